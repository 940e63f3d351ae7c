"""The trick behind the scan, and what all compiled kernels share.

**Many lanes, one mask.** A scan has to read two arrays at memory speed and yet do something for single elements. Vector
units compare many elements at once but cannot append to a list; scalar code can append but is too slow to look at every
element. The bridge between the two is a bit mask::

    live    3 3 7 1 0 5 9 9 …        64 elements, loaded as one vector of 64 lanes
    known   3 3 8 1 0 5 9 2 …        64 elements
    live != known                    one vector comparison: 64 truth values
    mask    0 0 1 0 0 0 0 1 …        the same 64 truth values as the bits of one uint64, element 0 lowest

Where nothing changed, the mask is 0 and 64 elements have been dealt with by one test of one register. Otherwise the
number of trailing zeros of the mask *is* the index of the first changed element, and ``mask & (mask - 1)`` clears that
bit: as many steps as there are changes, however they lie, without a branch per element::

    while mask:
        index = trailing_zeros(mask)
        mask &= mask - 1

numba's own vectoriser does not find this form, so :func:`differing` says it in LLVM's terms: load ``<64 x iN>`` twice,
``icmp ne``, and reinterpret the resulting ``<64 x i1>`` as an ``i64``. That is portable: LLVM splits the 64 lanes into
whatever the processor has (AVX-512 compares straight into mask registers, AVX2 and SSE2 go through ``movmskb``, NEON
through narrowing shifts), for elements of 1, 2, 4 and 8 bytes alike. Loads are declared unaligned.

**The branch that remains** is the end of the inner loop: how many changes 64 elements hold is not predictable, and one
misprediction costs as much as several changes. With 1 to 5 % changed most blocks have 0 to 4, so the scan takes four
steps at a time without asking, into room that exists anyway, and moves on by the mask's population count. Steps that
find the mask empty write garbage that the next block overwrites. After a few blocks without a
change, four are compared before anything is asked (:func:`any_differs`).

**Indices without a sign.** An index that could be negative counts from the end in Python, so compiled code has to look
at its sign. Where loops step through masks, all indices are ``uint64``, which numba takes as they are; mixed with a
signed number they would become floats.

**Writing where it is not cached.** Sparse elements of a large array each cost a miss, and a processor does not look far
enough ahead of a read-modify-write to overlap many of them. The kernels that scatter therefore look up an element's
place, and :func:`prefetch` it, ``AHEAD`` elements before they touch it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib.resources import files
from typing import Any

import blake3
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray
from typing_extensions import TypeVar

from dcr_stream.canonical import Bytes, Words

__all__ = [
    "AHEAD",
    "LANES",
    "Number",
    "any_differs",
    "at_least",
    "copy_lanes",
    "count_up",
    "differing",
    "jit",
    "leading_zeros",
    "masks",
    "population",
    "prefetch",
    "readable",
    "require_equal",
    "subtract_lanes",
    "trailing_zeros",
]

Number = Any
"""An integer of numba's, of whatever width and sign it has there."""

F = TypeVar("F", bound=Callable[..., Any])

LANES = 64
"""Elements per mask."""

AHEAD = 128
"""Elements between the prefetch of an element and its use."""


def jit(function: F) -> F:
    """Compile at first call, without the GIL, kept on disk where numba finds a folder that it can write."""
    njit: Any = numba.njit
    try:
        compiled: Any = njit(nogil=True, boundscheck=False, cache=True)(function)
        # numba takes kept code for current as long as the function's own file is unchanged. These files inline each
        # other's functions, so all of them count; if numba no longer keeps its stamp here, nothing may be kept.
        kept = compiled._cache._cache_file
        kept._source_stamp = (kept._source_stamp, _sources())
    except (RuntimeError, AttributeError):  # a RuntimeError: numba found no folder to keep code in
        compiled = njit(nogil=True, boundscheck=False)(function)
    found: F = compiled
    return found


@lru_cache(maxsize=1)
def _sources() -> str:
    """Digest of all files with kernels."""
    total = blake3.blake3()
    for file in sorted(files("dcr_stream.codec.kernels").iterdir(), key=lambda file: file.name):
        if file.name.endswith(".py"):
            total.update(file.read_bytes())
    return total.hexdigest()


def readable(array: Words) -> Words:
    """``array`` as kernels take their inputs: contiguous, aligned and read-only, so that one compiled form fits all.

    A view wherever possible.
    """
    if not (array.flags.c_contiguous and array.flags.aligned):
        array = np.require(array, requirements=["C", "A"])
    view = array.view()
    view.flags.writeable = False
    return view


def require_equal(*arrays: Words) -> None:
    """Refuse arrays of different sizes: compiled code would read beyond the shorter one.

    Raises:
        IndexError: their sizes differ.
    """
    if len({array.size for array in arrays}) > 1:
        raise IndexError(f"arrays of {', '.join(str(array.size) for array in arrays)} elements must be equally long")


def masks(column: Bytes) -> NDArray[np.uint64]:
    """Bytes as little-endian masks of 64 bits, filled up with zeros; a copy, since columns start and end anywhere."""
    filled = np.zeros((column.size + 7) // 8, np.uint64)
    filled.view(np.uint8)[: column.size] = column
    return filled


def _address(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    lanes = ir.VectorType(ir.IntType(kind.dtype.bitwidth), LANES)
    data = cgutils.create_struct_proxy(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), lanes.as_pointer())


def _load(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    loaded = builder.load(_address(context, builder, kind, array, at))
    loaded.align = 1
    return loaded


def _copy_lanes(typing: Any, target: Any, at: Any, source: Any, start: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        loaded = _load(context, builder, signature.args[2], args[2], args[3])
        builder.store(loaded, _address(context, builder, signature.args[0], args[0], args[1])).align = 1
        return context.get_dummy_value()

    return types.void(target, types.uint64, source, types.uint64), generate


def _subtract_lanes(typing: Any, target: Any, at: Any, a: Any, b: Any, start: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        one, other = (_load(context, builder, signature.args[i], args[i], args[4]) for i in (2, 3))
        difference = builder.sub(one, other)
        builder.store(difference, _address(context, builder, signature.args[0], args[0], args[1])).align = 1
        return context.get_dummy_value()

    return types.void(target, types.uint64, a, b, types.uint64), generate


def _differing(typing: Any, a: Any, b: Any, at: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        one, other = (_load(context, builder, signature.args[i], args[i], args[2]) for i in (0, 1))
        return builder.bitcast(builder.icmp_unsigned("!=", one, other), ir.IntType(LANES))

    return types.uint64(a, b, types.uint64), generate


def _at_least(typing: Any, array: Any, at: Any, least: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.args[0]
        lanes = _load(context, builder, kind, args[0], args[1])
        one = builder.insert_element(ir.Constant(lanes.type, ir.Undefined), args[2], ir.Constant(ir.IntType(32), 0))
        same = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        every = builder.shuffle_vector(one, ir.Constant(lanes.type, ir.Undefined), same)
        return builder.bitcast(builder.icmp_unsigned(">=", lanes, every), ir.IntType(LANES))

    return types.uint64(array, types.uint64, array.dtype), generate


def _any_differs(typing: Any, a: Any, b: Any, at: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        seen: Any = None
        for i in range(4):
            block = builder.add(args[2], ir.Constant(ir.IntType(64), LANES * i))
            one, other = (_load(context, builder, signature.args[j], args[j], block) for j in (0, 1))
            differing = builder.xor(one, other)
            seen = differing if seen is None else builder.or_(seen, differing)
        lanes = builder.icmp_unsigned("!=", seen, ir.Constant(seen.type, None))
        mask = builder.bitcast(lanes, ir.IntType(LANES))
        return builder.icmp_unsigned("!=", mask, ir.Constant(mask.type, 0))

    return types.boolean(a, b, types.uint64), generate


def _count_up(typing: Any, steps: Any, at: Any, reached: Any, into: Any, start: Any) -> Any:
    lanes, wide = 8, ir.VectorType(ir.IntType(64), 8)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def address(i: int, j: int, vector: Any) -> Any:
            data = cgutils.create_struct_proxy(signature.args[i])(context, builder, args[i]).data
            return builder.bitcast(builder.gep(data, [args[j]]), vector.as_pointer())

        loaded = builder.load(address(0, 1, ir.VectorType(ir.IntType(8), lanes)))
        loaded.align = 1
        sums = builder.add(builder.zext(loaded, wide), ir.Constant(wide, [1] * lanes))
        none = ir.Constant(wide, None)
        for distance in (1, 2, 4):
            # Lanes from ``distance`` on get the lane that far before them, the others 0.
            picked = [lanes if i < distance else i - distance for i in range(lanes)]
            moved = builder.shuffle_vector(sums, none, ir.Constant(ir.VectorType(ir.IntType(32), lanes), picked))
            sums = builder.add(sums, moved)
        one = builder.insert_element(none, args[2], ir.Constant(ir.IntType(32), 0))
        first = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
        positions = builder.add(sums, builder.shuffle_vector(one, none, first))
        builder.store(positions, address(3, 4, wide)).align = 1
        return builder.extract_element(positions, ir.Constant(ir.IntType(32), lanes - 1))

    return types.int64(steps, types.uint64, types.int64, into, types.uint64), generate


def _trailing_zeros(typing: Any, mask: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), generate


def _leading_zeros(typing: Any, mask: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctlz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), generate


def _population(typing: Any, mask: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), generate


def _prefetch(typing: Any, array: Any, at: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = cgutils.create_struct_proxy(signature.args[0])(context, builder, args[0]).data
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        takes = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        call = cgutils.get_or_insert_function(builder.module, takes, "llvm.prefetch.p0")
        address = builder.bitcast(builder.gep(data, [args[1]]), byte)
        # For writing, into the second-level cache: measured best, by little.
        builder.call(call, [address, *(ir.Constant(word, value) for value in (1, 2, 1))])
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


_made: Any = intrinsic

differing: Callable[[Words, Words, Any], Any] = _made(_differing)
"""Bit i: whether element ``at + i`` of two arrays of one dtype differs; all of ``at … at + 63`` must exist."""

at_least: Callable[[Words, Any, Any], Any] = _made(_at_least)
"""Bit i: whether element ``at + i`` of an array is at least a value of its dtype; ``at … at + 63`` must exist."""

copy_lanes: Callable[[Words, Any, Words, Any], None] = _made(_copy_lanes)
"""``target[at : at + 64] = source[start : start + 64]``; all of them must exist."""

subtract_lanes: Callable[[Words, Any, Words, Words, Any], None] = _made(_subtract_lanes)
"""``target[at : at + 64] = a[start : start + 64] - b[start : start + 64]``; all of them must exist."""

any_differs: Callable[[Words, Words, Any], Any] = _made(_any_differs)
"""Whether any of elements ``at … at + 255`` differs, all of which must exist."""

count_up: Callable[[Words, Any, Any, Words, Any], Any] = _made(_count_up)
"""Eight running sums of ``steps[at + i] + 1`` from ``reached`` on, into ``into[start + i]``; returns the last."""

trailing_zeros: Callable[[Any], Any] = _made(_trailing_zeros)
"""Index of the lowest bit that is set in a uint64; 64 if there is none."""

leading_zeros: Callable[[Any], Any] = _made(_leading_zeros)
"""How far the highest bit that is set in a uint64 is from bit 63; 64 if there is none."""

population: Callable[[Any], Any] = _made(_population)
"""Number of bits that are set in a uint64."""

prefetch: Callable[[Words, Any], None] = _made(_prefetch)
"""Have the cache line of one element fetched for writing; any index is allowed."""
