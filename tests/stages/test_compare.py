"""chunk and compare: every differing bit pattern is found, in bounded memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcr_stream.canonical import Words
from dcr_stream.codec import words
from dcr_stream.codec.positions import decode_positions, position_fault
from dcr_stream.delta import Shard, Task
from dcr_stream.errors import CaptureError, UsageError
from dcr_stream.stages import chunk, compare
from dcr_stream.stages.compare import changed_elements
from tests.stages.support import Rank, changed, random_words, run, total_of


def rank_of(old: torch.Tensor, new: torch.Tensor) -> Rank:
    rank = Rank()
    rank.add("w", words(old).copy(), words(new))
    return rank


def found(rank: Rank, max_bytes: int = 1 << 20) -> dict[str, dict[int, int]]:
    """Task → position → difference."""
    out: dict[str, dict[int, int]] = {}
    for change in run(chunk(max_bytes=max_bytes) | compare(workers=3), rank.shards()):
        assert position_fault(change.positions) is None
        assert change.positions.elements == change.shard.hi - change.shard.lo
        assert change.differences.all()
        positions = decode_positions(change.positions) + change.shard.lo
        out.setdefault(change.name, {}).update(zip(positions.tolist(), change.differences.tolist(), strict=True))
    return out


@st.composite
def two_versions(draw: st.DrawFn) -> tuple[Words, Words]:
    """Two arrays of words of one width, equal in places."""
    width = draw(st.sampled_from([1, 2, 4, 8]))
    word = st.one_of(
        st.integers(0, (1 << 8 * width) - 1),
        st.integers(0, 8 * width - 1).map(lambda bit: 1 << bit),
    )
    pairs = draw(st.lists(st.one_of(st.tuples(word, word), word.map(lambda w: (w, w))), max_size=40))
    old, new = np.array(pairs, f"u{width}").reshape(-1, 2).T
    return old.copy(), new.copy()


@given(two_versions(), st.integers(1, 64))
def test_any_two_bit_patterns_that_differ_are_found(versions: tuple[Words, Words], max_bytes: int) -> None:
    """A15: no heuristic decides what has changed."""
    old, new = versions
    rank = Rank()
    rank.add("w", old, new)
    modulus = 1 << 8 * old.itemsize
    expected = {
        i: (int(b) - int(a)) % modulus for i, (a, b) in enumerate(zip(old, new, strict=True)) if int(a) != int(b)
    }
    assert found(rank, max_bytes).get("w", {}) == expected
    assert rank.tally.scanned == old.size
    assert rank.tally.elements == len(expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_the_sign_of_zero_is_found_and_an_unchanged_nan_is_not(dtype: torch.dtype) -> None:
    """A4: values are never compared, bits are."""
    old = torch.tensor([0.0, -0.0, float("nan"), 1.0, float("inf")], dtype=dtype)
    new = torch.tensor([-0.0, 0.0, float("nan"), 1.0, float("inf")], dtype=dtype)
    assert set(found(rank_of(old, new))["w"]) == {0, 1}


def test_every_nan_payload_is_found() -> None:
    """A1: a NaN is a value like any other."""
    old = torch.full((4,), 2.0)
    new = torch.tensor([0x7FC00000, 0x7FC00001, 0x7F800001, 0x40000000], dtype=torch.int64).to(torch.int32)
    assert set(found(rank_of(old, new.view(torch.float32)))["w"]) == {0, 1, 2}
    other_payload = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert set(found(rank_of(torch.tensor([float("nan")]), other_payload))["w"]) == {0}


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        (torch.tensor([True, False]), torch.tensor([True, True]), {1}),
        (torch.tensor([-1, 2], dtype=torch.int64), torch.tensor([-1, -(2**63)], dtype=torch.int64), {1}),
        (torch.tensor(3, dtype=torch.int32), torch.tensor(4, dtype=torch.int32), {0}),
        (torch.zeros(0), torch.zeros(0), set[int]()),
        (torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn), torch.tensor([1.0, 4.0]).to(torch.float8_e4m3fn), {1}),
    ],
    ids=["bool", "int64", "0-dim", "empty", "float8"],
)
def test_other_dtypes_and_shapes_are_compared_alike(old: torch.Tensor, new: torch.Tensor, where: set[int]) -> None:
    """A2, A6: no float is assumed, and neither dimensions nor elements."""
    assert set(found(rank_of(old, new)).get("w", {})) == where


@pytest.mark.parametrize(
    "view",
    [lambda t: t.t(), lambda t: t[:, ::2], lambda t: t[1:2].expand(5, 8), lambda t: t.permute(1, 0)[2:7]],
    ids=["transposed", "strided", "expanded", "permuted"],
)
def test_sources_that_are_not_contiguous_are_compared_in_row_major_order(
    view: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """A10, A11: strides are followed, overlapping ones too."""
    base = torch.arange(64, dtype=torch.float32).view(8, 8)
    old = view(base).contiguous()
    base[1] += 0.5
    new = view(base)
    expected = np.flatnonzero(words(old) != words(new.contiguous()))
    assert set(found(rank_of(old, new))["w"]) == set(expected.tolist()) != set()


def test_positions_do_not_depend_on_the_cutting() -> None:
    """B17: any chunk size finds the same."""
    rng = np.random.default_rng(1)
    rank = Rank()
    for i, size in enumerate((3, 0, 200, 17, 300)):
        old = random_words(rng, size)
        rank.add(f"w{i}", old, changed(rng, old, 0.2))
    whole = found(rank)
    totals = rank.tally.elements, rank.tally.total
    assert {"w2", "w3", "w4"} <= set(whole)
    for max_bytes in (2, 7, 64, 500):
        rank.tally.elements = rank.tally.total = 0
        assert found(rank, max_bytes) == whole
        assert (rank.tally.elements, rank.tally.total) == totals


def test_the_tally_agrees_with_what_is_passed_on() -> None:
    rng = np.random.default_rng(2)
    rank = Rank()
    for i in range(5):
        old = random_words(rng, 500)
        rank.add(f"w{i}", old, changed(rng, old, 0.1))
    changes = run(chunk(max_bytes=256) | compare(), rank.shards())
    assert (rank.tally.elements, rank.tally.total) == total_of(changes)
    assert rank.tally.elements > 0
    assert rank.tally.scanned == 2500


def test_unchanged_shards_pass_nothing_on_but_are_counted() -> None:
    rank = Rank()
    rank.add("w", np.arange(1000, dtype=np.uint16), np.arange(1000, dtype=np.uint16))
    assert run(chunk() | compare(), rank.shards()) == []
    assert (rank.tally.scanned, rank.tally.elements, rank.tally.total) == (1000, 0, 0)


def test_comparing_needs_the_memory_of_a_block_not_of_the_shard() -> None:
    """D10: peak memory is that of a block."""
    old = np.zeros(16 << 20, np.uint16)
    new = old.copy()
    new[:: 1 << 18] = 1
    tracemalloc.start()
    try:
        positions, _, _ = changed_elements(lambda lo, hi: new[lo:hi], old, 0, old.size, "w")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert positions.count == 64
    assert peak < 2 << 20


def test_large_shards_are_cut_and_small_ones_travel_together() -> None:
    rank = Rank()
    for key, size in (("a", 3), ("b", 20), ("c", 1), ("d", 3), ("e", 0), ("f", 1)):
        rank.add(key, np.zeros(size, np.uint16), np.zeros(size, np.uint16))
    groups = run(chunk(max_bytes=16), rank.shards())
    shown = [[(shard.name, shard.lo, shard.hi) for shard in group] for group in groups]
    assert shown == [
        [("a", 0, 3)],
        [("b", 0, 8)],
        [("b", 8, 16)],
        [("b", 16, 20), ("c", 0, 1), ("d", 0, 3), ("e", 0, 0)],
        [("f", 0, 1)],
    ]


def test_an_element_wider_than_the_bound_is_not_cut() -> None:
    rank = Rank()
    rank.add("w", np.zeros(3, np.uint64), np.ones(3, np.uint64))
    groups = run(chunk(max_bytes=1), rank.shards())
    assert [[(shard.lo, shard.hi) for shard in group] for group in groups] == [[(0, 1)], [(1, 2)], [(2, 3)]]


@pytest.mark.parametrize(
    ("live", "message"),
    [
        (np.zeros(0, np.uint16), r"read as uint16 of shape \(0,\)"),
        (np.zeros(4, np.uint32), "read as uint32"),
        (np.zeros((4, 1), np.uint16), r"shape \(4, 1\)"),
    ],
    ids=["empty", "other width", "not flat"],
)
def test_a_source_that_reads_something_else_is_refused(live: Words, message: str) -> None:
    """A8: a shard that looks empty never passes for unchanged."""
    rank = Rank()
    rank.add("w", np.zeros(4, np.uint16), live)
    with pytest.raises(CaptureError, match=message):
        run(chunk() | compare(), rank.shards())
    assert rank.tally.scanned == 0


def test_a_shard_that_does_not_fit_its_tracker_is_refused() -> None:
    rank = Rank()
    task = rank.add("w", np.zeros(4, np.uint16), np.zeros(4, np.uint16))
    longer = Task("w", 5, "uint16", task.read, ())
    with pytest.raises(UsageError, match="5 elements but its tracker holds 4"):
        run(chunk(), [Shard(longer, 0, 5, rank.trackers, rank.tally)])
    with pytest.raises(UsageError, match=r"\[2, 5\) lies outside"):
        run(chunk(), [Shard(task, 2, 5, rank.trackers, rank.tally)])


def test_trackers_and_live_weights_are_never_written() -> None:
    rng = np.random.default_rng(3)
    old = random_words(rng, 100)
    new = changed(rng, old, 1.0)
    old.flags.writeable = new.flags.writeable = False
    rank = Rank()
    rank.add("w", old, new)
    assert len(run(chunk(max_bytes=64) | compare(), rank.shards())) == 4


@pytest.mark.parametrize("build", [lambda: chunk(max_bytes=0), lambda: compare(workers=0)], ids=["chunk", "compare"])
def test_arguments_are_checked_at_the_door(build: Callable[[], object]) -> None:
    with pytest.raises(UsageError, match="too small; give 1 or more"):
        build()
