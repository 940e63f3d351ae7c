"""A rollout engine made of real processes: one worker per tensor-parallel rank."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess, SpawnProcess
from pathlib import Path
from types import TracebackType
from typing import Self

import anyio
import anyio.to_thread
import msgspec

from dcr_stream.cli.demo.processes import process_context
from dcr_stream.cli.demo.worker import (
    MAX_MESSAGE_BYTES,
    Dump,
    Embed,
    Handle,
    MakeReceiver,
    Ping,
    Request,
    WorkerSettings,
    serve,
)
from dcr_stream.errors import PeerLost, UsageError, error_named
from dcr_stream.interfaces import Engine
from dcr_stream.messages import ReceiverCall, ReceiverReply

__all__ = ["RolloutEngine"]


class RolloutEngine(Engine):
    """Serves sentence embeddings with ``world`` worker processes; each holds one receiver.

    Use it as an async context manager, or call ``start`` and ``aclose``. Requests and calls run one at a time, in
    the order in which they were made, on all ranks: a forward pass never overlaps an apply. The engine fails as a
    whole: when one rank is gone the others are ended too, the pending call and all later ones raise ``PeerLost``,
    and a new engine of the same name takes its place.

    Args:
        name: of the engine; its receivers are called ``name.0``, ``name.1``, …
        world: tensor-parallel ranks.
        make_receiver: called in each worker with the loader of its model (:class:`MakeReceiver`).
        timeout_s: longest time that a worker may take for one answer; one that exceeds it counts as gone.
    """

    def __init__(self, name: str, world: int, *, make_receiver: MakeReceiver, timeout_s: float = 60.0) -> None:
        self.name = name
        self.ranks = world
        self._make_receiver = make_receiver
        self._timeout_s = timeout_s
        self._workers: list[_Worker] = []
        self._turn = anyio.Lock()
        self._threads = anyio.CapacityLimiter(world)
        self._lost: PeerLost | None = PeerLost(f"engine {name!r} is not running; start it first")

    async def start(self) -> None:
        """Start the workers and wait until all are ready, with storage allocated and nothing loaded.

        Raises:
            PeerLost: a worker died. Errors that a worker met come back as the same class.
        """
        if self._workers:
            raise UsageError(f"engine {self.name!r} is already running; close it first")
        with tempfile.TemporaryDirectory(prefix="dcr-engine-") as folder:
            await anyio.to_thread.run_sync(self._start_workers, Path(folder, "ranks"))
            self._lost = None
            try:
                for reply in await self._ask([Ping()] * self.ranks):
                    _check(reply)
            except BaseException:
                await self.aclose()
                raise

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids in rank order."""
        return tuple(worker.pid for worker in self._workers)

    async def call(self, call: ReceiverCall) -> list[ReceiverReply]:
        """Run one call on the receiver of every rank and return their replies in rank order.

        Raises:
            PeerLost: a rank is gone.
        """
        return await self._ask([Handle(call)] * self.ranks)

    async def embed(self, token_ids: Sequence[int]) -> bytes:
        """The sentence embedding's fp32 values as bytes, computed by all ranks together.

        Raises:
            PeerLost: a rank is gone.
            UsageError: token ids that the model does not have.
        """
        replies = await self._ask([Embed(tuple(token_ids))] * self.ranks)
        return msgspec.msgpack.decode(_check(replies[0]), type=bytes)

    async def dump(self, stem: Path) -> list[Path]:
        """Write every rank's reachable tensors as integer bits to ``{stem}-rank{n}.safetensors``.

        Raises:
            PeerLost: a rank is gone.
        """
        paths = [stem.with_name(f"{stem.name}-rank{rank}.safetensors") for rank in range(self.ranks)]
        for reply in await self._ask([Dump(str(path)) for path in paths]):
            _check(reply)
        return paths

    def kill(self, rank: int) -> None:
        """SIGKILL one worker now, whatever it is doing."""
        self._workers[rank].kill()

    async def aclose(self) -> None:
        """End all processes; returns once they are gone. Workers hold nothing that must be saved. Idempotent."""
        with anyio.CancelScope(shield=True):
            self._lose(PeerLost(f"engine {self.name!r} was closed; start a new one"))
            async with self._turn:
                workers, self._workers = self._workers, []
                for worker in workers:
                    await anyio.to_thread.run_sync(worker.close, limiter=self._threads)

    def _start_workers(self, store: Path) -> None:
        for rank in range(self.ranks):
            settings = WorkerSettings(
                engine=self.name,
                rank=rank,
                world=self.ranks,
                store=str(store),
                make_receiver=self._make_receiver,
            )
            self._workers.append(_Worker(settings))

    async def _ask(self, requests: Sequence[Request]) -> list[ReceiverReply]:
        """One request per rank, all at once; every rank has answered, or is gone, when this returns."""
        replies: dict[int, ReceiverReply] = {}

        async def ask(rank: int) -> None:
            try:
                replies[rank] = await anyio.to_thread.run_sync(
                    self._workers[rank].exchange, requests[rank], self._timeout_s, limiter=self._threads
                )
            except PeerLost as error:
                self._lose(error)

        async with self._turn:
            if self._lost is None:
                async with anyio.create_task_group() as group:
                    for rank in range(self.ranks):
                        group.start_soon(ask, rank)
                for reply in replies.values():
                    if reply.error == PeerLost.__name__:
                        # Nobody died, but ranks lost each other: their group cannot be used again.
                        self._lose(PeerLost(f"engine {self.name!r}: {reply.text}"))
            if self._lost is not None:
                raise PeerLost(str(self._lost)) from self._lost
            return [replies[rank] for rank in range(self.ranks)]

    def _lose(self, error: PeerLost) -> None:
        if self._lost is None:
            self._lost = error
        for worker in self._workers:
            worker.kill()


class _Worker:
    """The engine's end of one worker process. Its methods block; the engine calls them in threads."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._label = f"rank {settings.rank} of engine {settings.engine!r}"
        context = process_context()
        self._connection: Connection
        self._connection, theirs = context.Pipe()
        self._process: ForkServerProcess | SpawnProcess = context.Process(
            target=serve, args=(theirs, settings), name=f"{settings.engine}.{settings.rank}", daemon=True
        )
        self._process.start()
        # Held here as well, the worker's end would stay open when the worker dies.
        theirs.close()
        self.pid = self._process.pid or 0
        self._decoder = msgspec.msgpack.Decoder(ReceiverReply)

    def exchange(self, request: Request, timeout_s: float) -> ReceiverReply:
        try:
            self._connection.send_bytes(msgspec.msgpack.encode(request))
            if not self._connection.poll(timeout_s):
                self.kill()
                raise PeerLost(
                    f"{self._label} (process {self.pid}) did not answer within {timeout_s:g} s and was ended; "
                    "start the engine again under the same name"
                )
            return self._decoder.decode(self._connection.recv_bytes(MAX_MESSAGE_BYTES))
        except (EOFError, OSError) as error:
            raise PeerLost(
                f"{self._label} (process {self.pid}) is gone; start the engine again under the same name"
            ) from error

    def kill(self) -> None:
        # The id of a process that has ended may belong to another one by now.
        if self._process.is_alive():
            self._process.kill()

    def close(self) -> None:
        self.kill()
        self._process.join()
        self._process.close()
        self._connection.close()


def _check(reply: ReceiverReply) -> msgspec.Raw:
    if reply.error is not None:
        raise error_named(reply.error, reply.text)
    return reply.result
