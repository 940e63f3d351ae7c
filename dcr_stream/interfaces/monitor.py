"""Whoever watches a run: progress bars, metrics, traces, dashboards."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Monitor", "NullMonitor"]


class Monitor(Protocol):
    """Sees what stages and roles do; must return at once and never raise. Times are seconds on the role's clock."""

    def stage_started(self, stage: str) -> None:
        """A stage began to run."""

    def stage_ended(self, stage: str, *, items: int, nbytes: int, busy_s: float, waited_s: float, ok: bool) -> None:
        """A stage ended: what it passed on, how long it worked and how long it waited on its channels."""

    def channel(self, stage: str, *, items: int, nbytes: int) -> None:
        """What is queued before ``stage`` now."""

    def step(self, role: str, step: str, *, seconds: float | None = None, detail: str = "") -> None:
        """A protocol step began (``seconds`` is None) or ended."""

    def progress(self, what: str, done: int, total: int, unit: str) -> None:
        """Work towards a known total."""


class NullMonitor:
    """Watches nothing."""

    def stage_started(self, stage: str) -> None: ...

    def stage_ended(self, stage: str, *, items: int, nbytes: int, busy_s: float, waited_s: float, ok: bool) -> None: ...

    def channel(self, stage: str, *, items: int, nbytes: int) -> None: ...

    def step(self, role: str, step: str, *, seconds: float | None = None, detail: str = "") -> None: ...

    def progress(self, what: str, done: int, total: int, unit: str) -> None: ...
