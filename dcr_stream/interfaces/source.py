"""Where a training rank's weights come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from dcr_stream.canonical import TensorDirectory
from dcr_stream.delta import Task

__all__ = ["Source"]


class Source(ABC):
    """The weights one owner is responsible for, as tasks over live tensors."""

    @property
    @abstractmethod
    def directory(self) -> TensorDirectory:
        """All canonical tensors of the model, equal on every owner."""

    @abstractmethod
    def tasks(self) -> Sequence[Task]:
        """The shards this owner scans. Fixed for the life of the source; each unique element has one owner."""

    def synchronize(self) -> None:
        """Wait until the training step's writes are visible (device streams)."""

    def agree(self, ok: bool) -> bool:
        """Whether *every* training rank says ``ok``: an all-reduce on the caller's thread. One rank: itself."""
        return ok
