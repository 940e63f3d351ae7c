"""Records survive every entry mode bit for bit, and items that are not what they say are refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dcr_stream.canonical import WIDTHS, Region, TensorDirectory, TensorSpec, Words, word_dtype
from dcr_stream.codec import (
    COLUMNS,
    check_item,
    combine,
    decode_item,
    encode_record,
    slice_columns,
    state_sum,
    tensor_from_words,
    words,
)
from dcr_stream.codec.positions import decode_positions, encode_positions, whole
from dcr_stream.delta import Entry, EntryMode, Item, Record
from dcr_stream.errors import MalformedPayload, UsageError

from .wire_trip import trip

MODES: tuple[EntryMode, ...] = ("add", "xor", "overwrite")

# Quiet and signalling NaNs of both signs with payloads, infinities, zeros, subnormals, largest finite, one.
SPECIAL: dict[str, tuple[int, ...]] = {
    "bfloat16": (0x7FC0, 0xFFC1, 0x7F81, 0xFFBF, 0x7F80, 0xFF80, 0, 0x8000, 1, 0x8001, 0x7F7F, 0x3F80),
    "float16": (0x7E00, 0xFE01, 0x7C01, 0xFDFF, 0x7C00, 0xFC00, 0, 0x8000, 1, 0x8001, 0x7BFF, 0x3C00),
    "float32": (0x7FC00000, 0xFFC00001, 0x7F800001, 0xFFBFFFFF, 0x7F800000, 0xFF800000, 0, 1 << 31, 1, 0x7F7FFFFF),
    "float64": (0x7FF8 << 48, 0xFFF8 << 48 | 1, 0x7FF0 << 48 | 1, 0xFFF7 << 48, 0x7FF0 << 48, 0, 1 << 63, 1),
    "complex64": (0x7FC00000 << 32 | 1 << 31, 1 << 63, 0, 0x7F800001 << 32 | 0x7F800001),
}


@st.composite
def tensors(draw: st.DrawFn) -> tuple[str, torch.Tensor, torch.Tensor, NDArray[np.unsignedinteger], Words]:
    """Two tensors of one dtype and shape, in any memory layout, and the bits they hold in row-major order."""
    dtype = draw(st.sampled_from(sorted(WIDTHS)))
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    width = WIDTHS[dtype]
    seed = np.random.default_rng(draw(st.integers(0, 2**32)))
    rate = draw(st.sampled_from([0.0, 0.05, 0.5, 1.0]))
    special = np.array(SPECIAL.get(dtype, (0, 1, (1 << 8 * width) - 1, 1 << 8 * width - 1)), word_dtype(width))

    def laid_out(bits: Words) -> tuple[torch.Tensor, Words]:
        layout = draw(st.sampled_from(["contiguous", "transposed", "strided", "expanded"]))
        if layout == "transposed" and bits.ndim:
            turned = np.ascontiguousarray(bits.T)
            return tensor_from_words(turned, dtype, turned.shape).permute(*reversed(range(bits.ndim))), bits
        if layout == "strided" and bits.ndim:
            wide = np.repeat(bits, 2, axis=-1)
            return tensor_from_words(wide, dtype, wide.shape)[..., ::2], bits
        if layout == "expanded" and bits.ndim and len(bits):
            first = np.ascontiguousarray(bits[:1])
            return tensor_from_words(first, dtype, first.shape).expand(bits.shape), np.broadcast_to(first, bits.shape)
        return tensor_from_words(bits, dtype, shape), bits

    old = seed.integers(0, 256, (*shape, width), np.uint8).view(word_dtype(width)).reshape(shape)
    old = np.where(seed.random(shape) < 0.3, seed.choice(special, shape), old)
    new = seed.integers(0, 256, (*shape, width), np.uint8).view(word_dtype(width)).reshape(shape)
    near = old + seed.choice(np.array([1, (1 << 8 * width) - 1], word_dtype(width)), shape)
    kind = seed.random(shape)
    new = np.where(kind < 0.3, seed.choice(special, shape), np.where(kind < 0.7, near, new))
    new = np.where(seed.random(shape) < rate, new, old)
    old_tensor, old_bits = laid_out(np.array(old, word_dtype(width)))
    new_tensor, new_bits = laid_out(np.array(new, word_dtype(width)))
    return dtype, old_tensor, new_tensor, old_bits.reshape(-1), new_bits.reshape(-1)


@pytest.mark.parametrize("mode", MODES)
def test_any_two_tensors_round_trip_bit_for_bit(mode: EntryMode) -> None:
    """A1 A7 A10 A11: any dtype, shape, layout and bit patterns, NaNs and expanded sources included."""

    @settings(derandomize=True, deadline=None, max_examples=150)
    @given(tensors())
    def check(pair: tuple[str, torch.Tensor, torch.Tensor, Words, Words]) -> None:
        dtype, old, new, old_bits, new_bits = pair
        np.testing.assert_array_equal(words(old), old_bits)
        np.testing.assert_array_equal(words(new), new_bits)
        result, item = trip(words(old), words(new), mode, dtype)
        np.testing.assert_array_equal(result, new_bits)
        assert item.count == np.count_nonzero(old_bits != new_bits)

    check()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["uint8", "bool", "float8_e4m3fn"])
def test_every_pair_of_different_bytes_is_sent(mode: EntryMode, dtype: str) -> None:
    """A15: exhaustive over all 2^16 pairs of one-byte patterns; exactly the differing ones travel."""
    old, new = (a.reshape(-1).astype(np.uint8) for a in np.meshgrid(np.arange(256), np.arange(256)))
    result, item = trip(old, new, mode, dtype)
    np.testing.assert_array_equal(result, new)
    assert item.count == 256 * 255


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int64"])
def test_a_difference_in_any_single_bit_or_any_random_pair_is_sent(mode: EntryMode, dtype: str) -> None:
    """A15: no byte and no bit of an element is overlooked."""
    width = WIDTHS[dtype]
    rng = np.random.default_rng(4)
    old = rng.integers(0, 256, 20_000 * width, np.uint8).view(word_dtype(width))
    new = rng.integers(0, 256, 20_000 * width, np.uint8).view(word_dtype(width))
    bits = np.arange(8 * width).astype(old.dtype)
    new[: bits.size] = old[: bits.size] ^ (old.dtype.type(1) << bits)
    result, item = trip(old, new, mode, dtype)
    np.testing.assert_array_equal(result, new)
    assert item.count == np.count_nonzero(old != new)
    assert item.count >= 8 * width


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", SPECIAL)
def test_elements_become_nan_with_their_payload(mode: EntryMode, dtype: str) -> None:
    """A1: no NaN is a sentinel; every special pattern replaces every other one exactly."""
    special = np.array(SPECIAL[dtype], word_dtype(WIDTHS[dtype]))
    old, new = np.repeat(special, special.size), np.tile(special, special.size)
    result, item = trip(old, new, mode, dtype)
    np.testing.assert_array_equal(result, new)
    assert item.count == special.size * (special.size - 1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["int64", "int32", "bool"])
def test_integers_and_bools_are_sent_like_anything_else(mode: EntryMode, dtype: str) -> None:
    """A2 A3: no dtype is refused, and extreme integers do not overflow."""
    torch_type = {"int64": torch.int64, "int32": torch.int32, "bool": torch.bool}[dtype]
    values = [False, True] if dtype == "bool" else [torch.iinfo(torch_type).min, -1, 0, torch.iinfo(torch_type).max]
    size = len(values)
    old = torch.tensor(values, dtype=torch_type).repeat_interleave(size)
    new = torch.tensor(values, dtype=torch_type).repeat(size)
    result, _ = trip(words(old), words(new), mode, dtype)
    assert torch.equal(tensor_from_words(result, dtype, (size * size,)), new)


@pytest.mark.parametrize("mode", MODES)
def test_negative_zero_is_sent_and_an_unchanged_nan_is_not(mode: EntryMode) -> None:
    """A4: equality is of bits, not of numbers."""
    old = torch.tensor([0.0, math.nan, 1.0, -0.0, math.nan], dtype=torch.bfloat16)
    new = torch.tensor([-0.0, math.nan, 1.0, 0.0, math.nan], dtype=torch.bfloat16)
    result, item = trip(words(old), words(new), mode, "bfloat16")
    assert item.count == 2
    np.testing.assert_array_equal(result, words(new))
    same, nothing = trip(words(old), words(old), mode, "bfloat16")
    assert nothing.count == sum(nothing.sizes) == nothing.digest == 0
    np.testing.assert_array_equal(same, words(old))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int64"])
def test_a_zero_dim_tensor_is_sent(mode: EntryMode, dtype: str) -> None:
    """A6: a scalar is a region of one element."""
    old, new = (torch.tensor(value).to(getattr(torch, dtype)) for value in (3, -7))
    result, item = trip(words(old), words(new), mode, dtype)
    assert item.region == Region.whole(1)
    assert torch.equal(tensor_from_words(result, dtype, ()), new)


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_tensor_is_an_item_without_bytes_and_fits_no_other_shape(mode: EntryMode) -> None:
    """A8: zero elements travel as such, and never pass for a tensor with elements."""
    empty = np.empty(0, np.uint16)
    result, item = trip(empty, empty, mode, "bfloat16")
    assert result.size == item.count == sum(item.sizes) == 0
    full = record_of([1, 2, 3], [4, 5, 6])
    entry = encode_record(full, mode)
    with pytest.raises(MalformedPayload, match="does not lie inside its 0 elements"):
        check_item(entry.item, entry.columns, TensorDirectory([TensorSpec("w", "bfloat16", (0,))]))


@pytest.mark.parametrize("dtype", WIDTHS)
def test_a_complete_tensor_is_overwritten_densely_with_unchanged_elements(dtype: str) -> None:
    """A7: dense overwrite of every dtype; a difference of 0 is a value there."""
    bits = np.arange(100).astype(word_dtype(WIDTHS[dtype]))
    record = Record("w", 0, Region.whole(100), whole(100), np.zeros_like(bits), bits, None)
    entry = encode_record(record, "overwrite")
    assert entry.item.positions == "dense"
    assert entry.nbytes == bits.nbytes
    check_item(entry.item, entry.columns, TensorDirectory([TensorSpec("w", dtype, (10, 10))]))
    np.testing.assert_array_equal(decode_item(entry.item, entry.columns).values, bits)


def record_of(old: Sequence[int], new: Sequence[int], width: int = 2, region: Region | None = None) -> Record:
    old_bits, new_bits = (np.array(a, word_dtype(width)) for a in (old, new))
    positions = np.flatnonzero(old_bits != new_bits)
    return Record(
        name="w",
        tensor=0,
        region=region or Region.whole(old_bits.size),
        positions=encode_positions(positions, old_bits.size),
        differences=new_bits[positions] - old_bits[positions],
        old=old_bits[positions],
        task="w",
    )


@pytest.mark.parametrize("mode", MODES)
def test_positions_count_in_the_region_and_digests_in_the_tensor(mode: EntryMode) -> None:
    region = Region(3, (3, 2), (8, 2))
    record = record_of([1, 2, 3, 4, 5, 6], [1, 9, 3, 4, 8, 6], region=region)
    entry = encode_record(record, mode)
    decoded = decode_item(entry.item, entry.columns)
    assert region.flat(decode_positions(decoded.positions)).tolist() == [5, 19]
    new = combine(mode, record.old, decoded.values)
    assert new.tolist() == [9, 8]
    assert entry.item.digest == state_sum(0, np.array([5, 19]), new)


@pytest.mark.parametrize("mode", ["add", "xor"])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_an_unchanged_element_cannot_be_encoded_as_a_change(mode: EntryMode, width: int) -> None:
    record = record_of([1, 2], [3, 4], width)
    record.differences[1] = 0
    with pytest.raises(UsageError, match="difference of 0"):
        encode_record(record, mode)
    assert encode_record(record, "overwrite").item.count == 2


def test_records_that_cannot_be_encoded_are_refused() -> None:
    record = record_of([1, 2, 3], [4, 2, 6])
    cases: list[tuple[Record, EntryMode, str]] = [
        (replace(record, tensor=None), "overwrite", "source change"),
        (replace(record, relative=False), "add", "must be overwritten"),
        (replace(record, relative=False), "xor", "must be overwritten"),
        (replace(record, region=Region.whole(4)), "overwrite", "positions among 3 elements for a region of 4"),
    ]
    for wrong, mode, what in cases:
        with pytest.raises(UsageError, match=what):
            encode_record(wrong, mode)


def altered(entry: Entry, **fields: object) -> Item:
    return msgspec.structs.replace(entry.item, **fields)


def test_items_that_do_not_fit_the_directory_are_refused() -> None:
    """Index, width and region are checked against the tensor before anything else is believed."""
    directory = TensorDirectory([TensorSpec("model.w", "bfloat16", (2, 3)), TensorSpec("other", "float32", (9,))])
    entry = encode_record(record_of([1, 2, 3, 4, 5, 6], [0, 2, 3, 4, 5, 9]), "add")
    check_item(entry.item, entry.columns, directory)
    for item, what in (
        (altered(entry, tensor=2), "number 2.*not among the 2 tensors"),
        (altered(entry, tensor=-1), "not among the 2 tensors"),
        (altered(entry, tensor=1), "'other'.*2-byte elements for dtype float32"),
        (altered(entry, region=Region.run(1, 6)), "'model.w'.*does not lie inside its 6"),
        (altered(entry, region=Region(0, (7,), (1,))), "does not lie inside"),
        (altered(entry, region=Region(-1, (6,), (1,))), "does not lie inside"),
        (altered(entry, region=Region(0, (2, 3), (3,))), "does not lie inside"),
        (altered(entry, region=Region(0, (2, -3), (3, 1))), "does not lie inside"),
        (altered(entry, region=Region(0, (1,) * 5, (1,) * 5)), "does not lie inside"),
        (altered(entry, region=Region(0, (6,), (0,))), "distinct elements"),
        (altered(entry, region=Region(0, (2, 3), (1, 1))), "distinct elements"),
        (altered(entry, region=Region(0, (3, 2), (1, 2))), "distinct elements"),
        (altered(entry, region=Region.run(0, 5)), "belong to no position"),
        (altered(entry, region=Region.run(0, 1)), "2 elements in a region of 1"),
    ):
        with pytest.raises(MalformedPayload, match=what):
            check_item(item, entry.columns, directory)


@pytest.mark.parametrize("strides", [(3, 1), (1, 2), (4, 1), (1, 3)])
def test_boxes_in_any_order_of_dimensions_are_accepted(strides: tuple[int, int]) -> None:
    directory = TensorDirectory([TensorSpec("w", "bfloat16", (10,))])
    entry = encode_record(record_of([1, 2, 3, 4, 5, 6], [0, 2, 3, 4, 5, 9], region=Region(0, (2, 3), strides)), "add")
    check_item(entry.item, entry.columns, directory)


def test_items_that_disagree_with_their_columns_are_refused() -> None:
    """Every field and every byte of an item is accounted for before anything is decoded."""
    codes = encode_record(record_of([1] * 400, [1] * 300 + [2, 0, 99, 999] * 25), "add")
    planes = encode_record(record_of([1, 2, 3], [0, 2, 4], 4), "overwrite")
    mask = encode_record(record_of([1, 2, 3], [0, 2, 4], 4), "xor")
    dense = encode_record(record_of([1, 2, 3], [0, 9, 4], 4), "overwrite")

    def refused(what: str, entry: Entry, columns: dict[str, bytes] | None = None, **fields: object) -> None:
        changed = tuple((columns or {}).get(name, column) for name, column in zip(COLUMNS, entry.columns, strict=True))
        fields.setdefault("sizes", tuple(map(len, changed)))
        with pytest.raises(MalformedPayload, match=f"tensor number 0: .*{what}"):
            decode_item(altered(entry, **fields), changed)

    by_name = dict(zip(COLUMNS, map(bytes, codes.columns), strict=True))
    refused("unknown entry mode 'subtract'", codes, mode="subtract")
    refused("position mode 'ranges'", codes, positions="ranges")
    refused("bitmap positions with gaps", codes, positions="bitmap")
    refused("column B has 2 bytes", planes, {"B": b"\6\0"})
    refused("elements of 3 bytes", codes, width=3)
    refused("64-bit sum", codes, digest=1 << 64)
    refused("declares columns", codes, sizes=(0,) * 14)
    refused("declares columns", codes, sizes=(1,))
    refused("does not hold 99 gaps", codes, count=99)
    refused("does not hold -1 gaps|-1 elements", codes, count=-1)
    refused("shift 33", codes, shift=33)
    refused("column L has 0 bytes", codes, shift=1)
    refused("column L has 1 bytes", codes, {"L": b"\0"})
    refused("does not hold 100 gaps", codes, {"G": by_name["G"] + b"\xff"})
    refused("lead to position", codes, {"G": by_name["G"][:-1] + b"\xfe"})
    refused("dense positions", codes, positions="dense")
    refused("code width 8", codes, code_bits=8)
    refused("code width 0", codes, code_bits=0)
    refused("column C", codes, code_bits=2)
    refused("column E1", codes, {"E1": by_name["E1"][:-1]})
    refused("column E2", codes, {"E2": by_name["E2"] + b"\0"})
    refused("byte planes beside codes", codes, {"O7": b"\0"})
    refused("codes in an item of mode overwrite", codes, mode="overwrite")
    refused("codes in an item of mode overwrite", planes, code_bits=2)
    refused("codes in an item of mode xor", mask, {"E1": b"\0"})
    refused("byte planes that do not hold 2", planes, {"O3": b"\0"})
    refused("byte planes that do not hold 2", planes, {"O4": b"\0\0"})
    refused("value of 0", mask, {f"O{j}": bytes(mask.columns[COLUMNS.index("O0") + j][:1]) + b"\0" for j in range(4)})
    refused("value of 0", planes, {f"O{j}": b"\1\0" if j == 2 else b"\0\0" for j in range(4)}, mode="add")
    refused("dense positions", dense, shift=1)
    refused("dense positions", dense, {"G": b"\0"})
    refused("dense positions", dense, region=Region.whole(4))


def test_a_dense_item_cannot_declare_more_elements_than_it_has_bytes_for() -> None:
    """A length that lies is refused before anything of that length is made."""
    directory = TensorDirectory([TensorSpec("w", "uint8", (1 << 50,))])
    for mode in MODES:
        item = Item(0, Region.whole(1 << 50), 1 << 50, mode, "dense", 1, 0, 0, 0, (0,) * 14)
        with pytest.raises(MalformedPayload, match="do not hold"):
            check_item(item, (b"",) * 14, directory)


def test_combine_wants_equal_lengths_and_widths() -> None:
    for values in (np.zeros(3, np.uint16), np.zeros(2, np.uint8)):
        with pytest.raises(UsageError, match="cannot change 2 words"):
            combine("add", np.zeros(2, np.uint16), values)


def test_shares_of_columns_must_add_up() -> None:
    entries = [encode_record(record_of([1, 2, 3], [4, 2, n]), "add") for n in (3, 5, 700)]
    items = [entry.item for entry in entries]
    columns = [b"".join(parts) for parts in zip(*(entry.columns for entry in entries), strict=True)]
    for (item, shares), entry in zip(slice_columns(items, columns), entries, strict=True):
        assert item == entry.item
        assert tuple(map(bytes, shares)) == entry.columns
    assert list(slice_columns([], [b""] * 14)) == []
    for wrong_items, wrong_columns in (
        (items[:2], columns),
        (items, columns[:12]),
        (items, [*columns[:12], b"\0"]),
        ([], columns),
        ([msgspec.structs.replace(items[0], sizes=(1, 2)), *items[1:]], columns),
        ([msgspec.structs.replace(items[0], sizes=(-1,) * 14), *items[1:]], columns),
    ):
        with pytest.raises(MalformedPayload):
            slice_columns(wrong_items, wrong_columns)
