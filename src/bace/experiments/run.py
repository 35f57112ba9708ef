"""From a configuration to a finished run: assemble, train, write the run folder."""

import contextlib
import csv
import dataclasses
import fcntl
import functools
import hashlib
import importlib.metadata
import io
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from bace.config.parse import MOST_THREADS, config_from, current, flatten, import_named_method
from bace.config.schema import Config
from bace.core import checkpoint, metrics
from bace.core.memory import Memory
from bace.core.method import Method
from bace.core.position import Position
from bace.core.resources import bytes_needed, check_room, forget_peak, peak_bytes
from bace.core.stream import Stream
from bace.core.trainer import Results, Trainer
from bace.data.batch import Modality
from bace.data.benchmarks import cut_of, find_benchmark
from bace.data.modalities.image import Images
from bace.errors import CheckpointError, ConfigError, DataError, Stopped
from bace.experiments.stream import make_stream
from bace.files import open_own, parse_json, write_whole
from bace.methods import find_method
from bace.models.adapters import add_adapters
from bace.models.encoders import Encoder, freeze_prefix, keep_prefix, load_encoder
from bace.models.heads import CosineHead, Head, LinearHead
from bace.models.model import Model
from bace.randomness import generator
from bace.studies import STUDIES, Study


@dataclass(frozen=True)
class Result:
    """A finished run. `metrics` is what metrics.json holds; `matrix` has a row per task, in percent."""

    metrics: dict[str, Any]
    matrix: list[list[float]]
    folder: Path | None
    method: Method = field(repr=False)
    studies: dict[str, Any] = field(default_factory=dict, repr=False)  # what studies.json holds


def run(
    config: Config | Mapping[str, Any] | None = None,
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    trust: bool = False,
    force: bool = False,
    show: Callable[[float, str], None] | None = None,
    tell: Callable[[str], None] = lambda text: None,
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
        tell: called before training with a line that says how much memory it will take.
    """
    if resume is not None:
        if config is not None or settings or out is not None:
            raise ConfigError("a resumed run keeps its own settings: give `resume` alone")
        config = read_config(Path(resume), trust=trust)
        return _run_in(Path(resume), config, show, tell, resume=True, force=force)
    if not isinstance(config, Config):
        given = {**(config or {}), **settings}
        import_named_method(given)
        config = config_from(given)
    if out is None:
        return _finish(_trainer(config, tell, show=show), None)
    return _run_in(Path(out), config, show, tell)


# -- assembling


def assemble(config: Config) -> tuple[Method, Stream]:
    """The method and the stream of a configuration, attached to each other."""
    benchmark = find_benchmark(str(config.benchmark["name"]))
    prepare_torch(config)
    method = make_method(config, benchmark.modality)
    cut = cut_of(config)
    parts = benchmark.parts(cut)  # before a backbone is fetched: the path may be wrong
    encoder = load_backbone(config)
    stream = make_stream(parts, cut, encoder, config.backbone.name, config.seed)
    check_memory(config, method, stream)
    attach(method, stream, config, encoder)
    return method, stream


def make_method(config: Config, modality: str) -> Method:
    found = find_method(str(config.method["name"]))
    if modality not in found.modalities:
        why = f" ({found.card.o_rows})" if found.card and modality == "token" else ""
        raise ConfigError(
            f"{found.title} is not defined for {modality} data{why}: it works on {', '.join(sorted(found.modalities))}"
        )
    return found(**{k: v for k, v in config.method.items() if k != "name"})


def check_memory(config: Config, method: Method | type[Method], stream: Stream) -> None:
    """Say before training, not after the last task, that the memory cannot hold one example of each class."""
    if method.uses_memory:
        groups = len(set(stream.groups.tolist()) - {-1})
        Memory(**dataclasses.asdict(config.memory)).quota(groups)


def load_backbone(config: Config) -> Encoder:
    return load_encoder(config.backbone.name, image_size=config.backbone.image_size)


def attach(method: Method, stream: Stream, config: Config, encoder: Encoder) -> None:
    """Give a method its stream, memory and network."""
    device = torch.device(device_name(config.train.device))

    def fresh_model() -> Model:
        return make_model(load_backbone(config), config).to(device)

    stream.device = device
    method.stream, method.training_settings, method.now = stream, config.train, Position(config.seed)
    method.memory = Memory(**dataclasses.asdict(config.memory))
    method.fresh_model = fresh_model
    method.model = method.build(make_model(encoder, config).to(device))
    method.to(device)
    for memory in method.memories():
        memory.cpu()  # ids, not numbers to compute with


def make_model(encoder: Encoder, config: Config) -> Model:
    if config.backbone.adapter:
        add_adapters(encoder, config.backbone.adapter, generator(config.seed, "adapters"))
    if config.backbone.freeze:
        freeze_prefix(encoder, config.backbone.freeze)
    precision = torch.bfloat16 if config.train.precision == "bfloat16" else torch.float32
    if config.backbone.cache:
        keep_prefix(encoder, config.backbone.cache, precision)
    head: Head
    if config.head.kind == "cosine":
        head = CosineHead(encoder.width, config.head.sigma_init, config.head.sigma_learn)
    else:
        head = LinearHead(encoder.width)
    return Model(encoder, head, precision)


def device_name(wanted: str) -> str:
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=wanted)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].partition(":")[0]
        reason = "no such device" if reason.startswith("Expected one of") else reason
        raise ConfigError(f"train.device '{wanted}' cannot be used here ({reason}): use auto, cpu or cuda") from error
    return wanted


def prepare_torch(config: Config) -> None:
    """Threads, determinism, and a check that the precision asked for does not kill the process."""
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs time, changes nothing here
    if config.train.precision == "bfloat16" and device_name(config.train.device) == "cpu":
        probe = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); print(float((a @ a)[0, 0]))"
        if subprocess.run([sys.executable, "-c", probe], capture_output=True, check=False).returncode:
            raise ConfigError("train.precision bfloat16 does not work on this CPU (probed): use float32")


def _trainer(config: Config, tell: Callable[[str], None], **callbacks: Any) -> Trainer:
    method, stream = assemble(config)
    tell(check_room(method, range(len(stream))))
    forget_peak(stream.device)
    studies: dict[str, Study] = {name: STUDIES[name] for name in config.studies}
    given = {name: callback for name, callback in callbacks.items() if callback is not None}
    return Trainer(method, stream, config, studies=studies, **given)


# -- the run folder

STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU)
SUMS = "sha256.json"  # of a finished run's files, so that a changed one is noticed
FILES = {"run.json", "log.jsonl", "matrix.csv", "metrics.json", "studies.json"}
# all that a run leaves that was refused or killed before it began
UNBEGUN = {".lock", "log.jsonl", ".run.json.unfinished"}


def _run_in(
    folder: Path,
    config: Config,
    show: Callable[[float, str], None] | None,
    tell: Callable[[str], None],
    *,
    resume: bool = False,
    force: bool = False,
) -> Result:
    """Run or resume in a folder, which nobody else may use at the same time."""
    if not resume and _in_use(folder):
        raise ConfigError(f"run folder '{folder}' is already in use: choose another --out, or continue with --resume")
    if resume and (folder / "checkpoints").is_symlink():
        raise ConfigError(f"'{folder / 'checkpoints'}' is a symbolic link, and nothing is written through one")
    if resume and (folder / "metrics.json").exists():
        raise ConfigError(f"the run in '{folder}' is finished: there is nothing to resume")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run folder '{folder}' cannot be made ({error.strerror}): choose another --out") from error
    with _locked(folder), stop_signals() as stopping:
        described = read_run(folder) if resume else {}
        if "threads" in described and not config.train.threads:
            torch.set_num_threads(described["threads"])
        log = _Log(folder / "log.jsonl")

        def save(tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
            state = {**state, **log.so_far(), "run": described}
            checkpoint.save(folder / "checkpoints", tensors, state, keep=max(1, config.checkpoint.keep))

        trainer = _trainer(config, tell, log=log, save=save, show=show, stopping=stopping)
        needed = bytes_needed(trainer.method, range(len(trainer.stream)))
        if not resume:
            described = describe(config, trainer.stream)
            write_json(folder / "run.json", described)
        found = checkpoint.load(folder / "checkpoints") if resume else None
        if found is not None:
            if not force:
                check_unchanged(folder, described, found[1])
            trainer.restore(*found)
            with checkpoint.understood(f"the checkpoint of the run in '{folder}'"):
                if trainer.now.tasks_done == len(trainer.stream):
                    summary(trainer.results, trainer.stream, config)  # what was measured can be summed up
                log.cut(found[1]["log"], found[1].get("log_sha256"))
        else:
            log.cut(0)
        if found is None:
            log({"event": "start", "needed": needed})
        try:
            return _finish(trainer, folder)
        except Stopped as stopped:
            raise Stopped(stopped.signal, folder) from None


def check_unchanged(folder: Path, described: dict[str, Any], state: dict[str, Any]) -> None:
    """Refuse a run.json that is not the one which the run's checkpoint was written with."""
    with checkpoint.understood(f"the checkpoint of the run in '{folder}'"):
        before, now = flatten(state.get("run", described)), flatten(described)
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    if changed:
        raise CheckpointError(
            f"'{folder / 'run.json'}' was changed since the last checkpoint ({', '.join(changed[:5])}): the run would "
            "not be the one that was begun. Put it back, or use --force (in Python: force=True)"
        )


def _in_use(folder: Path) -> bool:
    """Whether there is anything to lose: more than what a run leaves that was refused before it began."""
    if not folder.is_dir():
        return folder.exists()
    return any(path.name not in UNBEGUN for path in folder.iterdir())


def _finish(trainer: Trainer, folder: Path | None) -> Result:
    results = trainer.run()
    trainer.tick()
    studies = trainer.findings()
    numbers = summary(results, trainer.stream, trainer.config)
    if folder is not None:
        texts = {"matrix.csv": matrix_csv(results.matrix), "metrics.json": as_json(numbers)}
        texts = {"studies.json": as_json(studies), **texts} if studies else texts
        sums = {name: sha256(text.encode()) for name, text in texts.items()}
        sums |= {name: sha256((folder / name).read_bytes()) for name in ("run.json", "log.jsonl")}
        write_json(folder / SUMS, sums)
        for name, text in texts.items():  # metrics.json last: with it a run is finished
            write_text(folder / name, text)
    return Result(numbers, results.matrix, folder, trainer.method, studies)


def summary(results: Results, stream: Stream, config: Config) -> dict[str, Any]:
    """What metrics.json holds, in percent."""
    last = results.details[-1]
    numbers: dict[str, Any] = metrics.summary(results.matrix, results.before, results.chance)
    if config.measure.fgt_max == "all":
        numbers["FGT"] = numbers["FGT_all"]
    numbers["seconds"] = round(results.seconds, 3)
    numbers["passes"] = round(results.passes)
    peak = peak_bytes(stream.device)
    numbers["peak_memory_mb"] = peak and round(peak / 1e6)  # of this process: since the start, or the last resume
    numbers["kept"] = [detail["kept"] for detail in results.details]  # bytes, after each task
    numbers["licences"] = stream.licences  # what was read beside the task's own examples and the memory
    numbers["score"] = "accuracy" if stream.background is None else "seqeval macro F1"
    if "evaluated" in last:
        numbers["evaluated"] = last["evaluated"]  # so many test examples of each task, not all
    if last["scorers"]:
        by_scorer = {name: [detail["scorers"][name] for detail in results.details] for name in last["scorers"]}
        numbers["scorers"] = {name: metrics.summary(matrix) for name, matrix in by_scorer.items()}
    if "confusion" in last:
        numbers["confusion"] = {"classes": stream.names, "counts": last["confusion"]}
    if "per_class" in last:
        numbers["sample_accuracy"] = last["sample_accuracy"]
        numbers["per_class"] = dict(zip(stream.names, last["per_class"], strict=True))
    if "scores" in last:
        numbers["entities"] = last["scores"]
    return numbers


def describe(config: Config, stream: Stream) -> dict[str, Any]:
    """What run.json holds: enough to run again, and to load the model without the data."""
    return {
        "method": find_method(str(config.method["name"])).title,
        "benchmark": config.benchmark["name"],
        "seed": config.seed,
        "modality": stream.modality,
        "picture": list(stream.data.pixels.shape[2:]) if isinstance(stream.data, Images) else None,
        "config": dataclasses.asdict(config),
        "versions": {
            "bace": importlib.metadata.version("bace-cil"),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "commit": _commit(),
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "tasks": [{"name": task.name, "classes": [stream.names[c] for c in task.classes]} for task in stream],
    }


def read_run(folder: Path) -> dict[str, Any]:
    try:
        found = parse_json((folder / "run.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"'{folder}' is not a run folder: it has no run.json. Start a run with --out") from error
    except (OSError, ValueError) as error:
        raise DataError(f"'{folder / 'run.json'}' cannot be read: {error}") from error
    kinds = {"config": dict, "tasks": list, "modality": str}
    about = found if isinstance(found, dict) else {}
    if missing := [key for key, kind in kinds.items() if not isinstance(about.get(key), kind)]:
        raise DataError(f"'{folder / 'run.json'}' does not describe a run: it has no '{missing[0]}'")
    if about["modality"] not in get_args(Modality):
        raise DataError(f"'{folder / 'run.json'}': 'modality' is '{about['modality']}', none of {get_args(Modality)}")
    if not is_picture(about.get("picture")):
        raise DataError(f"'{folder / 'run.json'}': 'picture' is {about['picture']!r}, not a height and a width")
    if about.get("threads", 1) not in range(1, MOST_THREADS + 1):
        raise DataError(f"'{folder / 'run.json'}': 'threads' is {about['threads']!r}, not 1 to {MOST_THREADS}")
    return about


def is_picture(size: Any) -> bool:
    """Whether this is a height and a width, or None for data that are no pictures."""
    return size is None or (isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size))


def read_config(folder: Path, *, trust: bool = False) -> Config:
    """The settings of a run; `trust`: a method that is not part of bace, but named there, may be imported."""
    given = current(read_run(folder)["config"])
    if trust:
        import_named_method(given)
    return config_from(given)


def matrix_csv(matrix: list[list[float]]) -> str:
    """Row t, column i: the score of task i after learning task t."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["task", *range(1, len(matrix) + 1)])
    for t, row in enumerate(matrix, 1):
        writer.writerow([t, *row, *[""] * (len(matrix) - t)])
    return text.getvalue()


def changed_files(folder: Path) -> list[str]:
    """Those of a finished run's files that are not as the run left them; none of a run that noted no checksums."""
    try:
        sums = json.loads((folder / SUMS).read_text())
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError):
        return [SUMS]
    if not isinstance(sums, dict) or not sums.keys() <= FILES:
        return [SUMS]
    found = {name: (folder / name).read_bytes() if (folder / name).is_file() else b"" for name in sums}
    return [name for name, content in found.items() if sha256(content) != sums[name]]


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def as_json(content: Any) -> str:
    return json.dumps(content, indent=2) + "\n"


def write_json(path: Path, content: Any) -> None:
    write_text(path, as_json(content))


def write_text(path: Path, text: str) -> None:
    with _writing(path):
        write_whole(path, text)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """A full disk is the user's to put right, and costs nothing but the time since the last checkpoint."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"could not write '{path}': {error.strerror}. Nothing is lost: make room and continue with --resume."
        ) from error


class _Log:
    """log.jsonl: one event a line, flushed at once; cut back to the checkpoint on resume."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _writing(path):
            self.file = open_own(path, "a")

    def __call__(self, event: dict[str, Any]) -> None:
        with _writing(self.path):
            self.file.write(json.dumps(event) + "\n")
            self.file.flush()

    def so_far(self) -> dict[str, Any]:
        """What is on the disk, for `cut`."""
        with _writing(self.path):
            os.fsync(self.file.fileno())
        content = self.path.read_bytes()
        return {"log": len(content), "log_sha256": sha256(content)}

    def cut(self, size: int, expected: str | None = None) -> None:
        """A log that is shorter, for a file system lost its end, stays as it is: padding would make it unreadable."""
        content = self.path.read_bytes()
        if len(content) > size:
            self.file.truncate(size)
        if expected not in (None, sha256(content[:size])):
            warnings.warn(
                f"'{self.path}' is not as the run left it: the losses that it tells may be wrong. Nothing else of the "
                "run depends on it.",
                stacklevel=2,
            )


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The lock is the kernel's: it goes with the process, however that ends."""
    try:
        lock = open_own(folder / ".lock", "w")
    except OSError as error:
        raise ConfigError(f"run folder '{folder}' cannot be written ({error.strerror}): choose another") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"run folder '{folder}' is already in use by another process: wait for it") from error
        yield


@contextlib.contextmanager
def stop_signals() -> Iterator[Callable[[], signal.Signals | None]]:
    """Signals by which a machine or a scheduler asks a process to end (Slurm's pre-emption among them) do not end it:
    in here they are noted, and the trainer stops at its next step, behind a checkpoint. A second one ends it."""
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


@functools.cache
def _commit() -> str | None:
    """The commit of the source tree, when it is one."""
    try:
        answer = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()
