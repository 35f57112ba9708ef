"""Cells as one array of Slurm jobs, through submitit (extra `slurm`). A job that reaches its time limit writes a
checkpoint, is put back into the queue and resumes."""

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

from bace.errors import ConfigError, Stopped
from bace.experiments.cells import Cell, Failures
from bace.experiments.cluster import LOOK_AGAIN, attempt_there, cell_threads, follow, with_whole_path
from bace.progress import Board

MINUTES = 240  # time limit of a job, unless SBATCH_TIMELIMIT is set
TIMEOUTS = 1000  # a job may be put back this often, because it makes progress every time


class Job:
    """The function that a node runs. submitit pickles it, and after a timeout asks `checkpoint` what to run: the same
    function again."""

    def __call__(self, cell: Cell, folder: str) -> str | None:
        import submitit

        try:
            return attempt_there(cell, folder)
        except Stopped as stopped:
            if stopped.signal == submitit.JobEnvironment._usr_sig():
                signal.raise_signal(stopped.signal)  # the run is saved: submitit's own handler puts the job back
            return str(stopped)  # scancel

    def checkpoint(self, cell: Cell, folder: str) -> Any:
        import submitit

        return submitit.helpers.DelayedSubmission(self, cell, folder)


def run_on_slurm(cells: Sequence[Cell], workers: int | None, shown: Board, cluster: str = "slurm") -> Failures:
    """Run the cells as one array of jobs. A job takes `train.threads` CPUs (the largest number of any cell; one by
    default) and one GPU if train.device is "cuda". sbatch's environment variables (SBATCH_PARTITION, SBATCH_ACCOUNT,
    SBATCH_TIMELIMIT) apply.

    `cluster` is submitit's name of the cluster; "local" runs the jobs as processes of this machine."""
    try:
        import submitit
    except ImportError as error:
        raise ConfigError("--on slurm needs submitit: pip install 'bace-cil[slurm]'") from error
    if not cells:
        return {}
    folder = cells[0].folder.absolute().parent / ".slurm"
    try:
        executor = submitit.AutoExecutor(folder, cluster=cluster, slurm_max_num_timeout=TIMEOUTS)
    except RuntimeError as error:
        raise ConfigError(f"--on slurm does not work here: {error}") from error
    executor.update_parameters(
        timeout_min=MINUTES,
        slurm_cpus_per_task=max(map(cell_threads, cells)),
        slurm_array_parallelism=workers or len(cells),
        gpus_per_node=int(any(cell.config.train.device.startswith("cuda") for cell in cells)),
        name="bace",
    )
    jobs = executor.map_array(Job(), map(with_whole_path, cells), [os.getcwd()] * len(cells))

    def done(left: list[Any]) -> list[Any]:
        time.sleep(LOOK_AGAIN)
        return [job for job in left if job.done()]

    try:
        return follow(zip(jobs, cells, strict=True), done, lambda job: job.result(), shown)
    except BaseException:
        for job in jobs:
            job.cancel(check=False)
        raise
