"""Positions as a bitmap: column B.

One bit for each position of the region, LSB first: 1 for an element of the item. Unused bits of the last byte are 0.
Used for items that hold more than a quarter of their region: there a bit per position is smaller than a gap per
element, even before compression, and takes less time to make.
"""

from __future__ import annotations

import numpy as np

from dcr_stream.canonical import Bytes, Indices
from dcr_stream.codec.kernels import kernel

__all__ = ["ROOM", "ascends", "bitmap_fault", "count_bitmap", "decode_bitmap", "encode_bitmap", "suits_bitmap"]


ROOM = 4
"""Positions that may be written beyond those that are set."""


def suits_bitmap(count: int, elements: int) -> bool:
    """Whether ``count`` out of ``elements`` positions are coded as a bitmap rather than as gaps."""
    return 4 * count > elements


@kernel("bitmap")
def ascends(positions: Indices) -> bool:
    """Whether positions are not negative and ascend without repeats."""
    return positions.size == 0 or (int(positions[0]) >= 0 and bool((positions[1:] > positions[:-1]).all()))


@kernel("bitmap")
def encode_bitmap(positions: Indices, elements: int) -> Bytes:
    """Code ascending positions in ``[0, elements)``."""
    present = np.zeros(elements, np.bool_)
    present[positions] = True
    return np.packbits(present, bitorder="little")


@kernel("bitmap")
def count_bitmap(bitmap: Bytes) -> int:
    """How many bits are set."""
    return int(np.count_nonzero(np.unpackbits(bitmap)))


def bitmap_fault(bitmap: Bytes, count: int, elements: int) -> str | None:
    """What is wrong with column B of an item of ``count`` out of ``elements`` positions; None if nothing.

    After a None, the column holds ``count`` positions in ``[0, elements)``.
    """
    if bitmap.size != (elements + 7) // 8:
        return f"column B has {bitmap.size} bytes, {elements} positions need {(elements + 7) // 8}"
    if elements % 8 and int(bitmap[-1]) >> elements % 8:
        return "column B ends with bits that belong to no position"
    if count_bitmap(bitmap) != count:
        return f"column B does not hold {count} positions"
    return None


@kernel("bitmap")
def decode_bitmap(bitmap: Bytes, start: int, into: Indices) -> int:
    """Write the positions of the bits that are set, counted from ``start`` on; returns how many.

    ``into`` has room for ``ROOM`` positions more than there are bits; what lies beyond the result is undefined.
    """
    positions = np.flatnonzero(np.unpackbits(bitmap, bitorder="little"))
    into[: positions.size] = positions + start
    return positions.size
