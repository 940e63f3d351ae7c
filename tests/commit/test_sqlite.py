"""Commit records in SQLite: the conformance suite, durability, and what must never look like a fresh start."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from dcr_stream.commit import SqliteCommitStore
from dcr_stream.errors import (
    CommitConflict,
    CommitDeadlineExceeded,
    CommitError,
    CommitRecordUnreadable,
    UsageError,
)
from dcr_stream.interfaces import CommitStore
from dcr_stream.testing.commit import CommitStoreTests, make_record

SECRET = b"0123456789abcdef"


class TestSqliteCommitStore(CommitStoreTests):
    """The suite on a database file."""

    secret: bytes | None = None

    @pytest.fixture
    def stores(self) -> Iterator[list[CommitStore]]:
        stores: list[CommitStore] = []
        yield stores
        for store in stores:
            store.close()

    @pytest.fixture
    def reopen(self, tmp_path: Path, stores: list[CommitStore]) -> Callable[[], CommitStore]:
        def reopen() -> CommitStore:
            stores.append(SqliteCommitStore(tmp_path / "run.db", secret=self.secret))
            return stores[-1]

        return reopen

    @pytest.fixture
    def store(self, reopen: Callable[[], CommitStore]) -> CommitStore:
        return reopen()


class TestSealedSqliteCommitStore(TestSqliteCommitStore):
    """The suite on records sealed with a secret."""

    secret = SECRET


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database that holds version 3 of run_1, sealed with the secret."""
    path = tmp_path / "run.db"
    store = SqliteCommitStore(path, secret=SECRET)
    store.compare_and_set(None, make_record(3))
    store.close()
    return path


def execute(path: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(statement, values)


def read(path: Path, secret: bytes | None = SECRET) -> object:
    store = SqliteCommitStore(path, secret=secret)
    try:
        return store.read("run_1")
    finally:
        store.close()


def test_an_altered_record_is_unreadable(path: Path) -> None:
    record = make_record(4).encode()
    execute(path, "UPDATE commits SET record = ?", record)
    with pytest.raises(CommitRecordUnreadable, match=re.escape(str(path))):
        read(path)


@pytest.mark.parametrize("secret", [None, b"another secret!!"])
def test_a_record_sealed_with_another_secret_is_unreadable(path: Path, secret: bytes | None) -> None:
    with pytest.raises(CommitRecordUnreadable, match="sealed with another secret; use that secret"):
        read(path, secret)


@pytest.mark.parametrize("kind", ["text", "null_seal", "not_json", "other_run", "other_spelling"])
def test_a_record_that_this_program_does_not_write_is_unreadable(path: Path, kind: str) -> None:
    store = SqliteCommitStore(path, secret=SECRET)
    record = make_record(3).encode()
    contents: dict[str, tuple[object, object]] = {
        "text": (record.decode(), store._seal(record)),
        "null_seal": (record, b""),
        "not_json": (b"{", store._seal(b"{")),
        "other_run": (other := make_record(3, run="run_2").encode(), store._seal(other)),
        "other_spelling": (spaced := record + b" ", store._seal(spaced)),
    }
    execute(path, "UPDATE commits SET record = ?, seal = ?", *contents[kind])
    with pytest.raises(CommitRecordUnreadable, match="run_1"):
        store.read("run_1")
    for expected in (None, make_record(3)):
        with pytest.raises(CommitRecordUnreadable):
            store.compare_and_set(expected, make_record(4))
    store.close()


@pytest.mark.parametrize("damage", ["empty", "garbage", "overwritten", "cut", "no_table"])
def test_a_damaged_database_is_unreadable_and_never_a_fresh_start(path: Path, damage: str) -> None:
    before = path.read_bytes()
    if damage == "no_table":
        execute(path, "DROP TABLE commits")
    else:
        path.write_bytes(
            {
                "empty": b"",
                "garbage": b"not a database " * 1000,
                "overwritten": before[:100] + b"\xff" * (len(before) - 100),
                "cut": before[:1000],
            }[damage]
        )
    after = path.read_bytes()
    with pytest.raises(CommitRecordUnreadable, match=re.escape(str(path))):
        read(path)
    assert path.read_bytes() == after


def test_another_programs_database_is_refused(tmp_path: Path) -> None:
    execute(tmp_path / "other.db", "CREATE TABLE commits (run, record, seal)")
    with pytest.raises(CommitRecordUnreadable, match="another program; choose another file"):
        SqliteCommitStore(tmp_path / "other.db")


def test_a_folder_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CommitRecordUnreadable, match=re.escape(str(tmp_path))):
        SqliteCommitStore(tmp_path)


def test_a_missing_folder_is_named_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere does not exist; create it"):
        SqliteCommitStore(tmp_path / "nowhere" / "run.db")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_created_is_named_with_the_way_out(tmp_path: Path) -> None:
    # Longer than a file name may be: refused by the system for root as well.
    with pytest.raises(UsageError, match=r"cannot be created: .*choose a local folder"):
        SqliteCommitStore(tmp_path / ("x" * 240 + ".db"))
    assert list(tmp_path.iterdir()) == []


def test_the_database_is_for_its_user_alone_and_creation_leaves_nothing_else(path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["run.db"]


def test_a_database_held_by_somebody_else_ends_in_bounded_time(path: Path) -> None:
    store = SqliteCommitStore(path, secret=SECRET, busy_s=0.05)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(CommitDeadlineExceeded, match=r"run\.db.* raise busy_s"):
            store.compare_and_set(make_record(3), make_record(4))
        assert store.read("run_1") == make_record(3)
        other.execute("ROLLBACK")
    store.compare_and_set(make_record(3), make_record(4))
    store.close()


def test_a_read_only_database_changes_nothing(path: Path) -> None:
    store = SqliteCommitStore(path, secret=SECRET)
    store._database.execute("PRAGMA query_only = ON")
    with pytest.raises(CommitError, match="the record is unchanged"):
        store.compare_and_set(make_record(3), make_record(4))
    assert store.read("run_1") == make_record(3)
    store.close()


def test_a_full_disk_changes_nothing(path: Path) -> None:
    store = SqliteCommitStore(path, secret=SECRET)
    (pages,) = store._database.execute("PRAGMA page_count").fetchone()
    store._database.execute(f"PRAGMA max_page_count = {pages}")
    big = replace(make_record(4), members=tuple(f"node{i}/engine" for i in range(5000)))
    with pytest.raises(CommitError, match="the record is unchanged: free some space"):
        store.compare_and_set(make_record(3), big)
    assert store.read("run_1") == make_record(3)
    store.compare_and_set(make_record(3), make_record(4))
    store.close()


def test_a_record_of_another_run_cannot_replace_one(path: Path) -> None:
    store = SqliteCommitStore(path, secret=SECRET)
    with pytest.raises(UsageError, match="run_1"):
        store.compare_and_set(make_record(3), make_record(4, run="run_2"))
    store.close()


def test_a_closed_store_says_so(path: Path) -> None:
    store = SqliteCommitStore(path, secret=SECRET)
    store.close()
    store.close()
    with pytest.raises(CommitError, match="open the store again"):
        store.read("run_1")


WRITER = """
    import sys
    from dcr_stream.commit import SqliteCommitStore
    from dcr_stream.testing.commit import make_record

    store = SqliteCommitStore(sys.argv[1], secret=b"0123456789abcdef")
    version = store.read("run_1").version
    while True:
        store.compare_and_set(make_record(version), make_record(version + 1))
        version += 1
        print(version, flush=True)
"""


@pytest.mark.processes
@pytest.mark.parametrize("commits", [1, 7, 40])
def test_a_killed_coordinator_loses_no_commit_that_it_was_told_of(path: Path, commits: int) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), str(path)], stdout=subprocess.PIPE, text=True
    )
    with writer:
        assert writer.stdout is not None
        told = [int(writer.stdout.readline()) for _ in range(commits)]
        os.kill(writer.pid, signal.SIGKILL)
        told += [int(line) for line in writer.stdout if line.endswith("\n")]
    store = SqliteCommitStore(path, secret=SECRET)
    found = store.read("run_1")
    assert found is not None
    assert found == make_record(found.version)
    # The one in flight may have been committed without an answer.
    assert found.version in (told[-1], told[-1] + 1)
    with pytest.raises(CommitConflict):
        store.compare_and_set(make_record(found.version - 1), make_record(found.version))
    store.compare_and_set(found, make_record(found.version + 1))
    store.close()


@pytest.mark.parametrize("keep", [100, 4096, 5000, 8000, -1])
def test_a_file_that_lost_its_end_is_no_fresh_start(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "commits.db"
    store = SqliteCommitStore(path)
    store.compare_and_set(None, make_record())
    store.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:keep])
    with pytest.raises(CommitRecordUnreadable):
        SqliteCommitStore(path).read("run_1")


def test_a_copy_of_the_one_file_is_complete(tmp_path: Path) -> None:
    store = SqliteCommitStore(tmp_path / "commits.db")
    store.compare_and_set(None, make_record(4))
    copy = tmp_path / "copy.db"
    copy.write_bytes((tmp_path / "commits.db").read_bytes())
    store.close()
    copied = SqliteCommitStore(copy)
    assert copied.read("run_1") == make_record(4)
    copied.close()
