"""Progress on the terminal: bars for whoever is looking, and lines for a log."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bace.errors import printable

Show = Callable[[float, str], None]


@contextmanager
def bar(title: str) -> Iterator[Show | None]:
    """A bar for the share done, between 0 and 1; None when nobody is looking."""
    if not sys.stderr.isatty():
        yield None
        return
    with _bars() as bars:
        task = bars.add_task("", total=1.0, title=title)
        yield lambda done, text: bars.update(task, completed=done, description=text)


class Board:
    """How far many runs are: a bar for each that is running and one for all of them on a terminal; elsewhere, and of
    runs that have ended, a line."""

    def __init__(self, total: int, bars: Any = None) -> None:
        self.total, self.ended, self.bars = total, 0, bars
        self.rows: dict[str, Any] = {}  # by name: the bar, or None, of a run that has begun
        self.all = bars and bars.add_task("", total=total, title=f"all {total} runs")

    def begin(self, name: str) -> None:
        if name not in self.rows:
            self.rows[name] = self.bars and self.bars.add_task("", total=1.0, title=name)
            if not self.bars:
                self.line(f"{name}: running")
        self.update(name, 0.0, "")

    def update(self, name: str, done: float, text: str) -> None:
        if self.bars:
            self.bars.update(self.rows[name], completed=done, description=text)

    def wait(self, name: str) -> None:
        """Another process works on it."""
        self.update(name, 0.0, "in use by another process")

    def end(self, name: str, said: str) -> None:
        self.ended += 1
        if self.bars:
            self.bars.update(self.all, completed=self.ended)
            if name in self.rows:
                self.bars.remove_task(self.rows.pop(name))
        self.line(f"[{self.ended}/{self.total}] {name}: {said}")

    def line(self, text: str) -> None:
        if self.bars:
            self.bars.console.print(printable(text), markup=False, highlight=False)
        else:
            print(printable(text), file=sys.stderr, flush=True)


@contextmanager
def board(total: int) -> Iterator[Board]:
    if not sys.stderr.isatty():
        yield Board(total)
        return
    with _bars() as bars:
        yield Board(total, bars)


def _bars() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.fields[title]}"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)
