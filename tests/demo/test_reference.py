from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from dcr_stream.cli.demo.reference import EngineDump, ReferenceJob, ReferenceReport, SavedState, main, run_reference
from dcr_stream.cli.demo.rollout_model import ModelConfig, RolloutModel, snapshot
from dcr_stream.errors import DcrError, UsageError
from tests.demo.conftest import TrainingRun

REQUEST = (101, 1037, 3712, 7205, 102)


def judge(job: ReferenceJob) -> ReferenceReport:
    path = Path(f"{job.output}.job")
    path.write_bytes(msgspec.json.encode(job))
    assert main([str(path)]) == 0
    return msgspec.json.decode(Path(job.output).read_bytes(), type=ReferenceReport)


@pytest.fixture(scope="module")
def clean_dump(run: TrainingRun, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = RolloutModel(ModelConfig.read(checkpoint))
    model.load_weights(load_file(run.states[0]).items())
    path = tmp_path_factory.mktemp("dump") / "clean.safetensors"
    save_file(snapshot(model), path)
    return path


def job(run: TrainingRun, dump: Path, output: Path, versions: tuple[int, ...] = (0,)) -> ReferenceJob:
    return ReferenceJob(
        states=tuple(SavedState(index, str(run.states[version])) for index, version in enumerate(versions)),
        layouts=(1,),
        requests=(REQUEST,),
        dumps=(EngineDump("solo", 0, 1, 0, str(dump)),),
        output=str(output),
    )


def test_an_engine_that_holds_the_state_has_no_mismatch(run: TrainingRun, clean_dump: Path, tmp_path: Path) -> None:
    report = judge(job(run, clean_dump, tmp_path / "report.json"))
    assert report.mismatches == ()
    assert [c.tensors for c in report.compared] == [len(load_file(clean_dump))]
    assert report.compared[0].elements > 22_713_728


def test_a_lost_an_extra_and_an_altered_tensor_are_reported_by_path(
    run: TrainingRun, clean_dump: Path, tmp_path: Path
) -> None:
    tensors = load_file(clean_dump)
    del tensors["pooler.dense.bias"]
    tensors["cache"] = torch.zeros(3, dtype=torch.int16)
    tensors["pooler.dense.weight"] = tensors["pooler.dense.weight"].reshape(-1)
    tensors["encoder.layer.5.output.dense.bias"][[3, 5]] ^= -0x8000
    save_file(tensors, tmp_path / "altered.safetensors")
    report = judge(job(run, tmp_path / "altered.safetensors", tmp_path / "report.json"))
    assert {(m.tensor, m.elements, m.reason) for m in report.mismatches} == {
        ("pooler.dense.bias", 384, "the engine does not hold this tensor"),
        ("cache", 3, "a dense load does not make this tensor"),
        ("pooler.dense.weight", 384 * 384, "other shape or element width"),
        ("encoder.layer.5.output.dense.bias", 2, "other bits"),
    }


def test_a_request_that_cannot_tell_two_versions_apart_is_reported(
    run: TrainingRun, clean_dump: Path, tmp_path: Path
) -> None:
    report = judge(job(run, clean_dump, tmp_path / "report.json", versions=(0, 1, 1)))
    assert report.indistinct == ((1, 2, 0),)


def test_a_dump_without_a_saved_state_is_refused(run: TrainingRun, clean_dump: Path, tmp_path: Path) -> None:
    bad = msgspec.structs.replace(job(run, clean_dump, tmp_path / "report.json"), states=())
    with pytest.raises(UsageError, match="solo"):
        judge(bad)


def test_a_failing_process_is_an_error_with_its_own_words(run: TrainingRun, clean_dump: Path, tmp_path: Path) -> None:
    bad = msgspec.structs.replace(
        job(run, clean_dump, tmp_path / "report.json"), states=(SavedState(0, str(tmp_path / "absent.safetensors")),)
    )
    with pytest.raises(DcrError, match=r"absent\.safetensors"):
        run_reference(bad)
