"""Refits between weights that live on devices: compared and applied there."""

from __future__ import annotations

import pytest
import torch

from dcr_stream import StateDictLoader, TorchSource
from dcr_stream.codec.device import DeviceWords
from dcr_stream.trace import StorageMap
from tests.devices import DEVICES, take_for_a_device
from tests.protocol.faults import fail_at
from tests.protocol.harness import Weights, nudge, running, some_tensors

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
    assert all(task.live is not None for source in sources for task in source.tasks() if task.numel)
    models: list[Weights] = []

    def model() -> Weights:
        models.append(Weights(live).to(device))
        return models[-1]

    async with running(live=live, sources=sources, model=model, nodes=("n0", "n1")) as run:
        await run.refit()
        run.check_exact()
        for owner in run.owners:
            assert owner._trackers is not None
            assert set(owner._trackers.on_device) == {task.key for task in owner._source.tasks() if task.numel}
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
