"""A training rank as a process: real AdamW steps, and a refit after each."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch

from dcr_stream.cli.demo.processes import when_closed
from dcr_stream.cli.demo.watch import Stopwatch, Times
from dcr_stream.errors import DcrError, TransitionFailed
from dcr_stream.front import Owner
from dcr_stream.sources import TorchSource

__all__ = ["StepDone", "TrainerSettings", "TrainingEnded", "state_path", "train"]


class TrainerSettings(msgspec.Struct, frozen=True):
    """What a training rank is started with. ``folder`` gets the trainer's own state dict of every version."""

    rank: int
    world: int
    steps: int
    coordinator: str
    run: str
    secret: bytes
    folder: str


class StepDone(msgspec.Struct, frozen=True, tag="step"):
    """Refit ``version`` is captured and offered; ``loss`` of the training step before it."""

    version: int
    loss: float
    elements: int
    scanned: int
    capture_s: float


class TrainingEnded(msgspec.Struct, frozen=True, tag="ended"):
    """The rank has taken all steps, or failed with ``error``."""

    error: str
    baseline_bytes: int
    times: Times


def state_path(folder: Path, version: int) -> Path:
    """Where the trainer's own state dict at the capture point of ``version`` is saved."""
    return folder / f"state-v{version}.safetensors"


def train(settings: TrainerSettings, pipe: Connection) -> None:
    """Take ``steps`` AdamW steps with a refit before the first and after each. Entry point of the process."""
    from dcr_stream.cli.demo.training import Trainer  # transformers takes seconds to import; only trainers need it

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    # A trainer holds nothing that must be saved, and may be deep in a step or a wait: it ends where it is.
    ended = threading.Event()
    when_closed(pipe, lambda: os._exit(0))
    watch = Stopwatch()
    try:
        folder = Path(settings.folder)
        trainer = Trainer(settings.rank, settings.world, folder / "trainers")
        source = TorchSource(trainer.policy, rank=settings.rank, replicas=settings.world, agree=trainer.agree)
        with Owner.connect(
            settings.coordinator,
            source,
            name=f"trainer{settings.rank}",
            run=settings.run,
            secret=settings.secret,
            monitor=watch,
        ) as owner:
            for version in range(settings.steps + 1):
                loss = trainer.step() if version else 0.0
                if settings.rank == 0:
                    trainer.save(state_path(folder, version))
                offer = owner.refit(timeout_s=120)
                done = StepDone(version, loss, offer.elements, offer.scanned, offer.capture_s)
                pipe.send_bytes(msgspec.json.encode(done))
                if version == 0:
                    owner.wait(timeout_s=120)
                    watch.reset()  # stage times are those of the delta refits
            outcome = owner.wait(timeout_s=120)
            if outcome is None or outcome.version != settings.steps:
                raise TransitionFailed(f"the last refit did not commit: {outcome and outcome.error}")
            pipe.send_bytes(msgspec.json.encode(TrainingEnded("", owner.baseline_bytes, watch.times)))
            # An engine that is restarted after the last step is restored by the owners: stay until told to go.
            ended.wait()
    except DcrError as error:
        with suppress(BrokenPipeError):
            problem = f"{type(error).__name__}: {error}"
            pipe.send_bytes(msgspec.json.encode(TrainingEnded(problem, 0, watch.times)))
    except BrokenPipeError:
        pass  # whoever started this process is gone
    pipe.close()
