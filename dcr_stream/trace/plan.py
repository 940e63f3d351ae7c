"""The placement plan: where each canonical element lives in one rank's storage."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import blake3
import msgspec

from dcr_stream.canonical import Region

__all__ = ["Box", "Finding", "Layout", "PlacementPlan", "StorageRange", "TensorClass", "TensorIdentity"]

TensorClass = Literal["mapped", "whole", "skipped", "refused"]
"""What a rank does with a canonical tensor.

``mapped``: everything it writes is placed by boxes, bit for bit. ``whole``: the native loader computes with it, so the
complete tensor goes through the loader when any of it changed. ``skipped``: this rank has no part of it. ``refused``:
a finding says why it cannot be refit.
"""


class Box(msgspec.Struct, frozen=True, array_like=True):
    """A canonical strided box and the equally large strided box of one storage that holds it.

    Position ``p`` (row-major) of ``region``, a box of canonical tensor ``tensor``, lives at position ``p`` of
    ``place``, a box of storage number ``storage`` counted in elements of the tensor's width from the storage's first
    byte. ``region`` and ``place`` have the same sizes. A dimension with stride 0 in ``region`` is a broadcast: each
    of its positions is a copy. The other dimensions of ``region`` are nested (an index has one set of coordinates).

    All elements of a box belong to one ``cell`` of the tensor (:mod:`dcr_stream.trace.cells`), and are this rank's
    copy number ``copy`` of them (the first of several if the box broadcasts).
    """

    tensor: int
    region: Region
    storage: int
    place: Region
    cell: int = 0
    copy: int = 0

    @property
    def copies(self) -> int:
        """How often the box holds each of its canonical elements."""
        copies = 1
        for size, stride in zip(self.region.sizes, self.region.strides, strict=True):
            if stride == 0 and size > 1:
                copies *= size
        return copies


class StorageRange(msgspec.Struct, frozen=True, array_like=True):
    """One distinct untyped storage: address of its first byte, and its size in bytes."""

    ptr: int
    nbytes: int


class TensorIdentity(msgspec.Struct, frozen=True, array_like=True):
    """What must stay the same about one parameter or buffer while a plan is in use."""

    name: str
    data_ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """Identity of a rank's storage: its distinct storages, and every parameter and buffer by name."""

    storages: tuple[StorageRange, ...]
    tensors: tuple[TensorIdentity, ...]


class Finding(msgspec.Struct, frozen=True, array_like=True):
    """One line of the prepare report. ``refuse`` forbids refits; ``note`` is for the reader. Ends with what to do."""

    severity: Literal["refuse", "note"]
    subject: str
    text: str


class PlacementPlan(msgspec.Struct, frozen=True, dict=True):
    """Where one rank holds every canonical element, as found and proved by :func:`dcr_stream.trace.trace`.

    ``classes`` and ``widths`` (bytes per element) are in directory order. ``aliased`` lists tensors that share
    storage with another name. ``constant_ranges`` counts the storage ranges that the native loader fills by itself
    (padding): no canonical element lives there and no delta writes them. ``mapped_bytes`` of the ``total_bytes`` that
    the loader fills from canonical tensors are placed by boxes. The plan dies with the process that owns the storage.
    """

    directory: str
    boxes: tuple[Box, ...]
    classes: tuple[TensorClass, ...]
    widths: tuple[int, ...]
    aliased: tuple[int, ...]
    identity: Layout
    constant_ranges: int
    mapped_bytes: int
    total_bytes: int
    findings: tuple[Finding, ...]

    @cached_property
    def digest(self) -> str:
        """Hex BLAKE3 of the plan."""
        return blake3.blake3(b"dcr-plan-1" + msgspec.msgpack.encode(self)).hexdigest()

    @cached_property
    def by_tensor(self) -> dict[int, tuple[Box, ...]]:
        """Boxes of every placed tensor, in plan order."""
        found: dict[int, list[Box]] = {}
        for box in self.boxes:
            found.setdefault(box.tensor, []).append(box)
        return {tensor: tuple(boxes) for tensor, boxes in found.items()}

    @property
    def coverage(self) -> float:
        """Mapped share of the bytes that the loader fills from canonical tensors; 1.0 if there are none."""
        return self.mapped_bytes / self.total_bytes if self.total_bytes else 1.0

    def tensors(self, kind: TensorClass) -> frozenset[int]:
        """Directory indices of the tensors of one class."""
        return frozenset(i for i, c in enumerate(self.classes) if c == kind)

    def encode(self) -> bytes:
        """MessagePack bytes."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> PlacementPlan:
        """The plan that was encoded.

        Raises:
            msgspec.DecodeError: ``data`` is no plan.
        """
        return msgspec.msgpack.decode(data, type=cls)
