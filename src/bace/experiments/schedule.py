"""Run the cells of a comparison in this process, in several processes of this machine, or on a cluster."""

from collections.abc import Callable, Sequence
from typing import Literal

from bace.errors import BaceError, ConfigError
from bace.experiments.cells import Cell, Failures, is_done, run_here
from bace.progress import Board, Tell, board

Engine = Literal["ray", "slurm"]


def run_cells(
    cells: Sequence[Cell], *, workers: int | None = None, on: Engine | None = None, tell: Tell | None = None
) -> Failures:
    """Run all cells, in any order. Finished cells are not run again, and begun ones are resumed. If another process
    runs a cell, this one waits for it. A cell that fails does not stop the others. `tell` receives the messages; by
    default they are printed, below progress bars on a terminal."""
    if workers is not None and workers < 1:
        raise ConfigError(f"--workers is '{workers}': it must be at least 1")
    engine = find_engine(workers or 1, on)
    left, failed = [], {}
    with board(len(cells), tell) as shown:
        for cell in cells:
            try:
                if is_done(cell):
                    shown.end(cell.name, "finished before")
                else:
                    left.append(cell)
            except BaceError as error:
                failed[cell.name] = str(error)
                shown.end(cell.name, f"not run: {error}")
        return failed | engine(left, workers, shown)


def find_engine(workers: int, on: Engine | None) -> Callable[[Sequence[Cell], int | None, Board], Failures]:
    """The function that runs a list of cells."""
    if on == "ray":
        from bace.experiments.on_ray import run_on_ray

        return run_on_ray
    if on == "slurm":
        from bace.experiments.on_slurm import run_on_slurm

        return run_on_slurm
    if workers > 1:
        from bace.experiments.workers import run_in_processes

        return run_in_processes
    return run_here
