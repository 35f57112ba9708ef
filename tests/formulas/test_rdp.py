"""RDP's prototypes, pseudo labels and the terms of its loss are compared with numpy, its pseudo and soft labels also
with cases by hand. Tests check which rows are frozen. With its weights at 0 and without pseudo labels it equals SEQ
with the same head bit for bit."""

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
    changed_in_stages,
    cross_entropy,
    kl_slice,
    learned_before,
    logits_of,
    make,
    picked,
    softmax,
    some,
    take_step,
    weights,
)

from bace.core.stream import Task
from bace.core.trainer import Trainer
from bace.errors import ConfigError
from bace.methods.rdp import RDP
from bace.methods.seq import SEQ
from bace.models.heads import CosineHead
from bace.models.model import Output

OFF = {"pseudo": False, "lambda_kd": 0.0, "lambda_soft": 0.0, "lambda_entropy": 0.0}


def wavering(tiny: Any, **changes: Any) -> Any:
    """Return a method whose teacher takes some O words for old entities and others not. The student is one step away
    from the teacher."""
    method = at_task(tiny, "token", {"name": "rdp", **changes})
    with torch.no_grad():
        examples = method.stream[1].train
        logits = method.outputs(examples, method.teacher).logits[method.stream.labels(examples)[1] == 0]
        gap = (logits[:, 0] - logits[:, 1:].amax(1)).median()  # O loses for half of the words
    forward = method.teacher.head.forward
    method.teacher.head.forward = lambda f: forward(f) - gap * torch.eye(5)[0]
    method.prototypes = None
    method.before_epoch(method.stages(method.stream[1])[0])
    take_step(method, some(method, 6))
    return method


def teacher_of(method: Any, batch: Any) -> tuple[Array, Array]:  # (rows, width), (rows, old)
    with torch.no_grad():
        out = method.teacher(batch)
    return array(out.features), array(out.logits)


def pseudo_by_hand(method: Any, batch: Any) -> Array:  # (rows,)
    """Return the argmax of softmax(z') softmax(-|f' - p|)."""
    f, z = teacher_of(method, batch)
    prototypes = array(method.prototypes)
    distance = np.stack([np.linalg.norm(f - p, axis=1) for p in prototypes], 1)
    found = prototypes.any(1)
    product = softmax(z)[:, found] * softmax(-distance[:, found])
    result: Array = np.flatnonzero(found)[product.argmax(1)]
    return result


# -- prototypical pseudo labels


def test_a_prototype_is_the_mean_feature_of_the_o_words_to_which_the_teacher_gives_its_label(tiny: Any) -> None:
    method = wavering(tiny)
    batch = method.stream.batch(method.stream[1].train)
    (f, z), outside = teacher_of(method, batch), batch.targets.numpy() == 0
    given = z.argmax(1)
    assert 0.2 < (given[outside] != 0).mean() < 0.8
    for c in range(5):
        own = f[outside & (given == c)]
        wanted = own.mean(0) if len(own) else np.zeros(f.shape[1])
        np.testing.assert_allclose(array(method.prototypes[c]), wanted, rtol=1e-9, atol=1e-12)


def test_an_o_word_gets_the_label_of_the_highest_product_of_probability_and_nearness(tiny: Any) -> None:
    method = wavering(tiny)
    batch = method.stream.batch(method.stream[1].train)
    with torch.no_grad():
        found = method.pseudo_labels(method.teacher(batch)).numpy()
    np.testing.assert_array_equal(found, pseudo_by_hand(method, batch))
    assert len(set(found.tolist())) > 1
    assert (found != teacher_of(method, batch)[1].argmax(1)).any()  # nearness corrects the teacher somewhere


def test_a_near_prototype_wins_over_a_little_more_probability_and_a_missing_one_never(tiny: Any) -> None:
    """p = (0.5, 0.3, 0.2), and the distances are 2, 1 and none. By hand, 0.5 e^-2 < 0.3 e^-1, and the third label has
    no prototype."""
    method = at_task(tiny, "token", {"name": "rdp"})
    method.prototypes = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    old = Output(torch.zeros(1, 2), torch.tensor([[0.5, 0.3, 0.2]]).log())
    assert method.pseudo_labels(old).tolist() == [1]
    method.prototypes[1] = torch.tensor([0.0, 1.6])  # 0.5 e^-2 > 0.3 e^-1.6
    assert method.pseudo_labels(old).tolist() == [0]


# -- the loss


@pytest.mark.parametrize("soft", ["bce", "softmax"])
def test_the_terms_of_the_loss(tiny: Any, soft: str) -> None:
    """L = CE with pseudo labels + 2 KL on O words + 0.3 soft labels + 0.1 entropy. The last two are means over
    labels."""
    method = wavering(tiny, soft=soft)
    batch = some(method, 6)
    terms = method.loss(batch)
    logits, targets = logits_of(method.model, batch), batch.targets.numpy()
    _, old = teacher_of(method, batch)
    outside = targets == 0
    labels = np.where(outside, pseudo_by_hand(method, batch), targets)
    assert (labels[outside] != 0).any()
    assert (labels[~outside] >= 5).all()
    p = softmax(logits)
    y = np.concatenate([1 / (1 + np.exp(-old)), np.eye(9)[targets][:, 5:]], 1)
    sigmoid = 1 / (1 + np.exp(-logits))
    wanted = {
        "new": cross_entropy(logits, labels),
        "distil": 2 * kl_slice(logits, old)[outside].mean(),
        "soft": 0.3 * -(softmax(y) * np.log(p)).mean(),
        "entropy": 0.1 * -(p * np.log(p)).mean(),
    }
    if soft == "bce":
        wanted["soft"] = 0.3 * -(y * np.log(sigmoid) + (1 - y) * np.log(1 - sigmoid)).mean()
    assert terms.keys() == wanted.keys()
    for name, value in wanted.items():
        assert terms[name].item() == pytest.approx(value, rel=1e-9), name


def test_soft_labels_by_hand(tiny: Any) -> None:
    """Five old labels at z' = 0 are one half each, the new label of the word is 1, and the others are 0. z = 0 gives
    log 2 for every label."""
    method = at_task(tiny, "token", {"name": "rdp"})
    zeros = torch.zeros(1, 9, requires_grad=True)
    loss = method.soft_label_loss(zeros, torch.zeros(1, 5), torch.tensor([6]))
    assert loss.item() == pytest.approx(math.log(2))
    loss.backward()
    np.testing.assert_allclose(array(zeros.grad)[0] * 9, [0] * 5 + [0.5, -0.5, 0.5, 0.5], atol=1e-12)


def test_the_first_task_is_plain_cross_entropy_with_o_as_class_0(tiny: Any) -> None:
    method = at_task(tiny, "token", {"name": "rdp"}, task=0)
    batch = some(method, 6)
    terms = method.loss(batch)
    assert set(terms) == {"new"}
    wanted = cross_entropy(logits_of(method.model, batch), batch.targets.numpy())
    assert terms["new"].item() == pytest.approx(wanted, rel=1e-9)


def test_a_batch_may_lack_entities_or_o_words(tiny: Any) -> None:
    method = at_task(tiny, "token", {"name": "rdp"})
    batch = some(method, 6)
    assert "distil" not in method.loss(picked(batch, torch.nonzero(batch.targets).flatten()))
    terms = method.loss(picked(batch, torch.nonzero(batch.targets == 0).flatten()))
    assert set(terms) == {"new", "distil", "soft", "entropy"}
    torch.stack(list(terms.values())).sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in method.model.parameters())


# -- frozen rows


def test_old_rows_including_os_are_frozen_and_no_example_is_kept(tiny: Any) -> None:
    method, stream, config = make(tiny, "token", {"name": "rdp"}, **{"benchmark.tasks": [2, 1, 2]})
    changed = changed_in_stages(Trainer(method, stream, config))
    assert isinstance(method.model.head, CosineHead)
    for task in range(3):
        rows = {name for name in changed[task, "main"] if name.startswith("model.head.blocks.")}
        assert rows == {f"model.head.blocks.{task}"}
    assert not len(method.remembered())


# -- special cases


@pytest.mark.parametrize("head", ["trained", "frozen"])
def test_without_its_terms_it_is_seq_with_the_same_head_bit_for_bit(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, head: str
) -> None:
    ends = []
    for chosen in ({"name": "rdp", "head": head, **OFF}, {"name": "seq"}):
        if chosen["name"] == "seq" and head == "frozen":
            monkeypatch.setattr(SEQ, "grow", grown_beside_frozen_rows)
            monkeypatch.setattr(SEQ, "before_epoch", imprinting)
        method, stream, config = make(tiny, "token", chosen, **{"benchmark.tasks": [2, 1, 2]})
        results = Trainer(method, stream, config).run()
        assert method.teacher is None
        ends.append((results.matrix, weights(method.model)))
    assert ends[0][0] == ends[1][0]
    assert_equal_bits(ends[0][1], ends[1][1])


def grown_beside_frozen_rows(method: SEQ, task: Task) -> None:
    super(SEQ, method).grow(task)
    for old in list(method.model.head.blocks)[:-1]:
        old.requires_grad_(False)


def imprinting(method: SEQ, stage: Any) -> None:
    """Imprint the new rows of a later task, so that they start from data."""
    if method.now.task and method.now.epoch == 0:
        method.imprint(method.stream[method.now.task])


def test_without_pseudo_labels_o_words_are_learned_as_o(tiny: Any) -> None:
    method = at_task(tiny, "token", {"name": "rdp", "pseudo": False})
    batch = some(method, 6)
    wanted = cross_entropy(logits_of(method.model, batch), batch.targets.numpy())
    assert method.loss(batch)["new"].item() == pytest.approx(wanted, rel=1e-9)
    assert method.prototypes is None


@pytest.mark.parametrize("wrong", [{"lambda_soft": -1.0}, {"lambda_entropy": -0.1}, {"lambda_kd": -2.0}])
def test_values_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"RDP.*{next(iter(wrong))}.*{next(iter(wrong.values()))}"):
        RDP(**wrong)


def test_other_data_than_sentences_are_refused(tiny: Any) -> None:
    with pytest.raises(ConfigError, match="RDP is not defined for text data"):
        make(tiny, "text", {"name": "rdp"})


def test_prototypes_are_made_anew_in_every_task(tiny: Any) -> None:
    trainer = learned_before(tiny, "token", {"name": "rdp"}, 2, **{"benchmark.tasks": [2, 1, 2]})
    method = trainer.method
    assert method.prototypes.shape[0] == 5
    trainer.learn(trainer.stream[2])
    assert method.prototypes.shape[0] == 7
