"""Entries → buckets of columns."""

from __future__ import annotations

from collections.abc import Iterator

from dcr_stream.delta import Bucket, Entry
from dcr_stream.flow import Stage, fold
from dcr_stream.flow.arguments import check_at_least

__all__ = ["bucket"]


def bucket(*, max_bytes: int = 64 << 20, max_items: int = 4096) -> Stage[Entry, Bucket]:
    """Lay entries out in columns: each bucket holds consecutive entries, each column their shares back to back.

    A bucket holds at most ``max_items`` entries and ``max_bytes`` over all columns; an entry larger than that is a
    bucket of its own. No bucket is empty.

    Raises:
        UsageError: a bound is less than 1.
    """
    check_at_least("bucket", "max_bytes", max_bytes, 1)
    check_at_least("bucket", "max_items", max_items, 1)
    return fold(lambda: _Columns(max_bytes, max_items), name="bucket")


class _Columns:
    def __init__(self, max_bytes: int, max_items: int) -> None:
        self._max_bytes = max_bytes
        self._max_items = max_items
        self._entries: list[Entry] = []
        self._nbytes = 0

    def push(self, item: Entry) -> Iterator[Bucket]:
        if self._entries and self._nbytes + item.nbytes > self._max_bytes:
            yield from self.flush()
        self._entries.append(item)
        self._nbytes += item.nbytes
        if len(self._entries) == self._max_items:
            yield from self.flush()

    def flush(self) -> Iterator[Bucket]:
        if self._entries:
            entries, self._entries, self._nbytes = self._entries, [], 0
            columns = zip(*(entry.columns for entry in entries), strict=True)
            yield Bucket(tuple(entry.item for entry in entries), tuple(b"".join(column) for column in columns))
