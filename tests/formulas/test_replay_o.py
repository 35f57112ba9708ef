"""In replayed sentences, methods that leave the words labelled O of new sentences to their teacher treat such words in
the same way or learn them as class 0 (train.replay_o). All other methods learn them as class 0. The words that are
learned with cross-entropy or distilled are compared with a selection by hand."""

from typing import Any

import numpy as np
import pytest
import torch
from checks import short
from steps import Array, at_task, cross_entropy, kl_slice, logits_of, recorded_passes, some, take_step

import bace
from bace.data.batch import Batch
from bace.methods import METHODS

RULES = ("label", "distil")
TEACHING = ("bace", "cfner", "extendner", "lucir")  # the methods whose teacher handles words labelled O
# for methods whose loss has a term "replay": its weight, and the number of the draw that it uses
REPLAYING: list[tuple[dict[str, Any], float, int]] = [
    ({"name": "er"}, 1, 1),
    ({"name": "derpp", "logits": "teacher"}, 0.5, 1),
    ({"name": "derpp", "logits": "stored"}, 0.5, 2),
    ({"name": "clser"}, 1, 1),
    ({"name": "bic"}, 4 / 9, 1),  # 1 - old / seen classes
    ({"name": "lucir"}, 1, 1),
    ({"name": "extendner"}, 1, 1),
    ({"name": "cfner"}, 1, 1),
    ({"name": "bace"}, 1, 1),
]


def counted(targets: Array, rule: str, name: str) -> Array:
    """Return the rows under cross-entropy: all words, or only entities."""
    return targets != 0 if rule == "distil" and name in TEACHING else np.ones(len(targets), bool)


def step(method: Any) -> tuple[dict[str, float], Batch, int]:
    """Return the terms of a step away from the start of the task, the batch that the student was passed, and the number
    of its new rows."""
    batch = some(method, 6)
    take_step(method, batch)
    with recorded_passes() as passes:
        terms = method.loss(batch)
    return {name: term.item() for name, term in terms.items()}, next(p.batch for p in passes if p.training), len(batch)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("options", "weight", "draw"), REPLAYING, ids=lambda value: str(value))
def test_replayed_sentences_are_under_cross_entropy_with_all_their_words_or_with_their_entities_alone(
    tiny: Any, options: dict[str, Any], weight: float, draw: int, rule: str
) -> None:
    method = at_task(tiny, "token", options, **{"train.replay_o": rule})
    terms, passed, new = step(method)
    rows = slice(new, new + len(method.replay(draw)))
    logits, targets = logits_of(method.model, passed)[rows], passed.targets.numpy()[rows]
    assert 0 < (targets == 0).sum() < len(targets)
    here = counted(targets, rule, options["name"])
    expected = weight * cross_entropy(logits[here], targets[here])
    assert terms["replay"] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    entity = targets != 0
    assert abs(cross_entropy(logits, targets) - cross_entropy(logits[entity], targets[entity])) > 1e-2  # O words matter


@pytest.mark.parametrize("rule", RULES)
def test_extendner_distils_the_o_words_that_are_not_under_cross_entropy(tiny: Any, rule: str) -> None:
    method = at_task(tiny, "token", {"name": "extendner"}, **{"train.replay_o": rule})
    terms, passed, new = step(method)
    kl = kl_slice(logits_of(method.model, passed), logits_of(method.teacher, passed))
    outside, is_new = passed.targets.numpy() == 0, np.arange(len(passed)) < new
    expected = kl[outside & is_new].mean() + (kl[outside & ~is_new].mean() if rule == "distil" else 0)
    assert terms["distil"] == pytest.approx(2 * expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_bace_distils_the_o_words_of_replayed_sentences_as_those_of_new_ones_and_matches_all_logits(
    tiny: Any, rule: str
) -> None:
    """The term is alpha times the mean over O of KL(S0 || S), where S is cut out of the soft-max over all labels.
    Without alpha, nothing is distilled."""
    for alpha in (0.7, 0.0):
        method = at_task(tiny, "token", {"name": "bace", "alpha": alpha}, **{"train.replay_o": rule})
        terms, passed, new = step(method)
        student, teacher = logits_of(method.model, passed)[new:], logits_of(method.teacher, passed)[new:]
        outside = passed.targets.numpy()[new:] == 0
        assert ("replay_o" in terms) == (rule == "distil" and alpha > 0)
        if "replay_o" in terms:
            expected = 0.7 * kl_slice(student[outside], teacher[outside]).mean()
            assert terms["replay_o"] == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert terms["match"] == pytest.approx(((student[:, :5] - teacher) ** 2).mean(), rel=1e-4, abs=1e-6)


def test_a_gems_reference_gradient_is_of_all_words(tiny: Any) -> None:
    """A gradient that is set to the opposite of the reference gradient is projected to zero."""
    method = at_task(tiny, "token", {"name": "agem"})
    batch = some(method, 6)
    method.loss(batch).backward()
    reference = method.reference()
    assert (reference.targets == 0).any()
    loss = torch.nn.functional.cross_entropy(method.model(reference).logits, reference.targets)
    moving = [p for p in method.model.parameters() if p.grad is not None]
    for p, g in zip(moving, torch.autograd.grad(loss, moving, allow_unused=True, materialize_grads=True), strict=True):
        p.grad = -g
    before = torch.stack([p.grad.norm() for p in moving if p.grad is not None]).norm()
    method.before_step(batch)
    after = torch.stack([p.grad.norm() for p in moving if p.grad is not None]).norm()
    assert before > 1e-2
    assert after < 1e-4 * before


def test_a_step_of_sparse_er_on_memory_takes_all_words(tiny: Any) -> None:
    method = at_task(tiny, "token", {"name": "sparseer", "every": 1})
    _, replayed = method.expand(some(method, 6))
    whole = method.replay()
    assert (whole.targets == 0).any()
    assert torch.equal(replayed.rows, whole.rows)
    expected = cross_entropy(logits_of(method.model, whole), whole.targets.numpy())
    assert method.loss(replayed).item() == pytest.approx(expected, rel=1e-4, abs=1e-6)


# A-GEM, Sparse-ER and MBPA++ learn replayed words from their labels, GDumb learns from its memory alone, and MBPA's
# neighbours are not replayed
UNCHANGED: list[dict[str, Any]] = [
    {"name": "agem"},
    {"name": "gdumb"},
    {"name": "mbpa"},
    {"name": "mbpapp", "every": 2},
    {"name": "sparseer", "every": 2},
]


@pytest.mark.parametrize("method", UNCHANGED, ids=lambda method: str(method["name"]))
def test_other_methods_are_the_same_under_both_rules(tiny: Any, method: dict[str, Any]) -> None:
    changes = {"method": short(method, most=16), "train.epochs": 1}
    runs = [bace.run(tiny.settings("token", **changes, **{"train.replay_o": rule})) for rule in RULES]
    assert runs[0].matrix == runs[1].matrix


def test_these_are_all_methods_that_keep_sentences() -> None:
    here = {options["name"] for options, _, _ in REPLAYING} | {method["name"] for method in UNCHANGED}
    assert here == {m.__name__.lower() for m in METHODS if m.uses_memory and "token" in m.modalities}


def test_other_terms_are_doubled_only_where_the_cross_entropy_is_two_means(tiny: Any) -> None:
    """LUCIR's weights are relative to one mean. A half in which all words are O has no mean."""
    method = at_task(tiny, "token", {"name": "lucir"}, **{"train.replay_o": "distil"})
    batch = method.with_replay(some(method))
    new = len(some(method))
    assert method.count_means(batch, new) == 2
    method.stream.targets[batch.rows[new:]] = 0
    assert method.count_means(batch, new) == 1
    method.stream.targets[batch.rows] = 0
    assert method.count_means(batch, new) == 0
