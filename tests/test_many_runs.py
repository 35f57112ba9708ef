"""Parallel runs give the same folders as sequential ones, no cell runs twice, and a failed cell stops no other."""

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import processes
import pytest
from safetensors.torch import load_file

from bace.cli.main import main
from bace.config.parse import config_from
from bace.experiments.cells import Cell, run_here
from bace.experiments.on_slurm import run_on_slurm
from bace.experiments.run_folder import locked
from bace.experiments.schedule import run_cells
from bace.experiments.workers import expected_passes, run_in_processes
from bace.paper.tables import ENTRIES, Block, Entry
from bace.progress import Board

pytestmark = pytest.mark.xdist_group("many runs")  # they start processes
PATIENCE = 120  # seconds


def cells(tiny: Any, out: Path, *methods: str, **changes: object) -> list[Cell]:
    return [
        Cell(name, out / name, config_from(tiny.settings("image", method=name, **{"train.threads": 1, **changes})))
        for name in methods
    ]


def words(tiny: Any, out: Path, **changes: object) -> list[str]:
    given = tiny.settings("image", **{"train.threads": 1, **changes})
    flags = [word for key, value in given.items() for word in (f"--{key}", json.dumps(value).strip('"'))]
    return ["compare", "--method", "SEQ", "ER", "--seeds", "2", "--out", str(out), *flags]


def content(folder: Path) -> dict[str, Any]:
    """Everything that a run leaves, except the time and memory that it took."""
    metrics = json.loads((folder / "metrics.json").read_text())
    del metrics["seconds"], metrics["peak_memory_mb"]
    newest = max((folder / "checkpoints").iterdir())
    weights = {name: tensor.tolist() for name, tensor in load_file(newest / "state.safetensors").items()}
    texts = {name: (folder / name).read_text() for name in ("run.json", "log.jsonl", "matrix.csv")}
    return {**texts, "metrics": metrics, "weights": weights}


def contents(out: Path) -> dict[str, Any]:
    return {folder.name: content(folder) for folder in sorted(out.iterdir()) if folder.is_dir()}


def test_workers_begin_with_the_longest_runs(tiny: Any, tmp_path: Path) -> None:
    planned = cells(tiny, tmp_path, "SEQ", "MTL", "ER", "BaCE", "SLDA")
    in_order = sorted(planned, key=expected_passes, reverse=True)
    assert [cell.name for cell in in_order] == ["MTL", "BaCE", "ER", "SEQ", "SLDA"]


@pytest.fixture(scope="module")
def one_by_one(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("comparison")
    assert main(words(tiny, out)) == 0
    return out


def test_two_workers_leave_the_folders_that_one_leaves(
    tiny: Any, one_by_one: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words(tiny, tmp_path), "--workers", "2"]) == 0
    said = capsys.readouterr().err
    assert "run 4 of 4: " in said
    assert "ER, seed 1: finished" in said
    assert contents(tmp_path) == contents(one_by_one)


def test_two_workers_leave_the_folders_of_a_table_that_one_leaves(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = tiny.settings("image", **{"train.threads": 1, "train.epochs": 1})
    full = {key: value for key, value in given.items() if key not in ("benchmark", "memory.size")}
    full["backbone.name"] = full.pop("backbone")
    block = Block("my-images", "pictures", (3,), (10,), ("SEQ", "ER"), full=full)
    monkeypatch.setitem(ENTRIES, "small", Entry("small", "Table 0", "a small table", (block,), ("A_last",)))
    said, found = [], []
    for out, workers in ((tmp_path / "one", []), (tmp_path / "two", ["--workers", "2"])):
        assert main(["paper", "run", "small", "--scale", "full", "--out", str(out), *workers]) == 0
        said.append(capsys.readouterr().err)
        found.append({str(path.parent.relative_to(out)): content(path.parent) for path in out.rglob("metrics.json")})
    assert len(found[0]) == 2
    assert found[0] == found[1]
    assert said[1].startswith("run 1 of 2: ER on ")  # workers begin with the longest run


def test_a_worker_has_its_share_of_the_threads_and_the_settings_stay(tiny: Any, tmp_path: Path) -> None:
    """This allows another number of workers to continue a comparison."""
    planned = cells(tiny, tmp_path, "SEQ", **{"train.threads": 0, "benchmark.tasks": 1, "train.epochs": 1})
    assert run_cells(planned, workers=2) == {}
    about = json.loads((tmp_path / "SEQ" / "run.json").read_text())
    assert (about["threads"], about["config"]["train"]["threads"]) == (1, 0)
    assert run_cells(planned) == {}


FATAL = """
import os
from bace.methods import SEQ

class Fatal(SEQ):
    def after_task(self, task):
        os.kill(os.getpid(), 9)

class Faulty(SEQ):
    def after_task(self, task):
        raise RuntimeError("a fault")
"""


def test_a_cell_that_fails_or_is_killed_stops_no_other_and_is_named(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fatal.py").write_text(FATAL)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    given = words(tiny, tmp_path / "c", **{"benchmark.tasks": 1, "train.epochs": 1})
    del given[1:6]  # the methods and seeds
    command = [*given, "--method", "fatal.Fatal", "fatal.Faulty", "ER", "SEQ"]
    assert main([*command, "--workers", "2"]) == 2
    said = capsys.readouterr()
    assert "2 of 4 runs failed" in said.err
    assert "Fatal, seed 0: its process was killed by signal 9" in said.err
    assert "Faulty, seed 0: unexpected error: RuntimeError: a fault" in said.err
    assert [line.split()[0] for line in said.out.splitlines() if line.startswith(("ER", "SEQ"))] == ["ER", "SEQ"]


def test_cells_of_other_settings_are_not_run(tiny: Any, one_by_one: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stamps = {path: path.stat().st_mtime_ns for path in one_by_one.glob("*/*")}
    assert main([*words(tiny, one_by_one, **{"memory.size": 7}), "--workers", "2"]) == 2
    assert "4 of 4 runs failed" in (said := capsys.readouterr().err)
    assert "ER-seed1' holds a run with other settings" in said
    assert {path: path.stat().st_mtime_ns for path in one_by_one.glob("*/*")} == stamps


@pytest.mark.parametrize("workers", [1, 2])
def test_a_cell_that_another_process_works_on_is_waited_for(tiny: Any, tmp_path: Path, workers: int) -> None:
    first, second = cells(tiny, tmp_path, "SEQ", "ER", **{"benchmark.tasks": 1, "train.epochs": 1})
    ended, held, order = threading.Event(), threading.Event(), []

    class Noted(Board):
        def end(self, name: str, said: str) -> None:
            order.append((name, said))
            ended.set()

    def hold() -> None:
        with locked(first.folder):
            held.set()
            assert ended.wait(PATIENCE)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(PATIENCE)
    assert (run_here if workers == 1 else run_in_processes)([first, second], workers, Noted(2)) == {}
    holder.join()
    assert order == [("ER", "finished"), ("SEQ", "finished")]


def start(*given: str) -> subprocess.Popen[str]:
    """Start a comparison in its own session, so that a signal also reaches its workers, and with Ctrl-C enabled:
    programs that a shell starts in the background, such as these tests, ignore Ctrl-C."""
    code = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler); {processes.BACE}"
    command = [sys.executable, "-c", code, *given]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)


def test_two_schedulers_share_the_cells_of_one_folder(tiny: Any, one_by_one: Path, tmp_path: Path) -> None:
    out, errs = tmp_path / "c", [tmp_path / "one", tmp_path / "other"]
    both = [processes.start(processes.BACE, *words(tiny, out), err=err) for err in errs]
    for each in both:
        each.join(PATIENCE)
    said = [err.read_text() for err in errs]
    assert [each.exitcode for each in both] == [0, 0], said
    assert contents(out) == contents(one_by_one)
    assert sum(text.count("run ") for text in said) >= 4


def test_ctrl_c_stops_all_workers_behind_a_checkpoint(tiny: Any, tmp_path: Path) -> None:
    long = words(tiny, tmp_path, **{"train.epochs": 3000, "checkpoint.minutes": 0})
    scheduler = start(*long, "--workers", "2")
    deadline = time.monotonic() + PATIENCE
    while len(list(tmp_path.glob("*/run.json"))) < 2:
        assert time.monotonic() < deadline
        assert scheduler.poll() is None
        time.sleep(0.05)
    os.killpg(scheduler.pid, signal.SIGINT)  # to all processes, as a terminal does
    assert "stopped" in scheduler.communicate(timeout=PATIENCE)[1]
    assert scheduler.returncode == 130
    begun = [path.parent for path in tmp_path.glob("*/run.json")]
    assert len(begun) == 2
    for folder in begun:
        with locked(folder):  # no process uses it any more
            assert len(list((folder / "checkpoints").iterdir())) == 1


# -- on a cluster

ONCE = """
import os
from pathlib import Path
from bace.methods import ER

class Once(ER):
    number = 9
    def after_task(self, task):
        super().after_task(task)
        marker = Path(os.environ["ONCE"]) / type(self).__name__
        if task.index == 1 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), self.number)

class Dies(Once):
    pass

class TimesOut(Once):
    number = 12  # SIGUSR2, which we ask Slurm to send before the time is over
"""


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with methods that get a signal when they first learn a second task, and with a mark of that."""
    folder = tmp_path_factory.mktemp("once")
    (folder / "once.py").write_text(ONCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("ONCE", str(folder))
        importlib.import_module("once")
        yield folder


@pytest.fixture(scope="module")
def ray(once: Path) -> Iterator[None]:
    """A cluster on this machine with room for two cells."""
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.usefixtures("ray")
def test_a_cluster_of_ray_leaves_the_folders_that_workers_leave(
    tiny: Any, one_by_one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*words(tiny, Path("c")), "--on", "ray"]) == 0
    assert contents(tmp_path / "c") == contents(one_by_one)


@pytest.mark.slow
@pytest.mark.usefixtures("ray")
def test_ray_tries_a_cell_again_that_died_and_it_resumes(once: Path, tiny: Any, tmp_path: Path) -> None:
    assert run_cells(cells(tiny, tmp_path, "once.Dies", "ER"), on="ray") == {}
    assert (once / "Dies").exists()
    check_same_results(tmp_path / "once.Dies", tmp_path / "ER")


@pytest.mark.slow
def test_a_job_of_slurm_whose_time_is_over_is_queued_again_and_resumes(once: Path, tiny: Any, tmp_path: Path) -> None:
    """submitit's executor of local processes runs the cells."""
    pytest.importorskip("submitit")
    planned = cells(tiny, tmp_path, "once.TimesOut", "ER")
    assert run_on_slurm(planned, None, Board(2), cluster="local") == {}
    assert (once / "TimesOut").exists()
    check_same_results(tmp_path / "once.TimesOut", tmp_path / "ER")
    logs = [path.read_text() for pattern in ("*.out", "*.err") for path in (tmp_path / ".slurm").glob(pattern)]
    assert sum("Requeued job" in text for text in logs) == 1


def check_same_results(folder: Path, other: Path) -> None:
    """Compare runs that differ only in their method's name."""
    found, expected = content(folder), content(other)
    for name in ("log.jsonl", "matrix.csv", "weights"):
        assert found[name] == expected[name]


def test_slurm_that_is_not_here_is_refused_with_a_reason(
    tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("submitit")
    assert main([*words(tiny, tmp_path), "--on", "slurm"]) == 2
    assert "--on slurm does not work here" in capsys.readouterr().err


@pytest.mark.parametrize(("engine", "package"), [("ray", "Ray"), ("slurm", "submitit")])
def test_an_engine_that_is_not_installed_is_named_with_its_extra(
    engine: str, package: str, tiny: Any, tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package.lower(), None)
    assert main([*words(tiny, tmp_path), "--on", engine]) == 2
    assert f"--on {engine} needs {package}: pip install 'bace-cil[{engine}]'" in capsys.readouterr().err
