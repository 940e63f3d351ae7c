"""Mutual proof that both ends hold the run's secret, and keys for the frames of one link.

The dialler sends a random nonce; the listener answers with its own and with a proof over both; the dialler checks
it and sends its proof. Proofs are keyed BLAKE3 with one label per side, so neither can be reflected, and the nonces
make every link's keys its own, so nothing recorded on one link is worth anything on another.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from dataclasses import dataclass
from typing import Literal

import blake3

from dcr_stream.errors import AuthenticationFailed

__all__ = ["MAC_BYTES", "NONCE_BYTES", "FrameGuard", "Handshake", "new_nonce"]

NONCE_BYTES = 32
MAC_BYTES = 32
_SEQUENCE = struct.Struct("<Q")

Side = Literal["dialler", "listener"]


def new_nonce() -> bytes:
    """A nonce that no link had before."""
    return secrets.token_bytes(NONCE_BYTES)


@dataclass(frozen=True)
class Handshake:
    """Both nonces of one link together with the secret (None: a well-known key, for loopback only)."""

    secret: bytes | None
    dialler_nonce: bytes
    listener_nonce: bytes

    def proof(self, side: Side) -> bytes:
        """The 32 bytes by which ``side`` shows that it holds the secret."""
        return self._derive(b"proof", side)

    def accepts(self, side: Side, proof: bytes) -> bool:
        """Whether ``proof`` is that of ``side``; takes the same time for every wrong one."""
        return hmac.compare_digest(self.proof(side), proof)

    def frame_key(self, sender: Side) -> bytes:
        """The key of the frames that ``sender`` sends."""
        return self._derive(b"frames", sender)

    def _derive(self, purpose: bytes, side: Side) -> bytes:
        key = blake3.blake3(self.secret or b"", derive_key_context="dcr-stream 2025 control link").digest()
        label = purpose + b"\0" + side.encode() + b"\0"
        return blake3.blake3(label + self.dialler_nonce + self.listener_nonce, key=key).digest()


class FrameGuard:
    """Protects the frames of one direction: sequence number (8 bytes), body, MAC (32 bytes)."""

    OVERHEAD = _SEQUENCE.size + MAC_BYTES

    def __init__(self, key: bytes, peer: str) -> None:
        self._key = key
        self._peer = peer
        self._next = 0

    def wrap(self, body: bytes) -> bytes:
        """The next frame to send."""
        head = _SEQUENCE.pack(self._next)
        self._next += 1
        return b"".join((head, body, self._mac(head, body)))

    def unwrap(self, frame: bytes) -> bytes:
        """The body of the next frame received.

        Raises:
            AuthenticationFailed: it was altered, repeated, left out before, or made without the secret.
        """
        if len(frame) < self.OVERHEAD:
            raise self._refused(f"a frame of {len(frame)} bytes is too short")
        head, body, mac = frame[: _SEQUENCE.size], memoryview(frame)[_SEQUENCE.size : -MAC_BYTES], frame[-MAC_BYTES:]
        if not hmac.compare_digest(self._mac(head, body), mac):
            raise self._refused("a frame was altered or made without the secret")
        (sequence,) = _SEQUENCE.unpack(head)
        if sequence != self._next:
            raise self._refused(f"frame {sequence} came where {self._next} was due: replayed, reordered or lost")
        self._next += 1
        return bytes(body)

    def _mac(self, head: bytes, body: bytes | memoryview) -> bytes:
        mac = blake3.blake3(head, key=self._key)
        mac.update(body)
        return mac.digest()

    def _refused(self, why: str) -> AuthenticationFailed:
        return AuthenticationFailed(f"link to {self._peer}: {why}; the link is closed, dial again")
