"""How the demonstration starts its processes: forked from a clean server that has imported torch and the model once."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.forkserver import ensure_running

__all__ = ["EVERYTHING", "process_context", "warm_up", "when_closed"]

WORKERS = ("dcr_stream.cli.demo.worker",)
EVERYTHING = ("dcr_stream.cli.demo.host", "dcr_stream.cli.demo.trainers", "dcr_stream.cli.demo.training")


def process_context(preload: tuple[str, ...] = WORKERS) -> ForkServerContext | SpawnContext:
    """The multiprocessing context of all processes: ``forkserver``, or ``spawn`` where that does not exist.

    The server imports ``preload`` once, when this process first needs it. A process forked from it starts in
    milliseconds instead of the seconds that importing torch takes. It is single-threaded and holds no weights.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    return context


def warm_up() -> None:
    """Start the server, which imports in the background; call it early. Idempotent."""
    if isinstance(process_context(EVERYTHING), ForkServerContext):
        ensure_running()


def when_closed(pipe: Connection, act: Callable[[], object]) -> None:
    """Call ``act`` from a thread once the other end of ``pipe`` is closed: its process wants the end, or is gone."""

    def wait() -> None:
        with suppress(EOFError, OSError):
            pipe.recv_bytes()
        act()

    threading.Thread(target=wait, name="until closed", daemon=True).start()
