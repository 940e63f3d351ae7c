"""A rollout host as a process: node, engine and gate, serving sentence embeddings over HTTP on the loopback interface.

``POST /v1/embeddings`` goes through the request gate. The routes under ``/demo/`` are the demonstration's own: they
write what the engine holds to files, and have a receiver killed in the middle of an apply.
"""

from __future__ import annotations

import base64
import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import anyio
import msgspec
from aiohttp import web

from dcr_stream.cli.demo.engine import RolloutEngine
from dcr_stream.cli.demo.processes import when_closed
from dcr_stream.errors import DcrError, GateClosed, PeerLost
from dcr_stream.flow import task_group
from dcr_stream.front import Node, run_async
from dcr_stream.gate import EngineGate, RequestGate
from dcr_stream.interfaces import Engine
from dcr_stream.messages import ReceiverCall, ReceiverReply
from dcr_stream.node import NodeSettings
from dcr_stream.protocol import CloseGates
from dcr_stream.receiver import Receiver

__all__ = ["HOLD_S", "Answer", "Ask", "HostReport", "HostSettings", "TimedGate", "serve_host"]

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

HOLD_S = 60.0
"""How long a request waits for the gate to open."""


class HostSettings(msgspec.Struct, frozen=True):
    """What a rollout host is started with. ``kill_at``: the version whose apply kills rank ``world - 1``; -1: none."""

    name: str
    world: int
    coordinator: str
    run: str
    secret: bytes
    kill_at: int = -1


class Ask(msgspec.Struct, frozen=True):
    """A request: token ids of one sentence."""

    token_ids: tuple[int, ...]


class Answer(msgspec.Struct, frozen=True):
    """The sentence embedding's fp32 bits (base64), and the versions that it started and ended on."""

    bits: str
    version_start: int
    version_end: int


class HostReport(msgspec.Struct, frozen=True):
    """What a host says of itself: the version it serves (-1: none), its gate's pauses in seconds, and restarts."""

    serving: int
    pauses: tuple[tuple[int, float], ...]
    restarts: int
    killed: bool


class TimedGate(EngineGate):
    """An engine's gate that remembers for how long it was closed before each version."""

    def __init__(self, engine: Engine, requests: RequestGate | None = None) -> None:
        super().__init__(engine, requests)
        self.pauses: list[tuple[int, float]] = []
        self._closed_at: float | None = None

    async def close(self, order: CloseGates) -> None:
        """Close, and remember when."""
        if self._closed_at is None and self.serving is not None:
            self._closed_at = time.monotonic()
        await super().close(order)

    async def open(self, version: int) -> None:
        """Open, and remember after how long."""
        await super().open(version)
        if self._closed_at is not None:
            self.pauses.append((version, time.monotonic() - self._closed_at))
            self._closed_at = None


class DoomedEngine(RolloutEngine):
    """An engine whose last rank is killed (SIGKILL) while it applies a payload of the attempt for ``kill_at``."""

    kill_at = -1
    killed = False
    _target = -1
    _applied = 0

    async def call(self, call: ReceiverCall) -> list[ReceiverReply]:
        """As any engine; from the second payload of the fatal attempt on, a rank dies during the call."""
        if call.method == "begin":
            attempt = msgspec.msgpack.decode(call.args)["attempt"]
            self._target, self._applied = attempt[1], 0
        elif call.method == "apply":
            self._applied += 1
        fatal = call.method == "apply" and self._target == self.kill_at and self._applied == 2 and not self.killed
        if not fatal:
            return await super().call(call)
        self.killed = True
        replies: list[ReceiverReply] = []
        async with task_group() as tasks:
            tasks.start_soon(self._kill_soon)
            replies.extend(await super().call(call))
        return replies

    async def _kill_soon(self) -> None:
        await anyio.sleep(0.002)  # the first payload is applied, the second has just gone to the workers
        self.kill(self.ranks - 1)


class _Host:
    def __init__(self, settings: HostSettings) -> None:
        self.settings = settings
        self.restarts = 0
        self.killed = False
        self.engine = self._make()
        self.gate = TimedGate(self.engine)
        self._old_pauses: list[tuple[int, float]] = []

    def _make(self) -> DoomedEngine:
        engine = DoomedEngine("engine", self.settings.world, make_receiver=Receiver)
        engine.kill_at = -1 if self.killed else self.settings.kill_at
        return engine

    async def watch(self, node: Node) -> None:
        """Restart the engine when one of its processes is gone, as a supervisor would."""
        while True:
            await anyio.sleep(0.1)
            if all(_alive(pid) for pid in self.engine.pids):
                continue
            self.killed = self.killed or self.engine.killed
            self._old_pauses += self.gate.pauses
            # Requests that wait for the old engine wait for the new one.
            waiting = self.gate.requests
            waiting.shut()
            await self.engine.aclose()
            self.engine = self._make()
            await self.engine.start()
            self.gate = TimedGate(self.engine, waiting)
            self.restarts += 1
            await node.replace(self.engine, self.gate)

    async def embeddings(self, request: web.Request) -> web.Response:
        ask = msgspec.json.decode(await request.read(), type=Ask)
        async with self.gate.requests.admit(HOLD_S) as ticket:
            embedding = await self.engine.embed(ask.token_ids)
        answer = Answer(base64.b64encode(embedding).decode(), ticket.version_start, ticket.version_end)
        headers = {"X-Policy-Version-Start": str(answer.version_start), "X-Policy-Version-End": str(answer.version_end)}
        return web.Response(body=msgspec.json.encode(answer), content_type="application/json", headers=headers)

    async def dump(self, request: web.Request) -> web.Response:
        stem = msgspec.json.decode(await request.read(), type=str)
        paths = await self.engine.dump(Path(stem))
        return web.Response(body=msgspec.json.encode([str(path) for path in paths]))

    async def report(self, request: web.Request) -> web.Response:
        serving = self.gate.serving
        report = HostReport(
            -1 if serving is None else serving,
            (*self._old_pauses, *self.gate.pauses),
            self.restarts,
            self.killed or self.engine.killed,
        )
        return web.Response(body=msgspec.json.encode(report))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except OSError:
        return True


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except (GateClosed, PeerLost) as error:
        return web.Response(status=503, text=str(error), headers={"Retry-After": "1"})
    except DcrError as error:
        return web.Response(status=400, text=str(error))


def serve_host(settings: HostSettings, pipe: Connection) -> None:
    """Run a host until the other end of ``pipe`` closes. Sends its HTTP port, or an error text, through ``pipe``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    async def main() -> None:
        try:
            await _serve(settings, pipe)
        except DcrError as error:
            with suppress(BrokenPipeError):
                pipe.send_bytes(msgspec.json.encode(f"{type(error).__name__}: {error}"))

    run_async(main)


async def _serve(settings: HostSettings, pipe: Connection) -> None:
    host = _Host(settings)
    await host.engine.start()
    app = web.Application(middlewares=[_errors])
    app.router.add_post("/v1/embeddings", host.embeddings)
    app.router.add_post("/demo/dump", host.dump)
    app.router.add_get("/demo/report", host.report)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)  # requests may wait for a gate that stays closed
    gone = anyio.Event()
    token = anyio.lowlevel.current_token()

    try:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        limits = NodeSettings(call_deadline_s=60.0, reconnect_s=0.2)
        async with Node.connect(
            settings.coordinator,
            [host.gate],
            name=settings.name,
            run=settings.run,
            secret=settings.secret,
            settings=limits,
        ) as node:
            when_closed(pipe, lambda: anyio.from_thread.run_sync(gone.set, token=token))
            try:
                pipe.send_bytes(msgspec.json.encode(port))
            except BrokenPipeError:
                return  # whoever started this process is gone
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(host.watch, node)
                await gone.wait()
                tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await runner.cleanup()
            await host.engine.aclose()
