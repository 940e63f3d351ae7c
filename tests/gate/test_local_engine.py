"""An engine whose receivers live in this process."""

from __future__ import annotations

import threading

import anyio
import msgspec
import pytest

from dcr_stream.errors import LayoutChanged
from dcr_stream.gate import LocalEngine
from dcr_stream.messages import ReceiverCall, ReceiverReply
from dcr_stream.runtime import ThreadWorkers

pytestmark = pytest.mark.anyio


class Rank:
    """Answers with its rank once every rank is being called."""

    def __init__(self, rank: int, meeting: threading.Barrier, *, error: Exception | None = None) -> None:
        self.rank = rank
        self.meeting = meeting
        self.error = error
        self.ended = False

    def handle(self, call: ReceiverCall) -> ReceiverReply:
        self.meeting.wait(timeout=10)
        self.ended = True
        if self.error is not None:
            raise self.error
        return ReceiverReply(msgspec.Raw(msgspec.msgpack.encode([call.method, self.rank])))


async def test_every_rank_is_called_at_once_and_answers_come_in_rank_order() -> None:
    meeting = threading.Barrier(3)
    engine = LocalEngine("engine0", [Rank(i, meeting) for i in range(3)], workers=ThreadWorkers())
    with anyio.fail_after(20):
        replies = await engine.call(ReceiverCall("status"))
    assert engine.ranks == 3
    assert [msgspec.msgpack.decode(reply.result) for reply in replies] == [["status", i] for i in range(3)]


async def test_a_receivers_exception_is_its_ranks_reply_and_the_others_are_waited_for() -> None:
    """D4: a receiver that raises before its first answer is heard, and keeps nobody waiting."""
    meeting = threading.Barrier(3)
    ranks = [Rank(i, meeting, error=LayoutChanged("tensor w moved; trace again") if i == 1 else None) for i in range(3)]
    engine = LocalEngine("engine0", ranks, workers=ThreadWorkers())
    with anyio.fail_after(20):
        replies = await engine.call(ReceiverCall("apply"))
    assert [reply.error for reply in replies] == [None, "LayoutChanged", None]
    assert replies[1].text == "tensor w moved; trace again"
    assert all(rank.ended for rank in ranks)


async def test_hooks_are_called_where_given() -> None:
    log: list[str] = []

    async def note(what: str = "hook") -> None:
        log.append(what)

    bare = LocalEngine("engine0", [], workers=ThreadWorkers())
    hooked = LocalEngine("engine1", [], workers=ThreadWorkers(), pause=note, resume=note, invalidate_caches=note)
    for engine in (bare, hooked):
        await engine.pause("keep")
        await engine.invalidate_caches()
        await engine.resume()
    assert log == ["keep", "hook", "hook"]
