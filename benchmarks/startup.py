"""The seconds until the help page is printed, and until `bace run` on digits takes its first step, in new processes."""

import subprocess
import sys
import tempfile
import time

from common import Bar

# the command, until the loop shows its first step
RUN = """
import sys
from bace.core.trainer import Trainer
Trainer.show_progress = lambda *position: sys.exit(0)
from bace.cli.main import main
main(["run", "--benchmark", "digits", "--method", "bace", "--out", sys.argv[1]])
"""


def seconds(words: list[str], repeat: int) -> float:
    """The seconds of the fastest repetition; the others read from a cold disk."""
    times = []
    for _ in range(repeat):
        begun = time.perf_counter()
        subprocess.run([sys.executable, *words], check=True, capture_output=True)
        times.append(time.perf_counter() - begun)
    return min(times)


def bars(tiny: bool) -> dict[str, Bar]:
    repeat = 1 if tiny else 5
    with tempfile.TemporaryDirectory() as folder:
        first_step = min(seconds(["-c", RUN, f"{folder}/{i}"], 1) for i in range(repeat))
    return {
        "bace --help (s)": Bar(seconds(["-m", "bace", "--help"], repeat), 0.5),
        "bace run on digits: first step (s)": Bar(first_step, 4.0),
    }
