"""A rollout worker: one tensor-parallel rank of an engine, in its own process, and what it is asked."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol, TypeAlias

import msgspec
import torch
from safetensors.torch import save_file

from dcr_stream.cli.demo.collective import Collective
from dcr_stream.cli.demo.rollout_model import ModelConfig, RolloutModel, snapshot
from dcr_stream.cli.demo.text import checkpoint_path
from dcr_stream.errors import UsageError
from dcr_stream.interfaces import Loader
from dcr_stream.loaders import TorchLoader
from dcr_stream.messages import ReceiverCall, ReceiverReply

__all__ = [
    "MAX_MESSAGE_BYTES",
    "Dump",
    "Embed",
    "Handle",
    "MakeReceiver",
    "Ping",
    "ReceiverLike",
    "Request",
    "RolloutWorker",
    "WorkerSettings",
    "serve",
]

MAX_MESSAGE_BYTES = 1 << 29
"""Longest message between an engine and a worker."""


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Answered as soon as the worker is ready."""


class Handle(msgspec.Struct, frozen=True, tag="handle"):
    """A node's call for this rank's receiver."""

    call: ReceiverCall


class Embed(msgspec.Struct, frozen=True, tag="embed"):
    """Compute a sentence embedding; answered with its fp32 bits as ``bytes``."""

    token_ids: tuple[int, ...]


class Dump(msgspec.Struct, frozen=True, tag="dump"):
    """Write the bits of every reachable tensor to a safetensors file."""

    path: str


Request: TypeAlias = Ping | Handle | Embed | Dump


class ReceiverLike(Protocol):
    """What a worker needs of its receiver."""

    def handle(self, call: ReceiverCall) -> ReceiverReply:
        """Run one call; errors come back inside the reply."""
        ...


class MakeReceiver(Protocol):
    """Builds the receiver of a worker; must be picklable (a class or a module-level function)."""

    def __call__(self, loader: Loader, *, rank: int, name: str) -> ReceiverLike:
        """The receiver of rank ``rank`` of its engine, over the worker's loader; ``name`` is for messages."""
        ...


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """What a worker is started with. ``store`` is the rendezvous file of the engine's ranks."""

    engine: str
    rank: int
    world: int
    store: str
    make_receiver: MakeReceiver


class RolloutWorker:
    """The model, its receiver, and the answers to requests, one at a time.

    Args:
        settings: which rank this is.
        all_reduce: sums over the engine's ranks.
    """

    def __init__(self, settings: WorkerSettings, all_reduce: Callable[[torch.Tensor], torch.Tensor]) -> None:
        config = ModelConfig.read(checkpoint_path())
        self.model = RolloutModel(config, rank=settings.rank, world=settings.world, all_reduce=all_reduce)
        self._receiver = settings.make_receiver(
            TorchLoader(self.model), rank=settings.rank, name=f"{settings.engine}.{settings.rank}"
        )
        self._vocabulary = config.vocab_size
        self._longest = config.max_position_embeddings

    def answer(self, request: Request) -> ReceiverReply:
        """Do what is asked; errors come back inside the reply."""
        try:
            match request:
                case Handle(call):
                    return self._receiver.handle(call)
                case Embed(token_ids):
                    return ReceiverReply(msgspec.Raw(msgspec.msgpack.encode(self._embed(token_ids))))
                case Dump(path):
                    save_file(snapshot(self.model), path)
                case Ping():
                    pass
            return ReceiverReply()
        except Exception as error:
            return failure(error)

    def _embed(self, token_ids: tuple[int, ...]) -> bytes:
        if not 0 < len(token_ids) <= self._longest:
            raise UsageError(f"a request has {len(token_ids)} tokens; send between 1 and {self._longest}")
        if not all(0 <= token < self._vocabulary for token in token_ids):
            raise UsageError(f"a request has token ids outside the vocabulary of {self._vocabulary}")
        return self.model(torch.tensor(token_ids)).numpy().tobytes()  # type: ignore[no-any-return]


def failure(error: Exception) -> ReceiverReply:
    """The reply that carries an error by class name and text."""
    return ReceiverReply(error=type(error).__name__, text=str(error))


def serve(connection: Connection, settings: WorkerSettings) -> None:
    """Answer the engine's requests until it closes the connection. Entry point of the worker's process.

    Messages are MessagePack of :data:`Request` and ``ReceiverReply``; each request is answered before the next is
    read. If the worker cannot be set up, every request is answered with that error.
    """
    # A terminal's interrupt goes to the whole process group; the engine decides when its workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Sums over several threads would add in another order.
    torch.set_num_threads(1)
    decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
    worker: RolloutWorker | ReceiverReply
    try:
        collective = Collective(Path(settings.store), settings.rank, settings.world)
        worker = RolloutWorker(settings, collective.all_reduce)
    except Exception as error:
        worker = failure(error)
    with connection:
        while True:
            try:
                body = connection.recv_bytes(MAX_MESSAGE_BYTES)
            except EOFError:
                return
            request = decoder.decode(body)
            reply = worker.answer(request) if isinstance(worker, RolloutWorker) else worker
            connection.send_bytes(msgspec.msgpack.encode(reply))
