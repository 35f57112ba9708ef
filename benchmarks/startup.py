"""The seconds until the help page is printed, and until `bace run` on digits takes its first step, in new processes."""

import subprocess
import sys
import time

from common import Bar

RUN = """
import bace
class Begun(Exception): ...
def show(done, text):
    raise Begun
try:
    bace.run(benchmark="digits", method="bace", show=show)
except Begun:
    pass
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
    return {
        "bace --help (s)": Bar(seconds(["-m", "bace", "--help"], repeat), 0.5),
        "bace run on digits: first step (s)": Bar(seconds(["-c", RUN], repeat), 4.0),
    }
