"""Payloads as objects: for now as files in a folder that owners and nodes share.

Layout: ``ATTEMPT/payloads/OWNER-SEQUENCE``, and ``ATTEMPT/fenced`` once the attempt is discarded. Objects are created
whole or not at all and never changed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio

from dcr_stream.errors import AttemptAborted, AttemptFenced, PayloadRejected, TransportTimeout, UsageError
from dcr_stream.messages import Announcement, Attempt, Payload, PayloadId
from dcr_stream.transports.base import PayloadSink, PayloadSource, Transport
from dcr_stream.transports.objects import Objects, checked_name

__all__ = ["ObjectStoreTransport"]

_FIRST_LOOK_S = 0.005
_LONGEST_LOOK_S = 0.1


class ObjectStoreTransport(Transport):
    """Keeps payloads in an object store until their attempt is discarded.

    The fence is an object of its own: written before anything is deleted, and looked for by every ``send`` after its
    payload is written and by every ``fetch`` after it has read. So nothing of a discarded attempt takes effect, and
    what a late ``send`` wrote is deleted by that ``send``.

    Args:
        objects: the store.
        wait_s: how long ``fetch`` waits for an object that is not there yet, in seconds.
    """

    def __init__(self, objects: Objects, *, wait_s: float = 60.0) -> None:
        self._objects = objects
        self._wait_s = wait_s

    @classmethod
    def from_url(cls, url: str, *, wait_s: float = 60.0, deadline_s: float = 60.0) -> ObjectStoreTransport:
        """Open ``file:///DIR``. ``deadline_s`` bounds one operation of the store with all its retries.

        Raises:
            UsageError: the URL is not understood, or the folder is missing or may not be written to.
        """
        return cls(Objects.in_folder(url, deadline_s=deadline_s), wait_s=wait_s)

    def open_sink(self, attempt: Attempt, owner: str) -> AbstractAsyncContextManager[PayloadSink]:
        """The owner's end; see ``Transport.open_sink``."""
        return self._sink(attempt, owner)

    def open_source(self, attempt: Attempt, node: str) -> AbstractAsyncContextManager[PayloadSource]:
        """A node's end; see ``Transport.open_source``."""
        return self._source(attempt)

    async def discard(self, attempt: Attempt) -> None:
        """Write the fence, then delete the payloads; see ``Transport.discard``. The fence stays."""
        await self._objects.create(_fence(attempt), b"")
        await self._objects.delete_below(_folder(attempt))

    @asynccontextmanager
    async def _sink(self, attempt: Attempt, owner: str) -> AsyncIterator[PayloadSink]:
        yield _ObjectSink(self._objects, attempt, owner)

    @asynccontextmanager
    async def _source(self, attempt: Attempt) -> AsyncIterator[PayloadSource]:
        yield _ObjectSource(self._objects, attempt, self._wait_s)


class _ObjectSink(PayloadSink):
    def __init__(self, objects: Objects, attempt: Attempt, owner: str) -> None:
        self._objects = objects
        self._attempt = attempt
        self._owner = owner

    async def send(self, payload: Payload) -> None:
        ident = payload.id
        if ident.attempt != self._attempt or ident.owner != self._owner:
            raise UsageError(
                f"payload {ident.name} of attempt {ident.attempt.name} was given to the sink of owner {self._owner} in "
                f"attempt {self._attempt.name}; open a sink for each owner and attempt"
            )
        name = _name(ident)
        await _check_fence(self._objects, self._attempt)
        created = await self._objects.create(name, payload.body)
        try:
            await _check_fence(self._objects, self._attempt)
        except AttemptFenced:
            await self._objects.delete(name)
            raise
        if not created:
            await self._check_equal(name, payload)

    async def _check_equal(self, name: str, payload: Payload) -> None:
        try:
            existing = await self._objects.read(name, payload.nbytes)
        except AttemptAborted:  # of another size
            existing = b""
        if existing is None:
            await _check_fence(self._objects, self._attempt)
        if existing != payload.body:
            raise PayloadRejected(
                f"payload {payload.id.name} of attempt {self._attempt.name} exists in {self._objects.where} with other "
                "bytes; a sequence number names one payload"
            )


class _ObjectSource(PayloadSource):
    def __init__(self, objects: Objects, attempt: Attempt, wait_s: float) -> None:
        self._objects = objects
        self._attempt = attempt
        self._wait_s = wait_s

    async def fetch(self, announcement: Announcement) -> bytes:
        ident = announcement.id
        if ident.attempt != self._attempt:
            raise UsageError(
                f"payload {ident.name} belongs to attempt {ident.attempt.name}, and this source to "
                f"{self._attempt.name}; open a source for each attempt"
            )
        name = _name(ident)
        pause = _FIRST_LOOK_S
        with anyio.move_on_after(self._wait_s):
            while True:
                body = await self._objects.read(name, announcement.size)
                await _check_fence(self._objects, self._attempt)
                if body is not None:
                    return body
                await anyio.sleep(pause)
                pause = min(2 * pause, _LONGEST_LOOK_S)
        raise TransportTimeout(
            f"payload {ident.name} of attempt {self._attempt.name} did not appear in {self._objects.where} within "
            f"{self._wait_s:g} s; look at owner {ident.owner}, and whether both hosts see the same folder"
        )


def _fence(attempt: Attempt) -> str:
    return f"{checked_name(attempt.name)}/fenced"


def _folder(attempt: Attempt) -> str:
    return f"{checked_name(attempt.name)}/payloads"


def _name(ident: PayloadId) -> str:
    return f"{_folder(ident.attempt)}/{checked_name(ident.name)}"


async def _check_fence(objects: Objects, attempt: Attempt) -> None:
    if await objects.exists(_fence(attempt)):
        raise AttemptFenced(f"attempt {attempt.name} was discarded; start another attempt")
