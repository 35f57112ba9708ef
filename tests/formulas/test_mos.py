"""MOS's merging, contrast and search for an example's adapters are compared with loops in numpy, and its Gaussians and
alignment with hand-computed numbers. Tests check what each stage may change."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from steps import (
    Array,
    array,
    at_stage,
    changed_in_stages,
    cross_entropy,
    features_of,
    learned_before,
    make,
    softmax,
    some,
    some_of_all,
    weights,
)

from bace.core.trainer import Trainer
from bace.errors import ConfigError
from bace.methods.mos import MOS, apart, refined

SHORT = {
    "name": "mos",
    "hidden": 4,
    "tune_epochs": 2,
    "tune_batch": 6,
    "tune_lr": 0.3,
    "align_epochs": 2,
    "align_lr": 0.1,
    "samples": 10,
}


# -- prediction


def found_by_loop(guess: int, logits: Array, tasks: list[int], rounds: int) -> Array:  # (tasks, classes) -> (classes,)
    """For one example, predict with the adapters of the guessed task, and stop when the task does not change."""
    task = tasks[guess]
    for _ in range(rounds):
        scores: Array = logits[task]
        if tasks[int(scores.argmax())] == task:
            break
        last, task = task, tasks[int(scores.argmax())]
    else:
        return np.asarray(logits[last])
    return scores


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 1000))
def test_every_example_is_predicted_by_the_adapters_it_finds(tasks: int, rounds: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    of_class = [t for t in range(tasks) for _ in range(2)]
    logits, guess = rng.normal(size=(9, tasks, 2 * tasks)), rng.integers(2 * tasks, size=9)
    found = refined(torch.from_numpy(guess), torch.from_numpy(logits), torch.tensor(of_class), rounds)
    expected = [found_by_loop(g, z, of_class, rounds) for g, z in zip(guess.tolist(), logits, strict=True)]
    np.testing.assert_array_equal(found.numpy(), np.stack(expected))


def in_space(method: Any, space: int, batch: Any) -> Array:
    with method.adapters.of(space):
        return features_of(method.model.encoder.eval(), batch)


@pytest.mark.parametrize("modality", ["image", "text"])
def test_scores_are_the_soft_max_of_the_found_adapters_and_that_of_the_first_guess(tiny: Any, modality: str) -> None:
    trainer = learned_before(tiny, modality, SHORT, 3, **{"benchmark.tasks": [2, 1, 2]})
    method, stream = trainer.method, trainer.stream
    with stream.licence("a test", torch.arange(len(stream.data))):
        means = []
        for task in stream:
            batch = stream.batch(task.train)
            first = in_space(method, 0, batch)
            means += [first[batch.targets.numpy() == c].mean(0) for c in task.classes]
        asked = stream.batch(torch.cat([task.test[:4] for task in stream]))
        found = array(method.predict(asked))
    spaces = [in_space(method, t, asked) for t in range(3)]
    W = np.concatenate([array(block) for block in method.aligned.blocks])
    b = np.concatenate([array(bias) for bias in method.aligned.biases])
    for row in range(len(asked)):
        f = spaces[0][row]
        cosines = np.array([f @ m / np.linalg.norm(f) / np.linalg.norm(m) for m in means])
        logits = np.stack([W @ space[row] + b for space in spaces])
        z = found_by_loop(int(cosines.argmax()), logits, [0, 0, 1, 2, 2], 4)
        np.testing.assert_allclose(found[row], softmax(z) + softmax(3 * cosines), atol=1e-10)


def test_a_prediction_does_not_depend_on_its_batch(tiny: Any) -> None:
    method = learned_before(tiny, "text", SHORT, 2).method
    batch = some_of_all(method, 6)
    together = method.predict(batch)
    alone = torch.cat([method.predict(batch.pick(torch.tensor([row]))) for row in range(6)])
    torch.testing.assert_close(together, alone, atol=1e-10, rtol=0)


# -- training


def test_the_contrast_by_hand() -> None:
    """With M = [(1, 0); (0, 2)] and T = 2, M M^T / T = [[1/2, 0], [0, 2]]."""
    found = apart(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]]), 2.0)
    expected = (np.log(np.exp(0.5) + 1) - 0.5 + np.log(np.exp(2) + 1) - 2) / 2
    assert float(found) == pytest.approx(expected)


def test_the_loss_is_cross_entropy_over_new_classes_and_the_contrast_with_means_of_old_ones(tiny: Any) -> None:
    method, trainer, stage = at_stage(tiny, "image", SHORT, "tune", task=1)
    method.model.eval()
    batch = some_of_all(method, 5)
    features = features_of(method.model.encoder, batch)
    logits = features @ array(method.model.head.blocks[1]).T + array(method.model.head.biases[1])
    terms = stage.loss(batch)
    assert float(terms["new"]) == pytest.approx(cross_entropy(logits, batch.targets.numpy() - 2))
    with trainer.stream.licence("a test", torch.arange(len(trainer.stream.data))):
        old = trainer.stream.batch(trainer.stream[0].train)
        first = in_space(method, 0, old)
    means = [first[old.targets.numpy() == c].mean(0) for c in (0, 1)]
    vectors = np.concatenate([np.stack(means), features])
    expected = 0.1 * cross_entropy(vectors @ vectors.T / 0.8, np.arange(7))
    assert float(terms["contrast"]) == pytest.approx(expected)
    method.contrast = 0.0
    assert set(stage.loss(batch)) == {"new"}


def test_each_step_merges_the_mean_of_the_earlier_adapters(tiny: Any) -> None:
    method, _, _ = at_stage(tiny, "image", SHORT, "tune", task=2, **{"benchmark.tasks": [2, 1, 2]})
    with torch.no_grad():
        for p in method.adapters.parameters_of(2):
            p += torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
    before = copy.deepcopy(method.adapters.sets)
    method.after_step(some(method))
    parts = zip(*(method_set.parameters() for method_set in (*before, method.adapters.sets[2])), strict=True)
    for first, second, newest, merged in parts:
        expected = 0.9 * array(newest) + 0.1 * (array(first) + array(second)) / 2
        np.testing.assert_allclose(array(merged), expected, atol=1e-12)
    assert all(
        torch.equal(p, q)
        for t in (0, 1)
        for p, q in zip(before[t].parameters(), method.adapters.parameters_of(t), strict=True)
    )
    method.momentum = 0.0
    merged = weights(method)
    method.after_step(some(method))
    assert all(torch.equal(value, merged[name]) for name, value in weights(method).items())


def test_adapters_start_as_those_of_the_task_before(tiny: Any) -> None:
    method, _, _ = at_stage(tiny, "image", SHORT, "tune", task=1)
    old, new = (method.adapters.parameters_of(t) for t in (0, 1))
    assert all(torch.equal(p, q) for p, q in zip(old, new, strict=True))
    assert all(p is not q for p, q in zip(old, new, strict=True))
    assert any(p.any() for p in old)


def test_each_stage_changes_what_is_its_own(tiny: Any) -> None:
    method, stream, config = make(tiny, "image", SHORT)
    changed = changed_in_stages(Trainer(method, stream, config))
    assert list(changed) == [(0, "tune"), (0, "statistics"), (1, "tune"), (1, "statistics"), (1, "align")]
    for t in (0, 1):
        own = {f"model.encoder.additions.{t}.{name}" for name in weights(method.adapters.sets[t])}
        assert changed[t, "tune"] == own | {f"model.head.blocks.{t}", f"model.head.biases.{t}"}
        assert {name.split(".")[0] for name in changed[t, "statistics"]} == {"statistics", "first"}
    assert all(torch.equal(p, q) for p, q in zip(*(method.adapters.parameters_of(t) for t in (0, 0)), strict=True))


def test_the_alignment_trains_a_copy_of_all_heads_on_features_drawn_from_the_classes(tiny: Any) -> None:
    method, trainer, stage = at_stage(tiny, "image", SHORT, "align", task=1)
    batch = trainer.stream.batch(stage.examples()[:10], inputs=False)
    features, targets = (array(part)[:10] for part in method.replayed)
    head = method.aligned
    logits = features @ np.concatenate([array(p) for p in head.blocks]).T + np.concatenate(
        [array(p) for p in head.biases]
    )
    assert float(stage.loss(batch)) == pytest.approx(cross_entropy(logits, targets.astype(int)))
    assert (stage.lr, stage.momentum, stage.weight_decay, stage.batch_size) == (0.1, 0.9, 5e-4, 10)


def test_the_gaussian_of_a_class_is_that_of_its_features_under_its_own_adapters(tiny: Any) -> None:
    trainer = learned_before(tiny, "image", SHORT, 2)
    method, stream = trainer.method, trainer.stream
    with stream.licence("a test", torch.arange(len(stream.data))):
        for task in stream:
            batch = stream.batch(task.train)
            features = in_space(method, task.index, batch)
            for c in task.classes:
                own = features[batch.targets.numpy() == c]
                mean, covariance = method.gaussian(c)
                np.testing.assert_allclose(array(mean), own.mean(0), atol=1e-10)
                np.testing.assert_allclose(array(covariance), np.cov(own.T) + 1e-4 * np.eye(16), atol=1e-10)


def test_the_published_settings_are_the_default(tiny: Any) -> None:
    method, _, stage = at_stage(tiny, "image", {"name": "mos"}, "tune", task=0)
    assert (stage.epochs, stage.batch_size, stage.lr, stage.momentum, stage.weight_decay) == (20, 48, 0.03, 0.9, 5e-4)
    assert stage.rates == {"head": pytest.approx(0.003)}
    assert (method.align_epochs, method.align_lr, method.samples) == (30, 0.005, 240)
    assert (method.momentum, method.contrast, method.temperature, method.rounds) == (0.1, 0.1, 0.8, 4)
    assert method.adapters.sets[0][0].down.out_features == 16


@pytest.mark.parametrize(
    "wrong",
    [{"momentum": 1.5}, {"contrast": -1.0}, {"temperature": 0.0}, {"rounds": 0}, {"tune_lr": 0.0}, {"samples": 0}],
)
def test_impossible_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        MOS(**wrong)
