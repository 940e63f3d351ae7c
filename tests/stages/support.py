"""Tasks over plain arrays, and running a stage over a list."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import anyio
import numpy as np

from dcr_stream.canonical import Words
from dcr_stream.codec import change_sum
from dcr_stream.codec.positions import decode_positions
from dcr_stream.delta import Change, Conversion, Record, Segment, Shard, Tally, Task, Trackers
from dcr_stream.flow import Stage, execute

In = TypeVar("In")
Out = TypeVar("Out")


def run(stage: Stage[In, Out], feed: Iterable[In]) -> list[Out]:
    """Everything that ``stage`` makes of ``feed``."""
    out: list[Out] = []

    async def deliver(item: Out) -> None:
        out.append(item)

    async def bounded() -> None:
        with anyio.fail_after(60):
            await execute(stage, feed, deliver)

    anyio.run(bounded)
    return out


class Rank:
    """One owner's tasks: live arrays, trackers, tally."""

    def __init__(self) -> None:
        self.live: dict[str, Words] = {}
        self.trackers = Trackers()
        self.tally = Tally()
        self.tasks: list[Task] = []

    def add(
        self,
        key: str,
        old: Words,
        new: Words,
        segments: Sequence[Segment] | None = (),
        conversions: Sequence[Conversion] = (),
    ) -> Task:
        """A task whose tracker holds ``old`` and whose live bits are ``new``."""
        self.live[key] = new
        self.trackers.tasks[key] = old

        def read(lo: int, hi: int) -> Words:
            return self.live[key][lo:hi]

        places = None if segments is None else tuple(segments)
        task = Task(key, old.size, f"uint{8 * old.itemsize}", read, places, tuple(conversions))
        self.tasks.append(task)
        return task

    def shards(self) -> list[Shard]:
        """Every task whole."""
        return [Shard(task, 0, task.numel, self.trackers, self.tally) for task in self.tasks]


def changed(rng: np.random.Generator, old: Words, share: float) -> Words:
    """``old`` with about ``share`` of its elements at other bits."""
    new = old.copy()
    where = np.flatnonzero(rng.random(old.size) < share)
    new[where] += rng.integers(1, 1 << 8 * old.itemsize, where.size, dtype=np.uint64).astype(old.dtype)
    return new


def random_words(rng: np.random.Generator, size: int, width: int = 2) -> Words:
    """Random bits."""
    words: Words = rng.integers(0, 256, size * width, dtype=np.uint8).view(f"u{width}")
    return words


def total_of(records: Iterable[Record | Change]) -> tuple[int, int]:
    """Count and sum of records, as the pending set takes them."""
    tally = Tally()
    for record in records:
        positions = decode_positions(record.positions)
        if isinstance(record, Change):
            key, flat = record.name, record.shard.lo + positions
        elif record.task is None:
            key, flat = f"residual:{record.tensor}", record.region.flat(positions)
        else:
            key, flat = record.task, record.start + positions
        tally.add(positions.size, change_sum(key, flat, record.differences))
    return tally.elements, tally.total
