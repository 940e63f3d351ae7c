"""Tables and plots of ``docs/codec.md``, from what the benchmarks printed. ``make figures`` does all of this::

    python -m bench.codec --json >build/bench/codec.txt
    python -m bench.rates --json >build/bench/rates.txt
    python -m bench._plots build/bench/codec.txt build/bench/rates.txt

Each file ends with the JSON object of one benchmark. The objects and the series of ``bench.rates`` are put together in
``docs/figures/measured.json``; from there the plots beside it are drawn, and the tables are written into the page
between their markers, ``<!-- figures: SECTION -->`` and ``<!-- end -->``. Without arguments, everything is made again
from ``measured.json`` as it is.

A figure belongs to the first section of ``SECTIONS`` whose pattern its name matches, and to ``other`` if none does; no
name is listed, so a benchmark may measure more. Plots are the same bytes whenever the figures are the same.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench._changes import CACHE

__all__ = ["PAGE", "SECTIONS", "Measured", "load", "table", "with_tables"]

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "codec.md"
FOLDER = DOCS / "figures"
KEPT = FOLDER / "measured.json"

SECTIONS: Mapping[str, str] = {
    "encode": r"(encode|owner|capture|advance)_.*|.*_scaling",
    "bytes": r"bytes_.*|entropy_.*",
    "speed": r"speed_.*",
    "apply": r"apply_.*|digest_cost",
    "table2": r"table2_.*",
    "rates": r"rate_.*|ulp_.*|loss_.*|steps|elements",
    "other": r".*",
}
"""Sections of the page, each with a pattern of the names that belong there."""

PAPER_TABLE2 = {"overwrite": (0.74, 7.02, 25.70), "XOR": (0.33, 3.23, 14.93)}
PAPER_RATES = (0.006, 0.012)

OURS, THEIRS, TARGET = "#3f51b5", "#9e9e9e", "#d84315"
_RATES = ("zero", "0_1", "1", "3", "5", "30", "100", "real")
_WORDS = {"zero": "0 %", "entropy_ratio": "worst of 1, 3, 5 %\nand real", "entropy_ratio_rare": "0.1 %"}
_TABLES = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.S)


class Measured(msgspec.Struct, frozen=True):
    """Figures and targets of all benchmarks, and the series of ``bench.rates``."""

    figures: dict[str, float | None] = {}
    targets: dict[str, tuple[str, float]] = {}
    series: dict[str, list[float]] = {}

    def of(self, section: str) -> dict[str, float | None]:
        """The figures of a section, in the order in which they were measured."""
        return {name: value for name, value in self.figures.items() if _section(name) == section}

    def chosen(self, pattern: str) -> dict[str, float]:
        """Finite figures whose names match, under the name's first group."""
        found = ((re.fullmatch(pattern, name), value) for name, value in self.figures.items())
        return {match[1]: value for match, value in found if match is not None and value is not None}


def _section(name: str) -> str:
    return next(section for section, pattern in SECTIONS.items() if re.fullmatch(pattern, name))


def load(path: Path = KEPT) -> Measured:
    """What was measured."""
    return msgspec.json.decode(path.read_bytes(), type=Measured)


def merged(outputs: Sequence[Path]) -> Measured:
    """The objects at the end of benchmarks' outputs together, with the series of as many steps as they name."""
    parts = [msgspec.json.decode(path.read_text().splitlines()[-1], type=Measured) for path in outputs]
    figures = {name: value for part in parts for name, value in part.figures.items()}
    targets = {name: target for part in parts for name, target in part.targets.items()}
    series: dict[str, list[float]] = {}
    if (steps := figures.get("steps")) is not None:
        series = json.loads((CACHE / f"rates-{steps:.0f}.json").read_text())
    return Measured(figures, targets, series)


def _lines(measured: Measured) -> str:
    """As JSON, a line for each figure, target and series."""
    parts = []
    for part, values in msgspec.to_builtins(measured).items():
        rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in values.items())
        parts.append(f"{json.dumps(part)}: {{\n{rows}\n}}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


# -- tables ---------------------------------------------------------------------------------------------------------


def table(measured: Measured, section: str) -> str:
    """The figures of a section as a table in Markdown."""
    rows = ["| figure | measured | target | met |", "|---|---:|---:|---|"]
    for name, value in measured.of(section).items():
        shown = "not finite" if value is None else _number(value)
        op, bound = measured.targets.get(name, ("", 0.0))
        met = ("yes" if _holds(value, op, bound) else "**no**") if op else ""
        rows.append(f"| `{name}` | {shown} | {f'{_SIGNS[op]} {_number(bound)}' if op else ''} | {met} |")
    missing = [name for name in measured.targets if _section(name) == section and name not in measured.figures]
    rows += [f"| `{name}` | not measured | | **no** |" for name in missing]
    return "\n".join(rows) if len(rows) > 2 else "None."


def with_tables(page: str, measured: Measured) -> str:
    """The page with its tables made again."""
    return _TABLES.sub(lambda found: f"{found[1]}\n{table(measured, found[2])}\n\n{found[3]}", page)


_SIGNS = {"<=": "≤", ">=": "≥", "<": "<", ">": ">", "==": "="}


def _holds(value: float | None, op: str, bound: float) -> bool:
    if value is None:
        return False
    return {"<=": value <= bound, ">=": value >= bound, "<": value < bound, ">": value > bound, "==": value == bound}[
        op
    ]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _label(name: str) -> str:
    """A name as a plot says it: ``paper_3`` is the paper's codec at 3 %."""
    match = re.fullmatch(r"(?:([a-z]\w*?)_)?(real|\d+(?:_\d+)?)", name)
    if name in _WORDS or match is None:
        return _WORDS.get(name, name.replace("_", " "))
    rate = match[2] if match[2] == "real" else f"{match[2].replace('_', '.')} %"
    return "\n".join(part for part in (match[1], rate) if part).replace("_", " ")


# -- plots ----------------------------------------------------------------------------------------------------------


class Plots:
    """Draws into SVG files: text as text, nothing random and no date in them."""

    def __init__(self, measured: Measured, folder: Path) -> None:
        self._measured = measured
        self._folder = folder
        matplotlib = importlib.import_module("matplotlib")
        matplotlib.use("svg")
        settings = {"svg.hashsalt": "dcr_stream", "svg.fonttype": "none", "font.size": 9, "font.family": "sans-serif"}
        sides = {"axes.spines.top": False, "axes.spines.right": False, "figure.constrained_layout.use": True}
        matplotlib.rcParams.update({**settings, **sides})
        self._pyplot = importlib.import_module("matplotlib.pyplot")

    def draw(self) -> None:
        """All plots that there are figures for."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for plot in (self.encode, self.bytes, self.entropy, self.speed, self.apply, self.table2, self.rates):
            plot()

    def encode(self) -> None:
        """Shares of the limit: encoding by change rate, then what else is measured against it."""
        measured = self._measured.chosen(r"((?:encode|capture|advance)_share(?:_\w+)?)")
        first = [f"encode_share_{rate}" for rate in _RATES]
        names = [name for name in first if name in measured] + [name for name in measured if name not in first]
        labels = {name: _label(name.replace("_share", "").removeprefix("encode_")) for name in names}
        self._ratios("Share of the speed of reading both versions", labels, "encode-share")

    def bytes(self) -> None:
        """Bytes over those of others."""
        self._against("bytes", "Payload: bytes over those of another codec (less is better)")

    def speed(self) -> None:
        """Speed over that of others."""
        self._against("speed", "Encoding: speed over that of another codec (more is better)")

    def apply(self) -> None:
        """Time to apply over that of a dense scratch."""
        self._against("apply", "Applying: time over that of a dense scratch (less is better)")

    def entropy(self) -> None:
        """What is above the bound."""
        ratios = self._measured.chosen(r"(entropy_\w+)")
        if ratios:
            axes = self._axes("Payload: bytes above the entropy of the changes")
            targets = {name: self._target(name) for name in ratios}
            self._bars(
                axes,
                {_label(name): 100 * (ratio - 1) for name, ratio in ratios.items()},
                {_label(name): 100 * (bound - 1) for name, bound in targets.items() if bound is not None},
            )
            axes.set_ylabel("%")
            self._save(axes, "entropy")

    def table2(self) -> None:
        """Megabytes of values, ours and the paper's, a panel for each amplitude."""
        ours = {kind: self._measured.chosen(rf"table2_{kind}_(1e\d)") for kind in ("xor", "add")}
        amplitudes = ("1e4", "1e3", "1e2")
        if not all(amplitude in values for values in ours.values() for amplitude in amplitudes):
            return
        figure, panels = self._pyplot.subplots(1, 3, figsize=(7, 2.6))
        for i, (axes, amplitude) in enumerate(zip(panels, amplitudes, strict=True)):
            bars = {f"paper\n{kind}": values[i] for kind, values in PAPER_TABLE2.items()}
            bars |= {f"here\n{kind}": ours[kind][amplitude] for kind in ours}
            self._bars(axes, bars, {}, [THEIRS, THEIRS, OURS, OURS])
            axes.set_title(f"a = {amplitude.replace('e', 'e-')}", fontsize=9)
        panels[0].set_ylabel("MB")
        figure.suptitle("Values alone: 20 million normals with noise of deviation a (less is better)", fontsize=10)
        self._save(panels[0], "table2")

    def rates(self) -> None:
        """Change rate by step."""
        rates = self._measured.series.get("rate")
        if rates:
            axes = self._axes("Share of BF16 words that a step of training changes")
            axes.set_xlabel("step")
            low, high = (100 * rate for rate in PAPER_RATES)
            axes.axhspan(low, high, color=THEIRS, alpha=0.25, linewidth=0, label="the paper's six models")
            axes.plot(range(1, len(rates) + 1), [100 * rate for rate in rates], color=OURS, label="all-MiniLM-L6-v2")
            axes.set_ylim(0, None)
            axes.set_ylabel("%")
            axes.legend(frameon=False, loc="lower left")
            self._save(axes, "change-rate")

    def _against(self, what: str, title: str) -> None:
        prefix = f"{what}_vs_"
        names = self._measured.chosen(rf"({prefix}\w+)")
        self._ratios(title, {name: _label(name.removeprefix(prefix)) for name in names}, what)

    def _ratios(self, title: str, labels: Mapping[str, str], name: str) -> None:
        """Bars of ratios, with what they are to reach, and a line where both sides are equal."""
        if labels:
            axes = self._axes(title)
            values = self._measured.chosen(r"(\w+)")
            targets = {label: self._target(figure) for figure, label in labels.items()}
            self._bars(axes, {label: values[figure] for figure, label in labels.items()}, targets)
            axes.axhline(1, color=THEIRS, linewidth=0.8)
            self._save(axes, name)

    def _target(self, name: str) -> float | None:
        return self._measured.targets[name][1] if name in self._measured.targets else None

    def _axes(self, title: str) -> Any:
        _, axes = self._pyplot.subplots(figsize=(7, 2.8))
        axes.set_title(title, fontsize=10)
        return axes

    def _bars(
        self,
        axes: Any,
        bars: Mapping[str, float],
        targets: Mapping[str, float | None],
        colors: Sequence[str] | str = OURS,
    ) -> None:
        width = 0.6 if len(bars) > 3 else 0.3
        drawn = axes.bar(list(bars), list(bars.values()), width=width, color=colors)
        axes.bar_label(drawn, [f"{value:.2f}" for value in bars.values()], fontsize=8, padding=2)
        marks = [(i, target) for i, name in enumerate(bars) if (target := targets.get(name)) is not None]
        if marks:
            at, heights = zip(*marks, strict=True)
            lo, hi = [x - width / 2 - 0.1 for x in at], [x + width / 2 + 0.1 for x in at]
            axes.hlines(heights, lo, hi, color=TARGET, linewidth=1.5, label="target")
            axes.legend(frameon=False)
        axes.margins(y=0.15)
        axes.tick_params(axis="x", length=0, labelsize=8)

    def _save(self, axes: Any, name: str) -> None:
        path = self._folder / f"{name}.svg"
        axes.figure.savefig(path, metadata={"Date": None, "Creator": None})
        self._pyplot.close(axes.figure)
        path.write_text("".join(f"{line.rstrip()}\n" for line in path.read_text().splitlines()))


def main(outputs: Sequence[str]) -> None:
    """Keep what the outputs hold, if there are any; then make plots and tables from what is kept."""
    if outputs:
        found = merged([Path(output) for output in outputs])
        FOLDER.mkdir(parents=True, exist_ok=True)
        KEPT.write_text(_lines(found), encoding="utf-8")
    measured = load()
    Plots(measured, FOLDER).draw()
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), measured), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
