"""Messages of the control plane, the commit record, and the payload's identity: plain frozen structs.

In one process and between processes the same structs are used; between processes they travel as MessagePack.
"""

from __future__ import annotations

from typing import Literal

import blake3
import msgspec

from dcr_stream.canonical import Region

__all__ = [
    "Announcement",
    "Attempt",
    "CommitRecord",
    "Manifest",
    "ManifestEntry",
    "OwnedRegion",
    "Payload",
    "PayloadId",
    "PayloadKind",
    "ReceiverCall",
    "ReceiverReply",
    "Sum",
]

PayloadKind = Literal["delta", "dense"]

Sum = tuple[int, int]
"""A state sum in two lanes, each modulo 2^64."""


class Attempt(msgspec.Struct, frozen=True, array_like=True):
    """One try at bringing receivers of ``run`` to version ``target``. Numbers never repeat within a run."""

    run: str
    target: int
    number: int
    epoch: int

    @property
    def name(self) -> str:
        """A name safe for paths and subjects, unique within the store."""
        return f"{self.run}-v{self.target}-a{self.number}-e{self.epoch}"


class PayloadId(msgspec.Struct, frozen=True, array_like=True):
    """Identity of a payload. The same id with another seal is an error."""

    attempt: Attempt
    owner: str
    sequence: int

    @property
    def name(self) -> str:
        """A name safe for paths and subjects, unique within the attempt."""
        return f"{self.owner}-{self.sequence:06d}"


class Payload(msgspec.Struct, frozen=True):
    """A sealed payload: identity, the bytes as they travel, and the seal (the last 32 of them)."""

    id: PayloadId
    body: bytes

    @property
    def seal(self) -> bytes:
        """The 32-byte seal at the end of the body."""
        return self.body[-32:]

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return len(self.body)


class Announcement(msgspec.Struct, frozen=True, tag="announcement"):
    """A payload is ready: what to fetch, and what it must turn out to be."""

    id: PayloadId
    size: int
    seal: bytes


class ManifestEntry(msgspec.Struct, frozen=True, array_like=True):
    """One payload of an owner's set."""

    sequence: int
    size: int
    seal: bytes


class Manifest(msgspec.Struct, frozen=True, tag="manifest"):
    """The whole set of one owner's payloads in one attempt. Only manifests make an attempt complete.

    ``digest_sum`` is the sum of the items' digests modulo 2^64; ``elements`` counts the items' elements.
    """

    attempt: Attempt
    owner: str
    payloads: tuple[ManifestEntry, ...]
    elements: int
    digest_sum: int
    seal: bytes = b""

    def unsealed(self) -> bytes:
        """What the seal covers."""
        return msgspec.msgpack.encode(msgspec.structs.replace(self, seal=b""))


class CommitRecord(msgspec.Struct, frozen=True):
    """The one record that says which version a run is at. Changed by compare-and-set only.

    ``epoch`` and ``attempt_floor`` fence: attempts numbered below the floor, and coordinators of an older epoch,
    can no longer commit. ``version`` is -1 before the first commit.
    """

    run: str
    version: int
    attempt: int
    epoch: int
    attempt_floor: int
    directory: str
    manifests: tuple[str, ...]
    members: tuple[str, ...]
    state: Sum
    time: float
    serial: int

    def encode(self) -> bytes:
        """Canonical JSON bytes."""
        return msgspec.json.encode(self)

    @property
    def digest(self) -> str:
        """Hex BLAKE3 of the record."""
        return blake3.blake3(self.encode()).hexdigest()


class ReceiverCall(msgspec.Struct, frozen=True):
    """A call from a node to the receivers of one engine: a method name and MessagePack-able arguments."""

    method: str
    args: msgspec.Raw = msgspec.Raw(b"\x80")


class ReceiverReply(msgspec.Struct, frozen=True):
    """A receiver's answer: a MessagePack result, or the class and text of an error."""

    result: msgspec.Raw = msgspec.Raw(b"\xc0")
    error: str | None = None
    text: str = ""


class OwnedRegion(msgspec.Struct, frozen=True, array_like=True):
    """A region of a canonical tensor that one owner publishes."""

    tensor: int
    region: Region
