"""Nothing grows with the number of refits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from dcr_stream.peers import Mode
from dcr_stream.transports import MemoryTransport
from tests.protocol.faults import fail_at
from tests.protocol.harness import Run, nudge_one, running

pytestmark = pytest.mark.anyio


def tables(run: Run, transport: MemoryTransport) -> dict[str, int]:
    """Sizes of everything that roles remember between two transitions."""
    sizes = {
        "payloads": len(transport._payloads),
        "payload bytes": transport.nbytes,
        "abandoned": len(run.coordinator._abandoned),
        "refused": len(run.coordinator._refused),
    }
    for owner in run.owners:
        assert owner._connection is not None
        sizes[f"{owner.name} sent"] = len(owner._sent)
        sizes[f"{owner.name} sending"] = len(owner._sending)
        sizes[f"{owner.name} manifests"] = len(owner._manifests)
        sizes[f"{owner.name} calls"] = len(owner._connection._pending) + len(owner._connection._unanswered)
        sizes[f"{owner.name} candidate"] = int(owner._candidate is not None)
    for name, rollout in run.rollouts.items():
        node, receiver = rollout.node, rollout.receiver.receiver
        assert node._connection is not None
        sizes[f"{name} early"] = len(node._early)
        sizes[f"{name} running"] = int(node._running is not None)
        sizes[f"{name} calls"] = len(node._connection._pending) + len(node._connection._unanswered)
        sizes[f"{name} session"] = int(receiver._session is not None)
    return sizes


async def test_two_hundred_refits_with_retries_and_joiners_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C22: payloads, manifests, announcements and calls are gone when their transition is."""
    monkeypatch.setattr("dcr_stream.shared._folder", lambda: tmp_path)
    transport = MemoryTransport()
    live = {"a": torch.zeros(8), "b": torch.zeros(8, dtype=torch.bfloat16)}
    async with running(live=live, transport=transport) as run:
        await run.refit()
        after_first = tables(run, transport)
        for step in range(200):
            mode: Mode = "sync" if step % 2 else "async"
            nudge_one(live["a"], step % 8)
            nudge_one(live["b"], step % 8)
            if step % 20 == 7:
                run.rollouts["n1"].receiver.before = fail_at("finish")
            if step % 50 == 13:
                run.rollouts["n0"].receiver.receiver.lose_base()
            report = await run.refit(mode)
            assert report.version == step + 1
        run.check_exact()
        assert tables(run, transport) == after_first
        assert all(size == 0 for size in after_first.values()), after_first
        assert os.listdir(tmp_path) == []
        applied = run.rollouts["n0"].receiver.receiver._applied
        assert len(applied) <= 2
