"""The documentation keeps its word: its code runs or is a sample, links lead somewhere, tables are complete."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dcr_stream import CoordinatorSettings, NodeSettings, OwnerSettings, TransitionSettings, errors
from dcr_stream.capture import CaptureSettings
from dcr_stream.codec import Limits
from dcr_stream.staging import StagingBudget

ROOT = Path(__file__).parents[2].resolve()
DOCS = ROOT / "docs"
SAMPLES = DOCS / "samples"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
RUNS = "<!-- runs -->"

_FENCE = re.compile(
    r"^(?P<mark><!-- [^\n]* -->\n)?(?P<indent> *)```(?P<kind>[^\n`]*)\n(?P<code>.*?)^(?P=indent)```$", re.M | re.S
)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_SNIPPET = re.compile(r'--8<-- "(?P<path>[^"]+)"')


@dataclass(frozen=True)
class Block:
    """One fenced block of Python on a page."""

    page: Path
    line: int
    runs: bool
    code: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def _blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        if found["kind"].split()[:1] in (["python"], ["py"], ["python3"]):
            yield Block(
                page, text.count("\n", 0, found.start()) + 1, (found["mark"] or "").strip() == RUNS, found["code"]
            )


BLOCKS = [block for page in PAGES for block in _blocks(page)]
RUNNING = [page for page in PAGES if any(block.runs for block in _blocks(page))]


def _stripped(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def _is_part(code: str, sample: Path) -> bool:
    wanted, held = _stripped(code), _stripped(sample.read_text(encoding="utf-8"))
    return any(held[i : i + len(wanted)] == wanted for i in range(len(held) - len(wanted) + 1))


@pytest.mark.parametrize("block", [b for b in BLOCKS if not b.runs], ids=str)
def test_python_that_is_not_run_is_a_sample_word_for_word(block: Block) -> None:
    included = _SNIPPET.search(block.code)
    if included is not None:
        assert (DOCS / included["path"]).is_relative_to(SAMPLES)
        assert (DOCS / included["path"]).is_file(), f"{block} includes a sample that does not exist"
        assert len(_stripped(block.code)) == 1
    else:
        assert any(_is_part(block.code, sample) for sample in SAMPLES.glob("*.py")), f"{block} is no part of a sample"


@pytest.mark.processes
@pytest.mark.parametrize("page", RUNNING, ids=lambda page: page.stem)
def test_the_python_of_a_page_runs_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    script = tmp_path / f"{page.stem.replace('-', '_')}.py"
    script.write_text("\n".join(block.code for block in _blocks(page) if block.runs), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SAMPLES)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def _anchors(page: Path) -> set[str]:
    prose = _FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", prose, re.M)
    plain = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    prose = _FENCE.sub("", page.read_text(encoding="utf-8"))
    for link in _LINK.findall(prose):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_relative_to(ROOT), f"{link} leaves the repository"
        assert target.exists(), f"{link} leads nowhere"
        if anchor:
            assert anchor in _anchors(target), f"{link}: no such heading"


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [str(p.relative_to(DOCS)) for p in PAGES[1:] if str(p.relative_to(DOCS)) not in navigation] == []


def test_every_error_is_explained_to_operators() -> None:
    rows = set(re.findall(r"^\| `(\w+)` \|", (DOCS / "operating.md").read_text(encoding="utf-8"), re.M))
    public = {name for name in errors.__all__ if isinstance(getattr(errors, name), type)}
    assert public - rows == set()


def _default(field: dataclasses.Field[object]) -> str:
    value = field.default
    if value is None:
        return "none"
    if isinstance(value, int) and field.name.endswith("_bytes"):
        return f"{value >> 30} GiB" if value % (1 << 30) == 0 else f"{value >> 20} MiB"
    return f"{value:g} s" if isinstance(value, float) else str(value)


@pytest.mark.parametrize(
    "settings",
    [TransitionSettings, CoordinatorSettings, OwnerSettings, CaptureSettings, NodeSettings, StagingBudget, Limits],
    ids=lambda settings: settings.__name__,
)
def test_every_setting_is_listed_with_its_default(settings: type[NodeSettings]) -> None:
    text = (DOCS / "operating.md").read_text(encoding="utf-8")
    section = re.search(rf"^### {settings.__name__}\b.*?(?=^##)", text, re.M | re.S)
    assert section is not None
    listed = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", section[0], re.M))
    nested = {"capture", "channel", "budget", "limits", "transition"}  # settings with a section or a text of their own
    assert listed == {f.name: _default(f) for f in dataclasses.fields(settings) if f.name not in nested}
