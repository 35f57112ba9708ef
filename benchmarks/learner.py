"""The accuracy of a Learner with default settings over all digits seen, after each of five calls.

It learns scikit-learn's digits as arrays, two digits per call, with a memory of 30 and the embedded digits-vit. Every
fifth picture of a digit is for the test. --json also prints what each call chose and how much it learned (`history_`).

    python benchmarks/learner.py [METHOD ...] [--examples N] [--threads N] [--json]
"""

import argparse
import json
import time
from typing import Any

import numpy as np
import torch

import bace
from bace.data.digits import load_digits
from bace.data.modality import Table

METHODS = ("bace", "er", "lucir", "slda")
CALLS = 5


def arrays(table: Table, digits: range, most: int | None = None) -> tuple[np.ndarray, list[int]]:
    """Pictures and labels of these digits, with a maximum number of each."""
    assert isinstance(table.inputs, torch.Tensor)
    labels = [int(str(label)) for label in table.labels]
    rows = [i for digit in digits for i in [i for i, label in enumerate(labels) if label == digit][:most]]
    return table.inputs[rows][:, 0].numpy(), [labels[i] for i in rows]


def measure(method: str, examples: int | None) -> dict[str, Any]:
    train, test = load_digits()
    learner, scores, began = bace.Learner(method, backbone="digits-vit", memory=30), [], time.perf_counter()
    for call in range(CALLS):
        learner.partial_fit(*arrays(train, range(2 * call, 2 * call + 2), examples))
        scores.append(learner.score(*arrays(test, range(2 * call + 2))))
    seconds = time.perf_counter() - began
    return {"method": method, "scores": scores, "seconds": seconds, "history": learner.history_}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=METHODS, metavar="METHOD")
    parser.add_argument("--examples", type=int, help="of each digit; default: all, about 144")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    if not asked.json:
        print(f"| `Learner(...)` |{' |' * CALLS} seconds |\n| --- |{' --- |' * (CALLS + 1)}")
    for method in asked.methods:
        found = measure(method, asked.examples)
        scores = " | ".join(f"{score:.3f}" for score in found["scores"])
        print(json.dumps(found) if asked.json else f'| "{method}" | {scores} | {found["seconds"]:.1f} |', flush=True)


if __name__ == "__main__":
    main()
