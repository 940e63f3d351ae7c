"""Receivers, engines, gates and transports that can be watched and broken; what they wrap is the real thing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from dcr_stream import Receiver
from dcr_stream.codec import Limits, OpenedPayload, open_payload
from dcr_stream.gate import EngineGate, LocalEngine
from dcr_stream.interfaces import PayloadSink, PayloadSource, Transport
from dcr_stream.messages import Attempt, Payload, ReceiverCall, ReceiverReply
from dcr_stream.protocol import CloseGates
from dcr_stream.receiver import ReceiverStatus


class Broken(Exception):
    """An engine that breaks on purpose."""


class FaultyReceiver:
    """A receiver whose calls can be watched, delayed or broken; the receiver itself is the real one."""

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver
        self.calls: list[str] = []
        self.before: Callable[[str], None] = lambda method: None
        self.after: Callable[[str], None] = lambda method: None

    def handle(self, call: ReceiverCall) -> ReceiverReply:
        self.calls.append(call.method)
        self.before(call.method)
        reply = self.receiver.handle(call)
        self.after(call.method)
        return reply

    def status(self) -> ReceiverStatus:
        """What the receiver holds, asked for directly."""
        return self.receiver.status()


def fail_at(method: str, nth: int = 0) -> Callable[[str], None]:
    """Break the ``nth`` call of ``method``, once."""
    seen = 0

    def check(called: str) -> None:
        nonlocal seen
        if called == method:
            seen += 1
            if seen == nth + 1:
                raise Broken(f"{method} number {nth}")

    return check


def fail_always(method: str) -> Callable[[str], None]:
    """Break every call of ``method``."""

    def check(called: str) -> None:
        if called == method:
            raise Broken(f"every {method}")

    return check


class FaultyEngine(LocalEngine):
    """An engine in this process whose calls can be held up before they reach the receivers."""

    before_call: Callable[[str], Awaitable[None]] | None = None

    async def call(self, call: ReceiverCall) -> list[ReceiverReply]:
        if self.before_call is not None:
            await self.before_call(call.method)
        return await super().call(call)


class WatchedGate(EngineGate):
    """A gate that says when it has closed and opened."""

    events: list[tuple[str, str]]
    owner: str = ""
    on_open: Callable[[int], None] = staticmethod(lambda version: None)

    async def close(self, order: CloseGates) -> None:
        await super().close(order)
        self.events.append((self.owner, "closed"))

    async def open(self, version: int) -> None:
        if self.serving != version:
            self.on_open(version)
            self.events.append((self.owner, f"open {version}"))
        await super().open(version)


class RecordingTransport(Transport):
    """Passes everything on, and keeps what was sent, opened. ``forge`` may replace a payload on its way."""

    def __init__(self, inner: Transport, secret: bytes | None = None) -> None:
        self.inner, self.secret = inner, secret
        self.sent: list[OpenedPayload] = []
        self.before_send: Callable[[Payload], None] = lambda payload: None

    def open_sink(self, attempt: Attempt, owner: str) -> AbstractAsyncContextManager[PayloadSink]:
        return self._sink(attempt, owner)

    @asynccontextmanager
    async def _sink(self, attempt: Attempt, owner: str) -> AsyncIterator[PayloadSink]:
        async with self.inner.open_sink(attempt, owner) as sink:
            yield _RecordingSink(self, sink)

    def open_source(self, attempt: Attempt, node: str) -> AbstractAsyncContextManager[PayloadSource]:
        return self.inner.open_source(attempt, node)

    async def discard(self, attempt: Attempt) -> None:
        await self.inner.discard(attempt)

    def modes(self, attempt: int) -> set[str]:
        """Entry modes that travelled in one attempt."""
        return {item.mode for p in self.sent if p.header.attempt == attempt for item in p.header.items}

    def attempts(self) -> list[int]:
        """Attempts in which anything travelled, in order."""
        return sorted({p.header.attempt for p in self.sent})


class _RecordingSink(PayloadSink):
    def __init__(self, transport: RecordingTransport, inner: PayloadSink) -> None:
        self._transport, self._inner = transport, inner

    async def send(self, payload: Payload) -> None:
        self._transport.before_send(payload)
        self._transport.sent.append(open_payload(payload.body, secret=self._transport.secret, limits=Limits()))
        await self._inner.send(payload)
