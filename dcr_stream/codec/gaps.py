"""Positions as gaps: columns G and L.

``gap[k] = position[k] - position[k-1] - 1`` with ``position[-1] = -1``. Each gap is split at the item's shift ``s``:

- **G** holds ``q = gap >> s`` as bytes: 255 for every full 255 in ``q``, then the rest (0 to 254). Every gap therefore
  ends with exactly one byte below 255, and the bytes of G add up to the sum of all ``q``.
- **L** holds the ``s`` low bits of every gap, LSB first, without padding between gaps; the last byte's unused bits
  are 0. Empty when ``s`` is 0.

The shift keeps ``q`` inside a byte for sparse items: ``s`` is the smallest integer from 0 to 32 with
``sum of gaps <= 192 · count · 2^s``, that is ``max(0, ceil(log2(mean gap / 192)))``. A decoder accepts any shift.
"""

from __future__ import annotations

import numpy as np

from dcr_stream.canonical import Bytes, Indices
from dcr_stream.codec.kernels import kernel

__all__ = ["MAX_SHIFT", "choose_shift", "decode_gaps", "encode_gaps", "gap_fault"]

MAX_SHIFT = 32
"""Largest gap shift; keeps all sums inside 64 bits."""

_MEAN_GAP = 192
_BLOCK = 1 << 13  # gaps packed or unpacked at a time; a multiple of 8, so that blocks packed end on a byte


def choose_shift(count: int, last: int) -> int:
    """The shift for ``count`` ascending positions that end at ``last``."""
    total = last + 1 - count
    shift = 0
    while shift < MAX_SHIFT and total > _MEAN_GAP * count << shift:
        shift += 1
    return shift


def encode_gaps(positions: Indices) -> tuple[int, Bytes, Bytes]:
    """Code ascending, distinct, non-negative positions as (shift, G, L).

    Raises:
        ValueError: positions are negative, repeat or do not ascend.
    """
    if positions.size == 0:
        return 0, np.empty(0, np.uint8), np.empty(0, np.uint8)
    shift = choose_shift(positions.size, int(positions[-1]))
    return shift, *join_gaps(positions, shift)


def gap_fault(high: Bytes, low: Bytes, shift: int, count: int, elements: int) -> str | None:
    """What is wrong with columns G and L of an item of ``count`` out of ``elements`` positions; None if nothing.

    After a None, the columns hold ``count`` ascending positions in ``[0, elements)``. Temporary memory is
    bounded by the columns' own size.
    """
    if not 0 <= shift <= MAX_SHIFT:
        return f"gap shift {shift} is not in 0..{MAX_SHIFT}"
    ends, total_high = sum_high(high)
    if ends != count or (high.size and high[-1] == 255):
        return f"column G does not hold {count} gaps"
    if low.size != (count * shift + 7) // 8:
        return f"column L has {low.size} bytes, {count} gaps with shift {shift} need {(count * shift + 7) // 8}"
    if low.size and count * shift % 8 and int(low[-1]) >> count * shift % 8:
        return "column L ends with bits that belong to no gap"
    # Neither sum can overflow: count <= high.size, and low parts are below 2^32. Together they are a Python integer.
    total = (total_high << shift) + (sum_low(low, shift, count) if shift else 0)
    if total + count > elements:
        return f"gaps lead to position {total + count - 1} of {elements}"
    return None


@kernel("gaps")
def decode_gaps(high: Bytes, low: Bytes, shift: int, first: int, reached: int, into: Indices) -> tuple[int, int]:
    """Write the positions whose gaps end in ``high``, a part of column G; all of L and the shift belong to it.

    ``first`` gaps end before the part, and it starts at position ``reached`` (-1 for the first part). The columns are
    such that ``gap_fault`` finds nothing wrong with them. ``into`` has room for one position more than ``high`` has
    bytes; what lies beyond the result is undefined.

    Returns:
        How many positions were written, and the one at which the next part starts.
    """
    ends = np.flatnonzero(high != 255)
    steps = high.astype(np.int64) << shift
    steps[ends] += 1
    if shift:
        for lo in range(0, ends.size, _BLOCK):
            some = ends[lo : lo + _BLOCK]
            steps[some] += _unpack_low(low, shift, first + lo, first + lo + some.size)
    positions = np.cumsum(steps) + reached
    into[: ends.size] = positions[ends]
    return ends.size, int(positions[-1]) if positions.size else reached


@kernel("gaps")
def join_gaps(positions: Indices, shift: int) -> tuple[Bytes, Bytes]:
    """Columns G and L of at least one position.

    Raises:
        ValueError: positions are negative, repeat or do not ascend.
    """
    gaps = np.diff(positions, prepend=-1) - 1
    if int(gaps.min()) < 0:
        raise ValueError("positions must ascend without repeats")
    full, rest = np.divmod(gaps >> shift, 255)
    ends = np.cumsum(full + 1) - 1
    high = np.full(int(ends[-1]) + 1, 255, np.uint8)
    high[ends] = rest
    return high, _pack_low(gaps, shift)


@kernel("gaps")
def sum_high(high: Bytes) -> tuple[int, int]:
    """How many gaps column G ends, and the sum of its bytes."""
    return int(np.count_nonzero(high != 255)), int(high.sum(dtype=np.int64))


@kernel("gaps")
def sum_low(low: Bytes, shift: int, count: int) -> int:
    """Sum of the low parts of ``count`` gaps, all of which column L holds; ``shift`` is not 0."""
    return sum(int(_unpack_low(low, shift, lo, min(lo + _BLOCK, count)).sum()) for lo in range(0, count, _BLOCK))


def _pack_low(gaps: Indices, shift: int) -> Bytes:
    if not shift:
        return np.empty(0, np.uint8)
    bit = np.arange(shift, dtype=np.int64)
    return np.concatenate(
        [
            np.packbits((gaps[lo : lo + _BLOCK, None] >> bit & 1).astype(np.uint8), bitorder="little")
            for lo in range(0, gaps.size, _BLOCK)
        ]
    )


def _unpack_low(low: Bytes, shift: int, lo: int, hi: int) -> Indices:
    skipped = lo * shift % 8
    packed = low[lo * shift // 8 : (hi * shift + 7) // 8]
    bits = np.unpackbits(packed, count=skipped + (hi - lo) * shift, bitorder="little")[skipped:].reshape(-1, shift)
    return bits @ (np.int64(1) << np.arange(shift, dtype=np.int64))
