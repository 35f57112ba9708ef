"""What every method costs relative to ER: seconds of a second task, everything in it counted, and peak memory.

Two tasks of 10 classes, 256 pictures each, one epoch in batches of 32 new and 32 old, a small ViT, one thread. The
second task is timed from its first hook to its last (teachers, stages, statistics, memory): methods put their work
in different places; the fastest of several repetitions counts. Seconds are given per step of ER.

    python benchmarks/methods.py [--repeat N] [--method NAME ...] [--json]
"""

import argparse
import json
import time

import torch
from common import CLASSES, WIDTH, peak_memory, pictures, small_vit

from bace.config import Backbone, Checkpoints, Config, Head, Measures, MemoryBudget, Training
from bace.data.images import Images
from bace.memory import Memory
from bace.method import Now
from bace.methods import METHODS, find_method
from bace.models.heads import CosineHead
from bace.models.model import Model
from bace.stream import Stream, Task
from bace.trainer import At, Trainer

EXAMPLES, BATCH = 256, 64


def ready(method: str) -> Trainer:
    """A method, and a stream of two tasks to be learned."""
    pixels, targets = pictures(2 * EXAMPLES)
    targets = torch.cat([targets[:EXAMPLES], targets[EXAMPLES:] + CLASSES])
    none = torch.zeros(0, dtype=torch.int64)
    tasks = [
        Task(t, f"task {t}", range(t * CLASSES, (t + 1) * CLASSES), ids, none, none)
        for t, ids in enumerate(torch.arange(2 * EXAMPLES).split(EXAMPLES))
    ]
    stream = Stream(Images(pixels, size=pixels.shape[-1]), targets, tasks, [str(c) for c in range(2 * CLASSES)])
    config = Config(
        {"name": "benchmark"},
        {"name": method},
        Backbone(),
        Head(),
        MemoryBudget(100),
        Training(epochs=1, batch_size=BATCH, threads=1),
        Measures(fwt=False),
        Checkpoints(),
    )
    learned = find_method(method)()
    learned.stream, learned.training_settings, learned.now = stream, config.train, Now(0)
    learned.memory = Memory(100)
    learned.fresh_model = lambda: Model(small_vit(), CosineHead(WIDTH))
    learned.model = learned.build(learned.fresh_model())
    return Trainer(learned, stream, config)


def second_task_seconds(method: str) -> float:
    trainer = ready(method)
    trainer.learn(trainer.stream[0])
    trainer.at = At(task=1)
    begun = time.perf_counter()
    trainer.learn(trainer.stream[1])
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--method", nargs="*")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = ["ER", *(n for n in options.method or [m.title for m in METHODS if "image" in m.modalities] if n != "ER")]
    seconds: dict[str, float] = dict.fromkeys(names, float("inf"))
    for _ in range(options.repeat):
        for name in names:
            seconds[name] = min(seconds[name], second_task_seconds(name))
    steps = EXAMPLES / (BATCH / 2)
    result = {
        name: {
            "ratio": seconds[name] / seconds["ER"],
            "seconds_per_step": seconds[name] / steps,
            "peak_memory_mb": peak_memory(second_task_seconds, name),
        }
        for name in names
    }
    if options.json:
        print(json.dumps(result))
        return
    print(f"{'method':10} {'s/step':>7} {'x ER':>6} {'MB':>6} {'x ER':>6}")
    for name, r in result.items():
        memory = r["peak_memory_mb"]
        share = memory / result["ER"]["peak_memory_mb"]
        print(f"{name:10} {r['seconds_per_step']:7.3f} {r['ratio']:6.2f} {memory:6} {share:6.2f}")


if __name__ == "__main__":
    main()
