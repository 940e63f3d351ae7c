"""What the file store promises beyond the conformance suite: names, folders, faults of the store."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest
from obstore.exceptions import GenericError
from obstore.store import MemoryStore

from dcr_stream.errors import (
    AttemptAborted,
    AttemptFenced,
    PayloadRejected,
    TransportTimeout,
    TransportUnavailable,
    UsageError,
)
from dcr_stream.interfaces import Transport
from dcr_stream.messages import Announcement, Attempt, Payload
from dcr_stream.testing.transport import announce, make_payload
from dcr_stream.transports import ObjectStoreTransport
from dcr_stream.transports.objects import Objects

pytestmark = pytest.mark.anyio

ATTEMPT = Attempt("run", 1, 1, 1)


async def send(transport: Transport, payload: Payload) -> None:
    async with transport.open_sink(payload.id.attempt, payload.id.owner) as sink:
        await sink.send(payload)


async def fetch(transport: Transport, announcement: Announcement) -> bytes:
    async with transport.open_source(announcement.id.attempt, "node0") as source:
        return await source.fetch(announcement)


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@contextmanager
def unprivileged() -> Iterator[None]:
    """Permissions hold for this block also if the tests run as root."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder that every user may write to, in a place that every user can reach."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    yield folder
    folder.chmod(0o777)
    shutil.rmtree(folder)


def lock(folder: Path) -> None:
    folder.chmod(0o555)


class FaultyObjects(Objects):
    """Raises the given errors, one per call, before it works."""

    def __init__(self, errors: list[Exception], *, deadline_s: float = 10.0) -> None:
        super().__init__(MemoryStore(), "memory", deadline_s=deadline_s)
        self.errors = errors
        self.calls = 0

    async def _put(self, name: str, body: bytes) -> None:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        await super()._put(name, body)


async def test_discard_leaves_nothing_but_the_fence(tmp_path: Path) -> None:
    transport = ObjectStoreTransport.from_url(tmp_path.as_uri())
    await send(transport, make_payload(ATTEMPT, "rank0", 0))
    assert files(tmp_path) == ["run-v1-a1-e1/payloads/rank0-000000"]
    (tmp_path / "run-v1-a1-e1/payloads/rank0-000001#1").write_bytes(b"what an interrupted write leaves behind")
    await transport.discard(ATTEMPT)
    assert files(tmp_path) == ["run-v1-a1-e1/fenced"]


async def test_a_send_that_overlaps_a_discard_leaves_no_payload(tmp_path: Path) -> None:
    """The fence comes between the first check and the write: the send deletes what it wrote."""
    objects = Objects.in_folder(tmp_path.as_uri())
    transport = ObjectStoreTransport(objects)
    create = objects.create

    async def slow_create(name: str, body: bytes) -> bool:
        if name.endswith("payloads/rank0-000000"):
            await ObjectStoreTransport.from_url(tmp_path.as_uri()).discard(ATTEMPT)
        return await create(name, body)

    objects.create = slow_create  # type: ignore[method-assign]
    with pytest.raises(AttemptFenced):
        await send(transport, make_payload(ATTEMPT, "rank0", 0))
    assert files(tmp_path) == ["run-v1-a1-e1/fenced"]


@pytest.mark.parametrize(
    "owner", ["../rank0", "a/b", "a\\b", "", ".hidden", "-flag", "a..b", "a\n", "a b", "ä", "x" * 260, "a#1", "a\0"]
)
async def test_a_name_that_could_leave_the_folder_is_rejected(tmp_path: Path, owner: str) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    transport = ObjectStoreTransport.from_url(folder.as_uri())
    payload = make_payload(ATTEMPT, owner, 0)
    for call in (send(transport, payload), fetch(transport, announce(payload))):
        with pytest.raises(PayloadRejected, match="cannot name an object"):
            await call
    run = make_payload(Attempt(owner, 1, 1, 1), "rank0", 0)
    for call in (send(transport, run), fetch(transport, announce(run)), transport.discard(run.id.attempt)):
        with pytest.raises(PayloadRejected):
            await call
    assert files(tmp_path) == []


async def test_a_missing_payload_fails_the_fetch_in_bounded_time(tmp_path: Path) -> None:
    """C7: an announced payload that never appears is an error that names it."""
    transport = ObjectStoreTransport.from_url(tmp_path.as_uri(), wait_s=0.05)
    await send(transport, make_payload(ATTEMPT, "rank0", 0))
    with pytest.raises(TransportTimeout, match=r"rank0-000001 .* look at owner rank0"):
        await fetch(transport, announce(make_payload(ATTEMPT, "rank0", 1)))


@pytest.mark.parametrize("size", [0, 1, 999, 1001])
async def test_a_truncated_or_lengthened_object_aborts_the_fetch(tmp_path: Path, size: int) -> None:
    """C7: a payload cut short on the store is never handed on."""
    transport = ObjectStoreTransport.from_url(tmp_path.as_uri())
    payload = make_payload(ATTEMPT, "rank0", 0)
    await send(transport, payload)
    path = tmp_path / "run-v1-a1-e1/payloads/rank0-000000"
    path.write_bytes((payload.body + b"x")[:size])
    with pytest.raises(AttemptAborted, match=f"has {size} bytes .* and 1000 were announced"):
        await fetch(transport, announce(payload))


async def test_a_missing_folder_is_refused_with_its_name_and_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere.* does not exist; create it"):
        ObjectStoreTransport.from_url((tmp_path / "nowhere").as_uri())
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UsageError, match=r"file.* does not exist; create it"):
        ObjectStoreTransport.from_url((tmp_path / "file").as_uri())


@pytest.mark.parametrize("url", ["file://relative/folder", "file://", "file:relative", "s3://bucket", "file:///a?b=c"])
async def test_a_url_that_is_no_absolute_folder_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match=r"write file:///DIR"):
        ObjectStoreTransport.from_url(url)


async def test_a_folder_name_may_need_quoting(tmp_path: Path) -> None:
    folder = tmp_path / "with space % and ü"
    folder.mkdir()
    await send(ObjectStoreTransport.from_url(folder.as_uri()), make_payload(ATTEMPT, "rank0", 0))
    assert files(folder) == ["run-v1-a1-e1/payloads/rank0-000000"]


async def test_a_folder_without_write_permission_is_refused_when_opened(shared_folder: Path) -> None:
    lock(shared_folder)
    with unprivileged(), pytest.raises(UsageError, match="may not be read and written"):
        ObjectStoreTransport.from_url(shared_folder.as_uri())


async def test_write_permission_lost_later_is_a_typed_error_at_once(shared_folder: Path) -> None:
    transport = ObjectStoreTransport.from_url(shared_folder.as_uri())
    lock(shared_folder)
    with unprivileged(), anyio.fail_after(5), pytest.raises(TransportUnavailable, match="is not permitted"):
        await send(transport, make_payload(ATTEMPT, "rank0", 0))
    assert files(shared_folder) == []


async def test_a_full_disk_is_a_typed_error_at_once() -> None:
    text = "Generic LocalFileSystem error: Unable to copy data to file: No space left on device (os error 28)"
    objects = FaultyObjects([GenericError(text)])
    with pytest.raises(TransportUnavailable, match=r"writing .*rank0-000000 in memory: no space is left"):
        await send(ObjectStoreTransport(objects), make_payload(ATTEMPT, "rank0", 0))
    assert objects.calls == 1


FILL_A_DISK = """
import sys, anyio
from dcr_stream.errors import TransportUnavailable
from dcr_stream.messages import Attempt
from dcr_stream.testing.transport import announce, make_payload
from dcr_stream.transports import open_transport

async def main():
    attempt = Attempt("run", 1, 1, 1)
    transport = open_transport("file://" + sys.argv[1])
    small, large = make_payload(attempt, "rank0", 0, 1000), make_payload(attempt, "rank0", 1, 1_000_000)
    async with transport.open_sink(attempt, "rank0") as sink, transport.open_source(attempt, "node0") as source:
        await sink.send(small)
        try:
            await sink.send(large)
        except TransportUnavailable as error:
            assert "no space is left" in str(error) and sys.argv[1] in str(error), error
            assert await source.fetch(announce(small)) == small.body
            await transport.discard(attempt)
            print("refused")

anyio.run(main)
"""


@pytest.mark.processes
async def test_a_really_full_disk_is_refused_and_what_was_sent_stays(tmp_path: Path) -> None:
    mount = 'mount -t tmpfs -o size=64k none "$1" && exec "$2" -c "$3" "$1"'
    own_mounts = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    try:
        able = await anyio.run_process([*own_mounts, 'mount -t tmpfs none "$1"', "sh", str(tmp_path)], check=False)
    except FileNotFoundError:
        pytest.skip("there is no unshare here")
    if able.returncode != 0:
        pytest.skip("this system allows no private mounts")
    command = [*own_mounts, mount, "sh", str(tmp_path), sys.executable, FILL_A_DISK]
    with anyio.fail_after(60):
        run = await anyio.run_process(command, check=False)
    assert run.stdout == b"refused\n", run.stderr.decode()


async def test_a_passing_fault_of_the_store_is_retried() -> None:
    objects = FaultyObjects([GenericError("503 SlowDown"), ConnectionResetError("reset")])
    transport = ObjectStoreTransport(objects)
    payload = make_payload(ATTEMPT, "rank0", 0)
    await send(transport, payload)
    assert objects.calls == 3
    assert await fetch(transport, announce(payload)) == payload.body


async def test_a_lasting_fault_of_the_store_ends_at_the_deadline_with_its_cause() -> None:
    objects = FaultyObjects([GenericError("503 SlowDown")] * 1000, deadline_s=0.2)
    with anyio.fail_after(5), pytest.raises(TransportUnavailable, match="503 SlowDown") as raised:
        await send(ObjectStoreTransport(objects), make_payload(ATTEMPT, "rank0", 0))
    assert raised.value.retryable
    assert objects.calls > 1


async def test_a_create_whose_answer_was_lost_succeeds_when_repeated() -> None:
    objects = FaultyObjects([])
    transport = ObjectStoreTransport(objects)
    payload = make_payload(ATTEMPT, "rank0", 0)
    await send(transport, payload)
    objects.errors.append(ConnectionResetError("the answer to a write that took effect was lost"))
    await send(transport, payload)
    assert await fetch(transport, announce(payload)) == payload.body
