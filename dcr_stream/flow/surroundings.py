"""What a running stage may use besides its two channels: worker threads, and the meter that counts its work."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from dcr_stream.errors import UsageError
from dcr_stream.flow.channel import Limits
from dcr_stream.flow.meter import Meter
from dcr_stream.interfaces import Monitor
from dcr_stream.runtime import Runtime

__all__ = ["METER", "SURROUNDINGS", "Surroundings", "in_worker", "surroundings"]

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Runtime, monitor and channel limits of one execution."""

    runtime: Runtime
    monitor: Monitor
    limits: Limits


# Context variables rather than arguments, so that a stage has one method with two parameters and a pipeline is
# itself a stage. `execute` sets the first one; each stage's task has the second one to itself.
SURROUNDINGS: ContextVar[Surroundings] = ContextVar("dcr_stream.flow.surroundings")
METER: ContextVar[Meter] = ContextVar("dcr_stream.flow.meter")


def surroundings() -> Surroundings:
    """The surroundings of the execution that the caller belongs to.

    Raises:
        UsageError: the caller does not run inside ``execute``.
    """
    try:
        return SURROUNDINGS.get()
    except LookupError:
        raise UsageError("stages run inside dcr_stream.flow.execute(); hand the pipeline to it") from None


async def in_worker(fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Run ``fn`` in the pipeline's worker threads; the time counts as the stage's work.

    Cancelling the caller waits for ``fn`` to return.

    Raises:
        UsageError: called outside ``execute``.
    """
    workers = surroundings().runtime.workers
    meter = METER.get()
    meter.called(1)
    try:
        return await workers.run(fn, *args, **kwargs)
    finally:
        meter.called(-1)
