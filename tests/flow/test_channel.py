"""Channels and back-pressure: bounded by items and bytes, first in first out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

import anyio
import anyio.lowlevel
import pytest
from anyio import wait_all_tasks_blocked
from hypothesis import given
from hypothesis import strategies as st

from dcr_stream.errors import UsageError
from dcr_stream.flow import Inlet, Limits, Outlet, Stage, each, execute
from dcr_stream.interfaces import NullMonitor
from dcr_stream.runtime import Runtime, SystemClock

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Block:
    """An item of a given size."""

    nbytes: int


class Pass(Stage[Block, Block]):
    """Passes everything on."""

    async def run(self, source: Inlet[Block], sink: Outlet[Block]) -> None:
        async for item in source:
            await sink.send(item)


class Inline:
    """Runs worker calls on the event loop, so that a standstill can be seen."""

    async def run(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        await anyio.lowlevel.checkpoint()
        return fn(*args, **kwargs)


def same(item: Block) -> Block:
    return item


@dataclass
class Depths(NullMonitor):
    """Remembers what was queued before every stage."""

    seen: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def channel(self, stage: str, *, items: int, nbytes: int) -> None:
        self.seen.setdefault(stage, []).append((items, nbytes))


async def held_back(sizes: list[int], limits: Limits) -> tuple[Depths, list[tuple[int, int]], list[int]]:
    """Run until nothing moves with a delivery that waits; then let it go on. Depths, standstill depths, delivered."""
    depths, delivered, release = Depths(), list[int](), anyio.Event()
    standstill: list[tuple[int, int]] = []

    async def deliver(item: Block) -> None:
        await release.wait()
        delivered.append(item.nbytes)

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:

            async def run() -> None:
                await execute(Pass() | Pass(), map(Block, sizes), deliver, monitor=depths, limits=limits)

            tasks.start_soon(run)
            await wait_all_tasks_blocked()
            standstill = [seen[-1] for seen in depths.seen.values()]
            release.set()
    return depths, standstill, delivered


@pytest.mark.anyio
async def test_a_fast_producer_is_held_at_the_item_bound() -> None:
    depths, standstill, delivered = await held_back([1] * 500, Limits(items=3, nbytes=1 << 20))
    assert {items for items, _ in standstill} == {3}
    assert max(items for seen in depths.seen.values() for items, _ in seen) == 3
    assert len(delivered) == 500


@pytest.mark.anyio
async def test_a_fast_producer_is_held_at_the_byte_bound() -> None:
    """D7: however slow the far end, queued bytes never exceed the bound."""
    depths, standstill, delivered = await held_back([40] * 500, Limits(items=1000, nbytes=100))
    assert {nbytes for _, nbytes in standstill} == {80}
    assert max(nbytes for seen in depths.seen.values() for _, nbytes in seen) == 80
    assert len(delivered) == 500


@pytest.mark.anyio
async def test_an_item_above_the_byte_bound_passes_alone() -> None:
    depths, _, delivered = await held_back([10, 500, 10, 10, 500, 500], Limits(items=10, nbytes=100))
    assert delivered == [10, 500, 10, 10, 500, 500]
    for seen in depths.seen.values():
        assert (1, 500) in seen
        assert all(items == 1 for items, nbytes in seen if nbytes > 100)


@given(
    sizes=st.lists(st.integers(0, 130), max_size=60),
    items=st.integers(1, 5),
    nbytes=st.integers(1, 200),
)
def test_bounds_and_order_hold_for_any_sizes(sizes: list[int], items: int, nbytes: int) -> None:
    depths, delivered = Depths(), list[int]()

    async def deliver(item: Block) -> None:
        for _ in range(item.nbytes % 3):
            await anyio.lowlevel.checkpoint()
        delivered.append(item.nbytes)

    async def run() -> None:
        limits = Limits(items=items, nbytes=nbytes)
        await execute(Pass() | Pass(), map(Block, sizes), deliver, monitor=depths, limits=limits)

    anyio.run(run)
    assert delivered == sizes
    for seen in depths.seen.values():
        assert all(queued <= items and (held <= nbytes or queued == 1) for queued, held in seen)
        assert seen[-1] == (0, 0)


@pytest.mark.anyio
async def test_several_senders_of_one_stage_lose_nothing() -> None:
    class Fan(Stage[Block, Block]):
        async def run(self, source: Inlet[Block], sink: Outlet[Block]) -> None:
            async with anyio.create_task_group() as tasks:
                async for item in source:
                    tasks.start_soon(sink.send, item)

    delivered: list[int] = []

    async def deliver(item: Block) -> None:
        await anyio.lowlevel.checkpoint()
        delivered.append(item.nbytes)

    with anyio.fail_after(30):
        await execute(Fan() | Pass(), map(Block, range(200)), deliver, limits=Limits(items=2))
    assert delivered == list(range(200))


@pytest.mark.anyio
async def test_a_small_item_never_overtakes_a_large_one_that_waits() -> None:
    class TwoSenders(Stage[Block, Block]):
        async def run(self, source: Inlet[Block], sink: Outlet[Block]) -> None:
            items = [item async for item in source]
            await sink.send(items[0])
            async with anyio.create_task_group() as tasks:
                for item in items[1:]:
                    tasks.start_soon(sink.send, item)
                    await wait_all_tasks_blocked()
                release.set()

    delivered: list[int] = []
    release = anyio.Event()

    async def deliver(item: Block) -> None:
        await release.wait()
        delivered.append(item.nbytes)

    with anyio.fail_after(30):
        await execute(TwoSenders(), map(Block, [70, 60, 80, 1]), deliver, limits=Limits(nbytes=100))
    assert delivered == [70, 60, 80, 1]


@pytest.mark.anyio
async def test_a_cancelled_send_is_not_delivered_and_frees_its_place() -> None:
    class GivesUp(Stage[Block, Block]):
        async def run(self, source: Inlet[Block], sink: Outlet[Block]) -> None:
            async for item in source:
                with anyio.move_on_after(0 if item.nbytes % 2 else None):
                    await sink.send(item)

    delivered: list[int] = []

    async def deliver(item: Block) -> None:
        delivered.append(item.nbytes)
        await wait_all_tasks_blocked()

    with anyio.fail_after(30):
        await execute(GivesUp() | Pass(), map(Block, [0, 2, 4, 6, 8, 10, 12, 1, 14]), deliver, limits=Limits(items=1))
    assert delivered == [0, 2, 4, 6, 8, 10, 12, 14]


@pytest.mark.anyio
async def test_items_in_flight_never_exceed_the_workers() -> None:
    release = anyio.Event()
    taken: list[int] = []

    class Counted(Stage[Block, Block]):
        async def run(self, source: Inlet[Block], sink: Outlet[Block]) -> None:
            async for item in source:
                taken.append(item.nbytes)
                await sink.send(item)

    async def deliver(item: Block) -> None:
        await release.wait()

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:

            async def run() -> None:
                pipeline = Counted() | each(same, workers=4)
                here = Runtime(SystemClock(), Runtime.default().network, Inline())
                await execute(pipeline, map(Block, range(100)), deliver, runtime=here, limits=Limits(items=1))

            tasks.start_soon(run)
            await wait_all_tasks_blocked()
            # One with the delivery, one queued before it, four in flight, one queued before them, one being sent.
            assert len(taken) == 8
            release.set()
    assert taken == list(range(100))


@pytest.mark.parametrize("wrong", [{"items": 0}, {"nbytes": 0}, {"items": -1}, {"items": True}])
def test_bounds_below_one_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="give 1 or more"):
        Limits(**wrong)
