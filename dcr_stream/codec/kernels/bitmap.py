"""Compiled forms of ``dcr_stream.codec.bitmap``."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dcr_stream.canonical import Bytes, Indices
from dcr_stream.codec.kernels.lanes import LANES, Number, jit, masks, population, readable, trailing_zeros

__all__ = ["ascends", "count_bitmap", "decode_bitmap", "encode_bitmap"]

_NONE = np.uint64(0)
_ONE = np.uint64(1)
_GROUP = 4  # positions written without asking whether there are as many


def ascends(positions: Indices) -> bool:
    """See :func:`dcr_stream.codec.bitmap.ascends`."""
    return bool(_ascends(readable(positions)))


def encode_bitmap(positions: Indices, elements: int) -> Bytes:
    """See :func:`dcr_stream.codec.bitmap.encode_bitmap`."""
    masks = np.zeros((elements + LANES - 1) // LANES, np.uint64)
    _encode(readable(positions), masks)
    return masks.view(np.uint8)[: (elements + 7) // 8]


def count_bitmap(bitmap: Bytes) -> int:
    """See :func:`dcr_stream.codec.bitmap.count_bitmap`."""
    return int(_count(masks(bitmap)))


def decode_bitmap(bitmap: Bytes, start: int, into: Indices) -> int:
    """See :func:`dcr_stream.codec.bitmap.decode_bitmap`."""
    if into.size < bitmap.size * 8 + _GROUP:
        raise IndexError(f"{into.size} indices are no room for {bitmap.size * 8} bits")
    return int(_decode(masks(bitmap), start, into))


@jit
def _ascends(positions: Indices) -> Number:
    wrong = np.int64(positions.size > 0 and positions[0] < 0)
    later = positions[1:]
    for i in range(later.size):
        wrong += later[i] <= positions[i]
    return wrong == 0


@jit
def _encode(positions: Indices, masks: NDArray[np.uint64]) -> None:
    at = np.int64(0)
    mask = _NONE
    for i in range(positions.size):
        word = positions[i] >> 6
        if word != at:
            masks[at] = mask
            at, mask = word, _NONE
        mask |= _ONE << np.uint64(positions[i] & 63)
    if masks.size:
        masks[at] = mask


@jit
def _count(masks: NDArray[np.uint64]) -> Number:
    total = np.int64(0)
    for mask in masks:
        total += np.int64(population(mask))
    return total


@jit
def _decode(masks: NDArray[np.uint64], start: Number, positions: Indices) -> Number:
    k = _NONE
    for i in range(masks.size):
        mask = masks[i]
        end = k + population(mask)
        while k < end:
            # Steps beyond the last bit write what the next mask overwrites, or what nobody reads.
            for _ in range(_GROUP):
                positions[k] = start + i * LANES + np.int64(trailing_zeros(mask))
                mask &= mask - _ONE
                k += _ONE
        k = end
    return k
