"""The coordinator: who takes part, and one transition after the other. Holds no weights.

Owners and nodes dial it. It drives attempts (:mod:`dcr_stream.transition`) and is the only user of the commit store.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio

from dcr_stream.baseline import check_tiling
from dcr_stream.canonical import TensorDirectory
from dcr_stream.errors import (
    CommitRecordUnreadable,
    ControlError,
    DirectoryMismatch,
    PeerLost,
    TransitionFailed,
    UsageError,
)
from dcr_stream.interfaces import CommitStore, Link, Monitor, NullMonitor
from dcr_stream.leadership import Leadership
from dcr_stream.messages import Announcement, CommitRecord
from dcr_stream.participants import Participants
from dcr_stream.peers import Mode, Peer, RefitReport, TransitionSettings
from dcr_stream.protocol import PROTOCOL, Done, Fence, Hello, Message, Offer, Shape, Welcome
from dcr_stream.runtime import Runtime
from dcr_stream.session import MessageConnection, message_connection
from dcr_stream.transition import Transition

__all__ = ["CoordinatorRole", "CoordinatorSettings"]


@dataclass(frozen=True, kw_only=True)
class CoordinatorSettings:
    """Whom the first transition waits for, and how long anybody waits for anybody.

    ``join_deadline_s``: for owners and nodes to come (or come back). ``offer_deadline_s``: for all owners' captures
    once one has offered.
    """

    owners: int = 1
    nodes: int = 1
    join_deadline_s: float = 120.0
    offer_deadline_s: float = 600.0
    commit_deadline_s: float = 30.0
    transition: TransitionSettings = field(default_factory=TransitionSettings)


class CoordinatorRole:
    """Coordinator of one run.

    Args:
        transport: URL of the transport that owners and nodes use; it travels to them in the welcome.
    """

    def __init__(
        self,
        run: str,
        store: CommitStore,
        *,
        transport: str,
        runtime: Runtime,
        settings: CoordinatorSettings | None = None,
        secret: bytes | None = None,
        monitor: Monitor | None = None,
    ) -> None:
        self.run = run
        self.settings = settings or CoordinatorSettings()
        self._runtime, self._transport, self._secret = runtime, transport, secret
        self._monitor = monitor or NullMonitor()
        self._lead = Leadership(run, store, runtime, self.settings.commit_deadline_s)
        self._owners: dict[str, Peer] = {}
        self._nodes: dict[str, Peer] = {}
        self._refused: list[str] = []
        self._abandoned: dict[str, Offer] = {}
        self._changed = anyio.Condition()
        self._turn = anyio.Lock()
        self._transition: Transition | None = None
        self._last: Transition | None = None
        self._attempt = 0
        self._joined_once = False

    # -- public -----------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The committed version; -1 before the first commit."""
        return self._lead.version

    @property
    def record(self) -> CommitRecord | None:
        """The commit record as this coordinator knows it."""
        return self._lead.record

    @asynccontextmanager
    async def listening(self, address: str) -> AsyncIterator[str]:
        """Take over the run and serve owners and nodes at ``address``; yields the address actually used.

        Raises:
            ListenFailed: the address is in use or not allowed.
            CommitRecordUnreadable: the record exists and cannot be read: not a reason to start over.
        """
        await self._lead.take()
        self._attempt = self._lead.record.attempt_floor if self._lead.record is not None else 0
        async with self._runtime.network.listen(address, self._serve_link) as actual:
            yield actual

    async def refit(self, mode: Mode = "async") -> RefitReport:
        """Wait for every owner's offer, run one transition and return how it went, once every owner has advanced.

        Raises:
            TransitionAbandoned: every attempt failed; receivers are back on the committed version.
            TransitionFailed: owners or nodes did not come in time; nothing has happened.
            StaleEpoch: another coordinator has taken over.
            UsageError, DirectoryMismatch, PlacementError: owners or receivers do not fit together.
        """
        async with self._turn:
            await self._finish_last()
            await self._wait_for(self._all_joined, self.settings.join_deadline_s, self._who_is_missing)
            self._joined_once = True
            try:
                await self._wait_for(self._all_offered, self.settings.offer_deadline_s, self._who_has_not_offered)
            except TransitionFailed:
                # Owners that captured must not wait for ever for one that will not: all of them capture again.
                await self._drop_offers()
                raise
            transition = await self._begin(mode)
            try:
                return await transition.run()
            finally:
                self._attempt = transition.next_attempt
                self._transition = None

    async def restore_joiners(self) -> int:
        """Bring engines that hold no committed version to it, densely, and open their gates. Returns how many.

        Nothing to do before the first commit. One that cannot be restored is reported and waits for the next
        transition.
        """
        async with self._turn:
            await self._finish_last()
            if not self._joiners():
                return 0
            transition = await self._begin("async")
            try:
                return await transition.restore_joiners()
            finally:
                self._attempt = transition.next_attempt
                self._transition = None

    async def serve(self, mode: Mode = "async", *, on_refit: Callable[[RefitReport], None] | None = None) -> None:
        """Run a transition whenever owners offer one, and restore joiners in between, until cancelled.

        A transition that is abandoned is reported to the monitor and to the owners; serving goes on.

        Raises:
            StaleEpoch: another coordinator has taken over.
            DcrError: what a next transition could not repair either.
        """
        while True:
            async with self._turn:
                await self._finish_last()
            async with self._changed:
                while not (self._any_offered() or self._joiners()):
                    await self._changed.wait()
            try:
                if self._any_offered():
                    report = await self.refit(mode)
                    if on_refit is not None:
                        on_refit(report)
                else:
                    await self.restore_joiners()
            except TransitionFailed as error:
                self._monitor.step("coordinator", "transition failed", seconds=0.0, detail=str(error))

    async def _finish_last(self) -> None:
        """Finish what an earlier call had committed and was cancelled before everybody was told of."""
        if self._last is not None:
            await self._last.finish()

    # -- peers ------------------------------------------------------------------------------------------------------

    async def _serve_link(self, link: Link) -> None:
        peer: Peer | None = None

        async def handle(message: Message) -> Message | None:
            nonlocal peer
            if isinstance(message, Hello):
                peer = await self._welcome(message, connection, peer)
                return Welcome(self._lead.epoch, self._lead.record, self._transport)
            if peer is None:
                raise ControlError("say Hello first")
            await self._hear(peer, message)
            return None

        connection = message_connection(link, handle)
        try:
            await connection.run()
        except PeerLost:
            pass
        finally:
            if peer is not None:
                peer.gone = True
                peers = self._owners if peer.hello.role == "owner" else self._nodes
                if peers.get(peer.hello.name) is peer:
                    del peers[peer.hello.name]
            await self._notify()

    async def _welcome(self, hello: Hello, connection: MessageConnection, known: Peer | None) -> Peer:
        refusal = self._refusal(hello)
        if refusal is not None:
            self._remember(str(refusal))
            await self._notify()
            raise refusal
        peers = self._owners if hello.role == "owner" else self._nodes
        if known is not None and known.hello.name == hello.name:
            known.hello, known.fresh = hello, True
            peer = known
        else:
            earlier = peers.get(hello.name)
            peer = peers[hello.name] = Peer(hello, connection)
            if earlier is not None:
                # The role came back before its old link was seen to be dead; or two processes use one name.
                if earlier.hello.incarnation != hello.incarnation:
                    self._remember(
                        f"{hello.role} {hello.name!r} came twice; if two processes use that name, rename one"
                    )
                await earlier.cut_off()
        await self._notify()
        return peer

    def _remember(self, trouble: str) -> None:
        self._refused.append(trouble)
        del self._refused[:-8]

    def _refusal(self, hello: Hello) -> Exception | None:
        who = f"{hello.role} {hello.name!r}"
        if hello.protocol != PROTOCOL:
            return UsageError(f"{who} speaks protocol {hello.protocol}, not {PROTOCOL}; install one version")
        if hello.run != self.run:
            return UsageError(f"{who} belongs to run {hello.run!r}, this coordinator drives {self.run!r}; name one run")
        if hello.version > self.version:
            return CommitRecordUnreadable(
                f"{who} reports version {hello.version}, but the commit record is at {self.version} "
                f"({'absent' if self._lead.record is None else 'older'}): give the coordinator the run's own commit "
                "store; it does not start over"
            )
        if hello.role == "owner" and hello.shape is None:
            return UsageError(f"{who} did not say which tensors it publishes; versions must match")
        return None

    async def _hear(self, peer: Peer, message: Message) -> None:
        match message:
            case Offer():
                if message == self._abandoned.get(peer.name):
                    # The owner was not there when its candidate was given up.
                    await peer.connection.notify(Fence(self._lead.epoch, self._attempt, abandon=True))
                # An offer that the last commit has overtaken is settled by the record.
                elif message.kind == "dense" or message.base == self.version:
                    peer.offer = message
                    await self._notify()
            case Announcement():
                if self._transition is not None:
                    await self._transition.announce(message)
            case _:
                raise UsageError(f"a coordinator does not understand {type(message).__name__}; versions must match")

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # -- transitions ------------------------------------------------------------------------------------------------

    async def _begin(self, mode: Mode) -> Transition:
        owners = dict(sorted(self._owners.items()))
        shape = self._agreed_shape(owners)
        directory = TensorDirectory(shape.tensors)
        record = self._lead.record
        if record is not None and record.version >= 0 and record.directory != directory.digest:
            raise DirectoryMismatch(
                f"the owners publish other tensors, dtypes or shapes than version {record.version} has; "
                "a run keeps its model: start a new run for a new structure"
            )
        skip = check_tiling(
            directory, {name: peer.hello.shape.regions for name, peer in owners.items() if peer.hello.shape is not None}
        )
        await self._lead.create(directory.digest)
        transition = Transition(
            self._lead,
            mode,
            Participants(
                lead=self._lead,
                shape=shape,
                directory=directory,
                owners=owners,
                current=self._owners,
                nodes=self._nodes,
                skip=skip,
                settings=self.settings.transition,
                monitor=self._monitor,
                abandoned=self._abandoned,
            ),
            first_attempt=self._attempt,
            runtime=self._runtime,
            secret=self._secret,
            monitor=self._monitor,
        )
        self._transition = self._last = transition
        return transition

    async def _drop_offers(self) -> None:
        fence = Fence(self._lead.epoch, self._attempt, abandon=True)
        for owner in list(self._owners.values()):
            if owner.offer is not None:
                self._abandoned[owner.name], owner.offer = owner.offer, None
                try:
                    await owner.ask(fence, Done, timeout_s=self.settings.transition.prepare_deadline_s)
                except ControlError:
                    await owner.cut_off()

    def _agreed_shape(self, owners: dict[str, Peer]) -> Shape:
        shapes = {name: peer.hello.shape for name, peer in owners.items()}
        first_name, first = next(iter(shapes.items()))
        assert first is not None
        for name, shape in shapes.items():
            assert shape is not None
            if shape.tensors != first.tensors:
                here, there = set(first.tensors), set(shape.tensors)
                odd = sorted(spec.name for spec in here ^ there)[:4]
                raise DirectoryMismatch(
                    f"owners {first_name!r} and {name!r} disagree about the model's tensors"
                    + (f" (first: {', '.join(odd)})" if odd else " (their order differs)")
                    + "; every rank must publish one directory"
                )
        return Shape(first.tensors)

    def _all_joined(self) -> bool:
        nodes = 1 if self._joined_once else self.settings.nodes
        return len(self._owners) >= self.settings.owners and len(self._nodes) >= nodes

    def _joiners(self) -> bool:
        return self.version >= 0 and self._all_joined() and any(node.fresh for node in self._nodes.values())

    def _any_offered(self) -> bool:
        return any(peer.offer is not None for peer in self._owners.values())

    def _all_offered(self) -> bool:
        return self._all_joined() and all(peer.offer is not None for peer in self._owners.values())

    def _who_is_missing(self) -> str:
        text = (
            f"{len(self._owners)} of {self.settings.owners} owners and {len(self._nodes)} of {self.settings.nodes} "
            f"nodes have joined run {self.run!r}"
        )
        return text + (f"; last trouble: {self._refused[-1]}" if self._refused else "; start the missing ones")

    def _who_has_not_offered(self) -> str:
        names = [name for name, peer in sorted(self._owners.items()) if peer.offer is None]
        return f"no refit was offered by owner {', '.join(names)}; every training rank must call owner.refit()"

    async def _wait_for(self, ready: Callable[[], bool], deadline_s: float, missing: Callable[[], str]) -> None:
        with anyio.move_on_after(deadline_s):
            async with self._changed:
                while not ready():
                    await self._changed.wait()
            return
        raise TransitionFailed(f"after {deadline_s:g} s {missing()}")
