"""Gates: all closed before anything is written, none open before the joint commit, and never two versions."""

from __future__ import annotations

import dataclasses

import anyio
import pytest

from dcr_stream.errors import TransitionAbandoned, UsageError
from dcr_stream.interfaces.engine import DrainMode
from dcr_stream.messages import CommitRecord
from dcr_stream.peers import Mode
from dcr_stream.protocol import CloseGates
from dcr_stream.testing import MemoryCommitStore
from dcr_stream.transports import MemoryTransport
from tests.protocol.faults import RecordingTransport, fail_at
from tests.protocol.harness import SETTINGS, Run, Weights, make_engine, nudge, running

pytestmark = pytest.mark.anyio

WRITES = ("apply", "load_begin", "load_block", "load_end", "load_whole")


def watch(run: Run, store: MemoryCommitStore) -> None:
    """Put writes and commits among the gates' events."""
    for name, rollout in run.rollouts.items():

        def before(method: str, name: str = name) -> None:
            if method in WRITES:
                run.events.append((name, "write"))

        rollout.receiver.before = before

    def committed(expected: CommitRecord | None, new: CommitRecord) -> None:
        if expected is None or new.version > expected.version:
            run.events.append(("record", f"commit {new.version}"))

    store.after_change = committed


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("failing", [False, True], ids=["first attempt", "with a retry"])
async def test_all_gates_close_before_any_write_and_none_opens_before_the_commit(mode: Mode, failing: bool) -> None:
    store = MemoryCommitStore()
    async with running(store=store) as run:
        await run.refit(mode)
        watch(run, store)
        for version in (1, 2):
            run.events.clear()
            nudge(run.live, version)
            if failing:
                run.rollouts["n1"].receiver.after = fail_at("apply", 1)
            await run.refit(mode)
            kinds = [event for _, event in run.events]
            first_write, commit = kinds.index("write"), kinds.index(f"commit {version}")
            closed = {name for name, event in run.events[:first_write] if event == "closed"}
            assert closed == {"n0", "n1"}
            last_write = len(kinds) - 1 - kinds[::-1].index("write")
            assert last_write < commit
            opened = [(name, event) for name, event in run.events[commit:] if event.startswith("open")]
            assert sorted(opened) == [("n0", f"open {version}"), ("n1", f"open {version}")]
            assert not any(event == f"open {version}" for event in kinds[:commit])
            run.check_exact()


@pytest.mark.parametrize(("mode", "serving"), [("sync", [None, None]), ("async", [0, 0])])
async def test_asynchronous_rollout_serves_v_while_v_plus_one_is_staged(mode: Mode, serving: list[int | None]) -> None:
    """Synchronous rollout closes first: that is the whole difference."""
    transport = RecordingTransport(MemoryTransport())
    async with running(transport=transport) as run:
        await run.refit(mode)
        nudge(run.live, 1)
        seen: list[list[int | None]] = []
        transport.before_send = lambda payload: seen.append(run.serving())
        await run.refit(mode)
        assert seen
        assert all(now == serving for now in seen)


async def test_the_mode_may_change_between_transitions() -> None:
    async with running() as run:
        modes: tuple[Mode, ...] = ("sync", "async", "sync", "async")
        for seed, mode in enumerate(modes):
            report = await run.refit(mode)
            assert report.mode == mode
            run.check_exact()
            nudge(run.live, seed)


async def test_gates_start_closed_until_the_first_commit() -> None:
    """C21: a request that comes before the first refit waits; it is not answered by base weights."""
    async with running() as run:
        gate = run.rollouts["n0"].gate
        served: list[int] = []

        async def ask() -> None:
            async with gate.requests.admit(10) as ticket:
                served.append(ticket.version_start)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await run.offer()
            assert run.serving() == [None, None]
            assert served == []
            await run.commit()
        assert served == [0]


async def test_an_engine_that_does_not_close_fails_the_attempt_and_is_left_out_of_the_next() -> None:
    """Nothing was written into it: it goes on with v until the commit, and is asked again in the next transition."""
    async with running() as run:
        await run.refit()
        nudge(run.live, 1)

        async def broken_pause(mode: DrainMode) -> None:
            raise RuntimeError("the scheduler does not answer")

        run.rollouts["n1"].engine._pause = broken_pause
        report = await run.refit()
        assert (report.attempts, report.record.members) == (2, ("n0/engine",))
        assert "EngineHookFailed" in report.failures[0]
        assert run.serving() == [1, None], "no gate stays open at v while others serve v+1, whatever the hooks do"
        run.rollouts["n1"].engine._pause = None
        nudge(run.live, 2)
        report = await run.refit()
        assert report.record.members == ("n0/engine", "n1/engine")
        run.check_exact()
        assert run.serving() == [2, 2]


async def test_a_request_that_outlasts_the_drain_deadline_fails_the_attempt_if_so_configured() -> None:
    settings = dataclasses.replace(SETTINGS, drain_deadline_s=0.05, after_deadline="fail", max_attempts=1)
    async with running(settings=settings) as run:
        await run.refit()
        nudge(run.live, 1)
        async with run.rollouts["n1"].gate.requests.admit(1):
            with pytest.raises(TransitionAbandoned, match="DrainTimeout"):
                await run.refit()
            assert run.serving() == [0, 0]
            run.check_exact(0)
        await run.refit()
        run.check_exact()


async def test_an_engine_that_does_not_resume_stays_closed_and_the_commit_stands() -> None:
    """After the joint commit nothing is undone: the others serve v+1, and the next transition tries again."""
    async with running() as run:
        await run.refit()
        nudge(run.live, 1)

        async def broken_resume() -> None:
            raise RuntimeError("the scheduler does not answer")

        run.rollouts["n1"].engine._resume = broken_resume
        report = await run.refit()
        assert (report.version, report.attempts) == (1, 1)
        assert run.serving() == [1, None]
        assert [owner.version for owner in run.owners] == [1, 1]
        run.rollouts["n1"].engine._resume = None
        nudge(run.live, 2)
        await run.refit()
        run.check_exact()
        assert run.serving() == [2, 2]


async def test_one_engine_of_a_node_that_does_not_resume_does_not_hold_the_other() -> None:
    async with running(nodes=["n0"]) as run:
        model = Weights(run.live)
        receiver, engine, gate = make_engine("second", model, run.runtime, engine_name="second", events=run.events)
        run.rollouts["n0"].node.attach(engine, gate)

        async def broken_resume() -> None:
            raise RuntimeError("the scheduler does not answer")

        run.rollouts["n0"].engine._resume = broken_resume
        report = await run.refit()
        assert report.record.members == ("n0/engine", "n0/second")
        assert (run.rollouts["n0"].gate.serving, gate.serving) == (None, 0)
        assert receiver.status().version == 0


async def test_a_node_that_missed_a_commit_stops_serving_the_old_version_when_it_comes_back() -> None:
    """Without a coordinator it goes on serving v; as soon as it reads the record its gate closes."""
    async with running() as run:
        await run.refit()
        away = run.rollouts["n1"]
        run.kill(away.node)
        await run.ended["n1"].wait()
        nudge(run.live, 1)
        report = await run.refit()
        assert report.record.members == ("n0/engine",)
        assert run.serving() == [1, 0]
        run.start(away.node)
        await run.joined()
        assert away.gate.serving is None
        assert await run.coordinator.restore_joiners() == 1
        assert run.serving() == [1, 1]
        run.check_exact(1)


async def test_nothing_is_written_behind_an_open_gate_whatever_the_coordinator_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The node itself refuses: the gate was opened by hand in the middle of an attempt."""
    async with running(nodes=["n0"], settings=dataclasses.replace(SETTINGS, max_attempts=1)) as run:
        await run.refit()
        nudge(run.live, 1)
        gate = run.rollouts["n0"].gate
        calls = run.rollouts["n0"].receiver.calls

        async def does_not_close(order: CloseGates) -> None:
            """Says that it has closed."""

        calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr(gate, "close", does_not_close)
            with pytest.raises(UsageError, match="while a gate is open"):
                await run.refit()
        assert not set(calls) & set(WRITES)
        run.check_exact(0)
        await run.refit()
        run.check_exact()
