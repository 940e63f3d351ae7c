"""Checks of arguments, made where a stage is built rather than where it fails."""

from __future__ import annotations

from dcr_stream.errors import UsageError

__all__ = ["check_at_least"]


def check_at_least(where: str, name: str, value: int, least: int) -> None:
    """Refuse a ``value`` that is no integer or below ``least``.

    Raises:
        UsageError: it is; the message names the argument and the smallest value that works.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise UsageError(f"{where}: {name}={value!r} is not an integer; give {least} or more")
    if value < least:
        raise UsageError(f"{where}: {name}={value} is too small; give {least} or more")
