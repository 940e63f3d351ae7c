"""Find the elements whose bits differ, and write down where they are as the wire does.

A scan that listed indices would write eight bytes for each changed element, and a second pass would have to read them
to make gaps of them. Where few elements change, gaps come straight out of the scan; where many do, the bits of the
comparison itself are the bitmap. Which of the two to expect is estimated from the first changes; what they got wrong is
coded again, so that the result depends on the changes alone.
"""

from __future__ import annotations

import numpy as np

from dcr_stream.canonical import Bytes, Words
from dcr_stream.codec.bitmap import suits_bitmap
from dcr_stream.codec.gaps import choose_shift
from dcr_stream.codec.kernels import kernel
from dcr_stream.codec.positions import decode_positions, encode_positions, whole
from dcr_stream.delta import PositionMode, Positions

__all__ = ["ROOM", "Found", "scan_bits", "scan_gaps", "subtract"]

ROOM = 64
"""What a scan for gaps needs at least to make progress, in elements."""

_PIECE = 1 << 16  # elements compared at a time by the reference: its mask stays in a core's cache
_FIRST = 1 << 10


@kernel("scan")
def scan_gaps(
    live: Words,
    known: Words,
    begin: int,
    start: int,
    high: Bytes,
    differences: Words,
    old: Words,
    filled: int,
    escapes: int,
    previous: int,
) -> tuple[int, int, int, int]:
    """Append where ``live`` differs from ``known``, from index ``begin`` on, until the end or until room is short.

    ``high`` gets gaps between positions (column G, unshifted), where a position is an index plus ``start`` and the one
    before the first is ``previous``; ``differences`` get ``live - known`` modulo 2^w, ``old`` the known bits. So far,
    ``filled`` elements are taken and ``escapes`` bytes of ``high`` more; what lies beyond the result is undefined.

    Returns:
        ``filled``, ``escapes`` and ``previous`` as they are now, and the first index that was not scanned:
        ``live.size``, or an earlier one if fewer than ``ROOM`` elements are left free.
    """
    for lo in range(begin, live.size, _PIECE):
        hi = lo + _PIECE
        changed = np.flatnonzero(live[lo:hi] != known[lo:hi])
        end = filled + changed.size
        if end > differences.size:
            changed = changed[: differences.size - filled]
            hi = int(changed[-1]) + lo + 1 if changed.size else lo
            end = differences.size
        changed += lo
        if changed.size:
            full, rest = np.divmod(np.diff(changed + start, prepend=previous) - 1, 255)
            ends = np.cumsum(full + 1) - 1
            coded = high[filled + escapes : filled + escapes + int(ends[-1]) + 1]
            coded[:] = 255
            coded[ends] = rest
            escapes += int(full.sum())
            previous = int(changed[-1]) + start
        old[filled:end] = known[changed]
        differences[filled:end] = live[changed] - old[filled:end]
        filled = end
        if hi < live.size and end == differences.size:
            return filled, escapes, previous, hi
    return filled, escapes, previous, live.size


@kernel("scan")
def scan_bits(live: Words, known: Words, bitmap: Bytes, differences: Words, old: Words, filled: int) -> int:
    """Set a bit of ``bitmap`` where ``live`` differs from ``known``, and append differences and old bits.

    ``bitmap`` has a bit for each element; ``differences`` and ``old`` have room for all of them. Returns the elements
    taken.
    """
    for lo in range(0, live.size, _PIECE):
        hi = lo + _PIECE
        mask = live[lo:hi] != known[lo:hi]
        bitmap[lo // 8 : (hi + 7) // 8] = np.packbits(mask, bitorder="little")
        end = filled + int(np.count_nonzero(mask))
        old[filled:end] = known[lo:hi][mask]
        differences[filled:end] = live[lo:hi][mask] - old[filled:end]
        filled = end
    return filled


@kernel("scan")
def subtract(live: Words, known: Words, differences: Words) -> bool:
    """Set ``differences`` to ``live - known`` modulo 2^w; returns whether none of them is 0."""
    np.subtract(live, known, out=differences)
    return bool(differences.all())


class Found:
    """The elements of ``known`` whose live bits differ; live blocks are scanned one after the other.

    Every block but the last is a multiple of 64 elements. Memory that was never used before costs more to touch than
    to fill. Arrays therefore begin small and grow straight to what the density so far suggests, and where everything
    changed, the old bits are ``known`` itself.
    """

    def __init__(self, known: Words) -> None:
        self._known = known
        self._scanned = self._filled = self._escapes = 0
        self._previous = -1
        self._mode: PositionMode = "gaps"
        self._bitmap = self._high = np.empty(0, np.uint8)
        self._differences = self._old = np.empty(0, known.dtype)
        self._resize(min(_FIRST, known.size + ROOM))

    def add(self, live: Words) -> None:
        """Scan the next block."""
        start, stop = self._scanned, self._scanned + live.size
        known = self._known[start:stop]
        if self._mode == "gaps" and not self._add_gaps(live, known):
            self._begin_again()
        if self._mode == "dense" and not subtract(live, known, self._differences[start:stop]):
            self._go_sparse()
        if self._mode == "bitmap":
            bitmap = self._bitmap[start // 8 : (stop + 7) // 8]
            self._filled = scan_bits(live, known, bitmap, self._differences, self._old, self._filled)
        self._scanned = stop

    def take(self) -> tuple[Positions, Words, Words]:
        """Positions, differences and old bits, in arrays of exactly their size."""
        count, elements = self._filled, self._known.size
        if self._mode == "dense":
            return whole(elements), self._differences, self._known
        self._differences.resize(count, refcheck=False)
        self._old.resize(count, refcheck=False)
        if self._mode == "bitmap":
            found = Positions(elements, count, "bitmap", bitmap=self._bitmap)
            expected = suits_bitmap(count, elements) and count < elements
        else:
            self._high.resize(count + self._escapes, refcheck=False)
            found = Positions(elements, count, "gaps", high=self._high)
            expected = not suits_bitmap(count, elements) and choose_shift(count, self._previous) == 0
        positions = found if expected else encode_positions(decode_positions(found), elements)
        return positions, self._differences, self._old

    def _begin_again(self) -> None:
        """Many changes at the begin: expect as many from there on, of all elements or of some."""
        self._differences = np.empty(self._known.size, self._known.dtype)
        if self._previous + 1 == self._filled:
            self._mode = "dense"
        else:
            self._go_sparse()

    def _go_sparse(self) -> None:
        """An element did not change: write down what a scan for bits would have found so far."""
        self._mode, self._filled = "bitmap", self._scanned
        self._bitmap = np.empty((self._known.size + 7) // 8, np.uint8)
        self._bitmap[: self._scanned // 8] = 255
        self._old = np.empty(self._known.size, self._known.dtype)
        self._old[: self._scanned] = self._known[: self._scanned]

    def _add_gaps(self, live: Words, known: Words) -> bool:
        """Scan a block for gaps; False if its very begin suggests a bitmap instead."""
        done = 0
        while True:
            self._filled, self._escapes, self._previous, done = scan_gaps(
                live,
                known,
                done,
                self._scanned,
                self._high,
                self._differences,
                self._old,
                self._filled,
                self._escapes,
                self._previous,
            )
            if done == live.size:
                return True
            if self._scanned == 0 and self._differences.size == _FIRST and suits_bitmap(self._filled, done):
                return False
            self._grow(self._scanned + done)

    def _grow(self, reached: int) -> None:
        left = self._known.size - reached
        expected = self._filled + self._filled * left // max(reached, 1)
        least, most = self._filled + self._filled // 2 + ROOM, self._filled + left + ROOM
        self._resize(min(max(least, expected + expected // 16), most))

    def _resize(self, size: int) -> None:
        # One escape stands for 255 elements without a change.
        self._high = _larger(self._high, self._filled + self._escapes, size + self._known.size // 255 + 1)
        self._differences = _larger(self._differences, self._filled, size)
        self._old = _larger(self._old, self._filled, size)


def _larger(array: Words, filled: int, size: int) -> Words:
    larger = np.empty(size, array.dtype)
    larger[:filled] = array[:filled]
    return larger
