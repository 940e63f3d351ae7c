"""Commit records in an SQLite database: one file, one row per run."""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import blake3
import msgspec

from dcr_stream.errors import (
    CommitConflict,
    CommitDeadlineExceeded,
    CommitError,
    CommitRecordUnreadable,
    UsageError,
)
from dcr_stream.interfaces import CommitStore
from dcr_stream.messages import CommitRecord

__all__ = ["SqliteCommitStore"]

_APPLICATION = 0x64637231
"""``application_id`` of the database file, so that no other program's file is taken for ours."""

_SCHEMA = f"""
PRAGMA application_id = {_APPLICATION};
PRAGMA user_version = 1;
CREATE TABLE commits (run TEXT PRIMARY KEY, record BLOB NOT NULL, seal BLOB NOT NULL) WITHOUT ROWID;
"""

_AWAY = "restore the file from a backup, or move it away if the run shall start afresh"


class SqliteCommitStore(CommitStore):
    """One durable record per run in the database at ``path``, made when it does not exist.

    A change compares the stored bytes with those of ``expected`` inside ``BEGIN IMMEDIATE`` and returns only after
    file and journal are synced (``synchronous=EXTRA``). Records are sealed with BLAKE3, keyed if there is a
    ``secret``. Safe to call from several threads, and for several stores on one file; not on network file systems
    (https://sqlite.org/faq.html#q5). A file that was cut off or damaged is unreadable, never a fresh start.

    Args:
        path: the database file; its folder must exist.
        secret: the run's secret; records sealed with another one are unreadable.
        busy_s: how long to wait for another writer, in seconds.

    Raises:
        UsageError: the folder is missing or may not be written to.
        CommitRecordUnreadable: the file exists and is no readable database of commit records.
    """

    def __init__(self, path: str | os.PathLike[str], *, secret: bytes | None = None, busy_s: float = 5.0) -> None:
        self._path = Path(path)
        self._key = (
            None if secret is None else blake3.blake3(secret, derive_key_context="dcr-stream 2025 commit record")
        )
        self._busy_s = busy_s
        self._lock = threading.Lock()
        if not self._path.exists():
            self._create()
        self._database = self._connect()

    def read(self, run: str) -> CommitRecord | None:
        """The record of ``run``, verified; see ``CommitStore.read``."""
        with self._using("read") as database:
            row = database.execute("SELECT record, seal FROM commits WHERE run = ?", (run,)).fetchone()
        return None if row is None else self._verified(run, *row)

    def compare_and_set(self, expected: CommitRecord | None, new: CommitRecord) -> None:
        """Replace ``expected`` by ``new`` or change nothing; see ``CommitStore.compare_and_set``."""
        if expected is not None and expected.run != new.run:
            raise UsageError(f"the record of run {expected.run!r} cannot become one of {new.run!r}")
        body = new.encode()
        with self._using("change") as database:
            database.execute("BEGIN IMMEDIATE")
            try:
                row = database.execute("SELECT record, seal FROM commits WHERE run = ?", (new.run,)).fetchone()
                stored = None if row is None else self._verified(new.run, *row)
                if (None if stored is None else stored.encode()) != (None if expected is None else expected.encode()):
                    raise CommitConflict(
                        f"run {new.run!r} in {self._path}: expected {_brief(expected)} and found {_brief(stored)}; "
                        "another coordinator took over, so stop this one or read the record again"
                    )
                database.execute(
                    "INSERT INTO commits VALUES (?, ?, ?) "
                    "ON CONFLICT (run) DO UPDATE SET record = excluded.record, seal = excluded.seal",
                    (new.run, body, self._seal(body)),
                )
                database.execute("COMMIT")
            finally:
                if database.in_transaction:
                    with contextlib.suppress(sqlite3.Error):
                        database.execute("ROLLBACK")

    def close(self) -> None:
        """Close the database. Idempotent."""
        with self._lock:
            self._database.close()

    def _create(self) -> None:
        """Make the file whole or not at all: an empty file is never taken for a fresh start."""
        folder = self._path.parent
        if not folder.is_dir():
            raise UsageError(f"commit store {self._path}: folder {folder} does not exist; create it")
        draft = folder / f".{self._path.name}.{secrets.token_hex(8)}"
        try:
            os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            with closing(sqlite3.connect(draft, isolation_level=None)) as database:
                database.executescript(_SCHEMA)
            with contextlib.suppress(FileExistsError):  # another store was faster, and its file is as good
                os.link(draft, self._path)
            _sync_folder(folder)
        except (OSError, sqlite3.Error) as error:
            raise UsageError(
                f"commit store {self._path} cannot be created: {error}; "
                "choose a local folder that this user may write to"
            ) from error
        finally:
            with contextlib.suppress(OSError):
                draft.unlink()

    def _connect(self) -> sqlite3.Connection:
        try:
            if self._path.stat().st_size == 0:
                raise CommitRecordUnreadable(f"commit store {self._path} is an empty file; {_AWAY}")
            database = sqlite3.connect(
                f"{self._path.absolute().as_uri()}?mode=rw",
                uri=True,
                timeout=self._busy_s,
                isolation_level=None,
                check_same_thread=False,
            )
        except (OSError, sqlite3.Error) as error:
            raise CommitRecordUnreadable(f"commit store {self._path} cannot be opened: {error}; {_AWAY}") from error
        try:
            (application,) = database.execute("PRAGMA application_id").fetchone()
            if application != _APPLICATION:
                raise CommitRecordUnreadable(f"{self._path} is a database of another program; choose another file")
            # A rollback journal: what is committed is in the one file, so a copy of it is complete.
            database.execute("PRAGMA journal_mode = DELETE")
            database.execute("PRAGMA synchronous = EXTRA")
            self._check_whole(database)
        except CommitRecordUnreadable:
            database.close()
            raise
        except sqlite3.Error as error:
            database.close()
            raise self._typed(error, "open") from error
        return database

    def _check_whole(self, database: sqlite3.Connection) -> None:
        """A file that lost its end, or whose pages do not hang together, may have lost the record: no fresh start."""
        (pages,) = database.execute("PRAGMA page_count").fetchone()
        (size,) = database.execute("PRAGMA page_size").fetchone()
        with self._path.open("rb") as file:
            header = file.read(100)
        written = max(pages, int.from_bytes(header[28:32], "big"))
        if self._path.stat().st_size < written * size:
            raise CommitRecordUnreadable(f"commit store {self._path} is cut off: its pages need more bytes; {_AWAY}")
        (fault,) = database.execute("PRAGMA quick_check(1)").fetchone()
        if fault != "ok":
            raise CommitRecordUnreadable(f"commit store {self._path} is damaged: {fault}; {_AWAY}")
        database.execute("SELECT count(*) FROM commits").fetchone()

    @contextmanager
    def _using(self, what: str) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                yield self._database
            except sqlite3.Error as error:
                raise self._typed(error, what) from error

    def _typed(self, error: sqlite3.Error, what: str) -> CommitError:
        # The low byte is the primary code; the rest says more (https://sqlite.org/rescode.html).
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        where = f"commit store {self._path}, {what}: {error}"
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return CommitDeadlineExceeded(
                f"{where} for {self._busy_s:g} s; end what holds the database, or raise busy_s"
            )
        if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH):
            return CommitError(f"{where}; the record is unchanged: let this user write the file and its folder")
        if code == sqlite3.SQLITE_FULL:
            return CommitError(f"{where}; the record is unchanged: free some space")
        if code == sqlite3.SQLITE_IOERR and what == "change":
            return CommitDeadlineExceeded(f"{where}; read the record back, and check the disk")
        if isinstance(error, sqlite3.ProgrammingError):
            return CommitError(f"{where}; open the store again")
        if code == sqlite3.SQLITE_NOTADB:
            return CommitRecordUnreadable(f"{where}; choose another file, or restore this one from a backup")
        return CommitRecordUnreadable(f"{where}; {_AWAY}")

    def _verified(self, run: str, record: object, seal: object) -> CommitRecord:
        where = f"the commit record of run {run!r} in {self._path}"
        if not isinstance(record, bytes) or not isinstance(seal, bytes):
            raise CommitRecordUnreadable(f"{where} is not what this program writes; {_AWAY}")
        if not secrets.compare_digest(self._seal(record), seal):
            raise CommitRecordUnreadable(
                f"{where} was altered or sealed with another secret; use that secret, or {_AWAY}"
            )
        try:
            decoded = msgspec.json.decode(record, type=CommitRecord)
        except msgspec.DecodeError as error:
            raise CommitRecordUnreadable(f"{where} does not decode ({error}); {_AWAY}") from error
        if decoded.run != run or decoded.encode() != record:
            raise CommitRecordUnreadable(f"{where} is of another run or was written by another version; {_AWAY}")
        return decoded

    def _seal(self, record: bytes) -> bytes:
        if self._key is None:
            return blake3.blake3(record).digest()
        return blake3.blake3(record, key=self._key.digest()).digest()


def _sync_folder(folder: Path) -> None:
    """Make a new name in ``folder`` survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _brief(record: CommitRecord | None) -> str:
    if record is None:
        return "no record"
    return f"version {record.version} (epoch {record.epoch}, attempt {record.attempt}, serial {record.serial})"
