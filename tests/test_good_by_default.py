"""A Learner with default settings learns, and says what it chose and how much it learned."""

import logging
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from checks import short, training_examples

import bace
from bace.config.parse import config_from
from bace.core.calibration import calibrate, calibration_error, fit_temperature
from bace.core.evaluation import ENOUGH_STEPS
from bace.data.batch import Batch
from bace.data.digits import load_digits
from bace.data.modalities.image import IMAGE, Images
from bace.data.modality import Table
from bace.experiments import choose
from bace.experiments.assemble import load_backbone
from bace.methods import METHODS
from bace.methods.seq import SEQ


def digits(classes: Any, count: int, *, test: bool = False) -> tuple[np.ndarray, list[int]]:
    table = load_digits()[test]
    rows = [i for d in classes for i in [i for i, name in enumerate(table.labels) if int(str(name)) == d][:count]]
    assert isinstance(table.inputs, torch.Tensor)
    return table.inputs[rows][:, 0].numpy(), [int(str(table.labels[i])) for i in rows]


@pytest.fixture(scope="module")
def taught() -> bace.Learner:
    """Two calls of two digits each, with only the required settings."""
    learner = bace.Learner("bace", backbone="digits-vit", memory=30)
    for classes in ((0, 1), (2, 3)):
        learner.partial_fit(*digits(classes, 40))
    return learner


def test_bace_learns_digits_with_nothing_set(taught: bace.Learner) -> None:
    assert taught.score(*digits(range(4), 20, test=True)) >= 0.9
    assert taught.history_[1]["new"] >= 0.9
    assert taught.history_[1]["old"] >= 0.9


def test_the_choice_is_in_the_history(taught: bace.Learner) -> None:
    first, second = taught.history_
    for call in (first, second):
        assert call["steps"] >= ENOUGH_STEPS
        assert not call["settings"]["benchmark.augment"]  # a digit that is moved by a pixel is not recognised
        assert call["rates"][f"{call['settings']['train.lr']:g}"] > max(call["rates"].values()) - choose.CLEARLY
    assert (first["classes"], second["known"]) == (["0", "1"], [])


def test_what_the_user_sets_stays(tiny: Any) -> None:
    settings = {"train.epochs": 3, "train.batch_size": 4, "train.lr": 0.02, "benchmark.augment": True}
    learner = bace.Learner("er", backbone=tiny.vit, memory=10, **settings)
    learner.partial_fit(*training_examples(tiny, "image", (0, 1)))
    assert learner.history_[0]["settings"] == {}
    assert learner.history_[0]["rates"] == {}
    assert learner.config is not None
    assert (learner.config.train.epochs, learner.config.train.batch_size, learner.config.train.lr) == (3, 4, 0.02)


def undated(learner: bace.Learner) -> list[dict[str, Any]]:
    """The history without the times of the calls."""
    return [{key: value for key, value in call.items() if key != "date"} for call in learner.history_]


def test_the_choice_is_repeatable_and_survives_saving(tiny: Any, tmp_path: Any) -> None:
    def fresh() -> bace.Learner:
        own = bace.Learner("er", backbone=tiny.bert, memory=10, **{"train.epochs": 2, "benchmark.max_length": 16})
        return own.partial_fit(*training_examples(tiny, "text", (0, 1)))

    one, other = fresh(), fresh()
    assert undated(one) == undated(other)
    one.save(tmp_path)
    loaded = bace.Learner.load(tmp_path)
    assert loaded.history_ == one.history_
    second = training_examples(tiny, "text", (2, 3))
    x, _ = training_examples(tiny, "text", (0, 1))
    assert torch.equal(loaded.partial_fit(*second).scores(x), other.partial_fit(*second).scores(x))
    assert undated(loaded) == undated(other)


@pytest.mark.parametrize(("examples", "size"), [(2000, 128), (1024, 128), (290, 32), (63, 16), (1, 16)])
def test_batches_leave_an_epoch_eight_steps_as_far_as_they_can(examples: int, size: int) -> None:
    assert choose.choose_batch_size(examples, 128) == size


def test_epochs_are_raised_to_a_floor_of_steps_and_never_lowered() -> None:
    assert choose.choose_epochs(steps=9, least=5) == 23
    assert choose.choose_epochs(steps=1000, least=5) == 5


@pytest.mark.parametrize(("pictures", "moved"), [("photographs", True), ("digits", False)])
def test_photographs_are_shown_in_random_views_and_digits_are_not(pictures: str, moved: bool) -> None:
    """A window of a large picture of one colour shows that colour."""
    if pictures == "digits":
        pixels = torch.from_numpy(digits((4, 5), 15)[0])[:, None]
    else:
        colours = np.random.default_rng(0).integers(0, 256, (30, 3, 1, 1), dtype=np.uint8)
        pixels = torch.from_numpy(colours).repeat(1, 1, 128, 128)
    config = config_from({"benchmark": "my-images", "backbone": "digits-vit"})
    encoder = load_backbone(config)
    table = Table(IMAGE, pixels, ["a"] * 30, ["a"])
    stream = bace.Learner("er")._stream(table, [["a"]], config, encoder)
    found = choose.choose_views(stream, encoder)
    assert found is not None
    assert found[0] is moved
    assert isinstance(stream.data, Images)
    assert stream.data.augment is moved


def test_of_rates_worth_about_the_same_the_first_is_taken() -> None:
    assert choose.best_rate({0.003: 0.90, 0.001: 0.91, 0.01: 0.3}) == 0.003
    assert choose.best_rate({0.003: 0.50, 0.001: 0.91, 0.0003: 0.90}) == 0.001


@pytest.mark.parametrize("method", [method.title for method in METHODS if "image" in method.modalities])
def test_a_trial_leaves_the_method_as_it_was(tiny: Any, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """A learner that tries several rates and takes the first learns like one that was given this rate."""
    monkeypatch.setattr(choose, "FIRST_RATE", {"sgd": 0.001})
    monkeypatch.setattr(choose, "best_rate", lambda tried: 0.001)  # also the default, for calls without a search
    monkeypatch.setattr(choose, "TRIAL_STEPS", 2)
    base = {"backbone": tiny.vit, "memory": 10, "train.epochs": 1, "train.batch_size": 8}
    searched = bace.Learner(short(method, 1, 1), **base)
    for classes in ((0, 1), (2,)):
        searched.partial_fit(*training_examples(tiny, "image", classes))
    assert all(len(call["rates"]) in (0, 3) for call in searched.history_)
    told = bace.Learner(short(method, 1, 1), **base, **{"train.lr": 0.001})
    for classes in ((0, 1), (2,)):
        told.partial_fit(*training_examples(tiny, "image", classes))
        assert told.history_[-1]["rates"] == {}
    x, _ = training_examples(tiny, "image", (0, 1, 2))
    assert torch.equal(torch.as_tensor(searched.scores(x)), torch.as_tensor(told.scores(x)))


# -- warnings when it did not learn


def test_a_call_that_taught_nothing_is_warned_of(tiny: Any) -> None:
    settings = {"backbone": tiny.vit, "memory": 10, "train.lr": 0.0, "train.epochs": 1, "train.batch_size": 8}
    learner = bace.Learner("er", **settings)
    with pytest.warns(UserWarning, match=r"this call was hardly learned.*train\.epochs, now 1"):
        learner.partial_fit(*training_examples(tiny, "image", (0, 1, 2, 3)))
    assert learner.history_[0]["new"] < 0.6
    assert learner.history_[0]["old"] is None


class Alarmist(SEQ):
    """Takes every word for an entity of its newest type."""

    title = "Alarmist"

    def predict(self, batch: Batch, scorer: str | None = None) -> torch.Tensor:
        scores = super().predict(batch)
        return F.one_hot(scores.new_full((len(scores),), self.now.known or 1, dtype=torch.int64), scores.shape[1])


def test_false_alarms_in_sentences_count_as_not_learned(tiny: Any) -> None:
    settings = {"backbone": tiny.bert, "train.lr": 0.0, "train.epochs": 1, "train.batch_size": 8}
    learner = bace.Learner(f"{__name__}.Alarmist", **settings)
    x = [["Ada", "met", "Bob", "at", "home"], ["Eve", "sleeps", "here", "and", "there"]]
    y = [["B-p", "O", "B-p", "O", "O"], ["B-p", "O", "O", "O", "O"]]
    with pytest.warns(UserWarning, match="this call was hardly learned"):
        learner.partial_fit(x, y)
    assert learner.history_[0]["new"] == pytest.approx(2 * 3 / (3 + 10))  # all 3 are found, among 10 words


class Oracle(SEQ):
    """Knows the first, third and fifth word of every sentence, as far as their types were taught."""

    title, uses_memory = "Oracle", True

    def predict(self, batch: Batch, scorer: str | None = None) -> torch.Tensor:
        scores, names = super().predict(batch), self.stream.names
        assert batch.at is not None
        types = [names.index(f"B-{kind}") if f"B-{kind}" in names else 0 for kind in "pcd"]
        at_token = torch.tensor([0, types[0], 0, types[1], 0, types[2], 0])  # token 0 begins the sentence
        return F.one_hot(at_token[batch.at[:, 1]], scores.shape[1])


def test_entities_that_a_task_did_not_label_are_no_false_alarms(tiny: Any) -> None:
    settings = {"backbone": tiny.bert, "memory": 9, "train.lr": 0.0, "train.epochs": 1, "train.batch_size": 2}
    learner = bace.Learner(f"{__name__}.Oracle", **settings)
    x = [[f"w{i}", "w50", f"w{10 + i}", "w51", f"w{20 + i}"] for i in range(4)]
    for place, kind in enumerate("pcd"):
        tags = ["O"] * 5
        tags[2 * place] = f"B-{kind}"
        learner.partial_fit(x, [tags] * 4)
        assert learner.history_[-1]["new"] == 1
    assert learner.history_[-1]["old"] == 1


def test_forgetting_is_warned_of_with_a_remedy(tiny: Any) -> None:
    settings = {"backbone": tiny.vit, "memory": 10, "train.lr": 0.05, "train.epochs": 20, "train.batch_size": 8}
    learner = bace.Learner("er", **settings, **{"train.replay_ratio": 0})
    learner.partial_fit(*training_examples(tiny, "image", (0, 1)))
    with pytest.warns(UserWarning, match="after this call, .* old examples in memory .*larger memory"):
        learner.partial_fit(*training_examples(tiny, "image", (2, 3)))


def test_an_epoch_of_one_step_is_warned_of(tiny: Any) -> None:
    learner = bace.Learner("er", backbone=tiny.vit, memory=10, **{"train.batch_size": 64, "train.epochs": 3})
    with pytest.warns(UserWarning, match="an epoch of this call is one step: lower train.batch_size .now 64"):
        learner.partial_fit(*training_examples(tiny, "image", (0, 1)))


def test_a_call_that_went_well_says_so_in_one_line_and_warns_of_nothing(caplog: Any) -> None:
    with warnings.catch_warnings(), caplog.at_level(logging.INFO, "bace"):
        warnings.simplefilter("error")
        bace.Learner("slda", backbone="digits-vit").partial_fit(*digits((0, 1), 10))
    (line,) = [record.message for record in caplog.records if record.name == "bace"]
    assert line.startswith("20 examples of 2 classes: statistics")
    assert "100% of the new" in line


# -- probabilities


def test_probabilities_are_in_the_order_of_the_classes_and_sum_to_one(taught: bace.Learner) -> None:
    x, _ = digits(range(4), 5, test=True)
    probabilities = taught.predict_proba(x)
    np.testing.assert_allclose(probabilities.sum(1), 1)
    assert [taught.classes_[i] for i in probabilities.argmax(1)] == taught.predict(x)
    assert taught.history_[-1]["temperature"] > 0


def test_a_network_that_has_diverged_has_no_temperature() -> None:
    assert calibrate(torch.full((4, 3), torch.nan), torch.tensor([0, 1, 2, 0])) == {}


def test_the_temperature_undoes_a_scale() -> None:
    """If calibrated scores are multiplied by ten, the temperature is ten, up to the step of the search."""
    rng = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(4000, 3, generator=rng, dtype=torch.float64)
    targets = torch.multinomial(logits.softmax(1), 1, generator=rng)[:, 0]
    temperature = fit_temperature(10 * logits, targets)
    assert temperature == pytest.approx(10, rel=0.2)
    before, after = (calibration_error((10 * logits / t).softmax(1), targets) for t in (1, temperature))
    assert after < 0.03 < before


def test_the_calibration_error_of_a_hand_made_case() -> None:
    probabilities = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6], [0.4, 0.6]])
    error = calibration_error(probabilities, torch.tensor([0, 1, 1, 1]))
    assert error == pytest.approx(0.5 * abs(0.5 - 0.9) + 0.5 * abs(1 - 0.6))


def test_scores_that_are_all_right_give_a_finite_temperature() -> None:
    scores = torch.eye(3).repeat(4, 1) * 5
    temperature = fit_temperature(scores, torch.arange(3).repeat(4))
    assert 0.1 < temperature < 10  # one of n + 2 counts as wrong, so the result is not the smallest value of the search
    assert fit_temperature(torch.ones(4, 1), torch.zeros(4, dtype=torch.int64)) == 1  # one class leaves nothing to fit


def test_classes_that_are_far_off_do_not_change_the_temperature() -> None:
    rng = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(200, 3, generator=rng, dtype=torch.float64)
    far = torch.full((200, 5), -1000.0, dtype=torch.float64)
    targets = logits.argmax(1)
    assert fit_temperature(torch.cat([logits, far], 1), targets) == fit_temperature(logits, targets) < 2


def test_what_looks_like_no_known_class_is_unknown(taught: bace.Learner) -> None:
    known, _ = digits(range(4), 10, test=True)
    assert taught.predict(known, reject=0.0) == taught.predict(known)
    strange, _ = digits((4, 5, 6, 7), 10, test=True)
    threshold = float(np.quantile(taught.predict_proba(known).max(1), 0.2))
    rejected = [
        np.mean([label == "unknown" for label in taught.predict(x, reject=threshold)]) for x in (known, strange)
    ]
    assert rejected[0] <= 0.2 < rejected[1]
