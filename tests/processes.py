"""Processes that tests start, watch and kill. They are forks of the server of `bace compare --workers`, which has
already imported the slow modules and shares nothing else with the tests."""

import os
import subprocess
import sys
import tempfile
from multiprocessing.process import BaseProcess
from pathlib import Path

from bace.experiments.workers import process_context

BACE = "import sys; from bace.cli.main import main; sys.exit(main(sys.argv[1:]))"


def start(code: str, *words: str, out: str | Path = os.devnull, err: str | Path = os.devnull) -> BaseProcess:
    """Run code as `python -c code words` does, with its output in these files."""
    child: BaseProcess = process_context().Process(target=execute, args=(code, words, str(out), str(err)))
    child.start()
    return child


def run(code: str, *words: str, patience: float = 120) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        child = start(code, *words, out=out, err=err)
        child.join(patience)
        if child.exitcode is None:
            child.kill()
            raise TimeoutError(f"it did not end in {patience} seconds: {err.read_text()}")
        return subprocess.CompletedProcess(words, child.exitcode, out.read_text(), err.read_text())


def execute(code: str, words: tuple[str, ...], out: str, err: str) -> None:
    for path, number in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.argv = ["-c", *words]
    exec(code, {"__name__": "__main__"})
