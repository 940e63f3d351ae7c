"""Pipelines: order, ends, failures, cancellation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel
import pytest

from dcr_stream.errors import UsageError
from dcr_stream.flow import Inlet, Outlet, Pipeline, Stage, each, execute, expand, fold, in_worker

pytestmark = pytest.mark.anyio


class Pass(Stage[int, int]):
    """Passes everything on."""

    async def run(self, source: Inlet[int], sink: Outlet[int]) -> None:
        async for item in source:
            await sink.send(item)


class FailAt(Stage[int, int]):
    """Passes items on up to one."""

    def __init__(self, last: int) -> None:
        self._last = last

    async def run(self, source: Inlet[int], sink: Outlet[int]) -> None:
        async for item in source:
            if item == self._last:
                raise ValueError(f"cannot pass {item}")
            await sink.send(item)


class TakeOne(Stage[int, int]):
    """Leaves the rest of its source."""

    async def run(self, source: Inlet[int], sink: Outlet[int]) -> None:
        await sink.send(await source.receive())


@dataclass
class Witness(Stage[int, int]):
    """Remembers what it saw, and whether it saw the end."""

    seen: list[int] = field(default_factory=list)
    ended: bool = False
    cancelled: bool = False

    async def run(self, source: Inlet[int], sink: Outlet[int]) -> None:
        try:
            async for item in source:
                self.seen.append(item)
                await sink.send(item)
        except anyio.get_cancelled_exc_class():
            self.cancelled = True
            raise
        self.ended = True


def double(item: int) -> int:
    return 2 * item


async def collect(stage: Stage[int, int], feed: Iterable[int]) -> list[int]:
    out: list[int] = []

    async def deliver(item: int) -> None:
        out.append(item)

    with anyio.fail_after(30):
        await execute(stage, feed, deliver)
    return out


async def test_everything_fed_is_delivered_in_order() -> None:
    assert await collect(Pass() | Pass() | Pass(), range(1000)) == list(range(1000))


async def test_an_empty_feed_ends_cleanly() -> None:
    witness = Witness()
    assert await collect(witness | each(abs), ()) == []
    assert witness.ended


async def test_a_failing_stage_never_lets_its_successor_finish() -> None:
    finished: list[int] = []

    class Total:
        def push(self, item: int) -> Iterable[int]:
            return ()

        def flush(self) -> Iterable[int]:
            finished.append(1)
            return (1,)

    witness = Witness()
    with pytest.raises(ValueError, match="cannot pass 6"):
        await collect(FailAt(6) | witness | fold(Total), range(100))
    assert not witness.ended
    assert witness.cancelled
    assert not finished


async def test_the_only_failure_is_raised_plain_and_names_its_stage() -> None:
    with pytest.raises(ValueError, match="cannot pass 3") as caught:
        await collect(Pass() | FailAt(3) | Pass(), range(10))
    assert caught.value.__notes__ == ["in stage 'failat'"]
    assert caught.value.__context__ is None


async def test_failure_of_a_lifted_function_names_it() -> None:
    def halve(item: int) -> int:
        return 12 // item

    with pytest.raises(ZeroDivisionError) as caught:
        await collect(each(halve, workers=3), (3, 2, 1, 0, 1))
    assert caught.value.__notes__ == ["in stage 'halve'"]


async def test_failure_of_the_feed_is_no_end() -> None:
    witness = Witness()

    def feed() -> Iterator[int]:
        yield 1
        raise OSError("source went away")

    with pytest.raises(OSError, match="went away") as caught:
        await collect(witness, feed())
    assert not witness.ended
    assert caught.value.__notes__ == ["in stage 'feed'"]


async def test_failure_of_the_delivery_stops_everything() -> None:
    witness = Witness()

    async def refuse(item: int) -> None:
        raise ConnectionError("no route")

    with anyio.fail_after(30), pytest.raises(ConnectionError) as caught:
        await execute(witness, iter(int, 1), refuse)  # an endless feed of zeros
    assert not witness.ended
    assert caught.value.__notes__ == ["in stage 'deliver'"]


async def test_independent_failures_come_together() -> None:
    arrived = 0
    both = anyio.Event()

    class Fails(Stage[int, int]):
        async def run(self, source: Inlet[int], sink: Outlet[int]) -> None:
            nonlocal arrived
            arrived += 1
            if arrived == 2:
                both.set()
            try:
                await both.wait()
            finally:
                raise ValueError("own failure")

    with pytest.raises(ExceptionGroup) as caught:
        await collect(Fails() | Fails(), ())
    assert [type(error) for error in caught.value.exceptions] == [ValueError, ValueError]


async def test_a_stage_that_leaves_its_source_is_an_error_that_names_it() -> None:
    with pytest.raises(UsageError, match="'takeone' returned before the end of its source"):
        await collect(Pass() | TakeOne() | Pass(), iter(int, 1))  # an endless feed does not hang either


async def test_an_unread_end_counts_as_unread_source() -> None:
    with pytest.raises(UsageError, match="'takeone' returned before the end"):
        await collect(TakeOne(), (1,))


async def test_cancelling_the_caller_closes_feed_and_stages() -> None:
    witness = Witness()
    closed: list[str] = []

    async def feed() -> AsyncIterator[int]:
        try:
            while True:
                yield 1
        finally:
            closed.append("feed")

    delivered = anyio.Event()

    async def deliver(item: int) -> None:
        delivered.set()
        await anyio.sleep_forever()

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(execute, witness, feed(), deliver)
            await delivered.wait()
            tasks.cancel_scope.cancel()
    assert closed == ["feed"]
    assert witness.cancelled
    assert not witness.ended


async def test_a_generator_given_as_feed_is_closed_when_a_stage_fails() -> None:
    closed: list[str] = []

    def feed() -> Iterator[int]:
        try:
            yield from range(100_000)
        finally:
            closed.append("feed")

    with pytest.raises(ValueError, match="cannot pass 3"):
        await collect(FailAt(3), feed())
    assert closed == ["feed"]


async def test_a_pipeline_runs_again_from_a_fresh_state() -> None:
    class Sum:
        def __init__(self) -> None:
            self._total = 0

        def push(self, item: int) -> Iterable[int]:
            self._total += item
            return ()

        def flush(self) -> Iterable[int]:
            return (self._total,)

    pipeline = Pass() | fold(Sum)
    assert await collect(pipeline, range(5)) == [10]
    assert await collect(pipeline, range(5)) == [10]


async def test_a_pipeline_inside_a_stage_is_a_stage() -> None:
    class Twice(Stage[int, int]):
        async def run(self, source: Inlet[int], sink: Outlet[int]) -> None:
            await (Pass() | each(double)).run(source, sink)

    assert await collect(Pass() | Twice() | Pass(), range(4)) == [0, 2, 4, 6]


async def test_pipelines_are_flat() -> None:
    a, b, c, d = Pass(), Pass(), Pass(), Pass()
    assert ((a | b) | (c | d)).stages == (a, b, c, d)
    assert (a | (b | c) | d).name == "pass | pass | pass | pass"


async def test_expand_drops_explicitly_and_multiplies() -> None:
    stage: Stage[int, int] = expand(lambda item: [item] * (item % 3), workers=2)
    assert await collect(stage, range(6)) == [1, 2, 2, 4, 5, 5]


async def test_stages_cannot_run_outside_execute() -> None:
    with pytest.raises(UsageError, match="execute"):
        await in_worker(abs, -1)


async def test_a_late_send_is_refused() -> None:
    kept: list[Outlet[int]] = []

    class Leaks(Stage[int, int]):
        async def run(self, source: Inlet[int], sink: Outlet[int]) -> None:
            kept.append(sink)
            async for item in source:
                await sink.send(item)

    await collect(Leaks() | Pass(), (1,))
    with pytest.raises(UsageError, match="after it had returned"):
        await kept[0].send(2)


async def test_an_empty_pipeline_is_refused() -> None:
    with pytest.raises(UsageError, match="at least one stage"):
        Pipeline[int, int](())
