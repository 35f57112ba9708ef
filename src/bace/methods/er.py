"""ER: experience replay. Chaudhry et al., "On Tiny Episodic Memories in Continual Learning", 2019."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from bace.core.method import Card, Loss, Method, Passes, Stage
from bace.core.stream import Task
from bace.data.batch import Batch


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
    cost = Passes(3, 3, task=1)
    card = Card(
        mechanism="replay",
        o_rows="class 0 under cross-entropy; in replayed sentences so too, or left out (`train.replay_o`)",
        replay="batch",
        reading="herded memory, a separate batch from it, sum of two means (`mode`, `reduction`: the other ways; "
        "authors: `joint`); methods built on it double their other terms with it, so that these keep their published "
        "weight beside the cross-entropy",
    )

    def __init__(self, mode: Literal["batch", "concat"] = "batch", reduction: Literal["sum", "joint"] = "sum") -> None:
        super().__init__()
        self.mode, self.reduction = mode, reduction

    def stages(self, task: Task) -> list[Stage]:
        if self.mode == "batch":
            return [self.stage(task)]
        union = torch.cat([self.trained(task), self.memory.examples])
        return [self.stage(task, batch_size=self.batch_size, examples=lambda: union)]

    def loss(self, batch: Batch) -> Loss:
        both = self.with_replay(batch)
        return self.cross_entropy(self.model(both).logits, both.targets, len(batch))

    def with_replay(self, batch: Batch) -> Batch:
        """The batch, and behind it the examples replayed with it."""
        return Batch.cat(batch, self.replay() if self.mode == "batch" else None)

    def cross_entropy(self, logits: Tensor, targets: Tensor, new: int) -> dict[str, Tensor]:
        """Of the first `new` rows, and of the replayed ones behind them, where they are labelled."""
        labelled = self.labelled(targets, new)
        logits, targets, new = logits[labelled], targets[labelled], int(labelled[:new].sum())
        parts = self.parts(new, len(targets))
        return {name: self.criterion(logits[rows], targets[rows]) for name, rows in parts.items()}

    def criterion(self, logits: Tensor, targets: Tensor) -> Tensor:  # (rows, classes), (rows,) -> ()
        """The classification loss: a mean over rows."""
        return F.cross_entropy(logits, targets)

    def parts(self, new: int, rows: int) -> dict[str, slice]:
        """Of `rows` rows, `new` of them new: those that a mean is taken over, for each term of the loss; what has no
        rows has no term."""
        parts = {"new": slice(new), "replay": slice(new, rows)} if self.reduction == "sum" else {"new": slice(rows)}
        return {name: part for name, part in parts.items() if part.stop > (part.start or 0)}

    def count_means(self, new: int, rows: int) -> int:
        """How many means the cross-entropy is the sum of. A published loss is one mean over the batch, and the weights
        of its other terms are relative to that: each of these that is one mean, of whatever rows, is multiplied by this
        number, or the sum of two means would halve its weight."""
        return len(self.parts(new, rows))
