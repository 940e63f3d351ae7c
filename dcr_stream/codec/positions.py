"""Which elements of a range are meant: columns G, L and B, from the scan to the wire.

=========== =====================================================================================
``gaps``    gaps between positions (:mod:`dcr_stream.codec.gaps`)
``bitmap``  a bit per position (:mod:`dcr_stream.codec.bitmap`): more than a quarter of the range
``dense``   nothing at all: every position of the range
=========== =====================================================================================

All functions here that make positions choose by their count alone; a decoder accepts any mode that holds what it
declares. Whoever needs indices takes them in blocks that stay in a core's cache: as 64-bit indices, the positions of a
large change would be several times its size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from dcr_stream.canonical import Indices
from dcr_stream.codec.bitmap import ROOM, ascends, bitmap_fault, decode_bitmap, encode_bitmap, suits_bitmap
from dcr_stream.codec.gaps import decode_gaps, encode_gaps, gap_fault
from dcr_stream.delta import Positions

__all__ = ["BLOCK", "blocks", "cut", "decode_positions", "encode_positions", "position_fault", "whole"]

BLOCK = 1 << 16
"""Most indices that are decoded at a time."""

_STEPS = np.arange(BLOCK, dtype=np.int64)
_spare: list[Indices] = []


def whole(elements: int) -> Positions:
    """Every position of a range."""
    return Positions(elements, elements, "dense")


def encode_positions(indices: Indices, elements: int) -> Positions:
    """Code indices in a range of ``elements``.

    Raises:
        ValueError: indices are negative, repeat, do not ascend, or lie outside the range.
    """
    count = indices.size
    if count and int(indices[-1]) >= elements:
        raise ValueError(f"position {int(indices[-1])} lies outside a region of {elements}")
    if count != elements and not suits_bitmap(count, elements):
        return Positions(elements, count, "gaps", *encode_gaps(indices))
    if not ascends(indices):
        raise ValueError("positions must ascend without repeats")
    if count == elements:
        return whole(elements)
    return Positions(elements, count, "bitmap", bitmap=encode_bitmap(indices, elements))


def decode_positions(positions: Positions) -> Indices:
    """All positions as indices: 8 bytes each."""
    found = np.empty(positions.count, np.int64)
    for indices, some in blocks(positions):
        found[some] = indices
    return found


def blocks(positions: Positions, start: int = 0) -> Iterator[tuple[Indices, slice]]:
    """Positions as indices, at most ``BLOCK`` at a time; with each block, which of the elements it holds.

    Indices are counted as if the range began at ``start``.

    A block is valid until the next one is asked for: all are decoded into the same array.
    """
    done, reached = 0, start - 1
    size = {"gaps": positions.high.size, "bitmap": positions.bitmap.size * 8, "dense": positions.count}[positions.mode]
    with _borrowed() as indices:
        for lo in range(0, size, BLOCK):
            hi = min(lo + BLOCK, size)
            if positions.mode == "gaps":
                part = positions.high[lo:hi]
                count, reached = decode_gaps(part, positions.low, positions.shift, done, reached, indices)
            elif positions.mode == "bitmap":
                count = decode_bitmap(positions.bitmap[lo // 8 : hi // 8], start + lo, indices)
            else:
                count = hi - lo
                np.add(_STEPS[:count], start + lo, out=indices[:count])
            if count:
                yield indices[:count], slice(done, done + count)
                done += count


@contextmanager
def _borrowed() -> Iterator[Indices]:
    """An array for a block. Used ones are kept, one for each place in the process that was decoding at a time."""
    try:
        array = _spare.pop()
    except IndexError:
        array = np.empty(BLOCK + ROOM, np.int64)
    try:
        yield array
    finally:
        _spare.append(array)


def position_fault(positions: Positions) -> str | None:
    """What is wrong with positions that came from elsewhere; None if nothing.

    After a None, there are ``count`` of them, ascending and in ``[0, elements)``. Temporary memory is bounded by the
    columns' own size.
    """
    count, elements, mode = positions.count, positions.elements, positions.mode
    if mode != "gaps" and (positions.shift or positions.high.size or positions.low.size):
        return f"{mode} positions with gaps"
    if mode != "bitmap" and positions.bitmap.size:
        return f"{mode} positions with a bitmap"
    if mode == "gaps":
        return gap_fault(positions.high, positions.low, positions.shift, count, elements)
    if mode == "bitmap":
        return bitmap_fault(positions.bitmap, count, elements)
    return None if count == elements else f"dense positions with {elements - count} missing elements"


def cut(positions: Positions, ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, Positions, slice]]:
    """What they hold of some ascending, disjoint ranges ``[lo, hi)``.

    Yields, for each range with at least one of them: its number, the positions counted from its ``lo``, and which of
    the elements those are.
    """
    if list(ranges) == [(0, positions.elements)]:
        yield 0, positions, slice(0, positions.count)
        return
    indices = decode_positions(positions)
    ends = np.searchsorted(indices, np.array(ranges, np.int64).reshape(-1, 2))
    for i in np.flatnonzero(ends[:, 0] < ends[:, 1]).tolist():
        (lo, hi), (first, last) = ranges[i], ends[i].tolist()
        yield i, encode_positions(indices[first:last] - lo, hi - lo), slice(first, last)
