"""bace tune sees only the training examples of the first tasks, continues where it stopped, and writes settings that a
run accepts."""

import itertools
import shutil
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import yaml

import bace
from bace.cli.main import main
from bace.errors import ConfigError, DataError, StreamRefused
from bace.experiments.tune import Search, annotation, range_around, space_of, trainer_of, tune
from bace.methods import find_method
from bace.models.frozen_prefix import PrefixCaches

optuna = pytest.importorskip("optuna")
FAST = {"train.epochs": 1, "train.batch_size": 16, "seed": 3}


def search(tiny: Any, *wanted: str, method: str = "ER", **changes: object) -> Search:
    return Search(bace.config.parse.flatten(tiny.settings("image", method=method, **{**FAST, **changes})), wanted)


def spoilt(tiny: Any, folder: Path) -> str:
    """The pictures, in which every file of the test split and of the last task's classes is spoilt, so that opening one
    is an error."""
    shutil.copytree(tiny.folder / "pictures", folder)
    bad = [*folder.glob("test/*/*"), *folder.glob("train/dog/*"), *folder.glob("train/eel/*")]
    assert len(bad) > 10
    for path in bad:
        path.write_bytes(b"spoilt")
    return str(folder)


def test_a_search_opens_no_test_example_and_none_of_a_later_task(tiny: Any, tmp_path: Path) -> None:
    path = {"benchmark.path": spoilt(tiny, tmp_path / "pictures")}
    found = tune(search(tiny, "train.lr", **path), tmp_path / "out", trials=2)
    assert found.trials == 2
    with pytest.raises(DataError, match="cannot be decoded"):  # an ordinary run opens them
        bace.run(search(tiny, **path).config({}))


def test_the_stream_of_a_trial_holds_training_examples_alone_and_refuses_what_is_held_out(tiny: Any) -> None:
    trainer = trainer_of(search(tiny), {}, PrefixCaches())
    stream = trainer.stream
    _, whole = bace.experiments.assemble.assemble(search(tiny).config({}))
    assert [task.name for task in stream] == [task.name for task in whole[:2]]
    assert len(stream.data) == sum(len(task.train) for task in whole[:2])  # it holds no test example
    for ours, theirs in zip(stream, whole, strict=False):
        assert len(ours.train) + len(ours.test) == len(theirs.train)
        assert len(ours.test) == round(0.2 * len(theirs.train))
        assert not set(ours.train.tolist()) & set(ours.test.tolist())
        shown = [stream.data.inputs(ids, None, torch.device("cpu"))["pixel_values"] for ids in (ours.train, ours.test)]
        known = whole.data.inputs(theirs.train, None, torch.device("cpu"))["pixel_values"]
        assert {p.tobytes() for p in torch.cat(shown).numpy()} == {p.tobytes() for p in known.numpy()}
    trainer.enter(stream[0])
    with pytest.raises(StreamRefused):
        stream.batch(stream[0].test[:1])
    with pytest.raises(StreamRefused):
        stream.batch(stream[1].train[:1])


def test_a_trial_reads_held_out_examples_for_evaluation_alone(tiny: Any, tmp_path: Path) -> None:
    tune(search(tiny, "train.lr"), tmp_path, trials=1)
    [trial] = load(tmp_path).trials
    assert trial.user_attrs["licences"] == ["evaluation"]


def load(folder: Path) -> Any:
    return optuna.load_study(study_name="bace", storage=f"sqlite:///{folder / 'study.db'}")


def test_the_first_trial_has_the_settings_as_they_are_and_scores_what_its_run_scores(tiny: Any, tmp_path: Path) -> None:
    asked = search(tiny, "train.lr", "reduction")
    tune(asked, tmp_path, trials=1)
    [trial] = load(tmp_path).trials
    assert trial.params == {"train.lr": 0.01, "method.reduction": "sum"}
    rows = trainer_of(asked, {}, PrefixCaches()).run().matrix
    assert trial.value == pytest.approx((rows[0][0] + sum(rows[1]) / 2) / 2, abs=1e-9)
    assert len(rows) == 2


def test_a_study_goes_on_where_it_stopped_and_repeats_what_was_cut_off(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = search(tiny, "train.lr")
    tune(asked, tmp_path, trials=2)
    with monkeypatch.context() as patch:
        patch.setattr("bace.core.trainer.Trainer.run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tune(asked, tmp_path, trials=4)
    cut = load(tmp_path).trials[-1]
    assert cut.state == optuna.trial.TrialState.RUNNING
    assert tune(asked, tmp_path, trials=4).trials == 4
    study = load(tmp_path)
    assert [trial.params for trial in study.trials].count(cut.params) == 2
    rates = [trial.params["train.lr"] for trial in study.trials if trial.number != cut.number]
    assert len(set(rates)) == 4  # no trial repeats another
    assert tune(asked, tmp_path, trials=4).trials == 4  # nothing is left to do
    with pytest.raises(ConfigError, match="other settings"):
        tune(search(tiny, "train.lr", **{"train.epochs": 2}), tmp_path, trials=5)


def interrupt(_: object) -> None:
    raise KeyboardInterrupt


def test_the_winner_is_a_file_that_run_takes_with_all_tasks(
    tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = tiny.settings("image", method="ER", **FAST)
    flags = list(itertools.chain.from_iterable((f"--{key}", str(value)) for key, value in given.items()))
    words = ["--search", "train.lr=0.001:0.1", "reduction=sum,joint", "--trials", "3", "--out", str(tmp_path / "t")]
    assert main(["tune", *flags, *words]) == 0
    said = capsys.readouterr().out
    best = load(tmp_path / "t").best_trial
    assert f"best of 3 trials: A_avg {best.value:.2f}" in said
    written = yaml.safe_load((tmp_path / "t" / "best.yaml").read_text())
    assert written["train"]["lr"] == best.params["train.lr"]
    assert written["method"]["reduction"] == best.params["method.reduction"]
    assert main(["run", "--config", str(tmp_path / "t" / "best.yaml"), "--out", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run" / "matrix.csv").read_text().splitlines()[0] == "task,1,2,3"


def test_a_trial_that_is_worse_than_most_is_stopped_after_its_first_task(tiny: Any, tmp_path: Path) -> None:
    asked = search(tiny, "train.lr=0:0.02")
    tune(asked, tmp_path, trials=1)
    study = load(tmp_path)
    for _ in range(5):  # five perfect trials
        trial = study.ask(space_of(asked))
        trial.report(100.0, step=1)
        study.tell(trial, 100.0)
    tune(asked, tmp_path, trials=7)
    last = load(tmp_path).trials[-1]
    assert last.state == optuna.trial.TrialState.PRUNED
    assert list(last.intermediate_values) == [1]


def test_values_that_do_not_go_together_end_their_trial_alone(tiny: Any, tmp_path: Path) -> None:
    asked = search(tiny, "r_stable=0.7,1.5", method="CLS-ER")
    found = tune(asked, tmp_path, trials=6)
    assert found.values == {"method.r_stable": 0.7}
    said = {trial.params["method.r_stable"]: trial.user_attrs.get("refused") for trial in load(tmp_path).trials}
    assert said[0.7] is None
    assert "r_stable (1.5)" in said[1.5]


def test_the_space_is_the_annotated_hyper_parameters_with_rate_and_epochs(tiny: Any) -> None:
    space = space_of(search(tiny, method="LwF"))
    assert set(space) == {"train.lr", "train.epochs", "method.lambda_kd", "method.tau", "method.span"}
    assert (space["method.tau"].low, space["method.tau"].high, space["method.tau"].log) == (0.2, 20.0, True)
    assert space["method.span"].choices == ("seen", "new")
    assert annotation(find_method("LUCIR"), "method.mode") == annotation(find_method("ER"), "method.mode")
    assert annotation(find_method("ER"), "method.mode") == Literal["batch", "concat"]


@pytest.mark.parametrize(
    ("value", "low", "high"), [(0.5, 0.05, 1.0), (5.0, 0.5, 50.0), (0.0, 0.0, 1.0), (1, 1, 4), (20, 5, 80)]
)
def test_the_range_around_a_number(value: float, low: float, high: float) -> None:
    found = range_around(value, None)
    assert (found.low, found.high) == (low, high)
    assert range_around(None, None) is None
    assert range_around(0, None) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"first_tasks": 4}, "--first_tasks is 4: the benchmark has 1 to 3"),
        ({"held_out": 1.0}, "--held_out is 1.0"),
        ({"wanted": ("alhpa",)}, "no setting 'alhpa'"),
        ({"wanted": ("train.lr=a:b",)}, "'train.lr=a:b' is not of the form"),
        ({"wanted": ("train.clip",)}, "no range around train.clip None: write train.clip=LOW:HIGH"),
    ],
)
def test_what_cannot_be_searched_is_refused_before_the_first_trial(
    tiny: Any, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    asked = Search(search(tiny).given, **changes)
    with pytest.raises(ConfigError, match=reason):
        tune(asked, tmp_path / "out", trials=1)
    assert not (tmp_path / "out").exists()
