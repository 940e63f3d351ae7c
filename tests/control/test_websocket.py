"""Who may connect, and that no frame can be altered, replayed or reordered on the way."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import aiohttp
import anyio
import anyio.abc
import pytest

from dcr_stream.control import WebSocketNetwork, websocket
from dcr_stream.control.handshake import FrameGuard, Handshake
from dcr_stream.errors import AuthenticationFailed, ControlError, ListenFailed, PeerLost, UsageError
from dcr_stream.interfaces import Link
from tests.control.conftest import SECRET

pytestmark = pytest.mark.anyio

ANY = "dcr://127.0.0.1:0"


async def echo(link: Link) -> None:
    while True:
        await link.send(await link.receive())


@pytest.mark.parametrize(
    ("listener", "dialler"),
    [(SECRET, b"another secret!!"), (SECRET, None), (None, SECRET)],
    ids=["other", "dialler_without", "listener_without"],
)
async def test_another_secret_is_refused(listener: bytes | None, dialler: bytes | None) -> None:
    served: list[Link] = []

    async def serve(link: Link) -> None:
        served.append(link)

    with anyio.fail_after(20):
        async with WebSocketNetwork(listener).listen(ANY, serve) as address:
            with pytest.raises(AuthenticationFailed, match="give both sides the same secret file"):
                await WebSocketNetwork(dialler).dial(address)
    assert not served


async def test_a_dialler_that_only_pretends_to_hold_the_secret_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener checks for itself: a dialler that skips its own check gets no further."""
    monkeypatch.setattr(Handshake, "accepts", _accepts_any_listener)
    with anyio.fail_after(20):
        async with WebSocketNetwork(SECRET).listen(ANY, echo) as address:
            with pytest.raises(AuthenticationFailed):
                await WebSocketNetwork(b"another secret!!").dial(address)


_accepts = Handshake.accepts


def _accepts_any_listener(self: Handshake, side: str, proof: bytes) -> bool:
    return side == "listener" or _accepts(self, "dialler", proof)


async def test_a_recorded_handshake_cannot_be_played_again() -> None:
    with anyio.fail_after(20):
        async with WebSocketNetwork(SECRET).listen(ANY, echo) as address, aiohttp.ClientSession() as session:
            base = address.replace("dcr://", "http://")
            nonce = b"n" * 32
            async with session.get(f"{base}/dcr/1/hello", headers={"X-Dcr-Dialler-Nonce": nonce.hex()}) as answer:
                listener_nonce = bytes.fromhex(answer.headers["X-Dcr-Listener-Nonce"])
            headers = {
                "X-Dcr-Dialler-Nonce": nonce.hex(),
                "X-Dcr-Listener-Nonce": listener_nonce.hex(),
                "X-Dcr-Proof": Handshake(SECRET, nonce, listener_nonce).proof("dialler").hex(),
            }
            async with session.ws_connect(f"{base}/dcr/1/link", headers=headers):
                pass
            with pytest.raises(aiohttp.WSServerHandshakeError, match="401"):
                await session.ws_connect(f"{base}/dcr/1/link", headers=headers)


@pytest.mark.parametrize("path", ["/", "/dcr/1/hello", "/dcr/1/link", "/dcr/2/link"])
async def test_whoever_does_not_speak_the_protocol_learns_nothing(path: str) -> None:
    with anyio.fail_after(20):
        async with (
            WebSocketNetwork(SECRET).listen(ANY, echo) as address,
            aiohttp.ClientSession() as session,
            session.get(address.replace("dcr://", "http://") + path) as answer,
        ):
            assert answer.status == 404
            assert await answer.read() == b""


async def test_something_else_that_answers_is_a_lost_peer() -> None:
    async def serve(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.receive()
            await stream.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")

    with anyio.fail_after(20):
        async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
            port = listener.extra(anyio.abc.SocketAttribute.local_port)
            async with anyio.create_task_group() as group:
                group.start_soon(listener.serve, serve)
                with pytest.raises(PeerLost, match="no dcr-stream role"):
                    await WebSocketNetwork(SECRET).dial(f"dcr://127.0.0.1:{port}")
                group.cancel_scope.cancel()


async def test_a_listener_that_never_answers_ends_the_handshake_in_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(websocket, "HANDSHAKE_S", 0.2)

    async def hang(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await anyio.sleep_forever()

    with anyio.fail_after(20):
        async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
            port = listener.extra(anyio.abc.SocketAttribute.local_port)
            async with anyio.create_task_group() as group:
                group.start_soon(listener.serve, hang)
                with pytest.raises(PeerLost, match=r"no answer within 0\.2 s"):
                    await WebSocketNetwork(SECRET).dial(f"dcr://127.0.0.1:{port}")
                group.cancel_scope.cancel()


async def test_strangers_are_bounded_and_dropped_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "MAX_STRANGERS", 4)
    monkeypatch.setattr(websocket, "HANDSHAKE_S", 0.5)
    with anyio.fail_after(30):
        async with WebSocketNetwork(SECRET).listen(ANY, echo) as address:
            member = await WebSocketNetwork(SECRET).dial(address)
            port = int(address.rpartition(":")[2])
            strangers = [await anyio.connect_tcp("127.0.0.1", port) for _ in range(8)]
            for stranger in strangers:  # four are dropped at once, four when they have been silent for too long
                with suppress(anyio.BrokenResourceError), pytest.raises(anyio.EndOfStream):
                    await stranger.receive()
                await stranger.aclose()
            await member.send(b"still here")
            assert await member.receive() == b"still here"
            another = await WebSocketNetwork(SECRET).dial(address)
            await another.aclose()
            await member.aclose()


@pytest.mark.parametrize(
    "address", ["dcr://0.0.0.0:0", "dcr://:0", "dcr://[::]:0", "dcr://192.0.2.1:0", "dcr://host.invalid:0"]
)
async def test_beyond_loopback_a_secret_and_a_word_on_plaintext_are_needed(address: str) -> None:
    for network, way_out in (
        (WebSocketNetwork(None), "DCR_STREAM_SECRET_FILE"),
        (WebSocketNetwork(None, insecure_plaintext=True), "DCR_STREAM_SECRET_FILE"),
        (WebSocketNetwork(SECRET), "--insecure-plaintext"),
    ):
        with pytest.raises(ListenFailed, match=way_out):
            async with network.listen(address, echo):
                pass
        with pytest.raises(UsageError, match=way_out):
            await network.dial(address)


async def test_with_a_secret_and_insecure_plaintext_every_interface_is_listened_on() -> None:
    network = WebSocketNetwork(SECRET, insecure_plaintext=True)
    with anyio.fail_after(20):
        async with network.listen("dcr://0.0.0.0:0", echo) as address:
            link = await network.dial(address.replace("0.0.0.0", "127.0.0.1"))
            await link.send(b"x")
            assert await link.receive() == b"x"
            await link.aclose()


@pytest.mark.parametrize(
    "address",
    [
        "",
        "127.0.0.1:7000",
        "http://127.0.0.1:7000",
        "dcr://127.0.0.1",
        "dcr://h:x",
        "dcr://h:70000",
        "dcr://u:p@h:1",
        "dcr://h:1/path",
    ],
)
async def test_an_address_that_is_not_understood_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match="write dcr://HOST:PORT"):
        await WebSocketNetwork(SECRET).dial(address)
    with pytest.raises(UsageError, match="write dcr://HOST:PORT"):
        async with WebSocketNetwork(SECRET).listen(address, echo):
            pass


async def test_an_address_that_is_not_ours_cannot_be_listened_on() -> None:
    network = WebSocketNetwork(SECRET, insecure_plaintext=True)
    with pytest.raises(ListenFailed, match=r"192\.0\.2\.1"):
        async with network.listen("dcr://192.0.2.1:0", echo):
            pass


async def test_a_frame_above_the_limit_is_refused_by_its_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "MAX_FRAME_BYTES", 1000)
    with anyio.fail_after(20):
        async with WebSocketNetwork(SECRET).listen(ANY, echo) as address:
            link = await WebSocketNetwork(SECRET).dial(address)
            with pytest.raises(UsageError, match="send payloads through the transport"):
                await link.send(b"x" * 1000)
            await link.send(b"x" * 900)
            assert len(await link.receive()) == 900
            await link.aclose()


async def test_a_dead_peer_is_noticed_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wire stays open and nothing comes back any more: only the heartbeat can tell."""
    monkeypatch.setattr(websocket, "HEARTBEAT_S", 0.2)
    with anyio.fail_after(20):
        async with WebSocketNetwork(SECRET).listen(ANY, echo) as address, wire(address) as (via, cut):
            link = await WebSocketNetwork(SECRET).dial(via)
            await link.send(b"x")
            assert await link.receive() == b"x"
            cut.set()
            with pytest.raises(PeerLost):
                await link.receive()
            await link.aclose()


@asynccontextmanager
async def wire(address: str) -> AsyncIterator[tuple[str, anyio.Event]]:
    """A TCP relay before ``address`` that swallows everything once its event is set."""
    port = int(address.rpartition(":")[2])
    cut = anyio.Event()

    async def pump(source: anyio.abc.SocketStream, sink: anyio.abc.SocketStream) -> None:
        with suppress(anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for part in source:
                if not cut.is_set():
                    await sink.send(part)

    async def relay(client: anyio.abc.SocketStream) -> None:
        async with client, await anyio.connect_tcp("127.0.0.1", port) as server, anyio.create_task_group() as group:
            group.start_soon(pump, client, server)
            await pump(server, client)
            group.cancel_scope.cancel()

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, relay)
        yield f"dcr://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}", cut
        group.cancel_scope.cancel()


Tamper = Callable[[list[bytes]], list[bytes]]


def flipped(position: int) -> Tamper:
    def tamper(frames: list[bytes]) -> list[bytes]:
        damaged = bytearray(frames[1])
        damaged[position] ^= 1
        return [frames[0], bytes(damaged), *frames[2:]]

    return tamper


def renumbered(frames: list[bytes]) -> list[bytes]:
    return [frames[0], struct.pack("<Q", 2) + frames[1][8:], *frames[2:]]


TAMPERINGS: dict[str, Tamper] = {
    "flipped_sequence": flipped(0),
    "flipped_body": flipped(8),
    "flipped_mac": flipped(-1),
    "renumbered": renumbered,
    "replayed": lambda frames: [frames[0], frames[0]],
    "reordered": lambda frames: [frames[0], frames[2], frames[1]],
    "left_out": lambda frames: [frames[0], frames[2]],
    "shortened": lambda frames: [frames[0], frames[1][:-1]],
    "extended": lambda frames: [frames[0], frames[1] + b"x"],
    "too_short": lambda frames: [frames[0], b"x"],
    "empty": lambda frames: [frames[0], b""],
}


@pytest.mark.parametrize("tampering", TAMPERINGS)
async def test_a_tampered_frame_is_refused_and_the_link_closes(tampering: str) -> None:
    """The first frame arrives; what was done to the rest is noticed before anything of it is used."""
    received: list[bytes] = []
    failed: list[AuthenticationFailed] = []

    async def serve(link: Link) -> None:
        try:
            while True:
                received.append(await link.receive())
        except AuthenticationFailed as error:
            failed.append(error)
        with pytest.raises(PeerLost):
            await link.receive()

    with anyio.fail_after(20):
        async with WebSocketNetwork(SECRET).listen(ANY, serve) as address:
            link = await WebSocketNetwork(SECRET).dial(address)
            assert isinstance(link, websocket._WebSocketLink)
            frames = [link._sends.wrap(body) for body in (b"first", b"second", b"third")]
            for frame in TAMPERINGS[tampering](frames):
                await link._socket.send_bytes(frame)
            with pytest.raises(PeerLost):
                await link.receive()
            await link.aclose()
    assert received == [b"first"]
    assert len(failed) == 1
    assert "dial again" in str(failed[0])


async def test_a_frame_cannot_be_reflected_or_carried_to_another_link() -> None:
    ends = Handshake(SECRET, b"d" * 32, b"l" * 32)
    other = Handshake(SECRET, b"e" * 32, b"l" * 32)
    frame = FrameGuard(ends.frame_key("dialler"), "peer").wrap(b"body")
    assert FrameGuard(ends.frame_key("dialler"), "peer").unwrap(frame) == b"body"
    for key in (ends.frame_key("listener"), other.frame_key("dialler"), other.frame_key("listener")):
        with pytest.raises(AuthenticationFailed):
            FrameGuard(key, "peer").unwrap(frame)


async def test_a_text_frame_or_one_above_the_limit_ends_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "MAX_FRAME_BYTES", 1000)
    failed: list[ControlError] = []

    async def serve(link: Link) -> None:
        try:
            await link.receive()
        except ControlError as error:
            failed.append(error)

    with anyio.fail_after(20):
        async with WebSocketNetwork(SECRET).listen(ANY, serve) as address:
            for bad in ("text", b"x" * 2000):
                link = await WebSocketNetwork(SECRET).dial(address)
                assert isinstance(link, websocket._WebSocketLink)
                if isinstance(bad, str):
                    await link._socket.send_str(bad)
                else:
                    await link._socket.send_bytes(bad)
                with pytest.raises(PeerLost):
                    await link.receive()
                await link.aclose()
    assert len(failed) == 2
