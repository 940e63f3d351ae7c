"""project: changes of a shard become records of the segments that they touch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcr_stream.canonical import Region
from dcr_stream.codec.positions import decode_positions, position_fault
from dcr_stream.delta import Change, Conversion, Record, Segment
from dcr_stream.errors import UsageError
from dcr_stream.stages import chunk, compare, project
from tests.stages.support import Rank, changed, random_words, run, total_of


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[Segment], int]:
    """Segments of random strided regions, with padding before, between and after; and the shard's length."""
    segments: list[Segment] = []
    at = draw(st.integers(0, 5))
    for tensor in range(draw(st.integers(0, 6))):
        sizes = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
        offset = draw(st.integers(0, 9))
        # Row-major strides of a larger box around the region.
        strides = tuple(7 ** (len(sizes) - 1 - d) for d in range(len(sizes)))
        segment = Segment(at, tensor, Region(offset, sizes, strides))
        segments.append(segment)
        at += segment.count + draw(st.one_of(st.just(0), st.integers(1, 4)))
    return segments, at + draw(st.integers(0, 3))


@given(layouts(), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.2, 1.0]), st.sampled_from([2, 10, 1 << 20]))
def test_records_equal_an_element_by_element_lookup(
    layout: tuple[list[Segment], int], seed: int, share: float, max_bytes: int
) -> None:
    """B23: padding of the source is advanced and never sent."""
    segments, numel = layout
    rng = np.random.default_rng(seed)
    old = random_words(rng, numel)
    new = changed(rng, old, share)
    rank = Rank()
    rank.add("w", old, new, segments)

    # Brute force: where does each element of the shard live?
    place: dict[int, tuple[int, int]] = {}
    for segment in segments:
        for position, flat in enumerate(segment.region.all_flat().tolist()):
            place[segment.start + position] = (segment.tensor, flat)
    expected = {i: place.get(i) for i in range(numel) if old[i] != new[i]}

    records = run(chunk(max_bytes=max_bytes) | compare() | project(), rank.shards())
    seen: dict[int, tuple[int, int] | None] = {}
    for record in records:
        assert isinstance(record, Record)
        assert record.positions.count
        assert position_fault(record.positions) is None
        assert record.positions.elements == record.region.count
        positions = decode_positions(record.positions)
        assert record.task == "w"
        local = record.start + positions
        assert (record.old == old[local]).all()
        assert (record.new() == new[local]).all()
        flats = record.region.flat(positions).tolist()
        for i, flat in zip(local.tolist(), flats, strict=True):
            assert i not in seen
            seen[i] = None if record.tensor is None else (record.tensor, flat)
    assert seen == expected
    assert (rank.tally.elements, rank.tally.total) == total_of(records)


def test_one_record_per_segment_touched() -> None:
    segments = [Segment(4 * i, i, Region.run(100 * i, 4)) for i in range(1000)]
    old = np.zeros(4000, np.uint16)
    new = old.copy()
    new[[5, 6, 3999]] = 1
    rank = Rank()
    rank.add("w", old, new, segments)
    records = [record for record in run(chunk() | compare() | project(), rank.shards()) if isinstance(record, Record)]
    assert [(record.tensor, record.start, decode_positions(record.positions).tolist()) for record in records] == [
        (1, 4, [1, 2]),
        (999, 3996, [3]),
    ]


def test_residual_changes_pass_unaltered() -> None:
    rank = Rank()
    rank.add("w", np.zeros(3, np.uint16), np.ones(3, np.uint16), None)
    (change,) = run(chunk() | compare(), rank.shards())
    (passed,) = run(project(), [change])
    assert isinstance(passed, Change)
    assert passed is change


def test_a_mapped_task_with_conversions_is_refused() -> None:
    """A17: whoever depends on a task must be computed anew when it changes, so such a task has to be residual."""
    rank = Rank()
    conversion = Conversion("scale", ("w",), (0,), dict)
    rank.add("w", np.zeros(3, np.uint16), np.ones(3, np.uint16), [Segment(0, 0, Region.whole(3))], [conversion])
    with pytest.raises(UsageError, match="both segments and conversions; make it residual"):
        run(chunk() | compare() | project(), rank.shards())
