"""RanPAC's sums, solution and choice of strength are compared with numpy on the network's own features. Without a
projection it equals ridge regression, and with a fixed strength the split into tasks does not matter. Only its first
session changes adapters."""

from typing import Any

import numpy as np
import pytest
import torch
from steps import Array, array, changed_in_stages, make
from torch import Tensor

from bace.core.trainer import Trainer
from bace.errors import ConfigError
from bace.methods.parts.ridge import LAMBDAS
from bace.methods.ranpac import RanPAC

FROZEN = {"name": "ranpac", "M": 30, "adapt": False}


def learned(tiny: Any, modality: str, method: dict[str, Any], **changes: Any) -> Any:
    made, stream, config = make(tiny, modality, method, **{"benchmark.tasks": [2, 1, 2], **changes})
    Trainer(made, stream, config).run()
    return made


def data_of(method: Any, task: int) -> tuple[Array, Any]:
    """Return the clean features of a task, and their classes."""
    stream = method.stream
    with stream.licence("a test", stream[task].train):
        targets = stream.labels(stream[task].train)[1]
        return array(method.outputs(stream[task].train).features), targets.numpy()


def everything(method: Any) -> tuple[Array, Any]:
    parts = [data_of(method, task) for task in range(len(method.stream))]
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])


def ridge(H: Array, Y: Array, lam: float) -> Array:
    """Solve by least squares with sqrt(lambda) I as additional rows."""
    rows = np.concatenate([H, np.sqrt(lam) * np.eye(H.shape[1])])
    solution: Array = np.linalg.lstsq(rows, np.concatenate([Y, np.zeros((H.shape[1], Y.shape[1]))]), rcond=None)[0]
    return solution


@pytest.mark.parametrize("modality", ["image", "text"])
def test_sums_and_solution_are_those_of_numpy(tiny: Any, modality: str) -> None:
    method = learned(tiny, modality, FROZEN)
    x, y = everything(method)
    H = np.maximum(x @ array(method.projection), 0)
    np.testing.assert_allclose(array(method.G), H.T @ H, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(array(method.Q), H.T @ np.eye(5)[y], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(array(method.weight), ridge(H, np.eye(5)[y], float(method.lam)), rtol=1e-6, atol=1e-8)
    assert method.G.dtype == torch.float64
    assert len(method.x) == len(method.y) == 0  # no example is kept


def test_without_a_projection_it_is_ridge_regression_on_the_features(tiny: Any) -> None:
    method = learned(tiny, "image", {**FROZEN, "M": 0, "ridge": 0.5})
    x, y = everything(method)
    expected = ridge(x, np.eye(5)[y], 0.5)
    np.testing.assert_allclose(array(method.weight), expected, rtol=1e-8, atol=1e-10)
    test = method.stream[1].test
    with method.stream.licence("a test", test):
        scores, asked = method.predict(method.stream.batch(test)), array(method.outputs(test).features)
    np.testing.assert_allclose(array(scores), asked @ expected, rtol=1e-8, atol=1e-10)


def test_the_projection_is_standard_normal_and_drawn_once(tiny: Any) -> None:
    method, stream, config = make(tiny, "image", {**FROZEN, "M": 400})
    before = method.projection.clone()
    assert before.shape == (16, 400)
    assert abs(float(before.mean())) < 0.05
    assert abs(float(before.std()) - 1) < 0.03
    Trainer(method, stream, config).run()
    assert torch.equal(method.projection, before)


def test_the_strength_is_chosen_on_the_task_alone_in_its_shuffled_order(tiny: Any) -> None:
    method, stream, config = make(tiny, "image", FROZEN)
    seen: list[tuple[int, Tensor, Tensor]] = []
    observe = method.observe

    def noted(x: Tensor, y: Tensor) -> None:
        seen.append((method.now.task, x, y))
        observe(x, y)

    method.observe = noted
    trainer = Trainer(method, stream, config)
    for task in stream:
        trainer.learn(task)
        x, y = (torch.cat([row[i] for row in seen if row[0] == task.index]) for i in (1, 2))
        assert len(set(y[:10].tolist())) > 1  # the examples are shuffled, although the files are sorted by class
        H, Y = np.maximum(array(x) @ array(method.projection), 0), np.eye(task.classes.stop)[y.numpy()]
        fit = int(0.8 * len(H))
        errors = [((H[fit:] @ ridge(H[:fit], Y[:fit], lam) - Y[fit:]) ** 2).mean() for lam in LAMBDAS]
        assert float(method.lam) == LAMBDAS[int(np.argmin(errors))]
        assert method.report() == {"lambda": float(method.lam)}


def test_with_a_fixed_strength_the_cut_into_tasks_does_not_matter(tiny: Any) -> None:
    one, other = (learned(tiny, "image", {**FROZEN, "ridge": 3.0}, **{"benchmark.tasks": t}) for t in ([2, 1, 2], [5]))
    np.testing.assert_allclose(array(one.weight), array(other.weight), rtol=1e-8, atol=1e-10)


def test_a_task_of_one_example_keeps_the_strength(tiny: Any) -> None:
    method, stream, config = make(tiny, "image", FROZEN)
    trainer = Trainer(method, stream, config)
    trainer.learn(stream[0])
    before = float(method.lam)
    stream.tasks[1] = type(stream[1])(1, "one", range(2, 4), stream[1].train[:1], stream[1].valid, stream[1].test)
    trainer.learn(stream[1])
    assert float(method.lam) == before
    [shown] = stream.labels(stream[1].train)[1].tolist()
    with stream.licence("a test", stream[1].test):
        scores = method.predict(stream.batch(stream[1].test))
    assert bool(torch.isinf(scores[:, 5 - shown]).all())  # the task's other class, 2 or 3, was never shown
    assert bool(torch.isfinite(scores[:, shown]).all())


# -- the first session


def test_adapters_and_a_cosine_head_are_tuned_on_the_first_task_and_then_rest(tiny: Any) -> None:
    method, stream, config = make(tiny, "image", {"name": "ranpac", "M": 30, "tune_epochs": 3})
    changed = changed_in_stages(Trainer(method, stream, config))
    assert list(changed) == [(0, "tune"), (0, "main"), (1, "main")]
    assert all(name.startswith(("model.encoder.additions.", "model.head.")) for name in changed[0, "tune"])
    assert any(name.startswith("model.encoder.additions.") for name in changed[0, "tune"])
    for stage in ((0, "main"), (1, "main")):
        assert not any(name.startswith("model.") for name in changed[stage])
    assert not any(p.requires_grad for p in method.model.parameters())


def test_the_first_session_is_tuned_as_published(tiny: Any) -> None:
    method, stream, _ = make(tiny, "image", {"name": "ranpac", "M": 30})
    method.grow(stream[0])
    tune = method.stages(stream[0])[0]
    assert (tune.epochs, tune.batch_size, tune.lr, tune.momentum, tune.weight_decay) == (20, 48, 0.01, 0.9, 5e-4)
    assert float(method.model.head.sigma) == 1.0


def test_statistics_are_of_the_tuned_features(tiny: Any) -> None:
    method = learned(tiny, "image", {"name": "ranpac", "M": 30, "tune_epochs": 3, "tune_lr": 1.0})
    x, y = everything(method)
    H = np.maximum(x @ array(method.projection), 0)
    np.testing.assert_allclose(array(method.Q), H.T @ np.eye(5)[y], rtol=1e-9, atol=1e-9)
    with method.adapters.of():  # the original encoder gives other features
        assert np.abs(everything(method)[0] - x).max() > 1e-3


def test_its_matrix_is_told_before_a_run(tiny: Any) -> None:
    frozen, adapted = (make(tiny, "image", {"name": "ranpac", "M": 100, "adapt": adapt})[0] for adapt in (False, True))
    encoder = sum(p.numel() for p in frozen.model.encoder.parameters())
    assert frozen.needs(0) == (encoder + 2 * (3 * 100**2 + 16 * 100), 0)
    size = 2 * (16 * 64 + 64 + 64 * 16 + 16)  # two blocks
    assert adapted.needs(0) == (frozen.needs(0)[0] + size, size)


def test_values_without_meaning_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"M \(-1\)"):
        RanPAC(M=-1)
    with pytest.raises(ConfigError, match=r"ridge \(0\)"):
        RanPAC(ridge=0)
    with pytest.raises(ConfigError, match=r"tune_epochs \(0\)"):
        RanPAC(tune_epochs=0)
