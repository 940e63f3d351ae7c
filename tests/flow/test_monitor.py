"""What monitors are told, and the runtime underneath."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

import anyio
import anyio.lowlevel
import pytest

from dcr_stream.errors import UsageError
from dcr_stream.flow import Inlet, Outlet, Stage, each, execute
from dcr_stream.interfaces import NullMonitor
from dcr_stream.runtime import Runtime, SystemClock, ThreadWorkers

pytestmark = pytest.mark.anyio

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class Clock:
    """Moves only when told."""

    now: float = 0.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


@dataclass
class Inline:
    """Runs worker calls on the event loop; each takes two seconds."""

    clock: Clock

    async def run(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        for _ in range(10):  # let everything else come to its wait first
            await anyio.lowlevel.checkpoint()
        self.clock.now += 2.0
        return fn(*args, **kwargs)


@dataclass
class Log(NullMonitor):
    """Remembers starts and ends."""

    started: list[str] = field(default_factory=list)
    ended: dict[str, tuple[int, int, float, float, bool]] = field(default_factory=dict)

    def stage_started(self, stage: str) -> None:
        self.started.append(stage)

    def stage_ended(self, stage: str, *, items: int, nbytes: int, busy_s: float, waited_s: float, ok: bool) -> None:
        self.ended[stage] = (items, nbytes, busy_s, waited_s, ok)


@dataclass(frozen=True)
class Block:
    """An item of a given size."""

    nbytes: int


def runtime() -> Runtime:
    clock = Clock()
    return Runtime(clock, Runtime.default().network, Inline(clock))


async def test_a_stage_reports_what_it_passed_on_and_how_long_it_worked() -> None:
    log = Log()

    def grow(item: Block) -> Block:
        return Block(item.nbytes + 1)

    async def deliver(item: Block) -> None: ...

    await execute(each(grow), map(Block, (1, 2, 3)), deliver, runtime=runtime(), monitor=log)
    assert sorted(log.started) == ["deliver", "feed", "grow"]
    items, nbytes, busy, _, ok = log.ended["grow"]
    assert (items, nbytes, ok) == (3, 9, True)
    assert busy == 6.0
    assert log.ended["feed"][:2] == (3, 6)
    assert log.ended["deliver"][:2] == (3, 9)


async def test_waiting_on_channels_is_not_work() -> None:
    log, here = Log(), runtime()

    class Waits(Stage[Block, Block]):
        async def run(self, source: Inlet[Block], sink: Outlet[Block]) -> None:
            async for item in source:
                await sink.send(item)

    async def deliver(item: Block) -> None: ...

    def work(item: Block) -> Block:
        return item

    await execute(each(work) | Waits(), map(Block, (1, 2, 3)), deliver, runtime=here, monitor=log)
    _, _, busy, waited, _ = log.ended["waits"]
    assert (busy, waited) == (0.0, 6.0)
    assert log.ended["work"][2:4] == (6.0, 0.0)


async def test_a_stage_is_busy_while_any_of_its_workers_is() -> None:
    log = Log()

    def work(item: Block) -> Block:
        return item

    async def deliver(item: Block) -> None: ...

    async def feed() -> AsyncIterator[Block]:
        yield Block(1)
        for _ in range(50):  # the other workers wait for an item while the first one works
            await anyio.lowlevel.checkpoint()

    await execute(each(work, workers=3), feed(), deliver, runtime=runtime(), monitor=log)
    assert log.ended["work"][2:4] == (2.0, 0.0)


async def test_a_failed_stage_is_reported_as_failed() -> None:
    log = Log()

    def broken(item: Block) -> Block:
        raise ValueError("broken")

    async def deliver(item: Block) -> None: ...

    with pytest.raises(ValueError, match="broken"):
        await execute(each(broken), map(Block, (1,)), deliver, monitor=log)
    assert log.ended["broken"][0] == 0
    assert not log.ended["broken"][4]
    assert not log.ended["deliver"][4]
    assert set(log.started) == set(log.ended)


async def test_the_default_runtime_has_no_network() -> None:
    async def handler(link: object) -> None: ...

    network = Runtime.default().network
    with pytest.raises(UsageError, match=r"no network; pass one to Runtime\.default"):
        await network.dial("127.0.0.1:1")
    with pytest.raises(UsageError, match="no network"):
        network.listen("127.0.0.1:0", handler)


async def test_thread_workers_bound_their_threads() -> None:
    workers = ThreadWorkers(2)
    running = peak = 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal running, peak
        with lock:
            running += 1
            peak = max(peak, running)
        anyio.from_thread.run(anyio.lowlevel.checkpoint)
        with lock:
            running -= 1

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(workers.run, work)
    assert 1 <= peak <= 2
    with pytest.raises(UsageError, match="at least 1"):
        ThreadWorkers(0)


async def test_the_system_clock_moves_forward() -> None:
    clock = SystemClock()
    assert clock.monotonic() <= clock.monotonic()
    assert clock.wall() > 1_600_000_000
