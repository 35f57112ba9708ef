"""`make test-cpu` runs the tests that depend on rounding under every instruction set of this machine, with one thread
and with two.

    python tests/cpu.py [formulas] [golden] [conformance] [--instructions NAME] [--threads N] [--workers N]

With one thread, MKL and oneDNN are also restricted to the instruction set; with two, only torch's own kernels are. The
script prints a table of the runs and the output of those that failed. The exit code is 1 if any failed.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from golden.record import INSTRUCTION_SETS, instruction_sets

TESTS = Path(__file__).parent
PARTS: dict[str, list[Path | str]] = {
    "formulas": [TESTS / "formulas"],
    "golden": [TESTS / "test_golden.py"],
    # each method, on one modality, ends in the same bits if it is killed at any kind of resume point
    "conformance": [TESTS / "test_methods.py", "-k", "check_resume_equals_the_straight_run", "-m", "first_modality"],
}


def environment(instructions: str, threads: int) -> dict[str, str]:
    lowered = INSTRUCTION_SETS.get(instructions, {})
    if threads > 1:
        kept = ("ATEN_CPU_CAPABILITY", "BACE_ONEDNN")
        lowered = {name: value for name, value in lowered.items() if name in kept}
    # threads that wait asleep let as many processes run as there are cores; spinning ones would slow each other down
    waiting = {"OMP_WAIT_POLICY": "passive"} if threads > 1 else {}
    return {"OMP_NUM_THREADS": str(threads), "BACE_TEST_THREADS": str(threads), **waiting, **lowered}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="*", help=f"of {', '.join(PARTS)}; default: all")  # `choices` would refuse []
    parser.add_argument("--instructions", choices=INSTRUCTION_SETS, nargs="*", default=instruction_sets())
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes at a time")
    given = parser.parse_args()
    if unknown := [part for part in given.part if part not in PARTS]:
        parser.error(f"there is no part '{unknown[0]}'")
    cases = [(instructions, threads) for threads in given.threads for instructions in given.instructions]
    print(f"{'instructions':14}{'threads':9}{'part':13}{'minutes':9}result", flush=True)
    pytest = [sys.executable, "-m", "pytest", "-n", str(given.workers), "--dist", "loadgroup"]
    failures = 0
    for instructions, threads in cases:
        changes = environment(instructions, threads)
        for part in given.part or PARTS:
            command = [*pytest, *PARTS[part]]
            began = time.monotonic()
            done = subprocess.run(command, env={**os.environ, **changes}, capture_output=True, text=True)
            summary = done.stdout.strip().splitlines()[-1:] or done.stderr.splitlines()[-1:]
            minutes = (time.monotonic() - began) / 60
            print(f"{instructions:14}{threads:<9}{part:13}{minutes:<9.1f}{summary[0]}", flush=True)
            if done.returncode:
                failures += 1
                print(" ".join(f"{name}={value}" for name, value in changes.items()), done.stdout, sep="\n")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
