"""Passes of ids through the native loader, and what storage says after them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dcr_stream.canonical import Indices, Region, Words
from dcr_stream.codec.device import DeviceWords, gather
from dcr_stream.trace.boxes import compress, strided
from dcr_stream.trace.contents import Contents, Ids, IdSpace, payload_bits
from dcr_stream.trace.passes import LoadRunner
from dcr_stream.trace.storage import StorageMap, StorageView

__all__ = ["Placed", "Seen", "Snapshot", "elements", "ids_at", "mismatches", "runs_of", "sweep"]

_BLOCK = 1 << 18
_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Placed:
    """A canonical region and the place in storage view ``view`` that holds it."""

    view: int
    region: Region
    place: Region


class Snapshot:
    """What a storage view held after a load: as runs of consecutive words if that is smaller, else a copy.

    Ids are runs, so that a snapshot after a load of ids takes a small share of the storage; it never takes more
    than the storage itself.
    """

    def __init__(self, words: Words) -> None:
        self._size = words.size
        self._copy: Words | None = None
        self._starts, self._first = _NONE, words[:0]
        breaks = np.flatnonzero(words[1:] != words[:-1] + words.dtype.type(1)) + 1
        if breaks.size * (8 + words.itemsize) >= words.nbytes:
            self._copy = words.copy()
        else:
            self._starts = np.concatenate([[0], breaks])
            self._first = words[self._starts]

    def read(self, lo: int, hi: int) -> Words:
        """Words ``[lo, hi)``, fewer at the end of the view."""
        hi = min(hi, self._size)
        if lo >= hi:
            return self._first[:0]
        if self._copy is not None:
            return self._copy[lo:hi]
        a = int(np.searchsorted(self._starts, lo, side="right")) - 1
        b = int(np.searchsorted(self._starts, hi))
        starts = self._starts[a:b]
        counts = np.diff(np.concatenate([np.maximum(starts, lo), [hi]]))
        dtype = self._first.dtype
        words: Words = np.repeat(self._first[a:b] - starts.astype(dtype), counts)
        words += np.arange(lo, hi).astype(dtype)
        return words


@dataclass(slots=True)
class Seen:
    """What the passes showed about one storage view.

    ``place``, ``ids`` and ``count`` are runs of elements that carried ids. ``rest`` are all other elements: their
    last words, whether a load changed them, and whether they differed between loads.
    """

    view: StorageView
    width: int
    place: Indices = field(default_factory=lambda: _NONE)
    ids: Indices = field(default_factory=lambda: _NONE)
    count: Indices = field(default_factory=lambda: _NONE)
    rest: Indices = field(default_factory=lambda: _NONE)
    last: Words = field(default_factory=lambda: np.empty(0, np.uint8))
    written: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    varied: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))

    def look(self, words: Words | DeviceWords) -> None:
        """Compare the rest with what it holds after another load."""
        now = gather(words, self.rest)
        changed = now != self.last
        self.varied |= changed
        self.written |= changed
        self.last = now

    def ids_of(self, at: Indices) -> Indices:
        """Ids that elements carried in directory order; -1 for none."""
        if self.place.size == 0:
            return np.full(at.shape, -1, np.int64)
        run = np.maximum(np.searchsorted(self.place, at, side="right") - 1, 0)
        offset = at - self.place[run]
        return np.where((offset >= 0) & (offset < self.count[run]), self.ids[run] + offset, -1)


def sweep(
    runner: LoadRunner, storage: StorageMap, views: Sequence[StorageView]
) -> tuple[IdSpace, list[Seen], dict[int, list[Placed]]]:
    """Load all passes of ids in directory order and read where they landed.

    An element carries an id if the complement of the first pass flips all its id bits, the other passes complete an id
    of this directory, and the view's dtype is that tensor's. Host memory: at most two copies of the storage, of
    which ids usually need a few per cent; afterwards 9 bytes and a word for each element that carries no id, and
    working memory of at most eight times the largest single storage view while its boxes are found.

    Raises:
        LoadFailed, LayoutChanged: see :meth:`LoadRunner.load`.
    """
    seen = [Seen(view, view.width) for view in views]
    initial = [storage.words(s.view.storage, s.width).copy() for s in seen]
    space = runner.settle()
    low = [[Snapshot(storage.words(s.view.storage, s.width))] for s in seen]
    runner.load(Ids(space, 0, complement=True))
    for s, snapshots, before in zip(seen, low, initial, strict=True):
        _find_rest(s, storage.words(s.view.storage, s.width), snapshots[0], before)
    del initial
    for number in range(1, space.passes()):
        runner.load(Ids(space, number))
        for s, snapshots in zip(seen, low, strict=True):
            s.look(storage.memory(s.view.storage, s.width))
            if number < space.passes(s.width):
                snapshots.append(Snapshot(storage.words(s.view.storage, s.width)))
    placed: dict[int, list[Placed]] = {}
    for i, (s, snapshots) in enumerate(zip(seen, low, strict=True)):
        _join(s, snapshots)
        _place(i, s, space, storage.memory(s.view.storage, s.width), placed)
    return space, seen, placed


def _find_rest(seen: Seen, words: Words, low: Snapshot, before: Words) -> None:
    """Set apart what holds no id in the first pass, or did not flip from it to its complement."""
    bits = payload_bits(seen.width)
    mask = words.dtype.type((1 << bits) - 1)
    rest: list[Indices] = []
    written: list[NDArray[np.bool_]] = []
    varied: list[NDArray[np.bool_]] = []
    for lo in range(0, words.size, _BLOCK):
        now = words[lo : lo + _BLOCK]
        was = low.read(lo, lo + now.size)
        other = ((now ^ was) != mask) | (was >> words.dtype.type(bits) != 1)
        if seen.view.covered is not None:
            covered = seen.view.covered[lo : lo + now.size]
            other &= covered
        at = np.flatnonzero(other)
        rest.append(at + lo)
        varied.append(now[at] != was[at])
        written.append((now[at] != before[lo + at]) | (was[at] != before[lo + at]))
    seen.rest = np.concatenate([_NONE, *rest])
    seen.varied = np.concatenate([np.empty(0, np.bool_), *varied])
    seen.written = np.concatenate([np.empty(0, np.bool_), *written])
    seen.last = words[seen.rest]


def _join(seen: Seen, passes: list[Snapshot]) -> None:
    """Put the passes together into runs of ids."""
    bits = payload_bits(seen.width)
    place: list[Indices] = []
    ids: list[Indices] = []
    count: list[Indices] = []
    for lo, words in _blocks(passes):
        carries = np.ones(words[0].size, np.bool_)
        a, b = (int(i) for i in np.searchsorted(seen.rest, [lo, lo + carries.size]))
        carries[seen.rest[a:b] - lo] = False
        if seen.view.covered is not None:
            carries &= seen.view.covered[lo : lo + carries.size]
        at = np.flatnonzero(carries)
        total = np.zeros(at.size, np.int64)
        odd = np.zeros(at.size, np.bool_)
        for number, part in enumerate(words):
            held = part[at]
            odd |= held >> part.dtype.type(bits) != 1
            total |= (held & part.dtype.type((1 << bits) - 1)).astype(np.int64) << (bits * number)
        total[odd] = -2
        starts, counts = runs_of(at, total)
        place.append(at[starts] + lo)
        ids.append(total[starts])
        count.append(counts)
    seen.place, seen.ids, seen.count = _rejoin(
        np.concatenate([_NONE, *place]), np.concatenate([_NONE, *ids]), np.concatenate([_NONE, *count])
    )


def _blocks(passes: list[Snapshot]) -> Iterator[tuple[int, list[Words]]]:
    lo = 0
    while (words := [p.read(lo, lo + _BLOCK) for p in passes])[0].size:
        yield lo, words
        lo += words[0].size


def runs_of(at: Indices, ids: Indices) -> tuple[Indices, Indices]:
    """Cut elements into runs in which both place and id are consecutive: index of the first one, and length."""
    if at.size == 0:
        return _NONE, _NONE
    starts = np.concatenate([[0], np.flatnonzero((np.diff(at) != 1) | (np.diff(ids) != 1)) + 1])
    return starts, np.diff(np.concatenate([starts, [at.size]]))


def _rejoin(place: Indices, ids: Indices, count: Indices) -> tuple[Indices, Indices, Indices]:
    """Join runs that were cut at the edge of a block."""
    if place.size < 2:
        return place, ids, count
    cut = (place[1:] != place[:-1] + count[:-1]) | (ids[1:] != ids[:-1] + count[:-1])
    starts = np.concatenate([[0], np.flatnonzero(cut) + 1])
    return place[starts], ids[starts], np.add.reduceat(count, starts)


def _place(
    number: int, seen: Seen, space: IdSpace, words: Words | DeviceWords, placed: dict[int, list[Placed]]
) -> None:
    """Compress the runs of a view into boxes per tensor; runs that are no ids of such a tensor join the rest."""
    tensor, flat = space.locate(seen.width, seen.ids)
    last, _ = space.locate(seen.width, seen.ids + seen.count - 1)
    good = (tensor == last) & space.of_dtype(tensor, seen.view.dtype)
    if not good.all():
        stray = elements(seen.place[~good], seen.count[~good])
        order = np.argsort(np.concatenate([seen.rest, stray]), kind="stable")
        seen.rest = np.concatenate([seen.rest, stray])[order]
        seen.varied = np.concatenate([seen.varied, np.ones(stray.size, np.bool_)])[order]
        seen.written = np.concatenate([seen.written, np.ones(stray.size, np.bool_)])[order]
        seen.last = gather(words, seen.rest)
        seen.place, seen.ids, seen.count = seen.place[good], seen.ids[good], seen.count[good]
        tensor, flat = tensor[good], flat[good]
    order = np.argsort(tensor, kind="stable")
    edges = np.flatnonzero(np.diff(tensor[order])) + 1
    for group in np.split(order, edges):
        if group.size:
            pairs = compress(seen.place[group], flat[group], seen.count[group])
            placed.setdefault(int(tensor[group[0]]), []).extend(Placed(number, r, p) for r, p in pairs)


def elements(start: Indices, count: Indices) -> Indices:
    """All elements of runs, in order."""
    if start.size == 0:
        return _NONE
    return np.repeat(start - (np.cumsum(count) - count), count) + np.arange(int(count.sum()))


def mismatches(
    contents: Contents, placed: dict[int, list[Placed]], storage: StorageMap, seen: Sequence[Seen]
) -> dict[int, list[tuple[int, Indices]]]:
    """Tensors whose boxes do not hold ``contents``, with the view and the storage elements that differ."""
    found: dict[int, list[tuple[int, Indices]]] = {}
    for tensor, boxes in placed.items():
        words = contents.words(tensor)
        for box in boxes:
            s = seen[box.view]
            held = strided(storage.memory(s.view.storage, s.width), box.place)
            wrong = held != strided(words, box.region)
            if wrong.any():
                found.setdefault(tensor, []).append((box.view, box.place.flat(np.flatnonzero(wrong))))
    return found


def ids_at(
    runner: LoadRunner,
    space: IdSpace,
    storage: StorageMap,
    seen: Sequence[Seen],
    at: dict[int, Indices],
    order: Sequence[int],
) -> dict[int, Indices]:
    """Ids that some elements carry after loads in another order; -1 for no id of a tensor of their dtype."""
    ids = {view: np.zeros(where.size, np.int64) for view, where in at.items()}
    valid = {view: np.ones(where.size, np.bool_) for view, where in at.items()}
    for number in range(space.passes()):
        runner.load(Ids(space, number), order)
        for view, where in at.items():
            width = seen[view].width
            if number >= space.passes(width):
                continue
            words = gather(storage.memory(seen[view].view.storage, width), where).astype(np.uint64)
            bits = payload_bits(width)
            valid[view] &= words >> np.uint64(bits) == 1
            low = (words & np.uint64((1 << bits) - 1)).astype(np.int64)
            ids[view] |= low << (bits * number)
    for view in at:
        tensor, _ = space.locate(seen[view].width, ids[view])
        ids[view][~(valid[view] & space.of_dtype(tensor, seen[view].view.dtype))] = -1
    return ids
