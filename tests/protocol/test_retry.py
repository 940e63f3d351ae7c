"""A retry overwrites: what an interrupted attempt left behind does not matter, and nothing is applied twice."""

from __future__ import annotations

import threading

import pytest

from dcr_stream.codec import Decoded
from dcr_stream.codec.positions import decode_positions, encode_positions
from dcr_stream.delta import Item
from dcr_stream.errors import TransitionAbandoned, TransportUnavailable
from dcr_stream.loaders import apply_item
from dcr_stream.messages import Payload
from dcr_stream.peers import Mode
from dcr_stream.testing import MemoryCommitStore
from dcr_stream.trace import PlacementPlan, StorageMap
from dcr_stream.transports import MemoryTransport
from tests.protocol.faults import Broken, RecordingTransport, fail_always, fail_at
from tests.protocol.harness import bits, nudge, nudge_one, running

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("nth", [0, 1, 3])
async def test_a_receiver_that_fails_between_payloads_is_overwritten_without_a_restart(mode: Mode, nth: int) -> None:
    """C1, C6: only one receiver failed; both end exact, the version advances once, and nothing relative is resent."""
    transport = RecordingTransport(MemoryTransport())
    async with running(transport=transport) as run:
        await run.refit(mode)
        first = run.coordinator.record
        assert first is not None
        nudge(run.live, 1)
        marks: list[str] = []
        broken, other = run.rollouts["n1"].receiver, run.rollouts["n0"].receiver
        other_wrote = threading.Event()
        fail = fail_at("apply", nth)

        def before(method: str) -> None:
            # Were nothing written anywhere, everybody would still be clean and the retry might send differences.
            assert method != "apply" or other_wrote.wait(10)
            fail(method)

        other.after = lambda method: other_wrote.set() if method == "apply" else None
        broken.before = before
        broken.after = lambda method: marks.append(broken.status().mark)
        report = await run.refit(mode)
        assert (report.version, report.attempts, report.kind, report.restored) == (1, 2, "delta", 0)
        assert "Broken" in report.failures[0]
        assert "dirty" in marks
        failed, retried = transport.attempts()[-2:]
        assert "add" in transport.modes(failed)
        assert transport.modes(retried) == {"overwrite"}
        run.check_exact()
        assert run.serving() == [1, 1]


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_failure_before_the_first_write_needs_no_overwrite(mode: Mode) -> None:
    """Every receiver is still clean at v, so the retry may send differences."""
    transport = RecordingTransport(MemoryTransport())
    async with running(transport=transport, nodes=("n0",)) as run:
        await run.refit(mode)
        nudge(run.live, 1)
        run.rollouts["n0"].receiver.before = fail_at("apply", 0)
        report = await run.refit(mode)
        assert (report.version, report.attempts) == (1, 2)
        assert "add" in transport.modes(transport.attempts()[-1])
        run.check_exact()


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_receiver_that_fails_between_items_of_a_payload_is_overwritten(
    mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C4: tensor i was changed, tensor i+1 was not; applying the difference again would change tensor i twice."""
    calls = 0

    def interrupted(plan: PlacementPlan, storage: StorageMap, item: Item, decoded: Decoded) -> dict[int, list[int]]:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise MemoryError("in the middle of a payload")
        return apply_item(plan, storage, item, decoded)

    transport = RecordingTransport(MemoryTransport())
    async with running(transport=transport) as run:
        await run.refit(mode)
        nudge(run.live, 2, share=0.5)
        monkeypatch.setattr("dcr_stream.receiver.apply_item", interrupted)
        report = await run.refit(mode)
        assert (report.version, report.attempts, report.restored) == (1, 2, 0)
        assert transport.modes(transport.attempts()[-1]) == {"overwrite"}
        run.check_exact()


async def test_half_an_item_written_and_then_lost_is_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """C4 within one tensor: some of its elements are new, some old, and the applier does not know which."""
    calls = 0

    def half(plan: PlacementPlan, storage: StorageMap, item: Item, decoded: Decoded) -> dict[int, list[int]]:
        nonlocal calls
        calls += 1
        if calls == 1:
            keep = decoded.positions.count // 2
            first = encode_positions(decode_positions(decoded.positions)[:keep], decoded.positions.elements)
            apply_item(plan, storage, item, Decoded(first, decoded.values[:keep]))
            raise MemoryError("in the middle of a tensor")
        return apply_item(plan, storage, item, decoded)

    async with running() as run:
        await run.refit()
        nudge(run.live, 3, share=0.5)
        monkeypatch.setattr("dcr_stream.receiver.apply_item", half)
        assert (await run.refit()).attempts == 2
        run.check_exact()


async def test_live_weights_that_move_on_after_capture_do_not_reach_a_retry() -> None:
    """The committed bits are those at capture, in every attempt; the next delta has the rest."""
    async with running() as run:
        await run.refit()
        nudge(run.live, 4)
        await run.offer()
        attempts = 0

        def move_on(method: str) -> None:
            nonlocal attempts
            if method == "begin":
                attempts += 1
                nudge(run.live, 100 + attempts)
                if attempts < 3:
                    raise Broken("once more")

        run.rollouts["n0"].receiver.before = move_on
        nudge(run.live, 99)
        report = await run.commit()
        assert report.attempts == 3
        assert run.captured != bits(run.live)
        run.check_exact()
        run.rollouts["n0"].receiver.before = lambda method: None
        report = await run.refit()
        assert (report.version, report.kind) == (2, "delta")
        run.check_exact()
        assert run.captured == bits(run.live)


async def test_a_failed_apply_leaves_version_baseline_and_the_next_delta_as_they_were() -> None:
    """C2, C13: every attempt fails in the receiver; nothing advances, and what was lost is in the next delta."""
    async with running() as run:
        await run.refit()
        before = run.store.read("test")
        assert before is not None
        nudge_one(run.live["a"])
        run.rollouts["n0"].receiver.before = fail_always("apply")
        with pytest.raises(TransitionAbandoned):
            await run.refit()
        record = run.store.read("test")
        assert record is not None
        assert (record.version, record.manifests, record.state) == (0, before.manifests, before.state)
        assert [owner.version for owner in run.owners] == [0, 0]
        run.rollouts["n0"].receiver.before = lambda method: None
        nudge_one(run.live["b"])
        report = await run.refit()
        assert (report.version, report.elements) == (1, 2)
        run.check_exact()


async def test_a_transport_that_fails_after_encode_moves_no_baseline() -> None:
    """C3: the bytes were encoded and never sent; the next delta still contains them."""
    transport = RecordingTransport(MemoryTransport())
    async with running(transport=transport) as run:
        await run.refit()
        nudge_one(run.live["a"])

        def refuse(payload: Payload) -> None:
            raise TransportUnavailable("the bucket is gone; try later")

        transport.before_send = refuse
        with pytest.raises(TransitionAbandoned, match="TransportUnavailable"):
            await run.refit()
        assert run.coordinator.version == 0
        assert run.serving() == [0, 0]
        run.check_exact(0)
        transport.before_send = lambda payload: None
        report = await run.refit()
        assert (report.version, report.elements) == (1, 1)
        run.check_exact()


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_an_empty_delta_still_commits(mode: Mode) -> None:
    """C13: the version counts joint commits, also of nothing."""
    async with running() as run:
        await run.refit(mode)
        report = await run.refit(mode)
        assert (report.version, report.elements, report.payloads) == (1, 0, 0)
        assert run.serving() == [1, 1]
        nudge(run.live, 5)
        await run.refit(mode)
        run.check_exact()


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_the_record_is_written_only_after_every_receiver_was_read_back(mode: Mode) -> None:
    """C11: at the moment of the joint commit every engine holds the new bits behind a closed gate."""
    store = MemoryCommitStore()
    async with running(store=store) as run:
        await run.refit(mode)
        nudge(run.live, 6)
        await run.offer()
        seen: list[tuple[int, bool, list[int | None]]] = []
        store.after_change = lambda expected, new: seen.append(
            (new.version, all(r.bits() == run.captured for r in run.rollouts.values()), run.serving())
        )
        await run.commit(mode)
        assert (1, True, [None, None]) in seen
        assert [exact for version, exact, _ in seen if version == 1] == [True]
