"""Progress is shown in lines and, on a terminal, in a bar below them. Both go to standard error, so that standard
output contains only results."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bace.errors import printable

Show = Callable[[float, str], None]
Tell = Callable[[str], None]


def quiet(done: float, text: str) -> None:
    """Shows nothing."""


def silent(line: str) -> None:
    """Tells nothing."""


def launched() -> bool:
    """Whether torchrun, or something like it, has started this process as one of a group (see ranks.py)."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def is_first() -> bool:
    """Whether this process speaks and writes for the run: it is the only one, or the first of a group."""
    return not launched() or os.environ["RANK"] == "0"


def tell(line: str) -> None:
    """Print a line at once, even into a pipe or a file."""
    if is_first():
        print(line, file=sys.stderr, flush=True)


@contextmanager
def bar(title: str) -> Iterator[Show | None]:
    """A bar for the share done, between 0 and 1; None if there is no terminal."""
    if not (sys.stderr.isatty() and is_first()):
        yield None
        return
    with _bars() as bars:
        task = bars.add_task("", total=1.0, title=title)
        yield lambda done, text: bars.update(task, completed=done, description=text)


class Board:
    """The progress of many runs. A terminal shows a bar for each active run and one for all runs. A line reports each
    run that has ended and, without a terminal, each run that begins."""

    def __init__(self, total: int, bars: Any = None, tell: Tell = tell) -> None:
        self.total, self.begun, self.ended, self.bars, self.print = total, 0, 0, bars, tell
        self.rows: dict[str, Any] = {}  # by name: the bar, or None, of a run that has begun
        self.all = bars and bars.add_task("", total=total, title=f"all {total} runs")

    def begin(self, name: str, *, continued: bool = False) -> None:
        if name not in self.rows:
            self.rows[name] = self.bars and self.bars.add_task("", total=1.0, title=name)
            self.begun += 1
            self.line(f"run {self.begun} of {self.total}: {name}{', continued' if continued else ''}")
        self.update(name, 0.0, "")

    def update(self, name: str, done: float, text: str) -> None:
        if self.bars:
            self.bars.update(self.rows[name], completed=done, description=text)

    def wait(self, name: str) -> None:
        """Show that another process works on the run."""
        self.update(name, 0.0, "in use by another process")

    def end(self, name: str, said: str) -> None:
        self.ended += 1
        if name not in self.rows:
            self.begun += 1
        if self.bars:
            self.bars.update(self.all, completed=self.ended)
            if name in self.rows:
                self.bars.remove_task(self.rows.pop(name))
        self.tell(name, said)

    def tell(self, name: str, text: str) -> None:
        self.line(f"{name}: {text}" if self.total > 1 else text)

    def line(self, text: str) -> None:
        if self.bars:
            self.bars.console.print(printable(text), markup=False, highlight=False)
        else:
            self.print(printable(text))


@contextmanager
def board(total: int, tell_lines: Tell | None = None) -> Iterator[Board]:
    if tell_lines is not None or not sys.stderr.isatty():
        yield Board(total, tell=tell_lines or tell)
        return
    with _bars() as bars:
        yield Board(total, bars)


def _bars() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.fields[title]}", markup=False),
        BarColumn(bar_width=20),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False)


def duration(seconds: float) -> str:
    """A time with as many digits as an estimate deserves: '40 s', '12 min', '3.5 h'."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
