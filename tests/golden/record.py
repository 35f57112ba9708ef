"""What each method scores on a small cut of the embedded digits: record it, after a change that is meant to change it.

python tests/golden/record.py NAME [NAME ...]     (`all`: every method that is defined for pictures)
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

import bace
from bace.methods import METHODS, find_method

FILE = Path(__file__).with_name("digits.json")
TOLERANCE = 5.0  # points: 15 of the 300 test digits; rounding differs between machines and grows over five tasks


def measured(method: str, settings: dict[str, Any]) -> dict[str, float]:
    metrics = bace.run(settings, method=method).metrics
    return {name: round(metrics[name], 2) for name in ("A_last", "FGT")}


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    golden = json.loads(FILE.read_text())
    titles = [method.title for method in METHODS if "image" in method.modalities]
    for title in titles if names == ["all"] else [find_method(name).title for name in names]:
        golden["methods"][title] = {**measured(title, golden["settings"]), "tolerance": TOLERANCE}
        print(title, golden["methods"][title])
    golden["methods"] = {title: golden["methods"][title] for title in titles if title in golden["methods"]}
    FILE.write_text(json.dumps(golden, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
