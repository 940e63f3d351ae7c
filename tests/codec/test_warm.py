"""Kernels are compiled once, before they are needed, and are right."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dcr_stream.codec import warm_up
from dcr_stream.codec.kernels import VARIABLE, Implementation, using
from dcr_stream.codec.warm import WIDTHS, kernel_fault

ROOT = Path(__file__).parents[2].resolve()
pytest.importorskip("numba", exc_type=ImportError)


@pytest.fixture(autouse=True, scope="module")
def kernels() -> Iterator[Implementation]:
    """Tests name the implementation where it is not numba."""
    with using("numba"):
        yield "numba"


def python(code: str, **environment: str) -> str:
    """What a new process prints."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={**clean, VARIABLE: "numba", **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", ["numba", "numpy"])
def test_the_kernels_are_right(name: Implementation) -> None:
    with using(name):
        assert kernel_fault() is None


@pytest.mark.parametrize(
    ("kernel", "result", "words"),
    [
        ("sums.lanes", (1, 2), "other bytes or sums"),
        ("boxes.sum_box", (3,), "other bytes or sums"),
        ("boxes.write_box", (0,), "storage does not hold the new bits"),
    ],
)
def test_a_wrong_kernel_is_found(
    monkeypatch: pytest.MonkeyPatch, kernel: str, result: tuple[int, ...], words: str
) -> None:
    monkeypatch.setattr(f"dcr_stream.codec.kernels.{kernel}", lambda *_: result)
    with using("numba"):
        fault = kernel_fault()
    assert fault is not None
    assert words in fault


def test_a_second_warm_up_has_nothing_to_do() -> None:
    warm_up(WIDTHS)
    again = warm_up(WIDTHS)
    assert (again.compiled, again.loaded) == (0, 0)


def test_numpys_kernels_need_no_warming() -> None:
    with using("numpy"):
        done = warm_up(WIDTHS)
    assert (done.compiled, done.loaded, done.folder) == (0, 0, None)


@pytest.mark.processes
def test_a_refit_after_a_warm_up_finds_every_kernel_ready() -> None:
    sample = ROOT / "docs" / "samples" / "custom_pipeline.py"
    code = f"""
import runpy
from dcr_stream.codec import warm_up
from dcr_stream.codec.kernels import compiled_forms
done = warm_up()
before = compiled_forms()
assert (before.compiled, before.loaded) == (done.compiled, done.loaded) != (0, 0)
runpy.run_path({str(sample)!r}, run_name="__main__")
assert compiled_forms() == before, compiled_forms()
"""
    assert "v2: " in python(code)


@pytest.mark.processes
def test_importing_the_package_compiles_nothing() -> None:
    code = """
import sys, dcr_stream
for name in dcr_stream.__all__: getattr(dcr_stream, name)
print("numba" in sys.modules)
"""
    assert python(code) == "False"


@pytest.mark.processes
def test_beside_a_package_that_cannot_be_written_the_users_folder_keeps_compiled_code(tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    shutil.copytree(ROOT / "dcr_stream", site / "dcr_stream", ignore=shutil.ignore_patterns("__pycache__"))
    # No permission stops root; a file in the folder's place stops everybody.
    (site / "dcr_stream" / "codec" / "kernels" / "__pycache__").touch()
    code = """
import numpy as np, dcr_stream
from dcr_stream.codec import state_sum
from dcr_stream.codec.kernels import compiled_forms
state_sum(0, np.arange(3), np.zeros(3, np.uint16))
made = compiled_forms()
print(dcr_stream.__file__, made.compiled, made.loaded, made.folder)
"""
    environment = {"PYTHONPATH": str(site), "XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path)}
    for first in (True, False):
        file, compiled, loaded, folder = python(code, **environment).split()
        assert Path(file).is_relative_to(site)
        assert (compiled != "0", loaded != "0") == (first, not first)
        assert Path(folder).is_relative_to(tmp_path)
        assert not Path(folder).is_relative_to(site)
