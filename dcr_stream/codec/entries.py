"""Records to entries and back: what an item's columns hold, and every check before the first write.

An item says which elements of a region of one canonical tensor are coded, and how. Its share of each column
(``COLUMNS``, in this order) is:

=========  ==========================================================================================
G, L, B    which positions of the region (``positions``)
C, E1, E2  values of ``add`` items with 2-byte elements (``codes``); empty otherwise
O0 … O7    all other values: byte plane j holds byte j (least significant first) of every value's word, for
           j below the element width; empty planes otherwise
=========  ==========================================================================================

A value is ``new - old`` modulo 2^(8·width) for ``add``, ``old ^ new`` for ``xor`` and the new bits for ``overwrite``.
Values of ``add`` and ``xor`` are never 0: an unchanged element is not an entry. ``shift`` is 0 unless positions are
gaps, ``code_bits`` is 0 unless the item has codes.

A region of an item reaches no element twice: sorted by stride, each dimension of more than one element has a larger
stride than all smaller ones together can reach. Otherwise ``add`` would be applied twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from dcr_stream.canonical import Bytes, Region, TensorDirectory, Words, word_dtype
from dcr_stream.codec.boxes import located
from dcr_stream.codec.codes import code_fault, decode_codes, encode_codes
from dcr_stream.codec.digest import state_sum
from dcr_stream.codec.positions import position_fault
from dcr_stream.delta import Entry, EntryMode, Item, PositionMode, Positions, Record
from dcr_stream.errors import MalformedPayload, UsageError

__all__ = ["COLUMNS", "Decoded", "check_item", "decode_item", "elements_sum", "encode_record", "slice_columns"]

COLUMNS: tuple[str, ...] = ("G", "L", "B", "C", "E1", "E2", *(f"O{j}" for j in range(8)))
"""Names of the columns, in the order of ``Item.sizes`` and of a payload's streams."""

_CODES = COLUMNS.index("C")
_PLANES = COLUMNS.index("O0")
_MODES: tuple[str, ...] = get_args(EntryMode)
_POSITIONS: tuple[str, ...] = get_args(PositionMode)
_NONE = np.empty(0, np.uint8)
_MASK = 0xFFFF_FFFF_FFFF_FFFF

Column = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Decoded:
    """An item's elements: ``positions`` in its region, row-major, and their ``values`` (see the module)."""

    positions: Positions
    values: Words


def encode_record(record: Record, mode: EntryMode) -> Entry:
    """Code a record as ``mode``; the item's digest is the state sum over the record's new bits.

    Raises:
        UsageError: the record is a source change (no tensor), is not ``relative`` and ``mode`` is, has positions of
            another region, or holds a difference of 0 and ``mode`` is ``add`` or ``xor``.
    """
    if record.tensor is None:
        raise UsageError(f"the record of {record.name!r} is a source change and is never sent; drop it before encoding")
    if mode != "overwrite" and not record.relative:
        raise UsageError(
            f"tensor {record.name!r} must be overwritten in this attempt but was to be encoded as {mode}; "
            "encode it as overwrite"
        )
    positions, width = record.positions, record.old.itemsize
    if positions.elements != record.region.count:
        raise UsageError(
            f"a record of tensor {record.name!r} has positions among {positions.elements} elements for a region of "
            f"{record.region.count}; pass records on as made"
        )
    code_bits, codes, excess, escaped = 0, _NONE, _NONE, _NONE
    planes: list[Bytes] = []
    try:
        if mode == "add" and width == 2:
            code_bits, codes, excess, escaped = encode_codes(record.differences)
        elif mode != "overwrite" and not record.differences.all():  # an XOR mask is 0 exactly where the difference is
            raise ValueError("a difference of 0 is no change")
        else:
            planes = _split_planes(_values(record, mode))
    except ValueError as error:
        raise UsageError(
            f"a record of tensor {record.name!r} cannot be encoded as {mode}: {error}; leave unchanged elements out of "
            "records, or encode as overwrite"
        ) from error
    digest = record.digest
    if digest is None:
        digest = elements_sum(record.tensor, record.region, positions, record.new)
    rest = [_NONE] * (8 - len(planes))
    parts = [positions.high, positions.low, positions.bitmap, codes, excess, escaped, *planes, *rest]
    columns = tuple(np.ascontiguousarray(part).data for part in parts)
    item = Item(
        tensor=record.tensor,
        region=record.region,
        count=positions.count,
        mode=mode,
        positions=positions.mode,
        width=width,
        shift=positions.shift,
        code_bits=code_bits,
        digest=digest,
        sizes=tuple(map(len, columns)),
    )
    return Entry(item, columns)


def elements_sum(tensor: int, region: Region, positions: Positions, bits: Callable[[slice], Words]) -> int:
    """State sum over elements of a region, whose words ``bits`` hands out: what an item's digest is."""
    total = 0
    for flat, some in located(region, positions):
        total += state_sum(tensor, flat, bits(some))
    return total & _MASK


def check_item(item: Item, columns: Sequence[Column], directory: TensorDirectory) -> None:
    """Check an item in full against the directory and its columns; nothing may be written before this has passed.

    Afterwards ``decode_item`` returns exactly ``item.count`` elements inside the tensor, and every byte of the columns
    has been accounted for. Temporary memory is proportional to the columns' size; no index array is built.

    Raises:
        MalformedPayload: naming the tensor and what is wrong.
    """
    if not 0 <= item.tensor < len(directory):
        raise _malformed(item, f"its index is not among the {len(directory)} tensors of the directory")
    spec = directory[item.tensor]
    if item.width != spec.width:
        raise _malformed(item, f"{item.width}-byte elements for dtype {spec.dtype}", spec.name)
    if not item.region.fits(spec.numel):
        raise _malformed(item, f"{item.region} does not lie inside its {spec.numel} elements", spec.name)
    fault = _item_fault(item, columns)
    if fault is not None:
        raise _malformed(item, fault, spec.name)


def decode_item(item: Item, columns: Sequence[Column]) -> Decoded:
    """Decode an item, with every check of ``check_item`` that needs no directory.

    Raises:
        MalformedPayload: naming the tensor and what is wrong.
    """
    fault = _item_fault(item, columns)
    if fault is not None:
        raise _malformed(item, fault)
    arrays = _arrays(columns)
    positions = _positions(item, arrays)
    codes, excess, escaped = arrays[_CODES:_PLANES]
    if item.code_bits:
        return Decoded(positions, decode_codes(codes, excess, escaped, item.code_bits, item.count))
    return Decoded(positions, _join_planes(arrays[_PLANES : _PLANES + item.width], item.count))


def slice_columns(items: Sequence[Item], columns: Sequence[Column]) -> Iterator[tuple[Item, tuple[memoryview, ...]]]:
    """Each item with its share of every column, in order, without copying.

    The shares are checked before this returns: they must add up to the columns exactly.

    Raises:
        MalformedPayload: they do not.
    """
    if len(columns) != len(COLUMNS):
        raise MalformedPayload(f"a bucket has {len(columns)} columns, not {len(COLUMNS)}; discard it and send it again")
    for item in items:
        if len(item.sizes) != len(COLUMNS) or min(item.sizes) < 0:
            raise _malformed(item, f"its column shares {item.sizes} are not {len(COLUMNS)} sizes")
    for name, column, sizes in zip(COLUMNS, columns, zip(*(item.sizes for item in items), strict=True), strict=False):
        if sum(sizes) != len(column):
            raise MalformedPayload(
                f"column {name} of a bucket has {len(column)} bytes, its {len(items)} items declare {sum(sizes)}; "
                "discard it and send it again"
            )
    if not items and any(map(len, columns)):
        raise MalformedPayload("a bucket without items has bytes in its columns; discard it and send it again")
    return _shares(items, [memoryview(column) for column in columns])


def _shares(items: Sequence[Item], views: list[memoryview]) -> Iterator[tuple[Item, tuple[memoryview, ...]]]:
    offsets = [0] * len(views)
    for item in items:
        ends = [lo + size for lo, size in zip(offsets, item.sizes, strict=True)]
        yield item, tuple(view[lo:hi] for view, lo, hi in zip(views, offsets, ends, strict=True))
        offsets = ends


def _malformed(item: Item, fault: str, name: str | None = None) -> MalformedPayload:
    what = f"{name!r}" if name is not None else f"number {item.tensor}"
    return MalformedPayload(
        f"malformed item of tensor {what}: {fault}; discard the payload and have its owner send it again"
    )


def _item_fault(item: Item, columns: Sequence[Column]) -> str | None:
    """What is wrong with an item, the directory aside; None if nothing. Bounds are checked before arrays are made."""
    if item.mode not in _MODES or item.positions not in _POSITIONS:
        return f"unknown entry mode {item.mode!r} or position mode {item.positions!r}"
    if item.width not in (1, 2, 4, 8):
        return f"elements of {item.width} bytes"
    if not 0 <= item.digest < 1 << 64:
        return f"digest {item.digest} is not a 64-bit sum"
    if len(columns) != len(COLUMNS) or item.sizes != tuple(map(len, columns)):
        return f"declares columns of {item.sizes} bytes, has {tuple(map(len, columns))}"
    region = item.region
    if not _distinct(region):
        return f"{region} is not a box of distinct elements"
    if not 0 <= item.count <= region.count:
        return f"{item.count} elements in a region of {region.count}"
    arrays = _arrays(columns)
    fault = position_fault(_positions(item, arrays))
    if fault is not None:
        return fault
    codes, excess, escaped, *planes = arrays[_CODES:]
    if item.mode == "add" and item.width == 2:
        if any(plane.size for plane in planes):
            return "byte planes beside codes"
        return code_fault(codes, excess, escaped, item.code_bits, item.count)
    if item.code_bits or codes.size or excess.size or escaped.size:
        return f"codes in an item of mode {item.mode} with {item.width}-byte elements"
    if any(plane.size != (item.count if j < item.width else 0) for j, plane in enumerate(planes)):
        return f"byte planes that do not hold {item.count} values of {item.width} bytes"
    if item.mode != "overwrite" and not _all_nonzero(planes[: item.width]):
        return f"mode {item.mode} with a value of 0"
    return None


def _distinct(region: Region) -> bool:
    """Whether a region is well formed and reaches no element twice (see the module)."""
    if len(region.sizes) != len(region.strides) or not region.fits(max(region.last + 1, region.offset)):
        return False
    reach = 0
    for stride, size in sorted(zip(region.strides, region.sizes, strict=True)):
        if size > 1 and stride <= reach:
            return False
        reach += max(size - 1, 0) * stride
    return True


def _arrays(columns: Sequence[Column]) -> list[Bytes]:
    return [np.frombuffer(column, np.uint8) for column in columns]


def _positions(item: Item, arrays: Sequence[Bytes]) -> Positions:
    high, low, bitmap = arrays[:_CODES]
    return Positions(item.region.count, item.count, item.positions, item.shift, high, low, bitmap)


def _values(record: Record, mode: EntryMode) -> Words:
    if mode == "add":
        return record.differences
    return record.old ^ record.new() if mode == "xor" else record.new()


def _split_planes(values: Words) -> list[Bytes]:
    width = values.itemsize
    little = np.ascontiguousarray(values, dtype=f"<u{width}").view(np.uint8).reshape(-1, width)
    return [little[:, j] for j in range(width)]


def _join_planes(planes: Sequence[Bytes], count: int) -> Words:
    width = len(planes)
    little = np.empty((count, width), np.uint8)
    for j, plane in enumerate(planes):
        little[:, j] = plane
    return little.reshape(-1).view(f"<u{width}").astype(word_dtype(width), copy=False)


def _all_nonzero(planes: Sequence[Bytes]) -> bool:
    seen = planes[0].copy()
    for plane in planes[1:]:
        seen |= plane
    return bool(seen.all())
