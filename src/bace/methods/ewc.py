"""EWC: elastic weight consolidation. Kirkpatrick et al., "Overcoming catastrophic forgetting in neural networks",
PNAS 2017."""

import math
import warnings
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from bace.core.method import Card, Loss, Passes
from bace.core.stream import Task
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.parts.fisher import fisher_diagonal
from bace.methods.seq import SEQ


class EWC(SEQ):
    """Tie each parameter to its last value, the tighter the more the earlier tasks depend on it (Fisher information).

    Args:
        lambda_ewc: weight of the penalty; 0 leaves SEQ. BaCE's 5000, the default, barely acts on the digits.
        fisher_samples: at most so many rows of a task (images, texts, words), drawn at random, make its Fisher
            information.
        max_pull: a step of SGD takes a parameter back by lambda F lr of its way from its old value; from 2 on it
            would diverge. F is cut, with a warning, where this is above `max_pull`; 0: never cut.
        span: the classes of the cross-entropy: only the `new` ones, or all `seen` so far.
    """

    paper = "Kirkpatrick et al., Overcoming Catastrophic Forgetting in Neural Networks, 2017"
    networks = 3  # the weights, those of the last task, and how much each matters
    cost = Passes(3, task=3)
    card = Card(
        mechanism="quadratic penalty on moved parameters, weighted by their Fisher information",
        besides="the task's 3 are of at most `fisher_samples` rows",
        o_rows="class 0 under cross-entropy, in training and in the Fisher information (a gradient per word)",
        reading="true labels, a gradient per row; merged as (F + t F_old) / (t + 1); factor 1/2; F cut where a step "
        "of SGD would overshoot (`max_pull`); cross-entropy over the new classes, as FACIL and PyCIL have it "
        "(`span=seen`: over all, which is SEQ's level). BaCE's lambda of 5000 barely acts: digits, 3 seeds, A_last "
        "54.6 ± 8.1 against 52.1 ± 7.1 of SEQ(span=new); 1e5 gives 63.4 ± 4.9",
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
        self.anchor: Tensor  # (entries,) theta*: all of these in a row, as the last task left them
        self.fisher: Tensor  # (entries,)
        self.register_buffer("anchor", torch.zeros(0))
        self.register_buffer("fisher", torch.zeros(0))

    def grow(self, task: Task) -> None:
        self.anchored = list(self.trainable())  # before the head grows: the rows of new classes are free
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
        rows, _ = self.stream.labels(self.trained(task))
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
        """F is cut to it. Not with AdamW, whose steps do not grow with the gradient."""
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
                f"EWC: after task {self.now.task + 1} lambda F lr is up to {pull:.3g}, so that a step of SGD would "
                f"overshoot: F is cut to {self.max_pull:g} / (lambda lr) for {cut} of {len(self.fisher)} parameters. "
                "A lower train.lr or lambda_ewc needs no cut.",
                stacklevel=2,
            )

    def trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}


def in_a_row(tensors: Iterable[Tensor]) -> Tensor:  # (entries,)
    return torch.cat([tensor.flatten() for tensor in tensors])
