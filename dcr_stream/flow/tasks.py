"""A task group whose only failure is raised as it is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup

__all__ = ["task_group"]


@asynccontextmanager
async def task_group() -> AsyncIterator[TaskGroup]:
    """``anyio.create_task_group()``, except that exactly one failure is raised plain, with its own traceback.

    Callers catch the library's typed errors by class. Only when several tasks failed on their own before
    cancellation reached them does an ``ExceptionGroup`` with all of them come out.
    """
    sole: BaseException | None = None
    try:
        async with anyio.create_task_group() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        sole = _sole_leaf(group)
        if sole is None:
            raise
    if sole is not None:
        # Outside the handler, so that the group does not become the error's context.
        try:
            raise sole
        finally:
            del sole


def _sole_leaf(group: BaseExceptionGroup[BaseException]) -> BaseException | None:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        if len(error.exceptions) != 1:
            return None
        error = error.exceptions[0]
    return error
