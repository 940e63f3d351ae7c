"""The pending set: one candidate's changes, kept from capture until commit.

Positions, differences and old bits are enough for every retry and for advancing the trackers after the commit; neither
scans nor converts again, and only the advance touches a tracker (``docs/design/protocol.md``, capture). Positions are
kept as gaps, as on the wire: about one byte each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import blake3
import numpy as np

from dcr_stream.canonical import Indices, Region, Words
from dcr_stream.codec.boxes import add_at, located
from dcr_stream.codec.digest import add_sums, change_sum, state_change
from dcr_stream.codec.gaps import decode_gaps, encode_gaps
from dcr_stream.delta import Record, Tally, Trackers
from dcr_stream.errors import PendingSetFull, RecordsAltered
from dcr_stream.messages import Sum
from dcr_stream.spill import SpillFile

__all__ = ["PendingSet", "baseline_key"]

_MASK = 0xFFFF_FFFF_FFFF_FFFF


def baseline_key(record: Record) -> str:
    """Which baseline array a record's elements live in: a task's tracker or a tensor's residual baseline."""
    return record.task if record.task is not None else f"residual:{record.tensor}"


Arrays = tuple[Words, Words, Words, Words]
"""Gaps (columns G and L of the wire format), differences and old bits."""


@dataclass(slots=True)
class _Held:
    """A record, in memory or at ``offset`` of the spill file."""

    name: str
    tensor: int | None
    region: Region
    task: str | None
    start: int
    shift: int
    sizes: tuple[int, ...]
    words: np.dtype[np.unsignedinteger]
    arrays: Arrays | None
    offset: int = -1

    def indices(self, positions: Indices) -> tuple[Indices, int]:
        """Where elements live in the baseline array: indices, and what is to be added to each."""
        return located(self.region, positions) if self.task is None else (positions, self.start)


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
        """Keep a record.

        Raises:
            RecordsAltered: its positions do not ascend.
        """
        count = int(record.positions.size)
        if count == 0:
            return
        differences, old = (np.require(a, requirements=["C", "O"]) for a in (record.differences, record.old))
        try:
            shift, high, low = encode_gaps(record.positions)
        except ValueError as error:
            raise RecordsAltered(
                f"a record of {record.name!r} is out of order: {error}; pass records on unchanged"
            ) from error
        self._elements += count
        if record.tensor is not None:
            self.sent_elements += count
            indices, offset = located(record.region, record.positions)
            change = state_change(record.tensor, indices, old, differences, offset)
            self.state_change[record.tensor] = add_sums(self.state_change.get(record.tensor, (0, 0)), change)
        self._hash.update(f"{record.name}\0{record.tensor}\0{record.task}\0{record.start}\0{count}\0{shift}\0".encode())
        for array in (high, low, differences):
            self._hash.update(array.data.cast("B"))
        arrays = (high.copy(), low, differences, old)  # a view would keep memory alive that is not counted
        held = _Held(
            name=record.name,
            tensor=record.tensor,
            region=record.region,
            task=record.task,
            start=record.start,
            shift=shift,
            sizes=tuple(array.nbytes for array in arrays),
            words=old.dtype,
            arrays=arrays,
        )
        indices, offset = held.indices(record.positions)
        self._total += change_sum(baseline_key(record), indices, differences, offset)
        self._held.append(held)
        self._by_key.setdefault(baseline_key(record), []).append(held)
        size = sum(held.sizes)
        if self.memory_bytes + size > self._limit:
            held.offset = self._spill.append(array.data.cast("B") for array in arrays)
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

    def records(self, *, relative: bool, overwrite: Iterable[int] = ()) -> Iterator[Record]:
        """The records that can be sent.

        ``relative`` says whether ``add``/``xor`` are allowed; tensors in ``overwrite`` forbid them all the same.
        """
        forbidden = frozenset(overwrite)
        for held in self._held:
            if held.tensor is not None:
                positions, differences, old = self._load(held)
                yield Record(
                    name=held.name,
                    tensor=held.tensor,
                    region=held.region,
                    positions=positions,
                    differences=differences,
                    old=old,
                    task=held.task,
                    start=held.start,
                    relative=relative and held.tensor not in forbidden,
                )

    def add_differences(self, key: str, first: int, words: Words) -> None:
        """Add to ``words`` the pending differences of elements ``[first, first + len(words))`` of baseline ``key``."""
        for held in self._by_key.get(key, ()):
            positions, differences, _ = self._load(held)
            indices, offset = held.indices(positions)
            where = indices + offset
            inside = (where >= first) & (where < first + words.size)
            words[where[inside] - first] += differences[inside]

    def advance(self, trackers: Trackers) -> None:
        """Bring ``trackers`` from v to v+1, in place. Called once, after the commit."""
        for held in self._held:
            positions, differences, _ = self._load(held)
            if held.task is None:
                assert held.tensor is not None
                target = trackers.residual[held.tensor]
            else:
                target = trackers.tasks[held.task]
            indices, offset = held.indices(positions)
            add_at(target, indices, differences, offset)

    def discard(self) -> None:
        """Release memory and spill file. Idempotent."""
        self._held.clear()
        self._by_key.clear()
        self.memory_bytes = 0
        self._spill.close()

    def _load(self, held: _Held) -> tuple[Indices, Words, Words]:
        """Positions, differences and old bits."""
        if held.arrays is not None:
            high, low, differences, old = held.arrays
        else:
            data = memoryview(self._spill.read(held.offset, sum(held.sizes)))
            parts = []
            for size in held.sizes:
                parts.append(data[:size])
                data = data[size:]
            high, low = (np.frombuffer(part, np.uint8) for part in parts[:2])
            differences, old = (np.frombuffer(part, np.uint8).view(held.words) for part in parts[2:])
        return decode_gaps(high, low, held.shift), differences, old
