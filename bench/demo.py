"""Where does a delta refit of a real model spend its time, and is it still exact?

Runs the demonstration in one process (real AdamW steps on all-MiniLM-L6-v2, two owners, a one-rank and a two-rank
engine, requests all the time) and takes the delta refits only.

- ``share_chunk`` … ``share_compress``: a stage's share of the busy seconds of all stages.
- ``share_capture``, ``share_stage``, ``share_gate``, ``share_apply``, ``share_commit``, ``share_advance``: a protocol
  step's share of a refit's wall time on the coordinator (capture: the slowest owner).
- ``exact``: share of refits that are bit-exact; ``mixed_responses``: answers that belong to no one version.
- ``bytes_over_entropy``: worst payload bytes per changed element over the bound H(gap) + H(d).
- ``checkpoint_share``: payload bytes over the bytes of the BF16 checkpoint, mean.
"""

from __future__ import annotations

import sys
from collections import defaultdict

from rich.console import Console

from bench._report import Figures, Targets, report
from dcr_stream.cli.demo.driver import DemoResult, run_demo
from dcr_stream.cli.demo.options import DemoOptions
from dcr_stream.front import run_async

TARGETS: Targets = {
    "exact": ("==", 1.0),
    "mixed_responses": ("==", 0.0),
    "bytes_over_entropy": ("<=", 1.05),
}

STAGES = ("chunk", "compare", "project", "convert", "encode", "bucket", "compress")
STEPS = ("capture", "stage", "gate", "apply", "commit", "advance")


def measure(quick: bool) -> Figures:
    """Run the demonstration and turn its verdict into figures."""
    found: list[DemoResult] = []

    async def main() -> None:
        options = DemoOptions(steps=3 if quick else 12, in_process=True)
        found.append(await run_demo(options, Console(stderr=True, width=184)))

    run_async(main)
    result = found[0]
    deltas = [row for row in result.rows if row.kind == "delta"]
    busy = sum(result.times.stages.values())
    steps: dict[str, float] = defaultdict(float)
    for row in deltas:
        for step, seconds in row.timeline_s.items():
            steps[step] += seconds
    wall = sum(steps.values())
    return {
        **{f"share_{stage}": result.times.stages.get(stage, 0.0) / busy for stage in STAGES},
        **{f"share_{step}": steps[step] / wall for step in STEPS},
        "exact": sum(row.exact for row in result.rows) / len(result.rows),
        "mixed_responses": float(result.responses.mixed),
        "bytes_over_entropy": max(row.bytes_per_change / row.entropy_bound for row in deltas),
        "checkpoint_share": sum(row.checkpoint_share for row in deltas) / len(deltas),
    }


if __name__ == "__main__":
    sys.exit(report("Share of each stage in a refit", measure, TARGETS))
