"""What every commit store must do, as tests: subclass ``CommitStoreTests`` and override its ``store`` fixture."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from msgspec.structs import replace

from dcr_stream.errors import CommitConflict
from dcr_stream.interfaces import CommitStore
from dcr_stream.messages import CommitRecord

__all__ = ["CommitStoreTests", "make_record"]


def make_record(version: int = 0, *, run: str = "run_1", epoch: int = 1, serial: int | None = None) -> CommitRecord:
    """A record of ``version`` with every field used."""
    return CommitRecord(
        run=run,
        version=version,
        attempt=version + 1,
        epoch=epoch,
        attempt_floor=version,
        directory="ab" * 32,
        manifests=("cd" * 32, "ef" * 32),
        members=("node0/engine0", "node1/engine1"),
        state=(2**64 - 1, 7),
        time=1_700_000_000.1,
        serial=version if serial is None else serial,
    )


class CommitStoreTests:
    """The contract of ``dcr_stream.interfaces.CommitStore``."""

    @pytest.fixture
    def store(self) -> CommitStore:
        """An empty store."""
        raise NotImplementedError("override the `store` fixture")

    @pytest.fixture
    def reopen(self) -> Callable[[], CommitStore]:
        """Opens what ``store`` stands on once more, as another coordinator would."""
        raise NotImplementedError("override the `reopen` fixture")

    def test_a_run_without_record_reads_as_none(self, store: CommitStore) -> None:
        assert store.read("run_1") is None

    def test_a_created_record_reads_back_equal(self, store: CommitStore) -> None:
        record = make_record(-1)
        store.compare_and_set(None, record)
        assert store.read("run_1") == record

    def test_creating_twice_conflicts_and_changes_nothing(self, store: CommitStore) -> None:
        store.compare_and_set(None, make_record())
        with pytest.raises(CommitConflict):
            store.compare_and_set(None, make_record(5))
        assert store.read("run_1") == make_record()

    def test_a_record_that_is_not_there_cannot_be_replaced(self, store: CommitStore) -> None:
        with pytest.raises(CommitConflict):
            store.compare_and_set(make_record(), make_record(1))
        assert store.read("run_1") is None

    def test_replacing_the_stored_record_succeeds(self, store: CommitStore) -> None:
        store.compare_and_set(None, make_record())
        store.compare_and_set(make_record(), make_record(1))
        assert store.read("run_1") == make_record(1)

    def test_a_stale_record_conflicts_and_changes_nothing(self, store: CommitStore) -> None:
        store.compare_and_set(None, make_record())
        store.compare_and_set(make_record(), make_record(1))
        with pytest.raises(CommitConflict):
            store.compare_and_set(make_record(), make_record(2))
        assert store.read("run_1") == make_record(1)

    @pytest.mark.parametrize(
        "changed",
        [
            {"epoch": 2},
            {"attempt": 9},
            {"attempt_floor": 9},
            {"manifests": ()},
            {"members": ("node0/engine0",)},
            {"state": (2**64 - 1, 8)},
            {"time": 1_700_000_000.2},
            {"serial": 9},
        ],
        ids=lambda changed: next(iter(changed)),
    )
    def test_a_record_that_differs_in_one_field_is_another_record(
        self, store: CommitStore, changed: dict[str, object]
    ) -> None:
        store.compare_and_set(None, make_record())
        with pytest.raises(CommitConflict):
            store.compare_and_set(replace(make_record(), **changed), make_record(1))
        assert store.read("run_1") == make_record()

    def test_runs_do_not_touch_each_other(self, store: CommitStore) -> None:
        store.compare_and_set(None, make_record(run="run_1"))
        store.compare_and_set(None, make_record(3, run="run_2"))
        store.compare_and_set(make_record(run="run_1"), make_record(1, run="run_1"))
        assert store.read("run_2") == make_record(3, run="run_2")
        assert store.read("run") is None

    def test_a_second_store_sees_every_change(self, store: CommitStore, reopen: Callable[[], CommitStore]) -> None:
        other = reopen()
        store.compare_and_set(None, make_record())
        assert other.read("run_1") == make_record()
        other.compare_and_set(make_record(), make_record(1))
        with pytest.raises(CommitConflict):
            store.compare_and_set(make_record(), make_record(2))
        assert store.read("run_1") == make_record(1)

    def test_records_outlive_the_store(self, store: CommitStore, reopen: Callable[[], CommitStore]) -> None:
        store.compare_and_set(None, make_record())
        store.close()
        assert reopen().read("run_1") == make_record()

    def test_of_racing_writers_exactly_one_wins(self, store: CommitStore, reopen: Callable[[], CommitStore]) -> None:
        stores = [store, *(reopen() for _ in range(3))]
        expected: CommitRecord | None = None
        for version in range(8):
            new = [make_record(version, serial=100 * version + i) for i in range(8)]
            start = threading.Barrier(len(new))

            def write(
                i: int,
                expected: CommitRecord | None = expected,
                new: list[CommitRecord] = new,
                start: threading.Barrier = start,
            ) -> bool:
                start.wait()
                try:
                    stores[i % len(stores)].compare_and_set(expected, new[i])
                except CommitConflict:
                    return False
                return True

            with ThreadPoolExecutor(len(new)) as pool:
                won = [i for i, ok in enumerate(pool.map(write, range(len(new)))) if ok]
            assert len(won) == 1
            expected = new[won[0]]
            assert all(one.read("run_1") == expected for one in stores)
