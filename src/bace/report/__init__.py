"""Comparisons of finished runs: a table for the terminal and one HTML page that works offline."""

from bace.experiments.run_folder import Run, load_runs
from bace.report.page import write_page
from bace.report.runs import Row, Stat, print_table, summary_rows

__all__ = ["Row", "Run", "Stat", "load_runs", "print_table", "summary_rows", "write_page"]
