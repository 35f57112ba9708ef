"""Scores of predictions, in percent: accuracy, confusion, entity F1."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from bace.errors import ConfigError, DataError


def accuracy(
    predictions: Tensor,  # (rows,)
    targets: Tensor,  # (rows,)
) -> float:
    """The share of correct predictions."""
    _check_rows(predictions, targets)
    if not len(targets):
        raise DataError("no predictions to score: the test set is empty.")
    return 100 * int((predictions == targets).sum()) / len(targets)


def confusion_matrix(
    predictions: Tensor,  # (rows,)
    targets: Tensor,  # (rows,)
    classes: int,
) -> Tensor:  # (classes, classes) int64
    """How often each class (row) was predicted as each class (column)."""
    _check_rows(predictions, targets)
    for name, values in (("predictions", predictions), ("targets", targets)):
        outside = values[(values < 0) | (values >= classes)]
        if len(outside):
            raise DataError(f"{name} hold class {int(outside[0])}, outside 0 to {classes - 1}: leave such rows out.")
    return (targets * classes + predictions).bincount(minlength=classes * classes).reshape(classes, classes)


def per_class_accuracy(
    predictions: Tensor,  # (rows,)
    targets: Tensor,  # (rows,)
    classes: int,
) -> list[float | None]:
    """The accuracy on the examples of each class; None for a class without any."""
    confusion = confusion_matrix(predictions, targets, classes)
    right, total = confusion.diagonal().tolist(), confusion.sum(1).tolist()
    return [100 * r / t if t else None for r, t in zip(right, total, strict=True)]


@dataclass(frozen=True)
class EntityScores:
    """Entity scores in percent. An entity is correct if its first word, last word and type are. A type counts in a mean
    over types if it occurs in the gold tags or is predicted. A score is 0 if there is nothing to count.

    Attributes:
        macro_f1: the mean over all types, as in seqeval. A predicted type that is not the task's counts with F1 0.
        macro_f1_own: the mean over the task's own types (`per_type`). An entity of a foreign type affects it only by
            displacing a correct one.
        micro_f1, precision, recall: over entities of all types.
        macro_precision, macro_recall: the means over the types of `macro_f1`.
        foreign_rate: the share of predicted entities whose type is not the task's.
        per_type: F1 of each of the task's own types.
    """

    macro_f1: float
    macro_f1_own: float
    micro_f1: float
    precision: float
    recall: float
    macro_precision: float
    macro_recall: float
    foreign_rate: float
    per_type: dict[str, float]


def entity_scores(
    gold: Sequence[Sequence[str]],
    predicted: Sequence[Sequence[str]],
    types: Sequence[str],
    *,
    foreign: Literal["error", "outside"] = "error",
) -> EntityScores:
    """Scores of predicted IOB2 tags, sentence by sentence, on a task whose entity types are `types`.

    A predicted entity of any other type is an error in precision, micro and macro F1. `foreign="outside"` counts it as
    O instead. This is more lenient, but it tells the scorer the task of the sentence.
    """
    if foreign not in ("error", "outside"):
        raise ConfigError(f"foreign = {foreign!r} is not a way to score foreign types: use 'error' or 'outside'.")
    if len(gold) != len(predicted):
        raise DataError(f"{len(gold)} sentences of gold tags, but {len(predicted)} of predicted ones.")
    right: Counter[str] = Counter()
    in_gold: Counter[str] = Counter()
    in_predicted: Counter[str] = Counter()
    for sentence, (gold_tags, predicted_tags) in enumerate(zip(gold, predicted, strict=True)):
        if len(gold_tags) != len(predicted_tags):
            raise DataError(
                f"sentence {sentence} has {len(gold_tags)} gold tags, but {len(predicted_tags)} predicted ones."
            )
        true, guessed = entities(gold_tags), entities(predicted_tags)
        in_gold.update(kind for _, _, kind in true)
        in_predicted.update(kind for _, _, kind in guessed)
        right.update(kind for _, _, kind in true & guessed)
    strangers = sorted(in_gold.keys() - set(types))
    if strangers:
        raise DataError(f"gold tags hold type '{strangers[0]}', which is not one of the task's: {', '.join(types)}.")

    every = in_predicted.total()
    strange = sum(in_predicted[kind] for kind in in_predicted.keys() - set(types))
    if foreign == "outside":
        # An entity of a foreign type neither starts nor extends one of the task's, so dropping it equals tagging it O.
        in_predicted = Counter({kind: in_predicted[kind] for kind in types})
    f1 = {
        kind: _f1(right[kind], in_predicted[kind], in_gold[kind])
        for kind in dict.fromkeys((*types, *in_predicted))
        if in_gold[kind] or in_predicted[kind]
    }
    per_type = {kind: score for kind, score in f1.items() if kind in types}
    return EntityScores(
        macro_f1=_mean(f1.values()),
        macro_f1_own=_mean(per_type.values()),
        micro_f1=_f1(right.total(), in_predicted.total(), in_gold.total()),
        precision=_share(right.total(), in_predicted.total()),
        recall=_share(right.total(), in_gold.total()),
        macro_precision=_mean([_share(right[kind], in_predicted[kind]) for kind in f1]),
        macro_recall=_mean([_share(right[kind], in_gold[kind]) for kind in f1]),
        foreign_rate=_share(strange, every),
        per_type=per_type,
    )


def entities(tags: Sequence[str]) -> set[tuple[int, int, str]]:
    """The (start, end, type) of every entity of a sentence tagged in IOB2; `end` is the word after the last.

    This follows seqeval's strict mode: an entity is a B- tag and the I- tags of its type that follow it. An I- tag that
    continues nothing is not an entity.
    """
    found = set()
    start, kind = 0, None  # the open entity
    for position, tag in enumerate(tags):
        prefix, _, name = tag.partition("-")
        if tag != "O" and not (prefix in ("B", "I") and name):
            raise DataError(f"tag '{tag}' of word {position} is not IOB2: use O, B-type or I-type.")
        if prefix == "I" and name == kind:
            continue
        if kind is not None:
            found.add((start, position, kind))
        start, kind = position, name if prefix == "B" else None
    if kind is not None:
        found.add((start, len(tags), kind))
    return found


def _share(part: int, whole: int) -> float:
    return 100 * part / whole if whole else 0.0


def _mean(values: Collection[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _f1(right: int, predicted: int, gold: int) -> float:
    return _share(2 * right, predicted + gold)  # the harmonic mean of right / predicted and right / gold


def _check_rows(predictions: Tensor, targets: Tensor) -> None:
    if predictions.shape != targets.shape or targets.ndim != 1:
        raise DataError(
            f"predictions {tuple(predictions.shape)}, targets {tuple(targets.shape)}: expected one class per row."
        )
