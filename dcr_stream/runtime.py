"""What a role takes from its surroundings, as one value, and the defaults for a real machine."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec, TypeVar

import anyio
from anyio import to_thread

from dcr_stream.errors import UsageError
from dcr_stream.interfaces import Clock, Link, Network, Workers

__all__ = ["Runtime", "SystemClock", "ThreadWorkers"]

P = ParamSpec("P")
R = TypeVar("R")


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        """Seconds since some fixed point, never going back."""
        return time.monotonic()

    def wall(self) -> float:
        """Seconds since the Unix epoch."""
        return time.time()


class ThreadWorkers:
    """At most ``threads`` calls at a time in worker threads; further calls wait in order.

    A call that has begun is never abandoned: cancelling its caller waits for the function to return, so no thread
    still reads weights or buffers after the task that asked for it has ended.

    Raises:
        UsageError: ``threads`` is less than 1.
    """

    def __init__(self, threads: int = 32) -> None:
        if threads < 1:
            raise UsageError(f"threads={threads}: a worker pool needs at least 1")
        self._limiter = anyio.CapacityLimiter(threads)

    async def run(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run ``fn`` off the event loop."""
        return await to_thread.run_sync(partial(fn, *args, **kwargs), limiter=self._limiter)


class _NoNetwork(Network):
    """Stands where no network was given: everything in one process."""

    def listen(self, address: str, handler: Callable[[Link], Awaitable[None]]) -> AbstractAsyncContextManager[str]:
        raise UsageError(f"cannot listen on {address!r}: this runtime has no network; pass one to Runtime.default()")

    async def dial(self, address: str) -> Link:
        raise UsageError(f"cannot dial {address!r}: this runtime has no network; pass one to Runtime.default()")


@dataclass(frozen=True, slots=True)
class Runtime:
    """Clock, network and worker threads of a role. Replaced as a whole in simulation."""

    clock: Clock
    network: Network
    workers: Workers

    @classmethod
    def default(cls, network: Network | None = None) -> Runtime:
        """System clock and worker threads; without ``network``, listening and dialling raise ``UsageError``."""
        return cls(SystemClock(), network or _NoNetwork(), ThreadWorkers())
