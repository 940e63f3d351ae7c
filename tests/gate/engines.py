"""An engine that records what is done to it, and fails where it is told to."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from dcr_stream.gate import RequestGate
from dcr_stream.interfaces import Engine
from dcr_stream.interfaces.engine import DrainMode
from dcr_stream.messages import ReceiverCall, ReceiverReply

__all__ = ["RecordingEngine"]


class RecordingEngine(Engine):
    """``log`` is what happened, in order; hooks in ``fail`` raise, those in ``hang`` never return."""

    name = "engine0"
    ranks = 1

    def __init__(self, gate: RequestGate, *, fail: frozenset[str] = frozenset(), hang: frozenset[str] = frozenset()):
        self.keeps_requests = True
        self.gate = gate
        self.fail = fail
        self.hang = hang
        self.log: list[str] = []
        self.on_pause: Callable[[DrainMode], None] | None = None

    async def call(self, call: ReceiverCall) -> list[ReceiverReply]:
        return [ReceiverReply()]

    async def pause(self, mode: DrainMode) -> None:
        await self._hook("pause", f"pause({mode})")
        if self.on_pause is not None:
            self.on_pause(mode)

    async def resume(self) -> None:
        await self._hook("resume", "resume")

    async def invalidate_caches(self) -> None:
        await self._hook("invalidate_caches", "invalidate_caches")

    async def _hook(self, hook: str, entry: str) -> None:
        gate = "open" if self.gate.is_open else f"closed, {self.gate.running} running"
        self.log.append(f"{entry} [{gate}]")
        if hook in self.hang:
            await anyio.sleep_forever()
        if hook in self.fail:
            raise RuntimeError("the engine's own error")
