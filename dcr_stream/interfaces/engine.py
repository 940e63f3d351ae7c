"""A rollout engine as its node sees it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

from dcr_stream.messages import ReceiverCall, ReceiverReply

__all__ = ["DrainMode", "Engine"]

DrainMode = Literal["wait", "abort", "keep"]


class Engine(ABC):
    """One serving engine: its hooks around a swap, and a way to call its receivers (one per rank).

    Order of the hooks: the gate is closed and drained, then ``pause`` → ``invalidate_caches`` → receivers apply →
    ``resume`` → the gate opens. A hook may be slow (the node bounds it) and may raise: before the first write the
    attempt fails and version v keeps serving.
    """

    name: str
    ranks: int

    keeps_requests: bool = False
    """Whether ``pause("keep")`` really stops forward passes, so that running requests may stay across a swap.

    An engine that cannot is never written to while requests run: at the drain deadline ``keep`` fails the attempt.
    """

    @abstractmethod
    async def call(self, call: ReceiverCall) -> list[ReceiverReply]:
        """Run one call on the receiver of every rank and return their replies in rank order.

        Raises:
            PeerLost: a rank is gone. Errors raised by receivers come back as the same class.
        """

    async def pause(self, mode: DrainMode) -> None:
        """Stop the engine from running forward passes. The default has nothing to stop."""

    async def resume(self) -> None:
        """Let the engine run again."""

    async def invalidate_caches(self) -> None:
        """Drop everything computed from old weights: prefix, KV and encoder caches."""
