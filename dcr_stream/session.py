"""A role's connection to its coordinator: dial, answer, and end together."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from dcr_stream.control.rpc import Codec, Connection
from dcr_stream.flow import task_group
from dcr_stream.interfaces import Link, Network
from dcr_stream.protocol import DECODER, Message

__all__ = ["MessageConnection", "message_connection", "session"]

MessageConnection = Connection[Message]


def message_connection(link: Link, handler: Callable[[Message], Awaitable[Message | None]]) -> MessageConnection:
    """A connection that speaks the protocol's messages over ``link``."""
    return Connection(link, Codec(DECODER), handler)


@asynccontextmanager
async def session(
    network: Network, address: str, handler: Callable[[Message], Awaitable[Message | None]]
) -> AsyncIterator[MessageConnection]:
    """Dial ``address`` and answer the peer with ``handler`` for as long as the block runs.

    Raises:
        PeerLost: nobody answers, or the link was lost: the block is cancelled.
        AuthenticationFailed: the peer has another secret, or a frame was altered.
    """
    link = await network.dial(address)
    connection = message_connection(link, handler)
    async with task_group() as tasks:
        tasks.start_soon(connection.run)
        yield connection
        tasks.cancel_scope.cancel()
