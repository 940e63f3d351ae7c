"""Which elements of its region an item holds: columns G, L and B.

=========== =====================================================================================
``gaps``    gaps between positions (:mod:`dcr_stream.codec.gaps`)
``bitmap``  a bit per position (:mod:`dcr_stream.codec.bitmap`): more than a quarter of the region
``dense``   nothing at all: every position of the region
=========== =====================================================================================

An encoder chooses by the item's count alone; a decoder accepts any mode that holds what the item declares.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dcr_stream.canonical import Indices
from dcr_stream.codec.bitmap import ascends, bitmap_fault, decode_bitmap, encode_bitmap, suits_bitmap
from dcr_stream.codec.gaps import decode_gaps, encode_gaps, gap_fault
from dcr_stream.delta import PositionMode

__all__ = ["CodedPositions", "decode_positions", "encode_positions", "position_fault"]

Bytes = NDArray[np.uint8]


def _none() -> Bytes:
    return np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class CodedPositions:
    """Position mode, gap shift, and an item's shares of columns G, L and B."""

    mode: PositionMode
    shift: int = 0
    high: Bytes = field(default_factory=_none)
    low: Bytes = field(default_factory=_none)
    bitmap: Bytes = field(default_factory=_none)


def encode_positions(positions: Indices, elements: int) -> CodedPositions:
    """Code the positions that an item holds of a region of ``elements``.

    Raises:
        ValueError: positions are negative, repeat, do not ascend, or lie outside the region.
    """
    count = positions.size
    if count and int(positions[-1]) >= elements:
        raise ValueError(f"position {int(positions[-1])} lies outside a region of {elements}")
    if count and suits_bitmap(count, elements):
        if not ascends(positions):
            raise ValueError("positions must ascend without repeats")
        if count == elements:
            return CodedPositions("dense")
        return CodedPositions("bitmap", bitmap=encode_bitmap(positions, elements))
    if count == elements:
        return CodedPositions("dense")
    shift, high, low = encode_gaps(positions)
    return CodedPositions("gaps", shift, high, low)


def position_fault(coded: CodedPositions, count: int, elements: int) -> str | None:
    """What is wrong with the positions of an item of ``count`` out of ``elements``; None if nothing.

    After a None, ``decode_positions`` returns ``count`` ascending positions in ``[0, elements)``.
    """
    if coded.mode != "gaps" and (coded.shift or coded.high.size or coded.low.size):
        return f"{coded.mode} positions with gaps"
    if coded.mode != "bitmap" and coded.bitmap.size:
        return f"{coded.mode} positions with a bitmap"
    if coded.mode == "gaps":
        return gap_fault(coded.high, coded.low, coded.shift, count, elements)
    if coded.mode == "bitmap":
        return bitmap_fault(coded.bitmap, count, elements)
    return None if count == elements else f"dense positions with {elements - count} missing elements"


def decode_positions(coded: CodedPositions, count: int) -> Indices:
    """The positions in which ``position_fault`` found nothing wrong."""
    if coded.mode == "gaps":
        return decode_gaps(coded.high, coded.low, coded.shift)
    if coded.mode == "bitmap":
        return decode_bitmap(coded.bitmap, count)
    return np.arange(count, dtype=np.int64)
