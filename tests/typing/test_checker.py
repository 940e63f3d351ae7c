"""mypy itself refuses a join of stages whose types do not match, on the line of the join."""

from __future__ import annotations

from pathlib import Path

from mypy import api

from dcr_stream import flow

_PACKAGE = Path(flow.__file__).parents[1]

# Types of the frameworks do not matter here, and following them would take a minute.
_CONFIG = """\
[mypy]
strict = true
cache_dir = {cache}
mypy_path = {path}
[mypy-torch.*,numpy.*,anyio.*,blake3.*,msgspec.*]
follow_imports = skip
"""

_JOIN = """\
from dcr_stream.flow import Stage, each

def number(text: str) -> int:
    return int(text)

def text(number: int) -> str:
    return str(number)

good: Stage[str, str] = each(number) | each(text)
bad = each(number) | each(number)
"""


def test_mypy_reports_the_line_of_a_mismatched_join(tmp_path: Path) -> None:
    config, source = tmp_path / "mypy.ini", tmp_path / "joins.py"
    config.write_text(_CONFIG.format(cache=tmp_path / "cache", path=_PACKAGE.parent))
    source.write_text(_JOIN)
    out, err, _ = api.run(["--config-file", str(config), "--no-error-summary", "--hide-error-context", str(source)])
    found = [line for line in out.splitlines() if "joins.py" in line and ": error:" in line]
    bad = _JOIN.splitlines().index("bad = each(number) | each(number)") + 1
    assert [line.split(":")[1] for line in found] == [str(bad)], out + err
    assert "incompatible type" in found[0]
