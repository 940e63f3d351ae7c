"""Bit-exact delta-compressed weight refit for reinforcement learning across clusters.

Everything here is loaded on first use, so that ``import dcr_stream`` costs nothing and needs no framework.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dcr_stream.commit import SqliteCommitStore
    from dcr_stream.coordinator import CoordinatorSettings
    from dcr_stream.front import Coordinator, Node, Owner, run_async
    from dcr_stream.loaders import StateDictLoader, TorchLoader
    from dcr_stream.messages import Announcement, Attempt, CommitRecord, Payload
    from dcr_stream.node import NodeSettings
    from dcr_stream.owner import OwnerSettings
    from dcr_stream.peers import RefitReport, TransitionSettings
    from dcr_stream.receiver import Receiver
    from dcr_stream.sources import ResidualConversion, TorchSource, all_agree

__version__ = "0.1.0"

_HOME = {
    "Announcement": "messages",
    "Attempt": "messages",
    "CommitRecord": "messages",
    "Coordinator": "front",
    "CoordinatorSettings": "coordinator",
    "Node": "front",
    "NodeSettings": "node",
    "Owner": "front",
    "OwnerSettings": "owner",
    "Payload": "messages",
    "Receiver": "receiver",
    "RefitReport": "peers",
    "ResidualConversion": "sources",
    "SqliteCommitStore": "commit",
    "StateDictLoader": "loaders",
    "TorchLoader": "loaders",
    "TorchSource": "sources",
    "TransitionSettings": "peers",
    "all_agree": "sources",
    "run_async": "front",
}

__all__ = [
    "Announcement",
    "Attempt",
    "CommitRecord",
    "Coordinator",
    "CoordinatorSettings",
    "Node",
    "NodeSettings",
    "Owner",
    "OwnerSettings",
    "Payload",
    "Receiver",
    "RefitReport",
    "ResidualConversion",
    "SqliteCommitStore",
    "StateDictLoader",
    "TorchLoader",
    "TorchSource",
    "TransitionSettings",
    "all_agree",
    "run_async",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'dcr_stream' has no attribute {name!r}")
    return getattr(import_module(f"dcr_stream.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
