"""Changes of task shards → records in canonical coordinates."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from operator import attrgetter

import numpy as np

from dcr_stream.canonical import Indices, Region
from dcr_stream.delta import Change, Record, Segment
from dcr_stream.errors import UsageError
from dcr_stream.flow import Stage, expand

__all__ = ["project", "source_change"]


def project() -> Stage[Change, Record | Change]:
    """Cut each change of a mapped task into one ``Record`` per segment that it touches.

    Positions are shifted by the segment's start and keep their order, because a segment's elements are its region's
    in row-major order: no work per element besides gathering the tracker's bits.

    Changed elements outside every segment (the source's own padding) become one record without a tensor. They are
    never sent, but they are advanced after commit; otherwise they would be found as changed again in every refit.
    Changes of residual tasks pass unaltered.

    Raises:
        UsageError: while running: a task has both segments and conversions.
    """
    return expand(_records, name="project")


def source_change(change: Change, positions: Indices, which: slice | Indices) -> Record:
    """The record without a tensor of a change's elements ``which``, at ``positions`` of its task's shard."""
    task = change.shard.task
    return Record(
        name=task.key,
        tensor=None,
        region=Region.whole(task.numel),
        positions=positions,
        differences=change.differences[which],
        old=change.old[which],
        task=task.key,
    )


def _records(change: Change) -> Iterator[Record | Change]:
    task = change.shard.task
    if task.segments is None:
        yield change
        return
    if task.conversions:
        raise UsageError(
            f"task {task.key!r} has both segments and conversions; make it residual (segments=None), so that "
            "its conversions run when it changes"
        )
    positions = change.positions
    segments = _overlapping(task.segments, change.shard.lo, change.shard.hi)
    starts = np.array([segment.start for segment in segments], np.int64)
    counts = np.array([segment.count for segment in segments], np.int64)
    first = np.searchsorted(positions, starts)
    last = np.searchsorted(positions, starts + counts)
    for i in np.flatnonzero(last > first):
        segment, part = segments[i], slice(int(first[i]), int(last[i]))
        yield Record(
            name=task.key,
            tensor=segment.tensor,
            region=segment.region,
            positions=positions[part] - segment.start,
            differences=change.differences[part],
            old=change.old[part],
            task=task.key,
            start=segment.start,
        )
    if int((last - first).sum()) < positions.size:
        padding = np.ones(positions.size, np.bool_)
        for lo, hi in zip(first, last, strict=True):
            padding[lo:hi] = False
        where = np.flatnonzero(padding)
        yield source_change(change, positions[where], where)


def _overlapping(segments: tuple[Segment, ...], lo: int, hi: int) -> tuple[Segment, ...]:
    start = attrgetter("start")
    first = max(0, bisect_right(segments, lo, key=start) - 1)
    return segments[first : bisect_right(segments, hi - 1, key=start)]
