"""Shared blocks: decoded payloads on their way from a node to the receivers of its host.

A block is a file of mode 0600 in one fixed folder (memory-backed where the system has ``/dev/shm``), named at random
by the node. A receiver opens it by base name only, checks owner and size, maps it privately and checks every bound in
it itself; nothing in it is executed.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dcr_stream.errors import MalformedPayload, StagingFull

__all__ = ["SharedBlock", "open_block"]

_NAME = re.compile(r"dcr-[0-9a-f]{32}")


def _folder() -> Path:
    memory = Path("/dev/shm")
    return memory if memory.is_dir() and os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


class SharedBlock:
    """A block written by this process; a context manager that removes it at the end.

    Raises:
        StagingFull: the folder has no room.
    """

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self.name = f"dcr-{secrets.token_hex(16)}"
        self.nbytes = len(data)
        path = _folder() / self.name
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise StagingFull(
                f"{self.nbytes:,} bytes cannot be shared in {path.parent}: {error.strerror or error}; "
                "free memory there or lower the bucket size"
            ) from error

    def __enter__(self) -> SharedBlock:
        return self

    def __exit__(self, *exc: object) -> None:
        (_folder() / self.name).unlink(missing_ok=True)


@contextmanager
def open_block(name: str, nbytes: int) -> Iterator[memoryview]:
    """Map a block that the node of this host wrote.

    Raises:
        MalformedPayload: no such block, another size, or another user's file.
    """
    if not _NAME.fullmatch(name):
        raise MalformedPayload(f"{name!r} is not the name of a shared block")
    if nbytes == 0:
        yield memoryview(b"")
        return
    try:
        descriptor = os.open(_folder() / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise MalformedPayload(f"shared block {name} cannot be opened: {error.strerror or error}") from error
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or status.st_size != nbytes:
            raise MalformedPayload(f"shared block {name} has another owner or size than announced ({nbytes:,} bytes)")
        mapped = mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
    view = memoryview(mapped)
    try:
        yield view
    finally:
        # Arrays over the block may outlive the call by a moment; the map goes with the last of them.
        try:
            view.release()
            mapped.close()
        except BufferError:
            pass
