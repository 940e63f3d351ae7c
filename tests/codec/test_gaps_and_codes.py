"""Columns G, L, C, E1 and E2 against the format's definition written as plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dcr_stream.canonical import Bytes, Indices, Region
from dcr_stream.codec import decode_positions, encode_positions, encode_record, frame_bucket
from dcr_stream.codec.codes import choose_code_bits, code_fault, decode_codes, encode_codes
from dcr_stream.codec.gaps import choose_shift, encode_gaps, gap_fault
from dcr_stream.delta import Bucket, Positions, Record


def pack_bits(values: list[int], width: int) -> bytes:
    number = sum(value << i * width for i, value in enumerate(values))
    return number.to_bytes((len(values) * width + 7) // 8, "little")


def decoded(shift: int, high: Bytes, low: Bytes, count: int) -> Indices:
    return decode_positions(Positions(1 << 40, count, "gaps", shift, high, low))


def gaps_by_definition(positions: list[int]) -> tuple[int, bytes, bytes]:
    gaps = [p - q - 1 for q, p in zip([-1, *positions], positions, strict=False)]
    mean = sum(gaps) / len(gaps)
    shift = max(0, math.ceil(math.log2(mean / 192))) if mean else 0
    high = bytearray()
    for gap in gaps:
        q = gap >> shift
        while q >= 255:
            high.append(255)
            q -= 255
        high.append(q)
    return shift, bytes(high), pack_bits([gap & (1 << shift) - 1 for gap in gaps], shift) if shift else b""


def codes_by_definition(differences: list[int]) -> tuple[int, bytes, bytes, bytes]:
    signed = [d - 65536 if d >= 32768 else d for d in differences]
    width = 2 if sum(abs(d) == 1 for d in signed) >= 0.6 * len(signed) else 4
    top = (1 << width) - 1
    z = [(2 * d if d >= 0 else -2 * d - 1) - 1 for d in signed]
    excess = bytes(min(v - top, 255) for v in z if v >= top)
    escaped = b"".join(v.to_bytes(2, "little") for v in z if v - top >= 255)
    return width, pack_bits([min(v, top) for v in z], width), excess, escaped


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    st.lists(
        st.one_of(st.integers(0, 3), st.integers(0, 1000), st.integers(0, 2**22), st.just(254), st.just(255)),
        min_size=1,
        max_size=60,
    )
)
def test_gaps_are_coded_as_defined_and_come_back(gaps: list[int]) -> None:
    positions = np.cumsum(np.array(gaps) + 1) - 1
    shift, high, low = encode_gaps(positions)
    assert (shift, high.tobytes(), low.tobytes()) == gaps_by_definition(positions.tolist())
    elements = int(positions[-1]) + 1
    assert gap_fault(high, low, shift, len(gaps), elements) is None
    np.testing.assert_array_equal(
        decode_positions(Positions(int(positions[-1]) + 1, positions.size, "gaps", shift, high, low)), positions
    )
    assert gap_fault(high, low, shift, len(gaps), elements - 1) is not None
    assert gap_fault(high, low, shift, len(gaps) + 1, elements) is not None


def test_low_bits_of_many_gaps_come_back() -> None:
    positions = np.sort(np.random.default_rng(0).choice(1 << 28, 50_001, replace=False))
    shift, high, low = encode_gaps(positions)
    assert shift == 5
    np.testing.assert_array_equal(
        decode_positions(Positions(int(positions[-1]) + 1, positions.size, "gaps", shift, high, low)), positions
    )


@pytest.mark.parametrize("positions", [[0, 0], [5, 4], [-1, 3]])
def test_positions_out_of_order_are_refused(positions: list[int]) -> None:
    with pytest.raises(ValueError, match="ascend"):
        encode_gaps(np.array(positions))


@pytest.mark.parametrize(("mean_gap", "shift"), [(0, 0), (1, 0), (192, 0), (193, 1), (384, 1), (385, 2), (768, 2)])
def test_gap_shift_is_the_smallest_that_keeps_the_mean_gap_below_192(mean_gap: int, shift: int) -> None:
    count = 1000
    assert choose_shift(count, count * (mean_gap + 1) - 1) == shift


def test_far_positions_use_the_largest_shift_at_most() -> None:
    positions = np.array([2**45])
    shift, high, low = encode_gaps(positions)
    assert shift == 32
    assert gap_fault(high, low, shift, 1, 2**45 + 1) is None
    np.testing.assert_array_equal(
        decode_positions(Positions(int(positions[-1]) + 1, positions.size, "gaps", shift, high, low)), positions
    )


@pytest.mark.parametrize("width", [2, 4])
def test_every_difference_of_two_bytes_has_a_code(width: int) -> None:
    ones = np.array([1, 0xFFFF] * (100_000 if width == 2 else 0), np.uint16)
    differences = np.concatenate([np.arange(1, 65536, dtype=np.uint16), ones])
    chosen, codes, excess, escaped = encode_codes(differences)
    assert chosen == width
    assert (width, codes.tobytes(), excess.tobytes(), escaped.tobytes()) == codes_by_definition(differences.tolist())
    assert code_fault(codes, excess, escaped, width, differences.size) is None
    np.testing.assert_array_equal(decode_codes(codes, excess, escaped, width, differences.size), differences)


def test_code_width_is_two_from_60_percent_ones_on() -> None:
    assert choose_code_bits(np.array([1, 0xFFFF, 1, 7, 9], np.uint16)) == 2
    assert choose_code_bits(np.array([1, 0xFFFF, 2, 7, 9], np.uint16)) == 4


@pytest.mark.parametrize(
    ("codes", "excess", "escaped", "count", "what"),
    [
        ([0b01], [], [], 5, "column C has 1 bytes"),
        ([0b0100_0001], [], [], 3, "belong to no code"),
        ([0b11], [], [], 1, "E1 has 0 bytes for 1"),
        ([0b00], [4], [], 1, "E1 has 1 bytes for 0"),
        ([0b11], [255], [], 1, "E2 has 0 bytes for 1"),
        ([0b11], [254], [0, 9], 1, "E2 has 2 bytes for 0"),
        ([0b11], [255], [1, 1], 1, "needs no escape"),
        ([0b11], [255], [255, 255], 1, "difference of 0"),
    ],
)
def test_codes_that_do_not_add_up_are_faults(
    codes: list[int], excess: list[int], escaped: list[int], count: int, what: str
) -> None:
    def column(values: list[int]) -> Bytes:
        return np.array(values, np.uint8)

    fault = code_fault(column(codes), column(excess), column(escaped), 2, count)
    assert fault is not None
    assert what in fault


def test_sums_of_gaps_cannot_overflow() -> None:
    """A gap total beyond 64 bits is seen as too large, not as a small number."""
    high, low = np.full(1 << 20, 254, np.uint8), np.full(4 << 20, 255, np.uint8)
    fault = gap_fault(high, low, 32, 1 << 20, 1 << 50)
    assert fault is not None
    assert "lead to position" in fault


def entropy(symbols: NDArray[np.generic]) -> float:
    counts = np.unique(symbols, return_counts=True)[1]
    p = counts / counts.sum()
    return float(-(p * np.log2(p)).sum())


def test_payload_size_is_near_the_entropy_of_positions_and_differences() -> None:
    """The stress recipe of the paper: relative noise of 1e-2 on 3 % of normal BF16 weights."""
    rng = np.random.default_rng(0)
    n = 1 << 22

    def bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)

    old = bf16(rng.normal(0, 0.02, n).astype(np.float32))
    wide = (old.astype(np.uint32) << 16).view(np.float32)
    noise = rng.normal(0, 1e-2, n).astype(np.float32) * (rng.random(n) < 0.03)
    new = bf16((wide + wide * noise).astype(np.float32))
    positions = np.flatnonzero(old != new)
    differences = new[positions] - old[positions]
    coded_positions = encode_positions(positions, n)
    record = Record("w", 0, Region.whole(n), coded_positions, differences, old[positions], "w")
    entry = encode_record(record, "add")
    coded = frame_bucket(Bucket((entry.item,), tuple(map(bytes, entry.columns))))
    p = positions.size / n
    bound = (-(p * math.log2(p) + (1 - p) * math.log2(1 - p)) / p + entropy(differences)) / 8
    assert 0.02 < p < 0.03
    assert coded.nbytes / positions.size < 1.05 * bound
