"""The commit store for tests passes the suite too, and fails where it is told to."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dcr_stream.errors import CommitDeadlineExceeded
from dcr_stream.interfaces import CommitStore
from dcr_stream.messages import CommitRecord
from dcr_stream.testing import MemoryCommitStore
from dcr_stream.testing.commit import CommitStoreTests, make_record


class TestMemoryCommitStore(CommitStoreTests):
    """One store: whoever reopens it gets the same."""

    @pytest.fixture
    def store(self) -> CommitStore:
        return MemoryCommitStore()

    @pytest.fixture
    def reopen(self, store: CommitStore) -> Callable[[], CommitStore]:
        return lambda: store


def lost(expected: CommitRecord | None, new: CommitRecord) -> None:
    raise CommitDeadlineExceeded("no answer")


def test_a_change_can_fail_before_it_happens_or_lose_its_answer() -> None:
    store = MemoryCommitStore()
    store.before_change = lost
    with pytest.raises(CommitDeadlineExceeded):
        store.compare_and_set(None, make_record())
    assert store.read("run_1") is None
    store.before_change, store.after_change = None, lost
    with pytest.raises(CommitDeadlineExceeded):
        store.compare_and_set(None, make_record())
    assert store.read("run_1") == make_record()
    assert store.history == [make_record()]
