"""A run that is killed with kill -9 at three random moments and continued ends with the same bytes as an undisturbed
run."""

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import processes
import pytest

import bace
from bace.core import checkpoint

pytestmark = pytest.mark.xdist_group("kill")  # one at a time, because each keeps both cores busy
PATIENCE = 90  # seconds in which a child must make progress


def start(*words: str) -> BaseProcess:
    return processes.start(processes.BACE, "run", *words)


def finish(child: BaseProcess) -> None:
    child.join(PATIENCE)
    assert child.exitcode == 0


def settings_for(tiny: Any, method: str) -> dict[str, object]:
    changes = {"train.epochs": 8, "checkpoint.every": 3, "train.momentum": 0.9, "train.threads": 1}
    settings: dict[str, object] = tiny.settings("image", method=method, **changes)
    return settings


def flags(settings: dict[str, object]) -> list[str]:
    return [word for key, value in settings.items() for word in (f"--{key}", json.dumps(value).strip('"'))]


def newest(folder: Path) -> int:
    found = folder / "checkpoints"
    return max((int(p.name) for p in found.iterdir() if p.name.isdigit()), default=0) if found.exists() else 0


def kill_after(child: BaseProcess, folder: Path, checkpoints: int, delay: float) -> None:
    """Send kill -9 a moment after this many more checkpoints are written, which may be between two of them or in the
    middle of writing one."""
    goal = newest(folder) + checkpoints
    end = time.monotonic() + PATIENCE
    while newest(folder) < goal:
        assert child.is_alive(), "the run ended before it could be killed"
        assert time.monotonic() < end
        time.sleep(0.01)
    time.sleep(delay)
    child.kill()  # SIGKILL
    child.join()


def files(folder: Path) -> dict[str, Any]:
    metrics = json.loads((folder / "metrics.json").read_text())
    del metrics["seconds"], metrics["passes"], metrics["peak_memory_mb"]
    return {"metrics.json": metrics} | {name: (folder / name).read_bytes() for name in ("matrix.csv", "log.jsonl")}


def run_with_kills(method: str, folder: Path, words: list[str]) -> list[int]:
    """Kill a run three times, then let it finish; return the newest checkpoint at each kill."""
    rng = random.Random(f"kill {method}")
    child = start(*words, "--out", str(folder))
    reached = []
    for _ in range(3):
        kill_after(child, folder, rng.randrange(2, 9), rng.uniform(0, 0.03))
        assert not (folder / "metrics.json").exists()
        reached.append(newest(folder))
        child = start("--resume", str(folder))
    finish(child)
    return reached


@pytest.mark.slow
def test_a_run_killed_three_times_ends_as_one_left_alone(tiny, tmp_path):
    methods = ["ER", "BaCE"]
    with ThreadPoolExecutor(len(methods)) as side_by_side:  # most of the time is spent on starting Python
        reached = side_by_side.map(lambda m: run_with_kills(m, tmp_path / m, flags(settings_for(tiny, m))), methods)
    for method, places in zip(methods, reached, strict=True):
        assert places == sorted(set(places))  # every start got further than the one before
        killed, straight = tmp_path / method, tmp_path / f"{method} straight"
        bace.run(settings_for(tiny, method), out=straight)
        assert files(killed) == files(straight)
        ends = [checkpoint.load(folder / "checkpoints") for folder in (killed, straight)]
        assert ends[0] is not None
        assert ends[1] is not None
        assert ends[0][0].keys() == ends[1][0].keys()
        for name, value in ends[0][0].items():
            assert value.equal(ends[1][0][name]), name


def test_a_run_killed_before_it_began_can_be_started_again_in_its_folder(tiny, tmp_path):
    """While data and backbone are loading, there is nothing to resume, and nothing blocks the next run."""
    child = start(*flags(settings_for(tiny, "ER")), "--out", str(tmp_path / "run"))
    end = time.monotonic() + PATIENCE
    while not (tmp_path / "run" / ".lock").exists():
        assert child.is_alive()
        assert time.monotonic() < end
        time.sleep(0.001)
    child.kill()
    child.join()
    if (tmp_path / "run" / "run.json").exists():
        pytest.skip("the run began before it could be killed")
    result = bace.run(tiny.settings("image", method="SEQ", **{"train.epochs": 1}), out=tmp_path / "run")
    assert len(result.matrix) == 3
