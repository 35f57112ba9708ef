"""SEQ*: sequential learning of heads on an encoder that is frozen after a warm-up.

Zheng, Qiu, Ma, "Learn or Recall? Revisiting Incremental Learning with Pre-trained Language Models", ACL 2024.
"""

import torch
from torch import Tensor

from bace.core.method import Card, Passes
from bace.core.stage import Stage
from bace.core.stream import Task
from bace.data.batch import NO_IDS, Batch
from bace.errors import ConfigError
from bace.methods.seq import SEQ
from bace.models.heads import CosineHead


class SEQStar(SEQ):
    """Fine-tune the encoder in the first epochs of the first task and freeze it for good. A task then learns nothing
    but its own rows of the head, beside the rows of earlier tasks, which are frozen too.

    Args:
        warmup_epochs: epochs in which the encoder is fine-tuned, of the first task alone; 0: it stays as it is.
        head_epochs: epochs in which the rows of a task are learned after that.
        head_lr: learning rate of that, with AdamW.
    """

    title = "SEQ*"
    paper = "Zheng et al., Learn or Recall? Revisiting Incremental Learning with Pre-trained Language Models, ACL 2024"
    cost = Passes(0, task=1)
    card = Card(
        mechanism="encoder fine-tuned in a warm-up on the first task, then frozen with the rows of old classes",
        besides="the first task: 3 new in each epoch of its warm-up",
        o_rows="O is learned as class 0 with cross-entropy; its row belongs to the first task and is frozen after it",
        stages=("head",),
        reading="The soft-max spans all seen classes. The head is the run's, cosine or linear (`head.kind`); the "
        "authors advise cosine if there are no old data. Its scale is frozen after the first task (theirs is 1 "
        "throughout: `head.sigma_init=1`, `head.sigma_learn=false`; rows then need more steps). Features are computed "
        "once, in clean views and without dropout. Rows of future classes are not allocated (the authors' option), "
        "because their number is unknown.",
    )

    def __init__(self, warmup_epochs: int = 3, head_epochs: int = 10, head_lr: float = 1e-3) -> None:
        super().__init__(span="seen")
        if warmup_epochs < 0 or head_epochs < 1 or head_lr <= 0:
            raise ConfigError(
                f"SEQ*: warmup_epochs ({warmup_epochs}) must be at least 0, head_epochs ({head_epochs}) at least 1 and "
                f"head_lr ({head_lr}) above 0"
            )
        self.warmup_epochs, self.head_epochs, self.head_lr = warmup_epochs, head_epochs, head_lr
        # the task's rows, ascending, and their features (rows, width), which no longer change
        self.rows, self.features = NO_IDS, torch.zeros(0)

    def needs(self, task: int) -> tuple[int, int]:
        kept, trained = super().needs(task)
        features = len(self.stream.rows_of(self.stream[task].train)[0]) * self.model.encoder.width
        return kept + features, 0 if task else trained

    def grow(self, task: Task) -> None:
        super().grow(task)
        head = self.model.head
        if task.index:
            self.model.encoder.requires_grad_(False)
            head.freeze_old()
            if isinstance(head, CosineHead):
                head.sigma.requires_grad_(False)

    def stages(self, task: Task) -> list[Stage]:
        warmup = self.stage(task, epochs=self.warmup_epochs)
        head = self.stage(
            task,
            name="head",
            loss=self.head_loss,
            epochs=self.head_epochs,
            module=lambda: self.model.head,
            cached=True,
            optimiser="adamw",
            lr=self.head_lr,
        )
        return [head] if task.index or not self.warmup_epochs else [warmup, head]

    def before_epoch(self, stage: Stage) -> None:
        if stage.name == "head" and not len(self.rows):
            examples = stage.examples().sort().values
            self.rows, self.features = self.stream.labels(examples)[0], self.outputs(examples).features

    def head_loss(self, batch: Batch) -> Tensor:
        """CE(z, y) over all seen classes, where z = head(f) with fixed f."""
        features = self.features[torch.searchsorted(self.rows, batch.rows)].to(batch.targets.device)
        return self.cross_entropy(self.model.head(features), batch.targets)

    def after_task(self, task: Task) -> None:
        self.rows, self.features = NO_IDS, torch.zeros(0)
