"""Bias correction (BiC, Wu et al., CVPR 2019) as BaCE's add-on: two scalars for the logits of the newest classes.

After the last task, with encoder and head frozen, z_c becomes A z_c + B for the new classes c; old logits do not
change. A and B are fitted on a small balanced set that was never trained on. Its logits are computed once, and each
step sees all of them.
"""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from bace.errors import ConfigError, DataError, TrainingError, closest_name


def fit_bias(
    logits: Tensor,  # (rows, classes)
    targets: Tensor,  # (rows,)
    new: slice | range,
    *,
    solver: Literal["sgd", "adam", "lbfgs"] = "sgd",
    penalty: float = 0.1,
    lr: float = 1e-3,
    epochs: int = 200,
) -> tuple[float, float]:
    """The pair (A, B) that minimises the mean cross-entropy of the corrected logits + penalty B^2 / 2, from (1, 0).

    "sgd" (momentum 0.9) and "adam" take `epochs` full-batch steps with learning rate `lr` and usually stop before
    the optimum; "lbfgs" finds the optimum of this convex problem and uses neither. If the set is so easy that the loss
    falls for ever as A grows, there is no optimum, and "lbfgs" ends at a large, finite A.
    """
    columns = _columns(new, logits)
    if targets.shape != logits.shape[:1]:
        raise DataError(f"targets {tuple(targets.shape)} for logits {tuple(logits.shape)}: expected one class per row.")
    if not len(logits):
        raise DataError("there are no examples to fit the bias on: hold out at least one per class.")
    if not logits.isfinite().all():
        raise DataError("logits to fit the bias on are not finite: leave masked columns out of them.")
    outside = targets[(targets < 0) | (targets >= logits.shape[1])]
    if len(outside):
        raise DataError(f"targets hold class {int(outside[0])}, but the logits have {logits.shape[1]} columns.")

    # For two scalars double precision costs nothing, and the result follows the formula on any device.
    # Copies are needed, because tensors from torch.inference_mode() cannot take part in a backward pass.
    logits, targets = logits.detach().to(torch.float64, copy=True), targets.clone()
    pair = torch.tensor([1.0, 0.0], dtype=torch.float64, device=logits.device, requires_grad=True)

    optimisers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "sgd": lambda: torch.optim.SGD([pair], lr=lr, momentum=0.9),
        "adam": lambda: torch.optim.Adam([pair], lr=lr),
        "lbfgs": lambda: torch.optim.LBFGS(
            [pair], max_iter=500, tolerance_grad=1e-10, tolerance_change=1e-14, line_search_fn="strong_wolfe"
        ),
    }
    if solver not in optimisers:
        raise ConfigError(f"'{solver}' is not a solver for the bias correction.{closest_name(solver, optimisers)}")
    optimiser = optimisers[solver]()

    def loss() -> float:
        optimiser.zero_grad()
        corrected = torch.where(columns, pair[0] * logits + pair[1], logits)
        value = F.cross_entropy(corrected, targets) + penalty / 2 * pair[1].square()
        torch.autograd.backward([value])
        return value.item()

    with torch.enable_grad():
        for _ in range(1 if solver == "lbfgs" else epochs):
            optimiser.step(loss)
    A, B = pair.tolist()
    if not pair.isfinite().all():
        raise TrainingError(f"the bias correction ended at A = {A}, B = {B}: lower lr = {lr}, or use solver 'lbfgs'.")
    return A, B


def correct_bias(
    logits: Tensor,  # (rows, classes)
    new: slice | range,
    A: float | Tensor,
    B: float | Tensor,
) -> Tensor:  # (rows, classes)
    """The logits with A z + B in the columns of the new classes; the old columns, and all columns for
    (1, 0), keep every bit. Gradients flow through tensors A and B."""
    columns = _columns(new, logits)
    if not isinstance(A, Tensor) and (A, B) == (1, 0):
        return logits.clone()  # -0.0 + 0.0 would lose its sign
    return torch.where(columns, A * logits + B, logits)


def _columns(new: slice | range, logits: Tensor) -> Tensor:  # (classes,) bool
    if logits.ndim != 2:
        raise DataError(f"logits have shape {tuple(logits.shape)}: expected (rows, classes).")
    classes = logits.shape[1]
    chosen = new if isinstance(new, range) else range(classes)[new]
    if not chosen or min(chosen) < 0 or max(chosen) >= classes:
        raise ConfigError(f"new = {new} does not name columns of logits with {classes} classes.")
    columns = torch.zeros(classes, dtype=torch.bool, device=logits.device)
    columns[list(chosen)] = True
    return columns
