"""Learner behaves like scikit-learn's estimators and accepts labelled data in many forms."""

from typing import Any

import numpy as np
import pytest
from checks import shown_examples, training_examples
from sklearn.base import clone

import bace
from bace.errors import ConfigError, DataError

QUICK = {"train.epochs": 2, "train.batch_size": 8, "train.lr": 0.01, "memory": 10}


@pytest.fixture
def fresh(tiny: Any) -> bace.Learner:
    return bace.Learner("er", backbone=tiny.vit, **QUICK)


def test_parameters_are_what_was_given_and_a_clone_has_the_same(fresh: bace.Learner, tiny: Any) -> None:
    assert fresh.get_params() == {"method": "er", "backbone": tiny.vit, **QUICK}
    fresh.partial_fit(*training_examples(tiny, "image", (0, 1)))
    copy = clone(fresh)
    assert copy.get_params() == fresh.get_params()
    assert copy.classes_ == []


def test_other_parameters_are_checked_and_start_over(fresh: bace.Learner, tiny: Any) -> None:
    fresh.partial_fit(*training_examples(tiny, "image", (0, 1)))
    assert fresh.set_params(seed=3) is fresh
    assert fresh.get_params()["seed"] == 3
    assert fresh.classes_ == []
    with pytest.raises(ConfigError, match="no setting 'sead'"):
        fresh.set_params(sead=3)


def test_fit_starts_over(fresh: bace.Learner, tiny: Any) -> None:
    fresh.partial_fit(*training_examples(tiny, "image", (0, 1)))
    x, y = training_examples(tiny, "image", (2, 3))
    assert fresh.fit(x, y) is fresh
    assert fresh.classes_ == sorted(set(y))
    again = clone(fresh).fit(x, y)
    np.testing.assert_array_equal(again.decision_function(x), fresh.decision_function(x))


def test_fit_that_fails_changes_nothing(fresh: bace.Learner, tiny: Any) -> None:
    x, y = training_examples(tiny, "image", (0, 1))
    before = fresh.fit(x, y).decision_function(x)
    with pytest.raises(DataError):
        fresh.fit(x, y[:-1])
    np.testing.assert_array_equal(fresh.decision_function(x), before)


def test_scores_probabilities_and_accuracy_agree(fresh: bace.Learner, tiny: Any) -> None:
    x, y = training_examples(tiny, "image", (0, 1))
    fresh.fit(x, y)
    assert fresh.decision_function(x).shape == fresh.predict_proba(x).shape == (len(x), 2)
    right = [one == other for one, other in zip(fresh.predict(x), y, strict=True)]
    assert fresh.score(x, y) == np.mean(right)


def test_memory_counts_examples_by_class(fresh: bace.Learner, tiny: Any) -> None:
    fresh.fit(*training_examples(tiny, "image", (0, 1)))
    assert fresh.memory_ == dict.fromkeys(fresh.classes_, 5)


def test_words_have_scores_of_their_own(tiny: Any) -> None:
    own = bace.Learner("er", backbone=tiny.bert, **QUICK).fit(*training_examples(tiny, "token", (0, 1)))
    x, y = training_examples(tiny, "token", (0, 1))
    assert 0 <= own.score(x, y) <= 1
    assert set(own.memory_) == set(own.classes_)
    with pytest.raises(ConfigError, match="scores for each word"):
        own.predict_proba(x)


def test_it_shows_what_it_is_and_escapes_names(fresh: bace.Learner, tiny: Any) -> None:
    assert repr(fresh).startswith("Learner('er', backbone=")
    x, _ = training_examples(tiny, "image", (0, 1))
    fresh.fit(x, ["<b>"] * 10 + ["bee"] * 10)
    assert "2 classes in 1 calls" in repr(fresh)
    assert "<td>&lt;b&gt;, bee</td><td>20</td>" in fresh._repr_html_()


# -- known classes


def test_more_examples_of_a_known_class_beside_a_new_one(fresh: bace.Learner, tiny: Any) -> None:
    fresh.fit(*training_examples(tiny, "image", (0, 1)))
    x, y = training_examples(tiny, "image", (1, 2))
    fresh.partial_fit(x, y)
    assert fresh.classes_ == ["ant", "bee", "cat"]
    assert fresh.history_[1]["known"] == ["bee"]
    assert fresh.memory_ == {"ant": 3, "bee": 3, "cat": 3}


def test_more_examples_enter_the_statistics_as_if_they_had_come_at_once(tiny: Any) -> None:
    """SLDA's means equal the means of all examples, and ACIL's weights equal ridge regression on all of them."""
    x, y = training_examples(tiny, "image", (0, 1))
    half = np.arange(len(x)) % 2 == 0
    labels = np.array(y)
    for method in ({"name": "slda", "exact": True}, {"name": "acil", "expansion": 32}):
        once, twice = (bace.Learner(method, backbone=tiny.vit) for _ in range(2))
        once.fit(x, y)
        twice.fit(x[half], labels[half].tolist()).partial_fit(x[~half], labels[~half].tolist())
        np.testing.assert_allclose(twice.decision_function(x), once.decision_function(x), rtol=1e-4, atol=1e-4)


def test_a_method_that_cannot_says_so_by_name(tiny: Any) -> None:
    own = bace.Learner({"name": "seq", "span": "new"}, backbone=tiny.vit, **QUICK)
    own.fit(*training_examples(tiny, "image", (0, 1)))
    before = own.decision_function(shown_examples(tiny, "image")[0])
    with pytest.raises(DataError, match=r"SEQ with these settings cannot.*or take one of ACIL, BaCE"):
        own.partial_fit(*training_examples(tiny, "image", (1, 2)))
    np.testing.assert_array_equal(own.decision_function(shown_examples(tiny, "image")[0]), before)


# -- labelled data


def test_a_folder_of_class_folders(fresh: bace.Learner, tiny: Any) -> None:
    fresh.partial_fit(tiny.folder / "pictures")
    assert fresh.classes_[:2] == ["ant", "bee"]


def test_tables_of_texts_with_labels(tiny: Any, tmp_path: Any) -> None:
    import datasets
    import pandas

    x, y = training_examples(tiny, "text", (0, 1))
    frame = pandas.DataFrame({"text": x, "label": y})
    frame.to_csv(tmp_path / "texts.csv", index=False)
    given = [
        (frame,),
        (datasets.Dataset.from_pandas(frame),),
        (frame.to_dict("records"),),
        (str(tmp_path / "texts.csv"),),
        (frame["text"], frame["label"]),
    ]
    scores = []
    for data in given:
        own = bace.Learner("slda", backbone=tiny.bert).partial_fit(*data)
        assert own.classes_ == sorted(set(y))
        scores.append(own.decision_function(x))
    for other in scores[1:]:
        np.testing.assert_allclose(other, scores[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("modality", ["image", "text", "token"])
def test_data_with_labels_are_scored_as_they_are_learned(tiny: Any, modality: str) -> None:
    """A folder, a CSV and a CoNLL file."""
    backbone = tiny.vit if modality == "image" else tiny.bert
    own = bace.Learner("simplecil", backbone=backbone).partial_fit(*training_examples(tiny, modality, range(5)))
    x, y = training_examples(tiny, modality, range(5))
    folder = {"image": "pictures", "text": "texts", "token": "sentences"}[modality]
    assert own.score(tiny.folder / folder) == own.score(x, y)
    with pytest.raises(DataError, match="give the labels as the second argument"):
        own.score(list(x))


def test_of_a_dict_of_splits_one_is_to_be_given(tiny: Any, fresh: bace.Learner) -> None:
    import datasets

    one = datasets.Dataset.from_dict({"text": ["w1", "w2"], "label": ["a", "b"]})
    splits = datasets.DatasetDict({"train": one, "test": one})
    own = bace.Learner("simplecil", backbone=tiny.bert).fit(splits["train"])
    for ask in (own.predict, own.partial_fit, own.fit):
        with pytest.raises(
            DataError, match=r"DatasetDict has several splits \(train, test\): .* such as data\['train'\]"
        ):
            ask(splits)


def test_a_dataset_names_its_integer_labels(tiny: Any) -> None:
    import datasets
    from PIL import Image

    x, y = training_examples(tiny, "image", (0, 1))
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["ant", "bee"])})
    columns = {
        "image": [Image.fromarray(picture) for picture in x],
        "label": [["ant", "bee"].index(name) for name in y],
    }
    own = bace.Learner("slda", backbone=tiny.vit).partial_fit(datasets.Dataset.from_dict(columns, features=features))
    assert own.classes_ == ["ant", "bee"]


def test_data_without_labels_are_refused(fresh: bace.Learner) -> None:
    with pytest.raises(DataError, match="give the labels as the second argument"):
        fresh.partial_fit(["a text", "another"])


def test_tools_of_scikit_learn_take_a_learner_as_it_is() -> None:
    from sklearn.base import is_classifier
    from sklearn.datasets import load_digits
    from sklearn.model_selection import cross_val_score
    from sklearn.utils.validation import check_is_fitted

    digits = load_digits()
    pictures, labels = (digits.images[:120] * 15).astype("uint8"), digits.target[:120]
    learner = bace.Learner("simplecil", backbone="digits-vit")
    assert is_classifier(learner)
    assert min(cross_val_score(learner, pictures, labels, cv=2)) > 0.6
    with pytest.raises(ValueError, match="not fitted"):
        check_is_fitted(learner)
    check_is_fitted(learner.partial_fit(pictures, (int(label) for label in labels)))
    assert learner.classes_ == list(range(10))  # whole numbers, from a generator


@pytest.mark.parametrize("labels", [{"a", "b"}, {"a": 1, "b": 2}])
def test_labels_without_an_order_are_refused(labels: Any) -> None:
    with pytest.raises(DataError, match="give a list with one label per example"):
        bace.Learner("simplecil", backbone="digits-vit").partial_fit(np.zeros((2, 8, 8), dtype=np.uint8), labels)
