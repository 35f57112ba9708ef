"""Classes as Gaussians: their statistics, the Mahalanobis distance to them, and features drawn from them."""

from collections.abc import Iterable

import torch
from torch import Tensor

from bace.core.memory import ElasticBuffers


class ClassStatistics(ElasticBuffers):
    """Count, mean and scatter matrix of each class's features, in double precision.

    They add up: statistics collected in parts (batches, tasks, processes), in any order, equal those of all data at
    once.

    Args:
        scatter: whether to keep scatter matrices, width^2 numbers per class; otherwise only counts and means are kept.
    """

    counts: Tensor  # (classes,)
    means: Tensor  # (classes, width)
    scatter: Tensor  # (classes, width, width) sum of (x - mean) (x - mean)^T; (classes, 0, 0) if it is not kept

    def __init__(self, *, scatter: bool = True) -> None:
        super().__init__()
        self.has_scatter = scatter
        for name, shape in (("counts", (0,)), ("means", (0, 0)), ("scatter", (0, 0, 0))):
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float64))

    def grow(self, classes: int, width: int) -> None:
        """Make room for this many more classes."""
        old, side = len(self.counts), width if self.has_scatter else 0
        for name, shape in (("counts", ()), ("means", (width,)), ("scatter", (side, side))):
            grown = torch.zeros((old + classes, *shape), dtype=torch.float64, device=self.counts.device)
            if old:
                grown[:old] = getattr(self, name)
            setattr(self, name, grown)

    def observe(
        self,
        x: Tensor,  # (rows, width)
        y: Tensor,  # (rows,) class ids, best on the CPU: which classes there are has to be read
    ) -> None:
        """Add these rows."""
        for c in y.unique().tolist():
            own = x[y == c]
            mean = own.mean(0)
            centred = own - mean
            self.merge(c, len(own), mean, centred.T @ centred)

    def merge(self, c: int, count: float, mean: Tensor, scatter: Tensor) -> None:  # (width,), (width, width)
        """Add the statistics of other rows of class c (Chan, Golub, LeVeque, 1979):
        n = a + b;  d = m_b - m_a;  m = m_a + b d / n;  S = S_a + S_b + a b d d^T / n."""
        before = self.counts[c].clone()  # not read, which would wait for a device
        total = before + count
        gap = mean - self.means[c]
        if self.has_scatter:
            self.scatter[c] += scatter + torch.outer(gap, gap) * (before * count / total)
        self.means[c] += gap * (count / total)
        self.counts[c] = total

    def forget_classes(self, classes: Iterable[int]) -> None:
        for c in classes:
            for statistic in (self.counts, self.means, self.scatter):
                statistic[c] = 0

    def covariance(self, c: int) -> Tensor:  # (width, width)
        """The covariance of a class, with n - 1 in the denominator; zeros for a class with one row."""
        return self.scatter[c] / (self.counts[c] - 1).clamp(min=1)

    @property
    def observed(self) -> list[int]:
        """The classes that have rows."""
        return [c for c, count in enumerate(self.counts.tolist()) if count]


def draw_features(
    gaussians: Iterable[tuple[Tensor, Tensor]],  # (width,) mean and (width, width) regular covariance of each class
    count: int,  # of each class
    rng: torch.Generator,
) -> Tensor:  # (classes * count, width), class by class
    """Gaussian replay: mean + L z with L L^T = Sigma and z ~ N(0, I)."""
    drawn = []
    for mean, covariance in gaussians:
        z = torch.randn(count, len(mean), generator=rng, dtype=torch.float64).to(mean)
        drawn.append(mean + z @ torch.linalg.cholesky(covariance).T)
    return torch.cat(drawn)


def class_gaussians(
    features: Tensor,  # (rows, width)
    targets: Tensor,  # (rows,) class ids
    classes: range,  # each has at least one row
) -> tuple[Tensor, Tensor]:  # (len(classes), width) means, (width, width) covariance
    """The mean of each class, and the average of the classes' covariances (n - 1 in the denominator; a class with one
    row has no covariance)."""
    means, covariances = [], []
    for c in classes:
        own = features[targets == c]
        means.append(own.mean(0))
        centred = own - means[-1]
        covariances.append(centred.T @ centred / max(len(own) - 1, 1))
    return torch.stack(means), torch.stack(covariances).mean(0)


def shrunk_whitening(
    covariance: Tensor,  # (width, width)
    kept: float = 0.8,
) -> Tensor:  # (width, width) lower triangular
    """W = L^-1 with L L^T = kept Sigma + (1 - kept) I, which is regular even with fewer rows than dimensions."""
    identity = torch.eye(len(covariance), dtype=covariance.dtype, device=covariance.device)
    return inverse_factor(torch.linalg.cholesky(kept * covariance + (1 - kept) * identity))


def inverse_factor(factor: Tensor) -> Tensor:  # (..., width, width) -> (..., width, width), both lower triangular
    identity = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    inverse: Tensor = torch.linalg.solve_triangular(factor, identity, upper=False)
    return inverse


def mahalanobis(
    features: Tensor,  # (rows, width)
    means: Tensor,  # (classes, width)
    whitening: Tensor,  # (width, width) W with W^T W = Sigma^-1
) -> Tensor:  # (rows, classes)
    """MD = sqrt((h - mu)^T Sigma^-1 (h - mu)) = |W h - W mu|."""
    # not by cdist, which ONNX does not have, nor by products, which are inexact for small distances
    rows, centres = features @ whitening.T, means @ whitening.T
    distances: Tensor = (rows[:, None] - centres).norm(dim=2)
    return distances
