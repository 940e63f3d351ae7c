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
    """The changed elements found so far, in arrays that grow with them."""

    def __init__(self, words: np.dtype[np.unsignedinteger]) -> None:
        self._filled = 0
        self._arrays = (np.empty(_FIRST, np.int64), np.empty(_FIRST, words), np.empty(_FIRST, words))

    def add(self, live: Words, known: Words, start: int) -> None:
        """Scan a block whose first element has index ``start``; blocks ascend."""
        done = 0
        while True:
            self._filled, done = scan(live, known, done, start, *self._arrays, self._filled)
            if done == live.size:
                return
            positions, differences, old = self._arrays
            self._arrays = (self._grown(positions), self._grown(differences), self._grown(old))

    def take(self) -> tuple[Indices, Words, Words]:
        """Ascending positions, differences and old bits, in arrays of exactly their size."""
        for array in self._arrays:
            array.resize(self._filled, refcheck=False)
        return self._arrays

    def _grown(self, array: Words) -> Words:
        larger = np.empty(2 * array.size, array.dtype)
        larger[: self._filled] = array[: self._filled]
        return larger
