"""`bace inspect` shows what a model knows, since when, and what it accepts."""

import json
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from checks import training_examples
from run_folders import MATRIX, write_run

import bace
from bace.cli.main import main
from bace.core import checkpoint
from bace.learner import Learner
from bace.report.inspection import inspect_learner

OLD = Path(__file__).with_name("old")


@pytest.fixture(scope="module")
def folder(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A learner after two calls; the second brings more examples of a known class."""
    path = tmp_path_factory.mktemp("inspected") / "model"
    kept = {k: v for k, v in tiny.settings("text").items() if not k.startswith("benchmark")}
    learner = bace.Learner("er", **{**kept, "train.epochs": 3})
    learner.partial_fit(*training_examples(tiny, "text", (0, 1)))
    learner.partial_fit(*training_examples(tiny, "text", (1, 2))).save(path)
    return path


def inspected(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["inspect", str(folder), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_classes_have_their_dates_counts_and_what_is_known(folder: Path, capsys: Any) -> None:
    found = inspected(folder, capsys)
    learner = Learner.load(folder)
    assert [own["name"] for own in found["classes"]] == ["ant", "bee", "cat"]
    assert [own["call"] for own in found["classes"]] == [1, 1, 2]
    assert [own["examples"] for own in found["classes"]] == [10, 20, 10]
    assert {own["name"]: own["in_memory"] for own in found["classes"]} == learner.memory_
    age = datetime.now(UTC) - datetime.fromisoformat(found["classes"][0]["learned"])
    assert timedelta(seconds=-1) <= age < timedelta(hours=1)
    first, second = (call["per_class"] for call in learner.history_)
    for own in found["classes"]:
        assert own["known"] == second[own["name"]]
        assert own["forgotten"] == (first[own["name"]] - second[own["name"]] if own["name"] in first else None)


def test_calls_have_what_was_known_after_them(folder: Path, capsys: Any) -> None:
    found, learner = inspected(folder, capsys), Learner.load(folder)
    assert [(call["classes"], call["more_of"], call["examples"]) for call in found["calls"]] == [
        (["ant", "bee"], [], 20),
        (["bee", "cat"], ["bee"], 20),
    ]
    for call, record in zip(found["calls"], learner.history_, strict=True):
        assert (call["new"], call["old"], call["date"]) == (record["new"], record["old"], record["date"])
    lost = [own["forgotten"] for own in found["classes"][:2]]
    assert found["calls"][1]["forgetting"] == pytest.approx(sum(lost) / 2)
    assert found["calls"][0]["forgetting"] is None


def test_what_was_forgotten_is_the_best_earlier_share_less_the_last() -> None:
    from bace.report.inspection import _call, _class

    def record(**per_class: float) -> dict[str, Any]:
        own = list(per_class)
        return {"classes": own[-1:], "known": [], "examples": 1, "new": 1, "old": 1, "per_class": per_class}

    history = [record(a=0.5), record(a=0.9, b=1.0), record(a=0.6, b=1.0, c=0.2)]
    history[2]["rates"] = {"0.01": 0.25, "0.03": 0.75}
    assert _class("a", 0, history)["forgotten"] == pytest.approx(0.3)
    assert _class("b", 0, history)["forgotten"] == 0
    assert _class("c", 0, history)["forgotten"] is None
    assert _class("a", 0, history)["examples"] is None  # an old record without counts
    assert _call(3, history)["forgetting"] == pytest.approx(0.15)
    assert _call(3, history)["held_out"] == 0.75


def test_bytes_are_those_of_the_kept_examples_and_of_the_files(folder: Path, capsys: Any) -> None:
    found = inspected(folder, capsys)
    stored = checkpoint.load(folder)
    assert stored is not None
    kept = sum(tensor.nbytes for name, tensor in stored[0].items() if name.startswith("kept"))
    assert found["memory"] == {"examples": 9, "bytes": kept}  # three of each class
    assert found["bytes_on_disk"] == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_it_is_printed_as_a_table(folder: Path, capsys: Any) -> None:
    assert main(["inspect", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out  # plain in a pipe
    assert [line.split()[:2] for line in out.splitlines() if line.startswith(("ant", "bee", "cat"))] == [
        ["ant", "1"],
        ["bee", "1"],
        ["cat", "2"],
    ]
    assert "cat; more of bee" in out


def test_a_learner_of_version_0_1_is_inspected_too(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    shutil.copytree(OLD / "learner", tmp_path / "learner")
    shutil.copytree(tiny.folder / "vit", tmp_path / "vit")
    monkeypatch.chdir(tmp_path)
    found = inspected(Path("learner"), capsys)
    assert found["calls"] == []
    assert {own["learned"] for own in found["classes"]} == {None}
    assert main(["inspect", "learner"]) == 0
    assert "in memory" in capsys.readouterr().out


def test_a_forged_history_is_an_error_of_one_sentence(folder: Path) -> None:
    learner = Learner.load(folder)
    learner.history_[0]["per_class"] = {"ant": "much"}
    with pytest.raises(bace.errors.CheckpointError, match="history of the learner"):
        inspect_learner(learner, folder)


def test_a_run_has_its_tasks_and_scores(tmp_path: Path, capsys: Any) -> None:
    write_run(tmp_path / "runs" / "one")
    write_run(tmp_path / "runs" / "two", finished=False)
    found = inspected(tmp_path / "runs" / "one", capsys)
    last = len(MATRIX)
    assert [task["score_now"] for task in found["tasks"]] == [pytest.approx(score) for score in MATRIX[-1]]
    assert [task["score"] for task in found["tasks"]] == [pytest.approx(MATRIX[t][t]) for t in range(last)]
    assert found["finished"]
    assert main(["inspect", str(tmp_path / "runs" / "one")]) == 0
    assert "A_last" in capsys.readouterr().out
    both = inspected(tmp_path / "runs", capsys)
    assert [run["finished"] for run in both["runs"]] == [True, False]
    assert main(["inspect", str(tmp_path / "runs")]) == 0
    assert "two" in capsys.readouterr().out


def test_what_is_no_model_is_refused(tmp_path: Path, capsys: Any) -> None:
    assert main(["inspect", str(tmp_path)]) == 2
    assert "holds no saved learner" in capsys.readouterr().err
