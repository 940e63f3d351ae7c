"""Changes of residual tasks → records of the canonical tensors that the framework computes from them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from dcr_stream.canonical import Region, Words
from dcr_stream.delta import Change, Conversion, Record, Tally, Trackers
from dcr_stream.errors import CaptureError
from dcr_stream.flow import Stage, fold
from dcr_stream.stages.compare import changed_elements, tallied
from dcr_stream.stages.project import source_change

__all__ = ["MOST", "convert"]

MOST = 1 << 23
"""Elements of a converted tensor that one record is about."""


def convert() -> Stage[Record | Change, Record]:
    """Run the conversions of changed residual tasks, and pass on what they changed.

    Records pass unaltered. A residual ``Change`` becomes a record without a tensor (advanced after commit, never
    sent). At the end of the source, each conversion of a task that changed runs once, in the order of the
    conversions' keys; each tensor it returns is compared with the residual baseline as ``compare`` does, added to
    the tally, and passed on as records of at most ``MOST`` of its elements. Conversions whose tasks did
    not change do not run. Neither trackers nor baseline are written.

    Raises:
        CaptureError: while running: a conversion did not return exactly its tensors at the baseline's size and
            width, or the baseline lacks one.
    """
    return fold(_Conversions, name="convert")


class _Conversions:
    def __init__(self) -> None:
        self._affected: dict[str, tuple[Conversion, Trackers, Tally]] = {}

    def push(self, item: Record | Change) -> tuple[Record, ...]:
        if isinstance(item, Record):
            return (item,)
        shard = item.shard
        for conversion in shard.task.conversions:
            self._affected.setdefault(conversion.key, (conversion, shard.trackers, shard.tally))
        return (source_change(item),)

    def flush(self) -> Iterator[Record]:
        # One order on every rank: a conversion can be a collective of the training cluster.
        for key in sorted(self._affected):
            yield from _changed(*self._affected.pop(key))


def _changed(conversion: Conversion, trackers: Trackers, tally: Tally) -> Iterator[Record]:
    results = dict(conversion.run())
    if set(results) != set(conversion.tensors):
        raise CaptureError(
            f"conversion {conversion.key!r} returned tensors {sorted(results)} instead of "
            f"{sorted(conversion.tensors)}; it must return all of its tensors and no others"
        )
    for tensor in conversion.tensors:
        what = f"tensor {tensor} of conversion {conversion.key!r}"
        new, old = results.pop(tensor), trackers.residual.get(tensor)
        if old is None:
            raise CaptureError(f"{what} is not in the residual baseline; fill it (first refit) before comparing")
        if new.shape != old.shape:
            raise CaptureError(
                f"{what} was computed with shape {new.shape} instead of {old.shape}; return flat words, "
                "and keep the model's structure within a run"
            )
        for lo in range(0, old.size, MOST):
            hi = min(lo + MOST, old.size)
            positions, differences, before = changed_elements(partial(_range, new), old, lo, hi, what)
            if positions.count:
                region = Region.run(lo, hi - lo)
                tallied(tally, f"residual:{tensor}", region, positions, differences)
                yield Record(conversion.key, tensor, region, positions, differences, before, task=None)


def _range(words: Words, lo: int, hi: int) -> Words:
    return words[lo:hi]
