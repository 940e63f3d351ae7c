"""The way that payloads take: the transport that the coordinator names."""

from __future__ import annotations

from collections.abc import Callable

from dcr_stream.errors import UsageError
from dcr_stream.interfaces import Transport

__all__ = ["Route"]


class Route:
    """Opens the transport at the coordinator's URL once, and again when a coordinator names another."""

    def __init__(self, who: str, open_transport: Callable[[str], Transport]) -> None:
        self._who, self._open = who, open_transport
        self._url = ""
        self._transport: Transport | None = None

    async def follow(self, url: str) -> None:
        """Use the transport at ``url`` from now on.

        Raises:
            UsageError, TransportError: it cannot be opened.
        """
        if url != self._url or self._transport is None:
            old, self._transport = self._transport, None
            if old is not None:
                await old.aclose()
            self._transport, self._url = self._open(url), url

    @property
    def transport(self) -> Transport:
        """The open transport.

        Raises:
            UsageError: no coordinator has named one yet.
        """
        if self._transport is None:
            raise UsageError(f"{self._who} was ordered to move payloads before it was welcomed; versions must match")
        return self._transport
