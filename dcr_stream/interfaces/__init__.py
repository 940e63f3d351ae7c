"""What can be plugged in: one small file each."""

from dcr_stream.interfaces.commit import CommitStore
from dcr_stream.interfaces.engine import Engine
from dcr_stream.interfaces.gate import Gate
from dcr_stream.interfaces.loader import Loader, LoadSession
from dcr_stream.interfaces.monitor import Monitor, NullMonitor
from dcr_stream.interfaces.runtime import Clock, Link, Network, Workers
from dcr_stream.interfaces.source import Source
from dcr_stream.interfaces.transport import PayloadSink, PayloadSource, Transport

__all__ = [
    "Clock",
    "CommitStore",
    "Engine",
    "Gate",
    "Link",
    "LoadSession",
    "Loader",
    "Monitor",
    "Network",
    "NullMonitor",
    "PayloadSink",
    "PayloadSource",
    "Source",
    "Transport",
    "Workers",
]
