"""bace report"""

import sys
import warnings
from pathlib import Path

from bace.cli.console import write
from bace.errors import printable


def command(
    folders: list[Path], *, out: Path = Path("report.html"), csv: Path | None = None, latex: Path | None = None
) -> None:
    """Print the table of runs and write their page.

    Seeds of one setting share a row. A row is named by what distinguishes it from the other rows. The page compares
    settings that differ between runs.

    Args:
        folders: at least one run folder, or a folder of run folders, such as `bace compare` writes.
        out: the page, which is one file that you can open, mail or print.
        csv: a file for the numbers of the table.
        latex: a file for the table in LaTeX.
    """
    show_report(folders, out, csv=csv, latex=latex)


def show_report(
    folders: list[Path], page: Path, *, ranked: bool = False, csv: Path | None = None, latex: Path | None = None
) -> None:
    from rich.console import Console

    from bace.report import load_runs, print_table, summary_rows, write_page
    from bace.report.export import as_csv, as_latex, summary_tables

    runs = load_runs(folders)
    for run in runs:
        if run.changed:
            warnings.warn(f"'{run.folder}' was changed after its run: {', '.join(run.changed)}", stacklevel=2)
    rows = summary_rows(runs)
    if ranked:
        rows.sort(key=lambda row: row.A_last.mean if row.A_last else 0.0, reverse=True)
    print_table(rows, Console(width=None if sys.stdout.isatty() else 120))
    if unfinished := [run for run in runs if run.metrics is None]:
        print("these runs are not in the table, because they are unfinished (bace run --resume DIR):")
    for run in unfinished:
        print(f"  {printable(str(run.folder))}: {len(run.matrix)} of {len(run.tasks)} tasks done")
    print(f"page: {write_page(runs, page)}")
    if csv:
        write(csv, as_csv(rows))
    if latex:
        write(latex, as_latex(summary_tables(rows)))
