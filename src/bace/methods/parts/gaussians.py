"""Classes as Gaussians with a common covariance: their statistics, and the Mahalanobis distance to them."""

import torch
from torch import Tensor


def class_gaussians(
    features: Tensor,  # (rows, width)
    targets: Tensor,  # (rows,) class ids
    classes: range,  # each has at least one row
) -> tuple[Tensor, Tensor]:  # (len(classes), width) means, (width, width) covariance
    """The mean of each class, and the average of the classes' covariances (n - 1 in the denominator; a class of one
    row has none)."""
    means, covariances = [], []
    for c in classes:
        own = features[targets == c]
        means.append(own.mean(0))
        centred = own - means[-1]
        covariances.append(centred.T @ centred / max(len(own) - 1, 1))
    return torch.stack(means), torch.stack(covariances).mean(0)


def shrunk_factor(
    covariance: Tensor,  # (width, width)
    kept: float = 0.8,
) -> Tensor:  # (width, width) lower triangular
    """The Cholesky factor L of kept Sigma + (1 - kept) I, which is regular also for fewer rows than dimensions."""
    identity = torch.eye(len(covariance), dtype=covariance.dtype, device=covariance.device)
    factor: Tensor = torch.linalg.cholesky(kept * covariance + (1 - kept) * identity)
    return factor


def mahalanobis(
    features: Tensor,  # (rows, width)
    means: Tensor,  # (classes, width)
    factor: Tensor,  # (width, width) L with L L^T = Sigma
) -> Tensor:  # (rows, classes)
    """MD = sqrt((h - mu)^T Sigma^-1 (h - mu)) = |L^-1 h - L^-1 mu|."""
    rows, centres = (torch.linalg.solve_triangular(factor, x.T, upper=False).T for x in (features, means))
    return torch.cdist(rows, centres, compute_mode="donot_use_mm_for_euclid_dist")  # exact for small distances
