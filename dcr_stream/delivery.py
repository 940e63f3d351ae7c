"""Delivery: a staged attempt goes into the engines of one node, and what they read back is checked.

Every payload is decoded once, laid out in a shared block, and applied by all engines. Per item, the sums that the
ranks read back from storage must agree between copies and add up over the cells of the tensor to what the owner
declared (``docs/design/wire-format.md``, state digest).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import anyio
import msgspec
from anyio import CancelScope

from dcr_stream.canonical import TensorDirectory, Words
from dcr_stream.codec import OpenedPayload, add_sums, decode_item, elements_sum, pack_block
from dcr_stream.delta import Item
from dcr_stream.dense import Assembly, pack_tensors
from dcr_stream.errors import DcrError, DigestMismatch, MalformedPayload, PeerLost, error_named
from dcr_stream.interfaces import Engine, Gate, Workers
from dcr_stream.messages import Attempt, ReceiverCall, ReceiverReply, Sum
from dcr_stream.protocol import EngineState, Mark, Shape, Stage
from dcr_stream.receiver import (
    AdoptVersion,
    Applied,
    Begin,
    Block,
    FullSums,
    Install,
    Quarantine,
    ReceiverStatus,
    Sums,
    Trace,
    Traced,
)
from dcr_stream.shared import SharedBlock
from dcr_stream.staging import Staging
from dcr_stream.together import every
from dcr_stream.trace import EnginePlacement, assign_cells

__all__ = ["Delivery", "EngineSlot"]

R = TypeVar("R")
_MASK = 0xFFFF_FFFF_FFFF_FFFF
_SUM_BATCH = 256
_SEVERITY: tuple[Mark, ...] = ("clean", "dirty", "quarantined", "empty", "lost")
_STATUS_S = 30.0
"""How long an engine may take to say what it holds; a busy one is asked again later."""


@dataclass(slots=True)
class EngineSlot:
    """One engine of a node, with its gate and the placement traced for it."""

    engine: Engine
    gate: Gate
    call_deadline_s: float
    placement: EnginePlacement | None = None
    directory: str = ""
    problem: str = ""
    silent: str = ""
    """Why the engine counts as gone until it is attached again: a call never came back, and may still be writing."""
    _turn: anyio.Lock = field(default_factory=anyio.Lock)

    @property
    def name(self) -> str:
        """The engine's name."""
        return self.engine.name

    async def call(self, method: str, args: msgspec.Struct | None, result: type[R]) -> list[R]:
        """Call every rank's receiver; results in rank order. The first rank's error is raised by its own class.

        A call is waited for even when the caller is cancelled: nothing may still be writing afterwards.

        Raises:
            PeerLost: a rank is gone, or did not answer this call, or an earlier one, within the call deadline.
        """
        raw = msgspec.Raw(msgspec.msgpack.encode(args)) if args is not None else msgspec.Raw(b"\xc0")
        replies = await self._answered(ReceiverCall(method, raw))
        for rank, reply in enumerate(replies):
            if reply.error is not None:
                raise error_named(reply.error, f"engine {self.name!r}, rank {rank}: {reply.text}")
        if len(replies) != self.engine.ranks:
            raise PeerLost(f"engine {self.name!r}: {len(replies)} of {self.engine.ranks} ranks answered {method!r}")
        return [msgspec.msgpack.decode(reply.result, type=result) for reply in replies]

    async def _answered(self, call: ReceiverCall) -> list[ReceiverReply]:
        deadline_s = min(self.call_deadline_s, _STATUS_S) if call.method == "status" else self.call_deadline_s
        async with self._turn:
            if self.silent:
                raise PeerLost(self.silent)
            try:
                with anyio.fail_after(deadline_s, shield=True):
                    return await self.engine.call(call)
            except TimeoutError as error:
                lost = (
                    f"engine {self.name!r} did not answer {call.method!r} within {deadline_s:g} s; restart the engine"
                )
                if call.method != "status":
                    self.silent = f"{lost} and attach it again"
                raise PeerLost(lost) from error

    async def traced(self, directory: TensorDirectory) -> bool:
        """Whether every rank holds a plan for ``directory``.

        Raises:
            PeerLost: a rank is gone.
        """
        ranks = await self.call("status", None, ReceiverStatus)
        return self.placement is not None and all(rank.directory == directory.digest for rank in ranks)

    async def state(self) -> EngineState:
        """The engine's mark and version: that of its worst rank, and never clean unless all ranks agree."""
        try:
            ranks = await self.call("status", None, ReceiverStatus)
        except DcrError as error:
            return EngineState(self.name, "", "lost", -1, problem=str(error))
        marks: list[Mark] = [rank.mark for rank in ranks]
        mark: Mark = max(marks, key=_SEVERITY.index)
        versions = {rank.version for rank in ranks}
        if mark == "clean" and len(versions) != 1:
            mark = "dirty"
        # An engine whose ranks were dirtied by different attempts is nobody's to repair by overwrite.
        dirtied = {rank.attempt for rank in ranks if rank.mark == "dirty"}
        whole: tuple[int, ...] = ()
        aliased: tuple[int, ...] = ()
        traced = self.placement is not None and all(rank.directory == self.directory for rank in ranks)
        if self.placement is not None and traced:
            whole, aliased = tuple(sorted(self.placement.whole)), tuple(sorted(self.placement.aliased))
        return EngineState(
            name=self.name,
            incarnation="+".join(rank.incarnation for rank in ranks),
            mark=mark if traced else "empty",
            version=min(versions) if mark == "clean" and traced else -1,
            attempt=next(iter(dirtied)) if len(dirtied) == 1 else None,
            whole=whole,
            aliased=aliased,
            problem=self.problem,
        )

    async def place(self, shape: Shape, directory: TensorDirectory, workers: Workers) -> None:
        """Trace all ranks and agree on cells. The gate must be closed; the weights are lost.

        Raises:
            PlacementError: everything that is wrong with this engine's placement, at once.
        """
        traced = await self.call("trace", Trace(shape.tensors), Traced)
        unplaced = frozenset(name for rank in traced for name in rank.unplaced)
        placement = await workers.run(assign_cells, [rank.plan for rank in traced], directory, unplaced)
        placement.raise_for_findings()
        await self.call("install", Install(tuple(placement.plans)), object)
        self.placement, self.directory = placement, directory.digest

    async def adopt(self, attempt: Attempt, version: int) -> None:
        """Tell every rank that its attempt was committed."""
        await self.call("adopt", AdoptVersion(attempt, version), object)

    async def quarantine(self, reason: str) -> None:
        """Mark every rank as holding stray writes, also when the caller is being cancelled."""
        with CancelScope(shield=True):
            await self.call("quarantine", Quarantine(reason), object)


class Delivery:
    """One attempt going into some engines of a node."""

    def __init__(
        self, order: Stage, slots: Sequence[EngineSlot], directory: TensorDirectory, workers: Workers, block_bytes: int
    ) -> None:
        self._order, self._slots, self._directory, self._workers = order, slots, directory, workers
        self._block_bytes = block_bytes
        self._whole = frozenset(order.whole)
        self._assembly = Assembly(directory)
        self.digest_sum = 0

    @property
    def dense(self) -> bool:
        """Whether complete tensors go through the native loader."""
        return self._order.kind in ("dense", "restore")

    async def begin(self) -> None:
        """Start the attempt on every engine; the first write may follow."""
        begin = Begin(self._order.attempt, self._order.base, self._order.kind)
        await self._each("load_begin" if self.dense else "begin", begin)

    async def apply(self, opened: OpenedPayload) -> None:
        """Apply one payload to every engine and check what they read back.

        Raises:
            DigestMismatch: an engine does not hold what the owner declared; it is quarantined.
        """
        await self._workers.run(self._receive, opened)
        if self.dense:
            return
        with await self._workers.run(lambda: SharedBlock(pack_block(opened))) as block:
            await every(self._slots, lambda slot: self._apply_to(slot, block, opened))

    async def apply_all(self, staging: Staging) -> None:
        """Apply a complete staged set; complete tensors are handed on in directory order as they fill up."""
        ready = 0
        for payload in staging.payloads():
            await self.apply(await self._workers.run(staging.open, payload))
            while self.dense and ready < len(self._directory) and ready in self._assembly.complete:
                ready = await self._hand_on(ready)
        if self.dense and ready < len(self._directory):
            raise MalformedPayload(
                f"the dense payloads of attempt {self._order.attempt.name} lack tensor {self._directory[ready].name!r} "
                f"(incomplete: {', '.join(self._assembly.missing()[:4]) or 'none'}); the owners do not cover the model"
            )

    async def finish(self, expected: dict[int, Sum]) -> None:
        """Hand whole tensors to the loader, end the attempt on every engine, and compare full sums.

        Raises:
            DigestMismatch: a tensor's storage differs from what its owners hold; the engine is quarantined.
        """
        if not self.dense and self._whole:
            missing = [self._directory[t].name for t in sorted(self._whole) if t not in self._assembly.complete]
            if missing:
                raise MalformedPayload(f"whole tensors came incomplete: {', '.join(missing[:8])}")
            for tensor in sorted(self._whole):
                await self._block("load_whole", [(tensor, self._assembly.complete.pop(tensor))])
        await self._each("load_end" if self.dense else "finish", None)
        await every(self._slots, lambda slot: self._compare(slot, expected))

    async def _hand_on(self, ready: int) -> int:
        """Push complete tensors from ``ready`` on, up to one block; returns the next tensor to wait for."""
        batch: list[tuple[int, Words]] = []
        size = 0
        while ready in self._assembly.complete and size < self._block_bytes:
            words = self._assembly.complete.pop(ready)
            batch.append((ready, words))
            size += words.nbytes
            ready += 1
        await self._block("load_block", batch)
        return ready

    async def _block(self, method: str, tensors: list[tuple[int, Words]]) -> None:
        with await self._workers.run(lambda: SharedBlock(pack_tensors(tensors))) as block:
            await self._each(method, Block(self._order.attempt, block.name, block.nbytes))

    async def _each(self, method: str, args: msgspec.Struct | None) -> None:
        await every(self._slots, lambda slot: slot.call(method, args, object))

    def _receive(self, opened: OpenedPayload) -> None:
        """Account for the items; put dense and whole tensors together, checked as received."""
        for item, columns in opened.items():
            self.digest_sum = (self.digest_sum + item.digest) & _MASK
            if self.dense or item.tensor in self._whole:
                decoded = decode_item(item, columns)
                found = elements_sum(item.tensor, item.region, decoded.positions, decoded.values.__getitem__)
                if found != item.digest:
                    name = self._directory[item.tensor].name
                    raise MalformedPayload(f"tensor {name!r} does not add up to the sum that its owner declared")
                self._assembly.add(item, decoded)

    async def _apply_to(self, slot: EngineSlot, block: SharedBlock, opened: OpenedPayload) -> None:
        replies = await slot.call("apply", Block(self._order.attempt, block.name, block.nbytes), Applied)
        items = opened.header.items
        if any(len(reply.sums) != len(items) for reply in replies):
            raise DigestMismatch(f"engine {slot.name!r} answered for another number of items than it was sent")
        for i, item in enumerate(items):
            fault = self._fault(slot, item, [reply.sums[i] for reply in replies])
            if fault:
                await slot.quarantine(fault)
                raise DigestMismatch(
                    f"engine {slot.name!r}, tensor {self._directory[item.tensor].name!r}, payload "
                    f"{opened.header.id.name}: {fault}; the engine is quarantined and will be restored densely"
                )

    def _fault(self, slot: EngineSlot, item: Item, ranks: list[dict[int, list[int]]]) -> str:
        placement = slot.placement
        assert placement is not None
        total, cells = 0, placement.cells.get(item.tensor, 0)
        for cell in range(cells):
            copies = [s for rank in ranks for s in rank.get(cell, ())]
            if len(copies) != len(placement.holders(item.tensor, cell)):
                return (
                    f"{len(copies)} copies answered for part {cell}, {len(placement.holders(item.tensor, cell))} exist"
                )
            if len(set(copies)) != 1:
                return "copies of one part differ after applying"
            total = (total + copies[0]) & _MASK
        if placement.complete(item.tensor) and total != item.digest:
            return "storage read back after applying does not hold the bits that the owner declared"
        return ""

    async def _compare(self, slot: EngineSlot, expected: dict[int, Sum]) -> None:
        placement = slot.placement
        assert placement is not None
        tensors = [t for t in sorted(expected) if placement.complete(t)]
        for batch in (tensors[i : i + _SUM_BATCH] for i in range(0, len(tensors), _SUM_BATCH)):
            replies = await slot.call("full_sums", FullSums(tuple(batch)), Sums)
            wrong = [t for t in batch if self._full(placement, t, replies) != expected[t]]
            if wrong:
                names = ", ".join(repr(self._directory[t].name) for t in wrong[:8])
                fault = f"full state sums differ from the owners' for {names}"
                await slot.quarantine(fault)
                raise DigestMismatch(f"engine {slot.name!r}: {fault}; it is quarantined and will be restored densely")

    @staticmethod
    def _full(placement: EnginePlacement, tensor: int, ranks: Iterable[Sums]) -> Sum | None:
        total: Sum = (0, 0)
        for cell in range(placement.cells.get(tensor, 0)):
            copies = [s for rank in ranks for s in rank.sums.get(tensor, {}).get(cell, ())]
            if len(set(copies)) != 1 or len(copies) != len(placement.holders(tensor, cell)):
                return None
            total = add_sums(total, copies[0])
        return total
