"""Scores of a run, in percent: accuracies, forgetting and forward transfer, from the accuracy matrix.

The accuracy matrix has one row per task learned: matrix[t][i] is the score on task i's test set after task t, i <= t,
with every class seen so far as a possible answer. All indices count from 0.
"""

from collections.abc import Sequence
from typing import Literal

from bace.errors import ConfigError, DataError

Matrix = Sequence[Sequence[float]]

MEASURES = ("A_last", "A_avg", "A_new", "FGT", "FWT")  # the metrics of a run in the order of tables


def average_accuracy(row: Sequence[float]) -> float:
    """A_t: the mean of one row of the matrix; every task counts the same, whatever the size of its test set."""
    if not row:
        raise DataError("a row of the accuracy matrix is empty: it needs one score per task seen.")
    return sum(row) / len(row)


def last_average_accuracy(matrix: Matrix) -> float:
    """A_last: the average accuracy after the last task."""
    _check(matrix)
    return average_accuracy(matrix[-1])


def average_incremental_accuracy(matrix: Matrix) -> float:
    """A_avg: the mean of A_t over all tasks learned."""
    _check(matrix)
    return sum(average_accuracy(row) for row in matrix) / len(matrix)


def new_task_accuracy(matrix: Matrix) -> float | None:
    """A_new: the mean score of each task right after it was learned, tasks 2 and later.

    It exposes methods that preserve old tasks by learning new ones badly, which A_last and FGT together hide. None for
    a single task."""
    _check(matrix)
    return average_accuracy([row[-1] for row in matrix[1:]]) if len(matrix) > 1 else None


def forgetting(matrix: Matrix, over: Literal["earlier", "all"] = "earlier") -> float | None:
    """FGT: the mean drop of each task except the last from its best score to its score after the last task.

    "earlier" takes the best over the rows before the last, so FGT is negative if old tasks improve; "all" includes the
    last row and is never negative. None for a single task.
    """
    _check(matrix)
    if over not in ("earlier", "all"):
        raise ConfigError(f"over = {over!r} is not a definition of forgetting: use 'earlier' or 'all'.")
    last = len(matrix) - 1
    if last == 0:
        return None
    rows = matrix[:last] if over == "earlier" else matrix
    drops = [max(row[i] for row in rows[i:]) - matrix[last][i] for i in range(last)]
    return sum(drops) / last


def forward_transfer(before: Sequence[float], chance: Sequence[float]) -> float | None:
    """FWT: the mean gain over chance on tasks before they are learned; both lists start at the second task.

    `before` holds the score of each task just before it is learned, `chance` the same measurement with random rows in
    the head. None if there is nothing to average.
    """
    if len(before) != len(chance):
        raise DataError(f"before has {len(before)} scores, chance {len(chance)}: both need one for tasks 2, 3, ...")
    if not before:
        return None
    return sum(b - c for b, c in zip(before, chance, strict=True)) / len(before)


def summary(
    matrix: Matrix, before: Sequence[float] = (), chance: Sequence[float] = ()
) -> dict[str, float | list[float] | None]:
    """Every metric of the matrix by its name in tables; `A` lists A_t, task by task."""
    _check(matrix)
    return {
        "A": [average_accuracy(row) for row in matrix],
        "A_last": last_average_accuracy(matrix),
        "A_avg": average_incremental_accuracy(matrix),
        "A_new": new_task_accuracy(matrix),
        "FGT": forgetting(matrix),
        "FGT_all": forgetting(matrix, over="all"),
        "FWT": forward_transfer(before, chance),
    }


def _check(matrix: Matrix) -> None:
    if not matrix:
        raise DataError("the accuracy matrix is empty: it needs one row per task learned.")
    for t, row in enumerate(matrix):
        if len(row) != t + 1:
            raise DataError(f"row {t} of the accuracy matrix has {len(row)} scores: expected {t + 1}, one per task.")
