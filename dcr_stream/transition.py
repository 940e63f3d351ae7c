"""One transition, v to v+1: attempts until one commits, or giving up with everybody back on v."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import anyio

from dcr_stream.attempt import AttemptRun, every
from dcr_stream.canonical import TensorDirectory
from dcr_stream.capture import total
from dcr_stream.codec import add_sums
from dcr_stream.errors import (
    CasUnsupported,
    CommitRecordUnreadable,
    DcrError,
    DigestMismatch,
    DirectoryMismatch,
    PeerLost,
    StaleEpoch,
    TransitionAbandoned,
    TransitionFailed,
    UsageError,
)
from dcr_stream.interfaces import Monitor
from dcr_stream.leadership import Leadership
from dcr_stream.messages import Announcement, Attempt, CommitRecord, Sum
from dcr_stream.peers import Mode, Peer, Receiving, RefitReport, TransitionSettings
from dcr_stream.protocol import (
    Adopt,
    Done,
    EngineState,
    Fence,
    OpenGates,
    Prepare,
    Prepared,
    Restored,
    Shape,
    StateSums,
    Stream,
    StreamKind,
    SumsRequest,
)
from dcr_stream.runtime import Runtime
from dcr_stream.steps import step

__all__ = ["Mode", "Peer", "RefitReport", "Transition", "TransitionSettings"]

_FATAL = (StaleEpoch, CommitRecordUnreadable, CasUnsupported, DirectoryMismatch, UsageError)
_POLL_S = 0.2


class Transition:
    """Drives the owners' candidates to a joint commit, or gives up. Used once.

    ``owners`` made the offers; ``current_owners`` and ``nodes`` are the coordinator's live tables.
    """

    def __init__(
        self,
        lead: Leadership,
        mode: Mode,
        *,
        shape: Shape,
        directory: TensorDirectory,
        owners: dict[str, Peer],
        current_owners: dict[str, Peer],
        nodes: dict[str, Peer],
        skip: dict[str, tuple[int, ...]],
        first_attempt: int,
        runtime: Runtime,
        settings: TransitionSettings,
        secret: bytes | None,
        monitor: Monitor,
    ) -> None:
        self.next_attempt = first_attempt
        self._lead, self._mode, self._shape, self._directory = lead, mode, shape, directory
        self._owners, self._current_owners, self._nodes, self._skip = owners, current_owners, nodes, skip
        self._runtime, self._settings, self._secret, self._monitor = runtime, settings, secret, monitor
        self._offers = {name: peer.offer for name, peer in owners.items() if peer.offer is not None}
        self._mine: set[int] = set()
        self._left_out: set[str] = set()
        self._suspicions = 0
        self._accused = False
        self._restored = 0
        self._run: AttemptRun | None = None

    async def announce(self, announcement: Announcement) -> None:
        """A payload of the running attempt is ready."""
        run = self._run
        if run is not None and run.streams[0][1].attempt == announcement.id.attempt:
            await run.announce(announcement)

    async def run(self) -> RefitReport:
        """Try until committed.

        Raises:
            TransitionAbandoned: ``max_attempts`` failed, or an owner's candidate is gone.
            StaleEpoch: another coordinator took over; nothing more is done here.
            DcrError: something that trying again cannot repair; everybody is back on v.
        """
        failures: list[str] = []
        await self._refuse_unequal_replicas()
        while len(failures) < self._settings.max_attempts:
            try:
                return await self._attempt(failures)
            except StaleEpoch:
                raise
            except DcrError as error:
                failures.append(f"{type(error).__name__}: {error}")
                self._monitor.step("coordinator", "attempt failed", seconds=0.0, detail=failures[-1])
                await self._fence()
                if isinstance(error, (*_FATAL, TransitionAbandoned)):
                    await self._give_up()
                    raise
                if self._mode == "async":
                    await self._open_gates()
        await self._give_up()
        raise TransitionAbandoned(
            f"version {self._lead.version + 1} was abandoned after {len(failures)} attempts; receivers are back on "
            f"{self._lead.version} and the next delta contains these changes. Last failure: {failures[-1]}"
        )

    async def restore_joiners(self) -> int:
        """Bring engines without a committed version to it and open all gates; returns how many."""
        receiving = await self._prepare()
        await self._restore(self._pick(receiving, lambda e: not self._at_base(e)))
        await self._open_gates()
        return self._restored

    # -- one attempt ------------------------------------------------------------------------------------------------

    async def _attempt(self, failures: list[str]) -> RefitReport:
        await self._owners_are_here()
        kind: StreamKind = "delta"
        if self._lead.version < 0 or any(offer.kind == "dense" for offer in self._offers.values()):
            kind = "dense"
        receiving = await self._usable(kind)
        engines = [engine for r in receiving for engine in r.engines]
        base, changed = self._lead.version, {t for offer in self._offers.values() for t in offer.changed}
        whole = tuple(sorted(changed & {t for e in engines for t in e.whole})) if kind == "delta" else ()
        aliased = tuple(sorted({t for e in engines for t in e.aliased}))
        relative = kind == "delta" and all(e.mark == "clean" and e.version == base for e in engines)
        tensors = range(len(self._directory)) if kind == "dense" else aliased
        expected = await self._sums(tensors, "target")
        run = self._new_run(kind, base, base + 1, receiving, expected, self._mode, relative, aliased, whole)
        attempt = run.streams[0][1].attempt
        try:
            async with step(self._monitor, self._runtime.clock, "coordinator", f"attempt {attempt.number}", kind):
                await run.run()
        except DigestMismatch as error:
            await self._maybe_accuse(receiving, error)
            raise
        finally:
            self._run = None
        record = await self._commit(run, attempt, receiving)
        await self._finish(record, receiving, run)
        return RefitReport(
            record=record,
            mode=self._mode,
            kind="dense" if kind == "dense" else "delta",
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
            (peer, Stream(attempt, base, kind, relative, overwrite, whole, self._skip.get(name, ())))
            for name, peer in self._owners.items()
        ]
        self._run = AttemptRun(
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
        return self._run

    async def _owners_are_here(self) -> None:
        """Wait, bounded, for every owner; its candidate must be the one that this transition is about."""
        with anyio.move_on_after(self._settings.rejoin_deadline_s) as scope:
            while any(peer.gone for peer in self._owners.values()):
                for name, peer in self._owners.items():
                    back = self._current_owners.get(name)
                    if peer.gone and back is not None:
                        self._owners[name] = back
                await anyio.sleep(_POLL_S)
        if scope.cancelled_caught:
            gone = ", ".join(sorted(n for n, p in self._owners.items() if p.gone))
            raise TransitionAbandoned(f"owner {gone} did not come back; its pending set is lost, so the next is dense")
        for name, peer in self._owners.items():
            if peer.offer is None or peer.offer.candidate != self._offers[name].candidate:
                raise TransitionAbandoned(
                    f"owner {name!r} was restarted and lost its candidate; the transition is abandoned and the next "
                    "one sends what this owner has then"
                )

    async def _usable(self, kind: StreamKind) -> list[Receiving]:
        """Engines that take part: prepared, and at v or dirtied only by this candidate. Others are restored first."""
        deadline = self._runtime.clock.monotonic() + self._settings.rejoin_deadline_s
        while True:
            receiving = await self._prepare()
            usable = self._pick(receiving, lambda e: kind == "dense" or self._at_base(e))
            lame = self._pick(receiving, lambda e: kind != "dense" and not self._at_base(e))
            if lame:
                try:
                    await self._restore(lame)
                except StaleEpoch:
                    raise
                except DcrError as error:
                    await self._fence()
                    # One joiner that cannot be restored must not hold the others.
                    self._left_out.update(member for r in lame for member in r.members)
                    self._monitor.step("coordinator", "restore failed", seconds=0.0, detail=str(error))
                continue
            if sum(len(r.engines) for r in usable) >= self._settings.min_receivers:
                return usable
            if self._runtime.clock.monotonic() > deadline:
                everything = await self._prepare(True)
                problems = [f"{r.node.name}/{e.name}: {e.problem or e.mark}" for r in everything for e in r.engines]
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

    def _pick(self, receiving: Iterable[Receiving], wanted: Callable[[EngineState], bool]) -> list[Receiving]:
        picked = [Receiving(r.node, [e for e in r.engines if wanted(e)]) for r in receiving]
        return [r for r in picked if r.engines]

    async def _prepare(self, everything: bool = False) -> list[Receiving]:
        """Ask all nodes; engines that are lost, refused or left out are dropped unless ``everything`` is asked for."""
        order = Prepare(self._shape, self._lead.epoch, self._lead.record)
        found: list[Receiving] = []

        async def ask(node: Peer) -> None:
            node.fresh = False
            try:
                prepared = await node.ask(order, Prepared, timeout_s=self._settings.prepare_deadline_s)
            except PeerLost:
                return
            engines = [
                e
                for e in prepared.engines
                if everything or (e.mark != "lost" and not e.problem and f"{node.name}/{e.name}" not in self._left_out)
            ]
            found.append(Receiving(node, engines))

        await every(list(self._nodes.values()), ask)
        return sorted((r for r in found if r.engines), key=lambda r: r.node.name)

    async def _sums(self, tensors: Iterable[int], at: Literal["base", "target"]) -> dict[int, Sum]:
        """Full state sums of ``tensors``: the parts of all owners added up."""
        wanted = tuple(tensors)
        sums: dict[int, Sum] = dict.fromkeys(wanted, (0, 0))
        if not wanted:
            return sums
        for name, peer in self._owners.items():
            skip = set(self._skip.get(name, ()))
            answer = await peer.ask(SumsRequest(wanted, at), StateSums, timeout_s=self._settings.prepare_deadline_s)
            for tensor, part in zip(wanted, answer.sums, strict=True):
                if tensor not in skip:
                    sums[tensor] = add_sums(sums[tensor], part)
        return sums

    async def _refuse_unequal_replicas(self) -> None:
        """A tensor that several owners publish is sent by one of them, if their bits are equal."""
        shared = sorted({tensor for tensors in self._skip.values() for tensor in tensors})
        if not shared:
            return
        found: dict[int, dict[Sum, str]] = {tensor: {} for tensor in shared}
        for name, peer in self._owners.items():
            publishes = {region.tensor for region in (peer.hello.shape.regions if peer.hello.shape else ())}
            order = SumsRequest(tuple(shared), "target")
            answer = await peer.ask(order, StateSums, timeout_s=self._settings.prepare_deadline_s)
            for tensor, value in zip(shared, answer.sums, strict=True):
                if tensor in publishes:
                    found[tensor].setdefault(value, name)
        for tensor, values in found.items():
            if len(values) > 1:
                await self._fence(abandon=True)
                raise UsageError(
                    f"owners {' and '.join(sorted(values.values()))} publish {self._directory[tensor].name!r} with "
                    "different bits; replicas must be equal, or only one of them may publish the tensor"
                )

    # -- commit and after -------------------------------------------------------------------------------------------

    async def _commit(self, run: AttemptRun, attempt: Attempt, receiving: list[Receiving]) -> CommitRecord:
        before = self._lead.record
        assert before is not None
        skipped = await self._skipped_state()
        state = total(offer.state for offer in self._offers.values())
        record = CommitRecord(
            run=self._lead.run,
            version=attempt.target,
            attempt=attempt.number,
            epoch=self._lead.epoch,
            attempt_floor=attempt.number + 1,
            directory=self._directory.digest,
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

    async def _skipped_state(self) -> Sum:
        """What replicated parts add to the offers' states beyond one copy."""
        state: Sum = (0, 0)
        for name, tensors in self._skip.items():
            order = SumsRequest(tensors, "target")
            answer = await self._owners[name].ask(order, StateSums, timeout_s=self._settings.prepare_deadline_s)
            state = add_sums(state, total(answer.sums))
        return state

    async def _finish(self, record: CommitRecord, receiving: list[Receiving], run: AttemptRun) -> None:
        """After the commit: nothing here can undo it, so a role that is gone settles when it comes back."""
        clock, started = self._runtime.clock, self._runtime.clock.monotonic()
        deadline = self._settings.advance_deadline_s

        async def adopt(peer: Peer) -> None:
            try:
                await peer.ask(Adopt(record), Done, timeout_s=deadline)
            except PeerLost:
                return
            if peer.hello.role == "owner":
                peer.offer = None

        await every([*self._owners.values(), *(r.node for r in receiving)], adopt)
        await self._lead.check()
        await self._open_gates()
        run.timeline["advance"] = clock.monotonic() - started

    async def _open_gates(self) -> None:
        """Open every engine that is clean at the committed version."""
        if self._lead.version < 0:
            return
        order = OpenGates(self._lead.version, self._lead.epoch)

        async def open_at(node: Peer) -> None:
            try:
                await node.ask(order, Done, timeout_s=self._settings.gate_deadline_s)
            except PeerLost:
                return

        await every(list(self._nodes.values()), open_at)

    # -- failure ----------------------------------------------------------------------------------------------------

    async def _fence(self, *, abandon: bool = False, forget: bool = False) -> None:
        """Void every attempt so far: first in the record, then on every role, until nothing of them writes."""
        await self._lead.fence(self.next_attempt)
        order = Fence(self._lead.epoch, self.next_attempt, abandon, forget)

        async def fence(peer: Peer) -> None:
            try:
                await peer.ask(order, Done, timeout_s=self._settings.apply_deadline_s)
            except PeerLost:
                return
            if abandon and peer.hello.role == "owner":
                peer.offer = None

        await every([*self._owners.values(), *self._nodes.values()], fence)

    async def _restore(self, receiving: list[Receiving], kind: StreamKind = "restore") -> None:
        """Bring engines to the committed version: an attempt of its own, complete once full sums hold."""
        if not receiving:
            return
        version = self._lead.version
        expected = await self._sums(range(len(self._directory)), "base") if kind == "restore" else {}
        run = self._new_run(kind, version, version, receiving, expected, "async")
        attempt = run.streams[0][1].attempt
        try:
            async with step(self._monitor, self._runtime.clock, "coordinator", f"attempt {attempt.number}", kind):
                await run.run()
        finally:
            self._run = None
        await self._lead.check()
        for r in receiving:
            await r.node.ask(Restored(attempt), Done, timeout_s=self._settings.advance_deadline_s)
        self._restored += sum(len(r.engines) for r in receiving)
        await self._lead.fence(self.next_attempt)
        if self._mode == "async":
            await self._open_gates()

    async def _give_up(self) -> None:
        """Bring receivers back to v, drop the candidate, and open the gates."""
        if self._lead.version >= 0 and not self._accused:
            try:
                receiving = await self._prepare()
                dirty = self._pick(receiving, lambda e: e.mark == "dirty" and self._at_base(e))
                await self._restore(dirty, "revert")
                lame = self._pick(await self._prepare(), lambda e: not self._at_base(e) or e.mark != "clean")
                await self._restore(lame)
            except StaleEpoch:
                raise
            except DcrError as error:
                # Who could not be brought back stays behind its closed gate and is restored before the next transition.
                self._monitor.step("coordinator", "restore failed", seconds=0.0, detail=str(error))
        await self._fence(abandon=True, forget=self._accused)
        await self._open_gates()

    async def _maybe_accuse(self, receiving: list[Receiving], error: DigestMismatch) -> None:
        """A mismatch on every engine is the owner's: abandon, and send everything next time."""
        marks = {f"{r.node.name}/{e.name}": e.mark for r in await self._prepare(True) for e in r.engines}
        members = [member for r in receiving for member in r.members]
        if all(marks.get(member) == "quarantined" for member in members):
            self._suspicions += 1
            if len(members) > 1 or self._suspicions > 1:
                self._accused = True
                raise TransitionAbandoned(
                    f"every engine read back other bits than the owners declared, so an owner is wrong about version "
                    f"{self._lead.version}; the next transition sends everything. First finding: {error}"
                ) from error
