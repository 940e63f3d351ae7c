"""The demonstration from start to verdict."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.to_thread
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from dcr_stream.cli.demo.local import LocalWorld
from dcr_stream.cli.demo.options import DemoOptions
from dcr_stream.cli.demo.processes import warm_up
from dcr_stream.cli.demo.reference import (
    EngineDump,
    Mismatch,
    ReferenceJob,
    ReferenceReport,
    SavedState,
    run_reference,
)
from dcr_stream.cli.demo.text import checkpoint_path, load_tokenizer, request_tokens
from dcr_stream.cli.demo.trainers import StepDone, state_path
from dcr_stream.cli.demo.verdict import Given, RefitRow, Responses, judge_responses, make_rows, show
from dcr_stream.cli.demo.watch import Times
from dcr_stream.cli.demo.world import LAYOUTS, RUN, ProcessWorld, World, new_secret
from dcr_stream.codec import warm_up as warm_up_kernels
from dcr_stream.commit import SqliteCommitStore
from dcr_stream.control import MemoryNetwork
from dcr_stream.coordinator import CoordinatorSettings
from dcr_stream.errors import TransitionFailed, UsageError
from dcr_stream.flow import task_group
from dcr_stream.front import Coordinator
from dcr_stream.interfaces import Network
from dcr_stream.peers import RefitReport, TransitionSettings
from dcr_stream.transports import open_transport

__all__ = ["DemoResult", "DemoRun", "judge", "run_demo"]

_REPAIR_S = 60.0
_BETWEEN_REQUESTS_S = 0.03
_SILENT_S = 1.0
_WIDTHS = (2, 8)  # weights, and position ids


@dataclass
class DemoResult:
    """The verdict. ``ok``: every refit bit-exact, no mixed response, every request distinct, repair if one was due."""

    ok: bool
    rows: list[RefitRow]
    responses: Responses
    mismatches: list[Mismatch]
    indistinct: int
    compared_tensors: int
    compared_elements: int
    killed: bool
    repaired: bool
    baseline_bytes: int
    times: Times
    problems: list[str] = field(default_factory=list)


@dataclass
class DemoRun:
    """What a run has gathered so far."""

    options: DemoOptions
    folder: Path
    progress: Progress
    requests: tuple[tuple[int, ...], ...]
    given: list[Given] = field(default_factory=list)
    reports: list[RefitReport] = field(default_factory=list)
    dumps: list[EngineDump] = field(default_factory=list)


async def run_demo(options: DemoOptions, console: Console) -> DemoResult:
    """Train, refit, serve and compare; progress goes to ``console``.

    Raises:
        DcrError: something could not be started or did not end; everything that was started is gone by then.
    """
    checkpoint_path()
    if options.transport is not None:
        await _check_transport(options.transport, options.in_process)
    if not options.in_process:
        warm_up()
    secret, network = new_secret(), MemoryNetwork() if options.in_process else None
    with (
        tempfile.TemporaryDirectory(prefix="dcr-demo-") as temporary,
        Progress(
            SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=False
        ) as progress,
    ):
        folder = Path(temporary)
        url = options.transport or f"file://{folder / 'payloads'}"
        if options.transport is None:
            (folder / "payloads").mkdir()
        requests = request_tokens(await anyio.to_thread.run_sync(load_tokenizer))
        await _have_kernels(progress)
        run = DemoRun(options, folder, progress, requests)
        async with (
            _coordinator(options, url, folder, secret, network) as coordinator,
            _world(run, coordinator, secret, network) as world,
        ):
            await _drive(run, coordinator, world)
            pauses, repaired, killed = await _reports(world)
        ended = world.ended
        reference = await _reference(run)
        result = await anyio.to_thread.run_sync(judge, run, reference, pauses)
        result.killed, result.repaired = killed, repaired
        if options.kill and not (killed and repaired):
            result.problems.append("the receiver that was to be killed was not killed and repaired")
        result.baseline_bytes = sum(e.baseline_bytes for e in ended.values())
        for end in ended.values():
            for stage, seconds in end.times.stages.items():
                result.times.stages[stage] = result.times.stages.get(stage, 0.0) + seconds
            for step, seconds in end.times.steps.items():
                result.times.steps[step] = result.times.steps.get(step, 0.0) + seconds
        result.ok = not result.problems
        if options.keep is not None:
            shutil.copytree(folder, options.keep, dirs_exist_ok=True)
    show(result.rows, console)
    return result


async def _have_kernels(progress: Progress) -> None:
    """Compile once what all processes would compile at the same time; told if it takes long enough to wonder."""
    task = progress.add_task("kernels: compiling", total=None, visible=False)

    async def tell() -> None:
        await anyio.sleep(_SILENT_S)
        progress.update(task, visible=True)

    async with task_group() as tasks:
        tasks.start_soon(tell)
        done = await anyio.to_thread.run_sync(warm_up_kernels, _WIDTHS)
        tasks.cancel_scope.cancel()
    progress.update(task, description=f"kernels: {done.compiled} compiled, {done.loaded} loaded", total=1, completed=1)


async def _check_transport(url: str, in_process: bool) -> None:
    transport = open_transport(url)
    if not transport.capabilities.spans_processes and not in_process:
        raise UsageError(f"--transport {url} works within one process only; use file://DIR, or add --in-process")
    await transport.aclose()


@asynccontextmanager
async def _coordinator(
    options: DemoOptions, url: str, folder: Path, secret: bytes, network: Network | None
) -> AsyncIterator[Coordinator]:
    commits = SqliteCommitStore(folder / "commits.db", secret=secret)
    transition = TransitionSettings(drain_deadline_s=10, stage_deadline_s=60, apply_deadline_s=60, rejoin_deadline_s=30)
    try:
        async with Coordinator.listen(
            "memory://coordinator" if options.in_process else "dcr://127.0.0.1:0",
            owners=2,
            nodes=len(LAYOUTS),
            transport=url,
            commits=commits,
            run=RUN,
            network=network,
            secret=secret,
            settings=CoordinatorSettings(join_deadline_s=60, transition=transition),
        ) as coordinator:
            yield coordinator
    finally:
        commits.close()


@asynccontextmanager
async def _world(
    run: DemoRun, coordinator: Coordinator, secret: bytes, network: Network | None
) -> AsyncIterator[ProcessWorld | LocalWorld]:
    steps = run.options.steps
    training = run.progress.add_task("training: starting", total=None)

    def on_step(rank: int, done: StepDone) -> None:
        if rank == 0:
            text = f"loss {done.loss:.3f}, " if done.version else ""
            run.progress.update(
                training,
                description=f"training: {text}candidate for v{done.version} captured in {done.capture_s:.2f} s",
            )

    async with AsyncExitStack() as stack:
        world: ProcessWorld | LocalWorld
        if run.options.in_process:
            assert network is not None
            world = await stack.enter_async_context(
                LocalWorld.start(coordinator, secret, run.folder, steps=steps, network=network, on_step=on_step)
            )
        else:
            kill_at = min(2, steps) if run.options.kill else -1
            world = await stack.enter_async_context(
                ProcessWorld.start(coordinator, secret, run.folder, steps=steps, kill_at=kill_at, on_step=on_step)
            )
        yield world


async def _drive(run: DemoRun, coordinator: Coordinator, world: ProcessWorld | LocalWorld) -> None:
    """One transition per training step, while clients ask all the time; dump what every engine holds after each."""
    serving = run.progress.add_task("requests: waiting for the first version", total=None)
    refits = run.progress.add_task("refits: waiting for trainers and engines", total=None)
    async with task_group() as tasks:
        for host in LAYOUTS:
            tasks.start_soon(_client, run, world, host, serving)
        for version in range(run.options.steps + 1):
            run.progress.update(refits, description=f"refits: v{version} of v{run.options.steps} ({run.options.mode})")
            report = await coordinator.refit(run.options.mode)
            if report.version != version:
                raise TransitionFailed(f"version {report.version} was committed where {version} was due")
            run.reports.append(report)
            await _all_serve(coordinator, world, version)
            for host, ranks in LAYOUTS.items():
                paths = await world.dump(host, run.folder / f"{host}-v{version}")
                for rank, path in enumerate(paths):
                    run.dumps.append(EngineDump(host, version, ranks, rank, str(path)))
        await world.trainers_done.wait()
        # Let every client see the last version too.
        await anyio.sleep(0.5)
        tasks.cancel_scope.cancel()
    run.progress.update(refits, description=f"refits: v0 to v{run.options.steps} committed ({run.options.mode})")


async def _all_serve(coordinator: Coordinator, world: World, version: int) -> None:
    """Wait, bounded, until every host serves ``version``; a restarted engine is restored on the way."""
    waiting: list[str] = []
    with anyio.move_on_after(_REPAIR_S):
        while True:
            waiting = [host for host in LAYOUTS if (await world.report(host)).serving != version]
            if not waiting:
                return
            await coordinator.restore_joiners()
            await anyio.sleep(0.1)
    raise TransitionFailed(f"rollout host {waiting[0]} does not serve version {version} after {_REPAIR_S:g} s")


async def _client(run: DemoRun, world: World, host: str, task: object) -> None:
    """Ask one request at a time, for as long as the demonstration runs."""
    number = 0
    while True:
        request = number % len(run.requests)
        answer = await world.ask(host, run.requests[request])
        if answer is None:
            await anyio.sleep(0.1)
            continue
        run.given.append(Given(host, request, answer))
        number += 1
        if len(run.given) % 16 == 0:
            run.progress.update(
                task,  # type: ignore[arg-type]  # rich's TaskID
                description=f"requests: {len(run.given)} answered, the last by v{answer.version_end}",
            )
        await anyio.sleep(_BETWEEN_REQUESTS_S)


async def _reports(world: World) -> tuple[dict[str, dict[int, float]], bool, bool]:
    pauses: dict[str, dict[int, float]] = {}
    killed = repaired = False
    for host in LAYOUTS:
        report = await world.report(host)
        pauses[host] = dict(report.pauses)
        killed = killed or report.killed
        repaired = repaired or (report.restarts > 0 and report.serving >= 0)
    return pauses, repaired, killed


async def _reference(run: DemoRun) -> ReferenceReport:
    task = run.progress.add_task("reference: dense loads in fresh processes", total=None)
    job = ReferenceJob(
        states=tuple(SavedState(v, str(state_path(run.folder, v))) for v in range(run.options.steps + 1)),
        layouts=tuple(sorted(set(LAYOUTS.values()))),
        requests=run.requests,
        dumps=tuple(run.dumps),
        output=str(run.folder / "reference.json"),
    )
    report = await anyio.to_thread.run_sync(run_reference, job)
    elements = sum(c.elements for c in report.compared)
    run.progress.update(
        task,
        description=f"reference: {len(report.compared)} dumps, {elements:,} elements compared as integers",
    )
    return report


def judge(run: DemoRun, reference: ReferenceReport, pauses: dict[str, dict[int, float]]) -> DemoResult:
    """The verdict over everything that was gathered; ``problems`` says what spoils it."""
    states = {v: state_path(run.folder, v) for v in range(run.options.steps + 1)}
    expected = {(host, v, r) for v in states for host, ranks in LAYOUTS.items() for r in range(ranks)}
    compared = {(c.engine, c.version, c.rank) for c in reference.compared}
    complete = {v for v in states if {e for e in expected if e[1] == v} <= compared}
    wrong = {m.version for m in reference.mismatches}
    checkpoint = states[0].stat().st_size
    rows = make_rows(run.reports, states, pauses, wrong, complete, checkpoint)
    responses = judge_responses(run.given, reference)
    problems: list[str] = []
    if wrong or len(complete) != len(states):
        problems.append(
            f"{len(reference.mismatches)} tensors differ from a dense refit ({len(complete)} versions compared)"
        )
    if responses.mixed:
        problems.append(f"{responses.mixed} responses match neither the version they started on nor their last")
    if set(responses.by_host) != set(LAYOUTS):
        problems.append("not every engine answered requests")
    if reference.indistinct:
        problems.append(f"{len(reference.indistinct)} requests have the same bits under two successive versions")
    return DemoResult(
        ok=not problems,
        rows=rows,
        responses=responses,
        mismatches=list(reference.mismatches),
        indistinct=len(reference.indistinct),
        compared_tensors=sum(c.tensors for c in reference.compared),
        compared_elements=sum(c.elements for c in reference.compared),
        killed=False,
        repaired=False,
        baseline_bytes=0,
        times=Times(),
        problems=problems,
    )
