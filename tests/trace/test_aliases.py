"""Names that share storage: all are placed, and the engine knows that they do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from dcr_stream.errors import PlacementError
from dcr_stream.loaders import TorchLoader, apply_item
from dcr_stream.trace import StorageMap, assign_cells, trace
from tests.native_loader import (
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


class Shared(nn.Module):
    """Every name is copied into a range of one parameter."""

    def __init__(self, ranges: dict[str, tuple[int, int]], size: int) -> None:
        super().__init__()
        self.ranges = ranges
        self.w = nn.Parameter(torch.zeros(size, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            lo, hi = self.ranges[name]
            self.w[lo:hi].copy_(tensor[: hi - lo])


def shared_places(ranges: dict[str, tuple[int, int]], size: int) -> tuple[dict[str, set[int]], set[str], list[str]]:
    weights = {name: torch.zeros(hi - lo, dtype=torch.bfloat16) for name, (lo, hi) in ranges.items()}
    directory = directory_of(weights)
    plan = trace(TorchLoader(Shared(ranges, size)), directory)
    places: dict[str, set[int]] = {name: set() for name in ranges}
    for box in plan.boxes:
        assert (box.place.all_flat() - box.region.all_flat() == ranges[directory[box.tensor].name][0]).all()
        assert not places[directory[box.tensor].name] & set(box.place.all_flat().tolist())
        places[directory[box.tensor].name] |= set(box.place.all_flat().tolist())
    findings = [f.text for f in plan.findings]
    return places, {directory[t].name for t in plan.aliased}, findings


def test_two_names_on_one_range_are_both_placed_in_full() -> None:
    ranges = {"a": (0, 8), "free": (8, 12), "b": (0, 8)}
    places, aliased, findings = shared_places(ranges, 12)
    assert places == {name: set(range(*r)) for name, r in ranges.items()}
    assert aliased == {"a", "b"}
    assert not findings


def test_three_names_on_one_range_are_all_placed_in_full() -> None:
    """The name in the middle is hidden both in directory order and backwards."""
    ranges = {"a": (0, 8), "b": (0, 8), "free": (8, 12), "c": (0, 8)}
    places, aliased, _ = shared_places(ranges, 12)
    assert places == {name: set(range(*r)) for name, r in ranges.items()}
    assert aliased == {"a", "b", "c"}


def test_partly_overlapping_names_are_placed_in_full() -> None:
    ranges = {"a": (0, 6), "b": (2, 9), "c": (4, 12), "d": (5, 6), "free": (12, 20)}
    places, aliased, _ = shared_places(ranges, 20)
    assert places == {name: set(range(*r)) for name, r in ranges.items()}
    assert aliased == {"a", "b", "c", "d"}


def test_a_name_that_only_others_hide_is_found() -> None:
    ranges = {"x": (3, 4), "a": (0, 8), "y": (3, 4), "b": (3, 4), "c": (0, 5)}
    places, aliased, _ = shared_places(ranges, 8)
    assert places == {name: set(range(*r)) for name, r in ranges.items()}
    assert aliased == set(ranges)


def test_tied_weights_sent_under_both_names_are_exact_when_overwritten() -> None:
    """B1: both names of one storage are placed; overwriting with equal bits is exact, on every rank."""
    config = NativeConfig(layers=1, tied=True, export_tied=True)
    old = make_checkpoint(0, config)
    new = random_delta(old, 1, rate=0.2)
    directory = directory_of(old)
    models = [NativeModel(config, rank, 2) for rank in range(2)]
    loaders = [torch_loader(model) for model in models]
    placement = assign_cells([trace(loader, directory) for loader in loaders], directory, frozenset())
    placement.raise_for_findings()
    assert {directory[t].name for t in placement.aliased} == {"embed_tokens.weight", "lm_head.weight"}
    assert all(placement.complete(t) for t in placement.aliased)
    for rank, (model, loader) in enumerate(zip(models, loaders, strict=True)):
        loader.load(old.items())
        for item, decoded in items_between(directory, old, new, "overwrite"):
            if placement.plans[rank].classes[item.tensor] == "whole":
                loader.load([(directory[item.tensor].name, new[directory[item.tensor].name])])
            else:
                apply_item(placement.plans[rank], StorageMap(loader), item, decoded)
        assert equal_bits(snapshot(load_dense(new, config, rank, 2)), snapshot(model))


def test_tied_weights_sent_under_one_name_are_no_alias() -> None:
    """B1: with one of the names published there is nothing to forbid."""
    checkpoint = make_checkpoint(0, NativeConfig(layers=1, tied=True))
    plan = trace(torch_loader(NativeModel(NativeConfig(layers=1, tied=True))), directory_of(checkpoint))
    assert plan.aliased == ()


def test_a_name_under_computed_storage_is_refused() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(8, dtype=torch.bfloat16), requires_grad=False)

        def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
            for name, tensor in weights:
                self.w.copy_(-tensor if name == "negated" else tensor)

    weights = {"negated": torch.zeros(8).bfloat16(), "plain": torch.zeros(8).bfloat16()}
    for order in (["negated", "plain"], ["plain", "negated"]):
        directory = directory_of({name: weights[name] for name in order})
        plan = trace(TorchLoader(Mixed()), directory)
        assert plan.classes[directory.index("plain")] in ("refused", "skipped")
        assert not plan.boxes
        with pytest.raises(PlacementError, match="'plain'"):
            assign_cells([plan], directory, frozenset()).raise_for_findings()
