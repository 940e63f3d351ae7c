"""``dcr-stream doctor`` says what is there, warns of what costs time, and fails for what does not work."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

import dcr_stream
from dcr_stream.cli import doctor_command
from dcr_stream.cli.doctor_command import Diagnosis, examine, run_doctor_command
from dcr_stream.codec.kernels import VARIABLE, using
from dcr_stream.codec.warm import WarmUp


@pytest.fixture(autouse=True)
def patch() -> Iterator[pytest.MonkeyPatch]:
    """Which kernels this process uses is undecided, as in a new one; what a test decides is forgotten after it."""
    with using("numpy"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("dcr_stream.codec.kernels._chosen", None)
        patch.delenv(VARIABLE, raising=False)
        patch.delenv("NUMBA_CACHE_DIR", raising=False)
        yield patch


def told(found: Diagnosis, level: str, *words: str) -> None:
    """Exactly one finding, of this level, with these words; only an error makes a machine unusable."""
    assert [finding.level for finding in found.findings] == [level], found.findings
    assert found.ok == (level == "warning")
    for word in words:
        assert word in found.findings[0].text


def warmed(patch: pytest.MonkeyPatch, folder: str | None) -> None:
    patch.setattr("dcr_stream.codec.warm.warm_up", lambda widths: WarmUp(1.0, compiled=3, folder=folder))


@pytest.mark.processes
def test_the_command_ends_with_one_json_object() -> None:
    pytest.importorskip("numba", exc_type=ImportError)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DCR_", "NUMBA_"))}
    done = subprocess.run(
        [sys.executable, "-c", "from dcr_stream.cli import main; main()", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    found = msgspec.json.decode(done.stdout, type=Diagnosis)
    assert found.ok
    assert found.versions["dcr_stream"] == dcr_stream.__version__
    assert found.versions["numpy"] == np.__version__
    assert found.kernels is not None
    assert found.kernels.implementation == "numba"
    assert found.kernels.correct
    assert found.kernels.compiled + found.kernels.loaded > 0
    assert found.cuda is not None
    assert found.cuda.available == torch.cuda.is_available()
    assert found.machine.cores >= 1
    assert "verdict     usable" in done.stderr


def test_wanting_numba_without_numba_is_an_error(patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    patch.setenv(VARIABLE, "numba")
    patch.setitem(sys.modules, "numba", None)
    assert run_doctor_command(as_json=True) == 1
    out, err = capsys.readouterr()
    found = msgspec.json.decode(out.splitlines()[-1], type=Diagnosis)
    told(found, "error", f"{VARIABLE}=numba", "install numba")
    assert found.versions["numba"] is None
    assert found.kernels is None
    assert "not usable" in err


def test_without_numba_the_slower_kernels_are_a_warning(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sys.modules, "numba", None)
    found = examine()
    told(found, "warning", "numba cannot be imported", "install numba")
    assert found.kernels is not None
    assert found.kernels.implementation == "numpy"
    assert found.kernels.correct


def test_kernels_that_are_kept_off_are_a_warning(patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    patch.setenv(VARIABLE, "numpy")
    told(examine(), "warning", f"{VARIABLE}=numpy", "unset it")
    assert run_doctor_command(as_json=False) == 0
    out, err = capsys.readouterr()
    assert f"kernels     numpy ({VARIABLE}=numpy)" in out
    assert "warning" in out
    assert "warning" not in err


def test_an_unknown_implementation_is_an_error(patch: pytest.MonkeyPatch) -> None:
    patch.setenv(VARIABLE, "fortran")
    told(examine(), "error", "'fortran' is unknown")


@pytest.mark.parametrize("name", ["torch", "numpy", "zstandard", "obstore"])
def test_a_package_that_cannot_be_imported_is_an_error(patch: pytest.MonkeyPatch, name: str) -> None:
    patch.setitem(sys.modules, name, None)
    found = examine()
    told(found, "error", f"{name} cannot be imported", "install it again")
    assert found.versions[name] is None


def test_kernels_that_give_other_bits_are_an_error(patch: pytest.MonkeyPatch) -> None:
    patch.setenv(VARIABLE, "numpy")
    patch.setattr("dcr_stream.codec.warm.write_box", lambda *_: (0,))
    found = examine()
    assert not found.ok
    assert found.kernels is not None
    assert not found.kernels.correct
    assert "storage does not hold the new bits" in found.findings[-1].text


def test_kernels_that_raise_are_an_error(patch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba", exc_type=ImportError)

    def compile_nothing(widths: object) -> WarmUp:
        raise OSError(28, "No space left on device\nand much more")

    patch.setattr("dcr_stream.codec.warm.warm_up", compile_nothing)
    told(examine(), "error", "No space left on device", "may be damaged", f"set {VARIABLE}=numpy")


def test_no_folder_for_compiled_code_is_a_warning(
    patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("numba", exc_type=ImportError)
    warmed(patch, None)
    told(examine(), "warning", "every process compiles them again", "set NUMBA_CACHE_DIR")
    assert run_doctor_command(as_json=False) == 0
    assert "3 compiled" in capsys.readouterr().out


def test_the_place_of_compiled_code_is_named(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("numba", exc_type=ImportError)

    def place(folder: Path) -> str | None:
        warmed(patch, str(folder))
        kernels = examine().kernels
        return kernels.place if kernels is not None else None

    beside = Path(dcr_stream.__file__).parent / "codec" / "kernels" / "__pycache__"
    assert place(beside) == "beside the package"
    assert place(tmp_path / "kernels_12ab") == "the user's cache folder"
    patch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert place(tmp_path / "kernels_12ab") == "NUMBA_CACHE_DIR"
    warmed(patch, str(beside))
    told(examine(), "warning", f"NUMBA_CACHE_DIR={tmp_path} cannot be written", "name another folder")


def test_devices_are_named(patch: pytest.MonkeyPatch) -> None:
    patch.setenv(VARIABLE, "numpy")
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "device_count", lambda: 2)
    patch.setattr(torch.cuda, "get_device_name", lambda i: f"device {i}")
    cuda = examine().cuda
    assert cuda is not None
    assert cuda.devices == ["device 0", "device 1"]


def test_a_driver_that_torch_complains_of_is_a_warning(patch: pytest.MonkeyPatch) -> None:
    def complain() -> bool:
        warnings.warn("the driver is too old", stacklevel=1)
        return False

    patch.setattr(torch.cuda, "is_available", complain)
    told(examine(), "warning", "the driver is too old", "update the driver")


def test_a_device_that_does_not_answer_is_an_error(patch: pytest.MonkeyPatch) -> None:
    def busy(i: int) -> str:
        raise RuntimeError("device is busy")

    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "device_count", lambda: 1)
    patch.setattr(torch.cuda, "get_device_name", busy)
    told(examine(), "error", "device is busy", "nvidia-smi")


def test_a_plug_in_that_does_not_load_is_a_warning(patch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("pigeon", "no_such_module:make", "dcr_stream.transports"),
        EntryPoint("owl", "dcr_stream.transports:open_transport", "dcr_stream.transports"),
    ]
    patch.setattr(doctor_command, "entry_points", lambda group: points)
    found = examine()
    told(found, "warning", "pigeon://", "no_such_module", "repair or remove")
    assert found.plug_ins == {"pigeon": False, "owl": True}


def test_too_little_shared_memory_is_a_warning(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    patch.setattr(doctor_command, "_SHARED", tmp_path)
    patch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=64 << 20))
    found = examine()
    told(found, "warning", "64 MiB free", "up to 256 MiB", "NodeSettings.block_bytes")
    assert found.machine.shared_free_bytes == 64 << 20


@pytest.mark.parametrize(("limit", "limited"), [("1048576\n", True), ("max\n", False)])
def test_a_containers_memory_limit_counts(patch: pytest.MonkeyPatch, tmp_path: Path, limit: str, limited: bool) -> None:
    (tmp_path / "memory.max").write_text(limit)
    patch.setattr(doctor_command, "_MEMORY_LIMITS", (str(tmp_path / "memory.max"), str(tmp_path / "missing")))
    assert (examine().machine.memory_bytes == 1 << 20) == limited
