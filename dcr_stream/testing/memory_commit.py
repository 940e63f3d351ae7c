"""A commit store in memory, with places to make it fail."""

from __future__ import annotations

import threading
from collections.abc import Callable

from dcr_stream.errors import CommitConflict, UsageError
from dcr_stream.interfaces import CommitStore
from dcr_stream.messages import CommitRecord

__all__ = ["MemoryCommitStore"]

Hook = Callable[[CommitRecord | None, CommitRecord], None]


class MemoryCommitStore(CommitStore):
    """Forgets everything when the process ends: for tests only.

    Hooks get ``(expected, new)`` and may raise: ``before_change`` before anything is compared (the change does not
    happen), ``after_change`` once the record has changed (the answer is lost). ``before_read`` gets the run.
    """

    def __init__(self) -> None:
        self.before_change: Hook | None = None
        self.after_change: Hook | None = None
        self.before_read: Callable[[str], None] | None = None
        self.history: list[CommitRecord] = []
        """Every record that was ever stored, oldest first."""
        self._records: dict[str, bytes] = {}
        self._last: dict[str, CommitRecord] = {}
        self._lock = threading.Lock()

    def read(self, run: str) -> CommitRecord | None:
        """The record of ``run``; see ``CommitStore.read``."""
        if self.before_read is not None:
            self.before_read(run)
        with self._lock:
            return self._last.get(run)

    def compare_and_set(self, expected: CommitRecord | None, new: CommitRecord) -> None:
        """Replace ``expected`` by ``new`` or change nothing; see ``CommitStore.compare_and_set``."""
        if expected is not None and expected.run != new.run:
            raise UsageError(f"the record of run {expected.run!r} cannot become one of {new.run!r}")
        if self.before_change is not None:
            self.before_change(expected, new)
        with self._lock:
            if self._records.get(new.run) != (None if expected is None else expected.encode()):
                raise CommitConflict(f"run {new.run!r}: the stored record is not the expected one; read it again")
            self._records[new.run] = new.encode()
            self._last[new.run] = new
            self.history.append(new)
        if self.after_change is not None:
            self.after_change(expected, new)
