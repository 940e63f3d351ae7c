"""Admission: which requests pass, which version they see, and how long anybody waits."""

from __future__ import annotations

import random

import anyio
import anyio.abc
import pytest

from dcr_stream.errors import DrainTimeout, GateClosed, UsageError
from dcr_stream.gate import RequestGate, Ticket

pytestmark = pytest.mark.anyio


async def request(gate: RequestGate, tickets: list[Ticket], until: anyio.Event | None = None) -> None:
    async with gate.admit(30) as ticket:
        if until is not None:
            await until.wait()
    tickets.append(ticket)


async def test_a_gate_starts_closed() -> None:
    gate = RequestGate()
    assert not gate.is_open
    assert gate.version is None
    with pytest.raises(GateClosed, match=r"did not open within 0\.01 s"):
        async with gate.admit(0.01):
            pass
    assert gate.waiting == 0
    with pytest.raises(UsageError, match="open it with a version"):
        gate.reopen()


async def test_a_ticket_carries_the_version_at_start_and_end() -> None:
    """E5: which version made a sample is on its ticket."""
    gate = RequestGate()
    gate.open(7)
    async with gate.admit(1) as ticket:
        assert ticket.version_start == 7
        with pytest.raises(UsageError, match="still running"):
            _ = ticket.version_end
    assert ticket.version_end == 7
    assert ticket.versions == (7,)


async def test_a_request_kept_across_a_swap_carries_both_versions() -> None:
    """E5: a request that spans versions lists them."""
    gate = RequestGate()
    gate.open(7)
    async with gate.admit(1) as ticket:
        gate.shut()
        gate.adopt(8)
    assert (ticket.version_start, ticket.version_end) == (7, 8)
    assert ticket.versions == (7, 8)


async def test_a_ticket_of_a_failed_request_is_given_back() -> None:
    gate = RequestGate()
    gate.open(7)
    tickets: list[Ticket] = []

    async def fail() -> None:
        async with gate.admit(1) as ticket:
            tickets.append(ticket)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert gate.running == 0
    assert tickets[0].version_end == 7


async def test_waiting_requests_are_let_in_when_the_gate_opens_and_see_its_version() -> None:
    gate = RequestGate()
    tickets: list[Ticket] = []
    async with anyio.create_task_group() as group:
        for _ in range(10):
            group.start_soon(request, gate, tickets)
        await anyio.wait_all_tasks_blocked()
        assert gate.waiting == 10
        gate.open(3)
    assert [ticket.version_start for ticket in tickets] == [3] * 10
    assert (gate.waiting, gate.running) == (0, 0)


async def test_a_gate_that_closes_again_at_once_lets_nobody_in() -> None:
    gate = RequestGate()
    tickets: list[Ticket] = []
    async with anyio.create_task_group() as group:
        group.start_soon(request, gate, tickets)
        await anyio.wait_all_tasks_blocked()
        gate.open(3)
        gate.shut()
        await anyio.wait_all_tasks_blocked()
        assert not tickets
        assert gate.waiting == 1
        gate.open(4)
    assert [ticket.version_start for ticket in tickets] == [4]


async def test_more_requests_than_may_wait_are_refused_at_once() -> None:
    gate = RequestGate(max_waiting=2)
    tickets: list[Ticket] = []
    async with anyio.create_task_group() as group:
        for _ in range(2):
            group.start_soon(request, gate, tickets)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(GateClosed, match="2 requests wait already"):
            async with gate.admit(1000):
                pass
        gate.open(1)
    assert len(tickets) == 2


async def test_a_cancelled_request_waits_no_more() -> None:
    gate = RequestGate(max_waiting=1)
    with anyio.move_on_after(0.01):
        async with gate.admit(1000):
            pass
    assert gate.waiting == 0


async def test_close_waits_for_every_ticket() -> None:
    gate = RequestGate()
    gate.open(1)
    ends = [anyio.Event() for _ in range(3)]
    tickets: list[Ticket] = []
    closed = anyio.Event()

    async def close() -> None:
        await gate.close(30)
        closed.set()

    async with anyio.create_task_group() as group:
        for end in ends:
            group.start_soon(request, gate, tickets, end)
        await anyio.wait_all_tasks_blocked()
        group.start_soon(close)
        for i, end in enumerate(ends):
            await anyio.wait_all_tasks_blocked()
            assert not closed.is_set()
            assert gate.running == 3 - i
            end.set()
    assert closed.is_set()


async def test_nothing_is_admitted_while_closing() -> None:
    gate = RequestGate()
    gate.open(1)
    end = anyio.Event()
    early: list[Ticket] = []
    late: list[Ticket] = []
    async with anyio.create_task_group() as group:
        group.start_soon(request, gate, early, end)
        await anyio.wait_all_tasks_blocked()
        group.start_soon(gate.close, 30)
        await anyio.wait_all_tasks_blocked()
        group.start_soon(request, gate, late)
        await anyio.wait_all_tasks_blocked()
        assert (gate.running, gate.waiting) == (1, 1)
        end.set()
        await anyio.wait_all_tasks_blocked()
        assert early
        assert not late
        gate.open(2)
    assert [ticket.versions for ticket in early + late] == [(1,), (2,)]


async def test_a_long_request_does_not_hold_the_gate_for_ever() -> None:
    gate = RequestGate()
    gate.open(1)
    end = anyio.Event()
    tickets: list[Ticket] = []
    async with anyio.create_task_group() as group:
        for _ in range(2):
            group.start_soon(request, gate, tickets, end)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(DrainTimeout, match=r"2 requests at version 1 still ran after 0\.05 s"):
            await gate.close(0.05)
        assert not gate.is_open
        end.set()
        await gate.close(30)
    assert gate.running == 0


async def test_versions_do_not_go_back_except_for_a_restore() -> None:
    gate = RequestGate()
    gate.open(5)
    gate.open(5)
    with pytest.raises(UsageError, match="close it before opening at 6"):
        gate.open(6)
    await gate.close(1)
    with pytest.raises(UsageError, match="restore=True"):
        gate.open(4)
    assert not gate.is_open
    gate.open(4, restore=True)
    assert gate.version == 4
    await gate.close(1)
    gate.reopen()
    assert gate.version == 4


@pytest.mark.parametrize("seed", range(40))
async def test_every_request_sees_exactly_one_version_at_random_interleavings(seed: int) -> None:
    """E3: requests started at any moment around a swap see v or v+1 whole, never a mixture, and none is lost.

    The model computes in several steps with whatever the weights are; a swap writes them in several steps, too.
    """
    choose = random.Random(seed)
    gate = RequestGate()
    weights = [0] * 4
    served: list[tuple[Ticket, list[int]]] = []

    async def hesitate() -> None:
        for _ in range(choose.randrange(5)):
            await anyio.lowlevel.checkpoint()

    async def infer() -> None:
        await hesitate()
        seen = []
        async with gate.admit(30) as ticket:
            for weight in range(len(weights)):
                seen.append(weights[weight])
                await hesitate()
        served.append((ticket, seen))

    async def refit() -> None:
        for version in range(1, 6):
            await hesitate()
            await gate.close(30)
            for weight in range(len(weights)):
                weights[weight] = version
                await hesitate()
            gate.open(version)

    gate.open(0)
    async with anyio.create_task_group() as group:
        group.start_soon(refit)
        for _ in range(60):
            group.start_soon(infer)
            await hesitate()
    assert len(served) == 60
    for ticket, seen in served:
        assert ticket.version_start == ticket.version_end
        assert seen == [ticket.version_start] * len(weights)
    assert len({ticket.version_start for ticket, _ in served}) > 1
