"""Staging: an attempt's payloads on a node, fetched as they are announced, verified once, kept compressed.

Announcements and manifests arrive on the control plane; only a complete set of manifests makes the attempt complete.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import anyio

from dcr_stream.canonical import TensorDirectory
from dcr_stream.codec import Limits, OpenedPayload, check_payload, manifest_digest, open_payload, verify_manifest
from dcr_stream.errors import AttemptAborted, MalformedPayload, SealMismatch, StagingFull, VersionMismatch
from dcr_stream.flow import task_group
from dcr_stream.interfaces import PayloadSource, Workers
from dcr_stream.messages import Announcement, Manifest, PayloadId
from dcr_stream.protocol import Stage
from dcr_stream.spill import SpillFile
from dcr_stream.together import gravest

__all__ = ["StagedPayload", "Staging", "StagingBudget"]


@dataclass(frozen=True, kw_only=True)
class StagingBudget:
    """How much a node holds for one attempt: in memory, then in a spill folder (None: no spilling).

    ``fetches`` payloads are on their way or being verified at once; each takes its compressed and its decoded size.
    """

    memory_bytes: int = 8 << 30
    spill_folder: Path | None = None
    spill_bytes: int = 64 << 30
    fetches: int = 4
    max_payloads: int = 1 << 20


@dataclass(slots=True)
class StagedPayload:
    """A verified payload: its bytes in memory, or where they lie in the spill file."""

    id: PayloadId
    seal: bytes
    size: int
    first_tensor: int
    body: bytes | None
    offset: int = -1


class Staging:
    """One attempt on one node.

    Args:
        order: the attempt and whose payloads it consists of.
        source: the transport's end for this node.
        secret: the run's secret, or None.
    """

    def __init__(
        self,
        order: Stage,
        source: PayloadSource,
        directory: TensorDirectory,
        *,
        secret: bytes | None,
        budget: StagingBudget,
        limits: Limits,
        workers: Workers,
    ) -> None:
        self.order = order
        self.manifests: dict[str, Manifest] = {}
        self.received_bytes = 0
        self._source, self._directory, self._secret = source, directory, secret
        self._budget, self._limits, self._workers = budget, limits, workers
        self._staged: dict[tuple[str, int], StagedPayload] = {}
        self._announced: dict[tuple[str, int], Announcement] = {}
        self._queue: list[Announcement] = []
        self._wake = anyio.Event()
        self._memory = 0
        self._spill = SpillFile(
            budget.spill_folder,
            budget.spill_bytes,
            what=f"staging attempt {order.attempt.name}",
            error=StagingFull,
            remedy="raise the staging budget, or name a spill folder with space",
        )
        self._spilling = anyio.Lock()
        self._failure: Exception | None = None
        self._scope = anyio.CancelScope()

    def fail(self, error: Exception) -> None:
        """Let ``run`` raise ``error`` at once, also when it waits for payloads; or ``check``, when it has ended."""
        self._failure = self._failure or error
        self._scope.cancel()

    def check(self) -> None:
        """Raise what was found wrong with the attempt, if anything was, also after it was complete."""
        if self._failure is not None:
            raise self._failure

    def announce(self, announcement: Announcement) -> None:
        """A payload is ready. A repeated announcement is ignored; one that contradicts the first raises.

        Raises:
            MalformedPayload: unknown owner, another attempt, too large, too many, or the same id with another seal.
        """
        id = announcement.id
        if id.attempt != self.order.attempt or id.owner not in self.order.owners:
            raise MalformedPayload(f"payload {id.name} of attempt {id.attempt.name} was announced to another attempt")
        known = self._announced.get((id.owner, id.sequence))
        if known is not None:
            if known != announcement:
                raise MalformedPayload(f"payload {id.name} was announced twice with different seals or sizes")
            return
        if announcement.size > self._limits.max_payload_bytes or len(self._announced) >= self._budget.max_payloads:
            raise MalformedPayload(
                f"payload {id.name} of {announcement.size:,} bytes exceeds this node's limits of "
                f"{self._limits.max_payload_bytes:,} bytes and {self._budget.max_payloads:,} payloads"
            )
        self._announced[id.owner, id.sequence] = announcement
        self._queue.append(announcement)
        self._notify()

    def manifest(self, manifest: Manifest) -> None:
        """An owner's set is closed.

        Raises:
            SealMismatch: the manifest was altered or sealed with another secret.
            MalformedPayload: it belongs to another attempt, or contradicts an earlier one.
        """
        verify_manifest(manifest, self._secret)
        if manifest.attempt != self.order.attempt or manifest.owner not in self.order.owners:
            raise MalformedPayload(f"the manifest of {manifest.owner!r} belongs to attempt {manifest.attempt.name}")
        if [entry.sequence for entry in manifest.payloads] != list(range(len(manifest.payloads))):
            raise MalformedPayload(
                f"the manifest of {manifest.owner!r} in {manifest.attempt.name} skips or repeats payloads"
            )
        if self.manifests.setdefault(manifest.owner, manifest) != manifest:
            raise MalformedPayload(f"owner {manifest.owner!r} sent two different manifests in {manifest.attempt.name}")
        self._notify()

    async def run(self, on_payload: Callable[[OpenedPayload], Awaitable[None]] | None = None) -> None:
        """Fetch and verify until every owner's manifest is complete; ``on_payload`` sees each payload once, in turn.

        Raises:
            PayloadError: a payload is not what was announced, or does not belong here. Nothing was written.
            StagingFull: out of memory budget and spill space.
            TransportError: as the transport says.
        """
        with self._scope:
            try:
                await self._run(on_payload)
            except ExceptionGroup as group:
                raise gravest(group) from group
        self.check()

    async def _run(self, on_payload: Callable[[OpenedPayload], Awaitable[None]] | None) -> None:
        turn = anyio.Lock()
        slots = anyio.Semaphore(self._budget.fetches)

        async def stage(announcement: Announcement) -> None:
            try:
                body = await self._source.fetch(announcement)
                opened = await self._workers.run(self._verify, announcement, body)
                await self._keep(announcement, body, opened)
                if on_payload is not None:
                    async with turn:
                        await on_payload(opened)
            finally:
                slots.release()
            self._notify()

        async with task_group() as tasks:
            while not self._complete():
                while self._queue:
                    await slots.acquire()
                    tasks.start_soon(stage, self._queue.pop(0))
                if not self._complete():
                    await self._wake.wait()

    def payloads(self) -> Iterator[StagedPayload]:
        """The complete set in a fixed order: by the first tensor, then owner and sequence."""
        yield from sorted(self._staged.values(), key=lambda p: (p.first_tensor, p.id.owner, p.id.sequence))

    def open(self, payload: StagedPayload) -> OpenedPayload:
        """Decode a staged payload again. Its seal is checked again too: it may have been on disk."""
        body = payload.body
        if body is None:
            body = self._spill.read(payload.offset, payload.size)
        return open_payload(body, secret=self._secret, limits=self._limits)

    def digests(self) -> tuple[str, ...]:
        """Digests of the manifests, by owner name."""
        return tuple(manifest_digest(self.manifests[owner]) for owner in sorted(self.manifests))

    def close(self) -> None:
        """Drop everything. Idempotent."""
        self._staged.clear()
        self._queue.clear()
        self._memory = 0
        self._spill.close()

    @property
    def memory_bytes(self) -> int:
        """Compressed bytes held in memory."""
        return self._memory

    def _notify(self) -> None:
        self._wake.set()
        self._wake = anyio.Event()

    def _complete(self) -> bool:
        """Whether exactly the payloads that the manifests list are staged."""
        if set(self.manifests) != set(self.order.owners):
            return False
        count = sum(len(manifest.payloads) for manifest in self.manifests.values())
        if len(self._staged) < count and len(self._announced) <= count:
            return False
        listed = {
            (owner, entry.sequence): (entry.size, entry.seal)
            for owner, manifest in self.manifests.items()
            for entry in manifest.payloads
        }
        for key, announcement in self._announced.items():
            if listed.get(key) != (announcement.size, announcement.seal):
                raise MalformedPayload(
                    f"payload {announcement.id.name} was announced but its owner's manifest does not list it so"
                )
        return self._staged.keys() == listed.keys()

    def _verify(self, announcement: Announcement, body: bytes) -> OpenedPayload:
        id, order = announcement.id, self.order
        if len(body) != announcement.size:
            raise AttemptAborted(
                f"payload {id.name} of attempt {id.attempt.name} has {len(body):,} of {announcement.size:,} bytes; "
                "the transport lost the rest, so the attempt is retried"
            )
        if body[-32:] != announcement.seal:
            raise SealMismatch(f"payload {id.name} of attempt {id.attempt.name} is not the one that was announced")
        opened = open_payload(body, secret=self._secret, limits=self._limits)
        header = opened.header
        if header.id != id:
            raise MalformedPayload(
                f"payload {id.name} says of itself to be {header.id.name} of {header.id.attempt.name}"
            )
        kind = "delta" if order.kind in ("delta", "revert") else "dense"
        if header.base != order.base or header.kind != kind:
            raise VersionMismatch(
                f"payload {id.name} is a {header.kind} payload from version {header.base}; "
                f"attempt {id.attempt.name} expects {kind} from version {order.base}"
            )
        check_payload(opened, self._directory)
        return opened

    async def _keep(self, announcement: Announcement, body: bytes, opened: OpenedPayload) -> None:
        id = announcement.id
        first = opened.header.items[0].tensor if opened.header.items else 0
        payload = StagedPayload(id, announcement.seal, len(body), first, body)
        if self._memory + len(body) <= self._budget.memory_bytes:
            self._memory += len(body)
        else:
            async with self._spilling:
                payload.offset = await self._workers.run(self._spill.append, [memoryview(body)])
            payload.body = None
        self.received_bytes += len(body)
        self._staged[id.owner, id.sequence] = payload
