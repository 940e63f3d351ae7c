"""4,000 mutated payloads: refused by a PayloadError, caught by the state digest, or the same bits."""

from __future__ import annotations

from collections import Counter

import blake3
import msgspec
import numpy as np
import pytest

from dcr_stream.canonical import Region, TensorDirectory, TensorSpec, Words, word_dtype
from dcr_stream.codec import (
    PayloadHeader,
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
from dcr_stream.errors import DigestMismatch, PayloadError
from dcr_stream.messages import Attempt, PayloadId

DIRECTORY = TensorDirectory(
    [
        TensorSpec("a", "bfloat16", (60, 50)),
        TensorSpec("b", "float32", (400,)),
        TensorSpec("c", "bool", (30,)),
        TensorSpec("d", "int64", (2000,)),
        TensorSpec("e", "bfloat16", (60000,)),
    ]
)
REGIONS = (
    Region(100, (40, 20), (50, 2)),
    Region.whole(400),
    Region.whole(30),
    Region.run(5, 1000),
    Region.whole(60000),
)
MODES: tuple[EntryMode, ...] = ("add", "xor", "overwrite", "add", "add")
RATES = (0.3, 0.4, 1.0, 0.2, 0.001)


def make() -> tuple[bytes, list[Words], list[Words]]:
    """A payload with every mode, width and column, and what its tensors hold before and after."""
    rng = np.random.default_rng(7)
    before, after, entries = [], [], []
    for tensor, (spec, region, mode, rate) in enumerate(zip(DIRECTORY, REGIONS, MODES, RATES, strict=True)):
        old = rng.integers(0, 256, spec.numel * spec.width, np.uint8).view(word_dtype(spec.width))
        positions = np.flatnonzero(rng.random(region.count) < rate)
        differences = rng.choice([1, 2, 5, 40, 700], positions.size, p=[0.6, 0.2, 0.1, 0.05, 0.05]).astype(old.dtype)
        differences[differences == 0] = 1
        flat = region.flat(positions)
        record = Record(
            spec.name, tensor, region, encode_positions(positions, region.count), differences, old[flat], spec.name
        )
        new = old.copy()
        new[flat] = record.new()
        entries.append(encode_record(record, mode))
        before.append(old)
        after.append(new)
    columns = tuple(b"".join(shares) for shares in zip(*(entry.columns for entry in entries), strict=True))
    payload = seal_payload(
        frame_bucket(Bucket(tuple(entry.item for entry in entries), columns)),
        id=PayloadId(Attempt("run", 2, 1, 1), "owner", 0),
        base=1,
        kind="delta",
        directory=DIRECTORY.digest,
        secret=None,
    )
    return payload.body, before, after


BODY, BEFORE, AFTER = make()


def received(body: bytes, block: bool = False) -> list[Words]:
    """What a receiver holds after everything it checks."""
    opened = unpack_block(body) if block else open_payload(body, secret=None)
    check_payload(opened, DIRECTORY)
    tensors = [words.copy() for words in BEFORE]
    for item, columns in opened.items():
        decoded = decode_item(item, columns)
        assert decoded.positions.count == decoded.values.size == item.count
        flat = item.region.flat(decode_positions(decoded.positions))
        storage = tensors[item.tensor]
        storage[flat] = combine(item.mode, storage[flat], decoded.values)
        if state_sum(item.tensor, flat, storage[flat]) != item.digest:
            raise DigestMismatch
    return tensors


def outcome(body: bytes, block: bool = False) -> str:
    try:
        tensors = received(body, block)
    except PayloadError:
        return "refused"
    except DigestMismatch:
        return "digest"
    for tensor, expected in zip(tensors, AFTER, strict=True):
        np.testing.assert_array_equal(tensor, expected)
    return "same bits"


def mutated(rng: np.random.Generator, data: bytes) -> bytes:
    """Flip, cut, insert, delete, move or repeat some bytes."""
    at, other = (int(i) for i in np.sort(rng.integers(0, len(data), 2)))
    some = rng.integers(0, 256, int(rng.integers(1, 9)), np.uint8).tobytes()
    kind = rng.integers(0, 7)
    if kind <= 1:
        return data[:at] + bytes((data[at] ^ int(rng.integers(1, 256)),)) + data[at + 1 :]
    if kind == 2:
        return data[:at]
    if kind == 3:
        return data[:at] + some + data[at:]
    if kind == 4:
        return data[:at] + data[at + len(some) :]
    if kind == 5:
        return data[:at] + some + data[at + len(some) :]
    return data[:at] + data[other : other + 8] + data[at + 8 : other] + data[at : at + 8] + data[other + 8 :]


def resealed(content: bytes) -> bytes:
    return content + blake3.blake3(content).digest()


def test_the_payload_itself_arrives() -> None:
    assert outcome(BODY) == "same bits"
    opened = open_payload(BODY, secret=None)
    assert all(any(item.sizes[c] for item in opened.header.items) for c in range(len(opened.columns)))
    assert {stream.codec for stream in opened.header.streams} == {"raw", "zstd"}


@pytest.mark.parametrize("seed", range(5))
def test_mutations_without_a_new_seal_are_refused(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(200):
        body = mutated(rng, BODY)
        assert outcome(body) == ("same bits" if body == BODY else "refused")


@pytest.mark.parametrize("seed", range(5))
def test_mutations_under_a_valid_seal_are_refused_or_caught(seed: int) -> None:
    """Structural checks stand on their own: no mutation raises anything else, or leaves other bits unnoticed."""
    rng = np.random.default_rng(100 + seed)
    length = 9 + int.from_bytes(BODY[5:9], "little")
    seen: Counter[str] = Counter()
    for i in range(200):
        if i % 2:
            content = BODY[:length] + mutated(rng, BODY[length:-32])
        else:
            header = mutated(rng, BODY[9:length])
            content = BODY[:5] + len(header).to_bytes(4, "little") + header + BODY[length:-32]
        seen[outcome(resealed(content))] += 1
    assert seen["refused"] >= 100


@pytest.mark.parametrize("seed", range(5))
def test_mutated_columns_under_valid_frames_are_refused_or_caught(seed: int) -> None:
    """A block has neither compression nor a seal of its own: every bound is the reader's."""
    rng = np.random.default_rng(200 + seed)
    block = pack_block(open_payload(BODY, secret=None))
    length = 9 + int.from_bytes(block[5:9], "little")
    seen: Counter[str] = Counter()
    for i in range(200):
        content = block[length:-32]
        if i % 4:
            at = int(rng.integers(0, len(content)))
            content = content[:at] + bytes((content[at] ^ int(rng.integers(1, 256)),)) + content[at + 1 :]
        else:
            content = mutated(rng, content)
        seen[outcome(block[:length] + content + block[-32:], block=True)] += 1
    assert seen["refused"] >= 10
    assert seen["digest"] >= 10


def altered_item(rng: np.random.Generator, item: Item) -> Item:
    def number(value: int) -> int:
        others = (value + 1, value - 1, 0, 1, 2 * value, 255, 1 << 31, (1 << 62) + 1, (1 << 64) - 1)
        return min(others[int(rng.integers(0, len(others)))], (1 << 64) - 1)

    def numbers(values: tuple[int, ...]) -> tuple[int, ...]:
        chosen = list(values)
        at = int(rng.integers(0, len(chosen)))
        chosen[at] = number(chosen[at])
        return tuple(chosen) if rng.random() < 0.8 else tuple(chosen[::-1])

    field = str(rng.choice(Item.__struct_fields__))
    value = getattr(item, field)
    if field == "mode":
        value = str(rng.choice(["add", "xor", "overwrite"]))
    elif field == "positions":
        value = str(rng.choice([mode for mode in ("gaps", "bitmap", "dense") if mode != value]))
    elif field == "sizes":
        value = numbers(value)
    elif field == "region":
        part = str(rng.choice(["offset", "sizes", "strides"]))
        old = getattr(value, part)
        value = msgspec.structs.replace(value, **{part: number(old) if part == "offset" else numbers(old)})
    else:
        value = number(value)
    return msgspec.structs.replace(item, **{field: value})


@pytest.mark.parametrize("seed", range(5))
def test_altered_item_tables_under_a_valid_seal_are_refused_or_caught(seed: int) -> None:
    rng = np.random.default_rng(300 + seed)
    length = 9 + int.from_bytes(BODY[5:9], "little")
    header = msgspec.msgpack.decode(BODY[9:length], type=PayloadHeader)
    seen: Counter[str] = Counter()
    for _ in range(200):
        items = list(header.items)
        if rng.random() < 0.1:
            i, j = rng.choice(len(items), 2, replace=False)
            items[i], items[j] = items[j], items[i]
        else:
            at = int(rng.integers(0, len(items)))
            items[at] = altered_item(rng, items[at])
        encoded = msgspec.msgpack.encode(msgspec.structs.replace(header, items=tuple(items)))
        content = BODY[:5] + len(encoded).to_bytes(4, "little") + encoded + BODY[length:-32]
        seen[outcome(resealed(content))] += 1
    assert seen["refused"] >= 80
