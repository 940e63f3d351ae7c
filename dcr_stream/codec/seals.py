"""Seals: BLAKE3 over payloads and manifests, keyed with the run's secret where there is one."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

import blake3
import msgspec

from dcr_stream.errors import SealMismatch
from dcr_stream.messages import Manifest

__all__ = ["SEAL_BYTES", "VERSION", "manifest_digest", "seal", "seal_manifest", "verify_manifest"]

VERSION = 1
"""Version of the wire format; part of every key."""

SEAL_BYTES = 32

_MANIFEST_MAGIC = b"DCRM"


def seal(parts: Sequence[bytes | memoryview], what: str, secret: bytes | None) -> bytes:
    """The 32-byte seal over ``parts``. ``what`` ("payload", "manifest") keeps the keys of different things apart."""
    if secret is None:
        hasher = blake3.blake3()
    else:
        context = f"dcr_stream {VERSION} {what} seal"
        hasher = blake3.blake3(key=blake3.blake3(secret, derive_key_context=context).digest())
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def seal_manifest(manifest: Manifest, secret: bytes | None) -> Manifest:
    """The manifest with its seal set."""
    return msgspec.structs.replace(manifest, seal=_manifest_seal(manifest, secret))


def verify_manifest(manifest: Manifest, secret: bytes | None) -> None:
    """Check a manifest's seal, which covers every other field.

    Raises:
        SealMismatch: a field was altered, or it was sealed with another secret.
    """
    if not hmac.compare_digest(manifest.seal, _manifest_seal(manifest, secret)):
        raise SealMismatch(
            f"the manifest of owner {manifest.owner!r} for attempt {manifest.attempt.name!r} does not match its seal; "
            "give both sides the same secret, or retry the attempt"
        )


def manifest_digest(manifest: Manifest) -> str:
    """Hex BLAKE3 over what the manifest's seal covers: independent of the seal itself and of the secret."""
    return blake3.blake3(_manifest_bytes(manifest)).hexdigest()


def _manifest_bytes(manifest: Manifest) -> bytes:
    return _MANIFEST_MAGIC + bytes((VERSION,)) + manifest.unsealed()


def _manifest_seal(manifest: Manifest, secret: bytes | None) -> bytes:
    return seal((_manifest_bytes(manifest),), "manifest", secret)
