"""Everybody who takes part in a transition, asked or told at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

import anyio

from dcr_stream.canonical import TensorDirectory
from dcr_stream.capture import total
from dcr_stream.codec import add_sums
from dcr_stream.errors import ControlError, DcrError, PeerLost, StaleEpoch, TransitionAbandoned, UsageError
from dcr_stream.interfaces import Monitor
from dcr_stream.leadership import Leadership
from dcr_stream.messages import CommitRecord, Sum
from dcr_stream.peers import Peer, Receiving, TransitionSettings
from dcr_stream.protocol import (
    Adopt,
    Done,
    EngineState,
    Fence,
    Message,
    Offer,
    OpenGates,
    Prepare,
    Prepared,
    Shape,
    StateSums,
    SumsRequest,
)
from dcr_stream.together import every

__all__ = ["Participants", "pick"]

_POLL_S = 0.2


def pick(receiving: Iterable[Receiving], wanted: Callable[[EngineState], bool]) -> list[Receiving]:
    """The engines that are ``wanted``, by node; nodes without any are left out."""
    picked = [Receiving(r.node, [e for e in r.engines if wanted(e)]) for r in receiving]
    return [r for r in picked if r.engines]


@dataclass(slots=True)
class Participants:
    """Owners and nodes of one transition.

    ``owners`` made the ``offers``; ``current`` (owners) and ``nodes`` are the coordinator's live tables, where those
    who were lost come back. ``skip``: tensors that an owner leaves to another. ``left_out``: engines (``node/engine``)
    that could not be restored and wait for the next transition. ``abandoned``: the coordinator's memory of candidates
    given up, for owners that were not there to hear it.
    """

    lead: Leadership
    shape: Shape
    directory: TensorDirectory
    owners: dict[str, Peer]
    current: dict[str, Peer]
    nodes: dict[str, Peer]
    skip: dict[str, tuple[int, ...]]
    settings: TransitionSettings
    monitor: Monitor
    abandoned: dict[str, Offer]
    left_out: set[str] = field(default_factory=set)
    offers: dict[str, Offer] = field(init=False)
    _incarnations: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.offers = {name: peer.offer for name, peer in self.owners.items() if peer.offer is not None}
        self._incarnations = {name: peer.hello.incarnation for name, peer in self.owners.items()}

    async def owners_are_back(self) -> None:
        """Wait, bounded, for every owner that was lost; its candidate must be the one of this transition.

        Raises:
            TransitionAbandoned: it did not come back, or came back without.
        """
        with anyio.move_on_after(self.settings.rejoin_deadline_s):
            while True:
                for name, peer in self.owners.items():
                    if peer.gone:
                        self.owners[name] = self.current.get(name, peer)
                here = all(not peer.gone and peer.offer is not None for peer in self.owners.values())
                restarted = any(p.hello.incarnation != self._incarnations[n] for n, p in self.owners.items())
                if here or restarted:
                    break
                await anyio.sleep(_POLL_S)
        lost = sorted(n for n, peer in self.owners.items() if peer.gone or peer.offer != self.offers[n])
        if lost:
            raise TransitionAbandoned(
                f"owner {', '.join(lost)} is gone, or came back without the candidate of this transition; it is "
                "abandoned, and the next one sends what the owners have then"
            )

    async def prepare(self, everything: bool = False) -> list[Receiving]:
        """Ask all nodes; engines that are lost, refused or left out are dropped unless ``everything`` is asked for.

        A node that does not answer in time holds nobody: it is left out until it does.
        """
        order = Prepare(self.shape, self.lead.epoch, self.lead.record)
        found: list[Receiving] = []

        async def ask(node: Peer) -> None:
            node.fresh = False
            try:
                prepared = await node.ask(order, Prepared, timeout_s=self.settings.prepare_deadline_s)
            except StaleEpoch:
                raise
            except DcrError as error:
                self.report(f"prepare of node {node.name!r} failed", error)
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

    async def adopt(self, record: CommitRecord) -> None:
        """Tell everybody of the joint commit; nodes that took no part close gates that serve an older version.

        Nothing here can undo the commit: a role that is gone or does not answer settles when it comes back.
        """
        for owner in {*self.owners.values(), *self.current.values()}:
            if owner.offer == self.offers.get(owner.name):
                owner.offer = None  # now, not after the answer: the next offer may come before that
        order, deadline_s = Adopt(record), self.settings.advance_deadline_s
        await every(self._everybody(), lambda peer: self._tell(peer, order, deadline_s))

    async def fence(self, floor: int, *, abandon: bool, forget: bool) -> None:
        """Tell everybody that attempts below ``floor`` are void; returns when nothing of them writes any more.

        Whoever does not confirm in time is cut off, and comes back once it is quiet.
        """
        if abandon:
            self.abandoned.update(self.offers)
            for owner in {*self.owners.values(), *self.current.values()}:
                owner.offer = None
        order = Fence(self.lead.epoch, floor, abandon, forget)
        deadline_s = self.settings.apply_deadline_s
        await every(self._everybody(), lambda peer: self._tell(peer, order, deadline_s))

    async def open_gates(self) -> None:
        """Open every engine that is clean at the committed version; one that does not open stays out of service."""
        if self.lead.version < 0:
            return
        order = OpenGates(self.lead.version, self.lead.epoch)
        deadline_s = self.settings.gate_deadline_s
        await every(list(self.nodes.values()), lambda node: self._tell(node, order, deadline_s))

    def report(self, what: str, error: DcrError) -> None:
        """Tell the monitor what went wrong and need not stop the transition."""
        self.monitor.step("coordinator", what, seconds=0.0, detail=f"{type(error).__name__}: {error}")

    def _everybody(self) -> set[Peer]:
        return {*self.owners.values(), *self.current.values(), *self.nodes.values()}

    async def _tell(self, peer: Peer, message: Message, deadline_s: float) -> None:
        try:
            await peer.ask(message, Done, timeout_s=deadline_s)
        except StaleEpoch:
            raise
        except PeerLost:
            return
        except DcrError as error:
            self.report(f"{type(message).__name__} at {peer.hello.role} {peer.name!r} failed", error)
            if isinstance(error, ControlError):
                await peer.cut_off()
