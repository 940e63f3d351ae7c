"""What roles say to each other (``docs/design/protocol.md``): requests, their replies, and notifications.

One tagged union for every control link; between a node and the receivers of an engine the same structs are the
arguments and results of a :class:`~dcr_stream.messages.ReceiverCall`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from dcr_stream.canonical import TensorSpec
from dcr_stream.messages import Announcement, Attempt, CommitRecord, Manifest, OwnedRegion, PayloadKind, Sum

__all__ = [
    "DECODER",
    "PROTOCOL",
    "Acked",
    "Adopt",
    "Apply",
    "CloseGates",
    "Done",
    "EngineState",
    "Fence",
    "Hello",
    "Mark",
    "Message",
    "Offer",
    "OpenGates",
    "Prepare",
    "Prepared",
    "Restored",
    "Shape",
    "Stage",
    "Staged",
    "StateSums",
    "Stream",
    "StreamKind",
    "SumsRequest",
    "Welcome",
]

PROTOCOL = 1
"""Version of this message set; both ends must agree."""

StreamKind = Literal["delta", "revert", "dense", "restore"]
"""What owners send: the pending set as changes; the committed bits at the pending set's positions; every element at
the target version; every element at the committed version."""

Mark = Literal["empty", "clean", "dirty", "quarantined", "lost"]
"""``empty``: no version known. ``clean``: exactly version v. ``dirty``: an attempt has begun to write. ``quarantined``:
holds stray or misplaced writes that only a dense restore repairs. ``lost``: its process is gone."""


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The request was carried out."""


class Shape(msgspec.Struct, frozen=True, tag="shape"):
    """The tensor directory, and the regions that the sending owner publishes."""

    tensors: tuple[TensorSpec, ...]
    regions: tuple[OwnedRegion, ...] = ()


class Offer(msgspec.Struct, frozen=True, tag="offer"):
    """An owner has captured a candidate: ``changed`` tensors, ``elements`` changed of ``scanned``.

    ``state`` is the sum of the owner's part of the whole state at the target version. ``base`` is -1 and ``kind``
    ``dense`` when the owner has no committed version to compare with.
    """

    candidate: str
    kind: PayloadKind
    base: int
    elements: int
    scanned: int
    changed: tuple[int, ...]
    state: Sum
    capture_s: float


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message of an owner or a node; an owner's outstanding ``Offer`` follows once it has read the record."""

    role: Literal["owner", "node"]
    name: str
    run: str
    incarnation: str
    version: int = -1
    shape: Shape | None = None
    protocol: int = PROTOCOL


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Answer to ``Hello``: who is in charge, and the committed record (None before the first commit)."""

    epoch: int
    record: CommitRecord | None
    transport: str


class SumsRequest(msgspec.Struct, frozen=True, tag="sums"):
    """Ask an owner for the state sums of its part of ``tensors``, at the committed or at the offered version."""

    tensors: tuple[int, ...]
    at: Literal["base", "target"]


class StateSums(msgspec.Struct, frozen=True, tag="state_sums"):
    """State sums in the order asked for; (0, 0) where the owner holds no part."""

    sums: tuple[Sum, ...]


class Stream(msgspec.Struct, frozen=True, tag="stream"):
    """An attempt's terms for one owner, and the order to send. Answered by the sealed ``Manifest``.

    ``relative``: ``add`` and ``xor`` are allowed. ``overwrite``: tensors that forbid them all the same. ``whole``:
    tensors to be sent complete. ``skip``: tensors that another owner publishes.
    """

    attempt: Attempt
    base: int
    kind: StreamKind
    relative: bool
    overwrite: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()
    skip: tuple[int, ...] = ()


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """Ask a node for the state of its engines, tracing those that were never traced for this directory."""

    shape: Shape
    epoch: int
    record: CommitRecord | None = None


class EngineState(msgspec.Struct, frozen=True):
    """One engine as its node sees it: all its receivers agree on ``mark`` and ``version``."""

    name: str
    incarnation: str
    mark: Mark
    version: int
    attempt: Attempt | None = None
    whole: tuple[int, ...] = ()
    aliased: tuple[int, ...] = ()
    problem: str = ""


class Prepared(msgspec.Struct, frozen=True, tag="prepared"):
    """Answer to ``Prepare``."""

    engines: tuple[EngineState, ...]


class Stage(msgspec.Struct, frozen=True, tag="stage"):
    """Ask a node to stage an attempt for ``engines``: fetch, verify, deduplicate and check every payload of ``owners``.

    Answered by ``Staged`` when every owner's manifest is complete. With ``on_arrival`` payloads are applied as they
    come (the gates are closed already).
    """

    attempt: Attempt
    base: int
    kind: StreamKind
    owners: tuple[str, ...]
    engines: tuple[str, ...]
    whole: tuple[int, ...]
    on_arrival: bool


class Staged(msgspec.Struct, frozen=True, tag="staged"):
    """Everything is staged: payloads and bytes received over the transport."""

    payloads: int
    nbytes: int


class CloseGates(msgspec.Struct, frozen=True, tag="close_gates"):
    """Close and drain the gates of the attempt's engines, pause them and drop their caches."""

    attempt: Attempt
    engines: tuple[str, ...]
    mode: Literal["sync", "async"]
    drain_deadline_s: float
    drain: Literal["wait", "abort", "keep"]
    after_deadline: Literal["keep", "abort", "fail"]


class Apply(msgspec.Struct, frozen=True, tag="apply"):
    """Apply what is staged. ``expected`` are full state sums that must be read back from storage afterwards."""

    attempt: Attempt
    expected: dict[int, Sum] = {}


class Acked(msgspec.Struct, frozen=True, tag="acked"):
    """ACK of every engine asked for: manifests applied, and the items' digests added up (modulo 2^64)."""

    engines: tuple[str, ...]
    incarnations: tuple[str, ...]
    manifests: tuple[str, ...]
    digest_sum: int
    apply_s: float


class Adopt(msgspec.Struct, frozen=True, tag="adopt"):
    """The joint commit happened: owners advance, receivers that the record lists adopt its version."""

    record: CommitRecord


class Restored(msgspec.Struct, frozen=True, tag="restored"):
    """An attempt whose target is the committed version is complete: its engines hold exactly ``attempt.target``."""

    attempt: Attempt


class OpenGates(msgspec.Struct, frozen=True, tag="open_gates"):
    """Open the gates of every engine that is clean at ``version``. Answered by ``Done``."""

    version: int
    epoch: int


class Fence(msgspec.Struct, frozen=True, tag="fence"):
    """Attempts below ``floor`` and coordinators below ``epoch`` are void. Answered when nothing of them writes.

    ``abandon``: owners drop their candidate. ``forget``: they drop their trackers too, so that the next one is dense.
    """

    epoch: int
    floor: int
    abandon: bool = False
    forget: bool = False


Message = (
    Done
    | Shape
    | Offer
    | Hello
    | Welcome
    | SumsRequest
    | StateSums
    | Stream
    | Manifest
    | Announcement
    | Prepare
    | Prepared
    | Stage
    | Staged
    | CloseGates
    | Apply
    | Acked
    | Adopt
    | Restored
    | OpenGates
    | Fence
)

DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
"""Decodes any message of the protocol; raises ``msgspec.ValidationError`` for everything else."""
