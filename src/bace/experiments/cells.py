"""The cells of a comparison and how one of them is run. schedule.py decides where they run."""

import functools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bace.config.parse import flatten
from bace.config.schema import Config
from bace.errors import BaceError, ConfigError, InUse, Stopped, kept_traceback, one_line
from bace.experiments.run import run
from bace.experiments.run_folder import is_begun, is_finished, read_description
from bace.methods import import_method
from bace.models.frozen_prefix import PrefixCaches
from bace.progress import Board, Show, Tell

Failures = dict[str, str]  # the cells that could not be run, by name, each with the reason
LOOK_AGAIN = 0.5  # seconds until a cell that another process is running is tried again


@dataclass(frozen=True)
class Cell:
    """One run of a comparison."""

    name: str  # for people; no two cells of a comparison share one
    folder: Path
    config: Config


def is_done(cell: Cell) -> bool:
    """Whether the cell is finished. It is refused if its folder was begun with other settings."""
    if is_begun(cell.folder) and (other := other_settings(cell)):
        named = ", ".join(other[:5]) + (" ..." if len(other) > 5 else "")
        raise ConfigError(
            f"'{cell.folder}' holds a run with other settings ({named}): choose another folder with --out, or delete it"
        )
    return is_finished(cell.folder)


def other_settings(cell: Cell) -> list[str]:
    """The settings that have other values in the run in the cell's folder."""
    before, now = (flatten(asdict(each)) for each in (read_description(cell.folder).settings(), cell.config))
    return [key for key in {**before, **now} if before.get(key) != now.get(key)]


def attempt(cell: Cell, caches: PrefixCaches, show: Show | None, tell: Tell = lambda line: None) -> str | None:
    """Begin or resume a cell, unless it is finished. Returns why it failed, or None.

    Raises InUse while another process runs the cell, and Stopped if a signal has stopped it."""
    threads = torch.get_num_threads()  # a resumed run sets its own number
    try:
        if "." in (name := str(cell.config.method["name"])):  # a user's class, imported by whoever planned the cell
            import_method(name)
        if not is_done(cell):
            _begin_or_resume(cell, caches, show, tell)
    except (InUse, Stopped):
        raise
    except BaceError as error:
        return str(error)
    except Exception as error:
        return f"unexpected error: {one_line(error)}. {kept_traceback()}"
    finally:
        torch.set_num_threads(threads)
    return None


def _begin_or_resume(cell: Cell, caches: PrefixCaches, show: Show | None, tell: Tell) -> None:
    begun = is_begun(cell.folder)
    try:
        if begun:
            run(resume=cell.folder, show=show, tell=tell, caches=caches)
        else:
            run(cell.config, out=cell.folder, show=show, tell=tell, caches=caches)
    except ConfigError as error:
        if is_finished(cell.folder) or is_begun(cell.folder) != begun:  # another process was quicker: look again
            raise InUse(str(error)) from error
        raise


def run_here(cells: Sequence[Cell], _: int | None, shown: Board) -> Failures:
    """Run the cells in this process, one after the other."""
    failed: Failures = {}
    caches, waiting = PrefixCaches(), deque(cells)
    while waiting:
        cell = waiting.popleft()
        shown.begin(cell.name, continued=is_begun(cell.folder))
        try:
            show, tell = (functools.partial(way, cell.name) for way in (shown.update, shown.tell))
            reason = attempt(cell, caches, show, tell)
        except InUse:
            shown.wait(cell.name)
            waiting.append(cell)
            time.sleep(LOOK_AGAIN)
            continue
        shown.end(cell.name, f"not run: {reason}" if reason else "finished")
        if reason:
            failed[cell.name] = reason
    return failed
