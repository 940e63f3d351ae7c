"""Synchronous and asynchronous RL as seen by a gate: they differ in when it closes, and in nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from dcr_stream.errors import UsageError
from dcr_stream.interfaces.engine import DrainMode

__all__ = ["AfterDeadline", "AsyncGate", "GateMode", "SyncGate", "mode_named"]

AfterDeadline = Literal["keep", "abort", "fail"]


@dataclass(frozen=True, kw_only=True)
class GateMode:
    """How one transition closes gates.

    Args:
        drain_deadline_s: how long ``drain="wait"`` waits for requests, in seconds. A request that runs longer does
            not hold the engine: ``after_deadline`` decides.
        drain: ``wait`` for running requests, ``abort`` them, or ``keep`` them across the swap.
        after_deadline: what happens to requests that still run: ``keep`` them with caches cleared, ``abort`` them,
            or ``fail`` the attempt so that version v goes on serving.
    """

    closes: ClassVar[Literal["start", "staged"]]
    """``start``: when the first attempt starts. ``staged``: once every node holds every payload."""

    drain_deadline_s: float = 30.0
    drain: DrainMode = "wait"
    after_deadline: AfterDeadline = "keep"


@dataclass(frozen=True, kw_only=True)
class SyncGate(GateMode):
    """Synchronous RL: nothing is served while the transition runs, and payloads are applied on arrival."""

    closes: ClassVar[Literal["start", "staged"]] = "start"


@dataclass(frozen=True, kw_only=True)
class AsyncGate(GateMode):
    """Asynchronous RL: version v is served while v+1 is staged; the gate closes only for drain, apply and commit."""

    closes: ClassVar[Literal["start", "staged"]] = "staged"


def mode_named(name: str) -> GateMode:
    """The mode called ``sync`` or ``async``, with default deadlines.

    Raises:
        UsageError: there is no such mode.
    """
    match name:
        case "sync":
            return SyncGate()
        case "async":
            return AsyncGate()
        case _:
            raise UsageError(f"there is no mode {name!r}; use 'sync' or 'async'")
