"""SLDA: deep streaming linear discriminant analysis.

Hayes, Kanan, "Lifelong Machine Learning with Deep Streaming Linear Discriminant Analysis", CVPR Workshops 2020.
"""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from bace.core.method import Card
from bace.core.stage import Stage
from bace.core.stream import Task
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.parts.one_pass import OnePass


class SLDA(OnePass):
    """Stream once over the frozen encoder's features, keep a mean per class and one covariance for all, and classify by
    linear discriminant analysis. Nothing is trained.

    Args:
        eps: share of the identity in the covariance that is inverted.
        exact: the streamed covariance is the pooled within-class covariance, in any order. Otherwise it is the
            published one, which depends on the order and deviates by a few per cent.
        covariance: `streamed` from the first example on; or the pooled covariance of the first task, shrunk towards a
            multiple of the identity (oracle approximating shrinkage), which then streams on (`plastic`) or stays
            (`fixed`). The authors use these two, with 100 classes in the first task.
        forgettable: also keep the share of each class in the covariance, width^2 numbers in double precision, so that
            a Learner can forget a class.
    """

    title = "SLDA"
    paper = "Hayes, Kanan, Lifelong Machine Learning with Deep Streaming Linear Discriminant Analysis, 2020"
    takes_known = True
    by_class = ("means", "counts")
    card = Card(
        mechanism="frozen encoder; running class means and covariance; linear discriminant analysis",
        o_rows="O is class 0 in every task: its mean covers all words labelled O so far, including hidden entities; "
        "most words are O, so the covariance is nearly O's",
        reading="There is one pass over clean views, whatever the number of epochs. The recursion is the published "
        "one (`exact`: the pooled covariance), but it starts with the first example; the authors start from the "
        "shrunk covariance of the first task (`covariance`).",
    )

    means: Tensor  # (classes, width)
    counts: Tensor  # (classes,)
    sigma: Tensor  # (width, width)
    shares: Tensor  # (classes, width, width) of n Sigma, if `forgettable`; all in double precision

    def __init__(
        self,
        eps: float = 1e-4,
        exact: bool = False,
        covariance: Literal["streamed", "plastic", "fixed"] = "streamed",
        forgettable: bool = False,
    ) -> None:
        super().__init__()
        if not 0 <= eps <= 1:
            raise ConfigError(f"SLDA: eps is {eps}, but it must lie between 0 and 1")
        if forgettable and covariance != "streamed":
            raise ConfigError(f"SLDA: with covariance={covariance} no class can be forgotten: leave out forgettable")
        self.eps, self.exact, self.covariance, self.forgettable = eps, exact, covariance, forgettable
        for name, shape in (("means", (0, 0)), ("counts", (0,)), ("sigma", (0, 0))):
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float64))
        if forgettable:
            self.register_buffer("shares", torch.zeros(0, 0, 0, dtype=torch.float64))
        else:
            self.cannot_forget = "its covariance mixes all classes; with `forgettable` it keeps the share of each"
        self.inverse: Tensor | None = None  # the inverse covariance, until the covariance changes

    def grow(self, task: Task) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=self.means.device)

        width, new = self.model.encoder.width, len(task.classes)
        if task.index == 0:
            self.means, self.sigma = zeros(0, width), zeros(width, width)
        self.means, self.counts = torch.cat([self.means, zeros(new, width)]), torch.cat([self.counts, zeros(new)])
        if self.forgettable:
            shares = zeros(len(self.means), width, width)
            shares[: len(self.shares)] = self.shares if task.index else 0
            self.shares = shares

    def needs(self, task: int) -> tuple[int, int]:
        kept, trained = super().needs(task)
        classes = self.stream[task].classes.stop if self.forgettable else 0
        return kept + 2 * classes * self.model.encoder.width**2, trained

    def observe(
        self,
        x: Tensor,  # (rows, width)
        y: Tensor,  # (rows,) on the CPU
    ) -> None:
        """The recursion for all rows at once: each row sees the mean of its class after the rows before it.

        e = x - mu_y;  Sigma <- (n Sigma + f e e^T) / (n + 1);  mu_y <- mu_y + e / (c_y + 1);  c_y, n <- c_y + 1, n + 1
        with f = n / (n + 1) as published, f = c_y / (c_y + 1) for the pooled within-class covariance."""
        labels, y = y, y.to(x.device)
        before = (y[:, None] == y).tril(-1).double()  # (rows, rows): earlier rows of the same class
        count = self.counts[y] + before.sum(1)
        e = x - (self.counts[y, None] * self.means[y] + before @ x) / count.clamp(min=1)[:, None]
        n = self.counts.sum() + torch.arange(len(y), device=y.device)
        f = count / (count + 1) if self.exact or self.in_base else n / (n + 1)
        if self.in_base or self.covariance != "fixed":
            self.sigma = (n[0] * self.sigma + (f[:, None] * e).T @ e) / (n[-1] + 1)
        if self.forgettable:
            for c in labels.unique().tolist():
                of_c = labels == c
                self.shares[c] += (f[of_c, None] * e[of_c]).T @ e[of_c]
        own = F.one_hot(y, len(self.means)).double().T  # (classes, rows)
        total = self.counts + own.sum(1)
        self.means = (self.counts[:, None] * self.means + own @ x) / total.clamp(min=1)[:, None]
        self.counts, self.inverse = total, None

    @torch.no_grad()
    def forget(self, classes: Sequence[int], examples: Tensor) -> None:
        """n Sigma is the sum of the shares that are left."""
        super().forget(classes, examples)
        self.shares[list(classes)] = 0
        self.sigma = self.shares.sum(0) / self.counts.sum().clamp(min=1)

    @property
    def in_base(self) -> bool:
        return self.covariance != "streamed" and self.now.task == 0

    def after_epoch(self, stage: Stage) -> None:
        if self.in_base:
            self.sigma, self.inverse = shrunk(self.sigma, self.counts.sum()), None

    def predict(self, batch: Batch, scorer: str | None = None) -> Tensor:  # (rows, seen)
        """mu_c^T Lambda x - mu_c^T Lambda mu_c / 2, where Lambda inverts (1 - eps) Sigma + eps I."""
        x = self.features(batch)
        if self.inverse is None:
            identity = torch.eye(len(self.sigma), dtype=torch.float64, device=x.device)
            self.inverse = torch.linalg.pinv((1 - self.eps) * self.sigma + self.eps * identity, hermitian=True)
        weight = self.means @ self.inverse  # (classes, width)
        scores = x @ weight.T - (weight * self.means).sum(1) / 2
        # a class without examples has a mean of zeros, and its score of 0 could win
        return scores.masked_fill(self.counts == 0, -torch.inf)


def shrunk(
    sigma: Tensor,  # (width, width)
    n: Tensor,  # ()
) -> Tensor:  # (width, width)
    """(1 - rho) Sigma + rho m I with m = tr Sigma / d (Chen, Wiesel, Eldar, Hero, 2010)."""
    identity = torch.eye(len(sigma), dtype=sigma.dtype, device=sigma.device)
    m, squares = sigma.trace() / len(sigma), sigma.square().mean()
    excess = (n + 1) * (squares - m**2 / len(sigma))
    rho = ((squares + m**2) / excess).clamp(max=1) if excess > 0 else torch.ones_like(m)
    return (1 - rho) * sigma + rho * m * identity
