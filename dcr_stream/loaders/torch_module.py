"""Loaders for torch modules: any with a ``load_weights``-style method, and plain ones copied by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import nn
from typing_extensions import override

from dcr_stream.codec.device import wait_for
from dcr_stream.errors import ApplyError, UsageError
from dcr_stream.interfaces import Loader, LoadSession
from dcr_stream.loaders.reachable import reachable_tensors
from dcr_stream.loaders.streamed import StreamedLoad

__all__ = ["StateDictLoader", "TorchLoader"]

LoadWeights = Callable[[Iterator[tuple[str, torch.Tensor]]], object]


class TorchLoader(Loader):
    """The loader of a module that places canonical tensors by its own ``load_weights(iterable of (name, tensor))``.

    Args:
        module: the model of one rank.
        load_weights: the native loader; ``module.load_weights`` if None.
        unplaced: canonical names that the model has no place for. They are never handed to the native loader.
        derived: paths of tensors that ``refresh`` recomputes, or that hold nothing computed from weights.
        refresh: recomputes derived state; called once after all writes of a commit.

    Raises:
        UsageError: the module has no ``load_weights`` and none is given.
    """

    def __init__(
        self,
        module: nn.Module,
        load_weights: LoadWeights | None = None,
        *,
        unplaced: Iterable[str] = (),
        derived: Iterable[str] = (),
        refresh: Callable[[], object] | None = None,
    ) -> None:
        native = load_weights if load_weights is not None else getattr(module, "load_weights", None)
        if native is None:
            raise UsageError(
                f"{type(module).__name__} has no load_weights method; pass load_weights=, or use StateDictLoader"
            )
        self.module = module
        self._native: LoadWeights = native
        self._unplaced = frozenset(unplaced)
        self._derived = frozenset(derived)
        self._refresh = refresh

    @override
    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Run the native loader once over ``tensors``.

        Raises:
            ApplyError: the native loader raised (its error is the cause).
        """
        try:
            with torch.no_grad():
                self._native((name, tensor) for name, tensor in tensors if name not in self._unplaced)
        except Exception as error:
            raise ApplyError(
                f"the native loader of {type(self.module).__name__} raised {type(error).__name__}: {error}; "
                "the weights are incomplete until a dense load succeeds"
            ) from error

    @override
    def open_session(self) -> LoadSession:
        return StreamedLoad(self.load, type(self.module).__name__)

    @override
    def storage(self) -> Mapping[str, torch.Tensor]:
        return {
            **dict(self.module.named_parameters(remove_duplicate=False)),
            **dict(self.module.named_buffers(remove_duplicate=False)),
        }

    @override
    def reachable(self) -> Mapping[str, torch.Tensor]:
        return reachable_tensors(self.module)

    @override
    def refresh(self) -> None:
        if self._refresh is not None:
            with torch.no_grad():
                self._refresh()

    @override
    def synchronize(self) -> None:
        wait_for({tensor.device for tensor in self.storage().values()})

    @override
    def declared_unplaced(self) -> frozenset[str]:
        return self._unplaced

    @override
    def declared_derived(self) -> frozenset[str]:
        return self._derived


class StateDictLoader(TorchLoader):
    """The loader of a plain module: canonical names are those of its ``state_dict``, copied in place with ``copy_``.

    A name that the module does not have, or another shape or dtype, raises.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        unplaced: Iterable[str] = (),
        derived: Iterable[str] = (),
        refresh: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(module, self._copy, unplaced=unplaced, derived=derived, refresh=refresh)

    def _copy(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        held = self.module.state_dict()
        for name, tensor in weights:
            target = held.get(name)
            if target is None:
                raise UsageError(
                    f"{type(self.module).__name__} has no tensor {name!r}; publish names of its state dict"
                )
            if (target.shape, target.dtype) != (tensor.shape, tensor.dtype):
                raise UsageError(
                    f"tensor {name!r} is {target.dtype} {list(target.shape)} in {type(self.module).__name__}, not "
                    f"{tensor.dtype} {list(tensor.shape)}; publish it as the module holds it"
                )
            target.copy_(tensor)
