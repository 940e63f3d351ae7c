"""The pending set: one candidate's changes, kept from capture until commit.

Positions, differences and old bits are enough for every retry and for advancing the trackers after the commit; neither
scans nor converts again, and only the advance touches a tracker (``docs/design/protocol.md``, capture). Positions are
kept as on the wire: about one byte each, or less.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import blake3
import numpy as np

from dcr_stream.canonical import Region, Words
from dcr_stream.codec.boxes import add_at, flat_indices, located
from dcr_stream.codec.digest import add_sums, change_sum, state_change, sub_sums
from dcr_stream.codec.positions import position_fault
from dcr_stream.delta import Record, RemoteWords, Tally, Trackers
from dcr_stream.errors import PendingSetFull, RecordsAltered
from dcr_stream.messages import Sum
from dcr_stream.spill import SpillFile

__all__ = ["PendingSet", "baseline_key"]

_MASK = 0xFFFF_FFFF_FFFF_FFFF


def baseline_key(record: Record) -> str:
    """Which baseline array a record's elements live in: a task's tracker or a tensor's residual baseline."""
    return record.task if record.task is not None else f"residual:{record.tensor}"


def _home(record: Record) -> Region:
    """Where a record's positions lie in its baseline array."""
    return record.region if record.task is None else Region.run(record.start, record.region.count)


@dataclass(slots=True)
class _Held:
    """A record; once spilled, its arrays are empty and ``sizes`` bytes of them at ``offset`` of the spill file."""

    record: Record
    words: np.dtype[np.unsignedinteger]
    sizes: tuple[int, ...] = ()
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
        """Keep a record.

        Raises:
            RecordsAltered: it does not hold as many elements as positions, or these are not in order.
        """
        positions, count = record.positions, record.positions.count
        fault = position_fault(positions)
        if (
            fault
            or not count == record.differences.size == record.old.size
            or positions.elements != record.region.count
        ):
            raise RecordsAltered(
                f"a record of {record.name!r} is not as it was made: {fault or 'its parts differ in length'}; "
                "pass records on unchanged"
            )
        if count == 0:
            return
        positions = replace(
            positions, high=_own(positions.high), low=_own(positions.low), bitmap=_own(positions.bitmap)
        )
        differences, old = _own(record.differences), _own(record.old)
        record = replace(record, positions=positions, differences=differences, old=old)
        record = replace(record, digest=self._account(record))
        self._hash.update(
            f"{record.name}\0{record.tensor}\0{record.task}\0{record.start}\0{record.region}\0"
            f"{count}\0{positions.mode}\0{positions.shift}\0".encode()
        )
        arrays = _arrays(record)
        for array in arrays[:-1]:  # old bits follow from the committed version
            self._hash.update(array.data.cast("B"))
        held = _Held(record, old.dtype)
        self._held.append(held)
        self._by_key.setdefault(baseline_key(record), []).append(held)
        if self.memory_bytes + record.nbytes > self._limit:
            held.sizes = tuple(array.nbytes for array in arrays)
            held.offset = self._spill.append(array.data.cast("B") for array in arrays)
            held.record = _with_arrays(record, [np.empty(0, array.dtype) for array in arrays])
        else:
            self.memory_bytes += record.nbytes

    def _account(self, record: Record) -> int | None:
        """Add to counts and sums; returns the record's digest if it can be sent."""
        tensor, key, home, digest = record.tensor, baseline_key(record), _home(record), 0
        change = self.state_change.get(tensor, (0, 0)) if tensor is not None else (0, 0)
        for at, some in located(home, record.positions):
            differences, old = record.differences[some], record.old[some]
            self._total += change_sum(key, at, differences)
            if tensor is not None:
                flat = at if home == record.region else flat_indices(record.region, at - home.offset)
                before, after = state_change(tensor, flat, old, differences)
                digest += after[0]
                change = add_sums(change, sub_sums(after, before))
        self._elements += record.positions.count
        if tensor is None:
            return None
        self.sent_elements += record.positions.count
        self.state_change[tensor] = change
        return digest & _MASK

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
            if held.record.tensor is not None:
                yield replace(self._load(held), relative=relative and held.record.tensor not in forbidden)

    def add_differences(self, key: str, first: int, words: Words) -> None:
        """Add to ``words`` the pending differences of elements ``[first, first + len(words))`` of baseline ``key``."""
        for held in self._by_key.get(key, ()):
            record = self._load(held)
            for at, some in located(_home(record), record.positions):
                where = at - first
                inside = (where >= 0) & (where < words.size)
                words[where[inside]] += record.differences[some][inside]

    def advance(self, trackers: Trackers) -> None:
        """Bring ``trackers`` from v to v+1, in place. Called once, after the commit."""
        for held in self._held:
            record = self._load(held)
            if record.task is None:
                assert record.tensor is not None
                target: Words | RemoteWords = trackers.residual[record.tensor]
            else:
                target = trackers[record.task]
            for at, some in located(_home(record), record.positions):
                if isinstance(target, RemoteWords):
                    target.add_at(at, record.differences[some])
                else:
                    add_at(target, at, record.differences[some])

    def discard(self) -> None:
        """Release memory and spill file. Idempotent."""
        self._held.clear()
        self._by_key.clear()
        self.memory_bytes = 0
        self._spill.close()

    def _load(self, held: _Held) -> Record:
        if held.offset < 0:
            return held.record
        data = memoryview(self._spill.read(held.offset, sum(held.sizes)))
        parts: list[Words] = []
        for size in held.sizes:
            parts.append(np.frombuffer(data[:size], np.uint8))
            data = data[size:]
        return _with_arrays(held.record, [*parts[:3], *(part.view(held.words) for part in parts[3:])])


def _own(array: Words) -> Words:
    """Not a view, which would keep memory alive that is not counted."""
    return np.require(array, requirements=["C", "O"])


def _arrays(record: Record) -> tuple[Words, ...]:
    positions = record.positions
    return positions.high, positions.low, positions.bitmap, record.differences, record.old


def _with_arrays(record: Record, arrays: Sequence[Words]) -> Record:
    high, low, bitmap, differences, old = arrays
    positions = replace(record.positions, high=high, low=low, bitmap=bitmap)
    return replace(record, positions=positions, differences=differences, old=old)
