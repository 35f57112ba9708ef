"""bace report"""

import sys
import warnings
from pathlib import Path

from bace.cli.options import refuse, split_options
from bace.errors import ConfigError, printable


def command(words: list[str]) -> None:
    options, folders = split_options(words, {"--out": 1})
    refuse([word for word in folders if word.startswith("-")], ["--out"])
    if not folders:
        raise ConfigError("bace report needs at least one run folder")
    show_report([Path(folder) for folder in folders], Path(options.get("--out", ["report.html"])[0]))


def show_report(folders: list[Path], page: Path, *, ranked: bool = False) -> None:
    from rich.console import Console

    from bace.experiments.run import changed_files
    from bace.report import load_runs, print_table, summary, write_page

    runs = load_runs(folders)
    for run in runs:
        if changed := changed_files(run.folder) if run.metrics else ():
            warnings.warn(f"'{run.folder}' is not as its run left it: {', '.join(changed)} changed", stacklevel=2)
    rows = summary(runs)
    if ranked:
        rows.sort(key=lambda row: row.A_last.mean if row.A_last else 0.0, reverse=True)
    print_table(rows, Console(width=None if sys.stdout.isatty() else 120))
    if unfinished := [printable(str(run.folder)) for run in runs if run.metrics is None]:
        print(f"not in the table, because unfinished (bace run --resume DIR): {', '.join(unfinished)}")
    print(f"page: {write_page(runs, page)}")
