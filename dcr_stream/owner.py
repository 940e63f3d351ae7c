"""The owner: one per training rank. Captures the change of its shards once, then sends it as often as needed.

``capture`` is the only step that reads live weights. What it leaves, the pending set, is enough for every attempt, for
giving up, and for advancing the trackers after the commit (``docs/design/protocol.md``).
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

import anyio
from anyio import CancelScope

from dcr_stream.baseline import Part, parts_of
from dcr_stream.capture import Candidate, CaptureSettings, capture, records_for, total
from dcr_stream.codec import manifest_digest, seal_manifest, seal_payload
from dcr_stream.delta import CodedBucket, Shard, Trackers
from dcr_stream.errors import AttemptFenced, CaptureError, PeerLost, StaleEpoch, TransitionAbandoned, UsageError
from dcr_stream.flow import Pipeline, execute
from dcr_stream.interfaces import Monitor, NullMonitor, Source, Transport
from dcr_stream.messages import (
    Announcement,
    Attempt,
    CommitRecord,
    Manifest,
    ManifestEntry,
    OwnedRegion,
    PayloadId,
    PayloadKind,
    Sum,
)
from dcr_stream.protocol import (
    Adopt,
    Done,
    Fence,
    Hello,
    Message,
    Offer,
    Shape,
    StateSums,
    Stream,
    SumsRequest,
    Welcome,
)
from dcr_stream.runtime import Runtime
from dcr_stream.session import MessageConnection, session
from dcr_stream.steps import step

__all__ = ["Outcome", "OwnerRole", "OwnerSettings"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class OwnerSettings:
    """Limits of an owner. ``piece_bytes``: complete tensors are sent in pieces of about this size."""

    capture: CaptureSettings = field(default_factory=CaptureSettings)
    piece_bytes: int = 32 << 20
    join_deadline_s: float = 30.0
    reconnect_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the last transition ended for this owner: the committed version, or the error that abandoned it."""

    version: int
    error: TransitionAbandoned | None = None


class OwnerRole:
    """Owner ``name`` of the tasks of ``source``.

    Args:
        pipeline: the stages from ``Shard`` to ``CodedBucket``, with exactly one record-to-entry stage.
        open_transport: makes the transport that the coordinator names by URL.
        secret: the run's secret, or None.
    """

    def __init__(
        self,
        name: str,
        source: Source,
        *,
        run: str,
        pipeline: Pipeline[Shard, CodedBucket],
        runtime: Runtime,
        open_transport: Callable[[str], Transport],
        secret: bytes | None = None,
        settings: OwnerSettings | None = None,
        monitor: Monitor | None = None,
    ) -> None:
        self.name, self.run, self.version = name, run, -1
        self.last: Outcome | None = None
        self._source, self._runtime, self._secret = source, runtime, secret
        self._front, self._back = pipeline.split()
        self._open_transport = open_transport
        self._settings = settings or OwnerSettings()
        self._monitor = monitor or NullMonitor()
        self._incarnation = secrets.token_hex(8)
        self._parts: tuple[Part, ...] = parts_of(source)
        self._trackers: Trackers | None = None
        self._sums: dict[int, Sum] = {}
        self._candidate: Candidate | None = None
        self._offer: Offer | None = None
        self._manifests: dict[str, Attempt] = {}
        self._sending: dict[Attempt, tuple[CancelScope, anyio.Event]] = {}
        self._transport: Transport | None = None
        self._transport_url = ""
        self._connection: MessageConnection | None = None
        self._epoch, self._floor = -1, 0
        self._settled = anyio.Event()
        self._settled.set()
        self._joined = anyio.Event()
        self._weights = anyio.Lock()

    # -- for the training side --------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether a coordinator has welcomed this owner."""
        return self._connection is not None

    @property
    def baseline_bytes(self) -> int:
        """Host bytes held by trackers and residual baseline."""
        return self._trackers.nbytes if self._trackers is not None else 0

    async def wait_settled(self, timeout_s: float) -> bool:
        """Wait until the last transition has ended and a coordinator is there; False when that takes longer."""
        with anyio.move_on_after(timeout_s):
            await self._settled.wait()
            await self._joined.wait()
            return True
        return False

    async def capture(self) -> Offer:
        """Scan every shard once and keep the changes; live weights must stay still until this returns.

        Nothing is offered yet: all training ranks agree first, then call ``offer`` or ``drop``.

        Raises:
            CaptureError: a stage altered records, or the pending set does not fit. Trackers are unchanged.
            UsageError: the last transition has not ended.
        """
        if self._candidate is not None:
            raise UsageError(f"owner {self.name!r}: the last transition has not ended; wait before refitting again")
        clock, started = self._runtime.clock, self._runtime.clock.monotonic()
        async with self._step("capture"):
            candidate = await capture(
                self._source,
                self._parts,
                self._trackers,
                self._sums,
                self._front,
                runtime=self._runtime,
                monitor=self._monitor,
                settings=self._settings.capture,
            )
        self._candidate, self._settled = candidate, anyio.Event()
        self._offer = Offer(
            candidate=candidate.digest,
            kind="dense" if candidate.filled is not None else "delta",
            base=self.version,
            elements=candidate.elements,
            scanned=candidate.scanned,
            changed=candidate.changed,
            state=total(candidate.sums.values()),
            capture_s=clock.monotonic() - started,
        )
        return self._offer

    async def offer(self) -> None:
        """Offer the captured candidate to the coordinator; repeated by itself when a coordinator returns."""
        if self._offer is None:
            raise UsageError(f"owner {self.name!r} has captured nothing to offer; call capture first")
        if self._connection is not None:
            with suppress(PeerLost):  # the next Hello repeats it
                await self._connection.notify(self._offer)

    def drop(self, error: TransitionAbandoned | None = None) -> None:
        """Forget the candidate; trackers stay at v, so the next capture contains its changes. Idempotent."""
        if self._candidate is not None:
            self._candidate.pending.discard()
            self._candidate = self._offer = None
            if error is not None:
                self.last = Outcome(self.version, error)
        self._settled.set()

    # -- for the coordinator ----------------------------------------------------------------------------------------

    async def serve(self, address: str) -> None:
        """Dial the coordinator and obey it until cancelled; dials again when the connection is lost."""
        while True:
            try:
                async with session(self._runtime.network, address, self.handle) as connection:
                    await self._join(connection)
                    await anyio.sleep_forever()
            except PeerLost:
                pass
            finally:
                self._connection = None
                self._joined = anyio.Event()
            await anyio.sleep(self._settings.reconnect_s)

    async def _join(self, connection: MessageConnection) -> None:
        shape = Shape(
            self._source.directory.tensors, tuple(OwnedRegion(part.tensor, part.region) for part in self._parts)
        )
        offered = self._offer
        hello = Hello("owner", self.name, self.run, self._incarnation, self.version, shape, offered)
        welcome = await connection.call(hello, timeout=self._settings.join_deadline_s)
        if not isinstance(welcome, Welcome):
            raise UsageError(f"the coordinator answered a Hello with {type(welcome).__name__}; versions must match")
        self._check_epoch(welcome.epoch)
        if welcome.transport != self._transport_url:
            if self._transport is not None:
                await self._transport.aclose()
            self._transport, self._transport_url = self._open_transport(welcome.transport), welcome.transport
        if welcome.record is not None:
            await self._adopt(welcome.record)
        self._connection = connection
        self._joined.set()
        if self._offer is not None and offered is None:
            await self.offer()

    async def handle(self, message: Message) -> Message | None:
        """Carry out one message of the coordinator."""
        match message:
            case SumsRequest():
                return self._state_sums(message)
            case Stream():
                return await self._stream(message)
            case Adopt():
                await self._adopt(message.record)
                return Done()
            case Fence():
                return await self._fence(message)
            case _:
                raise UsageError(f"an owner does not understand {type(message).__name__}; versions must match")

    def _state_sums(self, order: SumsRequest) -> StateSums:
        sums = self._sums
        if order.at == "target":
            if self._candidate is None:
                raise CaptureError(f"owner {self.name!r} has no candidate any more; it must be offered again")
            sums = self._candidate.sums
        return StateSums(tuple(sums.get(tensor, (0, 0)) for tensor in order.tensors))

    async def _stream(self, order: Stream) -> Manifest:
        attempt = order.attempt
        self._check_epoch(attempt.epoch)
        if attempt.number < self._floor:
            raise AttemptFenced(f"attempt {attempt.name} is below the fence at {self._floor}")
        if self._transport is None:
            raise UsageError(f"owner {self.name!r} was ordered to send before it was welcomed; versions must match")
        with CancelScope() as scope:
            ended = anyio.Event()
            self._sending[attempt] = scope, ended
            try:
                async with self._step("stream"):
                    manifest = await self._send(order, self._transport)
                self._manifests[manifest_digest(manifest)] = attempt
                return manifest
            finally:
                del self._sending[attempt]
                ended.set()
        raise AttemptFenced(f"attempt {attempt.name} was fenced while owner {self.name!r} sent it")

    async def _send(self, order: Stream, transport: Transport) -> Manifest:
        attempt, entries, elements, digests = order.attempt, list[ManifestEntry](), 0, 0
        kind: PayloadKind = "dense" if order.kind in ("dense", "restore") else "delta"
        directory = self._source.directory
        records = records_for(
            order, self._parts, self._trackers, self._candidate, directory, self._settings.piece_bytes
        )
        async with self._weights, transport.open_sink(attempt, self.name) as sink:

            async def deliver(coded: CodedBucket) -> None:
                nonlocal elements, digests
                id = PayloadId(attempt, self.name, len(entries))
                payload = await self._runtime.workers.run(
                    seal_payload,
                    coded,
                    id=id,
                    base=order.base,
                    kind=kind,
                    directory=directory.digest,
                    secret=self._secret,
                )
                await sink.send(payload)
                if self._connection is None:
                    raise PeerLost(f"owner {self.name!r} lost the coordinator while sending {attempt.name}")
                await self._connection.notify(Announcement(id, payload.nbytes, payload.seal))
                entries.append(ManifestEntry(id.sequence, payload.nbytes, payload.seal))
                elements += sum(item.count for item in coded.items)
                digests = (digests + sum(item.digest for item in coded.items)) & 0xFFFF_FFFF_FFFF_FFFF

            await execute(
                self._back,
                self._in_worker(records),
                deliver,
                runtime=self._runtime,
                monitor=self._monitor,
                limits=self._settings.capture.channel,
            )
        manifest = Manifest(attempt, self.name, tuple(entries), elements, digests)
        return seal_manifest(manifest, self._secret)

    async def _adopt(self, record: CommitRecord) -> None:
        """Advance if the record commits what this owner sent; anything else leaves trackers and candidate alone.

        Raises:
            UsageError: the record is older than this owner.
        """
        self._check_epoch(record.epoch)
        if record.version < self.version:
            raise UsageError(
                f"the commit record is at version {record.version}, owner {self.name!r} at {self.version}; "
                "versions never go back: give the coordinator the run's own commit store"
            )
        candidate = self._candidate
        mine = [self._manifests[d] for d in record.manifests if d in self._manifests]
        if record.version == self.version:
            return
        if candidate is None or not mine:
            if self.version >= 0:
                # The run went on without this owner: what it holds is no version to compare with any more.
                self._trackers, self._sums, self.version = None, {}, -1
                self.drop(TransitionAbandoned(f"version {record.version} was committed without owner {self.name!r}"))
            return
        # Shielded: trackers that have advanced without the version would be advanced twice.
        with CancelScope(shield=True):
            async with self._step("advance"), self._weights:
                if candidate.filled is not None:
                    self._trackers = candidate.filled
                else:
                    assert self._trackers is not None
                    await self._runtime.workers.run(candidate.pending.advance, self._trackers)
                self._sums, self.version = candidate.sums, record.version
        self.last = Outcome(self.version)
        self._manifests.clear()
        self.drop()
        await self._discard(mine)

    async def _fence(self, order: Fence) -> Done:
        self._check_epoch(order.epoch)
        self._floor = max(self._floor, order.floor)
        fenced = [attempt for attempt in self._sending if attempt.number < self._floor]
        ends = [self._sending[attempt] for attempt in fenced]
        for scope, ended in ends:
            scope.cancel()
            await ended.wait()
        old = [attempt for attempt in self._manifests.values() if attempt.number < self._floor]
        self._manifests = {d: a for d, a in self._manifests.items() if a.number >= self._floor}
        await self._discard([*fenced, *old])
        if order.forget:
            self._trackers, self._sums, self.version = None, {}, -1
        if order.abandon:
            self.drop(TransitionAbandoned("every attempt failed; the next delta contains this one's changes"))
        return Done()

    async def _discard(self, attempts: Sequence[Attempt]) -> None:
        for attempt in attempts:
            if self._transport is not None:
                await self._transport.discard(attempt)

    async def _in_worker(self, items: Iterator[T]) -> AsyncIterator[T]:
        """Iterate in worker threads: each step gathers bits from trackers or reads a spill file."""
        end = object()
        while True:
            item = await self._runtime.workers.run(next, items, end)
            if item is end:
                return
            yield item  # type: ignore[misc]  # `next` returns an item or `end`

    def _check_epoch(self, epoch: int) -> None:
        if epoch < self._epoch:
            raise StaleEpoch(
                f"owner {self.name!r} follows epoch {self._epoch}; the coordinator of epoch {epoch} was replaced"
            )
        self._epoch = epoch

    def _step(self, name: str) -> AbstractAsyncContextManager[None]:
        return step(self._monitor, self._runtime.clock, f"owner {self.name}", name)
