"""Progress bars on the terminal; silence elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Show = Callable[[float, str], None]


@contextmanager
def bar(title: str) -> Iterator[Show | None]:
    """A bar for the share done, between 0 and 1; None when nobody is looking."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.fields[title]}"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=1.0, title=title)
        yield lambda done, text: progress.update(task, completed=done, description=text)
