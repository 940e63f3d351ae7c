"""A whole run in one event loop: owners, coordinator, nodes and engines over in-process links."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import torch
from anyio.abc import TaskGroup

from dcr_stream import Receiver, StateDictLoader, TorchSource
from dcr_stream.capture import CaptureSettings
from dcr_stream.codec import words
from dcr_stream.control import MemoryNetwork
from dcr_stream.coordinator import CoordinatorRole, CoordinatorSettings
from dcr_stream.delta import CodedBucket, Shard
from dcr_stream.flow import Pipeline, task_group
from dcr_stream.interfaces import CommitStore, Loader, Source, Transport
from dcr_stream.node import NodeRole, NodeSettings
from dcr_stream.owner import OwnerRole, OwnerSettings
from dcr_stream.peers import Mode, RefitReport, TransitionSettings
from dcr_stream.runtime import Runtime
from dcr_stream.stages import bucket, chunk, compare, compress, convert, encode, project
from dcr_stream.testing import MemoryCommitStore
from dcr_stream.transports import MemoryTransport
from tests.protocol.faults import FaultyEngine, FaultyReceiver, WatchedGate

RUN = "test"
SETTINGS = TransitionSettings(
    max_attempts=3,
    prepare_deadline_s=20,
    stage_deadline_s=20,
    drain_deadline_s=2,
    gate_deadline_s=5,
    apply_deadline_s=20,
    advance_deadline_s=20,
    rejoin_deadline_s=2,
)


def small_pipeline(max_bytes: int = 2048) -> Pipeline[Shard, CodedBucket]:
    """Small chunks and buckets, so that a small model makes many payloads."""
    return (
        chunk(max_bytes=max_bytes)
        | compare()
        | project()
        | convert()
        | encode()
        | bucket(max_bytes=max_bytes, max_items=2)
        | compress()
    )


async def until(condition: Callable[[], bool]) -> None:
    """Wait, bounded, for something that another role does."""
    with anyio.fail_after(10):
        while not condition():  # noqa: ASYNC110  roles have no event for every state a test asks for
            await anyio.sleep(0.005)


class Weights(torch.nn.Module):
    """A plain model: parameters and buffers of several dtypes and shapes, all refit by name."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, torch.zeros_like(tensor))


def some_tensors(seed: int) -> dict[str, torch.Tensor]:
    """Tensors of every width, a 0-dim and an empty one among them."""
    g = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(64, 32, generator=g).bfloat16(),
        "b": torch.randn(48, 16, generator=g).bfloat16(),
        "bias": torch.randn(64, generator=g),
        "scale": torch.randn((), generator=g),
        "ids": torch.randint(0, 1 << 40, (33,), generator=g),
        "fp8": torch.randint(0, 255, (17, 3), generator=g, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "empty": torch.zeros(0, 4),
        "wide": torch.randn(7, 5, generator=g, dtype=torch.float64),
    }


def nudge(tensors: dict[str, torch.Tensor], seed: int, share: float = 0.05) -> None:
    """Change about ``share`` of the stored elements, in place, at random bits."""
    g = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        flat = words(tensor)
        if flat.size:
            hit = (torch.rand(flat.size, generator=g) < share).numpy()
            flat[hit] ^= flat.dtype.type(1 + seed % 3)


def nudge_one(tensor: torch.Tensor, at: int = 0) -> None:
    """Change the bits of one element, in place."""
    words(tensor)[at] ^= 1


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    """Stored bits by name."""
    return {name: words(t).tobytes() for name, t in tensors.items()}


@dataclass
class Rollout:
    """One node with one engine of one rank, and everything that a test wants to reach."""

    name: str
    model: torch.nn.Module
    receiver: FaultyReceiver
    engine: FaultyEngine
    gate: WatchedGate
    node: NodeRole

    def bits(self) -> dict[str, bytes]:
        """The engine's stored bits by name."""
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        return bits({name: t.detach() for name, t in tensors.items()})

    @property
    def mark(self) -> str:
        """The receiver's mark."""
        return self.receiver.status().mark


@dataclass
class Run:
    """A running world. ``committed`` keeps the live bits that every committed version was captured from."""

    network: MemoryNetwork
    transport: Transport
    store: CommitStore
    coordinator: CoordinatorRole
    owners: list[OwnerRole]
    live: dict[str, torch.Tensor]
    rollouts: dict[str, Rollout]
    tasks: TaskGroup
    runtime: Runtime
    events: list[tuple[str, str]]
    address: str
    secret: bytes | None
    committed: dict[int, dict[str, bytes]] = field(default_factory=dict)
    scopes: dict[str, anyio.CancelScope] = field(default_factory=dict)
    ended: dict[str, anyio.Event] = field(default_factory=dict)
    captured: dict[str, bytes] = field(default_factory=dict)

    async def offer(self) -> None:
        """Capture and offer on every owner, as training ranks do together."""
        for owner in self.owners:
            assert await owner.wait_settled(20)
        self.captured = bits(self.live)
        for owner in self.owners:
            await owner.capture()
        for owner in self.owners:
            await owner.offer()

    async def refit(self, mode: Mode = "async") -> RefitReport:
        """Offer and run one transition."""
        await self.offer()
        return await self.commit(mode)

    async def commit(self, mode: Mode = "async") -> RefitReport:
        """Run one transition with what is on offer."""
        report = await self.coordinator.refit(mode)
        self.committed[report.version] = self.captured
        return report

    def check_exact(self, version: int | None = None) -> None:
        """Every engine holds exactly the committed bits (or those of ``version``), in every tensor."""
        want = self.committed[self.coordinator.version if version is None else version]
        for rollout in self.rollouts.values():
            held = rollout.bits()
            wrong = [name for name in want if held[name] != want[name]]
            assert not wrong, f"{rollout.name}: {wrong}"

    def serving(self) -> list[int | None]:
        """What the engines serve, by node."""
        return [rollout.gate.serving for rollout in self.rollouts.values()]

    def start(self, role: OwnerRole | NodeRole) -> None:
        """Let a role dial the coordinator."""
        scope = self.scopes[role.name] = anyio.CancelScope()
        before, ended = self.ended.get(role.name), anyio.Event()
        self.ended[role.name] = ended

        async def serve() -> None:
            try:
                if before is not None:
                    await before.wait()
                with scope:
                    await role.serve(self.address)
            finally:
                ended.set()

        self.tasks.start_soon(serve)

    async def joined(self) -> None:
        """Wait until every role is known to the coordinator."""
        for owner in self.owners:
            assert await owner.wait_settled(10)
        await until(lambda: self.rollouts.keys() <= self.coordinator._nodes.keys())

    async def joined_or_offered(self) -> None:
        """Wait until every role is known to the coordinator, settled or not."""
        await until(lambda: all(owner._joined.is_set() for owner in self.owners))
        await until(lambda: self.rollouts.keys() <= self.coordinator._nodes.keys())
        await until(lambda: all(r.node._connection is not None for r in self.rollouts.values()))

    def kill(self, role: OwnerRole | NodeRole) -> None:
        """End a role at once, as the death of its process does."""
        self.scopes[role.name].cancel()

    def join(self, name: str, model: torch.nn.Module | None = None) -> Rollout:
        """One more node with one engine."""
        rollout = make_rollout(
            name, model or Weights(self.live), self.runtime, self.transport, secret=self.secret, events=self.events
        )
        self.rollouts[name] = rollout
        self.start(rollout.node)
        return rollout

    @asynccontextmanager
    async def successor(self, *, move: bool = True) -> AsyncIterator[CoordinatorRole]:
        """A second coordinator over the same store; all roles dial it from now on if they ``move``."""
        role = CoordinatorRole(
            RUN,
            self.store,
            transport="memory://test",
            runtime=self.runtime,
            settings=self.coordinator.settings,
            secret=self.secret,
        )
        async with role.listening("memory://successor:0") as self.address:
            self.coordinator = role
            if move:
                self.move()
            yield role

    def move(self) -> None:
        """All roles leave their coordinator and dial the current one."""
        roles: list[OwnerRole | NodeRole] = [*self.owners, *(r.node for r in self.rollouts.values())]
        for one in roles:
            self.kill(one)
            self.start(one)


def make_rollout(
    name: str,
    model: torch.nn.Module,
    runtime: Runtime,
    transport: Transport,
    *,
    loader: Loader | None = None,
    settings: NodeSettings | None = None,
    secret: bytes | None = None,
    events: list[tuple[str, str]] | None = None,
) -> Rollout:
    """A node with one engine over ``model``."""
    receiver, engine, gate = make_engine(name, model, runtime, loader=loader, events=events)
    node = NodeRole(
        name,
        [(engine, gate)],
        run=RUN,
        runtime=runtime,
        open_transport=lambda url: transport,
        settings=settings or NodeSettings(call_deadline_s=10, reconnect_s=0.02),
        secret=secret,
    )
    return Rollout(name, model, receiver, engine, gate, node)


def make_engine(
    name: str,
    model: torch.nn.Module,
    runtime: Runtime,
    *,
    loader: Loader | None = None,
    events: list[tuple[str, str]] | None = None,
    engine_name: str = "engine",
) -> tuple[FaultyReceiver, FaultyEngine, WatchedGate]:
    """A fresh receiver, engine and gate over ``model``."""
    receiver = FaultyReceiver(Receiver(loader or StateDictLoader(model), name=f"{name} receiver"))
    engine = FaultyEngine(engine_name, [receiver], workers=runtime.workers)
    gate = WatchedGate(engine, hook_deadline_s=2)
    gate.events, gate.owner = events if events is not None else [], name
    return receiver, engine, gate


def make_owner(
    name: str,
    source: Source,
    runtime: Runtime,
    transport: Transport,
    *,
    pipeline: Pipeline[Shard, CodedBucket] | None = None,
    capture: CaptureSettings | None = None,
    secret: bytes | None = None,
) -> OwnerRole:
    """An owner over ``source``."""
    return OwnerRole(
        name,
        source,
        run=RUN,
        pipeline=pipeline or small_pipeline(),
        runtime=runtime,
        open_transport=lambda url: transport,
        settings=OwnerSettings(capture=capture or CaptureSettings(), piece_bytes=1024, reconnect_s=0.02),
        secret=secret,
    )


@asynccontextmanager
async def running(
    *,
    live: dict[str, torch.Tensor] | None = None,
    sources: Sequence[Source] | None = None,
    nodes: Sequence[str] = ("n0", "n1"),
    store: CommitStore | None = None,
    transport: Transport | None = None,
    settings: TransitionSettings = SETTINGS,
    node_settings: NodeSettings | None = None,
    pipeline: Pipeline[Shard, CodedBucket] | None = None,
    capture: CaptureSettings | None = None,
    model: Callable[[], torch.nn.Module] | None = None,
    loader: Callable[[torch.nn.Module], Loader] | None = None,
    secret: bytes | None = None,
    offer_deadline_s: float = 10,
) -> AsyncIterator[Run]:
    """Two owners over replicas of ``live`` and one rollout for each of ``nodes``, all connected."""
    live = live if live is not None else some_tensors(1)
    network, store = MemoryNetwork(), store or MemoryCommitStore()
    transport = transport or MemoryTransport()
    runtime = Runtime.default(network)
    events: list[tuple[str, str]] = []
    if sources is None:
        sources = [TorchSource(live, rank=rank, replicas=2) for rank in range(2)]
    coordinator = CoordinatorRole(
        RUN,
        store,
        transport="memory://test",
        runtime=runtime,
        settings=CoordinatorSettings(
            owners=len(sources),
            nodes=len(nodes),
            join_deadline_s=10,
            offer_deadline_s=offer_deadline_s,
            transition=settings,
        ),
        secret=secret,
    )
    owners = [
        make_owner(f"o{i}", source, runtime, transport, pipeline=pipeline, capture=capture, secret=secret)
        for i, source in enumerate(sources)
    ]
    rollouts: dict[str, Rollout] = {}
    for name in nodes:
        made = model() if model is not None else Weights(live)
        rollouts[name] = make_rollout(
            name,
            made,
            runtime,
            transport,
            loader=loader(made) if loader is not None else None,
            settings=node_settings,
            secret=secret,
            events=events,
        )
    async with task_group() as tasks, coordinator.listening("memory://coordinator") as address:
        run = Run(
            network=network,
            transport=transport,
            store=store,
            coordinator=coordinator,
            owners=owners,
            live=live,
            rollouts=rollouts,
            tasks=tasks,
            runtime=runtime,
            events=events,
            address=address,
            secret=secret,
        )
        roles: list[OwnerRole | NodeRole] = [*owners, *(rollout.node for rollout in rollouts.values())]
        for role in roles:
            run.start(role)
        with anyio.fail_after(60):
            yield run
        tasks.cancel_scope.cancel()
