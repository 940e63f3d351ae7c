"""Compiled forms of ``dcr_stream.codec.codes``."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dcr_stream.canonical import Words
from dcr_stream.codec.kernels.lanes import Number, jit, readable

__all__ = ["count_codes", "decode_codes", "encode_codes"]

Bytes = NDArray[np.uint8]

_TILE = 4096  # codes made at a time, in the first-level cache; a multiple of what a byte holds


def encode_codes(differences: Words) -> tuple[int, Bytes, Bytes, Bytes]:
    """See :func:`dcr_stream.codec.codes.encode_codes`."""
    differences = readable(differences)
    count = differences.size
    ones, above2, above4, escapes2, escapes4 = _survey(differences)
    width = 2 if 5 * ones >= 3 * count else 4
    codes = np.empty((count * width + 7) // 8, np.uint8)
    # One more than needed: a code that is not saturated leaves its excess to be overwritten.
    excess = np.empty((above2 if width == 2 else above4) + 1, np.uint8)
    escaped = np.empty(2 * (escapes2 if width == 2 else escapes4), np.uint8)
    _encode(differences, width, codes, excess, escaped)
    return width, codes, excess[:-1], escaped


def count_codes(codes: Bytes, excess: Bytes, width: int, count: int) -> tuple[int, int]:
    """See :func:`dcr_stream.codec.codes.count_codes`."""
    saturated, escapes = _count(readable(codes), readable(excess), width, count)
    return int(saturated), int(escapes)


def decode_codes(codes: Bytes, excess: Bytes, escaped: Bytes, width: int, count: int) -> Words:
    """See :func:`dcr_stream.codec.codes.decode_codes`."""
    differences = np.empty(count, np.uint16)
    padded = readable(np.concatenate([excess, np.zeros(1, np.uint8)]))
    _decode(readable(codes), padded, readable(escaped), width, differences)
    return differences


@jit
def _zigzag(difference: Number) -> Number:
    signed = np.int16(difference)
    return np.uint16(np.uint16((signed << 1) ^ (signed >> 15)) - np.uint16(1))


@jit
def _survey(differences: Words) -> Number:
    ones = above2 = above4 = escapes2 = escapes4 = np.int64(0)
    for i in range(differences.size):
        z = np.uint16(_zigzag(differences[i]))
        ones += z <= 1
        above2 += z >= 3
        above4 += z >= 15
        escapes2 += z >= 3 + 255
        escapes4 += z >= 15 + 255
    return ones, above2, above4, escapes2, escapes4


# Loops run over slices from 0 on: only then can LLVM rule out negative indices, which numba lets wrap around, and
# vectorise. Codes that share a byte lie in one word of a tile (little-endian), each 8 bits from the next.


@jit
def _encode(differences: Words, width: Number, codes: Bytes, excess: Bytes, escaped: Bytes) -> None:
    top = np.uint16((1 << width) - 1)
    log = 2 if width == 2 else 1
    z = np.empty(_TILE, np.uint16)
    tile = np.empty(_TILE, np.uint8)
    fours, pairs = tile.view(np.uint32), tile.view(np.uint16)
    saturated = escapes = 0
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
        for i in range(some.size):
            excess[saturated] = np.uint8(min(np.uint16(z[i] - top), np.uint16(255)))
            saturated += z[i] >= top
        if escaped.size:
            for i in range(some.size):
                if z[i] >= top + 255:
                    escaped[escapes] = np.uint8(z[i] & 255)
                    escaped[escapes + 1] = np.uint8(z[i] >> 8)
                    escapes += 2


@jit
def _count(codes: Bytes, excess: Bytes, width: Number, count: Number) -> Number:
    saturated = escapes = np.int64(0)
    # Unused bits of the last byte are 0, so they never look saturated.
    if width == 2:
        for i in range(codes.size):
            both = codes[i] & codes[i] >> 1 & 0x55
            saturated += (both & 1) + (both >> 2 & 1) + (both >> 4 & 1) + (both >> 6)
    else:
        for i in range(codes.size):
            saturated += np.int64(codes[i] & 15 == 15) + np.int64(codes[i] >> 4 == 15)
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
    saturated: Number = 0
    escapes = 0
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
            full = np.uint16(tile[i] == top)
            z[i] = tile[i] + full * np.uint16(excess[saturated])
            saturated += full
        if escaped.size:
            for i in range(some.size):
                # No other value looks like this: what is larger was escaped as well.
                if z[i] == top + 255:
                    z[i] = np.uint16(escaped[2 * escapes]) | np.uint16(escaped[2 * escapes + 1]) << 8
                    escapes += 1
        for i in range(some.size):
            v = np.uint16(z[i] + np.uint16(1))
            some[i] = (v >> np.uint16(1)) ^ np.uint16(-(v & np.uint16(1)))
