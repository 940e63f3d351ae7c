"""Engines whose receivers live in this process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import anyio

from dcr_stream.interfaces.engine import DrainMode, Engine
from dcr_stream.interfaces.runtime import Workers
from dcr_stream.messages import ReceiverCall, ReceiverReply

__all__ = ["LocalEngine", "Receiver"]


class Receiver(Protocol):
    """One rank's receiver, as an engine calls it."""

    def handle(self, call: ReceiverCall) -> ReceiverReply:
        """Carry out one call; blocking."""
        ...


class LocalEngine(Engine):
    """An engine made of receivers in this process, called in worker threads, all ranks at once.

    Args:
        name: what errors call this engine.
        receivers: one per rank, in rank order.
        workers: the threads that run them.
        pause, resume, invalidate_caches: the engine's hooks; those left out do nothing.
    """

    def __init__(
        self,
        name: str,
        receivers: Sequence[Receiver],
        *,
        workers: Workers,
        pause: Callable[[DrainMode], Awaitable[None]] | None = None,
        resume: Callable[[], Awaitable[None]] | None = None,
        invalidate_caches: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.name = name
        self.ranks = len(receivers)
        self._receivers = tuple(receivers)
        self._workers = workers
        self.keeps_requests = pause is not None
        self._pause = pause
        self._resume = resume
        self._invalidate_caches = invalidate_caches

    async def call(self, call: ReceiverCall) -> list[ReceiverReply]:
        """Run one call on every rank; see ``Engine.call``.

        Every rank is waited for, also when one fails, so that nothing writes after this returns. An exception of a
        receiver becomes that rank's reply.
        """
        replies: dict[int, ReceiverReply] = {}

        async def one(rank: int, receiver: Receiver) -> None:
            try:
                replies[rank] = await self._workers.run(receiver.handle, call)
            except Exception as error:
                replies[rank] = ReceiverReply(error=type(error).__name__, text=str(error))

        async with anyio.create_task_group() as group:
            for rank, receiver in enumerate(self._receivers):
                group.start_soon(one, rank, receiver)
        return [replies[rank] for rank in range(self.ranks)]

    async def pause(self, mode: DrainMode) -> None:
        """Call the ``pause`` hook."""
        if self._pause is not None:
            await self._pause(mode)

    async def resume(self) -> None:
        """Call the ``resume`` hook."""
        if self._resume is not None:
            await self._resume()

    async def invalidate_caches(self) -> None:
        """Call the ``invalidate_caches`` hook."""
        if self._invalidate_caches is not None:
            await self._invalidate_caches()
