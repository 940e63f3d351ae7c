"""Refits between weights that live on devices: compared and applied there."""

from __future__ import annotations

import pytest
import torch

from dcr_stream import StateDictLoader, TorchSource
from dcr_stream.canonical import Indices, Words
from dcr_stream.codec.device import DeviceWords
from dcr_stream.trace import StorageMap
from tests.devices import DEVICES, take_for_a_device
from tests.protocol.faults import fail_at
from tests.protocol.harness import Weights, nudge, running, some_tensors, until

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("device", DEVICES)
async def test_refits_retries_and_restores_are_exact_on_devices(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take_for_a_device(monkeypatch, device)
    host = some_tensors(0)
    live = {name: tensor.to(device, copy=True) for name, tensor in host.items()}

    def step(seed: int) -> None:
        nudge(host, seed)
        for name, tensor in host.items():
            live[name].copy_(tensor)

    sources = [TorchSource(live, rank=rank, replicas=2, device_trackers=True) for rank in range(2)]
    assert all(task.live is not None for source in sources for task in source.tasks())
    models: list[Weights] = []

    def model() -> Weights:
        models.append(Weights(live).to(device))
        return models[-1]

    async with running(live=live, sources=sources, model=model, nodes=("n0", "n1")) as run:
        await run.refit()
        run.check_exact()
        for owner in run.owners:
            assert owner._trackers is not None
            assert set(owner._trackers.on_device) == {task.key for task in owner._source.tasks()}
        storage = StorageMap(StateDictLoader(models[0]))
        assert all(isinstance(storage.memory(i, 1), DeviceWords) for i in range(len(storage)))

        for seed in (1, 2):
            step(seed)
            report = await run.refit()
            assert (report.attempts, report.kind) == (1, "delta")
            run.check_exact()

        step(3)
        run.rollouts["n1"].receiver.before = fail_at("apply", 1)
        assert (await run.refit()).attempts == 2
        run.check_exact()

        run.join("n2", Weights(live).to(device))
        await run.joined()
        step(4)
        await run.refit("sync")
        run.check_exact()
        assert len(run.rollouts) == 3
        assert torch.equal(live["ids"].cpu(), host["ids"])


@pytest.mark.parametrize("device", DEVICES)
async def test_an_owner_whose_device_fails_while_it_advances_sends_everything_anew(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of its tracker is at v+1: advancing once more, or comparing with it, would lose changes."""
    take_for_a_device(monkeypatch, device)
    live = {name: tensor.to(device) for name, tensor in some_tensors(0).items()}
    source = TorchSource(live, device_trackers=True)
    add_at, calls = DeviceWords.add_at, 0

    def failing(self: DeviceWords, at: Indices, differences: Words) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        add_at(self, at, differences)

    async with running(live=live, sources=[source], model=lambda: Weights(live), nodes=("n0",)) as run:
        await run.refit()
        for tensor in (live["a"], live["b"]):
            tensor.view(torch.int16)[::3] += 1
        monkeypatch.setattr(DeviceWords, "add_at", failing)
        await run.refit()
        run.check_exact()
        await until(lambda: calls >= 2)
        live["a"].view(torch.int16)[::2] += 1
        report = await run.refit()
        assert report.kind == "dense"
        run.check_exact()
