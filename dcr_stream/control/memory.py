"""Links between roles of one process."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from dcr_stream.control.condition import LoopCondition
from dcr_stream.control.serving import background, serve_link
from dcr_stream.errors import ListenFailed, PeerLost
from dcr_stream.interfaces import Link, Network

__all__ = ["MemoryNetwork"]

_QUEUE_FRAMES = 256
_QUEUE_BYTES = 64 * 1024 * 1024
_MAX_BACKLOG = 1024


class _Wire:
    """Frames on their way in one direction; bounded."""

    def __init__(self, condition: LoopCondition) -> None:
        self.condition = condition
        self.frames: deque[bytes] = deque()
        self.nbytes = 0
        self.closed = False

    def full(self, frame: bytes) -> bool:
        return len(self.frames) >= _QUEUE_FRAMES or (self.nbytes > 0 and self.nbytes + len(frame) > _QUEUE_BYTES)

    def close(self) -> None:
        with self.condition.lock:
            self.closed = True
        self.condition.notify()


class _MemoryLink(Link):
    def __init__(self, peer: str, incoming: _Wire, outgoing: _Wire) -> None:
        self.peer = peer
        self._incoming = incoming
        self._outgoing = outgoing
        self._closed = False

    async def send(self, frame: bytes) -> None:
        def put() -> bool | None:
            if self._outgoing.closed:
                raise self._lost()
            if self._outgoing.full(frame):
                return None
            self._outgoing.frames.append(bytes(frame))
            self._outgoing.nbytes += len(frame)
            return True

        await self._outgoing.condition.until(put)
        self._outgoing.condition.notify()

    async def receive(self) -> bytes:
        def take() -> bytes | None:
            # What the peer sent before it closed still arrives.
            if self._incoming.frames and not self._closed:
                taken = self._incoming.frames.popleft()
                self._incoming.nbytes -= len(taken)
                return taken
            if self._incoming.closed:
                raise self._lost()
            return None

        frame = await self._incoming.condition.until(take)
        self._incoming.condition.notify()
        return frame

    async def aclose(self) -> None:
        self._closed = True
        self._outgoing.close()
        self._incoming.close()

    def _lost(self) -> PeerLost:
        return PeerLost(f"the link to {self.peer} is closed; dial it again once it runs")


class _Listener:
    def __init__(self) -> None:
        self.condition = LoopCondition()
        self.backlog: deque[Link] = deque()
        self.closed = False


class MemoryNetwork(Network):
    """A network inside one process: addresses are any strings; one ending in ``:0`` becomes a free one.

    Frames are copied, queues are bounded, and closing a link is seen by its other end. Roles may live in different
    event loops.
    """

    def __init__(self) -> None:
        self._listeners: dict[str, _Listener] = {}
        self._ports = itertools.count(1)
        self._dials = itertools.count(1)

    def listen(self, address: str, handler: Callable[[Link], Awaitable[None]]) -> AbstractAsyncContextManager[str]:
        """Serve links at ``address``; see ``Network.listen``."""
        return self._listen(address, handler)

    @asynccontextmanager
    async def _listen(self, address: str, handler: Callable[[Link], Awaitable[None]]) -> AsyncIterator[str]:
        if address.endswith(":0"):
            address = f"{address[:-1]}{next(self._ports)}"
        listener = _Listener()
        if self._listeners.setdefault(address, listener) is not listener:
            raise ListenFailed(f"address {address} is already listened on; end the other listener or use port 0")
        try:
            async with background() as group:

                async def accept() -> None:
                    while True:
                        link = await listener.condition.until(
                            lambda: listener.backlog.popleft() if listener.backlog else None
                        )
                        group.start_soon(serve_link, link, handler)

                group.start_soon(accept)
                yield address
        finally:
            del self._listeners[address]
            with listener.condition.lock:
                listener.closed = True
                unserved = list(listener.backlog)
            for link in unserved:
                await link.aclose()

    async def dial(self, address: str) -> Link:
        """Connect to a listener of this network; see ``Network.dial``."""
        listener = self._listeners.get(address)
        if listener is None:
            raise PeerLost(f"nobody listens at {address}; start that role first")
        there, back = _Wire(LoopCondition()), _Wire(LoopCondition())
        with listener.condition.lock:
            if listener.closed or len(listener.backlog) >= _MAX_BACKLOG:
                raise PeerLost(f"{address} does not accept links any more; start that role again")
            listener.backlog.append(_MemoryLink(f"dialler {next(self._dials)} of {address}", there, back))
        listener.condition.notify()
        return _MemoryLink(address, back, there)
