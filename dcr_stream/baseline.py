"""An owner's baseline: the bits of the committed version, and the regions of canonical tensors it publishes.

Trackers hold one array of words per task, the residual baseline one per converted tensor; both stay in host memory
at version v until a commit (paper, section on source and residual baselines).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from dcr_stream.canonical import Region, TensorDirectory, Words, word_dtype
from dcr_stream.codec.device import on_host
from dcr_stream.codec.digest import add_sums, state_sums
from dcr_stream.codec.positions import whole
from dcr_stream.delta import Conversion, Record, RemoteWords, Task, Trackers
from dcr_stream.errors import UsageError
from dcr_stream.interfaces import Source
from dcr_stream.messages import OwnedRegion, Sum
from dcr_stream.pending import PendingSet

__all__ = ["Part", "check_tiling", "complete_records", "empty_trackers", "fill_trackers", "part_sums", "parts_of"]

_READ_ELEMENTS = 4 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """A region that one owner publishes, and where its bits live: baseline array ``key`` from ``start`` on."""

    tensor: int
    region: Region
    key: str
    start: int
    task: str | None

    def words(self, trackers: Trackers) -> Words | RemoteWords:
        """The committed bits, in the region's row-major order (a view)."""
        array = trackers.residual[self.tensor] if self.task is None else trackers[self.task]
        return array[self.start : self.start + self.region.count]


def parts_of(source: Source) -> tuple[Part, ...]:
    """Every region this source publishes, in directory order.

    Raises:
        UsageError: a segment leaves its tensor, its shard or its width; or conversions publish a tensor twice.
    """
    directory = source.directory
    parts: list[Part] = []
    for task in source.tasks():
        for segment in task.segments or ():
            spec = directory[segment.tensor]
            if not segment.region.fits(spec.numel) or segment.start + segment.count > task.numel:
                raise UsageError(
                    f"task {task.key!r}: segment at {segment.start} leaves tensor {spec.name!r} or its shard"
                )
            if task.dtype != spec.dtype:
                raise UsageError(
                    f"task {task.key!r} has dtype {task.dtype} and is mapped to {spec.name!r} of dtype {spec.dtype}; "
                    "a cast is a conversion: make the task residual"
                )
            parts.append(Part(segment.tensor, segment.region, task.key, segment.start, task.key))
    for conversion in _conversions(source.tasks()):
        for tensor in conversion.tensors:
            parts.append(Part(tensor, Region.whole(directory[tensor].numel), f"residual:{tensor}", 0, None))
    parts.sort(key=lambda part: (part.tensor, part.region.offset))
    return tuple(parts)


def _conversions(tasks: Iterable[Task]) -> list[Conversion]:
    found = {conversion.key: conversion for task in tasks for conversion in task.conversions}
    return list(found.values())


def fill_trackers(source: Source) -> Trackers:
    """Copy every live bit, and run every residual conversion, into new trackers.

    Raises:
        UsageError: a conversion returns another size or width than the directory says.
    """
    directory = source.directory
    trackers = empty_trackers(source)
    for task in source.tasks():
        if task.key in trackers.on_device:
            continue  # copied when it was made
        words = trackers.tasks[task.key]
        if task.frozen:
            words = trackers.tasks[task.key] = task.read(0, task.numel)
            if np.may_share_memory(words[:1], task.read(0, min(1, task.numel))):
                trackers.borrowed.add(task.key)  # else reading converts, and this copy is the owner's own
            continue
        for lo in range(0, task.numel, _READ_ELEMENTS):
            hi = min(lo + _READ_ELEMENTS, task.numel)
            words[lo:hi] = task.read(lo, hi)
    for conversion in _conversions(source.tasks()):
        results = conversion.run()
        for tensor in conversion.tensors:
            spec, words = directory[tensor], results[tensor]
            if words.size != spec.numel or words.itemsize != spec.width:
                raise UsageError(
                    f"conversion {conversion.key!r} returned {words.size} elements of {words.itemsize} bytes for "
                    f"{spec.name!r}, which has shape {spec.shape} and dtype {spec.dtype}"
                )
            trackers.residual[tensor] = words.copy()
    if trackers.on_device:
        source.synchronize()  # a device copies later than it is told to
    return trackers


def empty_trackers(source: Source) -> Trackers:
    """Trackers of the right sizes, without content."""
    trackers = Trackers()
    for task in source.tasks():
        if task.key in trackers:
            raise UsageError(f"the source lists task {task.key!r} twice")
        if task.live is not None and not task.frozen:
            trackers.on_device[task.key] = task.live(0, task.numel).copy()
            continue
        probe = task.read(0, 0)
        trackers.tasks[task.key] = np.empty(0 if task.frozen else task.numel, word_dtype(probe.itemsize))
    return trackers


def part_sums(parts: Iterable[Part], trackers: Trackers) -> dict[int, Sum]:
    """Per tensor, the state sum of this owner's parts at the committed version."""
    sums: dict[int, Sum] = {}
    for part in parts:
        words = part.words(trackers)
        for first in range(0, max(words.size, 1), _READ_ELEMENTS):
            block = on_host(words[first : first + _READ_ELEMENTS])
            flat = part.region.flat(np.arange(first, first + block.size, dtype=np.int64))
            sums[part.tensor] = add_sums(sums.get(part.tensor, (0, 0)), state_sums(part.tensor, flat, block))
    return sums


def complete_records(
    parts: Iterable[Part],
    trackers: Trackers,
    pending: PendingSet | None,
    directory: TensorDirectory,
    *,
    max_bytes: int,
    only: Collection[int] | None = None,
) -> Iterator[Record]:
    """Every element of ``parts`` (of the tensors in ``only``), as overwrite records of at most about ``max_bytes``.

    The bits are those of the committed version, or of the candidate when ``pending`` is given.
    """
    for part in parts:
        if only is not None and part.tensor not in only:
            continue
        spec, words = directory[part.tensor], part.words(trackers)
        for first, region in _split(part.region, max(1, max_bytes // spec.width)):
            old = on_host(words[first : first + region.count])
            differences = np.zeros(old.size, old.dtype)
            if pending is not None:
                pending.add_differences(part.key, part.start + first, differences)
            yield Record(
                spec.name,
                part.tensor,
                region,
                whole(old.size),
                differences,
                old,
                part.task,
                part.start + first,
                relative=False,
            )


def _split(region: Region, most: int) -> Iterator[tuple[int, Region]]:
    """Cut a region along its first dimension into pieces of at most ``most`` positions (at least one row)."""
    rows = region.sizes[0]
    inner = region.count // rows if rows else 0
    step = max(1, most // inner) if inner else max(1, rows)
    if rows == 0 or inner == 0:
        yield 0, region
        return
    for row in range(0, rows, step):
        n = min(step, rows - row)
        offset = region.offset + row * region.strides[0]
        yield row * inner, Region(offset, (n, *region.sizes[1:]), region.strides)


def check_tiling(directory: TensorDirectory, owners: dict[str, tuple[OwnedRegion, ...]]) -> dict[str, tuple[int, ...]]:
    """Prove that the owners' regions cover every element of every tensor exactly once.

    A tensor that several owners publish whole and alike (replicas) belongs to the first by name; the result says
    which tensors each owner must leave to another. Their bits are compared before they are left out.

    Raises:
        UsageError: an element has no owner, or regions overlap in part.
    """
    claims: dict[int, list[tuple[str, Region]]] = {}
    for owner in sorted(owners):
        for owned in owners[owner]:
            claims.setdefault(owned.tensor, []).append((owner, owned.region))
    skip: dict[str, list[int]] = {}
    problems: list[str] = []
    for tensor, spec in enumerate(directory):
        mine = claims.get(tensor, [])
        first = next((owner for owner, _ in mine), None)
        published = {owner: tuple(r for o, r in mine if o == owner) for owner, _ in mine}
        if len(published) > 1 and all(regions == published[first or ""] for regions in published.values()):
            for owner in published:
                if owner != first:
                    skip.setdefault(owner, []).append(tensor)
            mine = [(owner, region) for owner, region in mine if owner == first]
        if len(mine) == 1 and mine[0][1] == Region.whole(spec.numel):
            continue
        seen = np.zeros(spec.numel, np.uint8)
        for _, region in mine:
            seen[region.all_flat()] += 1
        if missing := int((seen == 0).sum()):
            problems.append(f"{spec.name!r}: {missing:,} of {spec.numel:,} elements have no owner")
        if double := int((seen > 1).sum()):
            names = ", ".join(sorted({owner for owner, _ in mine}))
            problems.append(f"{spec.name!r}: {double:,} elements are published more than once (by {names})")
    if problems:
        raise UsageError(
            f"the owners {', '.join(sorted(owners))} do not tile the model: "
            + "; ".join(problems[:8])
            + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
            + ". Give each element exactly one owner (ranks and replica counts of the sources must agree)"
        )
    return {owner: tuple(tensors) for owner, tensors in skip.items()}
