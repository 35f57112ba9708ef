"""MORE's loss with the out-of-distribution label, its back-updates and its scores are compared with numpy, and
Mahalanobis distances with scipy. Without memory and distances the whole run equals HAT bit for bit."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial.distance import mahalanobis as scipy_mahalanobis
from steps import (
    array,
    assert_equal_bits,
    at_task,
    changed_in_stages,
    cross_entropy,
    make,
    recorded_passes,
    softmax,
    weights,
)

import bace
from bace.core.trainer import Trainer
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.more import MORE
from bace.methods.parts.gaussians import class_gaussians, mahalanobis, shrunk_whitening

SMALL = {"name": "more", "latent": 6, "back_epochs": 2, "gate_steps": 0}


def more_at(tiny: Any, task: int = 1, modality: str = "image", **options: Any) -> Any:
    """Return a method at step 1 of 4 of the task's first epoch."""
    method = at_task(tiny, modality, {**SMALL, **options}, task, **{"benchmark.tasks": [2, 1, 2]})
    method.now.step, method.now.steps, method.now.epochs = 1, 4, 1
    return method


def learned(tiny: Any, tasks: int = 3, modality: str = "image", **options: Any) -> Any:
    method, stream, config = make(tiny, modality, {**SMALL, **options}, **{"benchmark.tasks": [2, 1, 2]})
    trainer = Trainer(method, stream, config)
    for task in stream[:tasks]:
        trainer.learn(task)
    return method


def shown(method: Any) -> Batch:
    """Return test examples of all tasks."""
    examples = torch.cat([task.test for task in method.stream])
    with method.stream.licence("test", examples):
        found: Batch = method.stream.batch(examples)
    return found


def under(method: Any, task: int, batch: Batch, scale: float | None = None) -> tuple[Any, Any]:
    """Return features and logits of the task's own head under its gates."""
    start = [0, 3, 5][task]  # heads of 2, 1 and 2 classes have 3, 2 and 3 outputs
    with torch.no_grad(), method.gates.of(task, scale):
        out = method.model(batch)
    return array(out.features), array(out.logits)[:, start : [3, 5, 8][task]]


# -- learning a task


@pytest.mark.parametrize("modality", ["image", "text"])
def test_replayed_rows_are_the_class_behind_the_tasks_own(tiny: Any, modality: str) -> None:
    method = more_at(tiny, 2, modality)
    batch = method.stream.batch(method.stream[2].train[:5], view=method.now.view())
    with recorded_passes() as passes:
        loss = method.loss(batch)
    assert len(passes) == 1
    both = passes[0].batch
    assert both.examples[:5].tolist() == batch.examples.tolist()
    assert set(both.examples[5:].tolist()) <= set(method.memory.examples.tolist())
    assert len(both) > 5
    _, logits = under(method, 2, both, method.scale)
    labels = np.array([y - 3 if y >= 3 else 2 for y in both.targets.tolist()])
    assert (labels[5:] == 2).all()
    assert loss["new"].item() == pytest.approx(cross_entropy(logits, labels), rel=1e-4)
    assert set(loss) == {"new", "sparsity"}


def test_the_first_task_sees_nothing_out_of_distribution(tiny: Any) -> None:
    method = more_at(tiny, 0)
    batch = method.stream.batch(method.stream[0].train[:5])
    with recorded_passes() as passes:
        loss = method.loss(batch)
    assert [len(p.batch) for p in passes] == [5]
    _, logits = under(method, 0, batch, method.scale)
    assert logits.shape == (5, 3)
    assert loss["new"].item() == pytest.approx(cross_entropy(logits, batch.targets.numpy()), rel=1e-4)


def test_half_of_each_step_is_replayed(tiny: Any) -> None:
    """Batches have 8 examples. The first task shows its 20 examples in three steps, and the second its 10 in three
    steps of at most 4 + 4."""
    method, stream, config = make(tiny, "image", SMALL, **{"benchmark.tasks": [2, 1, 2], "train.epochs": 1})
    sizes: list[int] = []
    loss = method.loss

    def noted(batch: Batch) -> Any:
        with recorded_passes() as passes:
            value = loss(batch)
        sizes.extend(len(p.batch) for p in passes)
        return value

    method.loss = noted  # type: ignore[method-assign]
    trainer = Trainer(method, stream, config)
    for task in stream[:2]:
        trainer.learn(task)
    assert sizes == [8, 8, 4, 8, 8, 6]


@pytest.mark.parametrize("modality", ["image", "text"])
def test_without_memory_and_distances_it_is_hat_with_softmax_scores_bit_for_bit(tiny: Any, modality: str) -> None:
    hat_options = {"name": "hat", "scores": "softmax", "latent": 6}
    options = {"name": "more", "distance": False, "temperature": 1.0, "latent": 6}
    hat, more = (
        bace.run(tiny.settings(modality, method=m, **{"memory.size": 0})).method for m in (hat_options, options)
    )
    assert_equal_bits(weights(hat.model), weights(more.model))
    batch = shown(hat)
    assert torch.equal(hat.predict(batch), more.predict(batch))
    more.temperature, hat.scores = 2.0, "logits"
    logits = array(hat.predict(batch))
    halved = [softmax(logits[:, part] / 2) for part in (slice(0, 2), slice(2, 3), slice(3, 5))]
    np.testing.assert_allclose(array(more.predict(batch)), np.concatenate(halved, 1), rtol=1e-5)


# -- Gaussians


def test_distances_are_scipys(tiny: Any) -> None:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(40, 6)) @ rng.normal(size=(6, 6))
    targets = np.repeat([3, 4, 5], [20, 15, 5])
    means, covariance = class_gaussians(torch.tensor(features), torch.tensor(targets), range(3, 6))
    expected = np.mean([np.cov(features[targets == c].T) for c in (3, 4, 5)], 0)
    np.testing.assert_allclose(array(covariance), expected, rtol=1e-9, atol=1e-12)
    inverse = np.linalg.inv(0.8 * expected + 0.2 * np.eye(6))
    asked = rng.normal(size=(7, 6))
    found = array(mahalanobis(torch.tensor(asked), means, shrunk_whitening(covariance)))
    for i, h in enumerate(asked):
        for j, c in enumerate((3, 4, 5)):
            mean = features[targets == c].mean(0)
            assert found[i, j] == pytest.approx(scipy_mahalanobis(h, mean, inverse), rel=1e-9)


def test_a_class_of_one_example_and_a_distance_of_zero_are_finite() -> None:
    feature = torch.tensor([[1.0, 2.0, 3.0]])
    means, covariance = class_gaussians(feature, torch.tensor([0]), range(1))
    assert covariance.count_nonzero() == 0
    whitening = shrunk_whitening(covariance)
    torch.testing.assert_close(whitening.T @ whitening, 5 * torch.eye(3))
    distance = mahalanobis(torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 5.0]]), means, whitening)
    assert distance[:, 0].tolist() == pytest.approx([0.0, 2 / math.sqrt(0.2)], abs=1e-5)


def test_statistics_are_those_of_the_tasks_own_gates_and_stay_true(tiny: Any) -> None:
    """The output of a task's gates never changes, so all means can be computed again after the last task."""
    method = learned(tiny)
    for task in method.stream:
        with method.stream.licence("test", task.train):
            batch = method.stream.batch(task.train)  # clean views
        features, _ = under(method, task.index, batch)
        covariances = []
        for c in task.classes:
            own = features[batch.targets.numpy() == c]
            np.testing.assert_allclose(array(method.means[c]), own.mean(0), atol=1e-5)
            covariances.append(np.cov(own.T))
        shrunk = 0.8 * np.mean(covariances, 0) + 0.2 * np.eye(16)
        whitening = array(method.whitening[task.index])
        np.testing.assert_allclose(np.linalg.inv(whitening.T @ whitening), shrunk, atol=1e-5)
        assert np.abs(covariances).max() > 0.01


def test_a_model_of_version_0_1_which_saved_the_factors_themselves_predicts_the_same(tiny: Any) -> None:
    method = learned(tiny)
    saved, expected = method.state_dict(), method.predict(shown(method))
    saved["factors"] = torch.linalg.inv(saved.pop("whitening"))
    method.whitening = method.whitening[:0]
    method.load_state_dict(saved)
    torch.testing.assert_close(method.predict(shown(method)), expected)


# -- back-updates


def test_a_back_update_changes_one_earlier_head_and_nothing_else(tiny: Any) -> None:
    changed = changed_in_stages(Trainer(*make(tiny, "image", SMALL, **{"benchmark.tasks": [2, 1, 2]})))
    assert list(changed) == [(0, "main"), (1, "main"), (1, "back 1"), (2, "main"), (2, "back 1"), (2, "back 2")]
    for (_, stage), names in changed.items():
        if stage != "main":
            p = int(stage.removeprefix("back ")) - 1
            assert names == {f"model.head.blocks.{p}", f"model.head.biases.{p}"}
    for p in range(3):  # learning a task does not change the heads of the others
        heads = {name for name in changed[p, "main"] if ".head." in name}
        assert heads == {f"model.head.blocks.{p}", f"model.head.biases.{p}"}


def test_no_epochs_are_no_back_updates(tiny: Any) -> None:
    method = more_at(tiny, 2, back_epochs=0)
    assert [stage.name for stage in method.stages(method.stream[2])] == ["main"]


@pytest.mark.parametrize("p", [0, 1])
def test_a_back_update_is_cross_entropy_on_features_under_the_heads_own_gates(tiny: Any, p: int) -> None:
    method = more_at(tiny, 2)
    stage = next(s for s in method.stages(method.stream[2]) if s.name == f"back {p + 1}")
    assert stage.epochs == 2
    assert stage.batch_size == 8
    method.now.stage = stage.name
    method.eval()
    method.before_epoch(stage)
    pool = stage.examples()
    batch = method.stream.batch(pool[torch.tensor([5, 0, 12, 3, 7])])
    with recorded_passes() as passes:
        loss = stage.loss(batch)
    assert not passes  # cached
    _, logits = under(method, p, batch)
    first, classes = [(0, 2), (2, 1)][p]
    labels = np.array([y - first if first <= y < first + classes else classes for y in batch.targets.tolist()])
    assert len(set(labels.tolist())) > 1
    assert loss.item() == pytest.approx(cross_entropy(logits, labels), rel=1e-4)


@pytest.mark.parametrize("size", [10, 7])
def test_the_pool_has_as_many_examples_of_each_class(tiny: Any, size: int) -> None:
    method = at_task(tiny, "image", SMALL, 2, **{"benchmark.tasks": [2, 1, 2], "memory.size": size})
    pool = method.pool(method.stream[2])
    counts = torch.bincount(method.stream.targets[pool]).tolist()
    assert counts == [size // 3] * 5
    assert len(set(pool.tolist())) == len(pool)
    old = pool[method.stream.targets[pool] < 3]
    assert set(old.tolist()) == set(method.memory.examples.tolist())
    assert set(pool.tolist()) - set(old.tolist()) <= set(method.stream[2].train.tolist())


def test_the_smallest_class_sets_the_pool(tiny: Any) -> None:
    method = more_at(tiny, 2)
    method.memory.keep(torch.arange(len(method.memory))[1:])  # one class has lost an example
    counts = torch.bincount(method.stream.targets[method.pool(method.stream[2])]).tolist()
    assert counts == [2] * 5


def test_features_are_computed_once_a_stage(tiny: Any) -> None:
    method = more_at(tiny, 2)
    first, second = method.stages(method.stream[2])[1:]
    with recorded_passes() as passes:
        for stage, epochs in ((first, 3), (second, 2)):
            for epoch in range(epochs):
                method.now.stage, method.now.epoch = stage.name, epoch
                method.before_epoch(stage)
    assert [sorted(p.batch.examples.tolist()) for p in passes] == [sorted(first.examples().tolist())] * 2
    assert not any(p.training for p in passes)


# -- prediction


@pytest.mark.parametrize("distance", [True, False])
def test_scores_are_softmaxes_without_their_last_column_weighed_by_nearness(tiny: Any, distance: bool) -> None:
    method = learned(tiny, distance=distance)
    batch = shown(method)
    expected = []
    for t, classes in enumerate((range(2), range(2, 3), range(3, 5))):
        features, logits = under(method, t, batch)
        part = softmax(logits / 2)[:, : len(classes)]
        if distance:
            whitening = array(method.whitening[t])
            inverse = whitening.T @ whitening
            means = array(method.means)
            near = [[20 / scipy_mahalanobis(h, means[c], inverse) for c in classes] for h in features]
            part = part * np.max(near, 1)[:, None]
        expected.append(part)
    found = array(method.predict(batch))
    assert found.shape == (len(batch), 5)
    np.testing.assert_allclose(found, np.concatenate(expected, 1), rtol=1e-3)


def test_the_out_of_distribution_column_takes_mass_and_is_never_predicted(tiny: Any) -> None:
    method = learned(tiny, distance=False)
    batch = shown(method)
    before = array(method.predict(batch))
    with torch.no_grad():
        for t in range(3):
            method.head.biases[t][-1] = 20.0
    after = array(method.predict(batch))
    assert after.shape == (len(batch), 5)
    assert (after < 0.01 * before + 1e-3).all()
    assert after.argmax(1).max() < 5


def test_a_point_on_a_mean_has_a_finite_score(tiny: Any) -> None:
    method = learned(tiny, tasks=1)
    method.means[0] = 0
    assert method.nearness(0, torch.zeros(1, 16)).item() == pytest.approx(1e6)


def test_early_stopping_with_the_extra_output(tiny: Any) -> None:
    """The run finishes, and early stopping never shortens a back-update."""
    log: list[Any] = []
    settings = {"benchmark.tasks": [2, 1, 2], "benchmark.val_fraction": 0.2, "train.early_stop": 1, "train.epochs": 3}
    method, stream, config = make(tiny, "image", {**SMALL, "back_epochs": 4}, **settings)
    Trainer(method, stream, config, log=log.append).run()
    epochs = [event["epoch"] for event in log if event["event"] == "epoch" and event["stage"] == "back 1"]
    assert epochs == [0, 1, 2, 3, 0, 1, 2, 3]


def test_wrong_values_are_refused() -> None:
    for wrong in ({"temperature": 0.0}, {"back_epochs": -1}):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))} \\({next(iter(wrong.values()))}\\)"):
            MORE(**wrong)  # type: ignore[arg-type]
