"""Incomplete, damaged or contradictory sets of payloads: the attempt fails, and nothing was written."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from dcr_stream.codec import seal_manifest, words
from dcr_stream.errors import TransitionAbandoned
from dcr_stream.interfaces import PayloadSink
from dcr_stream.interfaces.transport import Capabilities
from dcr_stream.messages import Announcement, Attempt, Manifest, Payload, PayloadId
from dcr_stream.node import NodeRole, NodeSettings
from dcr_stream.owner import OwnerRole
from dcr_stream.peers import TransitionSettings
from dcr_stream.protocol import Stream
from dcr_stream.staging import StagingBudget
from dcr_stream.testing import Faults, FaultyTransport
from dcr_stream.transports import MemoryTransport
from tests.protocol.faults import RecordingTransport
from tests.protocol.harness import SETTINGS, Run, nudge, running, small_pipeline, some_tensors

pytestmark = pytest.mark.anyio

SECRET = b"a" * 32
QUICK = TransitionSettings(
    max_attempts=1,
    prepare_deadline_s=5,
    stage_deadline_s=1,
    apply_deadline_s=5,
    advance_deadline_s=5,
    rejoin_deadline_s=1,
)


async def refused(run: Run, match: str) -> None:
    """One transition that must fail before the first write, with version 0 serving all the time."""
    applied = [r.receiver.calls.count("apply") for r in run.rollouts.values()]
    with pytest.raises(TransitionAbandoned, match=match):
        await run.refit("async")
    assert run.coordinator.version == 0
    assert [owner.version for owner in run.owners] == [0, 0]
    assert [r.receiver.calls.count("apply") for r in run.rollouts.values()] == applied
    assert [r.mark for r in run.rollouts.values()] == ["clean", "clean"]
    assert run.serving() == [0, 0]
    run.check_exact(0)


async def recovered(run: Run) -> None:
    """The next transition contains everything."""
    assert (await run.refit("async")).version == 1
    run.check_exact()


def tamper(monkeypatch: pytest.MonkeyPatch, owner: OwnerRole, change: Callable[[Manifest], Manifest]) -> None:
    """Alter the manifests that an owner answers with."""
    original = owner._stream

    async def stream(order: Stream) -> Manifest:
        return change(await original(order))

    monkeypatch.setattr(owner, "_stream", stream)


def hear_twice(monkeypatch: pytest.MonkeyPatch, node: NodeRole, again: Callable[[Announcement], Announcement]) -> None:
    """Let a node hear every announcement a second time, changed by ``again``."""
    original = node._hear

    def hear(message: Announcement | Manifest) -> None:
        original(message)
        if isinstance(message, Announcement):
            original(again(message))

    monkeypatch.setattr(node, "_hear", hear)


class _Dropping(RecordingTransport):
    """Says that a payload was sent, and sends nothing, while ``drops`` is set."""

    drops = False

    @asynccontextmanager
    async def _sink(self, attempt: Attempt, owner: str) -> AsyncIterator[PayloadSink]:
        async with super()._sink(attempt, owner) as sink:
            yield _DroppingSink(self, sink)


@dataclass
class _DroppingSink(PayloadSink):
    transport: _Dropping
    sink: PayloadSink

    async def send(self, payload: Payload) -> None:
        if not (self.transport.drops and payload.id.sequence == 1):
            await self.sink.send(payload)


async def test_a_manifest_of_n_payloads_with_n_minus_one_delivered_does_not_advance() -> None:
    """C7: one payload never arrives; the manifest, not what lies there, says what is complete."""
    transport = _Dropping(MemoryTransport(wait_s=0.2))
    async with running(transport=transport, settings=QUICK) as run:
        await run.refit()
        nudge(run.live, 1)
        transport.drops = True
        await refused(run, "did not arrive")
        transport.drops = False
        await recovered(run)


@pytest.mark.parametrize(
    ("faults", "match"),
    [
        (Faults(seed=3, limit=1, truncate=1.0), "AttemptAborted"),
        (Faults(seed=3, limit=1, corrupt=1.0), "SealMismatch"),
        (Faults(seed=3, limit=1, abort=1.0), "AttemptAborted"),
    ],
    ids=["truncated", "altered", "ended early"],
)
async def test_a_damaged_payload_fails_the_attempt_before_any_gate_closes(faults: Faults, match: str) -> None:
    """C7: truncated, altered or ended early, one payload of many is enough."""
    transport = FaultyTransport(MemoryTransport(), Faults(seed=3))
    async with running(transport=transport, settings=QUICK) as run:
        await run.refit()
        nudge(run.live, 2)
        transport._faults = faults
        closed = [event for event in run.events if event[1] == "closed"]
        await refused(run, match)
        assert [event for event in run.events if event[1] == "closed"] == closed
        await recovered(run)


async def test_several_damaged_payloads_at_once_are_reported_by_a_typed_error() -> None:
    transport = FaultyTransport(MemoryTransport(), Faults(seed=3))
    async with running(transport=transport, settings=QUICK) as run:
        await run.refit()
        nudge(run.live, 2)
        transport._faults = Faults(seed=3, corrupt=1.0)
        await refused(run, "SealMismatch")
        transport._faults = Faults()
        await recovered(run)


async def test_random_transport_faults_are_retried_until_the_set_is_complete() -> None:
    """Duplicates, delays, disconnects and damage in one transition: the committed bits are exact all the same."""
    transport = FaultyTransport(MemoryTransport(wait_s=0.2), Faults())
    async with running(transport=transport, settings=dataclasses.replace(SETTINGS, max_attempts=8)) as run:
        await run.refit()
        for seed in range(3):
            nudge(run.live, seed)
            transport.injected.clear()
            transport._faults = Faults(seed=seed, duplicate=0.3, delay=0.5, corrupt=0.1, disconnect=0.05, limit=5)
            await run.refit()
            run.check_exact()


async def test_an_altered_manifest_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """C7: a manifest that lists one payload less was not sealed by its owner."""
    async with running(settings=QUICK, secret=SECRET) as run:
        await run.refit()
        nudge(run.live, 3)
        with monkeypatch.context() as patch:
            tamper(patch, run.owners[0], lambda manifest: replace(manifest, payloads=manifest.payloads[:-1]))
            await refused(run, "SealMismatch")
        await recovered(run)


async def test_a_manifest_that_repeats_a_payload_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """C7: sealed by its owner, but no set of payloads 0, 1, 2, ..."""
    async with running(settings=QUICK, secret=SECRET) as run:
        await run.refit()
        nudge(run.live, 3)
        with monkeypatch.context() as patch:
            tamper(
                patch,
                run.owners[0],
                lambda m: seal_manifest(replace(m, payloads=(*m.payloads, m.payloads[0]), seal=b""), SECRET),
            )
            await refused(run, "skips or repeats")
        await recovered(run)


async def test_a_payload_announced_twice_with_different_seals_fails_the_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(settings=QUICK) as run:
        await run.refit()
        nudge(run.live, 4)
        with monkeypatch.context() as patch:
            hear_twice(patch, run.rollouts["n0"].node, lambda heard: replace(heard, seal=b"x" * 32))
            await refused(run, "announced twice")
        await recovered(run)


async def test_a_payload_announced_twice_alike_is_staged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(settings=QUICK) as run:
        await run.refit()
        nudge(run.live, 4)
        hear_twice(monkeypatch, run.rollouts["n0"].node, lambda heard: heard)
        assert (await run.refit()).attempts == 1
        run.check_exact()


async def test_a_payload_sealed_with_another_secret_is_refused() -> None:
    async with running(settings=QUICK, secret=SECRET) as run:
        await run.refit()
        nudge(run.live, 5)
        run.owners[1]._secret = b"b" * 32
        await refused(run, "SealMismatch")
        run.owners[1]._secret = SECRET
        await recovered(run)


async def test_payloads_that_overtake_each_other_and_the_stage_order_are_applied_once() -> None:
    """Announcements that come before the order to stage wait for it; those of fenced attempts are dropped."""
    async with running(settings=QUICK) as run:
        await run.refit()
        node = run.rollouts["n0"].node
        record = run.coordinator.record
        assert record is not None
        for number in (0, record.attempt_floor + 7):
            attempt = Attempt("test", 1, number, record.epoch)
            announcement = Announcement(PayloadId(attempt, "o0", 0), 10, b"x" * 32)
            await node.handle(announcement)
        assert [m.id.attempt.number for m in node._early if isinstance(m, Announcement)] == [record.attempt_floor + 7]
        nudge(run.live, 6)
        assert (await run.refit()).attempts == 1
        run.check_exact()


async def test_staging_spills_beyond_its_memory_and_drops_everything_at_the_end(tmp_path: Path) -> None:
    """Many payloads are written at once to one file, each where it belongs: every seal is checked again when read."""
    budget = StagingBudget(memory_bytes=1000, spill_folder=tmp_path, fetches=8)
    settings = NodeSettings(budget=budget, call_deadline_s=10, reconnect_s=0.02)
    async with running(settings=QUICK, node_settings=settings, pipeline=small_pipeline(256)) as run:
        node = run.rollouts["n0"].node
        memory: list[int] = []
        for seed in range(4):
            nudge(run.live, seed, share=0.4)
            await run.offer()

            def note(method: str) -> None:
                staging = node._running.staging if node._running is not None else None
                if staging is not None:
                    memory.append(staging.memory_bytes)

            run.rollouts["n0"].receiver.before = note
            report = await run.commit()
            assert (report.attempts, report.payloads > 8) == (1, True)
            run.check_exact()
        assert memory
        assert 0 < max(memory) <= 1000
        assert node._running is None
        assert os.listdir(tmp_path) == []


async def test_a_node_out_of_memory_and_spill_fails_the_attempt_and_keeps_serving(tmp_path: Path) -> None:
    """Out of both is an error of its own, never credit withheld for ever."""
    budget = StagingBudget(memory_bytes=3000, spill_folder=tmp_path, spill_bytes=2_000)
    settings = NodeSettings(budget=budget, call_deadline_s=10, reconnect_s=0.02)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in some_tensors(1).items()}
    async with running(settings=QUICK, node_settings=settings, live=zeros, pipeline=small_pipeline(16 << 10)) as run:
        await run.refit()
        scramble(run.live)
        await refused(run, "StagingFull")
        for tensor in run.live.values():
            tensor.zero_()
        await recovered(run)


def scramble(tensors: dict[str, torch.Tensor]) -> None:
    """Change every element to something that does not compress."""
    generator = torch.Generator().manual_seed(7)
    for tensor in tensors.values():
        flat = words(tensor)
        noise = torch.randint(0, 255, (flat.nbytes,), generator=generator, dtype=torch.uint8).numpy()
        flat.view("u1")[:] = noise


async def test_a_payload_that_the_transport_does_not_take_is_refused_before_it_is_sent() -> None:
    async with running(transport=MemoryTransport(max_bytes=1 << 20)) as run:
        await run.refit()
        run.transport.capabilities = Capabilities(spans_processes=False, max_payload_bytes=100)  # type: ignore[misc]
        nudge(run.live, 1)
        await run.offer()
        with pytest.raises(TransitionAbandoned, match=r"PayloadRejected.*lower bucket"):
            await run.coordinator.refit("async")
        assert run.serving() == [0, 0]
