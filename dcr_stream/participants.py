"""Everybody who takes part in a transition, asked or told at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from dcr_stream.attempt import every
from dcr_stream.canonical import TensorDirectory
from dcr_stream.capture import total
from dcr_stream.codec import add_sums
from dcr_stream.errors import PeerLost, UsageError
from dcr_stream.leadership import Leadership
from dcr_stream.messages import CommitRecord, Sum
from dcr_stream.peers import Peer, Receiving, TransitionSettings
from dcr_stream.protocol import (
    Adopt,
    Done,
    EngineState,
    Fence,
    OpenGates,
    Prepare,
    Prepared,
    Shape,
    StateSums,
    SumsRequest,
)

__all__ = ["Participants", "pick"]


def pick(receiving: Iterable[Receiving], wanted: Callable[[EngineState], bool]) -> list[Receiving]:
    """The engines that are ``wanted``, by node; nodes without any are left out."""
    picked = [Receiving(r.node, [e for e in r.engines if wanted(e)]) for r in receiving]
    return [r for r in picked if r.engines]


@dataclass(slots=True)
class Participants:
    """Owners and nodes of one transition.

    ``owners`` made the offers; ``nodes`` is the coordinator's live table. ``skip``: tensors that an owner leaves to
    another. ``left_out``: engines (``node/engine``) that could not be restored and wait for the next transition.
    """

    lead: Leadership
    shape: Shape
    directory: TensorDirectory
    owners: dict[str, Peer]
    nodes: dict[str, Peer]
    skip: dict[str, tuple[int, ...]]
    settings: TransitionSettings
    left_out: set[str] = field(default_factory=set)

    async def prepare(self, everything: bool = False) -> list[Receiving]:
        """Ask all nodes; engines that are lost, refused or left out are dropped unless ``everything`` is asked for."""
        order = Prepare(self.shape, self.lead.epoch, self.lead.record)
        found: list[Receiving] = []

        async def ask(node: Peer) -> None:
            node.fresh = False
            try:
                prepared = await node.ask(order, Prepared, timeout_s=self.settings.prepare_deadline_s)
            except PeerLost:
                return
            engines = [
                e
                for e in prepared.engines
                if everything or (e.mark != "lost" and not e.problem and f"{node.name}/{e.name}" not in self.left_out)
            ]
            found.append(Receiving(node, engines))

        await every(list(self.nodes.values()), ask)
        return sorted((r for r in found if r.engines), key=lambda r: r.node.name)

    async def sums(self, tensors: Iterable[int], at: Literal["base", "target"]) -> dict[int, Sum]:
        """Full state sums of ``tensors``: the parts of all owners added up."""
        wanted = tuple(tensors)
        sums: dict[int, Sum] = dict.fromkeys(wanted, (0, 0))
        if not wanted:
            return sums
        for name, peer in self.owners.items():
            skip = set(self.skip.get(name, ()))
            answer = await peer.ask(SumsRequest(wanted, at), StateSums, timeout_s=self.settings.prepare_deadline_s)
            for tensor, part in zip(wanted, answer.sums, strict=True):
                if tensor not in skip:
                    sums[tensor] = add_sums(sums[tensor], part)
        return sums

    async def refuse_unequal_replicas(self) -> None:
        """A tensor that several owners publish is sent by one of them, if their bits are equal.

        Raises:
            UsageError: they differ.
        """
        shared = sorted({tensor for tensors in self.skip.values() for tensor in tensors})
        if not shared:
            return
        found: dict[int, dict[Sum, str]] = {tensor: {} for tensor in shared}
        for name, peer in self.owners.items():
            publishes = {region.tensor for region in (peer.hello.shape.regions if peer.hello.shape else ())}
            order = SumsRequest(tuple(shared), "target")
            answer = await peer.ask(order, StateSums, timeout_s=self.settings.prepare_deadline_s)
            for tensor, value in zip(shared, answer.sums, strict=True):
                if tensor in publishes:
                    found[tensor].setdefault(value, name)
        for tensor, values in found.items():
            if len(values) > 1:
                raise UsageError(
                    f"owners {' and '.join(sorted(values.values()))} publish {self.directory[tensor].name!r} with "
                    "different bits; replicas must be equal, or only one of them may publish the tensor"
                )

    async def skipped_state(self) -> Sum:
        """What replicated parts add to the offers' states beyond one copy."""
        state: Sum = (0, 0)
        for name, tensors in self.skip.items():
            order = SumsRequest(tensors, "target")
            answer = await self.owners[name].ask(order, StateSums, timeout_s=self.settings.prepare_deadline_s)
            state = add_sums(state, total(answer.sums))
        return state

    async def adopt(self, record: CommitRecord, receiving: Iterable[Receiving]) -> None:
        """Tell owners and receivers of the joint commit; a role that is gone settles when it comes back."""

        async def tell(peer: Peer) -> None:
            try:
                await peer.ask(Adopt(record), Done, timeout_s=self.settings.advance_deadline_s)
            except PeerLost:
                return
            if peer.hello.role == "owner":
                peer.offer = None

        await every([*self.owners.values(), *(r.node for r in receiving)], tell)

    async def fence(self, floor: int, *, abandon: bool, forget: bool) -> None:
        """Tell everybody that attempts below ``floor`` are void; returns when nothing of them writes any more."""
        order = Fence(self.lead.epoch, floor, abandon, forget)

        async def tell(peer: Peer) -> None:
            try:
                await peer.ask(order, Done, timeout_s=self.settings.apply_deadline_s)
            except PeerLost:
                return
            if abandon and peer.hello.role == "owner":
                peer.offer = None

        await every([*self.owners.values(), *self.nodes.values()], tell)

    async def open_gates(self) -> None:
        """Open every engine that is clean at the committed version."""
        if self.lead.version < 0:
            return
        order = OpenGates(self.lead.version, self.lead.epoch)

        async def open_at(node: Peer) -> None:
            try:
                await node.ask(order, Done, timeout_s=self.settings.gate_deadline_s)
            except PeerLost:
                return

        await every(list(self.nodes.values()), open_at)
