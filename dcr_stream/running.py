"""The attempt that a node works on: staged, then applied, and stopped as a whole."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
from anyio import CancelScope

from dcr_stream.delivery import Delivery, EngineSlot
from dcr_stream.errors import AttemptFenced, UsageError
from dcr_stream.messages import Attempt
from dcr_stream.protocol import Acked, Stage
from dcr_stream.staging import Staging

__all__ = ["Running"]


@dataclass(slots=True, eq=False)
class Running:
    """One attempt on one node: what is staged of it, the engines it goes into, and how far it has come."""

    order: Stage
    slots: list[EngineSlot]
    delivery: Delivery
    staging: Staging | None = None
    staged: bool = False
    begun: bool = False
    acked: Acked | None = None
    _scope: CancelScope = field(default_factory=CancelScope)
    _idle: anyio.Event = field(default_factory=anyio.Event)

    def __post_init__(self) -> None:
        self._idle.set()

    @property
    def attempt(self) -> Attempt:
        """The attempt's identity."""
        return self.order.attempt

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Stage or apply inside the block; ``stop`` cancels it and waits for its end.

        Raises:
            AttemptFenced: it was stopped.
        """
        self._idle = anyio.Event()
        try:
            with CancelScope() as self._scope:
                yield
        finally:
            self._idle.set()
        if self._scope.cancelled_caught:
            raise AttemptFenced(f"attempt {self.attempt.name} was stopped; another one follows")

    async def begin(self) -> None:
        """Start writing, behind closed gates only.

        Raises:
            UsageError: a gate is open.
        """
        if any(slot.gate.serving is not None for slot in self.slots):
            raise UsageError(f"attempt {self.attempt.name} may not apply while a gate is open; close it first")
        if not self.begun:
            self.begun = True
            await self.delivery.begin()

    async def stop(self) -> None:
        """Cancel what runs, and return once nothing of it writes any more.

        Calls to engines are shielded from cancellation: they end by themselves, within the call deadline.
        """
        self._scope.cancel()
        await self._idle.wait()

    def close(self) -> None:
        """Drop what is staged. Idempotent."""
        if self.staging is not None:
            self.staging.close()
