"""DDE's neighbours are compared with a brute-force search, its joint prediction, momentum feature and removal with
numpy and projections, and its gradient with one written out by hand. Without its parts it equals LUCIR bit for bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from checks import check_resume_equals_the_straight_run, counted_run
from steps import (
    Array,
    array,
    assert_equal_bits,
    at_task,
    begin,
    cross_entropy,
    logits_of,
    make,
    next_stage,
    recorded_passes,
    softmax,
    some_of_all,
    weights,
)

import bace
from bace.core.trainer import Trainer
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.dde import DDE
from bace.models.model import Output


def unit(x: Array) -> Array:
    result: Array = x / np.linalg.norm(x, axis=-1, keepdims=True)
    return result


def brute_force(method: Any, k: int) -> dict[int, list[int]]:
    """Return, for each example of the task or the memory, the k nearest other examples of new classes in the teacher's
    features."""
    new = method.stream[method.now.task].train.tolist()
    everything = sorted({*new, *method.memory.examples.tolist()})
    with torch.no_grad():
        batch = method.stream.batch(torch.tensor(everything), view=method.now.view())
        features = unit(array(method.teacher(batch).features))
    at = {example: i for i, example in enumerate(everything)}
    found = {}
    for i in everything:
        distance = {j: float(np.linalg.norm(features[at[i]] - features[at[j]])) for j in new if j != i}
        found[i] = sorted(distance, key=lambda j: (distance[j], j))[:k]
    return found


def mean_predictions(method: Any, rows: list[int], near: dict[int, list[int]]) -> Array:
    """Return q of each row, the mean of its neighbours' predictions in the view of the epoch."""
    method.model.eval()
    found = [
        softmax(logits_of(method.model, method.stream.batch(torch.tensor(near[row]), view=method.now.view()))).mean(0)
        for row in rows
    ]
    method.model.train()
    return np.stack(found)


# -- neighbours


@pytest.mark.parametrize("modality", ["image", "text"])
@pytest.mark.parametrize("mode", ["batch", "concat"])
def test_neighbours_are_the_nearest_others_of_new_classes_in_the_eyes_of_the_teacher(
    tiny: Any, modality: str, mode: str
) -> None:
    method = at_task(tiny, modality, {"name": "dde", "top_k": 3, "mode": mode})
    near = brute_force(method, 3)
    table = method.table
    assert table.anchors.tolist() == list(near)
    assert set(method.memory.examples.tolist()) < set(near)  # replayed examples have neighbours too
    for anchor, neighbours in zip(table.anchors.tolist(), table.neighbours.tolist(), strict=True):
        assert neighbours == near[anchor]
        assert anchor not in neighbours
        assert all(method.stream.targets[j] >= method.now.known for j in neighbours)


def test_neighbours_are_searched_in_each_epochs_view_and_never_by_the_student(tiny: Any) -> None:
    method = at_task(tiny, "image", {"name": "dde", "top_k": 3})
    first = method.table.neighbours
    with torch.no_grad():
        for p in method.model.parameters():
            p += 1.0
    (stage,) = method.stages(method.stream[1])
    method.before_epoch(stage)
    assert torch.equal(method.table.neighbours, first)
    method.now.epoch = 1
    method.before_epoch(stage)
    assert not torch.equal(method.table.neighbours, first)
    assert dict(zip(method.table.anchors.tolist(), method.table.neighbours.tolist(), strict=True)) == brute_force(
        method, 3
    )


def test_the_first_task_has_no_neighbours(tiny: Any) -> None:
    method = at_task(tiny, "image", {"name": "dde"}, task=0)
    batch = some_of_all(method)
    assert method.table is None
    loss = method.loss(batch)
    assert loss.keys() == {"new"}
    assert loss["new"].item() == pytest.approx(
        cross_entropy(logits_of(method.model, batch), batch.targets.numpy()), rel=1e-4
    )


# -- the joint prediction


@pytest.mark.parametrize("top_k", [3, 50])
def test_loss_is_that_of_half_the_own_prediction_and_half_the_mean_of_the_neighbours(tiny: Any, top_k: int) -> None:
    """If 50 neighbours are asked for, there are only 19 or 20."""
    method = at_task(tiny, "image", {"name": "dde", "top_k": top_k})
    batch = some_of_all(method)
    with recorded_passes() as passes:
        loss = method.loss(batch)
    both = next(p.batch for p in passes if p.training)
    q = mean_predictions(method, both.rows.tolist(), brute_force(method, top_k))
    joint = (softmax(logits_of(method.model, both)) + q) / 2
    nll = -np.log(joint[np.arange(len(both)), both.targets.numpy()])
    n = len(batch)
    assert len(both) > n
    assert loss["new"].item() == pytest.approx(nll[:n].mean(), rel=1e-4)
    assert loss["replay"].item() == pytest.approx(nll[n:].mean(), rel=1e-4)
    assert {"feature", "margin"} < loss.keys()
    logs = method.joint(method.model(both).logits, both)
    np.testing.assert_allclose(np.exp(array(logs)), joint, rtol=1e-4)
    np.testing.assert_allclose(np.exp(array(logs)).sum(1), 1, rtol=1e-5)


def test_no_gradient_reaches_the_neighbours(tiny: Any) -> None:
    """The gradient is that of -log((p_y + constant) / 2). Neighbours are passed in eval mode and without a graph."""
    method = at_task(tiny, "image", {"name": "dde", "top_k": 3, "lambda_base": 0.0, "margin_weight": 0.0})
    batch = some_of_all(method)
    with recorded_passes() as passes:
        loss = method.loss(batch)
    assert [p.training for p in passes].count(True) == 1
    both = next(p.batch for p in passes if p.training)
    method.model.zero_grad()
    (loss["new"] + loss["replay"]).backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in method.model.parameters()]
    q = torch.from_numpy(mean_predictions(method, both.rows.tolist(), brute_force(method, 3))).float()
    method.model.zero_grad()
    p = F.softmax(method.model(both).logits, 1)
    nll = -((p + q) / 2).log().gather(1, both.targets[:, None])
    (nll[: len(batch)].mean() + nll[len(batch) :].mean()).backward()
    for got, parameter in zip(gradients, method.model.parameters(), strict=True):
        assert (got is None) == (parameter.grad is None)
        if got is not None:
            torch.testing.assert_close(got, parameter.grad, rtol=1e-3, atol=1e-5)


# -- the momentum feature


def test_momentum_feature_adds_each_batchs_mean_to_what_is_left_and_starts_anew_with_each_task(tiny: Any) -> None:
    method, stream, config = make(tiny, "image", {"name": "dde"}, **{"benchmark.tasks": [2, 1, 2]})
    seen: dict[int, list[Array]] = {0: [], 1: [], 2: []}

    def note(module: Any, arguments: Any, out: Output) -> None:
        if module.training:
            seen[method.now.task].append(array(out.features).mean(0))

    method.model.register_forward_hook(note)
    trainer = Trainer(method, stream, config)
    found = []
    for task in stream:
        trainer.learn(task)
        found.append(array(method.e))
    assert (found[0] == 0).all()  # no momentum feature in the first task
    expected = [np.zeros(16)]
    for task_means in (seen[1], seen[2]):
        e = np.zeros(16)
        for mean in task_means:
            e = 0.9 * e + mean
        expected.append(e)
    np.testing.assert_allclose(found[1], [expected[0], expected[1]], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found[2], [expected[1], expected[2]], rtol=1e-4, atol=1e-6)


# -- its removal


def predictions(method: Any, **numbers: float) -> tuple[Array, Array, Array, Array]:
    """Return the predictions for some examples with these a1 and a2, the unit features of the examples, the unit rows
    and the unit e."""
    for name, value in numbers.items():
        getattr(method.removal, name).data.fill_(value)
    method.eval()
    batch = some_of_all(method, 6)
    with torch.no_grad():
        h = unit(array(method.model(batch).features))
    rows, e = (unit(array(x)) for x in (method.model.head.weight, method.e))
    return array(method.predict(batch)), h, rows, e


def removing(tiny: Any) -> Any:
    """Return a method in its third task, with two momentum features."""
    method = at_task(tiny, "image", {"name": "dde"}, 2, **{"benchmark.tasks": [2, 1, 2]})
    for step in range(3):
        method.now.step = step
        method.loss(some_of_all(method))
        method.after_step(some_of_all(method))
    return method


def test_removing_nothing_leaves_the_logits_as_they_are(tiny: Any) -> None:
    method = removing(tiny)
    got, *_ = predictions(method, a2=0.0)
    np.testing.assert_array_equal(got, logits_of(method.model, some_of_all(method, 6)))


def test_removing_all_gives_the_logits_of_what_stands_at_right_angles_to_the_momentum_feature(tiny: Any) -> None:
    method = removing(tiny)
    got, h, rows, e = predictions(method, a2=1.0)
    left = h - (h @ e[1])[:, None] * e[1]
    np.testing.assert_allclose(got, method.model.head.sigma.item() * left @ rows.T, rtol=1e-3, atol=1e-4)
    assert np.abs(left @ e[1]).max() < 1e-6


def test_half_of_the_momentum_direction_is_removed_by_default(tiny: Any) -> None:
    method = removing(tiny)
    got, h, rows, e = predictions(method)
    sigma = method.model.head.sigma.item()
    np.testing.assert_allclose(got, sigma * (h @ rows.T - 0.5 * np.outer(h @ e[1], rows @ e[1])), rtol=1e-3, atol=1e-4)


def test_learned_removal_weighs_the_features_of_two_tasks(tiny: Any) -> None:
    method = removing(tiny)
    got, h, rows, e = predictions(method, a1=0.7, a2=0.4)
    before, now = (np.outer(h @ x, rows @ x) for x in e)
    expected = method.model.head.sigma.item() * (h @ rows.T - 0.4 * (0.3 * before + 0.7 * now))
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4)


LEARNED = {"name": "dde", "removal": "learned"}


def at_removal(tiny: Any) -> tuple[Any, Any, Trainer]:
    """Return a method that has finished its main stage of the second task, the stage that follows, and the trainer."""
    method, stream, config = make(tiny, "image", LEARNED)
    trainer = Trainer(method, stream, config)
    trainer.learn(stream[0])
    begin(trainer, 1)
    method.removal.a1.data.fill_(0.2)  # as if left by the previous task
    main, removal = method.stages(stream[1])
    trainer.train(main, 2)
    next_stage(trainer)
    return method, removal, trainer


def test_learned_removal_fits_two_numbers_on_the_balanced_memory_and_leaves_the_network_alone(tiny: Any) -> None:
    method, removal, trainer = at_removal(tiny)
    network, e = weights(method.model), method.e.clone()
    pairs: list[list[float]] = []
    rates: list[float] = []
    original = removal.loss

    def noted(batch: Batch) -> Any:
        pairs.append([method.removal.a1.item(), method.removal.a2.item()])
        rates.append(method.now.lr)
        loss = original(batch)
        if len(pairs) == 1:
            with torch.no_grad():
                h = unit(array(method.model(batch).features))
            rows, direction = unit(array(method.model.head.weight)), unit(array(method.e[1]))
            left = h @ rows.T - 0.5 * np.outer(h @ direction, rows @ direction)
            expected = 5 * cross_entropy(method.model.head.sigma.item() * left, batch.targets.numpy())
            assert loss.item() == pytest.approx(expected, rel=1e-4)
        return loss

    removal.loss = noted
    with recorded_passes() as passes:
        trainer.train(removal, 2)
    assert all(p.model is method.model and not p.training for p in passes)
    assert len(pairs) == 20  # ten slots for four classes are two each, which is one batch
    assert pairs[0] == [1.0, 0.5]
    moves = np.abs(np.diff(pairs[:2], axis=0))
    np.testing.assert_allclose(moves, 2e-3, rtol=1e-2)  # Adam's first step has the size of the learning rate
    assert rates == pytest.approx([2e-3] * 10 + [2e-4] * 10)
    assert sorted(method.stream.targets[method.memory.examples].tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert_equal_bits(weights(method.model), network)
    assert torch.equal(method.e, e)


def test_the_memory_after_learned_removal_is_the_one_it_was_fitted_on(tiny: Any) -> None:
    method, removal, trainer = at_removal(tiny)
    trainer.train(removal, 2)
    fitted = method.memory.examples.clone()
    method.after_task(method.stream[1])
    assert torch.equal(method.memory.examples, fitted)
    fixed = bace.run(tiny.settings("image", method={"name": "dde"}))
    learned = bace.run(tiny.settings("image", method=LEARNED))
    assert torch.equal(fixed.method.memory.examples, learned.method.memory.examples)
    assert_equal_bits(weights(fixed.method.model), weights(learned.method.model))


def test_a_run_with_learned_removal_resumes_exactly_in_both_stages(tiny: Any, tmp_path: Path) -> None:
    counted_run(tiny, LEARNED, "image", tmp_path)
    check_resume_equals_the_straight_run(tiny, LEARNED, "image", tmp_path)


# -- equalities with other methods, and refusals


@pytest.mark.parametrize("modality", ["image", "text"])
def test_dde_without_neighbours_and_removal_is_lucir_bit_for_bit(tiny: Any, modality: str) -> None:
    off = {"name": "dde", "top_k": 0, "a": 0.0}
    lucir, dde = (bace.run(tiny.settings(modality, method=m)) for m in ("lucir", off))
    assert lucir.matrix == dde.matrix
    assert_equal_bits(weights(lucir.method.model), weights(dde.method.model))


def test_removal_changes_predictions_but_not_the_network(tiny: Any) -> None:
    plain, removed = (bace.run(tiny.settings("image", method={"name": "dde", "a": a})) for a in (0.0, 0.5))
    assert_equal_bits(weights(plain.method.model), weights(removed.method.model))
    shown = some_of_all(at_task(tiny, "image", {"name": "seq"}, task=0))
    assert not torch.equal(plain.method.predict(shown), removed.method.predict(shown))


def test_tokens_are_refused(tiny: Any) -> None:
    with pytest.raises(ConfigError, match="CFNER"):
        bace.run(tiny.settings("token", method="dde"))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"top_k": -1}, "top_k"), ({"mu": 1.0}, "mu"), ({"a": -0.5}, "a is"), ({"lambda_base": -1.0}, "DDE: lambda_base")],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DDE(**wrong)
