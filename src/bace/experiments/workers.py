"""Cells in several processes of this machine. Each process has its share of the threads and runs one cell after
another. Processes are not forked from this one, because torch's threads and CUDA do not survive a fork."""

import contextlib
import functools
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from bace.errors import BaceError, InUse, Stopped
from bace.experiments.cells import LOOK_AGAIN, Cell, Failures, attempt
from bace.experiments.run import stop_signals
from bace.experiments.run_folder import is_begun
from bace.methods import find_method
from bace.models.frozen_prefix import PrefixCaches
from bace.progress import Board

TELL_EVERY = 0.2  # seconds between two messages about progress
PATIENCE = 60.0  # seconds that a worker has to write its checkpoint when it is asked to stop


def process_context() -> ForkServerContext | SpawnContext:
    """The context that starts processes. On Linux they are forks of a server that has imported torch, which takes
    seconds, but has computed nothing. On other systems, whose libraries do not survive a fork, each process
    is new."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


class Worker:
    """A process that runs cells, seen from the process that plans them."""

    def __init__(self, threads: int) -> None:
        context = process_context()
        self.pipe, theirs = context.Pipe()
        given = (theirs, threads, dict(os.environ))  # the server has the environment in which it was started
        self.process: BaseProcess = context.Process(target=work, args=given, daemon=True)
        self.process.start()
        theirs.close()
        self.cell: Cell | None = None

    def give(self, cell: Cell) -> None:
        self.cell = cell
        with contextlib.suppress(OSError):  # the next call of `hear` notices a dead process
            self.pipe.send(cell)

    def hear(self) -> tuple[str, Any]:
        """The next message of the process; "died" and the reason if it has ended."""
        try:
            kind, said = self.pipe.recv()
            return str(kind), said
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode or 0
            how = f"killed by signal {-code}" if code < 0 else f"ended with status {code}"
            return "died", f"its process was {how}; the same command continues it"


def run_in_processes(cells: Sequence[Cell], workers: int | None, shown: Board) -> Failures:
    """Run the cells in this many processes. Ctrl-C or a signal stops them all, and each writes a checkpoint first."""
    workers = workers or 1
    threads = max(1, torch.get_num_threads() // workers)
    failed: Failures = {}
    waiting = deque(sorted(cells, key=expected_passes, reverse=True))  # no long run is left for the end
    with stop_signals() as stopping, _ended() as crew:
        crew += [Worker(threads) for _ in range(min(workers, len(cells)))]
        while waiting or any(worker.cell for worker in crew):
            for i, worker in enumerate(crew):
                if waiting and worker.cell is None:
                    if not worker.process.is_alive():
                        worker = crew[i] = Worker(threads)
                    shown.begin(waiting[0].name, continued=is_begun(waiting[0].folder))
                    worker.give(waiting.popleft())
            busy = {worker.pipe: worker for worker in crew if worker.cell}
            for pipe in wait(list(busy), timeout=LOOK_AGAIN):
                listen(busy[pipe], waiting, failed, shown)  # type: ignore[index]  # the pipes that went in
            if number := stopping():
                raise Stopped(number, None)
    return failed


def expected_passes(cell: Cell) -> float:
    """The relative length of a run, as far as its method tells: the passes of a new example and of a replayed one in
    all epochs. Joint training learns all data again at every task."""
    settings = {key: value for key, value in cell.config.method.items() if key != "name"}
    try:
        method = find_method(str(cell.config.method["name"]))(**settings)
    except BaceError:  # the run will say what is wrong
        return 0.0
    tasks = 5 if method.licence == "past" and not settings.get("only_last") else 1
    return tasks * (method.cost.new + method.cost.replayed) * (method.cost.epochs or cell.config.train.epochs)


def listen(worker: Worker, waiting: deque[Cell], failed: Failures, shown: Board) -> None:
    """Handle one message of a worker."""
    cell = worker.cell
    assert cell is not None
    kind, said = worker.hear()
    if kind == "progress":
        shown.update(cell.name, *said)
    elif kind == "line":
        shown.tell(cell.name, said)
    elif kind == "warning":
        shown.tell(cell.name, f"warning: {said}")
    else:
        worker.cell = None
        if kind == "stopped":
            worker.process.join()
        if kind == "in use":
            shown.wait(cell.name)
            waiting.append(cell)
        else:
            shown.end(cell.name, f"not run: {said}" if said else "finished")
            if said:
                failed[cell.name] = said


@contextlib.contextmanager
def _ended() -> Iterator[list[Worker]]:
    """A context with workers, which have ended when it is left. After an error, they are stopped."""
    crew: list[Worker] = []
    try:
        yield crew
        for worker in crew:
            with contextlib.suppress(OSError):
                worker.pipe.send(None)
    except BaseException:
        for worker in crew:
            worker.process.terminate()  # SIGTERM: a run writes a checkpoint first
        raise
    finally:
        try:
            end = time.monotonic() + PATIENCE
            for worker in crew:
                worker.process.join(max(0.0, end - time.monotonic()))
        finally:  # also after a second Ctrl-C
            for worker in crew:
                worker.process.kill()


def work(pipe: Connection, threads: int, environment: dict[str, str]) -> None:
    """The loop of a worker: take cells until there are no more."""
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the one that plans sends SIGTERM
    torch.set_num_threads(threads)
    caches, told = PrefixCaches(), 0.0

    def tell(kind: str, said: object) -> None:
        try:
            pipe.send((kind, said))
        except OSError:  # the planning process is gone: stop as if asked to
            os.kill(os.getpid(), signal.SIGTERM)

    def show(done: float, text: str) -> None:
        nonlocal told
        if time.monotonic() - told > TELL_EVERY:
            told = time.monotonic()
            tell("progress", (done, text))

    warnings.showwarning = lambda text, *rest: tell("warning", str(text))
    with contextlib.suppress(EOFError):
        while cell := pipe.recv():
            try:
                tell("end", attempt(cell, caches, show, functools.partial(tell, "line")))
            except InUse:
                time.sleep(LOOK_AGAIN)
                tell("in use", None)
            except Stopped as stopped:
                tell("stopped", str(stopped))
                return
