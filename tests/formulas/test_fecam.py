"""FeCAM's distances are compared with numpy, from unit features to the pseudo-inverse, and shrinkage and normalisation
with hand-computed numbers. With the identity as covariance it predicts the nearest mean."""

from typing import Any

import numpy as np
import pytest
import torch
from steps import Array, array, make
from torch import Tensor

from bace.errors import ConfigError
from bace.methods.fecam import FeCAM, correlations, shrunk
from bace.models.model import Output

WIDTH = 5


def data(seed: int = 0) -> tuple[Array, Any]:
    """Return three classes of 12, 7 and 20 rows, each with its own covariance."""
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(3), (12, 7, 20))
    mixes, centres = rng.normal(size=(3, WIDTH, WIDTH)), 2 * rng.normal(size=(3, WIDTH))
    return np.stack([centres[c] + rng.normal(size=WIDTH) @ mixes[c] for c in y]), y


def observed(x: Array, y: Any, classes: int = 3, **options: Any) -> FeCAM:
    method = FeCAM(**options)
    method.statistics.grow(classes, WIDTH)
    for rows in torch.randperm(len(y), generator=torch.Generator().manual_seed(0)).split(8):
        method.observe(torch.from_numpy(x)[rows], torch.from_numpy(y)[rows])
    return method


def scores(method: FeCAM, x: Array) -> Tensor:
    """Call `predict` on features."""
    method.infer = lambda batches, model=None: Output(torch.from_numpy(x), torch.zeros(len(x), 0))  # type: ignore[method-assign]
    return method.predict(None)  # type: ignore[arg-type]


def unit(x: Array) -> Array:
    result: Array = x / np.linalg.norm(x, axis=1, keepdims=True)
    return result


def by_numpy(x: Array, y: Any, asked: Array, a1: float, a2: float, common: bool) -> Array:
    rows = [unit(x)[y == c] for c in range(3)]
    covariances = [np.cov(own.T) for own in rows]
    if common:
        covariances = [np.mean(covariances, 0)] * 3
    found = []
    for own, S in zip(rows, covariances, strict=True):
        off = ~np.eye(WIDTH, dtype=bool)
        S = S + a1 * np.diag(S).mean() * np.eye(WIDTH) + a2 * S[off].mean() * off
        S = S / np.sqrt(np.outer(np.diag(S), np.diag(S)))
        inverse = np.linalg.pinv(S)
        found.append([-(f - own.mean(0)) @ inverse @ (f - own.mean(0)) for f in unit(asked)])
    return np.array(found).T


@pytest.mark.parametrize("common", [False, True])
@pytest.mark.parametrize(("a1", "a2"), [(1.0, 0.0), (0.0, 0.0), (0.5, 2.0)])
def test_scores_are_those_of_numpy(a1: float, a2: float, common: bool) -> None:
    x, y = data()
    asked = np.random.default_rng(1).normal(size=(40, WIDTH))
    found = scores(observed(x, y, alpha1=a1, alpha2=a2, common=common), asked)
    np.testing.assert_allclose(array(found), by_numpy(x, y, asked, a1, a2, common), rtol=1e-8, atol=1e-10)


def test_with_the_identity_for_covariance_it_is_nearest_mean() -> None:
    x, y = data()
    asked = np.random.default_rng(1).normal(size=(200, WIDTH))
    own = scores(observed(x, y), asked).argmax(1).numpy()
    method = observed(x, y)
    method.metrics = {c: torch.eye(WIDTH) for c in range(3)}
    means = np.stack([unit(x)[y == c].mean(0) for c in range(3)])
    distances = ((unit(asked)[:, None] - means) ** 2).sum(2)
    np.testing.assert_allclose(array(scores(method, asked)), -distances, atol=1e-12)
    np.testing.assert_array_equal(scores(method, asked).argmax(1).numpy(), distances.argmin(1))
    assert 0.5 < np.mean(own == distances.argmin(1)) < 1  # covariances matter
    # a huge ridge leaves only the identity of a covariance
    np.testing.assert_allclose(array(scores(observed(x, y, alpha1=1e12), asked)), -distances, atol=1e-9)


def test_shrinkage_and_normalisation_by_hand() -> None:
    """Variances of 4 and 1 and a covariance of 1 give V1 = 5/2 and V2 = 1."""
    S = torch.tensor([[4.0, 1.0], [1.0, 1.0]])
    assert shrunk(S, 2.0, 3.0).tolist() == [[9.0, 4.0], [4.0, 6.0]]
    assert correlations(S).tolist() == [[1.0, 0.5], [0.5, 1.0]]


def test_a_class_of_one_example_has_the_identity_and_one_of_none_is_never_predicted() -> None:
    x, y = data()
    x, y = np.concatenate([x, x[:1] + 1]), np.append(y, 3)
    found = scores(observed(x, y, classes=5), x)
    distance = ((unit(x) - unit(x[-1:])) ** 2).sum(1)
    np.testing.assert_allclose(array(found[:, 3]), -distance, atol=1e-12)
    assert bool(torch.isinf(found[:, 4]).all())
    assert bool(torch.isfinite(found[:, :4]).all())


@pytest.mark.parametrize("common", [False, True])
def test_every_observation_counts_in_the_next_prediction(common: bool) -> None:
    x, y = data()
    half = np.arange(len(y)) % 2 == 0
    method = observed(x[half], y[half], common=common)
    scores(method, x)
    method.observe(torch.from_numpy(x[~half]), torch.from_numpy(y[~half]))
    np.testing.assert_allclose(array(scores(method, x)), array(scores(observed(x, y, common=common), x)), rtol=1e-9)


def test_covariances_are_told_before_a_run(tiny: Any) -> None:
    """Five classes have 16 x 16 numbers, twice, in double precision."""
    plain, common = (
        make(tiny, "image", {"name": "fecam", "common": c}, **{"benchmark.tasks": [2, 3]})[0] for c in (False, True)
    )
    encoder = sum(p.numel() for p in plain.model.encoder.parameters())
    assert plain.needs(1)[0] == encoder + 2 * 10 * 16 * 16
    assert common.needs(1)[0] == encoder + 2 * 6 * 16 * 16
    assert plain.needs(0)[0] == encoder + 2 * 4 * 16 * 16


def test_negative_shrinkage_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"alpha1 \(-1.0\)"):
        FeCAM(alpha1=-1.0)
