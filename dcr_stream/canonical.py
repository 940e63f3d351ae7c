"""Canonical coordinates: the tensor directory, and strided regions of its tensors.

A *canonical tensor* is what a checkpoint names (Hugging Face name, dtype, shape). An element's canonical
coordinate is that name and its row-major flat index. Training shards and rollout storage meet here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import blake3
import msgspec
import numpy as np
from numpy.typing import NDArray

from dcr_stream.errors import DirectoryMismatch, UsageError

__all__ = ["MAX_DIMS", "WIDTHS", "Bytes", "Indices", "Region", "TensorDirectory", "TensorSpec", "Words", "word_dtype"]

Indices = NDArray[np.int64]
"""Flat element indices or positions."""

Bytes = NDArray[np.uint8]
"""Bytes of columns."""

Words = NDArray[Any]
"""Stored bits as unsigned integers: uint8, uint16, uint32 or uint64."""

MAX_DIMS = 4
"""Most dimensions that a collapsed region has (wire format, version 1)."""

WIDTHS: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
    "uint16": 2,
    "float32": 4,
    "int32": 4,
    "uint32": 4,
    "float64": 8,
    "int64": 8,
    "uint64": 8,
    "complex64": 8,
}
"""Bytes per element of every dtype that can be refit, by torch's name without ``torch.``."""

_WORDS: dict[int, np.dtype[Any]] = {w: np.dtype(f"u{w}") for w in (1, 2, 4, 8)}


def word_dtype(width: int) -> np.dtype[Any]:
    """The unsigned numpy dtype of ``width`` bytes (1, 2, 4 or 8)."""
    return _WORDS[width]


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """Name, dtype (torch's name without ``torch.``) and shape of one canonical tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-dim tensor."""
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        """Bytes per element."""
        return WIDTHS[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.numel * self.width


class TensorDirectory:
    """The ordered canonical tensors of a run; payloads refer to them by index.

    Raises:
        UsageError: a name occurs twice, a dtype is not supported, or a shape is negative.
    """

    def __init__(self, tensors: Iterable[TensorSpec]) -> None:
        self.tensors: tuple[TensorSpec, ...] = tuple(tensors)
        self._index: dict[str, int] = {}
        for i, spec in enumerate(self.tensors):
            if spec.name in self._index:
                raise UsageError(f"canonical tensor {spec.name!r} is listed twice; publish each name once")
            if spec.dtype not in WIDTHS:
                raise UsageError(
                    f"canonical tensor {spec.name!r} has dtype {spec.dtype!r}, which cannot be refit; "
                    f"supported: {', '.join(sorted(WIDTHS))}"
                )
            if any(n < 0 for n in spec.shape):
                raise UsageError(f"canonical tensor {spec.name!r} has a negative size in shape {spec.shape}")
            self._index[spec.name] = i
        self.digest: str = blake3.blake3(b"dcr-directory-1" + msgspec.msgpack.encode(self.tensors)).hexdigest()
        """Hex BLAKE3 over names, dtypes and shapes in order: equal on both sides or nothing is applied."""

    def __len__(self) -> int:
        return len(self.tensors)

    def __iter__(self) -> Iterator[TensorSpec]:
        return iter(self.tensors)

    def __getitem__(self, index: int) -> TensorSpec:
        return self.tensors[index]

    def __contains__(self, name: object) -> bool:
        return name in self._index

    def index(self, name: str) -> int:
        """Position of a name.

        Raises:
            DirectoryMismatch: the directory has no such tensor.
        """
        try:
            return self._index[name]
        except KeyError:
            raise DirectoryMismatch(
                f"tensor {name!r} is not in the directory of {len(self)} canonical tensors; "
                "the model's structure must not change within a run"
            ) from None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole checkpoint."""
        return sum(spec.nbytes for spec in self.tensors)


class Region(msgspec.Struct, frozen=True, array_like=True):
    """A strided box of one canonical tensor (or of one storage), in elements.

    Position ``p`` in the region is row-major over ``sizes``; its flat index is ``offset + Σ coordinate·stride``.
    Strides may be 0 (broadcast) on the receiving side only.
    """

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def whole(cls, numel: int) -> Region:
        """All of a tensor with ``numel`` elements."""
        return cls(0, (numel,), (1,))

    @classmethod
    def run(cls, start: int, count: int) -> Region:
        """The contiguous elements ``[start, start + count)``."""
        return cls(start, (count,), (1,))

    @property
    def count(self) -> int:
        """Number of positions."""
        return math.prod(self.sizes)

    @property
    def contiguous(self) -> bool:
        """Whether positions map to consecutive flat indices."""
        return len(self.sizes) == 1 and (self.strides[0] == 1 or self.sizes[0] <= 1)

    @property
    def last(self) -> int:
        """Largest flat index reached; ``offset - 1`` for an empty region."""
        if self.count == 0:
            return self.offset - 1
        return self.offset + sum((n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True))

    def fits(self, numel: int) -> bool:
        """Whether the region is well formed and inside ``numel`` elements (no negative sizes or strides)."""
        return (
            1 <= len(self.sizes) == len(self.strides) <= MAX_DIMS
            and self.offset >= 0
            and all(n >= 0 for n in self.sizes)
            and all(s >= 0 for s in self.strides)
            and (self.last < numel if self.count else self.offset <= numel)
        )

    def flat(self, positions: Indices) -> Indices:
        """Flat indices of ``positions`` (row-major positions inside the region)."""
        if self.contiguous:
            return positions + self.offset
        flat = np.full(positions.shape, self.offset, np.int64)
        rest = positions
        for size, stride in zip(reversed(self.sizes[1:]), reversed(self.strides[1:]), strict=True):
            rest, coordinate = np.divmod(rest, size)
            flat += coordinate * stride
        return flat + rest * self.strides[0]

    def cut(self, lo: int, hi: int) -> Iterator[Region]:
        """Boxes that, one after the other, hold positions ``[lo, hi)``: at most two per dimension, and no empty one."""
        if lo >= hi:
            return
        if (lo, hi) == (0, self.count):
            yield self
            return
        size, stride = self.sizes[0], self.strides[0]
        if len(self.sizes) == 1:
            yield Region(self.offset + lo * stride, (hi - lo,), (stride,))
            return
        inner = self.count // size
        first, last = -(-lo // inner), hi // inner  # rows that are whole
        if first > last:
            yield from self._row(last).cut(lo - last * inner, hi - last * inner)
            return
        if lo < first * inner:
            yield from self._row(first - 1).cut(lo - (first - 1) * inner, inner)
        if first < last:
            yield Region(self.offset + first * stride, (last - first, *self.sizes[1:]), self.strides)
        if last * inner < hi:
            yield from self._row(last).cut(0, hi - last * inner)

    def _row(self, index: int) -> Region:
        return Region(self.offset + index * self.strides[0], self.sizes[1:], self.strides[1:])

    def all_flat(self) -> Indices:
        """Flat indices of every position, in order."""
        flat = np.array([self.offset], np.int64)
        for size, stride in zip(self.sizes, self.strides, strict=True):
            flat = (flat[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
        return flat
