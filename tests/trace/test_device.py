"""Models on a device are traced, changed and read back as models on the host are."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

from dcr_stream.canonical import Indices, Region, Words
from dcr_stream.codec import words
from dcr_stream.codec.device import DeviceWords
from dcr_stream.delta import EntryMode
from dcr_stream.loaders import TorchLoader, apply_item, full_sums, read_back
from dcr_stream.trace import PlacementPlan, StorageMap, assign_cells, trace
from tests.devices import DEVICES, take_for_a_device
from tests.native_loader import (
    NativeConfig,
    NativeModel,
    directory_of,
    equal_bits,
    items_between,
    make_checkpoint,
    random_delta,
    snapshot,
    torch_loader,
)

CONFIG = NativeConfig(layers=1)
RANKS = (1, 4)  # rank and world: key-value heads are replicated, vocabulary and experts are cut


def same_place(one: PlacementPlan, other: PlacementPlan) -> bool:
    names = ("boxes", "classes", "aliased", "constant_ranges", "mapped_bytes", "total_bytes", "findings")
    return all(getattr(one, name) == getattr(other, name) for name in names)


@pytest.mark.parametrize("device", DEVICES)
def test_a_model_on_a_device_is_placed_changed_and_summed_as_on_the_host(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = make_checkpoint(0, CONFIG)
    new = random_delta(old, 1, special=True)
    directory = directory_of(old)
    on_host = NativeModel(CONFIG, *RANKS)
    host_plan = trace(torch_loader(on_host), directory)
    host = StorageMap(torch_loader(on_host))

    take_for_a_device(monkeypatch, device)
    model = NativeModel(CONFIG, *RANKS).to(device)
    loader = torch_loader(model)
    plan = trace(loader, directory)
    assert same_place(plan, host_plan)
    [plan] = assign_cells([plan], directory, frozenset()).plans
    [host_plan] = assign_cells([host_plan], directory, frozenset()).plans
    storage = StorageMap(loader)
    assert all(isinstance(storage.memory(i, 1), DeviceWords) for i in range(len(storage)))
    modes: tuple[EntryMode, ...] = ("add", "xor", "overwrite")
    for mode in modes:
        loader.load(old.items())
        torch_loader(on_host).load(old.items())
        for item, decoded in items_between(directory, old, new, mode):
            if plan.classes[item.tensor] == "mapped" and (mode == "overwrite" or item.tensor not in plan.aliased):
                sums = apply_item(plan, storage, item, decoded)
                assert sums == apply_item(host_plan, host, item, decoded)
                assert sums == read_back(plan, storage, item, decoded.positions)
        every = range(len(directory))
        assert full_sums(plan, storage, every) == full_sums(host_plan, host, every)
        assert equal_bits({name: t.cpu() for name, t in snapshot(model).items()}, snapshot(on_host))


@pytest.mark.parametrize("device", DEVICES)
def test_proving_many_boxes_does_not_copy_the_storage_for_each(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts are fused: their storage has as many boxes as there are experts, each of which is read alone."""

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(64, 8, 6, dtype=torch.bfloat16), requires_grad=False)

        def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
            for name, tensor in weights:
                self.w[int(name)].copy_(tensor.t())

    take_for_a_device(monkeypatch, device)
    crossed = 0
    host, strided, at = DeviceWords.host, DeviceWords.strided, DeviceWords.at

    def counted(found: Words) -> Words:
        nonlocal crossed
        crossed += found.size
        return found

    def counted_region(self: DeviceWords, region: Region) -> Words:
        return counted(strided(self, region))

    def counted_places(self: DeviceWords, indices: Indices) -> Words:
        return counted(at(self, indices))

    monkeypatch.setattr(DeviceWords, "host", lambda self: counted(host(self)))
    monkeypatch.setattr(DeviceWords, "strided", counted_region)
    monkeypatch.setattr(DeviceWords, "at", counted_places)
    model = Fused().to(device)
    checkpoint = {str(i): torch.zeros(6, 8, dtype=torch.bfloat16) for i in range(64)}
    plan = trace(TorchLoader(model), directory_of(checkpoint))
    assert len(plan.boxes) == 64
    assert crossed < 16 * model.w.numel()


@pytest.mark.parametrize("device", DEVICES)
def test_transposed_and_broadcast_regions_of_a_device_are_read_there(device: str) -> None:
    tensor = torch.arange(60, dtype=torch.int16)
    on_device = DeviceWords(tensor.to(device))[4:]
    region = Region(2, (3, 2, 5), (1, 0, 10))
    want = words(tensor)[4:][region.all_flat()].reshape(region.sizes)
    np.testing.assert_array_equal(on_device.strided(region), want)
