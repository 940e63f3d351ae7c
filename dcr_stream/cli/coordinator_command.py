"""``dcr-stream coordinator``: a coordinator on its own."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
from rich.console import Console

from dcr_stream.commit import SqliteCommitStore
from dcr_stream.control import load_secret
from dcr_stream.front import Coordinator, run_async
from dcr_stream.peers import Mode, RefitReport
from dcr_stream.transports import open_transport

__all__ = ["run_coordinator_command"]


def run_coordinator_command(
    *,
    commits: Path,
    transport: str,
    owners: int,
    nodes: int,
    listen: str,
    run: str,
    mode: Mode,
    insecure_plaintext: bool,
    as_json: bool,
) -> None:
    """Serve until interrupted. Arguments as in ``dcr-stream coordinator --help``."""
    console = Console(stderr=True)

    def on_refit(report: RefitReport) -> None:
        if as_json:
            sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
            sys.stdout.flush()
        console.print(
            f"v{report.version} {report.kind} {report.mode}: {report.payload_bytes / 1e6:.2f} MB, "
            f"{report.elements:,} of {report.scanned:,} elements, {report.attempts} attempt(s)"
        )

    async def main() -> None:
        secret = load_secret()
        await open_transport(transport).aclose()
        store = SqliteCommitStore(commits, secret=secret)
        try:
            async with Coordinator.listen(
                listen,
                owners=owners,
                nodes=nodes,
                transport=transport,
                commits=store,
                run=run,
                secret=secret,
                insecure_plaintext=insecure_plaintext,
            ) as coordinator:
                console.print(f"run {run!r} at {coordinator.address}, committed version {coordinator.version}")
                await coordinator.serve(mode, on_refit=on_refit)
        finally:
            store.close()

    run_async(main)
