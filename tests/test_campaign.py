"""A handful of cases of every campaign, so that they do not rot."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import bace


@pytest.mark.slow
def test_a_handful_of_every_campaign(tmp_path: Path) -> None:
    tests, source = Path(__file__).parent, Path(bace.__file__).parents[1]
    command = [sys.executable, "-m", "campaign", "--cases", "2", "--out", str(tmp_path)]
    command += ["--report", str(tmp_path / "report.md")]
    environment = {**os.environ, "PYTHONPATH": f"{source}:{tests}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("kills", "stops", "learns", "disk", "damage", "inputs"):
        records = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert len(records) == 2
        assert not any(record["fault"] for record in records)
    report = (tmp_path / "report.md").read_text()
    assert "**2 of 2 ended in the same bits**" in report
    assert "Checkpoints by time" in report
