"""What every benchmark shares: arguments, repeats, targets and output.

A benchmark is a function ``measure(quick)`` that returns its figures by name, and a table of targets::

    TARGETS: Targets = {"hop_us": ("<=", 50.0)}

    if __name__ == "__main__":
        sys.exit(report("Cost of a hop", measure, TARGETS))

With ``--json`` the last line of standard output is one object:
``{"ok": bool, "figures": {name: number}, "targets": {name: [op, number]}}``. The exit status is 1 when a target is
missed, when a figure that a target names is missing, or when a figure is not finite. ``--quick`` keeps all names.
"""

from __future__ import annotations

import argparse
import json
import math
import operator
from collections.abc import Callable, Mapping
from statistics import median
from typing import Literal

from rich.console import Console
from rich.table import Table

__all__ = ["Figures", "Targets", "median_of", "missed", "report"]

Operator = Literal["<=", ">=", "<", ">", "=="]
Figures = Mapping[str, float]
Targets = Mapping[str, tuple[Operator, float]]

_OPERATORS: dict[Operator, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
    "==": operator.eq,
}


def median_of(repeats: int, measure: Callable[[], float]) -> float:
    """The median of ``repeats`` calls of ``measure``."""
    return median(measure() for _ in range(repeats))


def missed(figures: Figures, targets: Targets) -> list[str]:
    """What is wrong, one sentence each: targets missed or without a figure, and figures that are not finite."""
    faults = [f"{name} is {value}, not a finite number" for name, value in figures.items() if not math.isfinite(value)]
    for name, (op, bound) in targets.items():
        if name not in figures:
            faults.append(f"{name} was not measured")
        elif math.isfinite(figures[name]) and not _OPERATORS[op](figures[name], bound):
            faults.append(f"{name} is {figures[name]:.6g}, target {op} {bound:g}")
    return faults


def report(title: str, measure: Callable[[bool], Figures], targets: Targets) -> int:
    """Run a benchmark as a command: parse arguments, call ``measure(quick)``, print figures and targets.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--quick", action="store_true", help="fewer repeats; the same figures in at most 45 s")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args()
    figures = measure(options.quick)
    faults = missed(figures, targets)
    _print(title, figures, targets)
    for fault in faults:
        print(f"MISSED: {fault}")
    if options.json:
        # Infinities and NaN have no JSON; as null they stay visible, and `ok` is false anyway.
        shown = {name: value if math.isfinite(value) else None for name, value in figures.items()}
        print(json.dumps({"ok": not faults, "figures": shown, "targets": {n: list(t) for n, t in targets.items()}}))
    return 1 if faults else 0


def _print(title: str, figures: Figures, targets: Targets) -> None:
    table = Table(title=title, title_justify="left")
    for heading in ("figure", "value", "target"):
        table.add_column(heading, justify="left" if heading == "figure" else "right")
    for name, value in figures.items():
        op, bound = targets.get(name, ("", math.nan))
        table.add_row(name, f"{value:.6g}", f"{op} {bound:g}" if op else "")
    Console(width=100).print(table)
