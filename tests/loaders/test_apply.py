"""State sums read back from storage show what applying did, and what it did not do."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

from dcr_stream.canonical import Region, TensorDirectory, Words
from dcr_stream.codec import Decoded, add_sums, state_sums, words
from dcr_stream.codec.boxes import combine
from dcr_stream.codec.kernels import using
from dcr_stream.codec.positions import decode_positions, encode_positions
from dcr_stream.delta import EntryMode, Item
from dcr_stream.loaders import TorchLoader, apply_item, full_sums, read_back
from dcr_stream.messages import Sum
from dcr_stream.trace import EnginePlacement, StorageMap, assign_cells, trace
from tests.native_loader import (
    Checkpoint,
    NativeConfig,
    NativeModel,
    directory_of,
    items_between,
    make_checkpoint,
    random_delta,
    torch_loader,
)

MASK = (1 << 64) - 1
CONFIG = NativeConfig(layers=1, kv_heads=2, tied=True, export_tied=True)
MODES: list[EntryMode] = ["add", "xor", "overwrite"]


class Ranks:
    """A traced engine of four ranks with replicated KV heads and tied names, loaded with a checkpoint."""

    def __init__(self, world: int = 4) -> None:
        self.old = make_checkpoint(0, CONFIG)
        self.directory: TensorDirectory = directory_of(self.old)
        self.models = [NativeModel(CONFIG, rank, world) for rank in range(world)]
        self.loaders: list[TorchLoader] = [torch_loader(model) for model in self.models]
        plans = [trace(loader, self.directory) for loader in self.loaders]
        self.placement: EnginePlacement = assign_cells(plans, self.directory, frozenset())
        self.storage = [StorageMap(loader) for loader in self.loaders]
        for loader in self.loaders:
            loader.load(self.old.items())

    def items(self, new: Checkpoint, mode: EntryMode) -> list[tuple[Item, Decoded]]:
        pairs = list(items_between(self.directory, self.old, new, mode))
        skip = self.placement.whole | (self.placement.aliased if mode != "overwrite" else frozenset())
        return [(item, decoded) for item, decoded in pairs if item.tensor not in skip]

    def apply(self, item: Item, decoded: Decoded) -> None:
        for plan, storage in zip(self.placement.plans, self.storage, strict=True):
            apply_item(plan, storage, item, decoded)

    def sums(self, item: Item, decoded: Decoded) -> dict[int, list[int]]:
        """All copies of every cell."""
        found: dict[int, list[int]] = {}
        for plan, storage in zip(self.placement.plans, self.storage, strict=True):
            for cell, copies in read_back(plan, storage, item, decoded.positions).items():
                found.setdefault(cell, []).extend(copies)
        assert {c: len(v) for c, v in found.items()} == {
            c: len(self.placement.holders(item.tensor, c)) for c in range(self.placement.cells[item.tensor])
        }
        return found

    def holds(self, item: Item, decoded: Decoded) -> bool:
        """What the coordinator checks: copies agree, and one of every cell adds up to the owner's sum."""
        found = self.sums(item, decoded)
        return all(len(set(v)) == 1 for v in found.values()) and sum(v[0] for v in found.values()) & MASK == item.digest


@pytest.fixture(scope="module")
def traced() -> Ranks:
    return Ranks()


@pytest.fixture
def ranks(traced: Ranks) -> Ranks:
    for loader in traced.loaders:
        loader.load(traced.old.items())
    return traced


@pytest.mark.parametrize("mode", MODES)
def test_sums_of_every_item_add_up_to_the_owners(ranks: Ranks, mode: EntryMode) -> None:
    """B7: every item is read back from every place, however small its tensor."""
    items = ranks.items(random_delta(ranks.old, 1, special=True), mode)
    assert len(items) >= len(ranks.directory) - len(ranks.placement.whole) - 2
    for item, decoded in items:
        # Of two tied names the first one's write is the second one's as well.
        assert ranks.holds(item, decoded) == (ranks.directory[item.tensor].name == "lm_head.weight")
        ranks.apply(item, decoded)
        assert ranks.holds(item, decoded)


@pytest.mark.parametrize("mode", ["add", "xor"])
def test_a_wrong_base_changes_the_sum(ranks: Ranks, mode: EntryMode) -> None:
    item, decoded = ranks.items(random_delta(ranks.old, 1), mode)[0]
    flat = item.region.flat(decode_positions(decoded.positions))
    box = next(b for b in ranks.placement.plans[0].by_tensor[item.tensor] if flat[0] in set(b.region.all_flat()))
    at = box.place.flat(np.flatnonzero(box.region.all_flat() == flat[0]))
    ranks.storage[0].words(box.storage, item.width)[at] ^= 4
    ranks.apply(item, decoded)
    assert not ranks.holds(item, decoded)


def test_a_lost_write_changes_the_sum(ranks: Ranks) -> None:
    item, decoded = ranks.items(random_delta(ranks.old, 1), "overwrite")[0]
    ranks.apply(item, some(decoded, slice(1, None)))
    assert not ranks.holds(item, decoded)


@pytest.mark.parametrize("mode", ["add", "xor"])
def test_a_doubled_write_changes_the_sum(ranks: Ranks, mode: EntryMode) -> None:
    """B1: a relative entry applied twice never passes for one applied once."""
    item, decoded = ranks.items(random_delta(ranks.old, 1), mode)[0]
    ranks.apply(item, decoded)
    ranks.apply(item, decoded)
    assert not ranks.holds(item, decoded)


def test_a_rank_that_did_not_apply_is_seen_though_its_copy_is_not_the_first(ranks: Ranks) -> None:
    key = ranks.directory.index("layers.0.self_attn.k_proj.weight")
    item, decoded = next(p for p in ranks.items(random_delta(ranks.old, 1, rate=0.5), "add") if p[0].tensor == key)
    for rank in (0, 2, 3):
        apply_item(ranks.placement.plans[rank], ranks.storage[rank], item, decoded)
    copies = [v for v in ranks.sums(item, decoded).values() if len(set(v)) > 1]
    assert len(copies) == 1
    assert not ranks.holds(item, decoded)


def test_a_write_into_a_copy_is_caught_by_read_back() -> None:
    """B16: a model that came to use another tensor than the one written has other sums, and another layout."""
    ranks = Ranks(world=1)
    item, decoded = ranks.items(random_delta(ranks.old, 1), "overwrite")[0]
    name = "embed_tokens"
    with torch.no_grad():
        setattr(ranks.models[0], name, nn.Parameter(getattr(ranks.models[0], name).clone(), requires_grad=False))
    ranks.apply(item, decoded)  # writes into the storage that the plan knows, which the model no longer uses
    ranks.storage = [StorageMap(ranks.loaders[0])]
    assert ranks.directory[item.tensor].name == "embed_tokens.weight"
    assert not ranks.holds(item, decoded)


def full(ranks: Ranks, tensor: int) -> dict[int, list[Sum]]:
    found: dict[int, list[Sum]] = {}
    for plan, storage in zip(ranks.placement.plans, ranks.storage, strict=True):
        for cell, copies in full_sums(plan, storage, [tensor]).get(tensor, {}).items():
            found.setdefault(cell, []).extend(copies)
    return found


def test_full_sums_of_all_ranks_add_up_to_the_tensors(ranks: Ranks) -> None:
    for tensor, spec in enumerate(ranks.directory):
        found = full(ranks, tensor)
        if tensor in ranks.placement.whole:
            continue
        assert {c: len(v) for c, v in found.items()} == {
            c: len(ranks.placement.holders(tensor, c)) for c in range(ranks.placement.cells[tensor])
        }
        total: Sum = (0, 0)
        for copies in found.values():
            assert len(set(copies)) == 1
            total = add_sums(total, copies[0])
        assert total == state_sums(tensor, np.arange(spec.numel), words(ranks.old[spec.name]))


def test_full_sums_see_a_write_outside_the_changed_set(ranks: Ranks) -> None:
    tensor = ranks.directory.index("layers.0.experts.gate_up_proj")
    before = full(ranks, tensor)
    with torch.no_grad():
        words(ranks.models[2].get_parameter("layers.0.w13"))[5] ^= 1
    assert full(ranks, tensor) != before


def test_full_sums_are_the_same_block_by_block(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = full_sums(ranks.placement.plans[1], ranks.storage[1], range(len(ranks.directory)))
    monkeypatch.setattr("dcr_stream.loaders.apply._BLOCK", 7)
    assert full_sums(ranks.placement.plans[1], ranks.storage[1], range(len(ranks.directory))) == whole


def test_every_copy_of_a_broadcast_is_written_once_and_read_back() -> None:
    class Spread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(3, 4, dtype=torch.bfloat16), requires_grad=False)

        def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
            for _, tensor in weights:
                self.w.copy_(tensor.expand(3, 4))

    old = {"w": torch.tensor([1.0, 2.0, 3.0, 4.0]).bfloat16()}
    new = {"w": torch.tensor([1.0, 2.5, 3.0, 4.5]).bfloat16()}
    directory, loader = directory_of(old), TorchLoader(Spread())
    placement = assign_cells([trace(loader, directory)], directory, frozenset())
    storage = StorageMap(loader)
    loader.load(old.items())
    [(item, decoded)] = items_between(directory, old, new, "add")
    apply_item(placement.plans[0], storage, item, decoded)
    assert torch.equal(loader.storage()["w"], new["w"].expand(3, 4))
    assert placement.holders(0, 0) == (0, 0, 0)
    assert read_back(placement.plans[0], storage, item, decoded.positions) == {0: [item.digest] * 3}


def test_two_copies_on_one_rank_have_a_sum_each() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.zeros(8, dtype=torch.bfloat16), requires_grad=False)
            self.b = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16), requires_grad=False)

        def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
            for _, tensor in weights:
                self.a.copy_(tensor)
                self.b.copy_(tensor[2:6])

    old = {"w": torch.arange(8).bfloat16()}
    new = {"w": torch.arange(8).bfloat16() * 2 + 1}
    directory, loader = directory_of(old), TorchLoader(Twice())
    placement = assign_cells([trace(loader, directory)], directory, frozenset())
    [plan], storage = placement.plans, StorageMap(loader)
    loader.load(old.items())
    [(item, decoded)] = items_between(directory, old, new, "xor")
    apply_item(plan, storage, item, decoded)
    sums = read_back(plan, storage, item, decoded.positions)
    assert sorted(map(len, sums.values())) == [1, 2]
    assert sum(copies[0] for copies in sums.values()) & MASK == item.digest
    [twice] = [cell for cell, copies in sums.items() if len(copies) == 2]
    assert sums[twice][0] == sums[twice][1]
    words(loader.storage()["b"])[1] ^= 1
    assert len(set(read_back(plan, storage, item, decoded.positions)[twice])) == 2
    assert len(set(full_sums(plan, storage, [0])[0][twice])) == 2


def test_elements_of_other_ranks_are_passed_over(ranks: Ranks) -> None:
    spec = ranks.directory[ranks.directory.index("layers.0.mlp.down_proj.weight")]
    new = {name: tensor.clone() for name, tensor in ranks.old.items()}
    words(new[spec.name])[0] += 1  # column 0 belongs to rank 0
    [(item, decoded)] = ranks.items(new, "add")
    before = words(ranks.models[3].get_parameter("layers.0.down_proj")).copy()
    apply_item(ranks.placement.plans[3], ranks.storage[3], item, decoded)
    assert (words(ranks.models[3].get_parameter("layers.0.down_proj")) == before).all()


def test_an_item_without_elements_changes_nothing_and_sums_to_zero(ranks: Ranks) -> None:
    item, decoded = ranks.items(random_delta(ranks.old, 1), "add")[0]
    item = replace_item(item, Region.run(3, 0))
    empty = some(decoded, slice(0))
    ranks.apply(item, empty)
    assert {s for copies in ranks.sums(item, empty).values() for s in copies} == {0}


def some(decoded: Decoded, which: slice) -> Decoded:
    """Only some of the elements."""
    positions = encode_positions(decode_positions(decoded.positions)[which], decoded.positions.elements)
    return Decoded(positions, decoded.values[which])


def replace_item(item: Item, region: Region) -> Item:
    return Item(item.tensor, region, 0, item.mode, item.positions, item.width, 0, 0, 0, ())


def test_corruption_between_write_and_read_back_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is summed is what storage holds afterwards, not what was meant to be written."""
    ranks = Ranks()
    item, decoded = ranks.items(random_delta(ranks.old, 3), "add")[0]
    plan, storage = ranks.placement.plans[0], ranks.storage[0]
    box = plan.by_tensor[item.tensor][0]
    before = read_back(plan, storage, item, decoded.positions)
    after = apply_item(plan, storage, item, decoded)
    assert after != before
    assert after == read_back(plan, storage, item, decoded.positions)
    assert apply_item(plan, storage, item, Decoded(decoded.positions, -decoded.values)) == before

    def corrupting(mode: EntryMode, old: Words, values: Words) -> Words:
        new = combine(mode, old, values)
        new[0] ^= 1
        return new

    with using("numpy"):
        monkeypatch.setattr("dcr_stream.codec.boxes.combine", corrupting)
        assert apply_item(plan, storage, item, decoded)[box.cell] != after[box.cell]
