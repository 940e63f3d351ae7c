"""Dead, stuck and returning roles: nobody waits for ever, and who comes back is restored before it serves."""

from __future__ import annotations

import dataclasses

import anyio
import pytest

from dcr_stream import TorchSource
from dcr_stream.errors import EngineHookFailed, PeerLost, TransitionAbandoned, TransitionFailed, TransportUnavailable
from dcr_stream.messages import Payload
from dcr_stream.node import NodeSettings
from dcr_stream.peers import Mode
from dcr_stream.protocol import Stage, Staged
from dcr_stream.transports import MemoryTransport
from tests.protocol.faults import Broken, RecordingTransport, fail_at
from tests.protocol.harness import (
    SETTINGS,
    Weights,
    make_engine,
    make_owner,
    nudge,
    nudge_one,
    running,
    until,
)

pytestmark = pytest.mark.anyio

IMPATIENT = dataclasses.replace(
    SETTINGS, prepare_deadline_s=1.0, apply_deadline_s=0.5, gate_deadline_s=1.0, rejoin_deadline_s=0.5
)
SHORT_CALLS = NodeSettings(call_deadline_s=0.2, reconnect_s=0.02)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("method", ["begin", "apply", "finish", "status"])
async def test_one_dead_receiver_does_not_hold_the_others(mode: Mode, method: str) -> None:
    """D1: its calls never return; the attempt fails within the deadline and the next one goes without it."""
    async with running(node_settings=SHORT_CALLS, settings=IMPATIENT) as run:
        await run.refit(mode)
        nudge(run.live, 1)

        async def dead(called: str) -> None:
            if called == method:
                await anyio.sleep_forever()

        dying = run.rollouts["n1"]
        dying.engine.before_call = dead
        report = await run.refit(mode)
        assert (report.version, report.record.members) == (1, ("n0/engine",))
        assert run.rollouts["n0"].bits() == run.committed[1]
        assert run.serving() == [1, None]

        model = Weights(run.live)
        dying.model = model
        dying.receiver, dying.engine, dying.gate = make_engine("n1", model, run.runtime, events=run.events)
        dying.node.attach(dying.engine, dying.gate)
        await dying.node.announce()
        assert dying.gate.serving is None
        assert await run.coordinator.restore_joiners() == 1
        run.check_exact(1)
        nudge(run.live, 2)
        report = await run.refit(mode)
        assert report.record.members == ("n0/engine", "n1/engine")
        run.check_exact()
        assert run.serving() == [2, 2]


async def test_a_receiver_that_is_gone_fails_the_attempt_at_once() -> None:
    """D1: its process is gone and says so."""
    async with running(settings=IMPATIENT) as run:
        await run.refit()
        nudge(run.live, 1)

        async def gone(called: str) -> None:
            raise PeerLost("the engine's process has ended; start it again")

        run.rollouts["n1"].engine.before_call = gone
        report = await run.refit()
        assert report.record.members == ("n0/engine",)
        assert run.rollouts["n0"].bits() == run.committed[1]


async def test_a_stuck_node_is_cut_off_and_comes_back_once_it_is_quiet() -> None:
    """D1: not even its node answers, because a call in its own process never returns."""
    settings = NodeSettings(call_deadline_s=30, reconnect_s=0.02)
    async with running(node_settings=settings, settings=IMPATIENT) as run:
        await run.refit()
        nudge(run.live, 1)
        go_on = anyio.Event()

        async def stuck(called: str) -> None:
            if called == "finish":
                await go_on.wait()

        run.rollouts["n1"].engine.before_call = stuck
        report = await run.refit()
        assert report.record.members == ("n0/engine",)
        assert run.rollouts["n0"].gate.serving == 1
        assert "n1" not in run.coordinator._nodes
        go_on.set()
        await run.joined()
        nudge(run.live, 2)
        report = await run.refit()
        assert (report.version, report.restored) == (2, 1)
        run.check_exact()
        assert run.serving() == [2, 2]


@pytest.mark.parametrize("method", ["begin", "apply", "load_begin"])
async def test_a_receiver_that_raises_before_its_first_ack_fails_the_attempt(method: str) -> None:
    """D4: the sender hears of it; it does not wait for an ACK that cannot come."""
    async with running() as run:
        if method != "load_begin":
            await run.refit()
        nudge(run.live, 1)
        run.rollouts["n0"].receiver.before = fail_at(method)
        report = await run.refit("sync")
        assert report.attempts == 2
        assert "Broken" in report.failures[0]
        run.check_exact()


async def test_an_error_on_the_control_plane_ends_the_data_plane(monkeypatch: pytest.MonkeyPatch) -> None:
    """D3: a node refuses to stage; the owners stop sending instead of waiting for readers that will not come."""
    transport = MemoryTransport(max_bytes=2000, wait_s=30)
    settings = dataclasses.replace(SETTINGS, max_attempts=1)

    async def refuse(order: Stage) -> Staged:
        raise EngineHookFailed("the engine is ill; look at its log")

    async with running(transport=transport, settings=settings) as run:
        for rollout in run.rollouts.values():
            monkeypatch.setattr(rollout.node, "_stage", refuse)
        with pytest.raises(TransitionAbandoned, match="EngineHookFailed"):
            await run.refit()
        assert all(not owner._sending for owner in run.owners)
        assert transport.nbytes == 0


async def test_an_error_on_the_data_plane_ends_the_control_plane() -> None:
    """D3: an owner cannot send; nodes stop staging instead of waiting for its manifest."""
    transport = RecordingTransport(MemoryTransport())
    async with running(transport=transport) as run:
        await run.refit()
        nudge(run.live, 1)
        sent = 0

        def refuse(payload: Payload) -> None:
            nonlocal sent
            sent += 1
            if sent == 3:
                raise TransportUnavailable("the link is down; try later")

        transport.before_send = refuse
        report = await run.refit()
        assert report.attempts == 2
        assert "TransportUnavailable" in report.failures[0]
        run.check_exact()


async def test_an_owner_that_dies_while_it_sends_abandons_and_the_next_is_dense() -> None:
    """Its trackers and pending set are lost with it; the others keep theirs, and nothing is served half."""
    transport = RecordingTransport(MemoryTransport())
    async with running(transport=transport, settings=IMPATIENT) as run:
        await run.refit()
        nudge(run.live, 1)
        await run.offer()
        dead = run.owners[0]

        def die(payload: Payload) -> None:
            if payload.id.owner == "o0":
                transport.before_send = lambda payload: None
                run.kill(dead)

        transport.before_send = die
        with pytest.raises(TransitionAbandoned, match="o0"):
            await run.commit()
        assert run.coordinator.version == 0
        assert run.serving() == [0, 0]
        run.check_exact(0)
        run.owners[0] = make_owner("o0", TorchSource(run.live, rank=0, replicas=2), run.runtime, run.transport)
        run.start(run.owners[0])
        await run.joined()
        report = await run.refit()
        assert (report.version, report.kind) == (1, "dense")
        run.check_exact()
        nudge(run.live, 2)
        assert (await run.refit()).kind == "delta"
        run.check_exact()


async def test_an_owner_that_loses_only_its_link_goes_on_with_its_candidate() -> None:
    transport = RecordingTransport(MemoryTransport())
    async with running(transport=transport) as run:
        await run.refit()
        nudge(run.live, 1)
        await run.offer()
        nudge(run.live, 2)
        connection = run.owners[0]._connection
        assert connection is not None
        async with anyio.create_task_group() as tasks:

            def cut(payload: Payload) -> None:
                if payload.id.owner == "o0":
                    transport.before_send = lambda payload: None
                    tasks.start_soon(connection.link.aclose)

            transport.before_send = cut
            report = await run.commit()
            assert (report.version, report.kind) == (1, "delta")
        run.check_exact()


async def test_a_joiner_is_restored_densely_and_serves_nothing_before() -> None:
    """It joins after v3; its gate opens between transitions, at the committed version."""
    async with running(nodes=["n0"]) as run:
        for seed in range(4):
            await run.refit()
            nudge(run.live, seed)
        joiner = run.join("n1")
        await run.joined()
        assert joiner.gate.serving is None
        assert await run.coordinator.restore_joiners() == 1
        assert "load_begin" in joiner.receiver.calls
        assert joiner.receiver.calls.count("apply") == 0
        run.check_exact(3)
        assert run.serving() == [3, 3]
        report = await run.refit()
        assert report.record.members == ("n0/engine", "n1/engine")
        run.check_exact()


async def test_a_joiner_that_cannot_be_restored_does_not_stop_the_others() -> None:
    async with running(nodes=["n0"]) as run:
        await run.refit()
        bad, good = run.join("n1"), run.join("n2")
        bad.receiver.before = broken_loads
        await run.joined()
        assert await run.coordinator.restore_joiners() == 1
        assert (good.gate.serving, bad.gate.serving) == (0, None)
        assert good.bits() == run.committed[0]
        nudge(run.live, 1)
        report = await run.refit()
        assert report.record.members == ("n0/engine", "n2/engine")
        assert run.serving() == [1, None, 1]
        bad.receiver.before = lambda method: None
        nudge(run.live, 2)
        assert (await run.refit()).restored == 1
        run.check_exact()
        assert run.serving() == [2, 2, 2]


def broken_loads(method: str) -> None:
    """A native loader that fails at the end of every load."""
    if method == "load_end":
        raise Broken(method)


async def test_a_half_loaded_receiver_is_no_base_for_an_overwrite() -> None:
    """Its dense load was interrupted: some tensors are new, some old, and no version plus changes describes them."""
    async with running(nodes=["n0"]) as run:
        await run.refit()
        joiner = run.join("n1")
        joiner.receiver.before = broken_loads
        await run.joined()
        assert await run.coordinator.restore_joiners() == 0
        assert joiner.mark == "dirty"
        joiner.receiver.calls.clear()
        joiner.receiver.before = lambda method: None
        nudge_one(run.live["a"])
        report = await run.refit()
        assert (report.version, report.restored) == (1, 1)
        assert joiner.receiver.calls.index("load_end") < joiner.receiver.calls.index("apply")
        run.check_exact()


async def test_a_receiver_that_loses_its_base_is_restored_in_the_next_refit() -> None:
    """E6: the engine slept and dropped its weights, and says so."""
    async with running() as run:
        await run.refit()
        run.rollouts["n0"].receiver.receiver.lose_base()
        nudge(run.live, 1)
        report = await run.refit()
        assert (report.version, report.restored, report.attempts) == (1, 1, 1)
        run.check_exact()


async def test_a_base_lost_after_the_ack_is_not_adopted() -> None:
    """The engine slept between its ACK and the joint commit; nothing it holds is version 1."""
    async with running() as run:
        await run.refit()
        nudge(run.live, 1)
        receiver = run.rollouts["n0"].receiver

        def sleep(method: str) -> None:
            if method == "adopt":
                receiver.receiver.lose_base()

        receiver.before = sleep
        report = await run.refit()
        assert report.version == 1
        assert run.serving() == [None, 1]
        assert run.rollouts["n0"].mark == "empty"
        receiver.before = lambda method: None
        nudge(run.live, 2)
        assert (await run.refit()).restored == 1
        run.check_exact()
        assert run.serving() == [2, 2]


async def test_an_attempt_without_enough_receivers_does_not_commit() -> None:
    settings = dataclasses.replace(IMPATIENT, min_receivers=2)
    async with running(settings=settings, node_settings=SHORT_CALLS) as run:
        await run.refit()
        nudge(run.live, 1)

        async def gone(called: str) -> None:
            raise PeerLost("the engine's process has ended; start it again")

        run.rollouts["n1"].engine.before_call = gone
        with pytest.raises(TransitionFailed, match="at least 2"):
            await run.refit()
        assert run.coordinator.version == 0
        assert run.rollouts["n0"].gate.serving == 0
        run.rollouts["n1"].engine.before_call = None
        await run.refit()
        run.check_exact()


async def test_serving_goes_on_through_refits_joiners_and_failures() -> None:
    """``serve`` restores who joins, reports what fails, and takes the next offer."""
    async with running(nodes=["n0"], settings=IMPATIENT) as run:
        reports: list[int] = []
        async with anyio.create_task_group() as tasks:

            async def serve() -> None:
                await run.coordinator.serve("async", on_refit=lambda report: reports.append(report.version))

            tasks.start_soon(serve)
            await run.offer()
            await run.joined()
            bad, good = run.join("n1"), run.join("n2")
            bad.receiver.before = broken_loads
            await until(lambda: good.gate.serving == 0)
            run.rollouts["n0"].receiver.before = fail_at("apply")
            nudge(run.live, 1)
            await run.offer()
            await run.joined()
            bad.receiver.before = lambda method: None
            nudge(run.live, 2)
            await run.offer()
            await run.joined()
            await until(lambda: run.serving() == [2, 2, 2])
            tasks.cancel_scope.cancel()
        assert reports == [0, 1, 2]
        run.committed[2] = run.captured
        run.check_exact(2)
