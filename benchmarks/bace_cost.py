"""The cost of BaCE relative to ER, with K = 5 and 2,500 examples per task. Neighbours are scored from the bank,
exactly, and with gradient.

python benchmarks/bace_cost.py [--encoder NAME] [--repeat N] [--steps N] [--json]
"""

import argparse
import json

import torch
from common import Bar, least, peak_memory, small_vit, step_times, trained_by_library

CASES: dict[str, tuple[str, dict[str, object]]] = {
    "ER": ("ER", {}),
    "BaCE, bank": ("BaCE", {"neighbour_scores": "bank"}),
    "BaCE, bank, gradient through one neighbour": ("BaCE", {"neighbour_scores": "bank", "neighbor_grad": True}),
    "BaCE, exact": ("BaCE", {"neighbour_scores": "exact"}),
    "BaCE, exact, gradient through all neighbours": ("BaCE", {"neighbour_scores": "exact", "neighbor_grad": True}),
}
LIMITS = dict(zip(list(CASES)[1:], (1.4, 2.8, 1.9, 2.8), strict=True))
EXAMPLES, BATCH = 2500, 128
EPOCH = -(-EXAMPLES // (BATCH // 2))  # steps per epoch
ENCODERS = {"micro ViT": {}, "ViT 192 x 12": {"width": 192, "depth": 12, "side": 56}}  # 49 tokens and the class token


def timed(shape: dict[str, int], examples: int, batch: int, repeat: int, steps: int) -> dict[str, float]:
    """The seconds of an epoch for each case, from its first steps; the cases alternate."""
    runs: dict[str, list[list[float]]] = {case: [] for case in CASES}
    for _ in range(repeat):
        for case, (method, settings) in CASES.items():
            work = trained_by_library(method, examples, batch, small_vit(**shape), **settings)
            runs[case].append(step_times(work, steps))
    return {case: least(times, -(-examples // (batch // 2))) for case, times in runs.items()}


def first_steps(case: str, shape: dict[str, int], steps: int) -> None:
    method, settings = CASES[case]
    step_times(trained_by_library(method, EXAMPLES, BATCH, small_vit(**shape), **settings), steps)


def bars(tiny: bool) -> dict[str, Bar]:
    found = {}
    for name, shape in ENCODERS.items():
        few = name != "micro ViT"  # steps of the other encoder take seconds
        plan = (16, 8, 1, 2) if tiny else (EXAMPLES, BATCH, 2, 4 if few else 12)
        seconds = timed(shape | {"depth": 2} if tiny else shape, *plan)
        for case, limit in LIMITS.items():
            found[f"{case}: seconds over ER, {name}"] = Bar(seconds[case] / seconds["ER"], limit)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", choices=ENCODERS, default="micro ViT")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--steps", type=int, default=EPOCH, help="of an epoch that are timed, at least 2")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shape = ENCODERS[options.encoder]
    seconds = timed(shape, EXAMPLES, BATCH, options.repeat, options.steps)
    memory = {case: peak_memory(first_steps, case, shape, 2) for case in CASES}
    if options.json:
        print(json.dumps({case: {"seconds": seconds[case], "peak_memory_mb": memory[case]} for case in CASES}))
        return
    print(f"{options.encoder}, an epoch of a second task of 2,500 examples, batches of 64 + 64, K = 5, one thread")
    for case in CASES:
        print(f"  {case:45} {seconds[case]:7.2f} s  {seconds[case] / seconds['ER']:.2f} x ER  {memory[case]} MB")


if __name__ == "__main__":
    main()
