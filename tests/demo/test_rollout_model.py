from __future__ import annotations

import json
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dcr_stream.cli.demo.collective import Collective
from dcr_stream.cli.demo.rollout_model import ModelConfig, RolloutModel, bits, snapshot
from tests.demo.conftest import TrainingRun

TOKENS = (101, 1037, 3712, 7205, 102)


@pytest.fixture(scope="module")
def config(checkpoint: Path) -> ModelConfig:
    return ModelConfig.read(checkpoint)


@pytest.fixture(scope="module")
def state(checkpoint: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(checkpoint / "model.safetensors")
    return {name: t.bfloat16() if t.is_floating_point() else t for name, t in tensors.items()}


@pytest.fixture(scope="module")
def model(config: ModelConfig, state: dict[str, torch.Tensor]) -> RolloutModel:
    model = RolloutModel(config)
    assert model.load_weights(state.items()) == set(state)
    return model


def test_embeddings_match_transformers_on_the_same_bf16_weights(
    checkpoint: Path, state: dict[str, torch.Tensor], model: RolloutModel
) -> None:
    from transformers.models.bert.configuration_bert import BertConfig
    from transformers.models.bert.modeling_bert import BertModel

    reference = BertModel(BertConfig(**json.loads((checkpoint / "config.json").read_text())))
    reference.load_state_dict({name: t.float() for name, t in state.items()}, strict=False)
    reference.eval()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        hidden = reference(input_ids=torch.tensor([TOKENS])).last_hidden_state[0].mean(0)
    torch.testing.assert_close(model(torch.tensor(TOKENS)), hidden / hidden.norm(), atol=1e-6, rtol=1e-4)


def test_two_tensor_parallel_ranks_compute_what_one_does(
    config: ModelConfig, state: dict[str, torch.Tensor], model: RolloutModel, tmp_path: Path
) -> None:
    answers: dict[int, torch.Tensor] = {}

    def rank(number: int) -> None:
        group = Collective(tmp_path / "ranks", number, 2)
        part = RolloutModel(config, rank=number, world=2, all_reduce=group.all_reduce)
        part.load_weights(state.items())
        answers[number] = part(torch.tensor(TOKENS))

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(bits(answers[0]), bits(answers[1]))
    torch.testing.assert_close(answers[0], model(torch.tensor(TOKENS)), atol=1e-6, rtol=1e-4)


def test_every_request_has_other_bits_at_the_next_version(
    run: TrainingRun, config: ModelConfig, requests: tuple[tuple[int, ...], ...]
) -> None:
    answers: list[list[bytes]] = []
    for path in run.states:
        served = RolloutModel(config)
        served.load_weights(load_file(path).items())
        answers.append([served(torch.tensor(ids)).numpy().tobytes() for ids in requests])
    for before, after in pairwise(answers):
        assert all(old != new for old, new in zip(before, after, strict=True))


def test_all_ranks_together_hold_every_element(config: ModelConfig, state: dict[str, torch.Tensor]) -> None:
    ranks = [RolloutModel(config, rank=rank, world=2) for rank in range(2)]
    for part in ranks:
        part.load_weights(state.items())
    block = "encoder.layer.3.attention"
    fused = [part.get_parameter(f"{block}.self.qkv_proj.weight").chunk(3) for part in ranks]
    for index, name in enumerate(("query", "key", "value")):
        whole = torch.cat([fused[0][index], fused[1][index]])
        assert torch.equal(bits(whole), bits(state[f"{block}.self.{name}.weight"]))
    columns = torch.cat([part.get_parameter(f"{block}.output.dense.weight") for part in ranks], dim=1)
    assert torch.equal(bits(columns), bits(state[f"{block}.output.dense.weight"]))
    rows = torch.cat([part.get_parameter("embeddings.word_embeddings.weight") for part in ranks])
    assert torch.equal(bits(rows[: config.vocab_size]), bits(state["embeddings.word_embeddings.weight"]))


@pytest.mark.parametrize("world", [1, 2])
def test_loading_fills_padding_and_snapshot_covers_it(
    config: ModelConfig, state: dict[str, torch.Tensor], world: int
) -> None:
    """B23: storage is larger than the canonical tensor; what lies behind it is part of the comparison."""
    name = "embeddings.word_embeddings.weight"
    model = RolloutModel(config, rank=world - 1, world=world)
    storage = model.get_parameter(name)
    assert storage.shape[0] * world % (64 * world) == 0
    assert storage.shape[0] * world > config.vocab_size
    storage.fill_(-0.0)
    model.load_weights([(name, state[name])])
    clean = snapshot(model)
    assert not clean[name][-(storage.shape[0] * world - config.vocab_size) :].any()
    storage[-1, -1] = -0.0
    dirty = snapshot(model)
    assert [key for key in clean if not torch.equal(clean[key], dirty[key])] == [name]


class Derived(nn.Module):
    """Holds weights where neither parameters nor buffers are looked for."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(2, 2)
        self.cache = {"absorbed": [torch.ones(2, dtype=torch.bfloat16)], "epoch": 3}
        self.alias = [self.dense.weight.detach()]
        self.register_buffer("scale", torch.tensor(1.0), persistent=False)


def test_snapshot_reaches_parameters_buffers_and_tensors_in_plain_attributes() -> None:
    found = snapshot(nn.ModuleDict({"block": Derived()}))
    assert found.keys() == {
        "block.dense.weight",
        "block.dense.bias",
        "block.cache.absorbed.0",
        "block.alias.0",
        "block.scale",
    }
    assert torch.equal(found["block.alias.0"], found["block.dense.weight"])
    assert found["block.scale"].dtype == torch.int32


def test_snapshot_compares_bits_and_not_values() -> None:
    zeros = torch.tensor([0.0, float("nan")]), torch.tensor([-0.0, float("nan")])
    assert (bits(zeros[0]) != bits(zeros[1])).tolist() == [True, False]
    assert bits(torch.tensor(True)).dtype == torch.uint8
    assert bits(torch.ones(3, 2).t()).is_contiguous()


@pytest.mark.parametrize(
    "name", ["encoder.layer.6.output.dense.weight", "lm_head.weight", "embeddings.weight", "encoder.weight", "weight"]
)
def test_an_unknown_name_is_refused(model: RolloutModel, name: str) -> None:
    """B13: a name without a place is an error that names it."""
    with pytest.raises(ValueError, match=name):
        model.load_weights([(name, torch.zeros(384))])


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("pooler.dense.bias", (1,)),
        ("encoder.layer.0.attention.self.query.bias", (192,)),
        ("embeddings.word_embeddings.weight", (30522, 1)),
    ],
)
def test_a_shape_that_copy_would_broadcast_is_refused(model: RolloutModel, name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=name):
        model.load_weights([(name, torch.zeros(shape))])
