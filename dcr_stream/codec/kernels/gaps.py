"""Compiled forms of ``dcr_stream.codec.gaps``."""

from __future__ import annotations

import numpy as np

from dcr_stream.canonical import Bytes, Indices
from dcr_stream.codec.kernels.lanes import LANES, Number, at_least, count_up, jit, readable

__all__ = ["decode_gaps", "join_gaps", "sum_high", "sum_low"]

_LANES, _EIGHT, _ONE = np.uint64(LANES), np.uint64(8), np.uint64(1)
_ESCAPE = np.uint8(255)


def join_gaps(positions: Indices, shift: int) -> tuple[Bytes, Bytes]:
    """See :func:`dcr_stream.codec.gaps.join_gaps`."""
    count = positions.size
    # Every 255 stands for 255 shifted gaps' worth of distance, of which there are no more than this.
    escapes = max(int(positions[-1]) + 1 - count >> shift, 0) // 255
    high = np.empty(count + escapes, np.uint8)
    low = np.zeros((count * shift + 7) // 8, np.uint8)
    size = int(_join(readable(positions), shift, high, low))
    if size < 0:
        raise ValueError("positions must ascend without repeats")
    return high[:size], low


def sum_high(high: Bytes) -> tuple[int, int]:
    """See :func:`dcr_stream.codec.gaps.sum_high`."""
    ends, total = _sum_high(readable(high))
    return int(ends), int(total)


def sum_low(low: Bytes, shift: int, count: int) -> int:
    """See :func:`dcr_stream.codec.gaps.sum_low`."""
    return int(_sum_low(_padded(low, (count * shift + 7) >> 3), shift, count))


def decode_gaps(high: Bytes, low: Bytes, shift: int, first: int, reached: int, into: Indices) -> tuple[int, int]:
    """See :func:`dcr_stream.codec.gaps.decode_gaps`."""
    # Each byte writes the position it has reached; those that end no gap are overwritten, the last one by nobody.
    if into.size <= high.size:
        raise IndexError(f"{into.size} indices are no room for {high.size} gaps")
    if shift:
        bit = first * shift
        part = _padded(low[bit >> 3 :], ((bit & 7) + high.size * shift + 7) >> 3)
        count, reached = _decode_shifted(readable(high), part, bit & 7, shift, reached, into)
    else:
        count, reached = _decode(readable(high), reached, into)
    return int(count), int(reached)


def _padded(low: Bytes, size: int) -> Bytes:
    """The first ``size`` bytes, 0 where there are fewer, and 8 more, so that any low part can be read as one word."""
    padded = np.zeros(size + 8, np.uint8)
    held = low[:size]
    padded[: held.size] = held
    return readable(padded)


@jit
def _join(positions: Indices, shift: Number, high: Bytes, low: Bytes) -> Number:
    size = 0
    previous = np.int64(-1)
    held = np.uint64(0)
    bits = 0
    filled = 0
    mask = (np.int64(1) << shift) - 1
    for i in range(positions.size):
        position = positions[i]
        gap = position - previous - 1
        if gap < 0:
            return -1
        previous = position
        if shift:
            held |= np.uint64(gap & mask) << np.uint64(bits)
            bits += shift
            while bits >= 8:
                low[filled] = np.uint8(held & np.uint64(255))
                filled += 1
                held >>= np.uint64(8)
                bits -= 8
        rest = gap >> shift
        # The room was computed from the last position: positions that do not ascend could ask for more.
        if size + rest // 255 >= high.size:
            return -1
        while rest >= 255:
            high[size] = 255
            size += 1
            rest -= 255
        high[size] = rest
        size += 1
    if bits:
        low[filled] = np.uint8(held & np.uint64(255))
    return size


@jit
def _sum_high(high: Bytes) -> Number:
    ends = np.int64(0)
    total = np.int64(0)
    for i in range(high.size):
        ends += high[i] != 255
        total += high[i]
    return ends, total


@jit
def _low(low: Bytes, bit: Number, mask: Number) -> Number:
    at = bit >> 3
    word = np.uint64(0)
    for i in range(8):
        word |= np.uint64(low[at + i]) << np.uint64(8 * i)
    return np.int64(word >> np.uint64(bit & 7)) & mask


@jit
def _sum_low(low: Bytes, shift: Number, count: Number) -> Number:
    total = np.int64(0)
    mask = (np.int64(1) << shift) - 1
    for i in range(count):
        total += _low(low, i * shift, mask)
    return total


@jit
def _decode(high: Bytes, reached: Number, positions: Indices) -> Number:
    position = np.int64(reached)
    i, k, size = np.uint64(0), np.uint64(0), np.uint64(high.size)
    while i < size:
        if i + _LANES <= size and at_least(high, i, _ESCAPE) == 0:
            for _ in range(LANES // 8):
                position = count_up(high, i, position, positions, k)
                i += _EIGHT
                k += _EIGHT
        else:
            end = min(i + _LANES, size)
            while i < end:
                byte = np.int64(high[i])
                ends = np.int64(byte != 255)
                position += byte + ends
                positions[k] = position
                k += np.uint64(ends)
                i += _ONE
    return k, position


@jit
def _decode_shifted(
    high: Bytes, low: Bytes, skipped: Number, shift: Number, reached: Number, positions: Indices
) -> Number:
    k: Number = 0
    position = np.int64(reached)
    mask = (np.int64(1) << shift) - 1
    for i in range(high.size):
        byte = np.int64(high[i])
        position += byte << shift
        if byte != 255:
            position += 1 + _low(low, skipped + k * shift, mask)
            positions[k] = position
            k += 1
    return k, position
