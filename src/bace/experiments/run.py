"""Begin or resume a run, train it, and write its results to its folder."""

import contextlib
import dataclasses
import functools
import html
import importlib.metadata
import platform
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bace import ranks
from bace.config.parse import config_from, import_named_method
from bace.config.schema import Config
from bace.core import checkpoint, metrics
from bace.core.evaluation import calibration
from bace.core.method import Method
from bace.core.resources import bytes_needed, check_resources, forget_peak, peak_bytes
from bace.core.stream import Stream
from bace.core.trainer import Results, Trainer
from bace.errors import ConfigError, InUse, Stopped
from bace.experiments import loggers, run_folder
from bace.experiments.assemble import assemble
from bace.experiments.run_folder import CHECKPOINTS, Confusion, Description, Metrics
from bace.methods import find_method
from bace.models.frozen_prefix import PrefixCaches
from bace.models.products import prefers_onednn
from bace.progress import Show, Tell, is_first, launched, silent
from bace.studies import STUDIES, Study

STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)


@dataclass(frozen=True, repr=False)
class Result:
    """A finished run. `metrics` is the content of metrics.json; `matrix` has a row per task, in percent."""

    metrics: dict[str, Any]
    matrix: list[list[float]]
    folder: Path | None
    method: Method
    studies: dict[str, Any] = field(default_factory=dict)  # the content of studies.json

    def __repr__(self) -> str:
        kept = "" if self.folder is None else f" in '{self.folder}'"
        return f"<Result of {self.method.title}{kept}: {', '.join(' '.join(pair) for pair in self._numbers())}>"

    def _repr_html_(self) -> str:
        """For notebooks: the metrics, and the score of task i (column) after task t (row)."""
        numbers = self._numbers()
        tables = {
            f"{self.method.title} ({self.metrics['score']}, %)": [[n for n, _ in numbers], [v for _, v in numbers]],
            "task by task": [
                ["task", *(str(i) for i in range(1, len(self.matrix) + 1))],
                *([f"after {t}", *(f"{score:.1f}" for score in row)] for t, row in enumerate(self.matrix, 1)),
            ],
        }
        return "".join(
            f"<table><caption>{html.escape(title)}</caption>"
            + "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
            + "</table>"
            for title, rows in tables.items()
        )

    def _numbers(self) -> list[tuple[str, str]]:
        found = {name: self.metrics[name] for name in run_folder.COLUMNS}
        return [(name, "-" if value is None else f"{value:.2f}") for name, value in found.items()]


def run(
    config: Config | Mapping[str, Any] | None = None,
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    trust: bool = False,
    force: bool = False,
    show: Show | None = None,
    tell: Tell = silent,
    caches: PrefixCaches | None = None,
    **settings: Any,
) -> Result:
    """Learn a benchmark with a method, as `bace run` does.

    Args:
        config: settings, nested as in a YAML file; more of them can be given by name:
            `run(benchmark="digits", method={"name": "bace", "alpha": 2}, memory=50, seed=1)`.
        out: the run folder to write; None writes nothing.
        resume: a run folder to continue, with the settings it was started with.
        trust: whether a method that is not part of bace, but named in the run folder, may be imported.
        force: whether to continue with a run.json that was changed since the last checkpoint.
        show: called with the share done and a line of text, for a progress bar.
        tell: called with a line before training (how much memory it will take) and after each task (its scores and
            the time that is left): `tell=print`.
    """
    begun = None
    if resume is not None:
        if config is not None or settings or out is not None:
            raise ConfigError("a resumed run keeps its own settings: give `resume` alone")
        begun, out = run_folder.read_description(Path(resume)), resume
        config = begun.settings(trust=trust)
    if not isinstance(config, Config):
        given = {**(config or {}), **settings}
        import_named_method(given)
        config = config_from(given)
    with ranks.joined(config.train.device):
        if launched():
            config = dataclasses.replace(config, train=dataclasses.replace(config.train, devices=ranks.size()))
        if not is_first():
            show = None
            tell = silent if tell is silent else lambda line: None  # all ranks measure what the first one tells
        if out is None:
            if config.log:
                raise ConfigError(f"logging to {', '.join(config.log)} needs a run folder: name one with `out`")
            return _finish(_trainer(config, tell, caches, show=show), None)
        return _run_in(Path(out), config, show, tell, caches, begun, force=force)


def _run_in(
    folder: Path,
    config: Config,
    show: Show | None,
    tell: Tell,
    caches: PrefixCaches | None,
    begun: Description | None = None,
    *,
    force: bool = False,
) -> Result:
    """Run in a folder, or resume the run that was `begun` in it. No other process may use the folder at the same time.
    If there are several ranks, the first locks the folder and writes."""
    loggers.check(config.log)
    with _held(folder, begun) if is_first() else nullcontext(), stop_signals() as stopping:
        if begun and begun.threads and not config.train.threads:
            torch.set_num_threads(begun.threads)
        log = run_folder.Log(folder) if is_first() else None

        def save(tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
            if log:
                state = {**state, **log.so_far(), "run": described.as_json()}
                checkpoint.save(folder / CHECKPOINTS, tensors, state, keep=max(1, config.checkpoint.keep))

        trainer = _trainer(config, tell, caches, log=log, save=save, show=show, stopping=stopping)
        described = begun or describe(config, trainer.stream)
        if log and not begun:
            run_folder.write_description(folder, described)
        found = run_folder.read_checkpoint(folder, described, force=force) if begun else None
        if found is not None:
            trainer.restore(*found)
            with checkpoint.understood(f"the checkpoint of the run in '{folder}'"):
                if trainer.now.tasks_done == len(trainer.stream):
                    summary(trainer.results, trainer.stream, config)  # raises if the results cannot be summed up
                elif described.instructions not in (None, here := instructions()) and not torch.cuda.is_available():
                    tell(
                        f"this run was begun with {described.instructions} instructions, and this machine computes "
                        f"with {here}: its results may differ slightly from those of a run on one machine"
                    )
                if log:
                    log.cut(found[1]["log"], found[1].get("log_sha256"))
        elif log:
            log.cut(0)
        with loggers.opened(config.log if log else (), folder, described) as others:
            if log and others:
                trainer.log = functools.partial(_to_both, trainer, log, others)
                trainer.clock = trainer.spent()
            if found is None:
                needed = bytes_needed(trainer.method, range(len(trainer.stream)))
                trainer.log({"event": "start", "needed": needed})
            try:
                result = _finish(trainer, folder)
            except Stopped as stopped:
                raise Stopped(stopped.signal, folder) from None
            if others:
                others.close(result.metrics)
            return result


def _to_both(trainer: Trainer, log: run_folder.Log, others: loggers.Loggers, event: dict[str, Any]) -> None:
    """The time that other loggers take is not counted as the method's."""
    log(event)
    began = time.monotonic()
    others(event)
    seconds, passes = trainer.clock
    trainer.clock = seconds + time.monotonic() - began, passes


@contextlib.contextmanager
def _held(folder: Path, begun: Description | None) -> Iterator[None]:
    """Lock a folder that is new or, if a run was `begun` in it, can be continued."""
    if begun is None and run_folder.is_in_use(folder):
        raise ConfigError(f"run folder '{folder}' is already in use: choose another --out, or continue with --resume")
    if begun and (folder / CHECKPOINTS).is_symlink():
        raise ConfigError(f"'{folder / CHECKPOINTS}' is a symbolic link, and nothing is written through one")
    if begun and run_folder.is_finished(folder):
        raise ConfigError(f"the run in '{folder}' is finished: there is nothing to resume")
    with run_folder.locked(folder):
        if run_folder.is_finished(folder) if begun else run_folder.is_in_use(folder):  # since we looked
            raise InUse(f"run folder '{folder}' was already in use by another process a moment ago: try again")
        yield


def _trainer(config: Config, tell: Tell, caches: PrefixCaches | None, **callbacks: Any) -> Trainer:
    with ranks.first_goes_first():
        method, stream = assemble(config, caches)
    tell(check_resources(method, range(len(stream))))
    forget_peak(stream.device)
    studies: dict[str, Study] = {name: STUDIES[name] for name in config.studies}
    given = {name: callback for name, callback in callbacks.items() if callback is not None}
    return Trainer(method, stream, config, studies=studies, tell=tell, **given)


def _finish(trainer: Trainer, folder: Path | None) -> Result:
    results = trainer.run()
    trainer.tick()
    studies = trainer.findings()
    numbers = summary(results, trainer.stream, trainer.config)
    numbers = dataclasses.replace(numbers, **calibration(trainer.method))
    if folder is not None and is_first():
        run_folder.write_results(folder, results.matrix, numbers, studies)
    ranks.wait()
    return Result(numbers.as_json(), results.matrix, folder, trainer.method, studies)


def summary(results: Results, stream: Stream, config: Config) -> Metrics:
    last, peak = results.details[-1], peak_bytes(stream.device)
    measured: dict[str, Any] = metrics.summary(results.matrix, results.before, results.chance)
    if config.measure.fgt_max == "all":
        measured["FGT"] = measured["FGT_all"]
    by_scorer = {name: [detail["scorers"][name] for detail in results.details] for name in last["scorers"]}
    per_class = last.get("per_class")
    return Metrics(
        **measured,
        seconds=round(results.seconds, 3),
        passes=round(results.passes),
        peak_memory_mb=peak and round(peak / 1e6),
        kept=[detail["kept"] for detail in results.details],
        licences=stream.licences,
        score=stream.modality.measure,
        evaluated=last.get("evaluated"),
        scorers={name: metrics.summary(matrix) for name, matrix in by_scorer.items()} or None,
        confusion=Confusion(stream.names, last["confusion"]) if "confusion" in last else None,
        sample_accuracy=last["sample_accuracy"] if per_class else None,
        per_class=dict(zip(stream.names, per_class, strict=True)) if per_class else None,
        entities=last.get("scores", ()),
        per_type=last.get("per_type"),
    )


def describe(config: Config, stream: Stream) -> Description:
    versions = {"bace": importlib.metadata.version("bace-cil"), "python": platform.python_version()}
    return Description(
        method=find_method(str(config.method["name"])).title,
        benchmark=str(config.benchmark["name"]),
        seed=config.seed,
        modality=stream.modality.name,
        picture=stream.modality.picture(stream.data),
        config=dataclasses.asdict(config),
        versions={**versions, "torch": str(torch.__version__)},
        commit=_commit(),
        threads=torch.get_num_threads(),
        instructions=instructions(),
        tasks=tuple(run_folder.Task(task.name, tuple(stream.names[c] for c in task.classes)) for task in stream),
    )


def instructions() -> str:
    """What the last digits of a CPU's results depend on, besides the number of threads."""
    return torch.backends.cpu.get_cpu_capability() + (", oneDNN" if prefers_onednn() else "")


@functools.cache
def _commit() -> str | None:
    """The commit of the source tree, if it is a repository."""
    try:
        answer = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()


@contextlib.contextmanager
def stop_signals() -> Iterator[Callable[[], signal.Signals | None]]:
    """A context in which signals that ask the process to end (including Slurm's pre-emption) do not end it. They are
    noted, and the trainer stops after its next step and a checkpoint. A second signal ends the process."""
    caught: list[signal.Signals] = []

    def note(number: int, frame: object) -> None:
        caught.append(signal.Signals(number))
        signal.signal(number, signal.SIG_DFL)

    if threading.current_thread() is not threading.main_thread():  # the only one that may set handlers
        yield lambda: None
        return
    before = {number: signal.signal(number, note) for number in STOP_SIGNALS}
    try:
        yield lambda: caught[0] if caught else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
