"""For those who test roles, or write a transport or a commit store of their own.

``dcr_stream.testing.transport.TransportTests`` and ``dcr_stream.testing.commit.CommitStoreTests`` are conformance
suites to subclass; they need pytest, which is why they are not imported here.
"""

from dcr_stream.testing.faults import Faults, FaultyTransport
from dcr_stream.testing.memory_commit import MemoryCommitStore

__all__ = ["Faults", "FaultyTransport", "MemoryCommitStore"]
