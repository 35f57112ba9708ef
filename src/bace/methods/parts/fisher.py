"""The diagonal of the empirical Fisher information: which parameters the likelihood of the labels depends on."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from bace import ranks
from bace.core.stream import Stream
from bace.data.batch import NO_IDS, Batch
from bace.models.model import Model

ROOM = 2**26  # the maximum number of gradient entries held at once


def fisher_diagonal(
    model: Model,  # in eval mode
    stream: Stream,
    rows: Tensor,  # (rows,) ids
    loss: Callable[[Tensor, Tensor], Tensor],  # (1, classes) logits, (1,) targets -> -log p(y | x)
) -> dict[str, Tensor]:  # by the name of each trainable parameter
    """F_i = mean over rows (x, y) of (d log p(y | x) / d theta_i)^2, with true labels and clean views.

    Every row has its own gradient: the square of a mean gradient would be smaller by about the batch size.
    """
    model = copy.copy(model)
    model.precision = torch.float32  # autocast cannot be vectorised over rows
    theta = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def row_loss(theta: dict[str, Tensor], inputs: dict[str, Tensor], target: Tensor, at: Tensor | None) -> Tensor:
        row = Batch({key: value[None] for key, value in inputs.items()}, target[None], NO_IDS, NO_IDS, at)
        return loss(functional_call(model, theta, (row,)).logits, row.targets)

    total = {name: torch.zeros_like(value) for name, value in theta.items()}
    at_once = max(ROOM // sum(value.numel() for value in theta.values()), 1)
    for part in ranks.dealt(rows.split(min(at_once, 128))):  # gradients of rows add up over parts, and over ranks
        batch = stream.rows(part)
        inputs, at = dict(batch.inputs), None
        if batch.at is not None:  # the sentence of each word, and its position in it
            inputs = {key: value[batch.at[:, 0]] for key, value in inputs.items()}
            at = (batch.at * torch.tensor([0, 1], device=batch.at.device))[:, None]  # (rows, 1, 2)
        each = (None, 0, 0, None if at is None else 0)
        # over rows, fused attention cannot be vectorised and no text can be looked up
        with sdpa_kernel(SDPBackend.MATH), model.encoder.uncached(), ranks.alone():
            gradients = vmap(grad(row_loss), in_dims=each)(theta, inputs, batch.targets, at)
        model.encoder.passes.total += 3 * (len(part) - 1)  # vectorised, they look like one
        for name, gradient in gradients.items():
            total[name] += gradient.square().sum(0)
    return {name: ranks.total(value) / len(rows) for name, value in total.items()}
