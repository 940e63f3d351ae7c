"""The two ways to run the demonstration: as real processes, or all roles as plain objects in this one."""

from __future__ import annotations

import base64
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess, SpawnProcess
from pathlib import Path

import aiohttp
import anyio
import anyio.to_thread
import msgspec

from dcr_stream.cli.demo.host import Answer, Ask, HostReport, HostSettings, serve_host
from dcr_stream.cli.demo.processes import EVERYTHING, process_context
from dcr_stream.cli.demo.trainers import StepDone, TrainerSettings, TrainingEnded, train
from dcr_stream.errors import DcrError, PeerLost, TransitionFailed
from dcr_stream.flow import task_group
from dcr_stream.front import Coordinator

__all__ = ["LAYOUTS", "RUN", "TRAINERS", "ProcessWorld", "World", "bits_of", "new_secret"]

RUN = "demo"
LAYOUTS: dict[str, int] = {"tp1": 1, "tp2": 2}
"""Rollout engines by host name, and how many tensor-parallel ranks each has."""

TRAINERS = 2
_GRACE_S = 4.0


class World(ABC):
    """Trainers and rollout engines as the driver sees them."""

    @abstractmethod
    async def ask(self, host: str, token_ids: tuple[int, ...]) -> Answer | None:
        """One request to a host's engine; None if the host cannot answer now (503)."""

    @abstractmethod
    async def dump(self, host: str, stem: Path) -> list[Path]:
        """Write what every rank of the host's engine holds; paths in rank order."""

    @abstractmethod
    async def report(self, host: str) -> HostReport:
        """What the host says of itself."""


@dataclass(slots=True)
class _Child:
    process: ForkServerProcess | SpawnProcess
    pipe: Connection


@dataclass
class ProcessWorld(World):
    """Two training ranks and two rollout hosts as processes; requests travel over HTTP on the loopback interface."""

    session: aiohttp.ClientSession
    ports: dict[str, int] = field(default_factory=dict)
    ended: dict[int, TrainingEnded] = field(default_factory=dict)
    trainers_done: anyio.Event = field(default_factory=anyio.Event)

    @classmethod
    @asynccontextmanager
    async def start(
        cls,
        coordinator: Coordinator,
        secret: bytes,
        folder: Path,
        *,
        steps: int,
        kill_at: int,
        on_step: Callable[[int, StepDone], None],
    ) -> AsyncIterator[ProcessWorld]:
        """Start all processes; end them, and wait until they are gone, when the block ends."""
        children: list[_Child] = []
        context = process_context(EVERYTHING)

        def spawn(target: Callable[..., None], settings: msgspec.Struct, name: str) -> _Child:
            ours, theirs = context.Pipe()
            process = context.Process(target=target, args=(settings, theirs), name=name)
            process.start()
            theirs.close()
            children.append(_Child(process, ours))
            return children[-1]

        async with AsyncExitStack() as stack:
            stack.push_async_callback(_end, children)
            session = await stack.enter_async_context(aiohttp.ClientSession())
            world = cls(session)
            hosts: dict[str, _Child] = {}
            for name, ranks in LAYOUTS.items():
                fatal = kill_at if ranks > 1 else -1
                settings = HostSettings(name, ranks, coordinator.address, RUN, secret, fatal)
                hosts[name] = await anyio.to_thread.run_sync(spawn, serve_host, settings, f"rollout {name}")
            trainers: list[_Child] = []
            for rank in range(TRAINERS):
                job = TrainerSettings(rank, TRAINERS, steps, coordinator.address, RUN, secret, str(folder))
                trainers.append(await anyio.to_thread.run_sync(spawn, train, job, f"trainer {rank}"))
            for name, child in hosts.items():
                port = msgspec.json.decode(await _receive(child, f"rollout host {name}"), type=int | str)
                if isinstance(port, str):
                    raise DcrError(f"rollout host {name} did not start: {port}")
                world.ports[name] = port
            async with task_group() as tasks:
                for rank, child in enumerate(trainers):
                    tasks.start_soon(world._listen, rank, child, on_step)
                yield world
                tasks.cancel_scope.cancel()

    async def ask(self, host: str, token_ids: tuple[int, ...]) -> Answer | None:
        """POST to ``/v1/embeddings``."""
        status, body = await self._http(host, "POST", "/v1/embeddings", msgspec.json.encode(Ask(token_ids)))
        if status == 503:
            return None
        return msgspec.json.decode(_ok(host, status, body), type=Answer)

    async def dump(self, host: str, stem: Path) -> list[Path]:
        """POST to ``/demo/dump``."""
        status, body = await self._http(host, "POST", "/demo/dump", msgspec.json.encode(str(stem)))
        return [Path(path) for path in msgspec.json.decode(_ok(host, status, body), type=list[str])]

    async def report(self, host: str) -> HostReport:
        """GET ``/demo/report``."""
        status, body = await self._http(host, "GET", "/demo/report", None)
        return msgspec.json.decode(_ok(host, status, body), type=HostReport)

    async def _http(self, host: str, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        try:
            url = f"http://127.0.0.1:{self.ports[host]}{path}"
            async with self.session.request(method, url, data=body) as response:
                return response.status, await response.read()
        except aiohttp.ClientError as error:
            raise PeerLost(f"rollout host {host} does not answer any more: {error}") from error

    async def _listen(self, rank: int, child: _Child, on_step: Callable[[int, StepDone], None]) -> None:
        while True:
            message = msgspec.json.decode(await _receive(child, f"trainer {rank}"), type=StepDone | TrainingEnded)
            if isinstance(message, TrainingEnded):
                self.ended[rank] = message
                if message.error:
                    raise TransitionFailed(f"trainer {rank} stopped: {message.error}")
                if len(self.ended) == TRAINERS:
                    self.trainers_done.set()
                return
            on_step(rank, message)


def _ok(host: str, status: int, body: bytes) -> bytes:
    if status != 200:
        raise PeerLost(f"rollout host {host} answered {status}: {body.decode(errors='replace')}")
    return body


async def _receive(child: _Child, who: str) -> bytes:
    """The next message of a child; waits on its pipe with a thread that can be given up."""

    def read() -> bytes:
        while not child.pipe.poll(0.2):
            anyio.from_thread.check_cancelled()
        return child.pipe.recv_bytes()

    try:
        return await anyio.to_thread.run_sync(read)
    except (EOFError, OSError) as error:
        raise PeerLost(f"{who} ended before it was done (exit status {child.process.exitcode})") from error


async def _end(children: list[_Child]) -> None:
    """Close the pipes, which children take as the end; kill what is left after a moment."""

    def end() -> None:
        limit = time.monotonic() + _GRACE_S
        for child in children:
            child.pipe.close()
        for child in children:
            child.process.join(max(0.0, limit - time.monotonic()))
            if child.process.is_alive():
                child.process.kill()
                child.process.join()
            child.process.close()

    with anyio.CancelScope(shield=True):
        await anyio.to_thread.run_sync(end)


def new_secret() -> bytes:
    """A secret for one demonstration."""
    return secrets.token_hex(32).encode()


def bits_of(answer: Answer) -> bytes:
    """The embedding's fp32 bits."""
    return base64.b64decode(answer.bits)
