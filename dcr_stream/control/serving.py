"""What every listener does: tasks beside the caller's block, and one handler per accepted link."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup

from dcr_stream.errors import ControlError
from dcr_stream.interfaces import Link

__all__ = ["background", "serve_link"]

_CLOSE_S = 5.0


@asynccontextmanager
async def background() -> AsyncIterator[TaskGroup]:
    """A task group for tasks beside the block; they are cancelled when the block ends.

    An error of the block, or the only error of its tasks, comes out as it is and not in an ``ExceptionGroup``.
    """
    failure: Exception | None = None
    try:
        async with anyio.create_task_group() as group:
            try:
                yield group
            except Exception as error:
                failure = error
            group.cancel_scope.cancel()
    except ExceptionGroup as errors:
        if failure is None and len(errors.exceptions) == 1:
            raise errors.exceptions[0] from None
        raise
    if failure is not None:
        raise failure


async def serve_link(link: Link, handler: Callable[[Link], Awaitable[None]]) -> None:
    """Run ``handler`` on ``link`` and close it afterwards.

    A ``ControlError`` is about this peer alone and ends its link only; anything else is a fault of this role and is
    raised into the listener.
    """
    try:
        await handler(link)
    except ControlError:
        pass
    finally:
        with anyio.move_on_after(_CLOSE_S, shield=True):
            await link.aclose()
