"""Control links between processes: WebSockets whose frames are authenticated with the run's secret."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final

import aiohttp
import anyio
from aiohttp import web
from anyio.abc import TaskGroup

from dcr_stream.control.address import Address
from dcr_stream.control.handshake import MAC_BYTES, NONCE_BYTES, FrameGuard, Handshake, new_nonce
from dcr_stream.control.serving import background, serve_link
from dcr_stream.errors import AuthenticationFailed, ControlError, ListenFailed, PeerLost, UsageError
from dcr_stream.interfaces import Link, Network

__all__ = ["MAX_FRAME_BYTES", "WebSocketNetwork"]

MAX_FRAME_BYTES = 64 * 1024 * 1024
"""Longer frames are refused, by the sender and (from their declared length) by the receiver."""

HEARTBEAT_S = 10.0
"""A peer that answers no ping is given up after one and a half times this."""

HANDSHAKE_S = 10.0
"""A peer that has not proved itself by then is dropped."""

MAX_STRANGERS = 64
"""Connections that have not proved themselves yet; more are dropped at once."""

_CLOSE_S = 2.0
_HELLO: Final = "/dcr/1/hello"
_LINK: Final = "/dcr/1/link"
_DIALLER = "X-Dcr-Dialler-Nonce"
_LISTENER = "X-Dcr-Listener-Nonce"
_PROOF = "X-Dcr-Proof"

_Socket = aiohttp.ClientWebSocketResponse | web.WebSocketResponse


class _WebSocketLink(Link):
    def __init__(
        self,
        peer: str,
        socket: _Socket,
        sends: FrameGuard,
        receives: FrameGuard,
        session: aiohttp.ClientSession | None = None,
    ) -> None:
        self.peer = peer
        self._socket = socket
        self._sends = sends
        self._receives = receives
        self._session = session
        self._order = anyio.Lock()

    async def send(self, frame: bytes) -> None:
        if len(frame) + FrameGuard.OVERHEAD > MAX_FRAME_BYTES:
            raise UsageError(
                f"a control frame of {len(frame)} bytes to {self.peer} exceeds {MAX_FRAME_BYTES}; "
                "send payloads through the transport"
            )
        async with self._order:
            if self._socket.closed:
                raise self._lost()
            try:
                # aiohttp writes the whole frame before its first await, so a cancelled send leaves no half a frame.
                await self._socket.send_bytes(self._sends.wrap(frame))
            except (ConnectionError, RuntimeError, aiohttp.ClientError) as error:
                raise self._lost() from error

    async def receive(self) -> bytes:
        try:
            message = await self._socket.receive()
        except (ConnectionError, RuntimeError, aiohttp.ClientError) as error:
            raise self._lost() from error
        if message.type is not aiohttp.WSMsgType.BINARY:
            await self.aclose()
            if message.type is aiohttp.WSMsgType.ERROR and isinstance(message.data, aiohttp.WebSocketError):
                raise ControlError(f"{self.peer} broke the protocol of the link: {message.data}; the link is closed")
            raise self._lost()
        try:
            return self._receives.unwrap(message.data)
        except AuthenticationFailed:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        with anyio.move_on_after(_CLOSE_S, shield=True):
            await self._socket.close()
        if self._session is not None:
            with anyio.move_on_after(_CLOSE_S, shield=True):
                await self._session.close()

    def _lost(self) -> PeerLost:
        return PeerLost(f"the link to {self.peer} is closed; dial it again once it runs")


class WebSocketNetwork(Network):
    """Links over TCP. Addresses are ``dcr://HOST:PORT``.

    Both ends prove that they hold ``secret`` before a WebSocket exists; after that every frame carries a sequence
    number and a MAC bound to link and direction, so none can be altered, replayed or reordered unnoticed. Frames
    are not encrypted. Anyone who holds the secret can forge: it is one secret for all members of a run.

    Without a secret only loopback may be listened on or dialled; beyond loopback ``insecure_plaintext`` must say
    that the network between the hosts is trusted to keep what it carries to itself.
    """

    def __init__(self, secret: bytes | None, *, insecure_plaintext: bool = False) -> None:
        self._secret = secret
        self._insecure_plaintext = insecure_plaintext

    def listen(self, address: str, handler: Callable[[Link], Awaitable[None]]) -> AbstractAsyncContextManager[str]:
        """Serve links at ``address``; see ``Network.listen``."""
        return self._listen(address, handler)

    @asynccontextmanager
    async def _listen(self, address: str, handler: Callable[[Link], Awaitable[None]]) -> AsyncIterator[str]:
        where = Address.parse(address)
        if (refusal := self._refusal(where)) is not None:
            raise ListenFailed(f"{where} cannot be listened on: {refusal}")
        door = _Door(self._secret, handler)
        runner = web.ServerRunner(door.server, shutdown_timeout=_CLOSE_S)
        await runner.setup()
        try:
            site = web.TCPSite(runner, where.host or None, where.port)
            try:
                await site.start()
            except OSError as error:
                raise ListenFailed(f"{where} cannot be listened on: {_why(error)}") from error
            port: int = runner.addresses[0][1]
            async with background() as group:
                door.open(group)
                yield str(Address(where.host, port))
        finally:
            with anyio.move_on_after(2 * _CLOSE_S, shield=True):
                await runner.cleanup()

    async def dial(self, address: str) -> Link:
        """Connect and prove both ends to each other; see ``Network.dial``."""
        where = Address.parse(address)
        if (refusal := self._refusal(where)) is not None:
            raise UsageError(f"{where} cannot be dialled: {refusal}")
        session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), trust_env=False)
        try:
            with anyio.fail_after(HANDSHAKE_S):
                return await self._introduce(session, where)
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                await session.close()
            if isinstance(error, TimeoutError | OSError | aiohttp.ClientError):
                raise PeerLost(
                    f"nobody answers at {where}: {_why(error)}; start that role, or check the address"
                ) from error
            raise

    async def _introduce(self, session: aiohttp.ClientSession, where: Address) -> Link:
        nonce = new_nonce()
        async with session.get(where.http(_HELLO), headers={_DIALLER: nonce.hex()}, allow_redirects=False) as answer:
            listener_nonce = _unhex(answer.headers.get(_LISTENER), NONCE_BYTES)
            proof = _unhex(answer.headers.get(_PROOF), MAC_BYTES)
        if answer.status != 200 or listener_nonce is None or proof is None:
            raise PeerLost(f"what answers at {where} is no dcr-stream role (HTTP {answer.status}); check the address")
        handshake = Handshake(self._secret, nonce, listener_nonce)
        refused = AuthenticationFailed(
            f"{where} does not hold this run's secret; give both sides the same secret file (DCR_STREAM_SECRET_FILE)"
        )
        if not handshake.accepts("listener", proof):
            raise refused
        try:
            socket = await session.ws_connect(
                where.http(_LINK),
                headers={
                    _DIALLER: nonce.hex(),
                    _LISTENER: listener_nonce.hex(),
                    _PROOF: handshake.proof("dialler").hex(),
                },
                heartbeat=HEARTBEAT_S,
                max_msg_size=MAX_FRAME_BYTES,
                timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_S),  # pyright: ignore[reportCallIssue]
            )
        except aiohttp.WSServerHandshakeError as error:
            if error.status == 401:
                raise refused from error
            raise
        return _WebSocketLink(
            str(where),
            socket,
            sends=FrameGuard(handshake.frame_key("dialler"), str(where)),
            receives=FrameGuard(handshake.frame_key("listener"), str(where)),
            session=session,
        )

    def _refusal(self, where: Address) -> str | None:
        if where.loopback:
            return None
        if self._secret is None:
            return "beyond loopback a secret is needed; set DCR_STREAM_SECRET_FILE, or use dcr://127.0.0.1:PORT"
        if not self._insecure_plaintext:
            return (
                "beyond loopback frames would travel unencrypted; say --insecure-plaintext if the network is trusted, "
                "or use dcr://127.0.0.1:PORT through a tunnel"
            )
        return None


class _Door:
    """Lets in who holds the secret; runs the handler of each link in the listener's task group."""

    def __init__(self, secret: bytes | None, handler: Callable[[Link], Awaitable[None]]) -> None:
        self._secret = secret
        self._group: TaskGroup | None = None
        self._handler = handler
        self._offered: dict[bytes, bytes] = {}
        self._members = 0
        self.server = _BoundedServer(self)

    def open(self, group: TaskGroup) -> None:
        """Let peers in; their handlers run in ``group``."""
        self._group = group

    @property
    def members(self) -> int:
        """Connections that have proved themselves."""
        return self._members

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        dialler_nonce = _unhex(request.headers.get(_DIALLER), NONCE_BYTES)
        if dialler_nonce is None or request.method != "GET" or self._group is None:
            return web.Response(status=404)
        if request.path == _HELLO:
            return self._hello(dialler_nonce)
        if request.path == _LINK:
            return await self._link(request, dialler_nonce, self._group)
        return web.Response(status=404)

    def _hello(self, dialler_nonce: bytes) -> web.Response:
        nonce = new_nonce()
        while len(self._offered) >= 4 * MAX_STRANGERS:
            del self._offered[next(iter(self._offered))]
        self._offered[nonce] = dialler_nonce
        proof = Handshake(self._secret, dialler_nonce, nonce).proof("listener")
        return web.Response(headers={_LISTENER: nonce.hex(), _PROOF: proof.hex()})

    async def _link(self, request: web.BaseRequest, dialler_nonce: bytes, group: TaskGroup) -> web.StreamResponse:
        nonce = _unhex(request.headers.get(_LISTENER), NONCE_BYTES)
        proof = _unhex(request.headers.get(_PROOF), MAC_BYTES)
        # A nonce is good for one link, so a recorded handshake cannot be played again.
        if nonce is None or proof is None or self._offered.pop(nonce, None) != dialler_nonce:
            return web.Response(status=401)
        handshake = Handshake(self._secret, dialler_nonce, nonce)
        if not handshake.accepts("dialler", proof):
            return web.Response(status=401)
        socket = web.WebSocketResponse(timeout=_CLOSE_S, heartbeat=HEARTBEAT_S, max_msg_size=MAX_FRAME_BYTES)
        self._members += 1
        try:
            await socket.prepare(request)
            peer = f"peer at {request.remote}"
            link = _WebSocketLink(
                peer,
                socket,
                sends=FrameGuard(handshake.frame_key("listener"), peer),
                receives=FrameGuard(handshake.frame_key("dialler"), peer),
            )
            ended = anyio.Event()

            async def serve() -> None:
                try:
                    await serve_link(link, self._handler)
                finally:
                    ended.set()

            group.start_soon(serve)
            await ended.wait()
        finally:
            self._members -= 1
        return socket


class _BoundedServer(web.Server):
    """Drops connections beyond ``MAX_STRANGERS`` that have not proved themselves, and idle ones after a while."""

    def __init__(self, door: _Door) -> None:
        super().__init__(door, keepalive_timeout=HANDSHAKE_S, access_log=None)
        self._door = door

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if len(self.connections) - self._door.members > MAX_STRANGERS:
            # Not at once: aiohttp starts this connection's task first, and that must find its server.
            asyncio.get_running_loop().call_soon(transport.abort)


def _unhex(text: str | None, size: int) -> bytes | None:
    if text is None or len(text) != 2 * size:
        return None
    try:
        return bytes.fromhex(text)
    except ValueError:
        return None


def _why(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return "the address is in use; end what listens there, or take port 0 for any free one"
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM):
        return "not permitted; take a port above 1023"
    if isinstance(error, TimeoutError):
        return f"no answer within {HANDSHAKE_S:g} s"
    return f"{error}"
