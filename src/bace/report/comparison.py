"""Comparisons in Python: `bace.compare` and its result."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from bace.config.parse import DEFAULT_NAMES, flatten
from bace.errors import ConfigError
from bace.experiments.compare import cells_of, methods_asked
from bace.experiments.run_folder import Run, load_runs
from bace.experiments.schedule import run_cells
from bace.methods import import_method
from bace.progress import Tell
from bace.report.export import as_frame, summary_tables
from bace.report.page import write_page
from bace.report.runs import Row, summary_rows


def compare(
    methods: str | Sequence[str],
    *,
    seeds: int = 1,
    out: str | Path | None = None,
    tell: Tell = lambda line: None,
    **settings: Any,
) -> "Comparison":
    """Run several methods with several seeds, as `bace compare` does. The same call continues a stopped comparison.

    Args:
        methods: names from `bace list methods`, optionally with settings: ["ER", "BaCE(W0=1)", "BaCE"]; or "all".
        seeds: the number of seeds; the first is `seed`.
        out: the folder that keeps the runs; by default runs/<benchmark>.
        tell: called with a line for each run and each task, for example `print`.
        settings: settings of all runs, as in `bace.run`: `benchmark="digits"`, `memory=50`, `train={"epochs": 3}`.
    """
    if seeds < 1:
        raise ConfigError(f"seeds is {seeds}: it must be at least 1")
    given = flatten(settings)
    if own := next((key for key in given if key.startswith("method.")), None):
        raise ConfigError(f"'{own}' belongs to one method: give it in brackets, \"BaCE(alpha=2)\"")
    words = [methods] if isinstance(methods, str) else list(methods)
    if not words:
        raise ConfigError('there is no method to compare: give names, or "all"')
    asked = methods_asked(words, str(given.get("benchmark.name", DEFAULT_NAMES["benchmark.name"])))
    for name, _ in asked:
        import_method(name)
    _, cells = cells_of(asked, given, seeds, None if out is None else Path(out))
    if failed := run_cells(cells, tell=tell):
        name, reason = next(iter(failed.items()))
        raise ConfigError(f"{len(failed)} of {len(cells)} runs failed, the first of them {name}: {reason}")
    return Comparison(load_runs([cell.folder for cell in cells]))


@dataclass(frozen=True, repr=False)
class Comparison:
    """The runs of a comparison. A notebook shows them as a table; `frame` is the table as a pandas DataFrame."""

    runs: list[Run]

    @property
    def rows(self) -> list[Row]:
        """A row for each method with its settings: mean and sample standard deviation over seeds."""
        return summary_rows(self.runs)

    @property
    def frame(self) -> Any:
        """The rows as a pandas DataFrame."""
        return as_frame(self.rows)

    def page(self, path: str | Path) -> Path:
        """Write the report page, one HTML file, and return its path."""
        return write_page(self.runs, Path(path))

    def __repr__(self) -> str:
        lines = []
        for title, header, rows in summary_tables(self.rows):
            widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
            lines.append(title)
            for row in (header, *rows):
                lines.append("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        tables = []
        for title, header, rows in summary_tables(self.rows):
            head = "".join(f"<th>{escape(text)}</th>" for text in header)
            body = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows)
            tables.append(f"<table><caption>{escape(title)}</caption><tr>{head}</tr>{body}</table>")
        return "".join(tables)
