"""docs/reliability.md from the records of the campaigns."""

import json
import platform
import subprocess
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

from bace.core import checkpoint

INTRODUCTION = """\
# Reliability

What `make campaign` did when it was last run in full: faults made deliberately, one record each. It is bounded in time,
goes on where it was stopped, and is no part of `make test`, which runs a handful of each (`tests/test_campaign.py`).
The campaigns are `tests/campaign/`; what they found before is mended, and a test in `tests/test_campaign_findings.py`
fails without the mend. The runs are tiny (two blocks of width 16, three tasks) but real: `bace run` in a process of its
own, with one thread.
"""


def write_report(path: Path, folder: Path, campaigns: dict[str, Any]) -> None:
    lines = [
        INTRODUCTION,
        f"`PYTHONPATH=tests python -m campaign --out DIR --report {path}`, {date.today():%d %B %Y}, {machine()}.",
        "",
    ]
    lines += ["| campaign | cases | faults | minutes |", "| --- | --- | --- | --- |"]
    sections: list[str] = []
    for name, module in campaigns.items():
        file = folder / f"{name}.jsonl"
        records = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        faults = [record for record in records if record["fault"]]
        minutes = sum(record["seconds"] for record in records) / 60
        lines.append(f"| {module.TITLE} | {len(records):,} | {len(faults)} | {minutes:.1f} |")
        if records:
            sections += [
                "",
                f"## {module.TITLE[0].upper()}{module.TITLE[1:]}",
                "",
                module.__doc__.strip().replace("\n", " "),
                "",
            ]
            sections += [f"- {line}" for line in module.summary(records)]
            sections += [f"- Fault: `{record['case']}`: {record['fault']}" for record in faults]
    sections += ["", "## Checkpoints by time", "", checkpoint_cost(folder / "cost")]
    path.write_text("\n".join([*lines, *sections]) + "\n")


def machine() -> str:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return f"commit {commit}, Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}"


def checkpoint_cost(folder: Path) -> str:
    """What writing a checkpoint takes, of the ten minutes between two of them by default."""
    numbers = {f"{kind}.{i}": torch.randn(5_500_000 // 100) for kind in ("weights", "momentum") for i in range(100)}
    times = []
    for _ in range(5):
        began = time.monotonic()
        checkpoint.save(folder, numbers, {"at": {}}, keep=2)
        times.append(time.monotonic() - began)
    median = sorted(times)[2]
    return (
        f"A checkpoint of a ViT-Tiny with SGD's momentum (44 MB, with checksums and fsync) is written in {median:.2f} "
        f"s (median of 5): {100 * median / 600:.3f} % of the ten minutes between two by default (bar: 1 %)."
    )
