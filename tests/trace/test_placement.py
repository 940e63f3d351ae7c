"""Refits through a traced plan equal dense loads of fresh models, bit for bit, over every reachable tensor."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dcr_stream.canonical import Region, TensorDirectory
from dcr_stream.codec import words
from dcr_stream.delta import EntryMode
from dcr_stream.errors import UntracedPath
from dcr_stream.loaders import TorchLoader, apply_item
from dcr_stream.trace import EnginePlacement, PlacementPlan, StorageMap, assign_cells, trace
from tests.native_loader import (
    Checkpoint,
    NativeConfig,
    NativeModel,
    directory_of,
    equal_bits,
    items_between,
    load_dense,
    make_checkpoint,
    random_delta,
    snapshot,
    torch_loader,
)

MODES: list[EntryMode] = ["add", "xor", "overwrite"]


class Engine:
    """All ranks of a traced engine, in one process."""

    def __init__(self, config: NativeConfig, world: int, checkpoint: Checkpoint) -> None:
        self.config, self.world = config, world
        self.directory: TensorDirectory = directory_of(checkpoint)
        self.models = [NativeModel(config, rank, world) for rank in range(world)]
        self.loaders: list[TorchLoader] = [torch_loader(model) for model in self.models]
        self.placement: EnginePlacement = assign_cells(
            [trace(loader, self.directory) for loader in self.loaders], self.directory, frozenset()
        )
        self.placement.raise_for_findings()
        self.storage = [StorageMap(loader) for loader in self.loaders]
        self.load(checkpoint)

    def load(self, checkpoint: Checkpoint) -> None:
        for loader in self.loaders:
            loader.load(checkpoint.items())

    def refit(
        self, old: Checkpoint, new: Checkpoint, mode: EntryMode, regions: dict[str, list[Region]] | None = None
    ) -> None:
        for rank, loader in enumerate(self.loaders):
            plan = self.placement.plans[rank]
            for item, decoded in items_between(self.directory, old, new, mode, regions):
                if plan.classes[item.tensor] == "whole":
                    name = self.directory[item.tensor].name
                    loader.load([(name, new[name])])
                else:
                    apply_item(plan, self.storage[rank], item, decoded)
            self.storage[rank].check(plan.identity)

    def assert_equals_dense_load(self, checkpoint: Checkpoint) -> None:
        for rank, model in enumerate(self.models):
            fresh = load_dense(checkpoint, self.config, rank, self.world)
            assert equal_bits(snapshot(fresh), snapshot(model)), f"rank {rank} of {self.world}"


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("tied", [True, False])
def test_every_mode_equals_a_dense_load_on_every_rank(world: int, tied: bool) -> None:
    config = NativeConfig(layers=1, tied=tied)
    versions = [make_checkpoint(world, config)]
    engine = Engine(config, world, versions[0])
    for step, mode in enumerate(MODES * 2):
        versions.append(random_delta(versions[-1], step, special=step >= 3))
        engine.refit(versions[-2], versions[-1], mode)
        engine.assert_equals_dense_load(versions[-1])


@pytest.mark.parametrize("mode", MODES)
def test_every_element_of_every_tensor_may_change(mode: EntryMode) -> None:
    config = NativeConfig(layers=1)
    old = make_checkpoint(1, config)
    new = random_delta(old, 2, rate=1.0, special=True)
    engine = Engine(config, 2, old)
    engine.refit(old, new, mode)
    engine.assert_equals_dense_load(new)


def test_single_elements_at_slice_borders_land_on_the_right_rank() -> None:
    config = NativeConfig(layers=1)
    old = make_checkpoint(1, config)
    engine = Engine(config, 4, old)
    new = {name: tensor.clone() for name, tensor in old.items()}
    for tensor in new.values():
        flat = words(tensor)
        width = tensor.shape[-1] if tensor.dim() > 1 else 1
        if tensor.dtype != torch.bool:
            for at in (0, width - 1, width // 4, width // 4 - 1, flat.size // 4, flat.size // 4 - 1, flat.size - 1):
                flat[at] += 1
    engine.refit(old, new, "add")
    engine.assert_equals_dense_load(new)


@pytest.mark.parametrize("mode", MODES)
def test_items_may_cover_any_region(mode: EntryMode) -> None:
    config = NativeConfig(layers=1)
    old = make_checkpoint(1, config)
    new = random_delta(old, 5, rate=0.3)
    regions: dict[str, list[Region]] = {}
    for name, tensor in old.items():
        if tensor.dim() == 2:
            rows, columns = tensor.shape
            half = columns // 2
            regions[name] = [
                Region(0, (rows, half), (columns, 1)),
                Region(half, (columns - half, rows), (1, columns)),  # column by column: flat indices do not ascend
            ]
    engine = Engine(config, 2, old)
    engine.refit(old, new, mode, regions)
    engine.assert_equals_dense_load(new)


def test_nan_payloads_and_signed_zeros_are_written_as_they_are() -> None:
    config = NativeConfig(layers=1)
    old = make_checkpoint(1, config)
    new = {name: tensor.clone() for name, tensor in old.items()}
    patterns = np.array([0x7FC0, 0xFFC1, 0x7F81, 0x7F80, 0xFF80, 0x8000, 0x0000, 0x0001, 0x8001], np.uint16)
    words(new["layers.0.mlp.gate_proj.weight"])[: patterns.size] = patterns
    engine = Engine(config, 2, old)
    engine.refit(old, new, "overwrite")
    engine.assert_equals_dense_load(new)


def test_padding_rows_stay_as_the_loader_filled_them() -> None:
    """B23: rows beyond the vocabulary are no canonical element, and no refit touches them."""
    config = NativeConfig(layers=1, vocab=37, pad_vocab_to=8)
    old = make_checkpoint(1, config)
    engine = Engine(config, 4, old)
    last = engine.models[2].embed_tokens
    real = config.vocab - 2 * engine.models[2].vocab_rows
    assert 0 < real < last.shape[0]
    assert [plan.constant_ranges for plan in engine.placement.plans] == [0, 0, 1, 1]
    new = random_delta(old, 3, rate=1.0)
    engine.refit(old, new, "xor")
    assert words(last[real:]).any() == np.False_
    engine.assert_equals_dense_load(new)


def test_classes_are_told_per_rank() -> None:
    config = NativeConfig(layers=1)
    checkpoint = make_checkpoint(0, config)
    engine = Engine(config, 2, checkpoint)
    directory = engine.directory
    for plan in engine.placement.plans:
        whole = {directory[t].name for t in plan.tensors("whole")}
        assert whole == {"layers.0.mixer.A_log", "token_mask"}
        assert len(plan.tensors("mapped")) == len(directory) - 2
        assert 0.9 < plan.coverage < 1.0


def test_a_whole_tensor_has_no_path_for_items() -> None:
    config = NativeConfig(layers=1)
    old = make_checkpoint(0, config)
    engine = Engine(config, 1, old)
    name = "layers.0.mixer.A_log"
    new = {**old, name: old[name] + 1}
    [(item, decoded)] = items_between(engine.directory, old, new, "overwrite")
    with pytest.raises(UntracedPath, match="whole"):
        apply_item(engine.placement.plans[0], engine.storage[0], item, decoded)


def test_a_plan_survives_the_wire() -> None:
    checkpoint = make_checkpoint(0, NativeConfig(layers=1))
    plan = trace(torch_loader(NativeModel(NativeConfig(layers=1))), directory_of(checkpoint))
    copy = PlacementPlan.decode(plan.encode())
    assert copy == plan
    assert copy.digest == plan.digest
    assert copy.by_tensor == plan.by_tensor


def test_tracing_twice_finds_the_same_placement() -> None:
    checkpoint = make_checkpoint(0, NativeConfig(layers=1))
    loader = torch_loader(NativeModel(NativeConfig(layers=1)))
    first = trace(loader, directory_of(checkpoint))
    loader.load(checkpoint.items())
    second = trace(loader, directory_of(checkpoint), seed=1)
    assert first.boxes == second.boxes
    assert first.classes == second.classes


def test_seventeen_bit_ids_need_two_passes_and_are_told_apart() -> None:
    """More elements than one pass can number: the second pass must place them."""

    class Big(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(300, 500, dtype=torch.bfloat16), requires_grad=False)

        def load_weights(self, weights: object) -> None:
            for _, tensor in weights:  # type: ignore[attr-defined]
                self.w.copy_(tensor.t())

    directory = directory_of({"w": torch.zeros(500, 300, dtype=torch.bfloat16)})
    plan = trace(TorchLoader(Big()), directory)
    assert [(b.region, b.place) for b in plan.boxes] == [
        (Region(0, (300, 500), (1, 300)), Region(0, (300, 500), (500, 1)))
    ]
