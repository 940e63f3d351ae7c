"""The pending set gives back what it was given, from memory and from its spill file alike."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dcr_stream.canonical import Region, Words, word_dtype
from dcr_stream.codec import change_sum, state_sums, sub_sums
from dcr_stream.codec.positions import decode_positions, encode_positions
from dcr_stream.delta import Positions, Record, Tally, Trackers
from dcr_stream.errors import PendingSetFull, RecordsAltered
from dcr_stream.pending import PendingSet

REGION = Region(40, (30, 20), (50, 2))


def make(width: int) -> tuple[Trackers, Words, list[Record]]:
    """Trackers, what task ``w`` holds afterwards, and the records that lead there; and one residual record."""
    rng = np.random.default_rng(width)
    trackers = Trackers()
    trackers.tasks["w"] = rng.integers(0, 256, 5000 * width, np.uint8).view(word_dtype(width))
    trackers.residual[3] = rng.integers(0, 256, 2000 * width, np.uint8).view(word_dtype(width))
    new = trackers.tasks["w"].copy()
    records = []
    for tensor, start, count in ((0, 0, 600), (None, 1000, 3000)):
        region = REGION if tensor == 0 else Region.whole(count)
        positions = np.flatnonzero(rng.random(count) < 0.02)
        differences = rng.integers(1, 256, positions.size).astype(new.dtype)
        old = trackers.tasks["w"][start + positions]
        new[start + positions] += differences
        records.append(Record("w", tensor, region, encode_positions(positions, count), differences, old, "w", start))
    positions = np.array([0, 7, 599])
    at = REGION.flat(positions)
    records.append(
        Record(
            "r",
            3,
            REGION,
            encode_positions(positions, REGION.count),
            np.ones(3, new.dtype),
            trackers.residual[3][at],
            None,
        )
    )
    return trackers, new, records


def tally_of(records: list[Record]) -> Tally:
    tally = Tally()
    for record in records:
        key = record.task or f"residual:{record.tensor}"
        positions = decode_positions(record.positions)
        at = positions + record.start if record.task else record.region.flat(positions)
        tally.add(positions.size, change_sum(key, at, record.differences))
    return tally


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("limit", [0, 100, 1 << 20])
def test_records_and_trackers_come_out_of_memory_and_spill_file_alike(width: int, limit: int, tmp_path: Path) -> None:
    trackers, new, records = make(width)
    pending = PendingSet(limit_bytes=limit, spill_folder=tmp_path)
    for record in records:
        pending.add(record)
    pending.close(tally_of(records))
    assert (pending.spilled_bytes > 0) == (limit < 1 << 20)
    assert pending.memory_bytes <= limit
    assert pending.tensors == {0, 3}
    sent = list(pending.records(relative=True, overwrite=[3]))
    assert [(r.name, r.tensor, r.region, r.task, r.start, r.relative) for r in sent] == [
        ("w", 0, REGION, "w", 0, True),
        ("r", 3, REGION, None, 0, False),
    ]
    for record, original in zip(sent, (records[0], records[2]), strict=True):
        np.testing.assert_array_equal(decode_positions(record.positions), decode_positions(original.positions))
        np.testing.assert_array_equal(record.differences, original.differences)
        np.testing.assert_array_equal(record.old, original.old)
        flat = REGION.flat(decode_positions(original.positions))
        gained = sub_sums(
            state_sums(original.tensor or 0, flat, original.new()), state_sums(original.tensor or 0, flat, original.old)
        )
        assert record.digest == state_sums(original.tensor or 0, flat, original.new())[0]
        assert pending.state_change[original.tensor or 0] == gained
    some = trackers.tasks["w"][1500:2500].copy() - trackers.tasks["w"][1500:2500]
    pending.add_differences("w", 1500, some)
    np.testing.assert_array_equal(trackers.tasks["w"][1500:2500] + some, new[1500:2500])
    residual = trackers.residual[3].copy()
    residual[REGION.flat(decode_positions(records[2].positions))] += 1
    pending.advance(trackers)
    np.testing.assert_array_equal(trackers.tasks["w"], new)
    np.testing.assert_array_equal(trackers.residual[3], residual)
    pending.discard()
    assert pending.memory_bytes == pending.spilled_bytes == 0


def test_positions_cost_a_byte_each_in_memory() -> None:
    rng = np.random.default_rng(0)
    positions = np.flatnonzero(rng.random(1 << 20) < 0.03)
    words = np.ones(positions.size, np.uint16)
    pending = PendingSet()
    pending.add(Record("w", 0, Region.whole(1 << 20), encode_positions(positions, 1 << 20), words, words, "w"))
    assert pending.memory_bytes < 5.01 * positions.size


def test_what_a_record_shares_with_others_is_copied() -> None:
    """A view would keep all of its shard's changes alive, uncounted."""
    words = np.ones(1000, np.uint16)
    pending = PendingSet()
    pending.add(
        Record("w", 0, Region.whole(1000), encode_positions(np.arange(10), 1000), words[:10], words[10:20], "w")
    )
    words[:] = 7
    (record,) = pending.records(relative=True)
    assert record.differences.tolist() == record.old.tolist() == [1] * 10


def test_records_that_are_not_as_they_were_made_are_refused() -> None:
    words = np.ones(2, np.uint16)
    beyond = Positions(9, 2, "gaps", high=np.array([5, 4], np.uint8))
    with pytest.raises(RecordsAltered, match="gaps lead to position 10 of 9"):
        PendingSet().add(Record("w", 0, Region.whole(9), beyond, words, words, "w"))
    good = encode_positions(np.array([4, 5]), 9)
    for record in (
        Record("w", 0, Region.whole(9), good, words[:1], words, "w"),
        Record("w", 0, Region.whole(9), good, words, words[:1], "w"),
        Record("w", 0, Region.whole(8), good, words, words, "w"),
    ):
        with pytest.raises(RecordsAltered, match="differ in length"):
            PendingSet().add(record)


def test_more_than_memory_without_a_spill_folder_is_refused() -> None:
    words = np.ones(2, np.uint16)
    with pytest.raises(PendingSetFull, match="spill_folder"):
        PendingSet(limit_bytes=3).add(
            Record("w", 0, Region.whole(9), encode_positions(np.array([4, 5]), 9), words, words, "w")
        )
