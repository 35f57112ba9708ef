"""Can a Learner distinguish future classes from the classes that it knows? And are its probabilities calibrated?

The Learner learns the tasks of a benchmark one by one. After each task except the last, the test examples of the tasks
so far are known, and those of later tasks are unknown. AUROC measures how well a score separates the two (0.5 is
chance); `reject=` uses the highest probability. ECE is the expected calibration error on the known test examples and
NLL their mean negative log-likelihood, with temperature 1 and with the fitted one. Numbers are means over the calls.

    python benchmarks/reject.py [--benchmarks NAME ...] [--methods NAME ...] [--train N] [--test N] [SETTING=VALUE ...]
"""

import argparse
import os
import warnings
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from auto import Remembered
from sklearn.metrics import roc_auc_score
from torch import Tensor

import bace
from bace.config.parse import config_from
from bace.core.calibration import calibration_error, finite
from bace.data.benchmarks import find_benchmark
from bace.data.decode import Pictures, decode_pictures
from bace.data.modality import Table
from bace.data.settings import data_settings
from bace.models.encoder import Encoder

BENCHMARKS = ("digits", "topics-desk", "cifar100-desk")
METHODS: dict[str, dict[str, Any]] = {
    "SimpleCIL": {"name": "simplecil"},
    "FeCAM": {"name": "fecam"},
    "SLDA": {"name": "slda"},
    "ER": {"name": "er"},  # trains the encoder, which is slow on large data sets, so it runs only if asked for
}
COLUMNS = ("highest probability", "highest score", "ECE, temperature 1", "ECE", "NLL, temperature 1", "NLL")


def first(table: Table, count: int) -> Table:
    """The first examples of each class."""
    shown = table.shown()
    return table.take([i for name in table.names for i in [i for i, own in enumerate(shown) if name in own][:count]])


def inputs(table: Table) -> Any:
    """A Learner takes decoded pictures."""
    return decode_pictures([table.inputs], None) if isinstance(table.inputs, Pictures) else table.inputs


def measure(benchmark: str, method: str, train: int, test: int, settings: dict[str, Any]) -> dict[str, float]:
    config = config_from({"benchmark.name": benchmark, "method.name": METHODS[method]["name"], **settings})
    tasks = find_benchmark(benchmark).parts(data_settings(config))
    backbone = {"backbone.name": config.backbone.name, "backbone.image_size": config.backbone.image_size}
    views = {"benchmark.augment": False, "benchmark.flip": False} if benchmark != "topics-desk" else {}
    learner, found = bace.Learner(METHODS[method], **backbone, **views), []
    tests = [first(task.test, test) for task in tasks]
    asked = [inputs(table) for table in tests]
    for t, task in enumerate(tasks[:-1]):
        shown = first(task.train, train)
        learner.partial_fit(inputs(shown), list(shown.labels))
        scores = [learner.scores(examples) for examples in asked]
        known, unknown = torch.cat(scores[: t + 1]), torch.cat(scores[t + 1 :])
        names = [str(name) for name in learner.classes_]
        targets = torch.tensor([names.index(str(label)) for table in tests[: t + 1] for label in table.labels])
        found.append(judged(known, unknown, targets, learner.history_[-1]["temperature"]))
    return {name: mean(one[name] for one in found) for name in found[0]}


def judged(known: Tensor, unknown: Tensor, targets: Tensor, temperature: float) -> dict[str, float]:
    """(known, classes), (unknown, classes), (known,) classes"""

    def separated(score: Any) -> float:
        values = torch.cat([score(known), score(unknown)])
        return float(roc_auc_score([1] * len(known) + [0] * len(unknown), values.numpy()))

    def probabilities(scores: Tensor, t: float) -> Tensor:
        return torch.softmax(finite(scores) / t, 1)

    return {
        "highest probability": separated(lambda scores: probabilities(scores, temperature).max(1).values),
        "highest score": separated(lambda scores: finite(scores).max(1).values),
        "ECE, temperature 1": calibration_error(probabilities(known, 1.0), targets),
        "ECE": calibration_error(probabilities(known, temperature), targets),
        "NLL, temperature 1": float(F.cross_entropy(finite(known), targets)),
        "NLL": float(F.cross_entropy(finite(known) / temperature, targets)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--benchmarks", nargs="+", default=BENCHMARKS)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=("SimpleCIL", "FeCAM", "SLDA"))
    parser.add_argument("--train", type=int, default=20, help="examples of each class")
    parser.add_argument("--test", type=int, default=10)
    parser.add_argument("settings", nargs="*", metavar="SETTING=VALUE", help="of benchmark, and backbone.image_size")
    asked = parser.parse_args()
    settings = {name: value for name, _, value in (word.partition("=") for word in asked.settings)}
    for name in settings:
        if not name.startswith("benchmark.") and name not in ("backbone.name", "backbone.image_size"):
            parser.error(f"'{name}' has no effect here")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ["HF_HUB_OFFLINE"] = "1"
    remembered = Remembered()
    Encoder.forward = lambda encoder, inputs, taps=False, pooled=False: remembered.forward(encoder, inputs, taps)
    print(f"| benchmark | method | {' | '.join(COLUMNS)} |\n|{' --- |' * (len(COLUMNS) + 2)}")
    for benchmark in asked.benchmarks:
        for method in asked.methods:
            found = measure(benchmark, method, asked.train, asked.test, settings)
            print(f"| {benchmark} | {method} | {' | '.join(f'{found[name]:.3f}' for name in COLUMNS)} |", flush=True)


if __name__ == "__main__":
    main()
