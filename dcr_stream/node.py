"""The node: one agent per rollout host. Stages payloads once, and drives its engines' gates and receivers.

It dials the coordinator and obeys it; it refuses whatever comes from an older epoch or belongs to a fenced attempt.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

import anyio

from dcr_stream.canonical import TensorDirectory
from dcr_stream.codec import Limits
from dcr_stream.delivery import Delivery, EngineSlot
from dcr_stream.errors import AttemptFenced, DcrError, PeerLost, StaleEpoch, UsageError
from dcr_stream.fences import Fences
from dcr_stream.interfaces import Engine, Gate, Monitor, NullMonitor, Transport
from dcr_stream.messages import Announcement, Attempt, CommitRecord, Manifest
from dcr_stream.protocol import (
    Acked,
    Adopt,
    Apply,
    CloseGates,
    Done,
    EngineState,
    Fence,
    Hello,
    Message,
    OpenGates,
    Prepare,
    Prepared,
    Restored,
    Stage,
    Staged,
)
from dcr_stream.route import Route
from dcr_stream.running import Running
from dcr_stream.runtime import Runtime
from dcr_stream.session import MessageConnection, greet, session
from dcr_stream.staging import Staging, StagingBudget
from dcr_stream.steps import step
from dcr_stream.together import every

__all__ = ["NodeRole", "NodeSettings"]

_EARLY = 1 << 16


@dataclass(frozen=True, kw_only=True)
class NodeSettings:
    """Limits of a node. ``call_deadline_s`` bounds one call to an engine's receivers, loading included."""

    budget: StagingBudget = field(default_factory=StagingBudget)
    limits: Limits = field(default_factory=Limits)
    block_bytes: int = 256 << 20
    call_deadline_s: float = 600.0
    join_deadline_s: float = 30.0
    reconnect_s: float = 1.0


class NodeRole:
    """Node ``name`` with its engines, each behind its gate.

    Args:
        engines: pairs of engine and gate. Gates are closed until the first commit.
        open_transport: makes the transport that the coordinator names by URL.
        secret: the run's secret, or None.
    """

    def __init__(
        self,
        name: str,
        engines: Sequence[tuple[Engine, Gate]],
        *,
        run: str,
        runtime: Runtime,
        open_transport: Callable[[str], Transport],
        secret: bytes | None = None,
        settings: NodeSettings | None = None,
        monitor: Monitor | None = None,
    ) -> None:
        self.name, self.run = name, run
        self._runtime, self._secret = runtime, secret
        self._settings = settings or NodeSettings()
        self._monitor = monitor or NullMonitor()
        self._route = Route(f"node {name!r}", open_transport)
        self._incarnation = secrets.token_hex(8)
        self._slots: dict[str, EngineSlot] = {}
        for engine, gate in engines:
            self.attach(engine, gate)
        self._directory: TensorDirectory | None = None
        self._connection: MessageConnection | None = None
        self._fences = Fences(f"node {name!r}")
        self._preparing = anyio.Lock()
        self._running: Running | None = None
        self._early: list[Announcement | Manifest] = []
        self._last_acked: Acked | None = None
        self._last_attempt: Attempt | None = None

    def attach(self, engine: Engine, gate: Gate) -> None:
        """Add an engine, or replace a restarted one of the same name; ``announce`` tells the coordinator."""
        self._slots[engine.name] = EngineSlot(engine, gate, self._settings.call_deadline_s)

    async def announce(self) -> None:
        """Tell the coordinator that engines have come, so that it restores them; without one, the next Hello does."""
        if self._connection is not None:
            await self._join(self._connection)

    async def serve(self, address: str) -> None:
        """Dial the coordinator and obey it until cancelled; dials again when the connection is lost.

        While there is no coordinator, open gates keep serving their version.
        """
        while True:
            try:
                async with session(self._runtime.network, address, self.handle) as connection:
                    await self._join(connection)
                    self._connection = connection
                    await anyio.sleep_forever()
            except (PeerLost, StaleEpoch) as error:
                self._monitor.step(f"node {self.name}", "no coordinator", seconds=0.0, detail=str(error))
            finally:
                self._connection = None
            await self._stop()
            await anyio.sleep(self._settings.reconnect_s)

    async def _join(self, connection: MessageConnection) -> None:
        states: list[EngineState] = []

        async def ask(slot: EngineSlot) -> None:
            states.append(await slot.state())

        await every(list(self._slots.values()), ask)
        version = max((state.version for state in states), default=-1)
        hello = Hello("node", self.name, self.run, self._incarnation, version)
        welcome = await greet(connection, hello, timeout_s=self._settings.join_deadline_s)
        self._fences.follow(welcome.epoch)
        await self._route.follow(welcome.transport)
        if welcome.record is not None:
            await self._adopt(welcome.record)

    async def handle(self, message: Message) -> Message | None:
        """Carry out one message of the coordinator."""
        match message:
            case Announcement() | Manifest():
                self._hear(message)
                return None
            case Prepare():
                return await self._prepare(message)
            case Stage():
                return await self._stage(message)
            case CloseGates():
                return await self._close_gates(message)
            case Apply():
                return await self._apply(message)
            case Adopt():
                await self._adopt(message.record)
                return Done()
            case Restored():
                return await self._restored(message)
            case OpenGates():
                return await self._open_gates(message)
            case Fence():
                return await self._fence(message)
            case _:
                raise UsageError(f"a node does not understand {type(message).__name__}; versions must match")

    # -- requests, in the order of a transition ---------------------------------------------------------------------

    async def _prepare(self, order: Prepare) -> Prepared:
        self._fences.follow(order.epoch)
        directory = TensorDirectory(order.shape.tensors)
        states: dict[str, EngineState] = {}

        async def ask(slot: EngineSlot) -> None:
            states[slot.name] = await self._place(slot, order, directory)

        # One at a time: an earlier order whose answer came too late may still be tracing.
        async with self._preparing, self._step("prepare"):
            self._directory = directory
            await every(list(self._slots.values()), ask)
        return Prepared(tuple(states[name] for name in sorted(states)))

    async def _place(self, slot: EngineSlot, order: Prepare, directory: TensorDirectory) -> EngineState:
        """Trace an engine that has no plan for this directory; what is wrong with it becomes its ``problem``."""
        try:
            if not await slot.traced(directory):
                await slot.gate.close(_closing(order.epoch))
                await slot.place(order.shape, directory, self._runtime.workers)
            slot.problem = ""
        except DcrError as error:
            slot.problem = f"{type(error).__name__}: {error}"
        return await slot.state()

    async def _stage(self, order: Stage) -> Staged:
        self._fences.check(order.attempt)
        await self._stop()
        self._fences.check(order.attempt)  # a fence may have come meanwhile
        if self._directory is None:
            raise UsageError("the coordinator ordered staging before prepare; versions must match")
        slots = [self._slot(name) for name in order.engines]
        delivery = Delivery(order, slots, self._directory, self._runtime.workers, self._settings.block_bytes)
        run = self._running = Running(order, slots, delivery)
        source_of = self._route.transport.open_source(order.attempt, self.name)
        async with run.working(), self._step("stage"), source_of as source:
            staging = run.staging = Staging(
                order,
                source,
                self._directory,
                secret=self._secret,
                budget=self._settings.budget,
                limits=self._settings.limits,
                workers=self._runtime.workers,
            )
            early, self._early = self._early, []
            for message in early:
                self._hear(message)
            if order.on_arrival:
                await run.begin()
            await staging.run(delivery.apply if order.on_arrival and not delivery.dense else None)
            run.staged = True
        return Staged(sum(len(m.payloads) for m in staging.manifests.values()), staging.received_bytes)

    async def _close_gates(self, order: CloseGates) -> Done:
        self._fences.check(order.attempt)
        async with self._step("gate"):
            await every(order.engines, lambda name: self._slot(name).gate.close(order))
        return Done()

    async def _apply(self, order: Apply) -> Acked:
        self._fences.check(order.attempt)
        run = self._running
        if run is None or run.attempt != order.attempt or not run.staged or run.staging is None:
            raise AttemptFenced(f"attempt {order.attempt.name} is not staged on node {self.name!r}")
        started = self._runtime.clock.monotonic()
        async with run.working(), self._step("apply"):
            run.staging.check()
            await run.begin()
            if not run.order.on_arrival or run.delivery.dense:
                await run.delivery.apply_all(run.staging)
            await run.delivery.finish(order.expected)
            states = [await slot.state() for slot in run.slots]
        run.acked = Acked(
            engines=tuple(f"{self.name}/{slot.name}" for slot in run.slots),
            incarnations=tuple(state.incarnation for state in states),
            manifests=run.staging.digests(),
            digest_sum=run.delivery.digest_sum,
            apply_s=self._runtime.clock.monotonic() - started,
        )
        self._last_acked, self._last_attempt = run.acked, order.attempt
        return run.acked

    async def _adopt(self, record: CommitRecord) -> None:
        """Adopt the record's version in the engines that it lists and that ACKed exactly what it names.

        An engine that cannot adopt stays closed and is restored; a gate that still serves another version closes.
        """
        self._fences.follow(record.epoch)
        acked, attempt = self._last_acked, self._last_attempt
        named: list[EngineSlot] = []
        if (
            acked is not None
            and attempt is not None
            and (attempt.target, attempt.number) == (record.version, record.attempt)
            and set(acked.manifests) == set(record.manifests)
        ):
            listed = set(record.members) & set(acked.engines)
            named = [slot for slot in self._slots.values() if f"{self.name}/{slot.name}" in listed]

        async def adopt(slot: EngineSlot) -> None:
            try:
                if attempt is not None and slot in named:
                    await slot.adopt(attempt, record.version)
                if slot.gate.serving not in (None, record.version):
                    slot.gate.shut()  # first, and whatever the engine's hooks do: others open at the new version
                    await slot.gate.close(_closing(record.epoch))
            except DcrError as error:
                who = f"node {self.name}"
                self._monitor.step(who, "adopt failed", seconds=0.0, detail=f"{type(error).__name__}: {error}")

        await every(list(self._slots.values()), adopt)
        self._fences.raise_floor(record.attempt_floor)
        if self._running is not None and self._fences.void(self._running.attempt):
            self._release(self._running)
        self._forget_early()

    async def _restored(self, order: Restored) -> Done:
        self._fences.check(order.attempt)
        run = self._running
        if run is None or run.attempt != order.attempt or run.acked is None:
            raise AttemptFenced(f"attempt {order.attempt.name} did not end on node {self.name!r}")
        await every(run.slots, lambda slot: slot.adopt(order.attempt, order.attempt.target))
        self._release(run)
        return Done()

    async def _open_gates(self, order: OpenGates) -> Done:
        self._fences.follow(order.epoch)
        run = self._running
        writing = run.slots if run is not None and run.begun else []

        async def open_at(slot: EngineSlot) -> None:
            state = await slot.state()
            if state.mark == "clean" and state.version == order.version and slot not in writing:
                await slot.gate.open(order.version)

        async with self._step("open"):
            await every(list(self._slots.values()), open_at)
        return Done()

    async def _fence(self, order: Fence) -> Done:
        self._fences.follow(order.epoch)
        self._fences.raise_floor(order.floor)
        run = self._running
        if run is not None and self._fences.void(run.attempt):
            await self._stop()
        self._forget_early()
        return Done()

    # -- helpers ----------------------------------------------------------------------------------------------------

    def _hear(self, message: Announcement | Manifest) -> None:
        """An announcement or manifest; those that come before their attempt's order wait for it."""
        run = self._running
        attempt = _attempt_of(message)
        if run is not None and run.staging is not None and run.attempt == attempt:
            try:
                if isinstance(message, Announcement):
                    run.staging.announce(message)
                else:
                    run.staging.manifest(message)
            except DcrError as error:
                run.staging.fail(error)
        elif not self._fences.void(attempt) and len(self._early) < _EARLY:
            self._early.append(message)

    def _forget_early(self) -> None:
        self._early = [message for message in self._early if not self._fences.void(_attempt_of(message))]

    async def _stop(self) -> None:
        """Cancel the running attempt and wait until nothing of it writes any more."""
        if (run := self._running) is not None:
            await run.stop()
            self._release(run)

    def _release(self, run: Running) -> None:
        if self._running is run:
            self._running = None
        run.close()

    def _slot(self, name: str) -> EngineSlot:
        try:
            return self._slots[name]
        except KeyError:
            raise PeerLost(f"node {self.name!r} has no engine {name!r} any more") from None

    def _step(self, name: str) -> AbstractAsyncContextManager[None]:
        return step(self._monitor, self._runtime.clock, f"node {self.name}", name)


def _closing(epoch: int) -> CloseGates:
    """How a gate is closed whose engine may not serve what it holds: at once, waiting for no request."""
    return CloseGates(Attempt("", -1, 0, epoch), (), "async", 0.0, "keep", "keep")


def _attempt_of(message: Announcement | Manifest) -> Attempt:
    return message.id.attempt if isinstance(message, Announcement) else message.attempt
