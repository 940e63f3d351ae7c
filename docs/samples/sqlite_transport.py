"""A transport of your own: payloads as rows of one SQLite file, shared by owners and nodes."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread

from dcr_stream import Announcement, Attempt, Payload
from dcr_stream.errors import AttemptFenced, PayloadRejected, TransportTimeout
from dcr_stream.interfaces import PayloadSink, PayloadSource, Transport


@dataclass
class SqliteTransport(Transport, PayloadSink, PayloadSource):
    """Keeps payloads in the database ``path`` until their attempt is discarded; ``fetch`` waits up to ``wait_s``."""

    path: Path
    wait_s: float = 60.0

    def __post_init__(self) -> None:
        with closing(sqlite3.connect(self.path)) as db:
            db.execute("create table if not exists payload (attempt, name, body, primary key (attempt, name))")
            db.execute("create table if not exists fence (attempt primary key)")

    @contextmanager
    def database(self, attempt: Attempt) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.path, timeout=self.wait_s)) as db, db:
            db.execute("begin immediate")
            if db.execute("select 1 from fence where attempt = ?", (attempt.name,)).fetchone():
                raise AttemptFenced(f"attempt {attempt.name} was discarded; start another one")
            yield db

    def put(self, payload: Payload) -> None:
        key = (payload.id.attempt.name, payload.id.name)
        with self.database(payload.id.attempt) as db:
            db.execute("insert or ignore into payload values (?, ?, ?)", (*key, payload.body))
            if db.execute("select body from payload where (attempt, name) = (?, ?)", key).fetchone() != (payload.body,):
                raise PayloadRejected(f"payload {key} exists with other bytes; give it another sequence")

    def get(self, announcement: Announcement) -> bytes | None:
        key = (announcement.id.attempt.name, announcement.id.name)
        with self.database(announcement.id.attempt) as db:
            row = db.execute("select body from payload where (attempt, name) = (?, ?)", key).fetchone()
            return bytes(row[0]) if row else None

    def drop(self, attempt: Attempt) -> None:
        with closing(sqlite3.connect(self.path, timeout=self.wait_s)) as db, db:
            db.execute("insert or ignore into fence values (?)", (attempt.name,))
            db.execute("delete from payload where attempt = ?", (attempt.name,))

    async def send(self, payload: Payload) -> None:
        await anyio.to_thread.run_sync(self.put, payload)

    async def fetch(self, announcement: Announcement) -> bytes:
        with anyio.move_on_after(self.wait_s):
            while True:
                if (body := await anyio.to_thread.run_sync(self.get, announcement)) is not None:
                    return body
                await anyio.sleep(0.05)
        raise TransportTimeout(f"payload {announcement.id.name} did not come in {self.wait_s:g} s; is its owner up?")

    @asynccontextmanager
    async def open_sink(self, attempt: Attempt, owner: str) -> AsyncIterator[PayloadSink]:
        yield self

    @asynccontextmanager
    async def open_source(self, attempt: Attempt, node: str) -> AsyncIterator[PayloadSource]:
        yield self

    async def discard(self, attempt: Attempt) -> None:
        await anyio.to_thread.run_sync(self.drop, attempt)
