"""What the memory transport promises beyond the conformance suite."""

from __future__ import annotations

import threading

import anyio
import pytest

from dcr_stream.errors import AttemptAborted, PayloadRejected, TransportTimeout, UsageError
from dcr_stream.messages import Announcement, Attempt
from dcr_stream.testing.transport import announce, make_payload
from dcr_stream.transports import MemoryTransport, open_transport

pytestmark = pytest.mark.anyio

ATTEMPT = Attempt("run", 1, 1, 1)
NEXT = Attempt("run", 1, 2, 1)


async def test_send_waits_for_room_until_an_attempt_is_discarded() -> None:
    transport = MemoryTransport(max_bytes=3000)
    peak: list[int] = []

    async def send_all() -> None:
        async with transport.open_sink(NEXT, "rank0") as sink:
            for sequence in range(3):
                await sink.send(make_payload(NEXT, "rank0", sequence))
                peak.append(transport.nbytes)

    async with transport.open_sink(ATTEMPT, "rank0") as sink:
        for sequence in range(2):
            await sink.send(make_payload(ATTEMPT, "rank0", sequence))
    async with anyio.create_task_group() as group:
        group.start_soon(send_all)
        await anyio.wait_all_tasks_blocked()
        assert peak == [3000]
        await transport.discard(ATTEMPT)
    assert peak == [3000, 2000, 3000]


async def test_a_send_without_room_fails_in_bounded_time_and_says_what_to_do() -> None:
    transport = MemoryTransport(max_bytes=1500, wait_s=0.05)
    async with transport.open_sink(ATTEMPT, "rank0") as sink:
        await sink.send(make_payload(ATTEMPT, "rank0", 0))
        with pytest.raises(TransportTimeout, match=r"rank0-000001 .* raise max_bytes"):
            await sink.send(make_payload(ATTEMPT, "rank0", 1))
        await sink.send(make_payload(ATTEMPT, "rank0", 2, 500))
    assert transport.nbytes == 1500


async def test_a_payload_that_never_fits_is_rejected_at_once() -> None:
    transport = MemoryTransport(max_bytes=999)
    async with transport.open_sink(ATTEMPT, "rank0") as sink:
        with pytest.raises(PayloadRejected, match="make buckets smaller"):
            await sink.send(make_payload(ATTEMPT, "rank0", 0))


async def test_memory_is_flat_over_many_attempts() -> None:
    transport = MemoryTransport()
    for number in range(200):
        attempt = Attempt("run", number, number, 1)
        async with transport.open_sink(attempt, "rank0") as sink:
            await sink.send(make_payload(attempt, "rank0", 0))
        await transport.discard(attempt)
        assert transport.nbytes == 0


async def test_a_missing_payload_fails_the_fetch_in_bounded_time() -> None:
    """C7: an announced payload that never arrives is an error, never an empty one."""
    transport = MemoryTransport(wait_s=0.05)
    async with transport.open_source(ATTEMPT, "node0") as source:
        with pytest.raises(TransportTimeout, match="look at owner rank0"):
            await source.fetch(announce(make_payload(ATTEMPT, "rank0", 0)))


async def test_a_payload_of_another_size_than_announced_aborts() -> None:
    """C7: a payload that is shorter than announced is refused."""
    transport = MemoryTransport()
    payload = make_payload(ATTEMPT, "rank0", 0)
    async with transport.open_sink(ATTEMPT, "rank0") as sink:
        await sink.send(payload)
    async with transport.open_source(ATTEMPT, "node0") as source:
        with pytest.raises(AttemptAborted, match="1000 bytes and 1001 were announced"):
            await source.fetch(Announcement(payload.id, 1001, payload.seal))


async def test_a_payload_of_another_attempt_or_owner_is_a_usage_error() -> None:
    transport = MemoryTransport()
    async with transport.open_sink(ATTEMPT, "rank0") as sink:
        for payload in (make_payload(NEXT, "rank0", 0), make_payload(ATTEMPT, "rank1", 0)):
            with pytest.raises(UsageError, match="open a sink for each owner and attempt"):
                await sink.send(payload)
    async with transport.open_source(ATTEMPT, "node0") as source:
        with pytest.raises(UsageError, match="open a source for each attempt"):
            await source.fetch(announce(make_payload(NEXT, "rank0", 0)))


async def test_a_name_means_one_transport_in_the_whole_process() -> None:
    one, same, other = (open_transport(f"memory://{name}") for name in ("a", "a", "b"))
    assert one is same
    assert one is not other


async def test_owner_and_node_may_run_in_different_event_loops() -> None:
    transport = MemoryTransport(max_bytes=1500)
    payloads = [make_payload(ATTEMPT, "rank0", 0), make_payload(NEXT, "rank0", 1)]

    async def own() -> None:
        for payload in payloads:  # the second waits until the other loop discards the first attempt
            async with transport.open_sink(payload.id.attempt, "rank0") as sink:
                await sink.send(payload)

    thread = threading.Thread(target=anyio.run, args=(own,))
    with anyio.fail_after(10):
        async with transport.open_source(ATTEMPT, "node0") as source, anyio.create_task_group() as group:
            group.start_soon(source.fetch, announce(payloads[0]))
            await anyio.wait_all_tasks_blocked()
            thread.start()
        await transport.discard(ATTEMPT)
        async with transport.open_source(NEXT, "node0") as source:
            assert await source.fetch(announce(payloads[1])) == payloads[1].body
        await anyio.to_thread.run_sync(thread.join)
