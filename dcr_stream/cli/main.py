"""Commands of ``dcr-stream``.

Exit status: 0 as asked; 1 a comparison found differences, or ``doctor`` something that does not work; 2 wrong use, or
an error that names its way out; 130 interrupted.
"""

from __future__ import annotations

import signal
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal, Optional

import typer

import dcr_stream
from dcr_stream.errors import DcrError

__all__ = ["app", "main"]

app = typer.Typer(
    name="dcr-stream",
    help="Bit-exact delta-compressed weight refit: sends only the changed bits of a policy to its rollout engines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class ModeName(StrEnum):
    """When gates close."""

    sync = "sync"
    asynchronous = "async"


Mode = Annotated[ModeName, typer.Option(help="sync: gates close first. async: once the delta is staged.")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output; its last line is one JSON object.")]


def _version(show: bool) -> None:
    if show:
        typer.echo(f"dcr-stream {dcr_stream.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Global options."""


@app.command()
def demo(
    steps: Annotated[int, typer.Option(help="Training steps; each is followed by a delta refit.")] = 5,
    mode: Mode = ModeName.asynchronous,
    transport: Annotated[Optional[str], typer.Option(help="file:///DIR; the default is a temporary folder.")] = None,  # noqa: UP045
    kill: Annotated[bool, typer.Option("--kill", help="Kill a receiver while it applies; it rejoins.")] = False,
    in_process: Annotated[bool, typer.Option("--in-process", help="All roles as objects in this process.")] = False,
    as_json: Json = False,
    keep: Annotated[Optional[Path], typer.Option(help="Copy states, dumps and the reference report here.")] = None,  # noqa: UP045
) -> None:
    """Refit a real model from training processes to rollout processes that keep serving, and prove every bit.

    Trains all-MiniLM-L6-v2 with AdamW on two ranks, serves it on two engines (one of them tensor-parallel), answers
    requests through the request gate all the time, and compares every tensor and every answer with a dense refit
    made in fresh processes.

    Example: dcr-stream demo --steps 3 --mode sync --kill
    """
    from dcr_stream.cli.demo.options import DemoOptions
    from dcr_stream.cli.demo.text import checkpoint_path

    name: Literal["sync", "async"] = "sync" if mode is ModeName.sync else "async"
    options = DemoOptions(steps=steps, mode=name, transport=transport, kill=kill, in_process=in_process, keep=keep)
    checkpoint_path()  # names what is not installed before anything that needs it is imported
    from dcr_stream.cli.demo_command import run_demo_command

    raise typer.Exit(run_demo_command(options, as_json=as_json))


@app.command()
def coordinator(
    commits: Annotated[Path, typer.Option(help="SQLite file of the commit record; made if the run is new.")],
    transport: Annotated[str, typer.Option(help="URL of the payloads' transport, such as file:///shared/payloads.")],
    owners: Annotated[int, typer.Option(min=1, help="Training ranks that take part.")],
    nodes: Annotated[int, typer.Option(min=1, help="Rollout hosts that the first refit waits for.")] = 1,
    listen: Annotated[str, typer.Option(help="Address to listen at.")] = "dcr://127.0.0.1:7000",
    run: Annotated[str, typer.Option(help="Name of the run.")] = "run",
    mode: Mode = ModeName.asynchronous,
    insecure_plaintext: Annotated[
        bool, typer.Option("--insecure-plaintext", help="Listen beyond loopback without encryption (with a secret).")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run a coordinator on its own, until interrupted.

    The run's secret comes from DCR_STREAM_SECRET or DCR_STREAM_SECRET_FILE; without one, only loopback is served.

    Example: dcr-stream coordinator --commits run.db --transport file:///shared/payloads --owners 8 --nodes 2
    """
    from dcr_stream.cli.coordinator_command import run_coordinator_command

    run_coordinator_command(
        commits=commits,
        transport=transport,
        owners=owners,
        nodes=nodes,
        listen=listen,
        run=run,
        mode="sync" if mode is ModeName.sync else "async",
        insecure_plaintext=insecure_plaintext,
        as_json=as_json,
    )


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say whether this machine and installation are ready: packages, kernels, CUDA, transports, memory.

    Compiles the kernels, or loads them where an earlier process has compiled them, and checks them against numpy. The
    exit status is 1 if something does not work; what only costs time is a warning.

    Example: dcr-stream doctor --json
    """
    from dcr_stream.cli.doctor_command import run_doctor_command

    raise typer.Exit(run_doctor_command(as_json=as_json))


def main() -> None:
    """Entry point: errors are one line that names the thing and the way out, never a traceback."""
    # A polite end cleans up like Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        app()
    except (DcrError, BaseExceptionGroup, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt) or _interrupted(error):
            sys.stderr.write("interrupted\n")
            sys.exit(130)
        found = _typed(error)
        if not found:
            raise
        for text in dict.fromkeys(found):
            sys.stderr.write(f"error: {text}\n")
        sys.exit(2)


def _interrupted(error: BaseException) -> bool:
    return isinstance(error, BaseExceptionGroup) and error.subgroup(KeyboardInterrupt) is not None


def _typed(error: BaseException) -> list[str]:
    """Texts of the typed errors in ``error``; empty if anything else is among them."""
    if isinstance(error, DcrError):
        return [str(error)]
    if not isinstance(error, ExceptionGroup):
        return []
    texts = [_typed(inner) for inner in error.exceptions]
    return [text for inner in texts for text in inner] if all(texts) else []
