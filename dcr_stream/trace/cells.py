"""Cells: which ranks of an engine hold which part of each canonical tensor, and how often."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from dcr_stream.canonical import Indices, Region, TensorDirectory
from dcr_stream.errors import DirectoryMismatch, PlacementError, UnplacedTensor
from dcr_stream.trace.boxes import compress, strided
from dcr_stream.trace.plan import Box, Finding, PlacementPlan
from dcr_stream.trace.sweep import runs_of

__all__ = ["EnginePlacement", "assign_cells"]


@dataclass(frozen=True)
class EnginePlacement:
    """The placement of all ranks of one engine.

    A *cell* of a tensor is the set of its elements that the same ranks hold, each the same number of times. ``cells``
    counts the cells of every placed tensor; they are numbered from 0 per tensor. ``plans`` are the ranks' plans, in
    rank order, with boxes cut so that each lies in one cell and is (part of) one copy of it. ``whole`` tensors are
    whole on some rank. ``aliased`` ones share storage with another name on some rank: unless exactly one of those
    names is sent, they must be overwritten. ``findings`` are everything that stands against refits, all at once.
    """

    plans: tuple[PlacementPlan, ...]
    cells: dict[int, int]
    whole: frozenset[int]
    aliased: frozenset[int]
    findings: tuple[Finding, ...]
    copies: dict[tuple[int, int], tuple[int, ...]]
    incomplete: frozenset[int]

    def holders(self, tensor: int, cell: int) -> tuple[int, ...]:
        """The ranks that hold a cell: one entry per copy, ascending, so that a rank may occur several times."""
        return self.copies[tensor, cell]

    def complete(self, tensor: int) -> bool:
        """Whether the cells cover every element of a tensor, so that their sums add up to its owners' sum."""
        return tensor not in self.incomplete

    def raise_for_findings(self) -> None:
        """Refuse an engine that cannot be refitted.

        Raises:
            UnplacedTensor: elements are held by no rank; the text has all other findings as well.
            PlacementError: anything else, all findings in one text.
        """
        refusals = [f for f in self.findings if f.severity == "refuse"]
        if not refusals:
            return
        kind = UnplacedTensor if any(f.subject == _UNPLACED for f in refusals) else PlacementError
        lines = "".join(f"\n- {f.text}" for f in refusals)
        raise kind(f"this engine cannot be refitted, {len(refusals)} finding(s):{lines}")


_UNPLACED = "unplaced"


def assign_cells(
    plans: Sequence[PlacementPlan], directory: TensorDirectory, unplaced: frozenset[str]
) -> EnginePlacement:
    """Label every canonical element with the ranks (and how often each) that hold it, and cut boxes at the borders.

    Args:
        plans: the plans of all ranks of one engine, in rank order.
        directory: the canonical tensors that they were traced for.
        unplaced: names that this engine may leave without a place.

    Memory: one tensor at a time, about 20 bytes an element, and 50 for boxes that have to be cut.

    Raises:
        DirectoryMismatch: a plan belongs to another directory.
    """
    for rank, plan in enumerate(plans):
        if plan.directory != directory.digest:
            raise DirectoryMismatch(f"the plan of rank {rank} was traced for another tensor directory; trace it again")
    boxes: list[dict[int, list[Box]]] = [{} for _ in plans]
    cells: dict[int, int] = {}
    copies: dict[tuple[int, int], tuple[int, ...]] = {}
    whole = frozenset(t for plan in plans for t in plan.tensors("whole"))
    refused = frozenset(t for plan in plans for t in plan.tensors("refused"))
    findings = _rank_findings(plans)
    missing: dict[int, int] = {}
    incomplete: set[int] = set()
    for tensor, spec in enumerate(directory):
        labels, holders, counts = _label(tensor, spec.numel, plans)
        bare = next((label for label, held in enumerate(holders) if not held), None)
        lacking = 0 if bare is None else counts[bare]
        placed = [label for label, held in enumerate(holders) if held and counts[label]]
        number = np.full(len(holders), -1, np.int64)
        number[placed] = np.arange(len(placed))
        if placed:
            cells[tensor] = len(placed)
        for label in placed:
            copies[tensor, int(number[label])] = holders[label]
        if lacking or tensor in whole or tensor in refused:
            incomplete.add(tensor)
        if lacking and tensor not in whole and tensor not in refused and spec.name not in unplaced:
            missing[tensor] = lacking
        for rank, plan in enumerate(plans):
            held = plan.by_tensor.get(tensor, ())
            boxes[rank][tensor] = list(_cut(held, labels, number, spec.numel))
    findings += _missing_findings(missing, directory)
    return EnginePlacement(
        plans=tuple(
            msgspec.structs.replace(plan, boxes=tuple(b for part in cut.values() for b in part))
            for plan, cut in zip(plans, boxes, strict=True)
        ),
        cells=cells,
        whole=whole,
        aliased=frozenset(t for plan in plans for t in plan.aliased),
        findings=tuple(findings),
        copies=copies,
        incomplete=frozenset(incomplete),
    )


def _rank_findings(plans: Sequence[PlacementPlan]) -> list[Finding]:
    """Findings of all ranks; what several say is said once."""
    ranks: dict[Finding, list[int]] = {}
    for rank, plan in enumerate(plans):
        for finding in plan.findings:
            ranks.setdefault(finding, []).append(rank)
    return [
        Finding(f.severity, f.subject, f"{'rank' if len(r) == 1 else 'ranks'} {', '.join(map(str, r))}: {f.text}")
        for f, r in ranks.items()
    ]


def _missing_findings(missing: dict[int, int], directory: TensorDirectory) -> list[Finding]:
    if not missing:
        return []
    what = ", ".join(f"{directory[t].name!r} ({n} of {directory[t].numel} elements)" for t, n in missing.items())
    paste = "unplaced=[" + ", ".join(f'"{directory[t].name}"' for t in missing) + "]"
    text = (
        f"no rank holds {what}: the native loader skipped them, or keeps them to itself; correct the names, or if this "
        f"engine really has no place for them declare {paste}"
    )
    return [Finding("refuse", _UNPLACED, text)]


def _paint(counts: NDArray[np.uint32], region: Region) -> NDArray[np.uint32]:
    """The part of ``counts`` under a region, each element once: broadcast dimensions are left out."""
    kept = [d for d, stride in enumerate(region.strides) if stride > 0 or region.sizes[d] == 1]
    sizes = tuple(region.sizes[d] for d in kept) or (1,)
    strides = tuple(region.strides[d] for d in kept) or (1,)
    view: NDArray[np.uint32] = strided(counts, Region(region.offset, sizes, strides))
    return view


def _label(
    tensor: int, numel: int, plans: Sequence[PlacementPlan]
) -> tuple[NDArray[np.int32], list[tuple[int, ...]], list[int]]:
    """Label of every element, and for every label the holding ranks (one per copy) and the number of elements."""
    labels = np.zeros(numel, np.int32)
    holders: list[tuple[int, ...]] = [()]
    for rank, plan in enumerate(plans):
        held = plan.by_tensor.get(tensor, ())
        if not held:
            continue
        counts = np.zeros(numel, np.uint32)
        for box in held:
            spot = _paint(counts, box.region)
            spot += np.uint32(box.copies)
        base = int(counts.max()) + 1
        joint = labels.astype(np.int64) * base + counts
        present = np.flatnonzero(np.bincount(joint, minlength=1))
        table = np.zeros(int(present[-1]) + 1, np.int32)
        table[present] = np.arange(present.size)
        labels = table[joint]
        holders = [holders[p // base] + (rank,) * (p % base) for p in present.tolist()]
    counted = np.bincount(labels, minlength=len(holders)).tolist()
    return labels, holders, counted


def _cut(boxes: Sequence[Box], labels: NDArray[np.int32], number: Indices, numel: int) -> Iterator[Box]:
    """One rank's boxes of a tensor, cut so that each lies in one cell and starts at one copy."""
    earlier = np.zeros(numel if len(boxes) > 1 else 0, np.uint32)
    for box in boxes:
        under = _paint(labels.view(), box.region)  # type: ignore[arg-type]
        before = _paint(earlier, box.region).copy() if earlier.size else np.zeros(1, np.uint32)
        if earlier.size:
            spot = _paint(earlier, box.region)
            spot += np.uint32(box.copies)
        if under.min() == under.max() and before.min() == before.max():
            cell = int(number[under.flat[0]])
            yield msgspec.structs.replace(box, cell=cell, copy=int(before.flat[0]))
            continue
        yield from _split(box, labels, np.broadcast_to(before, under.shape), number)


def _split(box: Box, labels: NDArray[np.int32], before: NDArray[np.uint32], number: Indices) -> Iterator[Box]:
    broadcast = [d for d, s in enumerate(box.region.strides) if s == 0 and box.region.sizes[d] > 1]
    if broadcast:
        # Copies of a broadcast are cut one by one; they count up from the elements' earlier copies.
        d = broadcast[0]
        for i in range(box.region.sizes[d]):
            one = msgspec.structs.replace(box, region=_at(box.region, d, i), place=_at(box.place, d, i))
            yield from _split(one, labels, before + np.uint32(i * one.copies), number)
        return
    flat, at = box.region.all_flat(), box.place.all_flat()
    order = np.argsort(at)
    flat, at, copy = flat[order], at[order], before.reshape(-1)[order].astype(np.int64)
    key = labels[flat].astype(np.int64) * (int(copy.max()) + 1) + copy
    for value in np.unique(key).tolist():
        mine = np.flatnonzero(key == value)
        starts, count = runs_of(at[mine], flat[mine])
        for region, place in compress(at[mine][starts], flat[mine][starts], count):
            cell = int(number[labels[region.offset]])
            yield msgspec.structs.replace(box, region=region, place=place, cell=cell, copy=int(copy[mine[0]]))


def _at(region: Region, dim: int, index: int) -> Region:
    """The part of a region at one coordinate of a dimension."""
    sizes = region.sizes[:dim] + region.sizes[dim + 1 :]
    strides = region.strides[:dim] + region.strides[dim + 1 :]
    return Region(region.offset + index * region.strides[dim], sizes or (1,), strides or (1,))
