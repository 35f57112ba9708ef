"""Functions that commands share: printing, and the check of the number of seeds."""

import json
import sys
from pathlib import Path

from bace.errors import ConfigError, printable


def check_seeds(seeds: int) -> None:
    if seeds < 1:
        raise ConfigError(f"--seeds is '{seeds}': it must be at least 1")


def name_failures(failed: dict[str, str], total: int) -> None:
    """Fail if some runs of a comparison failed (name: reason). Runs with the same reason share a line."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in failed.items():
        by_reason.setdefault(reason, []).append(name)
    if failed:
        lines = "".join(f"\n  {'; '.join(names)}: {reason}" for reason, names in by_reason.items())
        raise ConfigError(f"{len(failed)} of {total} runs failed:{lines}")


def print_rows(header: list[str], rows: list[list[str]]) -> None:
    """A table as wide as the terminal; names are never shortened, so that they can be copied."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column(header[0], no_wrap=True, overflow="ignore", min_width=max(len(row[0]) for row in rows))
    for name in header[1:]:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(value)) for value in row))  # Text, because a str would be read as markup
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be written: {error.strerror}") from error
    print(f"written: {path}")


def print_json(value: object) -> None:
    print(json.dumps(value, indent=2))


def in_line(value: object) -> str:
    """A value of a prediction as text: words and tags with spaces; an entity as 0-13 person "Angela Merkel"."""
    if not isinstance(value, list):
        return printable(str(value))
    return " ".join(
        printable(item if isinstance(item, str) else f'{item["start"]}-{item["end"]} {item["type"]} "{item["text"]}"')
        for item in value
    )


def in_words(value: object) -> str:
    """A cell as text; commas separate the entries of lists and the names of settings."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list | dict) else str(value)
