# pyright: reportUnnecessaryTypeIgnoreComment=true
"""Types flow through ``|``: what checkers infer, and the joins that they must refuse.

Both checkers reject an ``ignore`` that nothing needs, so every ignored line below is proof of an error on that line.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_type

from dcr_stream.delta import Bucket, Change, CodedBucket, Entry, Record, Shard
from dcr_stream.flow import Inlet, Outlet, Pipeline, Stage, each, execute, expand, fold
from dcr_stream.stages import bucket, chunk, compare, compress, convert, default_pipeline, encode, project


def count_experts(record: Record) -> Record:
    return record


def large_only(record: Record) -> Iterable[Record]:
    return (record,) if record.nbytes > 100 else ()


class Names:
    """An accumulator from records to text."""

    def push(self, item: Record) -> Iterable[str]:
        return ()

    def flush(self) -> Iterable[str]:
        return ("",)


class OwnStage(Stage[Record, Record]):
    """A stage of one's own."""

    async def run(self, source: Inlet[Record], sink: Outlet[Record]) -> None:
        async for record in source:
            assert_type(record, Record)
            await sink.send(record)


def test_a_composed_pipeline_knows_its_ends() -> None:
    capture = chunk(max_bytes=1 << 20) | compare(workers=4) | project() | convert() | each(count_experts) | OwnStage()
    assert_type(capture, Pipeline[Shard, Record])
    delivery = encode(entries="mixed") | bucket(max_bytes=1 << 20) | compress(level=1, workers=4)
    assert_type(delivery, Pipeline[Record, CodedBucket])
    pipeline = capture | delivery
    assert_type(pipeline, Pipeline[Shard, CodedBucket])
    assert_type(pipeline.split(), tuple[Pipeline[Shard, Record], Pipeline[Record, CodedBucket]])
    assert_type(default_pipeline(), Pipeline[Shard, CodedBucket])
    assert [part.name for part in pipeline.split()] == [capture.name, delivery.name]


def test_stages_and_lifted_functions_know_their_types() -> None:
    assert_type(compare(), Stage[tuple[Shard, ...], Change])
    assert_type(project(), Stage[Change, Record | Change])
    assert_type(convert(), Stage[Record | Change, Record])
    assert_type(bucket(), Stage[Entry, Bucket])
    assert_type(each(count_experts), Stage[Record, Record])
    assert_type(expand(large_only), Stage[Record, Record])
    assert_type(convert() | fold(Names), Pipeline[Record | Change, str])


def test_a_wider_stage_may_follow_a_narrower_one() -> None:
    def any_item(item: object) -> int:
        return id(item)

    assert_type(compare() | each(any_item), Pipeline[tuple[Shard, ...], int])
    assert_type(OwnStage() | convert(), Pipeline[Record, Record])


async def deliver_record(item: Record) -> None:
    """Take a record."""


async def deliver_text(item: str) -> None:
    """Take text."""


def test_checkers_refuse_joins_that_do_not_match() -> None:
    records: list[Record] = []
    chunk() | bucket()  # type: ignore[operator]
    chunk() | compare() | convert() | encode() | compress()  # type: ignore[operator]
    compare() | each(count_experts)  # type: ignore[arg-type]
    project() | OwnStage()  # type: ignore[operator]
    encode() | fold(Names)  # type: ignore[arg-type]
    execute(OwnStage(), [1], deliver_record).close()  # type: ignore[misc]
    execute(OwnStage(), records, deliver_text).close()  # type: ignore[arg-type]
