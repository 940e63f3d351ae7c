"""Coordinators that race, die or lose an answer: one record decides, and everybody follows it exactly once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio
import pytest

from dcr_stream.coordinator import CoordinatorRole
from dcr_stream.errors import (
    CommitConflict,
    CommitDeadlineExceeded,
    CommitError,
    CommitRecordUnreadable,
    StaleEpoch,
    TransitionFailed,
    UsageError,
)
from dcr_stream.interfaces import Link, PayloadSource
from dcr_stream.messages import Announcement, Attempt, CommitRecord
from dcr_stream.participants import Participants
from dcr_stream.protocol import Fence, OpenGates
from dcr_stream.testing import MemoryCommitStore
from dcr_stream.transports import MemoryTransport
from tests.protocol.faults import RecordingTransport
from tests.protocol.harness import Run, Weights, bits, make_owner, make_rollout, nudge, nudge_one, running, until

pytestmark = pytest.mark.anyio


class Holding(RecordingTransport):
    """Lets no fetch begin while ``held`` is set, and says when one waits."""

    def __init__(self) -> None:
        super().__init__(MemoryTransport())
        self.held: anyio.Event | None = None
        self.waiting = anyio.Event()

    def open_source(self, attempt: Attempt, node: str) -> AbstractAsyncContextManager[PayloadSource]:
        return self._source(attempt, node)

    @asynccontextmanager
    async def _source(self, attempt: Attempt, node: str) -> AsyncIterator[PayloadSource]:
        async with self.inner.open_source(attempt, node) as source:
            yield _HoldingSource(self, source)


class _HoldingSource(PayloadSource):
    def __init__(self, transport: Holding, inner: PayloadSource) -> None:
        self._transport, self._inner = transport, inner

    async def fetch(self, announcement: Announcement) -> bytes:
        if self._transport.held is not None:
            self._transport.waiting.set()
            await self._transport.held.wait()
        return await self._inner.fetch(announcement)


def hold(run: Run, name: str, method: str) -> tuple[anyio.Event, anyio.Event]:
    """Stop one engine before ``method``: the first event says that it stands there, the second lets it go on."""
    reached, go_on = anyio.Event(), anyio.Event()

    async def before(called: str) -> None:
        if called == method:
            reached.set()
            await go_on.wait()

    run.rollouts[name].engine.before_call = before
    return reached, go_on


async def raised_by(act: Callable[[], Awaitable[object]], into: list[BaseException]) -> None:
    """Keep what ``act`` raises."""
    try:
        await act()
    except Exception as error:
        into.append(error)


async def test_a_replaced_coordinator_cannot_commit_and_its_successor_retries() -> None:
    """The first has every ACK when the second takes over: its compare-and-set fails and nothing of it takes effect."""
    async with running() as run:
        await run.refit()
        nudge(run.live, 1)
        await run.offer()
        first, errors = run.coordinator, list[BaseException]()
        reached, go_on = hold(run, "n0", "finish")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(raised_by, first.refit, errors)
            await reached.wait()
            async with run.successor(move=False) as second:
                go_on.set()
                await until(lambda: bool(errors))
                assert isinstance(errors[0], StaleEpoch)
                record = run.store.read("test")
                assert record is not None
                assert (record.version, record.epoch) == (0, 2)
                assert [owner.version for owner in run.owners] == [0, 0]
                assert run.serving() == [None, None]
                run.move()
                report = await run.commit()
                assert (report.version, report.record.epoch) == (1, 2)
                run.check_exact()
                assert run.serving() == [1, 1]
                nudge(run.live, 2)
                assert (await run.refit()).version == second.version == 2
                run.check_exact()


async def test_roles_refuse_every_frame_of_a_coordinator_that_was_replaced() -> None:
    async with running() as run:
        await run.refit()
        async with run.successor():
            nudge(run.live, 1)
            await run.refit()
            stale = Fence(1, 99, abandon=True, forget=True)
            for role in (run.owners[0], run.rollouts["n0"].node):
                with pytest.raises(StaleEpoch):
                    await role.handle(stale)
            with pytest.raises(StaleEpoch):
                await run.rollouts["n0"].node.handle(OpenGates(0, 1))
            assert run.owners[0].version == 1
            assert run.serving() == [1, 1]


@pytest.mark.parametrize("written", [True, False], ids=["after writing", "before writing"])
async def test_a_lost_answer_to_the_commit_is_resolved_by_reading_the_record(written: bool) -> None:
    """The store does not answer in time: the record itself says whether the transition is committed."""
    store = MemoryCommitStore()

    def lose(expected: CommitRecord | None, new: CommitRecord) -> None:
        if new.version == 1:
            store.before_change = store.after_change = None
            raise CommitDeadlineExceeded("no answer within 1 s; read the record back")

    async with running(store=store) as run:
        await run.refit()
        nudge(run.live, 1)
        if written:
            store.after_change = lose
        else:
            store.before_change = lose
        report = await run.refit()
        assert (report.version, report.attempts) == (1, 1 if written else 2)
        assert [record.version for record in store.history].count(1) == 1
        run.check_exact()


async def test_a_store_that_fails_to_read_once_is_read_again() -> None:
    """A lost answer and a failing read after it are no reason to forget one's own commit."""
    store = MemoryCommitStore()

    def busy(name: str) -> None:
        store.before_read = None
        raise CommitError("the database is locked; try again")

    def lose(expected: CommitRecord | None, new: CommitRecord) -> None:
        if new.version == 1:
            store.after_change, store.before_read = None, busy
            raise CommitDeadlineExceeded("no answer within 1 s; read the record back")

    async with running(store=store) as run:
        await run.refit()
        nudge(run.live, 1)
        store.after_change = lose
        assert (await run.refit()).attempts == 1
        run.check_exact()


async def test_a_store_that_fails_after_the_commit_does_not_undo_it() -> None:
    """The commit stands; gates stay closed because another coordinator may be in charge by now."""
    store = MemoryCommitStore()

    def broken(name: str) -> None:
        raise CommitError("the disk is gone; repair it")

    async with running(store=store) as run:
        await run.refit()
        nudge(run.live, 1)
        store.after_change = lambda expected, new: setattr(store, "before_read", broken)
        report = await run.refit()
        assert (report.version, report.attempts) == (1, 1)
        assert [owner.version for owner in run.owners] == [1, 1]
        assert run.serving() == [None, None]
        store.after_change = store.before_read = None
        nudge(run.live, 2)
        await run.refit()
        run.check_exact()
        assert run.serving() == [2, 2]


async def test_a_late_commit_of_a_fenced_attempt_changes_nothing() -> None:
    """It was on its way when the coordinator gave up waiting; the fence in the record defeats it."""
    store = MemoryCommitStore()
    late: list[tuple[CommitRecord | None, CommitRecord]] = []

    def delay(expected: CommitRecord | None, new: CommitRecord) -> None:
        if new.version == 1 and not late:
            late.append((expected, new))
            raise CommitDeadlineExceeded("no answer within 1 s; read the record back")

    async with running(store=store) as run:
        await run.refit()
        nudge(run.live, 1)
        store.before_change = delay
        await run.offer()
        failed, fenced = late, list[CommitConflict]()

        def arrive(expected: CommitRecord | None, new: CommitRecord) -> None:
            if new.version == 0 and failed and not fenced:
                store.after_change = None
                with pytest.raises(CommitConflict) as caught:
                    store.compare_and_set(*failed[0])
                fenced.append(caught.value)

        store.after_change = arrive
        report = await run.commit()
        assert len(fenced) == 1
        assert (report.version, report.attempts, report.record.attempt) == (1, 2, failed[0][1].attempt + 1)
        with pytest.raises(CommitConflict):
            store.compare_and_set(*failed[0])
        run.check_exact()


async def test_a_coordinator_that_dies_while_payloads_are_staged_is_replaced() -> None:
    """The record is at v: the successor retries with the candidates that the owners still hold."""
    transport = Holding()
    async with running(transport=transport) as run:
        await run.refit()
        nudge(run.live, 1)
        await run.offer()
        transport.held = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run.coordinator.refit)
            await transport.waiting.wait()
            tasks.cancel_scope.cancel()
        nudge(run.live, 2)
        async with run.successor():
            transport.held.set()
            transport.held = None
            report = await run.commit()
            assert (report.version, report.kind) == (1, "delta")
            run.check_exact()
            await run.refit()
            run.check_exact()


@pytest.mark.parametrize("method", ["begin", "apply", "finish"])
async def test_a_coordinator_that_dies_while_receivers_apply_is_replaced(method: str) -> None:
    """What its attempt left half-written is not this coordinator's to overwrite: it is restored, then v+1 follows."""
    async with running() as run:
        await run.refit()
        nudge(run.live, 1)
        await run.offer()
        reached, go_on = hold(run, "n1", method)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run.coordinator.refit)
            await reached.wait()
            tasks.cancel_scope.cancel()
        async with run.successor():
            go_on.set()
            report = await run.commit()
            assert report.version == 1
            run.check_exact()
            assert run.serving() == [1, 1]


async def commit_and_tell_nobody(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commit the offers; the call is cancelled before any role hears of it."""
    committed = anyio.Event()

    async def die(self: Participants, record: CommitRecord) -> None:
        committed.set()
        await anyio.sleep_forever()

    with monkeypatch.context() as patch:
        patch.setattr(Participants, "adopt", die)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run.coordinator.refit)
            await committed.wait()
            tasks.cancel_scope.cancel()


async def test_a_takeover_after_the_commit_finishes_it_exactly_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record is at v+1, nobody has advanced: all do when they read it, and nothing is sent again."""
    transport = RecordingTransport(MemoryTransport())
    async with running(transport=transport) as run:
        await run.refit()
        nudge(run.live, 1)
        await run.offer()
        await commit_and_tell_nobody(run, monkeypatch)
        assert [owner.version for owner in run.owners] == [0, 0]
        run.committed[1] = run.captured
        sent = len(transport.sent)
        async with run.successor() as second:
            await run.joined()
            assert [owner.version for owner in run.owners] == [1, 1]
            assert run.serving() == [None, None]
            assert await second.restore_joiners() == 0
            assert len(transport.sent) == sent
            assert run.serving() == [1, 1]
            run.check_exact(1)
            # Trackers that had advanced twice, or not at all, would find changes now.
            assert (await run.refit()).elements == 0
            nudge(run.live, 3)
            await run.refit()
            run.check_exact()


async def test_a_receiver_that_missed_the_commit_is_restored_by_the_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ACKed, but its engine was restarted before anybody could tell it."""
    async with running() as run:
        await run.refit()
        nudge(run.live, 1)
        await run.offer()
        await commit_and_tell_nobody(run, monkeypatch)
        run.committed[1] = run.captured
        run.rollouts["n0"].receiver.receiver.lose_base()
        async with run.successor() as second:
            await run.joined()
            assert await second.restore_joiners() == 1
            run.check_exact(1)
            assert run.serving() == [1, 1]


async def test_a_cancelled_refit_can_be_called_again() -> None:
    """Cancelled in flight by whoever drives the coordinator; the next call fences what was left running."""
    transport = Holding()
    async with running(transport=transport) as run:
        await run.refit()
        nudge(run.live, 1)
        await run.offer()
        transport.held = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run.coordinator.refit)
            await transport.waiting.wait()
            tasks.cancel_scope.cancel()
        transport.held = None
        assert (await run.commit()).version == 1
        run.check_exact()
        assert run.serving() == [1, 1]


async def test_a_refit_cancelled_after_its_commit_is_finished_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """C13: the commit stands; with the next call owners advance, receivers adopt and gates open."""
    async with running() as run:
        await run.refit()
        nudge(run.live, 1)
        await run.offer()
        await commit_and_tell_nobody(run, monkeypatch)
        assert [owner.version for owner in run.owners] == [0, 0]
        assert run.serving() == [None, None]
        assert await run.coordinator.restore_joiners() == 0, "any next call finishes what was committed"
        assert [owner.version for owner in run.owners] == [1, 1]
        assert run.serving() == [1, 1]
        assert all(rollout.bits() == bits(run.live) for rollout in run.rollouts.values())
        nudge(run.live, 2)
        assert (await run.refit()).version == 2
        run.check_exact()


async def test_an_offer_that_comes_after_a_commit_nobody_was_told_of_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An owner whose link was lost settles by the record that welcomes it back, and offers its next candidate."""
    async with running() as run:
        await run.refit()
        nudge(run.live, 1)
        await run.offer()
        await commit_and_tell_nobody(run, monkeypatch)
        early, late = run.owners
        await run.coordinator._owners[early.name].cut_off()
        await until(lambda: early.version == 1)
        nudge(run.live, 2)
        await early.capture()
        await early.offer()
        await until(lambda: early.name in run.coordinator._owners)
        await until(lambda: run.coordinator._owners[early.name].offer is not None)
        assert await run.coordinator.restore_joiners() == 0
        assert late.version == 1
        await late.capture()
        await late.offer()
        assert (await run.coordinator.refit()).version == 2
        assert all(rollout.bits() == bits(run.live) for rollout in run.rollouts.values())


async def test_an_unreadable_record_is_no_reason_to_start_over() -> None:
    store = MemoryCommitStore()
    async with running(store=store) as run:
        await run.refit()

        def unreadable(name: str) -> None:
            raise CommitRecordUnreadable("the record of run test fails its checksum; restore it from a backup")

        store.before_read = unreadable
        with pytest.raises(CommitRecordUnreadable):
            async with run.successor():
                pytest.fail("it took over")
        store.before_read = None
        nudge(run.live, 1)
        assert (await run.refit()).version == 1


async def test_an_absent_record_is_an_error_while_any_role_reports_a_version() -> None:
    async with running() as run:
        await run.refit()
        empty = CoordinatorRole("test", MemoryCommitStore(), transport="memory://test", runtime=run.runtime)
        async with empty.listening("memory://empty"):
            for role in (run.owners[0], run.rollouts["n0"].node):
                run.kill(role)
                with pytest.raises(CommitRecordUnreadable, match="does not start over"):
                    await role.serve("memory://empty")
                run.start(role)
        nudge(run.live, 1)
        await run.refit()
        run.check_exact()


async def test_a_role_of_another_run_is_refused() -> None:
    async with running() as run:
        rollout = make_rollout("stranger", run.rollouts["n0"].model, run.runtime, run.transport)
        rollout.node.run = "other"
        with pytest.raises(UsageError, match="belongs to run 'other'"):
            await rollout.node.serve(run.address)
        await run.refit()
        assert "stranger" not in str(run.coordinator.record)


async def test_the_next_offer_may_come_before_the_last_commit_is_confirmed() -> None:
    """An owner trains on as soon as it has advanced, while it still frees the last payloads."""

    class SlowDiscard(RecordingTransport):
        async def discard(self, attempt: Attempt) -> None:
            await anyio.sleep(0.2)
            await super().discard(attempt)

    async with running(transport=SlowDiscard(MemoryTransport()), offer_deadline_s=2) as run:
        await run.refit()
        nudge(run.live, 1)
        await run.offer()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run.coordinator.refit)
            await until(lambda: run.coordinator.version == 1)
            nudge(run.live, 2)
            await run.offer()
        assert (await run.commit()).version == 2
        run.check_exact()


async def test_owners_do_not_wait_for_ever_for_one_that_never_offers() -> None:
    """After the deadline those that captured drop it; the next refit of all ranks contains everything."""
    async with running(offer_deadline_s=0.2) as run:
        await run.refit()
        nudge_one(run.live["a"])
        nudge_one(run.live["b"])
        await run.owners[0].capture()
        await run.owners[0].offer()
        with pytest.raises(TransitionFailed, match="owner o1"):
            await run.coordinator.refit()
        assert await run.owners[0].wait_settled(5)
        report = await run.refit()
        assert (report.version, report.elements) == (1, 2)
        run.check_exact()


async def test_an_owner_that_started_first_sees_the_coordinator_come() -> None:
    """Whoever waits for a coordinator is not left behind by the dials that failed before."""
    async with running() as run:
        run.kill(run.owners[0])
        other = make_owner("o0", run.owners[0]._source, run.runtime, run.transport)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(other.serve, "memory://late")
            settled: list[bool] = []

            async def wait() -> None:
                settled.append(await other.wait_settled(5))

            tasks.start_soon(wait)
            await anyio.sleep(0.1)
            late = CoordinatorRole("test", MemoryCommitStore(), transport="memory://test", runtime=run.runtime)
            async with late.listening("memory://late"):
                await until(lambda: bool(settled))
                assert settled == [True]
                tasks.cancel_scope.cancel()


@pytest.mark.parametrize("which", ["owner", "node"])
async def test_a_role_whose_hello_is_cut_off_dials_again(which: str) -> None:
    """The link is lost while Hello waits for its answer, again and again."""
    async with running() as run:
        dials = 0

        async def cut(link: Link) -> None:
            nonlocal dials
            dials += 1
            await link.receive()
            await link.aclose()

        role = run.owners[0] if which == "owner" else run.rollouts["n0"].node
        run.kill(role)
        async with run.network.listen("memory://cut", cut), anyio.create_task_group() as tasks:
            tasks.start_soon(role.serve, "memory://cut")
            await until(lambda: dials >= 3)
            tasks.cancel_scope.cancel()
        run.start(role)
        await run.refit()
        run.check_exact()


async def test_a_node_that_comes_back_on_a_new_link_replaces_its_old_one() -> None:
    """Its old link was not seen to be dead; what arrives there does not count any more."""
    async with running() as run:
        await run.refit()
        old = run.coordinator._nodes["n0"]
        again = make_rollout("n0", Weights(run.live), run.runtime, run.transport)
        run.kill(run.rollouts["n0"].node)
        run.rollouts["n0"] = again
        run.start(again.node)
        nudge(run.live, 1)
        await run.offer()
        await until(lambda: run.coordinator._nodes.get("n0", old) is not old)
        assert old.gone
        assert (await run.commit()).version == 1
        run.check_exact()
