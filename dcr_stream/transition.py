"""One transition, v to v+1: attempts until one commits, or giving up with everybody back on v."""

from __future__ import annotations

from contextlib import suppress

import anyio

from dcr_stream.attempt import AttemptRun
from dcr_stream.capture import total
from dcr_stream.errors import (
    CasUnsupported,
    CommitError,
    CommitRecordUnreadable,
    DcrError,
    DigestMismatch,
    DirectoryMismatch,
    LayoutChanged,
    PlacementError,
    RecordsAltered,
    StaleEpoch,
    TransitionAbandoned,
    TransitionFailed,
    UntracedPath,
    UsageError,
)
from dcr_stream.interfaces import Monitor
from dcr_stream.leadership import Leadership
from dcr_stream.messages import Announcement, Attempt, CommitRecord, Sum
from dcr_stream.participants import Participants, pick
from dcr_stream.peers import Mode, Receiving, RefitReport
from dcr_stream.protocol import Done, EngineState, Restored, Stream, StreamKind
from dcr_stream.runtime import Runtime
from dcr_stream.steps import step

__all__ = ["Transition"]

_FATAL = (
    CasUnsupported,
    CommitRecordUnreadable,
    DirectoryMismatch,
    PlacementError,
    TransitionFailed,
    UsageError,
)
_REPAIRABLE = (LayoutChanged, UntracedPath)
"""Placement errors of one engine that lost its plan: it is traced again and restored."""

_POLL_S = 0.2


class Transition:
    """Drives the owners' candidates to a joint commit, or gives up. Used once."""

    def __init__(
        self,
        lead: Leadership,
        mode: Mode,
        participants: Participants,
        *,
        first_attempt: int,
        runtime: Runtime,
        secret: bytes | None,
        monitor: Monitor,
    ) -> None:
        self.next_attempt = first_attempt
        self._unfinished: tuple[CommitRecord, AttemptRun] | None = None
        self._mode: Mode = mode
        self._lead, self._all = lead, participants
        self._runtime, self._secret, self._monitor = runtime, secret, monitor
        self._settings = participants.settings
        self._offers = participants.offers
        self._mine: set[int] = set()
        self._suspicions = 0
        self._accused = False
        self._restored = 0
        self._run: AttemptRun | None = None

    async def announce(self, announcement: Announcement) -> None:
        """A payload of the running attempt is ready."""
        run = self._run
        if run is not None and run.attempt == announcement.id.attempt:
            await run.announce(announcement)

    async def run(self) -> RefitReport:
        """Try until committed.

        Raises:
            TransitionAbandoned: ``max_attempts`` failed, or an owner's candidate is gone.
            StaleEpoch: another coordinator took over; nothing more is done here.
            DcrError: something that trying again cannot repair; everybody is back on v.
        """
        failures: list[str] = []
        await self._fence_leftovers()
        while len(failures) < self._settings.max_attempts:
            try:
                run, record = await self._attempt()
            except StaleEpoch:
                raise
            except DcrError as error:
                failures.append(f"{type(error).__name__}: {error}")
                self._all.report("attempt failed", error)
                await self._fence()
                if isinstance(error, _FATAL) and not isinstance(error, _REPAIRABLE):
                    await self._give_up()
                    if len(failures) > 1:
                        raise type(error)(f"{error} (what failed first: {failures[0]})") from error
                    raise
                if self._mode == "async":
                    await self._all.open_gates()
            else:
                self._unfinished = record, run
                await self.finish()
                return self._report(record, run, failures)
        await self._give_up()
        raise TransitionAbandoned(
            f"version {self._lead.version + 1} was abandoned after {len(failures)} attempts; receivers are back on "
            f"{self._lead.version} and the next delta contains these changes. Last failure: {failures[-1]}"
        )

    async def restore_joiners(self) -> int:
        """Bring engines without a committed version to it and open all gates; returns how many.

        Raises:
            TransitionAbandoned: the owners do not hold the committed version any more; the next refit is dense.
        """
        await self._fence_leftovers()
        try:
            await self._restore_each(pick(await self._all.prepare(), lambda e: not self._at_base(e)))
        except TransitionAbandoned:
            await self._fence(abandon=True, forget=True)
            await self._all.open_gates()
            raise
        await self._all.open_gates()
        return self._restored

    async def _fence_leftovers(self) -> None:
        """Void an attempt of an earlier transition that was cancelled in flight."""
        record = self._lead.record
        if record is not None and self.next_attempt > record.attempt_floor:
            await self._fence()

    # -- one attempt ------------------------------------------------------------------------------------------------

    async def _attempt(self) -> tuple[AttemptRun, CommitRecord]:
        await self._all.owners_are_back()
        await self._all.refuse_unequal_replicas()
        kind: StreamKind = "delta"
        if self._lead.version < 0 or any(offer.kind == "dense" for offer in self._offers.values()):
            kind = "dense"
        receiving = await self._usable(kind)
        engines = [engine for r in receiving for engine in r.engines]
        base, changed = self._lead.version, {t for offer in self._offers.values() for t in offer.changed}
        whole = tuple(sorted(changed & {t for e in engines for t in e.whole})) if kind == "delta" else ()
        aliased = tuple(sorted({t for e in engines for t in e.aliased}))
        relative = kind == "delta" and all(e.mark == "clean" and e.version == base for e in engines)
        tensors = range(len(self._all.directory)) if kind == "dense" else aliased
        expected = await self._all.sums(tensors, "target")
        run = self._new_run(kind, base, base + 1, receiving, expected, self._mode, relative, aliased, whole)
        try:
            await self._drive(run, kind)
        except DigestMismatch as error:
            await self._fence()  # afterwards every engine has found what it will find
            await self._maybe_accuse(receiving, kind, error)
            raise
        finally:
            self._all.left_out |= run.unclosed
        return run, await self._commit(run, receiving)

    async def _drive(self, run: AttemptRun, kind: StreamKind) -> None:
        self._run = run
        try:
            async with step(self._monitor, self._runtime.clock, "coordinator", f"attempt {run.attempt.number}", kind):
                await run.run()
        except RecordsAltered as error:
            self._accused = True
            raise TransitionAbandoned(str(error)) from error
        finally:
            self._run = None

    def _report(self, record: CommitRecord, run: AttemptRun, failures: list[str]) -> RefitReport:
        return RefitReport(
            record=record,
            mode=self._mode,
            kind="dense" if run.streams[0][1].kind == "dense" else "delta",
            attempts=len(failures) + 1,
            restored=self._restored,
            elements=sum(offer.elements for offer in self._offers.values()),
            scanned=sum(offer.scanned for offer in self._offers.values()),
            payloads=sum(len(m.payloads) for m in run.manifests.values()),
            payload_bytes=sum(p.size for m in run.manifests.values() for p in m.payloads),
            timeline={"capture": max(o.capture_s for o in self._offers.values()), **run.timeline},
            failures=tuple(failures),
        )

    def _new_run(
        self,
        kind: StreamKind,
        base: int,
        target: int,
        receiving: list[Receiving],
        expected: dict[int, Sum],
        mode: Mode,
        relative: bool = False,
        overwrite: tuple[int, ...] = (),
        whole: tuple[int, ...] = (),
    ) -> AttemptRun:
        attempt = Attempt(self._lead.run, target, self.next_attempt, self._lead.epoch)
        self.next_attempt += 1
        if kind in ("delta", "revert"):
            # What an interrupted dense load leaves behind is no version plus changes: never to be overwritten onto.
            self._mine.add(attempt.number)
        streams = [
            (peer, Stream(attempt, base, kind, relative, overwrite, whole, self._all.skip.get(name, ())))
            for name, peer in self._all.owners.items()
        ]
        return AttemptRun(
            streams=streams,
            receiving=receiving,
            expected=expected,
            mode=mode,
            settings=self._settings,
            clock=self._runtime.clock,
            secret=self._secret,
            timeline={},
            manifests={},
        )

    async def _usable(self, kind: StreamKind) -> list[Receiving]:
        """Engines that take part: prepared, and at v or dirtied only by this candidate. Others are restored first."""
        deadline = self._runtime.clock.monotonic() + self._settings.rejoin_deadline_s
        while True:
            receiving = await self._all.prepare()
            usable = pick(receiving, lambda e: kind == "dense" or self._at_base(e))
            lame = pick(receiving, lambda e: kind != "dense" and not self._at_base(e))
            if lame:
                await self._restore_each(lame)
                continue
            if sum(len(r.engines) for r in usable) >= self._settings.min_receivers:
                return usable
            everything = [(f"{r.node.name}/{e.name}", e) for r in await self._all.prepare(True) for e in r.engines]
            problems = [f"{member}: {engine.problem or engine.mark}" for member, engine in everything]
            if everything and all(engine.problem and engine.mark != "lost" for _, engine in everything):
                raise PlacementError(f"no engine can be refit: {'; '.join(problems)}")
            if self._runtime.clock.monotonic() > deadline:
                raise TransitionFailed(
                    f"{sum(len(r.engines) for r in usable)} engines can take part, at least "
                    f"{self._settings.min_receivers} must ({'; '.join(problems) or 'no node is connected'})"
                )
            await anyio.sleep(_POLL_S)

    def _at_base(self, engine: EngineState) -> bool:
        """Whether an overwrite of the candidate's changes brings the engine from where it is to v+1."""
        if engine.mark == "clean":
            return engine.version == self._lead.version
        attempt = engine.attempt
        if engine.mark != "dirty" or attempt is None:
            return False
        return attempt.epoch == self._lead.epoch and attempt.number in self._mine

    # -- commit and after -------------------------------------------------------------------------------------------

    async def _commit(self, run: AttemptRun, receiving: list[Receiving]) -> CommitRecord:
        before, attempt = self._lead.record, run.attempt
        assert before is not None
        skipped = await self._all.skipped_state()
        state = total(offer.state for offer in self._offers.values())
        record = CommitRecord(
            run=self._lead.run,
            version=attempt.target,
            attempt=attempt.number,
            epoch=self._lead.epoch,
            attempt_floor=attempt.number + 1,
            directory=self._all.directory.digest,
            manifests=run.digests,
            members=tuple(member for r in receiving for member in r.members),
            state=(state[0] - skipped[0] & 0xFFFF_FFFF_FFFF_FFFF, state[1] - skipped[1] & 0xFFFF_FFFF_FFFF_FFFF),
            time=self._runtime.clock.wall(),
            serial=before.serial + 1,
        )
        started = self._runtime.clock.monotonic()
        await self._lead.commit(record)
        run.timeline["commit"] = self._runtime.clock.monotonic() - started
        return record

    async def finish(self) -> None:
        """Tell everybody of the commit and open the gates; called again if the caller gave up in between.

        Nothing here can undo the commit, so a role that is gone settles when it comes back. Idempotent.

        Raises:
            StaleEpoch: another coordinator has taken over meanwhile; it opens the gates.
        """
        if self._unfinished is None:
            return
        record, run = self._unfinished
        clock, started = self._runtime.clock, self._runtime.clock.monotonic()
        await self._all.adopt(record)
        try:
            await self._lead.check()
        except StaleEpoch:
            raise
        except CommitError as error:
            # Whether this is still the coordinator is not known, so gates stay closed; the commit stands.
            self._all.report("reading the record again failed", error)
        else:
            await self._all.open_gates()
        run.timeline["advance"] = clock.monotonic() - started
        self._unfinished = None

    # -- failure ----------------------------------------------------------------------------------------------------

    async def _fence(self, *, abandon: bool = False, forget: bool = False) -> None:
        """Void every attempt so far: first in the record, then on every role, until nothing of them writes."""
        await self._lead.fence(self.next_attempt)
        await self._all.fence(self.next_attempt, abandon=abandon, forget=forget)

    async def _restore_each(self, lame: list[Receiving]) -> None:
        """Restore all of them at once; if that fails, one by one, so that a broken one holds nobody."""
        if await self._restored_all(lame, "restore"):
            return
        single = [Receiving(r.node, [engine]) for r in lame for engine in r.engines]
        for one in single:
            if len(single) == 1 or not await self._restored_all([one], "restore"):
                self._all.left_out.update(one.members)

    async def _restored_all(self, receiving: list[Receiving], kind: StreamKind) -> bool:
        """Whether all of them came to the committed version; if not, nothing of the try is left running."""
        if not receiving:
            return True
        try:
            await self._restore(receiving, kind)
        except StaleEpoch:
            raise
        except DcrError as error:
            if self._accused:
                raise
            self._all.report(f"{kind} of {', '.join(m for r in receiving for m in r.members)} failed", error)
            await self._fence()
            return False
        return True

    async def _restore(self, receiving: list[Receiving], kind: StreamKind) -> None:
        """Bring engines to the committed version: an attempt of its own, complete once full sums hold.

        ``revert`` overwrites this candidate's changes with the committed bits, for engines that hold nothing else.
        """
        version, engines = self._lead.version, [engine for r in receiving for engine in r.engines]
        changed = {t for offer in self._offers.values() for t in offer.changed} if kind == "revert" else set[int]()
        whole = tuple(sorted(changed & {t for e in engines for t in e.whole}))
        summed = range(len(self._all.directory)) if kind == "restore" else {t for e in engines for t in e.aliased}
        expected = await self._all.sums(sorted(summed), "base")
        run = self._new_run(kind, version, version, receiving, expected, "async", whole=whole)
        await self._drive(run, kind)
        await self._lead.check()
        for r in receiving:
            await r.node.ask(Restored(run.attempt), Done, timeout_s=self._settings.advance_deadline_s)
        self._restored += len(engines)
        await self._fence()
        if self._mode == "async":
            await self._all.open_gates()

    async def _give_up(self) -> None:
        """Bring receivers back to v, drop the candidate, and open the gates.

        Who cannot be brought back stays behind its closed gate and is restored before the next transition.
        """
        if self._lead.version >= 0 and not self._accused:
            dirty = pick(await self._all.prepare(), lambda e: e.mark == "dirty" and self._at_base(e))
            with suppress(TransitionAbandoned):  # owners are accused only now; the same follows
                await self._restored_all(dirty, "revert")
                lame = pick(await self._all.prepare(), lambda e: e.mark != "clean" or not self._at_base(e))
                await self._restore_each(lame)
        await self._fence(abandon=True, forget=self._accused)
        await self._all.open_gates()

    async def _maybe_accuse(self, receiving: list[Receiving], kind: StreamKind, error: DigestMismatch) -> None:
        """A mismatch on every engine is the owner's: abandon, and send everything next time.

        An engine that alone reads back wrong bits after a dense load would do so again: the others go on without it.
        """
        marks = {f"{r.node.name}/{e.name}": e.mark for r in await self._all.prepare(True) for e in r.engines}
        members = [member for r in receiving for member in r.members]
        wrong = [member for member in members if marks.get(member) == "quarantined"]
        if len(wrong) < len(members):
            if kind == "dense":
                self._all.left_out.update(wrong)
            return
        self._suspicions += 1
        if len(members) > 1 or self._suspicions > 1:
            self._accused = True
            raise TransitionAbandoned(
                f"every engine read back other bits than the owners declared, so an owner is wrong about version "
                f"{self._lead.version}; the next transition sends everything. First finding: {error}"
            ) from error
