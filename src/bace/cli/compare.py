"""bace compare"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bace.cli.console import check_seeds, name_failures
from bace.cli.report import show_report
from bace.config.parser import Parser
from bace.errors import ConfigError

if TYPE_CHECKING:  # imports torch
    from bace.config.schema import Config
    from bace.experiments.cells import Cell


def command(
    *,
    method: list[str] | None = None,
    seeds: int = 1,
    out: Path = Path("comparison"),
    config: Path | None = None,
    trust: bool = False,
    workers: int | None = None,
    on: Literal["ray", "slurm"] | None = None,
    **settings: Any,
) -> None:
    """Run several methods with several seeds: one table and page.

    The page is OUT/report.html. The same command continues where it was stopped: finished runs are not run again, one
    that was cut off is resumed. All settings of `bace run --help` are taken and hold for every method, but
    hyper-parameters belong in brackets: bace compare --benchmark digits --method ER BaCE "BaCE(alpha=0)" --seeds 3
    --train.epochs 3. The first seed is --seed.

    Args:
        method: names of `bace list methods`, with hyper-parameters if wanted ("BaCE(alpha=0.5, K=3)"); `all` is every
            method that takes the data, in the order of their results. Not needed if the file names a method.
        seeds: how many seeds.
        out: the folder that keeps the runs.
        config: a YAML file of settings; those of the command line win.
        trust: a method of your own that the file names may be imported, which runs its code.
        workers: how many runs at a time, each in a process with its share of the CPU's threads; default: one here, and
            as many as there is room for on a cluster (docs/scale.md).
        on: the cluster that runs them: `ray` or `slurm`; default: this machine.
    """
    from bace.cli.settings import from_file, import_typed
    from bace.config.parse import DEFAULT_NAMES, config_from, flatten
    from bace.experiments.schedule import run_cells

    check_seeds(seeds)
    file = from_file(config, trust=trust)
    given = {key: value for key, value in file.items() if not key.startswith("method.")} | flatten(settings)
    benchmark = given.get("benchmark.name", DEFAULT_NAMES["benchmark.name"])
    if method:
        asked = methods_asked(method, benchmark)
        for name, _ in asked:
            import_typed(name)
    elif own := {key[7:]: value for key, value in file.items() if key.startswith("method.")}:
        asked = [(str(own.pop("name", DEFAULT_NAMES["method.name"])), own)]
    else:
        raise ConfigError("bace compare needs --method: names, or `all` for every method that takes these data")
    first = config_from({**given, "method": asked[0][0]}).seed
    configs = [  # every configuration is checked before the first run starts
        config_from({**given, "method": {"name": name, **changes}, "seed": seed})
        for seed in range(first, first + seeds)
        for name, changes in asked
    ]
    print(f"{len(asked)} methods x {seeds} seeds on {benchmark}: {out}", file=sys.stderr)
    cells = [cell_of(chosen, out) for chosen in configs]
    failed = run_cells(cells, workers=workers, on=on)
    if made := [cell.folder for cell in cells if cell.name not in failed]:
        show_report(made, out / "report.html", ranked=method == ["all"])
    name_failures(failed, len(cells))


def cell_of(config: "Config", out: Path) -> "Cell":
    """The run of a configuration in the folder of its comparison."""
    from bace.config.parse import method_label
    from bace.experiments.cells import Cell
    from bace.experiments.compare import folder_name

    label = method_label(config.method)
    return Cell(f"{label}, seed {config.seed}", out / f"{folder_name(label)}-seed{config.seed}", config)


def prepare(parser: Parser, words: Sequence[str]) -> None:
    """Add the settings, but to the help, which refers to that of `run`."""
    parser.usage = "bace compare --method NAME [NAME ...] [--seeds N] [options] [settings]"
    if not {"-h", "--help"} & set(words):
        from bace.config.parse import add_settings

        if typed := next((word for word in words if word.startswith("--method.")), None):
            raise ConfigError(f"'{typed}' belongs in brackets behind its method: --method \"BaCE(alpha=2)\"")
        add_settings(parser)


def methods_asked(words: list[str], benchmark: object) -> list[tuple[str, dict[str, Any]]]:
    """`all`, or names with changes: BaCE "BaCE(W0=1, alpha=0)"."""
    from bace.data.benchmarks import find_benchmark
    from bace.experiments.compare import parse_method
    from bace.methods import METHODS

    if words == ["all"]:
        modality = find_benchmark(str(benchmark)).modality
        return [(method.title, {}) for method in METHODS if modality in method.modalities]
    return [parse_method(word) for word in words]
