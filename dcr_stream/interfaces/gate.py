"""The request gate of one engine, together with the engine's hooks, as its node sees it."""

from __future__ import annotations

from abc import ABC, abstractmethod

from dcr_stream.interfaces.engine import Engine
from dcr_stream.protocol import CloseGates

__all__ = ["Gate"]


class Gate(ABC):
    """Holds back requests while an engine's weights are replaced. Starts closed."""

    engine: Engine

    @property
    @abstractmethod
    def serving(self) -> int | None:
        """The version that requests are admitted to; None while closed."""

    @abstractmethod
    def shut(self) -> None:
        """Stop admissions at once: no drain, no hook, and no way to fail. Running requests go on."""

    @abstractmethod
    async def close(self, order: CloseGates) -> None:
        """Stop admissions, drain, pause the engine and drop its caches. Idempotent.

        Raises:
            DrainTimeout: requests were still running at the deadline and may not be cut off.
            EngineHookFailed: a hook failed; the gate serves the version it served before.
        """

    @abstractmethod
    async def open(self, version: int) -> None:
        """Resume the engine and admit requests to ``version``. Idempotent.

        Raises:
            EngineHookFailed: the engine does not resume; the gate stays closed.
        """
