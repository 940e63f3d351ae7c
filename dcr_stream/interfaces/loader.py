"""The native loader of a serving runtime, as a receiver sees it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

import torch

__all__ = ["LoadSession", "Loader"]


class LoadSession(ABC):
    """One streamed dense load: tensors go in part by part, in directory order."""

    @abstractmethod
    def push(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Hand tensors to the native loader; returns once it has consumed them (their memory may be reused)."""

    @abstractmethod
    def finish(self) -> None:
        """End the load: the native loader returns, or its error is raised here."""

    @abstractmethod
    def abort(self) -> None:
        """Give the load up. Idempotent; does nothing after ``finish``."""


class Loader(ABC):
    """Places canonical tensors into a model's storage with the runtime's own code."""

    @abstractmethod
    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Run the native loader once over ``tensors`` (a streamed iterable of canonical tensors)."""

    @abstractmethod
    def open_session(self) -> LoadSession:
        """Start a streamed dense load."""

    @abstractmethod
    def storage(self) -> Mapping[str, torch.Tensor]:
        """Every parameter and buffer by name, duplicates (tied names) included."""

    @abstractmethod
    def reachable(self) -> Mapping[str, torch.Tensor]:
        """Every tensor reachable from the model's modules (parameters, buffers, plain attributes), by path."""

    def refresh(self) -> None:
        """Recompute state derived from weights (absorbed matrices, packed copies). Called once per commit."""

    def synchronize(self) -> None:
        """Wait until every write has reached the storage (device streams)."""

    def declared_unplaced(self) -> frozenset[str]:
        """Canonical names that this engine legitimately has no place for."""
        return frozenset()

    def declared_derived(self) -> frozenset[str]:
        """Paths of reachable tensors that ``refresh`` recomputes or that hold no weights (caches, workspaces)."""
        return frozenset()
