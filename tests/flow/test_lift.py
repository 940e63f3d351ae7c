"""Functions and accumulators as stages: order, threads, one output at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

import anyio
import pytest

from dcr_stream.errors import UsageError
from dcr_stream.flow import Limits, Stage, each, execute, expand, fold

pytestmark = pytest.mark.anyio


async def collect(stage: Stage[int, int], feed: Iterable[int], limits: Limits | None = None) -> list[int]:
    out: list[int] = []

    async def deliver(item: int) -> None:
        out.append(item)

    with anyio.fail_after(30):
        await execute(stage, feed, deliver, limits=limits)
    return out


async def test_order_is_kept_when_later_items_finish_first() -> None:
    gates = [threading.Event() for _ in range(4)]
    finished: list[int] = []

    def backwards(item: int) -> int:
        # Each group of four finishes in reverse: an item waits for the one behind it.
        place = item % 4
        if place < 3:
            assert gates[place + 1].wait(20)
            gates[place + 1].clear()
        finished.append(item)
        gates[place].set()
        return item

    assert await collect(each(backwards, workers=4), range(4)) == [0, 1, 2, 3]
    assert finished == [3, 2, 1, 0]


async def test_workers_run_at_the_same_time_and_off_the_event_loop() -> None:
    together = threading.Barrier(3, timeout=20)
    threads: set[int] = set()

    def meet(item: int) -> int:
        together.wait()
        threads.add(threading.get_ident())
        return item

    assert await collect(each(meet, workers=3), range(6)) == list(range(6))
    assert threading.get_ident() not in threads


async def test_one_worker_is_never_entered_twice() -> None:
    inside = threading.Lock()

    def alone(item: int) -> int:
        assert inside.acquire(blocking=False)
        inside.release()
        return item

    assert await collect(each(alone), range(50)) == list(range(50))


async def test_returning_none_is_an_error_that_names_the_function() -> None:
    def forgets(item: int) -> int | None:
        return item if item < 3 else None

    async def deliver(item: int | None) -> None: ...

    with pytest.raises(UsageError, match="'forgets' returned None for an item of type int"):
        await execute(each(forgets), range(10), deliver)


async def test_no_call_is_left_running_after_a_failure() -> None:
    running, started, go_on = threading.Semaphore(0), threading.Event(), threading.Event()

    def slow_or_broken(item: int) -> int:
        if item == 1:
            assert started.wait(20)
            go_on.set()
            raise ValueError("broken")
        started.set()
        assert go_on.wait(20)
        running.release()
        return item

    with pytest.raises(ValueError, match="broken"):
        await collect(each(slow_or_broken, workers=2), range(2))
    assert running.acquire(blocking=False), "the other call had not returned"


async def test_a_fold_is_asked_for_one_output_at_a_time() -> None:
    made: list[int] = []
    delivered: list[int] = []
    ahead: list[int] = []

    class Many:
        def push(self, item: int) -> Iterator[int]:
            for i in range(item):
                made.append(i)
                yield i

        def flush(self) -> Iterable[int]:
            return ()

    async def deliver(item: int) -> None:
        ahead.append(len(made) - len(delivered))
        delivered.append(item)

    with anyio.fail_after(30):
        await execute(fold(Many), (300,), deliver, limits=Limits(items=2))
    assert delivered == list(range(300))
    # With the delivery, queued before it (two), being sent.
    assert max(ahead) <= 4


async def test_fold_pushes_in_order_and_flushes_once_at_the_end() -> None:
    class Pairs:
        def __init__(self) -> None:
            self._kept: list[int] = []

        def push(self, item: int) -> Iterable[int]:
            self._kept.append(item)
            if len(self._kept) == 2:
                first, second = self._kept
                self._kept = []
                return (10 * first + second,)
            return ()

        def flush(self) -> Iterable[int]:
            return tuple(self._kept)

    assert await collect(fold(Pairs), range(1, 6)) == [12, 34, 5]
    assert await collect(fold(Pairs), ()) == []


async def test_a_fold_that_fails_names_its_stage() -> None:
    class Fails:
        def push(self, item: int) -> Iterator[int]:
            yield item
            raise RuntimeError("half way")

        def flush(self) -> Iterable[int]:
            raise AssertionError("flushed after a failure")

    with pytest.raises(RuntimeError, match="half way") as caught:
        await collect(fold(Fails, name="half"), range(3))
    assert caught.value.__notes__ == ["in stage 'half'"]


@pytest.mark.parametrize("workers", [0, -1, True, 1.5])
async def test_workers_below_one_are_refused(workers: int) -> None:
    with pytest.raises(UsageError, match="workers="):
        each(abs, workers=workers)
    with pytest.raises(UsageError, match="workers="):
        expand(lambda item: (item,), workers=workers)
