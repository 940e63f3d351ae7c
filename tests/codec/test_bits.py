"""Words are the stored bits of any tensor, and a tensor can be laid over words."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dcr_stream.canonical import WIDTHS, word_dtype
from dcr_stream.codec import dtype_name, tensor_from_words, torch_dtype, words
from dcr_stream.errors import UsageError


@pytest.mark.parametrize("dtype", WIDTHS)
def test_every_supported_dtype_has_a_name_and_words(dtype: str) -> None:
    """A7: bool, integers, float8 and complex64 included."""
    bits = np.arange(250, dtype=word_dtype(WIDTHS[dtype]))
    tensor = tensor_from_words(bits, dtype, (10, 25))
    assert tensor.dtype == torch_dtype(dtype)
    assert dtype_name(tensor.dtype) == dtype
    assert tensor.shape == (10, 25)
    assert tensor.data_ptr() == bits.ctypes.data
    seen = words(tensor)
    assert seen.dtype == bits.dtype
    assert seen.ctypes.data == bits.ctypes.data
    np.testing.assert_array_equal(seen, bits)


@pytest.mark.parametrize("dtype", [torch.complex128, torch.quint8, torch.complex32])
def test_other_dtypes_are_refused_by_name(dtype: torch.dtype) -> None:
    with pytest.raises(UsageError, match=str(dtype).removeprefix("torch.")):
        dtype_name(dtype)
    with pytest.raises(UsageError, match="Tensor"):
        torch_dtype("Tensor")


def test_writing_to_words_of_a_parameter_writes_to_the_parameter() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    words(parameter)[2] = 0x3F80
    assert parameter.tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize("dtype", WIDTHS)
def test_zero_dim_and_empty_tensors_have_words(dtype: str) -> None:
    """A6 A8: a 0-dim tensor has one word, an empty one none, whatever its shape."""
    scalar = tensor_from_words(np.array([3], word_dtype(WIDTHS[dtype])), dtype, ())
    assert scalar.dim() == 0
    assert words(scalar).tolist() == [3]
    for shape in ((0,), (3, 0, 2)):
        empty = tensor_from_words(np.empty(0, word_dtype(WIDTHS[dtype])), dtype, shape)
        assert empty.shape == shape
        assert words(empty).size == 0


@pytest.mark.parametrize("dtype", WIDTHS)
def test_strided_transposed_and_expanded_tensors_are_read_in_row_major_order(dtype: str) -> None:
    """A10 A11: strides count, memory order does not; nothing is written through the copy."""
    bits = np.random.default_rng(0).integers(0, 128, (4, 6)).astype(word_dtype(WIDTHS[dtype]))
    tensor = tensor_from_words(bits, dtype, (4, 6))
    for view, expected in (
        (tensor.t(), bits.T),
        (tensor[::2, 1::3], bits[::2, 1::3]),
        (tensor[:, 2], bits[:, 2]),
        (tensor[1:2].expand(3, 6), np.broadcast_to(bits[1:2], (3, 6))),
        (tensor[0, 0].expand(5), np.broadcast_to(bits[0, 0], (5,))),
        (tensor.unfold(1, 3, 1), np.lib.stride_tricks.sliding_window_view(bits, 3, axis=1)),
    ):
        seen = words(view)
        np.testing.assert_array_equal(seen, expected.reshape(-1))
        seen ^= seen.dtype.type(0xFF)
    np.testing.assert_array_equal(words(tensor), bits.reshape(-1))


def test_a_conjugated_view_is_read_as_its_own_bits() -> None:
    tensor = torch.tensor([1 + 2j, -3j], dtype=torch.complex64)
    np.testing.assert_array_equal(words(tensor.conj()), words(tensor.conj().resolve_conj().clone()))
    assert words(tensor.conj()).tolist() != words(tensor).tolist()


def test_tensors_without_dense_storage_are_refused() -> None:
    for tensor in (torch.empty(3, device="meta"), torch.eye(3).to_sparse()):
        with pytest.raises(UsageError, match="dense storage"):
            words(tensor)


def test_words_that_do_not_fit_a_tensor_are_refused() -> None:
    read_only = np.zeros(4, np.uint16)
    read_only.flags.writeable = False
    for wrong in (np.zeros(4, np.uint32), np.zeros(5, np.uint16), np.zeros(8, np.uint16)[::2], read_only):
        with pytest.raises(UsageError, match="bfloat16"):
            tensor_from_words(wrong, "bfloat16", (2, 2))
