"""What BaCE costs over ER: K = 5, 2,500 examples a task, exact; without and with gradient through the neighbours.

python benchmarks/bace_cost.py [--repeat N] [--json]
"""

import argparse
import json

import torch
from common import clocked, peak_memory, second_task

from bace.trainer import At, Trainer

CASES: dict[str, tuple[str, dict[str, object]]] = {
    "ER": ("ER", {}),
    "BaCE": ("BaCE", {}),
    "BaCE, neighbours with gradient": ("BaCE", {"neighbor_grad": True}),
}


def one_epoch(case: str) -> tuple[float, float]:
    method, settings = CASES[case]
    learned, stream, config = second_task(method, 2500, 128, **settings)
    trainer = Trainer(learned, stream, config)
    trainer.at = At(task=1)
    trainer.enter(stream[1])
    learned.grow(stream[1])
    stage = learned.stages(stream[1])[0]
    return clocked(lambda: trainer.train(stage, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    times: dict[str, list[tuple[float, float]]] = {case: [] for case in CASES}
    for i in range(options.repeat + 1):
        for case in CASES:
            taken = one_epoch(case)
            if i:  # the first round warms up
                times[case].append(taken)
    base_wall, base_cpu = (min(t[k] for t in times["ER"]) for k in (0, 1))
    result = {
        case: {
            "ratio": min(t[0] for t in taken) / base_wall,
            "cpu_ratio": min(t[1] for t in taken) / base_cpu,
            "seconds": min(t[0] for t in taken),
            "peak_memory_mb": peak_memory(one_epoch, case),
        }
        for case, taken in times.items()
    }
    if options.json:
        print(json.dumps(result))
        return
    print("one epoch of a second task of 2,500 examples, batches of 64 + 64, K = 5, one thread")
    for case, r in result.items():
        print(
            f"  {case:32} {r['seconds']:.2f} s  {r['ratio']:.2f} x ER  (CPU {r['cpu_ratio']:.2f})"
            f"  {r['peak_memory_mb']} MB"
        )


if __name__ == "__main__":
    main()
