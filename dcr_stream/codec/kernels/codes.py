"""Compiled forms of ``dcr_stream.codec.codes``."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dcr_stream.canonical import Bytes, Words
from dcr_stream.codec.kernels.lanes import LANES, Number, at_least, jit, masks, population, readable, trailing_zeros

__all__ = ["count_codes", "decode_codes", "encode_codes"]

_TILE = 4096  # codes made at a time, in the first-level cache; a multiple of what a byte and what a mask hold
_SPARE = 4  # bytes of E1 that may be touched beyond its end
_LAST = np.uint64(LANES - 1)
_NONE, _ONE = np.uint64(0), np.uint64(1)
_PAIRS, _FOURS = np.uint64(0x5555_5555_5555_5555), np.uint64(0x1111_1111_1111_1111)


def encode_codes(differences: Words) -> tuple[int, Bytes, Bytes, Bytes]:
    """See :func:`dcr_stream.codec.codes.encode_codes`."""
    differences = readable(differences)
    count = differences.size
    zeros, ones, above2, above4, escapes2, escapes4 = (int(each) for each in _survey(differences))
    if zeros:
        raise ValueError("a difference of 0 has no code")
    width = 2 if 5 * ones >= 3 * count else 4
    above, escapes = (above2, escapes2) if width == 2 else (above4, escapes4)
    codes = np.empty((count * width + 7) // 8, np.uint8)
    excess = np.empty(above + _SPARE, np.uint8)
    escaped = np.empty(escapes, np.uint16)
    _encode(differences, width, codes, excess, escaped)
    return width, codes, excess[:above], escaped.view(np.uint8)


def count_codes(codes: Bytes, excess: Bytes, width: int, count: int) -> tuple[int, int]:
    """See :func:`dcr_stream.codec.codes.count_codes`."""
    saturated, escapes = _count(masks(codes), readable(excess), width)
    return int(saturated), int(escapes)


def decode_codes(codes: Bytes, excess: Bytes, escaped: Bytes, width: int, count: int) -> Words:
    """See :func:`dcr_stream.codec.codes.decode_codes`."""
    differences = np.empty(count, np.uint16)
    padded = readable(np.concatenate([excess, np.zeros(_SPARE, np.uint8)]))
    _decode(readable(codes), padded, readable(escaped), width, differences)
    return differences


@jit
def _zigzag(difference: Number) -> Number:
    signed = np.int16(difference)
    return np.uint16(np.uint16((signed << 1) ^ (signed >> 15)) - np.uint16(1))


@jit
def _survey(differences: Words) -> Number:
    totals = np.zeros(6, np.int64)
    for start in range(0, differences.size, _TILE):
        some = differences[start : start + _TILE]
        # Counters as wide as the elements are what keeps every lane of a vector busy.
        zeros = ones = above2 = above4 = escapes2 = escapes4 = np.uint16(0)
        for i in range(some.size):
            z = _zigzag(some[i])
            zeros = np.uint16(zeros + np.uint16(z == 0xFFFF))
            ones = np.uint16(ones + np.uint16(z <= 1))
            above2 = np.uint16(above2 + np.uint16(z >= 3))
            above4 = np.uint16(above4 + np.uint16(z >= 15))
            escapes2 = np.uint16(escapes2 + np.uint16(z >= 3 + 255))
            escapes4 = np.uint16(escapes4 + np.uint16(z >= 15 + 255))
        for i, found in enumerate((zeros, ones, above2, above4, escapes2, escapes4)):
            totals[i] += found
    return totals


# Loops run over slices from 0 on: only then can LLVM rule out negative indices, which numba lets wrap around, and
# vectorise. Codes that share a byte lie in one word of a tile (little-endian), each 8 bits from the next.


@jit
def _encode(differences: Words, width: Number, codes: Bytes, excess: Bytes, escaped: Words) -> None:
    top = np.uint16((1 << width) - 1)
    log = 2 if width == 2 else 1
    z = np.empty(_TILE, np.uint16)
    tile = np.empty(_TILE, np.uint8)
    fours, pairs = tile.view(np.uint32), tile.view(np.uint16)
    saturated = escapes = _NONE
    for start in range(0, differences.size, _TILE):
        some = differences[start : start + _TILE]
        packed = codes[start >> log : (start + _TILE) >> log]
        for i in range(some.size):
            z[i] = _zigzag(some[i])
        for i in range(some.size):
            tile[i] = np.uint8(min(z[i], top))
        for i in range(some.size, _TILE):
            tile[i] = 0
        if width == 2:
            for i in range(packed.size):
                word = fours[i]
                packed[i] = np.uint8((word | word >> 6 | word >> 12 | word >> 18) & 255)
        else:
            for i in range(packed.size):
                both = pairs[i]
                packed[i] = np.uint8((both | both >> 4) & 255)
        for i in range(some.size, _TILE):
            z[i] = 0
        for lane in range(0, some.size, LANES):
            mask = at_least(z, np.uint64(lane), top)
            end = saturated + population(mask)
            while saturated < end:
                # Steps beyond the last bit write what comes later, or what nobody reads.
                for _ in range(4):
                    p = np.uint64(lane) + (trailing_zeros(mask) & _LAST)
                    mask &= mask - _ONE
                    excess[saturated] = np.uint8(min(np.uint16(z[p] - top), np.uint16(255)))
                    saturated += _ONE
            saturated = end
            if escaped.size:
                mask = at_least(z, np.uint64(lane), np.uint16(top + 255))
                while mask != _NONE:
                    escaped[escapes] = z[np.uint64(lane) + trailing_zeros(mask)]
                    mask &= mask - _ONE
                    escapes += _ONE


@jit
def _count(words: NDArray[np.uint64], excess: Bytes, width: Number) -> Number:
    saturated = escapes = np.int64(0)
    # A code's lowest bit remains where all of its bits are set; bits that belong to no code are 0.
    for word in words:
        if width == 2:
            full = word & word >> _ONE & _PAIRS
        else:
            pairs = word & word >> _ONE
            full = pairs & pairs >> np.uint64(2) & _FOURS
        saturated += np.int64(population(full))
    for i in range(excess.size):
        escapes += excess[i] == 255
    return saturated, escapes


@jit
def _decode(codes: Bytes, excess: Bytes, escaped: Bytes, width: Number, differences: Words) -> None:
    top = np.uint16((1 << width) - 1)
    log = 2 if width == 2 else 1
    z = np.empty(_TILE, np.uint16)
    tile = np.empty(_TILE, np.uint8)
    fours, pairs = tile.view(np.uint32), tile.view(np.uint16)
    saturated = escapes = _NONE
    for start in range(0, differences.size, _TILE):
        some = differences[start : start + _TILE]
        packed = codes[start >> log : (start + _TILE) >> log]
        if width == 2:
            for i in range(packed.size):
                word = np.uint32(packed[i])
                fours[i] = (word | word << 6 | word << 12 | word << 18) & 0x03030303
        else:
            for i in range(packed.size):
                both = np.uint16(packed[i])
                pairs[i] = (both | both << 4) & 0x0F0F
        for i in range(some.size):
            z[i] = tile[i]
        for i in range(some.size, _TILE):
            z[i] = 0
        for lane in range(0, some.size, LANES):
            mask = at_least(z, np.uint64(lane), top)
            while mask != _NONE:
                p = np.uint64(lane) + trailing_zeros(mask)
                mask &= mask - _ONE
                z[p] = top + np.uint16(excess[saturated])
                saturated += _ONE
            if escaped.size:
                mask = at_least(z, np.uint64(lane), np.uint16(top + 255))
                while mask != _NONE:
                    p = np.uint64(lane) + trailing_zeros(mask)
                    mask &= mask - _ONE
                    z[p] = np.uint16(escaped[escapes]) | np.uint16(escaped[escapes + _ONE]) << 8
                    escapes += np.uint64(2)
        for i in range(some.size):
            v = np.uint16(z[i] + np.uint16(1))
            some[i] = (v >> np.uint16(1)) ^ np.uint16(-(v & np.uint16(1)))
