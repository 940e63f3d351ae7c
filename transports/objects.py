"""Create-only objects in a store, with names checked, errors typed and retries in one place."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

import anyio
import obstore
from anyio import to_thread
from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError
from obstore.store import LocalStore, ObjectStore

from dcr_stream.errors import (
    AttemptAborted,
    DcrError,
    PayloadRejected,
    TransportError,
    TransportTimeout,
    TransportUnavailable,
    UsageError,
)

__all__ = ["MAX_NAME_BYTES", "Objects", "checked_name"]

MAX_NAME_BYTES = 250
"""Longest part of an object's name; file systems allow 255, and writing needs a few for a temporary name."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\Z")
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0

T = TypeVar("T")


def checked_name(name: str) -> str:
    """``name`` if it may be one part of an object's name: it then names nothing outside its folder.

    Raises:
        PayloadRejected: it may not.
    """
    if not _NAME.match(name) or ".." in name or len(name) > MAX_NAME_BYTES:
        raise PayloadRejected(
            f"{name[:80]!r} cannot name an object: use letters, digits, '.', '_' and '-', not '..', "
            f"starting with a letter, digit or '_', at most {MAX_NAME_BYTES} bytes"
        )
    return name


class Objects:
    """Whole objects that are created once, read, and deleted.

    Args:
        store: the obstore store.
        where: what errors call it (a folder or URL).
        folder: the folder on this machine, if it is one.
        deadline_s: total time of one operation with all its retries, in seconds.
    """

    def __init__(self, store: ObjectStore, where: str, *, folder: Path | None = None, deadline_s: float = 60.0) -> None:
        self.where = where
        self._store = store
        self._folder = folder
        self._deadline_s = deadline_s

    @classmethod
    def in_folder(cls, url: str, *, deadline_s: float = 60.0) -> Objects:
        """Objects as files below the folder of a ``file:///DIR`` URL.

        Raises:
            UsageError: the URL is not understood, or the folder is missing or may not be written to.
        """
        parts = urlsplit(url)
        if (
            parts.scheme != "file"
            or parts.netloc not in ("", "localhost")
            or not parts.path.startswith("/")
            or parts.query
        ):
            raise UsageError(f"transport {url!r} is not understood; write file:///DIR with an absolute folder")
        folder = Path(unquote(parts.path))
        # A folder that cannot even be looked at counts as existing: what follows says that it may not be used.
        try:
            missing = not folder.is_dir()
        except OSError:
            missing = False
        if missing:
            raise UsageError(f"transport {url!r}: folder {str(folder)!r} does not exist; create it, on every host")
        effective = os.access in os.supports_effective_ids
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK, effective_ids=effective):
            raise UsageError(
                f"transport {url!r}: folder {str(folder)!r} may not be read and written by this user; "
                "change its permissions or choose another folder"
            )
        folder = folder.resolve()
        return cls(LocalStore(folder), f"folder {str(folder)!r}", folder=folder, deadline_s=deadline_s)

    async def create(self, name: str, body: bytes) -> bool:
        """Create an object whole or not at all; False if it exists already (with whatever bytes)."""

        async def put() -> bool:
            try:
                await self._put(name, body)
            except AlreadyExistsError:
                return False
            return True

        return await self._retrying(f"writing {name}", put)

    async def read(self, name: str, size: int) -> bytes | None:
        """The object's bytes; None if there is no such object.

        Raises:
            AttemptAborted: it has another size than ``size``, or ends early. Nothing larger is read.
        """

        async def get() -> bytes | None:
            try:
                found, body = await self._get(name, size)
            except FileNotFoundError:
                return None
            if found != size or len(body) != size:
                raise AttemptAborted(
                    f"{name} in {self.where} has {found} bytes ({len(body)} read) and {size} were announced; "
                    "retry the attempt"
                )
            return body

        return await self._retrying(f"reading {name}", get)

    async def exists(self, name: str) -> bool:
        """Whether there is such an object."""

        async def head() -> bool:
            try:
                await self._head(name)
            except FileNotFoundError:
                return False
            return True

        return await self._retrying(f"looking for {name}", head)

    async def delete(self, name: str) -> None:
        """Delete an object; no error if there is none."""

        async def delete() -> None:
            with suppress(FileNotFoundError):
                await self._delete([name])

        await self._retrying(f"deleting {name}", delete)

    async def delete_below(self, prefix: str) -> None:
        """Delete every object below ``prefix``, and what interrupted writes left there."""

        async def delete() -> None:
            names = await self._list(prefix)
            if names:
                with suppress(FileNotFoundError):  # somebody else deletes too
                    await self._delete(names)
            if self._folder is not None:
                await to_thread.run_sync(partial(shutil.rmtree, self._folder / prefix, ignore_errors=True))

        await self._retrying(f"deleting what is below {prefix}", delete)

    # The calls to the store, one each, for fault injection.

    async def _put(self, name: str, body: bytes) -> None:
        await obstore.put_async(self._store, name, body, mode="create", use_multipart=False)

    async def _get(self, name: str, size: int) -> tuple[int, bytes]:
        answer = await obstore.get_async(self._store, name)
        found = answer.meta["size"]
        return found, bytes(await answer.bytes_async()) if found == size else b""

    async def _head(self, name: str) -> None:
        await obstore.head_async(self._store, name)

    async def _delete(self, names: list[str]) -> None:
        await obstore.delete_async(self._store, names)

    async def _list(self, prefix: str) -> list[str]:
        names: list[str] = []
        async for page in obstore.list(self._store, prefix=prefix):
            names.extend(item["path"] for item in page)
        return names

    async def _retrying(self, what: str, operation: Callable[[], Awaitable[T]]) -> T:
        """The only place where storage calls are repeated: with growing pauses, until the total deadline."""
        last: TransportError | None = None
        pause = _FIRST_PAUSE_S
        with anyio.move_on_after(self._deadline_s):
            while True:
                try:
                    return await operation()
                except DcrError:
                    raise
                except (BaseError, OSError) as error:
                    final, last = self._typed(what, error)
                    if final:
                        raise last from error
                await anyio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
        if last is not None:
            raise last
        raise TransportTimeout(
            f"{what} in {self.where} took longer than {self._deadline_s:g} s; check the store, or raise deadline_s"
        )

    def _typed(self, what: str, error: BaseError | OSError) -> tuple[bool, TransportError]:
        """Our error for a store's, and whether repeating at once is useless."""
        text = str(error).partition("\n")[0]
        number = _os_error(error)
        if isinstance(error, PermissionDeniedError) or number in (errno.EACCES, errno.EPERM, errno.EROFS):
            return True, TransportUnavailable(
                f"{what} in {self.where} is not permitted ({text}); change the permissions of the store"
            )
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return True, TransportUnavailable(
                f"{what} in {self.where}: no space is left ({text}); free some, then refit again"
            )
        if number in (errno.ENOENT, errno.ENOTDIR) or (self._folder is not None and not self._folder.is_dir()):
            return True, TransportUnavailable(f"{what}: {self.where} is gone ({text}); create it again on every host")
        return False, TransportUnavailable(f"{what} in {self.where} failed ({text}); check the store")


def _os_error(error: BaseError | OSError) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else None
