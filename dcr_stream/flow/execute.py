"""Running a pipeline from a feed to its delivery."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Generator, Iterable
from typing import Generic, Never, TypeVar

from dcr_stream.flow.channel import Channel, Inlet, Limits, Outlet, nbytes_of
from dcr_stream.flow.meter import Meter
from dcr_stream.flow.stage import Pipeline, Stage
from dcr_stream.flow.surroundings import SURROUNDINGS, Surroundings
from dcr_stream.interfaces import Monitor, NullMonitor
from dcr_stream.runtime import Runtime

__all__ = ["execute"]

In = TypeVar("In")
Out = TypeVar("Out")
T = TypeVar("T")


async def execute(
    stage: Stage[In, Out],
    feed: Iterable[In] | AsyncIterable[In],
    deliver: Callable[[Out], Awaitable[object]],
    *,
    runtime: Runtime | None = None,
    monitor: Monitor | None = None,
    limits: Limits | None = None,
) -> None:
    """Run ``stage`` (a pipeline, usually) over ``feed`` and await ``deliver`` with each output, in order.

    Returns when everything was delivered. If the feed, a stage or the delivery fails, or the caller is cancelled,
    everything is cancelled, worker calls that have begun are waited for, generators given as feed are closed, and
    nothing runs any more when this raises. A plain iterable is iterated on the event loop, so its items must be
    cheap to make. ``limits`` hold for every channel; ``monitor`` sees the feed and the delivery as stages ``feed``
    and ``deliver``.

    Raises:
        Exception: what the failing part raised, with the note ``in stage 'NAME'``; an ``ExceptionGroup`` only when
            several parts failed independently.
        UsageError: a stage returned before the end of its source.
    """
    here = Surroundings(runtime or Runtime.default(), monitor or NullMonitor(), limits or Limits())
    pipeline = _Feed(feed) | stage | _Deliver(deliver)
    token = SURROUNDINGS.set(here)
    try:
        await _alone(pipeline, Meter(here.runtime.clock))
    finally:
        SURROUNDINGS.reset(token)


async def _alone(pipeline: Pipeline[Never, Never], meter: Meter) -> None:
    nothing: Channel[Never] = Channel(Limits(), lambda items, nbytes: None)
    nothing.close()
    nothing.exhausted = True
    await pipeline.run(Inlet(nothing, meter), Outlet(nothing, meter))


class _Feed(Stage[Never, T], Generic[T]):
    def __init__(self, feed: Iterable[T] | AsyncIterable[T]) -> None:
        self._feed = feed

    @property
    def name(self) -> str:
        return "feed"

    async def run(self, source: Inlet[Never], sink: Outlet[T]) -> None:
        feed = self._feed
        try:
            if isinstance(feed, AsyncIterable):
                async for item in feed:
                    await sink.send(item)
            else:
                for item in feed:
                    await sink.send(item)
        finally:
            # A generator left suspended would keep its resources until it is collected.
            if isinstance(feed, AsyncGenerator):
                await feed.aclose()
            elif isinstance(feed, Generator):
                feed.close()


class _Deliver(Stage[T, Never], Generic[T]):
    def __init__(self, deliver: Callable[[T], Awaitable[object]]) -> None:
        self._deliver = deliver

    @property
    def name(self) -> str:
        return "deliver"

    async def run(self, source: Inlet[T], sink: Outlet[Never]) -> None:
        async for item in source:
            await self._deliver(item)
            sink.passed(nbytes_of(item))
