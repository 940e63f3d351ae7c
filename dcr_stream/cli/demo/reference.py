"""The judge: dense loads of the trainer's saved states, in fresh processes, compared with the engines bit for bit.

``python -m dcr_stream.cli.demo.reference JOB.json`` knows the model and its own ``load_weights``, and no tracker,
pending set, payload or placement plan. One process per tensor-parallel rank handles all versions.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file

from dcr_stream.cli.demo.collective import Collective
from dcr_stream.cli.demo.rollout_model import ModelConfig, RolloutModel, snapshot
from dcr_stream.cli.demo.text import checkpoint_path
from dcr_stream.errors import DcrError, UsageError

__all__ = [
    "Compared",
    "EngineDump",
    "Mismatch",
    "ReferenceEmbedding",
    "ReferenceJob",
    "ReferenceReport",
    "SavedState",
    "main",
    "run_reference",
]


class SavedState(msgspec.Struct, frozen=True):
    """The trainer's own state dict at the capture point of ``version``, as a safetensors file."""

    version: int
    path: str


class EngineDump(msgspec.Struct, frozen=True):
    """What one rank of an engine of ``world`` ranks held at ``version``, written by ``RolloutEngine.dump``."""

    engine: str
    version: int
    world: int
    rank: int
    path: str


class ReferenceJob(msgspec.Struct, frozen=True):
    """What to judge. ``layouts`` are tensor-parallel sizes, ``requests`` token ids; the report goes to ``output``."""

    states: tuple[SavedState, ...]
    layouts: tuple[int, ...]
    requests: tuple[tuple[int, ...], ...]
    dumps: tuple[EngineDump, ...]
    output: str


class Mismatch(msgspec.Struct, frozen=True):
    """A tensor of a dump that is not what a dense load gives; ``elements`` have other bits."""

    engine: str
    version: int
    rank: int
    tensor: str
    elements: int
    reason: str


class Compared(msgspec.Struct, frozen=True):
    """How much of a dump was compared."""

    engine: str
    version: int
    rank: int
    tensors: int
    elements: int


class ReferenceEmbedding(msgspec.Struct, frozen=True):
    """The fp32 bits that an engine of ``world`` ranks at ``version`` must answer to request number ``request``."""

    world: int
    version: int
    request: int
    bits: bytes


class ReferenceReport(msgspec.Struct, frozen=True):
    """The verdict. ``indistinct`` lists (world, version, request) whose bits equal those of the version before."""

    compared: tuple[Compared, ...]
    mismatches: tuple[Mismatch, ...]
    embeddings: tuple[ReferenceEmbedding, ...]
    indistinct: tuple[tuple[int, int, int], ...] = ()
    seconds: float = 0.0


def run_reference(job: ReferenceJob, *, timeout_s: float = 120.0) -> ReferenceReport:
    """Judge ``job`` in fresh processes and return the report. Blocks; the job file lies beside the report.

    Raises:
        DcrError: the processes failed or took longer than ``timeout_s``.
    """
    path = Path(f"{job.output}.job")
    path.write_bytes(msgspec.json.encode(job))
    command = _command(path)
    try:
        subprocess.run(command, check=True, timeout=timeout_s, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise DcrError(
            f"the reference processes failed; run {' '.join(command)} to see why:\n{error.stderr}"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise DcrError(f"the reference processes took longer than {timeout_s:g} s; allow more time") from error
    return msgspec.json.decode(Path(job.output).read_bytes(), type=ReferenceReport)


def judge(job: ReferenceJob, rank: int) -> ReferenceReport:
    """The part of process ``rank``: its rank of every layout, and its turn at layouts of one rank."""
    processes = max(job.layouts)
    groups = {
        world: Collective(Path(f"{job.output}.ranks{world}"), rank, world, timeout_s=60.0)
        for world in job.layouts
        if rank < world
    }
    alone = Collective(Path(), 0, 1)
    config = ModelConfig.read(checkpoint_path())
    compared: list[Compared] = []
    mismatches: list[Mismatch] = []
    embeddings: list[ReferenceEmbedding] = []
    for turn, state in enumerate(job.states):
        tensors = load_file(state.path)
        for world in job.layouts:
            # Layouts of one rank need no peers, so the processes take turns at them.
            if world == 1 and turn % processes == rank:
                group = alone
            elif world > 1 and rank < world:
                group = groups[world]
            else:
                continue
            model = RolloutModel(config, rank=group.rank, world=world, all_reduce=group.all_reduce)
            model.load_weights(tensors.items())
            expected = snapshot(model)
            for dump in job.dumps:
                if (dump.version, dump.world, dump.rank) == (state.version, world, group.rank):
                    found = load_file(dump.path)
                    mismatches += _compare(dump, expected, found)
                    size = sum(tensor.numel() for tensor in found.values())
                    compared.append(Compared(dump.engine, dump.version, dump.rank, len(found), size))
            for number, token_ids in enumerate(job.requests):
                answer = model(torch.tensor(token_ids))
                if group.rank == 0:
                    embeddings.append(ReferenceEmbedding(world, state.version, number, answer.numpy().tobytes()))
    return ReferenceReport(tuple(compared), tuple(mismatches), tuple(embeddings))


def main(arguments: list[str] | None = None) -> int:
    """Run one process of a job; the first starts the others and merges their reports."""
    parser = argparse.ArgumentParser(prog="python -m dcr_stream.cli.demo.reference")
    parser.add_argument("job", type=Path)
    parser.add_argument("--rank", type=int, default=0)
    options = parser.parse_args(arguments)
    rank: int = options.rank
    path: Path = options.job
    started = time.monotonic()
    torch.set_num_threads(1)
    job = msgspec.json.decode(path.read_bytes(), type=ReferenceJob)
    _check_job(job)
    part = Path(f"{job.output}.{rank}")
    if rank:
        part.write_bytes(msgspec.json.encode(judge(job, rank)))
        return 0
    others = {n: subprocess.Popen([*_command(path), "--rank", str(n)]) for n in range(1, max(job.layouts))}
    try:
        reports = [judge(job, 0)]
        for n, process in others.items():
            if process.wait(timeout=60.0):
                raise DcrError(f"reference process {n} of {len(others) + 1} failed; its own message says why")
            reports.append(msgspec.json.decode(Path(f"{job.output}.{n}").read_bytes(), type=ReferenceReport))
    finally:
        for process in others.values():
            process.kill()
            process.wait()
    embeddings = tuple(e for r in reports for e in r.embeddings)
    report = ReferenceReport(
        compared=tuple(c for r in reports for c in r.compared),
        mismatches=tuple(m for r in reports for m in r.mismatches),
        embeddings=embeddings,
        indistinct=tuple(_indistinct(embeddings)),
        seconds=time.monotonic() - started,
    )
    Path(job.output).write_bytes(msgspec.json.encode(report))
    return 0


def _command(job: Path) -> list[str]:
    return [sys.executable, "-m", "dcr_stream.cli.demo.reference", str(job)]


def _check_job(job: ReferenceJob) -> None:
    versions = {state.version for state in job.states}
    for dump in job.dumps:
        if dump.version not in versions or dump.world not in job.layouts or not 0 <= dump.rank < dump.world:
            raise UsageError(
                f"the dump {dump.path} of engine {dump.engine!r} (version {dump.version}, rank {dump.rank} of "
                f"{dump.world}) has no saved state or layout in this job to be compared with; add it"
            )


def _compare(dump: EngineDump, expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> Iterator[Mismatch]:
    """Every tensor on either side, as integers."""
    for name in sorted(expected.keys() | found.keys()):
        reason = ""
        elements = 0
        if name not in found:
            reason, elements = "the engine does not hold this tensor", expected[name].numel()
        elif name not in expected:
            reason, elements = "a dense load does not make this tensor", found[name].numel()
        elif (found[name].dtype, found[name].shape) != (expected[name].dtype, expected[name].shape):
            reason, elements = "other shape or element width", expected[name].numel()
        elif not torch.equal(found[name], expected[name]):
            reason, elements = "other bits", int((found[name] != expected[name]).sum())
        if reason:
            yield Mismatch(dump.engine, dump.version, dump.rank, name, elements, reason)


def _indistinct(embeddings: tuple[ReferenceEmbedding, ...]) -> Iterator[tuple[int, int, int]]:
    known = {(e.world, e.version, e.request): e.bits for e in embeddings}
    for (world, version, request), answer in sorted(known.items()):
        if known.get((world, version - 1, request)) == answer:
            yield world, version, request


if __name__ == "__main__":
    sys.exit(main())
