"""Run and show the paper's tables, figures and claims, with your numbers beside the printed ones."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from bace.cli.console import check_seeds, name_failures, print_rows, write
from bace.errors import BaceError
from bace.paper.tables import ENTRIES, Cell, Entry, Scale, find_entry

if TYPE_CHECKING:  # imports torch
    from bace.experiments.cells import Cell as Run


def list_entries() -> None:
    """List every table and figure."""
    rows = [
        [entry.id, entry.place, entry.title, str(len(entry.cells())), ", ".join(missing_sets(entry, "full")) or "-"]
        for entry in ENTRIES.values()
    ]
    print_rows(["id", "place", "content", "runs a seed", "sets that are not here"], rows)


def missing_sets(entry: Entry, scale: Scale) -> list[str]:
    """The public sets of an entry that are in no local folder. Some are downloaded when needed (bace check data)."""
    from bace.data.benchmarks import BENCHMARKS
    from bace.data.datasets import find_folder

    names = dict.fromkeys(cell.settings(scale)["benchmark.name"] for cell in entry.cells())
    sets = dict.fromkeys(corpus for name in names for corpus in BENCHMARKS[name].corpora)
    return [corpus.folder for corpus in sets if find_folder(corpus, os.environ.get("BACE_DATA")) is None]


def run_entry(
    id: str,
    *,
    scale: Scale = "desk",
    seeds: int = 1,
    out: Path = Path("paper"),
    print_config: bool = False,
    dry_run: bool = False,
    workers: int | None = None,
    on: Literal["ray", "slurm"] | None = None,
) -> None:
    """Run a table or figure. Finished runs are skipped, and a run that was stopped is continued.

    Args:
        id: an ID of `bace paper list`.
        scale: the paper's own scale (`full`), or a smaller one (`desk`).
        seeds: the number of seeds.
        out: the folder that keeps the runs.
        print_config: print the settings of the runs and run nothing.
        dry_run: print the cost of the runs and run nothing.
        workers: the number of runs at a time, each in a process with its share of the CPU's threads. The default is one
            on this machine, and as many as fit on a cluster (docs/scale.md).
        on: the cluster that runs them, `ray` or `slurm`; the default is this machine.
    """
    from bace.experiments.run_folder import is_finished, load_runs
    from bace.experiments.schedule import run_cells
    from bace.paper.results import for_page
    from bace.report import write_page

    check_seeds(seeds)
    entry = find_entry(id)
    cells = entry.cells()
    if print_config:
        print_configs(cells, scale)
        return
    if scale == "full" or dry_run:
        print_estimate(entry, scale, seeds, out)
    if dry_run:
        if absent := missing_sets(entry, scale):
            print(f"not here: {', '.join(absent)} (bace check data says how to get them)")
        return
    planned, refused = plan(cells, scale, seeds, out)
    failed = refused | run_cells(planned, workers=workers, on=on)
    show_tables(entry, scale, out)
    folders = {cell.folder(out, scale, seed): cell for cell in cells for seed in range(seeds)}
    if made := {folder: cell for folder, cell in folders.items() if is_finished(folder)}:
        title = f"{entry.place}: {entry.title} ({scale} scale)"
        runs = load_runs(made)
        page = write_page(runs, out / scale / f"{entry.id}.html", title, published=for_page(entry, runs, made))
        print(f"page: {page}")
    name_failures(failed, len(cells) * seeds)


def plan(cells: list[Cell], scale: Scale, seeds: int, out: Path) -> tuple[list["Run"], dict[str, str]]:
    """The runs of these cells, and the reasons why some cannot be run. The rest of the table does not wait for them."""
    from bace.experiments.cells import Cell as Run

    planned, refused = [], {}
    for seed in range(seeds):
        for cell in cells:
            name = f"{cell}, seed {seed}"
            try:
                planned.append(Run(name, cell.folder(out, scale, seed), cell.config(scale, seed)))
            except BaceError as error:
                refused[name] = str(error)
    return planned, refused


def show_entry(
    id: str, *, scale: Scale = "desk", out: Path = Path("paper"), csv: Path | None = None, latex: Path | None = None
) -> None:
    """Show a table or figure: our numbers, the published ones and the differences.

    Args:
        id: an ID of `bace paper list`.
        scale: the scale of the runs.
        out: the folder that keeps the runs.
        csv: a file for the numbers.
        latex: a file for the tables in LaTeX.
    """
    from bace.paper.results import as_csv, collect, tables
    from bace.report.export import as_latex

    entry = find_entry(id)
    if not any(folder.exists() for cell in entry.cells() for folder in [cell.folder(out, scale, 0).parent]):
        print(f"nothing has been run yet: bace paper run {entry.id} --scale {scale}")
    show_tables(entry, scale, out)
    values = collect(entry, out, scale)
    if csv:
        write(csv, as_csv(entry, scale, values))
    if latex:
        write(latex, as_latex(tables(entry, values)))


def show_claims(*, scale: Scale = "desk", out: Path = Path("paper"), markdown: bool = False) -> None:
    """Print what the finished runs say about each of the paper's claims.

    Args:
        scale: the scale of the runs.
        out: the folder that keeps the runs.
        markdown: print a Markdown page.
    """
    from bace.paper.claims import as_markdown, as_rows, evaluate

    verdicts = evaluate(out, scale)
    if markdown:
        print(as_markdown(verdicts), end="")
        return
    print_rows(["claim", "verdict", "difference [95 % interval]", "printed", "about"], as_rows(verdicts))
    counts: dict[str, int] = {}
    for verdict in verdicts:
        counts[verdict.verdict] = counts.get(verdict.verdict, 0) + 1
    print(", ".join(f"{count} {name}" for name, count in counts.items()))


COMMANDS = {"list": list_entries, "run": run_entry, "show": show_entry, "claims": show_claims}


def show_tables(entry: Entry, scale: Scale, out: Path) -> None:
    from bace.paper.results import as_text, collect, tables

    print(f"{entry.place}, {entry.title}; {scale} scale, runs in {out / scale}\n")
    for title, header, rows in tables(entry, collect(entry, out, scale)):
        print(f"{title}\n{as_text(header, rows)}")


def print_configs(cells: list[Cell], scale: Scale) -> None:
    """Print the settings of each cell as a YAML document; for a cell that cannot be run here, also the reason."""
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
    """The passes, hours and memory of the runs that remain."""
    from bace.experiments.assemble import device_name
    from bace.experiments.run_folder import is_finished
    from bace.paper.cost import estimate, measured_gflops

    device = device_name("auto")
    gflops = measured_gflops(device)
    rows, hours, passes, largest, unknown = [], 0.0, 0.0, 0.0, 0
    for cell in entry.cells():
        left = sum(not is_finished(cell.folder(out, scale, seed)) for seed in range(seeds))
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
        + (f"; this leaves out {unknown} runs of unknown cost" if unknown else "")
    )


def in_hours(number: float) -> str:
    """A number with as many digits as an estimate deserves."""
    return f"{number:.2f}" if number < 1 else f"{number:.1f}" if number < 10 else f"{number:,.0f}"
