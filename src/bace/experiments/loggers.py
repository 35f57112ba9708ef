"""The losses and scores of a run for TensorBoard, Weights & Biases and MLflow, beside log.jsonl (docs/loggers.md).

A logger is a function that opens a log in the run folder and returns a `Sink`. Each event of log.jsonl goes to every
sink once: logged.jsonl counts them. A resumed run repeats the events since its last checkpoint, and they are skipped.
"""

import contextlib
import importlib.util
import json
import logging
import os
import re
import secrets
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bace.config.parse import flatten
from bace.config.schema import LoggerName
from bace.core.metrics import MEASURES
from bace.errors import ConfigError, one_line
from bace.experiments.run_folder import LOG, Description
from bace.files import is_number, open_own, parse_json, write_whole

LOGGED = "logged.jsonl"  # the identity of the logged run, then a line for each event that was logged
PROJECT = "bace"  # the project of all runs, unless the library's own variable names another
LONGEST = 500  # maximum length of a setting in MLflow


@dataclass(frozen=True)
class Point:
    """Numbers at one point of a run. `axis` says what `step` counts: "epoch" (over all tasks) or "task". `line` is the
    line in log.jsonl."""

    values: dict[str, float]
    axis: str
    step: int
    line: int


@dataclass(frozen=True)
class Sink:
    """An open log. It takes points, and is closed with the measures of a finished run or with None."""

    name: str
    write: Callable[[Point], None]
    close: Callable[[dict[str, float] | None], None]


def tensorboard(folder: Path, run: Description, name: str) -> Sink:
    """Event files in the folder `tensorboard` of the run."""
    from torch.utils.tensorboard import SummaryWriter

    new = not (folder / "tensorboard").exists()
    writer = SummaryWriter(str(folder / "tensorboard"))
    if new:
        writer.add_text("settings", "".join(f"    {key}: {value}\n" for key, value in settings_of(run).items()), 0)

    def write(point: Point) -> None:
        for key, value in point.values.items():
            writer.add_scalar(key, value, point.step)
        writer.flush()

    def close(measures: dict[str, float] | None) -> None:
        for key, value in (measures or {}).items():
            writer.add_scalar(f"final/{key}", value, len(run.tasks))
        writer.close()

    return Sink("TensorBoard", write, close)


def wandb(folder: Path, run: Description, name: str) -> Sink:
    """A run in the folder `wandb` of the run, offline unless WANDB_MODE says otherwise."""
    import wandb as library

    offline = os.environ.get("WANDB_MODE", "offline") == "offline"
    opened = library.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        id=name,
        name=f"{run.method} on {run.benchmark}, seed {run.seed}",
        dir=str(folder),
        mode="offline" if offline else None,
        resume=None if offline else "allow",  # offline, the parts only share their id
        config=settings_of(run),
        settings=library.Settings(silent=True, console="off", save_code=False, x_disable_stats=True),
        reinit="create_new",  # a comparison has many runs in one process
    )
    for axis in ("epoch", "task"):
        opened.define_metric(f"{axis}/*", step_metric=axis)

    def write(point: Point) -> None:
        opened.log({**point.values, point.axis: point.step}, step=point.line)

    def close(measures: dict[str, float] | None) -> None:
        opened.summary.update({f"final/{key}": value for key, value in (measures or {}).items()})
        opened.finish(exit_code=int(measures is None))

    return Sink("Weights & Biases", write, close)


def mlflow(folder: Path, run: Description, name: str) -> Sink:
    """A run in mlflow.db in the run folder, or at MLFLOW_TRACKING_URI."""
    from mlflow.entities import Metric, Param
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    logging.getLogger("alembic").setLevel(logging.WARNING)  # otherwise it logs every table that it makes
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
    client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{folder.resolve() / 'mlflow.db'}"))
    project = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    found = client.get_experiment_by_name(project)
    place = None if "MLFLOW_TRACKING_URI" in os.environ else (folder.resolve() / "mlartifacts").as_uri()
    if found is None:
        with contextlib.suppress(MlflowException):  # another run of a comparison may have made it since
            client.create_experiment(project, artifact_location=place)
        found = client.get_experiment_by_name(project)
    if found is None or found.lifecycle_stage != "active":
        raise ConfigError(f"the experiment '{project}' was deleted: restore it, or set MLFLOW_EXPERIMENT_NAME")
    experiment = found.experiment_id
    before = client.search_runs([experiment], f"tags.`bace.id` = '{name}'")
    if before:
        number = before[0].info.run_id
        client.update_run(number, status="RUNNING")
    else:
        title = f"{run.method} on {run.benchmark}, seed {run.seed}"
        number = client.create_run(experiment, tags={"bace.id": name}, run_name=title).info.run_id
        settings = [Param(key, str(value)[:LONGEST]) for key, value in settings_of(run).items()]
        for start in range(0, len(settings), 100):  # as many as it takes at once
            client.log_batch(number, params=settings[start : start + 100])

    def log(values: dict[str, float], step: int) -> None:
        now = int(1000 * time.time())
        client.log_batch(number, metrics=[Metric(key, value, now, step) for key, value in values.items()])

    def close(measures: dict[str, float] | None) -> None:
        if measures:
            log({f"final/{key}": value for key, value in measures.items()}, len(run.tasks))
        client.set_terminated(number, "KILLED" if measures is None else "FINISHED")

    return Sink("MLflow", lambda point: log(point.values, point.step), close)


LOGGERS: dict[LoggerName, Callable[[Path, Description, str], Sink]] = {
    "tensorboard": tensorboard,
    "wandb": wandb,
    "mlflow": mlflow,
}


PACKAGES: dict[LoggerName, tuple[str, ...]] = {
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
}


def check(names: Sequence[LoggerName]) -> None:
    """Refuse loggers whose packages are not installed, before a run begins."""
    for name in names:
        if not all(map(importlib.util.find_spec, PACKAGES[name])):
            raise ConfigError(f"logging to {name} needs more packages: pip install 'bace-cil[{name}]'")


class Loggers:
    """All loggers of a run: called with each event, and at the end with the metrics."""

    def __init__(self, names: Sequence[LoggerName], folder: Path, run: Description) -> None:
        self.told = Counter(kinds(folder / LOG))  # the number of events before a resume, by kind
        name, self.logged = identity(folder / LOGGED)
        self.count = open_own(folder / LOGGED, "a")
        self.sinks: list[Sink] = []
        for logger in names:
            try:
                self.sinks.append(LOGGERS[logger](folder, run, name))
            except Exception as error:  # libraries raise many kinds
                self.close(None)
                why = f"the log of {logger} cannot be opened ({one_line(error)})"
                raise ConfigError(f"{why}: correct it and continue with --resume") from error

    def __call__(self, event: dict[str, Any]) -> None:
        self.told[event["event"]] += 1
        line = self.told.total()
        point = as_point(event, self.told["epoch"], line)
        if point is None or line <= self.logged:
            return
        self.count.write(f"{line}\n")  # comes first, so that an event is not repeated if the run is killed here
        self.count.flush()
        self._each(lambda sink: sink.write(point))

    def close(self, metrics: dict[str, Any] | None) -> None:
        found: dict[str, Any] = {name: (metrics or {}).get(name) for name in (*MEASURES, "seconds", "passes")}
        measures = {name: float(value) for name, value in found.items() if is_number(value)}
        self._each(lambda sink: sink.close(None if metrics is None else measures))
        self.count.close()

    def _each(self, do: Callable[[Sink], None]) -> None:
        """If a log can no longer be written, it is given up with a warning, and the run continues."""
        for sink in list(self.sinks):
            try:
                do(sink)
            except Exception as error:  # libraries raise many kinds
                self.sinks.remove(sink)
                warnings.warn(f"the log of {sink.name} is given up ({one_line(error)}); the run goes on", stacklevel=2)


@contextlib.contextmanager
def opened(names: Sequence[LoggerName], folder: Path, run: Description) -> Iterator[Loggers | None]:
    """The loggers of a run, if it has any. At the end, loggers that are still open are closed as unfinished."""
    if not names:
        yield None
        return
    loggers = Loggers(list(dict.fromkeys(names)), folder, run)
    try:
        yield loggers
    finally:
        if not loggers.count.closed:
            loggers.close(None)


def as_point(event: dict[str, Any], epochs: int, line: int) -> Point | None:
    """The numbers of an event of log.jsonl; None if it has none."""
    values: dict[str, Any]
    kind = event["event"]
    if kind == "epoch":
        terms = event["terms"] if len(event["terms"]) > 1 else {}
        values = {"loss": event["loss"], **{f"term {name}": value for name, value in terms.items()}}
    elif kind == "task":
        values = {"A_t": event["A"], **{f"score of task {t}": score for t, score in enumerate(event["scores"], 1)}}
        values["kept bytes"] = event["kept"]
    elif kind == "transfer":
        values = {"before learning": event["before"], "by chance": event["chance"]}
    else:
        return None
    axis, step = ("epoch", epochs) if kind == "epoch" else ("task", event["task"])
    found = {f"{axis}/{plain(name)}": float(value) for name, value in values.items() if is_number(value)}
    return Point(found, axis, step, line) if found else None


def plain(name: str) -> str:
    """A name that all libraries accept."""
    return re.sub(r"[^\w. -]", "_", name, flags=re.ASCII)


def settings_of(run: Description) -> dict[str, Any]:
    return {plain(key): value for key, value in flatten(run.config).items()}


def kinds(log: Path) -> list[str]:
    """The kinds of the events in log.jsonl, which was cut back to the last checkpoint."""
    found = []
    for line in log.read_bytes().splitlines():
        try:
            found.append(str(parse_json(line.decode())["event"]))
        except (ValueError, TypeError, KeyError):
            found.append("damaged")
    return found


def identity(path: Path) -> tuple[str, int]:
    """The name of a logged run (a new one if there is none) and the last line of log.jsonl that is logged."""
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines()
        with contextlib.suppress(ValueError, IndexError, TypeError):
            name, numbers = str(parse_json(lines[0])["id"]), [int(line) for line in lines[1:]]
            if re.fullmatch("[0-9a-f]{16}", name):
                return name, max(numbers, default=0)
        raise ConfigError(f"'{path}' is damaged: delete it, and a new log will start at the current position")
    name = secrets.token_hex(8)
    write_whole(path, json.dumps({"id": name}) + "\n")
    return name, 0
