"""Rollout engines as real processes."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import anyio
import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from dcr_stream.cli.demo.engine import RolloutEngine
from dcr_stream.cli.demo.reference import EngineDump, ReferenceJob, SavedState, run_reference
from dcr_stream.errors import PeerLost, UsageError
from tests.demo.conftest import ROOT, TrainingRun
from tests.demo.fakes import BrokenReceiver, FileReceiver, receiver_call

pytestmark = [pytest.mark.anyio, pytest.mark.processes]

TOKENS = (101, 1037, 3712, 7205, 102)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> None:
    """Workers import the receivers of these tests by name."""
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.fixture(scope="module")
async def engine(checkpoint: Path) -> AsyncIterator[RolloutEngine]:
    """An engine of two ranks that holds the checkpoint's first state."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        engine = RolloutEngine("pair", 2, make_receiver=FileReceiver)
        await engine.start()
    try:
        yield engine
    finally:
        await engine.aclose()


def running(pids: tuple[int, ...]) -> list[int]:
    found: list[int] = []
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, 0)
            found.append(pid)
    return found


async def test_dumps_and_responses_equal_the_reference_bit_for_bit(
    engine: RolloutEngine, run: TrainingRun, requests: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    dumps: list[EngineDump] = []
    answers: dict[tuple[int, int], bytes] = {}
    for version, state in enumerate(run.states):
        replies = await engine.call(receiver_call("load", str(state)))
        assert [msgspec.msgpack.decode(reply.result) for reply in replies] == ["pair.0", "pair.1"]
        for rank, path in enumerate(await engine.dump(tmp_path / f"v{version}")):
            dumps.append(EngineDump("pair", version, 2, rank, str(path)))
        for number, ids in enumerate(requests):
            answers[version, number] = await engine.embed(ids)
    spoiled = load_file(dumps[-1].path)
    spoiled["embeddings.word_embeddings.weight"][-1, -1] ^= 1
    save_file(spoiled, dumps[-1].path)

    job = ReferenceJob(
        states=tuple(SavedState(version, str(path)) for version, path in enumerate(run.states)),
        layouts=(1, 2),
        requests=requests,
        dumps=tuple(dumps),
        output=str(tmp_path / "report.json"),
    )
    report = await anyio.to_thread.run_sync(run_reference, job)

    assert {(e.version, e.request): e.bits for e in report.embeddings if e.world == 2} == answers
    assert len(report.embeddings) == 2 * len(answers)
    assert not report.indistinct
    assert len(report.compared) == len(dumps)
    assert [(m.version, m.rank, m.tensor, m.elements) for m in report.mismatches] == [
        (run.steps, 1, "embeddings.word_embeddings.weight", 1)
    ]


async def test_the_same_request_gives_the_same_bits(engine: RolloutEngine) -> None:
    answers = [await engine.embed(TOKENS) for _ in range(4)]
    assert len(set(answers)) == 1
    assert len(answers[0]) == 4 * 384


async def test_requests_and_calls_made_at_once_are_all_answered(engine: RolloutEngine) -> None:
    answers: list[bytes] = []

    async def ask() -> None:
        answers.append(await engine.embed(TOKENS))
        await engine.call(receiver_call("name"))

    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(ask)
    assert len(answers) == 8
    assert len(set(answers)) == 1


@pytest.mark.parametrize("token_ids", [(), (101, 30522, 102), (101, -1), (101,) * 513])
async def test_a_bad_request_is_refused_and_the_engine_serves_on(
    engine: RolloutEngine, token_ids: tuple[int, ...]
) -> None:
    with pytest.raises(UsageError):
        await engine.embed(token_ids)
    assert await engine.embed(TOKENS)


async def test_a_receivers_error_comes_back_by_class_from_every_rank(engine: RolloutEngine) -> None:
    replies = await engine.call(receiver_call("fail", "stray writes"))
    assert [(reply.error, reply.text) for reply in replies] == [("DigestMismatch", "stray writes")] * 2


async def test_a_killed_worker_fails_pending_and_later_calls_and_a_new_engine_takes_over(tmp_path: Path) -> None:
    """D1: one dead rank must not leave the others, or the caller, waiting."""
    lost: list[str] = []

    async def call(engine: RolloutEngine) -> None:
        with pytest.raises(PeerLost) as caught:
            await engine.call(receiver_call("hang", str(tmp_path / "inside")))
        lost.append(str(caught.value))

    async def embed(engine: RolloutEngine) -> None:
        with pytest.raises(PeerLost) as caught:
            await engine.embed(TOKENS)
        lost.append(str(caught.value))

    async with RolloutEngine("twins", 2, make_receiver=FileReceiver) as engine:
        pids = engine.pids
        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                group.start_soon(call, engine)
                # Only a file tells that the other processes are inside the call.
                while not all((tmp_path / f"inside.{rank}").exists() for rank in range(2)):  # noqa: ASYNC110
                    await anyio.sleep(0.005)
                group.start_soon(embed, engine)
                engine.kill(1)
            await embed(engine)
    assert len(lost) == 3
    assert all("rank 1 of engine 'twins'" in message for message in lost)
    assert not running(pids)
    async with RolloutEngine("twins", 2, make_receiver=FileReceiver) as engine:
        assert await engine.embed(TOKENS)
        assert not set(pids) & set(engine.pids)


async def test_a_worker_that_dies_while_idle_is_noticed_by_the_next_call() -> None:
    async with RolloutEngine("single", 1, make_receiver=FileReceiver) as engine:
        engine.kill(0)
        with pytest.raises(PeerLost, match="rank 0 of engine 'single'"):
            await engine.embed(TOKENS)


async def test_a_worker_that_does_not_answer_is_ended(tmp_path: Path) -> None:
    async with RolloutEngine("slow", 1, make_receiver=FileReceiver, timeout_s=0.5) as engine:
        pids = engine.pids
        with pytest.raises(PeerLost, match="did not answer"):
            await engine.call(receiver_call("hang", str(tmp_path / "inside")))
    assert not running(pids)


async def test_closing_ends_all_processes_and_is_idempotent() -> None:
    engine = RolloutEngine("brief", 2, make_receiver=FileReceiver)
    with pytest.raises(PeerLost, match="start it first"):
        await engine.embed(TOKENS)
    await engine.start()
    pids = engine.pids
    assert len(running(pids)) == 2
    assert os.getpid() not in pids
    await engine.aclose()
    await engine.aclose()
    assert not running(pids)
    with pytest.raises(PeerLost, match="closed"):
        await engine.embed(TOKENS)


async def test_a_worker_that_cannot_be_set_up_says_why() -> None:
    engine = RolloutEngine("broken", 1, make_receiver=BrokenReceiver)
    with pytest.raises(UsageError, match=r"receiver broken\.0 has no place"):
        await engine.start()
    assert engine.pids == ()


async def test_bf16_storage_is_dumped_with_every_reachable_tensor(engine: RolloutEngine, tmp_path: Path) -> None:
    for path in await engine.dump(tmp_path / "all"):
        tensors = load_file(path)
        assert tensors["embeddings.position_ids"].dtype == torch.int64
        assert tensors["embeddings.word_embeddings.weight"].dtype == torch.int16
        assert tensors["encoder.layer.0.attention.self.qkv_proj.weight"].shape == (576, 384)
