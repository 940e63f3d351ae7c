"""Groups of shards → the elements whose bits changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dcr_stream.canonical import Region, Words
from dcr_stream.codec.boxes import located
from dcr_stream.codec.digest import change_sum
from dcr_stream.codec.scan import Found
from dcr_stream.delta import Change, Positions, RemoteWords, Shard, Tally
from dcr_stream.errors import CaptureError
from dcr_stream.flow import Stage, expand
from dcr_stream.flow.arguments import check_at_least
from dcr_stream.stages.chunk import Group

__all__ = ["BLOCK", "changed_elements", "compare", "tallied"]

BLOCK = 1 << 23
"""Elements asked of a source at a time: what a source must gather or copy costs no more memory than this."""


def compare(*, workers: int = 1) -> Stage[Group, Change]:
    """Compare each shard's live bits with its tracker; pass on one ``Change`` per shard that differs.

    Bits are compared, so a new NaN payload or the sign of a zero is a change and an unchanged NaN is none. Live
    weights and trackers are read once, block by block, and never written. Every shard is accounted for in its tally,
    ``scanned`` whether or not it changed, so progress shows even where nothing is sent.

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
) -> tuple[Positions, Words, Words]:
    """Where ``read(lo, hi)`` differs from ``old``: positions from ``lo`` on, new - old modulo 2^w, and old bits.

    Where everything changed, the old bits are a view of ``old``. Memory is that of the result, up to twice as much
    while it grows, and what ``read`` itself makes for a block.

    Raises:
        CaptureError: ``read`` returned something else than the words of the range; ``what`` names it.
    """
    found = Found(old[lo:hi])
    for start in range(lo, hi, BLOCK):
        stop = min(start + BLOCK, hi)
        live, known = read(start, stop), old[start:stop]
        if live.dtype != known.dtype or live.shape != known.shape:
            raise CaptureError(
                f"{what}: elements [{start}, {stop}) were read as {live.dtype} of shape {live.shape} instead of "
                f"{known.dtype} of shape {known.shape}; its dtype and shape must not change within a run"
            )
        found.add(live)
    return found.take()


def tallied(tally: Tally, key: str, region: Region, positions: Positions, differences: Words) -> None:
    """Account for changed elements of baseline array ``key``, whose ``positions`` lie in ``region`` of it."""
    total = 0
    for at, some in located(region, positions):
        total += change_sum(key, at, differences[some])
    tally.add(positions.count, total)


def _changes(group: Group) -> Iterator[Change]:
    for shard in group:
        change = _compare(shard)
        if change.positions.count:
            yield change


def _compare(shard: Shard) -> Change:
    task, lo, hi, known = shard.task, shard.lo, shard.hi, shard.trackers[shard.task.key]
    if isinstance(known, RemoteWords):
        assert task.live is not None
        positions, differences, old = known[lo:hi].changes_to(task.live(lo, hi))
    else:
        positions, differences, old = changed_elements(task.read, known, lo, hi, f"task {task.key!r}")
    shard.tally.scan(hi - lo)
    tallied(shard.tally, task.key, Region.run(lo, hi - lo), positions, differences)
    return Change(shard, positions, differences, old)
