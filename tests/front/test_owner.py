"""The front door as training code uses it: real sockets, real threads, plain calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
import torch

from dcr_stream import Coordinator, Node, Owner, Receiver, SqliteCommitStore, StateDictLoader, TorchSource
from dcr_stream.coordinator import CoordinatorSettings
from dcr_stream.delta import CodedBucket, Record, Shard
from dcr_stream.errors import (
    AuthenticationFailed,
    CaptureError,
    CommitRecordUnreadable,
    ControlError,
    RecordsAltered,
    TransitionFailed,
    UsageError,
)
from dcr_stream.flow import Pipeline, each, expand
from dcr_stream.gate import EngineGate, LocalEngine
from dcr_stream.interfaces import Transport
from dcr_stream.runtime import ThreadWorkers
from dcr_stream.stages import bucket, chunk, compare, compress, convert, encode, project

pytestmark = pytest.mark.anyio

SECRET = b"0123456789abcdef0123456789abcdef"


def gate_over(model: torch.nn.Module) -> EngineGate:
    """An engine of one rank over ``model``."""
    return EngineGate(LocalEngine("engine", [Receiver(StateDictLoader(model))], workers=ThreadWorkers()))


def same_bits(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    """Whether every tensor of both has the same bits."""
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in pairs)


def shift(parameter: torch.Tensor, by: float) -> torch.Tensor:
    """Change a parameter in place; returns the old bits."""
    old = parameter.detach().clone()
    with torch.no_grad():
        parameter.copy_(old + by)
    return old


def put_back(parameter: torch.Tensor, old: torch.Tensor) -> None:
    """Give a parameter its old bits."""
    with torch.no_grad():
        parameter.copy_(old)


class World:
    """A coordinator and one node on real sockets; the owner side is up to the test."""

    def __init__(self, folder: Path) -> None:
        self.trained, self.served = torch.nn.Linear(40, 30).bfloat16(), torch.nn.Linear(40, 30).bfloat16()
        self.gate = gate_over(self.served)
        self.store = SqliteCommitStore(folder / "commits.db", secret=SECRET)
        self.payloads = folder / "payloads"
        self.payloads.mkdir()

    def listen(self, owners: int = 1):  # type: ignore[no-untyped-def]
        return Coordinator.listen(
            "dcr://127.0.0.1:0",
            owners=owners,
            nodes=1,
            transport=f"file://{self.payloads}",
            commits=self.store,
            secret=SECRET,
            settings=CoordinatorSettings(join_deadline_s=20, offer_deadline_s=20),
        )


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A fresh world."""
    return World(tmp_path)


async def test_a_refit_over_sockets_is_exact_and_training_goes_on_after_capture(world: World) -> None:
    async with world.listen() as coordinator, Node.connect(coordinator.address, [world.gate], name="n", secret=SECRET):
        with Owner.connect(coordinator.address, TorchSource(world.trained), secret=SECRET) as owner:
            for step in range(3):
                with torch.no_grad():
                    world.trained.weight[step] += 0.5
                captured = torch.nn.Linear(40, 30).bfloat16()
                captured.load_state_dict(world.trained.state_dict())
                await anyio.to_thread.run_sync(owner.refit)
                with torch.no_grad():
                    world.trained.bias[step] = float("nan")  # the trainer does not wait
                report = await coordinator.refit()
                assert report.version == step
                assert same_bits(captured, world.served)
            outcome = await anyio.to_thread.run_sync(owner.wait)
            assert outcome is not None
            assert (outcome.version, owner.version, owner.last) == (2, 2, outcome)
        assert not list(world.payloads.rglob("*.dcrp")), "payloads are dropped after the commit"


async def test_an_owner_with_another_secret_is_refused(world: World) -> None:
    async with world.listen() as coordinator:
        with (
            Owner.connect(coordinator.address, TorchSource(world.trained), secret=b"x" * 32) as owner,
            pytest.raises(AuthenticationFailed, match="secret"),
        ):
            await anyio.to_thread.run_sync(lambda: owner.refit(timeout_s=20))


async def test_an_owner_of_another_run_is_refused(world: World) -> None:
    async with world.listen() as coordinator:
        with (
            Owner.connect(coordinator.address, TorchSource(world.trained), run="other", secret=SECRET) as owner,
            pytest.raises(UsageError, match="other"),
        ):
            await anyio.to_thread.run_sync(lambda: owner.refit(timeout_s=20))


async def test_a_coordinator_with_an_empty_store_does_not_start_a_run_over(world: World, tmp_path: Path) -> None:
    with torch.no_grad():
        world.trained.weight.fill_(1)
    async with world.listen() as coordinator, Node.connect(coordinator.address, [world.gate], name="n", secret=SECRET):
        owner = Owner.connect(coordinator.address, TorchSource(world.trained), secret=SECRET)
        await anyio.to_thread.run_sync(owner.refit)
        await coordinator.refit()
        await anyio.to_thread.run_sync(owner.wait)
        port = coordinator.address
    world.store.close()
    blank = SqliteCommitStore(tmp_path / "blank.db", secret=SECRET)
    async with Coordinator.listen(
        port, owners=1, nodes=1, transport=f"file://{world.payloads}", commits=blank, secret=SECRET
    ):
        with pytest.raises(CommitRecordUnreadable, match="commit store"):
            await anyio.to_thread.run_sync(lambda: owner.refit(timeout_s=20))
    await anyio.to_thread.run_sync(owner.close)
    assert blank.read("run") is None
    blank.close()


def test_without_a_coordinator_refit_raises_in_bounded_time() -> None:
    with Owner.connect("dcr://127.0.0.1:9", TorchSource({"w": torch.zeros(3)}), secret=SECRET) as owner:
        with pytest.raises(TransitionFailed, match="no coordinator"):
            owner.refit(timeout_s=0.5)
        waiting = threading.Thread(target=_raises_control_error, args=(owner,))
        waiting.start()
    waiting.join(10)
    assert not waiting.is_alive(), "close ends a refit that waits in another thread"


def _raises_control_error(owner: Owner) -> None:
    with pytest.raises(ControlError):
        owner.refit(timeout_s=60)


def dropping() -> Pipeline[Shard, CodedBucket]:
    """A pipeline whose own stage loses records."""

    def drop(record: Record) -> tuple[Record, ...]:
        return () if record.name == "bias" else (record,)

    return chunk() | compare() | project() | convert() | expand(drop) | encode() | bucket() | compress()


async def test_a_stage_that_drops_a_record_fails_the_refit_and_nothing_advances(world: World) -> None:
    async with world.listen() as coordinator, Node.connect(coordinator.address, [world.gate], name="n", secret=SECRET):
        source = TorchSource(world.trained)
        with Owner.connect(coordinator.address, source, secret=SECRET, pipeline=dropping()) as owner:
            await anyio.to_thread.run_sync(owner.refit)
            await coordinator.refit()
            await anyio.to_thread.run_sync(owner.wait)
            before = [p.detach().clone() for p in world.served.parameters()]
            bias = shift(world.trained.bias, 1)
            shift(world.trained.weight, 1)
            with pytest.raises(RecordsAltered, match="drops"):
                await anyio.to_thread.run_sync(owner.refit)
            assert (owner.version, coordinator.version, world.gate.serving) == (0, 0, 0)
            assert all(torch.equal(a, b) for a, b in zip(before, world.served.parameters(), strict=True))
            put_back(world.trained.bias, bias)  # the committed bits: there is nothing to drop
            await anyio.to_thread.run_sync(owner.refit)
            assert (await coordinator.refit()).version == 1
        assert same_bits(world.trained, world.served)


async def test_whatever_a_stage_raises_is_a_capture_error_on_every_rank(world: World) -> None:
    agreement = Agreement()
    broken = [True]

    def fragile(record: Record) -> Record:
        if broken[0]:
            raise ValueError("a fault in the user's own stage")
        return record

    pipeline = chunk() | compare() | project() | convert() | each(fragile) | encode() | bucket() | compress()
    sources = [TorchSource(world.trained, rank=r, replicas=2, agree=agreement.of(r)) for r in range(2)]
    async with (
        world.listen(owners=2) as coordinator,
        Node.connect(coordinator.address, [world.gate], name="n", secret=SECRET),
    ):
        mine = next(r for r in range(2) if sources[r].tasks())
        chosen = [pipeline if r == mine else None for r in range(2)]
        owners = [
            Owner.connect(coordinator.address, sources[r], name=f"rank{r}", secret=SECRET, pipeline=chosen[r])
            for r in range(2)
        ]
        try:
            assert await refit_all(owners) == [None, None]  # the first refit is dense and runs no stage of capture
            await coordinator.refit()
            shift(world.trained.weight, 1)
            shift(world.trained.bias, 1)
            failed = await refit_all(owners)
            assert [type(error) for error in failed] == [CaptureError, CaptureError]
            error = failed[mine]
            assert error is not None
            assert isinstance(error.__cause__, ValueError)
            broken[0] = False
            assert await refit_all(owners) == [None, None]
            await coordinator.refit()
        finally:
            for owner in owners:
                await anyio.to_thread.run_sync(owner.close)
    assert same_bits(world.trained, world.served)


async def refit_all(owners: list[Owner]) -> list[Exception | None]:
    """Every owner's refit, each in a thread of its own; what each raised."""
    results: list[Exception | None] = [None] * len(owners)

    async def one(rank: int) -> None:
        try:
            await anyio.to_thread.run_sync(owners[rank].refit)
        except Exception as error:
            results[rank] = error

    async with anyio.create_task_group() as tasks:
        for rank in range(len(owners)):
            tasks.start_soon(one, rank)
    return results


class Agreement:
    """An all-reduce of "ok" over two training ranks that are threads here."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=20)
        self._said: dict[int, bool] = {}

    def of(self, rank: int) -> Callable[[bool], bool]:
        def agree(ok: bool) -> bool:
            self._said[rank] = ok
            self._barrier.wait()
            result = all(self._said.values())
            self._barrier.wait()
            return result

        return agree


async def test_either_every_rank_captures_or_every_rank_raises(world: World) -> None:
    agreement = Agreement()
    async with (
        world.listen(owners=2) as coordinator,
        Node.connect(coordinator.address, [world.gate], name="n", secret=SECRET),
    ):
        sources = [TorchSource(world.trained, rank=r, replicas=2, agree=agreement.of(r)) for r in range(2)]
        publishes_bias = next(r for r in range(2) if any(t.key == "bias" for t in sources[r].tasks()))
        owners = [
            Owner.connect(
                coordinator.address,
                sources[r],
                name=f"rank{r}",
                secret=SECRET,
                pipeline=dropping() if r == publishes_bias else None,
            )
            for r in range(2)
        ]
        try:
            assert await refit_all(owners) == [None, None]
            await coordinator.refit()
            bias = shift(world.trained.bias, 1)
            failed = await refit_all(owners)
            assert isinstance(failed[publishes_bias], RecordsAltered)
            assert isinstance(failed[1 - publishes_bias], CaptureError)
            put_back(world.trained.bias, bias)
            shift(world.trained.weight, 1)
            assert await refit_all(owners) == [None, None]
            assert (await coordinator.refit()).version == 1
        finally:
            for owner in owners:
                await anyio.to_thread.run_sync(owner.close)
    assert same_bits(world.trained, world.served)


async def test_a_transport_that_cannot_be_opened_on_one_rank_fails_every_rank(world: World) -> None:
    """An untyped error outside of capture must not leave the other ranks waiting in their all-reduce."""
    agreement = Agreement()
    sources = [TorchSource(world.trained, rank=r, replicas=2, agree=agreement.of(r)) for r in range(2)]
    async with world.listen(owners=2) as coordinator:
        owners = [Owner.connect(coordinator.address, sources[r], name=f"rank{r}", secret=SECRET) for r in range(2)]
        try:

            def broken(url: str) -> Transport:
                raise ValueError("a fault in the user's own transport")

            owners[1]._role._route._open = broken
            failed = await refit_all(owners)
            assert isinstance(failed[0], TransitionFailed)
            assert isinstance(failed[1], CaptureError)
            assert "ValueError" in str(failed[1])
        finally:
            for owner in owners:
                await anyio.to_thread.run_sync(owner.close)


def test_an_owner_without_a_coordinator_says_where_it_looked_and_why() -> None:
    with (
        Owner.connect("dcr://127.0.0.1:9", TorchSource({"w": torch.zeros(3)}), secret=SECRET) as owner,
        pytest.raises(TransitionFailed, match=r"dcr://127\.0\.0\.1:9.*no coordinator: .*127\.0\.0\.1:9"),
    ):
        owner.refit(timeout_s=1)
