"""The demonstration as a user runs it: exact, repaired after a kill, and honest in its exit status."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dcr_stream.cli.demo.options import DemoOptions
from dcr_stream.errors import UsageError

pytestmark = pytest.mark.processes


def demo(*arguments: str, timeout_s: float = 110) -> dict[str, Any]:
    """Run the demonstration and return the JSON object of its last line."""
    done = subprocess.run(
        [sys.executable, "-c", "from dcr_stream.cli import main; main()", "demo", "--json", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = msgspec.json.decode(done.stdout.splitlines()[-1])
    assert result["ok"]
    return result


def check(result: dict[str, Any], steps: int, mode: str) -> None:
    """Every refit exact, every answer of one version, and really answers."""
    figures = result["figures"]
    assert figures["refits_exact"] == figures["refits"] == steps + 1
    assert figures["responses_mixed"] == figures["requests_indistinct"] == 0
    assert figures["responses"] > 10
    assert figures["compared_elements"] > 22_000_000 * (steps + 1)
    assert [row["mode"] for row in result["refits"]] == [mode] * (steps + 1)
    assert [row["kind"] for row in result["refits"]] == ["dense"] + ["delta"] * steps


def test_a_receiver_killed_while_it_applies_is_repaired_and_every_refit_is_exact() -> None:
    result = demo("--steps", "2", "--kill")
    check(result, 2, "async")
    assert result["figures"]["killed"] == result["figures"]["repaired"] == 1
    assert result["refits"][2]["attempts"] == 2


def test_all_roles_run_in_one_process() -> None:
    check(demo("--steps", "1", "--in-process", "--mode", "sync"), 1, "sync")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_five_steps_with_a_kill(mode: str) -> None:
    result = demo("--steps", "5", "--mode", mode, "--kill")
    check(result, 5, mode)
    assert result["figures"]["killed"] == result["figures"]["repaired"] == 1


def test_payloads_can_travel_through_a_folder_of_the_users(tmp_path: Path) -> None:
    check(demo("--steps", "1", "--in-process", "--transport", f"file://{tmp_path}"), 1, "async")


def test_options_are_checked_at_the_door() -> None:
    with pytest.raises(UsageError, match="1 to 1000"):
        DemoOptions(steps=0)
