"""The transports that come with the package pass the conformance suite, and the suite fails broken ones."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from dcr_stream.interfaces import Transport
from dcr_stream.messages import Attempt
from dcr_stream.testing import Faults, FaultyTransport
from dcr_stream.testing.transport import TransportTests
from dcr_stream.transports import MemoryTransport, ObjectStoreTransport, open_transport
from tests.transports.broken_transports import MUTANTS, Broken, TakesTooMuch


class TestMemoryTransport(TransportTests):
    """Memory, one object for both ends."""

    @pytest.fixture
    def transport(self) -> Transport:
        return MemoryTransport(max_bytes=1_000_000)


class TestObjectStoreTransport(TransportTests):
    """A folder, opened by each end for itself."""

    @pytest.fixture
    def transport(self, tmp_path: Path) -> Transport:
        return ObjectStoreTransport.from_url(tmp_path.as_uri())

    @pytest.fixture
    def node_transport(self, tmp_path: Path, transport: Transport) -> Transport:
        return open_transport(tmp_path.as_uri())


class TestFaultlessFaultyTransport(TransportTests):
    """The fault injector without faults, and with those that a transport must hide."""

    @pytest.fixture
    def transport(self) -> Transport:
        return FaultyTransport(
            MemoryTransport(max_bytes=1_000_000), Faults(seed=1, delay=0.5, delay_s=0.002, duplicate=0.5)
        )


@pytest.mark.anyio
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
async def test_the_suite_catches_a_broken_transport(mutant: type[Broken]) -> None:
    with pytest.raises((Exception, pytest.fail.Exception)):
        await _run(MUTANTS[mutant], mutant())


@pytest.mark.anyio
@pytest.mark.parametrize("test", [test for kind, test in MUTANTS.items() if kind is not TakesTooMuch])
async def test_the_suite_passes_the_transport_that_mutants_are_made_of(test: str) -> None:
    await _run(test, Broken())


async def _run(name: str, transport: Transport) -> None:
    suite = TransportTests()
    suite.bound_s = 1.0
    test = getattr(suite, name)
    arguments: dict[str, object] = {
        "transport": transport,
        "node_transport": transport,
        "attempt": Attempt("run_1", 7, 1, 3),
        "size": 1000,
    }
    await test(**{argument: arguments[argument] for argument in inspect.signature(test).parameters})
