"""Where a run is: moved by the trainer, read by methods and models, saved in every checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from bace.core.checkpoint import as_saved
from bace.core.stream import Task
from bace.randomness import derive, generator

Phase = Literal["begin", "train", "finish", "evaluate", "end"]

# What the rest of a run depends on; the other fields follow from the task and the stage.
SAVED = ("task", "phase", "stages_done", "prepared", "epoch", "step", "sums", "best", "stale", "noted")


@dataclass
class Position:
    """The next thing to do. Every random draw is named by it, so nothing about randomness needs to be saved."""

    seed: int
    task: int = 0
    known: int = 0  # classes before this task: the old ones are [0, known)
    seen: int = 0  # classes with this task's: the new ones are [known, seen)
    stage: str = ""
    epoch: int = 0
    epochs: int = 0
    step: int = 0
    steps: int = 0  # of an epoch
    part: int = 0  # of a step, where a method expands a batch
    lr: float = 0.0
    # how far the task has come
    phase: Phase = "begin"
    stages_done: int = 0
    prepared: bool = False  # the stage at hand
    sums: dict[str, float] = field(default_factory=dict)  # loss terms of the epoch so far
    best: float | None = None  # validation loss, for early stopping
    stale: int = 0  # epochs since then
    noted: dict[str, dict[str, Any]] = field(default_factory=dict)  # by studies, in the task's last epoch

    # -- random draws

    def rng(self, name: str) -> torch.Generator:
        """The stream of random numbers called `name`, at this step. Asking twice gives the same numbers."""
        return generator(self.seed, name, self.task, self.stage, self.epoch, self.step)

    def view(self, draw: int = 0) -> int:
        """The key of a random view. Draw 0 is the epoch's: the same for anchor, neighbour and teacher all epoch long.
        Draws 1, 2, ... are fresh at every step: memory examples, second views."""
        return derive(self.seed, "view", self.task, self.stage, self.epoch, draw, self.step if draw else 0)

    def dropout_seed(self) -> int:
        """Every step has its own, and every part of it."""
        return derive(self.seed, "dropout", self.task, self.stage, self.epoch, self.step, self.part)

    # -- moves

    def begin(self, task: Task, phase: Phase = "begin") -> None:
        """The start of a task."""
        self.show_task(task)
        self.phase, self.stages_done, self.noted = phase, 0, {}
        self.begin_stage("before task")

    def begin_stage(self, name: str) -> None:
        self.stage, self.prepared, self.epoch, self.step, self.part = name, False, 0, 0, 0
        self.sums, self.best, self.stale = {}, None, 0

    def show_task(self, task: Task) -> None:
        self.task, self.known, self.seen = task.index, task.classes.start, task.classes.stop

    # -- saving

    @property
    def tasks_done(self) -> int:
        return self.task + (self.phase == "end")

    def state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SAVED}

    def restore(self, state: dict[str, Any]) -> None:
        """Raises KeyError or TypeError if that is not a saved position."""
        if "stage" in state:  # before 0.2
            state = {"stages_done": state["stage"], **state}
        for name, value in as_saved({name: state[name] for name in SAVED}, Position(seed=0)).items():
            setattr(self, name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Position:
        """A copy of a model stands where the run is, too."""
        return self


def tasks_done(state: dict[str, Any]) -> int:
    """How many tasks were learned and evaluated when this position was saved."""
    position = Position(seed=0)
    position.restore(state)
    return position.tasks_done
