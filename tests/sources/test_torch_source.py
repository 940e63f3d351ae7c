"""Owners over plain torch tensors: what is published, and how it is read."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dcr_stream import TorchSource
from dcr_stream.codec import words
from dcr_stream.errors import UsageError
from tests.devices import DEVICES, take_for_a_device


def test_a_module_publishes_what_its_state_dict_holds() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(4, 3)
            self.head = torch.nn.Linear(3, 4, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("steps", torch.tensor(3))
            self.register_buffer("frequencies", torch.ones(2), persistent=False)

    source = TorchSource(Model())
    assert [spec.name for spec in source.directory] == ["steps", "embed.weight", "head.weight"]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24).reshape(4, 6).t(),
        torch.arange(48).reshape(4, 12)[:, ::3],
        torch.arange(6).reshape(1, 6).expand(5, 6),
        torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1),
        torch.arange(12).reshape(1, 12)[:, ::2],
        torch.arange(3)[:1].reshape(()),
        torch.zeros(0, 4).t(),
    ],
)
def test_strided_tensors_are_read_in_row_major_order(tensor: torch.Tensor) -> None:
    """A10, A11: transposed, strided and expanded tensors."""
    (task,) = TorchSource({"w": tensor}).tasks()
    want = words(tensor)
    for step in (1, 4, 5, 100):
        parts = [task.read(lo, min(lo + step, task.numel)) for lo in range(0, task.numel, step)]
        assert np.array_equal(np.concatenate([want[:0], *parts]), want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cast", [None, torch.bfloat16])
def test_elements_are_the_same_where_they_live(
    device: str, cast: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_for_a_device(monkeypatch, device)
    tensors = {
        "transposed": torch.randn(6, 4).t(),
        "strided": torch.randn(4, 12)[:, ::3],
        "expanded": torch.randn(1, 6).expand(5, 6),
        "scalar": torch.tensor(float("nan")),
        "empty": torch.zeros(0, 4).t(),
        "bool": torch.tensor([True, False]),
        "conjugated": torch.tensor([1 + 2j, 3j], dtype=torch.complex64).conj(),
        "float8": torch.arange(5.0).to(torch.float8_e4m3fn),
    }
    live = {name: tensor.to(device) for name, tensor in tensors.items()}
    for task in TorchSource(live, published_dtype=cast, device_trackers=True).tasks():
        assert task.live is not None
        for lo, hi in ((0, task.numel), (task.numel // 3, task.numel // 2)):
            np.testing.assert_array_equal(task.live(lo, hi).host(), task.read(lo, hi))


@pytest.mark.parametrize("device", DEVICES)
def test_weights_that_come_to_be_strided_are_followed_on_their_device(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_for_a_device(monkeypatch, device)
    weights = torch.arange(6.0).view(2, 3).to(device)
    source = TorchSource({"w": weights}, device_trackers=True)
    [task] = source.tasks()
    weights.data = torch.arange(6.0).view(3, 2).t().to(device)
    source.synchronize()
    assert task.live is not None
    np.testing.assert_array_equal(task.live(1, 5).host(), words(weights)[1:5])


def test_weights_on_the_host_have_host_trackers_whatever_was_asked_for() -> None:
    [task] = TorchSource({"w": torch.zeros(3)}, device_trackers=True).tasks()
    assert task.live is None


def test_reading_a_transposed_tensor_copies_only_the_rows_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    (task,) = TorchSource({"w": torch.zeros(1000, 1000).t()}).tasks()
    copied: list[int] = []
    original = torch.Tensor.reshape

    def reshape(self: torch.Tensor, *shape: int) -> torch.Tensor:
        copied.append(self.numel())
        return original(self, *shape)

    monkeypatch.setattr(torch.Tensor, "reshape", reshape)
    task.read(5_000, 6_500)
    assert max(copied) == 2_000


def test_fp32_masters_are_published_as_bf16_without_a_copy_of_the_model() -> None:
    master = torch.randn(50, 40)
    (task,) = TorchSource({"w": master}, published_dtype=torch.bfloat16).tasks()
    assert task.dtype == "bfloat16"
    assert np.array_equal(task.read(0, 2000), words(master.bfloat16()))
    master += 1
    assert np.array_equal(task.read(100, 200), words(master.bfloat16())[100:200])


def test_every_name_has_exactly_one_owner_among_replicas() -> None:
    tensors = {f"layer.{i}.weight": torch.zeros(2) for i in range(50)}
    owned = [[task.key for task in TorchSource(tensors, rank=r, replicas=3).tasks()] for r in range(3)]
    assert sorted(name for names in owned for name in names) == sorted(tensors)
    assert all(owned)


def test_wrong_ranks_and_names_are_refused() -> None:
    with pytest.raises(UsageError, match="rank 3"):
        TorchSource({}, rank=3, replicas=3)
    with pytest.raises(UsageError, match="ghost"):
        TorchSource({"w": torch.zeros(1)}, frozen=["ghost"])
    with pytest.raises(UsageError, match="complex128"):
        TorchSource({"w": torch.zeros(1, dtype=torch.complex128)})
