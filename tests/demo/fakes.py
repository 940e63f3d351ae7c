"""Receivers for workers under test."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
from safetensors.torch import load_file

from dcr_stream.errors import DigestMismatch, UsageError
from dcr_stream.interfaces import Loader
from dcr_stream.messages import ReceiverCall, ReceiverReply


class FileReceiver:
    """Loads states from files through the worker's loader, and waits or fails when told to."""

    def __init__(self, loader: Loader, *, rank: int, name: str) -> None:
        self._loader = loader
        self._rank = rank
        self._name = name

    def handle(self, call: ReceiverCall) -> ReceiverReply:
        argument = msgspec.msgpack.decode(call.args, type=str)
        match call.method:
            case "load":
                self._loader.load(load_file(argument).items())
            case "hang":
                Path(f"{argument}.{self._rank}").touch()
                time.sleep(600)
            case "fail":
                raise DigestMismatch(argument)
        return ReceiverReply(msgspec.Raw(msgspec.msgpack.encode(self._name)))


class BrokenReceiver:
    """Cannot be built."""

    def __init__(self, loader: Loader, *, rank: int, name: str) -> None:
        raise UsageError(f"receiver {name} has no place")

    def handle(self, call: ReceiverCall) -> ReceiverReply:
        raise AssertionError


def receiver_call(method: str, argument: str = "") -> ReceiverCall:
    return ReceiverCall(method, msgspec.Raw(msgspec.msgpack.encode(argument)))
