"""Control addresses: ``dcr://HOST:PORT``, and who may be reached without protection."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from dcr_stream.errors import UsageError

__all__ = ["Address"]


@dataclass(frozen=True)
class Address:
    """Host and port of a listener; an empty host means every interface."""

    host: str
    port: int

    @classmethod
    def parse(cls, address: str) -> Address:
        """Read ``dcr://HOST:PORT`` (IPv6 hosts in brackets).

        Raises:
            UsageError: it is anything else.
        """
        try:
            parts = urlsplit(address)
            host, port = parts.hostname or "", parts.port
        except ValueError as error:
            raise UsageError(f"control address {address!r}: {error}; write dcr://HOST:PORT") from error
        rest = parts.path.strip("/") or parts.query or parts.fragment or parts.username or parts.password
        if parts.scheme != "dcr" or port is None or rest:
            raise UsageError(f"control address {address!r} is not understood; write dcr://HOST:PORT")
        return cls(host, port)

    @property
    def loopback(self) -> bool:
        """Whether only processes of this machine can be meant."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def http(self, path: str) -> str:
        """The URL of ``path`` there."""
        return f"http://{self._netloc}{path}"

    @property
    def _netloc(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"dcr://{self._netloc}"
