"""The interface that transports implement, for those who write one."""

from dcr_stream.interfaces.transport import Capabilities, PayloadSink, PayloadSource, Transport

__all__ = ["Capabilities", "PayloadSink", "PayloadSource", "Transport"]
