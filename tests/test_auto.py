"""Learner("auto") takes the method that measured best on data like the first call's, and keeps it."""

import json
import logging
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from checks import shown_examples, training_examples
from sklearn.base import clone

import bace
from bace.errors import ConfigError
from bace.learner.auto import CANDIDATES, MEASURED, choose_method
from bace.methods import find_method

CELLS = json.loads((Path(__file__).parents[1] / "benchmarks" / "auto.json").read_text())


def test_the_table_is_what_was_measured() -> None:
    found: dict[Any, list[float]] = defaultdict(list)
    for cell in CELLS:
        found[cell["modality"], cell["examples"], cell["method"]].append(100 * mean(cell["scores"]))
    for modality, sizes in MEASURED.items():
        sets = {cell["set"] for cell in CELLS if cell["modality"] == modality}
        for size, methods in sizes.items():
            for method, score in methods.items():
                scores = found[modality, size, method]
                assert len(scores) == len(sets), (modality, size, method)
                assert score == pytest.approx(mean(scores), abs=0.06), (modality, size, method)


@pytest.mark.parametrize("method", CANDIDATES.values(), ids=CANDIDATES)
def test_every_candidate_takes_known_classes_and_can_forget(method: dict[str, Any]) -> None:
    made = find_method(method["name"])(**{name: value for name, value in method.items() if name != "name"})
    assert made.takes_known
    assert made.cannot_forget is None


@pytest.mark.parametrize("modality", ["image", "text", "token"])
def test_the_choice_takes_the_modality_and_gives_its_reason(modality: str) -> None:
    for examples in (1, 8, 20, 100, 5000):
        method, why = choose_method(modality, examples)
        assert modality in find_method(method["name"]).modalities
        name = next(name for name, candidate in CANDIDATES.items() if candidate == method)
        assert why.startswith((f"{name}, which is best", f"{name}, which is nearly best, and fast,"))


def test_the_nearest_size_counts() -> None:
    chosen = {size: choose_method("text", size)[0] for size in sorted(MEASURED["text"])}
    assert [method["name"] for method in chosen.values()] == ["SimpleCIL", "SLDA", "SLDA"]
    for size, method in chosen.items():
        assert choose_method("text", 1.4 * size)[0] == method
    assert {choose_method("token", size)[0]["name"] for size in MEASURED["token"]} == {"ExtendNER"}  # training pays
    assert "SimpleCIL" in choose_method("vector", 3)[1]


def test_a_method_that_trains_is_chosen_only_if_it_is_clearly_better(monkeypatch: pytest.MonkeyPatch) -> None:
    for trained, chosen in ((61.9, "FeCAM"), (62.1, "ER")):
        monkeypatch.setitem(MEASURED, "image", {30: {"FeCAM": 60.0, "SLDA": 50.0, "ER": trained, "ACIL": 99.0}})
        method, why = choose_method("image", 30)
        assert method == CANDIDATES[chosen]
        assert ("nearly best" in why) == (chosen == "FeCAM")


def test_it_is_the_default_and_says_what_it_took(tiny: Any, tmp_path: Path, caplog: Any) -> None:
    learner = bace.Learner(backbone=tiny.vit)
    with caplog.at_level(logging.INFO, "bace"):
        learner.partial_fit(*training_examples(tiny, "image", (0, 1)))
    taken = learner.history_[0]["method"]
    assert learner.method is not None
    assert taken.startswith(learner.method.title)
    assert f"the method is {taken}" in caplog.text
    learner.partial_fit(*training_examples(tiny, "image", (2, 3)))
    assert "method" not in learner.history_[1]
    learner.save(tmp_path)
    loaded = bace.Learner.load(tmp_path)
    x, _ = shown_examples(tiny, "image")
    assert loaded.predict(x) == learner.predict(x)
    assert loaded.get_params()["method"] == clone(learner).get_params()["method"] == "auto"
    assert loaded.partial_fit(*training_examples(tiny, "image", (4,))).classes_ == list(tiny.classes)


def test_wrong_settings_are_refused_before_a_method_is_chosen() -> None:
    with pytest.raises(ConfigError, match="no setting 'sead'"):
        bace.Learner(sead=3)
