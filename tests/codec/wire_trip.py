"""A trip over the wire, for tests: record → entry → payload → block → bits."""

from __future__ import annotations

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
from dcr_stream.delta import Bucket, EntryMode, Item, Record
from dcr_stream.messages import Attempt, PayloadId


def trip(old: Words, new: Words, mode: EntryMode, dtype: str) -> tuple[Words, Item]:
    """Send what differs between two versions of a tensor; what the receiver then holds, and the item that did it."""
    directory = TensorDirectory([TensorSpec("other", "bool", (3,)), TensorSpec("weight", dtype, (old.size,))])
    positions = np.flatnonzero(old != new)
    record = Record(
        name="weight",
        tensor=1,
        region=Region.whole(old.size),
        positions=encode_positions(positions, old.size),
        differences=new[positions] - old[positions],
        old=old[positions],
        task="weight",
    )
    entry = encode_record(record, mode)
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
    decoded = decode_item(item, columns)
    flat = item.region.flat(decode_positions(decoded.positions))
    result = old.copy()
    result[flat] = combine(item.mode, old[flat], decoded.values)
    assert state_sum(1, flat, result[flat]) == item.digest
    return result, item
