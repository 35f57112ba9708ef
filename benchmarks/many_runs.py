"""The speed-up of the demo's runs by two workers with one thread each over one worker with two threads, on two cores.

python benchmarks/many_runs.py
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import Bar

DEMO = ["compare", "--benchmark", "digits", "--method", "SEQ", "ER", "BaCE", "MTL", "--seeds"]


def seconds(seeds: int, *words: str) -> float:
    """The seconds of a whole command, including the start of its processes."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        command = [sys.executable, "-m", "bace", *DEMO, str(seeds), "--out", str(Path(folder) / "runs"), *words]
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "2"})
        return time.perf_counter() - begun


def bars(tiny: bool) -> dict[str, Bar]:
    seeds, few = (1, ["--train.epochs", "1"]) if tiny else (3, [])
    one, two = seconds(seeds, *few), seconds(seeds, "--workers", "2", *few)
    return {"one worker of two threads over two workers of one": Bar(one / two, 1.6, least=True)}


def main() -> None:
    one = seconds(3)
    two = seconds(3, "--workers", "2")
    print(f"one worker of two threads: {one:.0f} s; two workers of one thread: {two:.0f} s; ratio {one / two:.2f}")


if __name__ == "__main__":
    main()
