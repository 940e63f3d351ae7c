"""Boxes say exactly what the element map says, in few strided pieces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcr_stream.canonical import MAX_DIMS, Indices, Region
from dcr_stream.codec.boxes import find
from dcr_stream.trace.boxes import BoxPair, compress, strided
from dcr_stream.trace.sweep import runs_of


def boxes_of(place: Indices, flat: Indices) -> list[BoxPair]:
    order = np.argsort(place)
    place, flat = place[order], flat[order]
    starts, count = runs_of(place, flat)
    return compress(place[starts], flat[starts], count)


def map_of(boxes: list[BoxPair]) -> dict[int, int]:
    """Storage element → canonical element; fails if an element is placed twice."""
    found: dict[int, int] = {}
    for region, place in boxes:
        assert region.sizes == place.sizes
        assert region.fits(region.last + 1)
        assert place.fits(place.last + 1)
        for at, flat in zip(place.all_flat().tolist(), region.all_flat().tolist(), strict=True):
            assert at not in found
            found[at] = flat
    return found


def found_through(boxes: list[BoxPair], wanted: Indices) -> set[tuple[int, int]]:
    pairs: list[tuple[int, int]] = []
    for region, place in boxes:
        for chosen, at in find(region, place, wanted):
            pairs += zip(at.tolist(), wanted[chosen].tolist(), strict=True)
    assert len(set(pairs)) == len(pairs)
    return set(pairs)


def check_exact(place: Indices, flat: Indices) -> list[BoxPair]:
    boxes = boxes_of(place, flat)
    expected = dict(zip(place.tolist(), flat.tolist(), strict=True))
    assert map_of(boxes) == expected
    wanted = np.unique(flat)[::2]
    keep = set(wanted.tolist())
    assert found_through(boxes, wanted) == {(p, f) for p, f in expected.items() if f in keep}
    return boxes


@st.composite
def strided_maps(draw: st.DrawFn) -> tuple[Indices, Indices]:
    """A box of a canonical tensor, cut out, permuted, flipped or broadcast, and laid into part of a storage."""
    dims = draw(st.integers(1, 4))
    shape = [draw(st.integers(1, 6)) for _ in range(dims)]
    canonical = np.arange(np.prod(shape)).reshape(shape)
    cut = tuple(slice(*sorted((draw(st.integers(0, n)), draw(st.integers(0, n))))) for n in shape)
    step = draw(st.sampled_from([1, 1, 2, -1]))
    piece = canonical[cut][..., ::step].transpose(draw(st.permutations(range(dims))))
    if draw(st.booleans()):
        piece = np.broadcast_to(piece, (draw(st.integers(1, 3)), *piece.shape))
    flat = np.ascontiguousarray(piece).reshape(-1).astype(np.int64)
    gap = draw(st.integers(0, 3))
    row = max(piece.shape[-1], 1)
    place = np.arange(flat.size, dtype=np.int64)
    return place + place // row * gap + draw(st.integers(0, 5)), flat


@given(strided_maps())
def test_strided_layouts_are_reproduced_exactly(layout: tuple[Indices, Indices]) -> None:
    check_exact(*layout)


@given(st.permutations(range(24)), st.integers(1, 24))
def test_any_permutation_is_reproduced_exactly(order: list[int], kept: int) -> None:
    check_exact(np.array(order[:kept], np.int64), np.arange(kept, dtype=np.int64))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_any_repetition_is_reproduced_exactly(flat: list[int]) -> None:
    check_exact(np.arange(len(flat), dtype=np.int64), np.array(flat, np.int64))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=30), st.integers(0, 3))
def test_runs_of_any_lengths_are_reproduced_exactly(lengths: list[int], jump: int) -> None:
    flat = np.concatenate([np.arange(n) + i * (5 + jump) for i, n in enumerate(lengths)]).astype(np.int64)
    check_exact(np.arange(flat.size, dtype=np.int64), flat)


@pytest.mark.parametrize(
    "piece",
    [
        np.arange(4096).reshape(64, 64)[:, 16:32],
        np.arange(4096).reshape(64, 64).T,
        np.arange(4096).reshape(8, 8, 8, 8).transpose(3, 1, 0, 2),
        np.arange(4096).reshape(8, 8, 8, 8).transpose(2, 0, 3, 1)[::2],
        np.broadcast_to(np.arange(16)[:, None], (16, 32)),
        np.broadcast_to(np.array(3), (500,)),
        np.arange(120).reshape(60, 2)[::-1][::-1][:, :1],
    ],
)
def test_regular_layouts_are_one_box(piece: np.ndarray) -> None:
    flat = np.ascontiguousarray(piece).reshape(-1).astype(np.int64)
    boxes = check_exact(np.arange(flat.size, dtype=np.int64), flat)
    assert len(boxes) == 1
    assert len(boxes[0][0].sizes) <= MAX_DIMS


def test_overlapping_windows_become_boxes_of_distinct_elements() -> None:
    flat = np.lib.stride_tricks.sliding_window_view(np.arange(20), 4).reshape(-1).astype(np.int64)
    boxes = check_exact(np.arange(flat.size, dtype=np.int64), flat)
    assert all(np.unique(region.all_flat()).size == region.count for region, _ in boxes)


def test_a_strided_view_shows_the_elements_of_its_region() -> None:
    region = Region(3, (2, 2, 3), (20, 7, 2))
    words = np.arange(60, dtype=np.uint16)
    assert strided(words, region).reshape(-1).tolist() == words[region.all_flat()].tolist()
