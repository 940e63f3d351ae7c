"""Bits that are wrong although every write succeeded: read-back finds them, and no overwrite may hide them."""

from __future__ import annotations

import pytest
import torch

from dcr_stream import StateDictLoader
from dcr_stream.codec import words
from dcr_stream.errors import TransitionAbandoned
from dcr_stream.interfaces import Loader
from dcr_stream.peers import Mode
from dcr_stream.transports import MemoryTransport
from tests.protocol.faults import RecordingTransport
from tests.protocol.harness import Run, nudge, nudge_one, running

pytestmark = pytest.mark.anyio


def corrupt(run: Run, name: str, tensor: str = "a", at: int = 5) -> None:
    """Change one stored element of an engine behind everybody's back."""
    words(run.rollouts[name].model.get_buffer(tensor))[at] ^= 64


def loads(run: Run) -> dict[str, int]:
    """How many dense loads each engine has had."""
    return {name: r.receiver.calls.count("load_begin") for name, r in run.rollouts.items()}


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_wrong_base_under_a_change_is_quarantined_and_restored_and_never_overwritten(mode: Mode) -> None:
    """Overwriting would repair this element and leave every other stray write: only the wrong engine is restored."""
    transport = RecordingTransport(MemoryTransport())
    async with running(transport=transport) as run:
        await run.refit(mode)
        corrupt(run, "n0")
        corrupt(run, "n0", "b", 9)  # a stray write that no delta touches
        nudge_one(run.live["a"], 5)
        marks: list[str] = []
        run.rollouts["n0"].receiver.after = lambda method: marks.append(run.rollouts["n0"].mark)
        report = await run.refit(mode)
        assert (report.version, report.attempts, report.restored) == (1, 2, 1)
        assert "DigestMismatch" in report.failures[0]
        assert "quarantined" in marks
        assert marks[marks.index("quarantined") :].count("dirty") > 0  # by the dense restore, not by an apply
        assert loads(run) == {"n0": 2, "n1": 1}
        run.check_exact()
        assert run.serving() == [1, 1]


async def test_a_quarantined_receiver_takes_no_further_write_of_its_attempt() -> None:
    """One payload of the attempt was read back wrong: what comes after it may not turn the mark into a mere dirty."""
    async with running(nodes=["n0"]) as run:
        await run.refit()
        corrupt(run, "n0")
        nudge(run.live, 1, share=0.5)
        nudge_one(run.live["a"], 5)
        receiver = run.rollouts["n0"].receiver
        seen: list[tuple[str, str]] = []
        receiver.after = lambda method: seen.append((method, receiver.status().mark))
        await run.refit("sync")
        at = next(i for i, (_, mark) in enumerate(seen) if mark == "quarantined")
        after = seen[at:]
        restored = next(i for i, (method, _) in enumerate(after) if method == "load_begin")
        assert {mark for _, mark in after[:restored]} == {"quarantined"}
        run.check_exact()


async def test_a_mismatch_on_every_engine_accuses_the_owner_and_the_next_refit_is_dense() -> None:
    """The engines agree with each other; it is the owner's tracker that is not what was committed."""
    async with running() as run:
        await run.refit()
        owner = next(o for o in run.owners if o._trackers is not None and "a" in o._trackers.tasks)
        assert owner._trackers is not None
        owner._trackers.tasks["a"][5] ^= 64
        nudge_one(run.live["a"], 5)
        with pytest.raises(TransitionAbandoned, match="an owner is wrong"):
            await run.refit()
        assert run.coordinator.version == 0
        assert run.serving() == [None, None]
        assert [owner.baseline_bytes for owner in run.owners] == [0, 0]
        report = await run.refit()
        assert (report.version, report.kind) == (1, "dense")
        run.check_exact()
        assert run.serving() == [1, 1]
        nudge(run.live, 2)
        assert (await run.refit()).kind == "delta"
        run.check_exact()


async def test_a_single_engine_is_restored_once_before_its_owner_is_accused() -> None:
    async with running(nodes=["n0"]) as run:
        await run.refit()
        corrupt(run, "n0")
        nudge_one(run.live["a"], 5)
        report = await run.refit()
        assert (report.restored, report.kind) == (1, "delta")
        run.check_exact()
        owner = next(o for o in run.owners if o._trackers is not None and "a" in o._trackers.tasks)
        assert owner._trackers is not None
        owner._trackers.tasks["a"][6] ^= 64
        nudge_one(run.live["a"], 6)
        with pytest.raises(TransitionAbandoned):
            await run.refit()
        assert (await run.refit()).kind == "dense"
        run.check_exact()


async def test_a_wrong_element_outside_of_the_changed_set_is_found_by_the_next_dense_load() -> None:
    """Deltas read back what they write, and nothing else: this is what a delta cannot see, and what repairs it."""
    async with running() as run:
        await run.refit()
        corrupt(run, "n0", "b", 3)
        nudge_one(run.live["a"], 0)
        assert (await run.refit()).restored == 0
        with pytest.raises(AssertionError, match=r"n0: \['b'\]"):
            run.check_exact()
        run.rollouts["n0"].receiver.receiver.lose_base()
        nudge_one(run.live["a"], 1)
        assert (await run.refit()).restored == 1
        run.check_exact()


async def test_an_engine_whose_dense_load_never_reads_back_right_does_not_hold_the_others() -> None:
    """Full sums after a dense load find a loader that writes something else; everybody else goes on."""

    def loader(model: torch.nn.Module) -> Loader:
        def spoil() -> None:
            if getattr(model, "bad", False):
                words(model.get_buffer("b"))[3] ^= 1

        return StateDictLoader(model, refresh=spoil)

    async with running(loader=loader) as run:
        run.rollouts["n1"].model.bad = True  # type: ignore[assignment]
        report = await run.refit()
        assert (report.version, report.record.members) == (0, ("n0/engine",))
        assert run.rollouts["n1"].mark == "quarantined"
        assert run.serving() == [0, None]
        nudge(run.live, 1)
        report = await run.refit()
        assert (report.version, report.record.members) == (1, ("n0/engine",))
        assert run.serving() == [1, None]
        run.rollouts["n1"].model.bad = False  # type: ignore[assignment]
        nudge(run.live, 2)
        report = await run.refit()
        assert report.record.members == ("n0/engine", "n1/engine")
        run.check_exact()
        assert run.serving() == [2, 2]


async def test_storage_that_moved_since_it_was_traced_is_traced_again_and_restored() -> None:
    """A tensor was replaced behind the plan: nothing is written through the old plan, and the refit goes on."""
    async with running() as run:
        await run.refit()
        model = run.rollouts["n0"].model
        model.register_buffer("a", model.get_buffer("a").clone())
        nudge(run.live, 1)
        report = await run.refit()
        assert (report.version, report.restored) == (1, 1)
        assert "LayoutChanged" in report.failures[0]
        run.check_exact()
        assert run.serving() == [1, 1]


async def test_a_joiner_is_not_blamed_for_what_its_owner_lost() -> None:
    """The owner's trackers were altered in memory: what it sends is not what it committed, and it is found out
    before the joiner or anybody else has been touched."""
    async with running() as run:
        await run.refit()
        owner = next(o for o in run.owners if o._trackers is not None and "a" in o._trackers.tasks)
        assert owner._trackers is not None
        owner._trackers.tasks["a"][5] ^= 64
        joiner = run.join("n2")
        await run.joined()
        with pytest.raises(TransitionAbandoned, match="do not add up"):
            await run.coordinator.restore_joiners()
        assert joiner.mark == "empty"
        assert run.serving() == [0, 0, None]
        assert (await run.refit()).kind == "dense"
        run.check_exact()
        assert run.serving() == [1, 1, 1]
