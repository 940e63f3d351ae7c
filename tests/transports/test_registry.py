"""Transports are found by the scheme of their URL."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from dcr_stream.errors import UsageError
from dcr_stream.interfaces import Transport
from dcr_stream.transports import MemoryTransport, ObjectStoreTransport, open_transport, registry


def make_mine(url: str, *, size: int = 1) -> Transport:
    return MemoryTransport(max_bytes=size)


def make_nothing(url: str) -> object:
    return object()


@pytest.fixture
def plug_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("mine", f"{__name__}:make_mine", registry.ENTRY_POINTS),
        EntryPoint("nothing", f"{__name__}:make_nothing", registry.ENTRY_POINTS),
        EntryPoint("gone", "no_such_module:make", registry.ENTRY_POINTS),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda *, group: [p for p in points if p.group == group])


def test_built_in_schemes_open_their_transports(tmp_path: Path) -> None:
    assert isinstance(open_transport("memory://registry"), MemoryTransport)
    assert isinstance(open_transport(tmp_path.as_uri(), wait_s=1.0), ObjectStoreTransport)


@pytest.mark.usefixtures("plug_ins")
def test_an_entry_point_adds_a_scheme_and_gets_the_options() -> None:
    assert open_transport("mine://anywhere", size=77).capabilities.max_payload_bytes == 77


@pytest.mark.usefixtures("plug_ins")
@pytest.mark.parametrize("url", ["ftp://host", "no-scheme", "", "://", "/absolute/path"])
def test_an_unknown_scheme_lists_the_known_ones_and_how_to_plug_one_in(url: str) -> None:
    with pytest.raises(UsageError) as raised:
        open_transport(url)
    for said in ("file://", "memory://", "mine://", "dcr_stream.transports", repr(url)):
        assert said in str(raised.value)


@pytest.mark.usefixtures("plug_ins")
def test_a_plug_in_that_does_not_load_or_makes_no_transport_is_named() -> None:
    with pytest.raises(UsageError, match=r"gone://.*no_such_module:make.*does not load"):
        open_transport("gone://x")
    with pytest.raises(UsageError, match="object, which is no Transport"):
        open_transport("nothing://x")


def test_options_that_a_transport_does_not_take_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"does not take these options.*colour"):
        open_transport(tmp_path.as_uri(), colour="red")


@pytest.mark.processes
@pytest.mark.parametrize("folder", ["transports", "gate"])
def test_a_folder_imported_by_its_own_name_fails_at_once(folder: str) -> None:
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", f"import {folder}"], cwd=root, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode != 0
    assert "relative import" in run.stderr
