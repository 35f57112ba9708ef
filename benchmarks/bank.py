"""Compare BaCE with the bank and with exact scores of neighbours, on the same seeds, and print the differences.

    python benchmarks/bank.py [--benchmark digits] [--seeds 5] [--out FOLDER] [SETTING=VALUE ...]

Runs are kept in FOLDER, by default runs/bank-BENCHMARK; the same command continues where it was stopped. Settings are
the same as for `bace run`, such as backbone.name=micro or train.epochs=3.
"""

import argparse
import math
import statistics
from pathlib import Path

import bace

EXACT, BANK = "BaCE(neighbour_scores=exact)", "BaCE(neighbour_scores=bank)"
T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}  # 97.5 %, by seeds


def paired(exact: list[float], bank: list[float]) -> tuple[float, float]:
    """The mean difference of the pairs, and half of its 95 % interval (Student's t)."""
    differences = [b - e for e, b in zip(exact, bank, strict=True)]
    half = T[len(differences)] * statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.mean(differences), half


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--benchmark", default="digits")
    parser.add_argument("--seeds", type=int, choices=T, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("settings", nargs="*", metavar="SETTING=VALUE")
    options = parser.parse_args()
    settings = dict(word.split("=", 1) for word in options.settings)
    out = options.out or Path("runs") / f"bank-{options.benchmark}"
    found = bace.compare(
        [EXACT, BANK], seeds=options.seeds, out=out, tell=print, benchmark=options.benchmark, **settings
    )
    scores: dict[str, dict[int, float]] = {"exact": {}, "bank": {}}
    for run in found.runs:
        assert run.metrics is not None
        scores[run.config["method"]["neighbour_scores"]][run.seed] = run.metrics.A_last
    pairs = [[by_seed[seed] for seed in sorted(by_seed)] for by_seed in (scores["exact"], scores["bank"])]
    mean, half = paired(*pairs)
    print(f"A_last, exact: {' '.join(f'{score:.2f}' for score in pairs[0])}")
    print(f"A_last, bank:  {' '.join(f'{score:.2f}' for score in pairs[1])}")
    where = "inside" if abs(mean) <= half else "outside"
    print(f"bank less exact: {mean:+.2f} ± {half:.2f} (95 %, {len(pairs[0])} pairs); 0 lies {where}")


if __name__ == "__main__":
    main()
