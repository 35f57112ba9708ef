"""Cells on other machines. Run folders are in storage that all machines share, and they alone record how far a cell
is, so no messages are sent back."""

import json
import math
import os
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from bace.errors import InUse, one_line
from bace.experiments.cells import Cell, Failures, attempt
from bace.experiments.run_folder import LOG, is_begun, read_description
from bace.models.frozen_prefix import PrefixCaches
from bace.progress import Board

T = TypeVar("T", bound=Hashable)
TAIL = 65_536  # bytes at the end of a log that are searched for its last event
LOOK_AGAIN = 2.0  # seconds


def with_whole_path(cell: Cell) -> Cell:
    """Paths are made absolute, because another machine works in another folder."""
    return replace(cell, folder=cell.folder.absolute())


def cell_threads(cell: Cell) -> int:
    """A cell on a cluster uses the number of CPUs in its settings, by default one."""
    return cell.config.train.threads or 1


def attempt_there(cell: Cell, folder: str) -> str | None:
    """Call `attempt` on the machine that the cluster has chosen. Paths in the settings are relative to `folder`, where
    the comparison was started."""
    os.chdir(folder)
    torch.set_num_threads(cell_threads(cell))
    while True:
        try:
            return attempt(cell, PrefixCaches(), None)
        except InUse:
            time.sleep(LOOK_AGAIN)


def follow(
    submitted: Iterator[tuple[T, Cell]],
    done: Callable[[list[T]], list[T]],
    result: Callable[[T], str | None],
    shown: Board,
    most: float = math.inf,
) -> Failures:
    """Wait for cells and show how far they are.

    Args:
        submitted: submits the next cell when it is asked for one; at most `most` run at a time.
        done: returns the cells among these that have ended; it may take a moment.
        result: returns why a cell failed, or None; it may also raise an exception.
    """
    failed: Failures = {}
    running: dict[T, Cell] = {}
    more = True
    while more or running:
        while more and len(running) < most:
            handle, cell = next(submitted, (None, None))
            more = cell is not None
            if handle is not None and cell is not None:
                running[handle] = cell
        for handle in done(list(running)):
            cell = running.pop(handle)
            try:
                reason = result(handle)
            except Exception as error:
                reason = f"its machine reports {one_line(error)}; the same command continues it"
            shown.end(cell.name, f"not run: {reason}" if reason else "finished")
            if reason:
                failed[cell.name] = reason
        for cell in running.values():
            if seen := glance(cell.folder):
                shown.begin(cell.name)
                shown.update(cell.name, *seen)
    return failed


def glance(folder: Path) -> tuple[float, str] | None:
    """The progress of the run in a folder, by the last event of its log; None if there is no such event yet."""
    if not is_begun(folder):
        return None
    tasks = len(read_description(folder).tasks)
    with (folder / LOG).open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL))
        lines = log.read().decode(errors="replace").splitlines()
    for line in reversed(lines):
        try:
            event = json.loads(line)
        except ValueError:  # cut off, by us or by whoever is writing it
            continue
        where = f"task {event.get('task')}/{tasks}"
        if event.get("event") == "task":
            return event["task"] / tasks, f"{where} learned"
        if event.get("event") == "epoch":
            return (event["task"] - 1) / tasks, f"{where} {event['stage']} epoch {event['epoch'] + 1}"
    return 0.0, ""
