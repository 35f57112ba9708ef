"""FeCAM: feature covariance-aware metric.

Goswami, Liu, Twardowski, van de Weijer, "FeCAM: Exploiting the Heterogeneity of Class Distributions in Exemplar-Free
Continual Learning", NeurIPS 2023.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from bace.core.method import Card
from bace.core.stream import Task
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.parts.gaussians import ClassStatistics
from bace.methods.parts.one_pass import OnePass


class FeCAM(OnePass):
    """Freeze the encoder, keep the mean and covariance of each class's unit features, and classify by the Mahalanobis
    distance with each class's own covariance, shrunk and normalised. Nothing is trained.

    Args:
        alpha1: how much of the mean variance is added to the variances.
        alpha2: how much of the mean covariance is added to the covariances.
        common: use one covariance, the mean over all classes, so that memory at prediction does not grow with them.
    """

    title = "FeCAM"
    paper = (
        "Goswami et al., FeCAM: Exploiting the Heterogeneity of Class Distributions in Exemplar-Free Continual "
        "Learning, NeurIPS 2023"
    )
    takes_known = True
    card = Card(
        mechanism="frozen encoder; mean and covariance of each class, Mahalanobis distance",
        besides="a covariance for each class; prediction computes a distance with its own metric for each class",
        o_rows="O is class 0 in every task: its mean and covariance cover all words labelled O so far, including "
        "hidden entities",
        reading="There is one pass over clean views, whatever the number of epochs. Mean and covariance are both of "
        "unit features. There is no power transform, because features can be negative. alpha1 and alpha2 are the "
        "authors' values for a ViT.",
    )

    def __init__(self, alpha1: float = 1.0, alpha2: float = 0.0, common: bool = False) -> None:
        super().__init__()
        if min(alpha1, alpha2) < 0:
            raise ConfigError(f"FeCAM: alpha1 ({alpha1}) and alpha2 ({alpha2}) must be at least 0")
        self.alpha1, self.alpha2, self.common = alpha1, alpha2, common
        self.statistics = ClassStatistics()
        self.metrics: dict[int, Tensor] = {}  # inverted covariances by class (-1: all), until it gets more examples

    def grow(self, task: Task) -> None:
        self.statistics.grow(len(task.classes), self.model.encoder.width)

    def needs(self, task: int) -> tuple[int, int]:
        kept, trained = super().needs(task)
        classes = self.stream[task].classes.stop
        matrices = classes + (1 if self.common else classes)  # covariances and their inverses, in double precision
        return kept + 2 * matrices * self.model.encoder.width**2, trained

    def observe(self, x: Tensor, y: Tensor) -> None:  # (rows, width), (rows,)
        self.statistics.observe(F.normalize(x, dim=1), y)
        for c in (-1, *y.unique().tolist()):
            self.metrics.pop(c, None)

    def predict(self, batch: Batch, scorer: str | None = None) -> Tensor:  # (rows, seen)
        """-(f - mu_c)^T S_c^+ (f - mu_c); a class without examples is never predicted."""
        x = F.normalize(self.features(batch), dim=1)
        scores = torch.full((x.shape[0], len(self.statistics.counts)), -torch.inf, dtype=x.dtype, device=x.device)
        for c in self.statistics.observed:
            gap = x - self.statistics.means[c]
            scores[:, c] = -((gap @ self.metric(c)) * gap).sum(1)
        return scores

    def metric(self, c: int) -> Tensor:  # (width, width)
        """S_c^+, for the shrunk and normalised covariance of a class, or of all."""
        key = -1 if self.common else c
        if key not in self.metrics:
            covariance = self.common_covariance() if self.common else self.statistics.covariance(c)
            S = correlations(shrunk(covariance, self.alpha1, self.alpha2))
            self.metrics[key] = torch.linalg.pinv(S, hermitian=True)
        return self.metrics[key]

    def common_covariance(self) -> Tensor:  # (width, width)
        observed = self.statistics.observed
        total = torch.zeros_like(self.statistics.scatter[0])
        for c in observed:
            total += self.statistics.covariance(c)
        return total / len(observed)


def shrunk(S: Tensor, alpha1: float, alpha2: float) -> Tensor:  # (width, width) -> (width, width)
    """S + alpha1 V1 I + alpha2 V2 (1 - I), where V1 is the mean variance and V2 the mean covariance of two
    dimensions."""
    width = len(S)
    identity = torch.eye(width, dtype=S.dtype, device=S.device)
    V1 = S.trace() / width
    V2 = (S.sum() - S.trace()) / max(width * (width - 1), 1)
    return S + alpha1 * V1 * identity + alpha2 * V2 * (1 - identity)


def correlations(S: Tensor) -> Tensor:  # (width, width) -> (width, width)
    """S_ij / sqrt(S_ii S_jj); a dimension that does not vary (a class with one example) correlates only with itself."""
    deviation = S.diagonal().clamp(min=0).sqrt()
    deviation = torch.where(deviation > 0, deviation, torch.inf)
    return (S / torch.outer(deviation, deviation)).fill_diagonal_(1)
