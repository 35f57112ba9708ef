"""ROW: replay, out-of-distribution detection and within-task prediction. Kim, Xiao, Konishi, Liu, "Learnability and
Algorithm for Continual Learning", ICML 2023.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from bace.core.method import Card, Passes
from bace.core.stage import Stage
from bace.core.stream import Task
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.more import MORE
from bace.models.heads import LinearHead
from bace.models.model import Model
from bace.randomness import generator


class ROW(MORE):
    """Use MORE's features with two heads per task: one predicts within the task, the other separates the task from all
    others. The score of a class is the product of both and of the relative nearness of its task.

    Args:
        smax: the steepest slope of the gates; in training the slope rises from 1 / smax to smax.
        anneal: as in HAT: the slope rises once over the `stage`, or within every `epoch`.
        gate_steps: as in HAT: gates move as far as they would in at least this many steps.
        lamb: weight of the sparsity of the gates; 0 leaves it out.
        temperature: temperature of the heads' soft-max at prediction.
        wp_epochs: epochs in which a task's head is fine-tuned for prediction within the task.
        tp_epochs: epochs in which each task's other head is fine-tuned after every task.
        head_batch: examples per step of these two stages; the second adds as many examples of other tasks.
        latent: hidden units of the adapters, if the backbone has none (backbone.adapter).
        lr: learning rate of everything that is trained; default: the run's.
    """

    paper = "Kim et al., Learnability and Algorithm for Continual Learning, ICML 2023"
    cost = Passes(3, 3, task=3)
    card = Card(
        mechanism="HAT with an out-of-distribution class; heads within and between tasks; Mahalanobis weights",
        besides="prediction takes one pass and the distances for each task; heads train on cached features",
        o_rows="refused: O belongs to no task, and the heads of single tasks cannot tell which task a word belongs to",
        stages=("main", "wp", "..."),
        reading="MORE's reading applies. Heads are trained on features of clean views. The pool takes the smallest "
        "count of any class from each class.",
    )

    def __init__(
        self,
        smax: float = 500.0,
        lamb: float = 0.75,
        temperature: float = 5.0,
        wp_epochs: int = 5,
        tp_epochs: int = 10,
        head_batch: int = 32,
        latent: int = 64,
        lr: float | None = None,
        anneal: Literal["stage", "epoch"] = "stage",
        gate_steps: int = 3140,
    ) -> None:
        super().__init__(smax, lamb, temperature, True, 0, latent, lr, anneal, gate_steps)
        if min(wp_epochs, tp_epochs) < 0 or head_batch < 1:
            raise ConfigError(
                f"ROW: wp_epochs ({wp_epochs}) and tp_epochs ({tp_epochs}) must be at least 0, head_batch "
                f"({head_batch}) at least 1"
            )
        self.wp_epochs, self.tp_epochs, self.head_batch = wp_epochs, tp_epochs, head_batch

    # -- two heads per task

    def build(self, model: Model) -> Model:
        self.tp = LinearHead(model.encoder.width)
        return super().build(model)

    def grow(self, task: Task) -> None:
        super().grow(task)
        self.tp.grow(self.head.sizes[-1], generator(self.now.seed, "tp", task.index))  # `start_tp` fills in values

    def stages(self, task: Task) -> list[Stage]:
        stages = super().stages(task)
        if not task.index:
            return stages
        within = self.head_stage(
            "wp", task.index, self.head, lambda: self.training_examples(task), self.wp_epochs, self.head_batch
        )
        if not self.extra:
            return [*stages, within]
        between = [self.tp_stage(task, p) for p in (task.index, *self.memory.task.unique().tolist())]
        between[0].prepare = lambda: self.start_tp(task)
        return [*stages, within, *between]

    def tp_stage(self, task: Task, p: int) -> Stage:
        """Train TP_p on the pool, in every step on equally many examples of task p and of all other tasks."""
        own, others = (lambda side=side: self.sides(task, p)[side] for side in (0, 1))
        return self.head_stage(f"tp {p + 1}", p, self.tp, own, self.tp_epochs, self.head_batch, others=others)

    def sides(self, task: Task, p: int) -> tuple[Tensor, Tensor]:  # (examples,) ids, (examples,) ids
        """The examples of task p in the pool, and all other examples in it."""
        pool = self.pool(task)
        own = self.local(p, self.stream.labels(pool)[1]) < len(self.stream[p].classes)
        return pool[own], pool[~own]

    def start_tp(self, task: Task) -> None:
        """TP_t starts as a copy of head t. The first task's TP does so when the second task is learned."""
        for p in (0, 1) if task.index == 1 else (task.index,):
            for mine, its in zip(self.tp.of(p), self.head.of(p), strict=True):
                mine.data.copy_(its.data)

    # -- prediction

    @torch.inference_mode()
    def predict(self, batch: Batch, scorer: str | None = None) -> Tensor:
        """WP x TP x nearness: softmax(z_t / T) over the task's own columns, max_y softmax(TP_t(h) / T)_y over the
        same columns but normalised with the last one, and max_y 1 / MD normalised over the tasks."""
        passes = self.passes(batch)
        near = torch.cat([self.nearness(t, out.features) for t, out in enumerate(passes)], 1)
        near = near / near.sum(1, keepdim=True)  # (rows, tasks)
        scores = []
        for t, out in enumerate(passes):
            own = len(self.stream[t].classes)
            within = F.softmax(out.logits[:, :own] / self.temperature, 1)
            scores.append(within * near[:, [t]])
            if self.extra and len(passes) > 1:  # a single task has no other task to be separated from
                between = self.logits_of(t, self.tp(out.features)) / self.temperature
                scores[-1] = scores[-1] * F.softmax(between, 1)[:, :own].amax(1, keepdim=True)
        return torch.cat(scores, 1)
