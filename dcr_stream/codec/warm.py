"""Have the kernels ready before they are needed."""

from __future__ import annotations

import time

import numpy as np

from dcr_stream.canonical import Indices, Region
from dcr_stream.codec.boxes import located
from dcr_stream.codec.digest import change_sum, state_change, state_sums
from dcr_stream.codec.entries import decode_item, encode_record
from dcr_stream.codec.kernels import implementation
from dcr_stream.codec.scan import Found
from dcr_stream.delta import Record

__all__ = ["warm_up"]


def warm_up() -> float:
    """Compile, or load from numba's cache, what a refit of BF16 tensors runs; returns the seconds it took.

    Called once in a parent process, it spares the children from compiling the same code at the same time. Kernels for
    other element widths are compiled at their first use. Does nothing where kernels are numpy's.
    """
    started = time.perf_counter()
    if implementation() == "numba":
        for step in (1, 2, 10, 1000):  # dense, bitmap, gaps without and with a shift
            _refit(np.arange(4, dtype=np.int64) * step)
    return time.perf_counter() - started


def _refit(changed: Indices) -> None:
    old = np.zeros(int(changed[-1]) + 1, np.uint16)
    new = old.copy()
    new[changed] = 1
    found = Found(old)
    found.add(new)
    positions, differences, before = found.take()
    region = Region.whole(old.size)
    for indices, offset, some in located(region, positions):
        change_sum("", indices, differences[some], offset)
        state_change(0, indices, before[some], differences[some], offset)
        state_sums(0, indices, differences[some])
    entry = encode_record(Record("", 0, region, positions, differences, before, ""), "add")
    decode_item(entry.item, entry.columns)
