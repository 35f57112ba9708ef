"""The formulas of losses.py (docs/bace.md 2, 3) are compared with numpy, hand-computed numbers and finite
differences."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import Array, array, kl_renorm, kl_slice, softmax
from torch import Tensor

from bace.methods.parts.losses import (
    distillation,
    feature_cosine,
    mixture_nll,
    neighbour_log_weights,
    old_logit_mse,
    soft_cross_entropy,
)


def normal(*shape: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def difference_quotient(f: Any, x: Array, step: float = 1e-6) -> Array:
    """Return central differences of f at every entry of x."""
    gradient = np.zeros_like(x)
    for i in np.ndindex(*x.shape):
        up, down = x.copy(), x.copy()
        up[i], down[i] = up[i] + step, down[i] - step
        gradient[i] = (f(up) - f(down)) / (2 * step)
    return gradient


# -- the mixture of a sample and its neighbours


def mixture_case(
    rows: int = 4, k: int = 3, classes: int = 5
) -> tuple[Tensor, Tensor, Tensor, Array, Array]:  # logits of anchors, of neighbours, targets, W_0, W_j
    anchors, neighbours = normal(rows, classes, seed=1), normal(rows, k, classes, seed=2)
    targets = torch.arange(rows) % classes
    shares = np.random.default_rng(3).dirichlet(np.ones(k + 1), size=rows)
    return anchors, neighbours, targets, shares[:, 0], shares[:, 1:]


def mixture_of_logits(anchors: Tensor, neighbours: Tensor, targets: Tensor, own: Array, shares: Array) -> Tensor:
    rows = torch.arange(len(targets))
    return mixture_nll(
        F.log_softmax(anchors, 1)[rows, targets],
        F.log_softmax(neighbours, 2)[rows, :, targets],
        torch.from_numpy(np.log(own)),
        torch.from_numpy(np.log(shares)),
    )


def mixture_in_numpy(anchors: Array, neighbours: Array, targets: Array, own: Array, shares: Array) -> float:
    rows = np.arange(len(targets))
    total = own * softmax(anchors)[rows, targets] + (shares * softmax(neighbours)[rows, :, targets]).sum(1)
    return float(-np.log(total).mean())


def test_the_mixture_is_minus_log_of_the_weighted_scores_of_the_anchors_class() -> None:
    # W_0 S(x)[y] + W_1 S(x_1)[y] + W_2 S(x_2)[y] = .5 .2 + .3 .6 + .2 .1 = .3, and .5 .8 + .3 .1 + .2 .35 = .5
    anchor, beside = torch.tensor([0.2, 0.8]), torch.tensor([[0.6, 0.1], [0.1, 0.35]])
    own, shares = torch.tensor([0.5, 0.5]), torch.tensor([[0.3, 0.2], [0.3, 0.2]])
    value = mixture_nll(anchor.log(), beside.log(), own.log(), shares.log())
    assert float(value) == pytest.approx(-(math.log(0.3) + math.log(0.5)) / 2, rel=1e-6)


def test_the_mixture_does_not_underflow() -> None:
    """S(x)[y] = exp(-2000) is 0 in any float, but the loss is 2000 - log(1/2 + 1/2)."""
    low, half = torch.tensor([-2000.0]), torch.tensor([0.5]).log()
    anchor = low.clone().requires_grad_()
    value = mixture_nll(anchor, low[:, None], half, half[:, None])
    value.backward()
    assert value.item() == pytest.approx(2000.0)
    assert anchor.grad is not None
    assert anchor.grad.item() == pytest.approx(-0.5, abs=1e-4)


@pytest.mark.parametrize("k", [1, 3, 10])
def test_with_all_weight_on_the_anchor_the_mixture_is_cross_entropy_bit_for_bit_whatever_k(k: int) -> None:
    logits = normal(6, 4)
    targets = torch.tensor([0, 1, 2, 3, 0, 1])
    own, shares = neighbour_log_weights(torch.rand(6, k) + 0.1, 1.0)
    for row in range(6):  # one row at a time, because a mean over rows may be summed in another order
        one = slice(row, row + 1)
        log_anchor = F.log_softmax(logits[one], 1)[:, targets[row]]
        value = mixture_nll(log_anchor, torch.randn(1, k), own[one], shares[one])
        assert torch.equal(value, F.cross_entropy(logits[one], targets[one]))


def test_gradient_of_the_mixture_is_responsibility_times_that_of_cross_entropy() -> None:
    """d/d logits of member j is r_j (S(x_j) - onehot(y)), here divided by the number of rows in the mean.
    Both the formula and autograd agree with finite differences of the paper's loss."""
    anchors, neighbours, targets, own, shares = mixture_case()
    a, n, y = array(anchors), array(neighbours), targets.numpy()
    anchors.requires_grad_(), neighbours.requires_grad_()
    mixture_of_logits(anchors, neighbours, targets, own, shares).backward()

    by_differences = (
        difference_quotient(lambda x: mixture_in_numpy(x, n, y, own, shares), a),
        difference_quotient(lambda x: mixture_in_numpy(a, x, y, own, shares), n),
    )
    rows = len(shares)
    scores = np.concatenate([softmax(a)[:, None], softmax(n)], axis=1)  # (rows, 1 + K, classes)
    weighted = np.concatenate([own[:, None], shares], axis=1) * scores[np.arange(rows), :, y]
    responsibility = weighted / weighted.sum(1, keepdims=True)
    formula = responsibility[:, :, None] * (scores - np.eye(a.shape[1])[y][:, None]) / rows
    for gradient, differences, expected in (
        (anchors.grad, by_differences[0], formula[:, 0]),
        (neighbours.grad, by_differences[1], formula[:, 1:]),
    ):
        assert gradient is not None
        np.testing.assert_allclose(gradient.numpy(), expected, atol=1e-12)
        np.testing.assert_allclose(gradient.numpy(), differences, atol=1e-8)


def test_without_gradient_through_neighbours_the_gradient_is_r0_times_that_of_cross_entropy() -> None:
    anchors, neighbours, targets, own, shares = mixture_case()
    anchors.requires_grad_()
    mixture_of_logits(anchors, neighbours, targets, own, shares).backward()
    a, n, y = array(anchors), array(neighbours), targets.numpy()
    rows = np.arange(len(y))
    mine = own * softmax(a)[rows, y]
    r0 = mine / (mine + (shares * softmax(n)[rows, :, y]).sum(1))
    cross_entropy_gradient = softmax(a) - np.eye(a.shape[1])[y]
    assert anchors.grad is not None
    np.testing.assert_allclose(anchors.grad.numpy(), r0[:, None] * cross_entropy_gradient / len(y), atol=1e-12)


@pytest.mark.parametrize(
    ("score", "neighbours", "r0"), [(0.9, 0.9, 0.95), (0.05, 0.9, 0.51), (0.01, 0.5, 0.28)]
)  # the examples of 2.4, with W0 = 0.95
def test_r0_of_the_specifications_examples(score: float, neighbours: float, r0: float) -> None:
    log_anchor = torch.tensor([score]).log().requires_grad_()
    own, shares = neighbour_log_weights(torch.tensor([[1.0, 2.0, 3.0]]), 0.95)
    mixture_nll(log_anchor, torch.full((1, 3), neighbours).log(), own, shares).backward()
    assert log_anchor.grad is not None
    assert -float(log_anchor.grad[0]) == pytest.approx(r0, abs=0.006)


@given(seed=st.integers(0, 10**6), k=st.integers(1, 6))
@settings(max_examples=25, deadline=None)
def test_the_order_of_neighbours_changes_nothing(seed: int, k: int) -> None:
    distances, log_scores = normal(4, k, seed=seed).abs(), -normal(4, k, seed=seed + 1).abs()
    log_anchor = -normal(4, seed=seed + 2).abs()
    order = torch.randperm(k, generator=torch.Generator().manual_seed(seed))
    values = []
    for at in (torch.arange(k), order):
        own, shares = neighbour_log_weights(distances[:, at], 0.8)
        values.append(float(mixture_nll(log_anchor, log_scores[:, at], own, shares)))
    assert values[0] == pytest.approx(values[1], rel=1e-12)


# -- weights (2.1, 2.2)


def test_weights_are_inverse_distances_shared_among_the_neighbours() -> None:
    # 1/d = 1, 1/2, 1/4; their sum is 7/4
    own, shares = neighbour_log_weights(torch.tensor([[1.0, 2.0, 4.0]]), 0.9)
    torch.testing.assert_close(own.exp(), torch.tensor([0.9]))
    torch.testing.assert_close(shares.exp(), 0.1 * torch.tensor([[4 / 7, 2 / 7, 1 / 7]]))


def test_uniform_weights_are_equal_among_the_neighbours_there_are() -> None:
    _, shares = neighbour_log_weights(torch.tensor([[1.0, 2.0, 4.0], [1.0, 5.0, math.inf]]), 0.7, uniform=True)
    torch.testing.assert_close(shares.exp(), torch.tensor([[0.1, 0.1, 0.1], [0.15, 0.15, 0.0]]))


def test_fewer_neighbours_than_k_share_all_of_the_weight_and_none_leaves_the_anchor_alone() -> None:
    far = math.inf
    own, shares = neighbour_log_weights(torch.tensor([[1.0, 3.0, far], [2.0, far, far], [far, far, far]]), 0.6)
    torch.testing.assert_close(own.exp(), torch.tensor([0.6, 0.6, 1.0]))
    torch.testing.assert_close(shares.exp(), torch.tensor([[0.3, 0.1, 0.0], [0.4, 0.0, 0.0], [0.0, 0.0, 0.0]]))


def test_an_exact_duplicate_takes_nearly_all_that_is_left_and_two_of_them_share_it() -> None:
    own, shares = neighbour_log_weights(torch.tensor([[0.0, 0.5, 1.0], [0.0, 0.0, 1.0]], dtype=torch.float64), 0.95)
    # the clamp at 1e-6: 1e6 / (1e6 + 2 + 1)
    assert float(shares[0, 0].exp()) == pytest.approx(0.05 * 1e6 / (1e6 + 3), rel=1e-9)
    assert float(shares[1, 0].exp()) == pytest.approx(0.025, rel=1e-5)
    assert torch.equal(shares[1, 0], shares[1, 1])
    assert own.exp().tolist() == pytest.approx([0.95, 0.95])


@given(
    seed=st.integers(0, 10**6),
    k=st.integers(1, 7),
    missing=st.integers(0, 7),
    W0=st.sampled_from([0.0, 0.3, 0.95, 1.0]),
    uniform=st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_weights_sum_to_one_and_do_not_depend_on_the_scale(
    seed: int, k: int, missing: int, W0: float, uniform: bool
) -> None:
    distances = normal(3, k, seed=seed).abs() + 1e-3
    distances[0, k - min(missing, k) :] = math.inf
    own, shares = neighbour_log_weights(distances, W0, uniform=uniform)
    total = own.exp() + shares.exp().sum(1)
    torch.testing.assert_close(total, torch.ones(3, dtype=torch.float64), rtol=1e-12, atol=0)
    for scaled in (distances * 1e-2, distances * 1e3):
        _, again = neighbour_log_weights(scaled, W0, uniform=uniform)
        torch.testing.assert_close(again.exp(), shares.exp())


# -- distillation (3.1)


@pytest.mark.parametrize("tau", [1.0, 2.0])
@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_distillation_is_the_kl_divergence_in_both_directions_and_readings(direction: Any, tau: float) -> None:
    student, teacher = normal(5, 7, seed=4), normal(5, 4, seed=5)
    log_teacher = F.log_softmax(teacher / tau, 1)
    s, t = array(student), array(teacher)
    for mode, formula in (("slice", kl_slice), ("renorm", kl_renorm)):
        expected = tau**2 * formula(s, t, tau, direction)
        reading: Any = {"mode": mode, "direction": direction, "tau": tau}
        assert float(distillation(student, log_teacher, **reading)) == pytest.approx(expected.mean(), rel=1e-10)
        mean = distillation(student, log_teacher, **reading, reduction="mean")
        assert float(mean) == pytest.approx(expected.mean() / 4, rel=1e-10)


@pytest.mark.parametrize("tau", [1.0, 2.0])
def test_distillation_counts_each_row_by_its_weight(tau: float) -> None:
    student, teacher = (torch.randn(4, n, generator=torch.Generator().manual_seed(n)) for n in (5, 3))
    log_teacher = F.log_softmax(teacher / tau, 1)
    weights = torch.tensor([0.0, 0.5, 3.0, 1.0])
    rows = tau**2 * kl_renorm(array(student), array(teacher), tau)
    expected = (0.5 * rows[1] + 3 * rows[2] + rows[3]) / 4
    assert float(distillation(student, log_teacher, tau=tau, weights=weights)) == pytest.approx(expected, rel=1e-5)


def test_distillation_of_a_case_by_hand() -> None:
    """Student scores are (1/2, 1/4 | 1/4), and teacher scores are (1/2, 1/2). The slice is 1/2 log 1 + 1/2 log 2, and
    in the other direction 1/2 log 1 + 1/4 log 1/2. Renormalised to (2/3, 1/3), it is 1/2 log(3/4) + 1/2 log(3/2)."""
    student, teacher = torch.tensor([[0.5, 0.25, 0.25]]).log(), torch.tensor([[0.5, 0.5]]).log()
    literal = distillation(student, teacher, mode="slice", direction="reverse")
    assert float(literal) == pytest.approx(-math.log(2) / 4, rel=1e-6)
    assert float(distillation(student, teacher, mode="slice")) == pytest.approx(math.log(2) / 2, rel=1e-6)
    renormalised = (math.log(3 / 4) + math.log(3 / 2)) / 2
    assert float(distillation(student, teacher, mode="renorm")) == pytest.approx(renormalised, rel=1e-5)


def test_sliced_distillation_is_the_renormalised_one_less_the_log_of_the_old_mass() -> None:
    student, log_teacher = normal(5, 7, seed=4), F.log_softmax(normal(5, 4, seed=5), 1)
    old_mass = softmax(array(student))[:, :4].sum(1)
    gap = distillation(student, log_teacher, mode="slice") - distillation(student, log_teacher, mode="renorm")
    assert float(gap) == pytest.approx(-np.log(old_mass).mean(), rel=1e-10)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0])
def test_cross_entropy_with_sliced_distillation_trains_towards_the_closed_form(alpha: float) -> None:
    """Section 3.1: the gradient is (1 + alpha) S - onehot(y) - alpha P0, where P0 is 0 on the new columns."""
    student, log_teacher = normal(5, 7, seed=4), F.log_softmax(normal(5, 4, seed=5), 1)
    targets = torch.tensor([4, 5, 6, 4, 5])
    student.requires_grad_()
    (F.cross_entropy(student, targets) + alpha * distillation(student, log_teacher, mode="slice")).backward()
    p0 = np.pad(np.exp(array(log_teacher)), ((0, 0), (0, 3)))
    expected = (1 + alpha) * softmax(array(student)) - np.eye(7)[targets.numpy()] - alpha * p0
    assert student.grad is not None
    np.testing.assert_allclose(student.grad.numpy(), expected / 5, atol=1e-12)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0])
def test_the_direction_decides_how_much_old_mass_a_new_sample_keeps(alpha: float) -> None:
    """Section 3.1: with one new class and a student that agrees with the teacher among the old ones, cross-entropy +
    alpha KL is -log(1 - m) - alpha log m (forward) or -log(1 - m) + alpha m log m (reverse), where m is the old mass.
    They are minimal at m = alpha / (1 + alpha), and where 1 / (1 - m) + alpha (1 + log m) = 0."""
    log_teacher = torch.tensor([[0.7, 0.3]], dtype=torch.float64).log()
    for direction, excess in (
        ("forward", lambda m: m - alpha / (1 + alpha)),
        ("reverse", lambda m: 1 / (1 - m) + alpha * (1 + math.log(m))),
    ):
        new = torch.tensor(0.0, dtype=torch.float64, requires_grad=True)  # the new logit; the old logits are log S0
        reading: Any = {"mode": "slice", "direction": direction}
        optimiser = torch.optim.LBFGS([new], max_iter=100, tolerance_grad=1e-12, tolerance_change=1e-14)

        def loss(reading: Any = reading, new: Tensor = new, optimiser: Any = optimiser) -> Tensor:
            optimiser.zero_grad()
            logits = torch.cat([log_teacher, new[None, None]], 1)
            value = F.cross_entropy(logits, torch.tensor([2])) + alpha * distillation(logits, log_teacher, **reading)
            value.backward()
            return value

        optimiser.step(loss)
        assert excess(1 / (1 + math.exp(new.item()))) == pytest.approx(0.0, abs=1e-6)


def test_a_teacher_without_any_doubt_gives_a_finite_distillation() -> None:
    student, log_teacher = torch.zeros(1, 3), torch.tensor([[0.0, -math.inf]])
    assert float(distillation(student, log_teacher, mode="slice")) == pytest.approx(math.log(3), rel=1e-6)


# -- logit matching (3.3)


def test_logit_matching_looks_at_old_columns_and_reduces_as_it_says() -> None:
    student = torch.tensor([[1.0, 2.0, 30.0], [4.0, 5.0, 60.0]])
    teacher = torch.tensor([[0.0, 0.0], [2.0, 2.0]])  # squared differences: 1, 4 and 4, 9
    assert float(old_logit_mse(student, teacher)) == 18 / 4
    assert float(old_logit_mse(student, teacher, "sum")) == 18 / 2


# -- distillation in the cross-entropy form and of feature directions (LUCIR)


@pytest.mark.parametrize("tau", [1.0, 2.0, 5.0])
def test_soft_cross_entropy_is_the_kl_plus_the_teachers_entropy(tau: float) -> None:
    student, teacher = normal(6, 4, seed=4), normal(6, 4, seed=5)
    p = softmax(array(teacher) / tau)
    entropy = -(p * np.log(p)).sum(1).mean()
    expected = kl_renorm(array(student), array(teacher), tau).mean() + entropy
    assert soft_cross_entropy(student, teacher, tau).item() == pytest.approx(expected, rel=1e-12)
    assert soft_cross_entropy(teacher, teacher, tau).item() == pytest.approx(entropy, rel=1e-12)  # its minimum


def test_soft_cross_entropy_teaches_the_student_alone() -> None:
    student, teacher = normal(6, 4, seed=4).requires_grad_(), normal(6, 4, seed=5).requires_grad_()
    soft_cross_entropy(student, teacher, 2.0).backward()
    assert teacher.grad is None
    assert student.grad is not None
    expected = difference_quotient(lambda z: kl_renorm(z, array(teacher), 2.0).mean(), array(student))
    np.testing.assert_allclose(array(student.grad), expected, atol=1e-8)


def test_feature_cosine_ignores_length_and_counts_the_angle() -> None:
    h = torch.tensor([[3.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    teacher = torch.tensor([[7.0, 0.0], [5.0, 0.0], [-2.0, -2.0]])  # cosines 1, 0, -1
    assert feature_cosine(h, teacher).item() == pytest.approx((0 + 1 + 2) / 3, abs=1e-6)
    assert feature_cosine(h, 4 * h).item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("mode", ["slice", "renorm"])
def test_the_gradient_of_the_divergence_is_finite_where_a_probability_vanishes(mode: Any, direction: Any) -> None:
    for dtype, far in ((torch.float32, 200.0), (torch.float64, 2000.0)):
        logits = torch.tensor([[0.0, -far, far], [far, 0.0, -far]], dtype=dtype, requires_grad=True)
        teacher = torch.tensor([[0.5, 0.5], [0.9, 0.1]], dtype=dtype).log()
        loss = distillation(logits, teacher, mode=mode, direction=direction)
        loss.backward()
        assert loss.isfinite()
        assert logits.grad is not None
        assert logits.grad.isfinite().all()
