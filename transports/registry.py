"""Finds a transport by the scheme of its URL."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

from dcr_stream.errors import DcrError, UsageError
from dcr_stream.transports.base import Transport
from dcr_stream.transports.memory import MemoryTransport
from dcr_stream.transports.object_store import ObjectStoreTransport

__all__ = ["ENTRY_POINTS", "open_transport"]

ENTRY_POINTS = "dcr_stream.transports"
"""Entry-point group: name = URL scheme, value = ``make(url: str, **options) -> Transport``."""


def _memory(url: str, **options: object) -> Transport:
    return MemoryTransport.named(url.partition("://")[2], **options)  # type: ignore[arg-type]


def _file(url: str, **options: object) -> Transport:
    return ObjectStoreTransport.from_url(url, **options)  # type: ignore[arg-type]


_BUILT_IN: dict[str, Callable[..., Transport]] = {"memory": _memory, "file": _file}


def open_transport(url: str, **options: object) -> Transport:
    """Open the transport at ``url``: ``memory://NAME``, ``file:///DIR``, or the scheme of an installed plug-in.

    ``options`` go to the transport.

    Raises:
        UsageError: the scheme is unknown, its plug-in does not load, or the transport refuses URL or options.
    """
    scheme, found, _ = url.partition("://")
    make = _BUILT_IN.get(scheme) if found else None
    if make is None:
        make = _plug_in(scheme if found else "", url)
    try:
        transport = make(url, **options)
    except DcrError:
        raise
    except TypeError as error:
        raise UsageError(f"transport {url!r} does not take these options: {error}") from error
    if not isinstance(transport, Transport):
        raise UsageError(f"the plug-in for {scheme}:// returned {type(transport).__name__}, which is no Transport")
    return transport


def _plug_in(scheme: str, url: str) -> Callable[..., Transport]:
    plug_ins = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if scheme not in plug_ins:
        known = ", ".join(f"{name}://" for name in sorted({*_BUILT_IN, *plug_ins}))
        raise UsageError(
            f"transport {url!r} is not known; known: {known}. A package adds a scheme with an entry point in the group "
            f"{ENTRY_POINTS!r}: SCHEME = 'module:make', where make(url, **options) returns a Transport"
        )
    try:
        make: Callable[..., Transport] = plug_ins[scheme].load()
    except Exception as error:
        raise UsageError(
            f"the plug-in for {scheme}:// ({plug_ins[scheme].value}) does not load: {type(error).__name__}: {error}; "
            "repair or remove that package"
        ) from error
    return make
