"""The receiver: one per rollout rank, in the process that owns the weights. No network.

Its node calls it through :meth:`Receiver.handle`; every call and result is plain MessagePack, so the same receiver
serves in this process, behind a pipe, or behind a serving runtime's collective call. It keeps the clean/dirty mark and
the set of applied payloads beside the weights (``docs/design/protocol.md``, apply).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import msgspec

from dcr_stream.canonical import TensorDirectory, TensorSpec
from dcr_stream.codec import Limits, check_payload, decode_item, tensor_from_words, unpack_block
from dcr_stream.delta import Item
from dcr_stream.dense import unpack_tensors
from dcr_stream.errors import (
    AttemptFenced,
    DcrError,
    DigestMismatch,
    LayoutChanged,
    LoaderConditionViolated,
    UntracedPath,
    VersionMismatch,
)
from dcr_stream.interfaces import Loader, LoadSession
from dcr_stream.loaders.apply import apply_item, full_sums, read_back
from dcr_stream.messages import Attempt, ReceiverCall, ReceiverReply, Sum
from dcr_stream.protocol import Mark, StreamKind
from dcr_stream.shared import open_block
from dcr_stream.trace import PlacementPlan, StorageMap, trace

__all__ = [
    "AdoptVersion",
    "Applied",
    "Begin",
    "Block",
    "FullSums",
    "Install",
    "Quarantine",
    "Receiver",
    "ReceiverStatus",
    "Sums",
    "Trace",
    "Traced",
]


class Trace(msgspec.Struct, frozen=True):
    """Trace the loader's placement of these canonical tensors. Destroys the weights: a dense load must follow."""

    tensors: tuple[TensorSpec, ...]


class Traced(msgspec.Struct, frozen=True):
    """The traced plan of this rank, and the names it declares unplaced."""

    plan: PlacementPlan
    unplaced: tuple[str, ...]


class Install(msgspec.Struct, frozen=True):
    """The plans of all ranks of the engine, with cells assigned; each rank takes its own."""

    plans: tuple[PlacementPlan, ...]


class ReceiverStatus(msgspec.Struct, frozen=True):
    """What a receiver holds."""

    incarnation: str
    mark: Mark
    version: int
    attempt: Attempt | None
    directory: str


class Begin(msgspec.Struct, frozen=True):
    """Start an attempt; nothing is written yet."""

    attempt: Attempt
    base: int
    kind: StreamKind


class Block(msgspec.Struct, frozen=True):
    """A shared block to apply or to load, in a running attempt."""

    attempt: Attempt
    name: str
    nbytes: int


class Applied(msgspec.Struct, frozen=True):
    """Per item of the block: for each cell this rank holds, one read-back sum per copy."""

    sums: tuple[dict[int, list[int]], ...]


class FullSums(msgspec.Struct, frozen=True):
    """Read full state sums of these tensors from storage."""

    tensors: tuple[int, ...]


class Sums(msgspec.Struct, frozen=True):
    """Per tensor: for each cell this rank holds, one full state sum per copy."""

    sums: dict[int, dict[int, list[Sum]]]


class AdoptVersion(msgspec.Struct, frozen=True):
    """The joint commit names this attempt: the receiver is clean at ``version``."""

    attempt: Attempt
    version: int


class Quarantine(msgspec.Struct, frozen=True):
    """Read-back or audit found stray or misplaced writes: only a dense restore helps."""

    reason: str


class Receiver:
    """Applies payloads to one rank's weights through the traced placement plan. Not thread-safe: one call at a time.

    Args:
        loader: the serving runtime's own loader over this rank's model.
        rank: this receiver's place among the ranks of its engine.
        name: for error messages.
        limits: largest blocks and payloads accepted.
    """

    def __init__(self, loader: Loader, *, rank: int = 0, name: str = "receiver", limits: Limits | None = None) -> None:
        self.name = name
        self._rank = rank
        self._loader = loader
        self._limits = limits or Limits()
        self._incarnation = secrets.token_hex(8)
        self._mark: Mark = "empty"
        self._version = -1
        self._attempt: Attempt | None = None
        self._begin: Begin | None = None
        self._relative = False
        self._finished = False
        self._newest = (-1, -1)
        self._applied: set[tuple[str, int]] = set()
        self._directory: TensorDirectory | None = None
        self._plan: PlacementPlan | None = None
        self._storage: StorageMap | None = None
        self._session: LoadSession | None = None
        self._methods: dict[str, tuple[Any, Callable[[Any], object]]] = {
            "trace": (Trace, self._do_trace),
            "install": (Install, self._do_install),
            "status": (None, lambda _: self.status()),
            "begin": (Begin, self._do_begin),
            "apply": (Block, self._do_apply),
            "load_begin": (Begin, self._do_load_begin),
            "load_block": (Block, self._do_load_block),
            "load_end": (None, lambda _: self._do_load_end()),
            "load_whole": (Block, self._do_load_whole),
            "finish": (None, lambda _: self._do_finish()),
            "full_sums": (FullSums, self._do_full_sums),
            "adopt": (AdoptVersion, self._do_adopt),
            "quarantine": (Quarantine, self._do_quarantine),
        }

    def handle(self, call: ReceiverCall) -> ReceiverReply:
        """Carry out one call; an error comes back in the reply, by class name and text."""
        try:
            kind, method = self._methods[call.method]
            args = msgspec.msgpack.decode(call.args, type=kind) if kind is not None else None
            return ReceiverReply(result=msgspec.Raw(msgspec.msgpack.encode(method(args))))
        except (DigestMismatch, LayoutChanged, LoaderConditionViolated) as error:
            # These writes went where they should not: an overwrite of the changed set would leave them there.
            self._mark = "quarantined"
            if isinstance(error, LayoutChanged):
                self._plan = None
            return self._failed(error)
        except Exception as error:
            return self._failed(error)

    def status(self) -> ReceiverStatus:
        """What this receiver holds now."""
        directory = self._directory.digest if self._directory is not None and self._plan is not None else ""
        return ReceiverStatus(self._incarnation, self._mark, self._version, self._attempt, directory)

    def lose_base(self) -> None:
        """Say that the weights are gone (sleep, reload): the next transition restores this receiver densely."""
        self._forget()
        self._plan = None

    def _forget(self) -> None:
        """Hold no version, and let no attempt go on: nothing that was applied before counts."""
        self._abort_session()
        self._mark, self._version, self._attempt = "empty", -1, None
        self._begin, self._finished = None, False

    def _abort_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.abort()

    def _failed(self, error: Exception) -> ReceiverReply:
        if not isinstance(error, AttemptFenced):
            # What failed half-way is not known: the attempt cannot go on here, another one has to begin.
            self._begin, self._finished = None, False
            self._abort_session()
        kind = type(error).__name__ if isinstance(error, DcrError) else "ApplyError"
        text = str(error) if isinstance(error, DcrError) else f"{type(error).__name__}: {error}"
        return ReceiverReply(error=kind, text=f"{self.name}: {text}")

    def _do_trace(self, args: Trace) -> Traced:
        self._forget()
        self._directory = TensorDirectory(args.tensors)
        self._plan = trace(self._loader, self._directory)
        self._storage = StorageMap(self._loader)
        return Traced(self._plan, tuple(sorted(self._loader.declared_unplaced())))

    def _do_install(self, args: Install) -> None:
        directory, _, storage = self._placed()
        if self._rank >= len(args.plans) or args.plans[self._rank].directory != directory.digest:
            raise UntracedPath("no plan to install belongs to this rank and tensor directory; trace again")
        storage.check(args.plans[self._rank].identity)
        self._plan = args.plans[self._rank]

    def _do_begin(self, args: Begin) -> None:
        self._placed()
        self._start(args)
        if self._mark in ("empty", "quarantined") or (self._mark == "clean" and self._version != args.base):
            self._begin = None
            raise VersionMismatch(
                f"attempt {args.attempt.name} changes version {args.base}, but this receiver is {self._mark} "
                f"(version {self._version}); it must be restored"
            )

    def _start(self, args: Begin) -> None:
        order = args.attempt.epoch, args.attempt.number
        if order < self._newest:
            raise AttemptFenced(f"attempt {args.attempt.name} is older than one begun here; start a new attempt")
        self._newest = order
        self._abort_session()
        self._begin, self._applied, self._finished = args, set(), False
        self._relative = self._mark == "clean" and self._version == args.base

    def _do_apply(self, args: Block) -> Applied:
        directory, plan, storage = self._placed()
        begin = self._running(args.attempt)
        if begin.kind not in ("delta", "revert"):
            raise UntracedPath(
                f"attempt {begin.attempt.name} is a dense load; its tensors go through the native loader"
            )
        with open_block(args.name, args.nbytes) as view:
            opened = unpack_block(view, self._limits)
            header = opened.header
            if (header.run, header.target, header.attempt, header.epoch) != (
                begin.attempt.run,
                begin.attempt.target,
                begin.attempt.number,
                begin.attempt.epoch,
            ) or header.base != begin.base:
                raise VersionMismatch(
                    f"payload {header.owner}-{header.sequence} leads from version {header.base} to {header.target} in "
                    f"attempt {header.attempt}; this receiver runs attempt {begin.attempt.name} from {begin.base}"
                )
            check_payload(opened, directory)
            items = list(opened.items())
            for item, _ in items:
                self._check_allowed(item, directory, plan)
            storage.check(plan.identity)
            fresh = (header.owner, header.sequence) not in self._applied
            if fresh and items:
                self._mark, self._attempt, self._finished = "dirty", begin.attempt, False
            sums: list[dict[int, list[int]]] = []
            for item, columns in items:
                if plan.classes[item.tensor] != "mapped":
                    sums.append({})
                    continue
                decoded = decode_item(item, columns)
                if fresh:
                    sums.append(apply_item(plan, storage, item, decoded))
                else:
                    sums.append(read_back(plan, storage, item, decoded.positions))
            self._applied.add((header.owner, header.sequence))
        return Applied(tuple(sums))

    def _check_allowed(self, item: Item, directory: TensorDirectory, plan: PlacementPlan) -> None:
        name, kind = directory[item.tensor].name, plan.classes[item.tensor]
        if kind == "refused":
            raise UntracedPath(f"tensor {name!r} has no proved placement on this rank; see the prepare report")
        if item.mode != "overwrite" and not self._relative:
            raise VersionMismatch(
                f"tensor {name!r} comes as {item.mode!r}, but this receiver is {self._mark} "
                f"(version {self._version}); a retry must overwrite"
            )
        if item.mode != "overwrite" and kind == "whole":
            raise UntracedPath(
                f"tensor {name!r} goes whole through the native loader here and cannot take {item.mode!r}"
            )

    def _do_load_begin(self, args: Begin) -> None:
        self._placed()
        self._start(args)
        self._mark, self._attempt = "dirty", args.attempt
        self._session = self._loader.open_session()

    def _do_load_block(self, args: Block) -> None:
        directory, _, _ = self._placed()
        self._running(args.attempt)
        if self._session is None:
            raise UntracedPath("no dense load is open; begin one first")
        with open_block(args.name, args.nbytes) as view:
            self._session.push(
                [
                    (directory[i].name, tensor_from_words(words, directory[i].dtype, directory[i].shape))
                    for i, words in unpack_tensors(view, directory)
                ]
            )

    def _do_load_end(self) -> None:
        if self._session is None:
            raise UntracedPath("no dense load is open; begin one first")
        session, self._session = self._session, None
        session.finish()
        self._do_finish()

    def _do_load_whole(self, args: Block) -> None:
        """Give complete tensors to the native loader where this rank does not map them."""
        directory, plan, storage = self._placed()
        begin = self._running(args.attempt)
        with open_block(args.name, args.nbytes) as view:
            tensors = [
                (directory[i].name, tensor_from_words(words, directory[i].dtype, directory[i].shape))
                for i, words in unpack_tensors(view, directory)
                if plan.classes[i] == "whole"
            ]
            if tensors:
                self._mark, self._attempt = "dirty", begin.attempt
                self._loader.load(tensors)
                storage.check(plan.identity)

    def _do_finish(self) -> None:
        _, plan, storage = self._placed()
        self._loader.refresh()
        self._loader.synchronize()
        storage.check(plan.identity)
        self._finished = self._begin is not None

    def _do_full_sums(self, args: FullSums) -> Sums:
        _, plan, storage = self._placed()
        storage.check(plan.identity)
        return Sums(full_sums(plan, storage, args.tensors))

    def _do_adopt(self, args: AdoptVersion) -> None:
        if self._mark == "clean" and self._version == args.version:
            return
        begin = self._begin
        if begin is None or begin.attempt != args.attempt or not self._finished or self._mark == "quarantined":
            raise VersionMismatch(
                f"version {args.version} was committed by attempt {args.attempt.name}, which this receiver "
                f"({self._mark}) did not finish; it must be restored"
            )
        self._mark, self._version, self._attempt, self._begin = "clean", args.version, args.attempt, None

    def _do_quarantine(self, args: Quarantine) -> None:
        self._mark, self._begin = "quarantined", None

    def _running(self, attempt: Attempt) -> Begin:
        if self._begin is None or self._begin.attempt != attempt:
            raise AttemptFenced(f"attempt {attempt.name} is not running here; begin it first")
        return self._begin

    def _placed(self) -> tuple[TensorDirectory, PlacementPlan, StorageMap]:
        if self._directory is None or self._plan is None or self._storage is None:
            raise UntracedPath("the loader's placement was not traced yet; prepare the engine first")
        return self._directory, self._plan, self._storage
