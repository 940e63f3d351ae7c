"""Both networks, and a small set of messages."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dcr_stream.control import MemoryNetwork, WebSocketNetwork
from dcr_stream.interfaces import Network

SECRET = b"0123456789abcdef"


@pytest.fixture(params=["memory", "websocket"])
def network(request: pytest.FixtureRequest) -> Network:
    """A network; its addresses are free ones on loopback."""
    kinds: dict[str, Callable[[], Network]] = {
        "memory": MemoryNetwork,
        "websocket": lambda: WebSocketNetwork(SECRET),
    }
    return kinds[request.param]()
