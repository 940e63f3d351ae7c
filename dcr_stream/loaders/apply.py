"""Apply items to storage through the placement plan, and read back what storage then holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from dcr_stream.canonical import Indices, Region, Words
from dcr_stream.codec.boxes import located, sum_box, write_box
from dcr_stream.codec.device import DeviceWords, gather
from dcr_stream.codec.digest import add_sums, state_sums, tensor_key
from dcr_stream.codec.entries import Decoded
from dcr_stream.delta import Item, Positions
from dcr_stream.errors import UntracedPath
from dcr_stream.messages import Sum
from dcr_stream.trace.plan import Box, PlacementPlan
from dcr_stream.trace.storage import StorageMap

__all__ = ["apply_item", "full_sums", "read_back"]

_MASK = 0xFFFF_FFFF_FFFF_FFFF
_BLOCK = 1 << 16


def apply_item(plan: PlacementPlan, storage: StorageMap, item: Item, decoded: Decoded) -> dict[int, list[int]]:
    """Write an item's elements to every place that this rank has for them, and read back what storage then holds.

    Each storage element under the item is written exactly once, whatever the region and the boxes look like; elements
    that other ranks hold are passed over. Elements are written and read back in blocks: a block is walked again while
    it is still cached, loading storage anew. The item must have been checked against the directory.

    Returns:
        As :func:`read_back`.

    Raises:
        UntracedPath: the tensor goes whole through the loader, or is refused, on this rank.
    """
    return _walk(plan, storage, item, decoded.positions, decoded.values)


def read_back(plan: PlacementPlan, storage: StorageMap, item: Item, positions: Positions) -> dict[int, list[int]]:
    """State sums of an item's elements as storage holds them now, loaded anew.

    Returns:
        For each cell of the tensor that this rank holds, one sum per copy (0 for a cell without changed elements).

    Raises:
        UntracedPath: see :func:`apply_item`.
    """
    return _walk(plan, storage, item, positions, None)


def _walk(
    plan: PlacementPlan, storage: StorageMap, item: Item, positions: Positions, values: Words | None
) -> dict[int, list[int]]:
    _require_placed(plan, item.tensor)
    boxes = [(box, storage.memory(box.storage, item.width)) for box in plan.by_tensor.get(item.tensor, ())]
    key = tensor_key(item.tensor)
    sums: dict[int, list[int]] = {}
    for box, _ in boxes:
        copies = sums.setdefault(box.cell, [])
        copies += [0] * (box.copy + box.copies - len(copies))
    row_major = _row_major(item.region)
    for flat, some in located(item.region, positions):
        new = values[some] if values is not None else None
        if not row_major:
            order = np.argsort(flat)
            flat, new = flat[order], new[order] if new is not None else None
        for box, words in boxes:
            if isinstance(words, DeviceWords):
                if new is None:
                    found = words.sum_box(box.region, box.place, key, flat)
                else:
                    found = words.write_box(box.region, box.place, item.mode, key, flat, new)
            elif new is None:
                found = sum_box(words, box.region, box.place, key, flat)
            else:
                found = write_box(words, box.region, box.place, item.mode, key, flat, new)
            for copy, each in enumerate(found, box.copy):
                sums[box.cell][copy] = (sums[box.cell][copy] + each) & _MASK
    return sums


def full_sums(plan: PlacementPlan, storage: StorageMap, tensors: Iterable[int]) -> dict[int, dict[int, list[Sum]]]:
    """State sums of all that this rank holds of some tensors: per tensor and cell, one per copy.

    Tensors that this rank does not map are left out. Read block by block: memory does not grow with the tensor.
    """
    found: dict[int, dict[int, list[Sum]]] = {}
    for tensor in tensors:
        for box in plan.by_tensor.get(tensor, ()):
            words = storage.memory(box.storage, plan.widths[tensor])
            copies = found.setdefault(tensor, {}).setdefault(box.cell, [])
            copies += [(0, 0)] * (box.copy + box.copies - len(copies))
            for copy, region, place in _single_copies(box):
                for flat, at in _in_blocks(region, place):
                    copies[copy] = add_sums(copies[copy], state_sums(tensor, flat, gather(words, at)))
    return found


def _require_placed(plan: PlacementPlan, tensor: int) -> None:
    if plan.classes[tensor] in ("whole", "refused"):
        raise UntracedPath(
            f"tensor number {tensor} is {plan.classes[tensor]!r} on this rank and has no boxes; "
            "give it whole to the native loader, or see the prepare report"
        )


def _row_major(region: Region) -> bool:
    """Whether flat indices ascend with positions: each dimension steps over all that is inside of it."""
    reach = 0
    for size, stride in zip(reversed(region.sizes), reversed(region.strides), strict=True):
        if size > 1 and stride <= reach:
            return False
        reach += (size - 1) * stride
    return True


def _single_copies(box: Box) -> Iterator[tuple[int, Region, Region]]:
    """Each copy that a box holds: its number, and the canonical region and place without broadcast dimensions."""
    sizes = box.region.sizes
    spread = [d for d, stride in enumerate(box.region.strides) if stride == 0 and sizes[d] > 1]
    kept = [d for d in range(len(sizes)) if d not in spread]
    kept_sizes = tuple(sizes[d] for d in kept) or (1,)
    strides = tuple(box.region.strides[d] for d in kept) or (1,)
    steps = tuple(box.place.strides[d] for d in kept) or (1,)
    region = Region(box.region.offset, kept_sizes, strides)
    for copy, at in enumerate(np.ndindex(*(sizes[d] for d in spread)), box.copy):
        shift = sum(i * box.place.strides[d] for i, d in zip(at, spread, strict=True))
        yield copy, region, Region(box.place.offset + shift, kept_sizes, steps)


def _in_blocks(region: Region, place: Region) -> Iterator[tuple[Indices, Indices]]:
    for lo in range(0, region.count, _BLOCK):
        positions = np.arange(lo, min(lo + _BLOCK, region.count), dtype=np.int64)
        yield region.flat(positions), place.flat(positions)
