"""State digests: commutative 64-bit sums over (tensor, flat index, stored bits).

Definition (all arithmetic modulo 2^64, ``^`` is XOR, ``>>`` a logical shift)::

    finalise(x):  x = (x ^ x >> 30) · 0xBF58476D1CE4E5B9
                  x = (x ^ x >> 27) · 0x94D049BB133111EB
                  return x ^ x >> 31                                      # SplitMix64 (Steele, Lea, Flood 2014)
    key(tensor)         = finalise((tensor + 1) · 0x9E3779B97F4A7C15)
    lane_0(key, i, b)   = finalise((key + (i + 1) · 0x9E3779B97F4A7C15) ^ b · 0xD6E8FEB86659FD93)
    lane_1(key, i, b)   = finalise((key + (i + 1) · 0xD1342543DE82EF95) ^ b · 0xA0761D6478BD642F)
    mix(tensor, i, b)   = lane_0(key(tensor), i, b)

``b`` is the element's word, zero-extended; ``i`` its row-major flat index. ``state_sum`` adds ``mix`` over elements,
``state_sums`` adds both lanes. Sums do not depend on order, so they can be split over ranks, items and blocks, and
follow changes: subtract an element's old value and add its new one. Every pair of an index and bits has its own
value, so bits at the wrong index, or two values swapped, change the sum (up to a chance of 2^-64).

Test vectors, ``mix(tensor, flat, bits)``::

    mix(0, 0, 0)                            = 0xA706DD2F4D197E6F
    mix(0, 1, 0x8000)                       = 0xE8B27A1DCCA1A54B
    mix(3, 1234567890123, 0x7FC00001)       = 0xA5EFF7D66376090F
    mix(65535, 2, 0xFFFFFFFFFFFFFFFF)       = 0xC9A7434AE5945585

Sums find faults, not attackers; seals are for those.
"""

from __future__ import annotations

from collections.abc import Callable

import blake3
import numpy as np
from numpy.typing import NDArray

from dcr_stream.canonical import Indices, Words
from dcr_stream.codec.kernels import kernel
from dcr_stream.messages import Sum

__all__ = [
    "BLOCK",
    "add_sums",
    "before_after",
    "change_sum",
    "lane",
    "lanes",
    "mix",
    "state_change",
    "state_sum",
    "state_sums",
    "sub_sums",
    "tensor_key",
]

BLOCK = 1 << 16
"""Elements mixed at a time: temporary memory stays below 2 MiB however large the arrays are."""

_MASK = 0xFFFF_FFFF_FFFF_FFFF
_GOLDEN = 0x9E37_79B9_7F4A_7C15
_LANES = ((_GOLDEN, 0xD6E8_FEB8_6659_FD93), (0xD134_2543_DE82_EF95, 0xA076_1D64_78BD_642F))


def _finalise(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58_476D_1CE4_E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D0_49BB_1331_11EB)
    x ^= x >> np.uint64(31)
    return x


def tensor_key(tensor: int) -> int:
    """``key(tensor)`` as defined above."""
    return int(_finalise(np.array([(tensor + 1) * _GOLDEN & _MASK], np.uint64))[0])


def _lane(lane: int, key: int, flat: Indices, bits: Words) -> NDArray[np.uint64]:
    index_factor, bits_factor = _LANES[lane]
    x = flat.astype(np.uint64)
    x += np.uint64(1)
    x *= np.uint64(index_factor)
    x += np.uint64(key)
    x ^= bits.astype(np.uint64) * np.uint64(bits_factor)
    return _finalise(x)


def _sum(which: int, key: int, flat: Indices, bits: Words) -> int:
    total = 0
    for lo in range(0, flat.size, BLOCK):
        mixed = _lane(which, key, flat[lo : lo + BLOCK], bits[lo : lo + BLOCK])
        total += int(mixed.sum(dtype=np.uint64))
    return total & _MASK


@kernel("sums")
def lane(key: int, flat: Indices, bits: Words) -> int:
    """Sum of the first lane over the elements ``flat``."""
    return _sum(0, key, flat, bits)


@kernel("sums")
def lanes(key: int, flat: Indices, bits: Words) -> Sum:
    """Sums of both lanes over the elements ``flat``."""
    return _sum(0, key, flat, bits), _sum(1, key, flat, bits)


@kernel("sums")
def before_after(key: int, flat: Indices, old: Words, differences: Words) -> tuple[Sum, Sum]:
    """Sums of both lanes over ``old``, and over ``old + differences``, at the elements ``flat``."""
    new = np.add(old, differences, dtype=old.dtype)
    return lanes.reference(key, flat, old), lanes.reference(key, flat, new)


def mix(tensor: int, flat: Indices, bits: Words) -> NDArray[np.uint64]:
    """Mix each element's tensor index, flat index and bits into 64 bits, as defined above.

    Args:
        tensor: index in the tensor directory.
        flat: row-major flat indices, int64, not negative.
        bits: the elements' words, same length.
    """
    return _lane(0, tensor_key(tensor), flat, bits)


def state_sum(tensor: int, flat: Indices, bits: Words) -> int:
    """Sum of ``mix`` over the elements ``flat`` modulo 2^64; 0 for none.

    Temporary memory is bounded by ``BLOCK``.
    """
    return lane(tensor_key(tensor), flat, bits)


def state_sums(tensor: int, flat: Indices, bits: Words) -> Sum:
    """Two independent sums modulo 2^64; the first equals ``state_sum``. Temporary memory is bounded by ``BLOCK``."""
    return lanes(tensor_key(tensor), flat, bits)


def state_change(tensor: int, flat: Indices, old: Words, differences: Words) -> tuple[Sum, Sum]:
    """``state_sums`` of elements ``flat`` before and after ``old`` changes by ``differences`` (modulo 2^w)."""
    return before_after(tensor_key(tensor), flat, old, differences)


def change_sum(task_key: str, flat: Indices, differences: Words) -> int:
    """Sum modulo 2^64 over a task's changed elements: what the tally compares between capture and pending set.

    ``flat`` are indices in the task's shard. As ``state_sum``, with the first 8 bytes (little-endian) of the
    BLAKE3 digest of ``task_key`` in UTF-8 as the key.
    """
    key = int.from_bytes(blake3.blake3(task_key.encode()).digest(length=8), "little")
    return lane(key, flat, differences)


def _lanewise(operation: Callable[[int, int], int], a: Sum, b: Sum) -> Sum:
    return operation(a[0], b[0]) & _MASK, operation(a[1], b[1]) & _MASK


def add_sums(a: Sum, b: Sum) -> Sum:
    """``a + b``, lane by lane, modulo 2^64."""
    return _lanewise(int.__add__, a, b)


def sub_sums(a: Sum, b: Sum) -> Sum:
    """``a - b``, lane by lane, modulo 2^64."""
    return _lanewise(int.__sub__, a, b)
