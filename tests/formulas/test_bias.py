"""The bias correction of the new logits (docs/bace.md 7) is compared with hand-computed steps and scipy's optimum."""

import math

import numpy as np
import pytest
import scipy.optimize
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bace.errors import ConfigError, DataError, TrainingError
from bace.methods.parts.bias_correction import correct_bias, fit_bias


def sample(rows: int, classes: int, seed: int, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    """Return logits, and targets drawn from their own soft-max, as for a calibrated model."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(rows, classes, dtype=torch.float64, generator=generator)
    targets = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
    return logits, targets


def objective(pair: np.ndarray, logits: np.ndarray, targets: np.ndarray, new: range, penalty: float) -> float:
    corrected = logits.copy()
    corrected[:, list(new)] = pair[0] * corrected[:, list(new)] + pair[1]
    top = corrected.max(1, keepdims=True)
    log_sum = top[:, 0] + np.log(np.exp(corrected - top).sum(1))
    return float((log_sum - corrected[np.arange(len(targets)), targets]).mean() + penalty * pair[1] ** 2 / 2)


@pytest.mark.parametrize(("A", "B"), [(0.94423, -0.01378), (0.6, -1.5), (1.7, 0.8)])
def test_a_known_distortion_of_the_new_logits_is_found_again(A: float, B: float) -> None:
    calibrated, targets = sample(60_000, 6, seed=0)
    new = range(4, 6)
    distorted = calibrated.clone()
    distorted[:, 4:] = (calibrated[:, 4:] - B) / A
    found = fit_bias(distorted, targets, new, solver="lbfgs", penalty=0.0)
    assert found == pytest.approx((A, B), abs=0.03)  # the statistical error of 60,000 draws is below 0.01
    restored = correct_bias(distorted, new, A, B)
    torch.testing.assert_close(restored, calibrated)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6), old=st.integers(1, 5), fresh=st.integers(1, 4), penalty=st.sampled_from([0.0, 0.1, 3.0])
)
def test_lbfgs_finds_the_optimum_that_scipy_finds(seed: int, old: int, fresh: int, penalty: float) -> None:
    logits, targets = sample(300, old + fresh, seed, scale=1.0)
    new = range(old, old + fresh)
    found = fit_bias(logits, targets, new, solver="lbfgs", penalty=penalty)
    arguments = (logits.numpy(), targets.numpy(), new, penalty)
    best = scipy.optimize.minimize(objective, np.array([1.0, 0.0]), arguments, method="BFGS", options={"gtol": 1e-7})
    assert objective(np.array(found), *arguments) <= best.fun + 1e-10
    assert found == pytest.approx(tuple(best.x), abs=2e-4)


def test_the_first_step_is_the_gradient_by_hand() -> None:
    # One old class (logit 0) and one new (logit log 3): soft-max (1/4, 3/4). Over targets old, new:
    #   dCE/dz_new = 3/4 and 3/4 - 1, mean 1/4, so dL/dA = z_new / 4 = log(3) / 4 and dL/dB = 1/4 (the penalty's is 0).
    logits = torch.tensor([[0.0, math.log(3)]] * 2, dtype=torch.float64)
    targets = torch.tensor([0, 1])
    A, B = fit_bias(logits, targets, range(1, 2), lr=0.01, epochs=1)
    assert pytest.approx(1 - 0.01 * math.log(3) / 4) == A
    assert pytest.approx(-0.01 / 4) == B
    # Adam's first step has the size of the learning rate, against the gradient's sign.
    assert fit_bias(logits, targets, slice(1, 2), solver="adam", lr=0.01, epochs=1) == pytest.approx((0.99, -0.01))


def test_sgd_has_momentum_and_the_penalty_pulls_at_b() -> None:
    # Three steps by hand on the same two rows: at (A, B) the new logit is z = A log 3 + B, and p = sigmoid(z).
    logits = torch.tensor([[0.0, math.log(3)]] * 2, dtype=torch.float64)
    lr, penalty = 0.5, 0.7
    A, B, step_A, step_B = 1.0, 0.0, 0.0, 0.0
    for _ in range(3):
        push = 1 / (1 + math.exp(-(A * math.log(3) + B))) - 0.5  # mean of p and p - 1
        step_A = 0.9 * step_A + push * math.log(3)
        step_B = 0.9 * step_B + push + penalty * B
        A, B = A - lr * step_A, B - lr * step_B
    found = fit_bias(logits, torch.tensor([0, 1]), range(1, 2), lr=lr, penalty=penalty, epochs=3)
    assert found == pytest.approx((A, B))


def test_the_default_steps_lower_the_loss_and_many_larger_ones_reach_the_optimum() -> None:
    calibrated, targets = sample(2000, 6, seed=1)
    logits = calibrated.clone()
    logits[:, 4:] = 1.5 * calibrated[:, 4:] + 1
    new = range(4, 6)
    optimum = fit_bias(logits, targets, new, solver="lbfgs")

    def loss(pair: tuple[float, float]) -> float:
        return objective(np.array(pair), logits.numpy(), targets.numpy(), new, penalty=0.1)

    for solver in ("sgd", "adam"):
        stopped = fit_bias(logits, targets, new, solver=solver)  # type: ignore[arg-type]
        assert loss(optimum) < loss(stopped) < loss((1, 0)) - 0.05
    assert fit_bias(logits, targets, new, lr=0.1, epochs=1000) == pytest.approx(optimum, abs=1e-6)
    assert fit_bias(logits, targets, new, solver="adam", lr=0.02, epochs=2000) == pytest.approx(optimum, abs=1e-4)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), A=st.floats(-3, 3), B=st.floats(-5, 5))
def test_old_logits_keep_every_bit_and_so_their_order(seed: int, A: float, B: float) -> None:
    logits = torch.randn(20, 7, generator=torch.Generator().manual_seed(seed))
    corrected = correct_bias(logits, range(4, 7), A, B)
    assert torch.equal(corrected[:, :4].view(torch.int32), logits[:, :4].view(torch.int32))
    assert torch.equal(corrected[:, :4].argsort(1), logits[:, :4].argsort(1))
    torch.testing.assert_close(corrected[:, 4:], A * logits[:, 4:] + B)


def test_the_identity_pair_leaves_every_bit_and_returns_a_copy() -> None:
    logits = torch.tensor([[0.1, -0.0, 1e-40, -3.7]])
    corrected = correct_bias(logits, slice(1, None), 1.0, 0.0)
    assert torch.equal(corrected.view(torch.int32), logits.view(torch.int32))
    assert corrected.data_ptr() != logits.data_ptr()


def test_slices_and_ranges_name_the_same_columns() -> None:
    logits, targets = sample(100, 5, seed=2)
    assert fit_bias(logits, targets, slice(3, None)) == fit_bias(logits, targets, range(3, 5))
    assert torch.equal(correct_bias(logits, slice(-2, None), 2, 1), correct_bias(logits, range(3, 5), 2, 1))


def test_logits_of_inference_mode_can_be_fitted_inside_and_outside_no_grad() -> None:
    with torch.inference_mode():
        logits, targets = sample(100, 5, seed=3)
    outside = fit_bias(logits, targets, range(3, 5))
    with torch.no_grad():
        assert fit_bias(logits, targets, range(3, 5)) == outside
    assert outside != (1, 0)


def test_a_set_without_a_finite_optimum_gives_finite_numbers() -> None:
    logits = torch.tensor([[0.0, -1.0], [0.0, 1.0]])
    A, B = fit_bias(logits, torch.tensor([0, 1]), range(1, 2), solver="lbfgs")
    assert math.isfinite(A)
    assert A > 5
    assert pytest.approx(0, abs=1e-6) == B


def test_what_cannot_be_fitted_is_refused_by_name() -> None:
    logits, targets = sample(10, 4, seed=4)
    with pytest.raises(ConfigError, match="Did you mean 'lbfgs'"):
        fit_bias(logits, targets, range(2, 4), solver="bfgs")  # type: ignore[arg-type]
    for new in (range(4, 5), range(2, 2), slice(4, None), range(-1, 2)):
        with pytest.raises(ConfigError, match="does not name columns of logits with 4 classes"):
            correct_bias(logits, new, 1, 0)
    with pytest.raises(DataError, match="class 4"):
        fit_bias(logits, targets + 4 - targets, range(2, 4))
    with pytest.raises(DataError, match="no examples"):
        fit_bias(logits[:0], targets[:0], range(2, 4))
    with pytest.raises(DataError, match=r"targets \(3,\)"):
        fit_bias(logits, targets[:3], range(2, 4))
    with pytest.raises(DataError, match="not finite"):
        fit_bias(logits.log(), targets, range(2, 4))
    with pytest.raises(TrainingError, match="lower lr"):
        fit_bias(logits, targets, range(2, 4), lr=1e200, epochs=5)


def test_a_pair_of_tensors_has_a_gradient_also_where_it_is_the_identity() -> None:
    """The derivatives of the sum of the corrected logits by A and B are the sum of the new logits and their number."""
    logits = torch.tensor([[1.0, 2.0, 5.0], [3.0, -4.0, 0.5]])
    A, B = torch.tensor(1.0, requires_grad=True), torch.tensor(0.0, requires_grad=True)
    corrected = correct_bias(logits, range(1, 3), A, B)
    assert torch.equal(corrected, logits)
    torch.autograd.backward([corrected.sum()])
    assert A.grad is not None
    assert B.grad is not None
    assert (A.grad.item(), B.grad.item()) == (3.5, 4.0)
