"""Compiled form of ``dcr_stream.codec.scan``."""

from __future__ import annotations

import numpy as np

from dcr_stream.canonical import Indices, Words
from dcr_stream.codec.kernels.lanes import LANES, Number, differing, jit, population, readable, trailing_zeros

__all__ = ["scan"]

_NONE = np.uint64(0)
_ONE = np.uint64(1)
_ALL = np.uint64(0xFFFF_FFFF_FFFF_FFFF)


def scan(
    live: Words, known: Words, begin: int, start: int, positions: Indices, differences: Words, old: Words, filled: int
) -> tuple[int, int]:
    """See :func:`dcr_stream.codec.scan.scan`."""
    if live.size != known.size or not positions.size == differences.size == old.size:
        raise IndexError("blocks to scan, and arrays for what is found, must be equally long")
    taken, done = _scan(readable(live), readable(known), begin, start, positions, differences, old, filled)
    return int(taken), int(done)


@jit
def _scan(
    live: Words,
    known: Words,
    begin: Number,
    start: Number,
    positions: Indices,
    differences: Words,
    old: Words,
    filled: Number,
) -> Number:
    n = live.size
    k = filled
    t = begin
    # An empty mask has its first bit at 64: the element after a block must exist, so the last block is done singly.
    while t + LANES < n:
        if k + LANES > positions.size:
            return k, t
        mask = differing(live, known, t)
        if mask == _ALL:
            for i in range(LANES):
                positions[k + i] = start + t + i
                old[k + i] = known[t + i]
                differences[k + i] = live[t + i] - known[t + i]
            k += LANES
        elif mask != _NONE:
            end = k + population(mask)
            for _ in range(4):
                p = t + trailing_zeros(mask)
                mask &= mask - _ONE
                positions[k] = start + p
                old[k] = known[p]
                differences[k] = live[p] - known[p]
                k += 1
            while mask != _NONE:
                p = t + trailing_zeros(mask)
                mask &= mask - _ONE
                positions[k] = start + p
                old[k] = known[p]
                differences[k] = live[p] - known[p]
                k += 1
            k = end
        t += LANES
    while t < n:
        if k == positions.size:
            return k, t
        if live[t] != known[t]:
            positions[k] = start + t
            old[k] = known[t]
            differences[k] = live[t] - known[t]
            k += 1
        t += 1
    return k, n
