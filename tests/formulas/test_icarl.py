"""Loss, exemplars and class means are compared in double precision with numpy code written from the authors' formulas.
The decision is also checked by the invariances of a nearest mean."""

from typing import Any

import numpy as np
import pytest
import torch
from steps import Array, array, at_task, logits_of, make, recorded_passes, some
from torch import Tensor

import bace
from bace.config.parse import config_from
from bace.core.trainer import Trainer
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.experiments.assemble import assemble
from bace.models.model import Output


def sigmoid(z: Array) -> Array:
    result: Array = 1 / (1 + np.exp(-z))
    return result


def binary_cross_entropies(z: Array, wanted: Array) -> Array:  # (rows, classes)
    result: Array = -wanted * np.log(sigmoid(z)) - (1 - wanted) * np.log(1 - sigmoid(z))
    return result


def learned(tiny: Any, method: dict[str, Any] | None = None, modality: str = "image", **changes: Any) -> Any:
    """Return a method that has learned all tasks."""
    made, stream, config = make(tiny, modality, method or {"name": "icarl"}, **changes)
    Trainer(made, stream, config).run()
    return made


def shown(method: Any, examples: Tensor) -> Batch:
    with method.stream.licence("test", examples):
        found: Batch = method.stream.batch(examples)
    return found


def unit_features(method: Any, batch: Batch) -> Array:
    with torch.no_grad():
        features = array(method.model.eval()(batch).features)
    result: Array = features / np.linalg.norm(features, axis=1, keepdims=True)
    return result


def mirrored(batch: Batch) -> Batch:
    turned = torch.tensor(batch.inputs["pixel_values"].numpy()[..., ::-1].copy())
    return Batch({"pixel_values": turned}, batch.targets, batch.examples, batch.rows)


def class_means(method: Any, *, mirror: bool) -> Array:  # (classes, width)
    """Compute the means class by class, from one exemplar at a time."""
    means = []
    for c in range(method.now.seen):
        own = [e for e in method.memory.examples.tolist() if int(method.stream.targets[e]) == c]
        vectors = []
        for example in own:
            batch = shown(method, torch.tensor([example]))
            vectors += [unit_features(method, b)[0] for b in ([batch, mirrored(batch)] if mirror else [batch])]
        mean = np.mean(vectors, axis=0)
        means.append(mean / np.linalg.norm(mean))
    return np.stack(means)


# -- the loss


@pytest.mark.parametrize("modality", ["image", "text"])
@pytest.mark.parametrize("reduction", ["sum", "joint"])
@pytest.mark.parametrize("columns", ["sum", "mean"])
def test_old_columns_want_the_teachers_sigmoid_in_every_row_and_new_ones_the_label(
    tiny: Any, modality: str, reduction: str, columns: str
) -> None:
    method = at_task(tiny, modality, {"name": "icarl", "reduction": reduction, "columns": columns})
    batch = some(method)
    with torch.no_grad():
        for p in method.model.parameters():
            p += 0.05  # the student differs from its teacher
    with recorded_passes() as passes:
        loss = method.loss(batch)
    (both,) = (p.batch for p in passes if p.training)
    assert len(both) == 8
    assert set(both.targets[4:].tolist()) <= {0, 1}  # exemplars
    wanted = np.zeros((8, 4))
    wanted[np.arange(4), batch.targets.numpy()] = 1
    wanted[:, :2] = sigmoid(logits_of(method.teacher, both))  # also for the exemplar's own class
    rows = binary_cross_entropies(logits_of(method.model, both), wanted)
    rows = rows.sum(1) if columns == "sum" else rows.mean(1)
    values = {name: term.item() for name, term in loss.items()}
    if reduction == "sum":
        assert values == pytest.approx({"new": rows[:4].mean(), "replay": rows[4:].mean()})
    else:
        assert values == pytest.approx({"new": rows.mean()})


def test_the_first_task_is_plain_one_hot(tiny: Any) -> None:
    method = at_task(tiny, "image", {"name": "icarl"}, task=0)
    batch = some(method)
    with recorded_passes() as passes:
        loss = method.loss(batch)
    assert [p.model is method.model for p in passes] == [True]
    expected = binary_cross_entropies(logits_of(method.model, batch), np.eye(2)[batch.targets.numpy()])
    assert loss["new"].item() == pytest.approx(expected.sum(1).mean())


def test_at_the_first_step_nothing_pulls_at_old_columns_and_new_ones_get_sigmoid_minus_label(tiny: Any) -> None:
    """dL/dz_c = sigmoid(z_c) - G_c, which is 0 while student and teacher agree."""
    method = at_task(tiny, "image", {"name": "icarl", "reduction": "joint"}, **{"head.kind": "linear"})
    batch = some(method)
    with recorded_passes() as passes:
        loss = method.loss(batch)
    both = passes[0].batch
    method.model.zero_grad()
    loss["new"].backward()
    head = method.model.head
    assert head.blocks[0].grad.abs().max() < 1e-12
    assert head.biases[0].grad.abs().max() < 1e-12
    labels = np.eye(4)[both.targets.numpy()][:, 2:]
    expected = (sigmoid(logits_of(method.model, both)[:, 2:]) - labels).mean(0)
    np.testing.assert_allclose(array(head.biases[1].grad), expected)


# -- exemplars and their means


@pytest.mark.parametrize("modality", ["image", "text"])
def test_exemplars_are_chosen_by_greedy_herding_on_clean_unit_features(tiny: Any, modality: str) -> None:
    method = learned(tiny, modality=modality, **{"benchmark.tasks": [2], "memory.size": 8})
    for c in (0, 1):
        own = [e for e in method.stream[0].train.tolist() if int(method.stream.targets[e]) == c]
        features = unit_features(method, shown(method, torch.tensor(own)))
        chosen: list[int] = []
        for _ in range(4):
            distance = {
                i: np.linalg.norm(features.mean(0) - features[[*chosen, i]].mean(0))
                for i in range(len(own))
                if i not in chosen
            }
            chosen.append(min(distance, key=lambda i: distance[i]))
        assert method.memory.examples[method.memory.group == c].tolist() == [own[i] for i in chosen]


@pytest.mark.parametrize("mirror", [True, False])
def test_the_prediction_is_the_brute_force_nearest_mean_of_all_classes_by_the_newest_features(
    tiny: Any, mirror: bool
) -> None:
    changes = {"benchmark.tasks": [2, 1, 2], "memory.size": 15}
    method, stream, config = make(tiny, "image", {"name": "icarl", "mirror": mirror}, **changes)
    trainer = Trainer(method, stream, config)
    before = None
    for task in stream:
        trainer.learn(task)
        means = class_means(method, mirror=mirror)
        np.testing.assert_allclose(array(method.means), means, atol=1e-12)
        if before is not None:  # old classes have new means too
            assert (np.abs(means[: len(before)] - before).max(1) > 1e-6).all()
        before = means
        test = torch.cat([earlier.test for earlier in stream[: task.index + 1]])
        batch = shown(method, test)
        distance = ((unit_features(method, batch)[:, None] - means[None]) ** 2).sum(2)
        scores = method.predict(batch)
        np.testing.assert_allclose(array(scores), -distance, atol=1e-12)
        assert scores.argmax(1).tolist() == distance.argmin(1).tolist()


def test_one_exemplar_per_class_is_its_own_mean(tiny: Any) -> None:
    method = learned(tiny, {"name": "icarl", "mirror": False}, **{"memory.size": 0, "memory.per_class": 1})
    batch = shown(method, method.memory.examples)
    assert batch.targets.tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(array(method.means), unit_features(method, batch), atol=1e-12)
    assert method.predict(batch).argmax(1).tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(array(method.predict(batch).diagonal()), 0, atol=1e-12)


def test_the_mean_is_taken_of_unit_vectors_so_that_long_features_weigh_no_more(tiny: Any) -> None:
    """Two exemplars of one class have the features (3, 4) and (0, 10). The units are (0.6, 0.8) and (0, 1), and their
    mean is (0.3, 0.9)."""
    method = at_task(tiny, "image", {"name": "icarl", "mirror": False}, task=0)
    method.remember = lambda task: None
    method.memory.add(method.stream[0].train[[0, 1, 10]], 0, torch.tensor([0, 0, 1]))
    features = torch.tensor([[3.0, 4.0], [0.0, 10.0], [-2.0, 0.0]])
    method.outputs = lambda examples, **options: Output(features, features)
    method.after_task(method.stream[0])
    np.testing.assert_allclose(array(method.means), [np.array([0.3, 0.9]) / np.sqrt(0.9), [-1, 0]])


def test_scaling_a_feature_changes_no_score(tiny: Any) -> None:
    method = learned(tiny)
    batch = shown(method, torch.cat([task.test for task in method.stream]))
    expected, out = method.predict(batch), method.infer([batch])
    scale = torch.linspace(0.01, 50, len(batch))[:, None]
    method.infer = lambda batches: Output(out.features * scale, out.logits)
    torch.testing.assert_close(method.predict(batch), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("changes", [{"benchmark.flip": False}, {"benchmark.augment": False}], ids=str)
def test_pictures_that_training_does_not_mirror_are_not_mirrored_for_the_means(
    tiny: Any, changes: dict[str, Any]
) -> None:
    one, other = (learned(tiny, {"name": "icarl", "mirror": mirror}, **changes) for mirror in (True, False))
    torch.testing.assert_close(one.means, other.means, rtol=0, atol=1e-15)


# -- the two ways to predict, and refusals


def test_the_linear_scorer_is_the_head_and_is_measured_beside_the_nearest_mean(tiny: Any) -> None:
    result = bace.run(tiny.settings("image", method="icarl"))
    method: Any = result.method
    tests = [task.test for task in method.stream]
    batch = shown(method, torch.cat(tests))
    with torch.no_grad():
        logits = method.model(batch).logits
    assert torch.equal(method.predict(batch, "linear"), logits)
    for scores, measured in (
        (logits, result.metrics["scorers"]["linear"]["A_last"]),
        (method.predict(batch), result.metrics["A_last"]),
    ):
        right = (scores.argmax(1) == batch.targets).split([len(test) for test in tests])
        assert np.mean([100 * part.double().mean().item() for part in right]) == pytest.approx(measured)


def test_a_class_without_exemplars_is_never_predicted(tiny: Any) -> None:
    method = learned(tiny, **{"memory.size": 3, "memory.allow_missing_classes": True})
    batch = shown(method, torch.cat([task.test for task in method.stream]))
    scores = method.predict(batch)
    kept = sorted(method.stream.targets[method.memory.examples].tolist())
    assert len(kept) == 3
    missing = next(c for c in range(4) if c not in kept)
    assert torch.isneginf(scores[:, missing]).all()
    assert torch.isfinite(scores[:, kept]).all()


def test_a_memory_of_nothing_and_tokens_are_refused_with_the_reason(tiny: Any) -> None:
    with pytest.raises(ConfigError, match="classifies by stored exemplars"):
        assemble(config_from(tiny.settings("image", method="icarl", **{"memory.size": 0})))
    with pytest.raises(ConfigError, match=r"not defined for token data \(refused: the mean of all words"):
        assemble(config_from(tiny.settings("token", method="icarl")))
