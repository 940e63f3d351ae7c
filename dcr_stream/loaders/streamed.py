"""A streamed load session: the native loader runs in a thread and pulls what is pushed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import torch
from typing_extensions import override

from dcr_stream.errors import ApplyError
from dcr_stream.interfaces import LoadSession

__all__ = ["StreamedLoad"]

_Answer = Literal["consumed", "returned"] | BaseException
Part = list[tuple[str, torch.Tensor]]
_LIMIT_S = 600.0
"""Longest that one part may take in the native loader."""


class _GivenUp(Exception):
    """Raised into the native loader when its load is given up."""


class StreamedLoad(LoadSession):
    """Feeds a loader's one streamed ``load`` call part by part.

    One part is in flight: ``push`` returns when the loader asks for more, which is when it is done with the last
    tensor. The loader's errors are raised by the next ``push`` or ``finish``. A load that is given up ends when the
    loader asks for its next tensor: it gets an error, and no tensor after that even if it swallows the error.

    Args:
        load: consumes an iterator of (name, tensor); runs in a thread of its own.
        name: of the model, for error messages.
    """

    def __init__(self, load: Callable[[Iterator[tuple[str, torch.Tensor]]], None], name: str) -> None:
        self._name = name
        self._load = load
        self._parts: queue.Queue[Part | None] = queue.Queue(1)
        self._answers: queue.Queue[_Answer] = queue.Queue(2)  # a part's, and the loader's own at its end
        self._untaken = 0
        self._returned = self._ended = self._giving_up = False
        self._thread = threading.Thread(target=self._run, name=f"load {name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._load(self._feed())
        except BaseException as error:
            self._answers.put(error)
        else:
            self._answers.put("returned")

    def _feed(self) -> Iterator[tuple[str, torch.Tensor]]:
        while (part := self._parts.get()) is not None:
            for pair in part:
                self._untaken -= 1
                yield pair
            del part
            self._answers.put("consumed")
        if self._giving_up:
            raise _GivenUp(f"the load of {self._name} was given up")

    @override
    def push(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Hand tensors to the native loader and wait until it has consumed them.

        Raises:
            ApplyError: the loader raised, returned before it took all of them, or does not come back; or the load
                has ended.
        """
        self._require_open()
        part = list(tensors)
        self._untaken = len(part)
        if not self._returned:
            self._parts.put(part)
            self._wait()
        if self._returned and self._untaken:
            self._ended = True
            raise ApplyError(
                f"the native loader of {self._name} returned before it took all tensors; the weights are incomplete "
                "until a dense load succeeds"
            )

    @override
    def finish(self) -> None:
        """End the load and wait for the native loader to return.

        Raises:
            ApplyError: the loader raised or does not come back; or the load has ended.
        """
        self._require_open()
        self._ended = True
        if not self._returned:
            self._parts.put(None)
            self._wait()
        self._join()

    @override
    def abort(self) -> None:
        """Give the load up and wait until the native loader has stopped writing. Does nothing after the end.

        Raises:
            ApplyError: the loader does not stop.
        """
        if self._ended:
            return
        self._ended = self._giving_up = True
        if not self._returned:
            self._parts.put(None)
        self._join()

    def _require_open(self) -> None:
        if self._ended:
            raise ApplyError(f"the load of {self._name} has ended; open another session")

    def _wait(self) -> None:
        """Wait for the loader to take what it was given, or to end."""
        try:
            answer = self._answers.get(timeout=_LIMIT_S)
        except queue.Empty:
            self._ended = self._giving_up = True
            raise ApplyError(
                f"the native loader of {self._name} did not come back within {_LIMIT_S:.0f} s; restart its engine"
            ) from None
        if isinstance(answer, BaseException):
            self._ended = True
            self._join()
            raise answer
        self._returned = answer == "returned"

    def _join(self) -> None:
        self._thread.join(_LIMIT_S)
        if self._thread.is_alive():
            raise ApplyError(f"the native loader of {self._name} does not stop; restart its engine")
