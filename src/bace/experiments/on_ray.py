"""Cells on a Ray cluster (extra `ray`). Ray places each cell. If a process or its machine dies, the cell is started
elsewhere and resumes from its checkpoint."""

import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

from bace.errors import ConfigError, Stopped
from bace.experiments.cells import Cell, Failures
from bace.experiments.cluster import LOOK_AGAIN, attempt_there, cell_threads, follow, with_whole_path
from bace.progress import Board

TRIES = 5  # how often a cell whose process died is started again


def run_on_ray(cells: Sequence[Cell], workers: int | None, shown: Board) -> Failures:
    """Run the cells on the cluster at RAY_ADDRESS, on a cluster that is running on this machine, or on a new one with
    only this machine. A cell takes `train.threads` CPUs (one by default) and, if the cluster has GPUs, one GPU."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError("--on ray needs Ray: pip install 'bace-cil[ray]'") from error
    ours = not ray.is_initialized()
    if ours:
        ray.init(log_to_driver=False, include_dashboard=False)
    gpus = 1 if ray.cluster_resources().get("GPU") else 0
    remote = ray.remote(attempt_there)
    here = os.getcwd()

    def submitted() -> Iterator[tuple[Any, Cell]]:
        for cell in map(with_whole_path, cells):
            room = {"num_cpus": cell_threads(cell), "num_gpus": gpus}
            yield remote.options(**room, max_retries=TRIES, retry_exceptions=[Stopped]).remote(cell, here), cell

    def done(handles: list[Any]) -> list[Any]:
        ended, _ = ray.wait(handles, num_returns=len(handles), timeout=LOOK_AGAIN) if handles else ([], [])
        return list(ended)

    try:
        return follow(submitted(), done, ray.get, shown, workers or math.inf)
    finally:
        if ours:
            ray.shutdown()  # ends cells that still run after Ctrl-C
