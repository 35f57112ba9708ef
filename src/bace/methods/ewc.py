"""EWC: elastic weight consolidation. Kirkpatrick et al., "Overcoming catastrophic forgetting in neural networks",
PNAS 2017."""

import math
import warnings
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from bace.core.method import Card, Passes
from bace.core.stage import Loss
from bace.core.stream import Task
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.parts.fisher import fisher_diagonal
from bace.methods.seq import SEQ


class EWC(SEQ):
    """Pull each parameter towards its last value; the more earlier tasks depend on it (Fisher information), the harder.

    Args:
        lambda_ewc: weight of the penalty; 0 gives SEQ. The default, BaCE's 5000, has almost no effect on digits.
        fisher_samples: maximum number of a task's rows (images, texts, words), drawn at random, for its Fisher
            information.
        max_pull: a step of SGD moves a parameter back by lambda F lr of its distance from its old value, and from 2
            on it would diverge. Where this exceeds `max_pull`, F is cut, with a warning; 0 means never.
        span: the classes of the cross-entropy: only the `new` ones, or all `seen` so far.
    """

    paper = "Kirkpatrick et al., Overcoming Catastrophic Forgetting in Neural Networks, 2017"
    networks = 3  # the weights, those of the last task, and their Fisher information
    cost = Passes(3, task=3)
    cannot_forget = "its Fisher information is a mean over all classes"
    card = Card(
        mechanism="quadratic penalty on changed parameters, weighted by their Fisher information",
        besides="the 3 passes over the task cover at most `fisher_samples` rows",
        o_rows="O is learned as class 0 with cross-entropy, in training and in the Fisher information (one gradient "
        "per word)",
        reading="The Fisher information uses true labels and one gradient per row. It is merged as (F + t F_old) / (t "
        "+ 1), and the penalty has a factor of 1/2. F is cut where a step of SGD would overshoot (`max_pull`). The "
        "cross-entropy spans the new classes, as in FACIL and PyCIL; with `span=seen` it spans all seen classes, "
        "which gives SEQ's level. BaCE's lambda of 5000 has almost no effect: on digits (3 seeds) A_last is 54.6 ± "
        "8.1, compared with 52.1 ± 7.1 for SEQ(span=new); 1e5 gives 63.4 ± 4.9.",
    )

    def __init__(
        self,
        lambda_ewc: float = 5000.0,
        fisher_samples: int = 2000,
        max_pull: float = 1.0,
        span: Literal["seen", "new"] = "new",
    ) -> None:
        super().__init__(span)
        self.lambda_ewc, self.fisher_samples, self.max_pull = lambda_ewc, fisher_samples, max_pull
        if lambda_ewc < 0 or fisher_samples < 1 or max_pull < 0:
            raise ConfigError(
                f"EWC: lambda_ewc ({lambda_ewc}) and max_pull ({max_pull}) must be at least 0, fisher_samples "
                f"({fisher_samples}) at least 1"
            )
        self.anchored: list[str] = []  # names of the parameters under the penalty
        self.anchor: Tensor  # (entries,) theta*: all of these, concatenated, after the last task
        self.fisher: Tensor  # (entries,)
        self.register_buffer("anchor", torch.zeros(0))
        self.register_buffer("fisher", torch.zeros(0))

    def grow(self, task: Task) -> None:
        self.anchored = list(self.trainable())  # before the head grows, so the rows of new classes are free
        super().grow(task)

    def loss(self, batch: Batch) -> Loss:
        """L = CE(z, y; K) + lambda/2 sum_i F_i (theta_i - theta*_i)^2."""
        terms = {"new": self.cross_entropy(self.model(batch).logits, batch.targets)}
        if self.lambda_ewc and len(self.fisher):
            trainable = self.trainable()
            moved = in_a_row(trainable[name] for name in self.anchored) - self.anchor
            terms["penalty"] = self.lambda_ewc / 2 * (self.fisher.clamp(max=self.largest) * moved.square()).sum()
        return terms

    def after_task(self, task: Task) -> None:
        super().after_task(task)
        if not self.lambda_ewc:
            return
        rows, _ = self.stream.labels(self.training_examples(task))
        rows = rows[torch.randperm(len(rows), generator=self.now.rng("fisher"))[: self.fisher_samples]]
        fisher, t = fisher_diagonal(self.model, self.stream, rows, self.cross_entropy), task.index
        before: dict[str, Tensor] = {}
        if t:
            sizes = [fisher[name].numel() for name in self.anchored]
            before = dict(zip(self.anchored, self.fisher.split(sizes), strict=True))
        # F <- (F_t + t F) / (t + 1), where F was 0 for the rows of new classes
        self.fisher = in_a_row((f.flatten() + t * before.get(name, 0.0)) / (t + 1) for name, f in fisher.items())
        self.anchor = in_a_row(self.trainable().values()).detach()
        self.warn()

    @property
    def largest(self) -> float:
        """F is cut to this value. AdamW needs no cut, because its steps do not grow with the gradient."""
        train = self.training_settings
        rate = max(train.lr, train.head_lr or 0.0)
        if train.optimiser != "sgd" or not self.max_pull or not rate:
            return math.inf
        return self.max_pull / (self.lambda_ewc * rate)

    def warn(self) -> None:
        cut = int((self.fisher > self.largest).sum())
        if cut:
            pull = self.max_pull * float(self.fisher.max()) / self.largest
            warnings.warn(
                f"EWC: after task {self.now.task + 1} lambda F lr is up to {pull:.3g}, so a step of SGD would "
                f"overshoot. F is cut to {self.max_pull:g} / (lambda lr) for {cut} of {len(self.fisher)} parameters. "
                "With a lower train.lr or lambda_ewc no cut is needed.",
                stacklevel=2,
            )

    def trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}


def in_a_row(tensors: Iterable[Tensor]) -> Tensor:  # (entries,)
    return torch.cat([tensor.flatten() for tensor in tensors])
