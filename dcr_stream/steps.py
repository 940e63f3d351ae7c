"""Protocol steps as the monitor sees them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dcr_stream.interfaces import Clock, Monitor

__all__ = ["step"]


@asynccontextmanager
async def step(monitor: Monitor, clock: Clock, role: str, name: str, detail: str = "") -> AsyncIterator[None]:
    """Tell ``monitor`` when ``role`` begins and ends ``name``, and how many seconds it took."""
    started = clock.monotonic()
    monitor.step(role, name, detail=detail)
    try:
        yield
    finally:
        monitor.step(role, name, seconds=clock.monotonic() - started, detail=detail)
