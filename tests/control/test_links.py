"""What a link and a listener promise, on every network."""

from __future__ import annotations

import anyio
import pytest

from dcr_stream.errors import ControlError, ListenFailed, PeerLost
from dcr_stream.interfaces import Link, Network

pytestmark = pytest.mark.anyio

ANY = "dcr://127.0.0.1:0"


async def echo(link: Link) -> None:
    while True:
        await link.send(await link.receive())


async def test_frames_arrive_whole_and_in_order(network: Network) -> None:
    frames = [b"", b"\0", b"x" * 1_000_000, *(bytes([i]) * i for i in range(100))]
    with anyio.fail_after(20):
        async with network.listen(ANY, echo) as address:
            link = await network.dial(address)
            for frame in frames:
                await link.send(frame)
            assert [await link.receive() for _ in frames] == frames
            await link.aclose()


async def test_every_dialler_gets_a_link_of_its_own(network: Network) -> None:
    with anyio.fail_after(20):
        async with network.listen(ANY, echo) as address:
            links = [await network.dial(address) for _ in range(5)]
            for i, link in enumerate(links):
                await link.send(bytes([i]))
            assert [await link.receive() for link in links] == [bytes([i]) for i in range(5)]
            for link in links:
                await link.aclose()


async def test_closing_one_end_is_seen_by_the_other(network: Network) -> None:
    lost = anyio.Event()

    async def watch(link: Link) -> None:
        with pytest.raises(PeerLost):
            await link.receive()
        lost.set()

    with anyio.fail_after(20):
        async with network.listen(ANY, watch) as address:
            link = await network.dial(address)
            await link.aclose()
            await link.aclose()
            for call in (link.send(b"x"), link.receive()):
                with pytest.raises(PeerLost, match=r"127\.0\.0\.1"):
                    await call
            await lost.wait()


async def test_a_link_closes_when_its_handler_returns(network: Network) -> None:
    async def greet(link: Link) -> None:
        await link.send(b"hello")

    with anyio.fail_after(20):
        async with network.listen(ANY, greet) as address:
            link = await network.dial(address)
            assert await link.receive() == b"hello"
            with pytest.raises(PeerLost):
                await link.receive()
            await link.aclose()


async def test_links_close_when_the_listener_ends(network: Network) -> None:
    with anyio.fail_after(20):
        async with network.listen(ANY, echo) as address:
            link = await network.dial(address)
            await link.send(b"x")
            assert await link.receive() == b"x"
        with pytest.raises(PeerLost):
            await link.receive()
        await link.aclose()
        with pytest.raises(PeerLost, match="start that role"):
            await network.dial(address)


async def test_an_address_in_use_is_named_with_the_way_out(network: Network) -> None:
    async with network.listen(ANY, echo) as address:
        with pytest.raises(ListenFailed, match=rf"{address} .* port 0"):
            async with network.listen(address, echo):
                pass
        async with network.listen(ANY, echo) as other:
            assert other != address
    async with network.listen(address, echo) as again:
        assert again == address


async def test_nobody_listening_is_a_lost_peer(network: Network) -> None:
    async with network.listen(ANY, echo) as address:
        pass
    with anyio.fail_after(20), pytest.raises(PeerLost, match=r"nobody .*127\.0\.0\.1.*start that role"):
        await network.dial(address)


async def test_a_control_error_of_one_link_leaves_the_others(network: Network) -> None:
    async def refuse_or_echo(link: Link) -> None:
        if await link.receive() == b"bad":
            raise ControlError("no such frame")
        await echo(link)

    with anyio.fail_after(20):
        async with network.listen(ANY, refuse_or_echo) as address:
            good, bad = await network.dial(address), await network.dial(address)
            await good.send(b"good")
            await bad.send(b"bad")
            with pytest.raises(PeerLost):
                await bad.receive()
            await good.send(b"x")
            assert await good.receive() == b"x"
            await good.aclose()
            await bad.aclose()


async def test_a_fault_of_the_handler_is_raised_by_the_listener(network: Network) -> None:
    async def faulty(link: Link) -> None:
        raise ZeroDivisionError("a fault of this role")

    async def listen_for_ever() -> None:
        async with network.listen(ANY, faulty) as address:
            link = await network.dial(address)
            try:
                await anyio.sleep_forever()
            finally:
                await link.aclose()

    with anyio.fail_after(20), pytest.raises(ZeroDivisionError):
        await listen_for_ever()


async def test_an_error_of_the_listeners_block_comes_out_as_it_is(network: Network) -> None:
    with pytest.raises(ZeroDivisionError):
        async with network.listen(ANY, echo):
            raise ZeroDivisionError


async def test_a_sender_waits_for_a_receiver_that_does_not_read(network: Network) -> None:
    """Queues are bounded: a peer that does not read cannot make the sender's memory grow."""
    frame = b"x" * 1_000_000
    sent = 0

    async def ignore(link: Link) -> None:
        await anyio.sleep_forever()

    with anyio.fail_after(60):
        async with network.listen(ANY, ignore) as address:
            link = await network.dial(address)
            with anyio.move_on_after(1.5) as scope:
                for _ in range(2000):
                    await link.send(frame)
                    sent += 1
            assert scope.cancelled_caught
            await link.aclose()
    assert sent < 500
