"""How seconds and memory of a run of ER grow with classes, tasks, examples and memory: exponents of fitted powers.

The encoder is tiny (one block of width 32, 8 pixels), so that what the library does beside it shows. One number grows
at a time. An exponent of 1 is linear; none may be above 1.1.

    python benchmarks/scaling.py
"""

import math
import multiprocessing
import time

import torch
from common import Bar, _peak_after, small_vit

from bace.config.schema import Backbone, Checkpoints, Config, HeadSettings, Measures, MemoryBudget, Training
from bace.core.memory import Memory
from bace.core.position import Position
from bace.core.stream import Stream, Task
from bace.core.trainer import Trainer
from bace.data.modalities.image import Images
from bace.methods import find_method
from bace.models.heads import CosineHead
from bace.models.model import Model

USUAL = {"classes": 100, "tasks": 5, "examples": 2000, "memory": 200}
AXES = {
    "classes": [10, 30, 100, 300, 1000],
    "tasks": [5, 10, 25, 50, 100],
    "examples": [1000, 3000, 10_000, 30_000, 100_000],
    "memory": [200, 500, 1000, 2000],
}
TINY = {"classes": [10, 20], "tasks": [2, 4], "examples": [200, 400], "memory": [50, 100]}


def run(classes: int, tasks: int, examples: int, memory: int) -> float:
    """Seconds of a whole run: training, memory and evaluation after every task."""
    rng = torch.Generator().manual_seed(0)
    count = examples + examples // 4  # a quarter as many for the test
    pixels = torch.randint(0, 256, (count, 3, 8, 8), generator=rng).to(torch.uint8)
    targets = (torch.arange(count) * classes // count).clamp(max=classes - 1)
    ends = [classes * (t + 1) // tasks for t in range(tasks)]
    made = []
    for t, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        ids = ((targets >= start) & (targets < end)).nonzero().flatten()
        test = torch.arange(len(ids)) % 5 == 4
        made.append(Task(t, str(t), range(start, end), ids[~test], ids[:0], ids[test]))
    stream = Stream(Images(pixels, size=8), targets, made, [str(c) for c in range(classes)])
    budget = MemoryBudget(memory, allow_missing_classes=True)
    training, measures = Training(epochs=1, threads=1), Measures(fwt=False)
    settings = (Backbone(), HeadSettings(), budget, training, measures, Checkpoints())
    config = Config({"name": "benchmark"}, {"name": "ER"}, *settings)
    method = find_method("ER")()
    method.stream, method.training_settings, method.now = stream, training, Position(0)
    method.memory = Memory(memory, allow_missing_classes=True)
    encoder = small_vit(32, 1, 8, 4)
    method.model = method.build(Model(encoder, CosineHead(encoder.width)))
    begun = time.process_time()
    Trainer(method, stream, config).run()
    return time.process_time() - begun


def measured(size: dict[str, int]) -> tuple[float, int]:
    """Seconds, and peak memory in MB, in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        seconds = pool.apply(_one_thread, (size,))
        return seconds, pool.apply(_peak_after, (int, ()))


def _one_thread(size: dict[str, int]) -> float:
    torch.set_num_threads(1)
    return run(**size)


def exponent(sizes: list[int], values: list[float]) -> float:
    """The slope of log(value) over log(size), by least squares."""
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in values]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    products = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return products / sum((a - mean_x) ** 2 for a in x)


def grown(axis: str, sizes: list[int], usual: dict[str, int]) -> list[tuple[int, float, int]]:
    """(size, seconds, MB) along one axis."""
    return [(size, *measured({**usual, axis: size})) for size in sizes]


def bars(tiny: bool) -> dict[str, Bar]:
    axes, usual = (TINY, {"classes": 10, "tasks": 2, "examples": 200, "memory": 50}) if tiny else (AXES, USUAL)
    found = {}
    for axis, sizes in axes.items():
        # tasks of at least one class, and classes of at least ten examples
        fitting = {**usual, "classes": 100, "examples": 10_000} if axis in ("tasks", "classes") and not tiny else usual
        points = grown(axis, sizes, fitting)
        found[f"seconds grow with {axis}: exponent"] = Bar(exponent(sizes, [s for _, s, _ in points]), 1.1)
        found[f"memory grows with {axis}: exponent"] = Bar(exponent(sizes, [m for _, _, m in points]), 1.1)
    return found


if __name__ == "__main__":
    for axis, sizes in AXES.items():
        for size, seconds, megabytes in grown(axis, sizes, USUAL):
            print(f"{axis} {size}: {seconds:.1f} s, {megabytes} MB", flush=True)
