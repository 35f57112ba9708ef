"""Folders written by earlier versions still open: from 0.1 a finished run, a run that was stopped in its second task,
and a learner; and a learner of format 4 that contains its encoder and has forgotten a class. They were written with the
tiny encoder of conftest.py, with six test images per class."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bace
from bace.experiments.run_folder import read_description

OLD = Path(__file__).with_name("old")
EXPECTED = json.loads((OLD / "expected.json").read_text())


@pytest.fixture
def old(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the old folders, with the pictures and the backbone that they name."""
    shutil.copytree(OLD, tmp_path, dirs_exist_ok=True)
    for name in ("pictures", "vit"):
        shutil.copytree(tiny.folder / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def agree(found: Any, expected: list[str]) -> bool:
    """One picture may differ, because another machine may round its scores the other way."""
    return sum(map(str.__ne__, map(str, found), expected)) <= 1


def test_the_model_of_an_old_run_predicts_as_it_did(old: Path) -> None:
    assert agree(bace.load("run").predict(EXPECTED["pictures"]), EXPECTED["run"])


def test_an_old_run_that_was_stopped_goes_on_to_the_same_end(old: Path) -> None:
    matrix = bace.run(resume="unfinished").matrix
    one_picture = 100 / 6 + 1e-6
    for row, expected in zip(matrix, EXPECTED["matrix"], strict=True):
        np.testing.assert_allclose(row, expected, atol=one_picture)


def test_an_old_learner_predicts_as_it_did_and_learns_on(old: Path) -> None:
    learner = bace.Learner.load("learner")
    assert agree(learner.predict(EXPECTED["pictures"]), EXPECTED["learner"])
    new = sorted(map(str, Path("pictures/train/dog").glob("*.png")))
    learner.partial_fit(new, ["dog"] * len(new))
    assert "dog" in learner.classes_


def test_a_learner_of_format_4_needs_nothing_else_and_learns_on(old: Path) -> None:
    shutil.rmtree(old / "vit")
    learner = bace.Learner.from_pretrained("learner-4")
    assert learner.classes_ == ["ant", "bee", "cat"]
    assert agree(learner.predict(EXPECTED["pictures"]), EXPECTED["learner-4"])
    new = sorted(map(str, Path("pictures/train/eel").glob("*.png")))
    assert learner.partial_fit(new, ["eel"] * len(new)).classes_[-1] == "eel"  # the class that was forgotten


def test_what_an_old_run_did_not_set_is_as_it_was_then(old: Path) -> None:
    config = read_description(old / "run").settings()
    assert config.method["kl_direction"] == "forward"
    assert (config.train.replay_o, config.checkpoint.minutes) == ("label", 0.0)
