"""What a role takes from its surroundings: time, network and worker threads. Replaceable as a whole (simulation)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import ParamSpec, Protocol, TypeVar

__all__ = ["Clock", "Link", "Network", "Workers"]

P = ParamSpec("P")
R = TypeVar("R")


class Clock(Protocol):
    """Time. Waiting is done with anyio, which follows the event loop's own clock."""

    def monotonic(self) -> float:
        """Seconds since some fixed point, never going back."""
        ...

    def wall(self) -> float:
        """Seconds since the Unix epoch."""
        ...


class Workers(Protocol):
    """Threads for CPU work and blocking calls."""

    async def run(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run ``fn`` off the event loop."""
        ...


class Link(ABC):
    """An ordered, reliable, authenticated channel of frames between two roles."""

    peer: str

    @abstractmethod
    async def send(self, frame: bytes) -> None:
        """Send one frame.

        Raises:
            PeerLost: the link is closed.
        """

    @abstractmethod
    async def receive(self) -> bytes:
        """The next frame.

        Raises:
            PeerLost: the link is closed.
            AuthenticationFailed: a frame was altered, replayed or made without the secret.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Close; the other end sees PeerLost. Idempotent."""


class Network(ABC):
    """How roles find each other."""

    @abstractmethod
    def listen(self, address: str, handler: Callable[[Link], Awaitable[None]]) -> AbstractAsyncContextManager[str]:
        """Serve links at ``address`` (port 0: any free one) and yield the address actually used.

        ``handler`` runs once per link; the link closes when it returns.

        Raises:
            ListenFailed: the address is in use or not allowed.
        """

    @abstractmethod
    async def dial(self, address: str) -> Link:
        """Connect.

        Raises:
            PeerLost: nobody answers there.
            AuthenticationFailed: the other side has another secret.
        """
