"""Bits, digests, entries and the wire format (version 1): plain functions on words and bytes."""

from dcr_stream.codec.bits import dtype_name, tensor_from_words, torch_dtype, words
from dcr_stream.codec.boxes import combine, flat_indices
from dcr_stream.codec.digest import add_sums, change_sum, mix, state_change, state_sum, state_sums, sub_sums
from dcr_stream.codec.entries import (
    COLUMNS,
    Decoded,
    check_item,
    decode_item,
    elements_sum,
    encode_record,
    slice_columns,
)
from dcr_stream.codec.kernels import implementation
from dcr_stream.codec.positions import decode_positions, encode_positions
from dcr_stream.codec.seals import manifest_digest, seal_manifest, verify_manifest
from dcr_stream.codec.warm import warm_up
from dcr_stream.codec.wire import (
    Limits,
    OpenedPayload,
    PayloadHeader,
    check_payload,
    frame_bucket,
    open_payload,
    pack_block,
    seal_payload,
    unpack_block,
)

__all__ = [
    "COLUMNS",
    "Decoded",
    "Limits",
    "OpenedPayload",
    "PayloadHeader",
    "add_sums",
    "change_sum",
    "check_item",
    "check_payload",
    "combine",
    "decode_item",
    "decode_positions",
    "dtype_name",
    "elements_sum",
    "encode_positions",
    "encode_record",
    "flat_indices",
    "frame_bucket",
    "implementation",
    "manifest_digest",
    "mix",
    "open_payload",
    "pack_block",
    "seal_manifest",
    "seal_payload",
    "slice_columns",
    "state_change",
    "state_sum",
    "state_sums",
    "sub_sums",
    "tensor_from_words",
    "torch_dtype",
    "unpack_block",
    "verify_manifest",
    "warm_up",
    "words",
]
