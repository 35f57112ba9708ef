"""An estimate of the passes, hours and memory of a run before it starts.

The estimate is correct to a factor of about two. Its unit is F, one forward pass of one example; a backward pass costs
2 F. It counts the training passes (as the method declares them in `Method.cost` and `networks`), the tests after every
task and the studies' passes over the training data. docs/paper.md explains the numbers.
"""

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

from bace.config.schema import Config
from bace.core.method import Method
from bace.core.resources import activations
from bace.data.benchmarks import find_benchmark
from bace.experiments.assemble import make_method
from bace.methods.er import ER

CORPORA = {  # classes, training and test examples of the tasks, which are parts of corpora; approximate for sentences
    "topics": (22, 22 * 28_000, 22 * 2_000 - 400),
    "topics-desk": (36, 36 * 28_000, 36 * 2_000),
    "entities": (62, 158_000, 27_000),
    "entities-desk": (45, 30_000, 10_000),
}
EFFICIENCY = 0.5  # the share of a large matrix product's speed that training reaches


@dataclass(frozen=True)
class Cost:
    """The cost of one run: forward passes (a backward pass counts as two), floating-point operations, bytes."""

    passes: float
    flop: float
    memory: float

    def hours(self, gflops: float) -> float:
        return self.flop / gflops / 1e9 / 3600


def estimate(config: Config, steps: int) -> Cost | None:
    """The cost of a run; None if the benchmark's size or the backbone's shape is not known."""
    size, shape = data_size(config), shape_of(config)
    if size is None or shape is None:
        return None
    classes, train, test = size
    width, depth, tokens = shape
    method = make_method(config, find_benchmark(str(config.benchmark["name"])).modality)
    memory = min(config.memory.size or config.memory.per_class * classes, train)
    learning = learning_passes(method, config, train, memory, steps)
    seen = (steps + 1) / 2  # tests and studies after each task are over all tasks so far
    looking = train * seen if {"probing", "tracking"} & set(config.studies) else 0.0
    # a trained example costs 3 F; frozen blocks save both parts of the backward pass, adapters the part of the weights
    frozen = config.backbone.freeze / depth
    saved = 1 / 3 if config.backbone.adapter else 2 / 3 * frozen
    passes = computed = learning * (1 - saved) + test * seen + looking
    if config.backbone.cache:  # each example passes frozen blocks once; 1 of 3 F is forward
        computed -= frozen * max(learning / 3 + test * seen + looking - train - test, 0.0)
    if config.train.recompute or config.train.accumulate > 1:  # each adds a forward pass; 1 of 3 F is forward
        computed += learning / 3 * (config.train.recompute + (config.train.accumulate > 1))
    per_pass = tokens * depth * (24 * width**2 + 4 * tokens * width)
    weights = 12 * depth * width**2
    optimiser = 1 if config.train.optimiser == "sgd" else 2
    networks = method.networks + method.keeps_teacher + method.expands * (steps - 1)
    held = weights * (networks + 1 + optimiser)  # and the gradient
    stepping = activations(config.train, max(config.train.batch_size, method.own_batch), tokens, width, depth)
    kept = min(config.backbone.cache * 1e6, 4 * (train + test) * tokens * width)
    return Cost(passes, computed * per_pass, 4 * (held + stepping) + kept)


def learning_passes(method: Method, config: Config, train: int, memory: int, steps: int) -> float:
    """The passes of a run with this many training examples and memory slots, without tests."""
    cost, each = method.cost, train // steps
    epochs = cost.epochs_of(each, config.train.epochs)
    if method.licence == "past":  # all data so far at every task, or once
        rounds = 1.0 if config.method.get("only_last") else (steps + 1) / 2
        return cost.new * epochs * train * rounds
    method.training_settings = config.train
    share = method.replay_share if memory else 0
    replayed = share / (config.train.batch_size - share)  # beside each new example
    if isinstance(method, ER) and method.policy.mode == "concat":  # each slot once an epoch
        replayed = memory * steps / train
    first = cost.first_task(each, config.train.epochs)
    later = epochs * (cost.new + cost.replayed * replayed) + cost.task
    return train / steps * (first + (steps - 1) * later) + steps * cost.memory * memory


def data_size(config: Config) -> tuple[int, int, int] | None:
    """Classes, training and test examples of a benchmark."""
    name = str(config.benchmark["name"])
    counts = [corpus.counts for corpus in find_benchmark(name).corpora]
    if name in CORPORA:
        classes, train, test = CORPORA[name]
    elif known := [each for each in counts if each is not None]:
        classes, train, test = (sum(numbers) for numbers in zip(*known, strict=True))
    else:
        return None
    tasks = 5  # only corpora are limited by task
    per_class = [config.benchmark.get(key) for key in ("train_per_class", "test_per_class")]
    per_task = [config.benchmark.get(key) for key in ("train_per_task", "test_per_task")]
    found = []
    for all_of_it, a_class, a_task in zip((train, test), per_class, per_task, strict=True):
        limits = [limit * n for limit, n in ((a_class, classes), (a_task, tasks)) if isinstance(limit, int)]
        found.append(min([all_of_it, *limits]))
    return classes, found[0], found[1]


def shape_of(config: Config) -> tuple[int, int, int] | None:
    """Width, depth and tokens of the encoder, without loading it."""
    from bace.models.backbones import find_backbone

    name, about = config.backbone.name, {}
    known = find_backbone(name)
    width, depth = (known.width, known.depth) if known else (0, 0)
    local = Path(name).expanduser() / "config.json"
    if local.exists():
        about = json.loads(local.read_text())
        width, depth = about.get("hidden_size", 0), about.get("num_hidden_layers", 0)
    if not width or not depth:
        return None
    if str(config.benchmark["name"]) in CORPORA:
        return width, depth, int(str(config.benchmark["max_length"])) // 2  # most texts are shorter than the limit
    side = config.backbone.image_size or about.get("image_size", 224)
    return width, depth, (side // about.get("patch_size", 16)) ** 2 + 1


def measured_gflops(device: str) -> float:
    """The speed that training may reach here: half the speed of a product of matrices as large as a transformer's. The
    fastest product within a fifth of a second counts, because others may be using the machine."""
    import torch

    a, b = torch.ones(1024, 768, device=device), torch.ones(768, 3072, device=device)
    fastest, start = math.inf, time.perf_counter()
    while time.perf_counter() - start < 0.2:
        begun = time.perf_counter()
        float((a @ b)[0, 0])  # waits for the device
        fastest = min(fastest, time.perf_counter() - begun)
    return EFFICIENCY * 2 * 1024 * 768 * 3072 / fastest / 1e9
