"""The request gate of a rollout engine, when it closes, and the engine's hooks around a swap."""

# The folder is reached through the link `dcr_stream/gate`. This parent-relative import makes importing it directly
# fail at once, instead of giving every class a second identity.
from .. import __version__ as _version  # noqa: F401, TID252  # pyright: ignore[reportMissingImports]

# isort: split
from dcr_stream.gate.engine_gate import EngineGate
from dcr_stream.gate.engines import LocalEngine, Receiver
from dcr_stream.gate.hooks import close_engine, open_engine
from dcr_stream.gate.modes import AfterDeadline, AsyncGate, GateMode, SyncGate, mode_named
from dcr_stream.gate.request_gate import RequestGate, Ticket

__all__ = [
    "AfterDeadline",
    "AsyncGate",
    "EngineGate",
    "GateMode",
    "LocalEngine",
    "Receiver",
    "RequestGate",
    "SyncGate",
    "Ticket",
    "close_engine",
    "mode_named",
    "open_engine",
]
