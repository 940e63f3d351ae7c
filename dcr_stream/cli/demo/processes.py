"""How the demonstration starts its processes: forked from a clean server that has imported torch and the model once."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.forkserver import ensure_running

__all__ = ["process_context", "warm_up"]

PRELOAD = ["dcr_stream.cli.demo.worker", "dcr_stream.cli.demo.training"]


def process_context() -> ForkServerContext | SpawnContext:
    """The multiprocessing context of all processes: ``forkserver``, or ``spawn`` where that does not exist.

    A process forked from the server starts in milliseconds instead of the seconds that importing torch takes. The
    server is single-threaded and holds no weights.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def warm_up() -> None:
    """Start the server, which imports in the background; call it early. Idempotent."""
    if isinstance(process_context(), ForkServerContext):
        ensure_running()
