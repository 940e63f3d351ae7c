"""Admits requests to one engine and says which version serves each of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio

from dcr_stream.errors import DrainTimeout, GateClosed, UsageError

__all__ = ["RequestGate", "Ticket"]


class Ticket:
    """One admitted request. ``version_start`` served its begin; ``version_end`` is known once it has ended.

    They differ only if the drain mode ``keep`` let the request run across a swap; ``versions`` then lists both.
    """

    def __init__(self, version: int) -> None:
        self.version_start: int = version
        self._version_end: int | None = None

    @property
    def version_end(self) -> int:
        """The version that served the request's end.

        Raises:
            UsageError: the request is still running.
        """
        if self._version_end is None:
            raise UsageError("the request is still running; read version_end after the `async with` block")
        return self._version_end

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions that served the request, first and last."""
        end = self.version_end
        return (self.version_start,) if end == self.version_start else (self.version_start, end)


class RequestGate:
    """Closed, or open at one version; starts closed. Belongs to one event loop.

    Between ``close`` and ``open`` nothing is admitted, also not while ``close`` still waits for requests to end.
    Versions never go back, unless a restore says so. At most ``max_waiting`` requests wait for the gate to open.
    """

    def __init__(self, *, max_waiting: int = 1024) -> None:
        if max_waiting < 0:
            raise UsageError(f"max_waiting is {max_waiting}; give 0 or more")
        self._max_waiting = max_waiting
        self._version: int | None = None
        self._open = False
        self._opened = anyio.Event()
        self._running = 0
        self._idle = anyio.Event()
        self._waiting = 0

    @property
    def is_open(self) -> bool:
        """Whether requests are admitted now."""
        return self._open

    @property
    def version(self) -> int | None:
        """The version that serves requests, or served the last ones; None before the first."""
        return self._version

    @property
    def running(self) -> int:
        """Admitted requests that have not ended."""
        return self._running

    @property
    def waiting(self) -> int:
        """Requests that wait for the gate to open."""
        return self._waiting

    def admit(self, timeout: float) -> AbstractAsyncContextManager[Ticket]:
        """Admit one request for the length of the block; wait up to ``timeout`` seconds while the gate is closed.

        Raises:
            GateClosed: the gate did not open in time, or too many requests wait already.
        """
        return self._admit(timeout)

    @asynccontextmanager
    async def _admit(self, timeout: float) -> AsyncIterator[Ticket]:
        if not self._open:
            await self._wait_open(timeout)
        # No await between seeing the gate open and counting the request: a close always sees it.
        assert self._version is not None
        ticket = Ticket(self._version)
        self._running += 1
        try:
            yield ticket
        finally:
            ticket._version_end = self._version
            self._running -= 1
            if self._running == 0:
                self._idle.set()

    async def _wait_open(self, timeout: float) -> None:
        if self._waiting >= self._max_waiting:
            raise GateClosed(
                f"the gate is closed and {self._waiting} requests wait already; "
                "send this request to another engine, or later"
            )
        self._waiting += 1
        try:
            with anyio.move_on_after(timeout):
                while not self._open:  # it may have closed again before this task ran
                    await self._opened.wait()
        finally:
            self._waiting -= 1
        if not self._open:
            raise GateClosed(
                f"the gate did not open within {timeout:g} s (last version: {self._version}); "
                "send this request to another engine, or later"
            )

    def open(self, version: int, *, restore: bool = False) -> None:
        """Admit requests, served by ``version``; everybody who waits is let in.

        Raises:
            UsageError: the gate is open at another version, or ``version`` lies before the last one without
                ``restore``.
        """
        if self._open and version != self._version:
            raise UsageError(f"the gate is open at version {self._version}; close it before opening at {version}")
        self.adopt(version, restore=restore)
        self._open = True
        self._opened.set()

    def reopen(self) -> None:
        """Admit requests again at the last version.

        Raises:
            UsageError: the gate never was open.
        """
        if self._version is None:
            raise UsageError("the gate never was open; open it with a version")
        self.open(self._version)

    def adopt(self, version: int, *, restore: bool = False) -> None:
        """Say that the weights are at ``version`` from now on, while the gate stays as it is.

        Called before the engine resumes, so that requests kept across the swap end with the version they end on.

        Raises:
            UsageError: as for ``open``.
        """
        if self._open and version != self._version:
            raise UsageError(f"the gate is open at version {self._version}; close it before adopting {version}")
        if self._version is not None and version < self._version and not restore:
            raise UsageError(
                f"version {version} lies before {self._version}, which this gate served; pass restore=True to go back"
            )
        self._version = version

    def shut(self) -> None:
        """Stop admissions at once and wait for nothing."""
        if self._open:
            self._open = False
            self._opened = anyio.Event()

    async def close(self, deadline_s: float) -> None:
        """Stop admissions at once, then wait until every admitted request has ended.

        Raises:
            DrainTimeout: some still ran after ``deadline_s`` seconds; the gate stays closed.
        """
        self.shut()
        with anyio.move_on_after(deadline_s):
            while self._running:
                self._idle = anyio.Event()
                await self._idle.wait()
        if self._running:
            raise DrainTimeout(
                f"{self._running} requests at version {self._version} still ran after {deadline_s:g} s; "
                "raise the drain deadline, or drain by abort"
            )
