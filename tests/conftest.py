"""Settings that every test shares."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# One seed for all, so that a failure here is a failure everywhere, with what is needed to repeat it.
settings.register_profile("dcr_stream", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("dcr_stream")

_GRACE_S = 5.0
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Asynchronous tests run on asyncio, as the library does."""
    return "asyncio"


@pytest.fixture(scope="module", autouse=True)
def no_surviving_children(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a module whose tests leave processes behind."""
    before = _children()
    yield
    limit = time.monotonic() + _GRACE_S
    while (left := _children() - before) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not left, f"{request.node.nodeid} left processes running: {sorted(map(_command, left))}"


def _children() -> set[int]:
    """Running child processes (where /proc exists), without Python's own helpers and without zombies."""
    found: set[int] = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == os.getpid() and state != "Z":
            found.add(int(stat.parent.name))
    return {pid for pid in found if not any(helper in _command(pid) for helper in _HELPERS)}


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
