"""Position modes: chosen by the count, coded as defined, refused when they are not what they say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr_stream.codec.positions import decode_positions, encode_positions, position_fault
from dcr_stream.delta import Positions


def bitmap_by_definition(positions: list[int], elements: int) -> bytes:
    number = sum(1 << position for position in positions)
    return number.to_bytes((elements + 7) // 8, "little")


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.integers(0, 300), st.floats(0, 1), st.integers(0, 2**32))
def test_any_set_of_positions_comes_back(elements: int, rate: float, seed: int) -> None:
    positions = np.flatnonzero(np.random.default_rng(seed).random(elements) < rate)
    coded = encode_positions(positions, elements)
    assert position_fault(coded) is None
    np.testing.assert_array_equal(decode_positions(coded), positions)
    if coded.mode == "bitmap":
        assert coded.bitmap.tobytes() == bitmap_by_definition(positions.tolist(), elements)


@pytest.mark.parametrize(
    ("count", "mode"), [(0, "gaps"), (1, "gaps"), (25, "gaps"), (26, "bitmap"), (99, "bitmap"), (100, "dense")]
)
def test_more_than_a_quarter_is_a_bitmap_and_all_of_it_is_nothing(count: int, mode: str) -> None:
    positions = np.sort(np.random.default_rng(0).choice(100, count, replace=False))
    assert encode_positions(positions, 100).mode == mode


def test_no_positions_of_an_empty_region_are_dense() -> None:
    assert encode_positions(np.empty(0, np.int64), 0).mode == "dense"


@pytest.mark.parametrize("positions", [[1, 1], [2, 1], [-1, 2], [0, 4], [0, 9], [0, 0, 1, 2], [3, 2, 1, 0]])
@pytest.mark.parametrize("elements", [4, 100])
def test_positions_that_are_no_set_of_the_region_are_refused(positions: list[int], elements: int) -> None:
    if elements == 4 or sorted(set(positions)) != positions or positions[0] < 0:
        with pytest.raises(ValueError, match=r"ascend|outside"):
            encode_positions(np.array(positions), elements)


def test_bitmaps_that_do_not_add_up_are_faults() -> None:
    def fault(bits: list[int], count: int, elements: int) -> str:
        found = position_fault(Positions(elements, count, "bitmap", bitmap=np.array(bits, np.uint8)))
        return found or "none"

    assert fault([0b0101_0101, 1], 5, 9) == "none"
    assert "has 1 bytes, 9 positions need 2" in fault([255], 8, 9)
    assert "has 3 bytes" in fault([255, 1, 0], 9, 9)
    assert "belong to no position" in fault([255, 2], 9, 9)
    assert "does not hold 8 positions" in fault([255, 1], 8, 9)
    assert fault([255, 1], 9, 9) == "none"


@pytest.mark.parametrize(
    ("coded", "what"),
    [
        (Positions(3, 2, "bitmap", shift=1, bitmap=np.array([3], np.uint8)), "bitmap positions with gaps"),
        (Positions(3, 2, "bitmap", high=np.zeros(2, np.uint8), bitmap=np.array([3], np.uint8)), "with gaps"),
        (Positions(3, 2, "dense", low=np.zeros(1, np.uint8)), "dense positions with gaps"),
        (Positions(3, 2, "dense", bitmap=np.array([3], np.uint8)), "dense positions with a bitmap"),
        (Positions(3, 2, "gaps", high=np.zeros(2, np.uint8), bitmap=np.array([3], np.uint8)), "gaps positions with a"),
        (Positions(3, 2, "dense"), "dense positions with 1 missing"),
    ],
)
def test_columns_of_another_mode_are_faults(coded: Positions, what: str) -> None:
    found = position_fault(coded)
    assert found is not None
    assert what in found
