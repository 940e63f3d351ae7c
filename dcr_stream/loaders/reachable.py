"""Every tensor that a model can reach."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

import torch
from torch import nn

__all__ = ["reachable_tensors"]

_OPAQUE = (
    str, bytes, bytearray, int, float, complex, type(None), type, ModuleType,
    FunctionType, BuiltinFunctionType, MethodType, torch.dtype, torch.device, torch.Size,
)  # fmt: skip
_MAX_DEPTH = 16


def reachable_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor reachable from a module, by path: parameters, buffers, and attributes of any kind.

    Follows submodules, mappings, sequences, sets and attributes of plain objects and of tensors; not functions and
    closures. A tensor that several paths reach is listed under the first, but parameters and buffers under each of
    their names.
    """
    found = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    registered = {id(tensor) for tensor in found.values()}
    for path, tensor in _walk(module, "", set(), 0):
        if id(tensor) not in registered:
            found[path] = tensor
    return found


def _walk(value: object, path: str, seen: set[int], depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, _OPAQUE) or id(value) in seen or depth > _MAX_DEPTH:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield path, value
    for name, child in _children(value):
        yield from _walk(child, f"{path}.{name}" if path else name, seen, depth + 1)


def _children(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, nn.Module):
        for table in (value._parameters, value._buffers, value._modules):
            yield from table.items()
        registered = {"_parameters", "_buffers", "_modules"}
        yield from ((n, v) for n, v in list(vars(value).items()) if n not in registered)
        return
    if isinstance(value, Mapping):
        yield from ((str(k), v) for k, v in list(value.items()))
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((str(i), v) for i, v in enumerate(value))
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        yield from ((str(n), v) for n, v in list(attributes.items()))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name) and name not in ("__dict__", "__weakref__"):
                yield name, getattr(value, name)
