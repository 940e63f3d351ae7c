"""Loads made for tracing: whole streams through the native loader, and which names it cannot load."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from dcr_stream.canonical import TensorDirectory
from dcr_stream.codec.bits import tensor_from_words
from dcr_stream.errors import PlacementError
from dcr_stream.interfaces import Loader
from dcr_stream.trace.contents import Contents, Ids, IdSpace
from dcr_stream.trace.storage import StorageMap

__all__ = ["LoadFailed", "LoadRunner"]

_TIES_TRIED = 8
_USED = 0xA5


class LoadFailed(PlacementError):
    """The native loader raised. ``tensor`` is the one it was working on; None if it had taken all of them."""

    def __init__(self, tensor: int | None, name: str, cause: Exception) -> None:
        super().__init__(f"the native loader raised {type(cause).__name__} at {name}: {cause}")
        self.tensor = tensor
        self.reason = f"{type(cause).__name__}: {cause}"


class LoadRunner:
    """Streams contents through the native loader, as a dense load would.

    Every load hands out all canonical tensors but the ``refused`` ones. A tensor's memory is overwritten as soon as
    the loader asks for the next, as it is in a streamed load: a loader that keeps references instead of copying is
    seen to place nothing. After every load the storage must be where it was.
    """

    def __init__(self, loader: Loader, directory: TensorDirectory, storage: StorageMap) -> None:
        self._loader = loader
        self._directory = directory
        self._storage = storage
        self.refused: dict[int, str] = {}
        self.equal: dict[int, int] = {}
        self._at: int | None = None

    def settle(self) -> IdSpace:
        """Find out which names can be loaded, ending with a whole load of the first pass of ids.

        A name at which the loader raises is tried with the same contents as earlier tensors of its dtype and shape
        (loaders compare tied weights); if that does not help it is refused, by name.

        Raises:
            LoadFailed: the load fails as a whole, and no single name is to blame.
            LayoutChanged: the loader replaced storage.
        """
        while True:
            space = IdSpace(self._directory, self.equal)
            try:
                self.load(Ids(space, 0))
            except LoadFailed as failure:
                if failure.tensor is None or not self._tie(failure.tensor):
                    self._blame(space, failure)
            else:
                return space

    def _tie(self, tensor: int) -> bool:
        if tensor in self.equal:
            return False
        spec = self._directory[tensor]
        alike = [
            t
            for t in range(tensor)
            if t not in self.refused
            and t not in self.equal
            and (self._directory[t].dtype, self._directory[t].shape) == (spec.dtype, spec.shape)
        ]
        for other in alike[:_TIES_TRIED]:
            equal = {**self.equal, tensor: other}
            try:
                self.load(Ids(IdSpace(self._directory, equal), 0))
            except LoadFailed as failure:
                if failure.tensor == tensor:
                    continue
            self.equal = equal
            return True
        return False

    def _blame(self, space: IdSpace, failure: LoadFailed) -> None:
        alone: dict[int, str] = {}
        suspects = [failure.tensor] if failure.tensor is not None else []
        for tensor in [*suspects, *(t for t in range(len(self._directory)) if t not in self.refused)]:
            try:
                self.load(Ids(space, 0), [tensor])
            except LoadFailed as again:
                alone[tensor] = again.reason
                if tensor == failure.tensor:
                    break
        if not alone and failure.tensor is None:
            raise failure
        self.refused |= alone or dict.fromkeys(suspects, failure.reason)

    def order(self, *, backwards: bool = False, first: Collection[int] = (), last: Collection[int] = ()) -> list[int]:
        """All tensors in directory order or backwards, some of them moved; equal tensors follow each other forwards."""
        everything = range(len(self._directory))
        ordered = [
            *(t for t in everything if t in first and t not in last),
            *(t for t in (reversed(everything) if backwards else everything) if t not in first and t not in last),
            *(t for t in everything if t in last),
        ]
        if not self.equal:
            return ordered
        followers: dict[int, list[int]] = {}
        for tensor, representative in sorted(self.equal.items()):
            followers.setdefault(representative, []).append(tensor)
        return [t for lead in ordered if lead not in self.equal for t in (lead, *followers.get(lead, ()))]

    def load(self, contents: Contents, order: Sequence[int] | None = None) -> None:
        """Load ``contents`` of the tensors in ``order`` (all in directory order if None) in one stream.

        Raises:
            LoadFailed: the loader raised.
            LayoutChanged: the loader replaced storage.
        """
        self._at = None
        try:
            with torch.no_grad():
                self._loader.load(self._stream(contents, self.order() if order is None else order))
        except Exception as error:
            name = repr(self._directory[self._at].name) if self._at is not None else "the end of the load"
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
            raise LoadFailed(self._at, name, cause) from error
        finally:
            self._loader.synchronize()
        self._storage.check(self._storage.identity())

    def _stream(self, contents: Contents, order: Sequence[int]) -> Iterator[tuple[str, torch.Tensor]]:
        for tensor in order:
            if tensor in self.refused:
                continue
            spec = self._directory[tensor]
            self._at = tensor
            words = contents.words(tensor)
            yield spec.name, tensor_from_words(words, spec.dtype, spec.shape)
            words.view("u1")[...] = _USED if spec.dtype != "bool" else 1
        self._at = None
