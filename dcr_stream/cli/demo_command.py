"""``dcr-stream demo``: options in, verdict out."""

from __future__ import annotations

import sys

import msgspec
from rich.console import Console

from dcr_stream.cli.demo.driver import DemoResult, run_demo
from dcr_stream.cli.demo.options import DemoOptions
from dcr_stream.front import run_async

__all__ = ["run_demo_command"]


def run_demo_command(options: DemoOptions, *, as_json: bool) -> int:
    """Run the demonstration; returns the exit status: 0 if everything is exact, 1 if any bit or answer is not."""
    console = Console(stderr=True)
    if not console.is_terminal:
        console = Console(stderr=True, width=184)
    found: list[DemoResult] = []

    async def main() -> None:
        found.append(await run_demo(options, console))

    run_async(main)
    result = found[0]
    for problem in result.problems:
        console.print(f"[red]{problem}[/]")
    for mismatch in result.mismatches[:10]:
        console.print(
            f"  {mismatch.engine} v{mismatch.version} rank {mismatch.rank} {mismatch.tensor}: {mismatch.reason}"
        )
    exact = sum(row.exact for row in result.rows)
    responses = result.responses
    console.print(
        f"{exact} of {len(result.rows)} refits bit-exact over {result.compared_elements:,} compared elements; "
        f"{responses.total} responses, {responses.mixed} mixed"
        + (f"; receiver killed: {result.killed}, repaired: {result.repaired}" if options.kill else "")
    )
    if as_json:
        sys.stdout.write(msgspec.json.encode(_figures(options, result)).decode() + "\n")
        sys.stdout.flush()
    return 0 if result.ok else 1


def _figures(options: DemoOptions, result: DemoResult) -> dict[str, object]:
    deltas = [row for row in result.rows if row.kind == "delta"]
    pauses = [pause for row in deltas for pause in row.gate_pause_s.values()]
    figures: dict[str, float] = {
        "refits": len(result.rows),
        "refits_exact": sum(row.exact for row in result.rows),
        "responses": result.responses.total,
        "responses_mixed": result.responses.mixed,
        "requests_indistinct": result.indistinct,
        "compared_elements": result.compared_elements,
        "change_rate_mean": sum(r.change_rate for r in deltas) / len(deltas),
        "checkpoint_share_mean": sum(r.checkpoint_share for r in deltas) / len(deltas),
        "bytes_over_entropy_worst": max(r.bytes_per_change / r.entropy_bound for r in deltas if r.entropy_bound),
        "gate_pause_s_max": max(pauses, default=0.0),
        "killed": int(result.killed),
        "repaired": int(result.repaired),
        "baseline_bytes": result.baseline_bytes,
    }
    return {
        "ok": result.ok,
        "figures": figures,
        "targets": {"responses_mixed": ["<=", 0], "requests_indistinct": ["<=", 0]},
        "mode": options.mode,
        "steps": options.steps,
        "refits": result.rows,
        "stage_busy_s": result.times.stages,
        "step_s": result.times.steps,
        "problems": result.problems,
    }
