"""The owner: one per training rank. Captures the change of its shards once, then sends it as often as needed.

``capture`` is the only step that reads live weights. What it leaves, the pending set, is enough for every attempt, for
giving up, and for advancing the trackers after the commit (``docs/design/protocol.md``).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field

import anyio
from anyio import CancelScope

from dcr_stream.baseline import Part, parts_of
from dcr_stream.capture import Candidate, CaptureSettings, capture, records_for, total
from dcr_stream.codec import manifest_digest
from dcr_stream.delta import CodedBucket, Shard, Trackers
from dcr_stream.errors import (
    AttemptFenced,
    CaptureError,
    PeerLost,
    StaleEpoch,
    TransitionAbandoned,
    TransportError,
    UsageError,
)
from dcr_stream.fences import Fences
from dcr_stream.flow import Pipeline
from dcr_stream.interfaces import Monitor, NullMonitor, Source, Transport
from dcr_stream.messages import (
    Announcement,
    Attempt,
    CommitRecord,
    Manifest,
    OwnedRegion,
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
)
from dcr_stream.route import Route
from dcr_stream.runtime import Runtime
from dcr_stream.sending import send_records
from dcr_stream.session import MessageConnection, greet, session
from dcr_stream.steps import step
from dcr_stream.together import gravest

__all__ = ["Outcome", "OwnerRole", "OwnerSettings"]


@dataclass(frozen=True, kw_only=True)
class OwnerSettings:
    """Limits of an owner. ``piece_bytes``: complete tensors are sent in pieces of about this size."""

    capture: CaptureSettings = field(default_factory=CaptureSettings)
    piece_bytes: int = 4 << 20
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
        self.trouble = ""
        """Why there is, or last was, no coordinator."""
        self._source, self._runtime, self._secret = source, runtime, secret
        self._front, self._back = pipeline.split()
        self._route = Route(f"owner {name!r}", open_transport)
        self._settings = settings or OwnerSettings()
        self._monitor = monitor or NullMonitor()
        self._incarnation = secrets.token_hex(8)
        self._parts: tuple[Part, ...] = parts_of(source)
        self._trackers: Trackers | None = None
        self._sums: dict[int, Sum] = {}
        self._candidate: Candidate | None = None
        self._offer: Offer | None = None
        self._offered = False
        self._manifests: dict[str, Attempt] = {}
        self._sent: set[Attempt] = set()
        self._sending: dict[Attempt, tuple[CancelScope, anyio.Event]] = {}
        self._connection: MessageConnection | None = None
        self._fences = Fences(f"owner {name!r}")
        self._settled = anyio.Event()
        self._settled.set()
        self._joined = anyio.Event()
        self._weights = anyio.Lock()

    # -- for the training side --------------------------------------------------------------------------------------

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
            CaptureError: a stage altered records, the pending set does not fit, or the committed version changed
                meanwhile. Trackers are unchanged.
            UsageError: the last transition has not ended.
        """
        if self._candidate is not None:
            raise UsageError(f"owner {self.name!r}: the last transition has not ended; wait before refitting again")
        clock, started = self._runtime.clock, self._runtime.clock.monotonic()
        trackers, version = self._trackers, self.version
        async with self._step("capture"):
            candidate = await capture(
                self._source,
                self._parts,
                trackers,
                self._sums,
                self._front,
                runtime=self._runtime,
                monitor=self._monitor,
                settings=self._settings.capture,
            )
        if self._candidate is not None or trackers is not self._trackers or version != self.version:
            candidate.pending.discard()
            raise CaptureError(f"owner {self.name!r} was brought to another version while it captured; capture again")
        self._candidate, self._settled, self._offered = candidate, anyio.Event(), False
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
        self._offered = True
        if self._connection is not None:
            with suppress(PeerLost):  # repeated after the next Hello
                await self._connection.notify(self._offer)

    def drop(self, error: TransitionAbandoned | None = None) -> None:
        """Forget the candidate; trackers stay at v, so the next capture contains its changes. Idempotent."""
        if self._candidate is not None:
            self._candidate.pending.discard()
            self._candidate = self._offer = None
            self._offered = False
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
            except (PeerLost, StaleEpoch) as error:
                self.trouble = str(error)
                self._monitor.step(f"owner {self.name}", "no coordinator", seconds=0.0, detail=self.trouble)
            finally:
                self._connection = None
                if self._joined.is_set():  # those who wait already must see the next one
                    self._joined = anyio.Event()
            await anyio.sleep(self._settings.reconnect_s)

    async def _join(self, connection: MessageConnection) -> None:
        shape = Shape(
            self._source.directory.tensors, tuple(OwnedRegion(part.tensor, part.region) for part in self._parts)
        )
        hello = Hello("owner", self.name, self.run, self._incarnation, self.version, shape)
        welcome = await greet(connection, hello, timeout_s=self._settings.join_deadline_s)
        self._fences.follow(welcome.epoch)
        await self._route.follow(welcome.transport)
        if welcome.record is not None:
            await self._adopt(welcome.record)
        self._connection, self.trouble = connection, ""
        self._joined.set()
        # Only now: the record may have settled what was on offer.
        if self._offered:
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
        self._fences.check(attempt)
        transport = self._route.transport
        self._sent.add(attempt)
        with CancelScope() as scope:
            ended = anyio.Event()
            self._sending[attempt] = scope, ended
            try:
                async with self._step("stream"):
                    manifest = await self._send(order, transport)
                self._manifests[manifest_digest(manifest)] = attempt
                return manifest
            except ExceptionGroup as group:
                raise gravest(group) from group
            finally:
                del self._sending[attempt]
                ended.set()
        raise AttemptFenced(f"attempt {attempt.name} was fenced while owner {self.name!r} sent it")

    async def _send(self, order: Stream, transport: Transport) -> Manifest:
        directory = self._source.directory
        records = records_for(
            order, self._parts, self._trackers, self._candidate, directory, self._settings.piece_bytes
        )

        async def announce(announcement: Announcement) -> None:
            if self._connection is None:
                raise PeerLost(f"owner {self.name!r} lost the coordinator while sending {order.attempt.name}")
            await self._connection.notify(announcement)

        # Complete tensors are read from the trackers, which must not advance meanwhile.
        async with self._weights, transport.open_sink(order.attempt, self.name) as sink:
            return await send_records(
                order,
                self.name,
                records,
                self._back,
                sink,
                announce,
                max_bytes=transport.capabilities.max_payload_bytes,
                directory=directory.digest,
                secret=self._secret,
                runtime=self._runtime,
                monitor=self._monitor,
                limits=self._settings.capture.channel,
            )

    async def _adopt(self, record: CommitRecord) -> None:
        """Advance if the record commits what this owner sent; anything else leaves trackers and candidate alone.

        Raises:
            UsageError: the record is older than this owner.
        """
        self._fences.follow(record.epoch)
        if record.version < self.version:
            raise UsageError(
                f"the commit record is at version {record.version}, owner {self.name!r} at {self.version}; "
                "versions never go back: give the coordinator the run's own commit store"
            )
        # Shielded: trackers that have advanced without the version would be advanced twice.
        with CancelScope(shield=True):
            async with self._weights:
                await self._follow(record)
        self._fences.raise_floor(record.attempt_floor)
        await self._discard()

    async def _follow(self, record: CommitRecord) -> None:
        candidate = self._candidate
        if record.version == self.version:
            return
        if candidate is None or not any(digest in self._manifests for digest in record.manifests):
            if self.version >= 0:
                # The run went on without this owner: what it holds is no version to compare with any more.
                self._forget(f"version {record.version} was committed without owner {self.name!r}")
            return
        async with self._step("advance"):
            if candidate.filled is not None:
                self._trackers = candidate.filled
            else:
                assert self._trackers is not None
                try:
                    await self._runtime.workers.run(candidate.pending.advance, self._trackers)
                except Exception as error:
                    # Whatever it was (a device has errors of its own): trackers may be at different versions.
                    self._forget(f"owner {self.name!r} could not advance to version {record.version}: {error}")
                    raise
            self._sums, self.version = candidate.sums, record.version
        self.last = Outcome(self.version)
        self._manifests.clear()
        self.drop()

    def _forget(self, why: str) -> None:
        """Hold no version any more: the next candidate is dense."""
        self._trackers, self._sums, self.version = None, {}, -1
        self.drop(TransitionAbandoned(f"{why}; the next refit sends everything"))

    async def _fence(self, order: Fence) -> Done:
        self._fences.follow(order.epoch)
        self._fences.raise_floor(order.floor)
        for attempt in [attempt for attempt in self._sending if self._fences.void(attempt)]:
            scope, ended = self._sending[attempt]
            scope.cancel()
            await ended.wait()
        self._manifests = {d: a for d, a in self._manifests.items() if not self._fences.void(a)}
        if order.forget:
            self._forget("read-back accused the owners")
        if order.abandon:
            self.drop(TransitionAbandoned("every attempt failed; the next delta contains this one's changes"))
        await self._discard()
        return Done()

    async def _discard(self) -> None:
        """Free what was sent in void attempts; a transport that does not answer now is asked again later."""
        for attempt in [attempt for attempt in self._sent if self._fences.void(attempt)]:
            with suppress(TransportError):
                await self._route.transport.discard(attempt)
                self._sent.discard(attempt)

    def _step(self, name: str) -> AbstractAsyncContextManager[None]:
        return step(self._monitor, self._runtime.clock, f"owner {self.name}", name)
