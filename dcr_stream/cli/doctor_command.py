"""``dcr-stream doctor``: what of this machine and installation matters to a run, and what is wrong with it."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import sys
import warnings
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Literal

import msgspec
from rich.console import Console

import dcr_stream

__all__ = ["Diagnosis", "Finding", "examine", "run_doctor_command"]

_REQUIRED = ("torch", "numpy", "zstandard", "obstore")
_MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_SHARED = Path("/dev/shm")


class Finding(msgspec.Struct, frozen=True):
    """What is wrong, ending with the way out. An ``error`` stands against any run, a ``warning`` only costs time."""

    level: Literal["error", "warning"]
    text: str


class Kernels(msgspec.Struct, frozen=True):
    """Which kernels run, why, and what having them ready took; ``folder`` is where compiled code is kept.

    ``correct``: they gave the same bits as their numpy references, and a refit with them ended with the right ones.
    """

    implementation: Literal["numba", "numpy"]
    reason: str
    folder: str | None
    place: str | None
    compiled: int
    loaded: int
    warm_up_s: float
    correct: bool


class Cuda(msgspec.Struct, frozen=True):
    """``build`` is the CUDA release that torch was built for, None without; ``devices`` are those it can use."""

    build: str | None
    available: bool
    devices: list[str]


class Machine(msgspec.Struct, frozen=True):
    """``cores`` that this process may use, and ``memory_bytes`` it may have (None: unknown).

    ``shared_free_bytes`` is what is free in ``/dev/shm``; None where there is none.
    """

    system: str
    cores: int
    memory_bytes: int | None
    shared_free_bytes: int | None


class Diagnosis(msgspec.Struct, frozen=True):
    """All of it. ``ok``: no finding is an error. A package whose version is None cannot be imported."""

    ok: bool
    versions: dict[str, str | None]
    package: str
    kernels: Kernels | None
    cuda: Cuda | None
    plug_ins: dict[str, bool]
    machine: Machine
    findings: list[Finding]


def run_doctor_command(*, as_json: bool) -> int:
    """Examine this machine and say what was found; returns the exit status: 0 if all is usable, 1 if not."""
    with Console(stderr=True).status("doctor: importing packages, compiling or loading kernels"):
        diagnosis = examine()
    _show(diagnosis, Console(stderr=as_json))
    if as_json:
        sys.stdout.write(msgspec.json.encode(diagnosis).decode() + "\n")
        sys.stdout.flush()
    return 0 if diagnosis.ok else 1


def examine() -> Diagnosis:
    """Import what the library needs, have its kernels ready and checked, and look at the machine.

    Compiles the kernels of every element width, or loads them, which can take seconds. Never raises for something that
    is wrong: that is a finding.
    """
    findings: list[Finding] = []
    versions: dict[str, str | None] = {"dcr_stream": dcr_stream.__version__, "python": platform.python_version()}
    for name in _REQUIRED:
        versions[name], fault = _imported(name)
        if fault is not None:
            findings.append(_error(f"{name} cannot be imported ({fault}); install it again"))
    versions["numba"], without_numba = _imported("numba")
    usable = not findings
    kernels = _kernels(without_numba, findings) if usable else None
    cuda = _cuda(findings) if versions["torch"] is not None else None
    plug_ins = _plug_ins(findings) if usable else {}
    free = _shared(findings) if usable else None
    machine = Machine(f"{platform.system()} {platform.machine()}", _cores(), _memory(), free)
    ok = not any(finding.level == "error" for finding in findings)
    package = str(Path(dcr_stream.__file__).parent)
    return Diagnosis(ok, versions, package, kernels, cuda, plug_ins, machine, findings)


def _error(text: str) -> Finding:
    return Finding("error", text)


def _warning(text: str) -> Finding:
    return Finding("warning", text)


def _told(error: BaseException) -> str:
    """One line: compilers tell whole stories."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _imported(name: str) -> tuple[str | None, str | None]:
    """A package's version, or why it cannot be imported: a broken native library may raise anything."""
    try:
        importlib.import_module(name)
        return version(name), None
    except Exception as error:
        return None, _told(error)


def _kernels(without_numba: str | None, findings: list[Finding]) -> Kernels | None:
    from dcr_stream.codec.kernels import VARIABLE, compiled_forms, implementation
    from dcr_stream.codec.warm import WIDTHS, kernel_fault, warm_up
    from dcr_stream.errors import UsageError

    try:
        chosen = implementation()
    except UsageError as error:
        findings.append(_error(str(error)))
        return None
    asked = os.environ.get(VARIABLE)
    reason = f"{VARIABLE}={asked}" if asked else "numba can be imported"
    if chosen == "numpy" and asked:
        findings.append(_warning(f"{reason} keeps the compiled kernels off; unset it, they are faster"))
    elif chosen == "numpy":
        reason = "numba cannot be imported"
        findings.append(_warning(f"{reason} ({without_numba}), so that slower kernels run; install numba"))
    folder, warm = None, None
    try:
        folder = compiled_forms().folder if chosen == "numba" else None
        warm = warm_up(WIDTHS)
        fault = kernel_fault()
    except Exception as error:
        fault = _told(error)
    if fault is not None:
        stale = f"remove {folder}, whose content may be damaged, or " if folder is not None else ""
        way_out = f"{stale}set {VARIABLE}=numpy to go on without" if chosen == "numba" else "install numpy again"
        findings.append(_error(f"the {chosen} kernels do not work: {fault}; {way_out}"))
    if warm is None:
        return None
    place = _cache_place(warm.folder, findings) if chosen == "numba" else None
    return Kernels(chosen, reason, warm.folder, place, warm.compiled, warm.loaded, warm.seconds, fault is None)


def _cache_place(folder: str | None, findings: list[Finding]) -> str | None:
    """Which of the places for compiled code numba took."""
    named = os.environ.get("NUMBA_CACHE_DIR")
    if folder is None:
        what = f"neither NUMBA_CACHE_DIR={named}" if named else "no folder for compiled kernels"
        rest = " nor any other folder for compiled kernels" if named else ""
        findings.append(
            _warning(
                f"{what}{rest} can be written, so that every process compiles them again; "
                "set NUMBA_CACHE_DIR to a folder that can"
            )
        )
        return None
    where = Path(folder).resolve()
    if named:
        if where.is_relative_to(Path(named).resolve()):
            return "NUMBA_CACHE_DIR"
        findings.append(
            _warning(
                f"NUMBA_CACHE_DIR={named} cannot be written; compiled kernels are in {folder}; name another folder"
            )
        )
    inside = where.is_relative_to(Path(dcr_stream.__file__).parent.resolve())
    return "beside the package" if inside else "the user's cache folder"


def _cuda(findings: list[Finding]) -> Cuda:
    import torch

    build = torch.version.cuda
    # What is wrong with a driver is told as a warning, once.
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    findings += [_warning(f"CUDA cannot be used ({each.message}); update the driver") for each in told]
    devices: list[str] = []
    try:
        devices += [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if available else []
    except Exception as error:
        findings.append(_error(f"a CUDA device does not answer ({_told(error)}); look at nvidia-smi"))
    return Cuda(build, available, devices)


def _plug_ins(findings: list[Finding]) -> dict[str, bool]:
    """URL schemes that other packages add, and whether each can be loaded."""
    from dcr_stream.transports.registry import ENTRY_POINTS

    found: dict[str, bool] = {}
    for point in entry_points(group=ENTRY_POINTS):
        try:
            point.load()
            found[point.name] = True
        except Exception as error:
            found[point.name] = False
            findings.append(
                _warning(
                    f"the transport {point.name}:// ({point.value}) does not load ({_told(error)}); "
                    "repair or remove that package"
                )
            )
    return found


def _shared(findings: list[Finding]) -> int | None:
    """What is free where nodes share payloads with receivers."""
    from dcr_stream.node import NodeSettings

    if not _SHARED.is_dir():
        return None
    free, block = shutil.disk_usage(_SHARED).free, NodeSettings().block_bytes
    if free < block:
        findings.append(
            _warning(
                f"{_SHARED} has {free / 2**20:.0f} MiB free, and a node puts up to {block / 2**20:.0f} MiB and a "
                "tensor there; on rollout hosts enlarge it (containers: --shm-size), or lower NodeSettings.block_bytes"
            )
        )
    return free


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _memory() -> int | None:
    """Physical memory, or less where a container is given less."""
    limits = []
    try:
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):  # not a POSIX system
        return None
    for path in map(Path, _MEMORY_LIMITS):
        if path.is_file() and (limit := path.read_text().strip()).isdigit():
            limits.append(int(limit))
    return min(limits)


def _show(found: Diagnosis, console: Console) -> None:
    def line(name: str, text: str, style: str = "") -> None:
        console.print(f"{name:<11} {text}", style=style, markup=False, highlight=False, soft_wrap=True)

    line("versions", ", ".join(f"{name} {known or 'unusable'}" for name, known in found.versions.items()))
    line("package", found.package)
    kernels = found.kernels
    if kernels is not None:
        line("kernels", f"{kernels.implementation} ({kernels.reason})")
        line("", "same bits as their numpy references" if kernels.correct else "not correct")
        if kernels.implementation == "numba":
            done = [f"{kernels.compiled} compiled"] if kernels.compiled else []
            done += [f"{kernels.loaded} loaded"] if kernels.loaded else []
            line("", f"ready in {kernels.warm_up_s:.2f} s: {' and '.join(done) or 'nothing to do'}")
            line("", f"kept in {kernels.folder} ({kernels.place})" if kernels.folder else "not kept")
    if found.cuda is not None:
        built = f"torch is built for {found.cuda.build}" if found.cuda.build else "torch is built without"
        line("CUDA", f"{', '.join(found.cuda.devices) or 'no device'} ({built})")
    plug_ins = [f"{name}://" + ("" if loads else " (does not load)") for name, loads in found.plug_ins.items()]
    line("transports", f"plug-ins: {', '.join(plug_ins) or 'none'}")
    machine = found.machine
    memory = f"{machine.memory_bytes / 2**30:.1f} GiB of memory" if machine.memory_bytes else "memory unknown"
    shared = (
        f", {machine.shared_free_bytes / 2**30:.1f} GiB free in {_SHARED}"
        if machine.shared_free_bytes is not None
        else ""
    )
    line("machine", f"{machine.system}, {machine.cores} cores, {memory}{shared}")
    for finding in found.findings:
        line(finding.level, finding.text, "red" if finding.level == "error" else "yellow")
    line("verdict", "usable" if found.ok else "not usable", "green" if found.ok else "red")
