"""Compiled forms of the sums of ``dcr_stream.codec.digest``."""

from __future__ import annotations

import numpy as np

from dcr_stream.canonical import Indices, Words
from dcr_stream.codec.kernels.lanes import Number, jit, readable, require_equal
from dcr_stream.messages import Sum

__all__ = ["before_after", "lane", "lanes", "mix", "sum_lane"]

_INDEX = (np.uint64(0x9E37_79B9_7F4A_7C15), np.uint64(0xD134_2543_DE82_EF95))
_BITS = (np.uint64(0xD6E8_FEB8_6659_FD93), np.uint64(0xA076_1D64_78BD_642F))


def lane(key: int, flat: Indices, bits: Words) -> int:
    """See :func:`dcr_stream.codec.digest.lane`."""
    require_equal(flat, bits)
    return int(sum_lane(np.uint64(key), readable(flat), readable(bits)))


def lanes(key: int, flat: Indices, bits: Words) -> Sum:
    """See :func:`dcr_stream.codec.digest.lanes`."""
    require_equal(flat, bits)
    first, second = _lanes(np.uint64(key), readable(flat), readable(bits))
    return int(first), int(second)


def before_after(key: int, flat: Indices, old: Words, differences: Words) -> tuple[Sum, Sum]:
    """See :func:`dcr_stream.codec.digest.before_after`."""
    require_equal(flat, old, differences)
    sums = _before_after(np.uint64(key), readable(flat), readable(old), readable(differences))
    before, other_before, after, other_after = (int(each) for each in sums)
    return (before, other_before), (after, other_after)


@jit
def mix(which: Number, key: Number, flat: Number, bits: Number) -> Number:
    """One lane of one element."""
    x = (key + np.uint64(flat + 1) * _INDEX[which]) ^ (np.uint64(bits) * _BITS[which])
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58_476D_1CE4_E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D0_49BB_1331_11EB)
    return x ^ x >> np.uint64(31)


@jit
def sum_lane(key: Number, flat: Indices, bits: Words) -> Number:
    """Sum of the first lane, as compiled kernels call it."""
    total = np.uint64(0)
    for i in range(flat.size):
        total += mix(0, key, flat[i], bits[i])
    return total


@jit
def _lanes(key: Number, flat: Indices, bits: Words) -> Number:
    first = second = np.uint64(0)
    for i in range(flat.size):
        first += mix(0, key, flat[i], bits[i])
        second += mix(1, key, flat[i], bits[i])
    return first, second


@jit
def _before_after(key: Number, flat: Indices, old: Words, differences: Words) -> Number:
    before = other_before = after = other_after = np.uint64(0)
    for i in range(flat.size):
        new = old.dtype.type(old[i] + differences[i])
        before += mix(0, key, flat[i], old[i])
        other_before += mix(1, key, flat[i], old[i])
        after += mix(0, key, flat[i], new)
        other_after += mix(1, key, flat[i], new)
    return before, other_before, after, other_after
