"""Scores become probabilities by one temperature for all classes (Guo, Pleiss, Sun, Weinberger, ICML 2017)."""

from typing import Any

import torch
from torch import Tensor

BINS = 15  # number of bins of the expected calibration error
TEMPERATURES = torch.logspace(-3, 3, 121, dtype=torch.float64)


def fit_temperature(scores: Tensor, targets: Tensor) -> float:  # (rows, classes), (rows,)
    """The T of softmax(z / T) with the least cross-entropy.

    The rows were learned from, and may all be right: no T would be small enough for them. By the rule of succession,
    one of n + 2 such rows is wrong. A mistake goes to the class that comes second, so the target of a row is
    1 - 1 / (n + 2) for its class and 1 / (n + 2) for the best of the others. (If all others shared it, those that are
    far off would ask for a T so high that nothing is certain.)"""
    if scores.shape[1] == 1:
        return 1.0
    wrong = 1 / (len(targets) + 2)
    scores = finite(scores)
    own = scores.gather(1, targets[:, None])
    second = scores.scatter(1, targets[:, None], -torch.inf).amax(1, keepdim=True)
    aimed_at = ((1 - wrong) * own + wrong * second)[:, 0]
    losses = []
    for temperature in TEMPERATURES:
        losses.append((torch.logsumexp(scores / temperature, 1) - aimed_at / temperature).mean())
    return float(TEMPERATURES[int(torch.stack(losses).argmin())])


def calibrate(scores: Tensor, targets: Tensor) -> dict[str, Any]:  # (rows, classes), (rows,)
    """The temperature that suits these rows, and their calibration error without and with it, as a record has them.
    Nothing suits rows with a NaN, which a network that has diverged gives."""
    if scores.isnan().any():
        return {}
    temperature = fit_temperature(scores, targets)
    errors = (calibration_error(torch.softmax(finite(scores) / t, 1), targets) for t in (1.0, temperature))
    return {"temperature": temperature, "ece": [round(error, 4) for error in errors]}


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
