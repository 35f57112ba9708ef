"""A run over several processes gives the same numbers as one process and one set of files and messages, and all of its
processes end together."""

import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import final_state, short
from data_parallel import (
    PATIENCE,
    difference,
    ended,
    exactly,
    job,
    run_command,
    run_exactly,
    shared_and_alone,
    started,
    started_alone,
)
from test_kill import flags, newest

import bace
from bace.cli.main import main
from bace.config.parse import config_from
from bace.core import resources
from bace.errors import ConfigError
from bace.experiments.assemble import assemble, check_batch_norms
from bace.methods import METHODS

pytestmark = pytest.mark.xdist_group("data parallel")  # they run in the process that has the fork server


def modality_of(method: Any) -> str:
    return next(modality for modality in ("image", "text", "token") if modality in method.modalities)


@pytest.fixture(scope="module")
def compared(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    """Every method runs, one after the other, in the same two processes and in this one, for about ten steps in one
    modality. `make test-parallel` runs twenty steps in all modalities."""
    fewer = {"benchmark.tasks": [2, 3], "train.epochs": 1, "measure.fwt": False}
    jobs = {
        method.title: job(tiny, modality_of(method), short(method.title, 1, 1), **fewer) for method in METHODS
    }
    return shared_and_alone(jobs, tmp_path_factory.mktemp("compared"))


@pytest.mark.slow
@pytest.mark.parametrize("method", [method.title for method in METHODS])
def test_two_processes_learn_what_one_learns(compared: dict[str, tuple[Any, Any]], method: str) -> None:
    found, alone = compared[method]
    assert not difference(found, alone)
    assert found["passes"] == pytest.approx(alone["passes"], rel=0.05)  # a rank without a share passes one example


def settings_for(tiny: Any, **changes: object) -> dict[str, object]:
    given = {"train.epochs": 2, "checkpoint.every": 3, "train.threads": 1, **changes}
    settings: dict[str, object] = tiny.settings("image", method="BaCE", **given)
    return settings


def test_a_signal_to_one_of_four_stops_all_at_a_step_from_which_two_go_on(tiny: Any, tmp_path: Path) -> None:
    """With four, the last batch of an epoch has fewer examples than there are processes."""
    out, said = tmp_path / "run", tmp_path / "said.txt"
    settings = settings_for(tiny, **{"checkpoint.every": 0})
    stopped = ended(started(4, said, run_exactly, [*flags(settings), "--out", str(out)], "ToldToStop"))
    assert stopped == [128 + signal.SIGTERM] * 4
    assert said.read_text().count("stopped by signal 15 after a checkpoint") == 1
    assert newest(out) == 2  # checkpoint 1 is the end of the first task, checkpoint 2 is this one
    assert json.loads((out / "run.json").read_text())["config"]["train"]["devices"] == 4
    assert ended(started(2, said, run_exactly, ["--resume", str(out)])) == [0, 0]
    with exactly():
        alone = bace.run(settings, out=tmp_path / "alone")
    metrics = json.loads((out / "metrics.json").read_text())
    for name in ("A", "A_last", "A_new", "FGT", "FWT", "kept", "confusion"):
        assert metrics[name] == alone.metrics[name]
    assert metrics["passes"] == pytest.approx(alone.metrics["passes"], rel=0.05)
    (found, _), (expected, _) = final_state(out), final_state(tmp_path / "alone")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-9, equal_nan=True)
    assert said.read_text().count("task 2/3: A_t") == 1  # lines are printed only once
    assert bace.load(out).classes_  # in one process


def test_a_killed_process_ends_the_others_and_the_run_resumes_bit_for_bit(tiny: Any, tmp_path: Path) -> None:
    settings = settings_for(tiny, **{"train.epochs": 3})
    said, killed, straight = tmp_path / "said.txt", tmp_path / "killed", tmp_path / "straight"
    crew = started(2, said, run_command, *flags(settings), "--out", str(killed))
    wait_for(killed, 4, crew[1])
    crew[1].kill()
    began = time.monotonic()
    assert ended(crew) == [2, -signal.SIGKILL]
    assert time.monotonic() - began < 30
    assert "another process of this run has ended" in said.read_text()
    assert ended(started(2, said, run_command, "--resume", str(killed))) == [0, 0]
    assert ended(started(2, said, run_command, *flags(settings), "--out", str(straight))) == [0, 0]
    (tensors, files), (expected, expected_files) = final_state(killed), final_state(straight)
    assert files == expected_files
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(tensors[name], value), name


@pytest.mark.parametrize(
    ("drifting", "name", "checkpoints"),
    [
        ("DriftingWeight", "method.model.encoder.norm.bias", 0),
        ("DriftingMemory", "method.memory.examples", 1),  # the end of the first task, which fills the memory
        ("DriftingLabels", "stream.targets", 0),
    ],
)
def test_processes_that_drift_apart_are_stopped_by_the_name_of_the_tensor(
    tiny: Any, tmp_path: Path, drifting: str, name: str, checkpoints: int
) -> None:
    fewer = {"benchmark.tasks": [2, 3], "train.epochs": 1, "checkpoint.every": 0, "measure.fwt": False}
    words = [*flags(settings_for(tiny, **fewer)), "--out", str(tmp_path / "run")]
    assert ended(started(2, tmp_path / "said.txt", run_exactly, words, drifting)) == [2, 2]
    assert (tmp_path / "said.txt").read_text().count(f"'{name}' of rank 1 differs from rank 0's") == 1
    assert newest(tmp_path / "run") == checkpoints


def test_a_loss_that_is_not_finite_ends_all_processes_with_one_message(tiny: Any, tmp_path: Path) -> None:
    words = [*flags(settings_for(tiny, **{"train.lr": 1e30})), "--out", str(tmp_path / "run")]
    assert ended(started(2, tmp_path / "said.txt", run_command, *words)) == [2, 2]
    assert (tmp_path / "said.txt").read_text().count("the loss is not finite") == 1


# -- the real launcher


def ranks_of(launcher: int) -> list[int]:
    """The processes that the launcher has started as ranks."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children")
    found = [int(pid) for pid in children.read_text().split()] if children.exists() else []
    return [pid for pid in found if b"RANK=" in Path(f"/proc/{pid}/environ").read_bytes()]


def wait_for(folder: Path, checkpoints: int, process: BaseProcess) -> None:
    end = time.monotonic() + PATIENCE
    while newest(folder) < checkpoints:
        assert process.is_alive()
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.slow
def test_torchrun_starts_a_run_that_measures_what_one_process_measures(tiny: Any, tmp_path: Path) -> None:
    fewer = {"benchmark.tasks": [2, 3], "train.epochs": 1, "measure.fwt": False}
    settings, out = settings_for(tiny, **fewer), tmp_path / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [*torchrun, "-m", "bace", "run", *flags(settings), "--out", str(out)]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ran.returncode == 0, ran.stderr
    assert json.loads((out / "run.json").read_text())["config"]["train"]["devices"] == 2
    bace.run(settings, out=tmp_path / "alone")
    found, expected = (json.loads((folder / "metrics.json").read_text()) for folder in (out, tmp_path / "alone"))
    for name in ("A", "A_last", "A_new", "FGT", "kept", "confusion"):
        assert found[name] == expected[name]
    losses, expected_losses = epoch_losses(out), epoch_losses(tmp_path / "alone")
    assert len(losses) == 2
    assert losses == pytest.approx(expected_losses, rel=1e-5)


def epoch_losses(folder: Path) -> list[float]:
    events = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [event["loss"] for event in events if event["event"] == "epoch"]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes in /proc, which only Linux has")
def test_the_launcher_passes_signals_on_and_ends_all_when_one_is_killed(tiny: Any, tmp_path: Path) -> None:
    out, said = tmp_path / "run", tmp_path / "said.txt"
    settings = settings_for(tiny, **{"train.epochs": 200, "train.devices": 2})
    launcher = started_alone(said, run_command, *flags(settings), "--out", str(out))
    wait_for(out, 2, launcher)
    launcher.terminate()
    assert ended([launcher]) == [128 + signal.SIGTERM]
    assert said.read_text().count("stopped by signal 15 after a checkpoint") == 1
    launcher = started_alone(said, run_command, "--resume", str(out))
    wait_for(out, newest(out) + 2, launcher)
    assert launcher.pid is not None
    os.kill(ranks_of(launcher.pid)[-1], signal.SIGKILL)
    began = time.monotonic()
    assert ended([launcher]) == [2]
    assert time.monotonic() - began < 30
    assert "was killed by signal 9" in said.read_text()


# -- refusals and estimates


def test_several_devices_need_several_processes(tiny: Any) -> None:
    with pytest.raises(ConfigError, match=r"train.devices is 2, but this is one process: use `bace run`"):
        bace.run(tiny.settings("image", method="SEQ", **{"train.devices": 2}))


def test_a_backbone_that_takes_means_over_the_batch_is_refused(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    method, _ = assemble(config_from(tiny.settings("image", method="SEQ")))
    method.model.encoder.norm = torch.nn.BatchNorm1d(16)
    monkeypatch.setattr("bace.ranks.size", lambda: 2)
    with pytest.raises(ConfigError, match=r"SEQ .* 'model.encoder.norm' takes means over a batch"):
        check_batch_norms(method)


def test_only_a_run_is_started_by_torchrun(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["compare", "--benchmark", "digits"]) == 2
    assert "it takes `bace run`, not compare" in capsys.readouterr().err


def test_the_estimate_of_activations_is_that_of_a_share(tiny: Any) -> None:
    train = config_from(tiny.settings("image", method="SEQ")).train
    whole = resources.activations(train, 8, 5, 16, 2)
    train.devices = 3
    assert resources.activations(train, 8, 5, 16, 2) == whole * 3 / 8  # a process has at most 3 of the 8 examples
