"""EASE's prototypes in every space are compared with loops over pairs of classes, and its scores with numpy. With one
task it equals APER without concatenation."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from steps import Array, array, at_stage, features_of, learned_before, make, some, weights

from bace.core.trainer import Trainer
from bace.errors import ConfigError
from bace.methods.ease import EASE, complete

SHORT = {"name": "ease", "tune_epochs": 2, "tune_batch": 6, "tune_lr": 0.1}


def cos(a: Array, b: Array) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def made_by_hand(known: Array, tasks: list[range]) -> Array:
    """Complete the prototypes class by class. A soft-max of cosines in the class's own space weights the prototypes in
    the later space."""
    result = known.copy()
    for i, old in enumerate(tasks):
        for j in range(i + 1, len(tasks)):
            later = range(tasks[j].start, tasks[-1].stop)
            for c in old:
                powers = np.exp([cos(known[c, i], known[o, i]) for o in later])
                result[c, j] = sum(p * known[o, j] for p, o in zip(powers / powers.sum(), later, strict=True))
    return result


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(0, 1000))
def test_missing_prototypes_are_means_of_later_classes_weighted_by_similarity(sizes: list[int], seed: int) -> None:
    stops = np.cumsum(sizes).tolist()
    tasks = [range(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]
    known = np.random.default_rng(seed).normal(size=(stops[-1], len(tasks), 5))
    found = torch.from_numpy(known.copy())
    complete(found, tasks)
    np.testing.assert_allclose(found.numpy(), made_by_hand(known, tasks), atol=1e-12)


def test_a_made_prototype_by_hand() -> None:
    """In two tasks of 1 and 2 classes, the cosines in the old space are 1 and 0."""
    prototypes = torch.tensor([[[2.0, 0.0], [9.0, 9.0]], [[3.0, 0.0], [1.0, 0.0]], [[0.0, 1.0], [0.0, 1.0]]])
    complete(prototypes, [range(1), range(1, 3)])
    e = np.e
    np.testing.assert_allclose(prototypes[0, 1].numpy(), [e / (e + 1), 1 / (e + 1)], atol=1e-12)
    assert prototypes[0, 0].tolist() == [2.0, 0.0]
    assert prototypes[1:].tolist() == [[[3.0, 0.0], [1.0, 0.0]], [[0.0, 1.0], [0.0, 1.0]]]


def in_space(method: Any, space: int, batch: Any) -> Array:
    with method.adapters.of(space):
        return features_of(method.model.encoder.eval(), batch)


@pytest.mark.parametrize("modality", ["image", "text"])
def test_prototypes_and_scores_of_three_tasks(tiny: Any, modality: str) -> None:
    trainer = learned_before(tiny, modality, SHORT, 3, **{"benchmark.tasks": [2, 1, 2]})
    method, stream = trainer.method, trainer.stream
    known = np.zeros((5, 3, 16))
    with stream.licence("a test", torch.arange(len(stream.data))):
        for task in stream:
            batch = stream.batch(task.train)
            for j in range(task.index + 1):
                features = in_space(method, j, batch)
                for c in task.classes:
                    known[c, j] = features[batch.targets.numpy() == c].mean(0)
        asked = stream.batch(torch.cat([task.test[:4] for task in stream]))
        found = array(method.predict(asked))
    prototypes = made_by_hand(known, [task.classes for task in stream])
    np.testing.assert_allclose(array(method.prototypes), prototypes, atol=1e-10)
    spaces = [in_space(method, j, asked) for j in range(3)]
    for row in range(len(asked)):
        for task in stream:
            for c in task.classes:
                weigh = [1.0 if j == task.index else 0.1 / 3 for j in range(3)]
                expected = sum(w * cos(spaces[j][row], prototypes[c, j]) for j, w in enumerate(weigh))
                assert found[row, c] == pytest.approx(expected, abs=1e-10)


def test_a_prediction_does_not_depend_on_its_batch(tiny: Any) -> None:
    method = learned_before(tiny, "text", SHORT, 2).method
    batch = some(method, 6)
    together = method.predict(batch)
    alone = torch.cat([method.predict(batch.pick(torch.tensor([row]))) for row in range(6)])
    torch.testing.assert_close(together, alone, atol=1e-10, rtol=0)


@pytest.mark.parametrize("modality", ["image", "text"])
def test_with_one_task_it_is_aper_without_concatenation(tiny: Any, modality: str) -> None:
    aper = {**SHORT, "name": "aper", "concatenate": False}
    one, other = (learned_before(tiny, modality, method, 1).method for method in (SHORT, aper))
    tuned = weights(one.model)
    assert all(torch.equal(value, tuned[name]) for name, value in weights(other.model).items())
    batch = some(one, 8)
    torch.testing.assert_close(one.predict(batch), other.predict(batch), atol=1e-12, rtol=0)


def test_adapters_of_earlier_tasks_never_change_and_each_task_starts_from_new_ones(tiny: Any) -> None:
    method, stream, config = make(tiny, "image", SHORT, **{"benchmark.tasks": [2, 2, 1]})
    trainer, encoder = Trainer(method, stream, config), weights(method.model.encoder)
    noted: list[dict[str, torch.Tensor]] = []
    for task in stream:
        trainer.learn(task)
        noted.append(weights(method.model.encoder))
    for earlier, later in zip([encoder, *noted], noted, strict=False):
        assert all(torch.equal(value, later[name]) for name, value in earlier.items())
    last = noted[-1]
    assert all(last[f"additions.{t}.0.up.weight"].any() for t in range(2))  # a task of one class teaches nothing
    assert not torch.equal(last["additions.0.0.down.weight"], last["additions.1.0.down.weight"])


def test_the_soft_max_of_a_task_is_over_its_own_classes(tiny: Any) -> None:
    method, _, stage = at_stage(tiny, "image", SHORT, "tune", task=1)
    assert method.model.head.classes == 2
    method.model.eval()
    batch = some(method, 4)
    cosines = features_of(method.model.encoder, batch)
    rows = array(method.model.head.blocks[0])
    logits = np.array([[cos(f, w) for w in rows] for f in cosines])  # with a scale of 1
    labels = batch.targets.numpy() - 2
    expected = np.mean([np.log(np.exp(z).sum()) - z[y] for z, y in zip(logits, labels, strict=True)])
    assert float(stage.loss(batch)) == pytest.approx(expected, abs=1e-10)


def test_the_published_settings_are_the_default() -> None:
    method = EASE()
    assert (method.alpha, method.hidden) == (0.1, 64)
    assert (method.tune_epochs, method.tune_lr, method.tune_batch) == (20, 0.025, 48)


@pytest.mark.parametrize("wrong", [{"alpha": -0.1}, {"tune_epochs": 0}, {"tune_lr": 0.0}, {"tune_batch": 0}])
def test_impossible_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        EASE(**wrong)
