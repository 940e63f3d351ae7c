"""Loaders that do more than copy: each is mapped exactly, goes whole, or is refused; none is silently wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import nn

from dcr_stream.canonical import TensorDirectory
from dcr_stream.codec import words
from dcr_stream.delta import EntryMode
from dcr_stream.errors import PlacementError, UnplacedTensor
from dcr_stream.loaders import StateDictLoader, TorchLoader, apply_item, reachable_tensors
from dcr_stream.trace import PlacementPlan, StorageMap, TensorClass, assign_cells, trace
from tests.native_loader import directory_of, items_between, random_delta

Place = Callable[[nn.Parameter, torch.Tensor], object]
Weights = Iterator[tuple[str, torch.Tensor]]


class Model(nn.Module):
    """``plain`` is copied; ``odd`` is loaded in a way of its own."""

    def __init__(
        self, place: Place, *, shape: tuple[int, ...] = (6, 8), dtype: torch.dtype = torch.bfloat16, fill: float = 0.25
    ) -> None:
        super().__init__()
        self.plain = nn.Parameter(torch.full((4, 8), 2.0, dtype=torch.bfloat16), requires_grad=False)
        self.odd = nn.Parameter(torch.full(shape, fill).to(dtype), requires_grad=False)
        self.place = place

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            if name == "plain":
                self.plain.copy_(tensor)
            else:
                self.place(self.odd, tensor)


def checkpoint(
    shape: tuple[int, ...] = (6, 8), dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "plain": torch.randn((4, 8), generator=generator).bfloat16(),
        "odd": torch.randn(shape, generator=generator).to(dtype),
    }


def traced(model: nn.Module, weights: dict[str, torch.Tensor]) -> tuple[PlacementPlan, TensorDirectory]:
    directory = directory_of(weights)
    return trace(TorchLoader(model), directory), directory


def classes(plan: PlacementPlan, directory: TensorDirectory) -> dict[str, TensorClass]:
    return {spec.name: c for spec, c in zip(directory, plan.classes, strict=True)}


def refusals(plan: PlacementPlan) -> str:
    return "\n".join(f.text for f in plan.findings if f.severity == "refuse")


def through_fp32(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
    parameter.copy_((tensor.float() * 1.0).to(parameter.dtype))


def clamp(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
    parameter.copy_(tensor.clamp(-1e4, 1e4))


def sort_by_value(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
    parameter.copy_(tensor.flatten().sort().values.view_as(tensor))


def flush_subnormals(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
    tiny = torch.finfo(tensor.dtype).tiny
    parameter.copy_(torch.where(tensor.abs() < tiny, torch.zeros_like(tensor), tensor))


def negate(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
    parameter.copy_(-tensor)


def quantise(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
    parameter.copy_(tensor.to(torch.float8_e4m3fn).to(parameter.dtype))


@pytest.mark.parametrize("place", [through_fp32, clamp, sort_by_value, flush_subnormals, negate, quantise])
def test_a_loader_that_computes_gets_the_complete_tensor(place: Place) -> None:
    plan, directory = traced(Model(place), checkpoint())
    assert classes(plan, directory) == {"plain": "mapped", "odd": "whole"}
    assert not refusals(plan)
    assert {directory[b.tensor].name for b in plan.boxes} == {"plain"}


def test_a_cast_to_another_dtype_gets_the_complete_tensor() -> None:
    """A13: storage in fp32 for a bf16 tensor is not the tensor's bits."""
    plan, directory = traced(Model(lambda p, t: p.copy_(t), dtype=torch.float32), checkpoint())
    assert classes(plan, directory)["odd"] == "whole"


def test_bools_go_whole() -> None:
    weights = checkpoint()
    weights["odd"] = weights["odd"] > 0
    plan, directory = traced(Model(lambda p, t: p.copy_(t), dtype=torch.bool), weights)
    assert classes(plan, directory) == {"plain": "mapped", "odd": "whole"}
    assert not refusals(plan)


def running_max(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
    parameter.copy_(torch.maximum(parameter, tensor))


def running_sum(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
    parameter.add_(tensor)


def skip_zeros(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
    parameter.copy_(torch.where(tensor == 0, parameter, tensor))


def skip_a_zero_tensor(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
    if tensor.any():
        parameter.copy_(tensor)


def running_average(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
    parameter.copy_(parameter * 0.5 + tensor * 0.5)


def running_minimum_of_usual_values(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
    usual = (tensor.abs() > 1e-5) & (tensor.abs() < 4)
    parameter.copy_(torch.where(usual, torch.minimum(parameter, tensor), parameter))


@pytest.mark.parametrize(
    "place",
    [
        running_max,
        running_minimum_of_usual_values,
        running_sum,
        running_average,
        skip_zeros,
        skip_a_zero_tensor,
    ],
)
@pytest.mark.parametrize("shape", [(6, 8), (1,)])
def test_a_loader_that_depends_on_old_contents_is_refused(place: Place, shape: tuple[int, ...]) -> None:
    plan, directory = traced(Model(place, shape=shape), checkpoint(shape))
    assert refusals(plan)
    assert classes(plan, directory)["odd"] not in ("mapped", "whole")
    with pytest.raises(PlacementError):
        assign_cells([plan], directory, frozenset()).raise_for_findings()


def test_a_loader_that_writes_what_the_last_load_brought_is_refused() -> None:
    held: list[torch.Tensor] = []

    def late(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
        if held:
            parameter.copy_(held.pop())
        held.append(tensor.clone())

    plan, directory = traced(Model(late), checkpoint())
    assert refusals(plan)
    assert classes(plan, directory)["odd"] not in ("mapped", "whole")


def test_a_loader_that_only_caches_places_nothing() -> None:
    """B14: a name that the loader takes without a traced write is reported, not assumed placed."""
    cache: list[torch.Tensor] = []
    plan, directory = traced(Model(lambda _, t: cache.append(t.clone())), checkpoint())
    assert classes(plan, directory) == {"plain": "mapped", "odd": "skipped"}
    with pytest.raises(UnplacedTensor, match="'odd' \\(48 of 48 elements\\)"):
        assign_cells([plan], directory, frozenset()).raise_for_findings()


def test_a_loader_that_keeps_references_is_not_mapped() -> None:
    """Memory of a streamed tensor is reused; a loader that copies at the end copies something else."""

    class Collecting(Model):
        def load_weights(self, weights: Weights) -> None:
            super().load_weights(iter(dict(weights).items()))

    plan, directory = traced(Collecting(lambda p, t: p.copy_(t)), checkpoint())
    assert "mapped" not in classes(plan, directory).values()
    with pytest.raises(PlacementError):
        assign_cells([plan], directory, frozenset()).raise_for_findings()


def rebind(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
    parameter.data = tensor.clone()


def rebind_to_the_source(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
    parameter.data = tensor


@pytest.mark.parametrize("place", [rebind, rebind_to_the_source])
def test_a_loader_that_replaces_storage_is_refused(place: Place) -> None:
    plan, directory = traced(Model(place), checkpoint())
    assert set(classes(plan, directory).values()) == {"refused"}
    assert "replaces storage" in refusals(plan)
    assert "'odd'" in refusals(plan)


def test_a_broadcast_scalar_is_mapped_to_every_copy() -> None:
    weights = {**checkpoint(), "odd": torch.tensor(0.5, dtype=torch.bfloat16)}
    model = Model(lambda p, t: p.copy_(t.expand_as(p)))
    plan, directory = traced(model, weights)
    assert classes(plan, directory)["odd"] == "mapped"
    [box] = [b for b in plan.boxes if directory[b.tensor].name == "odd"]
    assert box.copies == 48
    check_refits(model, plan, directory, weights)


def test_a_scalar_broadcast_very_widely_goes_whole() -> None:
    weights = {**checkpoint(), "odd": torch.tensor(0.5, dtype=torch.bfloat16)}
    plan, directory = traced(Model(lambda p, t: p.copy_(t.expand_as(p)), shape=(64, 64)), weights)
    assert classes(plan, directory)["odd"] == "whole"
    assert not refusals(plan)


def test_a_transposed_and_interleaved_layout_is_mapped_exactly() -> None:
    def interleave(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
        parameter[::2].copy_(tensor.t()[:4])
        parameter[1::2].copy_(tensor.t()[4:].flip(0))

    weights = checkpoint((6, 8))
    model = Model(interleave, shape=(8, 6))
    plan, directory = traced(model, weights)
    assert classes(plan, directory)["odd"] == "mapped"
    check_refits(model, plan, directory, weights)


def test_tied_names_that_the_loader_compares_are_mapped_both() -> None:
    """B1: names on one storage are both placed, and told to be aliased."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Parameter(torch.zeros(6, 4, dtype=torch.bfloat16), requires_grad=False)
            self.head = self.embed
            self.norm = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16), requires_grad=False)

        def load_weights(self, weights: Weights) -> None:
            for name, tensor in weights:
                if name == "head":
                    assert torch.equal(self.embed, tensor), "tied weights differ"
                else:
                    getattr(self, name).copy_(tensor)

    weights = {"embed": torch.randn(6, 4).bfloat16(), "norm": torch.randn(4).bfloat16()}
    weights["head"] = weights["embed"].clone()
    plan, directory = traced(Tied(), weights)
    assert classes(plan, directory) == {"embed": "mapped", "norm": "mapped", "head": "mapped"}
    assert {directory[t].name for t in plan.aliased} == {"embed", "head"}
    assert not refusals(plan)


def test_a_loader_that_raises_on_special_values_is_mapped_and_noted() -> None:
    def checked(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
        if not torch.isfinite(tensor).all():
            raise ValueError("weights must be finite")
        parameter.copy_(tensor)

    model, weights = Model(checked), checkpoint()
    plan, directory = traced(model, weights)
    assert classes(plan, directory)["odd"] == "mapped"
    assert not refusals(plan)
    assert {f.subject for f in plan.findings} == {"infinite", "nan"}


def test_a_loader_that_flushes_and_refuses_nans_is_not_mapped() -> None:
    def checked(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
        if tensor.isnan().any():
            raise ValueError("weights must not be NaN")
        flush_subnormals(parameter, tensor)

    plan, directory = traced(Model(checked), checkpoint())
    assert classes(plan, directory)["odd"] == "whole"


def test_unknown_names_are_refused_all_at_once() -> None:
    """B13: every name that the model does not know is in the report, before any write of a refit."""
    model = nn.Linear(4, 3, dtype=torch.bfloat16)
    weights = {n: torch.zeros(3, 4, dtype=torch.bfloat16) for n in ("wegiht", "weight", "decoder.weight")}
    weights["bais"] = torch.zeros(3, dtype=torch.bfloat16)
    directory = directory_of(weights)
    plan = trace(StateDictLoader(model), directory)
    assert classes(plan, directory) == {
        "wegiht": "refused", "weight": "mapped", "decoder.weight": "refused", "bais": "refused",
    }  # fmt: skip
    for name in ("wegiht", "decoder.weight", "bais"):
        assert f"'{name}'" in refusals(plan)


def test_names_declared_unplaced_never_reach_the_loader() -> None:
    model = nn.Linear(4, 3, dtype=torch.bfloat16, bias=False)
    weights = {"weight": torch.zeros(3, 4, dtype=torch.bfloat16), "draft.weight": torch.ones(2, dtype=torch.bfloat16)}
    directory = directory_of(weights)
    loader = StateDictLoader(model, unplaced=["draft.weight"])
    plan = trace(loader, directory)
    assert classes(plan, directory) == {"weight": "mapped", "draft.weight": "skipped"}
    placement = assign_cells([plan], directory, loader.declared_unplaced())
    placement.raise_for_findings()
    assert not placement.complete(1)
    loader.load(weights.items())
    assert not model.weight.any()


def test_a_loader_that_fails_at_the_end_of_every_load_is_refused() -> None:
    class Strict(Model):
        def load_weights(self, weights: Weights) -> None:
            super().load_weights(weights)
            raise RuntimeError("two tensors were missing")

    plan, directory = traced(Strict(lambda p, t: p.copy_(t)), checkpoint())
    assert set(classes(plan, directory).values()) == {"refused"}
    assert "two tensors were missing" in refusals(plan)


def test_a_tensor_computed_from_two_names_is_refused() -> None:
    class Scaled(nn.Module):
        """Weight and scale are multiplied into one parameter, whichever comes last."""

        def __init__(self) -> None:
            super().__init__()
            self.product = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16), requires_grad=False)
            self.seen: dict[str, torch.Tensor] = {}

        def load_weights(self, weights: Weights) -> None:
            for name, tensor in weights:
                self.seen[name] = tensor.clone()
                if len(self.seen) == 2:
                    self.product.copy_(self.seen["w"] * self.seen["s"])

    weights = {"w": torch.randn(4).bfloat16(), "s": torch.randn(4).bfloat16()}
    directory = directory_of(weights)
    model = Scaled()
    plan = trace(TorchLoader(model, derived=["seen.w", "seen.s"]), directory)
    assert classes(plan, directory) == {"w": "refused", "s": "refused"}
    assert "'w', 's'" in refusals(plan)


def test_too_many_bytes_of_whole_tensors_are_refused() -> None:
    weights = checkpoint()
    directory = directory_of(weights)
    plan = trace(TorchLoader(Model(negate)), directory, whole_limit_bytes=95)
    assert "96 bytes" in refusals(plan)
    assert not refusals(trace(TorchLoader(Model(negate)), directory, whole_limit_bytes=96))


def test_a_tensor_outside_parameters_and_buffers_is_refused_by_path() -> None:
    model = Model(lambda p, t: p.copy_(t))
    model.packed = {"w": [torch.zeros(3, 2)]}  # type: ignore[assignment]
    model.view = model.plain.detach()[1:]
    assert "packed.w.0" in reachable_tensors(model)
    plan, _ = traced(model, checkpoint())
    assert [f.subject for f in plan.findings] == ["packed.w.0"]
    assert "shape [3, 2]" in refusals(plan)
    declared = trace(TorchLoader(model, derived=["packed.w.0"]), directory_of(checkpoint()))
    assert not declared.findings


def test_a_derived_buffer_needs_a_refresh_hook() -> None:
    """B8: state computed from weights while loading is refused, or whole, unless it is declared and refreshed."""

    class Absorbing(Model):
        def __init__(self) -> None:
            super().__init__(lambda p, t: p.copy_(t))
            self.register_buffer("absorbed", torch.zeros(8, 4), persistent=False)

        def absorb(self) -> None:
            self.get_buffer("absorbed").copy_(self.plain.float().t() * 2)

        def load_weights(self, weights: Weights) -> None:
            super().load_weights(weights)
            self.absorb()

    weights = checkpoint()
    plan, directory = traced(Absorbing(), weights)
    assert classes(plan, directory)["plain"] == "whole"

    model = Absorbing()
    calls: list[int] = []

    def refresh() -> None:
        calls.append(1)
        model.absorb()

    loader = TorchLoader(model, derived=["absorbed"], refresh=refresh)
    plan = trace(loader, directory)
    assert classes(plan, directory) == {"plain": "mapped", "odd": "mapped"}
    assert not plan.findings
    loader.load(weights.items())
    new = random_delta(weights, 1)
    for item, decoded in items_between(directory, weights, new, "add"):
        apply_item(plan, StorageMap(loader), item, decoded)
    loader.refresh()
    assert calls == [1]
    fresh = Absorbing()
    fresh.load_weights(iter(new.items()))
    assert torch.equal(fresh.get_buffer("absorbed"), model.get_buffer("absorbed"))


def test_a_loader_that_reads_a_buffer_is_traced_with_the_buffer_intact() -> None:
    """Expert maps steer where loads go: tracing must not fill storage beforehand."""

    class Mapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("expert_map", torch.tensor([1, 0]))
            self.w = nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16), requires_grad=False)

        def load_weights(self, weights: Weights) -> None:
            for name, tensor in weights:
                self.w[int(self.get_buffer("expert_map")[int(name)])].copy_(tensor)

    directory = directory_of({"0": torch.zeros(3, dtype=torch.bfloat16), "1": torch.zeros(3, dtype=torch.bfloat16)})
    plan = trace(TorchLoader(Mapped()), directory)
    assert [(b.tensor, b.place.offset) for b in plan.boxes] == [(0, 3), (1, 0)]
    assert not plan.findings


def test_a_view_of_a_parameter_shares_its_boxes() -> None:
    """vLLM registers ``conv_weights`` as a view of ``conv1d.weight``: one storage, one placement."""

    class Conv(Model):
        def __init__(self) -> None:
            super().__init__(lambda p, t: p.copy_(t))
            self.register_buffer("conv_weights", self.odd.detach().view(-1, 2))

    plan, directory = traced(Conv(), checkpoint())
    assert len([b for b in plan.boxes if directory[b.tensor].name == "odd"]) == 1
    assert not plan.findings


def test_parameters_of_two_dtypes_over_one_storage_are_mapped_apart() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            flat = torch.zeros(64, dtype=torch.uint8)
            self.a = nn.Parameter(flat[:16].view(torch.bfloat16), requires_grad=False)
            self.b = nn.Parameter(flat[16:48].view(torch.float32), requires_grad=False)

        def load_weights(self, weights: Weights) -> None:
            for name, tensor in weights:
                getattr(self, name).copy_(tensor)

    weights = {"a": torch.randn(8).bfloat16(), "b": torch.randn(8)}
    plan, directory = traced(Flat(), weights)
    assert classes(plan, directory) == {"a": "mapped", "b": "mapped"}
    assert [(b.storage, b.place.offset) for b in plan.boxes] == [(0, 0), (0, 4)]
    assert not plan.findings


def test_empty_tensors_place_nothing_and_are_no_finding() -> None:
    weights = {**checkpoint(), "odd": torch.zeros(0, 3).bfloat16()}
    plan, directory = traced(Model(lambda p, t: p.copy_(t), shape=(0, 3)), weights)
    assert classes(plan, directory)["odd"] == "skipped"
    assign_cells([plan], directory, frozenset()).raise_for_findings()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.float32, torch.float64,
                                   torch.int8, torch.int32, torch.int64, torch.uint8, torch.complex64])  # fmt: skip
def test_every_dtype_that_is_copied_is_mapped(dtype: torch.dtype) -> None:
    weights = checkpoint()
    raw = np.random.default_rng(0).integers(0, 256, 48 * dtype.itemsize, np.uint8)
    weights["odd"] = torch.from_numpy(raw).view(dtype).view(6, 8)
    model = Model(lambda p, t: p.copy_(t), dtype=dtype)
    plan, directory = traced(model, weights)
    assert classes(plan, directory)["odd"] == "mapped"
    check_refits(model, plan, directory, weights)


def check_refits(
    model: nn.Module, plan: PlacementPlan, directory: TensorDirectory, weights: dict[str, torch.Tensor]
) -> None:
    """Deltas through the plan equal dense loads."""
    loader = TorchLoader(model)
    loader.load(weights.items())
    modes: list[EntryMode] = ["add", "xor", "overwrite"]
    for seed, mode in enumerate(modes):
        new = random_delta(weights, seed, rate=0.3)
        for item, decoded in items_between(directory, weights, new, mode):
            apply_item(plan, StorageMap(loader), item, decoded)
        held = {name: words(p).copy() for name, p in model.named_parameters()}
        loader.load(new.items())
        for name, parameter in model.named_parameters():
            assert held[name].tobytes() == words(parameter).tobytes(), (name, mode)
        weights = new


def test_a_packed_dtype_that_no_tensor_can_have_goes_whole() -> None:
    def pack(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
        parameter.view(torch.uint8).copy_(tensor.view(torch.uint8)[..., ::2])

    model = Model(pack, dtype=torch.uint8)
    model.odd = nn.Parameter(model.odd.detach().view(torch.float4_e2m1fn_x2), requires_grad=False)
    plan, directory = traced(model, checkpoint())
    assert classes(plan, directory) == {"plain": "mapped", "odd": "whole"}
    assert not refusals(plan)


def test_a_tensor_that_is_copied_in_part_and_computed_in_part_goes_whole() -> None:
    def half(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
        parameter[:3].copy_(tensor[:3])
        parameter[3:].copy_(-tensor[3:])

    plan, directory = traced(Model(half), checkpoint())
    assert classes(plan, directory) == {"plain": "mapped", "odd": "whole"}
    assert {directory[b.tensor].name for b in plan.boxes} == {"plain"}
    assert (plan.mapped_bytes, plan.total_bytes) == (64, 64 + 96)


def test_a_loader_that_depends_on_the_order_of_names_is_refused() -> None:
    class Ordered(Model):
        def load_weights(self, weights: Weights) -> None:
            last = ""
            for name, tensor in weights:
                if name < last:
                    raise RuntimeError("weights must come in alphabetical order")
                last = name
                super().load_weights(iter([(name, tensor)]))

    weights = checkpoint()
    weights = {name: weights[name] for name in sorted(weights)}
    plan, directory = traced(Ordered(lambda p, t: p.copy_(t)), weights)
    assert set(classes(plan, directory).values()) == {"refused"}
    assert "alphabetical order" in refusals(plan)


def test_a_buffer_that_counts_loads_is_refused_unless_it_is_declared_derived() -> None:
    class Counting(Model):
        def __init__(self) -> None:
            super().__init__(lambda p, t: p.copy_(t))
            self.register_buffer("loads", torch.zeros(1, dtype=torch.int64))

        def load_weights(self, weights: Weights) -> None:
            self.get_buffer("loads").add_(1)
            super().load_weights(weights)

    plan, directory = traced(Counting(), checkpoint())
    assert "'loads'" in refusals(plan)
    declared = trace(TorchLoader(Counting(), derived=["loads"]), directory)
    assert set(classes(declared, directory).values()) == {"mapped"}
    assert not declared.findings


def test_names_that_must_be_equal_but_are_kept_apart_are_refused() -> None:
    """B1: two storages cannot be told apart by ids that have to be the same."""

    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Parameter(torch.zeros(6, 4, dtype=torch.bfloat16), requires_grad=False)
            self.head = nn.Parameter(torch.zeros(6, 4, dtype=torch.bfloat16), requires_grad=False)

        def load_weights(self, weights: Weights) -> None:
            for name, tensor in weights:
                if name == "head":
                    assert torch.equal(self.embed, tensor), "tied weights differ"
                getattr(self, name).copy_(tensor)

    weights = {"embed": torch.randn(6, 4).bfloat16()}
    weights["head"] = weights["embed"].clone()
    plan, directory = traced(Apart(), weights)
    assert classes(plan, directory) == {"embed": "refused", "head": "refused"}
    assert not plan.boxes


def test_whole_tensors_of_a_loader_that_clears_storage_at_every_call_are_refused() -> None:
    """Loading only the whole tensors would wipe out what was applied through the map."""

    class Clearing(Model):
        def load_weights(self, weights: Weights) -> None:
            self.plain.zero_()
            super().load_weights(weights)

    plan, directory = traced(Clearing(negate), checkpoint())
    assert classes(plan, directory)["plain"] == "refused"
    assert "'plain' shares storage" in refusals(plan)
    harmless, _ = traced(Clearing(lambda p, t: p.copy_(t)), checkpoint())
    assert set(harmless.classes) == {"mapped"}
