"""The prepare report: everything that stands against refitting a model, all at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from dcr_stream.canonical import TensorDirectory
from dcr_stream.interfaces import Loader
from dcr_stream.trace.plan import Finding
from dcr_stream.trace.storage import StorageMap

__all__ = ["unknown_names", "unmanaged_tensors", "whole_limit", "whole_tensors"]

_MIB = 1 << 20


def unmanaged_tensors(loader: Loader, storage: StorageMap) -> list[Finding]:
    """Tensors of the model that no plan can keep up to date and nobody declared derived."""
    findings = []
    derived = loader.declared_derived()
    for path, tensor in loader.reachable().items():
        if path in derived or (not tensor.is_meta and storage.contains(tensor)):
            continue
        owner, _, attribute = path.rpartition(".")
        text = (
            f"{attribute!r} of {owner or 'the model'!r} is a {tensor.dtype} tensor of shape "
            f"{list(tensor.shape)} outside parameters and buffers, which may hold something computed from weights; "
            "declare it derived (and recompute it in the refresh hook if it is)"
        )
        findings.append(Finding("refuse", path, text))
    return findings


def unknown_names(refused: Mapping[int, str], directory: TensorDirectory, unplaced: Collection[str]) -> list[Finding]:
    """Names at which the native loader raised."""
    findings = []
    for tensor, reason in sorted(refused.items()):
        name = directory[tensor].name
        text = f"the native loader cannot load {name!r} ({reason}); "
        if name in unplaced:
            findings.append(Finding("note", name, f"{text}it is declared unplaced and left out"))
        else:
            findings.append(Finding("refuse", name, f"{text}publish the names of this model, or declare it unplaced"))
    return findings


def whole_limit(directory: TensorDirectory) -> int:
    """Bytes of whole tensors that are accepted by default: 0.1 % of the checkpoint, at least 1 MiB."""
    return max(directory.nbytes // 1000, _MIB)


def whole_tensors(whole: Collection[int], directory: TensorDirectory, limit: int) -> list[Finding]:
    """Too many bytes that the loader computes with would go whole over the wire whenever one of them changes."""
    nbytes = sum(directory[t].nbytes for t in whole)
    if nbytes <= limit:
        return []
    names = ", ".join(repr(directory[t].name) for t in sorted(whole))
    text = (
        f"the loader casts or computes {nbytes} bytes of canonical tensors, more than the {limit} that may go whole: "
        f"{names}; send canonical tensors as storage holds them (dtype, and quantised ones with their scales)"
    )
    return [Finding("refuse", "whole tensors", text)]
