"""MTL: joint training on all data so far, the upper bound."""

import torch

from bace.core.method import Card, Method
from bace.core.stage import Stage
from bace.core.stream import Task


class MTL(Method):
    """At every task, start from the pre-trained weights again and train on the data of all tasks so far.

    It holds the licence to read past data, which is logged.

    Args:
        only_last: train once, after the last task; the earlier tasks are then not learned at all.
    """

    title = "MTL"
    paper = "joint (multi-task) training; the standard upper bound, no single origin"
    licence = "past"
    takes_known = True
    card = Card(
        mechanism="joint training on all data so far",
        besides="the new examples are the data of all tasks so far",
        o_rows="O is learned as class 0 with cross-entropy",
        reading="Training starts from the pre-trained weights at every task and takes as many epochs as for one task.",
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
