"""A transport that misbehaves on purpose, from a seed."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import anyio

from dcr_stream.errors import AttemptAborted, TransportUnavailable, UsageError
from dcr_stream.interfaces import PayloadSink, PayloadSource, Transport
from dcr_stream.messages import Announcement, Attempt, Payload

__all__ = ["Faults", "FaultyTransport"]


@dataclass(frozen=True, kw_only=True)
class Faults:
    """How often what goes wrong: probabilities per call, drawn from ``seed``.

    Args:
        drop: ``send`` returns although nothing was sent.
        duplicate: ``send`` sends twice.
        delay: ``send`` and ``fetch`` wait up to ``delay_s`` seconds first, so payloads overtake each other.
        corrupt: ``fetch`` returns bytes of the right length with one bit flipped.
        truncate: ``fetch`` returns only the beginning.
        disconnect: ``send`` and ``fetch`` raise ``TransportUnavailable``.
        abort: ``fetch`` raises ``AttemptAborted``.
        limit: faults in all; later calls are faultless. None: no limit.
    """

    seed: int = 0
    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    delay_s: float = 0.01
    corrupt: float = 0.0
    truncate: float = 0.0
    disconnect: float = 0.0
    abort: float = 0.0
    limit: int | None = None

    def __post_init__(self) -> None:
        for name in ("drop", "duplicate", "delay", "corrupt", "truncate", "disconnect", "abort"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise UsageError(f"faults: {name} is {getattr(self, name)}; give a probability between 0 and 1")


class FaultyTransport(Transport):
    """Passes everything on to ``inner``, except for the faults. ``injected`` counts those by name."""

    def __init__(self, inner: Transport, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults
        self._random = random.Random(faults.seed)
        self.injected: dict[str, int] = {}
        # A class variable of transports, but this one is what its inner transport is.
        self.capabilities = inner.capabilities  # type: ignore[misc]

    def open_sink(self, attempt: Attempt, owner: str) -> AbstractAsyncContextManager[PayloadSink]:
        """The inner transport's sink, with faults."""
        return self._sink(attempt, owner)

    def open_source(self, attempt: Attempt, node: str) -> AbstractAsyncContextManager[PayloadSource]:
        """The inner transport's source, with faults."""
        return self._source(attempt, node)

    async def discard(self, attempt: Attempt) -> None:
        """Passed on without faults."""
        await self._inner.discard(attempt)

    async def aclose(self) -> None:
        """Passed on without faults."""
        await self._inner.aclose()

    @asynccontextmanager
    async def _sink(self, attempt: Attempt, owner: str) -> AsyncIterator[PayloadSink]:
        async with self._inner.open_sink(attempt, owner) as sink:
            yield _FaultySink(self, sink)

    @asynccontextmanager
    async def _source(self, attempt: Attempt, node: str) -> AsyncIterator[PayloadSource]:
        async with self._inner.open_source(attempt, node) as source:
            yield _FaultySource(self, source)

    def _strikes(self, fault: str) -> bool:
        struck = self._random.random() < getattr(self._faults, fault)
        if not struck or sum(self.injected.values()) == self._faults.limit:
            return False
        self.injected[fault] = self.injected.get(fault, 0) + 1
        return True

    async def _before(self, what: str) -> None:
        if self._strikes("delay"):
            await anyio.sleep(self._random.random() * self._faults.delay_s)
        if self._strikes("disconnect"):
            raise TransportUnavailable(f"{what}: disconnected by an injected fault; try again")

    def _damaged(self, body: bytes) -> bytes:
        if body and self._strikes("corrupt"):
            bit = self._random.randrange(8 * len(body))
            damaged = bytearray(body)
            damaged[bit // 8] ^= 1 << bit % 8
            return bytes(damaged)
        if body and self._strikes("truncate"):
            return body[: self._random.randrange(len(body))]
        return body


class _FaultySink(PayloadSink):
    def __init__(self, transport: FaultyTransport, inner: PayloadSink) -> None:
        self._transport = transport
        self._inner = inner

    async def send(self, payload: Payload) -> None:
        await self._transport._before(f"payload {payload.id.name}")
        if self._transport._strikes("drop"):
            return
        await self._inner.send(payload)
        if self._transport._strikes("duplicate"):
            await self._inner.send(payload)


class _FaultySource(PayloadSource):
    def __init__(self, transport: FaultyTransport, inner: PayloadSource) -> None:
        self._transport = transport
        self._inner = inner

    async def fetch(self, announcement: Announcement) -> bytes:
        await self._transport._before(f"payload {announcement.id.name}")
        if self._transport._strikes("abort"):
            raise AttemptAborted(f"payload {announcement.id.name}: aborted by an injected fault; retry the attempt")
        return self._transport._damaged(await self._inner.fetch(announcement))
