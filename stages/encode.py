"""Records → entries."""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

from dcr_stream.codec.entries import encode_record
from dcr_stream.delta import Entry, EntryMode, Record
from dcr_stream.errors import UsageError
from dcr_stream.flow import Inlet, Outlet, Stage, each
from dcr_stream.flow.arguments import check_at_least

__all__ = ["Entries", "encode"]

Entries = Literal["mixed", "add", "xor", "overwrite"]
"""Which entry modes to use. An upper bound: records that an attempt's terms forbid to be relative are overwritten."""


def encode(*, entries: Entries = "mixed", workers: int = 1) -> Stage[Record, Entry]:
    """Code each record as one entry; this is the record-to-entry stage, before which an owner splits its pipeline.

    ``mixed`` and ``add`` code relative records as ``add``, ``xor`` codes them as ``xor``. All others, and with
    ``overwrite`` every record, are coded as ``overwrite``.

    Args:
        workers: records encoded at the same time.

    Raises:
        UsageError: an argument is out of range. While running: a record has no tensor (a source change, which the
            owner keeps back), or cannot be encoded.
    """
    if entries not in get_args(Entries):
        raise UsageError(f"encode: entries={entries!r} is unknown; use one of {', '.join(get_args(Entries))}")
    check_at_least("encode", "workers", workers, 1)
    return _Encode("add" if entries == "mixed" else entries, workers)


class _Encode(Stage[Record, Entry]):
    encodes: ClassVar[bool] = True

    def __init__(self, relative: EntryMode, workers: int) -> None:
        def entry(record: Record) -> Entry:
            return encode_record(record, relative if record.relative else "overwrite")

        self._each = each(entry, workers=workers, name=self.name)

    @property
    def name(self) -> str:
        return "encode"

    async def run(self, source: Inlet[Record], sink: Outlet[Entry]) -> None:
        await self._each.run(source, sink)
