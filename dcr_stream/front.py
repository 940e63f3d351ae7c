"""The package's front door: roles with sensible defaults, as user programs meet them.

``Owner`` is for training loops (plain calls, every rank); ``Coordinator`` and ``Node`` are for asyncio programs and
for the command line. The roles themselves (:mod:`dcr_stream.owner`, :mod:`dcr_stream.node`,
:mod:`dcr_stream.coordinator`) take everything as arguments and know no defaults.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from typing import TypeVar

import anyio
from anyio.from_thread import BlockingPortal, start_blocking_portal

from dcr_stream.control import WebSocketNetwork, load_secret
from dcr_stream.coordinator import CoordinatorRole, CoordinatorSettings
from dcr_stream.delta import CodedBucket, Shard
from dcr_stream.errors import CaptureError, ControlError, DcrError, TransitionFailed, UsageError
from dcr_stream.flow import Pipeline, task_group
from dcr_stream.gate import EngineGate
from dcr_stream.interfaces import CommitStore, Engine, Monitor, Network, Source, Transport
from dcr_stream.messages import CommitRecord
from dcr_stream.node import NodeRole, NodeSettings
from dcr_stream.owner import Outcome, OwnerRole, OwnerSettings
from dcr_stream.peers import Mode, RefitReport
from dcr_stream.protocol import Offer
from dcr_stream.runtime import Runtime
from dcr_stream.stages import default_pipeline
from dcr_stream.transports import open_transport

__all__ = ["Coordinator", "Node", "Owner", "event_loop_options", "run_async"]

T = TypeVar("T")


def event_loop_options() -> dict[str, object]:
    """Options for ``anyio.run`` and portals: uvloop where it is installed."""
    return {"use_uvloop": importlib.util.find_spec("uvloop") is not None}


def run_async(main: Callable[[], object]) -> object:
    """Run an async function of no arguments on asyncio, with uvloop where it is installed."""
    return anyio.run(main, backend="asyncio", backend_options=event_loop_options())  # type: ignore[arg-type]


def _opener(transport: Transport | None) -> Callable[[str], Transport]:
    return open_transport if transport is None else lambda _: transport


def _runtime(network: Network | None, secret: bytes | None, insecure_plaintext: bool) -> Runtime:
    if network is None:
        network = WebSocketNetwork(secret, insecure_plaintext=insecure_plaintext)
    return Runtime.default(network)


def _rank_name() -> str:
    rank = os.environ.get("RANK", "0")
    return f"rank{rank}" if rank.isdigit() else "rank0"


class Owner:
    """One training rank's end: ``refit`` after each step, from any thread but always the same one.

    Network, compression and the rest of the pipeline run in a background thread with its own event loop; training
    goes on as soon as ``refit`` has captured the change.
    """

    def __init__(self, role: OwnerRole, source: Source, portal: BlockingPortal, stack: ExitStack, address: str) -> None:
        self._role, self._source, self._portal, self._stack = role, source, portal, stack
        self.address = address
        self._closed = False
        self._serving: Future[None] = portal.start_task_soon(role.serve, address)

    @classmethod
    def connect(
        cls,
        address: str,
        source: Source,
        *,
        name: str | None = None,
        run: str = "run",
        pipeline: Pipeline[Shard, CodedBucket] | None = None,
        transport: Transport | None = None,
        network: Network | None = None,
        secret: bytes | None = None,
        insecure_plaintext: bool = False,
        settings: OwnerSettings | None = None,
        monitor: Monitor | None = None,
    ) -> Owner:
        """Start this rank's owner and dial the coordinator at ``address`` (``dcr://host:port``) in the background.

        ``name`` must differ between ranks; the default is ``rank`` and the environment's ``RANK``. ``secret``
        defaults to the environment's (:func:`dcr_stream.control.load_secret`). ``transport`` replaces the one that
        the coordinator names, for transports that live in this process. ``insecure_plaintext`` allows addresses beyond
        loopback, where frames are authenticated with the secret but not encrypted.

        Raises:
            UsageError: the source or the pipeline cannot work, or the secret cannot be read.
        """
        secret = secret if secret is not None else load_secret()
        role = OwnerRole(
            name or _rank_name(),
            source,
            run=run,
            pipeline=pipeline if pipeline is not None else default_pipeline(),
            runtime=_runtime(network, secret, insecure_plaintext),
            open_transport=_opener(transport),
            secret=secret,
            settings=settings,
            monitor=monitor,
        )
        stack = ExitStack()
        portal = stack.enter_context(start_blocking_portal("asyncio", event_loop_options()))
        return cls(role, source, portal, stack, address)

    @property
    def name(self) -> str:
        """This owner's name."""
        return self._role.name

    @property
    def version(self) -> int:
        """The committed version that this owner has advanced to; -1 before the first."""
        return self._role.version

    @property
    def last(self) -> Outcome | None:
        """How the last transition ended; None before the first."""
        return self._role.last

    @property
    def baseline_bytes(self) -> int:
        """Host bytes held by trackers and residual baseline."""
        return self._role.baseline_bytes

    def refit(self, *, timeout_s: float = 600.0) -> Offer:
        """Capture this rank's change and offer it; collective: every training rank calls it at the same point.

        Waits, bounded, for the last transition to end. Returns once the change is captured: live weights may change
        again. Either every rank captures or every rank raises. How the transition ends is in ``last``.

        Raises:
            TransitionFailed: the last transition has not ended, or no coordinator is there, within ``timeout_s``.
            CaptureError: this rank or another one could not capture; nothing has changed.
            AuthenticationFailed, CommitRecordUnreadable, UsageError: the coordinator refuses this owner.
        """
        settled, problem = self._tried(self._role.wait_settled, timeout_s)
        if settled is False:
            problem = TransitionFailed(self._not_settled(timeout_s))
        if not self._source.agree(problem is None):
            raise problem or TransitionFailed("another training rank cannot refit now; its error says why")
        offer, problem = self._tried(self._role.capture)
        if not self._source.agree(offer is not None) or offer is None:
            if not self._closed:
                self._call(_sync(self._role.drop))
            raise problem or CaptureError("another training rank could not capture; its error says why")
        self._call(self._role.offer)
        return offer

    def wait(self, timeout_s: float = 600.0) -> Outcome | None:
        """Wait until the last offered transition has ended, and say how.

        Raises:
            TransitionFailed: it has not ended within ``timeout_s``.
        """
        if not self._call(self._role.wait_settled, timeout_s):
            raise TransitionFailed(self._not_settled(timeout_s))
        return self.last

    def close(self) -> None:
        """Leave the run and end the background thread. Idempotent; ends a ``refit`` that waits in another thread."""
        self._serving.cancel()
        if not self._closed:
            self._closed = True
            self._portal.start_task_soon(self._portal.stop, True)
            self._stack.close()

    def __enter__(self) -> Owner:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _tried(self, fn: Callable[..., Awaitable[T]], *args: object) -> tuple[T | None, DcrError | None]:
        """What ``_call`` returns, or the error: whatever it is, the other ranks wait for this one's word."""
        try:
            return self._call(fn, *args), None
        except DcrError as error:
            return None, error
        except Exception as error:
            # A user's own stage, source or transport may raise anything.
            problem = CaptureError(
                f"owner {self.name!r} could not refit: {type(error).__name__}: {error}; "
                "repair that stage, source or transport"
            )
            problem.__cause__ = error
            return None, problem

    def _not_settled(self, timeout_s: float) -> str:
        trouble = f" (no coordinator: {self._role.trouble})" if self._role.trouble else ""
        return (
            f"owner {self.name!r}: after {timeout_s:g} s no coordinator answers at {self.address}, or the last "
            f"transition has not ended{trouble}; look at the coordinator, or raise timeout_s"
        )

    def _call(self, fn: Callable[..., Awaitable[T]], *args: object) -> T:
        """Call into the background loop; an owner that the coordinator refused raises that refusal."""
        self._check_serving()
        waiting: Future[T] = self._portal.start_task_soon(fn, *args)
        while True:
            try:
                return waiting.result(timeout=0.2)
            except CancelledError:
                raise ControlError(f"owner {self.name!r} was closed") from None
            except TimeoutError:
                if not waiting.done():
                    self._check_serving()

    def _check_serving(self) -> None:
        if self._closed or self._serving.cancelled():
            raise ControlError(f"owner {self.name!r} was closed; connect again")
        if self._serving.done():
            error = self._serving.exception()
            raise error if error is not None else ControlError(f"owner {self.name!r} has stopped; connect again")


def _sync(fn: Callable[[], None]) -> Callable[[], Awaitable[None]]:
    async def call() -> None:
        fn()

    return call


class Coordinator:
    """The one that drives transitions. Made by ``listen``."""

    def __init__(self, role: CoordinatorRole, address: str) -> None:
        self._role, self.address = role, address

    @classmethod
    @asynccontextmanager
    async def listen(
        cls,
        address: str,
        *,
        owners: int,
        nodes: int,
        transport: str,
        commits: CommitStore,
        run: str = "run",
        network: Network | None = None,
        secret: bytes | None = None,
        insecure_plaintext: bool = False,
        settings: CoordinatorSettings | None = None,
        monitor: Monitor | None = None,
    ) -> AsyncIterator[Coordinator]:
        """Take over ``run`` and listen at ``address`` (``dcr://127.0.0.1:0``: any free port, see ``.address``).

        ``owners`` and ``nodes``: whom the first transition waits for. ``transport``: the URL that all of them use.

        Raises:
            ListenFailed: the address is in use or not allowed without a secret.
            CommitRecordUnreadable: the run's record exists and cannot be read.
        """
        secret = secret if secret is not None else load_secret()
        settings = replace(settings or CoordinatorSettings(), owners=owners, nodes=nodes)
        role = CoordinatorRole(
            run,
            commits,
            transport=transport,
            runtime=_runtime(network, secret, insecure_plaintext),
            settings=settings,
            secret=secret,
            monitor=monitor,
        )
        async with role.listening(address) as actual:
            yield cls(role, actual)

    @property
    def version(self) -> int:
        """The committed version; -1 before the first commit."""
        return self._role.version

    @property
    def record(self) -> CommitRecord | None:
        """The commit record."""
        return self._role.record

    async def refit(self, mode: Mode = "async") -> RefitReport:
        """Run one transition; see :meth:`dcr_stream.coordinator.CoordinatorRole.refit`."""
        return await self._role.refit(mode)

    async def serve(self, mode: Mode = "async", *, on_refit: Callable[[RefitReport], None] | None = None) -> None:
        """Run transitions as owners offer them; see :meth:`dcr_stream.coordinator.CoordinatorRole.serve`."""
        await self._role.serve(mode, on_refit=on_refit)

    async def restore_joiners(self) -> int:
        """Restore engines that hold no committed version, between transitions."""
        return await self._role.restore_joiners()


class Node:
    """One rollout host's agent. Made by ``connect``."""

    def __init__(self, role: NodeRole) -> None:
        self._role = role

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        address: str,
        engines: Sequence[EngineGate],
        *,
        name: str,
        run: str = "run",
        transport: Transport | None = None,
        network: Network | None = None,
        secret: bytes | None = None,
        insecure_plaintext: bool = False,
        settings: NodeSettings | None = None,
        monitor: Monitor | None = None,
    ) -> AsyncIterator[Node]:
        """Serve ``engines`` for as long as the block runs; dials the coordinator at ``address`` again when it is lost.

        Raises:
            AuthenticationFailed, UsageError: the coordinator refuses this node; the block is cancelled.
        """
        if not engines:
            raise UsageError(f"node {name!r} has no engines; give it at least one EngineGate")
        secret = secret if secret is not None else load_secret()
        role = NodeRole(
            name,
            [(gate.engine, gate) for gate in engines],
            run=run,
            runtime=_runtime(network, secret, insecure_plaintext),
            open_transport=_opener(transport),
            secret=secret,
            settings=settings,
            monitor=monitor,
        )
        async with task_group() as tasks:
            tasks.start_soon(role.serve, address)
            yield cls(role)
            tasks.cancel_scope.cancel()

    async def replace(self, engine: Engine, gate: EngineGate) -> None:
        """Bring in an engine, or a restarted one under its old name; it is restored before it serves."""
        self._role.attach(engine, gate)
        await self._role.announce()
