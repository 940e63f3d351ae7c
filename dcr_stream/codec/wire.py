"""Wire format, version 1: sealed payloads, decoded blocks in shared memory, and manifests.

Payload (integers little-endian)::

    "DCRP" · u8 version = 1 · u32 header length · header · frames · 32-byte seal

- **header**: ``PayloadHeader`` as MessagePack in its shortest form, every struct an array of its fields in order.
  There is one encoding of a header; any other is refused.
- **frames**: one per column (``dcr_stream.codec.COLUMNS``), in order, back to back; nothing follows the last. A stream
  is ``raw``, or one ``zstd`` frame that states its content size, needs no dictionary and at most ``MAX_WINDOW`` of
  window. An empty column is ``raw`` of 0 bytes.
- **seal**: BLAKE3 over everything before it. With a secret it is keyed by
  ``BLAKE3.derive_key("dcr_stream 1 payload seal", secret)``.

A reader checks, in this order: size limit, seal, magic, version, header length, header, stream table, coded total, raw
total, and the frames' own sizes. Nothing is allocated by a length that has not been checked against ``Limits``.

Block: what a node writes into shared memory, once the payload is verified, for receivers in other processes::

    "DCRB" · u8 version = 1 · u32 header length · header · columns (decoded; their sizes are the streams' raw sizes)
    · the payload's 32-byte seal (its identity, not a check of the block)

Manifest: sealed by BLAKE3 over ``"DCRM" · u8 version · Manifest.unsealed()``, with a secret keyed by
``BLAKE3.derive_key("dcr_stream 1 manifest seal", secret)``.
"""

from __future__ import annotations

import hmac
import re
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import zstandard

from dcr_stream.canonical import TensorDirectory
from dcr_stream.codec.entries import COLUMNS, check_item, slice_columns
from dcr_stream.codec.seals import SEAL_BYTES, VERSION, seal
from dcr_stream.delta import Bucket, CodedBucket, Item, Stream
from dcr_stream.errors import DirectoryMismatch, MalformedPayload, SealMismatch, UsageError
from dcr_stream.messages import Attempt, Payload, PayloadId, PayloadKind

__all__ = [
    "MAX_WINDOW",
    "Limits",
    "OpenedPayload",
    "PayloadHeader",
    "check_payload",
    "frame_bucket",
    "open_payload",
    "pack_block",
    "seal_payload",
    "unpack_block",
]

MAX_WINDOW = 8 << 20
"""Largest zstd window, in bytes: what levels 1 to 19 use at most."""
_MAX_LEVEL = 19
_SMALL_TABLE = 6

_PAYLOAD_MAGIC = b"DCRP"
_BLOCK_MAGIC = b"DCRB"
_HEAD = struct.Struct("<4sBI")
_NAME = re.compile(r"(?!.*\.\.)[A-Za-z0-9_][A-Za-z0-9._-]{0,254}")
_RAW_ALWAYS = COLUMNS.index("L")  # packed low bits are incompressible
_RESEND = "discard the payload and have its owner send it again"

Column = bytes | memoryview


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a reader accepts at most; anything larger raises ``MalformedPayload`` before it is allocated.

    Defaults leave room above buckets of 64 MiB and shards of 256 MiB; a header takes about 70 bytes an item.
    """

    max_payload_bytes: int = 1 << 30
    max_raw_bytes: int = 1 << 30
    max_items: int = 1 << 20
    max_header_bytes: int = 128 << 20


class PayloadHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Everything a payload says about itself. ``directory`` is the tensor directory's digest.

    ``base`` is the version that ``add`` and ``xor`` start from; in a dense payload, the version that its
    values were read at.
    """

    run: str
    base: int
    target: int
    attempt: int
    epoch: int
    owner: str
    sequence: int
    kind: PayloadKind
    directory: str
    items: tuple[Item, ...]
    streams: tuple[Stream, ...]

    @property
    def id(self) -> PayloadId:
        """The payload's identity."""
        return PayloadId(Attempt(self.run, self.target, self.attempt, self.epoch), self.owner, self.sequence)


@dataclass(frozen=True, slots=True)
class OpenedPayload:
    """A payload whose seal, header and sizes have been checked, with its columns decompressed.

    Columns are views into the body or block that was opened where nothing had to be decompressed.
    """

    header: PayloadHeader
    columns: tuple[Column, ...]
    seal: bytes

    @property
    def nbytes(self) -> int:
        """Bytes over all columns."""
        return sum(map(len, self.columns))

    def items(self) -> Iterator[tuple[Item, tuple[memoryview, ...]]]:
        """Each item with its share of every column, without copying."""
        return slice_columns(self.header.items, self.columns)


class _Compressors(threading.local):
    """One compressor per thread and level: making one costs more than framing a small column."""

    def __init__(self) -> None:
        self.by_level: dict[int, zstandard.ZstdCompressor] = {}

    def __getitem__(self, level: int) -> zstandard.ZstdCompressor:
        if level not in self.by_level:
            # Columns of changes hold no long repeats: at level 1 a large table only finds matches that cost more than
            # the literals they replace.
            table = {"hash_log": _SMALL_TABLE} if level == 1 else {}
            parameters = zstandard.ZstdCompressionParameters.from_level(level, **table)
            self.by_level[level] = zstandard.ZstdCompressor(compression_params=parameters)
        return self.by_level[level]


class _Decompressor(threading.local):
    def __init__(self) -> None:
        self.zstd = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)


_compressors = _Compressors()
_decompressor = _Decompressor()


def frame_bucket(bucket: Bucket, level: int = 1) -> CodedBucket:
    """Frame each column of a bucket: one zstd frame, or raw where that is not larger (column L always).

    Raises:
        UsageError: ``level`` is above 19, whose windows no reader accepts.
    """
    if level > _MAX_LEVEL:
        raise UsageError(f"zstd level {level} needs larger windows than readers accept; use at most {_MAX_LEVEL}")
    streams, frames = [], []
    for c, column in enumerate(bucket.columns):
        coded = column if c == _RAW_ALWAYS or not column else _compressors[level].compress(column)
        zstd = len(coded) < len(column)
        frames.append(coded if zstd else column)
        streams.append(Stream("zstd" if zstd else "raw", len(column), len(frames[-1])))
    return CodedBucket(bucket.items, tuple(streams), tuple(frames))


def seal_payload(
    coded: CodedBucket, *, id: PayloadId, base: int, kind: PayloadKind, directory: str, secret: bytes | None
) -> Payload:
    """Put header and seal around a coded bucket.

    Raises:
        UsageError: a field that every reader would refuse (such as an owner's name that is not a plain name).
    """
    attempt = id.attempt
    header = PayloadHeader(
        run=attempt.run,
        base=base,
        target=attempt.target,
        attempt=attempt.number,
        epoch=attempt.epoch,
        owner=id.owner,
        sequence=id.sequence,
        kind=kind,
        directory=directory,
        items=coded.items,
        streams=coded.streams,
    )
    fault = _identity_fault(header)
    if fault is not None:
        raise UsageError(f"payload {id.name!r} of attempt {attempt.name!r} cannot be sealed: {fault}")
    encoded = msgspec.msgpack.encode(header)
    parts = (_HEAD.pack(_PAYLOAD_MAGIC, VERSION, len(encoded)), encoded, *coded.frames)
    return Payload(id, b"".join((*parts, seal(parts, "payload", secret))))


def open_payload(
    body: bytes | memoryview,
    *,
    secret: bytes | None,
    limits: Limits = Limits(),
) -> OpenedPayload:
    """Verify a payload's seal, parse it and decompress its columns. Items are checked by ``check_payload``.

    Raises:
        SealMismatch: altered bytes, or another secret; nothing of the header was parsed.
        MalformedPayload: the payload is not exactly what its header declares, or exceeds a limit.
    """
    view = memoryview(body)
    if not _HEAD.size + SEAL_BYTES <= len(view) <= limits.max_payload_bytes:
        raise MalformedPayload(
            f"a payload of {len(view)} bytes is empty or exceeds the limit of {limits.max_payload_bytes}; "
            "send smaller buckets or raise max_payload_bytes"
        )
    sealed, found = view[:-SEAL_BYTES], bytes(view[-SEAL_BYTES:])
    if not hmac.compare_digest(found, seal((sealed,), "payload", secret)):
        raise SealMismatch(
            f"the seal of a payload of {len(view)} bytes does not belong to it; give both sides the same secret, or "
            "fetch the payload again"
        )
    header, start = _parse_header(sealed, _PAYLOAD_MAGIC, limits)
    coded = sum(stream.coded for stream in header.streams)
    if start + coded != len(sealed):
        raise _malformed(header, f"its streams declare {coded} bytes, {len(sealed) - start} follow the header")
    columns: list[Column] = []
    for name, stream in zip(COLUMNS, header.streams, strict=True):
        frame = sealed[start : start + stream.coded]
        columns.append(frame if stream.codec == "raw" else _decompress(header, name, stream, frame))
        start += stream.coded
    opened = OpenedPayload(header, tuple(columns), found)
    opened.items()
    return opened


def check_payload(opened: OpenedPayload, directory: TensorDirectory) -> None:
    """Check an opened payload against the directory and every item in full. Nothing may be written before this.

    Raises:
        DirectoryMismatch: it was made for another tensor directory.
        MalformedPayload: an item is not what it declares; a dense payload holds anything but overwrites.
    """
    header = opened.header
    if header.directory != directory.digest:
        raise DirectoryMismatch(
            f"payload {header.id.name!r} of attempt {header.id.attempt.name!r} was made for directory "
            f"{header.directory[:16]!r}, the receiver has {directory.digest[:16]!r}; the model's tensors must be equal "
            "on both sides"
        )
    for item, columns in opened.items():
        check_item(item, columns, directory)
        if header.kind == "dense" and item.mode != "overwrite":
            raise _malformed(header, f"dense, but mode {item.mode} for tensor {directory[item.tensor].name!r}")


def pack_block(opened: OpenedPayload) -> bytes:
    """Lay an opened payload out as a block for ``unpack_block`` in another process."""
    encoded = msgspec.msgpack.encode(opened.header)
    return b"".join((_HEAD.pack(_BLOCK_MAGIC, VERSION, len(encoded)), encoded, *opened.columns, opened.seal))


def unpack_block(block: memoryview | bytes, limits: Limits = Limits()) -> OpenedPayload:
    """Read a block written by ``pack_block``; its columns are views into it, so it must outlive them.

    ``block`` is exactly the block: cut it to size if it lies in a larger mapping.

    Raises:
        MalformedPayload: the block is not exactly what its header declares, or exceeds a limit.
    """
    view = memoryview(block)
    if len(view) < _HEAD.size + SEAL_BYTES:
        raise MalformedPayload(f"a block of {len(view)} bytes holds no payload; have the node write it again")
    content = view[:-SEAL_BYTES]
    header, start = _parse_header(content, _BLOCK_MAGIC, limits)
    raw = sum(stream.raw for stream in header.streams)
    if start + raw != len(content):
        raise _malformed(header, f"its columns declare {raw} bytes, {len(content) - start} follow the block's header")
    columns = []
    for stream in header.streams:
        columns.append(content[start : start + stream.raw])
        start += stream.raw
    opened = OpenedPayload(header, tuple(columns), bytes(view[-SEAL_BYTES:]))
    opened.items()
    return opened


def _parse_header(view: memoryview, magic: bytes, limits: Limits) -> tuple[PayloadHeader, int]:
    """The header, with its stream table checked, and where it ends."""
    found, version, length = _HEAD.unpack_from(view)
    if found != magic:
        raise MalformedPayload(f"{found!r} is not how a payload starts ({magic!r}); {_RESEND}")
    if version != VERSION:
        raise MalformedPayload(
            f"wire format version {version} is not known, only {VERSION} is; run the same release on both sides"
        )
    if length > min(limits.max_header_bytes, len(view) - _HEAD.size):
        raise MalformedPayload(
            f"a header of {length} bytes exceeds the limit of {limits.max_header_bytes} or the payload; {_RESEND}"
        )
    encoded = bytes(view[_HEAD.size : _HEAD.size + length])
    try:
        header = msgspec.msgpack.decode(encoded, type=PayloadHeader)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise MalformedPayload(f"a payload's header cannot be read: {error}; {_RESEND}") from error
    if msgspec.msgpack.encode(header) != encoded:
        raise _malformed(header, "its header is not in the shortest form")
    fault = _identity_fault(header) or _stream_fault(header, limits)
    if fault is not None:
        raise _malformed(header, fault)
    return header, _HEAD.size + length


def _identity_fault(header: PayloadHeader) -> str | None:
    for name in (header.run, header.owner):
        if not _NAME.fullmatch(name):
            return f"{name!r} is not a plain name (letters, digits, '.', '_', '-'; at most 255; no '..')"
    if header.base < -1 or min(header.target, header.attempt, header.epoch, header.sequence) < 0:
        return "a version, attempt, epoch or sequence is negative"
    return None


def _stream_fault(header: PayloadHeader, limits: Limits) -> str | None:
    if len(header.items) > limits.max_items:
        return f"{len(header.items)} items exceed the limit of {limits.max_items}"
    if len(header.streams) != len(COLUMNS):
        return f"{len(header.streams)} streams for {len(COLUMNS)} columns"
    for name, stream in zip(COLUMNS, header.streams, strict=True):
        if not 0 <= stream.coded <= stream.raw or (stream.codec == "raw") != (stream.coded == stream.raw):
            return f"column {name} is {stream.codec}, {stream.raw} bytes in {stream.coded}"
    if sum(stream.raw for stream in header.streams) > limits.max_raw_bytes:
        return f"columns exceed the limit of {limits.max_raw_bytes} bytes"
    return None


def _decompress(header: PayloadHeader, name: str, stream: Stream, frame: memoryview) -> bytes:
    try:
        # The output is allocated from the frame's own content size, so that is compared before decoding.
        found = zstandard.get_frame_parameters(frame)
        if found.content_size != stream.raw or found.window_size > MAX_WINDOW or found.dict_id:
            raise _malformed(header, f"the frame of column {name} is not {stream.raw} bytes in a bounded window")
        column = _decompressor.zstd.decompress(frame, max_output_size=stream.raw, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise _malformed(header, f"column {name} does not decompress ({error})") from error
    if len(column) != stream.raw:
        raise _malformed(header, f"column {name} decompresses to {len(column)} bytes, not {stream.raw}")
    return column


def _malformed(header: PayloadHeader, fault: str) -> MalformedPayload:
    return MalformedPayload(
        f"malformed payload {header.owner!r}/{header.sequence} for version {header.target} of run {header.run!r}: "
        f"{fault}; {_RESEND}"
    )
