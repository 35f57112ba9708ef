"""Read run folders, group the seeds of one setting, and summarise each group in a row."""

import csv
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.segment import Segments
from rich.table import Table
from rich.text import Text

from bace.core.metrics import MEASURES, new_task_accuracy
from bace.errors import DataError, printable
from bace.files import parse_json

# Settings that name a run rather than define it; seeds of one experiment may differ in them.
BOOKKEEPING = frozenset({"seed", "studies", "out", "folder", "resume", "progress", "verbose"})
COLUMNS = (*MEASURES, "seconds")  # numbers of a run that tables show
BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")  # nothing else may stand where the page shows a picture


@dataclass(frozen=True)
class Task:
    """One task of a run: its name and the classes that arrive with it."""

    name: str
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Confusion:
    """Counts of the last model: one row for each true class, one column for each predicted class."""

    classes: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]  # (classes, classes)


@dataclass(frozen=True)
class Metrics:
    """What a finished run scored, in percent. None stands for a number that the run does not have."""

    A_last: float | None
    A_avg: float | None
    A_new: float | None
    FGT: float | None
    FWT: float | None
    seconds: float | None
    passes: float | None  # of examples through an encoder, forward; there and back counts three
    peak_memory_mb: float | None
    kept_mb: float | None  # most that the method held after a task
    score: str  # what the percentages are of: "accuracy", "seqeval macro F1"; "" where the run does not say
    A: tuple[float, ...]  # (tasks,)
    confusion: Confusion | None
    entities: tuple[dict[str, float | None], ...]  # (tasks,) scores of each, by name, after the last task; or empty


@dataclass(frozen=True)
class Epoch:
    """The training loss of one epoch, as logged."""

    task: int  # counted from 1
    stage: str
    epoch: int
    loss: float
    terms: dict[str, float]


@dataclass(frozen=True)
class Run:
    """One run folder. `metrics` is None while the run is unfinished."""

    folder: Path
    method: str
    benchmark: str
    seed: int
    modality: str
    config: dict[str, Any]
    versions: dict[str, str]
    commit: str | None
    threads: int | None
    tasks: tuple[Task, ...]
    matrix: tuple[tuple[float, ...], ...]  # row t holds a[t][1..t]: the lower triangle
    metrics: Metrics | None
    epochs: tuple[Epoch, ...]
    studies: dict[str, Any]  # by name, as in studies.json; a study that could not be made is {"skipped": reason}


@dataclass(frozen=True)
class Stat:
    """Mean over seeds, and the sample standard deviation (None with one seed)."""

    mean: float
    std: float | None


@dataclass(frozen=True)
class Row:
    """A method with its settings on a benchmark, over seeds. None: not every seed has the number."""

    benchmark: str
    method: str
    label: str
    settings: dict[str, str]
    seeds: tuple[int, ...]
    A_last: Stat | None
    A_avg: Stat | None
    A_new: Stat | None
    FGT: Stat | None
    FWT: Stat | None
    seconds: Stat | None


@dataclass(frozen=True)
class Group:
    """The finished runs behind a row: the same benchmark, method and settings, one run a seed."""

    benchmark: str
    method: str
    label: str
    settings: dict[str, str]
    runs: list[Run] = field(default_factory=list)


def load_runs(paths: Iterable[Path]) -> list[Run]:
    """Read run folders.

    A path is a run folder, or a folder that is searched for run folders. Runs come in the order of the paths, and
    within a searched folder by name. A run without `metrics.json` is unfinished and comes with `metrics=None`.
    """
    folders: dict[Path, Path] = {}  # resolved -> as given: a folder that is named twice is one run
    for path in map(Path, paths):
        if not path.is_dir():
            raise DataError(f"'{path}' is not a folder. Give a run folder, or a folder that contains run folders.")
        found = list(_run_folders(path))
        if not found:
            raise DataError(f"No run in '{path}': neither it nor a folder in it has a run.json.")
        for folder in found:
            folders.setdefault(folder.resolve(), folder)
    return [_load_run(folder) for folder in folders.values()]


def groups(runs: Iterable[Run]) -> list[Group]:
    """Finished runs by benchmark, method and the settings that differ among that method's runs, as they come."""
    finished = [run for run in runs if run.metrics is not None]
    by_method: dict[tuple[str, str], list[Run]] = {}
    for run in finished:
        by_method.setdefault((run.benchmark, run.method), []).append(run)
    made: list[Group] = []
    for (benchmark, method), members in by_method.items():
        by_settings: dict[tuple[tuple[str, str], ...], list[Run]] = {}
        for run, settings in zip(members, _differing(members), strict=True):
            by_settings.setdefault(tuple(settings.items()), []).append(run)
        for pairs, same in by_settings.items():
            label = method + (f" ({', '.join(f'{key}={_short(value)}' for key, value in pairs)})" if pairs else "")
            taken = {group.label for group in made if group.benchmark == benchmark}
            unique, number = label, 2
            while unique in taken:  # shortened values may coincide
                unique, number = f"{label} #{number}", number + 1
            made.append(Group(benchmark, method, unique, dict(pairs), _one_run_per_seed(same)))
    # Collected by method, a method's later settings come before methods that were given earlier: put that right.
    position = {run.folder: number for number, run in reversed(list(enumerate(finished)))}
    return sorted(made, key=lambda group: min(position[run.folder] for run in group.runs))


def summary(runs: Iterable[Run]) -> list[Row]:
    """One row for each benchmark, method and differing setting: mean and sample standard deviation over seeds.

    Unfinished runs are left out. Rows come in the order in which their first run was given.
    """
    rows = []
    for group in groups(runs):
        metrics = [run.metrics for run in group.runs if run.metrics is not None]
        rows.append(
            Row(
                benchmark=group.benchmark,
                method=group.method,
                label=group.label,
                settings=group.settings,
                seeds=tuple(run.seed for run in group.runs),
                **{name: stat([getattr(m, name) for m in metrics]) for name in COLUMNS},
            )
        )
    return rows


def print_table(rows: Sequence[Row], console: Console) -> None:
    """Print a table for each benchmark: mean ± sample standard deviation over seeds, rows in their order."""
    for benchmark in dict.fromkeys(row.benchmark for row in rows):
        # Text, because a str would be read as markup: a method may be called "[red]".
        table = Table(title=Text(printable(benchmark)), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.show_edge = False
        table.add_column("method", min_width=12)
        lines = [
            (printable(row.label), str(len(row.seeds)), *(show(getattr(row, name)) for name in COLUMNS))
            for row in rows
            if row.benchmark == benchmark
        ]
        for number, name in enumerate(("seeds", *COLUMNS), 1):
            width = max(len(line[number]) for line in lines)
            table.add_column(name, justify="right", no_wrap=True, min_width=max(width, len(name)))
        for line in lines:
            table.add_row(Text(line[0]), *line[1:])
        # rich would cut digits off in a narrow console: draw as wide as needed, the terminal then breaks the lines.
        endless = console.options.update(width=10_000)
        width = max(console.width, console.measure(table, options=endless).minimum)
        console.print(Segments(console.render(table, endless.update(width=width))), crop=False, soft_wrap=True)
        console.print()


def show(point: Stat | None) -> str:
    """'81.2 ± 0.9', '81.2' with one seed, '-' without a number; whole numbers from a hundred on need no decimal."""
    if point is None:
        return "-"
    decimals = 1 if point.mean <= 100 else 0
    spread = "" if point.std is None else f" ± {point.std:.{decimals}f}"
    return f"{point.mean:.{decimals}f}{spread}"


def stat(values: Sequence[float | None]) -> Stat | None:
    """Mean and sample standard deviation, or None unless every value is there."""
    numbers = [value for value in values if value is not None]
    if not numbers or len(numbers) < len(values):
        return None
    return Stat(fmean(numbers), stdev(numbers) if len(numbers) > 1 else None)


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as dotted names; `init_args` only says where jsonargparse keeps a class's own settings."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = prefix if key == "init_args" else f"{prefix}.{key}" if prefix else key
        if isinstance(value, dict) and value:
            flat.update(flatten(value, name))
        else:
            flat[name or key] = value
    return flat


def leaf(key: str) -> str:
    """The last part of a dotted name."""
    return key.rpartition(".")[2]


def _differing(runs: Sequence[Run]) -> list[dict[str, str]]:
    """For each run of a method, the settings in which these runs differ, under their shortest clear names."""
    configs = [flatten(run.config) for run in runs]
    keys = list(dict.fromkeys(key for config in configs for key in config))
    keys = [key for key in keys if leaf(key) not in BOOKKEEPING and not leaf(key).endswith("_seed")]
    values = [{key: _value(config[key]) if key in config else "unset" for key in keys} for config in configs]
    keys = [key for key in keys if len({value[key] for value in values}) > 1]
    short = {key: leaf(key) if [leaf(other) for other in keys].count(leaf(key)) == 1 else key for key in keys}
    settings = [{short[key]: value[key] for key in keys} for value in values]
    tasks: dict[str, set[int]] = {}
    for run, setting in zip(runs, settings, strict=True):
        tasks.setdefault(json.dumps(setting), set()).add(len(run.tasks))
    if any(len(counts) > 1 for counts in tasks.values()):  # never average matrices of different sizes
        settings = [{**setting, "tasks": str(len(run.tasks))} for run, setting in zip(runs, settings, strict=True)]
    return settings


def _one_run_per_seed(runs: Iterable[Run]) -> list[Run]:
    """Sorted by seed. A repeated seed with equal scores counts once; with other scores there is no telling which."""
    seeds: dict[int, Run] = {}
    for run in runs:
        other = seeds.setdefault(run.seed, run)
        if other.matrix != run.matrix:
            raise DataError(
                f"'{other.folder}' and '{run.folder}' are both {run.method} on {run.benchmark} with seed {run.seed} "
                "and the same settings, but scored differently. Give only one of them."
            )
    return [seeds[seed] for seed in sorted(seeds)]


def _value(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # 1 in one file and 1.0 in another are the same setting
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _short(value: str) -> str:
    return value if len(value) <= 24 else value[:23] + "…"


def _run_folders(top: Path) -> Iterator[Path]:
    for name, subfolders, files in os.walk(top):
        # Scores without a run.json are a damaged run, which must not silently drop out of a comparison.
        if "run.json" in files or {"matrix.csv", "metrics.json"} <= set(files):
            subfolders.clear()
            yield Path(name)
        subfolders.sort(key=lambda folder: [int(s) if s.isdigit() else s for s in re.split(r"(\d+)", folder)])


def _load_run(folder: Path) -> Run:
    path = folder / "run.json"
    about = _object(path)
    tasks = _get(about, "tasks", list, path)
    for task in tasks:
        if not (isinstance(task, dict) and isinstance(task.get("classes"), list)):
            raise DataError(f"'{path}': each of 'tasks' must be an object with 'name' and 'classes', got {task!r}.")
    if not tasks:
        raise DataError(f"'{path}': 'tasks' is empty; a run has at least one task.")
    finished = (folder / "metrics.json").exists()
    matrix_there = finished or (folder / "matrix.csv").exists()
    matrix = _matrix(folder / "matrix.csv", len(tasks), finished) if matrix_there else ()
    commit, threads = about.get("commit"), about.get("threads")
    return Run(
        folder=folder,
        method=_get(about, "method", str, path),
        benchmark=_get(about, "benchmark", str, path),
        seed=_get(about, "seed", int, path),
        modality=str(about.get("modality", "")),
        config=_get(about, "config", dict, path),
        versions={name: str(version) for name, version in _dict(about.get("versions")).items()},
        commit=None if commit is None else str(commit),
        threads=threads if isinstance(threads, int) else None,
        tasks=tuple(
            Task(str(task.get("name", f"task {number}")), tuple(str(name) for name in task["classes"]))
            for number, task in enumerate(tasks, 1)
        ),
        matrix=matrix,
        metrics=_metrics(folder / "metrics.json", matrix) if finished else None,
        epochs=_epochs(folder / "log.jsonl", len(tasks)) if finished else (),
        studies=_studies(folder / "studies.json", len(tasks)) if (folder / "studies.json").exists() else {},
    )


def _matrix(path: Path, tasks: int, finished: bool) -> tuple[tuple[float, ...], ...]:
    rows = [row for row in csv.reader(_read(path).splitlines()) if row]
    header = ["task", *(str(number) for number in range(1, tasks + 1))]
    if not rows or rows[0] != header:
        raise DataError(f"'{path}': the header must be '{','.join(header)}', for the {tasks} tasks in run.json.")
    if len(rows) - 1 > tasks or (finished and len(rows) - 1 != tasks):
        raise DataError(f"'{path}': {len(rows) - 1} rows for {tasks} tasks; a finished run has one row a task.")
    matrix = []
    for number, row in enumerate(rows[1:], 1):
        try:
            scores = tuple(float(cell) for cell in row[1 : number + 1])
        except ValueError:
            scores = ()
        empty = not any(row[number + 1 :]) and len(row) <= tasks + 1
        if row[0] != str(number) or len(scores) != number or not all(map(math.isfinite, scores)) or not empty:
            raise DataError(f"'{path}': row {number} must be {number}, {number} scores, then empty: {','.join(row)}")
        matrix.append(scores)
    return tuple(matrix)


def _metrics(path: Path, matrix: Sequence[Sequence[float]]) -> Metrics:
    found, tasks = _object(path), len(matrix)
    curve = _get(found, "A", list, path)
    numbers = [_finite(value) for value in curve]
    if len(curve) != tasks or None in numbers:
        raise DataError(f"'{path}': 'A' must be {tasks} numbers, one for each task, got {curve}.")
    found.setdefault("A_new", new_task_accuracy(matrix))  # runs of before it was a measure have no A_new
    for name in COLUMNS:
        value = found.get(name)
        if not isinstance(value, int | float) and (value is not None or name in ("A_last", "A_avg", "seconds")):
            raise DataError(f"'{path}': '{name}' must be a number, got {value!r}.")
    confusion = found.get("confusion")
    return Metrics(
        **{name: _finite(found.get(name)) for name in COLUMNS},
        passes=_finite(found.get("passes")),
        peak_memory_mb=_finite(found.get("peak_memory_mb")),
        kept_mb=max(found["kept"]) / 1e6 if _are_numbers(found.get("kept"), tasks) and all(found["kept"]) else None,
        score=str(found.get("score", "")),
        A=tuple(number for number in numbers if number is not None),
        confusion=None if confusion is None else _confusion(confusion, path),
        entities=_entities(found.get("entities", []), tasks, path),
    )


def _entities(found: Any, tasks: int, path: Path) -> tuple[dict[str, float | None], ...]:
    if found and not (isinstance(found, list) and len(found) == tasks and all(isinstance(one, dict) for one in found)):
        raise DataError(f"'{path}': 'entities' must be {tasks} objects with the scores of a task each.")
    return tuple({str(name): _finite(value) for name, value in one.items()} for one in found)


def _confusion(found: Any, path: Path) -> Confusion:
    try:
        classes = tuple(str(name) for name in found["classes"])
        counts = tuple(tuple(int(count) for count in row) for row in found["counts"])
    except (KeyError, TypeError, ValueError, OverflowError):
        raise DataError(f"'{path}': 'confusion' must have 'classes' and a matrix of 'counts'.") from None
    if len(set(classes)) != len(classes):
        raise DataError(f"'{path}': 'confusion' names a class twice: {', '.join(classes)}.")
    if len(counts) != len(classes) or any(len(row) != len(classes) for row in counts):
        raise DataError(f"'{path}': 'confusion' must have {len(classes)} rows of {len(classes)} counts, as 'classes'.")
    return Confusion(classes, counts)


def _studies(path: Path, tasks: int) -> dict[str, Any]:
    """The studies of a run (docs/studies.md), checked, so that figures can rely on their form."""
    studies = _object(path)
    for name, study in studies.items():
        if not isinstance(study, dict):
            raise DataError(f"'{path}': '{name}' must be an object, got {type(study).__name__}.")
        if "skipped" in study:
            continue
        for key in {"probing": ("observed",), "bias": ("A", "B"), "tracking": ("new", "old", "all")}.get(name, ()):
            if not _are_numbers(study.get(key), tasks):
                raise DataError(f"'{path}': '{key}' of '{name}' must be {tasks} numbers, one for each task.")
        if name == "probing" and not all(_are_numbers(values, tasks) for values in study.values()):
            raise DataError(f"'{path}': each part of 'probing' must be {tasks} numbers, one for each task.")
        if name == "tracking":
            rows = study.get("distance")
            triangle = isinstance(rows, list) and len(rows) == tasks
            if not triangle or not all(_are_numbers(row, t) for t, row in enumerate(rows or [], 1)):
                raise DataError(f"'{path}': 'distance' of 'tracking' must have {tasks} rows, row t with t numbers.")
        if name == "gallery" and not _is_gallery(study.get("tasks")):
            raise DataError(
                f"'{path}': 'tasks' of 'gallery' must be a list of objects with 'task' and 'anchors'; an anchor has a "
                "'label', an 'image' (a PNG in base64) or a 'text', and 'neighbours', which have a 'distance' and "
                "whether they are of the 'same' class besides."
            )
    return studies


def _are_numbers(values: Any, count: int) -> bool:
    """Whether these are so many finite numbers; null stands for one that there is not."""
    return (
        isinstance(values, list)
        and len(values) == count
        and all(value is None or _finite(value) is not None for value in values)
    )


def _is_gallery(tasks: Any) -> bool:
    return isinstance(tasks, list) and all(
        isinstance(task, dict)
        and "task" in task
        and isinstance(task.get("anchors"), list)
        and all(_is_anchor(anchor) for anchor in task["anchors"])
        for task in tasks
    )


def _is_anchor(found: Any) -> bool:
    neighbours = found.get("neighbours") if isinstance(found, dict) else None
    return (
        isinstance(neighbours, list)
        and all(_is_example(example) for example in [found, *neighbours])
        and all(_finite(n.get("distance")) is not None and isinstance(n.get("same"), bool) for n in neighbours)
    )


def _is_example(found: Any) -> bool:
    if not isinstance(found, dict) or "label" not in found:
        return False
    image = found.get("image")
    if image is None:
        word = found.get("word")
        return isinstance(found.get("text"), str) and (word is None or (_are_numbers(word, 2) and None not in word))
    return isinstance(image, str) and bool(BASE64.fullmatch(image))


def _epochs(path: Path, tasks: int) -> tuple[Epoch, ...]:
    epochs = []
    for number, line in enumerate(_read(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            event = parse_json(line)
        except ValueError as error:
            raise DataError(f"'{path}', line {number} is not JSON: {error}.") from None
        if not isinstance(event, dict) or event.get("event") != "epoch":
            continue
        task, epoch, loss = event.get("task"), event.get("epoch"), _finite(event.get("loss"))
        if not (isinstance(task, int) and 1 <= task <= tasks and isinstance(epoch, int)):
            raise DataError(f"'{path}', line {number}: 'task' must be in 1..{tasks} and 'epoch' a number: {line}")
        if loss is not None:  # stages without gradient have no loss
            terms = {name: _finite(value) for name, value in _dict(event.get("terms")).items()}
            known = {name: value for name, value in terms.items() if value is not None}
            epochs.append(Epoch(task, str(event.get("stage", "")), epoch, loss, known))
    return tuple(epochs)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"'{path}' is missing. Run it again, or leave this run out of the comparison.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"'{path}' cannot be read: {error}.") from None


def _object(path: Path) -> dict[str, Any]:
    try:
        found = parse_json(_read(path))
    except ValueError as error:
        raise DataError(f"'{path}' is not JSON: {error}.") from None
    if not isinstance(found, dict):
        raise DataError(f"'{path}' must hold a JSON object, not {type(found).__name__}.")
    return found


def _get(found: dict[str, Any], key: str, kind: type[Any], path: Path) -> Any:
    if not isinstance(found.get(key), kind):
        raise DataError(f"'{path}': '{key}' must be {kind.__name__}, got {found.get(key)!r}.")
    return found[key]


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _finite(value: Any) -> float | None:
    try:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
    except OverflowError:  # a whole number beyond all floats
        return None
