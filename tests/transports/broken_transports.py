"""Transports with one fault each: the conformance suite must catch every one of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

import anyio
import msgspec

from dcr_stream.errors import AttemptFenced, PayloadRejected, TransportTimeout
from dcr_stream.interfaces import PayloadSink, PayloadSource, Transport
from dcr_stream.messages import Announcement, Attempt, Payload
from dcr_stream.transports import MemoryTransport
from dcr_stream.transports.base import Capabilities

__all__ = ["MUTANTS", "Broken", "TakesTooMuch"]

Send = Callable[[Payload], Awaitable[None]]
Fetch = Callable[[Announcement], Awaitable[bytes]]


class Broken(Transport):
    """A memory transport whose methods mutants replace."""

    def __init__(self) -> None:
        self.inner = MemoryTransport(wait_s=1.0)
        self.seen: dict[object, bytes] = {}

    def open_sink(self, attempt: Attempt, owner: str) -> AbstractAsyncContextManager[PayloadSink]:
        return self._sink(attempt, owner)

    def open_source(self, attempt: Attempt, node: str) -> AbstractAsyncContextManager[PayloadSource]:
        return self._source(attempt, node)

    @asynccontextmanager
    async def _sink(self, attempt: Attempt, owner: str) -> AsyncIterator[PayloadSink]:
        async with self.inner.open_sink(attempt, owner) as sink:
            yield _Sink(lambda payload: self.send(sink.send, payload))
            await self.leave(sink.send)

    @asynccontextmanager
    async def _source(self, attempt: Attempt, node: str) -> AsyncIterator[PayloadSource]:
        async with self.inner.open_source(attempt, node) as source:
            yield _Source(lambda announcement: self.fetch(source.fetch, announcement))

    async def discard(self, attempt: Attempt) -> None:
        await self.inner.discard(attempt)

    async def send(self, send: Send, payload: Payload) -> None:
        await send(payload)

    async def leave(self, send: Send) -> None: ...

    async def fetch(self, fetch: Fetch, announcement: Announcement) -> bytes:
        return await fetch(announcement)


class _Sink(PayloadSink):
    def __init__(self, send: Send) -> None:
        self._send = send

    async def send(self, payload: Payload) -> None:
        await self._send(payload)


class _Source(PayloadSource):
    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch

    async def fetch(self, announcement: Announcement) -> bytes:
        return await self._fetch(announcement)


class LosesTheLastPayload(Broken):
    async def send(self, send: Send, payload: Payload) -> None:
        if payload.id.sequence != 3:
            await send(payload)


class SendsWhenTheSinkIsLeft(Broken):
    def __init__(self) -> None:
        super().__init__()
        self.held: list[Payload] = []

    async def send(self, send: Send, payload: Payload) -> None:
        self.held.append(payload)

    async def leave(self, send: Send) -> None:
        while self.held:
            await send(self.held.pop())


class GivesUpAtOnce(Broken):
    async def fetch(self, fetch: Fetch, announcement: Announcement) -> bytes:
        with anyio.move_on_after(0.001):
            return await fetch(announcement)
        raise TransportTimeout("not there")


class MixesUpConcurrentFetches(Broken):
    latest: Announcement | None = None

    async def fetch(self, fetch: Fetch, announcement: Announcement) -> bytes:
        self.latest = announcement
        await anyio.sleep(0.001)
        return await fetch(self.latest)


class DeletesWhatWasFetched(Broken):
    async def fetch(self, fetch: Fetch, announcement: Announcement) -> bytes:
        if announcement.id in self.seen:
            raise TransportTimeout("fetched already")
        body = self.seen[announcement.id] = await fetch(announcement)
        return body


class RefusesEqualBytes(Broken):
    async def send(self, send: Send, payload: Payload) -> None:
        if payload.id in self.seen:
            raise PayloadRejected("sent already")
        await send(payload)
        self.seen[payload.id] = payload.body


class OverwritesTheSameId(Broken):
    async def send(self, send: Send, payload: Payload) -> None:
        self.seen[payload.id] = payload.body
        with suppress(PayloadRejected):
            await send(payload)

    async def fetch(self, fetch: Fetch, announcement: Announcement) -> bytes:
        await fetch(announcement)
        return self.seen[announcement.id]


class ForgetsFences(Broken):
    async def send(self, send: Send, payload: Payload) -> None:
        with suppress(AttemptFenced):
            await send(payload)


class ServesFencedPayloads(Broken):
    async def fetch(self, fetch: Fetch, announcement: Announcement) -> bytes:
        if announcement.id in self.seen:
            return self.seen[announcement.id]
        body = self.seen[announcement.id] = await fetch(announcement)
        return body


class LeavesFetchesWaiting(Broken):
    async def fetch(self, fetch: Fetch, announcement: Announcement) -> bytes:
        try:
            return await fetch(announcement)
        except AttemptFenced:
            await anyio.sleep_forever()
            raise


class DiscardsOnce(Broken):
    async def discard(self, attempt: Attempt) -> None:
        if attempt in self.seen:
            raise AttemptFenced("discarded already")
        self.seen[attempt] = b""
        await super().discard(attempt)


class DiscardsOtherEpochs(Broken):
    async def discard(self, attempt: Attempt) -> None:
        await super().discard(attempt)
        await super().discard(msgspec.structs.replace(attempt, epoch=attempt.epoch + 1))


class KeysBySequence(Broken):
    async def send(self, send: Send, payload: Payload) -> None:
        key = payload.id.attempt, payload.id.sequence
        self.seen.setdefault(key, payload.body)
        await send(payload)

    async def fetch(self, fetch: Fetch, announcement: Announcement) -> bytes:
        await fetch(announcement)
        return self.seen[announcement.id.attempt, announcement.id.sequence]


class BreaksWhenCancelled(Broken):
    broken = False

    async def fetch(self, fetch: Fetch, announcement: Announcement) -> bytes:
        if self.broken:
            raise TransportTimeout("broken")
        self.broken = True
        body = await fetch(announcement)
        self.broken = False
        return body


class TakesTooMuch(Broken):
    capabilities = Capabilities(max_payload_bytes=1000)


MUTANTS: dict[type[Broken], str] = {
    LosesTheLastPayload: "test_every_payload_reaches_every_node",
    SendsWhenTheSinkIsLeft: "test_a_payload_is_ready_when_send_returns_and_not_only_when_the_sink_is_left",
    GivesUpAtOnce: "test_fetch_waits_for_a_payload_on_its_way",
    MixesUpConcurrentFetches: "test_concurrent_fetches_each_get_their_payload",
    DeletesWhatWasFetched: "test_fetch_is_repeatable",
    RefusesEqualBytes: "test_a_payload_sent_again_with_equal_bytes_is_no_error",
    OverwritesTheSameId: "test_the_same_id_with_other_bytes_is_rejected",
    ForgetsFences: "test_discard_fences_late_sends",
    ServesFencedPayloads: "test_discard_fences_fetches_of_what_was_sent",
    LeavesFetchesWaiting: "test_discard_ends_waiting_fetches",
    DiscardsOnce: "test_discard_is_idempotent_and_needs_no_payloads",
    DiscardsOtherEpochs: "test_attempts_are_isolated",
    KeysBySequence: "test_owners_do_not_share_sequence_numbers",
    BreaksWhenCancelled: "test_cancelled_calls_leave_it_usable",
    TakesTooMuch: "test_payloads_above_the_stated_limit_are_rejected",
}
"""Each broken transport, and the test of the suite that is there to catch it."""
