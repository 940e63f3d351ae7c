"""How many stored BF16 words does a step of training change? The paper's Figure 2, on a small model.

all-MiniLM-L6-v2 (22.7 million parameters) is trained as in the demonstration: masked-token prediction on English text,
AdamW at a constant learning rate of 1e-6 without warm-up, weight decay 0.01, gradients clipped to norm 1, fp32 masters
that are rounded to BF16 after every step. The masters start from the fp32 checkpoint, so that they do not lie on the
BF16 grid. Step k compares all BF16 words after step k with those after step k - 1.

- ``rate_first``, ``rate_min``, ``rate_median``, ``rate_max``, ``rate_last``: share of all words that differ, over the
  steps. Right after the start AdamW moves every weight by about the learning rate, whatever its gradient: the first
  rate is not typical.
- ``ulp_share_min``, ``ulp_share_median``: share of the changed words that moved to the next word up or down, as
  integers.
- ``loss_ratio``: mean loss of the last quarter of the steps over that of the first. Every step draws new text.
- ``steps``, ``elements``: what was measured.

No times are measured. The series of all steps is kept in ``build/bench/rates-STEPS.json``.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from statistics import mean, median

import numpy as np
import torch

from bench._changes import CACHE
from bench._report import Figures, Targets, report
from dcr_stream.canonical import Words
from dcr_stream.cli.demo.training import Trainer
from dcr_stream.codec import words

TARGETS: Targets = {
    "rate_max": ("<=", 0.05),  # what the codec is laid out for: the paper's larger stress case
    "ulp_share_median": (">=", 0.6),  # from here on, ``add`` takes 2-bit codes
    "loss_ratio": ("<", 1.0),
}


def bf16_words(trainer: Trainer) -> Words:
    """All BF16 words of the policy."""
    return np.concatenate([words(t).reshape(-1) for t in trainer.policy.values() if t.dtype == torch.bfloat16])


def series(steps: int) -> dict[str, list[float]]:
    """Change rate, share of changes by one unit in the last place, and loss of every step."""
    found: dict[str, list[float]] = {"rate": [], "ulp_share": [], "loss": []}
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(0, 1, Path(folder) / "store")
        old = bf16_words(trainer)
        for _ in range(steps):
            found["loss"].append(round(trainer.step(), 4))
            new = bf16_words(trainer)
            differences = new - old
            changed = int(np.count_nonzero(differences))
            ulps = int(np.count_nonzero((differences == 1) | (differences == 0xFFFF)))
            found["rate"].append(round(changed / new.size, 6))
            found["ulp_share"].append(round(ulps / changed, 4))
            old = new
    found["elements"] = [float(old.size)]
    return found


def measure(quick: bool) -> Figures:
    """All figures."""
    steps = 20 if quick else 200
    found = series(steps)
    CACHE.mkdir(parents=True, exist_ok=True)
    (CACHE / f"rates-{steps}.json").write_text(json.dumps(found) + "\n")
    rate, ulps, loss, quarter = found["rate"], found["ulp_share"], found["loss"], steps // 4
    return {
        "rate_first": rate[0],
        "rate_min": min(rate),
        "rate_median": median(rate),
        "rate_max": max(rate),
        "rate_last": rate[-1],
        "ulp_share_min": min(ulps),
        "ulp_share_median": median(ulps),
        "loss_ratio": mean(loss[-quarter:]) / mean(loss[:quarter]),
        "steps": steps,
        "elements": found["elements"][0],
    }


if __name__ == "__main__":
    sys.exit(report("Change rate of BF16 words, step by step", measure, TARGETS))
