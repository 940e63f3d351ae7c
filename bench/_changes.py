"""Weights before and after a step, as BF16 words: what ``bench.codec`` works on."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dcr_stream.canonical import Words
from dcr_stream.codec import words

__all__ = ["bf16", "noisy", "paper_recipe", "real_trace", "with_rate"]

CACHE = Path(__file__).parents[1] / "build" / "bench"


def bf16(values: NDArray[np.float32]) -> Words:
    """Nearest BF16 (ties to even), as words."""
    bits = values.view(np.uint32)
    rounded: Words = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return rounded


def floats(words: Words) -> NDArray[np.float32]:
    """BF16 words as float32."""
    return (words.astype(np.uint32) << 16).view(np.float32)


def normals(rng: np.random.Generator, count: int, deviation: float) -> NDArray[np.float32]:
    """Normal float32 numbers."""
    drawn = rng.standard_normal(count, np.float32)
    drawn *= np.float32(deviation)
    return drawn


def paper_recipe(elements: int, rate: float, seed: int) -> tuple[Words, Words]:
    """Old and new words of a normal tensor where *exactly* ``rate`` of the stored words differ.

    The paper's stress recipe: uniform over the shard, relative noise of amplitude 1e-2. Noise that rounds to the old
    word is drawn again, so that the rate counts stored bits.
    """
    rng = np.random.default_rng(seed)
    old = bf16(normals(rng, elements, 0.02))
    new = old.copy()
    todo = np.sort(rng.choice(elements, round(elements * rate), replace=False, shuffle=False))
    while todo.size:
        known = floats(old[todo])
        drawn = bf16((known + known * normals(rng, todo.size, 1e-2)).astype(np.float32))
        new[todo] = drawn
        todo = todo[drawn == old[todo]]
    return old, new


def with_rate(old: Words, differences: Words, rate: float, seed: int) -> Words:
    """``old`` with ``rate`` of its words changed by differences drawn from ``differences``."""
    rng = np.random.default_rng(seed)
    new = old.copy()
    chosen = np.flatnonzero(rng.random(old.size, np.float32) < rate) if rate < 1 else np.arange(old.size)
    new[chosen] += rng.choice(differences, chosen.size)
    return new


def noisy(elements: int, amplitude: float, seed: int = 0) -> tuple[Words, Words]:
    """The paper's Table 2: standard normals, and the same with noise of standard deviation ``amplitude``."""
    rng = np.random.default_rng(seed)
    old = bf16(normals(rng, elements, 1.0))
    return old, bf16(floats(old) + normals(rng, elements, amplitude))


def real_trace(steps: int = 20) -> tuple[Words, Words]:
    """All BF16 words of all-MiniLM-L6-v2 after ``steps`` and after one more AdamW step; kept in ``build/bench``."""
    kept = CACHE / f"minilm-{steps}.npz"
    if not kept.exists():
        from dcr_stream.cli.demo.training import Trainer

        with tempfile.TemporaryDirectory() as folder:
            trainer = Trainer(0, 1, Path(folder) / "store")
            versions = []
            for step in range(steps + 1):
                trainer.step()
                if step >= steps - 1:
                    weights = (t for t in trainer.policy.values() if t.dtype == torch.bfloat16)
                    versions.append(np.concatenate([words(t).copy() for t in weights]))
        CACHE.mkdir(parents=True, exist_ok=True)
        np.savez(kept, old=versions[0], new=versions[1])
    with np.load(kept) as stored:
        return stored["old"], stored["new"]
