"""Run campaigns. The docstring of the package describes them."""

import argparse
import importlib
import json
import os
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

from campaign import damage, disk, inputs, kills, learns, stops
from campaign.report import write_report
from campaign.work import PRELOADED, Work

# the number of cases (None: all cases of the campaign), and the most minutes that it may take
CAMPAIGNS: dict[str, tuple[Any, int | None, float]] = {
    "kills": (kills, 200, 30),
    "stops": (stops, 60, 10),
    "learns": (learns, 100, 15),
    "disk": (disk, None, 15),
    "damage": (damage, None, 15),
    "inputs": (inputs, None, 20),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("campaign", nargs="*", help=f"of {', '.join(CAMPAIGNS)}; default: all")
    parser.add_argument("--out", type=Path, default=Path("campaign"), help="folder of the records")
    parser.add_argument("--cases", type=int, help="of each campaign; default: as many as the report asks for")
    parser.add_argument("--report", type=Path, help="write the report of all records there")
    given = parser.parse_args()
    if unknown := [name for name in given.campaign if name not in CAMPAIGNS]:
        parser.error(f"there is no campaign '{unknown[0]}'")
    given.out.mkdir(parents=True, exist_ok=True)
    for module in PRELOADED:
        importlib.import_module(module)
    work = Work(given.out)
    faults = sum(run(name, work, given.cases) for name in given.campaign or CAMPAIGNS)
    if given.report:
        write_report(given.report, given.out, {name: module for name, (module, _, _) in CAMPAIGNS.items()})
    return min(faults, 1)


def run(name: str, work: Work, limit: int | None) -> int:
    """Run one campaign from where its records end, and return the number of faults found."""
    module, usual, minutes = CAMPAIGNS[name]
    file = work.folder / f"{name}.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    done, end = {record["case"] for record in records}, time.monotonic() + 60 * minutes
    with file.open("a") as out:
        for case, function in islice(module.cases(work), limit or usual):
            if case in done:
                continue
            if time.monotonic() > end:
                print(f"{name}: stopped after {minutes} minutes; call again to go on", flush=True)
                break
            began = time.monotonic()
            record = {"case": case, **function(), "seconds": round(time.monotonic() - began, 2)}
            records.append(record)
            out.write(json.dumps(record) + "\n")
            out.flush()
            if record["fault"]:
                print(f"{name}: {case}: {record['fault']}", flush=True)
    faults = sum(bool(record["fault"]) for record in records)
    print(f"{name}: {len(records)} cases, {faults} faults", flush=True)
    return faults


if __name__ == "__main__":
    sys.exit(main())
