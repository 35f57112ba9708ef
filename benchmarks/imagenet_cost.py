"""What runs of ImageNet's size cost by the model of `bace paper` (paper/cost.py): 1,000 classes in 10 tasks, ViT-B/16,
batches of 512, 5 epochs, a memory of 20,000. Nothing is run.

    python benchmarks/imagenet_cost.py [--tflops 100]
"""

import argparse
from typing import Any
from unittest.mock import patch

from bace.config.parse import config_from
from bace.data.benchmarks import BENCHMARKS, Benchmark, one_set
from bace.data.datasets import Corpus, Counts
from bace.paper.cost import Cost, estimate

TASKS = 10
CORPUS = Corpus("imagenet", None, "", counts=Counts(1000, 1_281_167, 50_000))
DEFAULTS = {"backbone.name": "vit-b16", "memory.size": 20_000, "train.batch_size": 512, "train.epochs": 5}
IMAGENET = Benchmark("imagenet", "image", "", one_set(CORPUS), DEFAULTS, (CORPUS,))
EXACT = {"name": "BaCE", "neighbour_scores": "exact"}
METHODS: dict[str, str | dict[str, str]] = {
    "SEQ": "SEQ",
    "LwF": "LwF",
    "ER": "ER",
    "BaCE": "BaCE",
    "BaCE, `neighbour_scores = exact`": EXACT,
}
SMALLER: dict[str, dict[str, Any]] = {
    "GB": {},
    "accumulate 8": {"train.accumulate": 8},
    "recompute": {"train.recompute": True},
    "both": {"train.accumulate": 8, "train.recompute": True},
    "devices 8": {"train.devices": 8},
}


def cost(method: str | dict[str, str], **settings: Any) -> Cost:
    with patch.dict(BENCHMARKS, {"imagenet": IMAGENET}):
        found = estimate(config_from({"benchmark": "imagenet", "method": method, **settings}), TASKS)
    assert found is not None
    return found


def table(tflops: float) -> str:
    """Hours of one GPU, and of several that share the work out evenly; GB of each GPU."""
    head = ("method", "million passes", "EFLOP", f"hours at {tflops:g} TFLOP/s", "on 8 GPUs", "on 32", *SMALLER)
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    for name, method in METHODS.items():
        found = cost(method)
        hours = [found.hours(1000 * tflops) / gpus for gpus in (1, 8, 32)]
        memory = [cost(method, **settings).memory / 1e9 for settings in SMALLER.values()]
        cells = [found.passes / 1e6, found.flop / 1e18, *hours, *memory]
        lines.append(f"| {name} | {' | '.join(f'{cell:.2f}' for cell in cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tflops", type=float, default=100.0, help="what a GPU reaches in training")
    print(table(parser.parse_args().tflops))


if __name__ == "__main__":
    main()
