"""Start the processes of one run with torch's own launcher, as `torchrun --nproc-per-node N -m bace ...` does."""

import dataclasses
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Sequence
from typing import Any

import torch

from bace.errors import TrainingError
from bace.experiments.run import STOP_SIGNALS

PATIENCE = 600  # seconds that processes have to write their checkpoint when they are asked to stop


def launch(words: Sequence[str], processes: int) -> int:
    """Run `bace` with these arguments in several processes and return its exit status. A signal to stop is passed on to
    all of them; if one dies, the others are ended."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # bace reports errors itself
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // processes)))
    newer: dict[str, Any] = {  # an older torch passes on SIGTERM, SIGINT, SIGHUP and SIGQUIT, and waits 30 seconds
        "signals_to_handle": ",".join([*(number.name for number in STOP_SIGNALS), "SIGINT"]),
        "shutdown_timeout": PATIENCE,
    }
    known = {field.name for field in dataclasses.fields(LaunchConfig)}
    with tempfile.TemporaryDirectory(prefix="bace-ranks-") as notes:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=notes),
            **{name: value for name, value in newer.items() if name in known},
        )
        try:
            elastic_launch(config, sys.executable)("-m", "bace", *words)
        except SignalException as stopped:
            return 128 + int(stopped.sigval)
        except ChildFailedError as failed:
            ends = [(rank, int(end.exitcode)) for rank, end in failed.failures.items()]
            # prefer a process that was killed by another signal than SIGTERM, with which the launcher ends the others
            rank, status = min(ends, key=lambda end: (end[1] >= 0, end[1] == -signal.SIGTERM))
            if status >= 0:
                return status  # it has said why
            raise TrainingError(
                f"rank {rank} was killed by signal {-status}, and the other processes were ended. The last checkpoint "
                "is kept: continue with --resume"
            ) from None
    return 0
