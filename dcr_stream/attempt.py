"""One attempt: payloads of all owners go to the engines that take part, and are applied behind closed gates.

What comes before (who takes part, on which terms) and after (the commit) is the transition's business.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import anyio

from dcr_stream.codec import manifest_digest, verify_manifest
from dcr_stream.errors import AttemptAborted, DcrError, DigestMismatch, PeerLost, TransportTimeout
from dcr_stream.flow import task_group
from dcr_stream.interfaces import Clock
from dcr_stream.messages import Announcement, Manifest, Sum
from dcr_stream.peers import Mode, Peer, Receiving, TransitionSettings
from dcr_stream.protocol import Acked, Apply, CloseGates, Done, Stage, Staged, Stream

__all__ = ["AttemptRun", "every"]

_MASK = 0xFFFF_FFFF_FFFF_FFFF
P = TypeVar("P")


async def every(peers: Iterable[P], act: Callable[[P], Awaitable[object]]) -> None:
    """Act on all peers at once, let each come to its (bounded) end, then raise the gravest error."""
    errors: list[DcrError] = []

    async def one(peer: P) -> None:
        try:
            await act(peer)
        except DcrError as error:
            errors.append(error)

    async with task_group() as tasks:
        for peer in peers:
            tasks.start_soon(one, peer)
    for error in sorted(errors, key=lambda e: not isinstance(e, DigestMismatch)):
        raise error


@dataclass(slots=True)
class AttemptRun:
    """One attempt in flight.

    ``streams`` are the owners' orders, ``receiving`` the engines by node, ``expected`` full sums to be read back.
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
    payload_bytes: int = 0

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
    def digests(self) -> tuple[str, ...]:
        """Digests of all manifests, by owner name."""
        return tuple(manifest_digest(self.manifests[owner]) for owner in sorted(self.manifests))

    async def _timed(self, step: str, act: Callable[[], Awaitable[None]]) -> None:
        started = self.clock.monotonic()
        await act()
        self.timeline[step] = self.clock.monotonic() - started

    async def _close_gates(self) -> None:
        deadline = self.settings.drain_deadline_s + self.settings.gate_deadline_s

        async def close(receiving: Receiving) -> None:
            order = CloseGates(
                attempt=self.streams[0][1].attempt,
                engines=receiving.names,
                mode=self.mode,
                drain_deadline_s=self.settings.drain_deadline_s,
                drain=self.settings.drain,
                after_deadline=self.settings.after_deadline,
            )
            await receiving.node.ask(order, Done, timeout_s=deadline)

        await every(self.receiving, close)

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
            staged = await receiving.node.ask(order, Staged, timeout_s=self.settings.stage_deadline_s)
            self.payload_bytes = max(self.payload_bytes, staged.nbytes)

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
            raise _gravest(group) from group

    async def _apply(self) -> None:
        attempt, digests = self.streams[0][1].attempt, self.digests
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


def _gravest(group: ExceptionGroup[Exception]) -> Exception:
    """The error to report of several at once: a typed one that is not just a lost peer, if there is any."""
    leaves: list[Exception] = []
    todo: list[BaseException] = [group]
    while todo:
        error = todo.pop()
        if isinstance(error, BaseExceptionGroup):
            todo.extend(error.exceptions)
        elif isinstance(error, Exception):
            leaves.append(error)
    leaves.sort(key=lambda e: (not isinstance(e, DcrError), isinstance(e, PeerLost)))
    return leaves[0]
