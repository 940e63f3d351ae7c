"""Sending one attempt: records are encoded, sealed, handed to the transport, announced, and closed by a manifest."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TypeVar

from dcr_stream.codec import seal_manifest, seal_payload
from dcr_stream.delta import CodedBucket, Record
from dcr_stream.errors import PayloadRejected, RecordsAltered
from dcr_stream.flow import Limits, Pipeline, execute
from dcr_stream.interfaces import Monitor, PayloadSink, Workers
from dcr_stream.messages import Announcement, Manifest, ManifestEntry, PayloadId, PayloadKind
from dcr_stream.protocol import Stream
from dcr_stream.runtime import Runtime

__all__ = ["send_records"]

_MASK = 0xFFFF_FFFF_FFFF_FFFF
T = TypeVar("T")


async def send_records(
    order: Stream,
    owner: str,
    records: Iterator[Record],
    back: Pipeline[Record, CodedBucket],
    sink: PayloadSink,
    announce: Callable[[Announcement], Awaitable[None]],
    *,
    max_bytes: int | None,
    directory: str,
    secret: bytes | None,
    runtime: Runtime,
    monitor: Monitor,
    limits: Limits,
) -> Manifest:
    """Send all ``records`` of ``owner`` through the pipeline's part ``back``; returns the sealed manifest.

    A payload is announced once every node can fetch it.

    Raises:
        PayloadRejected: a payload is larger than ``max_bytes``, what the transport takes.
        RecordsAltered: a stage after encode drops or repeats entries.
    """
    entries: list[ManifestEntry] = []
    kind: PayloadKind = "dense" if order.kind in ("dense", "restore") else "delta"
    fed = elements = digests = 0

    async def deliver(coded: CodedBucket) -> None:
        nonlocal elements, digests
        id = PayloadId(order.attempt, owner, len(entries))
        payload = await runtime.workers.run(
            seal_payload, coded, id=id, base=order.base, kind=kind, directory=directory, secret=secret
        )
        if max_bytes is not None and payload.nbytes > max_bytes:
            raise PayloadRejected(
                f"payload {id.name} of owner {owner!r} has {payload.nbytes:,} bytes, more than the {max_bytes:,} that "
                "the transport takes; lower bucket(max_bytes=)"
            )
        await sink.send(payload)
        await announce(Announcement(id, payload.nbytes, payload.seal))
        entries.append(ManifestEntry(id.sequence, payload.nbytes, payload.seal))
        elements += sum(item.count for item in coded.items)
        digests = (digests + sum(item.digest for item in coded.items)) & _MASK

    async def feed() -> AsyncIterator[Record]:
        nonlocal fed
        async for record in _in_worker(records, runtime.workers):
            fed += record.positions.count
            yield record

    await execute(back, feed(), deliver, runtime=runtime, monitor=monitor, limits=limits)
    if elements != fed:
        raise RecordsAltered(
            f"owner {owner!r}: the pipeline was given {fed:,} elements to send and made payloads of {elements:,}: a "
            "stage after encode drops or repeats entries; pass every entry on once"
        )
    return seal_manifest(Manifest(order.attempt, owner, tuple(entries), elements, digests), secret)


async def _in_worker(items: Iterator[T], workers: Workers) -> AsyncIterator[T]:
    """Iterate in worker threads: each step gathers bits from trackers or reads a spill file."""
    end = object()
    while True:
        item = await workers.run(next, items, end)
        if item is end:
            return
        yield item  # type: ignore[misc]  # `next` returns an item or `end`
