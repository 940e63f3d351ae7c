"""The fault injector does what it is told, and the same again for the same seed."""

from __future__ import annotations

import pytest

from dcr_stream.errors import AttemptAborted, TransportTimeout, TransportUnavailable, UsageError
from dcr_stream.messages import Attempt
from dcr_stream.testing import Faults, FaultyTransport
from dcr_stream.testing.transport import announce, make_payload
from dcr_stream.transports import MemoryTransport

pytestmark = pytest.mark.anyio

ATTEMPT = Attempt("run", 1, 1, 1)
PAYLOADS = [make_payload(ATTEMPT, "rank0", sequence) for sequence in range(40)]


async def outcomes(faults: Faults) -> tuple[list[str], dict[str, int]]:
    """What became of each payload, and the faults injected."""
    transport = FaultyTransport(MemoryTransport(wait_s=0.001), faults)
    found: list[str] = []
    async with transport.open_sink(ATTEMPT, "rank0") as sink, transport.open_source(ATTEMPT, "node0") as source:
        for payload in PAYLOADS:
            try:
                await sink.send(payload)
                body = await source.fetch(announce(payload))
            except (AttemptAborted, TransportTimeout, TransportUnavailable) as error:
                found.append(type(error).__name__)
            else:
                same_size = "corrupt" if len(body) == payload.nbytes else "truncate"
                found.append("intact" if body == payload.body else same_size)
    return found, transport.injected


@pytest.mark.parametrize(
    ("faults", "fault", "outcome"),
    [
        (Faults(seed=1, drop=0.3), "drop", "TransportTimeout"),
        (Faults(seed=1, corrupt=0.3), "corrupt", "corrupt"),
        (Faults(seed=1, truncate=0.3), "truncate", "truncate"),
        (Faults(seed=1, disconnect=0.2), "disconnect", "TransportUnavailable"),
        (Faults(seed=1, abort=0.3), "abort", "AttemptAborted"),
        (Faults(seed=1, duplicate=0.3), "duplicate", "intact"),
        (Faults(seed=1, delay=0.3, delay_s=0.001), "delay", "intact"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_each_fault_is_injected_and_counted(faults: Faults, fault: str, outcome: str) -> None:
    found, injected = await outcomes(faults)
    assert set(injected) == {fault}
    assert 0 < injected[fault] < 80
    if outcome == "intact":
        assert found == ["intact"] * len(PAYLOADS)
    else:
        assert set(found) == {"intact", outcome}
        assert found.count(outcome) == injected[fault]


async def test_the_same_seed_gives_the_same_faults() -> None:
    faults = Faults(seed=5, drop=0.1, corrupt=0.1, truncate=0.1, disconnect=0.1)
    other = Faults(seed=6, drop=0.1, corrupt=0.1, truncate=0.1, disconnect=0.1)
    assert await outcomes(faults) == await outcomes(faults)
    assert await outcomes(faults) != await outcomes(other)


async def test_after_its_limit_everything_works() -> None:
    found, injected = await outcomes(Faults(seed=1, corrupt=1.0, limit=3))
    assert found == ["corrupt"] * 3 + ["intact"] * (len(PAYLOADS) - 3)
    assert injected == {"corrupt": 3}


async def test_a_probability_outside_0_to_1_is_refused() -> None:
    with pytest.raises(UsageError, match=r"drop is 1\.5"):
        Faults(drop=1.5)
