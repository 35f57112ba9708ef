"""Methods that hold out a part of their memory from training, to fit something on it afterwards."""

import math
from typing import Any

import torch
from torch import Tensor

from bace.core.memory import Memory
from bace.core.method import Method
from bace.core.stream import Task
from bace.data.batch import NO_IDS
from bace.errors import ConfigError
from bace.models.model import Model
from bace.randomness import generator


class HoldOut(Method):
    """While `holds_out` is set, a tenth (rounded up) of each class's share of the memory is never trained on. It is set
    aside before its task is learned and kept in `held` beside the memory, within the same budget. A share of one
    example cannot be divided: `check_share` refuses it, or, if a subclass allows it, nothing is held out."""

    uses_memory = True
    holds_out: bool = False

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)  # the settings of the other base classes
        self.held = Memory()

    def build(self, model: Model) -> Model:
        if self.holds_out and len(self.stream):  # refuse now a quota that would fail at the last task
            self.check_share(self.quota(self.stream[-1]))
        return super().build(model)

    def remember(self, task: Task) -> None:
        if not self.holds_out:
            return super().remember(task)
        quota = self.quota(task)
        spare = self.spare(quota)
        chosen = self.choose(self.training_examples(task), task, max(quota - spare, 1))
        self.memory.fill(chosen, task.index, quota - spare, generator(self.now.seed, "missing", task.index))
        # `held` has no size of its own; if nothing is held out, it becomes empty
        self.held.fill(self.choose_held(task), task.index, spare, generator(self.now.seed, "missing", task.index))

    def training_examples(self, task: Task) -> Tensor:  # (examples,)
        if not self.holds_out:
            return super().training_examples(task)
        return task.train[~torch.isin(task.train, torch.cat([NO_IDS, *self.choose_held(task).values()]))]

    def choose_held(self, task: Task) -> dict[int, Tensor]:
        """Examples of each new class that training never sees; a sentence counts for one of the types it shows."""
        quota = self.quota(task)
        self.check_share(quota)
        members = self.stream.by_group(task.train)
        left = {group: set(examples.tolist()) for group, examples in members.items()}
        held = {}
        for group, examples in members.items():
            count = self.spare(min(quota, len(examples)))  # a share cannot exceed the class's examples
            shuffle = torch.randperm(len(examples), generator=generator(self.now.seed, "held", task.index, group))
            picked: list[int] = []
            for example in examples[shuffle].tolist():
                shows = [others for others in left.values() if example in others]
                # examples that are not taken yet; every class keeps at least one example to train on
                if len(picked) < count and shows and all(len(others) > 1 for others in shows):
                    picked.append(example)
                    for others in shows:
                        others.remove(example)
            held[group] = torch.tensor(picked, dtype=torch.int64)
        return held

    def spare(self, quota: int) -> int:
        """The number of held-out examples among a class's `quota` examples."""
        return math.ceil(quota / 10) if quota > 1 else 0

    def check_share(self, quota: int) -> None:
        """Refuse a quota that leaves nothing to hold out."""
        if quota < 2:
            raise ConfigError(
                f"{self.title}'s bias correction holds out memory examples: {quota} per class is too few, use 2 or more"
            )
