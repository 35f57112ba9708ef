"""Measure every bar of docs/performance.md in one run; print a table and write benchmarks/results.json.

    python benchmarks [--tiny] [--only PART ...] [--out FILE]

`--tiny` uses minimal sizes to check that everything runs; its numbers mean nothing and are not written unless `--out`
is given. Run it on a machine that does nothing else.
"""

import argparse
import importlib
import json
import sys
import time
from pathlib import Path

import torch
from common import Bar

PARTS = (
    "startup",
    "data_path",
    "neighbours",
    "overhead",
    "bace_cost",
    "prefix",
    "text",
    "peers",
    "scaling",
    "many_runs",
)
RESULTS = Path(__file__).parent / "results.json"


def measured(parts: list[str], tiny: bool) -> tuple[dict[str, Bar], dict[str, str]]:
    """The bars of these parts, and the reasons why parts could not be measured."""
    found: dict[str, Bar] = {}
    failed: dict[str, str] = {}
    for part in parts:
        print(f"{time.strftime('%H:%M:%S')} {part}", file=sys.stderr, flush=True)
        try:
            found |= importlib.import_module(part).bars(tiny)
        except Exception as error:  # if a package or a model is missing, the other parts are still measured
            failed[part] = f"{type(error).__name__}: {error}"
    return found, failed


def table(bars: dict[str, Bar], failed: dict[str, str]) -> str:
    width = max(map(len, [*bars, *failed, ""]))
    lines = []
    for name, bar in bars.items():
        limit = "" if bar.limit is None else f"{'>=' if bar.least else '<='} {bar.limit:g}"
        verdict = "" if bar.limit is None else "pass" if bar.passed else "FAIL"
        lines.append(f"{name:{width}}  {bar.value:10.3f}  {limit:>8}  {verdict}")
    return "\n".join([*lines, *(f"{part:{width}}  not measured ({why})" for part, why in failed.items())])


def as_json(bars: dict[str, Bar]) -> str:
    plain = {name: {"value": bar.value, "limit": bar.limit, "pass": bar.passed} for name, bar in bars.items()}
    return json.dumps(plain, indent=2) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    bars, failed = measured(options.only, options.tiny)
    print(table(bars, failed))
    out = options.out or (None if options.tiny or set(options.only) != set(PARTS) else RESULTS)
    if out is not None:
        out.write_text(as_json(bars))
    return int(bool(failed) or not all(bar.passed for bar in bars.values()))


if __name__ == "__main__":
    sys.exit(main())
