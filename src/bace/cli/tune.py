"""bace tune"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bace.config.parser import Parser
from bace.errors import ConfigError


def command(
    *,
    search: list[str] | None = None,
    trials: int = 30,
    first_tasks: int = 2,
    held_out: float = 0.2,
    out: Path = Path("tuning"),
    config: Path | None = None,
    trust: bool = False,
    **settings: Any,
) -> None:
    """Search for hyper-parameters on the first tasks.

    A trial learns the first tasks from a part of their training examples and is scored (A_avg) on the others. Test
    splits and later tasks are never read. The same command continues a study that was stopped. It writes the best
    settings to OUT/best.yaml, for `bace run --config`. It takes all settings of `bace run --help`, which hold for
    every trial.

    Args:
        search: names ("alpha" "train.lr"), ranges ("alpha=0.1:10") or choices ("mode=batch,concat") of settings to
            search. The default is the method's hyper-parameters, train.lr and train.epochs.
        trials: the number of trials in the end, including those of earlier commands.
        first_tasks: the number of tasks that a trial learns.
        held_out: the share of each class's training examples that a trial is scored on.
        out: the folder that keeps the study.
        config: a YAML file of settings. Settings on the command line override it.
        trust: allow a method of your own that the file names to be imported, which runs its code.
    """
    from bace.cli.settings import from_file
    from bace.config.parse import flatten
    from bace.experiments.tune import Search, tune

    if trials < 1:
        raise ConfigError(f"--trials is '{trials}': it must be at least 1")
    given = {**from_file(config, trust=trust), **flatten(settings)}
    found = tune(Search(given, tuple(search or ()), first_tasks, held_out), out, trials)
    of = f"held-out examples of the first {first_tasks} tasks"
    print(f"best of {found.trials} trials: A_avg {found.score:.2f} on {of}")
    for name, value in found.values.items():
        print(f"  {name}: {value:.4g}" if isinstance(value, float) else f"  {name}: {value}")
    print(f"settings: {found.file} (bace run --config {found.file})")


def prepare(parser: Parser, words: Sequence[str]) -> None:
    """Add the settings, except to the help page, which refers to the page of `run`."""
    parser.usage = "bace tune --method NAME [--search NAME ...] [--trials N] [options] [settings]"
    if not {"-h", "--help"} & set(words):
        from bace.cli.settings import method_asked
        from bace.config.parse import add_settings
        from bace.methods import find_method

        add_settings(parser, find_method(method_asked(words)))
