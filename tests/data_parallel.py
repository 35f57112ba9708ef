"""Runs in several processes for tests, and what they are compared by.

`python tests/data_parallel.py` (`make test-parallel`) goes through every method in every modality.
"""

import contextlib
import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bace
from bace.core.stage import Stage
from bace.core.trainer import Trainer
from bace.data.batch import Batch

PATIENCE = 120  # seconds
STEPS = 20  # whose losses are compared
PROCESSES = multiprocessing.get_context("forkserver")  # what takes a process long to import is imported once for all
PROCESSES.set_forkserver_preload(
    ["bace.experiments.run", "transformers.models.vit.modeling_vit", "transformers.models.bert.modeling_bert"]
)


class ListeningTrainer(Trainer):
    """Notes the loss of each step."""

    heard: list[float]

    def step(self, stage: Stage, batch: Batch, parameters: list[nn.Parameter]) -> None:
        super().step(stage, batch, parameters)
        if self.losses.waiting:
            ListeningTrainer.heard.append(float(self.losses.waiting[-1][2].sum()))


@contextlib.contextmanager
def exactly() -> Iterator[None]:
    """In double precision, where sums in another order differ by nothing that training could amplify, and without
    dropout, of which every process draws its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bace.experiments.run.Trainer", ListeningTrainer)
        patch.setattr(nn.Dropout, "forward", lambda self, x: x)
        patch.setattr(
            nn.functional, "scaled_dot_product_attention", without_dropout(nn.functional.scaled_dot_product_attention)
        )
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)


def without_dropout(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def attend(*tensors: Tensor, dropout_p: float = 0.0, **options: Any) -> Tensor:
        return attention(*tensors, **options)

    return attend


def measured(settings: dict[str, Any]) -> dict[str, Any]:
    """The losses of a run's steps, its scores, and sums over its final tensors."""
    ListeningTrainer.heard = []
    result = bace.run(settings)
    tensors = {name: t for name, t in result.method.state_dict().items() if isinstance(t, Tensor)}
    sums = {name: float(t.double().nan_to_num(0).abs().sum()) for name, t in tensors.items()}
    return {
        "losses": ListeningTrainer.heard[:STEPS],
        "matrix": result.matrix,
        "passes": result.metrics["passes"],
        "FWT": result.metrics["FWT"],
        "sums": sums,
    }


# -- processes


def started(ranks: int, work: Callable[..., None], *given: Any) -> list[BaseProcess]:
    """Processes that work as ranks of one run; what torchrun does, without the seconds that it takes to begin."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    crew = [PROCESSES.Process(target=as_rank, args=(rank, ranks, port, work, given)) for rank in range(ranks)]
    for process in crew:
        process.start()
    return crew


def as_rank(rank: int, ranks: int, port: int, work: Callable[..., None], given: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    work(*given)


def ended(crew: Sequence[BaseProcess]) -> list[int | None]:
    """The exit codes of processes, once all have ended."""
    end = time.monotonic() + PATIENCE
    try:
        for process in crew:
            process.join(max(0.0, end - time.monotonic()))
        return [process.exitcode for process in crew]
    finally:
        for process in crew:
            process.kill()


def go_through(jobs: dict[str, dict[str, Any]], out: Path) -> None:
    """Run every job as one of several ranks; the first writes what it has measured."""
    from bace import ranks

    with exactly(), ranks.joined("cpu"):
        found = {}
        for name, settings in jobs.items():
            try:
                found[name] = measured(settings)
            except Exception as error:
                found[name] = {"error": f"{type(error).__name__}: {error}"}
                if not isinstance(error, bace.errors.BaceError):
                    import traceback

                    traceback.print_exc()
            if ranks.index() == 0:
                out.write_text(json.dumps(found))


def shared_and_alone(jobs: dict[str, dict[str, Any]], folder: Path) -> Iterator[tuple[str, Any, Any]]:
    """What two processes have measured of each job, and what one has."""
    crew = started(2, go_through, jobs, folder / "found.json")
    with exactly():
        alone = {name: measured(settings) for name, settings in jobs.items()}
    codes = ended(crew)
    found = json.loads((folder / "found.json").read_text())
    for name in jobs:
        yield name, found.get(name, {"error": f"the processes ended with {codes}"}), alone[name]


def difference(found: dict[str, Any], expected: dict[str, Any]) -> str:
    """What is not the same, in words; "" if nothing is."""
    if "error" in found:
        return str(found["error"])
    if len(found["losses"]) != len(expected["losses"]):
        return f"{len(found['losses'])} steps, not {len(expected['losses'])}"
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


def main() -> int:
    import tempfile

    from checks import short
    from conftest import Tiny

    from bace.methods import METHODS

    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="bace-parallel-"))
    tiny, asked = Tiny(folder / "tiny"), sys.argv[1:]
    jobs = {
        f"{method.title} {modality}": tiny.settings(modality, method=short(method.title))
        for method in METHODS
        for modality in ("image", "text", "token")
        if modality in method.modalities and (not asked or method.title in asked)
    }
    failed = 0
    began = time.monotonic()
    for name, found, alone in shared_and_alone(jobs, folder):
        what = difference(found, alone)
        failed += bool(what)
        print(f"{name}: {what or 'the same'} ({len(alone['losses'])} steps)", flush=True)
    print(f"{len(jobs) - failed} of {len(jobs)} are the same, {time.monotonic() - began:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    import data_parallel  # the name under which processes find what they are to do

    sys.exit(data_parallel.main())
