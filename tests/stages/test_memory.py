"""What an owner's pipeline holds at most besides weights, trackers and pending set, for any change (D10)."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable
from typing import TypeVar

import anyio
import numpy as np
import pytest

from dcr_stream.canonical import Region
from dcr_stream.delta import Segment
from dcr_stream.flow import Limits, Stage, execute
from dcr_stream.stages import bucket, chunk, compare, compress, convert, encode, project
from tests.stages.support import Rank, random_words, run

In = TypeVar("In")
Out = TypeVar("Out")

MIB = 1 << 20
WEIGHTS = 16 * MIB
SLACK = MIB // 2
"""Python's own objects, and blocks of indices, which do not grow with chunks or buckets."""


def peak(stage: Stage[In, Out], feed: Iterable[In], channel: int) -> int:
    """Bytes held at the same time while a stage runs and nobody keeps what it makes."""

    async def drop(item: Out) -> None:
        pass

    async def bounded() -> None:
        with anyio.fail_after(60):
            await execute(stage, feed, drop, limits=Limits(nbytes=channel))

    tracemalloc.start()
    try:
        anyio.run(bounded)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def rank_of(width: int, rate: float) -> Rank:
    """A task of two tensors, one of them a column shard: its changes have to be cut."""
    numel = WEIGHTS // width
    rng = np.random.default_rng(width)
    old = random_words(rng, numel, width)
    new = old.copy()
    changed = np.flatnonzero(rng.random(numel) < rate)
    new[changed] += rng.integers(1, 200, changed.size).astype(new.dtype)
    rank = Rank()
    third = numel // 3
    rank.add(
        "w", old, new, [Segment(0, 0, Region.run(0, third)), Segment(third, 1, Region(0, (numel // 8, 4), (8, 1)))]
    )
    return rank


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("size", [MIB // 2, MIB], ids=["small", "large"])
@pytest.mark.parametrize("rate", [0.03, 0.24, 0.6, 2.0])
@pytest.mark.parametrize("width", [1, 2, 8])
def test_memory_is_bounded_by_workers_chunks_and_buckets(width: int, rate: float, size: int, workers: int) -> None:
    c = b = q = size
    rank = rank_of(width, rate)
    capture = chunk(max_bytes=c) | compare(workers=workers) | project() | convert()
    # Once without being looked at: the first call of a kernel loads or compiles it.
    sent = [record for record in run(capture, rank.shards()) if record.tensor is not None]
    delivery = encode(workers=workers) | bucket(max_bytes=b) | compress(workers=workers)
    run(delivery, sent[:1])

    bound = workers * 6 * c + 12 * c + 3 * max(q, 3 * c)
    assert peak(capture, rank.shards(), q) < bound + SLACK

    bound = workers * 4 * c + (1 + workers) * 2 * b + 2 * max(q, 4 * c, b)
    assert peak(delivery, sent, q) < bound + SLACK
