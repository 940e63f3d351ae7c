"""Wrong use of the command: one line that names the thing and the way out, exit status 2, nothing changed."""

from __future__ import annotations

import os
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

COMMAND = [sys.executable, "-c", "from dcr_stream.cli import main; main()"]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command, with a clean environment for secrets."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DCR_STREAM_")}
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=60, env={**clean, **environment}
    )


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """The command failed as promised: status 2, no traceback, and a message with ``words``."""
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("error: ")
    for word in words:
        assert word in line


def coordinator(folder: Path, *more: str) -> list[str]:
    """Arguments of a coordinator over ``folder``."""
    return [
        "coordinator",
        "--commits",
        str(folder / "run.db"),
        "--transport",
        f"file://{folder}",
        "--owners",
        "1",
        *more,
    ]


def test_help_and_version_need_no_torch() -> None:
    script = """
import sys
from dcr_stream.cli import main
sys.argv[1:] = ["--version"]
try:
    main()
except SystemExit:
    pass
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    done = run("--help")
    assert done.returncode == 0
    assert "demo" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--steps", "0"), ("--steps 0", "1 to 1000")),
        (("--kill", "--in-process"), ("--kill", "leave one out")),
        (("--transport", "carrier-pigeon://loft"), ("carrier-pigeon://loft", "file://", "entry point")),
        (("--transport", "memory://here"), ("memory://here", "--in-process")),
    ],
)
def test_the_demo_refuses_what_cannot_work(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    refused(run("demo", *arguments), *words)


def test_a_missing_payload_folder_is_named(tmp_path: Path) -> None:
    refused(run("demo", "--transport", f"file://{tmp_path / 'nowhere'}"), str(tmp_path / "nowhere"), "create it")


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused(run(*coordinator(tmp_path, "--listen", f"dcr://127.0.0.1:{port}")), str(port), "in use")


def test_beyond_loopback_needs_a_secret(tmp_path: Path) -> None:
    refused(run(*coordinator(tmp_path, "--listen", "dcr://0.0.0.0:0")), "0.0.0.0", "secret")


def test_an_unreadable_commit_record_is_no_fresh_start(tmp_path: Path) -> None:
    broken = tmp_path / "run.db"
    broken.write_bytes(b"this is not a database at all, and it must stay as it is" * 20)
    before = broken.read_bytes()
    refused(run(*coordinator(tmp_path)), str(broken))
    assert broken.read_bytes() == before


def test_a_record_sealed_with_another_secret_is_refused(tmp_path: Path) -> None:
    from dcr_stream.commit import SqliteCommitStore
    from dcr_stream.testing.commit import make_record

    store = SqliteCommitStore(tmp_path / "run.db", secret=b"one secret of many bytes")
    store.compare_and_set(None, make_record(3, run="run"))
    store.close()
    with sqlite3.connect(tmp_path / "run.db") as db:
        before = list(db.iterdump())
    db.close()
    refused(run(*coordinator(tmp_path), DCR_STREAM_SECRET="another secret of many bytes"), "run.db")
    with sqlite3.connect(tmp_path / "run.db") as db:
        assert list(db.iterdump()) == before
    db.close()


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret of many bytes")
    secret.chmod(0o644)
    refused(run(*coordinator(tmp_path), DCR_STREAM_SECRET_FILE=str(secret)), str(secret))


def test_a_commit_store_in_a_missing_folder_is_named(tmp_path: Path) -> None:
    arguments = coordinator(tmp_path)
    arguments[2] = str(tmp_path / "missing" / "run.db")
    refused(run(*arguments), str(tmp_path / "missing"))
