"""Capture: it happens once, completely and within its bounds, or it changes nothing."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dcr_stream import TorchSource
from dcr_stream.capture import CaptureSettings
from dcr_stream.delta import Entry, Record
from dcr_stream.errors import (
    CaptureError,
    DirectoryMismatch,
    PendingSetFull,
    RecordsAltered,
    TransitionAbandoned,
    UsageError,
)
from dcr_stream.flow import fold
from dcr_stream.pending import _arrays
from dcr_stream.stages import bucket, chunk, compare, compress, convert, encode, project
from tests.protocol.harness import Run, make_owner, nudge, nudge_one, running, until

pytestmark = pytest.mark.anyio


class Bad:
    """A stage that loses, repeats or alters what passes through it, while ``on``."""

    def __init__(self, kind: str) -> None:
        self.kind, self.on = kind, False

    def push(self, item: Record) -> Iterator[Record]:
        if not self.on:
            yield item
        elif self.kind == "duplicate":
            yield from (item, item)
        elif self.kind == "alter":
            yield dataclasses.replace(item, differences=item.differences + 1)

    def flush(self) -> Iterator[Record]:
        return iter(())


@pytest.mark.parametrize("kind", ["drop", "duplicate", "alter"])
async def test_a_stage_that_drops_repeats_or_alters_records_is_refused(kind: str) -> None:
    """Counts and sums taken where changes are found must be those of the pending set."""
    bad = Bad(kind)
    stages = (
        chunk(max_bytes=2048)
        | compare()
        | project()
        | convert()
        | fold(lambda: bad, name="mine")
        | encode()
        | bucket(max_bytes=2048)
        | compress()
    )
    async with running(pipeline=stages) as run:
        await run.refit()
        nudge(run.live, 1)
        bad.on = True
        for owner in run.owners:
            with pytest.raises(RecordsAltered):
                await owner.capture()
        await untouched(run)
        bad.on = False
        await run.refit()
        run.check_exact()


async def untouched(run: Run) -> None:
    """Version 0 is served, and owners hold no candidate."""
    assert [owner.version for owner in run.owners] == [0, 0]
    assert run.coordinator.version == 0
    assert run.serving() == [0, 0]
    for owner in run.owners:
        assert await owner.wait_settled(1)
        assert owner._candidate is None


class BadEntries:
    """A stage after encode that loses or repeats entries, while ``on``."""

    def __init__(self, kind: str) -> None:
        self.kind, self.on = kind, False

    def push(self, item: Entry) -> Iterator[Entry]:
        if not self.on:
            yield item
        elif self.kind == "duplicate":
            yield from (item, item)

    def flush(self) -> Iterator[Entry]:
        return iter(())


@pytest.mark.parametrize("kind", ["drop", "duplicate"])
async def test_a_stage_that_drops_or_repeats_entries_while_sending_is_refused(kind: str) -> None:
    """After encode no receiver could notice: what is missing from every payload is missing everywhere."""
    bad = BadEntries(kind)
    stages = (
        chunk(max_bytes=2048)
        | compare()
        | project()
        | convert()
        | encode()
        | fold(lambda: bad, name="mine")
        | bucket(max_bytes=2048)
        | compress()
    )
    async with running(pipeline=stages) as run:
        await run.refit()
        nudge(run.live, 1)
        bad.on = True
        with pytest.raises(TransitionAbandoned, match="drops or repeats entries"):
            await run.refit()
        assert run.coordinator.version == 0
        bad.on = False
        await run.refit()
        run.check_exact()


async def test_a_pending_set_larger_than_its_memory_spills_and_stays_within_it(tmp_path: Path) -> None:
    settings = CaptureSettings(pending_bytes=600, spill_folder=tmp_path)
    async with running(capture=settings) as run:
        await run.refit()
        for seed in range(3):
            nudge(run.live, seed, share=0.4)
            await run.offer()
            for owner in run.owners:
                assert owner._candidate is not None
                pending = owner._candidate.pending
                assert pending.memory_bytes <= 600
                held = [_arrays(each.record) for each in pending._held]
                assert sum(array.nbytes for arrays in held for array in arrays) == pending.memory_bytes
                assert all(array.base is None for arrays in held for array in arrays)
            assert sum(o._candidate.pending.spilled_bytes for o in run.owners if o._candidate is not None) > 0
            assert os.listdir(tmp_path) == []  # unlinked as soon as it is open
            await run.commit()
            run.check_exact()


async def test_a_full_disk_during_capture_raises_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = CaptureSettings(pending_bytes=600, spill_folder=tmp_path)
    async with running(capture=settings) as run:
        await run.refit()
        nudge(run.live, 1, share=0.4)

        def full(descriptor: int, data: bytes, offset: int) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr("dcr_stream.spill.os.pwrite", full)
            with pytest.raises(PendingSetFull, match="No space left"):
                await run.owners[0].capture()
        await untouched(run)
        await run.refit()
        run.check_exact()


async def test_a_pending_set_without_spill_folder_is_bounded() -> None:
    async with running(capture=CaptureSettings(pending_bytes=100)) as run:
        await run.refit()
        nudge(run.live, 1, share=0.5)
        with pytest.raises(PendingSetFull, match="spill_folder"):
            await run.owners[0].capture()
        assert (run.owners[0].version, run.owners[0]._candidate) == (0, None)


async def test_a_spill_file_that_cannot_be_read_at_the_end_costs_the_baseline_and_not_its_truth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half an advance is no version: the owner forgets it, and the next refit is dense."""
    async with running(capture=CaptureSettings(pending_bytes=600, spill_folder=tmp_path)) as run:
        await run.refit()
        nudge(run.live, 1, share=0.4)
        pread = os.pread
        armed = False

        def failing(descriptor: int, size: int, offset: int) -> bytes:
            if armed:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return pread(descriptor, size, offset)

        def arm(method: str) -> None:
            nonlocal armed
            armed = armed or method == "finish"

        monkeypatch.setattr("dcr_stream.spill.os.pread", failing)
        run.rollouts["n0"].receiver.before = arm
        report = await run.refit()
        assert report.version == 1
        assert -1 in [owner.version for owner in run.owners]
        armed = False
        run.rollouts["n0"].receiver.before = lambda method: None
        run.check_exact()
        nudge(run.live, 2)
        report = await run.refit()
        assert (report.version, report.kind) == (2, "dense")
        run.check_exact()


async def test_a_capture_before_the_last_transition_ended_is_refused() -> None:
    async with running() as run:
        await run.offer()
        with pytest.raises(UsageError, match="has not ended"):
            await run.owners[0].capture()
        await run.commit()
        run.check_exact()


@pytest.mark.parametrize("change", ["dtype", "shape", "name"])
async def test_an_owner_that_comes_back_with_another_directory_is_refused_and_nothing_changes(change: str) -> None:
    """B13: dtype, shape or name drift within a run."""
    async with running() as run:
        await run.refit()
        other = dict(run.live)
        if change == "dtype":
            other["bias"] = other["bias"].double()
        elif change == "shape":
            other["bias"] = other["bias"].reshape(2, -1)
        else:
            other["bias_2"] = other.pop("bias")
        before = list(run.owners)
        for i, owner in enumerate(before):
            run.kill(owner)
            run.owners[i] = make_owner(f"o{i}", TorchSource(other, rank=i, replicas=2), run.runtime, run.transport)
            run.start(run.owners[i])
        with pytest.raises(DirectoryMismatch):
            await run.refit()
        assert run.coordinator.version == 0
        assert run.serving() == [0, 0]
        run.check_exact(0)


async def test_owners_that_disagree_about_the_directory_are_refused() -> None:
    live = {"a": torch.ones(4), "b": torch.ones(3)}
    sources = [TorchSource(live, rank=0, replicas=2), TorchSource({"a": torch.ones(4)}, rank=1, replicas=2)]
    async with running(sources=sources, live=live) as run:
        with pytest.raises(DirectoryMismatch, match="disagree"):
            await run.refit()
        assert run.coordinator.version == -1


async def test_a_live_tensor_whose_dtype_changed_is_refused_by_capture() -> None:
    live = {"a": torch.ones(8), "b": torch.ones(8)}
    async with running(live=live, sources=[TorchSource(live)], nodes=["n0"]) as run:
        await run.refit()
        owner = run.owners[0]
        live["a"].data = torch.ones(8, dtype=torch.float64)
        with pytest.raises(CaptureError, match="'a'"):
            await owner.capture()
        assert owner.version == 0


async def test_an_offer_waits_until_every_rank_has_captured() -> None:
    """A capture that is dropped again, because another rank failed, was never on offer; not even after a new Hello."""
    async with running(offer_deadline_s=0.3) as run:
        await run.refit()
        nudge_one(run.live["a"])
        nudge_one(run.live["b"])
        for owner in run.owners:
            await owner.capture()
        connection = run.owners[0]._connection
        assert connection is not None
        await connection.link.aclose()
        await until(lambda: run.owners[0]._connection not in (None, connection))
        assert all(peer.offer is None for peer in run.coordinator._owners.values())
        for owner in run.owners:
            owner.drop()
        assert (await run.refit()).elements == 2
