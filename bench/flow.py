"""What does a hop from stage to stage cost, and does back-pressure hold?

- ``hop_us``: microseconds per item for one more stage that only passes items on, in the whole library: channel, byte
  accounting, meter and monitor calls.
- ``hop_vs_queue``: the same against one more bare ``asyncio.Queue`` of the same capacity in the same run.
- ``worker_hop_us``: the same for a stage that lifts a plain function into worker threads (``each``).
- ``backpressure_peak_over_bound``: most bytes ever queued in any channel, over the byte bound, while the delivery is
  slower than the feed.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce

import anyio
import anyio.lowlevel

from bench._report import Figures, Targets, median_of, report
from dcr_stream.flow import Inlet, Limits, Outlet, Stage, each, execute
from dcr_stream.interfaces import NullMonitor

TARGETS: Targets = {
    "hop_us": ("<=", 10.0),
    "hop_vs_queue": ("<=", 4.0),
    "worker_hop_us": ("<=", 500.0),
    "backpressure_peak_over_bound": ("<=", 1.0),
}

STAGES = 8
CAPACITY = 64
LIMITS = Limits(items=CAPACITY, nbytes=1 << 20)


@dataclass(frozen=True, slots=True)
class Block:
    """An item of a given size."""

    nbytes: int


class Pass(Stage[Block, Block]):
    """Passes items on."""

    async def run(self, source: Inlet[Block], sink: Outlet[Block]) -> None:
        async for item in source:
            await sink.send(item)


class Peaks(NullMonitor):
    """Remembers the most bytes queued in any channel."""

    def __init__(self) -> None:
        self.nbytes = 0

    def channel(self, stage: str, *, items: int, nbytes: int) -> None:
        self.nbytes = max(self.nbytes, nbytes)


async def ignore(item: Block) -> None:
    """Take an item."""


def seconds(stages: list[Stage[Block, Block]], items: int) -> float:
    """Wall time of ``items`` small items through ``stages``."""
    pipeline = reduce(lambda left, right: left | right, stages)
    began = time.perf_counter()
    anyio.run(lambda: execute(pipeline, (Block(64) for _ in range(items)), ignore, limits=LIMITS))
    return time.perf_counter() - began


def hop_us(items: int) -> float:
    """Microseconds per item for one more passing stage."""
    return (seconds([Pass() for _ in range(STAGES + 1)], items) - seconds([Pass()], items)) / items / STAGES * 1e6


def worker_hop_us(items: int) -> float:
    """Microseconds per item for one more stage in worker threads."""
    return (seconds([Pass(), each(lambda item: item)], items) - seconds([Pass()], items)) / items * 1e6


def queue_hop_us(items: int) -> float:
    """Microseconds per item for one more task between two ``asyncio.Queue``s."""

    async def passing(count: int) -> float:
        queues: list[asyncio.Queue[Block]] = [asyncio.Queue(CAPACITY) for _ in range(count + 1)]

        async def feed() -> None:
            for _ in range(items):
                await queues[0].put(Block(64))

        async def hop(i: int) -> None:
            for _ in range(items):
                await queues[i + 1].put(await queues[i].get())

        async def drain() -> None:
            for _ in range(items):
                await queues[-1].get()

        began = time.perf_counter()
        await asyncio.gather(feed(), drain(), *(hop(i) for i in range(count)))
        return time.perf_counter() - began

    return (asyncio.run(passing(STAGES + 1)) - asyncio.run(passing(1))) / items / STAGES * 1e6


def peak_over_bound(items: int) -> float:
    """Most bytes queued in a channel over its bound, with a feed that never waits and a slow delivery."""
    peaks = Peaks()
    bound = 1 << 16
    limits = Limits(items=1 << 20, nbytes=bound)

    def feed() -> Iterator[Block]:
        for i in range(items):
            yield Block(1 + i * 7919 % 8192)

    async def slow(item: Block) -> None:
        await anyio.lowlevel.checkpoint()

    anyio.run(lambda: execute(Pass() | Pass(), feed(), slow, monitor=peaks, limits=limits))
    return peaks.nbytes / bound


def measure(quick: bool) -> Figures:
    """All figures; medians of repeats, each ratio from one repeat."""
    repeats, items = (5, 4_000) if quick else (15, 20_000)
    hops: list[float] = []

    def ratio() -> float:
        hops.append(hop_us(items))
        return hops[-1] / queue_hop_us(items)

    hop_vs_queue = median_of(repeats, ratio)
    return {
        "hop_us": sorted(hops)[len(hops) // 2],
        "hop_vs_queue": hop_vs_queue,
        "worker_hop_us": median_of(repeats, lambda: worker_hop_us(items // 4)),
        "backpressure_peak_over_bound": peak_over_bound(items),
    }


if __name__ == "__main__":
    sys.exit(report("Cost of a hop between stages, and back-pressure", measure, TARGETS))
