"""The model as a serving runtime holds it: fused QKV, tensor-parallel slices, padded vocabulary, BF16 storage.

Layers follow vLLM's ``layers/linear.py`` and ``vocab_parallel_embedding.py``: a layer knows its slice of the
canonical tensor and places it with ``copy_``. Arithmetic is fp32 on weights that are upcast at each use, so a
response depends on the stored bits, the tensor-parallel layout and the request only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

from dcr_stream.loaders import reachable_tensors

__all__ = ["ModelConfig", "Reduce", "RolloutModel", "bits", "snapshot"]

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over the tensor-parallel ranks, in place, and returns it."""


class ModelConfig(msgspec.Struct, frozen=True):
    """Sizes of a BERT encoder, under the names of a checkpoint's ``config.json``."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float

    @classmethod
    def read(cls, folder: Path) -> ModelConfig:
        """The configuration of the checkpoint in ``folder``."""
        return msgspec.json.decode((folder / "config.json").read_bytes(), type=cls)


class Split:
    """This rank's share of a dimension: tensor-parallel rank ``rank`` of ``world``."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world

    def size(self, total: int) -> int:
        """Entries per rank of a dimension that every rank holds an equal part of."""
        if total % self.world:
            raise ValueError(f"{total} entries cannot be split over {self.world} tensor-parallel ranks")
        return total // self.world

    def of(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's part of ``tensor``."""
        part = self.size(tensor.shape[dim])
        return tensor.narrow(dim, self.rank * part, part)


def _storage(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)


def _place(destination: Tensor, loaded: Tensor) -> None:
    # copy_ would broadcast a tensor of another shape.
    if destination.shape != loaded.shape:
        raise ValueError(f"a part of shape {tuple(loaded.shape)} does not fit storage {tuple(destination.shape)}")
    destination.copy_(loaded)


class Layer(nn.Module):
    """A layer whose storage holds whole canonical tensors; subclasses hold slices."""

    def load(self, leaf: str, loaded: Tensor, shard: str | None = None) -> None:
        """Place the canonical tensor ``leaf`` (``shard`` of it, in a fused layer)."""
        _place(self.get_parameter(leaf), loaded)


class Linear(Layer):
    """A replicated linear layer."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = _storage(outputs, inputs)
        self.bias = _storage(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """fp32 in, fp32 out."""
        return functional.linear(x, self.weight.float(), self.bias.float())


class ColumnLinear(Linear):
    """Output features split over the ranks."""

    def __init__(self, inputs: int, outputs: int, split: Split) -> None:
        super().__init__(inputs, split.size(outputs))
        self._split = split

    def load(self, leaf: str, loaded: Tensor, shard: str | None = None) -> None:
        """Place this rank's rows."""
        _place(self.get_parameter(leaf), self._split.of(loaded, 0))


class QKVLinear(Linear):
    """Query, key and value in one storage: this rank's heads of each, one after the other."""

    shards = ("query", "key", "value")

    def __init__(self, hidden: int, split: Split) -> None:
        super().__init__(hidden, len(self.shards) * split.size(hidden))
        self._split = split

    def load(self, leaf: str, loaded: Tensor, shard: str | None = None) -> None:
        """Place this rank's rows of ``shard``."""
        assert shard is not None
        rows = self.get_parameter(leaf).chunk(len(self.shards))[self.shards.index(shard)]
        _place(rows, self._split.of(loaded, 0))


class RowLinear(Layer):
    """Input features split over the ranks; results are summed before the bias, which every rank holds."""

    def __init__(self, inputs: int, outputs: int, split: Split, reduce: Reduce) -> None:
        super().__init__()
        self.weight = _storage(outputs, split.size(inputs))
        self.bias = _storage(outputs)
        self._split = split
        self._reduce = reduce

    def load(self, leaf: str, loaded: Tensor, shard: str | None = None) -> None:
        """Place this rank's columns of the weight, or the bias."""
        _place(self.get_parameter(leaf), self._split.of(loaded, 1) if leaf == "weight" else loaded)

    def forward(self, x: Tensor) -> Tensor:
        """fp32 in, fp32 out; a collective call."""
        return self._reduce(functional.linear(x, self.weight.float())) + self.bias.float()


class Embedding(Layer):
    """A replicated table."""

    def __init__(self, entries: int, hidden: int) -> None:
        super().__init__()
        self.weight = _storage(entries, hidden)

    def forward(self, ids: Tensor) -> Tensor:
        """Rows as fp32."""
        return self.weight[ids].float()


class VocabularyEmbedding(Layer):
    """A table split by rows, padded so that every rank holds the same multiple of 64 rows."""

    multiple = 64

    def __init__(self, entries: int, hidden: int, split: Split, reduce: Reduce) -> None:
        super().__init__()
        block = self.multiple * split.world
        self.rows = split.size(math.ceil(entries / block) * block)
        self.weight = _storage(self.rows, hidden)
        self._start = split.rank * self.rows
        self._reduce = reduce

    def load(self, leaf: str, loaded: Tensor, shard: str | None = None) -> None:
        """Place this rank's rows and fill its padding with zeros."""
        weight = self.get_parameter(leaf)
        rows = loaded[self._start : self._start + self.rows]
        _place(weight[: len(rows)], rows)
        weight[len(rows) :].fill_(0)

    def forward(self, ids: Tensor) -> Tensor:
        """Rows as fp32; a collective call."""
        local = ids - self._start
        elsewhere = (local < 0) | (local >= self.rows)
        rows = self.weight[local.masked_fill(elsewhere, 0)].float()
        return self._reduce(rows.masked_fill(elsewhere[:, None], 0.0))


class LayerNorm(Layer):
    """Layer normalisation in fp32."""

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.weight = _storage(hidden)
        self.bias = _storage(hidden)
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """fp32 in, fp32 out."""
        return functional.layer_norm(x, x.shape[-1:], self.weight.float(), self.bias.float(), self._eps)


class Embeddings(Layer):
    """Sum of token, position and type embeddings, normalised."""

    position_ids: Tensor

    def __init__(self, config: ModelConfig, split: Split, reduce: Reduce) -> None:
        super().__init__()
        self.word_embeddings = VocabularyEmbedding(config.vocab_size, config.hidden_size, split, reduce)
        self.position_embeddings = Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.register_buffer("position_ids", torch.zeros(1, config.max_position_embeddings, dtype=torch.int64))

    def load(self, leaf: str, loaded: Tensor, shard: str | None = None) -> None:
        """Place the position ids, which are part of the checkpoint."""
        _place(self.get_buffer(leaf), loaded)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids of one sequence → hidden states."""
        positions = self.position_ids[0, : len(ids)]
        types = self.token_type_embeddings(torch.zeros_like(ids))
        return self.LayerNorm(self.word_embeddings(ids) + types + self.position_embeddings(positions))  # type: ignore[no-any-return]


class SelfAttention(nn.Module):
    """Attention over this rank's heads."""

    def __init__(self, config: ModelConfig, split: Split) -> None:
        super().__init__()
        self.qkv_proj = QKVLinear(config.hidden_size, split)
        self._heads = split.size(config.num_attention_heads)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states of one sequence → this rank's part of the context."""
        q, k, v = (t.unflatten(1, (self._heads, -1)).transpose(0, 1) for t in self.qkv_proj(x).chunk(3, 1))
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
        return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)  # type: ignore[no-any-return]


class RowOutput(nn.Module):
    """A row-parallel projection, added to its input's residual and normalised."""

    def __init__(self, inputs: int, config: ModelConfig, split: Split, reduce: Reduce) -> None:
        super().__init__()
        self.dense = RowLinear(inputs, config.hidden_size, split, reduce)
        self.LayerNorm = LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """fp32 in, fp32 out; a collective call."""
        return self.LayerNorm(self.dense(x) + residual)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Self-attention and its output projection."""

    def __init__(self, config: ModelConfig, split: Split, reduce: Reduce) -> None:
        super().__init__()
        self.self = SelfAttention(config, split)
        self.output = RowOutput(config.hidden_size, config, split, reduce)


class Intermediate(nn.Module):
    """First half of the feed-forward block."""

    def __init__(self, config: ModelConfig, split: Split) -> None:
        super().__init__()
        self.dense = ColumnLinear(config.hidden_size, config.intermediate_size, split)


class Block(nn.Module):
    """One encoder layer."""

    def __init__(self, config: ModelConfig, split: Split, reduce: Reduce) -> None:
        super().__init__()
        self.attention = Attention(config, split, reduce)
        self.intermediate = Intermediate(config, split)
        self.output = RowOutput(config.intermediate_size, config, split, reduce)

    def forward(self, x: Tensor) -> Tensor:
        """fp32 in, fp32 out; a collective call."""
        x = self.attention.output(self.attention.self(x), x)
        return self.output(functional.gelu(self.intermediate.dense(x)), x)  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """The encoder layers."""

    def __init__(self, config: ModelConfig, split: Split, reduce: Reduce) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Block(config, split, reduce) for _ in range(config.num_hidden_layers))


class Pooler(nn.Module):
    """The checkpoint's pooler: loaded, since it is part of the policy; sentence embeddings do not use it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size)


class RolloutModel(nn.Module):
    """One tensor-parallel rank of all-MiniLM-L6-v2 for inference.

    Args:
        config: sizes.
        rank, world: the tensor-parallel rank; heads and intermediate size must be divisible by ``world``.
        all_reduce: sums over the ranks of the engine; the identity for one rank.
    """

    def __init__(
        self, config: ModelConfig, *, rank: int = 0, world: int = 1, all_reduce: Reduce = lambda tensor: tensor
    ) -> None:
        super().__init__()
        split = Split(rank, world)
        self.embeddings = Embeddings(config, split, all_reduce)
        self.encoder = Encoder(config, split, all_reduce)
        self.pooler = Pooler(config)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Place canonical tensors (complete, any order, any subset) and return the names that were placed.

        Raises:
            ValueError: a name has no place here, or a shape does not fit.
        """
        loaded: set[str] = set()
        for name, tensor in weights:
            path, _, leaf = name.rpartition(".")
            parent, _, last = path.rpartition(".")
            fused = last in QKVLinear.shards
            try:
                layer = self.get_submodule(f"{parent}.qkv_proj" if fused else path)
            except AttributeError as error:
                raise ValueError(f"tensor {name!r} has no place in this model") from error
            if not isinstance(layer, Layer):
                raise ValueError(f"tensor {name!r} has no place in this model")
            try:
                layer.load(leaf, tensor, last if fused else None)
            except (AttributeError, ValueError) as error:
                raise ValueError(f"tensor {name!r} of shape {tuple(tensor.shape)} cannot be placed: {error}") from error
            loaded.add(name)
        return loaded

    @torch.inference_mode()
    def forward(self, ids: Tensor) -> Tensor:
        """Sentence embedding (fp32, length ``hidden``, norm 1) of one sequence of token ids (int64, 1-dim).

        A collective call: every rank of the engine must make it with the same ids; all get the same bits.
        """
        x = self.embeddings(ids)
        for block in self.encoder.layer:
            x = block(x)
        return functional.normalize(x.mean(0), dim=0)


def bits(tensor: Tensor) -> Tensor:
    """A contiguous copy of a tensor's bits as integers of the same width and shape."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(integers[tensor.element_size()])


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    """Bits of every tensor reachable from the module by path: parameters, buffers, and tensors in plain attributes.

    Padding is included. Shares no memory with the module.
    """
    return {path: bits(tensor) for path, tensor in reachable_tensors(module).items()}
