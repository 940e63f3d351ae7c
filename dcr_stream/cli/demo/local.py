"""``--in-process``: the same roles and messages, with everything in this process and no socket."""

from __future__ import annotations

import base64
import tempfile
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import torch
from safetensors.torch import save_file

from dcr_stream.cli.demo.collective import Collective
from dcr_stream.cli.demo.host import HOLD_S, Answer, HostReport, TimedGate
from dcr_stream.cli.demo.rollout_model import ModelConfig, RolloutModel, snapshot
from dcr_stream.cli.demo.text import checkpoint_path
from dcr_stream.cli.demo.trainers import StepDone, TrainingEnded, state_path
from dcr_stream.cli.demo.watch import Stopwatch
from dcr_stream.cli.demo.world import LAYOUTS, RUN, TRAINERS, World
from dcr_stream.errors import DcrError, GateClosed, TransitionFailed
from dcr_stream.flow import task_group
from dcr_stream.front import Coordinator, Node, Owner
from dcr_stream.gate import LocalEngine
from dcr_stream.interfaces import Network
from dcr_stream.loaders import TorchLoader
from dcr_stream.receiver import Receiver
from dcr_stream.runtime import ThreadWorkers
from dcr_stream.sources import TorchSource

__all__ = ["LocalWorld"]


class _Ranks:
    """An engine's tensor-parallel ranks as threads: a forward pass runs on all of them at once."""

    def __init__(self, world: int, store: Path) -> None:
        config = ModelConfig.read(checkpoint_path())
        groups: list[Collective] = []

        def join(rank: int) -> None:
            groups.append(Collective(store, rank, world))

        threads = [threading.Thread(target=join, args=(rank,)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        groups.sort(key=lambda group: group.rank)
        self.models = [
            RolloutModel(config, rank=group.rank, world=world, all_reduce=group.all_reduce) for group in groups
        ]
        self.busy = anyio.Lock()

    async def embed(self, token_ids: tuple[int, ...]) -> bytes:
        """The embedding's fp32 bits; one at a time."""
        found: dict[int, torch.Tensor] = {}

        async def run(rank: int) -> None:
            found[rank] = await anyio.to_thread.run_sync(self.models[rank], torch.tensor(token_ids))

        async with self.busy, anyio.create_task_group() as tasks:
            for rank in range(len(self.models)):
                tasks.start_soon(run, rank)
        return found[0].numpy().tobytes()


class LocalWorld(World):
    """One trainer that owns everything as two owners, and two engines of one and two ranks."""

    def __init__(self) -> None:
        self.ranks: dict[str, _Ranks] = {}
        self.gates: dict[str, TimedGate] = {}
        self.owners: list[Owner] = []
        self.ended: dict[int, TrainingEnded] = {}
        self.trainers_done = anyio.Event()

    @classmethod
    @asynccontextmanager
    async def start(
        cls,
        coordinator: Coordinator,
        secret: bytes,
        folder: Path,
        *,
        steps: int,
        network: Network,
        on_step: Callable[[int, StepDone], None],
    ) -> AsyncIterator[LocalWorld]:
        """Build everything, and train in a thread until the block ends."""
        torch.set_num_threads(1)
        world = cls()
        async with AsyncExitStack() as stack:
            store = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dcr-demo-")))
            for name, ranks in LAYOUTS.items():
                model = world.ranks[name] = await anyio.to_thread.run_sync(_Ranks, ranks, store / name)
                receivers = [
                    Receiver(TorchLoader(m), rank=rank, name=f"{name}.{rank}") for rank, m in enumerate(model.models)
                ]
                gate = world.gates[name] = TimedGate(LocalEngine("engine", receivers, workers=ThreadWorkers()))
                await stack.enter_async_context(
                    Node.connect(
                        coordinator.address,
                        [gate],
                        name=name,
                        run=RUN,
                        network=network,
                        secret=secret,
                    )
                )
            async with task_group() as tasks:
                stop = threading.Event()
                token = anyio.lowlevel.current_token()

                def tell(rank: int, done: StepDone) -> None:
                    anyio.from_thread.run_sync(on_step, rank, done, token=token)

                async def train() -> None:
                    await anyio.to_thread.run_sync(
                        world._train, coordinator.address, secret, folder, steps, network, tell, stop
                    )
                    for ended in world.ended.values():
                        if ended.error and not stop.is_set():
                            raise TransitionFailed(f"the trainer stopped: {ended.error}")
                    world.trainers_done.set()

                tasks.start_soon(train)
                try:
                    yield world
                finally:
                    stop.set()
                    for owner in world.owners:
                        await anyio.to_thread.run_sync(owner.close)
                tasks.cancel_scope.cancel()

    def _train(
        self,
        address: str,
        secret: bytes,
        folder: Path,
        steps: int,
        network: Network,
        tell: Callable[[int, StepDone], None],
        stop: threading.Event,
    ) -> None:
        from dcr_stream.cli.demo.training import Trainer

        trainer = Trainer(0, 1, folder / "trainers")
        watch = [Stopwatch() for _ in range(TRAINERS)]
        owners = self.owners = [
            Owner.connect(
                address,
                TorchSource(trainer.policy, rank=rank, replicas=TRAINERS),
                name=f"trainer{rank}",
                run=RUN,
                network=network,
                secret=secret,
                monitor=watch[rank],
            )
            for rank in range(TRAINERS)
        ]
        problem = ""
        try:
            for version in range(steps + 1):
                if stop.is_set():
                    return
                loss = trainer.step() if version else 0.0
                trainer.save(state_path(folder, version))
                for rank, owner in enumerate(owners):
                    offer = owner.refit(timeout_s=120)
                    tell(rank, StepDone(version, loss, offer.elements, offer.scanned, offer.capture_s))
                if version == 0:
                    for rank, owner in enumerate(owners):
                        owner.wait(timeout_s=120)
                        watch[rank].reset()  # stage times are those of the delta refits
            for owner in owners:
                owner.wait(timeout_s=120)
        except DcrError as error:
            problem = f"{type(error).__name__}: {error}"
        finally:
            for rank, owner in enumerate(owners):
                # Owners stay: an engine that is restarted after the last step is restored by them.
                self.ended[rank] = TrainingEnded(problem, owner.baseline_bytes, watch[rank].times)
                if stop.is_set():
                    owner.close()

    async def ask(self, host: str, token_ids: tuple[int, ...]) -> Answer | None:
        """Through the gate, to the engine's ranks."""
        try:
            async with self.gates[host].requests.admit(HOLD_S) as ticket:
                bits = await self.ranks[host].embed(token_ids)
        except GateClosed:
            return None
        return Answer(base64.b64encode(bits).decode(), ticket.version_start, ticket.version_end)

    async def dump(self, host: str, stem: Path) -> list[Path]:
        """Write every rank's bits."""
        paths: list[Path] = []
        for rank, model in enumerate(self.ranks[host].models):
            paths.append(stem.with_name(f"{stem.name}-rank{rank}.safetensors"))
            await anyio.to_thread.run_sync(save_file, snapshot(model), paths[-1])
        return paths

    async def report(self, host: str) -> HostReport:
        """Serving version and pauses."""
        serving = self.gates[host].serving
        return HostReport(-1 if serving is None else serving, tuple(self.gates[host].pauses), 0, False)
