"""Boxes: compress an element map into pairs of strided regions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from dcr_stream.canonical import MAX_DIMS, Indices, Region, Words
from dcr_stream.codec.device import DeviceWords

__all__ = ["BoxPair", "compress", "strided"]

BoxPair = tuple[Region, Region]
"""A canonical region and the place that holds it, with the same sizes."""


def strided(array: Words | DeviceWords, region: Region) -> Words:
    """The elements of a flat array at a region, with the region's sizes: a view, or a copy if they are on a device."""
    if isinstance(array, DeviceWords):
        return array.strided(region)
    spot = array[region.offset : region.last + 1]
    steps = tuple(s * array.itemsize for s in region.strides)
    return np.lib.stride_tricks.as_strided(spot, region.sizes, steps)


def compress(place: Indices, flat: Indices, count: Indices) -> list[BoxPair]:
    """Turn runs into few boxes that say the same.

    Run ``i`` puts canonical elements ``flat[i] …`` at storage elements ``place[i] …``, ``count[i]`` of them, both
    consecutive; runs are ascending in ``place`` and disjoint there. Equally long runs at equal distances become a
    dimension, then equal boxes at equal distances become the next, up to four. Any map is representable: what has no
    such structure ends as boxes of one element. Each storage element is in exactly one box.
    """
    if place.size == 0:
        return []
    if 2 * place.size > int(count.sum()):
        # Most runs are single elements: transposed or broadcast layouts have their inner dimension across runs.
        within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
        items = _Items.single(np.repeat(place, count) + within, np.repeat(flat, count) + within)
    else:
        items = _Items.runs(place, flat, count)
    while items.dims < MAX_DIMS:
        merged = items.merge()
        if merged is None:
            break
        items = merged
    return list(items.pairs())


class _Items:
    """Boxes of equal rank as arrays: offsets (m,), and sizes and strides (m, dims), outermost dimension first."""

    def __init__(self, place: Indices, flat: Indices, sizes: Indices, steps: Indices, flat_steps: Indices) -> None:
        self.place, self.flat, self.sizes, self.steps, self.flat_steps = place, flat, sizes, steps, flat_steps

    @classmethod
    def single(cls, place: Indices, flat: Indices) -> _Items:
        none = np.zeros((place.size, 0), np.int64)
        return cls(place, flat, none, none, none)

    @classmethod
    def runs(cls, place: Indices, flat: Indices, count: Indices) -> _Items:
        step = (count > 1).astype(np.int64)[:, None]
        return cls(place, flat, count[:, None], step, step)

    @property
    def dims(self) -> int:
        return int(self.sizes.shape[1])

    def merge(self) -> _Items | None:
        """Join equal neighbours at equal distances along a new outer dimension; None if there are none."""
        if self.place.size < 2:
            return None
        step, flat_step = np.diff(self.place), np.diff(self.flat)
        joins = flat_step >= 0
        for rows in (self.sizes, self.steps, self.flat_steps):
            joins &= (rows[1:] == rows[:-1]).all(axis=1)
        first, size = _progressions(step, flat_step, joins)
        if first.size == self.place.size:
            return None
        many = size > 1
        at = np.minimum(first, step.size - 1)

        def outer(column: Indices, inner: Indices) -> Indices:
            return np.column_stack([column, inner[first]])

        return _Items(
            self.place[first],
            self.flat[first],
            outer(size, self.sizes),
            outer(np.where(many, step[at], 0), self.steps),
            outer(np.where(many, flat_step[at], 0), self.flat_steps),
        )

    def pairs(self) -> Iterator[BoxPair]:
        rows = zip(
            self.place.tolist(),
            self.flat.tolist(),
            self.sizes.tolist(),
            self.steps.tolist(),
            self.flat_steps.tolist(),
            strict=True,
        )
        for place, flat, sizes, steps, flat_steps in rows:
            kept = [d for d, size in enumerate(sizes) if size > 1]
            if not kept:
                yield Region(flat, (1,), (1,)), Region(place, (1,), (1,))
                continue
            yield from _nested(
                Region(flat, tuple(sizes[d] for d in kept), tuple(flat_steps[d] for d in kept)),
                Region(place, tuple(sizes[d] for d in kept), tuple(steps[d] for d in kept)),
            )


def _progressions(step: Indices, flat_step: Indices, joins: NDArray[np.bool_]) -> tuple[Indices, Indices]:
    """Cut a sequence into arithmetic progressions, greedily from the left: first item and length of each.

    ``step[i]`` and ``flat_step[i]`` lead from item i to item i + 1, where ``joins[i]`` allows them to be joined.
    """
    same = (step[1:] == step[:-1]) & (flat_step[1:] == flat_step[:-1]) & joins[1:] & joins[:-1]
    # Stretches of equal steps: stretch j leads from item start[j] over length[j] steps; neighbours share an item.
    start = np.concatenate([[0], np.flatnonzero(~same) + 1])
    length = np.diff(np.concatenate([start, [step.size]]))
    usable = joins[start]
    # A stretch whose first item was taken by the one before needs at least two steps to form a group itself, so
    # that among stretches of one step every other one forms a group. `reset` restarts that alternation.
    number = np.arange(start.size)
    taken_after = usable & (length >= 2)
    reset = taken_after | ~usable
    last = np.maximum.accumulate(np.where(reset, number, -1))
    before = np.concatenate([[-1], last[:-1]])
    taken_at_reset = np.where(before >= 0, taken_after[np.maximum(before, 0)], False)
    taken = taken_at_reset ^ ((number - before - 1) % 2 == 1)
    forms = usable & (length + 1 - taken >= 2)
    first = (start + taken)[forms]
    size = (length + 1 - taken)[forms]
    grouped = np.zeros(step.size + 2, np.int64)
    np.add.at(grouped, first, 1)
    np.add.at(grouped, first + size, -1)
    alone = np.flatnonzero(np.cumsum(grouped)[: step.size + 1] == 0)
    firsts = np.concatenate([first, alone])
    sizes = np.concatenate([size, np.ones(alone.size, np.int64)])
    order = np.argsort(firsts)
    return firsts[order], sizes[order]


def _nested(region: Region, place: Region) -> Iterator[BoxPair]:
    """Split a box until every canonical index in it has one set of coordinates, broadcasts apart."""
    reach = 0
    for size, stride in sorted(zip(region.sizes, region.strides, strict=True), key=lambda d: d[1]):
        if stride == 0:
            continue
        if stride <= reach:
            break
        reach += (size - 1) * stride
    else:
        yield region, place
        return
    for i in range(region.sizes[0]):
        yield from _nested(
            Region(region.offset + i * region.strides[0], region.sizes[1:], region.strides[1:]),
            Region(place.offset + i * place.strides[0], place.sizes[1:], place.strides[1:]),
        )
