"""Compiled kernels, and the one place that chooses between them and their numpy references.

A function decorated with :func:`kernel` *is* the definition: plain numpy, the fallback and the oracle of the tests. The
module named in the decorator holds a function of the same name and arguments that gives the same results bit for bit,
compiled with numba. Which of the two a call runs is decided once per process, at the first call:

- the environment variable ``DCR_STREAM_KERNELS`` says ``numba`` or ``numpy``;
- without it, numba if it can be imported.

Compiled code is kept on disk by numba: in ``NUMBA_CACHE_DIR`` if that is set, else beside this package, or, where
site-packages are read-only, in the user's own cache folder. Where none can be written, it is compiled once per process.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Literal, get_args

from typing_extensions import ParamSpec, TypeVar

from dcr_stream.errors import UsageError

__all__ = ["VARIABLE", "Forms", "Implementation", "Kernel", "compiled_forms", "implementation", "kernel", "using"]

P = ParamSpec("P")
R = TypeVar("R")

Implementation = Literal["numba", "numpy"]

VARIABLE = "DCR_STREAM_KERNELS"
"""Environment variable that picks the implementation."""

_chosen: Implementation | None = None
_kernels: list[Kernel[..., Any]] = []


class Kernel(Generic[P, R]):
    """A function with a numpy ``reference`` and a compiled form; calling it runs the chosen one."""

    def __init__(self, reference: Callable[P, R], module: str) -> None:
        self.reference = reference
        self.__name__ = reference.__name__
        self.__doc__ = reference.__doc__
        self.__wrapped__ = reference
        self._module = module
        self._run: Callable[P, R] | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return (self._run or self._choose())(*args, **kwargs)

    @property
    def compiled(self) -> Callable[P, R]:
        """The compiled form. Importing it needs numba."""
        found: Callable[P, R] = getattr(importlib.import_module(f"{__name__}.{self._module}"), self.__name__)
        return found

    def forget(self) -> None:
        """Choose again at the next call."""
        self._run = None

    def _choose(self) -> Callable[P, R]:
        run = self.compiled if implementation() == "numba" else self.reference
        self._run = run
        return run


def kernel(module: str) -> Callable[[Callable[P, R]], Kernel[P, R]]:
    """Make a numpy function a kernel: its compiled form is the function of this name in ``kernels.<module>``."""

    def decorate(reference: Callable[P, R]) -> Kernel[P, R]:
        made = Kernel(reference, module)
        _kernels.append(made)
        return made

    return decorate


@dataclass(frozen=True, slots=True)
class Forms:
    """Compiled forms (a function for certain dtypes) that this process holds, and where numba keeps them.

    ``compiled`` were compiled here, ``loaded`` were found on disk in ``folder``; None where no folder can be written.
    """

    compiled: int
    loaded: int
    folder: str | None


def compiled_forms() -> Forms:
    """What numba says of the compiled functions of all kernels, those that only others call included.

    Imports numba and every module of compiled kernels, and compiles nothing.
    """
    is_jitted: Callable[[object], bool] = importlib.import_module("numba.extending").is_jitted
    modules = {sys.modules[each.compiled.__module__] for each in _kernels}
    found: dict[int, Any] = {id(f): f for module in modules for f in vars(module).values() if is_jitted(f)}
    stats = [dispatcher.stats for dispatcher in found.values()]
    return Forms(
        compiled=sum(each.cache_misses.total() for each in stats),
        loaded=sum(each.cache_hits.total() for each in stats),
        folder=next((each.cache_path for each in stats), None),
    )


def implementation() -> Implementation:
    """Which implementation this process uses; imports numba to find out.

    Raises:
        UsageError: ``DCR_STREAM_KERNELS`` names another one, or numba where it cannot be imported.
    """
    global _chosen
    if _chosen is None:
        _chosen = _wanted(os.environ.get(VARIABLE, ""))
    return _chosen


def _wanted(name: str) -> Implementation:
    if name not in ("", *get_args(Implementation)):
        raise UsageError(f"{VARIABLE}={name!r} is unknown; set numba or numpy, or leave it out")
    if name == "numpy":
        return "numpy"
    try:
        importlib.import_module("numba")
    except ImportError as error:
        if name == "numba":
            raise UsageError(f"{VARIABLE}=numba, but numba cannot be imported ({error}); install numba") from error
        return "numpy"
    return "numba"


@contextmanager
def using(name: Implementation) -> Iterator[None]:
    """Use one implementation in all of this process for a while: for tests and measurements.

    Raises:
        UsageError: numba cannot be imported.
    """
    global _chosen
    before = implementation()
    _chosen = _wanted(name)
    _forget()
    try:
        yield
    finally:
        _chosen = before
        _forget()


def _forget() -> None:
    for each in _kernels:
        each.forget()
