"""Prototypes (the mean feature of each class) and cosines with them."""

import torch
import torch.nn.functional as F
from torch import Tensor


def class_means(
    features: Tensor,  # (rows, width)
    targets: Tensor,  # (rows,) class ids
    classes: range,
) -> Tensor:  # (classes, width)
    """The mean feature of each class; zeros for a class without rows."""
    own = (targets == torch.tensor(classes, device=targets.device)[:, None]).to(features)  # (classes, rows)
    return own @ features / own.sum(1, keepdim=True).clamp(min=1)


def cosines(
    features: Tensor,  # (rows, width)
    prototypes: Tensor,  # (classes, width); zeros for a class without examples, which is never predicted
) -> Tensor:  # (rows, classes)
    found = F.normalize(features.to(prototypes), dim=1) @ F.normalize(prototypes, dim=1).T
    return found.masked_fill(~prototypes.any(1), -torch.inf)
