"""The gate of one engine: its requests and its hooks together, as a node drives them."""

from __future__ import annotations

import anyio

from dcr_stream.gate.hooks import close_engine, open_engine
from dcr_stream.gate.modes import AsyncGate, GateMode, SyncGate
from dcr_stream.gate.request_gate import RequestGate
from dcr_stream.interfaces import Engine, Gate
from dcr_stream.protocol import CloseGates

__all__ = ["EngineGate"]


class EngineGate(Gate):
    """Closes and opens ``requests`` around ``engine``'s hooks.

    Args:
        engine: whose hooks are called.
        requests: where the engine's requests are admitted; a new gate if not given.
        hook_deadline_s: how long one hook may take, in seconds.
    """

    def __init__(self, engine: Engine, requests: RequestGate | None = None, *, hook_deadline_s: float = 30.0) -> None:
        self.engine = engine
        self.requests = requests if requests is not None else RequestGate()
        self._hook_deadline_s = hook_deadline_s
        self._out_of_service = False
        self._turn = anyio.Lock()

    @property
    def serving(self) -> int | None:
        """The version that requests are admitted to; None while closed."""
        return self.requests.version if self.requests.is_open else None

    def shut(self) -> None:
        """Stop admissions at once; nothing is drained and no hook runs."""
        self.requests.shut()

    async def close(self, order: CloseGates) -> None:
        """Take the engine out of service; see ``close_engine``. Does nothing if it is out of service already."""
        async with self._turn:
            if self._out_of_service:
                return
            await close_engine(self.engine, self.requests, _mode(order), hook_deadline_s=self._hook_deadline_s)
            self._out_of_service = True

    async def open(self, version: int) -> None:
        """Put the engine back into service; see ``open_engine``. Does nothing if it serves ``version`` already."""
        async with self._turn:
            if self.serving == version:
                return
            await open_engine(self.engine, self.requests, version, hook_deadline_s=self._hook_deadline_s)
            self._out_of_service = False


def _mode(order: CloseGates) -> GateMode:
    kind = {"sync": SyncGate, "async": AsyncGate}[order.mode]
    return kind(drain_deadline_s=order.drain_deadline_s, drain=order.drain, after_deadline=order.after_deadline)
