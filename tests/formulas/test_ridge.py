"""Ridge solutions, computed by both of two equal formulas, and the choice of their strength are compared with numpy."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from steps import Array, array
from torch import Tensor

from bace.methods.parts.ridge import (
    LAMBDAS,
    ROWS,
    add_products,
    choose_lambda,
    one_hot,
    ridge_solution,
    solve,
    without,
)


def problem(rows: int, width: int, noise: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return features, and classes that are a noisy function of them."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=rng)
    scores = x[:, :3] + noise * torch.randn(rows, 3, generator=rng)
    return x, one_hot(scores.argmax(1), 4)  # the last class has no rows


def identity(x: Tensor) -> Tensor:
    return x


def by_numpy(x: Array, Y: Array, lam: float) -> Array:
    """Return the least-squares solution with sqrt(lambda) I as additional rows."""
    rows = np.concatenate([x, np.sqrt(lam) * np.eye(x.shape[1])])
    solution: Array = np.linalg.lstsq(rows, np.concatenate([Y, np.zeros((x.shape[1], Y.shape[1]))]), rcond=None)[0]
    return solution


@pytest.mark.parametrize("rows", [4, 6, 40, 2 * ROWS + 5])
@pytest.mark.parametrize("lam", [1e-4, 1.0, 1e6])
def test_a_solution_is_that_of_least_squares_with_more_and_with_fewer_rows_than_columns(rows: int, lam: float) -> None:
    x, Y = problem(rows, 6)
    [W] = solve(identity, x, Y, [lam])
    np.testing.assert_allclose(array(W), by_numpy(array(x), array(Y), lam), rtol=1e-7, atol=1e-11)
    assert not W[:, 3].any()


def test_products_add_up_over_parts() -> None:
    x, Y = problem(2 * ROWS + 5, 6)
    G, Q = torch.zeros(6, 6), torch.zeros(6, 4)
    for part in (slice(0, 7), slice(7, None)):
        add_products(G, Q, torch.relu, x[part], Y[part])
    H = np.maximum(array(x), 0)
    np.testing.assert_allclose(array(G), H.T @ H, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(array(Q), H.T @ array(Y), rtol=1e-12, atol=1e-12)


def chosen_by_numpy(expand: Callable[[Array], Array], x: Array, Y: Array) -> float:
    fit = int(0.8 * len(x))
    H, held = expand(x[:fit]), expand(x[fit:])
    errors = [((held @ by_numpy(H, Y[:fit], lam) - Y[fit:]) ** 2).mean() for lam in LAMBDAS]
    return LAMBDAS[int(np.argmin(errors))]


@pytest.mark.parametrize(("rows", "width", "noise"), [(30, 10, 0.0), (30, 10, 5.0), (30, 60, 0.5), (400, 8, 0.5)])
def test_the_strength_has_the_lowest_error_on_the_last_fifth(rows: int, width: int, noise: float) -> None:
    for seed in range(4):
        x, Y = problem(rows, width, noise, seed)
        lam = choose_lambda(torch.relu, x, Y)
        assert lam == chosen_by_numpy(lambda x: np.maximum(x, 0), array(x), array(Y))


def test_the_held_out_fifth_decides_and_is_not_solved_on() -> None:
    """There are ten rows. With y = x on eight of them, small ridges are best, unless the other two rows have y = 0."""
    x, Y = torch.arange(1.0, 11.0)[:, None], torch.arange(1.0, 11.0)[:, None]
    assert choose_lambda(identity, x, Y) == min(LAMBDAS)
    Y[8:] = 0
    assert choose_lambda(identity, x, Y) == max(LAMBDAS)


def test_strengths_range_over_17_powers_of_ten() -> None:
    np.testing.assert_allclose(np.log10(LAMBDAS), np.arange(-8, 9))


def test_a_strength_below_rounding_still_gives_a_solution_that_fits() -> None:
    """Three large rows, each repeated three times, give a matrix of rank 3 with 20 columns."""
    x, Y = problem(3, 20)
    x, Y = 1e5 * x.repeat(3, 1), Y.repeat(3, 1)
    W = ridge_solution(x.T @ x, x.T @ Y, 1e-8)
    np.testing.assert_allclose(array(x @ W), array(Y), atol=1e-3)
    assert float(W.norm()) < 1e-3


def test_rows_taken_in_one_after_another_leave_the_inverse_of_all_products() -> None:
    x, _ = problem(20, 6)
    P = torch.eye(6) / 0.5
    for part in x.split(7):
        P = without(P, part.T, 1.0)
    np.testing.assert_allclose(array(P), np.linalg.inv(array(x.T @ x) + 0.5 * np.eye(6)), atol=1e-13)
