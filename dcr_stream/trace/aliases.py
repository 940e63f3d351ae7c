"""Storage that several names write: found by loading the names in another order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dcr_stream.canonical import Indices
from dcr_stream.trace.boxes import compress
from dcr_stream.trace.contents import Ids, IdSpace
from dcr_stream.trace.passes import LoadRunner
from dcr_stream.trace.storage import StorageMap
from dcr_stream.trace.sweep import Placed, Seen, ids_at, mismatches, runs_of

__all__ = ["Aliases", "find_aliases"]


@dataclass(slots=True)
class Aliases:
    """``tensors`` share storage with each other. ``hidden`` are boxes that a later name overwrote.

    ``computed`` are placed tensors whose storage an earlier load filled with something else than ids.
    """

    tensors: set[int] = field(default_factory=set)
    hidden: dict[int, list[Placed]] = field(default_factory=dict)
    computed: set[int] = field(default_factory=set)


def find_aliases(
    runner: LoadRunner,
    space: IdSpace,
    storage: StorageMap,
    seen: Sequence[Seen],
    placed: dict[int, list[Placed]],
) -> Aliases:
    """Find every storage element that more than one name writes, and who writes it.

    After a load in directory order an element shows its last writer, after a load backwards its first one. So an
    element has several writers exactly if the two differ in some pass of ids: no name needs to be loaded alone to
    know that there are none, however large the model. Names between first and last writer are found by moving the
    known ones to the front of the load; then each is moved to its end, which shows all it writes.

    Raises:
        LoadFailed: the loader depends on the order of names, so that aliases cannot be excluded.
    """
    aliases = Aliases()
    several: dict[int, list[Indices]] = {}
    for number in range(space.passes()):
        contents = Ids(space, number)
        runner.load(contents, runner.order(backwards=True))
        for tensor, places in mismatches(contents, placed, storage, seen).items():
            aliases.tensors.add(tensor)
            for view, where in places:
                several.setdefault(view, []).append(where)
    if not several:
        return aliases
    at = {view: np.unique(np.concatenate(parts)) for view, parts in several.items()}

    def writers(order: Sequence[int]) -> dict[int, Indices]:
        return ids_at(runner, space, storage, seen, at, order)

    def names(ids: dict[int, Indices]) -> set[int]:
        found: set[int] = set()
        for view, values in ids.items():
            none = values < 0
            if none.any():
                last, _ = space.locate(seen[view].width, seen[view].ids_of(at[view][none]))
                aliases.computed.update(int(t) for t in np.unique(last) if t >= 0)
            tensors, _ = space.locate(seen[view].width, values[~none])
            found.update(int(t) for t in np.unique(tensors) if t >= 0)
        return found

    new = names(writers(runner.order(backwards=True)))
    while not new <= aliases.tensors:
        aliases.tensors |= new
        new = set()
        for backwards in (False, True):
            new |= names(writers(runner.order(backwards=backwards, first=aliases.tensors)))
    for tensor in sorted(aliases.tensors):
        for view, values in writers(runner.order(last=[tensor])).items():
            who, flat = space.locate(seen[view].width, values)
            mine = np.flatnonzero((who == tensor) & (seen[view].ids_of(at[view]) != values))
            spots = at[view][mine]
            starts, count = runs_of(spots, flat[mine])
            pairs = compress(spots[starts], flat[mine][starts], count)
            aliases.hidden.setdefault(tensor, []).extend(Placed(view, r, p) for r, p in pairs)
    return aliases
