"""ER: experience replay. Chaudhry et al., "On Tiny Episodic Memories in Continual Learning", 2019."""

from typing import Literal

import torch
import torch.nn.functional as F

from bace.method import Loss, Method, Stage
from bace.stream import Batch, Task


class ER(Method):
    """Mix stored old examples into every step.

    Args:
        mode: `batch`: a separate batch from memory at each step; `concat`: the memory is shuffled into the task's
            data (FACIL's and PyCIL's way, far weaker with a small memory).
        reduction: `sum`: mean over the new rows + mean over the replayed ones; `joint`: one mean over both.
    """

    title = "ER"
    paper = "Chaudhry et al., On Tiny Episodic Memories in Continual Learning, 2019"
    uses_memory = True

    def __init__(self, mode: Literal["batch", "concat"] = "batch", reduction: Literal["sum", "joint"] = "sum") -> None:
        super().__init__()
        self.mode, self.reduction = mode, reduction

    def stages(self, task: Task) -> list[Stage]:
        if self.mode == "batch":
            return [self.stage(task)]
        union = torch.cat([task.train, self.memory.examples])
        return [self.stage(task, batch_size=self.batch_size, examples=lambda: union)]

    def loss(self, batch: Batch) -> Loss:
        replay = self.replay() if self.mode == "batch" else None
        both = Batch.cat(batch, replay)
        logits = self.model(both).logits
        if replay is None or self.reduction == "joint":
            return F.cross_entropy(logits, both.targets)
        new, old = logits.split([len(batch), len(replay)])
        return {"new": F.cross_entropy(new, batch.targets), "replay": F.cross_entropy(old, replay.targets)}
