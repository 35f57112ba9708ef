"""ER: experience replay. Chaudhry et al., "On Tiny Episodic Memories in Continual Learning", 2019."""

import torch
import torch.nn.functional as F
from torch import Tensor

from bace.core.method import Card, Method, Passes
from bace.core.stage import Loss, Stage
from bace.core.stream import Task
from bace.data.batch import Batch
from bace.methods.parts.replay import Mode, Reduction, Replay


class ER(Method):
    """Mix stored old examples into every step.

    Methods built on ER also take these two settings.

    Args:
        mode: `batch`: a separate batch from memory at each step; `concat`: the memory is shuffled into the task's
            data (as in FACIL and PyCIL; far weaker with a small memory).
        reduction: `sum`: mean over the new rows + mean over the replayed ones; `joint`: one mean over both.
    """

    title = "ER"
    paper = "Chaudhry et al., On Tiny Episodic Memories in Continual Learning, 2019"
    uses_memory = True
    cost = Passes(3, 3, task=1)
    takes_known = True
    card = Card(
        mechanism="replay",
        o_rows="O is learned as class 0 with cross-entropy, also in replayed sentences",
        replay="batch",
        reading="The memory is herded. A separate batch is drawn from it at each step, and the loss is a sum of two "
        "means. `mode` and `reduction` offer the alternatives; the authors use `joint`. Methods built on ER multiply "
        "their other terms by two in this case, so that these keep their published weight relative to the "
        "cross-entropy.",
    )

    def __init__(self, mode: Mode = "batch", reduction: Reduction = "sum") -> None:
        super().__init__()
        self.policy = Replay(mode, reduction)

    def stages(self, task: Task) -> list[Stage]:
        if self.policy.mode == "batch":
            return [self.stage(task)]
        union = torch.cat([self.training_examples(task), self.memory.examples])
        return [self.stage(task, batch_size=self.batch_size, examples=lambda: union)]

    def loss(self, batch: Batch) -> Loss:
        both = self.with_replay(batch)
        return self.cross_entropy(self.model(both).logits, both, len(batch))

    def with_replay(self, batch: Batch) -> Batch:
        """The batch, followed by the examples that are replayed with it."""
        return Batch.cat(batch, self.replay() if self.policy.mode == "batch" else None)

    def cross_entropy(self, logits: Tensor, batch: Batch, new: int, targets: Tensor | None = None) -> dict[str, Tensor]:
        """The cross-entropy of the first `new` rows of a batch and of the replayed rows after them, where they are
        labelled; `targets` may be others than the batch's."""
        labelled = self.labelled(self.labels(batch), new)
        targets = batch.targets if targets is None else targets
        logits, targets, new = logits[labelled], targets[labelled], int(labelled[:new].sum())
        parts = self.policy.parts(new, len(targets))
        return {name: self.criterion(logits[rows], targets[rows]) for name, rows in parts.items()}

    def count_means(self, batch: Batch, new: int) -> int:
        """The number of means in `cross_entropy` for these rows (see Replay.count_means)."""
        labelled = self.labelled(self.labels(batch), new)
        return self.policy.count_means(int(labelled[:new].sum()), int(labelled.sum()))

    def criterion(self, logits: Tensor, targets: Tensor) -> Tensor:  # (rows, classes), (rows,) -> ()
        """The classification loss: a mean over rows."""
        return F.cross_entropy(logits, targets)
