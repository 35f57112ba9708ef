"""How much sooner two workers of one thread finish the demo's 12 runs than one worker of two threads.

python benchmarks/many_runs.py            # the bar is 1.6, on two cores that nobody else uses
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DEMO = ["compare", "--benchmark", "digits", "--method", "SEQ", "ER", "BaCE", "MTL", "--seeds", "3"]


def seconds(*words: str) -> float:
    """Of a whole command, with the start of its processes."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        command = [sys.executable, "-m", "bace", *DEMO, "--out", str(Path(folder) / "runs"), *words]
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "2"})
        return time.perf_counter() - begun


def main() -> None:
    one = seconds()
    two = seconds("--workers", "2")
    print(f"one worker of two threads: {one:.0f} s; two workers of one thread: {two:.0f} s; ratio {one / two:.2f}")


if __name__ == "__main__":
    main()
