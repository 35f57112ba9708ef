"""LUCIR's terms are compared with numpy on all three modalities, its ranking with hand-computed numbers and brute
force, and its frozen and imprinted rows with their origin. Without its terms it equals ER bit for bit."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from steps import (
    Array,
    array,
    assert_equal_bits,
    at_task,
    cross_entropy,
    make,
    picked,
    recorded_passes,
    some_of_all,
    weights,
)

import bace
from bace.core.trainer import Trainer
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.lucir import LUCIR
from bace.methods.parts.losses import margin_ranking
from bace.models.heads import CosineHead

OFF = {"name": "lucir", "lambda_base": 0.0, "margin_weight": 0.0}


def moved(method: Any) -> Any:
    """Move the student away from its teacher, as after some steps."""
    rng = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in method.model.encoder.parameters():
            p += 0.05 * torch.randn(p.shape, generator=rng)
    return method


def terms_and_pass(method: Any, batch: Batch) -> tuple[dict[str, float], Batch]:
    """Return the terms of the loss, and the whole batch that the student was passed."""
    with recorded_passes() as passes:
        terms = {name: term.item() for name, term in method.loss(batch).items()}
    (student,) = (p.batch for p in passes if p.model is method.model)
    return terms, student


def outputs(model: Any, batch: Batch) -> tuple[Array, Array]:
    with torch.no_grad():
        out = model(batch)
    return array(out.features), array(out.logits)


def mean_angle(a: Array, b: Array) -> float:
    cosines = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    return float((1 - cosines).mean())


def ranking_in_numpy(scores: Array, targets: Array, old: int, k: int, margin: float) -> float:
    hinges = []
    for s, y in zip(scores, targets, strict=True):
        if y < old:
            hinges += [max(0.0, margin - s[y] + rival) for rival in sorted(s[old:], reverse=True)[:k]]
    return sum(hinges) / len(hinges)


# -- the ranking


def test_ranking_by_hand() -> None:
    # old classes 0, 1; new 2, 3, 4. Row 0, y = 0: 0.5 - 0.6 + (0.4, 0.3) = .3, .2. Row 1, y = 1: 0.5 - 0.9 + (0.3, 0.1)
    # = -.1, -.3, so 0, 0. Row 2 is of a new class. Mean of the four: .125
    scores = torch.tensor([[0.6, 0.0, 0.3, 0.4, -0.2], [-0.3, 0.9, 0.1, 0.3, 0.0], [0.9, 0.9, 0.0, 0.9, 0.9]])
    targets = torch.tensor([0, 1, 2])
    assert margin_ranking(scores, targets, 2, k=2, margin=0.5).item() == pytest.approx(0.125)
    assert margin_ranking(scores, targets, 2, k=1, margin=0.5).item() == pytest.approx(0.15)  # (.3 + 0) / 2


@pytest.mark.parametrize("k", [1, 2, 3, 7])
def test_ranking_is_the_mean_over_old_rows_and_their_hardest_new_classes(k: int) -> None:
    rng = np.random.default_rng(k)
    scores, targets = rng.uniform(-1, 1, (20, 6)), rng.integers(0, 6, 20)
    value = margin_ranking(torch.from_numpy(scores), torch.from_numpy(targets), 3, k=k, margin=0.5)
    assert value.item() == pytest.approx(ranking_in_numpy(scores, targets, 3, k, 0.5))  # for 7, only three are there


def test_ranking_leaves_rows_of_new_classes_and_well_separated_ones_alone() -> None:
    scores = torch.tensor([[0.8, 0.3, 0.2], [0.1, 0.9, 0.9], [0.1, 0.2, 0.9]], requires_grad=True)
    margin_ranking(scores, torch.tensor([0, 1, 2]), 1, k=2, margin=0.5).backward()
    assert scores.grad is not None
    assert torch.equal(scores.grad, torch.zeros(3, 3))


def test_ranking_without_old_rows_is_zero() -> None:
    scores = torch.rand(3, 4, requires_grad=True)
    value = margin_ranking(scores, torch.tensor([2, 3, 2]), 2, k=2, margin=0.5)
    value.backward()
    assert value.item() == 0
    assert scores.grad is not None
    assert (scores.grad == 0).all()


# -- the loss of a step


@pytest.mark.parametrize("modality", ["image", "text"])
@pytest.mark.parametrize("task", [1, 2])
def test_loss_is_cross_entropy_and_twice_feature_term_and_ranking(tiny: Any, modality: str, task: int) -> None:
    """The factor is 2 because the cross-entropy is two means."""
    method = moved(at_task(tiny, modality, {"name": "lucir"}, task, **{"benchmark.tasks": [2, 1, 2]}))
    batch = some_of_all(method)
    terms, both = terms_and_pass(method, batch)
    (features, logits), (before, _) = outputs(method.model, both), outputs(method.teacher, both)
    targets, n, old = both.targets.numpy(), len(batch), method.now.known
    assert len(both) > n
    new = {1: 1, 2: 2}[task]
    scores = logits / method.model.head.sigma.item()
    assert terms["new"] == pytest.approx(cross_entropy(logits[:n], targets[:n]), rel=1e-4)
    assert terms["replay"] == pytest.approx(cross_entropy(logits[n:], targets[n:]), rel=1e-4)
    assert terms["feature"] == pytest.approx(2 * 5 * math.sqrt(old / new) * mean_angle(features, before), rel=1e-4)
    assert terms["margin"] == pytest.approx(2 * ranking_in_numpy(scores, targets, old, 2, 0.5), rel=1e-4)
    assert terms["feature"] > 1e-3
    assert terms["margin"] > 1e-3


def test_loss_of_the_first_task_is_cross_entropy(tiny: Any) -> None:
    for modality in ("image", "token"):
        method = at_task(tiny, modality, {"name": "lucir"}, task=0)
        batch = some_of_all(method)
        terms, _ = terms_and_pass(method, batch)
        assert terms.keys() == {"new"}
        logits = outputs(method.model, batch)[1]
        assert terms["new"] == pytest.approx(cross_entropy(logits, batch.targets.numpy()), rel=1e-4)  # including O rows


def test_on_entities_cross_entropy_leaves_out_o_rows_and_the_feature_term_takes_nothing_else(tiny: Any) -> None:
    method = moved(at_task(tiny, "token", {"name": "lucir"}))
    batch = some_of_all(method)
    terms, both = terms_and_pass(method, batch)
    (features, logits), (before, _) = outputs(method.model, both), outputs(method.teacher, both)
    targets, n, old = both.targets.numpy(), len(batch), method.now.known
    entity, new = targets != 0, np.arange(len(targets)) < n
    assert (targets[~new & entity] < old).all()
    assert old == 5  # O, and B and I of two types; the same number without O is new
    assert terms["new"] == pytest.approx(cross_entropy(logits[new & entity], targets[new & entity]), rel=1e-4)
    assert terms["replay"] == pytest.approx(cross_entropy(logits[~new & entity], targets[~new & entity]), rel=1e-4)
    assert terms["feature"] == pytest.approx(
        2 * 50 * math.sqrt(5 / 4) * mean_angle(features[~entity], before[~entity]), rel=1e-4
    )
    scores = logits / method.model.head.sigma.item()  # O rows and entities of old types are ranked
    assert terms["margin"] == pytest.approx(2 * ranking_in_numpy(scores, targets, old, 1, 0.5), rel=1e-4)


def test_on_entities_what_has_no_rows_has_no_term(tiny: Any) -> None:
    method = moved(at_task(tiny, "token", {"name": "lucir"}, **{"train.replay_ratio": 0.0}))
    batch = some_of_all(method)
    outside, entity = (picked(batch, torch.nonzero((batch.targets == 0) == o).flatten()) for o in (True, False))
    assert terms_and_pass(method, outside)[0].keys() == {"feature", "margin"}
    terms, _ = terms_and_pass(method, entity)
    assert terms.keys() == {"new", "margin"}
    assert terms["margin"] == 0


def test_feature_term_ignores_the_length_of_features(tiny: Any) -> None:
    method = at_task(tiny, "image", {"name": "lucir"})
    assert terms_and_pass(method, some_of_all(method))[0]["feature"] == pytest.approx(0, abs=1e-5)
    with torch.no_grad():  # h becomes 3 h
        method.model.encoder.norm.weight *= 3
        method.model.encoder.norm.bias *= 3
    assert terms_and_pass(method, some_of_all(method))[0]["feature"] == pytest.approx(0, abs=1e-5)
    with torch.no_grad():
        method.model.encoder.norm.weight[0] *= -1
    assert terms_and_pass(method, some_of_all(method))[0]["feature"] > 1e-3


def test_terms_that_are_off_cost_no_pass(tiny: Any) -> None:
    for off, passes in (({}, 2), ({"margin_weight": 0.0}, 2), ({"lambda_base": 0.0}, 1)):
        method = at_task(tiny, "image", {"name": "lucir", **off})
        with recorded_passes() as made:
            terms = method.loss(some_of_all(method))
        assert len(made) == passes
        assert ("margin" in terms, "feature" in terms) == ("margin_weight" not in off, "lambda_base" not in off)


def test_the_ranking_does_not_move_the_scale(tiny: Any) -> None:
    """The ranking acts on cosines: d/d sigma of z / sigma is 0."""
    method = moved(at_task(tiny, "image", {"name": "lucir"}))
    (gradient,) = torch.autograd.grad(method.loss(some_of_all(method))["margin"], method.model.head.sigma)
    assert abs(gradient.item()) < 1e-5


# -- the head


@pytest.mark.parametrize("frozen", [True, False])
def test_rows_of_old_classes_stay_while_new_rows_and_scale_are_trained(tiny: Any, frozen: bool) -> None:
    changes = {"benchmark.tasks": [2, 1, 2], "train.weight_decay": 0.1}
    method, stream, config = make(tiny, "image", {"name": "lucir", "freeze_old": frozen}, **changes)
    trainer = Trainer(method, stream, config)
    for task in stream:
        before = weights(method.model.head)
        trainer.learn(task)
        after = weights(method.model.head)
        for name, value in before.items():
            assert torch.equal(after[name], value) == (frozen and name.startswith("blocks")), name
        assert len(after) == len(before) + 1


def test_new_rows_start_as_mean_directions_at_the_mean_norm_of_old_rows(tiny: Any) -> None:
    method = at_task(tiny, "image", {"name": "lucir"})
    task = method.stream[1]
    features, _ = outputs(method.model.eval(), method.stream.batch(task.train))
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    targets = method.stream.targets[task.train].numpy()
    old, new = (array(block) for block in method.model.head.blocks)
    for c, row in zip(task.classes, new, strict=True):
        mean = features[targets == c].mean(0)
        np.testing.assert_allclose(row / np.linalg.norm(row), mean / np.linalg.norm(mean), atol=1e-5)
        assert np.linalg.norm(row) == pytest.approx(np.linalg.norm(old, axis=1).mean(), rel=1e-5)


def test_rows_of_the_first_task_start_as_those_of_er(tiny: Any) -> None:
    lucir, er = (at_task(tiny, "image", {"name": name}, task=0) for name in ("lucir", "er"))
    assert torch.equal(lucir.model.head.weight, er.model.head.weight)


def test_a_class_without_examples_keeps_its_random_row() -> None:
    """A row of zeros has no direction, and its first gradient would be infinite."""
    head = CosineHead(4)
    head.grow(3, torch.Generator().manual_seed(0))
    random = head.weight.detach().clone()
    head.imprint(torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 2.0, 0]]))
    assert torch.equal(head.weight[1], random[1])
    assert torch.equal(head.weight[[0, 2]], torch.tensor([[1.0, 0, 0, 0], [0, 0, 2.0, 0]]))


def test_a_linear_head_is_exchanged_for_a_cosine_head(tiny: Any) -> None:
    method = at_task(tiny, "image", {"name": "lucir"}, **{"head.kind": "linear"})
    assert isinstance(method.model.head, CosineHead)
    assert np.abs(outputs(method.model, some_of_all(method))[1]).max() <= method.model.head.sigma.item() * (1 + 1e-6)
    own = at_task(tiny, "image", {"name": "lucir"}, task=0, **{"head.sigma_init": 4.0})
    assert own.model.head.sigma.item() == 4


# -- equalities with other methods, and refusals


@pytest.mark.parametrize("modality", ["image", "text"])
@pytest.mark.parametrize("mode", ["batch", "concat"])
def test_lucir_without_its_terms_and_with_trained_old_rows_is_er_bit_for_bit(
    tiny: Any, modality: str, mode: str
) -> None:
    """Both have imprinted rows, which LUCIR always has."""
    changes = {"head.head_init": "imprint"}
    off = {**OFF, "freeze_old": False, "mode": mode}
    er, lucir = (bace.run(tiny.settings(modality, method=m, **changes)) for m in ({"name": "er", "mode": mode}, off))
    assert er.matrix == lucir.matrix
    assert_equal_bits(weights(er.method.model), weights(lucir.method.model))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"lambda_base": -1.0}, "lambda_base"),
        ({"margin": -0.1}, "margin"),
        ({"margin_weight": -1.0}, "margin_weight"),
        ({"K": 0}, "K is 0"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LUCIR(**wrong)
