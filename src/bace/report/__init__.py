"""Finished runs, compared: a table for the terminal and one HTML page that works offline."""

from bace.report.page import write_page
from bace.report.runs import Row, Run, Stat, load_runs, print_table, summary

__all__ = ["Row", "Run", "Stat", "load_runs", "print_table", "summary", "write_page"]
