"""convert: residual tensors are computed when an input changed, and only their changed bits pass on."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import pytest

from dcr_stream.canonical import Region, Words
from dcr_stream.codec.positions import decode_positions
from dcr_stream.delta import Conversion, Record, Segment
from dcr_stream.errors import CaptureError
from dcr_stream.stages import chunk, compare, convert, project
from tests.stages.support import Rank, run, total_of

CAPTURE = chunk(max_bytes=64) | compare(workers=2) | project() | convert()


class Halves:
    """Two sources ``a`` and ``b``, and tensors computed from them."""

    def __init__(self) -> None:
        self.rank = Rank()
        self.runs: list[str] = []
        self.old = {key: np.arange(100, dtype=np.uint16) for key in "ab"}
        self.new = {key: words.copy() for key, words in self.old.items()}
        own = {key: Conversion(f"{key}/2", (key,), (i,), partial(self.halve, key)) for i, key in enumerate("ab")}
        both = Conversion("sum", ("a", "b"), (2,), self.add)
        for key in "ab":
            self.rank.add(key, self.old[key], self.new[key], None, (own[key], both))
        self.rank.trackers.residual = {0: self.old["a"] // 2, 1: self.old["b"] // 2, 2: self.old["a"] * 2}

    def halve(self, key: str) -> Mapping[int, Words]:
        self.runs.append(key)
        return {"ab".index(key): self.new[key] // 2}

    def add(self) -> Mapping[int, Words]:
        self.runs.append("sum")
        return {2: self.new["a"] + self.new["b"]}

    def capture(self) -> list[Record]:
        return run(CAPTURE, self.rank.shards())


def test_nothing_is_converted_when_nothing_changed() -> None:
    halves = Halves()
    assert halves.capture() == []
    assert halves.runs == []


def test_only_conversions_of_changed_sources_run_and_each_runs_once() -> None:
    halves = Halves()
    halves.new["b"][[3, 40, 41, 99]] += 2  # changes in several chunks
    halves.capture()
    assert halves.runs == ["b", "sum"]


def test_conversions_run_in_one_order_whatever_changed_first() -> None:
    halves = Halves()
    for key in "ab":
        halves.new[key][0] += 2
    halves.rank.tasks.reverse()
    halves.capture()
    assert halves.runs == ["a", "b", "sum"]


def test_only_changed_bits_of_residual_tensors_pass_on() -> None:
    halves = Halves()
    halves.new["a"][4] += 1  # 4 // 2 == 5 // 2: half of it stays, the sum changes
    halves.new["a"][7] += 1  # 7 // 2 != 8 // 2: both change
    records = halves.capture()
    sent = {record.tensor: record for record in records if record.tensor is not None}
    assert {tensor: decode_positions(record.positions).tolist() for tensor, record in sent.items()} == {
        0: [7],
        2: [4, 7],
    }
    assert sent[0].new().tolist() == [4]
    assert sent[2].new().tolist() == [9, 15]
    assert sent[2].old.tolist() == [8, 14]
    for record in sent.values():
        assert record.task is None
        assert record.region == Region.whole(100)


def test_source_changes_are_kept_for_advancing_and_never_sent() -> None:
    halves = Halves()
    halves.new["a"][[0, 99]] += 1
    records = [record for record in halves.capture() if record.task is not None]
    assert all(record.tensor is None for record in records)
    advanced = halves.old["a"].copy()
    for record in records:
        advanced[record.start + decode_positions(record.positions)] = record.new()
    assert (advanced == halves.new["a"]).all()


def test_the_tally_counts_source_changes_and_residual_changes() -> None:
    halves = Halves()
    halves.new["a"][10:20] += 3
    records = halves.capture()
    assert (halves.rank.tally.elements, halves.rank.tally.total) == total_of(records)
    assert halves.rank.tally.elements == 10 + 10 + 10
    assert halves.rank.tally.scanned == 200


def test_records_of_mapped_tasks_pass_before_the_end() -> None:
    halves = Halves()
    halves.rank.add("m", np.zeros(4, np.uint8), np.ones(4, np.uint8), [Segment(0, 7, Region.whole(4))])
    halves.new["a"][0] += 2
    assert [record.tensor for record in halves.capture()] == [None, 7, 0, 2]


def test_baseline_and_trackers_are_never_written() -> None:
    halves = Halves()
    halves.new["a"][:] += 2
    for words in (*halves.rank.trackers.tasks.values(), *halves.rank.trackers.residual.values()):
        words.flags.writeable = False
    assert len(halves.capture()) > 2


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({}, r"returned tensors \[\] instead of \[0\]"),
        ({0: np.zeros(100, np.uint16), 5: np.zeros(1, np.uint16)}, r"returned tensors \[0, 5\] instead of \[0\]"),
        ({0: np.zeros(99, np.uint16)}, r"shape \(99,\) instead of \(100,\)"),
        ({0: np.zeros(100, np.uint32)}, "uint32"),
    ],
    ids=["missing", "unknown", "short", "other width"],
)
def test_a_conversion_that_returns_something_else_is_refused(result: Mapping[int, Words], message: str) -> None:
    rank = Rank()
    conversion = Conversion("half", ("w",), (0,), lambda: result)
    rank.add("w", np.zeros(100, np.uint16), np.ones(100, np.uint16), None, (conversion,))
    rank.trackers.residual[0] = np.zeros(100, np.uint16)
    with pytest.raises(CaptureError, match=message):
        run(CAPTURE, rank.shards())


def test_a_tensor_without_baseline_is_refused() -> None:
    rank = Rank()
    conversion = Conversion("half", ("w",), (0,), lambda: {0: np.zeros(4, np.uint16)})
    rank.add("w", np.zeros(4, np.uint16), np.ones(4, np.uint16), None, (conversion,))
    with pytest.raises(CaptureError, match="tensor 0 of conversion 'half' is not in the residual baseline"):
        run(CAPTURE, rank.shards())
