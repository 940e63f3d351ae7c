"""Find the elements whose bits differ."""

from __future__ import annotations

import numpy as np

from dcr_stream.canonical import Indices, Words
from dcr_stream.codec.kernels import kernel

__all__ = ["ROOM", "Found", "scan"]

ROOM = 64
"""What a scan needs at least to make progress, in elements."""

_PIECE = 1 << 16  # elements compared at a time by the reference: its mask stays in a core's cache
_FIRST = 1 << 12


@kernel("scan")
def scan(
    live: Words, known: Words, begin: int, start: int, positions: Indices, differences: Words, old: Words, filled: int
) -> tuple[int, int]:
    """Append where ``live`` differs from ``known``, from index ``begin`` on, until the end or until room is short.

    Positions are indices plus ``start``, differences ``live - known`` modulo 2^w, ``old`` the known bits. The three are
    equally long; their first ``filled`` elements are kept, what lies beyond the result afterwards is undefined.

    Returns:
        How many elements of the three are taken now, and the first index that was not scanned: ``live.size``, or an
        earlier one if fewer than ``ROOM`` elements are left free.
    """
    for lo in range(begin, live.size, _PIECE):
        hi = lo + _PIECE
        changed = np.flatnonzero(live[lo:hi] != known[lo:hi])
        end = filled + changed.size
        if end > positions.size:
            changed = changed[: positions.size - filled]
            hi = int(changed[-1]) + lo + 1 if changed.size else lo
            end = positions.size
        changed += lo
        positions[filled:end] = changed + start
        old[filled:end] = known[changed]
        differences[filled:end] = live[changed] - old[filled:end]
        filled = end
        if hi < live.size and end == positions.size:
            return filled, hi
    return filled, live.size


class Found:
    """The changed elements found so far in ``[lo, hi)``, in arrays that grow with them.

    Memory that was never used before costs more to touch than to fill, so arrays grow straight to the size that the
    density so far suggests.
    """

    def __init__(self, words: np.dtype[np.unsignedinteger], lo: int, hi: int) -> None:
        self._lo, self._hi = lo, hi
        self._filled = 0
        self._arrays = (np.empty(_FIRST, np.int64), np.empty(_FIRST, words), np.empty(_FIRST, words))

    def add(self, live: Words, known: Words, start: int) -> None:
        """Scan a block whose first element has index ``start``; blocks ascend."""
        done = 0
        while True:
            self._filled, done = scan(live, known, done, start, *self._arrays, self._filled)
            if done == live.size:
                return
            self._grow(start + done)

    def take(self) -> tuple[Indices, Words, Words]:
        """Ascending positions, differences and old bits, in arrays of exactly their size."""
        for array in self._arrays:
            array.resize(self._filled, refcheck=False)
        return self._arrays

    def _grow(self, reached: int) -> None:
        seen, left = max(reached - self._lo, 1), self._hi - reached
        expected = self._filled + self._filled * left // seen
        least, most = self._filled + self._filled // 2 + ROOM, self._filled + left + ROOM
        size = min(max(least, expected + expected // 16), most)
        positions, differences, old = (self._larger(array, size) for array in self._arrays)
        self._arrays = positions, differences, old

    def _larger(self, array: Words, size: int) -> Words:
        larger = np.empty(size, array.dtype)
        larger[: self._filled] = array[: self._filled]
        return larger
