"""Payloads, blocks and manifests: sealed, exact, bounded, and of one fixed format."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable, Sequence

import blake3
import msgspec
import numpy as np
import pytest
import zstandard

from dcr_stream.canonical import Region, TensorDirectory, TensorSpec, word_dtype
from dcr_stream.codec import (
    COLUMNS,
    Limits,
    OpenedPayload,
    PayloadHeader,
    check_payload,
    encode_record,
    frame_bucket,
    manifest_digest,
    open_payload,
    pack_block,
    seal_manifest,
    seal_payload,
    unpack_block,
    verify_manifest,
)
from dcr_stream.codec.positions import encode_positions
from dcr_stream.delta import Bucket, EntryMode, Record, Stream
from dcr_stream.errors import DirectoryMismatch, MalformedPayload, SealMismatch, UsageError
from dcr_stream.messages import Attempt, Manifest, ManifestEntry, Payload, PayloadId, PayloadKind

SECRET = b"a secret of the run"
DIRECTORY = TensorDirectory(
    [
        TensorSpec("model.embed.weight", "bfloat16", (40, 50)),
        TensorSpec("model.scale", "float32", ()),
        TensorSpec("model.mask", "bool", (7,)),
        TensorSpec("model.steps", "int64", (9,)),
    ]
)
ID = PayloadId(Attempt("run-1", 8, 3, 2), "owner.0", 5)


def record(tensor: int, positions: Sequence[int], old: Sequence[int], new: Sequence[int]) -> Record:
    spec = DIRECTORY[tensor]
    old_bits, new_bits = (np.array(a, word_dtype(spec.width)) for a in (old, new))
    return Record(
        name=spec.name,
        tensor=tensor,
        region=Region.whole(spec.numel),
        positions=encode_positions(np.array(positions, np.int64), spec.numel),
        differences=new_bits - old_bits,
        old=old_bits,
        task=spec.name,
    )


def bucket(*records: tuple[Record, EntryMode]) -> Bucket:
    entries = [encode_record(r, mode) for r, mode in records]
    columns = tuple(b"".join(parts) for parts in zip(*(e.columns for e in entries), strict=True))
    return Bucket(tuple(e.item for e in entries), columns)


def small() -> Bucket:
    """Every mode, width and position mode, in columns too short for zstd to shorten."""
    return bucket(
        (record(0, [3, 1999], [0x3F80, 7], [0x3F81, 0x8007]), "add"),
        (record(1, [0], [0x3F800000], [0x7FC00001]), "xor"),
        (record(2, [0, 1, 2, 3, 4, 5, 6], [0] * 7, [1, 0, 1, 1, 0, 0, 1]), "overwrite"),
        (record(3, [8], [5], [(1 << 64) - 5]), "add"),
    )


def large() -> Bucket:
    """Columns that zstd shortens."""
    rng = np.random.default_rng(0)
    positions = np.flatnonzero(rng.random(2000) < 0.2)
    old = np.full(positions.size, 0x3F80)
    return bucket((record(0, positions.tolist(), old.tolist(), (old + rng.choice([1, 2], old.size)).tolist()), "add"))


def sealed(b: Bucket, secret: bytes | None = SECRET, kind: PayloadKind = "delta") -> Payload:
    return seal_payload(frame_bucket(b), id=ID, base=7, kind=kind, directory=DIRECTORY.digest, secret=secret)


def reseal(content: bytes, secret: bytes | None = SECRET) -> bytes:
    if secret is None:
        return content + blake3.blake3(content).digest()
    key = blake3.blake3(secret, derive_key_context="dcr_stream 1 payload seal").digest()
    return content + blake3.blake3(content, key=key).digest()


def parts(body: bytes) -> tuple[PayloadHeader, bytes]:
    """Header and frames."""
    length = int.from_bytes(body[5:9], "little")
    return msgspec.msgpack.decode(body[9 : 9 + length], type=PayloadHeader), body[9 + length : -32]


def rebuilt(header: PayloadHeader, frames: bytes) -> bytes:
    """A validly sealed payload with this header."""
    return with_header_bytes(msgspec.msgpack.encode(header), frames)


def with_header_bytes(encoded: bytes, frames: bytes) -> bytes:
    return reseal(b"DCRP\x01" + len(encoded).to_bytes(4, "little") + encoded + frames)


def test_payload_bytes_are_fixed() -> None:
    """The format cannot drift: same input, same bytes, independent of the zstd library."""
    assert {stream.codec for stream in frame_bucket(small()).streams} == {"raw"}
    body = sealed(small(), None).body
    assert body[:5] == b"DCRP\x01"
    assert blake3.blake3(body).hexdigest() == "c5164d26ccab35ce71c0358d19006eb9e4809492b2aa0ae4c6962ccf0443166c"
    assert (
        blake3.blake3(sealed(small()).body).hexdigest()
        == "a3beeb51323b53dbdf18d7aad6de60495dc2afe3c09af477fcc4e362bbf88c60"
    )
    assert (
        blake3.blake3(pack_block(open_payload(body, secret=None))).hexdigest()
        == "819841e6d72fca9faf96334720f0501ff2c78b9696f97f2eccff5ad8ad35e511"
    )


@pytest.mark.parametrize("make", [small, large])
@pytest.mark.parametrize("secret", [None, SECRET])
def test_an_opened_payload_is_what_was_sealed(make: Callable[[], Bucket], secret: bytes | None) -> None:
    made = make()
    payload = sealed(made, secret)
    opened = open_payload(payload.body, secret=secret)
    assert opened.header.id == payload.id == ID
    assert (opened.header.base, opened.header.kind, opened.header.directory) == (7, "delta", DIRECTORY.digest)
    assert opened.header.items == made.items
    assert tuple(map(bytes, opened.columns)) == made.columns
    assert opened.seal == payload.seal
    assert opened.nbytes == made.nbytes
    check_payload(opened, DIRECTORY)


def test_an_empty_bucket_is_a_payload() -> None:
    opened = open_payload(sealed(Bucket((), (b"",) * len(COLUMNS))).body, secret=SECRET)
    check_payload(opened, DIRECTORY)
    assert list(opened.items()) == []


def test_columns_are_framed_apart_and_raw_where_that_is_not_larger() -> None:
    coded = frame_bucket(large())
    by_name = dict(zip(COLUMNS, coded.streams, strict=True))
    assert by_name["G"].codec == by_name["C"].codec == "zstd"
    assert by_name["O0"] == Stream("raw", 0, 0)
    for stream, frame, column in zip(coded.streams, coded.frames, large().columns, strict=True):
        assert len(frame) == stream.coded <= stream.raw == len(column)
    zeros = Bucket((), tuple(b"\0" * 1000 if name in ("G", "L") else b"" for name in COLUMNS))
    assert frame_bucket(zeros).streams[0].codec == "zstd"
    assert frame_bucket(zeros).streams[1] == Stream("raw", 1000, 1000)


def test_levels_whose_windows_readers_refuse_are_not_used() -> None:
    assert frame_bucket(large(), level=19).items == large().items
    with pytest.raises(UsageError, match="level 20"):
        frame_bucket(large(), level=20)


def test_threads_frame_alike() -> None:
    expected = frame_bucket(large())
    seen: list[bool] = []
    threads = [threading.Thread(target=lambda: seen.append(frame_bucket(large()) == expected)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 4


def test_every_altered_byte_breaks_the_seal() -> None:
    """F1: positions, values, header and seal are all covered; order matters."""
    body = sealed(small()).body
    for i in range(len(body)):
        with pytest.raises(SealMismatch):
            open_payload(body[:i] + bytes((body[i] ^ 1,)) + body[i + 1 :], secret=SECRET)


def test_permuted_positions_values_and_header_fields_break_the_seal() -> None:
    """F1: an order-blind hash would accept these."""
    body = sealed(large()).body
    header, frames = parts(body)
    replace = msgspec.structs.replace
    forged = [
        rebuilt(header, frames[1::-1] + frames[2:]),
        rebuilt(header, frames[-1:] + frames[1:-1] + frames[:1]),
        rebuilt(replace(header, base=header.target, target=header.base), frames),
        rebuilt(replace(header, attempt=header.epoch, epoch=header.attempt), frames),
        rebuilt(replace(header, run=header.owner, owner=header.run), frames),
        rebuilt(replace(header, streams=header.streams[::-1]), frames),
    ]
    for other in forged:
        assert sorted(other[:-32]) == sorted(body[:-32])
        with pytest.raises(SealMismatch):
            open_payload(other[:-32] + body[-32:], secret=SECRET)


def test_the_seal_is_256_bits_of_blake3() -> None:
    """F4: plain without a secret, keyed with one; never a short checksum."""
    plain, keyed = sealed(small(), None).body, sealed(small()).body
    assert plain[-32:] == blake3.blake3(plain[:-32]).digest()
    assert keyed[:-32] == plain[:-32]
    assert keyed == reseal(keyed[:-32])
    for secret in (None, b"another secret", b""):
        with pytest.raises(SealMismatch, match="secret"):
            open_payload(keyed, secret=secret)
    with pytest.raises(SealMismatch):
        open_payload(plain, secret=SECRET)


@pytest.mark.parametrize("version", [0, 2, 255])
def test_unknown_versions_and_so_unknown_digests_are_refused(version: int) -> None:
    """F4: seal and digest algorithms belong to the version byte; nothing else is tried."""
    body = sealed(small()).body
    with pytest.raises(MalformedPayload, match=f"version {version} is not known"):
        open_payload(reseal(body[:4] + bytes((version,)) + body[5:-32]), secret=SECRET)
    block = pack_block(open_payload(body, secret=SECRET))
    with pytest.raises(MalformedPayload, match=f"version {version} is not known"):
        unpack_block(block[:4] + bytes((version,)) + block[5:])


def test_the_seal_is_checked_before_the_header_is_parsed() -> None:
    with pytest.raises(SealMismatch):
        open_payload(b"DCRP\x01\x05\0\0\0junk!" + bytes(32), secret=SECRET)
    with pytest.raises(MalformedPayload, match="cannot be read"):
        open_payload(reseal(b"DCRP\x01\x05\0\0\0junk!"), secret=SECRET)


def test_truncated_payloads_and_other_magic_are_refused() -> None:
    body = sealed(large()).body
    for end in (0, 8, 40, 41, len(body) // 2, len(body) - 1):
        with pytest.raises((SealMismatch, MalformedPayload)):
            open_payload(body[:end], secret=SECRET)
        with pytest.raises(MalformedPayload):
            open_payload(reseal(body[:end]), secret=SECRET)
    with pytest.raises(MalformedPayload, match="not how a payload starts"):
        open_payload(reseal(b"DCRB" + body[4:-32]), secret=SECRET)


def test_bytes_after_the_last_stream_are_refused() -> None:
    body = sealed(large()).body
    with pytest.raises(MalformedPayload, match="follow the header"):
        open_payload(reseal(body[:-32] + b"\0"), secret=SECRET)


def test_a_header_has_one_encoding() -> None:
    header, frames = parts(sealed(small()).body)
    encoded = msgspec.msgpack.encode(header)
    for wrong in (
        b"\xdc\x00\x0b" + encoded[1:],  # the same array with a longer length
        b"\x9c" + encoded[1:] + b"\xc0",  # one field more
        b"\x9a" + encoded[1:],  # one field less
        encoded + b"\xc0",
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"",
    ):
        with pytest.raises(MalformedPayload):
            open_payload(with_header_bytes(wrong, frames), secret=SECRET)


def test_headers_that_contradict_themselves_are_refused() -> None:
    header, frames = parts(sealed(large()).body)
    streams, items = header.streams, header.items
    first = streams[0]
    replace = msgspec.structs.replace
    for wrong, what in (
        (replace(header, run="../etc"), "not a plain name"),
        (replace(header, owner="a..b"), "not a plain name"),
        (replace(header, owner=""), "not a plain name"),
        (replace(header, owner="a\n"), "not a plain name"),
        (replace(header, base=-2), "negative"),
        (replace(header, sequence=-1), "negative"),
        (replace(header, streams=streams[:-1]), "13 streams for 14"),
        (replace(header, streams=(*streams, Stream("raw", 0, 0))), "15 streams for 14"),
        (replace(header, streams=(replace(first, coded=-1), *streams[1:])), "column G is zstd"),
        (replace(header, streams=(replace(first, codec="raw"), *streams[1:])), "column G is raw"),
        (replace(header, streams=(replace(first, raw=first.raw + 1), *streams[1:])), "column G is not"),
        (replace(header, streams=(replace(first, coded=first.coded - 1), *streams[1:])), "streams declare"),
        (replace(header, items=()), "without items"),
        (replace(header, items=(*items, items[0])), "2 items declare"),
        (replace(header, items=(replace(items[0], sizes=items[0].sizes[:-1]),)), "not 14 sizes"),
    ):
        with pytest.raises(MalformedPayload, match=what):
            open_payload(rebuilt(wrong, frames), secret=SECRET)


def framed(column: bytes, frame: bytes) -> bytes:
    """A payload whose column G is ``frame``, declared as ``len(column)`` bytes."""
    header, _ = parts(sealed(large()).body)
    item = header.items[0]
    item = msgspec.structs.replace(item, sizes=(len(column), *[0] * 13))
    streams = (Stream("zstd", len(column), len(frame)), *[Stream("raw", 0, 0)] * 13)
    return rebuilt(msgspec.structs.replace(header, items=(item,), streams=streams), frame)


def test_frames_that_are_not_exactly_their_stream_are_refused() -> None:
    zeros = bytes(5000)
    compress = zstandard.ZstdCompressor(level=1).compress
    assert open_payload(framed(zeros, compress(zeros)), secret=SECRET).columns[0] == zeros
    unsized = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(zeros)
    skippable = b"\x50\x2a\x4d\x18\x10\0\0\0" + bytes(16)
    for frame in (
        compress(zeros + b"\0"),
        compress(zeros[:-1]),
        compress(zeros) + b"\0",
        compress(zeros) + compress(b"\0"),
        compress(zeros)[:-1],
        b"",
        unsized,
        skippable,
        skippable + compress(zeros),
        bytes(20),
    ):
        with pytest.raises(MalformedPayload, match="column G"):
            open_payload(framed(zeros, frame), secret=SECRET)


def test_large_windows_are_refused() -> None:
    zeros = bytes(20 << 20)
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=24)
    frame = zstandard.ZstdCompressor(compression_params=parameters).compress(zeros)
    with pytest.raises(MalformedPayload, match="bounded window"):
        open_payload(framed(zeros, frame), secret=SECRET)


def peak_bytes(call: Callable[[], OpenedPayload], what: str) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(MalformedPayload, match=what):
            call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_lengths_that_lie_allocate_nothing() -> None:
    """The output is limited by the stream table, and the stream table by the limits, before anything is decoded."""
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(64 << 20))
    assert peak_bytes(lambda: open_payload(framed(bytes(9000), bomb), secret=SECRET), "column G is not 9000") < 1 << 20
    header, frames = parts(sealed(large()).body)
    huge = (msgspec.structs.replace(header.streams[0], raw=1 << 45), *header.streams[1:])
    body = rebuilt(msgspec.structs.replace(header, streams=huge), frames)
    assert peak_bytes(lambda: open_payload(body, secret=SECRET), "exceed the limit of 1073741824") < 1 << 20
    head = reseal(b"DCRP\x01\xff\xff\xff\xff" + bytes(100))
    assert peak_bytes(lambda: open_payload(head, secret=SECRET), "header of 4294967295 bytes") < 1 << 20
    block = b"DCRB" + body[4:]
    assert peak_bytes(lambda: unpack_block(block), "exceed the limit of 1073741824") < 1 << 20


def test_limits_hold() -> None:
    body = sealed(large()).body
    header, _ = parts(body)
    raw = sum(stream.raw for stream in header.streams)
    length = len(msgspec.msgpack.encode(header))
    exact = Limits(max_payload_bytes=len(body), max_raw_bytes=raw, max_items=1, max_header_bytes=length)
    block = pack_block(open_payload(body, secret=SECRET, limits=exact))
    assert unpack_block(block, exact).header == header
    for limits, what in (
        (Limits(max_payload_bytes=len(body) - 1), "max_payload_bytes"),
        (Limits(max_raw_bytes=raw - 1), "columns exceed"),
        (Limits(max_items=0), "1 items exceed"),
        (Limits(max_header_bytes=length - 1), "header of"),
    ):
        with pytest.raises(MalformedPayload, match=what):
            open_payload(body, secret=SECRET, limits=limits)
    for limits in (Limits(max_raw_bytes=raw - 1), Limits(max_items=0), Limits(max_header_bytes=length - 1)):
        with pytest.raises(MalformedPayload):
            unpack_block(block, limits)


def test_a_payload_for_another_directory_is_refused() -> None:
    other = TensorDirectory([TensorSpec(s.name, s.dtype, s.shape[::-1]) for s in DIRECTORY])
    with pytest.raises(DirectoryMismatch, match=r"owner\.0-000005"):
        check_payload(open_payload(sealed(small()).body, secret=SECRET), other)


def test_every_item_is_checked() -> None:
    header, frames = parts(sealed(small()).body)
    items = (*header.items[:3], msgspec.structs.replace(header.items[3], region=Region.run(1, 9)))
    opened = open_payload(rebuilt(msgspec.structs.replace(header, items=items), frames), secret=SECRET)
    with pytest.raises(MalformedPayload, match=r"'model\.steps'.*does not lie inside"):
        check_payload(opened, DIRECTORY)


def test_a_dense_payload_only_overwrites() -> None:
    full = bucket((record(2, range(7), [0] * 7, [1] * 7), "overwrite"))
    check_payload(open_payload(sealed(full, kind="dense").body, secret=SECRET), DIRECTORY)
    relative = bucket((record(2, range(7), [0] * 7, [1] * 7), "add"))
    with pytest.raises(MalformedPayload, match=r"dense, but mode add for tensor 'model\.mask'"):
        check_payload(open_payload(sealed(relative, kind="dense").body, secret=SECRET), DIRECTORY)


def test_names_that_no_reader_accepts_are_not_sealed() -> None:
    for owner, run in (("a/b", "run"), ("owner", "..")):
        with pytest.raises(UsageError, match="not a plain name"):
            seal_payload(
                frame_bucket(small()),
                id=PayloadId(Attempt(run, 1, 1, 1), owner, 0),
                base=0,
                kind="delta",
                directory=DIRECTORY.digest,
                secret=None,
            )


@pytest.mark.parametrize("make", [small, large])
def test_blocks_hold_the_decoded_payload_and_are_views(make: Callable[[], Bucket]) -> None:
    opened = open_payload(sealed(make()).body, secret=SECRET)
    block = bytearray(pack_block(opened))
    read = unpack_block(memoryview(block))
    assert read.header == opened.header
    assert read.seal == opened.seal
    assert tuple(map(bytes, read.columns)) == tuple(map(bytes, opened.columns))
    check_payload(read, DIRECTORY)
    before = bytes(read.columns[0])
    block[block.index(before)] ^= 1
    assert bytes(read.columns[0]) != before


def test_blocks_of_another_size_are_refused() -> None:
    block = pack_block(open_payload(sealed(large()).body, secret=SECRET))
    for wrong in (b"", block[:30], block[:-1], block + b"\0", b"DCRP" + block[4:]):
        with pytest.raises(MalformedPayload):
            unpack_block(wrong)


MANIFEST = Manifest(
    attempt=Attempt("run", 4, 3, 2),
    owner="owner-0",
    payloads=(ManifestEntry(0, 100, bytes(32)), ManifestEntry(1, 200, bytes(range(32)))),
    elements=77,
    digest_sum=78,
)


@pytest.mark.parametrize("secret", [None, SECRET])
def test_every_field_of_a_manifest_is_sealed(secret: bytes | None) -> None:
    """F1: permuted or altered fields of a manifest are caught."""
    replace = msgspec.structs.replace
    manifest = seal_manifest(MANIFEST, secret)
    verify_manifest(manifest, secret)
    assert len(manifest.seal) == 32
    first, second = manifest.payloads
    for forged in (
        replace(manifest, payloads=(second, first)),
        replace(manifest, payloads=(first,)),
        replace(manifest, payloads=(replace(first, size=200), replace(second, size=100))),
        replace(manifest, payloads=(replace(first, seal=second.seal), replace(second, seal=first.seal))),
        replace(manifest, elements=78, digest_sum=77),
        replace(manifest, attempt=Attempt("run", 3, 4, 2)),
        replace(manifest, attempt=Attempt("run", 4, 2, 3)),
        replace(manifest, owner="owner-1"),
        replace(manifest, seal=manifest.seal[::-1]),
        replace(manifest, seal=manifest.seal[:16]),
        MANIFEST,
    ):
        with pytest.raises(SealMismatch, match="owner-"):
            verify_manifest(forged, secret)
    with pytest.raises(SealMismatch):
        verify_manifest(manifest, b"another secret")


def test_manifest_digests_tell_manifests_apart_and_ignore_the_seal() -> None:
    assert manifest_digest(MANIFEST) == manifest_digest(seal_manifest(MANIFEST, SECRET))
    assert manifest_digest(MANIFEST) != manifest_digest(msgspec.structs.replace(MANIFEST, elements=1))
    assert manifest_digest(MANIFEST) == "3125a85e13e5f7f67a34555e66aaffebf6fd39ebe2eb5615a86088fd0d6c4469"
    assert (
        seal_manifest(MANIFEST, SECRET).seal.hex() == "1e6b7cd87f3e43ffd8436e1135a2ee6cb9f6a4bc10d8da12fcdd37f0d5e47ac9"
    )
