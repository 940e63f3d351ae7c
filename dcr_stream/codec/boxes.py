"""Elements in strided regions: their flat indices, and where a box of the placement plan holds them.

A box is a canonical ``region`` and an equally large ``place`` in a storage (:class:`dcr_stream.trace.plan.Box`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from dcr_stream.canonical import Indices, Region, Words
from dcr_stream.codec.digest import lane
from dcr_stream.codec.kernels import kernel
from dcr_stream.codec.positions import blocks
from dcr_stream.delta import EntryMode, Positions
from dcr_stream.errors import UsageError

__all__ = ["add_at", "combine", "copies", "find", "flat_indices", "located", "sum_box", "write_box"]


def combine(mode: EntryMode, old: Words, values: Words) -> Words:
    """The new bits: ``old`` changed by an item's decoded ``values``. A new array, or ``values`` for ``overwrite``.

    Raises:
        UsageError: ``old`` and ``values`` differ in width or length.
    """
    if old.dtype != values.dtype or old.shape != values.shape:
        raise UsageError(
            f"{values.size} values of type {values.dtype} cannot change {old.size} words of type {old.dtype}; "
            "gather exactly the item's elements"
        )
    if mode == "add":
        return np.add(old, values)
    return np.bitwise_xor(old, values) if mode == "xor" else values


def copies(region: Region) -> int:
    """How often a box of ``region`` holds each of its canonical elements: a dimension of stride 0 repeats them."""
    repeats = (size for size, stride in zip(region.sizes, region.strides, strict=True) if stride == 0 and size > 1)
    return int(np.prod(list(repeats), dtype=np.int64))


@kernel("boxes")
def flat_indices(region: Region, positions: Indices) -> Indices:
    """Flat indices of row-major ``positions`` inside ``region``."""
    return region.flat(positions)


def located(region: Region, positions: Positions) -> Iterator[tuple[Indices, slice]]:
    """Flat indices of positions of a region, as :func:`dcr_stream.codec.positions.blocks` hands them out."""
    if region.contiguous:
        yield from blocks(positions, region.offset)
        return
    for indices, some in blocks(positions):
        yield flat_indices(region, indices), some


@kernel("boxes")
def add_at(words: Words, at: Indices, differences: Words) -> None:
    """Add differences (modulo 2^w) to the elements ``at``, each of which occurs once and exists."""
    words[at] += differences


@kernel("boxes")
def write_box(
    words: Words, region: Region, place: Region, mode: EntryMode, key: int, flat: Indices, values: Words
) -> tuple[int, ...]:
    """Change those of the ascending canonical indices ``flat`` that a box holds, in all its copies; then sum them.

    ``words`` are the storage; an element becomes ``combine(mode, element, value)``. The sums are those of ``sum_box``,
    over what storage holds afterwards: every element is loaded again after it, and others near it, were written.
    """
    for chosen, at in find(region, place, flat):
        words[at] = combine(mode, words[at], values[chosen])
    return sum_box.reference(words, region, place, key, flat)


@kernel("boxes")
def sum_box(words: Words, region: Region, place: Region, key: int, flat: Indices) -> tuple[int, ...]:
    """First-lane sums, one per copy, of those of the ascending canonical indices ``flat`` that a box holds."""
    found = [lane.reference(key, flat[chosen], words[at]) for chosen, at in find(region, place, flat)]
    return tuple(found) or (0,) * copies(region)


def find(region: Region, place: Region, flat: Indices) -> Iterator[tuple[slice | Indices, Indices]]:
    """Where ascending canonical indices live in a box.

    Yields, once per copy that the box holds, which entries of ``flat`` are in the box (an index into it) and the
    storage element of each.
    """
    lo, hi = (int(i) for i in np.searchsorted(flat, [region.offset, region.last + 1]))
    if lo == hi:
        return
    dims = list(zip(region.sizes, region.strides, place.strides, strict=True))
    rest = flat[lo:hi] - region.offset
    inside: NDArray[np.bool_] | None = None
    at = np.full(rest.size, place.offset, np.int64)
    moving = sorted((d for d in dims if d[1] > 0), key=lambda d: -d[1])
    for i, (size, stride, step) in enumerate(moving):
        if stride == 1:
            coordinate, rest = rest, np.zeros_like(rest)
        else:
            coordinate = rest // stride
            rest = rest - coordinate * stride
        if i:
            ok = coordinate < size
            inside = ok if inside is None else inside & ok
        at += coordinate * step
    if not moving or moving[-1][1] != 1:
        ok = rest == 0
        inside = ok if inside is None else inside & ok
    chosen: slice | Indices = slice(lo, hi)
    if inside is not None and not inside.all():
        hit = np.flatnonzero(inside)
        if hit.size == 0:
            return
        chosen, at = hit + lo, at[hit]
    shifts = np.zeros(1, np.int64)
    for size, stride, step in dims:
        if stride == 0:
            shifts = (shifts[:, None] + np.arange(size, dtype=np.int64) * step).reshape(-1)
    for shift in shifts.tolist():
        yield chosen, at + shift
