"""Payloads of every kind, and ways to break them: what ``test_mutations`` feeds to a reader."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import msgspec
import numpy as np
import zstandard

from dcr_stream.canonical import Region, TensorDirectory, TensorSpec, Words, word_dtype
from dcr_stream.codec import Limits, PayloadHeader, frame_bucket, open_payload, pack_block, seal_payload
from dcr_stream.codec.seals import SEAL_BYTES, seal
from dcr_stream.delta import Bucket, EntryMode, Item, Stream
from dcr_stream.messages import Attempt, PayloadId

from .wire_trip import entry_of

SECRET = b"a secret of the run"
LIMITS = Limits(max_payload_bytes=1 << 16, max_raw_bytes=1 << 14, max_items=64, max_header_bytes=1 << 13)
"""Just above the originals: whatever a reader allocates beyond them, it allocated by a length it did not check."""

# Of each width one tensor for every position mode: gaps, gaps with a shift, bitmap and dense. The middle two are
# reached through strides.
DIRECTORY = TensorDirectory(
    TensorSpec(f"{positions}.{dtype}", dtype, shape)
    for dtype in ("uint8", "bfloat16", "float32", "int64")
    for positions, shape in (("gaps", (300,)), ("shifted", (100, 80)), ("bitmap", (12, 5, 3)), ("dense", (31,)))
)
REGIONS = (Region.run(20, 250), Region(40, (99, 39), (80, 2)), Region(1, (10, 5, 2), (15, 3, 1)), Region.whole(31))
RATES = (0.15, 0.002, 0.5, 1.0)
MODES: tuple[EntryMode, ...] = ("add", "xor", "overwrite")
SOME = (0, 1, 2, 254, 255, 256, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 32, (1 << 62) + 1, 1 << 63, (1 << 64) - 1)
"""Lengths, counts and sums that readers get wrong."""

_HEAD = struct.Struct("<4sBI")


@dataclass(frozen=True)
class Original:
    """A valid payload: all items of one mode and width, or (``mixed``) of all of them."""

    name: str
    payload: bytes
    block: bytes
    header: PayloadHeader
    columns: tuple[bytes, ...]
    before: dict[int, Words]
    after: dict[int, Words]


def _original(name: str, tensors: Sequence[int], modes: Sequence[EntryMode], seed: int) -> Original:
    rng = np.random.default_rng(seed)
    before, after, entries = {}, {}, []
    for tensor, mode in zip(tensors, modes, strict=True):
        spec, region = DIRECTORY[tensor], REGIONS[tensor % len(REGIONS)]
        old = rng.integers(0, 256, spec.numel * spec.width, np.uint8).view(word_dtype(spec.width))
        count = max(2, round(region.count * RATES[tensor % len(RATES)]))
        changed = region.flat(np.sort(rng.choice(region.count, count, replace=False)))
        new = old.copy()
        new[changed] += rng.choice([1, 2, 5, 40, 700], count, p=[0.6, 0.2, 0.1, 0.05, 0.05]).astype(old.dtype)
        entries.append(entry_of(tensor, region, old, new, mode))
        before[tensor], after[tensor] = old, new
    columns = tuple(b"".join(shares) for shares in zip(*(entry.columns for entry in entries), strict=True))
    body = seal_payload(
        frame_bucket(Bucket(tuple(entry.item for entry in entries), columns)),
        id=PayloadId(Attempt("run", 2, 1, 1), "owner", 0),
        base=1,
        kind="delta",
        directory=DIRECTORY.digest,
        secret=SECRET,
    ).body
    opened = open_payload(body, secret=SECRET)
    return Original(name, bytes(body), pack_block(opened), opened.header, columns, before, after)


def _originals() -> tuple[Original, ...]:
    groups = [range(i, i + 4) for i in range(0, len(DIRECTORY), 4)]
    pure = [
        _original(f"{mode}, {DIRECTORY[group[0]].dtype}", group, (mode,) * 4, seed)
        for seed, (mode, group) in enumerate(product(MODES, groups))
    ]
    mixed: list[EntryMode] = [MODES[(i + i // 4) % 3] for i in range(len(DIRECTORY))]
    return (*pure, _original("mixed", range(len(DIRECTORY)), mixed, len(pure)))


ORIGINALS = _originals()

# -- bytes: whole, header only, or what follows it ----------------------------------------------------------------


def flipped(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    bits = np.frombuffer(data, np.uint8).copy()
    at = rng.integers(0, bits.size, int(rng.integers(1, 4)))
    bits[at] ^= np.uint8(1) << rng.integers(0, 8, at.size, np.uint8)
    return bits.tobytes()


def overwritten(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    at, some = int(rng.integers(0, len(data))), _bytes(rng)
    return data[:at] + some + data[at + len(some) :]


def with_a_length(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    """A little-endian or (MessagePack) big-endian integer of 1 to 8 bytes put somewhere."""
    width = int(rng.choice([1, 2, 4, 8]))
    value = (SOME[int(rng.integers(0, len(SOME)))] & ((1 << 8 * width) - 1)).to_bytes(width, "little")
    at = int(rng.integers(0, len(data)))
    return data[:at] + (value if rng.random() < 0.6 else value[::-1]) + data[at + width :]


def truncated(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    return data[: int(rng.integers(0, len(data)))]


def extended(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    return data + (_bytes(rng) if rng.random() < 0.8 else data)


def shortened(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    at = int(rng.integers(0, len(data)))
    return data[:at] + data[at + int(rng.integers(1, 9)) :]


def lengthened(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    at = int(rng.integers(0, len(data)))
    return data[:at] + _bytes(rng) + data[at:]


def exchanged(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    """Eight bytes here for eight there."""
    lo, hi = (int(i) for i in np.sort(rng.integers(0, len(data), 2)))
    return data[:lo] + data[hi : hi + 8] + data[lo + 8 : hi] + data[lo : lo + 8] + data[hi + 8 :]


def spliced(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    """The start of one payload and the end of another."""
    at = int(rng.integers(1, max(2, min(len(data), len(other)))))
    return data[:at] + other[at if rng.random() < 0.5 else int(rng.integers(0, len(other))) :]


def _bytes(rng: np.random.Generator) -> bytes:
    return rng.integers(0, 256, int(rng.integers(1, 9)), np.uint8).tobytes()


# -- header: well formed, of wrong content ------------------------------------------------------------------------


def altered_item(rng: np.random.Generator, header: PayloadHeader, other: PayloadHeader) -> PayloadHeader:
    """One field of one item."""
    items = list(header.items)
    at = int(rng.integers(0, len(items)))
    item = items[at]
    field = str(rng.choice(Item.__struct_fields__))
    value = getattr(item, field)
    if field in ("mode", "positions"):
        value = str(rng.choice(MODES if field == "mode" else ("gaps", "bitmap", "dense")))
    elif field == "sizes":
        value = _numbers(rng, value)
    elif field == "region":
        part = str(rng.choice(["offset", "sizes", "strides"]))
        old = getattr(value, part)
        value = msgspec.structs.replace(value, **{part: (_number if part == "offset" else _numbers)(rng, old)})
    else:
        value = _number(rng, value)
    items[at] = msgspec.structs.replace(item, **{field: value})
    return msgspec.structs.replace(header, items=tuple(items))


def altered_stream(rng: np.random.Generator, header: PayloadHeader, other: PayloadHeader) -> PayloadHeader:
    """One field of one stream, or two streams exchanged."""
    streams = list(header.streams)
    i, j = (int(k) for k in rng.choice(len(streams), 2, replace=False))
    kind = rng.integers(0, 4)
    if kind == 0:
        streams[i], streams[j] = streams[j], streams[i]
    elif kind == 1:
        streams[i] = msgspec.structs.replace(streams[i], codec="raw" if streams[i].codec == "zstd" else "zstd")
    else:
        field = "raw" if kind == 2 else "coded"
        streams[i] = msgspec.structs.replace(streams[i], **{field: _number(rng, getattr(streams[i], field))})
    return msgspec.structs.replace(header, streams=tuple(streams))


def altered_table(rng: np.random.Generator, header: PayloadHeader, other: PayloadHeader) -> PayloadHeader:
    """Items exchanged, dropped, repeated, or those of another payload."""
    items = list(header.items)
    i, j = (int(k) for k in rng.choice(len(items), 2, replace=False))
    kind = rng.integers(0, 5)
    if kind == 0:
        items[i], items[j] = items[j], items[i]
    elif kind == 1:
        items[i] = msgspec.structs.replace(items[i], sizes=items[j].sizes)
    elif kind == 2:
        del items[i]
    elif kind == 3:
        items.insert(j, items[i])
    else:
        items[i] = other.items[int(rng.integers(0, len(other.items)))]
    return msgspec.structs.replace(header, items=tuple(items))


def _number(rng: np.random.Generator, value: int) -> int:
    near = (value + 1, value - 1, value + 8, 2 * value, value // 2)
    choice = (*near, *SOME)[int(rng.integers(0, len(near) + len(SOME)))]
    return min(choice, (1 << 64) - 1)


def _numbers(rng: np.random.Generator, values: tuple[int, ...]) -> tuple[int, ...]:
    chosen = list(values)
    at = int(rng.integers(0, len(chosen)))
    kind = rng.random()
    if kind < 0.7:
        chosen[at] = _number(rng, chosen[at])
    elif kind < 0.8:
        chosen.reverse()
    elif kind < 0.9:
        del chosen[at]
    else:
        chosen.insert(at, _number(rng, chosen[at]))
    return tuple(chosen)


# -- columns: framed as declared, of wrong content ----------------------------------------------------------------

Bundle = tuple[list[Item], list[bytes]]


def broken_column(rng: np.random.Generator, original: Original, other: Original) -> Bundle:
    """One column changed, at its length or with an item's share that grows or shrinks along."""
    items, columns = list(original.header.items), list(original.columns)
    c = int(rng.choice([i for i, column in enumerate(columns) if column]))
    change = BYTES[int(rng.integers(0, len(BYTES)))]
    before = len(columns[c])
    columns[c] = change(rng, columns[c], other.columns[c] or columns[c])
    i = int(rng.integers(0, len(items)))
    sizes = list(items[i].sizes)
    sizes[c] += len(columns[c]) - before
    if sizes[c] >= 0:
        items[i] = msgspec.structs.replace(items[i], sizes=tuple(sizes))
    return items, columns


def swapped_columns(rng: np.random.Generator, original: Original, other: Original) -> Bundle:
    """Two columns exchanged, the items' shares of them with or without."""
    items, columns = list(original.header.items), list(original.columns)
    i = int(rng.choice([i for i, column in enumerate(columns) if column]))
    j = int(rng.choice([j for j in range(len(columns)) if j != i]))
    columns[i], columns[j] = columns[j], columns[i]
    if rng.random() < 0.7:
        for at, item in enumerate(items):
            sizes = list(item.sizes)
            sizes[i], sizes[j] = sizes[j], sizes[i]
            items[at] = msgspec.structs.replace(item, sizes=tuple(sizes))
    return items, columns


def duplicated_item(rng: np.random.Generator, original: Original, other: Original) -> Bundle:
    """An item twice, with its share of every column."""
    items, columns = list(original.header.items), list(original.columns)
    i = int(rng.integers(0, len(items)))
    for c, size in enumerate(items[i].sizes):
        lo = sum(item.sizes[c] for item in items[:i])
        columns[c] = columns[c][: lo + size] + columns[c][lo:]
    items.insert(i, items[i])
    return items, columns


def foreign_column(rng: np.random.Generator, original: Original, other: Original) -> Bundle:
    """A column of another payload under this one's table."""
    items, columns = list(original.header.items), list(original.columns)
    c = int(rng.choice([i for i, column in enumerate(columns) if column or other.columns[i]]))
    columns[c] = other.columns[c]
    return items, columns


# -- frames: more in them than a reader may allocate --------------------------------------------------------------

_INSIDE, _ABOVE = LIMITS.max_raw_bytes // 2, 1 << 26
_ZEROS = {size: zstandard.ZstdCompressor(level=1).compress(bytes(size)) for size in (_INSIDE, _ABOVE)}
_MAGIC = b"\x28\xb5\x2f\xfd"


def bomb(rng: np.random.Generator, original: Original, other: Original) -> tuple[PayloadHeader, list[bytes]]:
    """A frame that holds much more than it takes, and that says so, or not, in its header or in the stream table."""
    size = _INSIDE if rng.random() < 0.3 else _ABOVE
    frame = _ZEROS[size]
    claimed = int(rng.choice([size, _INSIDE, 1 << 31, 1 << 40]))
    if rng.random() < 0.5:  # content size of 8 bytes, in a single segment as large as that or in a window of 1 KiB
        single = rng.random() < 0.5
        start = b"\xe0" if single else b"\xc0\x00"
        frame = _MAGIC + start + claimed.to_bytes(8, "little") + frame[zstandard.frame_header_size(frame) :]
    coded = frame_bucket(Bucket(original.header.items, original.columns))
    streams, frames = list(coded.streams), list(coded.frames)
    c = int(rng.integers(0, len(streams)))
    frames[c] = frame
    declared = int(rng.choice([size, claimed, streams[c].raw, LIMITS.max_raw_bytes]))
    streams[c] = Stream("zstd", declared, len(frame))
    return msgspec.structs.replace(original.header, streams=tuple(streams)), frames


# -- all together ---------------------------------------------------------------------------------------------------

BYTES: tuple[Callable[[np.random.Generator, bytes, bytes], bytes], ...] = (
    flipped,
    overwritten,
    with_a_length,
    truncated,
    extended,
    shortened,
    lengthened,
    exchanged,
    spliced,
)
HEADERS = (altered_item, altered_stream, altered_table)
BUNDLES = (broken_column, swapped_columns, duplicated_item, foreign_column)
Mutation = Callable[[np.random.Generator, Original, Original, bool], bytes]


def _split(original: Original, block: bool) -> tuple[bytes, bytes, bytes]:
    data = (original.block if block else original.payload)[:-SEAL_BYTES]
    start = _HEAD.size + int.from_bytes(data[5 : _HEAD.size], "little")
    return data[: _HEAD.size], data[_HEAD.size : start], data[start:]


def _joined(head: bytes, header: bytes, rest: bytes) -> bytes:
    return head[:5] + len(header).to_bytes(4, "little") + header + rest


def _of_bytes(change: Callable[[np.random.Generator, bytes, bytes], bytes]) -> Mutation:
    def mutate(rng: np.random.Generator, original: Original, other: Original, block: bool) -> bytes:
        (head, header, rest), (_, header2, rest2) = _split(original, block), _split(other, block)
        part = rng.integers(0, 5)
        if part == 0:
            return change(rng, head + header + rest, head + header2 + rest2)
        if part <= 2:
            return _joined(head, change(rng, header, header2), rest)
        return head + header + change(rng, rest, rest2)

    return mutate


def _of_header(change: Callable[[np.random.Generator, PayloadHeader, PayloadHeader], PayloadHeader]) -> Mutation:
    def mutate(rng: np.random.Generator, original: Original, other: Original, block: bool) -> bytes:
        head, _, rest = _split(original, block)
        return _joined(head, msgspec.msgpack.encode(change(rng, original.header, other.header)), rest)

    return mutate


def _of_bundle(change: Callable[[np.random.Generator, Original, Original], Bundle]) -> Mutation:
    def mutate(rng: np.random.Generator, original: Original, other: Original, block: bool) -> bytes:
        items, columns = change(rng, original, other)
        coded = frame_bucket(Bucket(tuple(items), tuple(columns)))
        header = msgspec.structs.replace(original.header, items=coded.items, streams=coded.streams)
        rest = b"".join(columns if block else coded.frames)
        return _joined(_split(original, block)[0], msgspec.msgpack.encode(header), rest)

    return mutate


def _bomb(rng: np.random.Generator, original: Original, other: Original, block: bool) -> bytes:
    header, frames = bomb(rng, original, other)
    return _joined(_split(original, block)[0], msgspec.msgpack.encode(header), b"".join(frames))


MUTATIONS: dict[str, Mutation] = {
    **{change.__name__: _of_bytes(change) for change in BYTES},
    **{change.__name__: _of_header(change) for change in HEADERS},
    **{change.__name__: _of_bundle(change) for change in BUNDLES},
    "bomb": _bomb,
}


def mutant(rng: np.random.Generator, name: str, original: Original, *, block: bool = False) -> bytes:
    """What a mutation makes of an original, without a seal; never the original itself, or another one."""
    while True:
        other = ORIGINALS[int(rng.integers(0, len(ORIGINALS)))]
        made = MUTATIONS[name](rng, original, other, block)
        if made not in ((one.block if block else one.payload)[:-SEAL_BYTES] for one in (original, other)):
            return made


def sealed(content: bytes) -> bytes:
    """Content under a valid seal: made by whoever has the key, or by an encoder with a fault."""
    return content + seal((content,), "payload", SECRET)


__all__ = ["DIRECTORY", "LIMITS", "MUTATIONS", "ORIGINALS", "SECRET", "Original", "mutant", "sealed"]
