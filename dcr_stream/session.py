"""A role's connection to its coordinator: dial, say Hello, answer, and end together."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from dcr_stream.control.rpc import Codec, Connection
from dcr_stream.errors import ControlError, PeerLost, UsageError
from dcr_stream.flow import task_group
from dcr_stream.interfaces import Link, Network
from dcr_stream.protocol import DECODER, Hello, Message, Welcome
from dcr_stream.together import gravest

__all__ = ["MessageConnection", "greet", "message_connection", "session"]

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
    try:
        async with task_group() as tasks:
            tasks.start_soon(connection.run)
            yield connection
            tasks.cancel_scope.cancel()
    except ExceptionGroup as group:
        # A link that is lost while the block waits for an answer fails both at once.
        raise gravest(group) from group


async def greet(connection: MessageConnection, hello: Hello, *, timeout_s: float) -> Welcome:
    """Say Hello and return the coordinator's welcome.

    Raises:
        PeerLost: no answer within ``timeout_s``; dial again.
        DcrError: the coordinator refuses this role.
    """
    try:
        welcome = await connection.call(hello, timeout=timeout_s)
    except ControlError as error:
        if type(error) is ControlError:
            raise PeerLost(str(error)) from error
        raise
    if not isinstance(welcome, Welcome):
        raise UsageError(f"the coordinator answered a Hello with {type(welcome).__name__}; versions must match")
    return welcome
