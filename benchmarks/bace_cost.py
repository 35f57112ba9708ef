"""What BaCE costs over ER: K = 5, 2,500 examples a task; neighbours scored from the bank, exactly, and with gradient.

python benchmarks/bace_cost.py [--repeat N] [--json]
"""

import argparse
import json

import torch
from common import Bar, Mark, ignore, least, peak_memory, small_vit, step_times, trained_by_library

CASES: dict[str, tuple[str, dict[str, object]]] = {
    "ER": ("ER", {}),
    "BaCE, bank": ("BaCE", {"neighbour_scores": "bank"}),
    "BaCE": ("BaCE", {}),
    "BaCE, neighbours with gradient": ("BaCE", {"neighbor_grad": True}),
}


def one_epoch(case: str, mark: Mark = ignore) -> None:
    method, settings = CASES[case]
    trained_by_library(method, 2500, 128, **settings)(mark)


LIMITS = {"BaCE, bank": 1.4, "BaCE": 1.9, "BaCE, neighbours with gradient": 2.8}
ENCODERS = {"micro ViT": {}, "ViT 192 x 12": {"width": 192, "depth": 12, "side": 56}}  # 49 tokens and the class token


def bars(tiny: bool) -> dict[str, Bar]:
    examples, batch, repeat = (16, 8, 1) if tiny else (2500, 128, 3)
    found = {}
    for name, shape in ENCODERS.items():
        runs: dict[str, list[list[float]]] = {case: [] for case in CASES}
        for _ in range(repeat):
            for case, (method, settings) in CASES.items():
                encoder = small_vit(**(shape | {"depth": 2} if tiny else shape))
                runs[case].append(step_times(trained_by_library(method, examples, batch, encoder, **settings)))
        for case, limit in LIMITS.items():
            found[f"{case} over ER, {name}"] = Bar(least(runs[case]) / least(runs["ER"]), limit)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs: dict[str, list[list[float]]] = {case: [] for case in CASES}
    for _ in range(options.repeat):
        for case, (method, settings) in CASES.items():
            runs[case].append(step_times(trained_by_library(method, 2500, 128, **settings)))
    result = {
        case: {
            "ratio": least(times) / least(runs["ER"]),
            "seconds": least(times),
            "peak_memory_mb": peak_memory(one_epoch, case),
        }
        for case, times in runs.items()
    }
    if options.json:
        print(json.dumps(result))
        return
    print("one epoch of a second task of 2,500 examples, batches of 64 + 64, K = 5, one thread")
    for case, r in result.items():
        print(f"  {case:32} {r['seconds']:.2f} s  {r['ratio']:.2f} x ER  {r['peak_memory_mb']} MB")


if __name__ == "__main__":
    main()
