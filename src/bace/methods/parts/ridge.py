"""Ridge regression on the classes: W = argmin |H W - Y|^2 + lambda |W|^2, from sums over rows or row by row."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

LAMBDAS = tuple(10.0**power for power in range(-8, 9))
ROWS = 1000  # the number of rows whose random features are held at a time


def one_hot(y: Tensor, classes: int) -> Tensor:  # (rows,) -> (rows, classes)
    return F.one_hot(y, classes).double()


def ridge_solution(
    G: Tensor,  # (width, width) H^T H
    Q: Tensor,  # (width, classes) H^T Y
    lam: float,
) -> Tensor:  # (width, classes)
    """W = (G + lambda I)^-1 Q. A lambda that is lost in the rounding of G is raised until it has an effect."""
    felt = (10 * torch.finfo(G.dtype).eps * G.trace()).clamp(min=lam)
    shifted = G.clone()
    shifted.diagonal().add_(felt)
    W: Tensor = torch.cholesky_solve(Q, torch.linalg.cholesky(shifted))
    return W


def choose_lambda(
    expand: Callable[[Tensor], Tensor],  # (rows, features) -> (rows, width), H
    x: Tensor,  # (rows, features) in random order, at least two
    Y: Tensor,  # (rows, classes)
    lambdas: Sequence[float] = LAMBDAS,
) -> float:
    """The lambda with the lowest squared error on the last 20 % of the rows, solved on the first 80 %."""
    fit = int(0.8 * len(x))
    solutions = solve(expand, x[:fit], Y[:fit], lambdas)
    errors = torch.zeros(len(lambdas), dtype=torch.float64, device=x.device)
    for rows, labels in zip(x[fit:].split(ROWS), Y[fit:].split(ROWS), strict=True):
        H = expand(rows)
        errors += torch.stack([(H @ W - labels).square().sum() for W in solutions])
    return lambdas[int(errors.argmin())]


def solve(
    expand: Callable[[Tensor], Tensor],  # (rows, features) -> (rows, width), H
    x: Tensor,  # (rows, features)
    Y: Tensor,  # (rows, classes)
    lambdas: Sequence[float],
) -> list[Tensor]:  # (width, classes) for each lambda
    """(H^T H + lambda I)^-1 H^T Y; with fewer rows than columns by a smaller matrix, H^T (H H^T + lambda I)^-1 Y."""
    width = expand(x[:1]).shape[1]
    if len(x) < width:
        H = expand(x)
        K = H @ H.T
        return [H.T @ ridge_solution(K, Y, lam) for lam in lambdas]
    G, Q = x.new_zeros(width, width), x.new_zeros(width, Y.shape[1])
    add_products(G, Q, expand, x, Y)
    return [ridge_solution(G, Q, lam) for lam in lambdas]


def add_products(
    G: Tensor,  # (width, width)
    Q: Tensor,  # (width, classes)
    expand: Callable[[Tensor], Tensor],  # (rows, features) -> (rows, width), H
    x: Tensor,  # (rows, features)
    Y: Tensor,  # (rows, classes)
) -> None:
    """G <- G + H^T H;  Q <- Q + H^T Y. These sums add up over parts of the data."""
    for rows, labels in zip(x.split(ROWS), Y.split(ROWS), strict=True):
        H = expand(rows)
        G.addmm_(H.T, H)
        Q.addmm_(H.T, labels)


def without(
    P: Tensor,  # (inputs, inputs)
    R: Tensor,  # (inputs, positions)
    alpha: float,
) -> Tensor:  # (inputs, inputs)
    """P - K (alpha I + R^T K)^-1 K^T with K = P R: for each column r of R, P <- P - k k^T / (alpha + r^T k), k = P r.
    Starting from the identity with one alpha, the result is (I + R R^T / alpha)^-1 for all columns R stored so far. If
    P has become so inexact that there is no such factor, the result is NaN: steps call this, and an error would wait
    for the device."""
    K = P @ R
    ridge = alpha * torch.eye(R.shape[1], dtype=R.dtype, device=R.device)
    factor, failed = torch.linalg.cholesky_ex(ridge + R.T @ K)
    V: Tensor = torch.linalg.solve_triangular(factor.masked_fill_(failed > 0, torch.nan), K.T, upper=False)
    return P - V.T @ V
