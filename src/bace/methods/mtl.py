"""MTL: joint training on everything seen so far, the upper bound."""

import torch

from bace.core.method import Card, Method, Stage
from bace.core.stream import Task


class MTL(Method):
    """At every task, start from the pre-trained weights again and train on the data of all tasks so far.

    Holds the licence to read past data, which is logged.

    Args:
        only_last: train once, after the last task; the tasks before it are then not learned at all.
    """

    title = "MTL"
    paper = "joint (multi-task) training; the standard upper bound, no single origin"
    licence = "past"
    card = Card(
        mechanism="joint training on all data so far",
        besides="all tasks' data so far are the new examples",
        o_rows="class 0 under cross-entropy",
        reading="from the pre-trained weights at every task, with one task's epochs",
    )

    def __init__(self, only_last: bool = False) -> None:
        super().__init__()
        self.only_last = only_last

    def grow(self, task: Task) -> None:
        self.start_over(task)

    def stages(self, task: Task) -> list[Stage]:
        if self.only_last and task.index < len(self.stream) - 1:
            return []
        everything = torch.cat([earlier.train for earlier in self.stream[: task.index + 1]])
        return [self.stage(task, examples=lambda: everything)]
