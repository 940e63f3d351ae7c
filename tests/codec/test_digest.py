"""State digests: fixed values, independent of order, sensitive to everything else."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr_stream.codec import add_sums, change_sum, mix, state_sum, state_sums, sub_sums

MASK = (1 << 64) - 1


def finalise(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def defined(tensor: int, flat: int, bits: int, factors: tuple[int, int]) -> int:
    """The definition in the module's docstring, in Python integers."""
    key = finalise((tensor + 1) * 0x9E3779B97F4A7C15 & MASK)
    return finalise((key + (flat + 1) * factors[0] & MASK) ^ (bits * factors[1] & MASK))


@pytest.mark.parametrize(
    ("tensor", "flat", "bits", "expected"),
    [
        (0, 0, 0, 0xA706DD2F4D197E6F),
        (0, 1, 0x8000, 0xE8B27A1DCCA1A54B),
        (3, 1234567890123, 0x7FC00001, 0xA5EFF7D66376090F),
        (65535, 2, MASK, 0xC9A7434AE5945585),
    ],
)
def test_mix_has_the_documented_values(tensor: int, flat: int, bits: int, expected: int) -> None:
    assert int(mix(tensor, np.array([flat]), np.array([bits], np.uint64))[0]) == expected
    assert defined(tensor, flat, bits, (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93)) == expected


@settings(derandomize=True, deadline=None, max_examples=50)
@given(
    tensor=st.integers(0, 2**31),
    elements=st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, MASK)), max_size=20),
)
def test_sums_follow_the_definition(tensor: int, elements: list[tuple[int, int]]) -> None:
    flat = np.array([e[0] for e in elements], np.int64)
    bits = np.array([e[1] for e in elements], np.uint64)
    first = sum(defined(tensor, i, b, (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93)) for i, b in elements) & MASK
    second = sum(defined(tensor, i, b, (0xD1342543DE82EF95, 0xA0761D6478BD642F)) for i, b in elements) & MASK
    assert state_sums(tensor, flat, bits) == (first, second)
    assert state_sum(tensor, flat, bits) == first


def test_width_does_not_matter_only_the_number() -> None:
    flat = np.arange(200)
    sums = {state_sum(5, flat, np.arange(200).astype(f"u{width}")) for width in (1, 2, 4, 8)}
    assert len(sums) == 1


def test_sums_split_over_blocks_and_order_and_follow_changes() -> None:
    rng = np.random.default_rng(0)
    flat = np.arange(200_000)
    old = rng.integers(0, 1 << 16, flat.size).astype(np.uint16)
    whole = state_sums(2, flat, old)
    order = rng.permutation(flat.size)
    assert state_sums(2, flat[order], old[order]) == whole
    assert add_sums(state_sums(2, flat[:777], old[:777]), state_sums(2, flat[777:], old[777:])) == whole
    new = old.copy()
    changed = np.flatnonzero(rng.random(flat.size) < 0.03)
    new[changed] += 1
    step = sub_sums(state_sums(2, changed, new[changed]), state_sums(2, changed, old[changed]))
    assert add_sums(whole, step) == state_sums(2, flat, new)


def test_swapped_positions_or_values_change_the_sum() -> None:
    """F1: the digest is commutative over elements, never between an element's index and its bits."""
    rng = np.random.default_rng(1)
    flat = np.sort(rng.choice(10_000, 500, replace=False))
    bits = rng.permutation(np.arange(500, dtype=np.uint16))
    sums = state_sums(0, flat, bits)
    for _ in range(200):
        i, j = rng.choice(500, 2, replace=False)
        swapped = bits.copy()
        swapped[[i, j]] = bits[[j, i]]
        other = state_sums(0, flat, swapped)
        assert other[0] != sums[0]
        assert other[1] != sums[1]
    assert state_sum(1, flat, bits) != sums[0]
    assert state_sum(0, flat + 1, bits) != sums[0]


def test_every_single_bit_changes_the_sum() -> None:
    flat = np.array([12345])
    sums = {state_sum(0, flat, np.array([1 << bit], np.uint64)) for bit in range(64)}
    assert len(sums | {state_sum(0, flat, np.array([0], np.uint64))}) == 65


def test_change_sum_depends_on_task_index_and_difference() -> None:
    flat, differences = np.array([1, 2]), np.array([3, 4], np.uint16)
    total = change_sum("layers.0", flat, differences)
    assert total == sum(change_sum("layers.0", flat[i : i + 1], differences[i : i + 1]) for i in range(2)) & MASK
    assert total == 0xE83D49472FCE7CDF
    assert change_sum("layers.1", flat, differences) != total
    assert change_sum("layers.0", flat, differences[::-1]) != total
    assert change_sum("layers.0", flat[:0], differences[:0]) == 0


def test_sums_need_little_memory() -> None:
    flat = np.arange(4_000_000)
    bits = np.zeros(flat.size, np.uint16)
    tracemalloc.start()
    state_sums(0, flat, bits)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20
