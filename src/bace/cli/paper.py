"""bace paper list | run | show | claims."""

import os
import sys
from pathlib import Path

from bace.cli.console import print_rows
from bace.cli.options import int_option, refuse, split_options
from bace.errors import BaceError, ConfigError, nearest
from bace.paper.tables import ENTRIES, SCALES, Cell, Entry, Scale, find_entry

USAGE = """\
bace paper list                                       every table and figure
bace paper run ID [--scale desk|full] [--seeds N] [--out DIR] [--print_config] [--dry_run]
                                                      continues where it stopped; skips what is finished
bace paper show ID [--scale desk|full] [--out DIR] [--csv FILE] [--latex FILE]
                                                      ours, published, difference
bace paper claims [--scale desk|full] [--out DIR] [--markdown]
                                                      what the finished runs say about each of the paper's claims
"""
PLACE = {"--scale": 1, "--out": 1}


def command(words: list[str]) -> None:
    commands = {"list": list_entries, "run": run_entry, "show": show_entry, "claims": show_claims}
    if not words or {"-h", "--help"} & set(words):
        print(USAGE, end="")
    elif words[0] not in commands:
        raise ConfigError(f"there is no command 'paper {words[0]}'.{nearest(words[0], commands)}")
    else:
        commands[words[0]](words[1:])


def list_entries(words: list[str]) -> None:
    refuse(words, [])
    rows = [
        [entry.id, entry.place, entry.title, str(len(entry.cells())), ", ".join(missing_sets(entry, "full")) or "-"]
        for entry in ENTRIES.values()
    ]
    print_rows(["id", "place", "content", "runs a seed", "sets that are not here"], rows)


def missing_sets(entry: Entry, scale: Scale) -> list[str]:
    """Public sets of an entry that no local folder holds; some come from the hub by themselves (bace check data)."""
    from bace.data.benchmarks import BENCHMARKS
    from bace.data.datasets import find_folder

    names = dict.fromkeys(cell.settings(scale)["benchmark.name"] for cell in entry.cells())
    sets = dict.fromkeys(corpus for name in names for corpus in BENCHMARKS[name].corpora)
    return [corpus.folder for corpus in sets if find_folder(corpus, os.environ.get("BACE_DATA")) is None]


def run_entry(words: list[str]) -> None:
    from bace.experiments.compare import run_or_continue
    from bace.paper.results import for_page
    from bace.report import load_runs, write_page

    options, rest = split_options(words, {**PLACE, "--seeds": 1, "--print_config": 0, "--dry_run": 0})
    entry, scale, out = asked(rest, options)
    seeds = int_option(options, "--seeds", 1, least=1)
    cells = entry.cells()
    if "--print_config" in options:
        print_configs(cells, scale)
        return
    if scale == "full" or "--dry_run" in options:
        print_estimate(entry, scale, seeds, out)
    if "--dry_run" in options:
        if absent := missing_sets(entry, scale):
            print(f"not here: {', '.join(absent)} (bace check data says how to get them)")
        return
    refused: dict[str, str] = {}  # by reason: the first cell that cannot be run for it
    for number, (seed, cell) in enumerate(((seed, cell) for seed in range(seeds) for cell in cells), 1):
        folder = cell.folder(out, scale, seed)
        state = "finished before" if (folder / "metrics.json").exists() else "running"
        print(f"[{number}/{len(cells) * seeds}] {cell}, seed {seed}: {state}", file=sys.stderr, flush=True)
        try:
            run_or_continue(folder, cell.method, cell.config(scale, seed))
        except BaceError as error:  # the rest of the table does not wait for it
            again = str(error) in refused
            print(f"  not run: {'as before' if again else error}", file=sys.stderr, flush=True)
            refused.setdefault(str(error), str(cell))
    show_tables(entry, scale, out)
    folders = {cell.folder(out, scale, seed): cell for cell in cells for seed in range(seeds)}
    if made := {folder: cell for folder, cell in folders.items() if (folder / "metrics.json").exists()}:
        title = f"{entry.place}: {entry.title} ({scale} scale)"
        page = write_page(load_runs(made), out / scale / f"{entry.id}.html", title, published=for_page(entry, made))
        print(f"page: {page}")
    if refused:
        raise ConfigError(
            f"some runs of {entry.id} could not be made: see above, first at {next(iter(refused.values()))}"
        )


def show_entry(words: list[str]) -> None:
    from bace.paper.results import as_csv, as_latex, collect, tables

    options, rest = split_options(words, {**PLACE, "--csv": 1, "--latex": 1})
    entry, scale, out = asked(rest, options)
    if not any(folder.exists() for cell in entry.cells() for folder in [cell.folder(out, scale, 0).parent]):
        print(f"nothing has been run yet: bace paper run {entry.id} --scale {scale}")
    show_tables(entry, scale, out)
    values = collect(entry, out, scale)
    if "--csv" in options:
        write(Path(options["--csv"][0]), as_csv(entry, scale, values))
    if "--latex" in options:
        write(Path(options["--latex"][0]), as_latex(tables(entry, values)))


def show_claims(words: list[str]) -> None:
    from bace.paper.claims import as_markdown, as_rows, evaluate

    options, rest = split_options(words, {**PLACE, "--markdown": 0})
    refuse(rest, [*PLACE, "--markdown"])
    scale, out = place_of(options)
    verdicts = evaluate(out, scale)
    if "--markdown" in options:
        print(as_markdown(verdicts), end="")
        return
    print_rows(["claim", "verdict", "difference [95 % interval]", "printed", "about"], as_rows(verdicts))
    counts: dict[str, int] = {}
    for verdict in verdicts:
        counts[verdict.verdict] = counts.get(verdict.verdict, 0) + 1
    print(", ".join(f"{count} {name}" for name, count in counts.items()))


# -- words


def asked(rest: list[str], options: dict[str, list[str]]) -> tuple[Entry, Scale, Path]:
    refuse([word for word in rest if word.startswith("-")], [*PLACE, "--seeds", "--print_config", "--dry_run"])
    if len(rest) != 1:
        raise ConfigError(f"bace paper needs one ID of `bace paper list`, not '{' '.join(rest)}'")
    return find_entry(rest[0]), *place_of(options)


def place_of(options: dict[str, list[str]]) -> tuple[Scale, Path]:
    wanted = options.get("--scale", ["desk"])[0]
    for scale in SCALES:
        if scale == wanted:
            return scale, Path(options.get("--out", ["paper"])[0])
    raise ConfigError(f"--scale is '{wanted}': it must be desk or full")


def write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be written: {error.strerror}") from error
    print(f"written: {path}")


def show_tables(entry: Entry, scale: Scale, out: Path) -> None:
    from bace.paper.results import as_text, collect, tables

    print(f"{entry.place}, {entry.title}; {scale} scale, runs in {out / scale}\n")
    for title, header, rows in tables(entry, collect(entry, out, scale)):
        print(f"{title}\n{as_text(header, rows)}")


def print_configs(cells: list[Cell], scale: Scale) -> None:
    """The settings of each cell as YAML documents; of a cell that cannot be run here, what it asks for and why not."""
    import yaml

    from bace.config.parse import as_yaml, nest

    for cell in cells:
        print(f"---\n# {cell}")
        try:
            print(as_yaml(cell.config(scale, 0)), end="")
        except BaceError as error:
            print(f"# cannot be run here: {error}")
            print(yaml.safe_dump(nest(cell.settings(scale)), sort_keys=False), end="")


def print_estimate(entry: Entry, scale: Scale, seeds: int, out: Path) -> None:
    """Passes, hours and memory of what is still to be run."""
    from bace.experiments.run import device_name
    from bace.paper.cost import estimate, measured_gflops

    device = device_name("auto")
    gflops = measured_gflops(device)
    rows, hours, passes, largest, unknown = [], 0.0, 0.0, 0.0, 0
    for cell in entry.cells():
        left = sum(not (cell.folder(out, scale, seed) / "metrics.json").exists() for seed in range(seeds))
        try:
            cost = estimate(cell.config(scale, 0), cell.steps)
        except BaceError:  # running it will say why
            cost = None
        if cost is None:
            unknown += 1
            continue
        hours, passes = hours + left * cost.hours(gflops), passes + left * cost.passes
        largest = max(largest, cost.memory)
        numbers = [f"{cost.passes / 1e6:.2f}", in_hours(cost.hours(gflops)), f"{cost.memory / 1e9:.1f}"]
        rows.append([str(cell), str(left), *numbers])
    if rows:
        print_rows(["run", "to do", "million passes", "hours", "GB"], rows)
    print(
        f"estimate for {entry.id} at {scale} scale: {passes / 1e6:.1f} million passes, {in_hours(hours)} hours at "
        f"{gflops:.0f} GFLOP/s ({device}, half of a measured matrix product), {largest / 1e9:.1f} GB of memory"
        + (f"; {unknown} runs of unknown cost are not in it" if unknown else "")
    )


def in_hours(number: float) -> str:
    """As many digits as an estimate deserves."""
    return f"{number:.2f}" if number < 1 else f"{number:.1f}" if number < 10 else f"{number:,.0f}"
