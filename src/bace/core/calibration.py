"""Scores become probabilities by one temperature for all classes (Guo, Pleiss, Sun, Weinberger, ICML 2017)."""

import torch
import torch.nn.functional as F
from torch import Tensor

BINS = 15  # number of bins of the expected calibration error
TEMPERATURES = torch.logspace(-3, 3, 121, dtype=torch.float64)


def fit_temperature(scores: Tensor, targets: Tensor) -> float:  # (rows, classes), (rows,)
    """The T of softmax(z / T) with the least cross-entropy.

    The rows come from the training data, so all predictions may be right, and no T would be small enough. As in Platt's
    scaling, a target is therefore not 1 but (n + 1) / (n + 2), where n is the number of rows of its class."""
    counts = torch.bincount(targets, minlength=scores.shape[1]).double()[targets]
    own = (counts + 1) / (counts + 2)
    rest = max(scores.shape[1] - 1, 1)
    losses = []
    for temperature in TEMPERATURES:
        log_p = F.log_softmax(finite(scores) / temperature, 1)
        right = log_p.gather(1, targets[:, None])[:, 0]
        losses.append(-(own * right + (1 - own) * (log_p.sum(1) - right) / rest).mean())
    return float(TEMPERATURES[int(torch.stack(losses).argmin())])


def calibration_error(probabilities: Tensor, targets: Tensor) -> float:  # (rows, classes), (rows,)
    """ECE = sum over bins of confidence of (rows in the bin / rows) |accuracy - confidence|."""
    confidence, predicted = probabilities.double().max(1)
    right = (predicted == targets).double()
    bins = (confidence * BINS).long().clamp(max=BINS - 1)
    gaps = torch.zeros(BINS, dtype=torch.float64).index_add_(0, bins, right - confidence)
    return float(gaps.abs().sum() / len(targets))


def finite(scores: Tensor) -> Tensor:
    """Scores in double precision. A class that cannot be predicted (-inf) gets a score far below the others."""
    least = scores.double().masked_fill(scores.isinf(), 0).min() - 1e4
    return torch.where(scores.isinf(), least, scores.double())
