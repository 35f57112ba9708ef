"""bace compare"""

import sys
from pathlib import Path
from typing import Any

from bace.cli.options import import_typed, int_option, settings_file, split_options
from bace.cli.report import show_report
from bace.errors import ConfigError


def command(words: list[str]) -> None:
    known = {"--out": 1, "--config": 1, "--trust": 0, "--seeds": 1, "--seed": 1, "--method": -1}
    options, flags = split_options(words, known)
    from bace.config.parse import config_from, flag_values, flatten, method_label
    from bace.experiments.compare import folder_name, run_or_continue

    given = flatten(settings_file(options))
    benchmark = {**given, **flag_values(flags)}.get("benchmark.name", "digits")
    seeds = int_option(options, "--seeds", 1, least=1)
    first = int_option(options, "--seed", given.get("seed", 0))
    out = Path(options.get("--out", ["comparison"])[0])
    if "--method" in options:
        asked = methods_asked(options["--method"], benchmark)
        for name, _ in asked:
            import_typed(name)
    elif own := {key[7:]: value for key, value in given.items() if key.startswith("method.")}:
        asked = [(str(own.pop("name", "bace")), own)]
    else:
        raise ConfigError("bace compare needs --method: names, or `all` for every method that takes these data")
    given = {key: value for key, value in given.items() if not key.startswith("method.")}
    configs = [  # every configuration is checked before the first run starts
        config_from({**given, "method": {"name": name, **changes}, "seed": seed}, flags)
        for seed in range(first, first + seeds)
        for name, changes in asked
    ]
    print(f"{len(asked)} methods x {seeds} seeds on {benchmark}: {out}", file=sys.stderr)
    folders = []
    for config in configs:
        label = method_label(config.method)
        folders.append(run_or_continue(out / f"{folder_name(label)}-seed{config.seed}", label, config))
    show_report(folders, out / "report.html", ranked="all" in options.get("--method", []))


def methods_asked(words: list[str], benchmark: object) -> list[tuple[str, dict[str, Any]]]:
    """`all`, or names with changes: BaCE "BaCE(W0=1, alpha=0)"."""
    from bace.data.benchmarks import find_benchmark
    from bace.experiments.compare import parse_method
    from bace.methods import METHODS

    if words == ["all"]:
        modality = find_benchmark(str(benchmark)).modality
        return [(method.title, {}) for method in METHODS if modality in method.modalities]
    return [parse_method(word) for word in words]
