"""What is sent through the native loader to learn what it does: element ids, and bits to prove the map with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from dcr_stream.canonical import Indices, TensorDirectory, Words, word_dtype

__all__ = ["FALLBACKS", "PROOFS", "Choice", "Contents", "IdSpace", "Ids", "Patterns", "payload_bits"]

_BLOCK = 1 << 15

# sign, exponent and mantissa bits of every floating dtype
_FLOATS: dict[str, tuple[int, int, int]] = {
    "float8_e4m3fn": (1, 4, 3),
    "float8_e5m2": (1, 5, 2),
    "float8_e4m3fnuz": (1, 4, 3),
    "float8_e5m2fnuz": (1, 5, 2),
    "float8_e8m0fnu": (0, 8, 0),
    "float16": (1, 5, 10),
    "bfloat16": (1, 8, 7),
    "float32": (1, 8, 23),
    "complex64": (1, 8, 23),
    "float64": (1, 11, 52),
}

PROOFS = ("random", "special", "zero")
"""Contents that every mapped element must reproduce bit for bit."""

FALLBACKS: Mapping[str, tuple[str, ...]] = {
    "random": ("ordinary",),
    "special": ("subnormal", "largest", "infinite", "nan"),
}
"""What is tried one by one in place of contents that the loader refuses to load."""


class Contents(ABC):
    """Bits for every canonical tensor, made when they are needed and the same each time."""

    @abstractmethod
    def words(self, tensor: int) -> Words:
        """The flat words of a tensor: a fresh array."""


class IdSpace:
    """Numbers every canonical element, per element width, so that its bits can carry the number.

    An id is spread over several passes. In each, an element holds ``width * 8 - 3`` bits of its id below the fixed
    top bits 001: for every floating dtype a positive, finite, normal number of ordinary size, and for every integer a
    positive one. So loaders that check, clamp or compare values see nothing unusual, and maxima do not saturate.
    Tensors of ``equal`` (index → representative) share the ids of their representative.
    Ids of neighbouring tensors are not consecutive. Bools cannot carry ids; they only alternate.
    """

    def __init__(self, directory: TensorDirectory, equal: Mapping[int, int] | None = None) -> None:
        self.directory = directory
        self._equal = equal or {}
        self._base: dict[int, int] = {}
        next_id: dict[int, int] = {}
        tensors: dict[int, list[int]] = {}
        for tensor, spec in enumerate(directory):
            if tensor in self._equal:
                continue
            start = next_id.get(spec.width, 0)
            self._base[tensor] = start
            tensors.setdefault(spec.width, []).append(tensor)
            next_id[spec.width] = start + spec.numel + 1
        self._tensors = {w: np.array(t, np.int64) for w, t in tensors.items()}
        self._starts = {w: np.array([self._base[i] for i in t], np.int64) for w, t in tensors.items()}
        self._numel = {w: np.array([directory[i].numel for i in t], np.int64) for w, t in tensors.items()}
        self._dtypes = np.array([spec.dtype for spec in directory] + [""])
        self._passes = {w: max(1, -(-max(n - 1, 1).bit_length() // payload_bits(w))) for w, n in next_id.items()}

    def representative(self, tensor: int) -> int:
        """The tensor whose contents ``tensor`` shares: itself unless they were declared equal."""
        return self._equal.get(tensor, tensor)

    def passes(self, width: int | None = None) -> int:
        """Passes that ids of a width need; of the width that needs most if None."""
        return self._passes.get(width, 1) if width is not None else max(self._passes.values(), default=1)

    def base(self, tensor: int) -> int:
        """Id of a tensor's first element."""
        return self._base[self.representative(tensor)]

    def locate(self, width: int, ids: Indices) -> tuple[Indices, Indices]:
        """Tensor index and flat index of ids of one width; tensor -1 where an id belongs to no element."""
        if width not in self._starts:
            return np.full(ids.shape, -1, np.int64), ids
        starts, tensors, numel = self._starts[width], self._tensors[width], self._numel[width]
        slot = np.searchsorted(starts, ids, side="right") - 1
        flat = ids - starts[slot]
        return np.where((slot >= 0) & (ids >= 0) & (flat < numel[slot]), tensors[slot], -1), flat

    def of_dtype(self, tensors: Indices, dtype: str) -> NDArray[np.bool_]:
        """Which tensor indices are of a dtype that carries ids; -1 is of none."""
        same: NDArray[np.bool_] = (self._dtypes == dtype)[tensors]
        return same if dtype != "bool" else np.zeros_like(same)


def payload_bits(width: int) -> int:
    """Bits of an id that an element of ``width`` bytes carries in one pass."""
    return 8 * width - 3


class Ids(Contents):
    """Pass number ``number`` of the ids, or its complement."""

    def __init__(self, space: IdSpace, number: int, *, complement: bool = False) -> None:
        self._space, self._number, self._complement = space, number, complement

    @override
    def words(self, tensor: int) -> Words:
        spec = self._space.directory[tensor]
        out = np.empty(spec.numel, word_dtype(spec.width))
        bits = payload_bits(spec.width)
        number = self._number if self._number < self._space.passes(spec.width) else 0
        mask = (1 << bits) - 1
        start = self._space.base(tensor)
        if spec.dtype == "bool":
            out[...] = (np.arange(start, start + out.size) & 1) ^ self._complement
            return out
        block = np.arange(_BLOCK, dtype=np.uint64)
        prefix = np.uint64((mask if self._complement else 0) ^ (1 << bits))
        for lo in range(0, out.size, _BLOCK):
            part = out[lo : lo + _BLOCK]
            ids = block[: part.size] + np.uint64(start + lo)
            ids >>= np.uint64(bits * number)
            ids &= np.uint64(mask)
            ids ^= prefix
            part[...] = ids
        return out


class Patterns(Contents):
    """Seeded bits of one kind; tensors with equal ids get equal bits.

    ``random``: any bits. ``ordinary``: finite normal numbers of either sign. ``special``: zeros of both signs,
    subnormals, the largest finite numbers, infinities, quiet and signalling NaNs with payloads; or one of these
    kinds alone. Bools are random, and the opposite for another ``flavour`` of the same seed.
    """

    def __init__(self, space: IdSpace, kind: str, seed: int, flavour: int = 0) -> None:
        self._space, self._kind, self._seed, self._flavour = space, kind, seed, flavour

    @override
    def words(self, tensor: int) -> Words:
        spec = self._space.directory[tensor]
        key = self._space.representative(tensor)
        if spec.dtype == "bool":
            rng = np.random.Generator(np.random.SFC64([self._seed, key]))
            bits: Words = rng.integers(0, 2, spec.numel, np.uint8) ^ np.uint8(self._flavour & 1)
            return bits
        rng = np.random.Generator(np.random.SFC64([self._seed, key, self._flavour, *self._kind.encode()]))
        dtype = word_dtype(spec.width)
        table = _table(spec.dtype, self._kind)
        if table is not None:
            chosen: Words = table[rng.integers(0, table.size, spec.numel, np.uint8)]
            return chosen
        raw: Words = np.frombuffer(rng.bytes(spec.nbytes), dtype).copy()
        if self._kind == "random":
            return raw
        if spec.dtype not in _FLOATS:
            raw &= dtype.type((1 << (8 * spec.width - 2)) - 1)
            return raw
        sign, exponent, mantissa = _FLOATS[spec.dtype]
        # Exponents 01xx…: finite, normal, and near enough to 1 that functions of them do not saturate.
        keep = (sign << (exponent + mantissa)) | ((1 << (exponent + mantissa - 2)) - 1)
        low = (1 << (exponent + mantissa - 2)) | ((0b11 << (exponent + mantissa - 4)) if exponent > 4 else 0)
        raw &= dtype.type(_both(spec.dtype, keep))
        raw |= dtype.type(_both(spec.dtype, low))
        return raw


class Choice(Contents):
    """One of two contents for each tensor, by a bit of its (representative's) index."""

    def __init__(self, space: IdSpace, zero: Contents, one: Contents, bit: int) -> None:
        self._space, self._contents, self._bit = space, (zero, one), bit

    @override
    def words(self, tensor: int) -> Words:
        return self._contents[self._space.representative(tensor) >> self._bit & 1].words(tensor)


def _both(dtype: str, word: int) -> int:
    return word << 32 | word if dtype == "complex64" else word


@lru_cache(maxsize=256)
def _table(dtype: str, kind: str) -> Words | None:
    """Words of a special kind; None where the kind has no table (then ordinary numbers take its place)."""
    if kind in ("random", "ordinary"):
        return None
    if dtype not in _FLOATS:
        width = {"uint8": 1, "int8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4}.get(dtype, 8)
        top = 1 << (8 * width - 1)
        return np.array([0, 1, top - 1, top, 2 * top - 1], np.uint64).astype(word_dtype(width))
    sign, exponent, mantissa = _FLOATS[dtype]
    top, fraction = (1 << exponent) - 1, (1 << mantissa) - 1
    inf = top << mantissa
    quiet = 1 << max(mantissa - 1, 0)
    kinds = {
        "zero": [0],
        "subnormal": [1, fraction, max(fraction >> 1, 1)] if mantissa else [],
        "largest": [inf - 1],
        "infinite": [inf],
        "nan": [inf | quiet, inf | 1, inf | fraction, inf | quiet | 1] if mantissa else [],
    }
    chosen = [w for k, words in kinds.items() if kind in ("special", k) for w in words]
    if not chosen:
        return None
    signed = [w | s << (exponent + mantissa) for w in chosen for s in range(sign + 1)]
    width = (sign + exponent + mantissa) // 8
    if dtype == "complex64":
        signed = [a << 32 | b for a, b in zip(signed, signed[1:] + signed[:1], strict=True)]
        width = 8
    return np.array(signed, np.uint64).astype(word_dtype(width))
