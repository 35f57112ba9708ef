"""Write docs/reliability.md from the records of the campaigns."""

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

`make campaign` injects faults on purpose and records the outcome of each. This page reports its last full run. The
campaign is limited in time and continues where it was stopped. It is not part of `make test`, which runs a few cases of
each kind (`tests/test_campaign.py`). The code is in `tests/campaign/`. Every fault that it found has been fixed, and
`tests/test_campaign_findings.py` has a test for each fix. The runs are tiny (two blocks of width 16, three tasks) but
real: `bace run` in its own process, with one thread.
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
    """Return the time to write a checkpoint, relative to the default interval of ten minutes."""
    numbers = {f"{kind}.{i}": torch.randn(5_500_000 // 100) for kind in ("weights", "momentum") for i in range(100)}
    times = []
    for _ in range(5):
        began = time.monotonic()
        checkpoint.save(folder, numbers, {"at": {}}, keep=2)
        times.append(time.monotonic() - began)
    median = sorted(times)[2]
    return (
        f"Writing a checkpoint of a ViT-Tiny with SGD's momentum (44 MB, with checksums and fsync) takes {median:.2f} "
        f"s (median of 5). That is {100 * median / 600:.3f} % of the default interval of ten minutes; our limit is 1 %."
    )
