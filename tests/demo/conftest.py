"""One short real training run, shared by the tests of the demonstration's model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest
import torch

from dcr_stream.cli.demo.processes import warm_up
from dcr_stream.cli.demo.text import checkpoint_path, load_tokenizer, request_tokens
from dcr_stream.errors import UsageError

if TYPE_CHECKING:
    from dcr_stream.cli.demo.training import Trainer

ROOT = Path(__file__).resolve().parents[2]


class WithoutExtra(pytest.Module):
    """Stands for a test module that cannot be imported, because the demo extra is not installed."""

    reason: str

    def collect(self) -> NoReturn:
        pytest.skip(self.reason)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skip every module here, with the reason, where the demo extra is missing."""
    try:
        checkpoint_path()
    except UsageError as missing:
        module = WithoutExtra.from_parent(parent, path=module_path)
        module.reason = str(missing)
        return module
    return None


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """As in the demonstration's processes: two trainers and two workers share few cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class TrainingRun:
    """Two data-parallel trainers in threads, after ``steps`` steps; ``states`` are the files saved before and after."""

    steps = 2

    def __init__(self, folder: Path) -> None:

        self.folder = folder
        self.states = [folder / f"{version}.safetensors" for version in range(self.steps + 1)]
        self.losses: list[float] = []
        self.trainers: dict[int, Trainer] = {}
        self.errors: list[BaseException] = []
        threads = [threading.Thread(target=self._train, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def _train(self, rank: int) -> None:
        from dcr_stream.cli.demo.training import Trainer

        try:
            trainer = self.trainers[rank] = Trainer(rank, 2, self.folder / "ranks", batch=2, length=48)
            self.pointers = {name: tensor.data_ptr() for name, tensor in trainer.policy.items()}
            for version in range(self.steps + 1):
                if version:
                    loss = trainer.step()
                    self.losses += [loss] if rank == 0 else []
                if rank == 0:
                    trainer.save(self.states[version])
        except BaseException as error:
            self.errors.append(error)


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    """The packaged checkpoint; workers' imports begin while other tests run."""
    warm_up()
    return checkpoint_path()


@pytest.fixture(scope="session")
def run(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    """Real steps at the demonstration's learning rate."""
    return TrainingRun(tmp_path_factory.mktemp("training"))


@pytest.fixture(scope="session")
def requests(checkpoint: Path) -> tuple[tuple[int, ...], ...]:
    """Token ids of the demonstration's requests."""
    return request_tokens(load_tokenizer())
