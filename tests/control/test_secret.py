"""Secrets come from a file that nobody else may use, or from the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcr_stream.control import load_secret
from dcr_stream.errors import UsageError

SECRET = b"0123456789abcdef"


@pytest.fixture(autouse=True)
def no_secret_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DCR_STREAM_SECRET", raising=False)
    monkeypatch.delenv("DCR_STREAM_SECRET_FILE", raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_bytes(SECRET + b"\n")
    file.chmod(0o600)
    return file


def test_without_any_there_is_no_secret() -> None:
    assert load_secret() is None


def test_a_file_is_read_without_its_newline(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_secret(str(file)) == SECRET
    monkeypatch.setenv("DCR_STREAM_SECRET", "another secret in the environment")
    monkeypatch.setenv("DCR_STREAM_SECRET_FILE", str(file))
    assert load_secret() == SECRET


def test_the_environment_may_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCR_STREAM_SECRET", SECRET.decode())
    assert load_secret() == SECRET


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o602, 0o601, 0o777])
def test_a_file_that_others_may_use_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(UsageError, match=rf"secret.*mode {mode:04o}.*chmod 600"):
        load_secret(str(file))


@pytest.mark.parametrize("content", [b"", b"\n", b"15 bytes long..", b" " * 100, b"x" * 5000])
def test_a_secret_of_no_use_is_refused_without_showing_it(
    file: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_bytes(content)
    monkeypatch.setenv("DCR_STREAM_SECRET", content.decode())
    for path in (str(file), None):
        with pytest.raises(UsageError, match="a secret has 16 to 4096") as raised:
            load_secret(path)
        assert "15 bytes long" not in str(raised.value)


def test_a_missing_file_or_a_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere.*give a readable file"):
        load_secret(str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="give a"):
        load_secret(str(tmp_path))
