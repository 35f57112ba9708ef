"""Methods that keep a part of their memory out of training, to fit something on it afterwards."""

import math
from typing import Any

import torch
from torch import Tensor

from bace.errors import ConfigError
from bace.memory import Memory
from bace.method import Method
from bace.models.model import Model
from bace.randomness import generator
from bace.stream import Task


class HoldOut(Method):
    """While `holds_out` is set, a tenth (rounded up) of each class's share of the memory is never trained on: it is set
    aside before its task is learned, and kept in `held` beside the memory, within the same budget."""

    uses_memory = True
    holds_out: bool = False

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)  # of what a subclass is besides
        self.held = Memory()

    def build(self, model: Model) -> Model:
        if self.holds_out and len(self.stream):  # refuse now what would fail at the last task
            self.check_share(self.quota(self.stream[-1]))
        return super().build(model)

    def remember(self, task: Task) -> None:
        if not self.holds_out:
            return super().remember(task)
        quota = self.quota(task)
        spare = math.ceil(quota / 10)
        chosen = self.choose(self.trained(task), task, quota - spare)
        self.memory.fill(chosen, task.index, quota - spare, generator(self.now.seed, "missing", task.index))
        self.held.fill(self.choose_held(task), task.index, spare, generator(self.now.seed, "missing", task.index))

    def trained(self, task: Task) -> Tensor:  # (examples,)
        if not self.holds_out:
            return super().trained(task)
        return task.train[~torch.isin(task.train, torch.cat(list(self.choose_held(task).values())))]

    def choose_held(self, task: Task) -> dict[int, Tensor]:
        """Examples of each new class that training never sees."""
        quota = self.quota(task)
        self.check_share(quota)
        held = {}
        for group, members in self.stream.by_group(task.train).items():
            # a class cannot have a larger share than it has examples, and must keep one to be trained on
            count = min(math.ceil(min(quota, len(members)) / 10), len(members) - 1)
            shuffle = torch.randperm(len(members), generator=generator(self.now.seed, "held", task.index, group))
            held[group] = members[shuffle[:count]]
        return held

    def check_share(self, quota: int) -> None:
        if self.stream.modality == "token":
            raise ConfigError(f"{self.title}'s bias correction is not defined for tokens: switch it off")
        if quota < 2:
            raise ConfigError(
                f"{self.title}'s bias correction holds out memory examples: {quota} a class is too few, use at least 2"
            )
