"""Compiled kernels give what their numpy references give, bit for bit, and are chosen in one place."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dcr_stream.canonical import Indices, Words, word_dtype
from dcr_stream.codec import digest, warm_up
from dcr_stream.codec.bitmap import ascends, count_bitmap, decode_bitmap, encode_bitmap
from dcr_stream.codec.codes import choose_code_bits, count_codes, decode_codes, encode_codes
from dcr_stream.codec.gaps import decode_gaps, join_gaps, sum_high, sum_low
from dcr_stream.codec.kernels import VARIABLE, Implementation, Kernel, implementation, using
from dcr_stream.codec.scan import ROOM, Found, scan
from dcr_stream.errors import UsageError

WIDTHS = (1, 2, 4, 8)
pytest.importorskip("numba", exc_type=ImportError)


@pytest.fixture(autouse=True, scope="module")
def kernels() -> Iterator[Implementation]:
    """Both implementations are named where they are used."""
    with using("numba"):
        yield "numba"


def same(one: object, other: object) -> None:
    """Equal in type, dtype and every bit."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            same(a, b)
    elif isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    else:
        assert type(one) is type(other)
        assert one == other


def agree(kernel: Kernel[..., Any], *args: object) -> None:
    same(kernel.compiled(*args), kernel.reference(*args))


def random_words(rng: np.random.Generator, size: int, width: int) -> Words:
    return rng.integers(0, 256, size * width, np.uint8).view(word_dtype(width))


def scanned(
    run: Callable[..., tuple[int, int]], live: Words, known: Words, room: int
) -> tuple[tuple[Indices, Words, Words], int]:
    """What a scan finds, given ``room`` elements at a time, and how often it had to be called."""
    found: tuple[list[Words], ...] = ([np.empty(0, np.int64)], [np.empty(0, live.dtype)], [np.empty(0, live.dtype)])
    calls, done = 0, 0
    while done < live.size:
        into = np.empty(room, np.int64), np.empty(room, live.dtype), np.empty(room, live.dtype)
        filled, done = run(live, known, done, 1000, *into, 0)
        for parts, part in zip(found, into, strict=True):
            parts.append(part[:filled])
        calls += 1
    positions, differences, old = (np.concatenate(parts) for parts in found)
    return (positions, differences, old), calls


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rate", [0.0, 0.001, 0.03, 0.5, 1.0])
def test_scans_find_the_same_at_every_length_and_offset(width: int, rate: float) -> None:
    rng = np.random.default_rng(0)
    known = random_words(rng, 1000, width)
    live = np.where(rng.random(1000) < rate, random_words(rng, 1000, width), known)
    for size in (*range(70), 127, 128, 129, 193, 700):
        for start in (0, 1, 3, 63):
            a, b = live[start : start + size], known[start : start + size]
            for room in (ROOM, 10_000):
                found, expected = scanned(scan.compiled, a, b, room), scanned(scan.reference, a, b, room)
                same(found[0], expected[0])
                assert room == ROOM or found[1] == expected[1] <= 1
            same(expected[0], (np.flatnonzero(a != b) + 1000, (a - b)[a != b], b[a != b]))


@pytest.mark.parametrize("width", WIDTHS)
def test_a_difference_in_any_bit_of_any_lane_is_found(width: int) -> None:
    known = np.zeros(193, word_dtype(width))
    for bit in range(8 * width):
        for index in range(known.size):
            live = known.copy()
            live[index] = 1 << bit
            expected = (np.array([1000 + index]), live[index : index + 1], known[:1])
            same(scanned(scan.compiled, live, known, 200)[0], expected)


@pytest.mark.parametrize("width", WIDTHS)
def test_scans_take_strided_unaligned_and_read_only_words(width: int) -> None:
    rng = np.random.default_rng(1)
    raw = rng.integers(0, 256, 4001 * width + 1, np.uint8)
    unaligned = raw[1:].view(word_dtype(width))
    changed = np.where(rng.random(4001) < 0.1, unaligned + 1, unaligned)
    frozen = np.frombuffer(changed.tobytes(), changed.dtype)
    for live, known in ((frozen, unaligned), (frozen[::3], unaligned[::3]), (frozen[::-1], unaligned[::-1])):
        same(scanned(scan.compiled, live, known, 5000), scanned(scan.reference, live, known, 5000))


@pytest.mark.parametrize("first", [0, 150_000, 295_000])
def test_found_elements_outgrow_any_guess(first: int) -> None:
    """Density says little when all changes lie at one end."""
    old = np.zeros(300_000, np.uint16)
    new = old.copy()
    new[first:] += 1
    new[::7] += 2
    found = Found(old.dtype, 1000, 301_000)
    for lo in range(0, old.size, 70_000):
        found.add(new[lo : lo + 70_000], old[lo : lo + 70_000], 1000 + lo)
    positions, differences, before = found.take()
    np.testing.assert_array_equal(positions, np.flatnonzero(new) + 1000)
    np.testing.assert_array_equal(differences, new[positions - 1000])
    np.testing.assert_array_equal(before, old[positions - 1000])
    assert positions.base is None


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    gaps=st.lists(
        st.one_of(st.integers(0, 3), st.integers(0, 1000), st.integers(0, 2**30), st.sampled_from([254, 255, 256])),
        min_size=1,
        max_size=100,
    ),
    shift=st.integers(0, 32),
)
def test_gaps_agree_at_any_shift(gaps: list[int], shift: int) -> None:
    positions = np.cumsum(np.array(gaps) + 1) - 1
    agree(join_gaps, positions, shift)
    high, low = join_gaps.reference(positions, shift)
    agree(decode_gaps, high, low, shift)
    agree(sum_high, high)
    if shift:
        agree(sum_low, low, shift, len(gaps))


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.lists(st.integers(-5, 2**16), min_size=1, max_size=6), st.integers(0, 32))
def test_positions_out_of_order_are_refused_alike(positions: list[int], shift: int) -> None:
    array = np.array(positions)
    refused = positions[0] < 0 or bool((np.diff(array) <= 0).any())
    for run in (join_gaps.compiled, join_gaps.reference):
        if refused:
            with pytest.raises(ValueError, match="ascend"):
                run(array, shift)
        else:
            run(array, shift)


@pytest.mark.parametrize("elements", [0, 1, 7, 8, 9, 63, 64, 65, 127, 128, 1000, 70_001])
@pytest.mark.parametrize("rate", [0.0, 0.26, 0.7, 1.0])
def test_bitmaps_agree(elements: int, rate: float) -> None:
    positions = np.flatnonzero(np.random.default_rng(elements).random(elements) < rate)
    agree(encode_bitmap, positions, elements)
    bitmap = encode_bitmap.reference(positions, elements)
    for column in (bitmap, np.concatenate([bitmap[:1], bitmap])[1:]):
        agree(count_bitmap, column)
        agree(decode_bitmap, column, positions.size)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.lists(st.integers(-2, 20), max_size=5))
def test_ascending_positions_are_told_alike(positions: list[int]) -> None:
    agree(ascends, np.array(positions, np.int64))
    assert ascends(np.array(positions, np.int64)) == (positions == sorted({abs(p) for p in positions}))


@pytest.mark.parametrize("ones", [0.0, 0.59, 0.61, 1.0])
@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 4095, 4096, 4097, 20_001])
def test_codes_agree(ones: float, size: int) -> None:
    rng = np.random.default_rng(size)
    some = rng.integers(1, 1 << 16, size).astype(np.uint16)
    small = rng.choice(np.array([1, 2, 9, 0xFFFE, 0xFFFF, 0x8000, 0x7FFF], np.uint16), size)
    differences = np.where(rng.random(size) < ones, rng.choice(np.array([1, 0xFFFF], np.uint16), size), some)
    for d in (differences, small, differences[::2]):
        agree(encode_codes, d)
        width, codes, excess, escaped = encode_codes.reference(d)
        assert width == choose_code_bits(d)
        agree(count_codes, codes, excess, width, d.size)
        agree(decode_codes, codes, excess, escaped, width, d.size)


@pytest.mark.parametrize("width", [2, 4])
def test_every_pattern_of_codes_is_counted_alike(width: int) -> None:
    codes = np.arange(256, dtype=np.uint8)
    agree(count_codes, codes, codes, width, codes.size * 8 // width)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(
    key=st.integers(0, 2**64 - 1),
    width=st.sampled_from(WIDTHS),
    size=st.integers(0, 70),
    step=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_sums_agree(key: int, width: int, size: int, step: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    flat = rng.integers(0, 1 << 45, size)
    old, differences = random_words(rng, size, width)[::step], random_words(rng, size, width)[::step]
    for offset in (0, 1, 1 << 40):
        agree(digest.lane, key, flat[::step], old, offset)
        agree(digest.lanes, key, flat[::step], old, offset)
        agree(digest.change, key, flat[::step], old, differences, offset)
        assert digest.lane.compiled(key, flat[::step], old, offset) == digest.lane(key, flat[::step] + offset, old)


def test_state_change_is_the_difference_of_state_sums() -> None:
    rng = np.random.default_rng(3)
    flat: NDArray[np.int64] = np.arange(1000)
    old, differences = random_words(rng, 1000, 2), random_words(rng, 1000, 2)
    before, after = digest.state_sums(7, flat, old), digest.state_sums(7, flat, old + differences)
    assert digest.add_sums(before, digest.state_change(7, flat, old, differences)) == after


def test_the_implementation_in_use_runs(kernels: Implementation) -> None:
    assert implementation() == kernels
    with using("numpy"):
        assert implementation() == "numpy"
        assert warm_up().folder is None
    assert implementation() == kernels


@pytest.mark.parametrize("name", ["numpy", "numba", ""])
def test_the_environment_picks_the_implementation(name: str) -> None:
    code = "from dcr_stream.codec.kernels import implementation; print(implementation())"
    ran = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, VARIABLE: name}, capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == (name or "numba")


def test_an_unknown_implementation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "fortran")
    monkeypatch.setattr("dcr_stream.codec.kernels._chosen", None)
    with pytest.raises(UsageError, match="'fortran' is unknown; set numba or numpy"):
        implementation()


def test_without_numba_the_references_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setattr("dcr_stream.codec.kernels._chosen", None)
    assert implementation() == "numpy"
    monkeypatch.setattr("dcr_stream.codec.kernels._chosen", None)
    monkeypatch.setenv(VARIABLE, "numba")
    with pytest.raises(UsageError, match="numba cannot be imported"):
        implementation()


def test_kernels_compile_where_no_folder_can_be_written() -> None:
    """Read-only site-packages, and no cache folder of the user's either."""
    code = (
        "from dcr_stream.codec.scan import scan\n"
        "import numpy as np\n"
        "p, d, o = np.empty(64, np.int64), np.empty(64, np.uint8), np.empty(64, np.uint8)\n"
        "print(scan(np.ones(3, np.uint8), np.zeros(3, np.uint8), 0, 0, p, d, o, 0))\n"
    )
    # No locator of numba's applies: as in a container whose whole file system is read-only.
    env = {**os.environ, VARIABLE: "numba", "NUMBA_CACHE_LOCATOR_CLASSES": "ZipCacheLocator"}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert ran.stdout.strip() == "(3, 3)", ran.stderr
