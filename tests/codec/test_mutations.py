"""Mutated payloads: refused by a PayloadError, caught by the state digest, or the same bits; and bounded memory.

The short form reads 4,000 payloads and 2,000 blocks, the slow one 100,000 and 50,000, half of them with each
implementation of the kernels. Payloads are of every entry mode, position mode and element width.
"""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, islice, product
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from dcr_stream.codec import OpenedPayload, check_payload, open_payload, unpack_block
from dcr_stream.codec.seals import SEAL_BYTES
from dcr_stream.errors import DigestMismatch, MalformedPayload, PayloadError

from .mutants import DIRECTORY, LIMITS, MUTATIONS, ORIGINALS, SECRET, Original, mutant, sealed
from .wire_trip import arrive

Outcome = Literal["refused", "digest", "same bits"]

PEAK = 64 * LIMITS.max_raw_bytes
"""Python memory that one payload may take while it is read, in bytes: an element takes at least a quarter of a byte of
columns, and up to 16 bytes decoded."""
SPACE = 256 << 20
"""Address space that the process may gain, so that memory which Python does not account for is bounded, too."""


def opened(data: bytes, block: bool) -> OpenedPayload:
    return unpack_block(data, LIMITS) if block else open_payload(data, secret=SECRET, limits=LIMITS)


def outcome(original: Original, data: bytes, block: bool = False) -> Outcome:
    """Read, check, apply and read back as a receiver does."""
    tensors = {tensor: words.copy() for tensor, words in original.before.items()}
    try:
        payload = opened(data, block)
        check_payload(payload, DIRECTORY)
        for item, columns in payload.items():
            numel, width = DIRECTORY[item.tensor].numel, DIRECTORY[item.tensor].width
            arrive(tensors.setdefault(item.tensor, np.zeros(numel, f"u{width}")), item, columns)
    except PayloadError:
        return "refused"
    except DigestMismatch:
        return "digest"
    for tensor, words in tensors.items():
        np.testing.assert_array_equal(words, original.after.get(tensor))
    return "same bits"


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Fail an allocation that a read may not make, whoever makes it.

    Python's allocations (numpy's and what zstandard returns among them) by their peak. Compiled kernels allocate
    outside of that; there, and in C, the process runs out of address space.
    """
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + SPACE, hard))
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        yield
        assert tracemalloc.get_traced_memory()[1] - before <= PEAK
    finally:
        tracemalloc.stop()
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def read_mutants(seed: int, count: int, form: Literal["unsealed", "sealed", "block"]) -> Counter[tuple[str, Outcome]]:
    """Read ``count`` mutants, the same number of every original and every mutation; how each mutation ended."""
    print(f"seed {seed}")
    for original in ORIGINALS:  # everything is loaded and compiled before memory is bounded
        outcome(original, original.payload)
    rng = np.random.default_rng(seed)
    seen: Counter[tuple[str, Outcome]] = Counter()
    with bounded_memory():
        for number, (original, name) in enumerate(islice(cycle(product(ORIGINALS, MUTATIONS)), count)):
            content = mutant(rng, name, original, block=form == "block")
            data = sealed(content) if form == "sealed" else content + original.payload[-SEAL_BYTES:]
            try:
                seen[name, outcome(original, data, form == "block")] += 1
            except Exception as error:
                error.add_note(f"mutant {number} of seed {seed}: {name}, {form}, of {original.name!r}: {data.hex()}")
                raise
    return seen


def forms(short: int, full: int) -> pytest.MarkDecorator:
    """Seeds and counts of the short form, and of the slow one."""
    return pytest.mark.parametrize(
        ("seed", "count"),
        [(0, short), *(pytest.param(seed, full, marks=pytest.mark.slow) for seed in range(1, 6))],
    )


def total(seen: Counter[tuple[str, Outcome]], end: Outcome) -> int:
    return sum(count for (_, found), count in seen.items() if found == end)


def test_the_originals_arrive() -> None:
    for original in ORIGINALS:
        assert outcome(original, original.payload) == "same bits"
        assert outcome(original, original.block, block=True) == "same bits"


def test_the_originals_hold_every_mode_width_and_column() -> None:
    items = [item for original in ORIGINALS for item in original.header.items]
    kinds = {(item.mode, item.positions, item.shift > 0, item.width) for item in items}
    positions = [("gaps", False), ("gaps", True), ("bitmap", False), ("dense", False)]
    assert kinds == {(m, *p, w) for m in ("add", "xor", "overwrite") for p in positions for w in (1, 2, 4, 8)}
    assert all(any(original.columns[c] for original in ORIGINALS) for c in range(len(ORIGINALS[0].columns)))
    assert {s.codec for o in ORIGINALS for s in o.header.streams} == {"raw", "zstd"}


@forms(1_000, 5_000)
def test_mutants_without_a_new_seal_are_refused(seed: int, count: int) -> None:
    seen = read_mutants(seed, count, "unsealed")
    assert total(seen, "refused") == count


@forms(1_000, 5_000)
def test_mutants_under_a_valid_seal_are_refused_or_caught(seed: int, count: int) -> None:
    """Structural checks stand on their own: no mutation raises anything else, or leaves other bits unnoticed."""
    seen = read_mutants(seed, count, "sealed")
    for name in ("truncated", "extended", "shortened", "lengthened", "bomb"):  # nothing is ignored, and nothing missing
        assert {end for mutation, end in seen if mutation == name} == {"refused"}
    assert total(seen, "refused") > 0.5 * count
    assert total(seen, "digest") > 0.1 * count


@forms(1_000, 5_000)
def test_mutated_blocks_are_refused_or_caught(seed: int, count: int) -> None:
    """A block has neither compression nor a seal of its own: every bound is the reader's."""
    seen = read_mutants(seed, count, "block")
    assert total(seen, "refused") > 0.5 * count
    assert total(seen, "digest") > 0.1 * count


def test_an_item_that_comes_twice_is_caught_unless_it_overwrites() -> None:
    rng = np.random.default_rng(0)
    for original in ORIGINALS[:-1]:
        data = sealed(mutant(rng, "duplicated_item", original))
        assert outcome(original, data) == ("same bits" if original.header.items[0].mode == "overwrite" else "digest")


def test_the_bound_on_memory_would_notice_an_unchecked_length() -> None:
    with pytest.raises(AssertionError), bounded_memory():
        bytes(PEAK + 4096)
    with pytest.raises(MemoryError), bounded_memory():
        np.empty(2 * SPACE, np.uint8)


def test_a_length_above_the_limits_is_refused_before_it_is_allocated() -> None:
    original = ORIGINALS[0]
    data = bytearray(original.payload[:-SEAL_BYTES])
    data[5:9] = (1 << 31).to_bytes(4, "little")
    with bounded_memory(), pytest.raises(MalformedPayload, match="header of 2147483648 bytes"):
        opened(sealed(bytes(data)), block=False)
