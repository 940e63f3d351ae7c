"""Tensors as flat unsigned words: the only view of weights that the codec has.

A word is an element's stored bits, so NaN payloads, signed zeros, subnormals, bools and every integer are just
numbers here, and equality of words is equality of bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dcr_stream.canonical import WIDTHS, Words, word_dtype
from dcr_stream.errors import UsageError

__all__ = ["dtype_name", "tensor_from_words", "torch_dtype", "words"]

_WORD_DTYPES: dict[int, torch.dtype] = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype called ``name`` (torch's name without ``torch.``).

    Raises:
        UsageError: the dtype cannot be refit, or this torch does not have it.
    """
    dtype = getattr(torch, name, None) if name in WIDTHS else None
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"dtype {name!r} cannot be refit; supported: {', '.join(sorted(WIDTHS))}")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Torch's name of ``dtype`` without ``torch.``.

    Raises:
        UsageError: the dtype cannot be refit.
    """
    name = str(dtype).removeprefix("torch.")
    torch_dtype(name)
    return name


def words(tensor: torch.Tensor) -> Words:
    """The stored bits of ``tensor``, flat and row-major, as unsigned integers of the element's width.

    A view (writing to it writes to the tensor) when the tensor is contiguous on the CPU; otherwise a row-major copy:
    strided, transposed, expanded and lazily conjugated tensors, and tensors on a device. 0-dim tensors have one word,
    empty ones none. Autograd is not involved.

    Raises:
        UsageError: the dtype cannot be refit, or the tensor has no dense storage (sparse, quantised, meta).
    """
    width = WIDTHS[dtype_name(tensor.dtype)]
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise UsageError(
            f"a tensor of shape {tuple(tensor.shape)} with layout {tensor.layout} on device {tensor.device} "
            "has no dense storage to read bits from; materialise it first"
        )
    # Seen as integers before anything is copied: torch's copy of bools turns every byte but 0 into 1.
    bits = tensor.detach().resolve_conj().resolve_neg().view(_WORD_DTYPES[width])
    flat: Words = bits.cpu().contiguous().reshape(-1).numpy()
    return flat


def tensor_from_words(words: Words, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """A CPU tensor of ``dtype`` and ``shape`` over the memory of ``words``; nothing is copied.

    Raises:
        UsageError: the dtype cannot be refit; ``words`` have another width or number than it needs, are not
            contiguous, or are read-only (torch has no read-only tensors).
    """
    target = torch_dtype(dtype)
    if words.dtype != word_dtype(WIDTHS[dtype]) or words.size != math.prod(shape):
        raise UsageError(
            f"{words.size} words of type {words.dtype} do not make a {dtype} tensor of shape {tuple(shape)}, which "
            f"needs {math.prod(shape)} words of {WIDTHS[dtype]} bytes"
        )
    if not (words.flags.c_contiguous and words.flags.writeable):
        raise UsageError(
            f"words of a {dtype} tensor of shape {tuple(shape)} must be contiguous and writeable to be viewed as a "
            "tensor; pass a copy"
        )
    return torch.from_numpy(words.reshape(-1)).view(target).view(tuple(shape))
