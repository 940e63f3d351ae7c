"""The whole default pipeline on one owner, and the folder that the stages live in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zstandard

import dcr_stream
from dcr_stream.canonical import Region, Words
from dcr_stream.codec import combine, decode_item, slice_columns
from dcr_stream.codec.positions import decode_positions
from dcr_stream.delta import Change, Conversion, Record, Segment
from dcr_stream.flow import each, expand
from dcr_stream.stages import chunk, compare, convert, default_pipeline, project
from tests.stages.support import Rank, changed, random_words, run, total_of

ROOT = Path(dcr_stream.__file__).parents[1]


def owner(seed: int) -> tuple[Rank, dict[int, Words]]:
    """An owner of mapped, column-split, padded, frozen and residual tasks, and the canonical bits at version v."""
    rng = np.random.default_rng(seed)
    rank, canonical = Rank(), dict[int, Words]()
    for tensor in range(20):
        old = random_words(rng, int(rng.integers(1, 2000)))
        canonical[tensor] = old.copy()
        rank.add(f"m{tensor}", old, changed(rng, old, 0.05), [Segment(0, tensor, Region.whole(old.size))])
    frozen = random_words(rng, 500)
    rank.add("frozen", frozen, frozen.copy(), [Segment(0, 20, Region.whole(500))])
    columns = random_words(rng, 64 * 16 + 8)
    canonical[21] = random_words(rng, 64 * 32)
    region = Region(16, (64, 16), (32, 1))
    canonical[21][region.all_flat()] = columns[: 64 * 16]
    rank.add("columns", columns, changed(rng, columns, 0.2), [Segment(0, 21, region)])
    source = random_words(rng, 300)
    new = changed(rng, source, 0.1)
    canonical[22] = source // 2
    rank.trackers.residual[22] = source // 2
    rank.add("residual", source, new, None, [Conversion("half", ("residual",), (22,), lambda: {22: new // 2})])
    return rank, canonical


def test_receivers_and_trackers_end_at_exactly_the_live_bits() -> None:
    rank, canonical = owner(1)
    capture, delivery = default_pipeline().split()
    pending = run(capture, rank.shards())
    assert (rank.tally.elements, rank.tally.total) == total_of(pending)

    for coded in run(delivery, [record for record in pending if record.tensor is not None]):
        frames = [
            zstandard.ZstdDecompressor().decompress(frame) if stream.codec == "zstd" else frame
            for stream, frame in zip(coded.streams, coded.frames, strict=True)
        ]
        for item, columns in slice_columns(coded.items, frames):
            decoded = decode_item(item, columns)
            flat = item.region.flat(decode_positions(decoded.positions))
            words = canonical[item.tensor]
            words[flat] = combine(item.mode, words[flat], decoded.values)
    for tensor in range(20):
        assert (canonical[tensor] == rank.live[f"m{tensor}"]).all()
    shard = canonical[21].reshape(64, 32)[:, 16:]
    assert (shard.reshape(-1) == rank.live["columns"][: 64 * 16]).all()
    assert (canonical[22] == rank.live["residual"] // 2).all()

    for record in pending:
        if record.task is not None:
            rank.trackers.tasks[record.task][record.start + decode_positions(record.positions)] = record.new()
        else:
            assert record.tensor is not None
            rank.trackers.residual[record.tensor][record.region.flat(decode_positions(record.positions))] = record.new()
    assert all((rank.trackers.tasks[key] == rank.live[key]).all() for key in rank.trackers)
    assert run(capture, rank.shards()) == []


def test_frozen_weights_send_nothing() -> None:
    """B21: unchanged tensors cost no payload."""
    rank, _ = owner(2)
    capture, _ = default_pipeline().split()
    assert "frozen" not in {record.name for record in run(capture, rank.shards())}


@pytest.mark.parametrize("fault", ["drop", "alter"])
def test_a_stage_that_drops_or_alters_records_disagrees_with_the_tally(fault: str) -> None:
    def spoil(record: Record) -> tuple[Record, ...]:
        if record.name != "m3":
            return (record,)
        if fault == "drop":
            return ()
        return (
            Record(
                name=record.name,
                tensor=record.tensor,
                region=record.region,
                positions=record.positions,
                differences=record.differences ^ 2 | 1,
                old=record.old,
                task=record.task,
                start=record.start,
            ),
        )

    rank, _ = owner(3)
    pending = run(chunk() | compare() | project() | convert() | expand(spoil), rank.shards())
    assert (rank.tally.elements, rank.tally.total) != total_of(pending)


def test_a_stage_of_ones_own_sees_every_change() -> None:
    seen: list[str] = []

    def watch(change: Change) -> Change:
        seen.append(change.name)
        return change

    rank, _ = owner(4)
    pending = run(chunk() | compare(workers=4) | each(watch) | project() | convert(), rank.shards())
    assert (rank.tally.elements, rank.tally.total) == total_of(pending)
    assert set(seen) >= {"columns", "residual"}


def test_importing_the_folder_itself_fails_at_once() -> None:
    result = subprocess.run(
        [sys.executable, "-c", "import stages"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode != 0
    assert "ImportError: attempted relative import beyond top-level package" in result.stderr
