"""RanPAC: random projections and pre-trained models for continual learning.

McDonnell, Gong, Parvaneh, Abbasnejad, van den Hengel, "RanPAC: Random Projections and Pre-trained Models for Continual
Learning", NeurIPS 2023.
"""

import torch
from torch import Tensor

from bace.core.method import Card, Passes
from bace.core.stage import Stage
from bace.core.stream import Task
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.parts.one_pass import OnePass
from bace.methods.parts.ridge import add_products, choose_lambda, one_hot, ridge_solution
from bace.methods.parts.tuning import begin_tuning, check_tuning, local_validation_loss, tuning_stage
from bace.models.model import Model
from bace.models.parallel_adapters import ParallelAdapters
from bace.randomness import generator


class RanPAC(OnePass):
    """Tune adapters on the first task and freeze them. In every task expand the features at random, add up their
    products with each other and with the classes, and solve a ridge regression whose strength is chosen on the task.

    Args:
        M: number of random features; the method keeps a matrix of M^2 numbers in double precision (10000: 800 MB). 0
            uses the encoder's own features.
        ridge: strength of the ridge. Default: the strength from 10^-8 to 10^8 with the lowest squared error on a fifth
            of the task's examples, solved on the others.
        adapt: tune adapters on the first task; otherwise the encoder is not changed.
        hidden: units in the bottleneck of an adapter.
        tune_epochs: epochs of the tuning.
        tune_lr: learning rate of the tuning.
        tune_batch: examples per step of the tuning.
    """

    title = "RanPAC"
    paper = "McDonnell et al., RanPAC: Random Projections and Pre-trained Models for Continual Learning, NeurIPS 2023"
    cannot_forget = "its matrix G is the sum of the products of all examples, and the share of one class is not known"
    card = Card(
        mechanism="adapters tuned on the first task; random features, ridge regression on sums over all tasks",
        besides="M^2 numbers (`M`); once per task a solution of M equations",
        o_rows="O is class 0 in every task, so the order of tasks does not matter; hidden entities count as O",
        stages=("main",),
        reading="Adapters beside the MLPs and a cosine head are tuned as in APER. There is one pass over clean views, "
        "whatever the number of epochs. We use double precision (in the authors' single precision, small ridges are "
        "lost in rounding). The ridge is chosen on the task alone, as published: with few examples it can be too small "
        "for the sums over all tasks.",
    )

    adapters: ParallelAdapters | None
    projection: Tensor  # (width, M) W ~ N(0, 1); (0, 0) without
    G: Tensor  # (M, M) sum of H^T H
    Q: Tensor  # (M, classes) sum of H^T Y
    weight: Tensor  # (M, classes) (G + lambda I)^-1 Q
    lam: Tensor  # () lambda, as chosen on the last task
    x: Tensor  # (rows, width) of the current task, until all are collected
    y: Tensor  # (rows,)

    def __init__(
        self,
        M: int = 10000,
        ridge: float | None = None,
        adapt: bool = True,
        hidden: int = 64,
        tune_epochs: int = 20,
        tune_lr: float = 0.01,
        tune_batch: int = 48,
    ) -> None:
        super().__init__()
        check_tuning(self.title, tune_epochs, tune_lr, tune_batch)
        if M < 0 or (ridge is not None and ridge <= 0):
            raise ConfigError(f"RanPAC: M ({M}) must be at least 0 and ridge ({ridge}) above 0")
        self.M, self.ridge, self.adapt, self.hidden = M, ridge, adapt, hidden
        self.cost = Passes(0, task=1, first=1 + 3 * tune_epochs * adapt)
        self.tune_epochs, self.tune_lr, self.tune_batch = tune_epochs, tune_lr, tune_batch
        self.own_batch = tune_batch if adapt else 0

    def build(self, model: Model) -> Model:
        self.adapters = ParallelAdapters(model.encoder, self.hidden) if self.adapt else None
        width, device = model.encoder.width, self.stream.device
        drawn = torch.randn(width, self.M, generator=generator(self.now.seed, "projection"), dtype=torch.float64)
        self.register_buffer("projection", drawn.to(device))
        side = self.M or width
        for name, shape in (("G", (side, side)), ("Q", (side, 0)), ("weight", (side, 0)), ("x", (0, width))):
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float64, device=device))
        self.register_buffer("y", torch.zeros(0, dtype=torch.int64, device=device))
        self.register_buffer("lam", torch.ones((), dtype=torch.float64, device=device))
        return super().build(model)

    def needs(self, task: int) -> tuple[int, int]:
        kept, trained = super().needs(task)
        # in double precision: G, and while it is solved a copy with the ridge and its factor
        kept += 2 * (3 * len(self.G) ** 2 + self.projection.numel())
        if self.adapters is None:
            return kept, trained
        return kept + self.adapters.missing(1), 0 if task else self.adapters.size

    # -- the first session

    def grow(self, task: Task) -> None:
        if task.index:
            self.model.requires_grad_(False)
        elif self.adapters is not None:
            begin_tuning(self, task, self.adapters)
        more = self.Q.new_zeros(len(self.Q), len(task.classes))
        self.Q, self.weight = torch.cat([self.Q, more], 1), torch.cat([self.weight, more], 1)

    def stages(self, task: Task) -> list[Stage]:
        if self.adapters is None or task.index:
            return super().stages(task)
        tune = tuning_stage(
            self, task, self.adapters, epochs=self.tune_epochs, lr=self.tune_lr, batch_size=self.tune_batch
        )
        return [tune, *super().stages(task)]

    def validation_loss(self, examples: Tensor) -> float | None:
        if self.now.stage == "tune":
            return local_validation_loss(self, self.stream[self.now.task], examples)
        return None

    # -- every task

    def expanded(self, x: Tensor) -> Tensor:  # (rows, width) -> (rows, M)
        """h = ReLU(f W)."""
        return torch.relu(x @ self.projection) if self.M else x

    def observe(self, x: Tensor, y: Tensor) -> None:  # (rows, width), (rows,)
        self.x, self.y = torch.cat([self.x, x]), torch.cat([self.y, y.to(self.y.device)])

    def after_epoch(self, stage: Stage) -> None:
        if stage.name == "tune":
            return
        Y = one_hot(self.y, self.Q.shape[1])
        if self.ridge is not None:
            self.lam.fill_(self.ridge)
        elif len(Y) > 1:  # otherwise there is nothing to validate on
            self.lam.fill_(choose_lambda(self.expanded, self.x, Y))
        add_products(self.G, self.Q, self.expanded, self.x, Y)  # G <- G + H^T H;  Q <- Q + H^T Y
        self.weight = ridge_solution(self.G, self.Q, float(self.lam))
        self.x, self.y = self.x[:0].clone(), self.y[:0].clone()

    def predict(self, batch: Batch, scorer: str | None = None) -> Tensor:  # (rows, seen)
        """h W; a class without examples, whose column is 0, is never predicted."""
        scores = self.expanded(self.features(batch)) @ self.weight
        return scores.masked_fill(~self.Q.any(0), -torch.inf)

    def report(self) -> dict[str, float]:
        return {"lambda": float(self.lam)}
