"""Owners over plain torch tensors: a module, a state dict, or fp32 masters published as BF16 copies."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from dcr_stream.canonical import Region, TensorDirectory, TensorSpec, Words
from dcr_stream.codec.bits import dtype_name, words
from dcr_stream.codec.device import DeviceWords, is_host, wait_for
from dcr_stream.delta import Conversion, Segment, Task
from dcr_stream.errors import CaptureError, UsageError
from dcr_stream.interfaces import Source

__all__ = ["ResidualConversion", "TorchSource", "all_agree"]


@dataclass(frozen=True, kw_only=True)
class ResidualConversion:
    """Canonical tensors that are *computed* from source tensors (a cast, a merge, ``w + 1``).

    ``run`` receives the live source tensors named in ``inputs`` and returns canonical tensors by name; the source
    tensors themselves are not published. It is run once at construction to learn dtypes and shapes.
    """

    inputs: tuple[str, ...]
    run: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]


class TorchSource(Source):
    """One training rank's live tensors, each published whole under its own name.

    With ``published_dtype`` floating-point tensors are read through that dtype, element by element: fp32 masters
    published as BF16 copies need no second copy in memory. Among ``replicas`` data-parallel ranks that hold the same
    weights, tensor ``name`` belongs to rank ``blake2b(name) mod replicas``. Tensors are read in place: keep the same
    tensor objects for the life of the source; what replaces ``tensor.data`` is followed. Tied names are published
    once each; both must stay equal.

    Args:
        tensors: a module (what its ``state_dict`` holds) or a mapping of names to live tensors.
        rank, replicas: this rank among those that hold equal weights.
        published_dtype: cast floating-point tensors to this dtype when reading.
        conversions: residual conversions; their inputs are not published themselves.
        frozen: names that never change after the first refit: sent in dense refits, never scanned again.
        device_trackers: keep the trackers of tensors that live on a device there, and compare them there. It costs
            that device a copy of what is published and spares the host one; only changes cross to it.
        agree: an all-reduce of "ok" over the training ranks (:func:`all_agree`).
    """

    def __init__(
        self,
        tensors: torch.nn.Module | Mapping[str, torch.Tensor],
        *,
        rank: int = 0,
        replicas: int = 1,
        published_dtype: torch.dtype | None = None,
        conversions: Sequence[ResidualConversion] = (),
        frozen: Collection[str] = (),
        device_trackers: bool = False,
        agree: Callable[[bool], bool] | None = None,
    ) -> None:
        if not 0 <= rank < replicas:
            raise UsageError(f"rank {rank} is not among {replicas} replicas")
        if isinstance(tensors, torch.nn.Module):
            # As a checkpoint has them: tied names are all there, non-persistent buffers are not.
            state = tensors.state_dict(keep_vars=True)
            tensors = {name: t for name, t in state.items() if isinstance(t, torch.Tensor)}
        self._given = dict(tensors)
        self._live: dict[str, torch.Tensor] = {name: t.detach() for name, t in tensors.items()}
        self._published = published_dtype
        self._agree = agree
        self._device_trackers = device_trackers
        self._conversions = [self._probe(c) for c in conversions]
        residual = {name for c in conversions for name in c.inputs}
        specs = [self._spec(name, t) for name, t in self._live.items() if name not in residual]
        specs += [spec for _, outputs in self._conversions for spec in outputs]
        self._directory = TensorDirectory(specs)
        if unknown := set(frozen) - set(self._live):
            raise UsageError(f"frozen names that the source does not hold: {', '.join(sorted(unknown))}")
        self._frozen = frozenset(frozen)
        self._tasks = self._make_tasks(rank, replicas, residual)

    @property
    def directory(self) -> TensorDirectory:
        """All canonical tensors, in the order of the given tensors, computed ones last."""
        return self._directory

    def tasks(self) -> Sequence[Task]:
        """The tasks of the tensors that this rank owns."""
        return self._tasks

    def agree(self, ok: bool) -> bool:
        """Whether every training rank says ``ok``."""
        return self._agree(ok) if self._agree is not None else ok

    def synchronize(self) -> None:
        """Find where live tensors are now, and wait for the devices that hold them.

        Raises:
            CaptureError: a tensor has another shape or dtype than at first.
        """
        for name, given in self._given.items():
            now, was = given.detach(), self._live[name]
            if (now.shape, now.dtype) != (was.shape, was.dtype):
                raise CaptureError(
                    f"source tensor {name!r} was {was.dtype} {list(was.shape)} and is now {now.dtype} "
                    f"{list(now.shape)}; a run keeps its tensors: start a new one"
                )
            self._live[name] = now
        wait_for({tensor.device for tensor in self._live.values()})

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._published is not None and tensor.is_floating_point():
            return tensor.to(self._published)
        return tensor

    def _spec(self, name: str, tensor: torch.Tensor) -> TensorSpec:
        return TensorSpec(
            name, dtype_name(self._cast(tensor[:0] if tensor.dim() else tensor).dtype), tuple(tensor.shape)
        )

    def _probe(self, conversion: ResidualConversion) -> tuple[ResidualConversion, list[TensorSpec]]:
        missing = [name for name in conversion.inputs if name not in self._live]
        if missing:
            raise UsageError(f"a residual conversion names source tensors that do not exist: {', '.join(missing)}")
        outputs = conversion.run({name: self._live[name] for name in conversion.inputs})
        return conversion, [TensorSpec(n, dtype_name(t.dtype), tuple(t.shape)) for n, t in outputs.items()]

    def _make_tasks(self, rank: int, replicas: int, residual: set[str]) -> tuple[Task, ...]:
        tasks: list[Task] = []
        by_input: dict[str, list[Conversion]] = {}
        for conversion, outputs in self._conversions:
            key = "+".join(spec.name for spec in outputs)
            if _owner_of(key, replicas) == rank:
                bound = self._bind(conversion, outputs, key)
                for name in conversion.inputs:
                    by_input.setdefault(name, []).append(bound)
        for name, tensor in self._live.items():
            if name in residual:
                if name not in by_input:
                    continue
            elif _owner_of(name, replicas) != rank:
                continue
            segments = None
            if name not in residual:
                segments = (Segment(0, self._directory.index(name), Region.whole(tensor.numel())),)
            tasks.append(
                Task(
                    key=name,
                    numel=tensor.numel(),
                    dtype=dtype_name(self._cast(tensor.reshape(-1)[:0]).dtype),
                    read=self._reader(name),
                    segments=segments,
                    conversions=tuple(by_input.get(name, ())),
                    frozen=name in self._frozen,
                    live=self._on_device(name),
                )
            )
        return tuple(tasks)

    def _elements(self, name: str, lo: int, hi: int) -> torch.Tensor:
        """Some elements of a live tensor in row-major order, as they are published, where they live."""
        tensor = self._live[name]
        rows = tensor if tensor.is_contiguous() else tensor.squeeze()
        inner = rows[0].numel() if rows.dim() and rows.numel() else 0
        if rows.is_contiguous() or not inner:
            return self._cast(rows.reshape(-1)[lo:hi])
        # Only the rows that hold the range are copied, not the tensor.
        first = lo // inner
        part = rows[first : -(-hi // inner)].reshape(-1)
        return self._cast(part[lo - first * inner : hi - first * inner])

    def _reader(self, name: str) -> Callable[[int, int], Words]:
        return lambda lo, hi: words(self._elements(name, lo, hi))

    def _on_device(self, name: str) -> Callable[[int, int], DeviceWords] | None:
        if not self._device_trackers or is_host(self._live[name].device):
            return None
        return lambda lo, hi: DeviceWords(self._elements(name, lo, hi))

    def _bind(self, conversion: ResidualConversion, outputs: list[TensorSpec], key: str) -> Conversion:
        def run() -> dict[int, Words]:
            results = conversion.run({name: self._live[name] for name in conversion.inputs})
            found = {n: (dtype_name(t.dtype), tuple(t.shape)) for n, t in results.items()}
            expected = {spec.name: (spec.dtype, spec.shape) for spec in outputs}
            if found != expected:
                raise UsageError(f"residual conversion {key!r} now returns {found}, before it was {expected}")
            return {self._directory.index(n): words(t) for n, t in results.items()}

        tensors = tuple(self._directory.index(spec.name) for spec in outputs)
        return Conversion(key, conversion.inputs, tensors, run)


def _owner_of(name: str, replicas: int) -> int:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % replicas


def all_agree(group: torch.distributed.ProcessGroup | None = None) -> Callable[[bool], bool]:
    """An ``agree`` function for :class:`TorchSource`: a minimum over all ranks of ``group`` (the default group)."""

    def agree(ok: bool) -> bool:
        flag = torch.tensor([int(ok)], dtype=torch.int32)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN, group=group)
        return bool(flag.item())

    return agree
