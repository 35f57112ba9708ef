"""`partial_fit` beside a run of the same benchmark: the Learner gets the same data and backbone and chooses the rest.

    BACE_DATA=DATA BACE_MODELS=MODELS python benchmarks/partial_fit.py [--benchmark NAME] [--tasks N] [--method NAME]

The numbers are means over the tasks so far, after each task, in percent. One seed and one thread.
"""

import argparse
import logging
import sys
from statistics import mean

import torch
from reject import inputs

import bace
from bace.config.parse import config_from
from bace.data.benchmarks import find_benchmark
from bace.data.settings import data_settings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--benchmark", default="cifar100-desk")
    parser.add_argument("--tasks", type=int, default=5)
    parser.add_argument("--method", default="BaCE")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    logging.getLogger("bace").setLevel(logging.INFO)  # says which settings the Learner chooses
    given = {"benchmark": asked.benchmark, "benchmark.tasks": asked.tasks, "train.threads": 1}
    config = config_from({**given, "method": asked.method})
    backbone = {f"backbone.{name}": getattr(config.backbone, name) for name in ("name", "image_size", "freeze")}
    learner = bace.Learner(asked.method, memory=config.memory.size, **backbone)
    tasks, found = find_benchmark(asked.benchmark).parts(data_settings(config)), []
    for t, task in enumerate(tasks):
        learner.partial_fit(inputs(task.train), list(task.train.labels))
        scores = [learner.score(inputs(one.test), list(one.test.labels)) for one in tasks[: t + 1]]
        found.append(f"{100 * mean(scores):.1f}")
        print(f"Learner, after each task: {' '.join(found)}", flush=True)
    metrics = bace.run({**given, "method": asked.method, "measure.fwt": False}).metrics
    print(f"bace run, after each task: {' '.join(f'{score:.1f}' for score in metrics['A'])}")


if __name__ == "__main__":
    main()
