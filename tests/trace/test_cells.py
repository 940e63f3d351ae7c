"""Cells tell which ranks hold which elements, and how often."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcr_stream.canonical import Region, TensorDirectory, TensorSpec
from dcr_stream.errors import DirectoryMismatch, PlacementError, UnplacedTensor
from dcr_stream.trace import Box, EnginePlacement, Finding, Layout, PlacementPlan, assign_cells, trace
from tests.native_loader import NativeConfig, NativeModel, directory_of, make_checkpoint, torch_loader

DIRECTORY = TensorDirectory([TensorSpec("w", "bfloat16", (6, 10))])


def plan_of(*boxes: tuple[Region, Region], directory: TensorDirectory = DIRECTORY) -> PlacementPlan:
    return PlacementPlan(
        directory=directory.digest,
        boxes=tuple(Box(0, region, 0, place) for region, place in boxes),
        classes=("mapped",) if boxes else ("skipped",),
        widths=(2,),
        aliased=(),
        identity=Layout((), ()),
        constant_ranges=0,
        mapped_bytes=0,
        total_bytes=0,
        findings=(),
    )


def held(placement: EnginePlacement) -> dict[int, Counter[int]]:
    """Per canonical element, how often each rank holds it, told from the cut boxes."""
    found: dict[int, Counter[int]] = {}
    for rank, plan in enumerate(placement.plans):
        for box in plan.boxes:
            for flat in box.region.all_flat().tolist():
                found.setdefault(flat, Counter())[rank] += 1
    return found


def check(placement: EnginePlacement) -> None:
    """Every box lies in one cell, every copy covers its cell once, and cells are as coarse as they can be."""
    elements: dict[int, set[int]] = {}
    for flat, ranks in held(placement).items():
        cells = {
            box.cell for plan in placement.plans for box in plan.boxes if flat in set(box.region.all_flat().tolist())
        }
        assert len(cells) == 1
        [cell] = cells
        elements.setdefault(cell, set()).add(flat)
        assert Counter(placement.holders(0, cell)) == ranks
    assert sorted(elements) == list(range(placement.cells.get(0, 0)))
    labels = {placement.holders(0, cell) for cell in elements}
    assert len(labels) == len(elements)
    for rank, plan in enumerate(placement.plans):
        covered: dict[tuple[int, int], list[int]] = {}
        for box in plan.boxes:
            spread = box.region.all_flat().reshape(box.region.sizes)
            axes = tuple(d for d, s in enumerate(box.region.strides) if s == 0 and box.region.sizes[d] > 1)
            one = spread[tuple(0 if d in axes else slice(None) for d in range(spread.ndim))].reshape(-1).tolist()
            for copy in range(box.copy, box.copy + box.copies):
                covered.setdefault((box.cell, copy), []).extend(one)
        for (cell, copy), flats in covered.items():
            assert sorted(flats) == sorted(elements[cell])
            assert copy < placement.holders(0, cell).count(rank)


def test_ranks_with_the_same_part_share_one_cell() -> None:
    whole = Region.whole(60)
    placement = assign_cells([plan_of((whole, whole)), plan_of((whole, whole))], DIRECTORY, frozenset())
    assert placement.cells == {0: 1}
    assert placement.holders(0, 0) == (0, 1)
    assert placement.complete(0)
    check(placement)


def test_column_slices_are_cells_of_their_own() -> None:
    plans = [plan_of((Region(5 * r, (6, 5), (10, 1)), Region(0, (6, 5), (5, 1)))) for r in range(2)]
    placement = assign_cells(plans, DIRECTORY, frozenset())
    assert placement.cells == {0: 2}
    assert {placement.holders(0, 0), placement.holders(0, 1)} == {(0,), (1,)}
    check(placement)


def test_boxes_are_cut_where_other_ranks_end() -> None:
    everything = (Region.whole(60), Region.whole(60))
    columns = (Region(2, (6, 3), (10, 1)), Region(0, (6, 3), (3, 1)))
    placement = assign_cells([plan_of(everything), plan_of(columns)], DIRECTORY, frozenset())
    assert placement.cells == {0: 2}
    assert {placement.holders(0, c) for c in range(2)} == {(0,), (0, 1)}
    check(placement)


def test_two_copies_on_one_rank_are_two_holders() -> None:
    twice = plan_of((Region.whole(60), Region.whole(60)), (Region.run(10, 20), Region.run(100, 20)))
    placement = assign_cells([twice], DIRECTORY, frozenset())
    assert sorted(placement.holders(0, c) for c in range(2)) == [(0,), (0, 0)]
    check(placement)


def test_a_broadcast_counts_every_copy() -> None:
    spread = (Region(0, (3, 60), (0, 1)), Region(0, (3, 60), (60, 1)))
    placement = assign_cells([plan_of(spread)], DIRECTORY, frozenset())
    assert placement.holders(0, 0) == (0, 0, 0)
    check(placement)


@st.composite
def random_plans(draw: st.DrawFn) -> list[PlacementPlan]:
    plans = []
    for _ in range(draw(st.integers(1, 3))):
        boxes, at = [], 0
        for _ in range(draw(st.integers(0, 3))):
            rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 6))
            first = draw(st.integers(0, 6 - rows)) * 10 + draw(st.integers(0, 10 - columns))
            sizes, strides = (rows, columns), (10, 1)
            if draw(st.booleans()):
                sizes, strides = (columns, rows), (1, 10)
            copies = draw(st.integers(1, 2))
            count = rows * columns
            region = Region(first, (copies, *sizes), (0, *strides))
            place = Region(at, (copies, *sizes), (count, sizes[1], 1))
            if copies == 1:
                region, place = Region(first, sizes, strides), Region(at, sizes, (sizes[1], 1))
            boxes.append((region, place))
            at += copies * count
        plans.append(plan_of(*boxes))
    return plans


@given(random_plans())
def test_cells_describe_any_placement(plans: list[PlacementPlan]) -> None:
    placement = assign_cells(plans, DIRECTORY, frozenset(["w"]))
    before = [Counter(pairs(plan)) for plan in plans]
    after = [Counter(pairs(plan)) for plan in placement.plans]
    assert before == after
    check(placement)
    assert placement.complete(0) == (len(held(placement)) == 60)


def pairs(plan: PlacementPlan) -> list[tuple[int, int]]:
    return [
        pair
        for box in plan.boxes
        for pair in zip(box.region.all_flat().tolist(), box.place.all_flat().tolist(), strict=True)
    ]


def test_replicated_kv_heads_are_held_by_several_ranks() -> None:
    config = NativeConfig(layers=1, kv_heads=2)
    directory = directory_of(make_checkpoint(0, config))
    plans = [trace(torch_loader(NativeModel(config, rank, 8)), directory) for rank in range(8)]
    placement = assign_cells(plans, directory, frozenset())
    key = directory.index("layers.0.self_attn.k_proj.weight")
    query = directory.index("layers.0.self_attn.q_proj.weight")
    assert {placement.holders(key, c) for c in range(placement.cells[key])} == {(0, 1, 2, 3), (4, 5, 6, 7)}
    assert placement.cells[query] == 8
    assert {directory[t].name for t in placement.whole} == {"layers.0.mixer.A_log", "token_mask"}
    assert all(placement.complete(t) for t in range(len(directory)) if t not in placement.whole)


def test_elements_without_a_place_are_refused_with_the_list_to_paste() -> None:
    """B14: what no rank holds is an error unless it is declared."""
    half = plan_of((Region.run(0, 30), Region.run(0, 30)))
    placement = assign_cells([half, half], DIRECTORY, frozenset())
    with pytest.raises(UnplacedTensor, match=r"'w' \(30 of 60 elements\).*unplaced=\[\"w\"\]"):
        placement.raise_for_findings()
    declared = assign_cells([half, half], DIRECTORY, frozenset(["w"]))
    declared.raise_for_findings()
    assert not declared.complete(0)


def test_a_rank_that_skips_a_tensor_is_no_finding_while_another_holds_it() -> None:
    """B5: a rank without a part of a tensor is told apart from a tensor that got lost."""
    placement = assign_cells([plan_of((Region.whole(60), Region.whole(60))), plan_of()], DIRECTORY, frozenset())
    placement.raise_for_findings()
    assert placement.holders(0, 0) == (0,)


def test_all_findings_are_raised_at_once_and_said_once() -> None:
    one = Finding("refuse", "a", "first problem; do this")
    two = Finding("refuse", "b", "second problem; do that")
    note = Finding("note", "c", "nothing to worry about")
    empty = plan_of()
    plans = [msgspec.structs.replace(empty, findings=f) for f in ((one, note), (one, two), (two,))]
    with pytest.raises(PlacementError) as caught:
        assign_cells(plans, DIRECTORY, frozenset(["w"])).raise_for_findings()
    text = str(caught.value)
    assert "ranks 0, 1: first problem; do this" in text
    assert "ranks 1, 2: second problem; do that" in text
    assert "nothing to worry about" not in text


def test_a_plan_for_another_directory_is_refused() -> None:
    other = TensorDirectory([TensorSpec("w", "bfloat16", (6, 11))])
    with pytest.raises(DirectoryMismatch, match="rank 1"):
        assign_cells([plan_of(), plan_of(directory=other)], DIRECTORY, frozenset())


def test_empty_tensors_are_complete() -> None:
    directory = directory_of({"w": torch.zeros(0, 4)})
    placement = assign_cells([plan_of(directory=directory)], directory, frozenset())
    placement.raise_for_findings()
    assert placement.complete(0)
    assert placement.cells == {}
