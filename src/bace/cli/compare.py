"""bace compare"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bace.cli.console import check_seeds, name_failures
from bace.cli.report import show_report
from bace.config.parser import Parser
from bace.errors import ConfigError
from bace.progress import tell

if TYPE_CHECKING:  # imports torch
    pass


def command(
    *,
    method: list[str] | None = None,
    seeds: int = 1,
    out: Path | None = None,
    config: Path | None = None,
    trust: bool = False,
    workers: int | None = None,
    on: Literal["ray", "slurm"] | None = None,
    **settings: Any,
) -> None:
    """Run several methods with several seeds, and make one table and one page.

    The page is OUT/report.html. The same command continues a comparison that was stopped: it skips finished runs and
    resumes unfinished ones. It takes all settings of `bace run --help`, which hold for every method. Hyper-parameters
    stand in brackets: bace compare --benchmark digits --method ER BaCE "BaCE(alpha=0)" --seeds 3 --train.epochs 3. The
    first seed is --seed.

    Args:
        method: names of `bace list methods`, with or without hyper-parameters ("BaCE(alpha=0.5, K=3)"). `all` stands
            for every method that takes the data; its table is ranked. You may leave it out if the file names a method.
        seeds: the number of seeds.
        out: the folder that keeps the runs; by default runs/BENCHMARK.
        config: a YAML file of settings. Settings on the command line override it.
        trust: allow a method of your own that the file names to be imported, which runs its code.
        workers: the number of runs at a time, each in a process with its share of the CPU's threads. The default is one
            on this machine, and as many as fit on a cluster (docs/scale.md).
        on: the cluster that runs them, `ray` or `slurm`; the default is this machine.
    """
    from bace.cli.settings import from_file, import_typed
    from bace.config.parse import DEFAULT_NAMES, flatten
    from bace.experiments.compare import cells_of, methods_asked
    from bace.experiments.schedule import run_cells

    check_seeds(seeds)
    file = from_file(config, trust=trust)
    given = {key: value for key, value in file.items() if not key.startswith("method.")} | flatten(settings)
    if method:
        asked = methods_asked(method, str(given.get("benchmark.name", DEFAULT_NAMES["benchmark.name"])))
        for name, _ in asked:
            import_typed(name)
    elif own := {key[7:]: value for key, value in file.items() if key.startswith("method.")}:
        asked = [(str(own.pop("name", DEFAULT_NAMES["method.name"])), own)]
    else:
        raise ConfigError("bace compare needs --method: give names, or `all` for every method that takes these data")
    out, cells = cells_of(asked, given, seeds, out)
    tell(f"methods: {len(asked)}, seeds: {seeds}, on {cells[0].config.benchmark['name']}, kept in {out}")
    failed = run_cells(cells, workers=workers, on=on)
    if made := [cell.folder for cell in cells if cell.name not in failed]:
        show_report(made, out / "report.html", ranked=method == ["all"])
    name_failures(failed, len(cells))


def prepare(parser: Parser, words: Sequence[str]) -> None:
    """Add the settings, except to the help page, which refers to the page of `run`."""
    parser.usage = "bace compare --method NAME [NAME ...] [--seeds N] [options] [settings]"
    if not {"-h", "--help"} & set(words):
        from bace.config.parse import add_settings

        if typed := next((word for word in words if word.startswith("--method.")), None):
            raise ConfigError(f"'{typed}' belongs in brackets after its method: --method \"BaCE(alpha=2)\"")
        add_settings(parser)
