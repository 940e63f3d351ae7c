"""Owners and nodes as the coordinator sees them, and what a refit reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeVar

from dcr_stream.errors import ControlError
from dcr_stream.messages import CommitRecord
from dcr_stream.protocol import EngineState, Hello, Message, Offer
from dcr_stream.session import MessageConnection

__all__ = ["Mode", "Peer", "Receiving", "RefitReport", "TransitionSettings"]

M = TypeVar("M", bound=Message)

Mode = Literal["sync", "async"]
"""``sync``: gates close when the first attempt starts. ``async``: once every payload is staged."""


@dataclass(frozen=True, kw_only=True)
class TransitionSettings:
    """Bounds of one transition; all times in seconds.

    ``drain_deadline_s``: how long running requests may hold an engine before ``after_deadline`` is done: ``keep``
    pauses them with caches cleared, ``abort`` ends them, ``fail`` fails the attempt. ``rejoin_deadline_s``: how long
    a retry waits for owners and receivers to come back.
    """

    max_attempts: int = 4
    min_receivers: int = 1
    prepare_deadline_s: float = 300.0
    stage_deadline_s: float = 1800.0
    drain_deadline_s: float = 30.0
    drain: Literal["wait", "abort", "keep"] = "wait"
    after_deadline: Literal["keep", "abort", "fail"] = "keep"
    gate_deadline_s: float = 120.0
    apply_deadline_s: float = 900.0
    advance_deadline_s: float = 300.0
    rejoin_deadline_s: float = 60.0


@dataclass(slots=True, eq=False)
class Peer:
    """A connected owner or node. ``fresh``: it came, or brought new engines, since it was last prepared."""

    hello: Hello
    connection: MessageConnection
    offer: Offer | None = None
    fresh: bool = True
    gone: bool = False

    @property
    def name(self) -> str:
        """The role's name."""
        return self.hello.name

    async def ask(self, message: Message, answer: type[M], *, timeout_s: float) -> M:
        """Call the peer and insist on the kind of answer.

        Raises:
            PeerLost: it is gone. ControlError: it did not answer in time, or with something else.
        """
        reply = await self.connection.call(message, timeout=timeout_s)
        if not isinstance(reply, answer):
            raise ControlError(
                f"{self.hello.role} {self.name!r} answered {type(message).__name__} with {type(reply).__name__}; "
                "run the same version of dcr-stream everywhere"
            )
        return reply

    async def cut_off(self) -> None:
        """Close its link: it counts as gone, and dials again once nothing of it runs any more."""
        self.gone = True
        await self.connection.link.aclose()


@dataclass(slots=True)
class Receiving:
    """The engines of one node that take part in an attempt."""

    node: Peer
    engines: list[EngineState]

    @property
    def names(self) -> tuple[str, ...]:
        """Engine names."""
        return tuple(engine.name for engine in self.engines)

    @property
    def members(self) -> tuple[str, ...]:
        """``node/engine`` names as in the commit record."""
        return tuple(f"{self.node.name}/{engine.name}" for engine in self.engines)


@dataclass(frozen=True, kw_only=True)
class RefitReport:
    """How a transition went. Times in seconds on the coordinator's clock; bytes as they travelled.

    ``timeline``: protocol steps of the committed attempt and how long each took. ``failures``: what failed before.
    """

    record: CommitRecord
    mode: Mode
    kind: Literal["delta", "dense"]
    attempts: int
    restored: int
    elements: int
    scanned: int
    payloads: int
    payload_bytes: int
    timeline: dict[str, float] = field(default_factory=dict)
    failures: tuple[str, ...] = ()

    @property
    def version(self) -> int:
        """The committed version."""
        return self.record.version
