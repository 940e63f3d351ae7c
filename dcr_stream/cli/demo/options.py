"""What the demonstration can be asked for; checked before anything heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dcr_stream.errors import UsageError

__all__ = ["DemoOptions"]


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """``steps`` delta refits after the first dense one. ``transport``: a URL, or None for a temporary folder."""

    steps: int = 5
    mode: Literal["sync", "async"] = "async"
    transport: str | None = None
    kill: bool = False
    in_process: bool = False
    keep: Path | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= 1000:
            raise UsageError(f"--steps {self.steps}: give a number from 1 to 1000")
        if self.kill and self.in_process:
            raise UsageError("--kill ends a process, and with --in-process there is none to end; leave one out")
