"""Stages, and pipelines of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from dcr_stream.delta import Record
from dcr_stream.errors import UsageError
from dcr_stream.flow.channel import Channel, Inlet, Outlet
from dcr_stream.flow.meter import Meter
from dcr_stream.flow.surroundings import METER, surroundings
from dcr_stream.flow.tasks import task_group

__all__ = ["Pipeline", "Stage"]

In_contra = TypeVar("In_contra", contravariant=True)
Out_co = TypeVar("Out_co", covariant=True)
Next = TypeVar("Next")


class Stage(ABC, Generic[In_contra, Out_co]):
    """One step of a refit: reads items of one type to their end and writes items of another.

    A stage may be run many times, also at the same time, so what belongs to one run stays inside ``run``.
    ``first | second`` joins two stages into a ``Pipeline``; a type checker refuses it when the types do not match.
    """

    encodes: ClassVar[bool] = False
    """Whether this stage turns records into entries. A pipeline of an owner has exactly one such stage."""

    @property
    def name(self) -> str:
        """What monitors and error notes call this stage; by default the class's name in lower case."""
        return type(self).__name__.lower()

    @abstractmethod
    async def run(self, source: Inlet[In_contra], sink: Outlet[Out_co]) -> None:
        """Read ``source`` to its end and send results to ``sink``.

        Returning says that everything was sent: the next stage then sees the end of its source. A stage that
        cannot go on raises, and one that returns before it has seen the end of ``source`` is an error as well
        (read on and drop what is not needed). Long computations belong into ``in_worker``.
        """

    def __or__(self, other: Stage[Out_co, Next]) -> Pipeline[In_contra, Next]:
        return Pipeline((*_flat(self), *_flat(other)))


class Pipeline(Stage[In_contra, Out_co]):
    """Stages in a row, joined by bounded channels, in one task group; itself a stage.

    Made with ``|``. Pipelines of pipelines are flat, so grouping never changes what runs.

    Raises:
        UsageError: there is no stage.
    """

    def __init__(self, stages: Sequence[Stage[Any, Any]]) -> None:
        if not stages:
            raise UsageError("a pipeline needs at least one stage; join stages with |")
        self.stages: tuple[Stage[Any, Any], ...] = tuple(stages)

    @property
    def name(self) -> str:
        """The stages' names, joined by ``|``."""
        return " | ".join(stage.name for stage in self.stages)

    async def run(self, source: Inlet[In_contra], sink: Outlet[Out_co]) -> None:
        """Run all stages; returns when the last one has returned.

        A failing stage cancels the others; its successors never see an end. Its error carries the note
        ``in stage 'NAME'`` and is raised plain; only independent failures of several stages are raised together,
        as an ``ExceptionGroup``.

        Raises:
            UsageError: a stage returned before the end of its source, or this is called outside ``execute``.
        """
        here = surroundings()
        channels: list[Channel[Any]] = [source.channel, *(_before(stage) for stage in self.stages[1:]), sink.channel]
        async with task_group() as tasks:
            for i, stage in enumerate(self.stages):
                last = i + 1 == len(self.stages)
                meter = Meter(here.runtime.clock)
                # The outer sink counts for whoever runs this pipeline as a stage, and is closed there.
                outlet = Outlet(channels[i + 1], meter, also=sink if last else None)
                tasks.start_soon(partial(_drive, stage, Inlet(channels[i], meter), outlet, closes=not last))

    def split(self) -> tuple[Pipeline[In_contra, Record], Pipeline[Record, Out_co]]:
        """The part before the record-to-entry stage, and the part from it on.

        Raises:
            UsageError: there is not exactly one stage with ``encodes``, or nothing comes before it.
        """
        found = [i for i, stage in enumerate(self.stages) if stage.encodes]
        if len(found) != 1:
            raise UsageError(
                f"pipeline {self.name!r} has {len(found)} record-to-entry stages and needs exactly one; "
                "put one encode() between project() and bucket(), or set `encodes = True` on your own stage"
            )
        if found == [0]:
            raise UsageError(
                f"pipeline {self.name!r} begins with its record-to-entry stage; "
                "start with chunk() | compare() | project() | convert()"
            )
        return Pipeline(self.stages[: found[0]]), Pipeline(self.stages[found[0] :])


def _flat(stage: Stage[Any, Any]) -> tuple[Stage[Any, Any], ...]:
    return stage.stages if isinstance(stage, Pipeline) else (stage,)


def _before(stage: Stage[Any, Any]) -> Channel[Any]:
    here = surroundings()

    def watch(items: int, nbytes: int) -> None:
        here.monitor.channel(stage.name, items=items, nbytes=nbytes)

    return Channel(here.limits, watch)


async def _drive(stage: Stage[Any, Any], source: Inlet[Any], sink: Outlet[Any], *, closes: bool) -> None:
    monitor = surroundings().monitor
    meter = source.meter
    METER.set(meter)
    monitor.stage_started(stage.name)
    ok = False
    try:
        await stage.run(source, sink)
        if not source.channel.exhausted:
            raise UsageError(
                f"stage {stage.name!r} returned before the end of its source; "
                "read the source to its end, also when the rest is not needed"
            )
        ok = True
    except Exception as error:
        error.add_note(f"in stage {stage.name!r}")
        raise
    finally:
        busy, waited = meter.times()
        monitor.stage_ended(stage.name, items=meter.items, nbytes=meter.nbytes, busy_s=busy, waited_s=waited, ok=ok)
    # Only a clean return ends the stream. Closing it on failure would let the next stage finish a truncated result
    # as if it were complete before the cancellation reaches it.
    if closes:
        sink.channel.close()
