"""Compiled forms of ``dcr_stream.codec.boxes``.

Ascending indices stay in one innermost run of a region for a while, and between two runs lies a hole. Both are kept as
an interval: an index inside it needs a comparison and an addition, and only one that leaves it needs divisions.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dcr_stream.canonical import Indices, Region, Words
from dcr_stream.codec.kernels.lanes import AHEAD, Number, jit, prefetch, readable
from dcr_stream.codec.kernels.sums import mix, sum_lane
from dcr_stream.delta import EntryMode

__all__ = ["add_at", "flat_indices", "sum_box", "write_box"]

_READ, _OVERWRITE, _ADD, _XOR = -1, 0, 1, 2
_MODES: dict[EntryMode, int] = {"overwrite": _OVERWRITE, "add": _ADD, "xor": _XOR}

_END = np.int64(0x7FFF_FFFF_FFFF_FFFF)

Table = NDArray[np.int64]


def flat_indices(region: Region, positions: Indices) -> Indices:
    """See :func:`dcr_stream.codec.boxes.flat_indices`."""
    if region.contiguous:
        return positions + region.offset
    flat = np.empty(positions.shape, np.int64)
    _flat(region.offset, np.array(region.sizes), np.array(region.strides), readable(positions), flat)
    return flat


def add_at(words: Words, at: Indices, differences: Words) -> None:
    """See :func:`dcr_stream.codec.boxes.add_at`."""
    if at.size != differences.size or (at.size and not 0 <= at.min() <= at.max() < words.size):
        raise IndexError(f"{at.size} places and {differences.size} differences do not fit into {words.size} words")
    _add_at(words, readable(at), readable(differences))


def write_box(
    words: Words, region: Region, place: Region, mode: EntryMode, key: int, flat: Indices, values: Words
) -> tuple[int, ...]:
    """See :func:`dcr_stream.codec.boxes.write_box`."""
    if flat.size != values.size:
        raise IndexError(f"{flat.size} elements and {values.size} values")
    return _box(words, region, place, _MODES[mode], key, readable(flat), readable(values))


def sum_box(words: Words, region: Region, place: Region, key: int, flat: Indices) -> tuple[int, ...]:
    """See :func:`dcr_stream.codec.boxes.sum_box`."""
    return _box(words, region, place, _READ, key, readable(flat), readable(np.empty(0, words.dtype)))


def _box(
    words: Words, region: Region, place: Region, mode: int, key: int, flat: Indices, values: Words
) -> tuple[int, ...]:
    table, shifts = _tables(region, place, words.size)
    sums = np.zeros(shifts.size, np.uint64)
    if not _run(words, table, shifts, mode, np.uint64(key), flat, values, sums):
        _walk(words, table, shifts, mode, np.uint64(key), flat, values, sums)
    return tuple(sums.tolist())


@lru_cache(maxsize=4096)
def _tables(region: Region, place: Region, size: int) -> tuple[Table, Table]:
    """A box as numbers: offset, place and last index, then size, stride and step of each dimension; and its copies.

    Copies are told as what they are shifted by. Boxes are few and used for every block, so they are remembered.

    Raises:
        IndexError: the place reaches beyond ``size`` words. Compiled code would not notice.
    """
    if region.sizes != place.sizes or place.offset < 0 or place.last >= size:
        raise IndexError(f"{place} is no place for {region} in {size} words")
    dims = list(zip(region.sizes, region.strides, place.strides, strict=True))
    shifts = np.zeros(1, np.int64)
    for size, stride, step in dims:
        if stride == 0:
            shifts = (shifts[:, None] + np.arange(size, dtype=np.int64) * step).reshape(-1)
    moving = sorted((d for d in dims if d[1] > 0 and d[0] > 1), key=lambda d: -d[1])
    table = np.array([(region.offset, place.offset, region.last), *(moving or [(1, 1, 0)])], np.int64)
    return readable(table), readable(shifts)


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
def _add_at(words: Words, at: Indices, differences: Words) -> None:
    for i in range(at.size):
        prefetch(words, at[min(i + AHEAD, at.size - 1)])
        words[at[i]] += differences[i]


@jit
def _interval(table: Table, index: Number) -> Number:
    """The run or hole around an index: start, end, place of the start, step (-1: hole) and stride."""
    start = table[0, 0]
    place = table[0, 1]
    if index < start:
        return np.int64(0), start, place, np.int64(-1), np.int64(1)
    # End of the cell that the dimensions so far have narrowed the index down to.
    limit = table[0, 2] + 1
    if index >= limit:
        return limit, _END, place, np.int64(-1), np.int64(1)
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


@jit
def _change(words: Words, mode: Number, at: Number, value: Number) -> None:
    if mode == _ADD:
        words[at] += value
    elif mode == _XOR:
        words[at] ^= value
    elif mode == _OVERWRITE:
        words[at] = value


@jit
def _put(words: Words, mode: Number, at: Number, value: Number) -> None:
    if at >= 0:
        _change(words, mode, at, value)


@jit
def _run(
    words: Words,
    table: Table,
    shifts: Table,
    mode: Number,
    key: Number,
    flat: Indices,
    values: Words,
    sums: NDArray[np.uint64],
) -> Number:
    """What ``_walk`` does, for indices that all lie in one run and are stored in one; False if they do not."""
    size = flat.size
    if size == 0:
        return True
    start, end, place, step, stride = _interval(table, flat[0])
    if step != 1 or stride != 1 or flat[size - 1] >= end:
        return False
    bits = np.empty(AHEAD, words.dtype)
    for lo in range(0, size, AHEAD):
        here = flat[lo : lo + AHEAD]
        count = here.size
        for copy in range(shifts.size):
            base = np.uint64(place + shifts[copy] - start)
            if mode != _READ:
                some = values[lo : lo + AHEAD]
                for i in range(count):
                    if copy == 0:
                        prefetch(words, base + np.uint64(flat[min(lo + AHEAD + i, size - 1)]))
                    _change(words, mode, base + np.uint64(here[i]), some[i])
            # The second walk loads what storage holds now, after all writes of the block.
            for i in range(count):
                bits[i] = words[base + np.uint64(here[i])]
            sums[copy] += sum_lane(key, here, bits[:count])
    return True


@jit
def _walk(
    words: Words,
    table: Table,
    shifts: Table,
    mode: Number,
    key: Number,
    flat: Indices,
    values: Words,
    sums: NDArray[np.uint64],
) -> None:
    size = flat.size
    # Two sets of places: while one block is written, the next is looked up and its cache lines are fetched.
    at = np.empty((2, AHEAD), np.int64)
    bits = np.zeros(AHEAD, words.dtype)
    start = end = place = np.int64(0)
    step, stride, inverse = np.int64(-1), np.int64(1), 1.0
    for lo in range(-AHEAD, size, AHEAD):
        one, other = lo // AHEAD & 1, 1 - (lo // AHEAD & 1)
        for i in range(min(AHEAD, size - lo)):
            following = lo + AHEAD + i
            if following < size:
                index = flat[following]
                if index < start or index >= end:
                    start, end, place, step, stride = _interval(table, index)
                    inverse = 1.0 / stride
                found = _at(index - start, place, step, stride, inverse)
                at[other, i] = found + shifts[0] if found >= 0 else found
                prefetch(words, at[other, i])
            if lo >= 0 and mode != _READ:
                _put(words, mode, at[one, i], values[lo + i])
        if lo < 0:
            continue
        count = min(AHEAD, size - lo)
        for copy in range(shifts.size):
            shift = shifts[copy] - shifts[0]
            if copy and mode != _READ:
                for i in range(count):
                    _put(words, mode, at[one, i] + shift if at[one, i] >= 0 else at[one, i], values[lo + i])
            # The second walk loads what storage holds now, after all writes of the block.
            for i in range(count):
                if at[one, i] >= 0:
                    bits[i] = words[at[one, i] + shift]
            total = np.uint64(0)
            for i in range(count):
                total += mix(0, key, flat[lo + i], bits[i]) * np.uint64(at[one, i] >= 0)
            sums[copy] += total
