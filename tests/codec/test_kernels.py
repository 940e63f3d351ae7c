"""Compiled kernels give what their numpy references give, bit for bit, and are chosen in one place."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import dcr_stream
from dcr_stream.canonical import Words, word_dtype
from dcr_stream.codec import digest, warm_up
from dcr_stream.codec.bitmap import ascends, count_bitmap, decode_bitmap, encode_bitmap
from dcr_stream.codec.codes import choose_code_bits, count_codes, decode_codes, encode_codes
from dcr_stream.codec.gaps import decode_gaps, join_gaps, sum_high, sum_low
from dcr_stream.codec.kernels import VARIABLE, Implementation, Kernel, implementation, using
from dcr_stream.codec.positions import decode_positions, encode_positions
from dcr_stream.codec.scan import ROOM, Found, scan_bits, scan_gaps, subtract
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


def agree_into(kernel: Kernel[..., Any], room: int, *args: object) -> None:
    """Of kernels that write indices, and return first how many."""
    found = []
    for run in (kernel.compiled, kernel.reference):
        into = np.empty(room, np.int64)
        result = run(*args, into)
        found.append((into[: result[0] if isinstance(result, tuple) else result], result))
    same(*found)


def random_words(rng: np.random.Generator, size: int, width: int) -> Words:
    return rng.integers(0, 256, size * width, np.uint8).view(word_dtype(width))


def by_gaps(run: Callable[..., tuple[int, int, int, int]], live: Words, known: Words, room: int) -> tuple[Any, int]:
    """What a scan for gaps finds, given ``room`` elements at a time, and how often it had to be called."""
    found: list[tuple[Words, ...]] = []
    done, previous = 0, 998
    while done < live.size:
        high = np.empty(room + (live.size + 1001) // 255 + 1, np.uint8)
        differences, old = np.empty(room, live.dtype), np.empty(room, live.dtype)
        filled, escapes, previous, done = run(live, known, done, 1000, high, differences, old, 0, 0, previous)
        found.append((high[: filled + escapes], differences[:filled], old[:filled]))
    parts = [np.concatenate(part) for part in zip(*found, strict=True)] or [np.empty(0)]
    return (*parts, previous), len(found)


def by_bits(run: Callable[..., int], live: Words, known: Words) -> tuple[Words, ...]:
    """What a scan for bits finds, behind three elements that are there already."""
    bitmap = np.full((live.size + 7) // 8, 255, np.uint8)
    differences, old = np.empty(live.size + 3, live.dtype), np.empty(live.size + 3, live.dtype)
    filled = run(live, known, bitmap, differences, old, 3)
    return bitmap, differences[3:filled], old[3:filled]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rate", [0.0, 0.001, 0.03, 0.5, 1.0])
def test_scans_find_the_same_at_every_length_and_offset(width: int, rate: float) -> None:
    rng = np.random.default_rng(0)
    known = random_words(rng, 1000, width)
    live = np.where(rng.random(1000) < rate, random_words(rng, 1000, width), known)
    for size in (*range(1, 70), 127, 128, 129, 193, 321, 700):
        for start in (0, 1, 3, 63):
            a, b = live[start : start + size], known[start : start + size]
            where = np.flatnonzero(a != b)
            for room in (ROOM, 10_000):
                found, expected = by_gaps(scan_gaps.compiled, a, b, room), by_gaps(scan_gaps.reference, a, b, room)
                same(found[0], expected[0])
                assert room == ROOM or found[1] == expected[1] == 1
            gaps = np.diff(where + 1000, prepend=998) - 1
            if where.size:
                same(expected[0], (*by_definition(gaps.tolist()), a[where] - b[where], b[where], int(where[-1]) + 1000))
            bits = by_bits(scan_bits.compiled, a, b)
            same(bits, by_bits(scan_bits.reference, a, b))
            same(bits, (np.packbits(a != b, bitorder="little"), a[where] - b[where], b[where]))
            into, other = np.empty_like(a), np.empty_like(a)
            same(subtract.compiled(a, b, into), subtract.reference(a, b, other))
            same(into, other)


def by_definition(gaps: list[int]) -> tuple[NDArray[np.uint8]]:
    return (np.array([byte for gap in gaps for byte in [255] * (gap // 255) + [gap % 255]], np.uint8),)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_difference_in_any_bit_of_any_lane_is_found(width: int) -> None:
    known = np.zeros(400, word_dtype(width))
    for bit in range(8 * width):
        for index in range(known.size):
            live = known.copy()
            live[index] = 1 << bit
            (_, differences, old, previous), _ = by_gaps(scan_gaps.compiled, live, known, 200)
            assert (differences.tolist(), old.tolist(), previous) == ([1 << bit], [0], 1000 + index)
            bitmap, differences, old = by_bits(scan_bits.compiled, live, known)
            assert (differences.tolist(), old.tolist()) == ([1 << bit], [0])
            assert np.flatnonzero(np.unpackbits(bitmap, bitorder="little")).tolist() == [index]


@pytest.mark.parametrize("width", WIDTHS)
def test_scans_take_strided_unaligned_and_read_only_words(width: int) -> None:
    rng = np.random.default_rng(1)
    raw = rng.integers(0, 256, 4001 * width + 1, np.uint8)
    unaligned = raw[1:].view(word_dtype(width))
    changed = np.where(rng.random(4001) < 0.1, unaligned + 1, unaligned)
    frozen = np.frombuffer(changed.tobytes(), changed.dtype)
    for live, known in ((frozen, unaligned), (frozen[::3], unaligned[::3]), (frozen[::-1], unaligned[::-1])):
        same(by_gaps(scan_gaps.compiled, live, known, 5000), by_gaps(scan_gaps.reference, live, known, 5000))
        same(by_bits(scan_bits.compiled, live, known), by_bits(scan_bits.reference, live, known))


def test_a_scan_without_room_is_refused_before_it_writes() -> None:
    words = np.zeros(100, np.uint16)
    small, high = np.zeros(10, np.uint16), np.zeros(200, np.uint8)
    with pytest.raises(IndexError, match="no room"):
        scan_gaps.compiled(words, words, 0, 0, high, small, words, 0, 0, -1)
    with pytest.raises(IndexError, match="no room"):
        scan_gaps.compiled(words, words, 0, 0, high[:5], small, small, 0, 0, -1)
    with pytest.raises(IndexError, match="no room"):
        scan_bits.compiled(words, words, high, small, small, 0)
    with pytest.raises(IndexError, match="equally long"):
        subtract.compiled(words, words, small)
    with pytest.raises(IndexError, match="equally long"):
        scan_bits.compiled(words, small, high, words, words, 0)


CHANGED = {
    "nothing": lambda i: i < 0,
    "little": lambda i: i % 1000 == 7,
    "some": lambda i: i % 20 == 0,
    "much": lambda i: i % 3 == 0,
    "all": lambda i: i >= 0,
    "all but the last": lambda i: i < 300_000 - 1,
    "all but one in the third block": lambda i: i != 150_000,
    "the second half": lambda i: i >= 150_000,
    "the end": lambda i: i >= 295_000,
    "the begin": lambda i: i < 5_000,
    "all of the begin and little else": lambda i: (i < 5_000) | (i % 999 == 0),
    "half of the begin and little else": lambda i: (i < 5_000) & (i % 2 == 0) | (i % 999 == 0),
}


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("implementation", ["numba", "numpy"])
def test_what_is_found_does_not_depend_on_how_it_was_guessed(name: str, implementation: Implementation) -> None:
    """The density so far says little when changes lie together."""
    old = np.arange(300_000).astype(np.uint16)
    where = np.flatnonzero(CHANGED[name](np.arange(old.size)))
    new = old.copy()
    new[where] += 3
    with using(implementation):
        found = Found(old)
        for lo in range(0, old.size, 70_016):
            found.add(new[lo : lo + 70_016])
        positions, differences, before = found.take()
    same(decode_positions(positions), where)
    same(differences, np.full(where.size, 3, np.uint16))
    same(before, old[where])
    expected = encode_positions(where, old.size)
    assert (positions.mode, positions.shift, positions.count) == (expected.mode, expected.shift, expected.count)
    for one, other in zip(
        (positions.high, positions.low, positions.bitmap), (expected.high, expected.low, expected.bitmap), strict=True
    ):
        same(one, other)


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
    agree_into(decode_gaps, high.size + 1, high, low, shift, 0, -1)
    for at in range(0, min(high.size, 700), 7):
        done, reached = int(np.count_nonzero(high[:at] != 255)), 5
        agree_into(decode_gaps, 8, high[at : at + 7], low, shift, done, reached)
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
        agree_into(decode_bitmap, 8 * column.size + 4, column, 77)


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
    agree(digest.lane, key, flat[::step], old)
    agree(digest.lanes, key, flat[::step], old)
    agree(digest.before_after, key, flat[::step], old, differences)


def test_sums_over_arrays_of_different_lengths_are_refused() -> None:
    """Compiled code checks no index."""
    flat, short = np.arange(10), np.zeros(9, np.uint16)
    for run in (digest.lane.compiled, digest.lanes.compiled):
        with pytest.raises(IndexError, match="equally long"):
            run(0, flat, short)
    with pytest.raises(IndexError, match="equally long"):
        digest.before_after.compiled(0, flat, np.zeros(10, np.uint16), short)


def test_gaps_whose_low_parts_are_missing_are_read_as_zeros() -> None:
    """Positions that nobody has checked lead to wrong indices, not to memory beyond the columns."""
    into = np.empty(1001, np.int64)
    count, _ = decode_gaps.compiled(np.zeros(1000, np.uint8), np.empty(0, np.uint8), 20, 0, -1, into)
    assert into[:count].tolist() == list(range(1000))


def test_state_changes_are_state_sums_before_and_after() -> None:
    rng = np.random.default_rng(3)
    flat: NDArray[np.int64] = np.arange(1000)
    old, differences = random_words(rng, 1000, 2), random_words(rng, 1000, 2)
    before, after = digest.state_sums(7, flat, old), digest.state_sums(7, flat, old + differences)
    assert digest.state_change(7, flat, old, differences) == (before, after)


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


def test_kept_code_is_compiled_again_when_a_file_that_it_inlines_changes(tmp_path: Path) -> None:
    """numba looks at a kernel's own file only: after an update it would run half of the old version."""
    package = tmp_path / "dcr_stream"
    shutil.copytree(Path(dcr_stream.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    script = tmp_path / "count.py"
    script.write_text(
        "import numpy\nfrom dcr_stream.codec.bitmap import count_bitmap\nprint(count_bitmap(numpy.full(8, 3, 'u1')))\n"
    )
    env = {**os.environ, VARIABLE: "numba", "PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "kept")}

    def run() -> str:
        command = [sys.executable, str(script)]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout

    assert run().strip() == run().strip() == "16"
    assert list((tmp_path / "kept").rglob("*.nbc"))
    lanes = package / "codec" / "kernels" / "lanes.py"
    text = lanes.read_text()
    assert text.count("return builder.ctpop(args[0])") == 1
    one_more = "return builder.add(builder.ctpop(args[0]), ir.Constant(ir.IntType(64), 1))"
    lanes.write_text(text.replace("return builder.ctpop(args[0])", one_more))
    assert run().strip() == "17"


def test_kernels_compile_where_no_folder_can_be_written() -> None:
    """Read-only site-packages, and no cache folder of the user's either."""
    code = (
        "from dcr_stream.codec.scan import subtract\n"
        "import numpy as np\n"
        "print(subtract(np.ones(3, np.uint8), np.zeros(3, np.uint8), np.empty(3, np.uint8)))\n"
    )
    # No locator of numba's applies: as in a container whose whole file system is read-only.
    env = {**os.environ, VARIABLE: "numba", "NUMBA_CACHE_LOCATOR_CLASSES": "ZipCacheLocator"}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert ran.stdout.strip() == "True", ran.stderr
