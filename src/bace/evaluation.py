"""Scores of a task's test set: accuracy for images and texts, entity-level macro F1 for tokens."""

import torch
from torch import Tensor

from bace import metrics
from bace.method import Method
from bace.stream import Stream, Task, entity_type


def predict(method: Method, examples: Tensor) -> tuple[Tensor, Tensor]:  # (rows,) ids, (rows,) predicted classes
    """Predicted classes of all rows of these examples, among all classes seen so far."""
    method.eval()
    rows, predicted = [], []
    for part in examples.split(method.training_settings.eval_batch_size):
        batch = method.stream.batch(part)
        rows.append(batch.rows)
        predicted.append(method.predict(batch).argmax(1).cpu())
    return torch.cat(rows), torch.cat(predicted)


def score(stream: Stream, task: Task, rows: Tensor, predicted: Tensor, *, lenient: bool = False) -> dict[str, float]:
    """What a test set's predictions are worth, in percent; "score" is the one the accuracy matrix takes.

    Tokens: macro F1 over the task's own entity types; micro F1 counts predicted types of other tasks as errors unless
    `lenient` (bace.md 5.5)."""
    targets = stream.targets[rows]
    if stream.background is None:
        return {"score": metrics.accuracy(predicted, targets)}
    assert stream.row_start is not None
    owner = torch.searchsorted(stream.row_start, rows, right=True) - 1
    lengths = torch.unique_consecutive(owner, return_counts=True)[1].tolist()
    gold, guess = (
        [[stream.names[c] for c in sentence.tolist()] for sentence in classes.split(lengths)]
        for classes in (targets, predicted)
    )
    types = list(dict.fromkeys(entity_type(stream.names[c]) for c in task.classes if c != stream.background))
    result = metrics.entity_scores(gold, guess, types, foreign="outside" if lenient else "error")
    return {
        "score": result.macro_f1,
        "micro_f1": result.micro_f1,
        "precision": result.precision,
        "recall": result.recall,
        "foreign_rate": result.foreign_rate,
    }
