"""Placement by tracing: where the native loader puts every canonical element (``docs/design/placement.md``)."""

from __future__ import annotations

import numpy as np

from dcr_stream.canonical import TensorDirectory
from dcr_stream.errors import LayoutChanged
from dcr_stream.interfaces import Loader
from dcr_stream.trace.aliases import find_aliases
from dcr_stream.trace.classify import Prover
from dcr_stream.trace.passes import LoadFailed, LoadRunner
from dcr_stream.trace.plan import Box, Finding, PlacementPlan, TensorClass
from dcr_stream.trace.report import unknown_names, unmanaged_tensors, whole_limit, whole_tensors
from dcr_stream.trace.storage import StorageMap
from dcr_stream.trace.sweep import Placed, Seen, sweep

__all__ = ["trace"]

_MAX_COPIES = 1024
"""Copies of an element that are read back one by one; tensors broadcast more widely go whole."""


def trace(
    loader: Loader, directory: TensorDirectory, *, seed: int = 0, whole_limit_bytes: int | None = None
) -> PlacementPlan:
    """Find and prove where one rank's native loader places every canonical element.

    Ids of elements are loaded instead of weights and read back from every parameter and buffer, in directory order
    and backwards; the map so found must then reproduce random bits and special values bit for bit. What is written but
    not mapped is computed, and must depend on exactly one canonical tensor and nothing else. Storage is not filled
    first, because loaders read some buffers. Storage named by ``declared_derived`` is left out.

    **Afterwards storage holds garbage**: a dense load of all tensors through the native loader must follow.

    Nothing is raised for a model that cannot be refitted: the plan's findings say everything that is wrong at once,
    and ``classes`` of what is concerned is ``refused``.

    Memory: about one copy of the rank's storage at first and little later (:func:`dcr_stream.trace.sweep.sweep`),
    and twice the largest canonical tensor. Time: about nine dense loads, more if names alias or tensors are computed.

    Args:
        loader: the rank's native loader. No request may run.
        directory: the canonical tensors, as all owners publish them.
        seed: of the bits that prove the map.
        whole_limit_bytes: most bytes of ``whole`` tensors accepted; 0.1 % of the checkpoint, at least 1 MiB, if None.

    Raises:
        PlacementError: storage is not plain host memory.
    """
    storage = StorageMap(loader)
    findings = unmanaged_tensors(loader, storage)
    runner = LoadRunner(loader, directory, storage)
    try:
        return _traced(loader, directory, storage, runner, findings, seed, whole_limit_bytes)
    except LayoutChanged as error:
        findings.append(
            Finding("refuse", "storage", f"the native loader replaces storage instead of writing to it: {error}")
        )
    except LoadFailed as error:
        findings.append(
            Finding("refuse", "loader", f"{error}; make the loader accept any order and any finite weights")
        )
    findings += unknown_names(runner.refused, directory, loader.declared_unplaced())
    return PlacementPlan(
        directory=directory.digest,
        boxes=(),
        classes=tuple(_class(t, {}, set(), {t}) for t in range(len(directory))),
        widths=tuple(spec.width for spec in directory),
        aliased=(),
        identity=storage.identity(),
        constant_ranges=0,
        mapped_bytes=0,
        total_bytes=0,
        findings=tuple(findings),
    )


def _traced(
    loader: Loader,
    directory: TensorDirectory,
    storage: StorageMap,
    runner: LoadRunner,
    findings: list[Finding],
    seed: int,
    whole_limit_bytes: int | None,
) -> PlacementPlan:
    space, seen, placed = sweep(runner, storage, storage.views(loader.declared_derived()))
    aliases = find_aliases(runner, space, storage, seen, placed)
    prover = Prover(runner, space, storage, seen, placed, aliases.hidden, seed)
    failed = prover.prove()
    for tensor, boxes in placed.items():
        if any(_copies(box) > _MAX_COPIES for box in boxes):
            failed.setdefault(tensor, [])
    classified = prover.classify(failed)
    unplaced = loader.declared_unplaced()
    findings = [*findings, *unknown_names(runner.refused, directory, unplaced), *classified.findings]
    for tensor in sorted(aliases.computed):
        text = "shares storage with what the loader computes from another tensor; give each its own storage"
        findings.append(Finding("refuse", directory[tensor].name, f"tensor {directory[tensor].name!r} {text}"))
    refused = classified.refused | aliases.computed
    refused |= {t for t in runner.refused if directory[t].name not in unplaced}
    aliased = set(aliases.tensors)
    for tensor, boxes in aliases.hidden.items():
        placed.setdefault(tensor, []).extend(boxes)
    for follower, lead in runner.equal.items():
        # Which of two names with the same ids wrote an element cannot be seen, and need not be as long as there is
        # one element for both: then their bits are equal whoever writes them.
        if _held_twice(placed.get(lead, [])):
            name, other = directory[follower].name, directory[lead].name
            text = (
                f"the loader takes {name!r} only with the bits of {other!r}, but keeps them apart; publish one of them"
            )
            findings.append(Finding("refuse", name, text))
            refused |= {follower, lead}
        if lead in placed:
            placed[follower] = placed[lead]
            aliased |= {lead, follower}
        if lead in refused:
            refused.add(follower)
    whole = classified.whole - refused
    limit = whole_limit(directory) if whole_limit_bytes is None else whole_limit_bytes
    findings += whole_tensors(whole, directory, limit)
    mapped = {t: boxes for t, boxes in sorted(placed.items()) if t not in whole and t not in refused}
    mapped_bytes = _mapped_bytes(mapped, seen, aliased)
    # Placed parts of tensors that go whole for another part; whole parts were counted as computed.
    dropped = {t: boxes for t, boxes in placed.items() if t not in mapped and t not in failed}
    return PlacementPlan(
        directory=directory.digest,
        boxes=tuple(Box(t, b.region, seen[b.view].view.storage, b.place) for t, boxes in mapped.items() for b in boxes),
        classes=tuple(_class(t, mapped, whole, refused) for t in range(len(directory))),
        widths=tuple(spec.width for spec in directory),
        aliased=tuple(sorted(aliased)),
        identity=storage.identity(),
        constant_ranges=sum(_ranges(s) for s in seen),
        mapped_bytes=mapped_bytes,
        total_bytes=mapped_bytes + classified.computed_bytes + _mapped_bytes(dropped, seen, aliased),
        findings=tuple(findings),
    )


def _held_twice(boxes: list[Placed]) -> bool:
    if not boxes:
        return False
    flat = np.concatenate([box.region.all_flat() for box in boxes])
    return np.unique(flat).size < flat.size


def _copies(box: Placed) -> int:
    return Box(0, box.region, 0, box.place).copies


def _class(tensor: int, mapped: dict[int, list[Placed]], whole: set[int], refused: set[int]) -> TensorClass:
    if tensor in refused:
        return "refused"
    if tensor in whole:
        return "whole"
    return "mapped" if tensor in mapped else "skipped"


def _mapped_bytes(mapped: dict[int, list[Placed]], seen: list[Seen], aliased: set[int]) -> int:
    """Bytes of storage under boxes, each counted once."""
    single = sum(b.place.count * seen[b.view].width for t, boxes in mapped.items() if t not in aliased for b in boxes)
    shared: dict[int, list[Placed]] = {}
    for tensor in aliased & mapped.keys():
        for box in mapped[tensor]:
            shared.setdefault(box.view, []).append(box)
    for view, boxes in shared.items():
        at = np.unique(np.concatenate([box.place.all_flat() for box in boxes]))
        single += at.size * seen[view].width
    return single


def _ranges(seen: Seen) -> int:
    """Storage ranges that loads fill with something constant."""
    at = seen.rest[seen.written & ~seen.varied]
    return int((np.diff(at) != 1).sum()) + 1 if at.size else 0
