"""Results of finished runs: numbers, curves and matrices by name, and an entry's table with the printed numbers."""

import csv
import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from bace.experiments.run_folder import COLUMNS, Metrics, Run, is_finished, load_runs
from bace.paper.tables import Cell, Entry, Printed, Scale, published, published_average
from bace.report.export import LEFT
from bace.report.runs import groups

Matrix = list[list[float]]


@dataclass(frozen=True)
class Finished:
    """A finished run with the results of its studies."""

    run: Run

    @property
    def metrics(self) -> Metrics:
        assert self.run.metrics is not None
        return self.run.metrics

    def study(self, name: str, part: str) -> list[Any]:
        """A list of a study with one entry per task; empty if the run has no such study, or it was skipped."""
        return list(self.run.studies.get(name, {}).get(part, ()))


def finished_runs(cell: Cell, out: Path, scale: Scale) -> dict[int, Finished]:
    """The cell's finished runs, by seed."""
    pattern = cell.folder(out, scale, 0).name.removesuffix("0")
    folders = [
        folder
        for folder in sorted(cell.folder(out, scale, 0).parent.glob("*-seed*"))
        if folder.name.startswith(pattern) and folder.name.removeprefix(pattern).isdecimal()
    ]
    runs = load_runs(filter(is_finished, folders))
    return {run.seed: Finished(run) for run in runs}


# -- numbers of a run; None if the run does not have it


def average(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers else None


def last(values: Sequence[Any]) -> Any:
    return values[-1] if values else None


def less(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's rank correlation. Ties take their mean rank; it is 0 if one variable does not vary."""
    a, b = _ranks(x), _ranks(y)
    mean = (len(a) - 1) / 2
    covariance = sum((i - mean) * (j - mean) for i, j in zip(a, b, strict=True))
    scale = math.sqrt(sum((i - mean) ** 2 for i in a) * sum((j - mean) ** 2 for j in b))
    return covariance / scale if scale else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    return [sum(v < value for v in values) + (sum(v == value for v in values) - 1) / 2 for value in values]


def slope(values: Sequence[float]) -> float | None:
    """The slope in points per step, by least squares."""
    if len(values) < 2:
        return None
    middle, mean = (len(values) - 1) / 2, fmean(values)
    return sum((t - middle) * (v - mean) for t, v in enumerate(values)) / sum(
        (t - middle) ** 2 for t in range(len(values))
    )


def _of_metrics(name: str) -> Callable[[Finished], float | None]:
    return lambda found: getattr(found.metrics, name)


def observed(found: Finished) -> list[float]:
    return list(found.metrics.A)


def probing(found: Finished) -> list[float]:
    return found.study("probing", "cosine")


def distance(found: Finished) -> Matrix:
    """Row t: the distance of each task up to t, after task t."""
    return found.study("tracking", "distance")


def over_time(found: Finished) -> list[list[float]]:
    """The distances of each task, from the step at which it is learned."""
    triangle = distance(found)
    return [[row[i] for row in triangle[i:]] for i in range(len(triangle))]


def distance_growth(found: Finished) -> float | None:
    return average(curve[-1] - curve[0] for curve in over_time(found)[:-1])


def lowest_when_learned(found: Finished) -> float | None:
    return average(float(curve[0] == min(curve)) for curve in over_time(found)[:-1])


def distance_trend(found: Finished) -> float | None:
    return average(rank_correlation(range(len(curve)), curve) for curve in over_time(found) if len(curve) > 2)


def pushed_away(found: Finished) -> float | None:
    return average(float(b > a) for curve in over_time(found) for a, b in pairwise(curve))


def new_below_old(found: Finished) -> float | None:
    pairs = zip(found.study("tracking", "new")[1:], found.study("tracking", "old")[1:], strict=True)
    return average(float(new < old) for new, old in pairs)


def distance_and_accuracy(found: Finished) -> float | None:
    triangle = distance(found)
    return rank_correlation(triangle[-1], found.run.matrix[-1]) if triangle else None


def task_confusion(found: Finished) -> Matrix:
    """The percentage of each task's test examples that are predicted as a class of each task; rows sum to 100."""
    confusion = found.metrics.confusion
    if confusion is None:
        return []
    owner = {name: t for t, task in enumerate(found.run.tasks) for name in task.classes}
    if not set(confusion.classes) <= owner.keys():
        return []
    size = len(found.run.tasks)
    counts = [[0] * size for _ in range(size)]
    for true, row in zip(confusion.classes, confusion.counts, strict=True):
        for guessed, count in zip(confusion.classes, row, strict=True):
            counts[owner[true]][owner[guessed]] += count
    return [[100 * count / max(1, sum(row)) for count in row] for row in counts]


def imbalance(found: Finished) -> float | None:
    """The share of predictions on the last task's classes minus their true share, in points."""
    confusion = found.metrics.confusion
    if confusion is None:
        return None
    new = {c for c, name in enumerate(confusion.classes) if name in found.run.tasks[-1].classes}
    total = sum(map(sum, confusion.counts))
    guessed = sum(row[c] for row in confusion.counts for c in new)
    true = sum(sum(confusion.counts[c]) for c in new)
    return 100 * (guessed - true) / total


def neighbour_purity(found: Finished) -> float | None:
    """The percentage of the shown neighbours that have their anchor's label."""
    tasks = found.study("gallery", "tasks")
    return average(
        100.0 * bool(near["same"]) for task in tasks for anchor in task["anchors"] for near in anchor["neighbours"]
    )


def chance_purity(found: Finished) -> float | None:
    return average(100 / len(task.classes) for task in found.run.tasks)


NUMBERS: dict[str, Callable[[Finished], float | None]] = {
    **{name: _of_metrics(name) for name in (*COLUMNS, "kept_mb")},
    "Acc": _of_metrics("A_last"),
    "Prob.Acc": lambda found: last(probing(found)),
    "gap": lambda found: less(last(probing(found)), found.metrics.A_last),
    # the introduction's numbers are averages over the incremental steps, from the second step on
    "A_observed": lambda found: average(observed(found)[1:]),
    "A_probing": lambda found: average(probing(found)[1:]),
    "observed_slope": lambda found: slope(observed(found)[1:]),
    "probing_slope": lambda found: slope(probing(found)[1:]),
    "Feat.Embed.Dist": lambda found: less(last(found.study("tracking", "old")), last(found.study("tracking", "new"))),
    "distance_old": lambda found: last(found.study("tracking", "old")),
    "distance_new": lambda found: last(found.study("tracking", "new")),
    "distance_all": lambda found: last(found.study("tracking", "all")),
    "distance_all_avg": lambda found: average(found.study("tracking", "all")),
    "distance_growth": distance_growth,
    "distance_trend": distance_trend,
    "lowest_when_learned": lowest_when_learned,
    "pushed_away": pushed_away,
    "new_below_old": new_below_old,
    "distance_and_accuracy": distance_and_accuracy,
    "old_accuracy": lambda found: average(found.run.matrix[-1][:-1]),
    "new_accuracy": lambda found: found.run.matrix[-1][-1],
    "imbalance": imbalance,
    "neighbour_purity": neighbour_purity,
    "chance_purity": chance_purity,
    "bias_alpha": lambda found: last(found.study("bias", "A")),
    "bias_beta": lambda found: last(found.study("bias", "B")),
}
CURVES: dict[str, Callable[[Finished], list[float]]] = {"A": observed, "observed": observed, "probing": probing}
MATRICES: dict[str, Callable[[Finished], Matrix]] = {"distance": distance, "task_confusion": task_confusion}


def for_page(
    entry: Entry, runs: Iterable[Run], cells: dict[Path, Cell]
) -> dict[tuple[str, str], tuple[float, float | None]]:
    """The printed numbers of an entry by row and column of the report page, whose rows do not distinguish data sets.
    `cells` gives the cell of each run folder."""
    if len({cell.block.benchmark for cell in entry.cells()}) > 1:
        return {}
    found = {}
    for group in groups(runs):
        for column in ("A_last", "FGT", "FWT"):
            if printed := published(entry.table, cells[group.runs[0].folder], column):
                found[group.label, column] = (printed.mean, printed.std)
    return found


# -- an entry's table


@dataclass(frozen=True)
class Value:
    """One number of an entry: ours over seeds and the printed one."""

    dataset: str
    steps: str
    buffer: str
    method: str
    column: str
    place: tuple[int, ...]  # step of a curve, row and column of a matrix, counted from 1; empty for a number
    seeds: dict[int, float]
    printed: Printed | None = None

    @property
    def mean(self) -> float | None:
        return average(self.seeds.values())

    @property
    def std(self) -> float | None:
        return stdev(self.seeds.values()) if len(self.seeds) > 1 else None

    @property
    def difference(self) -> float | None:
        return less(self.mean, self.printed.mean if self.printed else None)


def collect(entry: Entry, out: Path, scale: Scale) -> list[Value]:
    """Every number of an entry, including those without runs; curves and matrices only if there are runs."""
    cells = entry.cells()
    runs = {cell.key: finished_runs(cell, out, scale) for cell in cells}
    values: list[Value] = []
    for cell in cells:
        own = runs[cell.key]
        place = (cell.block.dataset, str(cell.steps), str(cell.buffer), cell.method)
        for column in entry.columns:
            if column == "delta_A_last":
                base = runs.get((*cell.key[:3], entry.baseline), {})
                seeds = paired(
                    {seed: found.metrics.A_last for seed, found in own.items()},
                    {seed: found.metrics.A_last for seed, found in base.items()},
                )
            else:
                seeds = {seed: n for seed, found in own.items() if (n := NUMBERS[column](found)) is not None}
            values.append(Value(*place, column, (), seeds, published(entry.table, cell, column)))
        for column in (*entry.curves, *entry.matrices):
            values += _spread(place, column, own)
    return values + (_averages(entry, values) if entry.average else [])


def paired(ours: dict[int, float | None], base: dict[int, float | None]) -> dict[int, float]:
    """The differences for the seeds that both have."""
    found = {seed: less(value, base.get(seed)) for seed, value in ours.items()}
    return {seed: value for seed, value in found.items() if value is not None}


def _spread(place: tuple[str, str, str, str], column: str, runs: dict[int, Finished]) -> list[Value]:
    """A curve or matrix as one value for each of its places."""
    at: dict[tuple[int, ...], dict[int, float]] = {}
    for seed, found in runs.items():
        if column in CURVES:
            for t, value in enumerate(CURVES[column](found), 1):
                at.setdefault((t,), {})[seed] = value
        else:
            for t, row in enumerate(MATRICES[column](found), 1):
                for i, value in enumerate(row, 1):
                    at.setdefault((t, i), {})[seed] = value
    return [Value(*place, column, where, seeds) for where, seeds in at.items()]


def _averages(entry: Entry, values: list[Value]) -> list[Value]:
    """The mean over the data sets, for the seeds that have all of them."""
    found = []
    for column in entry.columns:
        for method in dict.fromkeys(value.method for value in values):
            own = [value for value in values if (value.method, value.column) == (method, column)]
            seeds = set.intersection(*(set(value.seeds) for value in own))
            means = {seed: fmean(value.seeds[seed] for value in own) for seed in sorted(seeds)}
            printed = published_average(entry.table, method, column)
            found.append(Value("Average", "", "", method, column, (), means, printed))
    return found


def decimals(column: str) -> int:
    return 4 if column.startswith(("distance", "Feat", "bias")) else 0 if column == "seconds" else 2


def in_digits(column: str, mean: float | None, std: float | None = None, sign: bool = False) -> str:
    if mean is None:
        return "-"
    places = decimals(column)
    text = f"{mean:{'+' if sign else ''}.{places}f}"
    return text if std is None else f"{text} ± {std:.{places}f}"


def tables(entry: Entry, values: list[Value]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, header and rows of each table to print: one for each data set and number of steps, then the curves and
    matrices, if any."""
    numbers = [value for value in values if not value.place]
    compared = [column for column in entry.columns if any(v.printed for v in numbers if v.column == column)]
    header = ["memory", "method", "seeds"]
    for column in entry.columns:
        header += [column, "published", "difference"] if column in compared else [column]
    found = []
    for dataset, steps in dict.fromkeys((value.dataset, value.steps) for value in numbers):
        rows = []
        own = [value for value in numbers if (value.dataset, value.steps) == (dataset, steps)]
        for buffer, method in dict.fromkeys((value.buffer, value.method) for value in own):
            by_column = {v.column: v for v in own if (v.buffer, v.method) == (buffer, method)}
            row = [buffer, method, str(max(len(value.seeds) for value in by_column.values()))]
            for column in entry.columns:
                value = by_column[column]
                row.append(in_digits(column, value.mean, value.std))
                if column in compared:
                    printed = value.printed
                    row.append(in_digits(column, printed.mean, printed.std) if printed else "-")
                    row.append(in_digits(column, value.difference, sign=True))
            rows.append(row)
        found.append((f"{dataset}, {steps} tasks" if steps else dataset, header, rows))
    return (
        found
        + [table for column in entry.curves for table in _curve_tables(column, values)]
        + [table for column in entry.matrices for table in _matrix_tables(column, values)]
    )


def _places(column: str, values: list[Value]) -> dict[tuple[str, str, str, str], dict[tuple[int, ...], Value]]:
    found: dict[tuple[str, str, str, str], dict[tuple[int, ...], Value]] = {}
    for value in values:
        if value.column == column and value.place:
            key = (value.dataset, value.steps, value.buffer, value.method)
            found.setdefault(key, {})[value.place] = value
    return found


def _short(column: str, value: Value | None) -> str:
    if value is None or value.mean is None:
        return ""
    return f"{value.mean:.2f}" if decimals(column) == 4 else f"{value.mean:.1f}"


def _curve_tables(column: str, values: list[Value]) -> list[tuple[str, list[str], list[list[str]]]]:
    groups: dict[tuple[str, str], list[list[str]]] = {}
    for (dataset, steps, buffer, method), at in _places(column, values).items():
        row = [buffer, method, *(_short(column, at.get((t,))) for t in range(1, int(steps) + 1))]
        groups.setdefault((dataset, steps), []).append(row)
    return [
        (
            f"{column} after each task: {dataset}, {steps} tasks",
            ["memory", "method", *map(str, range(1, int(steps) + 1))],
            rows,
        )
        for (dataset, steps), rows in groups.items()
    ]


def _matrix_tables(column: str, values: list[Value]) -> list[tuple[str, list[str], list[list[str]]]]:
    found = []
    for (dataset, steps, buffer, method), at in _places(column, values).items():
        tasks = range(1, int(steps) + 1)
        rows = [[str(t), *(_short(column, at.get((t, i))) for i in tasks)] for t in tasks]
        found.append((f"{column}: {method}, memory {buffer}, {dataset}", ["task", *map(str, tasks)], rows))
    return found


def as_text(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as wide as necessary, so that no number is cut."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    words = {i for i, name in enumerate(header) if name in LEFT}
    lines = [
        "  ".join(
            cell.ljust(n) if i in words else cell.rjust(n) for i, (cell, n) in enumerate(zip(row, widths, strict=True))
        )
        for row in (header, *rows)
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]]) + "\n"


def as_csv(entry: Entry, scale: Scale, values: list[Value]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    ours, theirs = ["mean", "std", "seeds"], ["published", "published_std", "difference", "published_note"]
    place = ["entry", "scale", "dataset", "steps", "buffer", "method", "metric", "step", "task"]
    writer.writerow([*place, *ours, *theirs])
    for value in values:
        step, task = (*value.place, "", "")[:2]
        printed = value.printed
        shown = [printed.mean, printed.std, value.difference, printed.note] if printed else [None] * 4
        where = [value.dataset, value.steps, value.buffer, value.method, value.column, step, task]
        writer.writerow([entry.id, scale, *where, value.mean, value.std, len(value.seeds), *shown])
    return text.getvalue()
