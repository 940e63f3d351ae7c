"""What every transport must do, as tests: subclass ``TransportTests`` and override its ``transport`` fixture.

::

    class TestMine(TransportTests):
        @pytest.fixture
        async def transport(self) -> AsyncIterator[Transport]:
            transport = MyTransport(...)
            yield transport
            await transport.aclose()
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Awaitable, Callable

import anyio
import pytest

from dcr_stream.errors import AttemptFenced, PayloadRejected
from dcr_stream.interfaces import Transport
from dcr_stream.messages import Announcement, Attempt, Payload, PayloadId

__all__ = ["TransportTests", "announce", "make_payload"]

_numbers = itertools.count(1)


def make_payload(attempt: Attempt, owner: str, sequence: int, size: int = 1000) -> Payload:
    """A payload of ``size`` bytes, different for every identity."""
    bits = random.Random(f"{attempt.name}/{owner}/{sequence}/{size}")
    return Payload(PayloadId(attempt, owner, sequence), bits.randbytes(size))


def announce(payload: Payload) -> Announcement:
    """The announcement of ``payload``."""
    return Announcement(payload.id, payload.nbytes, payload.seal)


@pytest.mark.anyio
class TransportTests:
    """The contract of ``dcr_stream.interfaces.Transport``. Every wait is bounded by ``bound_s``."""

    bound_s: float = 10.0
    """How long a correct transport may take for the few payloads of one test, in seconds."""

    pause_s: float = 0.05
    """How long a task gets to begin waiting, in seconds. Never long enough to make a correct transport fail."""

    @pytest.fixture
    def anyio_backend(self) -> str:
        """The tests run on asyncio."""
        return "asyncio"

    @pytest.fixture
    def transport(self) -> Transport:
        """The transport under test: an owner's."""
        raise NotImplementedError("override the `transport` fixture")

    @pytest.fixture
    def node_transport(self, transport: Transport) -> Transport:
        """The transport as a node has it: override it if the two ends are different objects."""
        return transport

    @pytest.fixture
    def attempt(self) -> Attempt:
        """An attempt that no other test uses."""
        return Attempt("run_1", 7, next(_numbers), 3)

    async def test_every_payload_reaches_every_node(
        self, transport: Transport, node_transport: Transport, attempt: Attempt
    ) -> None:
        payloads = [make_payload(attempt, owner, i, 32 + 999 * i) for owner in ("rank0", "rank1") for i in range(4)]
        with anyio.fail_after(self.bound_s):
            for owner in ("rank0", "rank1"):
                async with transport.open_sink(attempt, owner) as sink:
                    for payload in payloads:
                        if payload.id.owner == owner:
                            await sink.send(payload)
            for node in ("node0", "node1", "node2"):
                async with node_transport.open_source(attempt, node) as source:
                    for payload in reversed(payloads):
                        assert await source.fetch(announce(payload)) == payload.body

    async def test_a_payload_is_ready_when_send_returns_and_not_only_when_the_sink_is_left(
        self, transport: Transport, node_transport: Transport, attempt: Attempt
    ) -> None:
        payload = make_payload(attempt, "rank0", 0)
        with anyio.fail_after(self.bound_s):
            async with transport.open_sink(attempt, "rank0") as sink:
                await sink.send(payload)
                async with node_transport.open_source(attempt, "node0") as source:
                    assert await source.fetch(announce(payload)) == payload.body

    async def test_fetch_waits_for_a_payload_on_its_way(
        self, transport: Transport, node_transport: Transport, attempt: Attempt
    ) -> None:
        payload = make_payload(attempt, "rank0", 0)
        bodies: list[bytes] = []

        async def fetch() -> None:
            async with node_transport.open_source(attempt, "node0") as source:
                bodies.append(await source.fetch(announce(payload)))

        with anyio.fail_after(self.bound_s):
            async with anyio.create_task_group() as group:
                group.start_soon(fetch)
                await anyio.sleep(self.pause_s)
                assert not bodies
                async with transport.open_sink(attempt, "rank0") as sink:
                    await sink.send(payload)
        assert bodies == [payload.body]

    async def test_concurrent_fetches_each_get_their_payload(
        self, transport: Transport, node_transport: Transport, attempt: Attempt
    ) -> None:
        payloads = [make_payload(attempt, "rank0", i) for i in range(8)]
        bodies: dict[tuple[str, int], bytes] = {}

        async def fetch(node: str, payload: Payload) -> None:
            async with node_transport.open_source(attempt, node) as source:
                bodies[node, payload.id.sequence] = await source.fetch(announce(payload))

        with anyio.fail_after(self.bound_s):
            async with anyio.create_task_group() as group:
                for payload in payloads:
                    for node in ("node0", "node1"):
                        group.start_soon(fetch, node, payload)
                async with transport.open_sink(attempt, "rank0") as sink:
                    for payload in reversed(payloads):
                        await sink.send(payload)
        assert bodies == {(node, p.id.sequence): p.body for p in payloads for node in ("node0", "node1")}

    async def test_fetch_is_repeatable(self, transport: Transport, node_transport: Transport, attempt: Attempt) -> None:
        payload = make_payload(attempt, "rank0", 0)
        with anyio.fail_after(self.bound_s):
            await _send(transport, payload)
            for _ in range(3):
                async with node_transport.open_source(attempt, "node0") as source:
                    assert await source.fetch(announce(payload)) == payload.body
                    assert await source.fetch(announce(payload)) == payload.body

    async def test_a_payload_sent_again_with_equal_bytes_is_no_error(
        self, transport: Transport, node_transport: Transport, attempt: Attempt
    ) -> None:
        payload = make_payload(attempt, "rank0", 0)
        with anyio.fail_after(self.bound_s):
            await _send(transport, payload)
            await _send(transport, payload)
            async with node_transport.open_source(attempt, "node0") as source:
                assert await source.fetch(announce(payload)) == payload.body

    @pytest.mark.parametrize("size", [1000, 999, 1001], ids=["equal_size", "shorter", "longer"])
    async def test_the_same_id_with_other_bytes_is_rejected(
        self, transport: Transport, node_transport: Transport, attempt: Attempt, size: int
    ) -> None:
        payload = make_payload(attempt, "rank0", 0)
        other = Payload(payload.id, make_payload(attempt, "rank1", 0, size).body)
        with anyio.fail_after(self.bound_s):
            await _send(transport, payload)
            with pytest.raises(PayloadRejected):
                await _send(transport, other)
            async with node_transport.open_source(attempt, "node0") as source:
                assert await source.fetch(announce(payload)) == payload.body

    async def test_discard_fences_late_sends(
        self, transport: Transport, node_transport: Transport, attempt: Attempt
    ) -> None:
        with anyio.fail_after(self.bound_s):
            async with transport.open_sink(attempt, "rank0") as sink:
                await sink.send(make_payload(attempt, "rank0", 0))
                await node_transport.discard(attempt)
                with pytest.raises(AttemptFenced):
                    await sink.send(make_payload(attempt, "rank0", 1))
            with pytest.raises(AttemptFenced):
                await _send(transport, make_payload(attempt, "rank0", 0))

    async def test_discard_fences_fetches_of_what_was_sent(
        self, transport: Transport, node_transport: Transport, attempt: Attempt
    ) -> None:
        payload = make_payload(attempt, "rank0", 0)
        with anyio.fail_after(self.bound_s):
            await _send(transport, payload)
            async with node_transport.open_source(attempt, "node0") as source:
                assert await source.fetch(announce(payload)) == payload.body
                await transport.discard(attempt)
                with pytest.raises(AttemptFenced):
                    await source.fetch(announce(payload))

    async def test_discard_ends_waiting_fetches(
        self, transport: Transport, node_transport: Transport, attempt: Attempt
    ) -> None:
        fenced: list[int] = []

        async def fetch(sequence: int) -> None:
            async with node_transport.open_source(attempt, "node0") as source:
                with pytest.raises(AttemptFenced):
                    await source.fetch(announce(make_payload(attempt, "rank0", sequence)))
            fenced.append(sequence)

        with anyio.fail_after(self.bound_s):
            async with anyio.create_task_group() as group:
                for sequence in range(3):
                    group.start_soon(fetch, sequence)
                await anyio.sleep(self.pause_s)
                await transport.discard(attempt)
        assert sorted(fenced) == [0, 1, 2]

    async def test_discard_is_idempotent_and_needs_no_payloads(self, transport: Transport, attempt: Attempt) -> None:
        with anyio.fail_after(self.bound_s):
            await transport.discard(attempt)
            await transport.discard(attempt)
            with pytest.raises(AttemptFenced):
                await _send(transport, make_payload(attempt, "rank0", 0))

    async def test_attempts_are_isolated(
        self, transport: Transport, node_transport: Transport, attempt: Attempt
    ) -> None:
        # Neither number nor epoch nor target alone tells attempts apart.
        others = [
            Attempt(attempt.run, attempt.target, next(_numbers), attempt.epoch),
            Attempt(attempt.run, attempt.target + 1, attempt.number, attempt.epoch),
            Attempt(attempt.run, attempt.target, attempt.number, attempt.epoch + 1),
            Attempt(f"{attempt.run}_2", attempt.target, attempt.number, attempt.epoch),
        ]
        with anyio.fail_after(self.bound_s):
            for one in (attempt, *others):
                await _send(transport, make_payload(one, "rank0", 0))
            await transport.discard(attempt)
            for one in others:
                payload = make_payload(one, "rank0", 0)
                async with node_transport.open_source(one, "node0") as source:
                    assert await source.fetch(announce(payload)) == payload.body
                await _send(transport, make_payload(one, "rank0", 1))

    async def test_owners_do_not_share_sequence_numbers(
        self, transport: Transport, node_transport: Transport, attempt: Attempt
    ) -> None:
        payloads = [make_payload(attempt, owner, 0) for owner in ("rank0", "rank-0", "rank.0", "rank-0-000000")]
        with anyio.fail_after(self.bound_s):
            for payload in payloads:
                await _send(transport, payload)
            async with node_transport.open_source(attempt, "node0") as source:
                for payload in payloads:
                    assert await source.fetch(announce(payload)) == payload.body

    async def test_cancelled_calls_leave_it_usable(
        self, transport: Transport, node_transport: Transport, attempt: Attempt
    ) -> None:
        payload, late = make_payload(attempt, "rank0", 0), make_payload(attempt, "rank0", 1)
        with anyio.fail_after(self.bound_s):
            async with transport.open_sink(attempt, "rank0") as sink:
                await _cancelled_at_once(lambda: sink.send(payload))
                await sink.send(payload)
            async with node_transport.open_source(attempt, "node0") as source:
                await _cancelled_at_once(lambda: source.fetch(announce(payload)))
                with anyio.move_on_after(self.pause_s):
                    await source.fetch(announce(late))
                assert await source.fetch(announce(payload)) == payload.body
                await _send(transport, late)
                assert await source.fetch(announce(late)) == late.body

    async def test_an_empty_set_is_no_error(
        self, transport: Transport, node_transport: Transport, attempt: Attempt
    ) -> None:
        with anyio.fail_after(self.bound_s):
            async with transport.open_sink(attempt, "rank0"), node_transport.open_source(attempt, "node0"):
                pass
            await transport.discard(attempt)

    async def test_payloads_above_the_stated_limit_are_rejected(self, transport: Transport, attempt: Attempt) -> None:
        limit = transport.capabilities.max_payload_bytes
        if limit is None or limit > 64 * 1024 * 1024:
            pytest.skip("states no limit that a test can exceed")
        with anyio.fail_after(self.bound_s), pytest.raises(PayloadRejected):
            await _send(transport, make_payload(attempt, "rank0", 0, limit + 1))


async def _send(transport: Transport, payload: Payload) -> None:
    async with transport.open_sink(payload.id.attempt, payload.id.owner) as sink:
        await sink.send(payload)


async def _cancelled_at_once(call: Callable[[], Awaitable[object]]) -> None:
    with anyio.CancelScope() as scope:
        scope.cancel()
        await call()
