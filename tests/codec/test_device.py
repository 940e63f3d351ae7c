"""Words on a device: the same bits, bytes and sums as on the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr_stream.canonical import Region, Words, word_dtype
from dcr_stream.codec import encode_record
from dcr_stream.codec.boxes import add_at, sum_box, write_box
from dcr_stream.codec.device import DeviceWords, gather, on_host
from dcr_stream.delta import EntryMode, Record
from dcr_stream.errors import CaptureError
from dcr_stream.stages.compare import changed_elements
from tests.codec.test_box_kernels import boxes
from tests.devices import DEVICES

WIDTHS = (1, 2, 4, 8)
MODES: tuple[EntryMode, ...] = ("add", "xor", "overwrite")


def moved(words: Words, device: str) -> DeviceWords:
    signed = words.copy().view(f"i{words.itemsize}" if words.itemsize > 1 else "u1")
    return DeviceWords(torch.from_numpy(signed).to(device))


def random_words(rng: np.random.Generator, size: int, width: int) -> Words:
    return rng.integers(0, 256, size * width, np.uint8).view(word_dtype(width))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rate", [0.0, 0.001, 0.03, 0.5, 1.0])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_change_found_on_a_device_is_the_same_bytes_on_the_wire(width: int, rate: float, device: str) -> None:
    """All bit patterns occur: NaNs, infinities and both zeros among them."""
    rng = np.random.default_rng(width)
    old = random_words(rng, 70_001, width)
    new = np.where(rng.random(old.size) < rate, random_words(rng, old.size, width), old)
    if rate == 1:
        new = old + old.dtype.type(1)
    found = moved(old, device).changes_to(moved(new, device))
    expected = changed_elements(lambda lo, hi: new[lo:hi], old, 0, old.size, "w")
    entries = [
        encode_record(Record("w", 0, Region.whole(old.size), *change, "w"), mode)
        for mode in MODES
        for change in (found, expected)
    ]
    for one, other in zip(entries[::2], entries[1::2], strict=True):
        assert one.item == other.item
        assert one.columns == other.columns
    np.testing.assert_array_equal(found[2], expected[2])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.bool, torch.int64])
def test_words_of_any_dtype_go_there_and_back(dtype: torch.dtype, device: str) -> None:
    tensor = torch.arange(24).reshape(2, 12).to(dtype).to(device)
    on_device = DeviceWords(tensor)
    assert (on_device.size, on_device.itemsize, on_device.nbytes) == (24, tensor.element_size(), tensor.nbytes)
    host = on_host(on_device[3:9])
    assert host.dtype == on_device.dtype == word_dtype(tensor.element_size())
    assert host.tobytes() == tensor.cpu().view(torch.uint8).numpy().tobytes()[3 * host.itemsize : 9 * host.itemsize]
    copy = on_device.copy()
    on_device.add_at(np.array([3]), np.array([1], host.dtype))
    assert on_host(copy[3:9]).tobytes() == host.tobytes() != on_host(on_device[3:9]).tobytes()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", WIDTHS)
def test_differences_are_added_modulo_the_width(width: int, device: str) -> None:
    rng = np.random.default_rng(width)
    words, at = random_words(rng, 1000, width), np.arange(0, 1000, 3)
    differences = random_words(rng, at.size, width)
    on_device = moved(words, device)
    on_device.add_at(at, differences)
    add_at(words, at, differences)
    np.testing.assert_array_equal(on_host(on_device), words)


@pytest.mark.parametrize("device", DEVICES)
def test_boxes_of_up_to_four_dimensions_are_written_and_summed_alike(device: str) -> None:
    """Transposed and broadcast places among them."""

    @settings(derandomize=True, deadline=None, max_examples=150)
    @given(boxes(), st.sampled_from(MODES), st.sampled_from(WIDTHS), st.integers(0, 2**32), st.floats(0, 1))
    def check(box: tuple[Region, Region], mode: EntryMode, width: int, seed: int, rate: float) -> None:
        region, place = box
        rng = np.random.default_rng(seed)
        flat = np.flatnonzero(rng.random(region.last + 10) < rate)
        values = random_words(rng, flat.size, width)
        storage = random_words(rng, place.last + 5, width)
        on_device = moved(storage, device)
        assert on_device.sum_box(region, place, 9, flat) == sum_box(storage, region, place, 9, flat)
        sums = on_device.write_box(region, place, mode, 9, flat, values)
        assert sums == write_box(storage, region, place, mode, 9, flat, values)
        np.testing.assert_array_equal(on_host(on_device), storage)

    check()


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_summed_is_loaded_from_the_device_again(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    region, flat, values = Region.whole(10), np.arange(10), np.arange(10).astype(np.uint16)
    honest = moved(np.zeros(10, np.uint16), device).write_box(region, region, "overwrite", 9, flat, values)
    put = DeviceWords._put

    def corrupting(self: DeviceWords, mode: EntryMode, at: torch.Tensor, values: torch.Tensor) -> None:
        put(self, mode, at, values)
        self._words[4] ^= 1

    monkeypatch.setattr(DeviceWords, "_put", corrupting)
    assert moved(np.zeros(10, np.uint16), device).write_box(region, region, "overwrite", 9, flat, values) != honest


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("at", [-1, 10])
def test_a_place_outside_is_refused_before_the_device_hears_of_it(at: int, device: str) -> None:
    words, one = moved(np.zeros(10, np.uint16), device), np.ones(1, np.uint16)
    with pytest.raises(IndexError, match="do not lie in 10 words"):
        words.add_at(np.array([at]), one)
    with pytest.raises(IndexError, match="do not lie in 10 words"):
        words.at(np.array([at]))
    region, place = Region.whole(1), Region(at, (1,), (1,))
    with pytest.raises(IndexError, match="do not lie in 10 words"):
        words.write_box(region, place, "add", 9, np.zeros(1, np.int64), one)
    assert not on_host(words).any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("other", [np.zeros(1, np.uint16), np.zeros(10, np.uint32)], ids=["fewer", "wider"])
def test_live_words_of_another_kind_are_not_compared(other: Words, device: str) -> None:
    """A single word would be compared with every element, and nothing would notice."""
    with pytest.raises(CaptureError, match="must not change within a run"):
        moved(np.zeros(10, np.uint16), device).changes_to(moved(other, device))


@pytest.mark.parametrize("device", DEVICES)
def test_many_places_are_gathered_in_blocks(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcr_stream.codec.device._BLOCK", 7)
    words, at = random_words(np.random.default_rng(0), 100, 4), np.arange(99, -1, -3)
    np.testing.assert_array_equal(gather(moved(words, device), at), words[at])
