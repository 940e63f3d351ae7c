"""Channels between stages, bounded by items and by bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import anyio

from dcr_stream.errors import UsageError
from dcr_stream.flow.arguments import check_at_least
from dcr_stream.flow.meter import Meter

__all__ = ["Channel", "Inlet", "Limits", "Outlet", "nbytes_of"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What each channel may hold: at most ``items`` items and ``nbytes`` bytes.

    An item larger than ``nbytes`` passes alone, when the channel is empty.

    Raises:
        UsageError: a bound is less than 1.
    """

    items: int = 64
    nbytes: int = 64 << 20

    def __post_init__(self) -> None:
        check_at_least("Limits", "items", self.items, 1)
        check_at_least("Limits", "nbytes", self.nbytes, 1)


def nbytes_of(item: object) -> int:
    """What an item counts against the byte bound: its ``nbytes``, or 0 if it has none."""
    return int(getattr(item, "nbytes", 0))


class Channel(Generic[T]):
    """A first-in, first-out queue with one clean end; the owner of everything in it.

    ``watch(items, nbytes)`` is called whenever the contents change. Used from the event loop only.
    """

    def __init__(self, limits: Limits, watch: Callable[[int, int], None]) -> None:
        self.exhausted = False
        """Whether a reader has seen the end."""
        self._limits = limits
        self._watch = watch
        self._queue: deque[tuple[T, int]] = deque()
        self._held = 0
        self._closed = False
        self._readers: deque[anyio.Event] = deque()
        self._writers: deque[tuple[T, int, anyio.Event]] = deque()

    def close(self) -> None:
        """Nothing more will come. Readers get what is queued, then the end. Idempotent."""
        self._closed = True
        while self._readers:
            self._readers.popleft().set()

    async def put(self, item: T, nbytes: int, meter: Meter) -> None:
        """Queue ``item``; waits behind earlier writers for room, and does not yield when there is room.

        Raises:
            UsageError: the channel is closed.
        """
        if self._closed:
            raise UsageError("a stage sent an item after it had returned; await every send inside run()")
        if not self._writers and self._fits(nbytes):
            self._append(item, nbytes)
            return
        writer = (item, nbytes, anyio.Event())
        self._writers.append(writer)
        meter.blocked(1)
        try:
            await writer[2].wait()
        except BaseException:
            if not writer[2].is_set():
                self._writers.remove(writer)
                self._admit()
            raise
        finally:
            meter.blocked(-1)

    async def get(self, meter: Meter) -> T:
        """The next item; does not yield when there is one.

        Raises:
            anyio.EndOfStream: the channel was closed and is empty.
        """
        while not self._queue:
            if self._closed:
                self.exhausted = True
                raise anyio.EndOfStream
            await self._changed(meter)
        item, nbytes = self._queue.popleft()
        self._held -= nbytes
        self._admit()
        self._watch(len(self._queue), self._held)
        return item

    def queued(self) -> int:
        """Items that ``get`` returns without waiting."""
        return len(self._queue)

    async def _changed(self, meter: Meter) -> None:
        woken = anyio.Event()
        self._readers.append(woken)
        meter.blocked(1)
        try:
            await woken.wait()
        except BaseException:
            if not woken.is_set():
                self._readers.remove(woken)
            elif self._queue and self._readers:
                self._readers.popleft().set()
            raise
        finally:
            meter.blocked(-1)

    def _fits(self, nbytes: int) -> bool:
        if not self._queue:
            return True
        return len(self._queue) < self._limits.items and self._held + nbytes <= self._limits.nbytes

    def _append(self, item: T, nbytes: int) -> None:
        self._queue.append((item, nbytes))
        self._held += nbytes
        self._watch(len(self._queue), self._held)
        if self._readers:
            self._readers.popleft().set()

    def _admit(self) -> None:
        while self._writers and self._fits(self._writers[0][1]):
            item, nbytes, admitted = self._writers.popleft()
            self._append(item, nbytes)
            admitted.set()


class Inlet(Generic[T_co]):
    """A stage's source: iterate it to its end.

    The end means that everything before this stage succeeded. If something failed, the stage is cancelled instead
    and never sees an end.
    """

    def __init__(self, channel: Channel[T_co], meter: Meter) -> None:
        self.channel = channel
        self.meter = meter

    async def receive(self) -> T_co:
        """The next item.

        Raises:
            anyio.EndOfStream: there is none and never will be. Raised again by every later call.
        """
        return await self.channel.get(self.meter)

    async def receive_queued(self) -> list[T_co]:
        """The next item and all that are queued behind it: at most what the channel's limits allow.

        Raises:
            anyio.EndOfStream: as ``receive``.
        """
        items = [await self.channel.get(self.meter)]
        # Counted once: taking items lets writers in, who would otherwise keep this loop going.
        items += [await self.channel.get(self.meter) for _ in range(self.channel.queued())]
        return items

    def __aiter__(self) -> Inlet[T_co]:
        return self

    async def __anext__(self) -> T_co:
        try:
            return await self.channel.get(self.meter)
        except anyio.EndOfStream:
            raise StopAsyncIteration from None


class Outlet(Generic[T_contra]):
    """A stage's sink. There is no way to close it: only the stage's clean return ends its output."""

    def __init__(self, channel: Channel[T_contra], meter: Meter, *, also: Outlet[T_contra] | None = None) -> None:
        self.channel = channel
        self.meter = meter
        self._also = also

    async def send(self, item: T_contra) -> None:
        """Pass ``item`` on; waits while the channel is full."""
        nbytes = nbytes_of(item)
        await self.channel.put(item, nbytes, self.meter)
        self.passed(nbytes)

    def passed(self, nbytes: int) -> None:
        """Count an item of ``nbytes`` as passed on."""
        self.meter.passed(nbytes)
        if self._also is not None:
            self._also.passed(nbytes)
