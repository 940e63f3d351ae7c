"""A small model whose loader works as serving runtimes' loaders do, for tests of everything above it.

Canonical names and shapes are a Hugging Face checkpoint's; storage is fused, padded, replicated and sliced for one
rank of a tensor-parallel engine. Written from ``load_weights`` methods of vLLM models, and independent of the library.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dcr_stream.canonical import Region, TensorDirectory, TensorSpec
from dcr_stream.codec import Decoded, dtype_name, state_sum, words
from dcr_stream.codec.positions import encode_positions
from dcr_stream.delta import EntryMode, Item
from dcr_stream.loaders import TorchLoader, reachable_tensors

__all__ = [
    "NativeConfig",
    "NativeModel",
    "directory_of",
    "equal_bits",
    "items_between",
    "load_dense",
    "make_checkpoint",
    "random_delta",
    "snapshot",
    "torch_loader",
]

Checkpoint = dict[str, torch.Tensor]

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class NativeConfig:
    """Sizes of the model. ``heads`` and ``ffn`` divide by every world size used; ``kv_heads`` may be fewer."""

    hidden: int = 16
    layers: int = 2
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 4
    ffn: int = 16
    vocab: int = 37
    pad_vocab_to: int = 8
    experts: int = 3
    tied: bool = True
    """Embedding and output head are one parameter."""
    export_tied: bool = False
    """The checkpoint has both names of the tied parameter."""


class NativeModel(nn.Module):
    """One rank's storage. Nothing but ``load_weights`` knows canonical names."""

    inv_freq: torch.Tensor

    def __init__(self, config: NativeConfig | None = None, rank: int = 0, world: int = 1) -> None:
        super().__init__()
        self.config = c = config or NativeConfig()
        self.rank, self.world = rank, world
        rows = -(-c.vocab // (c.pad_vocab_to * world)) * c.pad_vocab_to
        self.vocab_rows = rows
        self.embed_tokens = _weight(rows, c.hidden)
        self.lm_head = self.embed_tokens if c.tied else _weight(rows, c.hidden)
        self.layers = nn.ModuleList(_Layer(c, rank, world) for _ in range(c.layers))
        self.norm = _weight(c.hidden)
        self.logit_scale = nn.Parameter(torch.full((), 1.0), requires_grad=False)
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, c.head_dim, 2) / c.head_dim), persistent=False)
        self.register_buffer("token_count", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("token_mask", torch.zeros(c.vocab, dtype=torch.bool))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Place canonical tensors; returns the runtime names written."""
        done = set()
        for name, tensor in weights:
            if name in ("embed_tokens.weight", "lm_head.weight"):
                self._load_vocab(self.embed_tokens if name[0] == "e" else self.lm_head, tensor)
            elif name in ("norm.weight", "logit_scale", "token_count", "token_mask"):
                getattr(self, name.removesuffix(".weight")).copy_(tensor)
            elif name.startswith("layers."):
                _, index, rest = name.split(".", 2)
                layer = self.layers[int(index)]
                assert isinstance(layer, _Layer)
                layer.load(rest, tensor)
            else:
                raise ValueError(f"there is no module or parameter named {name!r}")
            done.add(name)
        return done

    def _load_vocab(self, parameter: nn.Parameter, tensor: torch.Tensor) -> None:
        lo = self.rank * self.vocab_rows
        part = tensor[lo : lo + self.vocab_rows]
        parameter[: part.shape[0]].copy_(part)
        parameter[part.shape[0] :].fill_(0)


class _Layer(nn.Module):
    def __init__(self, c: NativeConfig, rank: int, world: int) -> None:
        super().__init__()
        self.c, self.rank, self.world = c, rank, world
        self.q_rows = c.heads // world * c.head_dim
        self.kv_rows = max(c.kv_heads // world, 1) * c.head_dim
        self.ffn = c.ffn // world
        self.qkv_proj = _weight(self.q_rows + 2 * self.kv_rows, c.hidden)
        self.qkv_bias = _weight(self.q_rows + 2 * self.kv_rows)
        self.o_proj = _weight(c.hidden, self.q_rows)
        self.gate_up_proj = _weight(2 * self.ffn, c.hidden)
        self.down_proj = _weight(c.hidden, self.ffn)
        self.input_norm = _weight(c.hidden)
        self.router = _weight(c.experts, c.hidden)
        self.router_bias = _weight(c.experts, dtype=torch.float32)
        self.w13 = _weight(c.experts, 2 * self.ffn, c.hidden)
        self.w2 = _weight(c.experts, c.hidden, self.ffn)
        self.A = _weight(c.heads // world, dtype=torch.float32)
        self.kv_scales = _weight(c.heads, dtype=torch.float8_e4m3fn)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        parts = name.split(".")
        if parts[0] == "self_attn" and parts[1] in ("q_proj", "k_proj", "v_proj"):
            self._load_qkv(self.qkv_proj if parts[2] == "weight" else self.qkv_bias, parts[1][0], tensor)
        elif name == "self_attn.o_proj.weight":
            self.o_proj.copy_(tensor.narrow(1, self.rank * self.q_rows, self.q_rows))
        elif name in ("mlp.gate_proj.weight", "mlp.up_proj.weight"):
            half = self.gate_up_proj.narrow(0, self.ffn * (parts[1] == "up_proj"), self.ffn)
            half.copy_(tensor.narrow(0, self.rank * self.ffn, self.ffn))
        elif name == "mlp.down_proj.weight":
            self.down_proj.copy_(tensor.narrow(1, self.rank * self.ffn, self.ffn))
        elif name == "experts.gate_up_proj":
            # (experts, 2 * ffn, hidden): gate rows, then up rows, each cut for this rank
            for half, part in zip(self.w13.chunk(2, 1), tensor.chunk(2, 1), strict=True):
                half.copy_(part.narrow(1, self.rank * self.ffn, self.ffn))
        elif parts[0] == "experts":
            self.w2[int(parts[1])].copy_(tensor.narrow(1, self.rank * self.ffn, self.ffn))
        elif name == "mixer.A_log":
            count = self.A.numel()
            self.A.copy_(-torch.exp(tensor.narrow(0, self.rank * count, count).float()))
        elif name in ("input_norm.weight", "router.weight", "router.bias", "kv_scales"):
            getattr(self, name.replace(".bias", "_bias").removesuffix(".weight")).copy_(tensor)
        else:
            raise ValueError(f"there is no module or parameter named {name!r}")

    def _load_qkv(self, parameter: nn.Parameter, which: str, tensor: torch.Tensor) -> None:
        if which == "q":
            parameter[: self.q_rows].copy_(tensor.narrow(0, self.rank * self.q_rows, self.q_rows))
            return
        replicas = max(self.world // self.c.kv_heads, 1)
        start = self.q_rows + self.kv_rows * (which == "v")
        shard = tensor.narrow(0, self.rank // replicas * self.kv_rows, self.kv_rows)
        parameter[start : start + self.kv_rows].copy_(shard)


def _weight(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    # As an allocator leaves it: nothing that a load should have written may be right by chance.
    storage = torch.empty(shape, dtype=dtype)
    storage.view(BITS[dtype.itemsize]).fill_(0x55)
    return nn.Parameter(storage, requires_grad=False)


def make_checkpoint(seed: int, config: NativeConfig | None = None) -> Checkpoint:
    """Canonical tensors with the bits of random weights."""
    c = config or NativeConfig()
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.05).to(dtype)

    out: Checkpoint = {"embed_tokens.weight": weight(c.vocab, c.hidden)}
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    for i in range(c.layers):
        at = f"layers.{i}."
        out[at + "input_norm.weight"] = weight(c.hidden)
        for which, rows in (("q", q), ("k", kv), ("v", kv)):
            out[f"{at}self_attn.{which}_proj.weight"] = weight(rows, c.hidden)
            out[f"{at}self_attn.{which}_proj.bias"] = weight(rows)
        out[at + "self_attn.o_proj.weight"] = weight(c.hidden, q)
        out[at + "mlp.gate_proj.weight"] = weight(c.ffn, c.hidden)
        out[at + "mlp.up_proj.weight"] = weight(c.ffn, c.hidden)
        out[at + "mlp.down_proj.weight"] = weight(c.hidden, c.ffn)
        out[at + "router.weight"] = weight(c.experts, c.hidden)
        out[at + "router.bias"] = weight(c.experts, dtype=torch.float32)
        out[at + "experts.gate_up_proj"] = weight(c.experts, 2 * c.ffn, c.hidden)
        for e in range(c.experts):
            out[f"{at}experts.{e}.down_proj.weight"] = weight(c.hidden, c.ffn)
        out[at + "mixer.A_log"] = weight(c.heads)
        out[at + "kv_scales"] = weight(c.heads, dtype=torch.float8_e4m3fn)
    out["norm.weight"] = weight(c.hidden)
    out["logit_scale"] = weight(dtype=torch.float32)
    out["token_count"] = torch.randint(-(2**40), 2**40, (3,), generator=generator)
    out["token_mask"] = torch.rand(c.vocab, generator=generator) < 0.5
    if not c.tied:
        out["lm_head.weight"] = weight(c.vocab, c.hidden)
    elif c.export_tied:
        out["lm_head.weight"] = out["embed_tokens.weight"].clone()
    return out


def directory_of(checkpoint: Mapping[str, torch.Tensor]) -> TensorDirectory:
    """The tensor directory of a checkpoint."""
    return TensorDirectory(TensorSpec(n, dtype_name(t.dtype), tuple(t.shape)) for n, t in checkpoint.items())


def random_delta(
    checkpoint: Mapping[str, torch.Tensor], seed: int, rate: float = 0.05, *, special: bool = False
) -> Checkpoint:
    """The next version of a checkpoint: about ``rate`` of all elements get other bits, at least one per tensor.

    ``special``: new values are NaNs, infinities, zeros of both signs and subnormals too. Tied names stay equal.
    """
    rng = np.random.default_rng(seed)
    out: Checkpoint = {}
    for name, tensor in checkpoint.items():
        new = tensor.clone()
        flat = words(new)
        chosen = rng.random(flat.size) < rate
        if flat.size:
            chosen[rng.integers(flat.size)] = True
        if tensor.dtype == torch.bool:
            flat[chosen] ^= 1
        else:
            flat[chosen] = _other_bits(flat[chosen], rng, tensor, special)
        out[name] = new
    if "lm_head.weight" in out and _same_bits(checkpoint["lm_head.weight"], checkpoint["embed_tokens.weight"]):
        out["lm_head.weight"] = out["embed_tokens.weight"].clone()
    return out


def _other_bits(
    old: NDArray[np.unsignedinteger], rng: np.random.Generator, tensor: torch.Tensor, special: bool
) -> NDArray[np.unsignedinteger]:
    step = rng.choice(np.array([1, 2, 2 ** (8 * old.itemsize) - 1], np.uint64), old.size)
    new = old + step.astype(old.dtype)
    if special and tensor.dtype.is_floating_point:
        # words(…) of a copy, because tensors of these values are made by torch, not from bits
        values = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, -1e-40]).to(tensor.dtype)
        table = np.concatenate([words(values), words(values[:1]) ^ np.array([5], old.dtype)])
        take = rng.random(old.size) < 0.5
        new[take] = table[rng.integers(0, table.size, int(take.sum()))]
    same = new == old
    new[same] ^= np.array([1], old.dtype)
    return new


def items_between(
    directory: TensorDirectory,
    old: Mapping[str, torch.Tensor],
    new: Mapping[str, torch.Tensor],
    mode: EntryMode,
    regions: Mapping[str, list[Region]] | None = None,
) -> Iterator[tuple[Item, Decoded]]:
    """Checked items that lead from one checkpoint to another: one per tensor, or per region where regions are given."""
    for tensor, spec in enumerate(directory):
        before, after = words(old[spec.name]), words(new[spec.name])
        for region in (regions or {}).get(spec.name, [Region.whole(spec.numel)]):
            at = region.all_flat()
            positions = np.flatnonzero(before[at] != after[at])
            if not positions.size:
                continue
            a, b = before[at[positions]], after[at[positions]]
            values = {"add": b - a, "xor": a ^ b, "overwrite": b}[mode]
            item = Item(
                tensor=tensor, region=region, count=positions.size, mode=mode, positions="gaps", width=spec.width,
                shift=0, code_bits=0, digest=state_sum(tensor, at[positions], b), sizes=(),
            )  # fmt: skip
            yield item, Decoded(encode_positions(positions, region.count), values)


def torch_loader(model: nn.Module, unplaced: Iterable[str] = ()) -> TorchLoader:
    """The library's loader over a model of this module."""
    return TorchLoader(model, unplaced=unplaced)


def load_dense(checkpoint: Mapping[str, torch.Tensor], config: NativeConfig, rank: int, world: int) -> NativeModel:
    """A fresh model that never was traced, loaded by its own loader: what every refit must equal."""
    model = NativeModel(config, rank, world)
    with torch.no_grad():
        model.load_weights(iter(checkpoint.items()))
    return model


def snapshot(module: nn.Module) -> dict[str, torch.Tensor]:
    """The bits of every tensor reachable from a module, as integers, by path."""
    return {path: _bits(tensor).clone() for path, tensor in reachable_tensors(module).items()}


def equal_bits(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    """Whether two snapshots (or checkpoints) have the same names and the same bits."""
    return a.keys() == b.keys() and all(_same_bits(a[name], b[name]) for name in a)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    # Through uint8 views only of a copy: bool cannot be viewed as another dtype of its width in every torch.
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat.to(torch.uint8)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))
