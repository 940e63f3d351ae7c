"""The storage behind a model's parameters and buffers, as words."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dcr_stream.canonical import Words, word_dtype
from dcr_stream.codec.device import DeviceWords, is_host, on_host
from dcr_stream.errors import LayoutChanged, PlacementError
from dcr_stream.interfaces import Loader
from dcr_stream.trace.plan import Layout, StorageRange, TensorIdentity

__all__ = ["StorageMap", "StorageView"]


@dataclass(frozen=True, slots=True)
class StorageView:
    """All parameters and buffers of one dtype over one storage.

    ``covered`` marks the elements (of the dtype's ``width``, from the storage's first byte) that belong to one of
    ``names``; None means all of them.
    """

    storage: int
    dtype: str
    width: int
    names: tuple[str, ...]
    covered: NDArray[np.bool_] | None


class StorageMap:
    """Every distinct untyped storage behind the parameters and buffers of a loader's model, numbered in their order.

    Parameters and buffers alias (tied weights, views), so that placement is told in storages and elements, not in
    names. The map keeps the storages alive: an address cannot be reused by another tensor while the map exists.

    Raises:
        PlacementError: a tensor is not plain memory (meta, sparse), its elements have more than 8 bytes, or two
            storages overlap.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        tensors = loader.storage()
        self._bytes: list[torch.Tensor] = []
        self._number: dict[int, int] = {}
        self._held: list[torch.UntypedStorage] = []
        self._owners: list[list[str]] = []
        for name, tensor in tensors.items():
            if tensor.numel() == 0:
                continue
            self._require_plain(name, tensor)
            memory = tensor.untyped_storage()
            number = self._number.setdefault(memory.data_ptr(), len(self._bytes))
            if number == len(self._bytes):
                self._bytes.append(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(memory))
                self._held.append(memory)
                self._owners.append([])
            self._owners[number].append(name)
        self._layout = self._identify(tensors)
        self._refuse_overlap()
        self._tensors = dict(tensors)

    @staticmethod
    def _require_plain(name: str, tensor: torch.Tensor) -> None:
        if (
            tensor.element_size() > 8
            or tensor.device.type not in ("cpu", "cuda")
            or tensor.layout is not torch.strided
            or tensor.untyped_storage().data_ptr() == 0
        ):
            raise PlacementError(
                f"storage of {name!r} is not plain memory of elements up to 8 bytes (device {tensor.device}, "
                f"layout {tensor.layout}, dtype {tensor.dtype}); materialise the model before tracing it"
            )

    def _refuse_overlap(self) -> None:
        ranges = sorted((s.ptr, s.ptr + s.nbytes, i) for i, s in enumerate(self._layout.storages))
        for (_, end, first), (start, _, second) in itertools.pairwise(ranges):
            if start < end:
                raise PlacementError(
                    f"storages of {self._owners[first][0]!r} and {self._owners[second][0]!r} overlap in memory; "
                    "let both be views of one torch storage"
                )

    def _identify(self, tensors: Mapping[str, torch.Tensor]) -> Layout:
        return Layout(
            tuple(StorageRange(m.data_ptr(), m.nbytes()) for m in self._held),
            tuple(
                TensorIdentity(name, t.data_ptr(), tuple(t.shape), tuple(t.stride()), _dtype_name(t))
                for name, t in tensors.items()
            ),
        )

    def __len__(self) -> int:
        return len(self._bytes)

    def memory(self, storage: int, width: int) -> Words | DeviceWords:
        """All whole words of ``width`` bytes of a storage, where they live; index 0 is at its first byte."""
        raw = self._bytes[storage]
        raw = raw[: raw.numel() // width * width]
        if is_host(raw.device):
            return raw.numpy().view(word_dtype(width))
        return DeviceWords.of_bytes(raw, width)

    def words(self, storage: int, width: int) -> Words:
        """The same, to be read on the host: of storage on a device a copy."""
        return on_host(self.memory(storage, width))

    def names(self, storage: int) -> tuple[str, ...]:
        """Names of the parameters and buffers over a storage."""
        return tuple(self._owners[storage])

    def span(self, name: str) -> tuple[int, int]:
        """First storage element of a parameter or buffer, and one past its last, in elements of its own width."""
        tensor = self._tensors[name]
        first = int(tensor.storage_offset())
        return first, first + 1 + sum((n - 1) * s for n, s in zip(tuple(tensor.shape), tensor.stride(), strict=True))

    def identity(self) -> Layout:
        """The layout as it was when the map was made."""
        return self._layout

    def check(self, identity: Layout) -> None:
        """Compare the model's parameters and buffers, as they are now, with ``identity``.

        Raises:
            LayoutChanged: one of them moved, changed shape, strides or dtype, appeared or vanished.
        """
        now = {t.name: t for t in self._identify(self._loader.storage()).tensors}
        for was in identity.tensors:
            found = now.pop(was.name, None)
            if found != was:
                raise LayoutChanged(
                    f"storage of {was.name!r} changed since it was traced (was {_describe(was)}, "
                    f"is {_describe(found) if found else 'gone'}); trace the engine again and restore it"
                )
        if now:
            raise LayoutChanged(
                f"storage of {next(iter(now))!r} appeared after the engine was traced; trace it again and restore it"
            )

    def contains(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lives in one of the map's storages."""
        return tensor.numel() == 0 or tensor.untyped_storage().data_ptr() in self._number

    def views(self, ignore: frozenset[str] = frozenset()) -> list[StorageView]:
        """Storage grouped by dtype, without the names in ``ignore``."""
        groups: dict[tuple[int, str, int], list[str]] = {}
        for name, tensor in self._tensors.items():
            if tensor.numel() and name not in ignore:
                number = self._number[tensor.untyped_storage().data_ptr()]
                groups.setdefault((number, _dtype_name(tensor), tensor.element_size()), []).append(name)
        return [StorageView(s, d, w, tuple(n), self._coverage(s, w, n)) for (s, d, w), n in groups.items()]

    def _coverage(self, storage: int, width: int, names: list[str]) -> NDArray[np.bool_] | None:
        count = self._bytes[storage].numel() // width
        if any(self._tensors[n].is_contiguous() and self._tensors[n].numel() == count for n in names):
            return None
        covered = np.zeros(count, np.bool_)
        for tensor in (self._tensors[n] for n in names):
            spot = covered[tensor.storage_offset() :]
            np.lib.stride_tricks.as_strided(spot, tuple(tensor.shape), tuple(tensor.stride()))[...] = True
        return None if covered.all() else covered


def _dtype_name(tensor: torch.Tensor) -> str:
    # Storage may have dtypes that no canonical tensor can have (packed sub-byte ones): they are never mapped.
    return str(tensor.dtype).removeprefix("torch.")


def _describe(tensor: TensorIdentity) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} strides {list(tensor.strides)} at {tensor.data_ptr:#x}"
