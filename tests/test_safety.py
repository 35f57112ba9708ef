"""Files from strangers run no code, changed files are noticed, a user's own files in a folder are kept, and a run that
is asked to stop leaves a checkpoint."""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import processes
import pytest
import torch

import bace
from bace.cli.main import main
from bace.core import checkpoint
from bace.errors import CheckpointError, ConfigError
from bace.methods import find_method

EVIL = """
from pathlib import Path
from bace.methods.seq import SEQ
Path("it ran").touch()
class Mine(SEQ):
    pass
"""


@pytest.fixture
def run(tiny: Any, tmp_path: Path) -> Path:
    """A finished run."""
    bace.run(tiny.settings("image", method="SEQ", **{"train.epochs": 1}), out=tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def theirs(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stranger's folder in the working folder, with a module beside the files that name it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    for name in [name for name in sys.modules if name.split(".")[0] == "theirs"]:
        monkeypatch.delitem(sys.modules, name)
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "m.py").write_text(EVIL)
    return folder


def edited(path: Path, change: Any) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def with_sums(folder: Path) -> None:
    """Write checksums of the current files, as a forger could."""
    sums = {name: checkpoint._sha256(folder / name) for name in ("state.safetensors", "state.json")}
    (folder / "sha256.json").write_text(json.dumps(sums))


def name_their_method(config: dict[str, Any]) -> None:
    config["method"] = {"name": "theirs.m.Mine", "span": "seen"}


# -- 1: no code runs


def test_a_run_folder_of_a_stranger_runs_no_code(run: Path, theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(run, theirs, dirs_exist_ok=True)
    edited(theirs / "run.json", lambda about: name_their_method(about["config"]))
    newest = sorted((theirs / "checkpoints").iterdir())[-1]
    edited(newest / "state.json", lambda state: name_their_method(state["run"]["config"]))
    with_sums(newest)
    picture = next((theirs / "m.py").parent.iterdir())
    with pytest.raises(ConfigError, match=r"imports the module 'theirs\.m'.*--trust"):
        bace.load("theirs")
    assert main(["predict", "theirs", str(picture)]) == 2
    assert main(["report", "theirs"]) in (0, 2)
    (theirs / "metrics.json").unlink()
    with pytest.raises(ConfigError, match="trust"):
        bace.run(resume="theirs")
    assert main(["run", "--resume", "theirs"]) == 2
    assert "theirs.m" in capsys.readouterr().err
    assert not Path("it ran").exists()
    assert "theirs.m" not in sys.modules


def test_a_learner_of_a_stranger_runs_no_code(tiny: Any, theirs: Path) -> None:
    learner = bace.Learner("SEQ", backbone=tiny.vit, **{"train.epochs": 1})
    learner.partial_fit(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), ["a", "a", "b", "b"])
    learner.save("saved")
    edited(Path("saved/00000001/state.json"), lambda state: name_their_method(state["given"]))
    with_sums(Path("saved/00000001"))
    with pytest.raises(ConfigError, match="trust"):
        bace.Learner.load("saved")
    assert not Path("it ran").exists()
    assert bace.Learner.load("saved", trust=True).classes_ == ["a", "b"]
    assert Path("it ran").exists()


def test_a_settings_file_imports_nothing_without_consent(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("theirs.yaml").write_text("method: theirs.m.Mine")
    assert main(["run", "--config", "theirs.yaml", "--print_config"]) == 2
    assert main(["compare", "--config", "theirs.yaml"]) == 2
    assert not Path("it ran").exists()
    assert main(["run", "--config", "theirs.yaml", "--trust", "--print_config"]) == 0
    assert "theirs.m.Mine" in capsys.readouterr().out


def test_a_run_with_a_method_of_ones_own_is_opened_with_consent(
    tiny: Any, theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {**tiny.settings("image"), "train.epochs": 1}
    words = [word for key, value in settings.items() for word in (f"--{key}", json.dumps(value).strip('"'))]
    assert main(["run", *words, "--method", "theirs.m.Mine", "--out", "mine"]) == 0  # a typed name is consent enough
    for name in ("theirs.m", "theirs"):
        del sys.modules[name]
    with pytest.raises(ConfigError, match="trust"):
        bace.load("mine")
    picture = str(next((tiny.folder / "pictures" / "test" / tiny.classes[0]).iterdir()))
    assert main(["predict", "mine", picture]) == 2
    assert main(["predict", "mine", picture, "--trust"]) == 0
    assert bace.load("mine").classes_ == list(tiny.classes)  # the module is already imported


def test_a_class_that_is_not_a_method_is_refused(theirs: Path) -> None:
    with pytest.raises(ConfigError, match=r"not a bace\.Method"):
        find_method("pathlib.Path")


# -- 2: files that bace did not write stay


def test_saving_a_learner_deletes_nothing_of_the_users(tiny: Any, tmp_path: Path) -> None:
    learner = bace.Learner("SEQ", backbone=tiny.vit, **{"train.epochs": 1})
    learner.partial_fit(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), ["a", "a", "b", "b"])
    for name in ("20240101", "7"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        (tmp_path / "photos" / name / "me.jpg").touch()
    with pytest.raises(ConfigError, match="not empty and holds no saved learner"):
        learner.save(tmp_path / "photos")
    for _ in range(3):  # a folder of ours in which the user also keeps files
        learner.save(tmp_path / "mine")
        (tmp_path / "mine" / "20240101").mkdir(exist_ok=True)
        (tmp_path / "mine" / "20240101" / "me.jpg").touch()
        (tmp_path / "mine" / "notes.txt").touch()
    names = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert {"photos/20240101/me.jpg", "photos/7/me.jpg", "mine/20240101/me.jpg", "mine/notes.txt"} <= names
    assert sorted(p.parent.name for p in tmp_path.rglob("sha256.json")) == ["00000003"]  # the newest of ours
    assert bace.Learner.load(tmp_path / "mine").classes_ == ["a", "b"]


def test_a_checkpoint_folder_in_which_a_user_put_something_keeps_that(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"a": torch.zeros(1)}, {}, keep=1)
    (tmp_path / "00000001" / "notes.txt").touch()
    checkpoint.save(tmp_path, {"a": torch.ones(1)}, {}, keep=1)
    assert [path.name for path in (tmp_path / "00000001").iterdir()] == ["notes.txt"]
    (tmp_path / "²").mkdir()  # a digit for Python, but not a number
    (tmp_path / "00000009").touch()
    found = checkpoint.load(tmp_path)
    assert found is not None
    assert found[0]["a"].item() == 1


# -- 4: changes are noticed


def test_a_changed_run_json_is_refused_with_what_changed(tiny: Any, run: Path) -> None:
    edited(run / "run.json", lambda about: about["tasks"][0]["classes"].reverse())
    with pytest.raises(CheckpointError, match=r"was changed since the last checkpoint \(tasks\).*--force"):
        bace.load(str(run))
    assert bace.load(str(run), force=True).classes_[:2] == list(reversed(tiny.classes[:2]))


def test_a_run_is_not_resumed_with_other_settings(tiny: Any, tmp_path: Path) -> None:
    settings = tiny.settings("image", method="SEQ", **{"train.epochs": 1})
    bace.run(settings, out=tmp_path / "run")
    newest = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    shutil.rmtree(newest)  # as if the run had stopped after the second task
    (tmp_path / "run" / "metrics.json").unlink()
    edited(tmp_path / "run" / "run.json", lambda about: about["config"]["train"].update(lr=0.5))
    with pytest.raises(CheckpointError, match=r"config\.train\.lr"):
        bace.run(resume=tmp_path / "run")
    assert bace.run(resume=tmp_path / "run", force=True).matrix


def test_a_run_folder_from_before_run_json_was_noted_still_opens(run: Path, tiny: Any) -> None:
    newest = sorted((run / "checkpoints").iterdir())[-1]
    edited(newest / "state.json", lambda state: state.pop("run"))
    with_sums(newest)
    assert bace.load(str(run)).classes_ == list(tiny.classes)


# -- 5: requests to stop


def test_a_run_that_is_asked_to_stop_saves_and_says_how_to_continue(tiny: Any, tmp_path: Path) -> None:
    """The run keeps the default, which writes no checkpoints by steps."""
    settings = tiny.settings("image", method="ER", **{"train.epochs": 40, "train.threads": 1})
    words = [word for key, value in settings.items() for word in (f"--{key}", json.dumps(value).strip('"'))]
    for number, wish in enumerate((signal.SIGTERM, signal.SIGHUP)):
        folder, err = tmp_path / f"run {number}", tmp_path / f"said {number}"
        child = processes.start(processes.BACE, "run", *words, "--out", str(folder), err=err)
        log, end = folder / "log.jsonl", time.monotonic() + 90
        while not (log.exists() and log.read_text().count("epoch") > 2):
            assert child.is_alive()
            assert time.monotonic() < end
            time.sleep(0.01)
        assert child.pid is not None
        os.kill(child.pid, wish)
        child.join(30)
        assert child.exitcode == 128 + wish
        assert f"--resume {folder}" in err.read_text()
        found = checkpoint.load(folder / "checkpoints")
        assert found is not None
        assert found[1]["at"]["phase"] == "train"  # in the middle of a task
    straight = bace.run(settings, out=tmp_path / "straight")
    assert bace.run(resume=folder).matrix == straight.matrix
    assert (folder / "log.jsonl").read_text() == (tmp_path / "straight" / "log.jsonl").read_text()


def test_checkpoints_are_written_by_time(tiny: Any, tmp_path: Path) -> None:
    every_step = {"checkpoint.minutes": 1e-9, "checkpoint.keep": 1000, "train.epochs": 1}
    for name, changes in (("by time", every_step), ("by task", {**every_step, "checkpoint.minutes": 0})):
        bace.run(tiny.settings("image", method="SEQ", **changes), out=tmp_path / name)
    counts = [len(list((tmp_path / name / "checkpoints").iterdir())) for name in ("by time", "by task")]
    assert counts[1] == 3
    assert counts[0] > 10


# -- 6: links and short logs


@pytest.mark.parametrize("name", [".lock", "log.jsonl", ".run.json.unfinished", ".metrics.json.unfinished"])
def test_nothing_is_written_through_a_symbolic_link(tiny: Any, tmp_path: Path, name: str) -> None:
    settings = tiny.settings("image", method="SEQ", **{"train.epochs": 1})
    bace.run(settings, out=tmp_path / "run")
    (tmp_path / "run" / "metrics.json").unlink()
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "run" / name).unlink(missing_ok=True)
    (tmp_path / "run" / name).symlink_to(tmp_path / "precious")
    if name.endswith(".unfinished"):
        bace.run(resume=tmp_path / "run")  # the link is replaced, not followed
    else:
        with pytest.raises((ConfigError, CheckpointError), match=r"cannot be written|could not write"):
            bace.run(resume=tmp_path / "run")
    assert (tmp_path / "precious").read_text() == "mine"


def test_no_checkpoint_is_written_into_a_folder_that_a_link_leads_to(run: Path, tmp_path: Path) -> None:
    (run / "metrics.json").unlink()
    (run / "checkpoints").rename(tmp_path / "elsewhere")
    (run / "checkpoints").symlink_to(tmp_path / "elsewhere")
    before = sorted(path.name for path in (tmp_path / "elsewhere").iterdir())
    with pytest.raises(ConfigError, match="is a symbolic link"):
        bace.run(resume=run)
    assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir()) == before


def test_a_log_that_lost_its_end_is_not_padded(tiny: Any, tmp_path: Path) -> None:
    settings = tiny.settings("image", method="SEQ", **{"train.epochs": 1})
    bace.run(settings, out=tmp_path / "run")
    (tmp_path / "run" / "metrics.json").unlink()
    log = tmp_path / "run" / "log.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:2]))
    with pytest.warns(UserWarning, match="was changed after the run wrote it"):
        bace.run(resume=tmp_path / "run")
    assert b"\0" not in log.read_bytes()
    assert [json.loads(line) for line in log.read_text().splitlines()] == [json.loads(line) for line in lines[:2]]
