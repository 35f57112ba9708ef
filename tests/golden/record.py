"""The bands in which each method scores on a small stream: record them anew after a change that is meant to change
them. The stream is a cut of the embedded digits or, for a method that does not take pictures, one of corpora.py.

    PYTHONPATH=tests python -m golden.record NAME [NAME ...]     (`all`: every method)

A method is run with five seeds under every instruction set that the machine has, and a band is the mean of these runs
plus or minus four of their standard deviations. Rounding grows over the steps of a run into another network, as another
seed does, so a run on a machine that rounds in its own way is one more draw from this spread: the seeds alone move the
seed that the test runs by less than two standard deviations (of five numbers none is farther from their mean), and the
other two are for the rounding. A method that no longer works falls much deeper; `tells_apart` sees to it. SEQ, which
others are told apart from, has a band on every stream.

Finished runs are kept in the temporary folder, under a hash of the sources: a recording that was cut short goes on.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from golden.corpora import corpora

import bace
from bace.methods import METHODS, find_method

FOLDER = Path(__file__).parent
STREAMS = {
    "image": "digits",
    "text": "texts",
    "token": "entities",
}  # by modality; its file has the bands
SEEDS = range(5)
SPREADS = 4.0  # half the width of a band, in standard deviations
LEAST = 1.5  # the least half width: four of the 240 test digits of tasks 2 to 5
MEASURES = ("A_last", "A_avg", "A_new", "FGT")
# smaller numbers of random features, which are squared, and of steps for small tasks: seconds instead of minutes
FEWER: dict[str, dict[str, Any]] = {"RanPAC": {"M": 1000}, "ACIL": {"expansion": 500}, "SEQ*": {"head_steps": 200}}
FEWER |= {"DualPrompt": {"tune_steps": 60}, "O-LoRA": {"tune_steps": 60}}
FEWER |= {name: {"tune_epochs": 10, "tune_steps": 30} for name in ("CODA-Prompt", "SD-LoRA")}
FEWER |= {"Sparse-ER": {"every": 1}, "MBPA++": {"every": 4}}  # replays: 100 steps are more than a run has
FEWER |= {"HAL": {"anchor_steps": 30, "memory_steps": 20}, "Co2L": {"linear_epochs": 40}}
FEWER["EASE"] = {"tune_epochs": 8}  # on so few digits it equals SimpleCIL, whatever its rate
FEWER["APER"] = {"tuning": "scale-shift", "tune_lr": 0.1}  # at the published rate, so does APER
FEWER["IDBR"] = {"every": 4}  # replays: a task has 50 steps


def titles_on(stream: str) -> list[str]:
    """SEQ, and the methods whose first modality is the stream's."""
    first = {method.title: next(STREAMS[m] for m in STREAMS if m in method.modalities) for method in METHODS}
    return [title for title, own in first.items() if own == stream or title == "SEQ"]


CASES = [(stream, title) for stream in STREAMS.values() for title in titles_on(stream)]

# By torch's names, the variables that restrict torch's own kernels, MKL and oneDNN to an instruction set. With AVX-512,
# encoders multiply with MKL or with oneDNN, depending on the maker of the processor (bace/models/products.py).
INSTRUCTION_SETS = {
    "DEFAULT": {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "AVX512": {"BACE_ONEDNN": "0"},
    "AVX512+oneDNN": {"BACE_ONEDNN": "1"},
}

Band = tuple[float, float]  # the middle of the band, and half its width


def instruction_sets() -> list[str]:
    """Those of this machine, the simplest first."""
    names, own = list(INSTRUCTION_SETS), torch.backends.cpu.get_cpu_capability()
    return [name for name in names if names.index(capability(name)) <= names.index(own)] if own in names else [own]


def capability(instructions: str) -> str:
    return instructions.partition("+")[0]


def golden(stream: str) -> dict[str, Any]:
    """The settings of the stream and the bands by method."""
    found: dict[str, Any] = json.loads((FOLDER / f"{stream}.json").read_text())
    return found


def measured(stream: str, method: str, **changes: Any) -> dict[str, float]:
    settings = {**golden(stream)["settings"], **changes}
    if stream != "digits":
        settings |= {name: str(corpora() / settings[name]) for name in ("benchmark.path", "backbone")}
    found = bace.run(settings, method={"name": method, **FEWER.get(method, {})}).metrics
    return {name: round(found[name], 2) for name in MEASURES}


def band(values: list[float]) -> Band:
    return round(statistics.mean(values), 2), round(max(SPREADS * statistics.stdev(values), LEAST), 2)


def tells_apart(bands: dict[str, Band], others: dict[str, Band]) -> bool:
    """Whether some measure's middle lies outside the other's band."""
    return any(abs(bands[name][0] - middle) > half for name, (middle, half) in others.items())


# -- recording


def runs_file() -> Path:
    sources = [*sorted(Path(bace.__file__).parent.rglob("*.py")), *sorted(FOLDER.glob("*.py"))]
    settings = [json.dumps(golden(stream)["settings"]).encode() for stream in STREAMS.values()]
    digest = hashlib.sha256(b"".join([*(path.read_bytes() for path in sources), *settings]))
    return Path(tempfile.gettempdir()) / f"bace-golden-{digest.hexdigest()[:12]}.jsonl"


def finished() -> dict[tuple[str, str, str, int], dict[str, float]]:
    """By stream, method, instruction set and seed."""
    lines = runs_file().read_text().splitlines() if runs_file().exists() else []
    runs = map(json.loads, lines)
    return {(run["stream"], run["method"], run["instructions"], run["seed"]): run["measures"] for run in runs}


def run_seed(instructions: str, seed: int, titles: list[str]) -> None:
    """In a process of its own, whose instruction set is that of its environment."""
    assert torch.backends.cpu.get_cpu_capability() == capability(instructions)
    for stream, title in CASES:
        if title in titles and (stream, title, instructions, seed) not in finished():
            run = {"stream": stream, "method": title, "instructions": instructions, "seed": seed}
            run |= {"measures": measured(stream, title, seed=seed)}
            with runs_file().open("a") as file:  # one line at a time, because several processes write
                file.write(json.dumps(run) + "\n")
            print(*run.values(), flush=True)


def record(titles: list[str], jobs: int) -> None:
    def start(case: tuple[str, int]) -> None:
        instructions, seed = case
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **INSTRUCTION_SETS.get(instructions, {})}
        command = [sys.executable, "-m", "golden.record", *titles, "--as", instructions, str(seed)]
        subprocess.run(command, env=environment, check=True)

    draws = [(instructions, seed) for instructions in instruction_sets() for seed in SEEDS]
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(start, draws))
    runs = finished()
    for stream in STREAMS.values():
        found = golden(stream) | {"instruction_sets": instruction_sets(), "seeds": list(SEEDS)}
        new = [title for title in titles_on(stream) if title in titles]
        for title in new:
            values = [runs[stream, title, *draw] for draw in draws]
            found["methods"][title] = {name: band([run[name] for run in values]) for name in MEASURES}
        if new:
            write(stream, found)


def write(stream: str, found: dict[str, Any]) -> None:
    """One line a method."""
    known = [title for title in titles_on(stream) if title in found["methods"]]
    lines = [f"    {json.dumps(title)}: {json.dumps(found['methods'][title])}" for title in known]
    head = json.dumps({key: value for key, value in found.items() if key != "methods"}, indent=2)[:-2]
    (FOLDER / f"{stream}.json").write_text(head + ',\n  "methods": {\n' + ",\n".join(lines) + "\n  }\n}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", nargs="+", help="or `all`")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time, of one thread each")
    parser.add_argument("--as", dest="case", nargs=2, help=argparse.SUPPRESS)  # for the calls by the program itself
    given = parser.parse_args()
    every = [method.title for method in METHODS]
    titles = every if given.method == ["all"] else [find_method(name).title for name in given.method]
    if given.case:
        run_seed(given.case[0], int(given.case[1]), titles)
    else:
        record(titles, given.jobs)


if __name__ == "__main__":
    main()
