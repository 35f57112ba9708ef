"""Forward transfer is measured by each method's own rule. The scores of a task that is not yet learned, with rows from
its data and with random rows, are compared with brute force in numpy in double precision."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from steps import Array, array, assert_equal_bits, learned_before, weights
from torch import Tensor

from bace.core.evaluation import CHANCE_DRAWS, transfer
from bace.data.batch import Batch
from bace.randomness import generator

Rule = Callable[[Array, Array], Array]  # unit features (rows, width), rows of the coming classes -> scores

SIGMA = 10.0  # initial scale of the cosine head


def before_the_third_task(tiny: Any, name: str) -> Any:
    """Return a method that has learned two of three tasks. The scale of its head has its initial value."""
    trainer = learned_before(tiny, "image", {"name": name}, 2, **{"benchmark.tasks": [2, 1, 2]})
    trainer.enter(trainer.stream[2])
    method: Any = trainer.method
    method.model.head.sigma.data.fill_(SIGMA)
    return method


def unit(x: Array) -> Array:
    result: Array = x / np.linalg.norm(x, axis=-1, keepdims=True)
    return result


def shown(method: Any, examples: Tensor, *, mirrored: bool = False) -> Batch:
    with method.stream.licence("test", examples):
        batch: Batch = method.stream.batch(examples)
    if mirrored:
        batch.inputs["pixel_values"] = torch.tensor(batch.inputs["pixel_values"].numpy()[..., ::-1].copy())
    return batch


def unit_features(network: Any, batch: Batch) -> Array:
    with torch.no_grad():
        return unit(array(network.eval()(batch).features))


def mean_directions(network: Any, *batches: Batch) -> Array:  # (classes of the third task, width)
    features = np.concatenate([unit_features(network, batch) for batch in batches])
    targets = np.concatenate([batch.targets.numpy() for batch in batches])
    return unit(np.stack([features[targets == c].mean(0) for c in (3, 4)]))


def random_rows(width: int, draw: int) -> Array:
    bound = 1 / math.sqrt(width)
    return array(torch.empty(2, width).uniform_(-bound, bound, generator=generator(0, "transfer", 2, draw)))


def cosines(network: Any) -> Rule:
    """Return the rule of the plain head: sigma cos(h, w)."""
    known = array(network.head.weight)
    assert known.shape[0] == 3
    return lambda h, rows: SIGMA * h @ unit(np.concatenate([known, rows])).T


def check(method: Any, network: Any, rule: Rule, rows: Array) -> None:
    """Compare every score of the third task's test examples, and the three numbers computed from them. The measurement
    must not change the method."""
    found: list[Array] = []
    own_rule = method.transfer_scores

    def noted(features: Tensor, head: Any) -> Tensor:
        scores: Tensor = own_rule(features, head)
        found.append(array(scores))
        return scores

    method.transfer_scores = noted
    before = weights(method)
    measured = transfer(method, method.stream[2])
    assert_equal_bits(weights(method), before)

    asked = shown(method, method.stream[2].test)
    h, truth = unit_features(network, asked), asked.targets.numpy()
    drawn = [rule(h, random_rows(h.shape[1], draw)) for draw in range(CHANCE_DRAWS)]
    expected = [rule(h, rows), *drawn]
    assert len(found) == 1 + CHANCE_DRAWS == 6
    for one, other in zip(found, expected, strict=True):
        assert one.shape == (len(truth), 5)
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)

    def accuracy(scores: Array, first: int = 0) -> float:
        return float(100 * np.mean(scores[:, first:].argmax(1) + first == truth))

    assert measured == {
        "before": pytest.approx(accuracy(expected[0])),
        "chance": pytest.approx(np.mean([accuracy(scores) for scores in drawn])),
        "within": pytest.approx(accuracy(expected[0], first=3)),
    }


def test_by_default_a_copy_of_the_head_grows_by_imprinted_rows(tiny: Any) -> None:
    method = before_the_third_task(tiny, "er")
    rows = mean_directions(method.model, shown(method, method.stream[2].train))
    check(method, method.model, cosines(method.model), rows)


@pytest.mark.parametrize("mirror", [True, False])
def test_icarl_compares_means_of_coming_classes_with_those_of_the_exemplars(tiny: Any, mirror: bool) -> None:
    method = before_the_third_task(tiny, "icarl")
    method.mirror = mirror
    train = method.stream[2].train
    batches = [shown(method, train), *([shown(method, train, mirrored=True)] if mirror else [])]
    known = array(method.means)  # checked in test_icarl.py

    def nearest_mean(h: Array, rows: Array) -> Array:
        means = np.concatenate([known, unit(rows)])
        result: Array = -((h[:, None] - means[None]) ** 2).sum(2)
        return result

    check(method, method.model, nearest_mean, mean_directions(method.model, *batches))


def test_icarl_never_predicts_a_known_class_without_exemplars_and_finds_coming_ones_beside_it(tiny: Any) -> None:
    method = before_the_third_task(tiny, "icarl")
    method.means[1] = 0
    head = method.model.head
    head.grow(2, generator(0))
    scores = method.transfer_scores(torch.randn(6, head.width, generator=generator(1)), head)
    assert torch.isneginf(scores[:, 1]).all()
    assert scores[:, [0, 2, 3, 4]].isfinite().all()


def test_cls_er_measures_with_the_stable_network_features_and_head(tiny: Any) -> None:
    method = before_the_third_task(tiny, "cls-er")
    for seed, network in enumerate((method.model, method.plastic, method.stable)):  # make the three networks differ
        rng = torch.Generator().manual_seed(seed)
        for p in network.parameters():
            p.data += 0.1 * torch.randn(p.shape, generator=rng)
        network.head.sigma.data.fill_(SIGMA)
    rows = mean_directions(method.stable, shown(method, method.stream[2].train))
    check(method, method.stable, cosines(method.stable), rows)


def test_dde_removes_the_momentum_direction_under_the_coming_rows_too(tiny: Any) -> None:
    """The scores are z - a2 ((1 - a1) b' + a1 b) with b_i = cos(h, e_i) sigma <w/|w|, e_i/|e_i|>."""
    method = before_the_third_task(tiny, "dde")
    method.removal.a1.data.fill_(0.3)
    method.removal.a2.data.fill_(0.7)
    method.e[0] = torch.randn(method.e.shape[1], generator=generator(3))
    e, plain = unit(array(method.e)), cosines(method.model)
    assert np.isfinite(e).all()  # the second task has left a momentum feature

    def direct_effect(h: Array, rows: Array) -> Array:
        by_feature = [(h @ e[i])[:, None] * plain(e[i : i + 1], rows) for i in (0, 1)]
        return plain(h, rows) - 0.7 * (0.7 * by_feature[0] + 0.3 * by_feature[1])

    rows = mean_directions(method.model, shown(method, method.stream[2].train))
    check(method, method.model, direct_effect, rows)


def test_bic_corrects_the_known_classes_and_leaves_the_coming_ones(tiny: Any) -> None:
    method = before_the_third_task(tiny, "bic")
    method.pairs[1].data.copy_(torch.tensor([0.6, -1.5]))
    plain = cosines(method.model)

    def corrected(h: Array, rows: Array) -> Array:
        scores = plain(h, rows)
        scores[:, 2] = 0.6 * scores[:, 2] - 1.5  # the second task's only class
        return scores

    rows = mean_directions(method.model, shown(method, method.stream[2].train))
    check(method, method.model, corrected, rows)
