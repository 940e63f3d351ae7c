"""Stages made of plain functions and accumulators."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from enum import Enum
from typing import Literal, Protocol, TypeVar

import anyio

from dcr_stream.errors import UsageError
from dcr_stream.flow.arguments import check_at_least
from dcr_stream.flow.channel import Inlet, Outlet
from dcr_stream.flow.stage import Stage
from dcr_stream.flow.surroundings import in_worker
from dcr_stream.flow.tasks import task_group

__all__ = ["Fold", "each", "expand", "fold"]

In = TypeVar("In")
Out = TypeVar("Out")
In_contra = TypeVar("In_contra", contravariant=True)
Out_co = TypeVar("Out_co", covariant=True)


class Fold(Protocol[In_contra, Out_co]):
    """An accumulator without any I/O, in the shape of ``zlib.compressobj``."""

    def push(self, item: In_contra) -> Iterable[Out_co]:
        """Take one item; return, or yield one by one, what is now ready."""
        ...

    def flush(self) -> Iterable[Out_co]:
        """The clean end: return, or yield one by one, what is left. Never called after a failure."""
        ...


def each(fn: Callable[[In], Out], *, workers: int = 1, name: str | None = None) -> Stage[In, Out]:
    """A stage that passes ``fn(item)`` on for every item, in the order of the items.

    ``fn`` runs in worker threads, at most ``workers`` items at a time (those waiting for their turn to be sent
    included). It must be safe to call from several threads when ``workers`` exceeds 1.
    Type checkers need a function with annotations; they cannot infer a lambda's types from the stages beside it.

    Raises:
        UsageError: ``workers`` is less than 1. While running: ``fn`` returned None, which is more often a forgotten
            ``return`` than a wish to drop the item; ``expand`` drops items explicitly.
    """
    label = name or _name(fn)

    def one(item: In) -> tuple[Out]:
        result = fn(item)
        if result is None:
            raise UsageError(
                f"stage {label!r} returned None for an item of type {type(item).__name__}; "
                "return the item, or use expand() and return () to drop it"
            )
        return (result,)

    return _Expand(one, workers, label)


def expand(fn: Callable[[In], Iterable[Out]], *, workers: int = 1, name: str | None = None) -> Stage[In, Out]:
    """A stage that passes on everything in ``fn(item)``, for every item and in order; ``()`` drops the item.

    Works as ``each``. All outputs of one item are made in one worker call and held until they are sent; where that
    is too much at once, use ``fold``.

    Raises:
        UsageError: ``workers`` is less than 1.
    """
    return _Expand(lambda item: tuple(fn(item)), workers, name or _name(fn))


def fold(make: Callable[[], Fold[In, Out]], *, name: str | None = None) -> Stage[In, Out]:
    """A stage around an accumulator, made anew by ``make`` for every run.

    ``push`` and ``flush`` run in a worker thread, one call at a time. Outputs are taken from them one by one, so a
    generator never runs ahead of the channel by more than one output. Everything queued is pushed in one worker
    call as long as nothing comes out, so the stage itself holds at most one channel's worth of inputs.
    """
    return _Folded(make, name or _name(make))


class _Expand(Stage[In, Out]):
    def __init__(self, fn: Callable[[In], tuple[Out, ...]], workers: int, name: str) -> None:
        check_at_least(name, "workers", workers, 1)
        self._fn = fn
        self._workers = workers
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    async def run(self, source: Inlet[In], sink: Outlet[Out]) -> None:
        line = _Line()
        async with task_group() as tasks:
            for _ in range(self._workers):
                tasks.start_soon(self._work, source, sink, line)

    async def _work(self, source: Inlet[In], sink: Outlet[Out], line: _Line) -> None:
        while True:
            async with line.receiving:
                try:
                    item = await source.receive()
                except anyio.EndOfStream:
                    return
                turn, done = line.queue_up()
            outputs = await in_worker(self._fn, item)
            del item
            await turn.wait()
            for output in outputs:
                await sink.send(output)
            del outputs
            done.set()


class _Line:
    """Keeps results in the order in which their items were received."""

    def __init__(self) -> None:
        self.receiving = anyio.Lock(fast_acquire=True)
        self._last = anyio.Event()
        self._last.set()

    def queue_up(self) -> tuple[anyio.Event, anyio.Event]:
        """The event to wait for before sending, and the one to set afterwards."""
        turn, self._last = self._last, anyio.Event()
        return turn, self._last


class _End(Enum):
    END = 0


class _Folded(Stage[In, Out]):
    def __init__(self, make: Callable[[], Fold[In, Out]], name: str) -> None:
        self._make = make
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    async def run(self, source: Inlet[In], sink: Outlet[Out]) -> None:
        state = self._make()
        while True:
            try:
                items = await source.receive_queued()
            except anyio.EndOfStream:
                break
            await _send_all(_pushed(state, items), sink)
        await _send_all(_flushed(state), sink)


def _pushed(state: Fold[In, Out], items: list[In]) -> Generator[Out, None, None]:
    items.reverse()
    while items:
        yield from state.push(items.pop())


def _flushed(state: Fold[In, Out]) -> Generator[Out, None, None]:
    yield from state.flush()


async def _send_all(outputs: Generator[Out, None, None], sink: Outlet[Out]) -> None:
    try:
        while (output := await in_worker(_following, outputs)) is not _End.END:
            await sink.send(output)
    finally:
        outputs.close()


def _following(outputs: Iterator[Out]) -> Out | Literal[_End.END]:
    return next(outputs, _End.END)


def _name(fn: Callable[..., object]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)
