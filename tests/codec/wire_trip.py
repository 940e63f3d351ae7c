"""A trip over the wire, for tests: record → entry → payload → block → bits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dcr_stream.canonical import Region, TensorDirectory, TensorSpec, Words
from dcr_stream.codec import (
    check_payload,
    combine,
    decode_item,
    encode_record,
    frame_bucket,
    open_payload,
    pack_block,
    seal_payload,
    state_sum,
    unpack_block,
)
from dcr_stream.codec.positions import decode_positions, encode_positions
from dcr_stream.delta import Bucket, Entry, EntryMode, Item, Record
from dcr_stream.errors import DigestMismatch
from dcr_stream.messages import Attempt, PayloadId


def entry_of(tensor: int, region: Region, old: Words, new: Words, mode: EntryMode) -> Entry:
    """What differs between two versions of a tensor (all of it in ``region``), encoded."""
    flat = region.all_flat()
    positions = np.flatnonzero(old[flat] != new[flat])
    changed = flat[positions]
    record = Record(
        name=f"tensor {tensor}",
        tensor=tensor,
        region=region,
        positions=encode_positions(positions, region.count),
        differences=new[changed] - old[changed],
        old=old[changed],
        task=f"tensor {tensor}",
    )
    return encode_record(record, mode)


def arrive(storage: Words, item: Item, columns: Sequence[bytes | memoryview]) -> None:
    """Decode an item into its tensor's storage, and read back what it wrote.

    Raises:
        MalformedPayload: as ``decode_item``.
        DigestMismatch: storage then holds other bits than the item's digest says.
    """
    decoded = decode_item(item, columns)
    positions = decode_positions(decoded.positions)
    assert positions.size == decoded.values.size == item.count
    assert positions.size == 0 or 0 <= positions[0] <= positions[-1] < item.region.count
    assert (np.diff(positions) > 0).all()
    flat = item.region.flat(positions)
    storage[flat] = combine(item.mode, storage[flat], decoded.values)
    if state_sum(item.tensor, flat, storage[flat]) != item.digest:
        raise DigestMismatch


def trip(old: Words, new: Words, mode: EntryMode, dtype: str) -> tuple[Words, Item]:
    """Send what differs between two versions of a tensor; what the receiver then holds, and the item that did it."""
    directory = TensorDirectory([TensorSpec("other", "bool", (3,)), TensorSpec("weight", dtype, (old.size,))])
    entry = entry_of(1, Region.whole(old.size), old, new, mode)
    payload = seal_payload(
        frame_bucket(Bucket((entry.item,), tuple(map(bytes, entry.columns)))),
        id=PayloadId(Attempt("run", 8, 1, 1), "owner", 0),
        base=7,
        kind="delta",
        directory=directory.digest,
        secret=b"secret",
    )
    opened = unpack_block(pack_block(open_payload(payload.body, secret=b"secret")))
    check_payload(opened, directory)
    ((item, columns),) = opened.items()
    result = old.copy()
    arrive(result, item, columns)
    return result, item
