"""What the demonstration proves and shows: every bit against the reference, every answer, and a table per refit."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from dcr_stream.canonical import Words
from dcr_stream.cli.demo.host import Answer
from dcr_stream.cli.demo.reference import ReferenceReport
from dcr_stream.cli.demo.world import LAYOUTS, bits_of
from dcr_stream.codec import words
from dcr_stream.peers import RefitReport

__all__ = ["Given", "RefitRow", "Responses", "entropy_bound", "judge_responses", "make_rows", "show"]


class Given(msgspec.Struct, frozen=True):
    """An answer that a client got: from which host, to which request."""

    host: str
    request: int
    answer: Answer


class Responses(msgspec.Struct, frozen=True):
    """All answers, sorted: ``exact`` belong to the version they say, ``spanning`` to one of the two they name."""

    total: int
    exact: int
    spanning: int
    mixed: int
    by_host: dict[str, int]


class RefitRow(msgspec.Struct, frozen=True):
    """One refit in the table and in ``--json``. Seconds, bytes, and shares of 1."""

    version: int
    mode: str
    kind: str
    attempts: int
    restored: int
    change_rate: float
    payload_bytes: int
    checkpoint_share: float
    bytes_per_change: float
    entropy_bound: float
    timeline_s: dict[str, float]
    gate_pause_s: dict[str, float]
    exact: bool
    failures: tuple[str, ...]


def judge_responses(given: Iterable[Given], reference: ReferenceReport) -> Responses:
    """Compare every answer, bit for bit, with the reference of the same engine layout."""
    known = {(e.world, e.version, e.request): e.bits for e in reference.embeddings}
    exact = spanning = mixed = 0
    by_host: dict[str, int] = {}
    for one in given:
        by_host[one.host] = by_host.get(one.host, 0) + 1
        start, end = one.answer.version_start, one.answer.version_end
        allowed = [known.get((LAYOUTS[one.host], version, one.request)) for version in {start, end}]
        if bits_of(one.answer) not in allowed:
            mixed += 1
        elif start == end:
            exact += 1
        else:
            spanning += 1
    return Responses(exact + spanning + mixed, exact, spanning, mixed, by_host)


def entropy_bound(old: Path, new: Path) -> tuple[int, int, float]:
    """Changed and total elements between two saved states, and the bound H(gap) + H(d) in bytes per change.

    H(gap) = H(p)/p is what positions of independent changes at rate p need; H(d) is the empirical entropy of the
    16-bit integer differences.
    """
    before, after = load_file(old), load_file(new)
    total = changed = 0
    counts = np.zeros(1 << 16, np.int64)
    for name, tensor in after.items():
        a, b = words(before[name]), words(tensor)
        total += b.size
        differ = a != b
        changed += int(differ.sum())
        if b.itemsize == 2:
            counts += np.bincount(b[differ] - a[differ], minlength=1 << 16)
    if not changed:
        return 0, total, 0.0
    rate = changed / total
    gap = (-rate * np.log2(rate) - (1 - rate) * np.log2(1 - rate)) / rate if rate < 1 else 0.0
    return changed, total, float(gap + _entropy(counts)) / 8


def _entropy(counts: Words) -> float:
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log2(p)).sum())


def make_rows(
    reports: Iterable[RefitReport],
    states: dict[int, Path],
    pauses: dict[str, dict[int, float]],
    wrong: set[int],
    compared: set[int],
    checkpoint_bytes: int,
) -> list[RefitRow]:
    """The table's rows. ``wrong``: versions with a mismatch; ``compared``: versions that were compared at all."""
    rows: list[RefitRow] = []
    for report in reports:
        version = report.version
        changed, total, bound = report.elements, report.scanned, 0.0
        if report.kind == "delta":
            changed, total, bound = entropy_bound(states[version - 1], states[version])
        rows.append(
            RefitRow(
                version=version,
                mode=report.mode,
                kind=report.kind,
                attempts=report.attempts,
                restored=report.restored,
                change_rate=changed / total if total else 0.0,
                payload_bytes=report.payload_bytes,
                checkpoint_share=report.payload_bytes / checkpoint_bytes,
                bytes_per_change=report.payload_bytes / changed if changed else 0.0,
                entropy_bound=bound,
                timeline_s=report.timeline,
                gate_pause_s={host: pause[version] for host, pause in pauses.items() if version in pause},
                exact=version in compared and version not in wrong,
                failures=report.failures,
            )
        )
    return rows


def show(rows: Iterable[RefitRow], console: Console) -> None:
    """Print the table."""
    table = Table(title="Refits", title_justify="left")
    for heading in ("v", "mode", "kind", "tries", "changed", "payload", "of BF16", "B/change", "bound"):
        table.add_column(heading, justify="right")
    for heading in ("capture", "stage", "gate", "apply", "commit", "advance"):
        table.add_column(f"{heading} ms", justify="right")
    table.add_column("pause ms")
    table.add_column("bit-exact")
    for row in rows:
        pause = " ".join(f"{host} {seconds * 1e3:.0f}" for host, seconds in row.gate_pause_s.items()) or "-"
        bound = f"{row.entropy_bound:.3f}" if row.entropy_bound else "-"
        steps = ("capture", "stage", "gate", "apply", "commit", "advance")
        table.add_row(
            str(row.version),
            row.mode,
            row.kind,
            str(row.attempts),
            f"{row.change_rate:.2%}",
            f"{row.payload_bytes / 1e6:.2f} MB",
            f"{row.checkpoint_share:.2%}",
            f"{row.bytes_per_change:.3f}",
            bound,
            *(f"{row.timeline_s.get(step, 0.0) * 1e3:.0f}" for step in steps),
            pause,
            "[green]yes[/]" if row.exact else "[red]NO[/]",
        )
    console.print(table)
