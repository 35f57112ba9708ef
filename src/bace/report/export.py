"""The numbers of a comparison for other programs: CSV, LaTeX, pandas."""

import csv
import importlib
import io
from collections.abc import Sequence
from typing import Any

from bace.errors import ConfigError
from bace.experiments.run_folder import COLUMNS
from bace.report.runs import Row, show

LEFT = ("memory", "method", "task")  # columns of names
MARKS = {  # characters that LaTeX must not get unchanged
    **{mark: f"\\{mark}" for mark in "{}_%&#$"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"±": r"$\pm$", ">": "$>$", "<": "$<$", "…": r"\dots{}"},
}


def records(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One dictionary per row: benchmark, method, number of seeds, and mean and deviation of each column."""
    made = []
    for row in rows:
        found: dict[str, Any] = {"benchmark": row.benchmark, "method": row.label, "seeds": len(row.seeds)}
        for name in COLUMNS:
            point = getattr(row, name)
            found |= {name: point and point.mean, f"{name}_std": point and point.std}
        made.append(found)
    return made


def as_csv(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    found = records(rows)
    writer = csv.DictWriter(text, list(found[0]) if found else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
    return text.getvalue()


def as_frame(rows: Sequence[Row]) -> Any:
    """A pandas DataFrame, if pandas is installed (it comes with `datasets`)."""
    try:
        pandas = importlib.import_module("pandas")
    except ImportError:
        raise ConfigError('the table as a DataFrame needs pandas: pip install "bace-cil[datasets]"') from None
    return pandas.DataFrame(records(rows))


def summary_tables(rows: Sequence[Row]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, header and cells of the table of each benchmark, as the terminal shows it."""
    header = ["method", "seeds", *COLUMNS]
    return [
        (
            benchmark,
            header,
            [
                [row.label, str(len(row.seeds)), *(show(getattr(row, name)) for name in COLUMNS)]
                for row in rows
                if row.benchmark == benchmark
            ],
        )
        for benchmark in dict.fromkeys(row.benchmark for row in rows)
    ]


def as_latex(found: Sequence[tuple[str, list[str], list[list[str]]]]) -> str:
    """A tabular for each table, which needs no LaTeX package."""
    lines = []
    for title, header, rows in found:
        columns = "".join("l" if name in LEFT else "r" for name in header)
        about = " ".join(title.split())  # a second line would not be a comment
        lines += [f"% {about}", f"\\begin{{tabular}}{{{columns}}}", "\\hline", _latex_row(header), "\\hline"]
        lines += [_latex_row(row) for row in rows]
        lines += ["\\hline", "\\end{tabular}", ""]
    return "\n".join(lines)


def _latex_row(cells: Sequence[str]) -> str:
    return " & ".join(_latex(cell) for cell in cells) + r" \\"


def _latex(text: str) -> str:
    return "".join(MARKS.get(letter, letter) for letter in " ".join(text.split()))
