"""Measures are checked on hand-made matrices, and entity scores are compared with seqeval."""

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seqeval.metrics import f1_score, precision_score, recall_score
from seqeval.scheme import IOB2, Entities
from sklearn.metrics import confusion_matrix as sklearn_confusion

import bace
from bace.core.evaluation import predict
from bace.core.metrics import (
    average_accuracy,
    average_incremental_accuracy,
    forgetting,
    forward_transfer,
    last_average_accuracy,
    new_task_accuracy,
    summary,
)
from bace.data.scores import accuracy, confusion_matrix, entities, entity_scores, per_class_accuracy
from bace.errors import ConfigError, DataError

STRICT = {"mode": "strict", "scheme": IOB2}  # seqeval's
MATRIX = [[95.0], [70.0, 92.0], [60.0, 75.0, 90.0], [50.0, 65.0, 70.0, 88.0]]


def test_the_measures_of_a_matrix_by_hand() -> None:
    assert average_accuracy(MATRIX[1]) == 81
    assert last_average_accuracy(MATRIX) == (50 + 65 + 70 + 88) / 4 == 68.25
    assert average_incremental_accuracy(MATRIX) == (95 + 81 + 75 + 68.25) / 4
    assert new_task_accuracy(MATRIX) == (92 + 90 + 88) / 3 == 90  # the diagonal without its first number
    # (95 - 50) + (92 - 65) + (90 - 70) over three tasks
    assert forgetting(MATRIX) == pytest.approx(92 / 3)
    assert round(92 / 3, 2) == 30.67
    assert forgetting(MATRIX, over="all") == pytest.approx(92 / 3)


def test_forgetting_takes_the_best_earlier_row_not_the_first() -> None:
    # Task 0 peaks after task 1: max(60, 80) - 50; task 1: 90 - 85.
    assert forgetting([[60.0], [80.0, 90.0], [50.0, 85.0, 99.0]]) == (30 + 5) / 2


def test_forgetting_is_negative_where_old_tasks_improve_unless_the_last_row_counts() -> None:
    matrix = [[80.0], [81.0, 70.0], [82.0, 71.0, 60.0]]
    assert forgetting(matrix) == -1  # (81 - 82) and (70 - 71)
    assert forgetting(matrix, over="all") == 0


def test_a_single_task_has_no_new_task_no_forgetting_and_no_forward_transfer() -> None:
    assert new_task_accuracy([[90.0]]) is None
    assert forgetting([[90.0]]) is None
    assert forgetting([[90.0]], over="all") is None
    assert forward_transfer([], []) is None
    none = dict.fromkeys(("A_new", "FGT", "FGT_all", "FWT"))
    assert summary([[90.0]]) == {"A": [90], "A_last": 90, "A_avg": 90, **none}


def test_a_new_shows_what_a_last_and_forgetting_hide() -> None:
    """Both end at the same scores and forget nothing. One learned its second task at once, the other only later."""
    quick, late = [[90.0], [90.0, 80.0], [90.0, 80.0, 70.0]], [[90.0], [90.0, 10.0], [90.0, 80.0, 70.0]]
    assert last_average_accuracy(quick) == last_average_accuracy(late)
    assert forgetting(quick, over="all") == forgetting(late, over="all") == 0
    assert (new_task_accuracy(quick), new_task_accuracy(late)) == (75, 40)


def test_forward_transfer_is_the_mean_gain_over_chance() -> None:
    assert forward_transfer([40.0, 30.0], [10.0, 5.0]) == (30 + 25) / 2
    assert forward_transfer([0.0], [2.0]) == -2


def test_the_summary_has_every_measure_by_its_name() -> None:
    assert summary(MATRIX, [40.0, 30.0, 20.0], [10.0, 10.0, 10.0]) == {
        "A": [95, 81, 75, 68.25],
        "A_last": 68.25,
        "A_avg": 79.8125,
        "A_new": 90,
        "FGT": pytest.approx(30.6667, abs=1e-4),
        "FGT_all": pytest.approx(30.6667, abs=1e-4),
        "FWT": 20,
    }


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 6), st.lists(st.floats(0, 100), min_size=21, max_size=21))
def test_the_reading_over_all_rows_cuts_each_task_at_zero(tasks: int, scores: list[float]) -> None:
    matrix = [scores[t * (t + 1) // 2 :][: t + 1] for t in range(tasks)]
    last = matrix[-1]
    drops = [max(matrix[j][i] for j in range(i, len(matrix) - 1)) - last[i] for i in range(len(matrix) - 1)]
    assert forgetting(matrix) == pytest.approx(sum(drops) / len(drops), abs=1e-9)
    assert new_task_accuracy(matrix) == pytest.approx(sum(matrix[t][t] for t in range(1, tasks)) / (tasks - 1))
    assert forgetting(matrix, over="all") == pytest.approx(sum(max(d, 0) for d in drops) / len(drops), abs=1e-9)


def test_a_matrix_of_the_wrong_shape_is_refused() -> None:
    for matrix, words in (([], "empty"), ([[1.0], [2.0]], "row 1"), ([[1.0, 2.0]], "row 0")):
        with pytest.raises(DataError, match=words):
            summary(matrix)
    with pytest.raises(DataError, match="chance 1"):
        forward_transfer([1.0, 2.0], [1.0])
    with pytest.raises(DataError, match="empty"):
        average_accuracy([])
    with pytest.raises(ConfigError, match="'later'"):
        forgetting(MATRIX, over="later")  # type: ignore[arg-type]


def test_accuracies_by_hand() -> None:
    predictions, targets = torch.tensor([0, 1, 1, 3, 0]), torch.tensor([0, 1, 0, 3, 1])
    assert accuracy(predictions, targets) == 60
    assert per_class_accuracy(predictions, targets, 5) == [50, 50, None, 100, None]
    rows = [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1]]
    assert confusion_matrix(predictions, targets, 4).tolist() == rows


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=60))
def test_the_confusion_matrix_is_scikit_learns(pairs: list[tuple[int, int]]) -> None:
    predictions, targets = (list(column) for column in zip(*pairs, strict=True))
    ours = confusion_matrix(torch.tensor(predictions), torch.tensor(targets), 7)
    assert ours.tolist() == sklearn_confusion(targets, predictions, labels=range(7)).tolist()


def test_predictions_that_cannot_be_scored_are_refused() -> None:
    with pytest.raises(DataError, match=r"\(2,\)"):
        accuracy(torch.tensor([1, 2]), torch.tensor([1]))
    with pytest.raises(DataError, match="test set is empty"):
        accuracy(torch.tensor([]), torch.tensor([]))
    with pytest.raises(DataError, match="targets hold class -100"):
        confusion_matrix(torch.tensor([1]), torch.tensor([-100]), 3)
    with pytest.raises(DataError, match="predictions hold class 3"):
        per_class_accuracy(torch.tensor([3]), torch.tensor([0]), 3)


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("", set()),
        ("O O", set()),
        ("B-PER I-PER O B-LOC", {(0, 2, "PER"), (3, 4, "LOC")}),
        ("B-PER B-PER I-PER", {(0, 1, "PER"), (1, 3, "PER")}),
        ("I-PER I-PER O", set()),  # there is nothing to continue
        ("B-PER I-LOC I-PER", {(0, 1, "PER")}),  # the type changes, so the entity ends, and no other begins
        ("B-PER O I-PER", {(0, 1, "PER")}),
        ("O B-geo-loc I-geo-loc", {(1, 3, "geo-loc")}),
    ],
)
def test_entities_begin_with_b_and_go_on_with_the_same_type(tags: str, expected: set[tuple[int, int, str]]) -> None:
    assert entities(tags.split()) == expected


@pytest.mark.parametrize("tag", ["PER", "B-", "B", "E-PER", "", "o"])
def test_a_tag_outside_iob2_is_refused(tag: str) -> None:
    with pytest.raises(DataError, match=f"tag '{tag}' of word 1"):
        entities(["O", tag])


def test_entity_scores_by_hand() -> None:
    gold = [["B-A", "I-A", "O", "B-B"], ["B-A", "O", "O"]]
    predicted = [["B-A", "I-A", "O", "B-X"], ["B-A", "I-A", "B-X"]]
    # Predicted: A is right, X is foreign in place of B; A has a wrong end, X is foreign on O.
    scores = entity_scores(gold, predicted, ["A", "B", "C"])
    assert scores.precision == 25  # 1 of 4
    assert scores.recall == pytest.approx(100 / 3)
    assert scores.micro_f1 == pytest.approx(200 / 7)  # 2 * 1 / (4 + 3)
    assert scores.per_type == {"A": 50, "B": 0}  # A: 1 of 2 and 1 of 2; C is neither in the labels nor predicted
    assert scores.macro_f1_own == 25
    assert scores.macro_f1 == pytest.approx(50 / 3)  # X counts, with 0
    assert (scores.macro_precision, scores.macro_recall) == pytest.approx((50 / 3, 50 / 3))  # of A, B and X: 50, 0, 0
    assert scores.foreign_rate == 50

    lenient = entity_scores(gold, predicted, ["A", "B", "C"], foreign="outside")
    assert lenient.precision == 50
    assert lenient.micro_f1 == pytest.approx(40)  # 2 * 1 / (2 + 3)
    assert lenient.recall == scores.recall
    assert lenient.per_type == scores.per_type
    assert lenient.macro_f1 == lenient.macro_f1_own == scores.macro_f1_own
    assert (lenient.macro_precision, lenient.macro_recall) == (25, 25)
    assert lenient.foreign_rate == 50


def test_one_foreign_prediction_beside_two_right_ones_costs_a_third_of_seqevals_macro() -> None:
    gold, predicted = [["B-A", "O", "B-B"]], [["B-A", "B-X", "B-B"]]
    scores = entity_scores(gold, predicted, ["A", "B"])
    assert scores.macro_f1 == pytest.approx(200 / 3)
    assert scores.macro_f1_own == 100
    assert scores.micro_f1 == pytest.approx(80)  # 2 * 2 / (3 + 2)
    # seqeval agrees in its strict mode, and in the default mode that the paper's authors call
    assert f1_score(gold, predicted, average="macro", **STRICT) == pytest.approx(2 / 3)
    assert f1_score(gold, predicted, average="macro") == pytest.approx(2 / 3)
    assert entity_scores(gold, predicted, ["A", "B"], foreign="outside").macro_f1 == 100


def test_entity_scores_are_zero_where_there_is_nothing_to_count() -> None:
    scores = entity_scores([["O"]], [["O"]], ["A"])
    assert (scores.macro_f1, scores.macro_f1_own, scores.micro_f1, scores.foreign_rate) == (0, 0, 0, 0)
    assert (scores.precision, scores.recall, scores.macro_precision, scores.macro_recall) == (0, 0, 0, 0)
    assert scores.per_type == {}
    assert entity_scores([["O"]], [["B-A"]], ["A"]).per_type == {"A": 0}


def test_sentences_that_do_not_match_and_foreign_gold_types_are_refused() -> None:
    with pytest.raises(DataError, match="2 sentences of gold tags, but 1"):
        entity_scores([["O"], ["O"]], [["O"]], ["A"])
    with pytest.raises(DataError, match="sentence 1 has 2 gold tags, but 1"):
        entity_scores([["O"], ["O", "O"]], [["O"], ["O"]], ["A"])
    with pytest.raises(DataError, match="'X'"):
        entity_scores([["B-X"]], [["O"]], ["A"])
    with pytest.raises(ConfigError, match="'drop'"):
        entity_scores([["O"]], [["O"]], ["A"], foreign="drop")  # type: ignore[arg-type]


def sentences(types: str) -> st.SearchStrategy[list[list[str]]]:
    tags = ["O", *(f"{prefix}-{kind}" for kind in types for prefix in "BI")]
    return st.lists(st.lists(st.sampled_from(tags), min_size=8, max_size=8), min_size=5, max_size=5)


EVERY_OWN = [["B-A", "B-B"]]
EVERY = [["B-A", "B-B", "B-C", "O", "B-A", "I-A", "O", "O"]]  # each type occurs on both sides


@settings(max_examples=150, deadline=None)
@given(gold=sentences("ABC"), predicted=sentences("ABC"))
def test_entity_scores_are_those_of_seqevals_strict_mode(gold: list[list[str]], predicted: list[list[str]]) -> None:
    gold, predicted = gold + EVERY, predicted + EVERY
    for tags in gold + predicted:
        assert entities(tags) == {(e.start, e.end, e.tag) for e in Entities([tags], IOB2).entities[0]}
    scores = entity_scores(gold, predicted, ["A", "B", "C"])
    macro = {"average": "macro", **STRICT}
    assert scores.precision == pytest.approx(100 * precision_score(gold, predicted, **STRICT))
    assert scores.recall == pytest.approx(100 * recall_score(gold, predicted, **STRICT))
    assert scores.micro_f1 == pytest.approx(100 * f1_score(gold, predicted, **STRICT))
    assert scores.macro_f1 == scores.macro_f1_own == pytest.approx(100 * f1_score(gold, predicted, **macro))
    assert scores.macro_precision == pytest.approx(100 * precision_score(gold, predicted, **macro))
    assert scores.macro_recall == pytest.approx(100 * recall_score(gold, predicted, **macro))
    by_type = f1_score(gold, predicted, average=None, **STRICT)
    assert list(scores.per_type.values()) == pytest.approx([100 * f for f in by_type])
    assert scores.foreign_rate == 0


@settings(max_examples=150, deadline=None)
@given(gold=sentences("AB"), predicted=sentences("ABXY"))
def test_foreign_types_count_in_micro_and_macro_as_in_seqeval_and_outside_maps_their_tags_to_o(
    gold: list[list[str]], predicted: list[list[str]]
) -> None:
    macro = {"average": "macro", **STRICT}
    scores = entity_scores(gold, predicted, ["A", "B"])
    lenient = entity_scores(gold, predicted, ["A", "B"], foreign="outside")
    mapped = [["O" if tag[2:] in ("X", "Y") else tag for tag in tags] for tags in predicted]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # seqeval warns when it divides by zero
        for found, tags in ((scores, predicted), (lenient, mapped)):
            assert found.precision == pytest.approx(100 * precision_score(gold, tags, **STRICT))
            assert found.recall == pytest.approx(100 * recall_score(gold, tags, **STRICT))
            assert found.micro_f1 == pytest.approx(100 * f1_score(gold, tags, **STRICT))
            if Entities(gold, IOB2).unique_tags | Entities(tags, IOB2).unique_tags:  # a mean over no type is NaN
                assert found.macro_f1 == pytest.approx(100 * f1_score(gold, tags, **macro))
                assert found.macro_precision == pytest.approx(100 * precision_score(gold, tags, **macro))
                assert found.macro_recall == pytest.approx(100 * recall_score(gold, tags, **macro))
    # the score over own types is seqeval's macro with foreign types as O
    assert scores.macro_f1_own == lenient.macro_f1_own == lenient.macro_f1
    assert scores.macro_f1 <= lenient.macro_f1 + 1e-9
    guessed = [e.tag for sentence in Entities(predicted, IOB2).entities for e in sentence]
    share = 100 * sum(tag in "XY" for tag in guessed) / len(guessed) if guessed else 0
    assert scores.foreign_rate == lenient.foreign_rate == pytest.approx(share)


def spans(types: str) -> st.SearchStrategy[list[list[str]]]:
    """Generate sentences in which every I- tag continues an entity."""
    words = st.one_of(
        st.just(["O"]),
        st.builds(lambda kind, n: [f"B-{kind}"] + n * [f"I-{kind}"], st.sampled_from(types), st.integers(0, 2)),
    )
    sentence = st.lists(words, min_size=8, max_size=8).map(lambda parts: [tag for part in parts for tag in part][:8])
    return st.lists(sentence, min_size=3, max_size=3)


@settings(max_examples=100, deadline=None)
@given(gold=spans("AB"), predicted=spans("ABXY"))
def test_where_every_entity_begins_with_b_seqevals_default_mode_gives_the_same_scores(
    gold: list[list[str]], predicted: list[list[str]]
) -> None:
    """The paper's authors use the default mode. There, an I- tag that continues nothing begins an entity."""
    gold, predicted = gold + EVERY_OWN, predicted + EVERY_OWN
    scores = entity_scores(gold, predicted, ["A", "B"])
    assert scores.micro_f1 == pytest.approx(100 * f1_score(gold, predicted))
    assert scores.macro_f1 == pytest.approx(100 * f1_score(gold, predicted, average="macro"))


def test_an_i_tag_that_continues_nothing_is_an_entity_in_seqevals_default_mode_only() -> None:
    gold, predicted = [["B-A", "B-B"]], [["I-A", "B-B"]]
    assert f1_score(gold, predicted, average="macro") == 1
    assert f1_score(gold, predicted, average="macro", **STRICT) == 0.5
    assert entity_scores(gold, predicted, ["A", "B"]).macro_f1 == 50


# -- scores of a run


def test_foreign_types_taken_for_o_raise_the_scores_of_a_run_and_nothing_else(tiny: Any) -> None:
    """With `measure.map_foreign_types_to_O`, the score is seqeval's macro F1 after the mapping, which equals the score
    over own types without the mapping. The setting does not change the method."""
    settings = {"method": "er", "train.optimiser": "adamw", "train.epochs": 8, "measure.fwt": False}
    strict, lenient = (
        bace.run(tiny.settings("token", **settings, **{"measure.map_foreign_types_to_O": mapped}))
        for mapped in (False, True)
    )
    assert all(map(torch.equal, strict.method.parameters(), lenient.method.parameters()))
    scores = strict.metrics["entities"]
    assert any(0 < score["foreign_rate"] < 100 and score["macro_f1"] < score["macro_f1_own"] for score in scores)
    assert [score["macro_f1"] for score in scores] == strict.matrix[-1]
    assert [score["macro_f1_own"] for score in scores] == lenient.matrix[-1]
    stream = strict.method.stream
    for task, found in zip(stream, scores, strict=True):
        with stream.licence("test", task.test):
            rows, by_scorer = predict(strict.method, task.test)
        lengths = torch.unique_consecutive(stream.owners(rows), return_counts=True)[1].tolist()
        gold, guessed = (
            [[stream.names[c] for c in sentence.tolist()] for sentence in classes.split(lengths)]
            for classes in (stream.targets[rows], by_scorer[None])
        )
        own = {stream.names[c] for c in task.classes}
        mapped = [[tag if tag in own else "O" for tag in tags] for tags in guessed]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # seqeval warns when it divides by zero
            assert found["macro_f1"] == pytest.approx(100 * f1_score(gold, guessed, average="macro", **STRICT))
            assert found["macro_f1_own"] == pytest.approx(100 * f1_score(gold, mapped, average="macro", **STRICT))
            assert found["micro_f1"] == pytest.approx(100 * f1_score(gold, guessed, **STRICT))
