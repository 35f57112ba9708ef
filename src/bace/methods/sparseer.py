"""Sparse-ER: sparse experience replay. De Masson d'Autume, Ruder, Kong, Yogatama, "Episodic Memory in Lifelong Language
Learning", NeurIPS 2019, where it is called REPLAY."""

from collections.abc import Iterable

import torch
from torch import Tensor

from bace.core.method import Card, Method, Passes
from bace.core.stage import Stage
from bace.core.stream import Task
from bace.data.batch import Batch
from bace.errors import ConfigError


class SparseER(Method):
    """Fine-tune on new data and only rarely take an additional step on a whole batch from memory.

    Args:
        every: steps on new data between two steps on memory, counted across tasks from the first task with a memory on;
            100 is the original's rate of 1 %. 0 gives SEQ.
    """

    title = "Sparse-ER"
    paper = "De Masson d'Autume et al., Episodic Memory in Lifelong Language Learning, NeurIPS 2019"
    uses_memory = True
    cost = Passes(3, task=1)
    card = Card(
        mechanism="replay in one step of a hundred",
        besides="one additional step in a hundred",
        o_rows="O is learned as class 0 with cross-entropy, also in replayed sentences",
        reading="The memory is herded, stays within the budget and is filled at the end of a task (the original keeps "
        "all examples). A memory step is as large as a batch and comes after the step on new data. Steps are counted "
        "across tasks, as in the original's stream without boundaries, so that short tasks are also followed by "
        "replay.",
    )

    taken: Tensor  # () steps on new data since the memory was first filled

    def __init__(self, every: int = 100) -> None:
        super().__init__()
        self.replay_every(every)
        self.register_buffer("taken", torch.zeros((), dtype=torch.int64))

    def replay_every(self, steps: int) -> None:
        if steps < 0:
            raise ConfigError(f"{self.title}: every ({steps}) must be at least 0")
        self.every = steps

    def stages(self, task: Task) -> list[Stage]:
        return [self.stage(task, batch_size=self.batch_size)]  # whole batches of new data

    def expand(self, batch: Batch) -> Iterable[Batch]:
        yield batch
        if not self.replay_size:
            return
        self.taken += 1
        if int(self.taken) % self.every == 0 and (replay := self.replay()) is not None:
            yield replay

    @property
    def replay_size(self) -> int:
        """The loss of a step on memory."""
        return self.batch_size if self.every and len(self.memory) else 0
