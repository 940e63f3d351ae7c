"""Published ways to code weight changes, each written from its description, as references for ``bench.codec``.

All take the new and the old words of one tensor and return the bytes that would be sent. None writes the old words.

- ``paper``: NeMo-DCR: gaps between changed elements as bytes (255 stands for 255 and more to come), XOR words, one zstd
  frame of level 1 over both, per chunk.
- ``overwrite``: the same with new words instead of XOR words.
- ``indexed``: 32-bit positions and values, uncompressed (verl).
- ``dense``: the XOR image of the whole tensor through zstd level 1 (slime).
"""

from __future__ import annotations

import numpy as np
import zstandard
from numpy.typing import NDArray

from dcr_stream.canonical import Indices, Words
from dcr_stream.codec.kernels.lanes import Number, jit

__all__ = ["Scratch", "dense", "indexed", "overwrite", "paper", "read_both"]

CHUNK = 4 << 20  # elements: large enough for frames not to matter, small enough for temporaries to stay cached

Bytes = NDArray[np.uint8]


def paper(new: Words, old: Words) -> int:
    """Bytes sent: gaps and XOR words."""
    return sum(len(frame) for frame in _chunks(new, old, xor=True))


def overwrite(new: Words, old: Words) -> int:
    """Bytes sent: gaps and new words."""
    return sum(len(frame) for frame in _chunks(new, old, xor=False))


def indexed(new: Words, old: Words) -> int:
    """Bytes sent: positions and new words."""
    at = np.flatnonzero(new != old).astype(np.int32)
    return at.nbytes + new[at].nbytes


def dense(new: Words, old: Words) -> int:
    """Bytes sent: the whole XOR image."""
    return len(zstandard.ZstdCompressor(level=1).compress((new ^ old).data.cast("B")))


def gap_bytes(at: Indices) -> Bytes:
    """Gaps between ascending positions, 255 for every full 255."""
    full, rest = np.divmod(np.diff(at, prepend=-1) - 1, 255)
    coded = np.full(int(full.sum()) + at.size, 255, np.uint8)
    coded[np.cumsum(full + 1) - 1] = rest
    return coded


def _chunks(new: Words, old: Words, *, xor: bool) -> list[bytes]:
    compressor = zstandard.ZstdCompressor(level=1)
    frames = []
    for lo in range(0, new.size, CHUNK):
        live, known = new[lo : lo + CHUNK], old[lo : lo + CHUNK]
        at = np.flatnonzero(live != known)
        values = live[at] ^ known[at] if xor else live[at]
        frames.append(compressor.compress(np.concatenate([gap_bytes(at), values.view(np.uint8)]).data))
    return frames


class Scratch:
    """Applying through a dense scratch tensor: decode into zeros, XOR the whole tensor, clear what was set.

    The decoding is compiled and fused, the XOR is numpy's: what a native loader would do on top is left out.
    """

    def __init__(self, new: Words, old: Words) -> None:
        at = np.flatnonzero(new != old)
        self._gaps = gap_bytes(at)
        self._words = new[at] ^ old[at]
        self._scratch = np.zeros_like(old)

    def apply(self, words: Words) -> None:
        """Change ``words`` from old to new, or back."""
        _set(self._scratch, self._gaps, self._words)
        np.bitwise_xor(words, self._scratch, out=words)
        _clear(self._scratch, self._gaps)


@jit
def _set(scratch: Words, gaps: Bytes, words: Words) -> None:
    position = np.int64(-1)
    k = 0
    for i in range(gaps.size):
        if gaps[i] == 255:
            position += 255
        else:
            position += np.int64(gaps[i]) + 1
            scratch[position] = words[k]
            k += 1


@jit
def _clear(scratch: Words, gaps: Bytes) -> None:
    position = np.int64(-1)
    for i in range(gaps.size):
        if gaps[i] == 255:
            position += 255
        else:
            position += np.int64(gaps[i]) + 1
            scratch[position] = 0


@jit
def _any_difference(a: Words, b: Words) -> Number:
    seen = np.uint64(0)
    for i in range(a.size):
        seen |= a[i] ^ b[i]
    return seen


def read_both(new: Words, old: Words) -> int:
    """Read two arrays of words once, as fast as they come: the limit for anything that compares them."""
    return int(_any_difference(new.view(np.uint64), old.view(np.uint64)))
