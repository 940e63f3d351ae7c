"""encode, bucket, compress: what the codec reads back is what was recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from dcr_stream.canonical import Region
from dcr_stream.codec import COLUMNS, combine, decode_item, slice_columns
from dcr_stream.codec.positions import decode_positions, encode_positions
from dcr_stream.delta import Bucket, CodedBucket, Entry, EntryMode, Item, Record
from dcr_stream.errors import UsageError
from dcr_stream.flow import each
from dcr_stream.stages import bucket, chunk, compare, compress, convert, default_pipeline, encode, project
from dcr_stream.stages.encode import Entries
from tests.stages.support import changed, random_words, run


def records(seed: int, count: int = 12) -> list[Record]:
    """Random records of all widths, sparse and full, relative and not."""
    rng = np.random.default_rng(seed)
    out: list[Record] = []
    for tensor in range(count):
        size = int(rng.integers(1, 400))
        old = random_words(rng, size, (1, 2, 4, 8)[tensor % 4])
        new = changed(rng, old, float(rng.choice([0.05, 0.5, 1.0])))
        where = np.flatnonzero(old != new)
        out.append(
            Record(
                name=f"t{tensor}",
                tensor=tensor,
                region=Region.run(tensor, size),
                positions=encode_positions(where, size),
                differences=new[where] - old[where],
                old=old[where],
                task="w",
                relative=bool(rng.random() < 0.5),
            )
        )
    return out


def items_of(coded: CodedBucket) -> Iterator[tuple[Item, tuple[memoryview, ...]]]:
    """Each item with its columns, after undoing the frames."""
    columns = [
        zstandard.ZstdDecompressor().decompress(frame) if stream.codec == "zstd" else frame
        for stream, frame in zip(coded.streams, coded.frames, strict=True)
    ]
    return slice_columns(coded.items, columns)


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["mixed", "add", "xor", "overwrite"]),
    st.sampled_from([1, 300, 1 << 20]),
    st.sampled_from([1, 5, 4096]),
)
def test_what_was_recorded_is_read_back(seed: int, entries: Entries, max_bytes: int, max_items: int) -> None:
    """B17: the size of buckets changes nothing."""
    sent = records(seed)
    delivery = (
        encode(entries=entries, workers=2) | bucket(max_bytes=max_bytes, max_items=max_items) | compress(workers=2)
    )
    read = [pair for coded in run(delivery, sent) for pair in items_of(coded)]
    assert [item.tensor for item, _ in read] == [record.tensor for record in sent]
    for record, (item, columns) in zip(sent, read, strict=True):
        decoded = decode_item(item, columns)
        assert (decode_positions(decoded.positions) == decode_positions(record.positions)).all()
        assert (combine(item.mode, record.old, decoded.values) == record.new()).all()


@pytest.mark.parametrize(
    ("entries", "relative", "absolute"),
    [
        ("mixed", "add", "overwrite"),
        ("add", "add", "overwrite"),
        ("xor", "xor", "overwrite"),
        ("overwrite", "overwrite", "overwrite"),
    ],
)
def test_records_that_must_not_be_relative_are_overwritten(
    entries: Entries, relative: EntryMode, absolute: EntryMode
) -> None:
    sent = records(5)
    assert len({record.relative for record in sent}) == 2
    for record, entry in zip(sent, run(encode(entries=entries), sent), strict=True):
        assert entry.item.mode == (relative if record.relative else absolute)


def test_a_source_change_is_never_encoded() -> None:
    with pytest.raises(UsageError, match="source change and is never sent"):
        run(encode(), [replace(records(1)[0], tensor=None)])


def entries_of(sizes: list[int]) -> list[Entry]:
    """Entries with ``size`` bytes, spread over two columns."""
    out: list[Entry] = []
    for tensor, size in enumerate(sizes):
        shares = [bytes([tensor]) * (size // 2), bytes([tensor]) * (size - size // 2)]
        columns = (*shares, *[b""] * (len(COLUMNS) - 2))
        item = Item(tensor, Region.whole(size), size, "overwrite", "dense", 1, 0, 0, 0, tuple(map(len, columns)))
        out.append(Entry(item, columns))
    return out


def shape(buckets: list[Bucket]) -> list[tuple[int, int]]:
    return [(len(made.items), made.nbytes) for made in buckets]


def test_buckets_respect_both_bounds_and_a_large_entry_is_alone() -> None:
    sizes = [40, 40, 40, 300, 10, 1, 1, 1, 1]
    buckets = run(bucket(max_bytes=100, max_items=3), entries_of(sizes))
    assert shape(buckets) == [(2, 80), (1, 40), (1, 300), (3, 12), (2, 2)]
    assert [item.tensor for made in buckets for item in made.items] == list(range(9))


def test_columns_are_the_shares_back_to_back() -> None:
    (made,) = run(bucket(), entries_of([3, 2]))
    assert made.columns[:2] == (b"\0\1", b"\0\0\1")
    assert len(made.columns) == len(COLUMNS)


def test_no_entries_make_no_bucket() -> None:
    assert run(bucket() | compress(), []) == []


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: bucket(max_bytes=0), "max_bytes=0 is too small"),
        (lambda: bucket(max_items=0), "max_items=0 is too small"),
        (lambda: compress(level=0), "level=0 is too small"),
        (lambda: compress(level=20), "level=20 is too large; give 1 to 19"),
        (lambda: compress(workers=0), "workers=0 is too small"),
        (lambda: encode(workers=0), "workers=0 is too small"),
        (
            lambda: encode(entries=cast(Entries, "delta")),
            "entries='delta' is unknown; use one of mixed, add, xor, overwrite",
        ),
    ],
)
def test_arguments_are_checked_at_the_door(build: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build()


def test_the_default_pipeline_splits_before_its_record_to_entry_stage() -> None:
    capture, delivery = default_pipeline().split()
    assert capture.name == "chunk | compare | project | convert"
    assert delivery.name == "encode | bucket | compress"


def test_a_pipeline_without_exactly_one_record_to_entry_stage_is_refused() -> None:
    capture = chunk() | compare() | project() | convert()

    def same(entry: Entry) -> Entry:
        return entry

    def again(entry: Entry) -> Record:
        return records(0)[0]

    with pytest.raises(UsageError, match="0 record-to-entry stages and needs exactly one"):
        (capture | each(str)).split()
    with pytest.raises(UsageError, match="begins with its record-to-entry stage"):
        (encode() | each(same)).split()
    with pytest.raises(UsageError, match="2 record-to-entry stages"):
        (capture | encode() | each(again) | encode()).split()
