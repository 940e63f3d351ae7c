"""The commit record in the hands of one coordinator: taking over, fencing, and the joint commit.

Every change is a compare-and-set on the exact record that this coordinator read, so a replaced coordinator, or a
commit of a fenced attempt that is still on its way, changes nothing (``docs/design/protocol.md``, failure).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import anyio
from msgspec.structs import replace

from dcr_stream.errors import (
    CommitConflict,
    CommitDeadlineExceeded,
    CommitError,
    CommitRecordUnreadable,
    StaleEpoch,
)
from dcr_stream.interfaces import CommitStore
from dcr_stream.messages import CommitRecord
from dcr_stream.runtime import Runtime

__all__ = ["Leadership"]

T = TypeVar("T")
_READ_AGAIN_S = 0.1


class Leadership:
    """One coordinator's hold on the record of ``run``. ``record`` is what this coordinator last wrote or read."""

    def __init__(self, run: str, store: CommitStore, runtime: Runtime, deadline_s: float) -> None:
        self.run = run
        self.record: CommitRecord | None = None
        self.epoch = 0
        self._store, self._runtime, self._deadline_s = store, runtime, deadline_s

    @property
    def version(self) -> int:
        """The committed version; -1 before the first commit."""
        return self.record.version if self.record is not None else -1

    async def take(self) -> None:
        """Become the coordinator: raise the epoch in the record, which defeats every commit in flight.

        Without a record nothing is written yet: ``create`` follows once all roles agree that the run is new.

        Raises:
            CommitRecordUnreadable: a record exists and cannot be read.
            StaleEpoch: another coordinator took over at the same moment.
        """
        found = await self._call(lambda: self._store.read(self.run))
        self.record = found
        self.epoch = 1 if found is None else found.epoch + 1
        if found is not None:
            await self._set(replace(found, epoch=self.epoch, serial=found.serial + 1))

    async def create(self, directory: str) -> None:
        """Write the first record of a new run, at version -1."""
        if self.record is None:
            await self._set(
                CommitRecord(
                    run=self.run,
                    version=-1,
                    attempt=-1,
                    epoch=self.epoch,
                    attempt_floor=0,
                    directory=directory,
                    manifests=(),
                    members=(),
                    state=(0, 0),
                    time=self._runtime.clock.wall(),
                    serial=0,
                )
            )

    async def fence(self, floor: int) -> None:
        """Void every attempt below ``floor``: no commit of theirs that is still on its way can succeed."""
        assert self.record is not None
        if floor > self.record.attempt_floor:
            await self._set(replace(self.record, attempt_floor=floor, serial=self.record.serial + 1))

    async def commit(self, new: CommitRecord) -> None:
        """The joint commit.

        Raises:
            StaleEpoch: another coordinator changed the record; nothing was committed here.
            CommitError: the store does not answer and the record is unchanged; fence before trying again.
        """
        await self._set(new)

    async def check(self) -> None:
        """Read the record again.

        Raises:
            StaleEpoch: it is not what this coordinator wrote.
        """
        found = await self._call(lambda: self._store.read(self.run))
        if found != self.record:
            raise self._replaced(found)

    async def _set(self, new: CommitRecord) -> None:
        # Shielded: a write whose outcome this coordinator does not remember would look like somebody else's.
        with anyio.CancelScope(shield=True):
            await self._replace(self.record, new)

    async def _replace(self, expected: CommitRecord | None, new: CommitRecord) -> None:
        try:
            await self._call(lambda: self._store.compare_and_set(expected, new))
        except CommitConflict as error:
            found = await self._read_back()
            if found != new:
                raise self._replaced(found) from error
        except CommitError:
            # The answer was lost, not necessarily the write: only the record itself can tell.
            found = await self._read_back()
            if found == expected:
                raise
            if found != new:
                raise self._replaced(found) from None
        self.record = new

    async def _read_back(self) -> CommitRecord | None:
        with anyio.move_on_after(self._deadline_s):
            while True:
                try:
                    return await self._call(lambda: self._store.read(self.run))
                except CommitRecordUnreadable:
                    raise
                except CommitError:
                    await anyio.sleep(_READ_AGAIN_S)
        raise CommitDeadlineExceeded(
            f"the commit store of run {self.run!r} did not answer within {self._deadline_s:g} s; whether the last "
            "change took effect is unknown, so this coordinator stops; start it again"
        )

    async def _call(self, fn: Callable[[], T]) -> T:
        return await self._runtime.workers.run(fn)

    def _replaced(self, found: CommitRecord | None) -> StaleEpoch:
        now = f"epoch {found.epoch}, version {found.version}" if found is not None else "no record at all"
        return StaleEpoch(
            f"run {self.run!r}: the commit record was changed by somebody else (now {now}; this coordinator is epoch "
            f"{self.epoch}); it stops, and the other one goes on"
        )
