"""Every field case that this version promises is named by the docstring of a test."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent

# Kinds of fault that have broken systems of this sort: A bit-exactness, B placement and derived state, C protocol and
# versions, D hangs and memory, E serving around the swap, F integrity checks that do not check.
PROMISED = frozenset(
    [
        *("A1", "A2", "A3", "A4", "A6", "A7", "A8", "A10", "A11", "A15"),
        *("B1", "B3", "B7", "B8", "B13", "B14", "B16", "B21", "B23"),
        *("C1", "C2", "C3", "C4", "C6", "C7", "C11", "C13"),
        *("D1", "D4"),
        *("E1", "E3", "E5"),
        *("F1", "F4"),
    ]
)


def test_every_promised_field_case_is_named_by_a_test() -> None:
    named: set[str] = set()
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                named.update(re.findall(r"\b[A-F][0-9]+\b", ast.get_docstring(node) or ""))
    missing = sorted(PROMISED - named, key=lambda case: (case[0], int(case[1:])))
    assert not missing, f"no test names {', '.join(missing)}"
