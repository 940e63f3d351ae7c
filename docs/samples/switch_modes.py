"""Switch a run between synchronous and asynchronous RL from one training step to the next.

Run it: ``python docs/samples/switch_modes.py``. The mode is an argument of the transition; engines, gates and owners
stay as they are.
"""

from __future__ import annotations

import tempfile

import anyio
import anyio.to_thread
import torch

from dcr_stream import Coordinator, Node, Owner, Receiver, SqliteCommitStore, StateDictLoader, TorchSource, run_async
from dcr_stream.gate import EngineGate, LocalEngine, RequestGate
from dcr_stream.runtime import ThreadWorkers


async def clients(requests: RequestGate, served: torch.nn.Linear, seen: dict[int, int]) -> None:
    """Rollout requests, one after the other, for as long as the run lasts."""
    while True:
        async with requests.admit(timeout=30) as ticket:
            served(torch.ones(1, 64, dtype=torch.bfloat16))
            await anyio.sleep(0.001)
        assert ticket.version_start == ticket.version_end
        seen[ticket.version_start] = seen.get(ticket.version_start, 0) + 1


async def main() -> None:
    trained, served = torch.nn.Linear(64, 64).bfloat16(), torch.nn.Linear(64, 64).bfloat16()
    engine = LocalEngine("engine", [Receiver(StateDictLoader(served))], workers=ThreadWorkers())
    gate, seen = EngineGate(engine), dict[int, int]()
    with tempfile.TemporaryDirectory() as folder:
        async with (
            Coordinator.listen(
                "dcr://127.0.0.1:0",
                owners=1,
                nodes=1,
                transport=f"file://{folder}",
                commits=SqliteCommitStore(f"{folder}/commits.db"),
            ) as coordinator,
            Node.connect(coordinator.address, [gate], name="node0"),
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(clients, gate.requests, served, seen)
            with Owner.connect(coordinator.address, TorchSource(trained)) as owner:
                for step in range(6):
                    with torch.no_grad():
                        trained.weight[step] *= -1
                    await anyio.to_thread.run_sync(owner.refit)
                    # Warm up on-policy, then let rollout run ahead.
                    report = await coordinator.refit("sync" if step < 3 else "async")
                    await anyio.sleep(0.02)
                    print(f"v{report.version} {report.mode}: requests by version {seen}")
            tasks.cancel_scope.cancel()
    assert torch.equal(trained.weight.view(torch.int16), served.weight.view(torch.int16))
    assert set(seen) == set(range(6)), seen


if __name__ == "__main__":
    run_async(main)
