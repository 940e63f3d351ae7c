"""Complete tensors on their way to a native loader: put together from owners' parts, handed on in shared blocks."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec
import numpy as np

from dcr_stream.canonical import TensorDirectory, Words, word_dtype
from dcr_stream.codec import Decoded
from dcr_stream.codec.boxes import located
from dcr_stream.delta import Item
from dcr_stream.errors import MalformedPayload

__all__ = ["Assembly", "pack_tensors", "unpack_tensors"]

_ALIGN = 16


class Assembly:
    """Puts tensors together from their owners' parts; each element must come exactly once.

    Holds only tensors that have begun and are not complete: with payloads in directory order from every owner, that
    is about one payload per owner.
    """

    def __init__(self, directory: TensorDirectory) -> None:
        self._directory = directory
        self._open: dict[int, tuple[Words, np.ndarray[tuple[int], np.dtype[np.bool_]]]] = {}
        self.complete: dict[int, Words] = {}

    def add(self, item: Item, decoded: Decoded) -> None:
        """Place one overwrite item.

        Raises:
            MalformedPayload: the item is relative, or an element came twice.
        """
        spec = self._directory[item.tensor]
        if item.mode != "overwrite":
            raise MalformedPayload(f"tensor {spec.name!r} must come complete, not as {item.mode!r}")
        if item.tensor in self.complete and spec.numel:
            raise MalformedPayload(f"tensor {spec.name!r} came twice")
        if item.tensor not in self._open:
            self._open[item.tensor] = np.empty(spec.numel, word_dtype(spec.width)), np.zeros(spec.numel, np.bool_)
        words, seen = self._open[item.tensor]
        for flat, some in located(item.region, decoded.positions):
            if seen[flat].any():
                raise MalformedPayload(f"tensor {spec.name!r}: an element came twice; owners' regions must not overlap")
            words[flat] = decoded.values[some]
            seen[flat] = True
        if seen.all():
            self.complete[item.tensor] = words
            del self._open[item.tensor]

    def missing(self) -> list[str]:
        """Names of tensors that have begun and are not complete."""
        return [self._directory[i].name for i in sorted(self._open)]


def pack_tensors(tensors: list[tuple[int, Words]]) -> bytearray:
    """Lay complete tensors (directory index, flat words) out in one block."""
    table = msgspec.msgpack.encode([(index, words.nbytes) for index, words in tensors])
    out = bytearray(struct.pack("<I", len(table)) + table)
    for _, words in tensors:
        out += bytes(-len(out) % _ALIGN)
        out += np.ascontiguousarray(words).data.cast("B")
    return out


def unpack_tensors(block: memoryview, directory: TensorDirectory) -> Iterator[tuple[int, Words]]:
    """The tensors of a block, as views.

    Raises:
        MalformedPayload: a length or an index does not fit the block or the directory.
    """
    if len(block) < 4:
        raise MalformedPayload("a block of tensors is shorter than its own length field")
    (length,) = struct.unpack("<I", block[:4])
    if length > len(block) - 4:
        raise MalformedPayload("the tensor table of a block is longer than the block")
    try:
        table = msgspec.msgpack.decode(block[4 : 4 + length], type=list[tuple[int, int]])
    except msgspec.DecodeError as error:
        raise MalformedPayload(f"the tensor table of a block cannot be read: {error}") from error
    at = 4 + length
    for index, nbytes in table:
        if not 0 <= index < len(directory) or nbytes != directory[index].nbytes:
            raise MalformedPayload(
                f"a block holds tensor {index} of {nbytes:,} bytes, which the directory does not list"
            )
        at += -at % _ALIGN
        if at + nbytes > len(block):
            raise MalformedPayload(f"tensor {directory[index].name!r} leaves its block")
        yield index, np.frombuffer(block[at : at + nbytes], word_dtype(directory[index].width))
        at += nbytes
    if at != len(block):
        raise MalformedPayload("bytes follow the last tensor of a block")
