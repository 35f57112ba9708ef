"""Class statistics, observed in any split into parts, and features drawn from them are compared with numpy."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from steps import array

from bace.methods.parts.gaussians import ClassStatistics, draw_features

WIDTH = 3


def observed(x: torch.Tensor, y: torch.Tensor, parts: list[torch.Tensor]) -> ClassStatistics:
    statistics = ClassStatistics()
    statistics.grow(1, WIDTH)
    statistics.grow(3, WIDTH)  # one class has no examples
    for rows in parts:
        statistics.observe(x[rows], y[rows])
    return statistics


@given(st.lists(st.integers(0, 2), min_size=1, max_size=25), st.integers(1, 9), st.integers(0, 100))
def test_statistics_are_numpys_in_any_parts_and_any_order(labels: list[int], size: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    y = torch.tensor(labels)
    x = 5 + torch.randn(len(y), WIDTH, generator=rng, dtype=torch.float64)
    found = observed(x, y, list(torch.randperm(len(y), generator=rng).split(size)))
    assert found.observed == sorted(set(labels))
    for c in range(4):
        own = x[y == c].numpy()
        assert float(found.counts[c]) == len(own)
        if len(own):
            np.testing.assert_allclose(array(found.means[c]), own.mean(0), atol=1e-12)
        expected = np.cov(own.T) if len(own) > 1 else np.zeros((WIDTH, WIDTH))
        np.testing.assert_allclose(array(found.covariance(c)), expected, atol=1e-11)


def test_what_several_processes_have_seen_adds_up() -> None:
    rng = torch.Generator().manual_seed(1)
    x, y = torch.randn(30, WIDTH, generator=rng), torch.arange(30) % 3
    whole = observed(x, y, [torch.arange(30)])
    one, other = observed(x, y, [torch.arange(11)]), observed(x, y, [torch.arange(11, 30)])
    for c in other.observed:
        one.merge(c, float(other.counts[c]), other.means[c], other.scatter[c])
    for name in ("counts", "means", "scatter"):
        np.testing.assert_allclose(array(getattr(one, name)), array(getattr(whole, name)), atol=1e-12)


def test_a_far_mean_does_not_blur_a_covariance() -> None:
    """Sums of squares would lose all digits with these numbers."""
    x = torch.tensor([[1e9, 0.0, 0.0], [1e9 + 1, 0.0, 0.0], [1e9 + 2, 0.0, 0.0]])
    found = observed(x, torch.zeros(3, dtype=torch.int64), [torch.tensor([0]), torch.tensor([1, 2])])
    assert float(found.covariance(0)[0, 0]) == 1.0
    assert float(found.covariance(0).abs().sum()) == 1.0


def test_without_scatter_nothing_of_its_size_is_kept() -> None:
    statistics = ClassStatistics(scatter=False)
    statistics.grow(2, WIDTH)
    statistics.observe(torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]]), torch.tensor([1, 1]))
    assert statistics.scatter.numel() == 0
    assert statistics.means[1].tolist() == [2.0, 2.0, 2.0]
    assert statistics.counts.tolist() == [0.0, 2.0]


def test_drawn_features_have_the_means_and_covariances_of_their_classes() -> None:
    mix = torch.tensor([[1.0, 0.0, 0.0], [0.5, 2.0, 0.0], [0.0, -1.0, 0.3]])
    gaussians = [(torch.tensor([4.0, 0.0, -1.0]), mix @ mix.T), (torch.zeros(3), torch.eye(3) / 4)]
    drawn = draw_features(gaussians, 20_000, torch.Generator().manual_seed(0))
    assert drawn.shape == (40_000, 3)
    for (mean, covariance), rows in zip(gaussians, drawn.split(20_000), strict=True):
        np.testing.assert_allclose(rows.numpy().mean(0), mean.numpy(), atol=0.06)
        np.testing.assert_allclose(np.cov(rows.numpy().T), covariance.numpy(), atol=0.12)
    again = draw_features(gaussians, 20_000, torch.Generator().manual_seed(0))
    assert torch.equal(drawn, again)
