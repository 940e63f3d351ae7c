"""Compiled forms of ``dcr_stream.codec.boxes``.

Ascending indices stay in one innermost run of a region for a while, and between two runs lies a hole. Both are kept as
an interval: an index inside it needs a comparison and an addition, and only one that leaves it needs divisions.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dcr_stream.canonical import Indices, Region, Words
from dcr_stream.codec.kernels.lanes import AHEAD, Number, jit, prefetch, readable
from dcr_stream.codec.kernels.sums import mix
from dcr_stream.delta import EntryMode

__all__ = ["flat_indices", "sum_box", "write_box"]

_ADD, _XOR = 1, 2
_MODES: dict[EntryMode, int] = {"overwrite": 0, "add": _ADD, "xor": _XOR}

Table = NDArray[np.int64]


def flat_indices(region: Region, positions: Indices) -> Indices:
    """See :func:`dcr_stream.codec.boxes.flat_indices`."""
    if region.contiguous:
        return positions + region.offset
    flat = np.empty(positions.shape, np.int64)
    _flat(region.offset, np.array(region.sizes), np.array(region.strides), readable(positions), flat)
    return flat


def write_box(words: Words, region: Region, place: Region, mode: EntryMode, flat: Indices, values: Words) -> None:
    """See :func:`dcr_stream.codec.boxes.write_box`."""
    flat, chosen = _within(region, flat)
    if flat.size:
        table, shifts = _tables(region, place)
        _write(words, table, shifts, _MODES[mode], flat, readable(values[chosen]))


def sum_box(words: Words, region: Region, place: Region, key: int, flat: Indices) -> tuple[int, ...]:
    """See :func:`dcr_stream.codec.boxes.sum_box`."""
    flat, _ = _within(region, flat)
    table, shifts = _tables(region, place)
    sums = np.zeros(shifts.size, np.uint64)
    _sum(words, table, shifts, np.uint64(key), flat, sums)
    return tuple(sums.tolist())


def _within(region: Region, flat: Indices) -> tuple[Indices, slice]:
    chosen = slice(*np.searchsorted(flat, [region.offset, region.last + 1]).tolist())
    return readable(flat[chosen]), chosen


def _tables(region: Region, place: Region) -> tuple[Table, Table]:
    """A box as numbers: offset and place, then (size, stride, step) per dimension; and the shifts of its copies."""
    dims = list(zip(region.sizes, region.strides, place.strides, strict=True))
    shifts = np.zeros(1, np.int64)
    for size, stride, step in dims:
        if stride == 0:
            shifts = (shifts[:, None] + np.arange(size, dtype=np.int64) * step).reshape(-1)
    moving = sorted((d for d in dims if d[1] > 0 and d[0] > 1), key=lambda d: -d[1])
    return np.array([(region.offset, place.offset, 0), *(moving or [(1, 1, 0)])], np.int64), shifts


@jit
def _flat(offset: Number, sizes: Table, strides: Table, positions: Indices, flat: Indices) -> None:
    last = sizes.size - 1
    inner, stride = sizes[last], strides[last]
    start, base = np.int64(-1), np.int64(0)
    for i in range(positions.size):
        position = positions[i]
        # Before the first run, `start` is too small for any position to be inside.
        if start < 0 or position < start or position >= start + inner:
            rest = position // inner
            start = rest * inner
            base = offset
            for d in range(last - 1, 0, -1):
                outer = rest // sizes[d]
                base += (rest - outer * sizes[d]) * strides[d]
                rest = outer
            if last:
                base += rest * strides[0]
        flat[i] = base + (position - start) * stride


@jit
def _interval(table: Table, index: Number) -> Number:
    """The run or hole around an index of the box's span: start, end, place of the start, step (-1: hole) and stride."""
    start = table[0, 0]
    place = table[0, 1]
    # End of the cell that the dimensions so far have narrowed the index down to.
    limit = np.int64(0x7FFF_FFFF_FFFF_FFFF)
    last = table.shape[0] - 1
    for d in range(1, last):
        size, stride = table[d, 0], table[d, 1]
        coordinate = (index - start) // stride
        if coordinate >= size:
            return start + size * stride, limit, place, np.int64(-1), np.int64(1)
        start += coordinate * stride
        place += coordinate * table[d, 2]
        limit = min(limit, start + stride)
    size, stride = table[last, 0], table[last, 1]
    if index >= start + size * stride:
        return start + size * stride, limit, place, np.int64(-1), np.int64(1)
    return start, min(limit, start + size * stride), place, table[last, 2], stride


@jit
def _write(words: Words, table: Table, shifts: Table, mode: Number, flat: Indices, values: Words) -> None:
    at = np.empty(AHEAD, np.int64)
    start = end = place = step = np.int64(0)
    stride, inverse = np.int64(1), 1.0
    for lo in range(0, flat.size, AHEAD):
        size = min(AHEAD, flat.size - lo)
        for i in range(size):
            index = flat[lo + i]
            if index < start or index >= end:
                start, end, place, step, stride = _interval(table, index)
                inverse = 1.0 / stride
            at[i] = _at(index - start, place, step, stride, inverse)
            if at[i] >= 0:
                prefetch(words, at[i] + shifts[0])
        for shift in shifts:
            for i in range(size):
                if at[i] >= 0:
                    to = at[i] + shift
                    if mode == _ADD:
                        words[to] += values[lo + i]
                    elif mode == _XOR:
                        words[to] ^= values[lo + i]
                    else:
                        words[to] = values[lo + i]


@jit
def _sum(words: Words, table: Table, shifts: Table, key: Number, flat: Indices, sums: NDArray[np.uint64]) -> None:
    at = np.empty(AHEAD, np.int64)
    start = end = place = step = np.int64(0)
    stride, inverse = np.int64(1), 1.0
    for lo in range(0, flat.size, AHEAD):
        size = min(AHEAD, flat.size - lo)
        for i in range(size):
            index = flat[lo + i]
            if index < start or index >= end:
                start, end, place, step, stride = _interval(table, index)
                inverse = 1.0 / stride
            at[i] = _at(index - start, place, step, stride, inverse)
            if at[i] >= 0:
                prefetch(words, at[i] + shifts[0])
        for copy in range(shifts.size):
            for i in range(size):
                if at[i] >= 0:
                    sums[copy] += mix(0, key, flat[lo + i], words[at[i] + shifts[copy]])


@jit
def _at(distance: Number, place: Number, step: Number, stride: Number, inverse: Number) -> Number:
    """Where the element lives that lies ``distance`` after the start of an interval; -1 if nowhere."""
    if step < 0:
        return np.int64(-1)
    if stride == 1:
        return place + distance * step
    # A reciprocal instead of a division: off by one at most, since distances stay below 2^52.
    coordinate = np.int64(distance * inverse)
    rest = distance - coordinate * stride
    if rest >= stride:
        coordinate += 1
        rest -= stride
    elif rest < 0:
        coordinate -= 1
        rest += stride
    if rest:
        return np.int64(-1)
    return place + coordinate * step
