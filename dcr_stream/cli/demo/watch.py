"""What the demonstration measures by watching: busy seconds per stage and per protocol step."""

from __future__ import annotations

import threading

import msgspec

from dcr_stream.interfaces import NullMonitor

__all__ = ["Stopwatch", "Times"]


class Times(msgspec.Struct):
    """Seconds of work, by stage and by protocol step of one role, added up."""

    stages: dict[str, float] = {}
    steps: dict[str, float] = {}


class Stopwatch(NullMonitor):
    """A monitor that adds up busy seconds. Thread-safe."""

    def __init__(self) -> None:
        self.times = Times()
        self._lock = threading.Lock()

    def reset(self) -> None:
        """Forget what was measured so far."""
        with self._lock:
            self.times = Times()

    def stage_ended(self, stage: str, *, items: int, nbytes: int, busy_s: float, waited_s: float, ok: bool) -> None:
        """Add a stage's work."""
        if stage not in ("feed", "deliver"):
            with self._lock:
                self.times.stages[stage] = self.times.stages.get(stage, 0.0) + busy_s

    def step(self, role: str, step: str, *, seconds: float | None = None, detail: str = "") -> None:
        """Add a step's duration."""
        if seconds is not None:
            with self._lock:
                self.times.steps[step] = self.times.steps.get(step, 0.0) + seconds
