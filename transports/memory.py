"""Payloads that stay in this process."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import ClassVar
from weakref import WeakValueDictionary

import anyio

from dcr_stream.control.condition import LoopCondition
from dcr_stream.errors import AttemptAborted, AttemptFenced, PayloadRejected, TransportTimeout, UsageError
from dcr_stream.messages import Announcement, Attempt, Payload, PayloadId
from dcr_stream.transports.base import Capabilities, PayloadSink, PayloadSource, Transport

__all__ = ["MemoryTransport"]

_GiB = 1024**3
_FENCES = 65_536


class MemoryTransport(Transport):
    """Keeps payloads in memory until their attempt is discarded. Roles may live in different event loops.

    Args:
        max_bytes: bytes of all payloads kept; ``send`` waits while there is no room.
        wait_s: how long ``send`` waits for room and ``fetch`` for a payload, in seconds.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(spans_processes=False)

    _named: ClassVar[WeakValueDictionary[str, MemoryTransport]] = WeakValueDictionary()
    _naming: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, *, max_bytes: int = 2 * _GiB, wait_s: float = 60.0) -> None:
        if max_bytes < 1:
            raise UsageError(f"max_bytes is {max_bytes}; give at least the size of one payload")
        # A class variable of transports, but here an option decides.
        self.capabilities = Capabilities(spans_processes=False, max_payload_bytes=max_bytes)  # type: ignore[misc]
        self._max_bytes = max_bytes
        self._wait_s = wait_s
        self._condition = LoopCondition()
        self._payloads: dict[Attempt, dict[PayloadId, bytes]] = {}
        self._used = 0
        self._fenced: dict[Attempt, None] = {}

    @classmethod
    def named(cls, name: str, *, max_bytes: int = 2 * _GiB, wait_s: float = 60.0) -> MemoryTransport:
        """The one transport of this name in this process; made with these options if nobody holds it yet."""
        with cls._naming:
            transport = cls._named.get(name)
            if transport is None:
                transport = cls._named[name] = cls(max_bytes=max_bytes, wait_s=wait_s)
            return transport

    @property
    def nbytes(self) -> int:
        """Bytes of all payloads kept now."""
        return self._used

    def open_sink(self, attempt: Attempt, owner: str) -> AbstractAsyncContextManager[PayloadSink]:
        """The owner's end; see ``Transport.open_sink``."""
        return _opened(_MemorySink(self, attempt, owner))

    def open_source(self, attempt: Attempt, node: str) -> AbstractAsyncContextManager[PayloadSource]:
        """A node's end; see ``Transport.open_source``."""
        return _opened_source(_MemorySource(self, attempt))

    async def discard(self, attempt: Attempt) -> None:
        """Fence the attempt and free its payloads; see ``Transport.discard``."""
        with self._condition.lock:
            self._fenced[attempt] = None
            # Numbers never repeat, so only stragglers meet a fence, and none is this late.
            while len(self._fenced) > _FENCES:
                del self._fenced[next(iter(self._fenced))]
            self._used -= sum(map(len, self._payloads.pop(attempt, {}).values()))
        self._condition.notify()

    async def _send(self, payload: Payload) -> None:
        attempt = payload.id.attempt

        def store() -> bool | None:
            self._check(attempt)
            kept = self._payloads.get(attempt, {}).get(payload.id)
            if kept is not None:
                if kept != payload.body:
                    raise PayloadRejected(
                        f"payload {payload.id.name} of attempt {attempt.name} was already sent with other bytes; "
                        "a sequence number names one payload"
                    )
                return True
            if self._used + payload.nbytes > self._max_bytes:
                return None
            self._payloads.setdefault(attempt, {})[payload.id] = bytes(payload.body)
            self._used += payload.nbytes
            return True

        if payload.nbytes > self._max_bytes:
            raise PayloadRejected(
                f"payload {payload.id.name} of attempt {attempt.name} has {payload.nbytes} bytes and the memory "
                f"transport holds {self._max_bytes}; raise max_bytes or make buckets smaller"
            )
        try:
            with anyio.fail_after(self._wait_s):
                await self._condition.until(store)
        except TimeoutError as error:
            raise TransportTimeout(
                f"payload {payload.id.name} of attempt {attempt.name} found no room for {self._wait_s:g} s: "
                f"{self._used} of {self._max_bytes} bytes are kept until their attempts are discarded; raise max_bytes"
            ) from error
        self._condition.notify()

    async def _fetch(self, announcement: Announcement) -> bytes:
        ident = announcement.id

        def take() -> bytes | None:
            self._check(ident.attempt)
            return self._payloads.get(ident.attempt, {}).get(ident)

        try:
            with anyio.fail_after(self._wait_s):
                body = await self._condition.until(take)
        except TimeoutError as error:
            raise TransportTimeout(
                f"payload {ident.name} of attempt {ident.attempt.name} did not arrive within {self._wait_s:g} s; "
                f"look at owner {ident.owner}"
            ) from error
        if len(body) != announcement.size:
            raise AttemptAborted(
                f"payload {ident.name} of attempt {ident.attempt.name} has {len(body)} bytes and "
                f"{announcement.size} were announced; retry the attempt"
            )
        return body

    def _check(self, attempt: Attempt) -> None:
        if attempt in self._fenced:
            raise AttemptFenced(f"attempt {attempt.name} was discarded; start another attempt")


class _MemorySink(PayloadSink):
    def __init__(self, transport: MemoryTransport, attempt: Attempt, owner: str) -> None:
        self._transport = transport
        self._attempt = attempt
        self._owner = owner

    async def send(self, payload: Payload) -> None:
        if payload.id.attempt != self._attempt or payload.id.owner != self._owner:
            raise UsageError(
                f"payload {payload.id.name} of attempt {payload.id.attempt.name} was given to the sink of owner "
                f"{self._owner} in attempt {self._attempt.name}; open a sink for each owner and attempt"
            )
        await self._transport._send(payload)


class _MemorySource(PayloadSource):
    def __init__(self, transport: MemoryTransport, attempt: Attempt) -> None:
        self._transport = transport
        self._attempt = attempt

    async def fetch(self, announcement: Announcement) -> bytes:
        if announcement.id.attempt != self._attempt:
            raise UsageError(
                f"payload {announcement.id.name} belongs to attempt {announcement.id.attempt.name}, and this source to "
                f"{self._attempt.name}; open a source for each attempt"
            )
        return await self._transport._fetch(announcement)


@asynccontextmanager
async def _opened(sink: _MemorySink) -> AsyncIterator[PayloadSink]:
    yield sink


@asynccontextmanager
async def _opened_source(source: _MemorySource) -> AsyncIterator[PayloadSource]:
    yield source
