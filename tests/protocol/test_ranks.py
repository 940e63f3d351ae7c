"""Engines of several ranks: they fail, are read back and adopt as one."""

from __future__ import annotations

import pytest

from dcr_stream import Receiver, TorchLoader, TorchSource
from dcr_stream.codec import words
from dcr_stream.peers import Mode
from tests.native_loader import (
    NativeConfig,
    NativeModel,
    equal_bits,
    load_dense,
    make_checkpoint,
    random_delta,
    snapshot,
)
from tests.protocol.faults import FaultyEngine, FaultyReceiver, WatchedGate, fail_at
from tests.protocol.harness import Run, running

pytestmark = pytest.mark.anyio

CONFIG = NativeConfig()
WORLD = 2


def attach(run: Run) -> tuple[list[NativeModel], list[FaultyReceiver], WatchedGate]:
    """One more engine on the only node: tensor-parallel, with fused, padded and replicated storage."""
    models = [NativeModel(CONFIG, rank, WORLD) for rank in range(WORLD)]
    receivers = [
        FaultyReceiver(Receiver(TorchLoader(model), rank=rank, name=f"rank {rank}"))
        for rank, model in enumerate(models)
    ]
    engine = FaultyEngine("parallel", receivers, workers=run.runtime.workers)
    gate = WatchedGate(engine, hook_deadline_s=2)
    gate.events, gate.owner = run.events, "parallel"
    run.rollouts["n0"].node.attach(engine, gate)
    return models, receivers, gate


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_ranks_of_an_engine_fail_and_recover_together(mode: Mode) -> None:
    """B20, C4: one rank stops half-way while the other has applied everything; afterwards all hold what a dense load
    would have given them."""
    live = make_checkpoint(5, CONFIG)
    async with running(
        live=live,
        sources=[TorchSource(live, rank=r, replicas=2) for r in range(2)],
        nodes=["n0"],
        model=lambda: NativeModel(CONFIG),
        loader=lambda model: TorchLoader(model),
    ) as run:
        models, receivers, gate = attach(run)

        def check() -> None:
            for rank, model in enumerate(models):
                want = load_dense(live, CONFIG, rank, WORLD)
                assert equal_bits(snapshot(model), snapshot(want)), rank
            assert equal_bits(snapshot(run.rollouts["n0"].model), snapshot(load_dense(live, CONFIG, 0, 1)))

        await run.refit(mode)
        check()
        for step, method in enumerate(("apply", "begin", "finish", "adopt", "nothing")):
            for name, tensor in random_delta(live, step, special=True).items():
                live[name].copy_(tensor)
            receivers[1].before = fail_at(method, 1 if method == "apply" else 0)
            report = await run.refit(mode)
            assert report.attempts == (2 if method in ("apply", "begin", "finish") else 1)
            assert report.restored == (1 if step == 4 else 0)  # the engine that could not adopt
            if method == "adopt":
                assert (run.rollouts["n0"].gate.serving, gate.serving) == (report.version, None)
            else:
                check()
                assert (run.rollouts["n0"].gate.serving, gate.serving) == (report.version, report.version)


async def test_a_wrong_element_on_one_rank_quarantines_its_whole_engine() -> None:
    """Copies of one part differ after applying; ranks are restored together, the other engine is not touched."""
    live = make_checkpoint(6, CONFIG)
    async with running(
        live=live,
        sources=[TorchSource(live)],
        nodes=["n0"],
        model=lambda: NativeModel(CONFIG),
        loader=lambda model: TorchLoader(model),
    ) as run:
        models, receivers, gate = attach(run)
        await run.refit()
        words(models[1].norm.data)[3] ^= 1
        words(live["norm.weight"])[3] ^= 2
        report = await run.refit()
        assert (report.attempts, report.restored, gate.serving) == (2, 1, 1)
        assert [r.calls.count("load_begin") for r in (*receivers, run.rollouts["n0"].receiver)] == [2, 2, 1]
        for rank, model in enumerate(models):
            assert equal_bits(snapshot(model), snapshot(load_dense(live, CONFIG, rank, WORLD)))
