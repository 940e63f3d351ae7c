"""Loaders over torch modules, and streamed load sessions."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from dcr_stream.errors import ApplyError, UsageError
from dcr_stream.loaders import StateDictLoader, TorchLoader, reachable_tensors
from tests.native_loader import (
    NativeConfig,
    NativeModel,
    equal_bits,
    load_dense,
    make_checkpoint,
    snapshot,
    torch_loader,
)

Weights = Iterator[tuple[str, torch.Tensor]]
CONFIG = NativeConfig(layers=1)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.taken: list[str] = []

    def load_weights(self, weights: Weights) -> None:
        for name, _ in weights:
            self.taken.append(name)


def pairs(*names: str) -> list[tuple[str, torch.Tensor]]:
    return [(name, torch.zeros(2)) for name in names]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_streamed_load_equals_one_dense_load(size: int) -> None:
    """B17: parts of any size give the same bytes."""
    checkpoint = make_checkpoint(0, CONFIG)
    model = NativeModel(CONFIG, 1, 2)
    session = torch_loader(model).open_session()
    tensors = iter(checkpoint.items())
    while part := list(itertools.islice(tensors, size)):
        session.push(part)
    session.finish()
    assert equal_bits(snapshot(model), snapshot(load_dense(checkpoint, CONFIG, 1, 2)))


def test_memory_of_a_part_may_be_reused_after_push() -> None:
    checkpoint = make_checkpoint(0, CONFIG)
    model = NativeModel(CONFIG)
    session = torch_loader(model).open_session()
    for name, tensor in checkpoint.items():
        scratch = tensor.clone()
        session.push([(name, scratch)])
        scratch.zero_()
    session.finish()
    assert equal_bits(snapshot(model), snapshot(load_dense(checkpoint, CONFIG, 0, 1)))


def test_an_error_of_the_loader_is_raised_by_push_with_its_cause() -> None:
    session = torch_loader(NativeModel(CONFIG)).open_session()
    with pytest.raises(ApplyError, match="no module or parameter named 'wrong'") as caught:
        session.push(pairs("wrong"))
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(ApplyError, match="has ended"):
        session.push(pairs("norm.weight"))
    session.abort()


def test_an_error_at_the_end_is_raised_by_finish() -> None:
    class Strict(Plain):
        def load_weights(self, weights: Weights) -> None:
            super().load_weights(weights)
            raise KeyError("missing")

    session = TorchLoader(Strict()).open_session()
    session.push(pairs("a"))
    with pytest.raises(ApplyError, match="missing"):
        session.finish()
    session.abort()


def test_a_loader_that_returns_before_taking_everything_fails() -> None:
    class Early(Plain):
        def load_weights(self, weights: Weights) -> None:
            super().load_weights(itertools.islice(weights, 1))

    session = TorchLoader(Early()).open_session()
    with pytest.raises(ApplyError, match="before it took all"):
        session.push(pairs("a", "b"))
    session = TorchLoader(Early()).open_session()
    session.push(pairs("a"))
    with pytest.raises(ApplyError, match="before it took all"):
        session.push(pairs("b"))


def test_a_loader_that_counts_its_tensors_may_return_after_the_last() -> None:
    class Counting(Plain):
        def load_weights(self, weights: Weights) -> None:
            super().load_weights(itertools.islice(weights, 2))

    model = Counting()
    session = TorchLoader(model).open_session()
    session.push(pairs("a", "b"))
    session.finish()
    assert model.taken == ["a", "b"]


def running_loads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("load ")]


def test_a_load_that_is_given_up_stops_its_loader() -> None:
    model = Plain()
    session = TorchLoader(model).open_session()
    session.push(pairs("a"))
    assert running_loads() == ["load Plain"]
    session.abort()
    session.abort()
    assert running_loads() == []
    assert model.taken == ["a"]


def test_a_load_that_is_given_up_stops_a_loader_that_swallows_errors() -> None:
    class Stubborn(Plain):
        def load_weights(self, weights: Weights) -> None:
            for _ in range(3):
                try:
                    super().load_weights(weights)
                except (Exception, GeneratorExit):
                    continue

    model = Stubborn()
    session = TorchLoader(model).open_session()
    session.push(pairs("a"))
    session.abort()
    assert running_loads() == []
    assert model.taken == ["a"]


def test_abort_after_finish_does_nothing() -> None:
    model = Plain()
    session = TorchLoader(model).open_session()
    session.push(pairs("a"))
    session.finish()
    session.abort()
    assert model.taken == ["a"]


def test_a_module_without_a_loader_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="Linear has no load_weights"):
        TorchLoader(nn.Linear(2, 2))


def test_refresh_runs_the_hook_and_no_hook_is_nothing() -> None:
    calls: list[bool] = []
    TorchLoader(Plain(), refresh=lambda: calls.append(torch.is_grad_enabled())).refresh()
    TorchLoader(Plain()).refresh()
    assert calls == [False]


def test_a_state_dict_is_copied_by_name_in_place() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    addresses = {name: t.data_ptr() for name, t in module.state_dict().items()}
    weights = {name: torch.full_like(t, 3) for name, t in module.state_dict().items()}
    StateDictLoader(module).load(weights.items())
    assert {name: t.data_ptr() for name, t in module.state_dict().items()} == addresses
    assert all(torch.equal(t, weights[name]) for name, t in module.state_dict().items())


@pytest.mark.parametrize(
    ("name", "tensor", "text"),
    [
        ("bias", torch.zeros(3), "no tensor 'bias'"),
        ("weight", torch.zeros(2, 4), r"\[2, 3\] in Linear, not torch.float32 \[2, 4\]"),
        ("weight", torch.zeros(2, 3, dtype=torch.float64), "torch.float64"),
        ("weight", torch.zeros(0), r"\[0\]"),
    ],
)
def test_a_state_dict_refuses_other_names_shapes_and_dtypes(name: str, tensor: torch.Tensor, text: str) -> None:
    """A8, B13: nothing is broadcast, cast or skipped."""
    with pytest.raises(ApplyError, match=text):
        StateDictLoader(nn.Linear(3, 2, bias=False)).load([(name, tensor)])


def test_every_attribute_that_holds_a_tensor_is_reached() -> None:
    class Holder:
        __slots__ = ("hidden",)

        def __init__(self) -> None:
            self.hidden = torch.zeros(1)

    class Method:
        def __init__(self) -> None:
            self.scales = {"k": (torch.zeros(1), [torch.zeros(1)])}
            self.myself = self

    module = nn.Module()
    module.child = nn.Linear(2, 2)
    module.child.tied = module.child.weight
    module.method = Method()  # type: ignore[assignment]
    module.holder = Holder()  # type: ignore[assignment]
    module.child.bias.scale = torch.zeros(1)  # type: ignore[attr-defined]
    module.buffer_list = [torch.zeros(2)]  # type: ignore[assignment]
    assert set(reachable_tensors(module)) == {
        *("child.weight", "child.bias", "child.tied", "child.bias.scale"),
        *("method.scales.k.0", "method.scales.k.1.0", "holder.hidden", "buffer_list.0"),
    }


def test_names_of_storage_have_tied_duplicates() -> None:
    model = NativeModel(CONFIG)
    storage = torch_loader(model).storage()
    assert storage["lm_head"] is storage["embed_tokens"]
    assert "inv_freq" in storage
