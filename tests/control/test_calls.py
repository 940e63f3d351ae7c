"""Calls and notifications over a link, on every network."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import msgspec
import pytest

from dcr_stream.control import Codec, Connection, MemoryNetwork
from dcr_stream.control.rpc import MAX_IN_FLIGHT
from dcr_stream.errors import ControlError, DcrError, PeerLost, StaleEpoch, UsageError
from dcr_stream.interfaces import Link, Network

pytestmark = pytest.mark.anyio

ANY = "dcr://127.0.0.1:0"


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """A question."""

    what: str
    number: int = 0


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """An answer."""

    number: int


Any = Ask | Reply
DECODER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Any)
CODEC: Codec[Any] = Codec(DECODER)
Handler = Callable[[Any], Awaitable[Any | None]]
Pair = tuple[Connection[Any], Connection[Any]]


async def refuse(message: Any) -> Any | None:
    raise UsageError(f"nobody asked {message}")


async def run_until_lost(connection: Connection[Any]) -> None:
    with pytest.raises(PeerLost):
        await connection.run()


@asynccontextmanager
async def connected(network: Network, here: Handler = refuse, there: Handler = refuse) -> AsyncIterator[Pair]:
    """Two running ends of one link."""
    accepted: list[Connection[Any]] = []
    ready = anyio.Event()

    async def serve(link: Link) -> None:
        accepted.append(Connection(link, CODEC, there))
        ready.set()
        await accepted[0].run()

    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(network.listen(ANY, serve))
        connection = Connection(await network.dial(address), CODEC, here)
        group = await stack.enter_async_context(anyio.create_task_group())
        group.start_soon(run_until_lost, connection)
        try:
            await ready.wait()
            yield connection, accepted[0]
        finally:
            with anyio.CancelScope(shield=True):
                await connection.link.aclose()


async def double(message: Any) -> Any | None:
    return Reply(2 * message.number)


async def test_both_ends_call_each_other(network: Network) -> None:
    with anyio.fail_after(20):
        async with connected(network, double, double) as (here, there):
            assert await here.call(Ask("x", 4), timeout=10) == Reply(8)
            assert await there.call(Ask("x", 5), timeout=10) == Reply(10)


async def test_a_handler_may_call_back(network: Network) -> None:
    ends: list[Connection[Any]] = []

    async def ask_back(message: Any) -> Any | None:
        return await ends[1].call(Ask("back", message.number + 1), timeout=10)

    with anyio.fail_after(20):
        async with connected(network, double, ask_back) as pair:
            ends.extend(pair)
            assert await pair[0].call(Ask("x", 4), timeout=10) == Reply(10)


async def test_calls_run_at_once_and_answers_find_their_call(network: Network) -> None:
    """More calls than may be in flight, answered in the opposite order within each batch."""
    waiting: list[anyio.Event] = []
    answers: dict[int, Any | None] = {}

    async def hold(message: Any) -> Any | None:
        if message.number >= 20:
            return Reply(message.number)
        event = anyio.Event()
        waiting.append(event)
        if len(waiting) == 20:
            for one in reversed(waiting):
                one.set()
        await event.wait()
        return Reply(message.number)

    async def ask(connection: Connection[Any], number: int) -> None:
        answers[number] = await connection.call(Ask("x", number), timeout=20)

    with anyio.fail_after(30):
        async with connected(network, there=hold) as (here, _), anyio.create_task_group() as group:
            for number in range(2 * MAX_IN_FLIGHT):
                group.start_soon(ask, here, number)
    assert answers == {number: Reply(number) for number in range(2 * MAX_IN_FLIGHT)}


async def test_a_handler_that_returns_none_answers_with_none(network: Network) -> None:
    async def nothing(message: Any) -> Any | None:
        return None

    with anyio.fail_after(20):
        async with connected(network, there=nothing) as (here, _):
            assert await here.call(Ask("x"), timeout=10) is None


async def test_errors_keep_their_class_and_text(network: Network) -> None:
    async def fail(message: Any) -> Any | None:
        if message.number:
            raise StaleEpoch("epoch 3 was replaced by 4; stop this coordinator")
        raise KeyError("weights")

    with anyio.fail_after(20):
        async with connected(network, there=fail) as (here, _):
            with pytest.raises(StaleEpoch, match="epoch 3 was replaced by 4; stop this coordinator"):
                await here.call(Ask("x", 1), timeout=10)
            with pytest.raises(DcrError, match="KeyError: 'weights'") as raised:
                await here.call(Ask("x", 0), timeout=10)
            assert type(raised.value) is DcrError


async def test_an_answer_that_cannot_be_encoded_is_an_error_of_that_call(network: Network) -> None:
    async def wrong(message: Any) -> Any | None:
        return object()  # type: ignore[return-value]

    with anyio.fail_after(20):
        async with connected(network, there=wrong) as (here, _):
            with pytest.raises(DcrError, match="TypeError"):
                await here.call(Ask("x"), timeout=10)


async def test_notifications_are_handled_in_order_and_before_later_calls(network: Network) -> None:
    seen: list[int] = []

    async def note(message: Any) -> Any | None:
        if isinstance(message, Ask):
            return Reply(len(seen))
        await anyio.sleep(0.001 if message.number % 3 else 0)
        seen.append(message.number)
        return None

    with anyio.fail_after(30):
        async with connected(network, there=note) as (here, _):
            for number in range(2 * MAX_IN_FLIGHT):
                await here.notify(Reply(number))
            assert await here.call(Ask("how many"), timeout=20) == Reply(2 * MAX_IN_FLIGHT)
    assert seen == list(range(2 * MAX_IN_FLIGHT))


async def test_notifications_wait_for_a_slow_peer(network: Network) -> None:
    sent = 0

    async def stuck(message: Any) -> Any | None:
        await anyio.sleep_forever()
        return None

    with anyio.fail_after(20):
        async with connected(network, there=stuck) as (here, _):
            with anyio.move_on_after(1):
                for number in range(10 * MAX_IN_FLIGHT):
                    await here.notify(Reply(number))
                    sent += 1
    assert sent == MAX_IN_FLIGHT


async def test_a_call_without_answer_ends_at_its_timeout_and_the_link_goes_on(network: Network) -> None:
    """D4: a peer that never answers holds nobody longer than stated."""

    async def sleep(message: Any) -> Any | None:
        if message.number:
            await anyio.sleep_forever()
        return Reply(1)

    with anyio.fail_after(20):
        async with connected(network, there=sleep) as (here, _):
            with pytest.raises(ControlError, match=r"did not answer Ask within 0\.05 s"):
                await here.call(Ask("x", 1), timeout=0.05)
            assert await here.call(Ask("x", 0), timeout=10) == Reply(1)


async def test_a_lost_link_fails_every_pending_call(network: Network) -> None:
    """D3: calls that wait for a peer end when it is gone, naming it."""
    failed: list[str] = []
    asked: list[int] = []
    all_asked = anyio.Event()

    async def hang(message: Any) -> Any | None:
        asked.append(message.number)
        if len(asked) == 5:
            all_asked.set()
        await anyio.sleep_forever()
        return None

    async def ask(connection: Connection[Any], number: int) -> None:
        with pytest.raises(PeerLost) as raised:
            await connection.call(Ask("x", number), timeout=60)
        failed.append(str(raised.value))

    with anyio.fail_after(20):
        async with connected(network, there=hang) as (here, there), anyio.create_task_group() as group:
            for i in range(5):
                group.start_soon(ask, here, i)
            await all_asked.wait()
            await there.link.aclose()
        assert len(failed) == 5
        assert all("dcr://127.0.0.1" in text for text in failed)
        with pytest.raises(PeerLost):
            await here.call(Ask("later"), timeout=60)
        with pytest.raises(PeerLost):
            await here.notify(Ask("later"))


async def test_an_error_on_the_control_plane_cancels_the_data_plane(network: Network) -> None:
    """D3: a transfer beside the connection ends when the peer refuses or is lost; nothing waits for ever."""
    moved: list[str] = []

    async def transfer() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            moved.append("cancelled")

    async def drop(link: Link) -> None:
        await link.receive()

    with anyio.fail_after(20):
        async with network.listen(ANY, drop) as address:
            connection = Connection(await network.dial(address), CODEC, refuse)

            async def refit() -> None:
                async with anyio.create_task_group() as group:
                    group.start_soon(connection.run)
                    group.start_soon(transfer)
                    await connection.notify(Ask("x"))

            with pytest.raises(ExceptionGroup) as raised:
                await refit()
    assert moved == ["cancelled"]
    assert raised.group_contains(PeerLost)


async def test_an_error_in_a_notification_ends_the_connection_with_it(network: Network) -> None:
    found: list[Exception] = []

    async def fail(message: Any) -> Any | None:
        raise StaleEpoch("old")

    async def serve(link: Link) -> None:
        try:
            await Connection(link, CODEC, fail).run()
        except StaleEpoch as error:
            found.append(error)

    with anyio.fail_after(20):
        async with network.listen(ANY, serve) as address:
            connection = Connection(await network.dial(address), CODEC, refuse)
            await connection.notify(Ask("x"))
            with pytest.raises(PeerLost):
                await connection.run()
    assert [str(error) for error in found] == ["old"]


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x93\xa1q\x01\xa5junk", msgspec.msgpack.encode(["z", 1, 2])])
async def test_a_frame_that_is_no_envelope_ends_the_connection(network: Network, frame: bytes) -> None:
    async def send_junk(link: Link) -> None:
        await link.send(frame)
        await link.receive()

    with anyio.fail_after(20):
        async with network.listen(ANY, send_junk) as address:
            connection = Connection(await network.dial(address), CODEC, refuse)
            with pytest.raises(ControlError, match="run the same version of dcr-stream"):
                await connection.run()


async def test_an_unknown_message_is_refused_and_the_connection_goes_on(network: Network) -> None:
    class Other(msgspec.Struct, tag="other"):
        """A message of another version."""

    with anyio.fail_after(20):
        async with connected(network, there=double) as (here, _):
            with pytest.raises(ControlError, match="is no message that this role knows"):
                await here.call(Other(), timeout=10)  # type: ignore[arg-type]
            assert await here.call(Ask("x", 1), timeout=10) == Reply(2)


async def test_a_peer_that_ignores_the_bound_on_requests_is_dropped() -> None:
    network = MemoryNetwork()

    async def flood(link: Link) -> None:
        for number in range(3 * MAX_IN_FLIGHT):
            await link.send(msgspec.msgpack.encode(["q", number, Ask("x")]))
        await link.receive()

    async def hang(message: Any) -> Any | None:
        await anyio.sleep_forever()
        return None

    with anyio.fail_after(20):
        async with network.listen(ANY, flood) as address:
            with pytest.raises(ControlError, match="requests in flight"):
                await Connection(await network.dial(address), CODEC, hang).run()


async def test_a_connection_runs_once() -> None:
    async with connected(MemoryNetwork()) as (here, _):
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(UsageError, match="call run"):
            await here.run()


async def test_memory_is_flat_over_a_thousand_calls(network: Network) -> None:
    async def ask(connection: Connection[Any], count: int) -> None:
        for number in range(count):
            await connection.notify(Reply(number))
            assert await connection.call(Ask("x" * 1000, number), timeout=20) == Reply(2 * number)

    with anyio.fail_after(60):
        async with connected(network, there=double) as (here, there):
            await ask(here, 300)
            gc.collect()
            tracemalloc.start()
            try:
                before = tracemalloc.get_traced_memory()[0]
                await ask(here, 1000)
                gc.collect()
                grown = tracemalloc.get_traced_memory()[0] - before
            finally:
                tracemalloc.stop()
            assert not here._pending
            assert not there._unanswered
    assert grown < 500_000  # a thousand kept requests would be a megabyte
