from __future__ import annotations

import math
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from dcr_stream.cli.demo.collective import Collective
from dcr_stream.cli.demo.rollout_model import bits
from dcr_stream.errors import PeerLost
from tests.demo.conftest import TrainingRun


def test_masters_stay_identical_on_all_ranks(run: TrainingRun) -> None:
    first, second = (run.trainers[rank].model.state_dict() for rank in range(2))
    assert first.keys() == second.keys()
    for name, master in first.items():
        assert torch.equal(bits(master), bits(second[name])), name
    assert all(math.isfinite(loss) for loss in run.losses)


def test_a_step_changes_a_small_share_of_bf16_elements(run: TrainingRun) -> None:
    states = [load_file(path) for path in run.states]
    for before, after in pairwise(states):
        changed = sum(int((bits(before[name]) != bits(after[name])).sum()) for name in before)
        assert 0.0005 < changed / sum(t.numel() for t in before.values()) < 0.05


def test_policy_has_the_checkpoints_names_in_bf16_and_integers_as_they_are(run: TrainingRun, checkpoint: Path) -> None:
    policy = run.trainers[0].policy
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        assert policy.keys() == set(file.keys())
        for name, tensor in policy.items():
            assert tuple(tensor.shape) == tuple(file.get_slice(name).get_shape())
    assert {name for name, t in policy.items() if t.dtype != torch.bfloat16} == {"embeddings.position_ids"}
    assert policy["embeddings.position_ids"].dtype == torch.int64


def test_policy_is_refreshed_in_place_and_equals_the_state_dict(run: TrainingRun) -> None:
    for trainer in run.trainers.values():
        state = trainer.bf16_state()
        saved = load_file(run.states[-1])
        for name, tensor in trainer.policy.items():
            assert torch.equal(bits(tensor), bits(state[name])), name
            assert torch.equal(bits(saved[name]), bits(state[name])), name
            assert state[name].data_ptr() != tensor.data_ptr()
    assert run.pointers in [
        {name: tensor.data_ptr() for name, tensor in trainer.policy.items()} for trainer in run.trainers.values()
    ]


def test_agreement_needs_every_rank(tmp_path: Path) -> None:
    answers: dict[tuple[int, bool], bool] = {}

    def rank(number: int) -> None:
        group = Collective(tmp_path / "ranks", number, 2)
        answers[number, True] = group.agree(True)
        answers[number, False] = group.agree(number == 0)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {(0, True): True, (0, False): False, (1, True): True, (1, False): False}


def test_a_peer_that_never_comes_is_lost_in_bounded_time(tmp_path: Path) -> None:
    with pytest.raises(PeerLost, match="rank 0 of 2"):
        Collective(tmp_path / "ranks", 0, 2, timeout_s=0.1)
