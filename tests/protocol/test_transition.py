"""One transition after the other: dense, then deltas, in both modes."""

from __future__ import annotations

import pytest

from dcr_stream.peers import Mode
from tests.protocol.harness import nudge, running

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_dense_refit_then_deltas_leave_exactly_the_live_bits(mode: Mode) -> None:
    async with running() as run:
        report = await run.refit(mode)
        assert (report.version, report.kind, report.attempts) == (0, "dense", 1)
        run.check_exact()
        for step in range(1, 4):
            nudge(run.live, step)
            report = await run.refit(mode)
            assert (report.version, report.kind, report.attempts) == (step, "delta", 1)
            run.check_exact()
            assert [r.gate.serving for r in run.rollouts.values()] == [step, step]
