"""Changes of task shards → records in canonical coordinates."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from operator import attrgetter

from dcr_stream.canonical import Region, Words
from dcr_stream.codec.positions import cut
from dcr_stream.delta import Change, Positions, Record, Segment
from dcr_stream.errors import UsageError
from dcr_stream.flow import Stage, expand

__all__ = ["project", "source_change"]


def project() -> Stage[Change, Record | Change]:
    """Cut each change of a mapped task into ``Record``s: one for each segment that it touches.

    A segment's elements are its region's in row-major order, so positions keep theirs. Where a change covers only part
    of a segment, its region is cut to the boxes that the part consists of.

    Changed elements outside every segment (the source's own padding) become records without a tensor. They are
    never sent, but they are advanced after commit; otherwise they would be found as changed again in every refit.
    Changes of residual tasks pass unaltered.

    Raises:
        UsageError: while running: a task has both segments and conversions.
    """
    return expand(_records, name="project")


def source_change(change: Change) -> Record:
    """A change as a record without a tensor."""
    shard = change.shard
    return _source_record(shard.task.key, shard.lo, change.positions, change.differences, change.old)


def _source_record(key: str, start: int, positions: Positions, differences: Words, old: Words) -> Record:
    region = Region.run(start, positions.elements)
    return Record(key, None, region, positions, differences, old, key, start)


def _records(change: Change) -> Iterator[Record | Change]:
    shard, task = change.shard, change.shard.task
    if task.segments is None:
        yield change
        return
    if task.conversions:
        raise UsageError(
            f"task {task.key!r} has both segments and conversions; make it residual (segments=None), so that "
            "its conversions run when it changes"
        )
    pieces = list(_pieces(task.segments, shard.lo, shard.hi))
    ranges = [(lo - shard.lo, hi - shard.lo) for lo, hi, _, _ in pieces]
    for i, positions, part in cut(change.positions, ranges):
        lo, _, tensor, region = pieces[i]
        differences, old = change.differences[part], change.old[part]
        if tensor is None:
            yield _source_record(task.key, lo, positions, differences, old)
        else:
            yield Record(task.key, tensor, region, positions, differences, old, task.key, lo)


def _pieces(segments: tuple[Segment, ...], lo: int, hi: int) -> Iterator[tuple[int, int, int | None, Region]]:
    """What a range of a task consists of: ranges, the tensor that each belongs to (None: padding), its box there."""
    at = lo
    for segment in _overlapping(segments, lo, hi):
        first, last = max(segment.start, lo), min(segment.start + segment.count, hi)
        if first >= last:
            continue
        if at < first:
            yield at, first, None, Region.run(at, first - at)
        at = first
        for region in segment.region.cut(first - segment.start, last - segment.start):
            yield at, at + region.count, segment.tensor, region
            at += region.count
    if at < hi:
        yield at, hi, None, Region.run(at, hi - at)


def _overlapping(segments: tuple[Segment, ...], lo: int, hi: int) -> tuple[Segment, ...]:
    start = attrgetter("start")
    first = max(0, bisect_right(segments, lo, key=start) - 1)
    return segments[first : bisect_right(segments, hi - 1, key=start)]
