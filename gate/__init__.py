"""The request gate of a rollout engine, when it closes, and the engine's hooks around a swap."""

from .. import errors as _errors  # noqa: F401, TID252  (importing this folder other than as dcr_stream.gate fails here)
from dcr_stream.gate.engines import LocalEngine, Receiver
from dcr_stream.gate.hooks import close_engine, open_engine
from dcr_stream.gate.modes import AfterDeadline, AsyncGate, GateMode, SyncGate, mode_named
from dcr_stream.gate.request_gate import RequestGate, Ticket

__all__ = [
    "AfterDeadline",
    "AsyncGate",
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
