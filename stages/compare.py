"""Groups of shards → the elements whose bits changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dcr_stream.canonical import Indices, Words
from dcr_stream.codec.digest import change_sum
from dcr_stream.codec.scan import Found
from dcr_stream.delta import Change, Shard
from dcr_stream.errors import CaptureError
from dcr_stream.flow import Stage, expand
from dcr_stream.flow.arguments import check_at_least
from dcr_stream.stages.chunk import Group

__all__ = ["BLOCK", "changed_elements", "compare"]

BLOCK = 1 << 20
"""Elements asked of a source at a time: what a source must gather or copy costs no more memory than this."""


def compare(*, workers: int = 1) -> Stage[Group, Change]:
    """Compare each shard's live bits with its tracker; pass on one ``Change`` per shard that differs.

    Bits are compared, so a new NaN payload or the sign of a zero is a change and an unchanged NaN is none. Live
    weights and trackers are read once, block by block, and never written. Positions are indices in the task's
    shard. Every shard is accounted for in its tally, ``scanned`` whether or not it changed, so progress shows even
    where nothing is sent.

    Args:
        workers: groups compared at the same time.

    Raises:
        UsageError: ``workers`` is less than 1.
        CaptureError: while running: a source returned another number or width of words than it declares.
    """
    check_at_least("compare", "workers", workers, 1)
    return expand(_changes, workers=workers, name="compare")


def changed_elements(
    read: Callable[[int, int], Words], old: Words, lo: int, hi: int, what: str
) -> tuple[Indices, Words, Words]:
    """Where ``read(lo, hi)`` differs from ``old``: ascending int64 indices, new - old modulo 2^w, and old bits.

    Memory is that of the result, up to twice as much while it grows, and what ``read`` itself makes for a block.

    Raises:
        CaptureError: ``read`` returned something else than the words of the range; ``what`` names it.
    """
    found = Found(old.dtype, lo, hi)
    for start in range(lo, hi, BLOCK):
        stop = min(start + BLOCK, hi)
        live, known = read(start, stop), old[start:stop]
        if live.dtype != known.dtype or live.shape != known.shape:
            raise CaptureError(
                f"{what}: elements [{start}, {stop}) were read as {live.dtype} of shape {live.shape} instead of "
                f"{known.dtype} of shape {known.shape}; its dtype and shape must not change within a run"
            )
        found.add(live, known, start)
    return found.take()


def _changes(group: Group) -> Iterator[Change]:
    for shard in group:
        change = _compare(shard)
        if change.positions.size:
            yield change


def _compare(shard: Shard) -> Change:
    task = shard.task
    positions, differences, old = changed_elements(
        task.read, shard.trackers[task.key], shard.lo, shard.hi, f"task {task.key!r}"
    )
    shard.tally.scan(shard.hi - shard.lo)
    shard.tally.add(positions.size, change_sum(task.key, positions, differences))
    return Change(shard, positions, differences, old)
