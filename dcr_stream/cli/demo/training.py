"""The trainer: real AdamW steps on fp32 masters of all-MiniLM-L6-v2, data-parallel, published as BF16."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers.models.bert.configuration_bert import BertConfig
from transformers.models.bert.modeling_bert import BertModel

from dcr_stream.cli.demo.collective import Collective
from dcr_stream.cli.demo.text import MASK_TOKEN, checkpoint_path, load_tokenizer, training_tokens

__all__ = ["Trainer"]


class Trainer:
    """One data-parallel training rank with the whole model.

    Every rank draws its own text, gradients are averaged over the ranks, and since all ranks then do the same
    arithmetic their masters stay equal bit for bit.

    Attributes:
        policy: canonical name → the live tensor that rollout must get: BF16 copies of the masters, and the
            checkpoint's integer tensors as they are. The tensor objects stay the same; ``step`` refreshes them.

    Args:
        rank, world: this rank among the data-parallel ranks.
        store: rendezvous file of the ranks (see :class:`Collective`).
        seed: decides the text and the masks, together with the rank.
        batch, length: sequences per rank and step, and their tokens.
        timeout_s: how long a rank waits for the others.
    """

    lr = 1e-6
    weight_decay = 0.01
    masked_share = 0.2
    # Embeddings of the tied output layer are small: without a temperature the softmax would be almost flat.
    logit_scale = 4.0

    def __init__(
        self,
        rank: int,
        world: int,
        store: Path,
        *,
        seed: int = 0,
        batch: int = 4,
        length: int = 64,
        timeout_s: float = 60.0,
    ) -> None:
        folder = checkpoint_path()
        tokenizer = load_tokenizer()
        mask = tokenizer.token_to_id(MASK_TOKEN)
        assert mask is not None
        self._mask_token: int = mask
        self._tokens = torch.tensor(training_tokens(tokenizer))
        self._shape = (batch, length)
        self._random = torch.Generator().manual_seed(seed * world + rank)
        self._collective = Collective(store, rank, world, timeout_s=timeout_s)
        checkpoint = load_file(folder / "model.safetensors")
        config = BertConfig(**json.loads((folder / "config.json").read_text()))
        config._attn_implementation = "eager"
        self.model = BertModel(config)
        self.model.load_state_dict(checkpoint, strict=False)
        # Dropout off: what is served is what is trained.
        self.model.eval()  # type: ignore[no-untyped-call]
        masters = dict(self.model.named_parameters())
        self._integers = {name: t for name, t in checkpoint.items() if not t.is_floating_point()}
        if masters.keys() | self._integers.keys() != checkpoint.keys():
            raise RuntimeError("this version of transformers names BertModel's parameters unlike the checkpoint")
        self._gradients = _flat_gradients(list(masters.values()))
        self._optimizer = torch.optim.AdamW(masters.values(), lr=self.lr, weight_decay=self.weight_decay)
        self.policy: dict[str, torch.Tensor] = {
            name: self._integers[name].clone() if name in self._integers else masters[name].detach().bfloat16()
            for name in checkpoint
        }

    def step(self) -> float:
        """Take one AdamW step on masked-token prediction, refresh ``policy`` and return this rank's loss.

        Raises:
            PeerLost: another rank left.
        """
        loss = self._loss()
        self._gradients.zero_()
        loss.backward()  # type: ignore[no-untyped-call]
        self._collective.all_reduce(self._gradients).div_(self._collective.world)
        self._gradients.div_(self._gradients.norm().clamp(min=1.0))
        self._optimizer.step()
        with torch.no_grad():
            for name, master in self.model.named_parameters():
                self.policy[name].copy_(master)
        return float(loss.detach())

    def agree(self, ok: bool) -> bool:
        """Whether every training rank says ``ok``; a collective call."""
        return self._collective.agree(ok)

    def bf16_state(self) -> dict[str, torch.Tensor]:
        """The canonical state dict now, in the checkpoint's order, made from the model's own ``state_dict``.

        Shares no memory with ``policy``, so that it can judge what was made from ``policy``.
        """
        masters = self.model.state_dict()
        return {
            name: self._integers[name].clone() if name in self._integers else masters[name].to(torch.bfloat16)
            for name in self.policy
        }

    def save(self, path: Path) -> None:
        """Write :meth:`bf16_state` as a safetensors file."""
        save_file(self.bf16_state(), path)

    def _loss(self) -> torch.Tensor:
        batch, length = self._shape
        starts = torch.randint(0, len(self._tokens) - length, (batch,), generator=self._random)
        target = self._tokens[starts[:, None] + torch.arange(length)]
        masked = torch.rand(batch, length, generator=self._random) < self.masked_share
        hidden = self.model(input_ids=target.masked_fill(masked, self._mask_token)).last_hidden_state[masked]
        logits = hidden @ self.model.embeddings.word_embeddings.weight.T * self.logit_scale
        return torch.nn.functional.cross_entropy(logits, target[masked])


def _flat_gradients(parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    """One buffer whose parts are the parameters' gradients: one all-reduce for all, nothing to copy."""
    flat = torch.zeros(sum(p.numel() for p in parameters))
    start = 0
    for parameter in parameters:
        parameter.grad = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    return flat
