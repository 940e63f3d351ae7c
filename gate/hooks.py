"""Takes an engine out of service for a swap, and puts it back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from dcr_stream.errors import DcrError, DrainTimeout, EngineHookFailed
from dcr_stream.gate.modes import GateMode
from dcr_stream.gate.request_gate import RequestGate
from dcr_stream.interfaces.engine import DrainMode, Engine

__all__ = ["close_engine", "open_engine"]


async def close_engine(engine: Engine, gate: RequestGate, mode: GateMode, *, hook_deadline_s: float) -> None:
    """Close the gate → drain → ``pause`` → ``invalidate_caches``; afterwards weights may be written.

    With ``drain="abort"`` the engine's ``pause("abort")`` is what ends the requests, so it comes before the wait;
    ``keep`` waits for nothing; of an engine that cannot keep requests it is ``wait``. Nothing was written yet, so
    whatever fails (also being cancelled) puts the engine back into service at the version that the gate served before.

    Raises:
        EngineHookFailed: a hook raised, or took longer than ``hook_deadline_s`` seconds.
        DrainTimeout: requests still ran at the drain deadline and the mode says ``fail``, or ``keep`` and the engine
            cannot, or aborting did not end them.
    """
    was_open = gate.is_open
    pausing = False
    try:
        drain = await _drain(gate, mode, engine.keeps_requests)
        pausing = True
        await _hook(engine, "pause", lambda: engine.pause(drain), hook_deadline_s)
        if drain == "abort":
            await gate.close(hook_deadline_s)
        await _hook(engine, "invalidate_caches", engine.invalidate_caches, hook_deadline_s)
    except BaseException as error:
        # Shielded: also an attempt that is cancelled must leave the engine serving v.
        with anyio.CancelScope(shield=True):
            await _back_to_service(engine, gate, was_open=was_open, pausing=pausing, why=error, bound=hook_deadline_s)
        raise


async def open_engine(
    engine: Engine, gate: RequestGate, version: int, *, hook_deadline_s: float, restore: bool = False
) -> None:
    """``resume`` the engine and open its gate at ``version``; ``restore`` allows a version before the last one.

    Raises:
        EngineHookFailed: ``resume`` failed or took longer than ``hook_deadline_s`` seconds; the gate stays closed.
    """
    gate.adopt(version, restore=restore)
    await _hook(engine, "resume", engine.resume, hook_deadline_s)
    gate.open(version)


async def _drain(gate: RequestGate, mode: GateMode, keeps_requests: bool) -> DrainMode:
    """Close the gate, wait as the mode says, and return how ``pause`` shall treat what still runs."""
    gate.shut()
    if mode.drain == "abort" or (mode.drain == "keep" and keeps_requests):
        return mode.drain
    try:
        await gate.close(mode.drain_deadline_s)
    except DrainTimeout:
        # A forward pass that is not stopped would read weights while they are written.
        if mode.after_deadline == "fail" or (mode.after_deadline == "keep" and not keeps_requests):
            raise
        return mode.after_deadline
    return "wait"


async def _hook(engine: Engine, name: str, call: Callable[[], Awaitable[None]], deadline_s: float) -> None:
    try:
        with anyio.fail_after(deadline_s):
            await call()
    except TimeoutError as error:
        raise EngineHookFailed(
            f"engine {engine.name}: {name} took longer than {deadline_s:g} s; "
            "look at the engine's log, or raise the hook deadline"
        ) from error
    except Exception as error:
        raise EngineHookFailed(
            f"engine {engine.name}: {name} failed: {type(error).__name__}: {error}; look at the engine's log"
        ) from error


async def _back_to_service(
    engine: Engine, gate: RequestGate, *, was_open: bool, pausing: bool, why: BaseException, bound: float
) -> None:
    if pausing:
        try:
            await _hook(engine, "resume", engine.resume, bound)
        except DcrError as error:
            why.add_note(f"{error} (its gate stays closed)")
            return
    if was_open:
        gate.reopen()
