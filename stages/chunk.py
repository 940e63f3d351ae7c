"""Task shards → groups of a bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dcr_stream.delta import Shard
from dcr_stream.errors import UsageError
from dcr_stream.flow import Stage, fold
from dcr_stream.flow.arguments import check_at_least

__all__ = ["Group", "chunk"]

Group = tuple[Shard, ...]
"""Shards that are compared in one go: whole ones, or ranges of large ones."""


def chunk(*, max_bytes: int = 16 << 20) -> Stage[Shard, Group]:
    """Group shards, in order, into at most ``max_bytes`` of weights each; larger shards are cut into ranges.

    Small shards travel together, so that a model of thousands of small tensors does not pay a hop for each. Every
    element is in exactly one group; an empty shard is in one as well. A single element is never cut.

    Raises:
        UsageError: ``max_bytes`` is less than 1. While running: a shard's tracker has another number of elements
            than its task, or its range lies outside the task.
    """
    check_at_least("chunk", "max_bytes", max_bytes, 1)
    return fold(lambda: _Groups(max_bytes), name="chunk")


class _Groups:
    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._shards: list[Shard] = []
        self._nbytes = 0

    def push(self, item: Shard) -> Iterator[Group]:
        _check(item)
        for piece in self._pieces(item):
            if self._shards and self._nbytes + piece.nbytes > self._max_bytes:
                yield from self.flush()
            self._shards.append(piece)
            self._nbytes += piece.nbytes

    def flush(self) -> Iterator[Group]:
        if self._shards:
            group = tuple(self._shards)
            self._shards, self._nbytes = [], 0
            yield group

    def _pieces(self, shard: Shard) -> Iterator[Shard]:
        if shard.nbytes <= self._max_bytes:
            yield shard
            return
        step = max(1, self._max_bytes // shard.trackers[shard.name].itemsize)
        for lo in range(shard.lo, shard.hi, step):
            yield replace(shard, lo=lo, hi=min(lo + step, shard.hi))


def _check(shard: Shard) -> None:
    task = shard.task
    tracked = shard.trackers[task.key].size
    if tracked != task.numel:
        raise UsageError(
            f"task {task.key!r} has {task.numel} elements but its tracker holds {tracked}; "
            "a source's tasks must not change within a run"
        )
    if not 0 <= shard.lo <= shard.hi <= task.numel:
        raise UsageError(
            f"range [{shard.lo}, {shard.hi}) lies outside task {task.key!r} of {task.numel} elements; "
            "hand out whole tasks"
        )
