"""ACIL: analytic class-incremental learning.

Zhuang, Weng, Wei, Xie, Toh, Lin, "ACIL: Analytic Class-Incremental Learning with Absolute Memorization and Privacy
Protection", NeurIPS 2022.
"""

import dataclasses
import math

import torch
from torch import Tensor

from bace.core.method import Card
from bace.core.stage import Stage
from bace.core.stream import Task
from bace.data.batch import Batch
from bace.errors import ConfigError, TrainingError
from bace.methods.parts.one_pass import OnePass
from bace.methods.parts.ridge import one_hot, without
from bace.models.model import Model
from bace.randomness import generator


class ACIL(OnePass):
    """Freeze the encoder, expand its features at random, and regress the classes on them by recursive least squares.
    After every batch the solution equals ridge regression on all data so far.

    Args:
        expansion: number of random features; the method keeps a matrix of expansion^2 numbers in double precision.
        gamma: weight of the ridge.
    """

    title = "ACIL"
    paper = (
        "Zhuang et al., ACIL: Analytic Class-Incremental Learning with Absolute Memorization and Privacy Protection, "
        "NeurIPS 2022"
    )
    takes_known = True
    cannot_forget = "its matrix R is made of the products of all examples, and the share of one class is not known"
    card = Card(
        mechanism="frozen encoder; random features, ridge regression by recursive least squares",
        besides="expansion^2 numbers (`expansion`), which every batch updates",
        o_rows="O is class 0 in every task, so the order of tasks does not matter; hidden entities count as O",
        reading="There is one pass over clean views, whatever the number of epochs. The encoder is the pre-trained one "
        "(the authors train a network on the first half of the classes). Random features follow the authors' code: "
        "ReLU(f B) with B uniform in ±1/sqrt(width) and no bias. `gamma` is the authors'; for features with norms as "
        "large as a ViT's it is too small where there are about as many examples as random features (docs/results.md).",
    )

    projection: Tensor  # (width, expansion) B
    R: Tensor  # (expansion, expansion) (X^T X + gamma I)^-1 over all rows X so far
    weight: Tensor  # (expansion, classes) W; all in double precision

    def __init__(self, expansion: int = 8192, gamma: float = 0.1) -> None:
        super().__init__()
        if expansion < 1 or gamma <= 0:
            raise ConfigError(f"ACIL: expansion ({expansion}) must be at least 1 and gamma ({gamma}) above 0")
        self.expansion, self.gamma = expansion, gamma

    def build(self, model: Model) -> Model:
        width, device = model.encoder.width, self.stream.device
        drawn = torch.rand(width, self.expansion, generator=generator(self.now.seed, "expansion"), dtype=torch.float64)
        identity = torch.eye(self.expansion, dtype=torch.float64, device=device)
        self.register_buffer("projection", ((2 * drawn - 1) / math.sqrt(width)).to(device))
        self.register_buffer("R", identity / self.gamma)  # R = I / gamma
        self.register_buffer("weight", identity[:, :0].clone())
        return super().build(model)

    def needs(self, task: int) -> tuple[int, int]:
        kept, trained = super().needs(task)
        # in double precision: R, and also the next R while a batch updates it
        return kept + 2 * (2 * self.expansion**2 + self.projection.numel()), trained

    def grow(self, task: Task) -> None:
        """New classes append columns of zeros."""
        self.weight = torch.cat([self.weight, self.weight.new_zeros(self.expansion, len(task.classes))], 1)

    def stages(self, task: Task) -> list[Stage]:
        """Batches are large, because each of them rewrites R."""
        [stage] = super().stages(task)
        return [dataclasses.replace(stage, batch_size=max(self.batch_size, self.training_settings.eval_batch_size))]

    def observe(self, x: Tensor, y: Tensor) -> None:  # (rows, width), (rows,)
        X, Y = self.expanded(x), one_hot(y.to(x.device), self.weight.shape[1])
        self.R = without(self.R, X.T, 1.0)  # R <- R - R X^T (I + X R X^T)^-1 X R
        self.weight += self.R @ (X.T @ (Y - X @ self.weight))  # W <- W + R X^T (Y - X W)

    def after_epoch(self, stage: Stage) -> None:
        if not bool(self.weight.isfinite().all()):
            raise TrainingError(f"ACIL: rounding has destroyed the matrix R: raise gamma (now {self.gamma:g}).")

    def expanded(self, x: Tensor) -> Tensor:  # (rows, width) -> (rows, expansion)
        return torch.relu(x @ self.projection)

    def predict(self, batch: Batch, scorer: str | None = None) -> Tensor:  # (rows, seen)
        """X W; a class without examples, whose column is 0, is never predicted."""
        scores = self.expanded(self.features(batch)) @ self.weight
        return scores.masked_fill(~self.weight.any(0), -torch.inf)
