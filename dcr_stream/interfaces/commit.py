"""Where the commit record lives."""

from __future__ import annotations

from abc import ABC, abstractmethod

from dcr_stream.messages import CommitRecord

__all__ = ["CommitStore"]


class CommitStore(ABC):
    """One durable record per run, changed by compare-and-set only. Used by the coordinator alone.

    Calls block briefly (a database or one request); the coordinator makes them from its worker pool.
    """

    @abstractmethod
    def read(self, run: str) -> CommitRecord | None:
        """The record, or None if the run never had one.

        Raises:
            CommitRecordUnreadable: a record exists but cannot be read or verified.
            CommitError: the store does not answer.
        """

    @abstractmethod
    def compare_and_set(self, expected: CommitRecord | None, new: CommitRecord) -> None:
        """Replace ``expected`` (None: no record) by ``new``, durably, or change nothing.

        Raises:
            CommitConflict: the stored record is not ``expected``.
            CommitDeadlineExceeded: no answer; the record may or may not have changed, so read it back.
        """

    def close(self) -> None:
        """Release the store. The default has nothing to release."""
