"""The node: one agent per rollout host. Stages payloads once, and drives its engines' gates and receivers.

It dials the coordinator and obeys it; it refuses whatever comes from an older epoch or belongs to a fenced attempt.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

import anyio
from anyio import CancelScope

from dcr_stream.canonical import TensorDirectory
from dcr_stream.codec import Limits
from dcr_stream.delivery import Delivery, EngineSlot
from dcr_stream.errors import (
    AttemptAborted,
    AttemptFenced,
    DcrError,
    PeerLost,
    StaleEpoch,
    UsageError,
)
from dcr_stream.flow import task_group
from dcr_stream.interfaces import Engine, Gate, Monitor, NullMonitor, Transport
from dcr_stream.messages import Announcement, Attempt, Manifest
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
    Welcome,
)
from dcr_stream.runtime import Runtime
from dcr_stream.session import MessageConnection, session
from dcr_stream.staging import Staging, StagingBudget
from dcr_stream.steps import step

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


@dataclass(slots=True)
class _Running:
    """The attempt that this node works on."""

    order: Stage
    scope: CancelScope
    slots: list[EngineSlot]
    delivery: Delivery
    staging: Staging | None = None
    staged: bool = False
    begun: bool = False
    acked: Acked | None = None


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
        self._open_transport = open_transport
        self._transport: Transport | None = None
        self._transport_url = ""
        self._incarnation = secrets.token_hex(8)
        self._slots: dict[str, EngineSlot] = {}
        for engine, gate in engines:
            self.attach(engine, gate)
        self._directory: TensorDirectory | None = None
        self._connection: MessageConnection | None = None
        self._epoch = -1
        self._floor = 0
        self._running: _Running | None = None
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
            except PeerLost:
                pass
            finally:
                self._connection = None
            await self._stop(AttemptAborted("the connection to the coordinator was lost"))
            await anyio.sleep(self._settings.reconnect_s)

    async def _join(self, connection: MessageConnection) -> None:
        versions = [(await slot.state()).version for slot in self._slots.values()]
        hello = Hello("node", self.name, self.run, self._incarnation, version=max(versions, default=-1))
        welcome = await connection.call(hello, timeout=self._settings.join_deadline_s)
        if not isinstance(welcome, Welcome):
            raise UsageError(f"the coordinator answered a Hello with {type(welcome).__name__}; versions must match")
        self._check_epoch(welcome.epoch)
        if welcome.transport != self._transport_url:
            if self._transport is not None:
                await self._transport.aclose()
            self._transport, self._transport_url = self._open_transport(welcome.transport), welcome.transport
        if welcome.record is not None:
            await self._adopt(Adopt(welcome.record))

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
                return await self._adopt(message)
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
        self._check_epoch(order.epoch)
        directory = TensorDirectory(order.shape.tensors)
        self._directory = directory
        states: list[EngineState] = []
        async with self._step("prepare"):
            for slot in list(self._slots.values()):
                states.append(await self._place(slot, order, directory))
        return Prepared(tuple(states))

    async def _place(self, slot: EngineSlot, order: Prepare, directory: TensorDirectory) -> EngineState:
        """Trace an engine that has no plan for this directory; what is wrong with it becomes its ``problem``."""
        try:
            if not await slot.traced(directory):
                await slot.gate.close(_closing(order))
                await slot.place(order.shape, directory, self._runtime.workers)
            slot.problem = ""
        except DcrError as error:
            slot.problem = f"{type(error).__name__}: {error}"
        return await slot.state()

    async def _stage(self, order: Stage) -> Staged:
        self._check(order.attempt)
        if self._directory is None or self._transport is None:
            raise UsageError("the coordinator ordered staging before prepare; versions must match")
        await self._stop(AttemptFenced(f"attempt {order.attempt.name} replaces it"))
        slots = [self._slot(name) for name in order.engines]
        delivery = Delivery(order, slots, self._directory, self._runtime.workers, self._settings.block_bytes)
        with CancelScope() as scope:
            run = self._running = _Running(order, scope, slots, delivery)
            async with self._step("stage"), self._transport.open_source(order.attempt, self.name) as source:
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
                    run.begun = True
                    await delivery.begin()
                await staging.run(delivery.apply if order.on_arrival and not delivery.dense else None)
                run.staged = True
                return Staged(sum(len(m.payloads) for m in staging.manifests.values()), staging.received_bytes)
        raise AttemptFenced(f"attempt {order.attempt.name} was fenced while node {self.name!r} staged it")

    async def _close_gates(self, order: CloseGates) -> Done:
        self._check(order.attempt)
        async with self._step("gate"), task_group() as tasks:
            for name in order.engines:
                tasks.start_soon(self._slot(name).gate.close, order)
        return Done()

    async def _apply(self, order: Apply) -> Acked:
        self._check(order.attempt)
        run = self._running
        if run is None or run.order.attempt != order.attempt or not run.staged or run.staging is None:
            raise AttemptFenced(f"attempt {order.attempt.name} is not staged on node {self.name!r}")
        started = self._runtime.clock.monotonic()
        with CancelScope() as scope:
            run.scope = scope
            async with self._step("apply"):
                if any(slot.gate.serving is not None for slot in run.slots):
                    raise UsageError(f"attempt {order.attempt.name} may not apply while a gate is open")
                if not run.begun:
                    run.begun = True
                    await run.delivery.begin()
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
        raise AttemptFenced(f"attempt {order.attempt.name} was fenced while node {self.name!r} applied it")

    async def _adopt(self, order: Adopt) -> Done:
        """Adopt the record's version in the engines that it lists and that ACKed exactly what it names."""
        record = order.record
        self._check_epoch(record.epoch)
        acked, attempt = self._last_acked, self._last_attempt
        if (
            acked is not None
            and attempt is not None
            and (attempt.target, attempt.number) == (record.version, record.attempt)
            and set(acked.manifests) <= set(record.manifests)
        ):
            for slot in self._slots.values():
                member = f"{self.name}/{slot.name}"
                if member in record.members and member in acked.engines:
                    await slot.adopt(attempt, record.version)
        self._release()
        return Done()

    async def _restored(self, order: Restored) -> Done:
        self._check(order.attempt)
        run = self._running
        if run is None or run.order.attempt != order.attempt or run.acked is None:
            raise AttemptFenced(f"attempt {order.attempt.name} did not end on node {self.name!r}")
        for slot in run.slots:
            await slot.adopt(order.attempt, order.attempt.target)
        self._release()
        return Done()

    async def _open_gates(self, order: OpenGates) -> Done:
        self._check_epoch(order.epoch)
        async with self._step("open"):
            for slot in self._slots.values():
                state = await slot.state()
                if state.mark == "clean" and state.version == order.version:
                    await slot.gate.open(order.version)
        return Done()

    async def _fence(self, order: Fence) -> Done:
        self._check_epoch(order.epoch)
        self._floor = max(self._floor, order.floor)
        run = self._running
        if run is not None and run.order.attempt.number < self._floor:
            await self._stop(AttemptFenced(f"attempt {run.order.attempt.name} was fenced"))
        return Done()

    # -- helpers ----------------------------------------------------------------------------------------------------

    def _hear(self, message: Announcement | Manifest) -> None:
        """An announcement or manifest; those that come before their attempt's order wait for it."""
        run = self._running
        attempt = message.id.attempt if isinstance(message, Announcement) else message.attempt
        if run is not None and run.staging is not None and run.order.attempt == attempt:
            try:
                if isinstance(message, Announcement):
                    run.staging.announce(message)
                else:
                    run.staging.manifest(message)
            except DcrError as error:
                run.staging.fail(error)
        elif attempt.number >= self._floor and attempt.epoch >= self._epoch and len(self._early) < _EARLY:
            self._early.append(message)

    async def _stop(self, why: DcrError) -> None:
        """Cancel the running attempt and wait until nothing of it writes any more."""
        run = self._running
        if run is not None:
            run.scope.cancel(str(why))
            # Calls to engines are shielded from cancellation: they end by themselves, within the call deadline.
            for slot in run.slots:
                await slot.quiet()
        self._release()

    def _release(self) -> None:
        run, self._running = self._running, None
        if run is not None and run.staging is not None:
            run.staging.close()
        self._early = [
            m for m in self._early if (m.id.attempt if isinstance(m, Announcement) else m.attempt).number >= self._floor
        ]

    def _slot(self, name: str) -> EngineSlot:
        try:
            return self._slots[name]
        except KeyError:
            raise PeerLost(f"node {self.name!r} has no engine {name!r} any more") from None

    def _check(self, attempt: Attempt) -> None:
        self._check_epoch(attempt.epoch)
        if attempt.number < self._floor:
            raise AttemptFenced(f"attempt {attempt.name} is below the fence at {self._floor}")

    def _check_epoch(self, epoch: int) -> None:
        if epoch < self._epoch:
            raise StaleEpoch(
                f"node {self.name!r} follows epoch {self._epoch}; epoch {epoch} was replaced and must stop"
            )
        self._epoch = epoch

    def _step(self, name: str) -> AbstractAsyncContextManager[None]:
        return step(self._monitor, self._runtime.clock, f"node {self.name}", name)


def _closing(order: Prepare) -> CloseGates:
    """How a gate is closed for tracing: the engine holds no version that could serve."""
    attempt = Attempt("", -1, 0, order.epoch)
    return CloseGates(attempt, (), "async", 30.0, "wait", "keep")
