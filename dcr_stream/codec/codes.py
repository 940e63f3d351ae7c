"""Two-byte ``add`` differences as short codes: columns C, E1 and E2.

With ``d`` the difference as int16 (never 0)::

    z    = zigzag(d) - 1          zigzag(d) = d << 1 ^ d >> 15, so -1, 1, -2, 2, … become z = 0, 1, 2, 3, …
    code = min(z, 2^w - 1)        column C: w bits per element, LSB first; unused bits of the last byte are 0
    e    = min(z - (2^w - 1), 255)  column E1: one byte for every saturated code, in order
    z                             column E2: u16, little-endian, for every 255 in E1, in order

``w`` is 2 when at least 60 % of the item's differences are ±1, otherwise 4; a decoder accepts both.
"""

from __future__ import annotations

import numpy as np

from dcr_stream.canonical import Bytes, Words
from dcr_stream.codec.kernels import kernel

__all__ = ["CODE_BITS", "choose_code_bits", "code_fault", "decode_codes", "encode_codes"]

CODE_BITS = (2, 4)
"""Code widths of wire format version 1."""


def choose_code_bits(differences: Words) -> int:
    """The code width for uint16 ``differences``."""
    ones = int(np.count_nonzero((differences == 1) | (differences == 0xFFFF)))
    return 2 if 5 * ones >= 3 * differences.size else 4


@kernel("codes")
def encode_codes(differences: Words) -> tuple[int, Bytes, Bytes, Bytes]:
    """Code uint16 ``differences`` as (code width, C, E1, E2).

    Raises:
        ValueError: one of them is 0.
    """
    if not differences.all():
        raise ValueError("a difference of 0 has no code")
    width = choose_code_bits(differences)
    top = (1 << width) - 1
    d = differences.view(np.int16)
    z = (d << 1 ^ d >> 15).view(np.uint16) - np.uint16(1)
    saturated = z[z >= top]
    excess = np.minimum(saturated - np.uint16(top), np.uint16(255)).astype(np.uint8)
    escaped = saturated[excess == 255].astype("<u2").view(np.uint8)
    return width, _pack(np.minimum(z, np.uint16(top)).astype(np.uint8), width), excess, escaped


def code_fault(codes: Bytes, excess: Bytes, escaped: Bytes, width: int, count: int) -> str | None:
    """What is wrong with columns C, E1 and E2 of an item of ``count`` elements; None if nothing.

    After a None, ``decode_codes`` returns ``count`` differences, none of them 0, and that encoding them with
    the same code width gives back the same bytes.
    """
    if width not in CODE_BITS:
        return f"code width {width} is not one of {CODE_BITS}"
    if codes.size != (count * width + 7) // 8:
        return f"column C has {codes.size} bytes, {count} codes of {width} bits need {(count * width + 7) // 8}"
    if codes.size and count * width % 8 and int(codes[-1]) >> count * width % 8:
        return "column C ends with bits that belong to no code"
    top = (1 << width) - 1
    saturated, escapes = count_codes(codes, excess, width, count)
    if excess.size != saturated:
        return f"column E1 has {excess.size} bytes for {saturated} saturated codes"
    if escaped.size != 2 * escapes:
        return f"column E2 has {escaped.size} bytes for {escapes} escapes"
    z = escaped.view("<u2")
    if z.size and (int(z.min()) < top + 255 or int(z.max()) == 0xFFFF):
        return "column E2 holds a value that needs no escape, or a difference of 0"
    return None


@kernel("codes")
def decode_codes(codes: Bytes, excess: Bytes, escaped: Bytes, width: int, count: int) -> Words:
    """The uint16 differences held by columns that ``code_fault`` found nothing wrong with."""
    top = (1 << width) - 1
    z = _unpack(codes, width, count).astype(np.uint16)
    tail = excess.astype(np.uint16) + np.uint16(top)
    tail[excess == 255] = escaped.view("<u2")
    z[z == top] = tail
    z += np.uint16(1)
    differences: Words = z >> np.uint16(1) ^ -(z & np.uint16(1))
    return differences


@kernel("codes")
def count_codes(codes: Bytes, excess: Bytes, width: int, count: int) -> tuple[int, int]:
    """How many of ``count`` codes are saturated, and how many bytes of E1 are escapes; unused bits of C are 0."""
    saturated = int(np.count_nonzero(_unpack(codes, width, count) == (1 << width) - 1))
    return saturated, int(np.count_nonzero(excess == 255))


def _pack(codes: Bytes, width: int) -> Bytes:
    per_byte = 8 // width
    padded = np.zeros(-(-codes.size // per_byte) * per_byte, np.uint8)
    padded[: codes.size] = codes
    shifts = np.arange(0, 8, width, dtype=np.uint8)
    packed: Bytes = np.bitwise_or.reduce(padded.reshape(-1, per_byte) << shifts, axis=1)
    return packed


def _unpack(packed: Bytes, width: int, count: int) -> Bytes:
    shifts = np.arange(0, 8, width, dtype=np.uint8)
    codes: Bytes = (packed[:, None] >> shifts & np.uint8((1 << width) - 1)).reshape(-1)
    return codes[:count]
