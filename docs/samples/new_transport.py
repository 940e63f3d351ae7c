"""Plug in a transport that is not part of the package: payloads travel through one SQLite file.

Run it: ``python docs/samples/new_transport.py``. The transport itself is ``sqlite_transport.py`` beside this file.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import anyio
import anyio.to_thread
import torch
from sqlite_transport import SqliteTransport

from dcr_stream import Coordinator, Node, Owner, Receiver, SqliteCommitStore, StateDictLoader, TorchSource, run_async
from dcr_stream.gate import EngineGate, LocalEngine
from dcr_stream.runtime import ThreadWorkers


async def main() -> None:
    trained, served = torch.nn.Linear(128, 128).bfloat16(), torch.nn.Linear(128, 128).bfloat16()
    gate = EngineGate(LocalEngine("engine", [Receiver(StateDictLoader(served))], workers=ThreadWorkers()))
    with tempfile.TemporaryDirectory() as folder:
        transport = SqliteTransport(Path(folder, "payloads.db"))
        async with (
            Coordinator.listen(
                "dcr://127.0.0.1:0",
                owners=1,
                nodes=1,
                transport="sqlite://payloads.db",
                commits=SqliteCommitStore(f"{folder}/commits.db"),
            ) as coordinator,
            Node.connect(coordinator.address, [gate], name="node0", transport=transport),
        ):
            with Owner.connect(coordinator.address, TorchSource(trained), transport=transport) as owner:
                for step in range(3):
                    with torch.no_grad():
                        trained.bias[step] = float("nan")
                    await anyio.to_thread.run_sync(owner.refit)
                    report = await coordinator.refit()
                    print(f"v{report.version}: {report.payload_bytes} bytes in {report.payloads} payloads")
    for name, tensor in trained.state_dict().items():
        assert torch.equal(tensor.view(torch.int16), served.state_dict()[name].view(torch.int16)), name


if __name__ == "__main__":
    run_async(main)
