"""The control plane: links between roles, and calls over them."""

from dcr_stream.control.condition import LoopCondition
from dcr_stream.control.memory import MemoryNetwork
from dcr_stream.control.rpc import Codec, Connection
from dcr_stream.control.secret import load_secret
from dcr_stream.control.websocket import WebSocketNetwork

__all__ = ["Codec", "Connection", "LoopCondition", "MemoryNetwork", "WebSocketNetwork", "load_secret"]
