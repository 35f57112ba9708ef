"""Runs in several processes for tests, and comparisons of them.

`python tests/data_parallel.py` (`make test-parallel`) runs every method in every modality.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from checks import short
from conftest import Tiny, read_once
from torch import Tensor, nn

import bace
from bace import ranks
from bace.cli.main import main
from bace.core.stage import Stage
from bace.core.trainer import Trainer
from bace.data.batch import Batch
from bace.methods import METHODS

PATIENCE = 120  # seconds
STEPS = 20  # the steps whose losses are compared
MODALITIES = ("image", "text", "token")
PROCESSES = multiprocessing.get_context("forkserver")  # slow imports are done once for all processes
PROCESSES.set_forkserver_preload(["bace.experiments.run", "transformers.models.bert.modeling_bert"])


class ListeningTrainer(Trainer):
    """Records the loss of each step, and whether the method has an optimiser at all."""

    heard: ClassVar[list[float]] = []
    optimises: ClassVar[bool] = False

    def train(self, stage: Stage, stages: int) -> None:
        super().train(stage, stages)
        ListeningTrainer.optimises |= stage.optimise

    def step(self, stage: Stage, batch: Batch, parameters: list[nn.Parameter]) -> None:
        super().step(stage, batch, parameters)
        if self.losses.waiting:
            ListeningTrainer.heard.append(float(self.losses.waiting[-1][2].sum()))


@contextlib.contextmanager
def exactly(precision: torch.dtype = torch.float64) -> Iterator[None]:
    """Run in double precision, in which training does not amplify the order of sums, and without dropout, which every
    process draws for itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bace.experiments.run.Trainer", ListeningTrainer)
        patch.setattr(nn.Dropout, "forward", lambda self, x: x)
        patch.setattr(
            nn.functional, "scaled_dot_product_attention", without_dropout(nn.functional.scaled_dot_product_attention)
        )
        torch.set_default_dtype(precision)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)


def without_dropout(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def attend(*tensors: Tensor, dropout_p: float = 0.0, **options: Any) -> Tensor:
        return attention(*tensors, **options)

    return attend


def job(tiny: Tiny, modality: str, method: dict[str, Any], **changes: object) -> dict[str, Any]:
    """The settings of a run that is compared. IDBR keeps the text that is nearest to the centre of a cluster; in a
    cluster of two, both texts are equally near and rounding decides."""
    if method["name"] == "IDBR":
        changes["memory.select"] = "random"
    return tiny.settings(modality, method=method, **changes)


def long_job(tiny: Tiny, modality: str, title: str) -> dict[str, Any]:
    """A run with at least STEPS steps. APER and RanPAC take steps in the first task only, five in an epoch; GDumb takes
    three in a pass over its memory."""
    own = {"passes": 4, "batch": 4} if title == "GDumb" else {}
    return job(tiny, modality, short({"name": title, **own}, 4), **{"train.epochs": 3})


def measured(settings: dict[str, Any]) -> dict[str, Any]:
    """The losses of a run's steps, its scores, and sums over its final tensors."""
    ListeningTrainer.heard, ListeningTrainer.optimises = [], False
    result = bace.run(settings)
    tensors = {name: t for name, t in result.method.state_dict().items() if isinstance(t, Tensor)}
    sums = {name: float(t.double().nan_to_num(0).abs().sum()) for name, t in tensors.items()}
    return {
        "losses": ListeningTrainer.heard[:STEPS],
        "optimises": ListeningTrainer.optimises,
        "matrix": result.matrix,
        "passes": result.metrics["passes"],
        "FWT": result.metrics["FWT"],
        "sums": sums,
    }


# -- processes


def started(ranks: int, said: Path, work: Callable[..., None], *given: Any) -> list[BaseProcess]:
    """Processes that work as ranks of one run, as under torchrun but without the seconds that it takes to start. Their
    output is appended to the file `said`."""
    meeting = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": meeting.port}
    group |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    crew = Crew(meeting)
    for rank in range(ranks):
        crew.append(PROCESSES.Process(target=as_rank, args=({**group, "RANK": rank}, said, work, given)))
        crew[-1].start()
    return crew


class Crew(list[BaseProcess]):
    """The processes, and the store where they meet, which lives as long as they do."""

    def __init__(self, meeting: torch.distributed.TCPStore) -> None:
        super().__init__()
        self.meeting = meeting


def started_alone(said: Path, work: Callable[..., None], *given: Any) -> BaseProcess:
    """A process that works by itself."""
    process = PROCESSES.Process(target=as_rank, args=({}, said, work, given))
    process.start()
    return process


def as_rank(group: dict[str, Any], said: Path, work: Callable[..., None], given: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ |= {name: str(value) for name, value in group.items()}
    with said.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    work(*given)


def ended(crew: Sequence[BaseProcess], patience: float = PATIENCE) -> list[int | None]:
    """The exit codes of processes, once all have ended."""
    end = time.monotonic() + patience
    try:
        for process in crew:
            process.join(max(0.0, end - time.monotonic()))
        return [process.exitcode for process in crew]
    finally:
        for process in crew:
            process.kill()


def run_command(*words: str) -> None:
    """`bace run`."""
    sys.exit(main(["run", *words]))


def run_exactly(words: Sequence[str], patched: str = "") -> None:
    """`bace run` in double precision, with one of the trainers below."""
    with exactly(), pytest.MonkeyPatch.context() as patch:
        if patched:
            patch.setattr("bace.experiments.run.Trainer", globals()[patched])
        run_command(*words)


class ToldToStop(Trainer):
    """The last rank gets SIGTERM in the middle of the second task."""

    def step(self, stage: Stage, batch: Batch, parameters: list[nn.Parameter]) -> None:
        super().step(stage, batch, parameters)
        if ranks.index() == ranks.size() - 1 and (self.now.task, self.now.epoch, self.now.step) == (1, 0, 1):
            os.kill(os.getpid(), signal.SIGTERM)


class Drifting(Trainer):
    """Rank 1 changes something after every step."""

    def step(self, stage: Stage, batch: Batch, parameters: list[nn.Parameter]) -> None:
        super().step(stage, batch, parameters)
        if ranks.index() == 1:
            self.drift()

    def drift(self) -> None:
        raise NotImplementedError


class DriftingWeight(Drifting):
    @torch.no_grad()
    def drift(self) -> None:
        self.method.model.encoder.norm.bias[0] += 1e-3


class DriftingMemory(Drifting):
    def drift(self) -> None:
        remembered = self.method.memory.examples
        if len(remembered):  # after the first task
            remembered[0] = remembered[1]


class DriftingLabels(Drifting):
    def drift(self) -> None:
        self.stream.targets[-1] = 0


def go_through(jobs: dict[str, dict[str, Any]], out: Path, precision: torch.dtype) -> None:
    """Run every job as one of several ranks; the first writes what it has measured."""
    (folder,) = {Path(settings["backbone"]).parent for settings in jobs.values()}
    with exactly(precision), read_once(folder), ranks.joined("cpu"):
        found = {}
        for name, settings in jobs.items():
            try:
                found[name] = measured(settings)
            except Exception as error:  # all ranks get the same error; otherwise the next exchange fails
                found[name] = {"error": f"{type(error).__name__}: {error}"}
            if ranks.index() == 0:
                out.write_text(json.dumps(found))


def shared_and_alone(
    jobs: dict[str, dict[str, Any]], folder: Path, precision: torch.dtype = torch.float64
) -> dict[str, tuple[Any, Any]]:
    """The measurements of each job by two processes and by one."""
    crew = started(2, folder / "said.txt", go_through, jobs, folder / "found.json", precision)
    with exactly(precision):
        alone = {name: measured(settings) for name, settings in jobs.items()}
    codes = ended(crew, 20 * PATIENCE)
    assert codes == [0, 0], (folder / "said.txt").read_text()
    found = json.loads((folder / "found.json").read_text())
    return {name: (found[name], alone[name]) for name in jobs}


def difference(found: dict[str, Any], expected: dict[str, Any], least: int = 0) -> str:
    """The differences in words; "" if there are none. At least this many steps must have been compared, unless the
    method has no optimiser."""
    if "error" in found:
        return str(found["error"])
    if len(found["losses"]) != len(expected["losses"]):
        return f"{len(found['losses'])} steps, not {len(expected['losses'])}"
    if expected["optimises"] and len(expected["losses"]) < least:
        return f"only {len(expected['losses'])} steps were compared, not {least}"
    for step, (one, other) in enumerate(zip(found["losses"], expected["losses"], strict=True)):
        if abs(one - other) > 1e-5 * abs(other) + 1e-9:
            return f"the loss of step {step + 1} is {one:.9g}, not {other:.9g}"
    for name, value in expected["sums"].items():
        if abs(found["sums"][name] - value) > 1e-5 * abs(value) + 1e-7:
            return f"{name} sums up to {found['sums'][name]:.9g}, not {value:.9g}"
    for what in ("matrix", "FWT"):
        if found[what] != expected[what]:
            return f"{what} is {found[what]}, not {expected[what]}"
    return ""


def compare_all() -> int:
    """Compare every method, or those that are named, in every modality, and two of them in single precision. Print a
    line for each."""
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="bace-parallel-"))
    tiny, asked, failed = Tiny(folder / "tiny"), sys.argv[1:], []
    titles = {name: [method.title for method in METHODS if name in method.modalities] for name in MODALITIES}
    cases = [(name, torch.float64, titles[name]) for name in MODALITIES]
    for modality, precision, all_of_them in [*cases, ("image", torch.float32, ["ER", "BaCE"])]:
        jobs = {title: long_job(tiny, modality, title) for title in all_of_them if not asked or title in asked}
        with read_once(tiny.folder):
            measurements = shared_and_alone(jobs, folder, precision) if jobs else {}
        for name, (found, alone) in measurements.items():
            what, where = difference(found, alone, STEPS), f"{modality}, {precision}"
            failed += [f"{name} ({where})"] if what else []
            print(f"{where}, {name}: {what or 'the same'} ({len(alone['losses'])} steps)", flush=True)
    print(f"different: {', '.join(failed) or 'none'}")
    return int(bool(failed))


if __name__ == "__main__":
    import data_parallel  # the name by which processes find their functions

    sys.exit(data_parallel.compare_all())
