"""The position of a run. The trainer moves it, methods and models read it, and every checkpoint saves it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from bace.core.checkpoint import as_saved
from bace.core.stream import Task
from bace.randomness import derive, generator

Phase = Literal["begin", "train", "finish", "evaluate", "end"]

# The rest of a run depends on these fields; the other fields follow from the task and the stage.
SAVED = ("task", "phase", "stages_done", "prepared", "epoch", "step", "sums", "best", "stale", "noted")


@dataclass
class Position:
    """The next thing to do. Every random draw is named by the position, so no generator state needs to be saved."""

    seed: int
    task: int = 0
    known: int = 0  # number of classes before this task; the old classes are [0, known)
    seen: int = 0  # number of classes including this task's; the new classes are [known, seen)
    stage: str = ""
    epoch: int = 0
    epochs: int = 0
    step: int = 0
    steps: int = 0  # number of steps of an epoch
    part: int = 0  # index within a step, if a method expands a batch
    lr: float = 0.0
    # progress within the task
    phase: Phase = "begin"
    stages_done: int = 0
    prepared: bool = False  # whether the current stage is prepared
    sums: dict[str, float] = field(default_factory=dict)  # sums of the loss terms in this epoch
    best: float | None = None  # best validation loss, for early stopping
    stale: int = 0  # epochs since the best one
    noted: dict[str, dict[str, Any]] = field(default_factory=dict)  # records of studies in the task's last epoch

    # -- random draws

    def rng(self, name: str) -> torch.Generator:
        """The random stream called `name` at this step. Two calls give the same numbers."""
        return generator(self.seed, name, self.task, self.stage, self.epoch, self.step)

    def view(self, draw: int = 0) -> int:
        """The key of a random view. Draw 0 is the same for anchor, neighbour and teacher during a whole epoch. Draws 1,
        2, ... are new at every step, for examples from memory and second views."""
        return derive(self.seed, "view", self.task, self.stage, self.epoch, draw, self.step if draw else 0)

    def dropout_seed(self) -> int:
        """The dropout seed, different for every step and every part of a step."""
        return derive(self.seed, "dropout", self.task, self.stage, self.epoch, self.step, self.part)

    def in_words(self) -> str:
        return f"task {self.task + 1}, stage '{self.stage}', epoch {self.epoch + 1}, step {self.step + 1}"

    # -- moves

    def begin(self, task: Task) -> None:
        """The start of a task."""
        self.show_task(task)
        self.phase, self.stages_done, self.noted = "begin", 0, {}
        self.begin_stage("before task")

    def end(self, task: Task) -> None:
        """The end of a task: nothing of it is left to do."""
        self.show_task(task)
        self.phase = "end"

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
        """Load a saved position; raise KeyError or TypeError if it is not one."""
        if "stage" in state:  # from versions before 0.2
            state = {"stages_done": state["stage"], **state}
        for name, value in as_saved({name: state[name] for name in SAVED}, Position(seed=0)).items():
            setattr(self, name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Position:
        """A deep copy of a model shares the position of the run."""
        return self


def tasks_done(state: dict[str, Any]) -> int:
    """The number of tasks that were learned and evaluated when this position was saved."""
    position = Position(seed=0)
    position.restore(state)
    return position.tasks_done
