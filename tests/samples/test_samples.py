"""The samples under ``docs/`` do what they say: each runs as a user would run it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from dcr_stream.interfaces import Transport
from dcr_stream.testing.transport import TransportTests

SAMPLES = Path(__file__).parents[2] / "docs" / "samples"


@pytest.mark.processes
@pytest.mark.parametrize("name", ["custom_pipeline", "switch_modes", "new_transport"])
def test_the_sample_runs(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(SAMPLES / f"{name}.py")], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "v0" in done.stdout


def test_the_sample_transport_has_less_than_80_lines() -> None:
    assert len((SAMPLES / "sqlite_transport.py").read_text().splitlines()) < 80


class TestSampleTransport(TransportTests):
    """The transport of the sample passes the conformance kit."""

    @pytest.fixture
    def transport(self, tmp_path: Path) -> Transport:
        spec = importlib.util.spec_from_file_location("sqlite_transport", SAMPLES / "sqlite_transport.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["sqlite_transport"] = module
        spec.loader.exec_module(module)
        made = module.SqliteTransport(tmp_path / "payloads.db")
        assert isinstance(made, Transport)
        return made
