"""Proof of the map on values, and what becomes of storage that is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dcr_stream.canonical import Indices, TensorDirectory, Words
from dcr_stream.codec.device import gather
from dcr_stream.trace.contents import FALLBACKS, PROOFS, Choice, Contents, IdSpace, Patterns
from dcr_stream.trace.passes import LoadFailed, LoadRunner
from dcr_stream.trace.plan import Finding
from dcr_stream.trace.storage import StorageMap
from dcr_stream.trace.sweep import Placed, Seen, mismatches

__all__ = ["Classified", "Prover"]

_MOST_NAMED = 16


@dataclass(slots=True)
class Classified:
    """``whole`` tensors are computed with; ``refused`` ones cannot be refit. ``computed_bytes`` is their storage."""

    whole: set[int] = field(default_factory=set)
    refused: set[int] = field(default_factory=set)
    computed_bytes: int = 0
    findings: list[Finding] = field(default_factory=list)


class Prover:
    """Loads bits through the native loader and compares storage with what the map says."""

    def __init__(
        self,
        runner: LoadRunner,
        space: IdSpace,
        storage: StorageMap,
        seen: Sequence[Seen],
        placed: dict[int, list[Placed]],
        hidden: dict[int, list[Placed]],
        seed: int,
    ) -> None:
        self._runner, self._space, self._storage, self._seen = runner, space, storage, seen
        self._placed, self._hidden, self._seed = placed, hidden, seed
        self._kinds: list[str] = []
        self.notes: list[Finding] = []

    @property
    def _directory(self) -> TensorDirectory:
        return self._space.directory

    def prove(self) -> dict[int, list[tuple[int, Indices]]]:
        """Tensors of which some mapped element does not equal its canonical element, bit for bit, and where.

        Contents that the loader refuses to load (it raises) are tried kind by kind; kinds that it refuses can never
        reach storage in a dense load.
        """
        failed: dict[int, list[tuple[int, Indices]]] = {}
        todo: list[str] = list(PROOFS)
        while todo:
            kind = todo.pop(0)
            contents = Patterns(self._space, kind, self._seed)
            try:
                failures = [self._proof(contents, None, self._placed)]
                for tensor, boxes in self._hidden.items():
                    failures.append(self._proof(contents, self._runner.order(last=[tensor]), {tensor: boxes}))
            except LoadFailed as failure:
                todo += FALLBACKS.get(kind, ())
                if kind not in FALLBACKS:
                    text = (
                        f"the native loader refuses to load {kind} values ({failure}); it will refuse them in a refit"
                    )
                    self.notes.append(Finding("note", kind, f"{text}, too: keep such values out of the weights"))
                continue
            self._kinds.append(kind)
            for found in failures:
                for tensor, places in found.items():
                    failed.setdefault(tensor, []).extend(places)
        return failed

    def _proof(
        self, contents: Contents, order: Sequence[int] | None, boxes: dict[int, list[Placed]]
    ) -> dict[int, list[tuple[int, Indices]]]:
        self._runner.load(contents, order)
        for s in self._seen:
            s.look(self._storage.memory(s.view.storage, s.width))
        return mismatches(contents, boxes, self._storage, self._seen)

    def classify(self, failed: dict[int, list[tuple[int, Indices]]]) -> Classified:
        """Find out which tensors the computed storage depends on, and whether it depends on anything else."""
        result = Classified(whole=set(failed), findings=self.notes)
        watch = self._computed(failed)
        if not watch:
            return result
        one, two = (Patterns(self._space, "ordinary", self._seed, flavour) for flavour in (0, 1))
        first, second = self._read(watch, one), self._read(watch, two)
        codes = [np.zeros(at.size, np.int64) for _, at in watch]
        mixed = [np.zeros(at.size, np.bool_) for _, at in watch]
        for bit in range(max(len(self._directory) - 1, 1).bit_length()):
            now = self._read(watch, Choice(self._space, one, two, bit))
            for code, odd, held, a, b in zip(codes, mixed, now, first, second, strict=True):
                code |= ((held == b) & (held != a)).astype(np.int64) << bit
                odd |= (held != a) & (held != b)
        # What only ever grows, or never changes again, shows itself when the first load is repeated.
        for odd, held, a in zip(mixed, self._read(watch, one), first, strict=True):
            odd |= held != a
        clear = [(a != b) & ~odd for a, b, odd in zip(first, second, mixed, strict=True)]
        owners = [np.where(ok, code, -1) for ok, code in zip(clear, codes, strict=True)]
        for owner in owners:
            owner[owner >= len(self._directory)] = -1
            result.whole.update(int(t) for t in np.unique(owner) if t >= 0)
        result.whole -= set(self._runner.refused)
        result.whole |= {t for t, lead in self._runner.equal.items() if lead in result.whole}
        for (view, at), owner, odd in zip(watch, owners, mixed, strict=True):
            self._check_attributed(view, at, owner, odd, result)
        if result.whole:
            self._check_state(watch, owners, mixed, result)
        result.computed_bytes = sum(at.size * self._seen[view].width for view, at in watch)
        return result

    def _computed(self, failed: dict[int, list[tuple[int, Indices]]]) -> list[tuple[int, Indices]]:
        at: dict[int, list[Indices]] = {i: [s.rest[s.varied]] for i, s in enumerate(self._seen)}
        for tensor in failed:
            for box in [*self._placed.get(tensor, ()), *self._hidden.get(tensor, ())]:
                at[box.view].append(box.place.all_flat())
        joined = ((view, np.unique(np.concatenate(parts))) for view, parts in at.items())
        return [(view, where) for view, where in joined if where.size]

    def _read(self, watch: list[tuple[int, Indices]], contents: Contents, only: list[int] | None = None) -> list[Words]:
        self._runner.load(contents, only)
        return self._held(watch)

    def _held(self, watch: list[tuple[int, Indices]]) -> list[Words]:
        views = [self._seen[view] for view, _ in watch]
        held = [self._storage.memory(s.view.storage, s.width) for s in views]
        return [gather(words, at) for words, (_, at) in zip(held, watch, strict=True)]

    def _check_attributed(
        self, view: int, at: Indices, owner: Indices, mixed: NDArray[np.bool_], result: Classified
    ) -> None:
        """Every parameter or buffer with computed elements must have some that depend on exactly one tensor."""
        for name, inside in self._owners(view, at):
            if mixed[inside].any():
                guilty = self._touching(view, at[inside & mixed])
                result.refused |= guilty
                names = self._names(sorted(guilty)) or "several tensors"
                text = (
                    f"the loader computes storage {name!r} from {names} together with other tensors or with what was "
                    "there before; send canonical tensors that land in storage as they are (quantised ones with "
                    "their scales, for instance), or declare it derived and recompute it in the refresh hook"
                )
                result.findings.append(Finding("refuse", name, text))
            elif inside.any() and not (owner[inside] >= 0).any():
                text = (
                    f"storage {name!r} changes when weights are loaded, but not as a function of one of them (it may "
                    "accumulate); give it a loader that copies, or declare it derived and recompute it in the "
                    "refresh hook"
                )
                result.findings.append(Finding("refuse", name, text))

    def _owners(self, view: int, at: Indices) -> list[tuple[str, NDArray[np.bool_]]]:
        """Names over a view, with which of some elements lie between their first and last."""
        found = []
        for name in self._seen[view].view.names:
            lo, hi = self._storage.span(name)
            inside = (at >= lo) & (at < hi)
            if inside.any():
                found.append((name, inside))
        return found

    def _touching(self, view: int, at: Indices) -> set[int]:
        """Tensors that change some elements when they are loaded alone."""
        guilty = set()
        contents = [Patterns(self._space, "ordinary", self._seed, flavour) for flavour in (0, 1)]
        before = self._held([(view, at)])[0]
        for tensor in range(len(self._directory)):
            if tensor in self._runner.refused:
                continue
            for content in contents:
                try:
                    now = self._read([(view, at)], content, [tensor])[0]
                except LoadFailed:
                    continue
                if (now != before).any():
                    guilty.add(tensor)
                before = now
        return guilty

    def _check_state(
        self,
        watch: list[tuple[int, Indices]],
        owners: list[Indices],
        mixed: list[NDArray[np.bool_]],
        result: Classified,
    ) -> None:
        """Loading the whole tensors alone must give what a dense load gives, whatever was there before."""
        whole = sorted(result.whole)
        other = Patterns(self._space, "ordinary", self._seed, 1)
        mapped = {t: b for t, b in self._placed.items() if t not in result.whole}
        for kind in ["ordinary", *self._kinds]:
            contents = Patterns(self._space, kind, self._seed)
            dense = self._read(watch, contents)
            self._runner.load(other)
            try:
                alone = self._read(watch, contents, whole)
            except LoadFailed as failure:
                self._refuse(set(whole), f"cannot be loaded without the other tensors ({failure})", result)
                return
            for a, b, owner, odd in zip(dense, alone, owners, mixed, strict=True):
                wrong = (a != b) & ~odd
                guilty = {int(t) for t in np.unique(owner[wrong]) if t >= 0}
                if (wrong & (owner < 0)).any():
                    # Undecided elements belong to one of the whole tensors; none can be cleared.
                    guilty |= result.whole
                why = "is combined by the loader with what storage held before (it accumulates, or skips some values)"
                self._refuse(guilty, why, result)
            strays = set(mismatches(other, mapped, self._storage, self._seen)) - result.refused
            if strays:
                self._refuse(strays, f"shares storage with what is computed from {self._names(whole)}", result)

    def _refuse(self, tensors: set[int], why: str, result: Classified) -> None:
        for tensor in sorted(tensors - result.refused):
            name = self._directory[tensor].name
            text = f"tensor {name!r} {why}; give it a loader that copies, or declare it unplaced"
            result.findings.append(Finding("refuse", name, text))
        result.refused |= tensors

    def _names(self, tensors: Sequence[int]) -> str:
        more = f" and {len(tensors) - _MOST_NAMED} more" if len(tensors) > _MOST_NAMED else ""
        return ", ".join(repr(self._directory[t].name) for t in tensors[:_MOST_NAMED]) + more
