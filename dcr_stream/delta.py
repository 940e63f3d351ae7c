"""What flows through a refit pipeline between the live weights and the wire.

``Shard`` → *compare* → ``Change`` → *project* → ``Record`` | ``Change`` (residual) → *convert* → ``Record``
→ pending set → ``Record`` → *encode* → ``Entry`` → *bucket* → ``Bucket`` → *compress* → ``CodedBucket``.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np

from dcr_stream.canonical import Bytes, Indices, Region, Words

__all__ = [
    "Bucket",
    "Change",
    "CodedBucket",
    "Conversion",
    "Entry",
    "EntryMode",
    "Item",
    "PositionMode",
    "Positions",
    "Record",
    "RemoteWords",
    "Segment",
    "Shard",
    "Stream",
    "Tally",
    "Task",
    "Trackers",
]

EntryMode = Literal["add", "xor", "overwrite"]
PositionMode = Literal["gaps", "bitmap", "dense"]


def _none() -> Bytes:
    return np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class Positions:
    """``count`` ascending positions in ``[0, elements)``, coded from the scan to the wire.

    ``high``, ``low`` and ``bitmap`` are columns G, L and B of the wire format, ``shift`` is the gap shift.
    :mod:`dcr_stream.codec.positions` makes positions of index arrays and index arrays of positions.
    """

    elements: int
    count: int
    mode: PositionMode
    shift: int = 0
    high: Bytes = field(default_factory=_none)
    low: Bytes = field(default_factory=_none)
    bitmap: Bytes = field(default_factory=_none)

    @property
    def nbytes(self) -> int:
        """Host bytes held."""
        return self.high.nbytes + self.low.nbytes + self.bitmap.nbytes


class RemoteWords(ABC):
    """A flat array of words that is not in host memory; ``dcr_stream.codec.device`` has those on a torch device."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of words."""

    @property
    @abstractmethod
    def itemsize(self) -> int:
        """Bytes of a word."""

    @abstractmethod
    def __getitem__(self, some: slice) -> RemoteWords:
        """A view of some of them."""

    @abstractmethod
    def copy(self) -> RemoteWords:
        """A copy in the same place."""

    @abstractmethod
    def host(self) -> Words:
        """A copy on the host."""

    @abstractmethod
    def changes_to(self, live: RemoteWords) -> tuple[Positions, Words, Words]:
        """Where ``live``, in the same place, differs: positions, differences modulo 2^w, old bits, on the host."""

    @abstractmethod
    def add_at(self, at: Indices, differences: Words) -> None:
        """Add differences (modulo 2^w) to the elements ``at``, each of which occurs once and exists."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Contiguous elements of a task's shard, from ``start`` on, that are ``region`` of canonical tensor ``tensor``."""

    start: int
    tensor: int
    region: Region

    @property
    def count(self) -> int:
        """Elements in the segment."""
        return self.region.count


@dataclass(frozen=True, slots=True)
class Conversion:
    """A residual conversion: canonical tensors computed by the framework from whole source tensors.

    ``run`` returns the flat words of every tensor in ``tensors``, computed from the live weights.
    It runs whenever one of ``inputs`` (task keys) changed.
    """

    key: str
    inputs: tuple[str, ...]
    tensors: tuple[int, ...]
    run: Callable[[], Mapping[int, Words]]


@dataclass(frozen=True, slots=True)
class Task:
    """One source tensor's shard that this owner must scan: ``numel`` elements of ``dtype``, flat.

    ``read(lo, hi)`` returns the live stored bits of elements ``[lo, hi)`` as flat words (a view where possible).
    ``segments`` place the shard in canonical coordinates, ordered and disjoint; elements outside every segment
    are padding and never sent. ``segments is None`` makes the task residual: it reaches the wire only through
    ``conversions``. ``frozen`` declares that the bits never change: the task is sent in dense refits only, is not
    scanned, and its live storage serves as tracker. ``live(lo, hi)``, where given, returns elements as they are on
    their device: the tracker is then kept on that device, and they are compared there.
    """

    key: str
    numel: int
    dtype: str
    read: Callable[[int, int], Words]
    segments: tuple[Segment, ...] | None
    conversions: tuple[Conversion, ...] = ()
    frozen: bool = False
    live: Callable[[int, int], RemoteWords] | None = None


class Trackers(Mapping[str, "Words | RemoteWords"]):
    """The owner's view of version v: one array of words per task key, and the residual baseline per tensor.

    ``tasks`` are on the host; ``on_device`` those of tasks that are compared on their device.
    """

    def __init__(self) -> None:
        self.tasks: dict[str, Words] = {}
        self.on_device: dict[str, RemoteWords] = {}
        self.residual: dict[int, Words] = {}
        self.borrowed: set[str] = set()

    def __getitem__(self, key: str) -> Words | RemoteWords:
        found = self.on_device.get(key)
        return found if found is not None else self.tasks[key]

    def __iter__(self) -> Iterator[str]:
        yield from self.tasks
        yield from self.on_device

    def __len__(self) -> int:
        return len(self.tasks) + len(self.on_device)

    @property
    def nbytes(self) -> int:
        """Host bytes held by trackers and residual baseline; frozen tasks borrow their live storage."""
        own = sum(a.nbytes for key, a in self.tasks.items() if key not in self.borrowed)
        return own + sum(a.nbytes for a in self.residual.values())


@dataclass(slots=True)
class Tally:
    """Count and sum of the changed elements of one capture, taken where they are found.

    ``compare`` and ``convert`` add to it; the pending set must arrive at the same figures. Thread-safe.
    """

    elements: int = 0
    total: int = 0
    scanned: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, elements: int, total: int) -> None:
        """Account for ``elements`` changed elements whose sum is ``total`` (modulo 2^64)."""
        with self._lock:
            self.elements += elements
            self.total = (self.total + total) & 0xFFFF_FFFF_FFFF_FFFF

    def scan(self, elements: int) -> None:
        """Account for ``elements`` compared elements."""
        with self._lock:
            self.scanned += elements


@dataclass(frozen=True, slots=True)
class Shard:
    """A range ``[lo, hi)`` of a task to compare, handed out with the trackers at version v."""

    task: Task
    lo: int
    hi: int
    trackers: Trackers
    tally: Tally

    @property
    def name(self) -> str:
        """The task's key."""
        return self.task.key

    @property
    def nbytes(self) -> int:
        """Bytes of the range."""
        return (self.hi - self.lo) * self.trackers[self.task.key].itemsize


@dataclass(frozen=True, slots=True)
class Change:
    """The changed elements of one shard, by their distance from ``shard.lo``.

    ``differences`` are ``new - old`` modulo 2^w and never 0. ``old`` are the tracker's bits, which the scan has at
    hand: gathering them again would cost as much as reading all of the tracker.
    """

    shard: Shard
    positions: Positions
    differences: Words
    old: Words

    @property
    def name(self) -> str:
        """The task's key."""
        return self.shard.task.key

    @property
    def nbytes(self) -> int:
        """Host bytes held."""
        return self.positions.nbytes + self.differences.nbytes + self.old.nbytes


@dataclass(frozen=True, slots=True)
class Record:
    """Changed elements of one region of one canonical tensor, before encoding.

    ``positions`` are row-major positions in ``region``; ``differences`` are ``new - old`` modulo 2^w and
    never 0; ``old`` are the bits at version v. ``task`` and ``start`` say where they live in the owner's trackers:
    tracker ``task`` at ``start + positions``; ``task`` is None for a residual result, which lives in the residual
    baseline at ``region.flat(positions)``. ``tensor`` is None for the source change of a residual task: it is
    advanced after commit and never sent. ``relative`` says whether ``add``/``xor`` are allowed in this attempt.
    ``digest`` is the state sum over the new bits, once it is known: the pending set has computed it.
    """

    name: str
    tensor: int | None
    region: Region
    positions: Positions
    differences: Words
    old: Words
    task: str | None
    start: int = 0
    relative: bool = True
    digest: int | None = None

    @property
    def nbytes(self) -> int:
        """Host bytes held."""
        return self.positions.nbytes + self.differences.nbytes + self.old.nbytes

    def new(self, some: slice = slice(None)) -> Words:
        """The bits at version v+1, of all elements or of some."""
        return np.add(self.old[some], self.differences[some], dtype=self.old.dtype)


class Item(msgspec.Struct, frozen=True, array_like=True):
    """Item table row of a payload: which elements of which tensor, how they are coded, and what they must become.

    ``sizes`` are this item's byte shares of the columns, in the order of ``dcr_stream.codec.COLUMNS``.
    ``digest`` is the state sum over the *new* bits of the changed elements.
    """

    tensor: int
    region: Region
    count: int
    mode: EntryMode
    positions: PositionMode
    width: int
    shift: int
    code_bits: int
    digest: int
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """An encoded record: its item table row and its share of every column, without copies where it has them."""

    item: Item
    columns: tuple[bytes | memoryview, ...]

    @property
    def nbytes(self) -> int:
        """Bytes over all columns."""
        return sum(map(len, self.columns))


@dataclass(frozen=True, slots=True)
class Bucket:
    """Items laid out together; ``columns[c]`` is the concatenation of the items' shares of column ``c``."""

    items: tuple[Item, ...]
    columns: tuple[bytes, ...]

    @property
    def nbytes(self) -> int:
        """Bytes over all columns."""
        return sum(map(len, self.columns))


class Stream(msgspec.Struct, frozen=True, array_like=True):
    """Stream table row of a payload: how one column is framed."""

    codec: Literal["raw", "zstd"]
    raw: int
    coded: int


@dataclass(frozen=True, slots=True)
class CodedBucket:
    """A bucket whose columns are framed; only the header and the seal are missing."""

    items: tuple[Item, ...]
    streams: tuple[Stream, ...]
    frames: tuple[bytes, ...]

    @property
    def nbytes(self) -> int:
        """Bytes over all frames."""
        return sum(map(len, self.frames))
