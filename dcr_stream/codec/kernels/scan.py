"""Compiled forms of ``dcr_stream.codec.scan``."""

from __future__ import annotations

import numpy as np

from dcr_stream.canonical import Bytes, Words
from dcr_stream.codec.kernels.lanes import (
    LANES,
    Number,
    any_differs,
    copy_lanes,
    differing,
    jit,
    leading_zeros,
    population,
    readable,
    require_equal,
    subtract_lanes,
    trailing_zeros,
)

__all__ = ["scan_bits", "scan_gaps", "subtract"]

_NONE = np.uint64(0)
_ONE = np.uint64(1)
_THREE = np.uint64(3)
_ALL = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
_FOUR = np.uint64(4 * LANES)
_QUIET = 4  # masks without a change after which four blocks are compared at a time
_LANES, _LAST = np.uint64(LANES), np.uint64(LANES - 1)
_ESCAPE = np.uint64(255)


def scan_gaps(
    live: Words,
    known: Words,
    begin: int,
    start: int,
    high: Bytes,
    differences: Words,
    old: Words,
    filled: int,
    escapes: int,
    previous: int,
) -> tuple[int, int, int, int]:
    """See :func:`dcr_stream.codec.scan.scan_gaps`."""
    require_equal(live, known)
    reach = start + live.size - previous
    if differences.size != old.size or high.size < differences.size + escapes + reach // 255:
        raise IndexError(f"{high.size} gaps, {differences.size} differences and {old.size} old words are no room")
    filled, escapes, previous, done = _scan_gaps(
        readable(live), readable(known), begin, start, high, differences, old, filled, escapes, previous
    )
    return int(filled), int(escapes), int(previous), int(done)


def scan_bits(live: Words, known: Words, bitmap: Bytes, differences: Words, old: Words, filled: int) -> int:
    """See :func:`dcr_stream.codec.scan.scan_bits`."""
    require_equal(live, known)
    if bitmap.size < (live.size + 7) // 8 or min(differences.size, old.size) < filled + live.size:
        raise IndexError(f"{bitmap.size} bytes and {differences.size} differences are no room for {live.size} elements")
    return int(_scan_bits(readable(live), readable(known), bitmap, differences, old, filled))


def subtract(live: Words, known: Words, differences: Words) -> bool:
    """See :func:`dcr_stream.codec.scan.subtract`."""
    require_equal(live, known, differences)
    return bool(_subtract(readable(live), readable(known), differences))


@jit
def _scan_gaps(
    live: Words,
    known: Words,
    begin: Number,
    start: Number,
    high: Bytes,
    differences: Words,
    old: Words,
    filled: Number,
    escapes: Number,
    previous: Number,
) -> Number:
    n, room = np.uint64(live.size), np.uint64(differences.size)
    t, k, g = np.uint64(begin), np.uint64(filled), np.uint64(filled + escapes)
    quiet = 0
    after = np.uint64(previous + 1 - start)  # where the next gap begins, as an index of this block, modulo 2^64
    # An empty mask has its first bit at 64: the element after a block must exist, so the last block is done singly.
    while t + _LANES < n:
        mask = differing(live, known, t)
        if mask == _NONE:
            quiet += 1
            if quiet > _QUIET:
                while t + _LANES + _FOUR < n and not any_differs(live, known, t + _LANES):
                    t += _FOUR
        else:
            quiet = 0
            if k + _LANES > room:
                return k, g - k, np.int64(after) + start - 1, t
            end, last = k + population(mask), t + _LAST - leading_zeros(mask)
            # Only the first gap reaches out of the block, so it alone can need escapes.
            first = t + trailing_zeros(mask)
            while first - after >= _ESCAPE:
                high[g] = 255
                g += _ONE
                after += _ESCAPE
            g -= k
            while k < end:
                # Steps beyond the last bit write what the next block overwrites.
                for _ in range(4):
                    p = t + trailing_zeros(mask)
                    mask &= mask - _ONE
                    high[g + k] = np.uint8(p - after)
                    after = p + _ONE
                    old[k] = known[p]
                    differences[k] = live[p] - known[p]
                    k += _ONE
            k, after = end, last + _ONE
            g += k
        t += _LANES
    while t < n:
        if k == room:
            return k, g - k, np.int64(after) + start - 1, t
        if live[t] != known[t]:
            while t - after >= _ESCAPE:
                high[g] = 255
                g += _ONE
                after += _ESCAPE
            high[g] = np.uint8(t - after)
            after = t + _ONE
            old[k] = known[t]
            differences[k] = live[t] - known[t]
            k += _ONE
            g += _ONE
        t += _ONE
    return k, g - k, np.int64(after) + start - 1, n


@jit
def _scan_bits(live: Words, known: Words, bitmap: Bytes, differences: Words, old: Words, filled: Number) -> Number:
    n = np.uint64(live.size)
    t, k = np.uint64(0), np.uint64(filled)
    while t + _LANES < n:
        mask = differing(live, known, t)
        for i in range(8):
            bitmap[(t >> _THREE) + np.uint64(i)] = np.uint8(mask >> np.uint64(8 * i))
        if mask == _ALL:
            copy_lanes(old, k, known, t)
            subtract_lanes(differences, k, live, known, t)
            k += _LANES
        else:
            end = k + population(mask)
            while k < end:
                # Steps beyond the last bit write what the next block overwrites.
                for _ in range(4):
                    p = t + trailing_zeros(mask)
                    mask &= mask - _ONE
                    old[k] = known[p]
                    differences[k] = live[p] - known[p]
                    k += _ONE
            k = end
        t += _LANES
    while t < n:
        byte = _NONE
        for i in range(8):
            p = t + np.uint64(i)
            if p < n and live[p] != known[p]:
                byte |= _ONE << np.uint64(i)
                old[k] = known[p]
                differences[k] = live[p] - known[p]
                k += _ONE
        bitmap[t >> _THREE] = np.uint8(byte)
        t += np.uint64(8)
    return k


@jit
def _subtract(live: Words, known: Words, differences: Words) -> Number:
    equal = np.int64(0)
    for i in range(live.size):
        difference = live.dtype.type(live[i] - known[i])
        equal += difference == 0
        differences[i] = difference
    return equal == 0
