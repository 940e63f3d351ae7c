"""Giving up: everybody is back on v, bit for bit, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dcr_stream.errors import TransitionAbandoned
from dcr_stream.peers import Mode
from dcr_stream.transports import MemoryTransport
from tests.protocol.faults import Broken, RecordingTransport, fail_always
from tests.protocol.harness import SETTINGS, nudge, running

pytestmark = pytest.mark.anyio


def fail_first(method: str, times: int) -> Callable[[str], None]:
    """Break the first calls of a method."""
    seen = 0

    def check(called: str) -> None:
        nonlocal seen
        seen += called == method
        if called == method and seen <= times:
            raise Broken(f"{method} number {seen}")

    return check


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_dirtied_receivers_are_brought_back_by_the_trackers_bits(mode: Mode) -> None:
    """Every attempt wrote everything and failed at the end; one overwrite of the changed set undoes it."""
    transport = RecordingTransport(MemoryTransport())
    async with running(transport=transport) as run:
        await run.refit(mode)
        nudge(run.live, 1, share=0.3)
        run.rollouts["n1"].receiver.before = fail_first("finish", SETTINGS.max_attempts)
        with pytest.raises(TransitionAbandoned, match="after 3 attempts"):
            await run.refit(mode)
        run.check_exact(0)
        assert run.serving() == [0, 0]
        assert [r.mark for r in run.rollouts.values()] == ["clean", "clean"]
        assert [r.receiver.calls.count("load_begin") for r in run.rollouts.values()] == [1, 1]
        assert all(p.header.kind == "delta" for p in transport.sent if p.header.attempt == transport.attempts()[-1])
        for owner in run.owners:
            assert owner.version == 0
            assert owner.last is not None
            assert isinstance(owner.last.error, TransitionAbandoned)
        nudge(run.live, 2)
        report = await run.refit(mode)
        assert (report.version, report.kind, report.restored) == (1, "delta", 0)
        run.check_exact()


async def test_the_next_delta_contains_what_was_abandoned() -> None:
    async with running() as run:
        await run.refit()
        nudge(run.live, 1)
        run.rollouts["n0"].receiver.before = fail_always("begin")
        await run.offer()
        lost = sum(owner._offer.elements for owner in run.owners if owner._offer is not None)
        with pytest.raises(TransitionAbandoned):
            await run.commit()
        run.rollouts["n0"].receiver.before = lambda method: None
        assert lost > 0
        assert (await run.refit()).elements == lost
        run.check_exact()


async def test_a_receiver_that_cannot_be_reverted_is_restored_densely() -> None:
    """Its applies fail for good, its dense load works."""
    async with running() as run:
        await run.refit()
        nudge(run.live, 1)
        run.rollouts["n1"].receiver.before = fail_always("apply")
        with pytest.raises(TransitionAbandoned):
            await run.refit()
        run.check_exact(0)
        assert run.serving() == [0, 0]


async def test_a_receiver_that_cannot_be_brought_back_stays_closed_and_the_others_serve() -> None:
    async with running() as run:
        await run.refit()
        nudge(run.live, 1)

        def dead(method: str) -> None:
            if method in ("finish", "load_block", "load_end"):
                raise Broken(method)

        run.rollouts["n1"].receiver.before = dead
        with pytest.raises(TransitionAbandoned):
            await run.refit()
        assert run.serving() == [0, None]
        assert run.rollouts["n0"].bits() == run.committed[0]
        assert run.rollouts["n1"].mark == "dirty"
        run.rollouts["n1"].receiver.before = lambda method: None
        report = await run.refit()
        assert (report.version, report.restored) == (1, 1)
        run.check_exact()
        assert run.serving() == [1, 1]


async def test_giving_up_on_a_first_refit_leaves_gates_closed() -> None:
    """C21: there is no version yet that could be served."""
    async with running() as run:
        run.rollouts["n1"].receiver.before = fail_always("load_end")
        with pytest.raises(TransitionAbandoned):
            await run.refit()
        assert run.coordinator.version == -1
        assert run.serving() == [None, None]
        assert [owner.version for owner in run.owners] == [-1, -1]
        run.rollouts["n1"].receiver.before = lambda method: None
        assert (await run.refit()).version == 0
        run.check_exact()
