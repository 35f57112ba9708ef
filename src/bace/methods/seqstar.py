"""SEQ*: sequential learning of heads on an encoder that is frozen after a warm-up.

Zheng, Qiu, Ma, "Learn or Recall? Revisiting Incremental Learning with Pre-trained Language Models", ACL 2024.
"""

from typing import cast

import torch
from torch import Tensor, nn

from bace.core.method import Card, Passes
from bace.core.stage import Loss, Stage
from bace.core.stream import Task
from bace.data.batch import NO_IDS, Batch
from bace.errors import ConfigError
from bace.methods.seq import SEQ
from bace.models.heads import CosineHead, Head, LinearHead
from bace.models.model import Model
from bace.randomness import generator

MOST_FUTURE = 100_000  # rows for future classes


class SEQStar(SEQ):
    """Fine-tune the encoder in the first epochs of the first task, then freeze it. From then on, a task learns only its
    own rows of the head. The rows of earlier tasks are frozen; those of later tasks exist from the start and learn to
    score low.

    Args:
        warmup_epochs: epochs of the first task in which the encoder is fine-tuned; 0 leaves it unchanged.
        warmup_lr: learning rate of the encoder in the warm-up, with AdamW; the head learns at `head_lr`.
        head_epochs: epochs in which the rows of a task are learned, after the warm-up.
        head_lr: learning rate of the head, with AdamW; the run's train.lr and optimiser are not used.
        head_steps: minimum number of steps of these epochs; the epochs are raised to reach it.
        future: number of rows for future classes, which take part in the soft-max before they are needed. Default: as
            many as the stream's later tasks need, which a Learner does not know. Further classes get new rows.
    """

    title = "SEQ*"
    paper = "Zheng et al., Learn or Recall? Revisiting Incremental Learning with Pre-trained Language Models, ACL 2024"
    card = Card(
        mechanism="encoder fine-tuned in a warm-up on the first task, then frozen with the rows of old classes",
        o_rows="O is learned as class 0 with cross-entropy; its row belongs to the first task and is frozen after it",
        stages=("head",),
        reading="The soft-max spans all seen classes. The head is the run's, cosine or linear (`head.kind`); the "
        "authors advise cosine if there is no old data. Its scale is frozen after the first task (the authors' is "
        "always 1: `head.sigma_init=1`, `head.sigma_learn=false`; rows then need more steps). Features are computed "
        "once, in clean views and without dropout. There are as many rows of future classes (`future`) as the stream "
        "will need, as in the authors' runs of SEQ*. The authors use batches of 4 texts, so ten epochs are thousands "
        "of steps (`head_steps`); in a few steps, rows that have learned to score low do not recover. The warm-up uses "
        "the authors' learning rate: at the rate of full fine-tuning, the features of later classes become similar.",
    )

    def __init__(
        self,
        warmup_epochs: int = 3,
        warmup_lr: float = 1e-5,
        head_epochs: int = 10,
        head_lr: float = 1e-3,
        head_steps: int = 1000,
        future: int | None = None,
    ) -> None:
        super().__init__(span="seen")
        if not 0 <= (future or 0) <= MOST_FUTURE:
            raise ConfigError(f"SEQ*: future ({future}) must lie between 0 and {MOST_FUTURE:,}")
        if min(warmup_epochs, head_steps) < 0 or head_epochs < 1 or min(head_lr, warmup_lr) <= 0:
            raise ConfigError(
                f"SEQ*: warmup_epochs ({warmup_epochs}) and head_steps ({head_steps}) must be at least 0, head_epochs "
                f"({head_epochs}) at least 1, head_lr ({head_lr}) and warmup_lr ({warmup_lr}) above 0"
            )
        self.warmup_epochs, self.warmup_lr, self.future = warmup_epochs, warmup_lr, future
        self.head_epochs, self.head_lr, self.head_steps = head_epochs, head_lr, head_steps
        self.cost = Passes(0, task=1, first=1 + 3 * warmup_epochs)
        # the task's rows, ascending, and their features (rows, width), which no longer change
        self.rows, self.features = NO_IDS, torch.zeros(0)

    def needs(self, task: int) -> tuple[int, int]:
        kept, trained = super().needs(task)
        features = len(self.stream.rows_of(self.stream[task].train)[0]) * self.model.encoder.width
        return kept + features, 0 if task else trained

    # -- the head

    def build(self, model: Model) -> Model:
        """The rows of future classes are a head inside the head, so they are trained and saved with it."""
        width, cosine = model.encoder.width, isinstance(model.head, CosineHead)
        rows = CosineHead(width, 1.0, sigma_learn=False) if cosine else LinearHead(width)
        model.head.add_module("future", rows.to(self.stream.device))
        return super().build(model)

    @property
    def future_rows(self) -> Head:
        return cast(Head, self.model.head.get_submodule("future"))

    def grow(self, task: Task) -> None:
        if task.index == 0:
            later = sum(len(other.classes) for other in self.stream[1:]) if self.future is None else self.future
            self.future_rows.grow(later, generator(self.now.seed, "future"))
        super().grow(task)
        head = self.model.head
        if task.index:
            take(self.future_rows, head)
            self.model.encoder.requires_grad_(False)
            head.freeze_old()
            if isinstance(head, CosineHead):
                head.sigma.requires_grad_(False)

    def logits(self, features: Tensor) -> Tensor:  # (rows, width) -> (rows, seen and future classes)
        head = self.model.head
        scale = head.sigma if isinstance(head, CosineHead) else 1.0
        return torch.cat([head(features), scale * self.future_rows(features)], 1)

    def loss(self, batch: Batch) -> Loss:
        return self.cross_entropy(self.logits(self.model(batch).features), batch.targets)

    # -- the stages

    def stages(self, task: Task) -> list[Stage]:
        warmup = self.stage(
            task,
            epochs=self.warmup_epochs,
            optimiser="adamw",
            lr=self.warmup_lr,
            rates={"head": self.head_lr},
        )
        head = self.stage(
            task,
            name="head",
            loss=self.head_loss,
            epochs=self.head_epochs,
            min_steps=self.head_steps,
            module=lambda: self.model.head,
            cached=True,
            optimiser="adamw",
            lr=self.head_lr,
        )
        return [head] if task.index or not self.warmup_epochs else [warmup, head]

    def before_epoch(self, stage: Stage) -> None:
        if stage.name == "head" and not len(self.rows):
            examples = stage.examples().sort().values
            self.rows, self.features = self.stream.labels(examples)[0], self.outputs(examples, logits=False).features

    def head_loss(self, batch: Batch) -> Tensor:
        """CE(z, y) over all seen and future classes, where z = head(f) with fixed f."""
        features = self.features[torch.searchsorted(self.rows, batch.rows)]
        return self.cross_entropy(self.logits(features), batch.targets)

    def after_task(self, task: Task) -> None:
        self.rows, self.features = NO_IDS, torch.zeros(0)


@torch.no_grad()
def take(future: Head, head: Head) -> None:
    """The newest rows of a head take the values of the first future rows, as long as there are any."""
    for parts in ("blocks", "biases"):
        if hasattr(head, parts):
            held, newest = getattr(future, parts), getattr(head, parts)[-1]
            count = min(len(held[0]), len(newest))
            newest[:count] = held[0][:count]
            held[0] = nn.Parameter(held[0][count:].clone())
