"""A spill file: bytes that do not fit a memory budget, in a file that only this process can reach."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from dcr_stream.errors import DcrError

__all__ = ["SpillFile"]


class SpillFile:
    """Append-only, at most ``limit_bytes`` in ``folder``; mode 0600 and unlinked as soon as it is open (POSIX).

    One caller appends at a time; reading may go on meanwhile.

    ``error`` is the class raised when there is no folder, no room within the limit, or no space on the disk;
    ``remedy`` ends its message.
    """

    def __init__(self, folder: Path | None, limit_bytes: int, *, what: str, error: type[DcrError], remedy: str) -> None:
        self._folder, self._limit = folder, limit_bytes
        self._what, self._error, self._remedy = what, error, remedy
        self._file: BinaryIO | None = None
        self.nbytes = 0

    def append(self, parts: Iterable[memoryview]) -> int:
        """Write ``parts`` one after the other; returns the offset of the first."""
        parts = list(parts)
        size = sum(len(part) for part in parts)
        if self._folder is None:
            raise self._error(f"{self._what} exceeds its memory budget and no spill folder is set; {self._remedy}")
        if self.nbytes + size > self._limit:
            raise self._error(f"{self._what} exceeds {self._limit:,} spilled bytes in {self._folder}; {self._remedy}")
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115  closed by close()
            offset = at = self.nbytes
            for view in parts:
                while view:
                    done = os.pwrite(self._file.fileno(), view, at)
                    at += done
                    view = view[done:]
        except OSError as error:
            raise self._error(
                f"{self._what} cannot be spilled to {self._folder}: {error.strerror or error}; {self._remedy}"
            ) from error
        self.nbytes = at
        return offset

    def read(self, offset: int, size: int) -> bytes:
        """``size`` bytes from ``offset`` on."""
        if self._file is None:
            raise self._error(f"{self._what} was spilled and is closed already; start again")
        data = bytearray()
        try:
            while len(data) < size:
                part = os.pread(self._file.fileno(), size - len(data), offset + len(data))
                if not part:
                    raise OSError(f"{size - len(data):,} bytes are missing")
                data += part
        except OSError as error:
            raise self._error(
                f"{self._what} cannot be read back from {self._folder}: {error.strerror or error}; {self._remedy}"
            ) from error
        return bytes(data)

    def close(self) -> None:
        """Give the space back. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self.nbytes = 0
