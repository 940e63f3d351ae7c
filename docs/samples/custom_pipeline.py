"""Compose a refit pipeline with a stage of your own.

Run it: ``python docs/samples/custom_pipeline.py``. Everything is in one process; on a cluster the owner runs in each
training rank, the node on each rollout host, and the coordinator wherever you like.
"""

from __future__ import annotations

import tempfile
from collections import Counter

import anyio
import anyio.to_thread
import torch

from dcr_stream import Coordinator, Node, Owner, Receiver, SqliteCommitStore, StateDictLoader, TorchSource, run_async
from dcr_stream.delta import Record
from dcr_stream.flow import each
from dcr_stream.gate import EngineGate, LocalEngine
from dcr_stream.runtime import ThreadWorkers
from dcr_stream.stages import bucket, chunk, compare, compress, convert, encode, project

MiB = 1 << 20
changed: Counter[str] = Counter()


def count_changes(record: Record) -> Record:
    """A stage of our own: any function from record to record. Pass every record on, or the refit fails."""
    changed[record.name] += record.positions.count
    return record


pipeline = (
    chunk(max_bytes=256 * MiB)
    | compare(workers=4)
    | project()
    | convert()
    | each(count_changes)
    | encode(entries="mixed")
    | bucket(max_bytes=64 * MiB)
    | compress(level=1, workers=4)
)


async def main() -> None:
    trained, served = torch.nn.Linear(256, 256).bfloat16(), torch.nn.Linear(256, 256).bfloat16()
    gate = EngineGate(LocalEngine("engine", [Receiver(StateDictLoader(served))], workers=ThreadWorkers()))
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
        ):
            with Owner.connect(coordinator.address, TorchSource(trained), pipeline=pipeline) as owner:
                for step in range(3):
                    with torch.no_grad():
                        trained.weight[step] += 0.125
                    await anyio.to_thread.run_sync(owner.refit)
                    report = await coordinator.refit()
                    print(f"v{report.version}: {report.payload_bytes} bytes, changed so far: {dict(changed)}")
    assert torch.equal(trained.weight.view(torch.int16), served.weight.view(torch.int16))
    assert changed == {"weight": 2 * 256}, changed  # the first refit is dense: nothing to compare with yet


if __name__ == "__main__":
    run_async(main)
