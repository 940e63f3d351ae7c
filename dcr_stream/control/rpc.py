"""Calls and notifications between two roles over one link."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Generic, TypeVar

import anyio
import anyio.abc
import msgspec

from dcr_stream.errors import ControlError, DcrError, PeerLost, UsageError, error_named
from dcr_stream.interfaces import Link

__all__ = ["MAX_IN_FLIGHT", "Codec", "Connection"]

MAX_IN_FLIGHT = 256
"""Requests and notifications of one end that the other end has not answered yet; more of them wait."""

M = TypeVar("M")


class Codec(Generic[M]):
    """Messages of one tagged union as MessagePack: ``Codec(msgspec.msgpack.Decoder(Hello | Offer | Done))``."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[M]) -> None:
        self._decoder = decoder
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, message: M) -> bytes:
        """The message's bytes."""
        return self._encoder.encode(message)

    def decode(self, body: bytes | msgspec.Raw) -> M:
        """The message in ``body``.

        Raises:
            ControlError: the bytes are not a message of this union.
        """
        try:
            return self._decoder.decode(body)
        except msgspec.DecodeError as error:
            raise ControlError(
                f"a control frame of {len(memoryview(body))} bytes is no message that this role knows ({error}); "
                "run the same version of dcr-stream on both sides"
            ) from error


class _Request(msgspec.Struct, frozen=True, array_like=True, tag="q"):
    id: int
    body: msgspec.Raw


class _Notice(msgspec.Struct, frozen=True, array_like=True, tag="n"):
    id: int
    body: msgspec.Raw


class _Answer(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """Answers a request (nil: no message) or acknowledges a handled notification."""

    id: int
    body: msgspec.Raw


class _Failure(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    id: int
    error: str
    text: str


_Envelope = _Request | _Notice | _Answer | _Failure
_ENVELOPES: msgspec.msgpack.Decoder[_Envelope] = msgspec.msgpack.Decoder(_Envelope)
_NIL = b"\xc0"


class _Pending(Generic[M]):
    """A call that waits for its answer."""

    def __init__(self) -> None:
        self.done = anyio.Event()
        self.answer: M | None = None
        self.error: DcrError | None = None


class Connection(Generic[M]):
    """Both ends may call; ``run`` must be running for calls to be answered.

    ``handler`` gets every message of the peer: requests run concurrently, notifications one after the other in the
    order in which they were sent, and a request starts only after every notification sent before it was handled.
    So a notification's handler must not wait for a request of the peer.

    A ``DcrError`` raised for a request is raised by the peer's ``call`` with the same class and text; any other
    exception arrives there as ``DcrError``. An exception raised for a notification has nobody to go to: ``run``
    raises it here, and the link closes.
    """

    def __init__(self, link: Link, codec: Codec[M], handler: Callable[[M], Awaitable[M | None]]) -> None:
        self.link = link
        self.peer = link.peer
        self._codec = codec
        self._handler = handler
        self._ids = itertools.count(1)
        self._pending: dict[int, _Pending[M]] = {}
        self._slots = anyio.Semaphore(MAX_IN_FLIGHT)
        self._unanswered: set[int] = set()
        self._lost: ControlError | None = None
        self._ran = False

    async def call(self, message: M, *, timeout: float) -> M | None:
        """Send a request and return the handler's answer (None if it returned None).

        A call that times out or is cancelled is forgotten here; the peer is not told and finishes it.

        Raises:
            PeerLost: the link was lost, before or while waiting.
            ControlError: no answer within ``timeout`` seconds.
            DcrError: what the peer's handler raised, as the same class.
        """
        pending: _Pending[M] = _Pending()
        with anyio.move_on_after(timeout) as scope:
            await self._send(_Request, message, pending)
            await pending.done.wait()
        if not pending.done.is_set():
            assert scope.cancelled_caught
            raise ControlError(
                f"{self.peer} did not answer {type(message).__name__} within {timeout:g} s; "
                "look at that role's log, or raise the timeout"
            )
        if pending.error is not None:
            raise pending.error
        return pending.answer

    async def notify(self, message: M) -> None:
        """Send a notification: handled in order, no answer. Waits while the peer is ``MAX_IN_FLIGHT`` behind.

        Raises:
            PeerLost: the link was lost.
        """
        await self._send(_Notice, message, _Pending())

    async def run(self) -> None:
        """Read and dispatch until the link ends; then fail every pending call and close the link.

        Raises:
            PeerLost: the link ended (also when the peer closed it in good order).
            AuthenticationFailed: a frame was altered, replayed or made without the secret.
            ControlError: the peer sent something that is no message of the codec.
            Exception: what the handler raised for a notification.
        """
        if self._ran:
            raise UsageError(f"the connection to {self.peer} is already running; call run() once per link")
        self._ran = True
        failure: Exception | None = None
        faults: list[Exception] = []
        try:
            # Handlers never raise into the group, so what ends it is raised from here, outside of an ExceptionGroup.
            async with anyio.create_task_group() as group:
                inbox = _Inbox()
                group.start_soon(self._dispatch, inbox, group, faults)
                try:
                    await self._read(inbox)
                except Exception as error:
                    failure = error
                group.cancel_scope.cancel()
            failure = faults[0] if faults else failure
        finally:
            lost = failure if isinstance(failure, ControlError) else PeerLost(self._gone())
            self._fail_all(lost)
            with anyio.move_on_after(5, shield=True):
                await self.link.aclose()
        if failure is not None:
            raise failure

    async def _send(self, kind: type[_Request] | type[_Notice], message: M, pending: _Pending[M]) -> None:
        body = msgspec.Raw(self._codec.encode(message))
        if self._lost is not None:
            raise self._lost_again()
        await self._slots.acquire()
        # The slot belongs to the entry in _pending from here on, and comes back with the peer's answer.
        ident = next(self._ids)
        self._pending[ident] = pending
        try:
            if self._lost is not None:
                raise self._lost_again()
            await self.link.send(msgspec.msgpack.encode(kind(ident, body)))
        except BaseException:
            self._settle(ident)
            raise

    async def _read(self, inbox: _Inbox) -> None:
        while True:
            frame = await self.link.receive()
            try:
                envelope = _ENVELOPES.decode(frame)
            except msgspec.DecodeError as error:
                raise ControlError(
                    f"{self.peer} sent a frame of {len(frame)} bytes that is no control frame ({error}); "
                    "run the same version of dcr-stream on both sides"
                ) from error
            if isinstance(envelope, _Request | _Notice):
                # Twice the bound: a sender that was cancelled while sending does not know whether it counts.
                if envelope.id in self._unanswered or len(self._unanswered) >= 2 * MAX_IN_FLIGHT:
                    raise ControlError(
                        f"{self.peer} has more than {2 * MAX_IN_FLIGHT} requests in flight or repeats one; "
                        "run the same version of dcr-stream on both sides"
                    )
                self._unanswered.add(envelope.id)
                inbox.put(envelope)
            elif (pending := self._settle(envelope.id)) is not None:
                try:
                    if isinstance(envelope, _Failure):
                        pending.error = error_named(envelope.error, envelope.text)
                    elif bytes(envelope.body) != _NIL:
                        pending.answer = self._codec.decode(envelope.body)
                except ControlError as error:
                    pending.error = error
                    raise
                finally:
                    pending.done.set()

    async def _dispatch(self, inbox: _Inbox, group: anyio.abc.TaskGroup, faults: list[Exception]) -> None:
        while True:
            envelope = await inbox.get()
            if isinstance(envelope, _Request):
                group.start_soon(self._answer, envelope)
                continue
            try:
                await self._handler(self._codec.decode(envelope.body))
                await self._reply(_Answer(envelope.id, msgspec.Raw(_NIL)))
            except Exception as error:
                faults.append(error)
                group.cancel_scope.cancel()
                return

    async def _answer(self, request: _Request) -> None:
        reply: _Answer | _Failure
        try:
            answer = await self._handler(self._codec.decode(request.body))
            body = _NIL if answer is None else self._codec.encode(answer)
            reply = _Answer(request.id, msgspec.Raw(body))
        except Exception as error:
            reply = _Failure(request.id, type(error).__name__, str(error))
        with suppress(ControlError):  # the reader of this link sees the same and ends run()
            await self._reply(reply)

    async def _reply(self, reply: _Answer | _Failure) -> None:
        self._unanswered.discard(reply.id)
        await self.link.send(msgspec.msgpack.encode(reply))

    def _settle(self, ident: int) -> _Pending[M] | None:
        pending = self._pending.pop(ident, None)
        if pending is not None:
            self._slots.release()
        return pending

    def _fail_all(self, lost: ControlError) -> None:
        self._lost = lost
        for ident in list(self._pending):
            pending = self._settle(ident)
            if pending is not None and not pending.done.is_set():
                pending.error = (
                    PeerLost(str(lost)) if isinstance(lost, PeerLost) else PeerLost(f"{self._gone()}: {lost}")
                )
                pending.done.set()

    def _lost_again(self) -> PeerLost:
        return PeerLost(self._gone())

    def _gone(self) -> str:
        return f"the link to {self.peer} is gone; dial it again once it runs"


class _Inbox:
    """Requests and notifications in order of arrival; bounded by the check on ``_unanswered``."""

    def __init__(self) -> None:
        self._items: deque[_Request | _Notice] = deque()
        self._arrived = anyio.Event()

    def put(self, item: _Request | _Notice) -> None:
        self._items.append(item)
        self._arrived.set()

    async def get(self) -> _Request | _Notice:
        while not self._items:
            self._arrived = anyio.Event()
            await self._arrived.wait()
        return self._items.popleft()
