"""One attempt: payloads of all owners go to the engines that take part, and are applied behind closed gates.

What comes before (who takes part, on which terms) and after (the commit) is the transition's business.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import anyio

from dcr_stream.codec import manifest_digest, verify_manifest
from dcr_stream.errors import AttemptAborted, DigestMismatch, GateError, PeerLost, RecordsAltered, TransportTimeout
from dcr_stream.flow import task_group
from dcr_stream.interfaces import Clock
from dcr_stream.messages import Announcement, Attempt, Manifest, Sum
from dcr_stream.peers import Mode, Peer, Receiving, TransitionSettings
from dcr_stream.protocol import Acked, Apply, CloseGates, Done, Stage, Staged, Stream
from dcr_stream.together import every, gravest

__all__ = ["AttemptRun"]

_MASK = 0xFFFF_FFFF_FFFF_FFFF


@dataclass(slots=True)
class AttemptRun:
    """One attempt in flight.

    ``streams`` are the owners' orders, ``receiving`` the engines by node, ``expected`` full sums to be read back.
    ``unclosed`` are the members (``node/engine``) whose gates did not close: they are left out of the next attempt.
    """

    streams: Sequence[tuple[Peer, Stream]]
    receiving: Sequence[Receiving]
    expected: dict[int, Sum]
    mode: Mode
    settings: TransitionSettings
    clock: Clock
    secret: bytes | None
    timeline: dict[str, float]
    manifests: dict[str, Manifest]
    unclosed: set[str] = field(default_factory=set)

    async def announce(self, announcement: Announcement) -> None:
        """Tell every node that a payload is ready."""
        for receiving in self.receiving:
            try:
                await receiving.node.connection.notify(announcement)
            except PeerLost:
                continue  # its Stage call fails with the same

    async def run(self) -> None:
        """Stage, gate, apply. When this returns, every engine holds the target's bits behind a closed gate.

        Raises:
            DcrError: the attempt failed; fence it before anything else.
        """
        if self.mode == "sync":
            await self._timed("gate", self._close_gates)
        await self._timed("stage", self._stage)
        if self.mode == "async":
            await self._timed("gate", self._close_gates)
        await self._timed("apply", self._apply)

    @property
    def attempt(self) -> Attempt:
        """The attempt's identity."""
        return self.streams[0][1].attempt

    @property
    def digests(self) -> tuple[str, ...]:
        """Digests of all manifests, by owner name."""
        return tuple(manifest_digest(self.manifests[owner]) for owner in sorted(self.manifests))

    async def _timed(self, step: str, act: Callable[[], Awaitable[None]]) -> None:
        started = self.clock.monotonic()
        await act()
        self.timeline[step] = self.clock.monotonic() - started

    async def _close_gates(self) -> None:
        deadline = self.settings.drain_deadline_s + self.settings.gate_deadline_s

        async def close(member: tuple[Receiving, str]) -> None:
            receiving, name = member
            order = CloseGates(
                attempt=self.attempt,
                engines=(name,),
                mode=self.mode,
                drain_deadline_s=self.settings.drain_deadline_s,
                drain=self.settings.drain,
                after_deadline=self.settings.after_deadline,
            )
            try:
                await receiving.node.ask(order, Done, timeout_s=deadline)
            except GateError:
                self.unclosed.add(f"{receiving.node.name}/{name}")
                raise

        await every([(receiving, name) for receiving in self.receiving for name in receiving.names], close)

    async def _stage(self) -> None:
        """Owners send while nodes fetch. The first error ends both planes: nobody waits for what cannot come."""
        owners = tuple(peer.name for peer, _ in self.streams)
        first = self.streams[0][1]

        async def stage(receiving: Receiving) -> None:
            order = Stage(
                attempt=first.attempt,
                base=first.base,
                kind=first.kind,
                owners=owners,
                engines=receiving.names,
                whole=first.whole,
                on_arrival=self.mode == "sync",
            )
            await receiving.node.ask(order, Staged, timeout_s=self.settings.stage_deadline_s)

        async def stream(peer: Peer, order: Stream) -> None:
            manifest = await peer.ask(order, Manifest, timeout_s=self.settings.stage_deadline_s)
            verify_manifest(manifest, self.secret)
            if manifest.attempt != order.attempt or manifest.owner != peer.name:
                raise AttemptAborted(f"owner {peer.name!r} closed another attempt than {order.attempt.name}")
            self.manifests[peer.name] = manifest
            for receiving in self.receiving:
                await receiving.node.connection.notify(manifest)

        try:
            with anyio.fail_after(self.settings.stage_deadline_s):
                async with task_group() as tasks:
                    for receiving in self.receiving:
                        tasks.start_soon(stage, receiving)
                    for peer, order in self.streams:
                        tasks.start_soon(stream, peer, order)
        except TimeoutError as error:
            raise TransportTimeout(
                f"attempt {first.attempt.name} was not staged within {self.settings.stage_deadline_s:g} s; "
                "look for the slow link, or raise stage_deadline_s"
            ) from error
        except ExceptionGroup as group:
            raise gravest(group) from group
        if first.kind in ("dense", "restore"):
            self._check_owners()

    def _check_owners(self) -> None:
        """Complete tensors, all of them: what the owners sent must be what they declare to hold.

        Raises:
            RecordsAltered: it is not, so no receiver may be blamed, and none has been touched.
        """
        declared = sum(value[0] for value in self.expected.values()) & _MASK
        if sum(manifest.digest_sum for manifest in self.manifests.values()) & _MASK != declared:
            raise RecordsAltered(
                f"the complete tensors of attempt {self.attempt.name} do not add up to what their owners declare: an "
                "owner's trackers were altered in memory; the next transition sends everything anew"
            )

    async def _apply(self) -> None:
        attempt, digests = self.attempt, self.digests
        digest_sum = sum(manifest.digest_sum for manifest in self.manifests.values()) & _MASK

        async def apply(receiving: Receiving) -> None:
            acked = await receiving.node.ask(
                Apply(attempt, self.expected), Acked, timeout_s=self.settings.apply_deadline_s
            )
            if acked.incarnations != tuple(engine.incarnation for engine in receiving.engines):
                raise PeerLost(f"an engine of node {receiving.node.name!r} was restarted during {attempt.name}")
            if acked.engines != receiving.members or set(acked.manifests) != set(digests):
                raise DigestMismatch(f"node {receiving.node.name!r} applied other manifests than the owners sealed")
            if acked.digest_sum != digest_sum:
                raise DigestMismatch(
                    f"the items that node {receiving.node.name!r} applied do not add up to the owners' manifests"
                )

        await every(self.receiving, apply)
