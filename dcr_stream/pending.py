"""The pending set: one candidate's changes, kept from capture until commit.

Positions and differences are enough for every retry (new bits = tracker + difference, since trackers stay at v) and
for advancing the trackers after the commit; neither scans nor converts again (``docs/design/protocol.md``, capture).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import blake3
import numpy as np

from dcr_stream.canonical import Indices, Region, Words, word_dtype
from dcr_stream.codec.digest import add_sums, change_sum, state_sums, sub_sums
from dcr_stream.delta import Record, Tally, Trackers
from dcr_stream.errors import PendingSetFull, RecordsAltered
from dcr_stream.messages import Sum
from dcr_stream.spill import SpillFile

__all__ = ["PendingSet", "baseline_key"]

_MASK = 0xFFFF_FFFF_FFFF_FFFF


def baseline_key(record: Record) -> str:
    """Which baseline array a record's elements live in: a task's tracker or a tensor's residual baseline."""
    return record.task if record.task is not None else f"residual:{record.tensor}"


def _indices(record: Record) -> Indices:
    """Where the record's elements live in their baseline array."""
    if record.task is None:
        return record.region.flat(record.positions)
    return record.positions + record.start


@dataclass(slots=True)
class _Held:
    """A record without its old bits, in memory or at ``offset`` of the spill file."""

    name: str
    tensor: int | None
    region: Region
    task: str | None
    start: int
    count: int
    index_dtype: str
    width: int
    arrays: tuple[Words, Words] | None
    offset: int = -1


class PendingSet:
    """The changed elements of one candidate. Filled by ``add``, sealed by ``close``, then read any number of times.

    At most ``limit_bytes`` are held in memory; what is beyond goes to one unlinked file (mode 0600) in
    ``spill_folder``. Not thread-safe while being filled.

    Raises:
        PendingSetFull: the spill folder has no room, or there is none.
    """

    def __init__(
        self, *, limit_bytes: int = 4 << 30, spill_folder: Path | None = None, spill_bytes: int = 64 << 30
    ) -> None:
        self._limit = limit_bytes
        self._spill = SpillFile(
            spill_folder,
            spill_bytes,
            what="the changed set",
            error=PendingSetFull,
            remedy="raise pending_bytes, or name a spill_folder with space",
        )
        self._held: list[_Held] = []
        self._by_key: dict[str, list[_Held]] = {}
        self._hash = blake3.blake3(b"dcr-candidate-1")
        self._elements = 0
        self._total = 0
        self.memory_bytes = 0
        self.sent_elements = 0
        self.state_change: dict[int, Sum] = {}
        """Per tensor: sum over the new bits minus sum over the old bits of its changed elements, two lanes."""

    def add(self, record: Record) -> None:
        """Keep a record. Its old bits are dropped: they are the tracker's."""
        count = int(record.positions.size)
        if count == 0:
            return
        positions, differences = record.positions, record.differences
        self._elements += count
        self._total += change_sum(baseline_key(record), _indices(record), differences)
        if record.tensor is not None:
            self.sent_elements += count
            flat = record.region.flat(positions)
            change = sub_sums(state_sums(record.tensor, flat, record.new), state_sums(record.tensor, flat, record.old))
            self.state_change[record.tensor] = add_sums(self.state_change.get(record.tensor, (0, 0)), change)
        self._hash.update(f"{record.name}\0{record.tensor}\0{record.task}\0{record.start}\0{count}\0".encode())
        self._hash.update(positions.tobytes())
        self._hash.update(differences.tobytes())
        kept = positions.astype(np.uint32 if int(positions[-1]) < 1 << 32 else np.int64)
        if differences.base is not None:
            differences = differences.copy()  # a view would keep all of its shard's differences alive, uncounted
        held = _Held(
            name=record.name,
            tensor=record.tensor,
            region=record.region,
            task=record.task,
            start=record.start,
            count=count,
            index_dtype=kept.dtype.str,
            width=differences.itemsize,
            arrays=(kept, differences),
        )
        self._held.append(held)
        self._by_key.setdefault(baseline_key(record), []).append(held)
        size = kept.nbytes + differences.nbytes
        if self.memory_bytes + size > self._limit:
            views = (np.ascontiguousarray(a).data.cast("B") for a in (kept, differences))
            held.offset = self._spill.append(views)
            held.arrays = None
        else:
            self.memory_bytes += size

    def close(self, tally: Tally) -> None:
        """Check that nothing was lost, added or altered since the changes were found.

        Raises:
            RecordsAltered: counts or sums differ; nothing may be sent or advanced.
        """
        if self._elements != tally.elements:
            raise RecordsAltered(
                f"the pipeline was given {tally.elements:,} changed elements and kept {self._elements:,}: a stage "
                "between compare and encode drops or adds records; pass every record on"
            )
        if self._total & _MASK != tally.total & _MASK:
            raise RecordsAltered(
                f"the pipeline kept {self._elements:,} changed elements but not the same ones: a stage between compare "
                "and encode alters positions or differences; pass records on unchanged"
            )

    @property
    def spilled_bytes(self) -> int:
        """Bytes in the spill file."""
        return self._spill.nbytes

    @property
    def digest(self) -> str:
        """Hex BLAKE3 that identifies the candidate."""
        return self._hash.hexdigest()

    @property
    def tensors(self) -> frozenset[int]:
        """Canonical tensors with at least one changed element."""
        return frozenset(self.state_change)

    def records(self, trackers: Trackers, *, relative: bool, overwrite: Iterable[int] = ()) -> Iterator[Record]:
        """The records that can be sent, with the old bits read from ``trackers`` (which must still be at v).

        ``relative`` says whether ``add``/``xor`` are allowed; tensors in ``overwrite`` forbid them all the same.
        """
        forbidden = frozenset(overwrite)
        for held in self._held:
            if held.tensor is not None:
                record = self._load(held, trackers)
                yield _with_relative(record, relative and held.tensor not in forbidden)

    def add_differences(self, key: str, first: int, words: Words) -> None:
        """Add to ``words`` the pending differences of elements ``[first, first + len(words))`` of baseline ``key``."""
        for held in self._by_key.get(key, ()):
            positions, differences = self._arrays(held)
            where = held.region.flat(positions) if held.task is None else positions + held.start
            inside = (where >= first) & (where < first + words.size)
            words[where[inside] - first] += differences[inside]

    def advance(self, trackers: Trackers) -> None:
        """Bring ``trackers`` from v to v+1, in place. Called once, after the commit."""
        for held in self._held:
            positions, differences = self._arrays(held)
            if held.task is None:
                assert held.tensor is not None
                target, where = trackers.residual[held.tensor], held.region.flat(positions)
            else:
                target, where = trackers.tasks[held.task], positions + held.start
            target[where] += differences

    def discard(self) -> None:
        """Release memory and spill file. Idempotent."""
        self._held.clear()
        self._by_key.clear()
        self.memory_bytes = 0
        self._spill.close()

    def _load(self, held: _Held, trackers: Trackers) -> Record:
        positions, differences = self._arrays(held)
        if held.task is None:
            assert held.tensor is not None
            old = trackers.residual[held.tensor][held.region.flat(positions)]
        else:
            old = trackers.tasks[held.task][positions + held.start]
        return Record(held.name, held.tensor, held.region, positions, differences, old, held.task, held.start)

    def _arrays(self, held: _Held) -> tuple[Indices, Words]:
        if held.arrays is not None:
            return held.arrays[0].astype(np.int64), held.arrays[1]
        index = np.dtype(held.index_dtype)
        data = self._spill.read(held.offset, held.count * (index.itemsize + held.width))
        split = held.count * index.itemsize
        positions = np.frombuffer(data, index, held.count).astype(np.int64)
        return positions, np.frombuffer(data, word_dtype(held.width), held.count, split)


def _with_relative(record: Record, relative: bool) -> Record:
    return Record(
        record.name,
        record.tensor,
        record.region,
        record.positions,
        record.differences,
        record.old,
        record.task,
        record.start,
        relative,
    )
