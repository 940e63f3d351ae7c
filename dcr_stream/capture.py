"""Capture: one scan of the live weights, and what it leaves for every attempt."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import blake3
import numpy as np

from dcr_stream.baseline import Part, complete_records, fill_trackers, part_sums
from dcr_stream.canonical import TensorDirectory
from dcr_stream.codec import add_sums
from dcr_stream.delta import Record, Shard, Tally, Trackers
from dcr_stream.errors import CaptureError
from dcr_stream.flow import Limits, Pipeline, execute
from dcr_stream.interfaces import Monitor, Source
from dcr_stream.messages import Sum
from dcr_stream.pending import PendingSet
from dcr_stream.protocol import Stream
from dcr_stream.runtime import Runtime

__all__ = ["Candidate", "CaptureSettings", "capture", "records_for", "total"]


@dataclass(frozen=True, kw_only=True)
class CaptureSettings:
    """Limits of a capture.

    ``pending_bytes``: the pending set in memory; more goes to ``spill_folder``, at most ``spill_bytes``. ``channel``:
    what each channel of the pipeline holds.
    """

    pending_bytes: int = 4 << 30
    spill_folder: Path | None = None
    spill_bytes: int = 64 << 30
    channel: Limits = field(default_factory=Limits)


@dataclass(slots=True)
class Candidate:
    """A captured change that is not committed yet.

    ``filled`` holds every bit when there was no committed version to compare with; otherwise the change is
    ``pending``. ``sums`` are the state sums of this owner's parts, per tensor, once committed.
    """

    digest: str
    pending: PendingSet
    filled: Trackers | None
    sums: dict[int, Sum]
    elements: int
    scanned: int
    changed: tuple[int, ...]


async def capture(
    source: Source,
    parts: Collection[Part],
    trackers: Trackers | None,
    sums: dict[int, Sum],
    front: Pipeline[Shard, Record],
    *,
    runtime: Runtime,
    monitor: Monitor,
    settings: CaptureSettings,
) -> Candidate:
    """Compare live weights with ``trackers`` (at v, with part sums ``sums``), or copy them when there are none.

    Trackers are not changed. Live weights must stay still until this returns.

    Raises:
        CaptureError: a stage loses or alters records, or the pending set does not fit.
    """
    await runtime.workers.run(source.synchronize)
    pending = PendingSet(
        limit_bytes=settings.pending_bytes, spill_folder=settings.spill_folder, spill_bytes=settings.spill_bytes
    )
    if trackers is None:
        filled = await runtime.workers.run(fill_trackers, source)
        sums = await runtime.workers.run(part_sums, parts, filled)
        elements = sum(part.region.count for part in parts)
        changed = tuple(sorted({part.tensor for part in parts}))
        digest = blake3.blake3(repr(sorted(sums.items())).encode()).hexdigest()
        return Candidate(digest, pending, filled, sums, elements, elements, changed)
    try:
        scanned = await _scan(source, trackers, pending, front, runtime, monitor, settings)
    except BaseException:
        pending.discard()
        raise
    sums = dict(sums)
    for tensor, change in pending.state_change.items():
        sums[tensor] = add_sums(sums.get(tensor, (0, 0)), change)
    changed = tuple(sorted(pending.tensors))
    return Candidate(pending.digest, pending, None, sums, pending.sent_elements, scanned, changed)


async def _scan(
    source: Source,
    trackers: Trackers,
    pending: PendingSet,
    front: Pipeline[Shard, Record],
    runtime: Runtime,
    monitor: Monitor,
    settings: CaptureSettings,
) -> int:
    tally = Tally()
    shards = [Shard(t, 0, t.numel, trackers, tally) for t in source.tasks() if not t.frozen]

    async def keep(item: object) -> None:
        if not isinstance(item, Record):
            raise CaptureError(
                f"the stage before encode passed on a {type(item).__name__} instead of a Record; "
                "put project() and convert() between compare and encode"
            )
        await runtime.workers.run(pending.add, item)

    await execute(front, shards, keep, runtime=runtime, monitor=monitor, limits=settings.channel)
    pending.close(tally)
    expected = sum(shard.hi for shard in shards)
    if tally.scanned != expected:
        raise CaptureError(
            f"the pipeline compared {tally.scanned:,} of {expected:,} elements; a stage before compare drops shards"
        )
    return expected


def records_for(
    order: Stream,
    parts: Iterable[Part],
    trackers: Trackers | None,
    candidate: Candidate | None,
    directory: TensorDirectory,
    piece_bytes: int,
) -> Iterator[Record]:
    """What ``order`` asks an owner to send, complete tensors in directory order.

    Raises:
        CaptureError: the owner holds neither the version nor the candidate that is asked for.
    """
    skip = frozenset(order.skip)
    mine = [part for part in parts if part.tensor not in skip]
    if order.kind == "restore":
        if trackers is None:
            raise CaptureError(f"this owner does not hold version {order.attempt.target}; send a dense candidate first")
        yield from complete_records(mine, trackers, None, directory, max_bytes=piece_bytes)
        return
    if candidate is None:
        raise CaptureError("this owner has no candidate any more; capture and offer again")
    base = candidate.filled if candidate.filled is not None else trackers
    assert base is not None
    new = None if order.kind == "revert" else candidate.pending
    if order.kind == "dense":
        yield from complete_records(mine, base, new, directory, max_bytes=piece_bytes)
        return
    left_out = skip.union(order.whole)
    for record in candidate.pending.records(relative=order.relative, overwrite=order.overwrite):
        if record.tensor in left_out:
            continue
        if new is None:
            none = np.zeros_like(record.differences)
            yield replace(record, differences=none, relative=False, digest=None)  # known is that of the new bits
        else:
            yield record
    if order.whole:
        yield from complete_records(mine, base, new, directory, max_bytes=piece_bytes, only=frozenset(order.whole))


def total(sums: Iterable[Sum]) -> Sum:
    """All sums added up."""
    result: Sum = (0, 0)
    for value in sums:
        result = add_sums(result, value)
    return result
