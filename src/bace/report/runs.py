"""Group the seeds of one setting, and summarise each group in a row."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.segment import Segments
from rich.table import Table
from rich.text import Text

from bace.errors import ConfigError, DataError, printable
from bace.experiments.run_folder import COLUMNS, Run
from bace.methods import find_method, plain_name

# Settings that name a run rather than define it; seeds of one experiment may differ in them.
BOOKKEEPING = frozenset({"seed", "studies", "log", "out", "folder", "resume", "progress", "verbose"})
METHOD = "method.name"  # the setting that names the method, as its title does


@dataclass(frozen=True)
class Stat:
    """Mean over seeds, and the sample standard deviation (None with one seed)."""

    mean: float
    std: float | None


@dataclass(frozen=True)
class Row:
    """A method with its settings on a benchmark, over seeds. A number is None unless every seed has it."""

    benchmark: str
    method: str
    label: str
    settings: dict[str, str]
    seeds: tuple[int, ...]
    A_last: Stat | None
    A_avg: Stat | None
    A_new: Stat | None
    FGT: Stat | None
    FWT: Stat | None
    seconds: Stat | None


@dataclass(frozen=True)
class Group:
    """The finished runs behind a row: the same benchmark, method and settings, one run per seed."""

    benchmark: str
    method: str
    label: str
    settings: dict[str, str]
    runs: list[Run] = field(default_factory=list)


def groups(runs: Iterable[Run]) -> list[Group]:
    """Finished runs by benchmark, method and settings, in their order. A group is named by its method and by what
    distinguishes it from its neighbours: settings in which runs of the benchmark differ, and hyper-parameters that are
    not at their default."""
    finished = [run for run in runs if run.metrics is not None]
    made: list[Group] = []
    for benchmark in dict.fromkeys(run.benchmark for run in finished):
        members = [run for run in finished if run.benchmark == benchmark]
        alike: dict[tuple[str, tuple[tuple[str, str], ...]], list[Run]] = {}
        for run, settings in zip(members, _telling(members), strict=True):
            alike.setdefault((run.method, tuple(settings.items())), []).append(run)
        taken: set[str] = set()
        for (method, pairs), same in alike.items():
            label = method + (f" ({', '.join(f'{key}={_short(value)}' for key, value in pairs)})" if pairs else "")
            unique, number = label, 2
            while unique in taken:  # shortened values may coincide
                unique, number = f"{label} #{number}", number + 1
            taken.add(unique)
            made.append(Group(benchmark, method, unique, dict(pairs), _one_run_per_seed(same)))
    # Groups are collected by benchmark: put them in the order of their first runs.
    position = {run.folder: number for number, run in reversed(list(enumerate(finished)))}
    return sorted(made, key=lambda group: min(position[run.folder] for run in group.runs))


def summary_rows(runs: Iterable[Run]) -> list[Row]:
    """One row for each benchmark, method and differing setting: mean and sample standard deviation over seeds.

    Unfinished runs are left out. Rows come in the order in which their first run was given.
    """
    rows = []
    for group in groups(runs):
        metrics = [run.metrics for run in group.runs if run.metrics is not None]
        rows.append(
            Row(
                benchmark=group.benchmark,
                method=group.method,
                label=group.label,
                settings=group.settings,
                seeds=tuple(run.seed for run in group.runs),
                **{name: stat([getattr(m, name) for m in metrics]) for name in COLUMNS},
            )
        )
    return rows


def print_table(rows: Sequence[Row], console: Console) -> None:
    """Print a table for each benchmark: mean ± sample standard deviation over seeds, rows in their order."""
    for benchmark in dict.fromkeys(row.benchmark for row in rows):
        # Text, because a str would be read as markup: a method may be called "[red]".
        table = Table(title=Text(printable(benchmark)), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.show_edge = False
        table.add_column("method", min_width=12)
        lines = [
            (printable(row.label), str(len(row.seeds)), *(show(getattr(row, name)) for name in COLUMNS))
            for row in rows
            if row.benchmark == benchmark
        ]
        for number, name in enumerate(("seeds", *COLUMNS), 1):
            width = max(len(line[number]) for line in lines)
            table.add_column(name, justify="right", no_wrap=True, min_width=max(width, len(name)))
        for line in lines:
            table.add_row(Text(line[0]), *line[1:])
        # rich would cut off digits in a narrow console: draw as wide as needed, and the terminal breaks the lines.
        endless = console.options.update(width=10_000)
        width = max(console.width, console.measure(table, options=endless).minimum)
        console.print(Segments(console.render(table, endless.update(width=width))), crop=False, soft_wrap=True)
        console.print()


def show(point: Stat | None) -> str:
    """'81.2 ± 0.9', '81.2' with one seed, '-' without a number; whole numbers from a hundred on need no decimal."""
    if point is None:
        return "-"
    decimals = 1 if point.mean <= 100 else 0
    spread = "" if point.std is None else f" ± {point.std:.{decimals}f}"
    return f"{point.mean:.{decimals}f}{spread}"


def stat(values: Sequence[float | None]) -> Stat | None:
    """Mean and sample standard deviation; None if a value is missing."""
    numbers = [value for value in values if value is not None]
    if not numbers or len(numbers) < len(values):
        return None
    return Stat(fmean(numbers), stdev(numbers) if len(numbers) > 1 else None)


def setting_names(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as dotted names; `init_args` only says where jsonargparse keeps a class's own settings."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = prefix if key == "init_args" else f"{prefix}.{key}" if prefix else key
        if isinstance(value, dict) and value:
            flat.update(setting_names(value, name))
        else:
            flat[name or key] = value
    return flat


def leaf(key: str) -> str:
    """The last part of a dotted name."""
    return key.rpartition(".")[2]


def _telling(runs: Sequence[Run]) -> list[dict[str, str]]:
    """For each run of a benchmark, the settings that distinguish it from the others, under their shortest clear
    names."""
    values = [_settings(run) for run in runs]
    every = list(dict.fromkeys(key for own in values for key in own))
    shared = {key for key in every if len({own[key] for own in values if key in own}) > 1}
    by_method: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        by_method.setdefault(run.method, []).append(place)
    chosen: list[list[str]] = [[] for _ in runs]
    for places in by_method.values():
        changed = {key for place in places for key in _changed(runs[place].config, values[place])}
        unequal = {key for key in every if len({values[place].get(key) for place in places}) > 1}
        for place in places:
            told = changed | unequal | {key for key in shared & values[place].keys() if not _is_own(key)}
            chosen[place] = [key for key in every if key in told]
    keys = list(dict.fromkeys(key for own in chosen for key in own))
    short = {key: leaf(key) if [leaf(other) for other in keys].count(leaf(key)) == 1 else key for key in keys}
    settings = [{short[key]: own.get(key, "unset") for key in told} for own, told in zip(values, chosen, strict=True)]
    tasks: dict[str, set[int]] = {}
    for run, setting in zip(runs, settings, strict=True):
        tasks.setdefault(json.dumps([run.method, setting]), set()).add(len(run.tasks))
    parted = {json.loads(name)[0] for name, counts in tasks.items() if len(counts) > 1}
    for run, setting in zip(runs, settings, strict=True):
        if run.method in parted:  # never average matrices of different sizes
            setting["tasks"] = str(len(run.tasks))
    return settings


def _settings(run: Run) -> dict[str, str]:
    """The settings that define a run."""
    flat = {key: value for key, value in setting_names(run.config).items() if not _is_bookkeeping(key)}
    if isinstance(name := flat.get(METHOD), str):
        flat[METHOD] = plain_name(name)
    return {key: _value(value) for key, value in flat.items()}


def _is_bookkeeping(key: str) -> bool:
    return leaf(key) in BOOKKEEPING or leaf(key).endswith("_seed") or key.startswith("checkpoint.")


def _is_own(key: str) -> bool:
    """Whether this is a setting of the method, which has no meaning for another."""
    return key.startswith("method.")


def _changed(config: dict[str, Any], values: dict[str, str]) -> list[str]:
    """The hyper-parameters of a run that are not at their default, if its method is known here."""
    try:
        found = find_method(str(setting_names(config)[METHOD]))
    except (KeyError, ConfigError):  # a user's own method
        return []
    defaults = {f"method.{name}": _value(p.default) for name, p in found.hyper_parameters().items()}
    return [key for key, default in defaults.items() if values.get(key, default) != default]


def _one_run_per_seed(runs: Iterable[Run]) -> list[Run]:
    """The runs sorted by seed. A repeated seed with equal scores counts once; with different scores it is an error."""
    seeds: dict[int, Run] = {}
    for run in runs:
        other = seeds.setdefault(run.seed, run)
        if other.matrix != run.matrix:
            raise DataError(
                f"'{other.folder}' and '{run.folder}' are both {run.method} on {run.benchmark} with seed {run.seed} "
                "and the same settings, but scored differently. Give only one of them."
            )
    return [seeds[seed] for seed in sorted(seeds)]


def _value(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # 1 in one file and 1.0 in another are the same setting
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def _short(value: str) -> str:
    return value if len(value) <= 24 else value[:23] + "…"
