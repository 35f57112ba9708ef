"""ACIL's solution after each batch is compared with joint ridge regression in numpy, in any order of tasks, and one
update with hand-computed numbers."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from steps import Array, array, learned_before, make
from torch import Tensor

from bace.core.trainer import Trainer
from bace.errors import ConfigError, TrainingError
from bace.methods.acil import ACIL

WIDTH, EXPANSION = 4, 12


def begun(gamma: float = 0.1, classes: int = 3) -> ACIL:
    """Return a method before its first example, with its own random features."""
    method = ACIL(EXPANSION, gamma)
    rng = torch.Generator().manual_seed(0)
    method.register_buffer("projection", torch.randn(WIDTH, EXPANSION, generator=rng))
    method.register_buffer("R", torch.eye(EXPANSION) / gamma)
    method.register_buffer("weight", torch.zeros(EXPANSION, classes))
    return method


def joint(x: Array, y: Any, projection: Tensor, gamma: float, classes: int) -> Array:
    """Return (X^T X + gamma I)^-1 X^T Y for all rows at once, by least squares with sqrt(gamma) I as additional
    rows."""
    X = np.maximum(x @ array(projection), 0)
    rows = np.concatenate([X, np.sqrt(gamma) * np.eye(X.shape[1])])
    Y = np.concatenate([np.eye(classes)[y], np.zeros((X.shape[1], classes))])
    solution: Array = np.linalg.lstsq(rows, Y, rcond=None)[0]
    return solution


@given(st.integers(1, 40), st.integers(1, 45), st.integers(0, 50), st.sampled_from([1e-3, 0.1, 10.0]))
def test_batch_by_batch_is_joint_ridge_regression(count: int, size: int, seed: int, gamma: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    x, y = torch.randn(count, WIDTH, generator=rng), torch.randint(3, (count,), generator=rng)
    method = begun(gamma)
    for rows in torch.randperm(count, generator=rng).split(size):
        method.observe(x[rows], y[rows])
    expected = joint(array(x), y.numpy(), method.projection, gamma, 3)
    np.testing.assert_allclose(array(method.weight), expected, rtol=1e-8, atol=1e-8)


def test_a_matrix_that_rounding_has_destroyed_is_reported_after_the_epoch(tiny: Any) -> None:
    trainer = learned_before(tiny, "image", {"name": "ACIL", "expansion": EXPANSION}, 0)
    trainer.method.get_buffer("R").neg_()  # no longer positive definite: its update has no factor
    with pytest.raises(TrainingError, match="raise gamma"):
        trainer.learn(trainer.stream[0])


def test_one_row_by_hand() -> None:
    """There is one feature, and gamma is 1/2, so R = 2. Then x = 3 gives X = 3, R = 2 - 36 / 19 = 2 / 19 and W = 2 / 19
    * 3 (1, 0)."""
    method = ACIL(1, 0.5)
    method.register_buffer("projection", torch.ones(1, 1))
    method.register_buffer("R", torch.full((1, 1), 2.0))
    method.register_buffer("weight", torch.zeros(1, 2))
    method.observe(torch.tensor([[3.0]]), torch.tensor([0]))
    assert method.R.item() == pytest.approx(2 / 19, rel=1e-12)
    assert method.weight[0].tolist() == pytest.approx([6 / 19, 0.0], rel=1e-12)


@pytest.mark.parametrize("modality", ["image", "text", "token"])
def test_a_run_over_tasks_is_joint_ridge_regression_on_all_of_its_data(tiny: Any, modality: str) -> None:
    tasks = {"benchmark.tasks": [2, 1, 2]}
    method, stream, config = make(tiny, modality, {"name": "acil", "expansion": 40}, **tasks)
    assert method.projection.abs().max() <= 1 / 4  # 1 / sqrt(width)
    Trainer(method, stream, config).run()
    assert all(value.dtype == torch.float64 for value in (method.projection, method.R, method.weight))
    x, y = [], []
    for task in stream:
        with stream.licence("a test", task.train):
            targets = stream.labels(task.train)[1]
            learned = (targets > 0) | (task.index == 0) | method.learns_o if modality == "token" else targets >= 0
            x.append(array(method.outputs(task.train).features[learned]))
            y.append(targets[learned].numpy())
    classes = stream[-1].classes.stop
    expected = joint(np.concatenate(x), np.concatenate(y), method.projection, 0.1, classes)
    np.testing.assert_allclose(array(method.weight), expected, rtol=1e-8, atol=1e-8)


def test_a_class_without_examples_is_never_predicted(tiny: Any) -> None:
    method, stream, config = make(tiny, "image", {"name": "acil", "expansion": 16})
    Trainer(method, stream, config).run()
    method.weight = torch.cat([-method.weight.abs(), torch.zeros(16, 1)], 1)
    with stream.licence("a test", stream[0].test):
        scores = method.predict(stream.batch(stream[0].test))
    assert bool((scores[:, :-1] < 0).all())
    assert bool(torch.isinf(scores[:, -1]).all())


def test_its_matrices_are_told_before_a_run(tiny: Any) -> None:
    method = make(tiny, "image", {"name": "acil", "expansion": 100})[0]
    encoder = sum(p.numel() for p in method.model.encoder.parameters())
    assert method.needs(0)[0] == encoder + 2 * (2 * 100**2 + 16 * 100)


def test_values_without_meaning_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"gamma \(0\)"):
        ACIL(gamma=0)
