"""Have the kernels ready before they are needed, and see that they are right."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from dcr_stream.canonical import Region, Words, word_dtype
from dcr_stream.codec.boxes import add_at, flat_indices, located, sum_box, write_box
from dcr_stream.codec.digest import change_sum, state_change, state_sums
from dcr_stream.codec.entries import decode_item, encode_record
from dcr_stream.codec.kernels import compiled_forms, implementation, using
from dcr_stream.codec.scan import Found
from dcr_stream.delta import Record

__all__ = ["WIDTHS", "WarmUp", "kernel_fault", "warm_up"]


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What a warm-up did: ``seconds`` it took, and the forms that it ``compiled`` or ``loaded`` from ``folder``.

    ``folder`` is where numba keeps compiled code; None if no folder can be written, or if kernels are numpy's.
    """

    seconds: float
    compiled: int = 0
    loaded: int = 0
    folder: str | None = None


WIDTHS = (1, 2, 4, 8)
"""Bytes of an element, all that there are."""


def warm_up(widths: Iterable[int] = (2,)) -> WarmUp:
    """Compile, or load from numba's cache, what a refit of tensors of some element widths runs; BF16 without arguments.

    Called once in a parent process, it spares the children from compiling the same code at the same time. Kernels for
    other element widths are compiled at their first use. Does nothing where kernels are numpy's.
    """
    started = time.perf_counter()
    if implementation() == "numpy":
        return WarmUp(time.perf_counter() - started)
    before = compiled_forms()
    for width in widths:
        for old, new in _changes(width):
            _refit(old, new)
    after = compiled_forms()
    return WarmUp(
        seconds=time.perf_counter() - started,
        compiled=after.compiled - before.compiled,
        loaded=after.loaded - before.loaded,
        folder=after.folder,
    )


def kernel_fault() -> str | None:
    """What is wrong with the kernels in use, from small refits of every element width; None if nothing.

    A refit must leave storage with exactly the new bits, and give the entries and sums of the numpy references. Those
    are used by the whole process meanwhile.
    """
    for width in WIDTHS:
        for old, new in _changes(width):
            storage, made = _refit(old, new)
            with using("numpy"):
                _, expected = _refit(old, new)
            changed = f"{np.count_nonzero(old != new)} changes among {old.size} elements of {width} bytes"
            if not np.array_equal(storage, new):
                return f"after {changed}, storage does not hold the new bits"
            if made != expected:
                return f"{changed} give other bytes or sums than the numpy references"
    return None


def _changes(width: int) -> Iterator[tuple[Words, Words]]:
    """Old and new words whose changes are coded as dense, as bitmap, as gaps without and with a shift."""
    rng = np.random.default_rng(width)
    for step in (1, 2, 10, 1000):
        changed = np.arange(200, dtype=np.int64) * step
        old = rng.integers(0, 256, (int(changed[-1]) + 1) * width, np.uint8).view(word_dtype(width))
        new = old.copy()
        new[changed] += rng.integers(1, 255, changed.size).astype(old.dtype)
        yield old, new


def _refit(old: Words, new: Words) -> tuple[Words, tuple[object, ...]]:
    """Scan, encode, decode, apply and advance; returns what was applied to, and all that must not depend on kernels."""
    found = Found(old)
    found.add(new)
    positions, differences, before = found.take()
    region = Region.whole(old.size)
    entry = encode_record(Record("", 0, region, positions, differences, before, ""), "add")
    decoded = decode_item(entry.item, entry.columns)
    storage, advanced = old.copy(), old.copy()
    made: list[object] = [entry, flat_indices(Region(0, (old.size,), (2,)), np.arange(old.size)).tobytes()]
    for indices, some in located(region, decoded.positions):
        made.append(change_sum("", indices, differences[some]))
        made.append(state_change(0, indices, before[some], differences[some]))
        made.append(state_sums(0, indices, differences[some]))
        add_at(advanced, indices, differences[some])
        made.append(write_box(storage, region, region, "add", 0, indices, decoded.values[some]))
        made.append(sum_box(storage, region, region, 0, indices))
    return storage, (*made, advanced.tobytes(), storage.tobytes())
