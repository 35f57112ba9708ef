"""Campaigns share a process with everything imported, which forks a child for each case, and reference runs."""

import contextlib
import io
import json
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checks import short
from conftest import Tiny

from bace.cli.main import main
from bace.core import checkpoint
from bace.methods import METHODS

Case = tuple[str, Callable[[], dict[str, Any]]]
PATIENCE = 120.0  # seconds that any case may take
FUSE = 8 * 2**30  # bytes that a child may reserve beyond what it began with, so that the machine survives a campaign
UNCAUGHT = 70  # exit code of a child whose function raised
PRELOADED = (
    "transformers.models.bert.modeling_bert",
    "transformers.tokenization_utils_tokenizers",
    "pyarrow.parquet",
    "scipy.io",
    "bace.report.page",
)


@dataclass(frozen=True)
class Ended:
    """The end of a child process.

    code: its exit code, or minus the number of the signal that killed it.
    answer: what its function returned, or None if it did not return.
    said: what it wrote to the terminal.
    megabytes: the most memory it held at once, beyond what it held when it began.
    """

    code: int
    answer: Any
    said: str
    seconds: float
    megabytes: float


class Child:
    """A forked process that calls a function. If the answer is a whole number, it is also the exit code."""

    def __init__(self, function: Callable[[], Any], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.said, self.answer, self.base = (folder / name for name in ("said.txt", "answer.json", "base"))
        for path in (self.said, self.answer, self.base):
            path.unlink(missing_ok=True)
        sys.stdout.flush()
        self.began = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            self._live(function, folder)

    def _live(self, function: Callable[[], Any], folder: Path) -> None:
        """Run the child, which never returns."""
        code = UNCAUGHT
        try:
            os.chdir(folder)
            terminal = os.open(self.said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            for stream in (1, 2):
                os.dup2(terminal, stream)
            self.base.write_text(str(pages("resident")))
            Path("/proc/self/clear_refs").write_text("5")  # the peak is measured from here on
            hard = resource.getrlimit(resource.RLIMIT_AS)[1]  # in a child of a child: the limit cannot be raised again
            limit = pages("size") + FUSE
            limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            answer = function()
            self.answer.write_text(json.dumps(answer))
            code = answer if isinstance(answer, int) else 0
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self, patience: float = PATIENCE) -> Ended:
        while True:
            pid, status, used = os.wait4(self.pid, os.WNOHANG)
            seconds = time.monotonic() - self.began
            if pid:
                break
            if seconds > patience:
                self.send(signal.SIGKILL)
            time.sleep(0.002)
        answer = json.loads(self.answer.read_text()) if self.answer.exists() and self.answer.stat().st_size else None
        base = int(self.base.read_text() or 0) if self.base.exists() else 0
        megabytes = max(0.0, used.ru_maxrss / 1024 - base / 2**20)
        said = self.said.read_text(errors="replace") if self.said.exists() else ""
        return Ended(os.waitstatus_to_exitcode(status), answer, said, seconds, round(megabytes, 1))


def pages(kind: str) -> int:
    """Return the bytes of address space ("size") or memory ("resident") of this process."""
    size, resident, *_ = Path("/proc/self/statm").read_text().split()
    return int({"size": size, "resident": resident}[kind]) * os.sysconf("SC_PAGE_SIZE")


class Work:
    """The folder of a campaign, with data, uninterrupted runs, and a place that a case may use freely."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.place, self.child = self.folder / "case", self.folder / "child"
        made = self.folder / "tiny"
        if not (made / "whole").exists():
            shutil.rmtree(made, ignore_errors=True)
            with contextlib.redirect_stdout(io.StringIO()):
                Tiny(made)
            (made / "whole").touch()
        self.tiny = object.__new__(Tiny)
        self.tiny.folder, self.tiny.vit, self.tiny.bert = made, str(made / "vit"), str(made / "bert")

    def fresh(self) -> Path:
        """Return an empty place."""
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir(parents=True)
        return self.place

    def start(self, function: Callable[[], Any]) -> Child:
        return Child(function, self.child)

    def ask(self, function: Callable[[], Any], patience: float = PATIENCE) -> Ended:
        return self.start(function).wait(patience)

    def settings(self, method: str, modality: str, **changes: object) -> list[str]:
        """Return the words of `bace run` for a run of a second or two with a checkpoint at every third step."""
        usual = {"method": short(method), "checkpoint.every": 3, "train.momentum": 0.9, "train.threads": 1}
        file = self.folder / "settings" / f"{_name(method, modality, changes)}.yaml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(self.tiny.settings(modality, **(usual | changes))))
        return ["run", "--config", str(file)]

    def straight(self, method: str, modality: str, **changes: object) -> tuple[Path, float]:
        """Return the folder of an uninterrupted run, and the seconds it took."""
        folder = self.folder / "straight" / _name(method, modality, changes)
        clock = folder.with_name(f"{folder.name}.seconds")
        if not clock.exists():
            shutil.rmtree(folder, ignore_errors=True)
            words = [*self.settings(method, modality, **changes), "--out", str(folder)]
            ended = self.ask(lambda: main(words))
            if ended.code:
                raise RuntimeError(f"the uninterrupted run of {method} on {modality} failed: {ended.said}")
            clock.write_text(str(ended.seconds))
        return folder, float(clock.read_text())


def _name(method: str, modality: str, changes: dict[str, object]) -> str:
    return "-".join([method, modality, *(f"{key}={value}" for key, value in changes.items())])


def unfinished(straight: Path, folder: Path) -> Path:
    """Copy a finished run as it was after the last but one of the checkpoints that were kept."""
    shutil.copytree(straight, folder)
    for name in ("metrics.json", "matrix.csv", "studies.json"):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(max((folder / "checkpoints").iterdir()))
    return folder


def pairs() -> list[tuple[str, str]]:
    """Return every method with each modality that it supports."""
    return [(method.title, modality) for method in METHODS for modality in sorted(method.modalities)]


def run_or_resume(folder: Path, words: list[str]) -> Callable[[], int]:
    """Return a function that calls `bace run`, or continues the run if it had begun."""
    begun = (folder / "run.json").exists()
    return lambda: main(["run", "--resume", str(folder)] if begun else [*words, "--out", str(folder)])


def differences(folder: Path, straight: Path) -> list[str]:
    """Return the names of all parts in which a finished run differs from the uninterrupted one, except times and
    repeated passes."""
    found = []
    for name in ("matrix.csv", "log.jsonl"):
        if (folder / name).read_bytes() != (straight / name).read_bytes():
            found.append(name)
    metrics = [json.loads((path / "metrics.json").read_text()) for path in (folder, straight)]
    ends = [checkpoint.load(path / "checkpoints") for path in (folder, straight)]
    if ends[0] is None or ends[1] is None:
        return [*found, "checkpoints"]
    for measured in (*metrics, *(state["results"] for _, state in ends if state)):
        for key in ("seconds", "passes", "peak_memory_mb"):
            measured.pop(key, None)
    if metrics[0] != metrics[1]:
        found.append("metrics.json")
    (tensors, state), (expected, expected_state) = ends
    for key in ("at", "results", "method", "licences"):
        if state[key] != expected_state[key]:
            found.append(f"state.json: {key}")
    names = [n for n in {**tensors, **expected} if n not in tensors or n not in expected]
    names += [n for n in tensors.keys() & expected.keys() if bits(tensors[n]) != bits(expected[n])]
    return found + sorted(names)


def bits(tensor: Any) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.numpy().tobytes()


def cases_in_turn(*series: Iterator[Case]) -> Iterator[Case]:
    """Yield one case of each series in turn, so that a campaign that is cut short has something of everything."""
    waiting = list(series)
    while waiting:
        for one in list(waiting):
            case = next(one, None)
            if case is None:
                waiting.remove(one)
            else:
                yield case


def one_line(text: str) -> str:
    return " | ".join(text.strip().splitlines()[-3:])[:400]
