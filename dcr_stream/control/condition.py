"""A condition variable whose waiters may be tasks of different event loops in one process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import anyio

__all__ = ["LoopCondition"]

T = TypeVar("T")


class LoopCondition:
    """Guards shared state; tasks of any event loop may wait for it to change.

    An owner's event loop runs in a background thread, so two roles of one process may share a link or a transport
    from different loops. State is read and written under ``lock``; whoever changed it calls ``notify``.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._waiting: dict[anyio.Event, asyncio.AbstractEventLoop] = {}

    async def until(self, step: Callable[[], T | None]) -> T:
        """Call ``step`` under the lock, again after every change, until it returns something other than None.

        What ``step`` raises is raised here. The caller bounds the wait.
        """
        loop = asyncio.get_running_loop()
        while True:
            event = anyio.Event()
            with self.lock:
                result = step()
                if result is None:
                    self._waiting[event] = loop
            if result is not None:
                # Even a call that need not wait lets other tasks run: no loop of ready calls starves the event loop.
                await anyio.lowlevel.cancel_shielded_checkpoint()
                return result
            try:
                await event.wait()
            finally:
                with self.lock:
                    self._waiting.pop(event, None)

    def notify(self) -> None:
        """Wake every waiting task; from any thread."""
        with self.lock:
            waiting, self._waiting = self._waiting, {}
        try:
            here: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        for event, loop in waiting.items():
            if loop is here:
                event.set()
            else:
                with suppress(RuntimeError):  # that loop has ended, and its tasks with it
                    loop.call_soon_threadsafe(event.set)
