"""An engine goes out of service in one exact order, and comes back if anything fails before the first write."""

from __future__ import annotations

from typing import Literal

import anyio
import pytest

from dcr_stream.errors import DrainTimeout, EngineHookFailed, UsageError
from dcr_stream.gate import (
    AsyncGate,
    EngineGate,
    GateMode,
    RequestGate,
    SyncGate,
    close_engine,
    mode_named,
    open_engine,
)
from dcr_stream.messages import Attempt
from dcr_stream.protocol import CloseGates
from tests.gate.engines import RecordingEngine

pytestmark = pytest.mark.anyio

IDLE = "[closed, 0 running]"
BUSY = "[closed, 1 running]"
QUICK = 0.05


@pytest.fixture
def gate() -> RequestGate:
    """Open at version 4."""
    gate = RequestGate()
    gate.open(4)
    return gate


async def run_for(gate: RequestGate, end: anyio.Event) -> None:
    async with gate.admit(1):
        await end.wait()


@pytest.mark.parametrize("mode", [SyncGate(), AsyncGate()], ids=["sync", "async"])
async def test_the_gate_closes_and_drains_before_pause_before_caches(gate: RequestGate, mode: GateMode) -> None:
    """E1: close, drain, pause, invalidate, (apply), resume, open, in this order."""
    engine = RecordingEngine(gate)
    end = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(run_for, gate, end)
        await anyio.wait_all_tasks_blocked()
        group.start_soon(lambda: close_engine(engine, gate, mode, hook_deadline_s=5))
        await anyio.wait_all_tasks_blocked()
        assert engine.log == []
        end.set()
    assert engine.log == [f"pause(wait) {IDLE}", f"invalidate_caches {IDLE}"]
    assert not gate.is_open
    await open_engine(engine, gate, 5, hook_deadline_s=5)
    assert engine.log[2:] == [f"resume {IDLE}"]
    assert (gate.is_open, gate.version) == (True, 5)


@pytest.mark.parametrize("how", ["fail", "hang"])
@pytest.mark.parametrize("hook", ["pause", "invalidate_caches"])
async def test_a_failing_hook_aborts_before_the_first_write_and_v_keeps_serving(
    gate: RequestGate, hook: str, how: str
) -> None:
    """E1: a hook that raises or hangs puts engine and gate back into service at v."""
    engine = RecordingEngine(gate, **{how: frozenset({hook})})
    with anyio.fail_after(10), pytest.raises(EngineHookFailed, match=f"engine0: {hook} (failed|took longer)"):
        await close_engine(engine, gate, AsyncGate(), hook_deadline_s=QUICK)
    assert engine.log[-1] == f"resume {IDLE}"
    assert (gate.is_open, gate.version) == (True, 4)
    async with gate.admit(1) as ticket:
        assert ticket.version_start == 4


async def test_an_engine_that_does_not_resume_stays_closed_and_the_error_says_so(gate: RequestGate) -> None:
    engine = RecordingEngine(gate, fail=frozenset({"pause", "resume"}))
    with pytest.raises(EngineHookFailed, match="pause failed: RuntimeError: the engine's own error") as raised:
        await close_engine(engine, gate, AsyncGate(), hook_deadline_s=QUICK)
    assert "resume failed" in raised.value.__notes__[0]
    assert "stays closed" in raised.value.__notes__[0]
    assert not gate.is_open


async def test_a_gate_that_was_closed_is_not_opened_by_a_failure() -> None:
    gate = RequestGate()
    engine = RecordingEngine(gate, fail=frozenset({"invalidate_caches"}))
    with pytest.raises(EngineHookFailed):
        await close_engine(engine, gate, SyncGate(), hook_deadline_s=QUICK)
    assert not gate.is_open


async def test_a_resume_that_fails_leaves_the_gate_closed(gate: RequestGate) -> None:
    engine = RecordingEngine(gate, fail=frozenset({"resume"}))
    await close_engine(engine, gate, AsyncGate(), hook_deadline_s=QUICK)
    with pytest.raises(EngineHookFailed, match="resume failed"):
        await open_engine(engine, gate, 5, hook_deadline_s=QUICK)
    assert not gate.is_open


async def test_a_cancelled_close_puts_the_engine_back_into_service(gate: RequestGate) -> None:
    engine = RecordingEngine(gate, hang=frozenset({"invalidate_caches"}))
    with anyio.move_on_after(QUICK):
        await close_engine(engine, gate, AsyncGate(), hook_deadline_s=30)
    assert engine.log[-1] == f"resume {IDLE}"
    assert (gate.is_open, gate.version) == (True, 4)


async def test_a_long_request_is_kept_across_the_swap_and_its_ticket_says_so(gate: RequestGate) -> None:
    """E5: after the drain deadline the request runs on; it starts at v and ends at v+1."""
    engine = RecordingEngine(gate)
    end = anyio.Event()
    async with anyio.create_task_group() as group:

        async def long_request() -> None:
            async with gate.admit(1) as ticket:
                await end.wait()
            assert ticket.versions == (4, 5)

        group.start_soon(long_request)
        await anyio.wait_all_tasks_blocked()
        await close_engine(engine, gate, AsyncGate(drain_deadline_s=QUICK), hook_deadline_s=5)
        assert engine.log == [f"pause(keep) {BUSY}", f"invalidate_caches {BUSY}"]
        await open_engine(engine, gate, 5, hook_deadline_s=5)
        end.set()


async def test_drain_keep_waits_for_nothing(gate: RequestGate) -> None:
    engine = RecordingEngine(gate)
    end = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(run_for, gate, end)
        await anyio.wait_all_tasks_blocked()
        with anyio.fail_after(10):
            await close_engine(engine, gate, AsyncGate(drain="keep", drain_deadline_s=1000), hook_deadline_s=5)
        assert engine.log == [f"pause(keep) {BUSY}", f"invalidate_caches {BUSY}"]
        end.set()


@pytest.mark.parametrize(
    "mode",
    [AsyncGate(drain="abort"), AsyncGate(drain_deadline_s=QUICK, after_deadline="abort")],
    ids=["at_once", "after_deadline"],
)
async def test_aborted_requests_have_ended_before_caches_are_dropped(gate: RequestGate, mode: GateMode) -> None:
    engine = RecordingEngine(gate)
    end = anyio.Event()
    engine.on_pause = lambda _: end.set()
    async with anyio.create_task_group() as group:
        group.start_soon(run_for, gate, end)
        await anyio.wait_all_tasks_blocked()
        await close_engine(engine, gate, mode, hook_deadline_s=5)
    assert engine.log == [f"pause(abort) {BUSY}", f"invalidate_caches {IDLE}"]


async def test_requests_that_survive_an_abort_fail_the_attempt_and_v_keeps_serving(gate: RequestGate) -> None:
    engine = RecordingEngine(gate)
    end = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(run_for, gate, end)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(DrainTimeout, match="1 requests at version 4"):
            await close_engine(engine, gate, AsyncGate(drain="abort"), hook_deadline_s=QUICK)
        assert engine.log == [f"pause(abort) {BUSY}", f"resume {BUSY}"]
        assert (gate.is_open, gate.version) == (True, 4)
        end.set()


async def test_after_the_deadline_fail_leaves_v_serving_and_the_engine_untouched(gate: RequestGate) -> None:
    engine = RecordingEngine(gate)
    end = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(run_for, gate, end)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(DrainTimeout):
            await close_engine(
                engine, gate, AsyncGate(drain_deadline_s=QUICK, after_deadline="fail"), hook_deadline_s=5
            )
        assert engine.log == []
        assert (gate.is_open, gate.version) == (True, 4)
        end.set()


async def test_modes_differ_only_in_when_they_close() -> None:
    assert (mode_named("sync"), mode_named("async")) == (SyncGate(), AsyncGate())
    assert (SyncGate.closes, AsyncGate.closes) == ("start", "staged")
    fields = ("drain_deadline_s", "drain", "after_deadline")
    assert [getattr(SyncGate(), field) for field in fields] == [getattr(AsyncGate(), field) for field in fields]
    with pytest.raises(UsageError, match="use 'sync' or 'async'"):
        mode_named("eventual")


def order(**options: object) -> CloseGates:
    settings: dict[str, object] = {
        "mode": "async",
        "drain_deadline_s": QUICK,
        "drain": "wait",
        "after_deadline": "fail",
    }
    return CloseGates(Attempt("run", 5, 1, 1), ("engine0",), **{**settings, **options})  # type: ignore[arg-type]


async def test_an_engine_gate_closes_and_opens_once(gate: RequestGate) -> None:
    engine = RecordingEngine(gate)
    both = EngineGate(engine, gate)
    served = [both.serving]
    await both.close(order())
    await both.close(order())
    served.append(both.serving)
    assert engine.log == [f"pause(wait) {IDLE}", f"invalidate_caches {IDLE}"]
    await both.open(5)
    await both.open(5)
    served.append(both.serving)
    assert served == [4, None, 5]
    assert engine.log[2:] == [f"resume {IDLE}"]
    await both.close(order(mode="sync"))
    assert len(engine.log) == 5


async def test_an_engine_gate_that_never_served_closes_its_engine_too() -> None:
    """A first refit writes weights as well: the engine is paused although its gate is still closed."""
    requests = RequestGate()
    engine = RecordingEngine(requests)
    both = EngineGate(engine, requests)
    assert both.serving is None
    await both.close(order())
    assert engine.log == [f"pause(wait) {IDLE}", f"invalidate_caches {IDLE}"]


async def test_an_engine_gate_obeys_the_orders_drain_settings(gate: RequestGate) -> None:
    engine = RecordingEngine(gate)
    both = EngineGate(engine, gate, hook_deadline_s=QUICK)
    end = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(run_for, gate, end)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(DrainTimeout):
            await both.close(order())
        assert both.serving == 4
        await both.close(order(after_deadline="keep"))
        assert engine.log == [f"pause(keep) {BUSY}", f"invalidate_caches {BUSY}"]
        end.set()


async def test_an_engine_gate_whose_close_failed_can_close_again(gate: RequestGate) -> None:
    engine = RecordingEngine(gate, fail=frozenset({"invalidate_caches"}))
    both = EngineGate(engine, gate, hook_deadline_s=QUICK)
    with pytest.raises(EngineHookFailed):
        await both.close(order())
    assert both.serving == 4
    engine.fail = frozenset()
    await both.close(order())
    assert both.serving is None


@pytest.mark.parametrize("drain", ["wait", "keep"])
async def test_an_engine_that_cannot_pause_is_never_written_to_while_requests_run(
    gate: RequestGate, drain: Literal["wait", "keep"]
) -> None:
    """E3: ``keep`` without a pause that stops forward passes would let them read half-written weights."""
    engine = RecordingEngine(gate)
    engine.keeps_requests = False
    end = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(run_for, gate, end)
        await anyio.wait_all_tasks_blocked()
        mode = AsyncGate(drain=drain, drain_deadline_s=QUICK, after_deadline="keep")
        with pytest.raises(DrainTimeout):
            await close_engine(engine, gate, mode, hook_deadline_s=5)
        assert (gate.is_open, gate.version) == (True, 4)
        assert not any("pause" in line for line in engine.log)
        end.set()
