"""How payloads travel from owners to nodes.

The order of calls in one attempt::

    owner:  async with transport.open_sink(attempt, owner) as sink:
                await sink.send(payload)                    # once or more; ready for every node when it returns
    node:   async with transport.open_source(attempt, node) as source:
                body = await source.fetch(announcement)     # any order, several at once, repeatable
    both:   await transport.discard(attempt)                # after commit and every ACK, or to fence the attempt

A transport moves bytes and knows nothing of completeness: payloads are announced, and an owner's set is closed by
a sealed manifest, on the control plane. So no transport can end early without being noticed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import ClassVar

from dcr_stream.messages import Announcement, Attempt, Payload

__all__ = ["Capabilities", "PayloadSink", "PayloadSource", "Transport"]


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a transport can do; the core never guesses.

    ``spans_processes``: usable between processes; programs that start processes check it. ``max_payload_bytes``: an
    owner refuses larger payloads before it sends them.
    """

    spans_processes: bool = True
    max_payload_bytes: int | None = None


class PayloadSink(ABC):
    """The owner's end of one attempt."""

    @abstractmethod
    async def send(self, payload: Payload) -> None:
        """Make the payload available to every node of the attempt.

        When it returns, a ``fetch`` that starts later succeeds. Sending the same id with the same bytes again is
        no error. Waits while the transport's own buffer is full.

        Raises:
            AttemptFenced: the attempt was discarded.
            PayloadRejected: the id exists with other bytes, or the payload is too large.
            TransportUnavailable, TransportTimeout: it may work later.
        """


class PayloadSource(ABC):
    """A node's end of one attempt."""

    @abstractmethod
    async def fetch(self, announcement: Announcement) -> bytes:
        """The announced payload's bytes, exactly as sent; waits for those still on their way.

        Raises:
            AttemptFenced: the attempt was discarded.
            AttemptAborted: the payload can no longer arrive, or ended early.
            TransportUnavailable, TransportTimeout: it may work later.
        """


class Transport(ABC):
    """A way for payloads to travel. Found by URL scheme (``dcr_stream.transports.open_transport``)."""

    capabilities: ClassVar[Capabilities] = Capabilities()

    @abstractmethod
    def open_sink(self, attempt: Attempt, owner: str) -> AbstractAsyncContextManager[PayloadSink]:
        """The owner's end; leaving it keeps what was sent."""

    @abstractmethod
    def open_source(self, attempt: Attempt, node: str) -> AbstractAsyncContextManager[PayloadSource]:
        """A node's end."""

    @abstractmethod
    async def discard(self, attempt: Attempt) -> None:
        """Fence the attempt and drop its payloads. Idempotent; other attempts are not touched."""

    async def aclose(self) -> None:
        """Release connections. The default has none."""
