"""Several peers or engines at once: each comes to its end, and the gravest error is the one that is raised."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from dcr_stream.errors import (
    AttemptAborted,
    AttemptFenced,
    ControlError,
    DcrError,
    DigestMismatch,
    PeerLost,
    StaleEpoch,
)
from dcr_stream.flow import task_group

__all__ = ["every", "gravest"]

P = TypeVar("P")


async def every(peers: Iterable[P], act: Callable[[P], Awaitable[object]]) -> None:
    """Act on all peers at once, let each come to its (bounded) end, then raise the gravest error.

    Raises:
        DcrError: what one of them raised; see :func:`gravest`.
    """
    errors: list[Exception] = []

    async def one(peer: P) -> None:
        try:
            await act(peer)
        except DcrError as error:
            errors.append(error)

    async with task_group() as tasks:
        for peer in peers:
            tasks.start_soon(one, peer)
    if errors:
        raise gravest(errors)


def gravest(errors: ExceptionGroup[Exception] | Iterable[Exception]) -> Exception:
    """The one of several errors that says most: a replaced coordinator before wrong bits, consequences last."""
    leaves: list[Exception] = []
    todo: list[Exception] = [errors] if isinstance(errors, ExceptionGroup) else list(errors)
    while todo:
        error = todo.pop(0)
        if isinstance(error, ExceptionGroup):
            todo.extend(error.exceptions)
        else:
            leaves.append(error)
    return min(leaves, key=_rank)


def _rank(error: Exception) -> int:
    for rank, kinds in enumerate(((StaleEpoch,), (DigestMismatch,))):
        if isinstance(error, kinds):
            return rank
    if isinstance(error, PeerLost | AttemptFenced | AttemptAborted) or type(error) is ControlError:
        return 4
    return 2 if isinstance(error, DcrError) else 3
