"""The run's shared secret: from a file or the environment, never from a command line."""

from __future__ import annotations

import os
import stat

from dcr_stream.errors import UsageError

__all__ = ["MIN_SECRET_BYTES", "load_secret"]

MIN_SECRET_BYTES = 16
"""Shorter secrets are refused."""

_MAX_SECRET_BYTES = 4096


def load_secret(path: str | os.PathLike[str] | None = None) -> bytes | None:
    """Read the secret from ``path``, else ``$DCR_STREAM_SECRET_FILE``, else ``$DCR_STREAM_SECRET``; None if unset.

    White space around the secret is dropped, so that a file may end with a newline.

    Raises:
        UsageError: the file cannot be read, others may read it, or the secret is too short.
    """
    path = path or os.environ.get("DCR_STREAM_SECRET_FILE") or None
    if path is not None:
        return _checked(_read(path), f"secret file {os.fspath(path)!r}")
    value = os.environ.get("DCR_STREAM_SECRET")
    if value is None:
        return None
    return _checked(os.fsencode(value), "$DCR_STREAM_SECRET")


def _read(path: str | os.PathLike[str]) -> bytes:
    try:
        with open(path, "rb") as file:
            # Checked on the open file, so that it cannot be exchanged between check and read.
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise UsageError(f"secret file {os.fspath(path)!r} is not a regular file; give a file with mode 0600")
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise UsageError(
                    f"secret file {os.fspath(path)!r} has mode {stat.S_IMODE(mode):04o}, so others may use it; "
                    "run chmod 600 on it"
                )
            return file.read(_MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"secret file {os.fspath(path)!r} cannot be read: {error.strerror}; give a readable file with mode 0600"
        ) from error


def _checked(secret: bytes, where: str) -> bytes:
    secret = secret.strip()
    if not MIN_SECRET_BYTES <= len(secret) <= _MAX_SECRET_BYTES:
        raise UsageError(
            f"{where} holds {len(secret)} bytes; a secret has {MIN_SECRET_BYTES} to {_MAX_SECRET_BYTES} "
            "(for example the output of: openssl rand -hex 32)"
        )
    return secret
