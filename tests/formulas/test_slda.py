"""SLDA's statistics are compared with the one-at-a-time recursion, the authors' whole procedure and pooled covariances
in numpy, its decisions with scikit-learn's LDA and the two-class closed form, and its shrinkage with scikit-learn's
OAS."""

from typing import Any, Literal

import numpy as np
import pytest
import torch
from sklearn.covariance import OAS
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from steps import Array, array, make, weights
from torch import Tensor

from bace.core.position import Position
from bace.core.trainer import Trainer
from bace.errors import ConfigError
from bace.methods.slda import SLDA
from bace.models.model import Output

WIDTH, CLASSES = 5, 3


def data(per_class: tuple[int, ...] = (12, 7, 16), seed: int = 0) -> tuple[Array, Any]:
    """Return Gaussians with one covariance, in random order."""
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.repeat(np.arange(len(per_class)), per_class))
    centres, mix = rng.normal(size=(len(per_class), WIDTH)) * 1.5, rng.normal(size=(WIDTH, WIDTH))
    return centres[y] + rng.normal(size=(len(y), WIDTH)) @ mix, y


def streamed(x: Array, y: Any, batch: int, classes: int = CLASSES, **options: Any) -> SLDA:
    """Return an SLDA that has seen these features in batches."""
    method = SLDA(**options)
    method.now = Position(0)
    method.means = torch.zeros(classes, WIDTH, dtype=torch.float64)
    method.counts = torch.zeros(classes, dtype=torch.float64)
    method.sigma = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    for rows in torch.arange(len(y)).split(batch):
        method.observe(torch.from_numpy(x)[rows], torch.from_numpy(y)[rows])
    return method


def scores(method: SLDA, x: Array) -> Tensor:
    """Call `predict` on features."""
    method.infer = lambda batches, model=None: Output(torch.from_numpy(x), torch.zeros(len(x), 0))  # type: ignore[method-assign]
    return method.predict(None)  # type: ignore[arg-type]


def sigma(method: SLDA) -> Array:
    return array(method.sigma)


def one_at_a_time(x: Array, y: Any, exact: bool) -> tuple[Array, Array, Array]:
    """Run the published recursion sample by sample: mean and count of each class, and one covariance."""
    mu, c, S = np.zeros((CLASSES, WIDTH)), np.zeros(CLASSES), np.zeros((WIDTH, WIDTH))
    for n, (row, k) in enumerate(zip(x, y, strict=True)):
        e = row - mu[k]
        f = c[k] / (c[k] + 1) if exact else n / (n + 1)
        S = (n * S + f * np.outer(e, e)) / (n + 1)
        mu[k] += e / (c[k] + 1)
        c[k] += 1
    return mu, c, S


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("batch", [1, 4, 9, 35])
def test_a_batch_with_repeated_labels_equals_its_rows_one_at_a_time(batch: int, exact: bool) -> None:
    x, y = data()
    assert len(set(y[:4])) < 4
    method = streamed(x, y, batch, exact=exact)
    mu, c, S = one_at_a_time(x, y, exact)
    np.testing.assert_allclose(array(method.means), mu, rtol=0, atol=1e-13)
    np.testing.assert_array_equal(array(method.counts), c)
    np.testing.assert_allclose(sigma(method), S, rtol=0, atol=1e-12)


def test_exact_covariance_is_the_pooled_one_in_any_order_and_the_published_is_not() -> None:
    x, y = data()
    centred = x - np.stack([x[y == k].mean(0) for k in range(CLASSES)])[y]
    pooled = centred.T @ centred / len(x)
    shuffle = np.random.default_rng(1).permutation(len(x))
    for order in (slice(None), slice(None, None, -1), shuffle):
        np.testing.assert_allclose(sigma(streamed(x[order].copy(), y[order].copy(), 8, exact=True)), pooled, atol=1e-12)
    first, second = (sigma(streamed(x[order], y[order], 8)) for order in (slice(None), shuffle))
    assert np.abs(first - second).max() > 0.02 * np.abs(pooled).max()
    assert np.abs(first - pooled).max() > 0.02 * np.abs(pooled).max()


def test_exact_mode_decides_as_batch_lda() -> None:
    x, y = data((15, 15, 15))  # balanced: scikit-learn's pooled covariance weighs classes by their priors
    method = streamed(x, y, 7, exact=True, eps=0.0)
    lda = LinearDiscriminantAnalysis(solver="lsqr", store_covariance=True).fit(x, y)
    np.testing.assert_allclose(sigma(method), lda.covariance_, atol=1e-12)
    np.testing.assert_allclose(array(method.means), lda.means_, atol=1e-13)
    asked = np.random.default_rng(5).normal(size=(200, WIDTH)) * 2
    found = scores(method, asked)
    np.testing.assert_array_equal(found.argmax(1).numpy(), lda.predict(asked))
    # equal priors add the same constant to every class
    difference = lda.decision_function(asked) - array(found)
    np.testing.assert_allclose(difference, np.full_like(difference, np.log(1 / 3)), atol=1e-6)
    assert 0.5 < np.mean(found.argmax(1).numpy() == scores(streamed(x, y, 7, eps=1.0), asked).argmax(1).numpy()) < 1


def test_two_classes_are_parted_by_the_closed_form() -> None:
    """Sigma = diag(2, 1/2, ...) and eps = 1/10 give Lambda = diag(1/1.9, 1/0.55), and w = Lambda (mu_1 - mu_0)."""
    method = streamed(*data(), 8, classes=2 + 1, eps=0.1)
    method.counts = torch.tensor([4.0, 4.0, 0.0]).double()
    method.means = torch.zeros(3, WIDTH).double()
    method.means[0, 0], method.means[1, 1] = 1.0, 2.0
    method.sigma = torch.diag(torch.tensor([2.0, 0.5, 1.0, 1.0, 1.0])).double()
    x = np.zeros((1, WIDTH))
    x[0, :2] = 3.0, 1.0
    # (0.9 * 2 + 0.1, 0.9 / 2 + 0.1) = (1.9, 0.55)
    expected = [3 / 1.9 - 0.5 / 1.9, 2 / 0.55 - 0.5 * 4 / 0.55]
    assert scores(method, x)[0, :2].tolist() == pytest.approx(expected, rel=1e-12)
    assert scores(method, x)[0, 2] == -torch.inf


def test_decisions_survive_any_invertible_map_of_the_features() -> None:
    x, y = data()
    asked = np.random.default_rng(2).normal(size=(100, WIDTH)) * 2
    A = np.random.default_rng(3).normal(size=(WIDTH, WIDTH))
    plain = scores(streamed(x, y, 8, exact=True, eps=0.0), asked)
    mapped = scores(streamed(x @ A.T, y, 8, exact=True, eps=0.0), asked @ A.T)
    np.testing.assert_allclose(array(mapped), array(plain), rtol=1e-7, atol=1e-8)
    with_identity = scores(streamed(x @ A.T, y, 8, exact=True, eps=0.5), asked @ A.T)
    assert np.abs(array(with_identity) - array(plain)).max() > 0.1


def test_a_class_without_examples_is_never_predicted() -> None:
    x, y = data()
    x = x - 50  # scores of real classes may be far below 0, the score of a mean of zeros
    method = streamed(x, y, 8, classes=CLASSES + 2)
    found = scores(method, -x)
    assert (found[:, :CLASSES].max(1).values < 0).any()
    assert set(found.argmax(1).tolist()) <= set(range(CLASSES))


def test_every_observation_counts_in_the_next_prediction() -> None:
    x, y = data()
    method = streamed(x[:20], y[:20], 8)
    scores(method, x)
    method.observe(torch.from_numpy(x[20:]), torch.from_numpy(y[20:]))
    np.testing.assert_allclose(array(scores(method, x)), array(scores(streamed(x, y, 8), x)), rtol=1e-9)


@pytest.mark.parametrize("covariance", ["plastic", "fixed"])
def test_the_first_covariance_is_oracle_approximating_shrinkage_of_the_first_task(
    covariance: Literal["plastic", "fixed"],
) -> None:
    x, y = data()
    method = streamed(x, y, 8, covariance=covariance)
    method.after_epoch(None)  # type: ignore[arg-type]
    centred = x - np.stack([x[y == k].mean(0) for k in range(CLASSES)])[y]
    oracle = OAS(assume_centered=True).fit(centred)
    assert 0.01 < oracle.shrinkage_ < 1
    np.testing.assert_allclose(sigma(method), oracle.covariance_, atol=1e-12)
    method.now.task = 1
    method.after_epoch(None)  # type: ignore[arg-type]
    np.testing.assert_allclose(sigma(method), oracle.covariance_, atol=1e-12)
    method.observe(torch.from_numpy(x[:1]), torch.from_numpy(y[:1]))  # it continues as published: f = n / (n + 1)
    e, n = x[0] - x[y == y[0]].mean(0), len(x)
    moved = (n * oracle.covariance_ + n / (n + 1) * np.outer(e, e)) / (n + 1)
    np.testing.assert_allclose(sigma(method), moved if covariance == "plastic" else oracle.covariance_, atol=1e-12)


def as_published(tasks: list[tuple[Array, Any]], covariance: str) -> tuple[Array, Array]:
    """Run the authors' procedure row by row. Sigma starts as a matrix of ones, and the first task may be fitted at
    once."""
    width, classes = tasks[0][0].shape[1], 1 + max(int(y.max()) for _, y in tasks)
    mu, c, S, n = np.zeros((classes, width)), np.zeros(classes), np.ones((width, width)), 0
    if covariance != "streamed":
        x, y = tasks.pop(0)
        for k in np.unique(y):
            mu[k], c[k] = x[y == k].mean(0), (y == k).sum()
        S, n = OAS(assume_centered=True).fit(x - mu[y]).covariance_, len(x)
    for x, y in tasks:
        for row, k in zip(x, y, strict=True):
            if covariance != "fixed":
                S = (n * S + np.outer(row - mu[k], row - mu[k]) * n / (n + 1)) / (n + 1)
            mu[k] += (row - mu[k]) / (c[k] + 1)
            c[k], n = c[k] + 1, n + 1
    return mu, S


@pytest.mark.parametrize("covariance", ["streamed", "plastic", "fixed"])
def test_a_run_over_all_tasks_is_the_published_procedure(tiny: Any, covariance: str) -> None:
    """The authors' initial covariance of ones has no effect, because n = 0 removes it with the first row."""
    options = {"name": "slda", "covariance": covariance}
    method, stream, config = make(tiny, "image", options, **{"benchmark.tasks": [2, 1, 2]})
    seen: list[tuple[int, Tensor, Tensor]] = []
    observe = method.observe

    def noted(x: Tensor, y: Tensor) -> None:
        seen.append((method.now.task, x, y))
        observe(x, y)

    method.observe = noted
    Trainer(method, stream, config).run()
    tasks = [[(x, y) for task, x, y in seen if task == t] for t in range(3)]
    rows = [(array(torch.cat([x for x, _ in part])), torch.cat([y for _, y in part]).numpy()) for part in tasks]
    mu, S = as_published(rows, covariance)
    np.testing.assert_allclose(array(method.means), mu, rtol=0, atol=1e-12)
    np.testing.assert_allclose(sigma(method), S, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("modality", ["image", "text"])
def test_the_cut_into_tasks_does_not_matter(tiny: Any, modality: str) -> None:
    """Kim et al.'s rows for 10 and 20 tasks differ by 0.02. In exact mode, only rounding errors remain. Nothing is
    trained."""
    found = []
    for tasks in ([2, 1, 2], [5]):
        method, stream, config = make(tiny, modality, {"name": "slda", "exact": True}, **{"benchmark.tasks": tasks})
        before = weights(method.model)
        Trainer(method, stream, config).run()
        assert all(torch.equal(value, before[name]) for name, value in method.model.state_dict().items())
        assert method.counts.tolist() == [10.0] * 5  # once each, for any number of epochs
        found.append(method)
    assert all(method.sigma.dtype == torch.float64 for method in found)
    np.testing.assert_allclose(array(found[0].means), array(found[1].means), atol=1e-6)
    np.testing.assert_allclose(sigma(found[0]), sigma(found[1]), atol=1e-6)


def test_the_features_are_clean_and_without_dropout(tiny: Any) -> None:
    with_dropout = {"backbone": tiny.bert, "benchmark.tasks": [5]}
    method, stream, config = make(tiny, "text", {"name": "slda"}, **with_dropout)
    assert method.model.has_dropout
    Trainer(method, stream, config).run()
    x, y = method.outputs(stream[0].train).features.double(), stream.labels(stream[0].train)[1]
    expected = torch.stack([x[y == k].mean(0) for k in range(5)])
    np.testing.assert_allclose(array(method.means), array(expected), atol=1e-6)


def test_a_share_outside_0_and_1_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"eps is -0.1"):
        SLDA(eps=-0.1)
