"""The content of a run folder, with its only reader and writer. Report, paper, command line and Learner use it.

run.json       `Description`: settings, tasks, versions. Its `format` is the version of the whole folder's schema.
log.jsonl      The trainer's events, one per line. Those of epochs are read as `Epoch`.
checkpoints/   See core/checkpoint.py. A checkpoint contains a copy of run.json, so that a changed one is noticed.
studies.json   The results of studies by name (docs/studies.md), if the run has studies.
matrix.csv     Row t, column i: the score of task i after learning task t.
metrics.json   `Metrics`. It is written last and marks a run as finished.
sha256.json    Checksums of the files of a finished run.
"""

import contextlib
import csv
import fcntl
import hashlib
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from bace.config.parse import MOST_THREADS, config_from, current, flatten, import_named_method
from bace.config.schema import Config
from bace.core import checkpoint
from bace.core.metrics import MEASURES, new_task_accuracy
from bace.core.position import tasks_done
from bace.data.decode import MOST_PIXELS
from bace.data.modalities import MODALITIES
from bace.errors import CheckpointError, ConfigError, DataError, InUse
from bace.files import check_format, is_number, open_own, parse_json, typed, write_whole

FORMAT = 2  # format 1, of version 0.1, has no number in run.json
RUN, LOG, STUDIES, MATRIX, METRICS = "run.json", "log.jsonl", "studies.json", "matrix.csv", "metrics.json"
SUMS, CHECKPOINTS, LOCK = "sha256.json", "checkpoints", ".lock"
UNBEGUN = {LOCK, LOG, f".{RUN}.unfinished"}  # all files of a run that was refused or killed before it began
T = TypeVar("T")
COLUMNS = (*MEASURES, "seconds")  # numbers of a run that tables show
NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?")  # as Python writes one
BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")  # the page shows nothing else as a picture


# -- the schema


@dataclass(frozen=True)
class Task:
    """One task of a run: its name and the classes that arrive with it."""

    name: str
    classes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Description:
    """run.json: enough to repeat the run, and to load the model without the data."""

    method: str
    benchmark: str
    seed: int
    modality: str = ""
    picture: tuple[int, int] | None = None  # height and width
    config: dict[str, Any]  # in the form of the version that wrote it: see `settings`
    versions: dict[str, str] = field(default_factory=dict)
    commit: str | None = None
    threads: int = 0  # 0: not noted
    instructions: str | None = None
    tasks: tuple[Task, ...]

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ValueError("'tasks' is empty; a run has at least one task")
        check_picture(self.picture)
        if not 0 <= self.threads <= MOST_THREADS:
            raise ValueError(f"'threads' is {self.threads}, not 1 to {MOST_THREADS}")

    def as_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    def settings(self, *, trust: bool = False) -> Config:
        """`trust` allows a method that is named here, and is not part of bace, to be imported."""
        given = current(self.config)
        if trust:
            import_named_method(given)
        return config_from(given)


@dataclass(frozen=True)
class Confusion:
    """Counts of the last model: one row for each true class, one column for each predicted class."""

    classes: Sequence[str]
    counts: Sequence[Sequence[int]]  # (classes, classes)

    def __post_init__(self) -> None:
        size = len(self.classes)
        if len(set(self.classes)) != size:
            raise ValueError(f"'confusion' names a class twice: {', '.join(self.classes)}")
        if len(self.counts) != size or any(len(row) != size for row in self.counts):
            raise ValueError(f"'confusion' must have {size} rows of {size} counts, as 'classes'")


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """metrics.json: the scores of a finished run, in percent. None stands for a number that the run does not have."""

    A: Sequence[float]  # (tasks,)
    A_last: float
    A_avg: float
    A_new: float | None = None
    FGT: float | None = None
    FGT_all: float | None = None
    FWT: float | None = None
    seconds: float
    passes: float | None = None  # of examples through an encoder: forward counts one, forward and backward three
    peak_memory_mb: float | None = None  # of the process, since the start or the last resume
    kept: Sequence[int] | None = None  # (tasks,) bytes that the method held after each
    licences: Sequence[str] = ()  # data that was read besides the task's own examples and the memory
    score: str = ""  # the measure: "accuracy", "seqeval macro F1"; "" if the run does not say
    temperature: float | None = None  # of the last model's probabilities; fitted without test examples
    training_ece: tuple[float, float] | None = None  # calibration error without and with it, on examples learned from
    # fields that metrics.json leaves out if the run does not have them:
    evaluated: Sequence[int] | None = None  # (tasks,) test examples of each, if not all were evaluated
    scorers: dict[str, Any] | None = None  # measures by the method's other rules of prediction
    confusion: Confusion | None = None
    sample_accuracy: float | None = None
    per_class: dict[str, float | None] | None = None  # accuracy
    entities: Sequence[dict[str, float | None]] = ()  # (tasks,) scores of each, by name, after the last task
    per_type: dict[str, float | None] | None = None  # F1 of each entity type, on the sentences of its task

    def __post_init__(self) -> None:
        if self.entities and len(self.entities) != len(self.A):
            raise ValueError(f"'entities' must be {len(self.A)} objects with the scores of a task each")
        if self.temperature is not None and not 0 < self.temperature < math.inf:
            raise ValueError(f"'temperature' is {self.temperature}, not a positive number")

    @property
    def kept_mb(self) -> float | None:
        """The maximum number of bytes that the method held after a task."""
        return max(self.kept) / 1e6 if self.kept and all(self.kept) else None

    def as_json(self) -> dict[str, Any]:
        sometimes = ("evaluated", "scorers", "confusion", "sample_accuracy", "per_class", "entities", "per_type")
        return {name: value for name, value in asdict(self).items() if name not in sometimes or value not in (None, ())}


@dataclass(frozen=True)
class Epoch:
    """An event of log.jsonl: the training loss of one epoch, and its terms."""

    task: int  # counted from 1
    epoch: int
    loss: float
    stage: str = ""
    terms: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Shown:
    """An example in a gallery: a picture (PNG in base64), or a text, with the place of a word in it."""

    label: Any
    image: str | None = None
    text: str | None = None
    word: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not (BASE64.fullmatch(self.image) if self.image is not None else self.text is not None):
            raise ValueError("an example of 'gallery' must have an 'image' (a PNG in base64) or a 'text'")


@dataclass(frozen=True, kw_only=True)
class Neighbour(Shown):
    distance: float
    same: bool  # whether it is of its anchor's class


@dataclass(frozen=True, kw_only=True)
class Anchor(Shown):
    neighbours: tuple[Neighbour, ...]


@dataclass(frozen=True)
class Scene:
    task: Any
    anchors: tuple[Anchor, ...]


@dataclass(frozen=True, kw_only=True)
class Run(Description):
    """A whole run folder. `metrics` is None while the run is unfinished."""

    folder: Path
    matrix: tuple[tuple[float, ...], ...]  # of the tasks learned so far; row t holds a[t][1..t]: the lower triangle
    metrics: Metrics | None
    epochs: tuple[Epoch, ...]
    studies: dict[str, Any]  # by name, as in studies.json; a study that could not be made is {"skipped": reason}
    changed: tuple[str, ...] = field(repr=False)  # files of a finished run that have changed since


# -- writing


def write_description(folder: Path, described: Description) -> None:
    with _writing(folder / RUN):
        write_whole(folder / RUN, _json(described.as_json()))


def write_results(folder: Path, matrix: Sequence[Sequence[float]], metrics: Metrics, studies: dict[str, Any]) -> None:
    """Write the files of a finished run."""
    tasks = len(matrix)
    rows = [["task", *range(1, tasks + 1)], *([t, *row, *[""] * (tasks - t)] for t, row in enumerate(matrix, 1))]
    texts = {STUDIES: _json(studies)} if studies else {}
    texts |= {MATRIX: "".join(",".join(map(str, row)) + "\n" for row in rows), METRICS: _json(metrics.as_json())}
    sums = {name: sha256(text.encode()) for name, text in texts.items()}
    sums |= {name: sha256((folder / name).read_bytes()) for name in (RUN, LOG)}
    for name, text in {SUMS: _json(sums), **texts}.items():
        with _writing(folder / name):
            write_whole(folder / name, text)


def _json(content: Any) -> str:
    """Indented, but with the numbers of a list in one line: a confusion matrix of 1,000 classes has a million of them.
    Texts are not touched, because JSON has no line breaks in them."""
    indented = json.dumps(content, indent=2) + "\n"
    return re.sub(r"\[\n([-+.\deE,\s]+)\]", lambda found: f"[{' '.join(found[1].split())}]", indented)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn a full disk into an error that the user can correct. Only the time since the last checkpoint is lost."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"could not write '{path}': {error.strerror}. Nothing is lost: make room and continue with --resume."
        ) from error


class Log:
    """log.jsonl: one event per line, flushed at once; on resume it is cut back to the checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOG
        with _writing(self.path):
            self.file = open_own(self.path, "a")

    def __call__(self, event: dict[str, Any]) -> None:
        with _writing(self.path):
            self.file.write(json.dumps(event) + "\n")
            self.file.flush()

    def so_far(self) -> dict[str, Any]:
        """The size on the disk, for `cut`."""
        with _writing(self.path):
            os.fsync(self.file.fileno())
        content = self.path.read_bytes()
        return {"log": len(content), "log_sha256": sha256(content)}

    def cut(self, size: int, expected: str | None = None) -> None:
        """A log that is shorter, because a file system lost its end, is not changed: padding would make it
        unreadable."""
        content = self.path.read_bytes()
        if len(content) > size:
            self.file.truncate(size)
        if expected not in (None, sha256(content[:size])):
            warnings.warn(
                f"'{self.path}' was changed after the run wrote it: its losses may be wrong. Nothing else in the run "
                "depends on it.",
                stacklevel=2,
            )


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a run folder, if it does not exist, and lock it. The kernel releases the lock when the process ends, however
    it ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run folder '{folder}' cannot be made ({error.strerror}): choose another --out") from error
    try:
        lock = open_own(folder / LOCK, "w")
    except OSError as error:
        raise ConfigError(f"run folder '{folder}' cannot be written ({error.strerror}): choose another") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InUse(f"run folder '{folder}' is already in use by another process: wait for it") from error
        yield


# -- what there is


def is_in_use(folder: Path) -> bool:
    """Whether the folder contains more than the files of a run that was refused before it began."""
    if not folder.is_dir():
        return folder.exists()
    return any(path.name not in UNBEGUN for path in folder.iterdir())


def is_begun(folder: Path) -> bool:
    return (folder / RUN).exists()


def is_finished(folder: Path) -> bool:
    return (folder / METRICS).exists()


# -- reading a run to continue it, or to predict


def read_description(folder: Path) -> Description:
    """The run.json of a run to resume, or of a run whose model is loaded."""
    if not is_begun(folder):
        raise ConfigError(f"'{folder}' is not a run folder: it has no run.json. Start a run with --out")
    described = _Files(folder).description()
    if described.modality not in MODALITIES:
        raise DataError(f"'{folder / RUN}': 'modality' is '{described.modality}', none of {tuple(MODALITIES)}")
    return described


def read_checkpoint(
    folder: Path, described: Description, *, force: bool
) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The newest checkpoint. Without `force`, it is refused if run.json has changed since it was written."""
    found = checkpoint.load(folder / CHECKPOINTS)
    if found and "run" in found[1] and not force:
        with checkpoint.understood(f"the checkpoint of the run in '{folder}'"):
            before, now = flatten(asdict(_description(found[1]["run"]))), flatten(asdict(described))
        if changed := [key for key in {**before, **now} if before.get(key) != now.get(key)]:
            raise CheckpointError(
                f"'{folder / RUN}' was changed since the last checkpoint ({', '.join(changed[:5])}): the run would "
                "not be the one that was begun. Put it back, or use --force (in Python: force=True)"
            )
    return found


def read_model(folder: Path, *, force: bool) -> tuple[Description, dict[str, Any], float | None]:
    """The description of a finished run, the state of its method, and the temperature of its probabilities."""
    described = read_description(folder)
    found = read_checkpoint(folder, described, force=force)
    if found is None or not is_finished(folder):
        raise CheckpointError(f"the run in '{folder}' is not finished: continue it with --resume")
    tensors, state = found
    with checkpoint.understood(f"the checkpoint of the run in '{folder}'"):
        done, values = tasks_done(state["at"]), checkpoint.method_state(tensors, state["method"])
    if done != len(described.tasks):
        raise CheckpointError(
            f"the last checkpoint of the run in '{folder}' is damaged, and the one before it does not hold the "
            "finished model: run it again"
        )
    metrics: Metrics = _Files(folder).object(METRICS, lambda found: typed(found, Metrics, METRICS))
    return described, values, metrics.temperature


# -- reading runs to compare them


def load_runs(paths: Iterable[Path]) -> list[Run]:
    """Read run folders.

    A path is a run folder, or a folder that is searched for run folders. Runs come in the order of the paths, and
    within a searched folder by name. A run without `metrics.json` is unfinished and comes with `metrics=None`.
    """
    folders: dict[Path, Path] = {}  # resolved -> as given, so that a folder that is named twice is one run
    for path in map(Path, paths):
        if not path.is_dir():
            raise DataError(f"'{path}' is not a folder. Give a run folder, or a folder that contains run folders.")
        found = list(run_folders(path))
        if not found:
            raise DataError(f"No run in '{path}': neither it nor a folder in it has a run.json.")
        for folder in found:
            folders.setdefault(folder.resolve(), folder)
    return [load_run(folder) for folder in folders.values()]


def load_run(folder: Path) -> Run:
    files, finished = _Files(folder), is_finished(folder)
    described = files.description()
    tasks = len(described.tasks)
    matrix: tuple[tuple[float, ...], ...] = ()
    if finished or (folder / MATRIX).exists():
        matrix = files.understood(MATRIX, lambda text: _matrix(text, tasks, finished))
    elif (folder / LOG).exists():
        matrix = files.understood(LOG, lambda text: _matrix_so_far(text, tasks))
    studied = (folder / STUDIES).exists()
    return Run(
        **vars(described),
        folder=folder,
        matrix=matrix,
        metrics=files.object(METRICS, lambda found: _metrics(found, matrix)) if finished else None,
        epochs=files.understood(LOG, lambda text: _epochs(text, tasks)) if finished else (),
        studies=files.object(STUDIES, lambda found: _checked_studies(found, tasks)) if studied else {},
        changed=files.changed() if finished else (),
    )


def run_folders(top: Path) -> Iterator[Path]:
    """The run folders in a folder, which may be one itself, by their names."""
    for name, subfolders, files in os.walk(top):
        # Scores without a run.json are a damaged run, which must not silently drop out of a comparison.
        if RUN in files or {MATRIX, METRICS} <= set(files):
            subfolders.clear()
            yield Path(name)
        subfolders.sort(key=lambda folder: [int(s) if s.isdigit() else s for s in re.split(r"(\d+)", folder)])


class _Files:
    """The files of a run folder. Each is read once, by functions that raise ValueError if the content is invalid."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.read: dict[str, bytes] = {}

    def understood(self, name: str, understand: Callable[[str], T]) -> T:
        path = self.folder / name
        try:
            self.read[name] = path.read_bytes()
            text = self.read[name].decode()
        except FileNotFoundError:
            raise DataError(f"'{path}' is missing. Run it again, or leave this run out of the comparison.") from None
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"'{path}' cannot be read: {error}.") from None
        try:
            return understand(text)
        except ValueError as error:
            raise DataError(f"'{path}': {error}.") from None

    def object(self, name: str, understand: Callable[[dict[str, Any]], T]) -> T:
        def parse(text: str) -> T:
            try:
                found = parse_json(text)
            except ValueError as error:
                raise DataError(f"'{self.folder / name}' cannot be read: it is not JSON ({error}).") from None
            if not isinstance(found, dict):
                raise ValueError(f"it must hold a JSON object, not {type(found).__name__}")
            return understand(found)

        return self.understood(name, parse)

    def description(self) -> Description:
        return self.object(RUN, _description)

    def changed(self) -> tuple[str, ...]:
        """The files that have changed since the run ended; none if the run has no checksums."""
        if not (self.folder / SUMS).exists():
            return ()
        try:
            sums = self.object(SUMS, lambda found: found)
        except DataError:
            return (SUMS,)
        if not sums.keys() <= {RUN, LOG, STUDIES, MATRIX, METRICS}:
            return (SUMS,)
        return tuple(name for name, expected in sums.items() if sha256(self.read.get(name, b"")) != expected)


def _description(found: Any) -> Description:
    if isinstance(found, dict):
        check_format(found, FORMAT)
    described: Description = typed(found, Description, RUN)
    return described


def _matrix(text: str, tasks: int, finished: bool) -> tuple[tuple[float, ...], ...]:
    rows = [row for row in csv.reader(text.splitlines()) if row]
    header = ["task", *(str(number) for number in range(1, tasks + 1))]
    if not rows or rows[0] != header:
        raise ValueError(f"the header must be '{','.join(header)}', for the {tasks} tasks in run.json")
    if len(rows) - 1 > tasks or (finished and len(rows) - 1 != tasks):
        raise ValueError(f"{len(rows) - 1} rows for {tasks} tasks; a finished run has one row per task")
    matrix = []
    for number, row in enumerate(rows[1:], 1):
        scores = [float(cell) for cell in row[1 : number + 1] if NUMBER.fullmatch(cell)]
        empty = not any(row[number + 1 :]) and len(row) <= tasks + 1
        if row[0] != str(number) or len(scores) != number or not all(map(is_number, scores)) or not empty:
            raise ValueError(f"row {number} must be {number}, {number} scores, then empty: {','.join(row)}")
        matrix.append(tuple(scores))
    return tuple(matrix)


def _matrix_so_far(text: str, tasks: int) -> tuple[tuple[float, ...], ...]:
    """The scores of the tasks in the log of an unfinished run. Its last line may be cut off."""
    matrix: list[tuple[float, ...]] = []
    for line in text.splitlines():
        try:
            event = parse_json(line)
        except ValueError:
            break
        if isinstance(event, dict) and event.get("event") == "task":
            scores: tuple[float, ...] = typed(event.get("scores"), tuple[float, ...], "scores")
            if len(matrix) == tasks or len(scores) != len(matrix) + 1:
                raise ValueError(f"task {event.get('task')!r:.20} does not have the scores of all tasks up to it")
            matrix.append(scores)
    return tuple(matrix)


def _metrics(found: dict[str, Any], matrix: Sequence[Sequence[float]]) -> Metrics:
    found.setdefault("A_new", new_task_accuracy(matrix))  # older runs have no A_new
    metrics: Metrics = typed(found, Metrics, METRICS)
    if len(metrics.A) != len(matrix):
        raise ValueError(f"'A' must be {len(matrix)} numbers, one for each task, got {found['A']}")
    return metrics


def _epochs(text: str, tasks: int) -> tuple[Epoch, ...]:
    epochs: list[Epoch] = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            event = parse_json(line.strip() or "null")
            # other events are not for the report, and epochs without gradient have no loss
            if isinstance(event, dict) and event.get("event") == "epoch" and event.get("loss") is not None:
                epochs.append(typed(event, Epoch, "epoch"))
                if not 1 <= epochs[-1].task <= tasks:
                    raise ValueError(f"'task' must be in 1..{tasks}")
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    return tuple(epochs)


def _checked_studies(found: dict[str, Any], tasks: int) -> dict[str, Any]:
    """The studies, after a check of the form that figures rely on (docs/studies.md)."""
    for name, study in found.items():
        if not isinstance(study, dict):
            raise ValueError(f"'{name}' must be an object, got {type(study).__name__}")
        if "skipped" in study:
            continue
        rows = {"probing": ("observed", *study), "bias": ("A", "B"), "tracking": ("new", "old", "all")}
        for key in rows.get(name, ()):
            if not _are_numbers(study.get(key), tasks):
                raise ValueError(f"'{key}' of '{name}' must be {tasks} numbers, one for each task")
        if name == "tracking":
            triangle = study.get("distance")
            whole = isinstance(triangle, list) and len(triangle) == tasks
            if not whole or not all(_are_numbers(row, t) for t, row in enumerate(triangle or [], 1)):
                raise ValueError(f"'distance' of 'tracking' must have {tasks} rows, row t with t numbers")
        if name == "gallery":
            typed(study.get("tasks"), tuple[Scene, ...], "tasks")
    return found


def _are_numbers(values: Any, count: int) -> bool:
    """Whether this is a list of `count` numbers, where null stands for a missing one."""
    return (
        isinstance(values, list) and len(values) == count and all(value is None or is_number(value) for value in values)
    )


def check_picture(size: Sequence[int] | None) -> None:
    """Raise ValueError unless these are a possible height and width of a picture, or None for no picture."""
    if size is not None and (min(size) < 1 or math.prod(size) > MOST_PIXELS):
        raise ValueError(f"'picture' is {size!r:.50}, not a height and a width")


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
