"""The demonstration's verdict finds what it is there to find."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.progress import Progress
from safetensors.torch import save_file

from dcr_stream.cli.demo.driver import DemoRun, judge
from dcr_stream.cli.demo.host import Answer
from dcr_stream.cli.demo.options import DemoOptions
from dcr_stream.cli.demo.reference import Compared, EngineDump, Mismatch, ReferenceEmbedding, ReferenceReport
from dcr_stream.cli.demo.trainers import state_path
from dcr_stream.cli.demo.verdict import Given, entropy_bound, judge_responses
from dcr_stream.cli.demo.world import LAYOUTS
from dcr_stream.messages import CommitRecord
from dcr_stream.peers import RefitReport

V = {(world, version): bytes([world, version]) for world in LAYOUTS.values() for version in range(2)}


def reference(**changes: object) -> ReferenceReport:
    """A clean reference of two versions and one request."""
    found = {
        "compared": tuple(
            Compared(host, version, rank, 1, 4)
            for host, world in LAYOUTS.items()
            for version in range(2)
            for rank in range(world)
        ),
        "mismatches": (),
        "embeddings": tuple(ReferenceEmbedding(world, version, 0, bits) for (world, version), bits in V.items()),
        **changes,
    }
    return ReferenceReport(**found)  # type: ignore[arg-type]


def given(host: str, bits: bytes, start: int, end: int) -> Given:
    """An answer of ``host``."""
    return Given(host, 0, Answer(base64.b64encode(bits).decode(), start, end))


def test_an_answer_must_be_the_one_of_its_own_version_and_layout() -> None:
    good = [given("tp1", V[1, 0], 0, 0), given("tp2", V[2, 1], 1, 1), given("tp1", V[1, 1], 0, 1)]
    verdict = judge_responses(good, reference())
    assert (verdict.total, verdict.exact, verdict.spanning, verdict.mixed) == (3, 2, 1, 0)
    wrong = [
        given("tp1", V[1, 1], 0, 0),  # the bits of the other version
        given("tp1", V[2, 0], 0, 0),  # the bits of the other layout
        given("tp1", b"neither", 0, 1),
        given("tp1", V[1, 0], 7, 7),  # a version that does not exist
    ]
    assert judge_responses(wrong, reference()).mixed == 4


@pytest.fixture
def finished(tmp_path: Path) -> DemoRun:
    """A run of one dense refit and one delta that went well."""
    run = DemoRun(DemoOptions(steps=1), tmp_path, Progress(disable=True), ((1, 2),))
    for version in range(2):
        save_file({"w": torch.full((8,), float(version)).bfloat16()}, state_path(tmp_path, version))
        record = CommitRecord("demo", version, version, 1, 0, "", (), (), (0, 0), 0.0, version)
        kind = "delta" if version else "dense"
        run.reports.append(
            RefitReport(
                record=record,
                mode="async",
                kind=kind,  # type: ignore[arg-type]
                attempts=1,
                restored=0,
                elements=8,
                scanned=8,
                payloads=1,
                payload_bytes=100,
            )
        )
        for host, world in LAYOUTS.items():
            run.given.append(given(host, V[world, version], version, version))
            run.dumps += [EngineDump(host, version, world, rank, "") for rank in range(world)]
    return run


def test_a_clean_run_is_ok(finished: DemoRun) -> None:
    result = judge(finished, reference(), {})
    assert result.ok, result.problems
    assert [row.exact for row in result.rows] == [True, True]


def test_one_differing_tensor_spoils_its_refit_and_the_verdict(finished: DemoRun) -> None:
    mismatch = Mismatch("tp2", 1, 0, "embeddings.word_embeddings.weight", 1, "other bits")
    result = judge(finished, reference(mismatches=(mismatch,)), {})
    assert not result.ok
    assert [row.exact for row in result.rows] == [True, False]


def test_a_dump_that_was_not_compared_spoils_the_verdict(finished: DemoRun) -> None:
    result = judge(finished, reference(compared=reference().compared[:-1]), {})
    assert not result.ok


def test_a_mixed_answer_spoils_the_verdict(finished: DemoRun) -> None:
    finished.given.append(given("tp1", b"half and half", 0, 1))
    assert not judge(finished, reference(), {}).ok


def test_requests_that_cannot_tell_versions_apart_spoil_the_verdict(finished: DemoRun) -> None:
    assert not judge(finished, reference(indistinct=((1, 1, 0),)), {}).ok


def test_an_engine_that_never_answered_spoils_the_verdict(finished: DemoRun) -> None:
    finished.given = [one for one in finished.given if one.host == "tp1"]
    assert not judge(finished, reference(), {}).ok


def test_the_entropy_bound_is_that_of_gaps_and_differences(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    old = random.integers(0, 1 << 15, 1 << 16, dtype=np.uint16)
    new = old.copy()
    changed = random.choice(old.size, 655, replace=False)
    new[changed] += np.where(np.arange(655) % 2 == 0, 1, 3).astype(np.uint16)
    for name, words in (("old", old), ("new", new)):
        save_file({"w": torch.from_numpy(words.view(np.int16)).view(torch.bfloat16)}, tmp_path / name)
    count, total, bound = entropy_bound(tmp_path / "old", tmp_path / "new")
    p = 655 / old.size
    gap = (-p * np.log2(p) - (1 - p) * np.log2(1 - p)) / p
    assert (count, total) == (655, old.size)
    assert bound == pytest.approx((gap + 1.0) / 8, rel=1e-3)  # two equally likely differences: one bit
