"""Random faults at random moments, from seeds: what must hold after every event, whatever happened before."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress

import anyio
import pytest

from dcr_stream.errors import DcrError
from dcr_stream.node import NodeRole
from dcr_stream.owner import OwnerRole
from dcr_stream.peers import Mode
from dcr_stream.testing import Faults, FaultyTransport
from dcr_stream.transports import MemoryTransport
from tests.protocol.faults import Broken
from tests.protocol.harness import Rollout, Run, nudge, running, until

pytestmark = pytest.mark.anyio

REFITS = 3
WRITES = ("begin", "apply", "finish", "load_begin", "load_block", "load_end", "full_sums", "adopt")


class Chaos:
    """Breaks receivers, transport and links while it is ``on``; checks every gate that opens."""

    def __init__(self, seed: int, run: Run, transport: FaultyTransport) -> None:
        self.random = random.Random(seed)
        self.run, self.transport, self.seed = run, transport, seed
        self.on = False
        self.left = 0
        self.violations: list[str] = []
        self._lock = threading.Lock()
        for rollout in run.rollouts.values():
            rollout.receiver.before = self.before_or_after
            rollout.receiver.after = self.before_or_after
            rollout.gate.on_open = self.opening(rollout.name)

    def before_or_after(self, method: str) -> None:
        """Called in worker threads, before and after every call of a receiver."""
        with self._lock:
            if not self.on or method not in WRITES or self.left == 0 or self.random.random() > 0.06:
                return
            self.left -= 1
        raise Broken(f"seed {self.seed}: {method}")

    def opening(self, name: str) -> Callable[[int], None]:
        """A gate opens at a version: its engine must hold exactly that version, and nobody may serve another."""

        def check(version: int) -> None:
            run = self.run
            want = run.committed.get(version, run.captured)
            held = run.rollouts[name].bits()
            wrong = [tensor for tensor in want if held[tensor] != want[tensor]]
            if wrong:
                self.violations.append(f"{name} opens at {version} with wrong {wrong}")
            if others := self.served() - {version}:
                self.violations.append(f"{name} opens at {version} while {others} is served")

        return check

    def served(self) -> set[int]:
        """Versions behind open gates. A node that has lost its coordinator goes on with what it served."""
        return {r.gate.serving for r in self.run.rollouts.values() if r.gate.serving is not None and linked(r)}

    def start(self) -> None:
        """Let things go wrong, a bounded number of times."""
        self.on, self.left = True, self.random.randrange(4)
        kinds = self.random.sample(["corrupt", "truncate", "disconnect", "abort"], 2)
        share = {kind: 0.1 if kind in kinds else 0.0 for kind in ("corrupt", "truncate", "disconnect", "abort")}
        self.transport._faults = Faults(
            seed=self.seed,
            limit=self.random.randrange(4),
            corrupt=share["corrupt"],
            truncate=share["truncate"],
            disconnect=share["disconnect"],
            abort=share["abort"],
            duplicate=0.2,
            delay=0.2,
        )
        self.transport.injected.clear()

    def stop(self) -> None:
        """From here on everything works."""
        self.on, self.transport._faults = False, Faults()

    async def disconnect(self) -> None:
        """Now and then a role loses its coordinator for a moment."""
        while self.random.random() < 0.4:
            await anyio.sleep(self.random.random() * 0.05)
            roles: list[OwnerRole | NodeRole] = [*self.run.owners, *(r.node for r in self.run.rollouts.values())]
            role = self.random.choice(roles)
            link = role._connection.link if role._connection is not None else None
            if link is not None:
                await link.aclose()


@pytest.mark.parametrize("block", range(8))
async def test_random_faults_never_break_what_is_served(block: int) -> None:
    """Versions only rise, an open gate always serves exactly its version's bits, and all ends exact (C17)."""
    for seed in range(block * 6, block * 6 + 6):
        await schedule(seed)


@pytest.mark.parametrize("block", range(4))
async def test_random_takeovers_never_break_what_is_served(block: int) -> None:
    """The same with a coordinator that dies at a random moment of every other transition, and a new one each time."""
    for seed in range(block * 5, block * 5 + 5):
        await takeovers(seed)


async def takeovers(seed: int) -> None:
    """One seeded run of refits under coordinators that die."""
    rng = random.Random(seed)
    transport = FaultyTransport(MemoryTransport(wait_s=0.3), Faults())
    async with running(transport=transport, offer_deadline_s=0.5) as run, AsyncExitStack() as stack:
        chaos = Chaos(seed, run, transport)
        version = -1
        for step in range(REFITS):
            nudge(run.live, seed * 100 + step, share=rng.choice([0.02, 0.5]))
            if all([await owner.wait_settled(0.05) for owner in run.owners]):
                await run.offer()
            chaos.start()
            with anyio.move_on_after(rng.choice([rng.random() * 0.06, 60])), suppress(DcrError):
                await run.commit(rng.choice(["sync", "async"]))
            chaos.stop()
            record = run.store.read("test")
            reached = record.version if record is not None else -1
            assert reached in (version, version + 1), f"seed {seed}: {version} then {reached}"
            if reached > version:
                run.committed[reached] = run.captured
            version = reached
            await stack.enter_async_context(run.successor())
            await run.joined_or_offered()
            assert chaos.served() <= {version}, f"seed {seed}: serving {run.serving()} at version {version}"
            assert not chaos.violations, f"seed {seed}: {chaos.violations}"
        await finish(run, seed)
        assert not chaos.violations, f"seed {seed}: {chaos.violations}"


async def schedule(seed: int) -> None:
    """One seeded run of a few refits."""
    rng = random.Random(seed)
    transport = FaultyTransport(MemoryTransport(wait_s=0.3), Faults())
    async with running(transport=transport, offer_deadline_s=1) as run:
        chaos = Chaos(seed, run, transport)
        versions = [-1]
        for step in range(REFITS):
            mode: Mode = rng.choice(["sync", "async"])
            nudge(run.live, seed * 100 + step, share=rng.choice([0.0, 0.02, 0.5]))
            if all([await owner.wait_settled(0.05) for owner in run.owners]):
                await run.offer()
            nudge(run.live, seed * 100 + step + 50, share=0.01)
            chaos.start()
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(chaos.disconnect)
                    await run.commit(mode)
            except* DcrError:
                pass
            chaos.stop()
            record = run.store.read("test")
            version = record.version if record is not None else -1
            assert version in (versions[-1], versions[-1] + 1), f"seed {seed}: {versions} then {version}"
            versions.append(version)
            if version > versions[-2]:
                run.committed[version] = run.captured
            assert chaos.served() <= {version}, f"seed {seed}: serving {run.serving()} at version {version}"
            assert not chaos.violations, f"seed {seed}: {chaos.violations}"
        await finish(run, seed)
        assert not chaos.violations, f"seed {seed}: {chaos.violations}"


def linked(rollout: Rollout) -> bool:
    """Whether a node has a coordinator; a link that was cut just now is none."""
    connection = rollout.node._connection
    return connection is not None and not getattr(connection.link, "_closed", False)


async def finish(run: Run, seed: int) -> None:
    """Without faults the next refits must succeed, and everybody is exact."""
    await until(lambda: all(linked(rollout) for rollout in run.rollouts.values()))
    await run.joined_or_offered()
    for attempt in range(3):
        try:
            if all([await owner.wait_settled(0.05) for owner in run.owners]):
                await run.offer()
            await run.commit()
            break
        except DcrError:
            if attempt == 2:
                raise
    run.check_exact()
    nudge(run.live, seed)
    report = await run.refit()
    assert report.attempts == 1, f"seed {seed}: {report.failures}"
    run.check_exact()
    assert run.serving() == [report.version] * 2, f"seed {seed}"
