"""Compiled walks through boxes touch and sum exactly what their numpy references do."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr_stream.canonical import Indices, Region, word_dtype
from dcr_stream.codec.boxes import add_at, copies, flat_indices, sum_box, write_box
from dcr_stream.codec.digest import lane
from dcr_stream.codec.kernels import Implementation, using
from dcr_stream.delta import EntryMode

pytest.importorskip("numba", exc_type=ImportError)

MODES: tuple[EntryMode, ...] = ("add", "xor", "overwrite")


@pytest.fixture(autouse=True, scope="module")
def kernels() -> Iterator[Implementation]:
    """Both implementations are named where they are used."""
    with using("numba"):
        yield "numba"


@st.composite
def nested(draw: st.DrawFn, smallest: int = 1) -> tuple[list[int], list[int]]:
    """Sizes and strides, outermost first, in which every index has one set of coordinates."""
    sizes, strides, reach = [], [], 0
    for _ in range(draw(st.integers(1, 4))):
        size = draw(st.integers(smallest, 5))
        stride = reach + draw(st.sampled_from([1, 1, 2, 3, 10]))
        sizes.append(size)
        strides.append(stride)
        reach += (size - 1) * stride
    return sizes[::-1], strides[::-1]


@st.composite
def boxes(draw: st.DrawFn) -> tuple[Region, Region]:
    """A canonical region and the place of a box: any order of dimensions on both sides, some of them broadcast.

    As in a traced plan, no dimension has size 1, except the only one of a box of one element.
    """
    sizes, strides = draw(st.one_of(nested(smallest=2), st.just(([1], [1]))))
    order = draw(st.permutations(range(len(sizes))))
    sizes, strides = [sizes[d] for d in order], [strides[d] for d in order]
    place, reach = [0] * len(sizes), 0
    for d in draw(st.permutations(range(len(sizes)))):
        place[d] = reach + draw(st.sampled_from([1, 1, 3]))
        reach += (sizes[d] - 1) * place[d]
    for d in draw(st.sets(st.integers(0, len(sizes) - 1), max_size=2)):
        strides[d] = 0
    region = Region(draw(st.integers(0, 7)), tuple(sizes), tuple(strides))
    return region, Region(draw(st.integers(0, 7)), tuple(sizes), tuple(place))


@settings(derandomize=True, deadline=None, max_examples=400)
@given(boxes(), st.sampled_from(MODES), st.sampled_from([1, 2, 4, 8]), st.integers(0, 2**32), st.floats(0, 1))
def test_boxes_are_written_and_summed_alike(
    box: tuple[Region, Region], mode: EntryMode, width: int, seed: int, rate: float
) -> None:
    region, place = box
    rng = np.random.default_rng(seed)
    flat = np.flatnonzero(rng.random(region.last + 10) < rate)
    values = rng.integers(0, 256, flat.size * width, np.uint8).view(word_dtype(width))
    storage = rng.integers(0, 256, (place.last + 5) * width, np.uint8).view(word_dtype(width))
    written = [storage.copy(), storage.copy()]
    sums = [
        run(words, region, place, mode, 99, flat, values)
        for run, words in zip((write_box.compiled, write_box.reference), written, strict=True)
    ]
    np.testing.assert_array_equal(written[0], written[1])
    assert sums[0] == sums[1] == sum_box.reference(written[0], region, place, 99, flat)
    before = sum_box.compiled(storage, region, place, 99, flat)
    assert before == sum_box.reference(storage, region, place, 99, flat)
    assert len(before) == copies(region)


@pytest.mark.parametrize("inner", [1, 2, 3, 7, 64])
def test_long_strided_boxes_need_no_exact_reciprocal(inner: int) -> None:
    """Coordinates found with a reciprocal are exact up to the largest tensors."""
    region, place = Region(5, (3, 1 << 44), (inner << 44, inner)), Region(0, (3, 1 << 44), (1 << 44, 1))
    rng = np.random.default_rng(inner)
    flat = np.unique(np.concatenate([rng.integers(0, region.last + 9, 3000), np.arange(20), [region.last]]))
    at = places(region, place, flat)
    coordinate, rest = np.divmod(flat - 5, inner)
    inside = (flat >= 5) & (rest == 0) & (flat <= region.last)
    np.testing.assert_array_equal(at, np.where(inside, coordinate, -1))


def places(region: Region, place: Region, flat: Indices) -> Indices:
    """Where the compiled walk finds single indices, without a storage that large."""
    from dcr_stream.codec.kernels import boxes as compiled

    table, _ = compiled._tables(region, place, place.last + 1)
    found = np.full(flat.size, -1)
    for i, index in enumerate(flat.tolist()):
        start, end, base, step, stride = compiled._interval(table, index)
        assert start <= index < end
        found[i] = compiled._at(index - start, base, step, stride, 1.0 / stride)
    return found


@settings(derandomize=True, deadline=None, max_examples=200)
@given(nested(), st.permutations(range(4)), st.integers(0, 9), st.integers(0, 2**32), st.booleans())
def test_flat_indices_agree_in_any_region(
    dims: tuple[list[int], list[int]], order: list[int], offset: int, seed: int, ascending: bool
) -> None:
    sizes, strides = ([values[d] for d in order if d < len(values)] for values in dims)
    region = Region(offset, tuple(sizes), tuple(strides))
    rng = np.random.default_rng(seed)
    positions = np.flatnonzero(rng.random(region.count) < 0.5)
    positions = positions if ascending else rng.permutation(positions)
    found = flat_indices.compiled(region, positions)
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found, flat_indices.reference(region, positions))


def test_more_elements_than_are_looked_up_at_a_time() -> None:
    rng = np.random.default_rng(0)
    region, place = Region(3, (100, 50), (70, 1)), Region(11, (100, 50), (1, 100))
    flat = np.flatnonzero(rng.random(7200) < 0.7)
    values = rng.integers(0, 1 << 16, flat.size).astype(np.uint16)
    storage = rng.integers(0, 1 << 16, 6000).astype(np.uint16)
    written = [storage.copy(), storage.copy()]
    sums = [
        run(words, region, place, "add", 1, flat, values)
        for run, words in zip((write_box.compiled, write_box.reference), written, strict=True)
    ]
    np.testing.assert_array_equal(written[0], written[1])
    assert sums[0] == sums[1] == sum_box.compiled(written[0], region, place, 1, flat)


@pytest.mark.parametrize("run", [write_box.compiled, write_box.reference])
def test_what_is_summed_is_loaded_from_storage_again(run: Callable[..., tuple[int, ...]]) -> None:
    """Two elements in one place: the second write corrupts the first, and only another load can see that."""
    storage = np.zeros(2, np.uint16)
    flat, values = np.array([0, 1]), np.array([5, 7], np.uint16)
    sums = run(storage, Region.whole(2), Region(0, (2,), (0,)), "overwrite", 3, flat, values)
    assert sums == (lane.reference(3, flat, np.array([7, 7], np.uint16)),)
    assert sums != (lane.reference(3, flat, values),)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_differences_are_added_alike(width: int) -> None:
    rng = np.random.default_rng(width)
    words = rng.integers(0, 256, 3000 * width, np.uint8).view(word_dtype(width))
    at = np.flatnonzero(rng.random(2900) < 0.3)
    differences = rng.integers(0, 256, at.size * width, np.uint8).view(word_dtype(width))
    changed = [words.copy(), words.copy()]
    add_at.compiled(changed[0], at + 100, differences)
    add_at.reference(changed[1], at + 100, differences)
    np.testing.assert_array_equal(changed[0], changed[1])


def test_nothing_is_written_outside_of_storage() -> None:
    """Compiled code checks no index, so what it is handed is checked as a whole."""
    words, ones = np.zeros(10, np.uint16), np.ones(3, np.uint16)
    flat = np.arange(3)
    for region, place in (
        (Region.whole(3), Region(8, (3,), (1,))),
        (Region.whole(3), Region(0, (3,), (5,))),
        (Region.whole(3), Region(-1, (3,), (1,))),
        (Region.whole(3), Region.whole(4)),
    ):
        with pytest.raises(IndexError):
            write_box.compiled(words, region, place, "overwrite", 0, flat, ones)
        with pytest.raises(IndexError):
            sum_box.compiled(words, region, place, 0, flat)
    with pytest.raises(IndexError):
        write_box.compiled(words, Region.whole(3), Region.whole(3), "overwrite", 0, flat, ones[:2])
    for at in ([0, 1, 10], [-1, 0, 1], [0, 1]):
        with pytest.raises(IndexError):
            add_at.compiled(words, np.array(at), ones)
    assert not words.any()
