"""Losses and class weights are compared with numpy and hand-computed numbers, and herding with brute force. Tests check
bit for bit which weights each stage may change. On one task it equals SEQ bit for bit."""

from typing import Any

import numpy as np
import pytest
import torch
from steps import (
    array,
    assert_equal_bits,
    at_stage,
    at_task,
    cross_entropy,
    features_of,
    logits_of,
    make,
    recorded_passes,
    softmax,
    some,
    weights,
)

import bace
from bace.core.trainer import Trainer
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.foster import FOSTER, class_weights


def foster(**changes: Any) -> dict[str, Any]:
    return {"name": "foster", "init_epochs": 2, "boost_epochs": 1, "compress_epochs": 1, **changes}


def passed(method: Any, loss: Any, batch: Batch) -> tuple[Any, Batch]:
    """Return the terms of a loss, and the batch of new and replayed rows on which it was computed."""
    with recorded_passes() as passes:
        terms = loss(batch)
    return terms, passes[0].batch


# -- class weights


def test_class_weights_by_hand() -> None:
    """With beta = 1/2, 1/E is .5/.5 and .5/.75, that is 1 and 2/3, scaled to sum to 2."""
    found = class_weights(torch.tensor([1.0, 2.0], dtype=torch.float64), 0.5)
    np.testing.assert_allclose(array(found), [1.2, 0.8])


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.96, 0.999])
def test_class_weights_sum_to_the_classes_and_rare_ones_weigh_more(beta: float) -> None:
    counts = np.array([2.0, 2.0, 35.5, 140.0, 0.0])
    found = array(class_weights(torch.tensor(counts), beta))
    assert found.sum() == pytest.approx(5)
    raw = (1 - beta) / (1 - beta ** np.maximum(counts, 1))  # a class without examples counts as having one
    np.testing.assert_allclose(found, raw * 5 / raw.sum())
    assert (found == 1).all() if beta == 0 else found[4] > found[0] == found[1] > found[2] > found[3]


def test_a_class_counts_as_often_as_an_epoch_shows_it(tiny: Any) -> None:
    """There are ten examples per class and five slots for each of two old classes. With `concat` each is shown once.
    With `batch`, 5 steps show 4 new and 4 replayed examples each, so 20 replayed examples over 10 slots."""
    concat, _, _ = at_stage(tiny, "image", foster(mode="concat"), "boost")
    assert concat.counts.tolist() == [5, 5, 10, 10]
    separate, _, _ = at_stage(tiny, "image", foster(), "boost")
    assert separate.counts.tolist() == [10, 10, 10, 10]
    rare, _, _ = at_stage(tiny, "image", foster(), "boost", **{"train.replay_ratio": 0.25})  # 4 steps of 6 and 2
    assert rare.counts.tolist() == [4, 4, 10, 10]


# -- boosting


@pytest.mark.parametrize("modality", ["image", "text"])
def test_boost_loss_in_numpy(tiny: Any, modality: str) -> None:
    options = foster(beta1=0.9, lambda_okd=0.7, T=3.0)
    method, _, _ = at_stage(tiny, modality, options, "boost", **{"train.replay_ratio": 0.25})
    teacher, head = method.teacher, method.teacher.head
    with torch.no_grad():
        for p in (head.columns[0], head.biases[0], *teacher.others[0].parameters()):  # away from their initial values
            p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
    terms, both = passed(method, method.boost, some(method, 3))
    n, y = 3, both.targets.numpy()
    hA, hB = features_of(teacher.encoder, both), features_of(teacher.others[0], both)
    np.testing.assert_allclose(hA, features_of(method.model.encoder, both))  # the old network
    W = np.concatenate([np.concatenate([array(head.blocks[0]), array(head.columns[0])], 1), array(head.blocks[1])])
    z = np.concatenate([hA, hB], 1) @ W.T + np.concatenate([array(b) for b in head.biases])
    w = (1 - 0.9) / (1 - 0.9 ** np.array([4.0, 4.0, 10.0, 10.0]))
    w *= 4 / w.sum()
    assert terms["new"].item() == pytest.approx(cross_entropy((z / w)[:n], y[:n]), rel=1e-4)
    assert terms["replay"].item() == pytest.approx(cross_entropy((z / w)[n:], y[n:]), rel=1e-4)
    beside = hB @ array(head.auxiliary.blocks[0]).T + array(head.auxiliary.biases[0])
    assert beside.shape == (len(both), 4)
    assert terms["branch new"].item() == pytest.approx(cross_entropy(beside[:n], y[:n]), rel=1e-4)
    assert terms["branch replay"].item() == pytest.approx(cross_entropy(beside[n:], y[n:]), rel=1e-4)
    old = hA @ array(method.model.head.blocks[0]).T + array(method.model.head.biases[0])
    kd = -(softmax(old / 3) * np.log(softmax(z[:, :2] / 3))).sum(1)  # no T^2
    assert terms["distil"].item() == pytest.approx(0.7 * (kd[:n].mean() + kd[n:].mean()), rel=1e-4)


def test_distillation_starts_at_the_entropy_of_the_old_network(tiny: Any) -> None:
    """The old rows are copies and do not read the new branch yet, so the teacher gives the logits of the old
    network."""
    method, _, _ = at_stage(tiny, "image", foster(), "boost")
    terms, both = passed(method, method.boost, some(method, 3))
    p = softmax(logits_of(method.model.eval(), both)[:, :2] / 2)
    each = -(p * np.log(p)).sum(1)
    entropy = each[:3].mean() + each[3:].mean()  # of the new rows, and of the replayed ones
    assert terms["distil"].item() == pytest.approx(entropy, rel=1e-5)
    with torch.no_grad():
        method.teacher.head.columns[0].add_(0.3 * torch.randn(2, 16, generator=torch.Generator().manual_seed(2)))
    assert passed(method, method.boost, some(method, 3))[0]["distil"].item() > entropy + 1e-3


def test_without_distillation_its_term_is_left_out(tiny: Any) -> None:
    method, _, _ = at_stage(tiny, "image", foster(lambda_okd=0.0), "boost")
    assert method.boost(some(method, 3)).keys() == {"new", "replay", "branch new", "branch replay"}


@pytest.mark.parametrize("modality", ["image", "text"])
def test_boosting_trains_the_new_branch_and_heads_and_nothing_of_the_old_network(tiny: Any, modality: str) -> None:
    """The ordinary backbone is used, so that dropout in the old branch would also be detected."""
    method, trainer, stage = at_stage(tiny, modality, foster(), "boost", backbone=getattr(tiny, _BACKBONE[modality]))
    old, student, before = weights(method.teacher.encoder), weights(method.model), weights(method.teacher)
    assert_equal_bits(old, weights(method.model.encoder))
    assert_equal_bits(old, weights(method.teacher.others[0]))  # starts as a copy of the old network
    trainer.train(stage, 2)
    assert all(p.grad is None for p in method.parameters())  # the announced memory holds one network's gradients
    assert_equal_bits(old, weights(method.teacher.encoder))
    assert_equal_bits(student, weights(method.model))
    changed = {name for name, value in weights(method.teacher).items() if not torch.equal(value, before[name])}
    head = {"blocks.0", "blocks.1", "columns.0", "biases.0", "biases.1", "auxiliary.blocks.0", "auxiliary.biases.0"}
    assert {f"head.{name}" for name in head} <= changed
    branch = {name for name in before if name.startswith("others.") and before[name].is_floating_point()}
    assert len(branch & changed) > len(branch) / 2


_BACKBONE = {"image": "vit", "text": "bert"}


def test_the_old_branch_is_in_eval_mode_while_the_new_one_trains(tiny: Any) -> None:
    method, _, _ = at_stage(tiny, "text", foster(), "boost", backbone=tiny.bert)
    old, new = method.teacher.encoders
    assert not any(module.training for module in old.modules())
    assert any(isinstance(m, torch.nn.Dropout) and m.training for m in new.modules())
    assert not any(p.requires_grad for p in old.parameters())


@pytest.mark.parametrize(("rows", "reads"), [("ft", True), ("az", False)])
def test_new_rows_read_the_old_branch_or_not(tiny: Any, rows: str, reads: bool) -> None:
    method, trainer, stage = at_stage(tiny, "image", foster(new_rows=rows), "boost")
    trainer.train(stage, 2)
    weight = method.teacher.head.weight
    assert weight.shape == (4, 32)
    assert bool((weight[2:, :16] != 0).all()) == reads
    assert (weight[2:, 16:] != 0).all()
    assert (weight[:2] != 0).all()


# -- compression


def test_compress_loss_in_numpy(tiny: Any) -> None:
    """The target is w' softmax(z_T / T), renormalised."""
    options = foster(beta2=0.9, T=3.0)
    method, _, _ = at_stage(tiny, "image", options, "compress", **{"train.replay_ratio": 0.25})
    (term,), both = passed(method, lambda batch: method.compress(batch).values(), some(method, 3))
    w = (1 - 0.9) / (1 - 0.9 ** np.array([4.0, 4.0, 10.0, 10.0]))  # its scale does not matter here
    target = softmax(logits_of(method.teacher, both) / 3) * w
    target /= target.sum(1, keepdims=True)
    student = logits_of(method.model, both)
    assert term.item() == pytest.approx(-(target * np.log(softmax(student / 3))).sum(1).mean(), rel=1e-5)


def test_compression_starts_from_the_old_network_and_leaves_the_teacher_alone(tiny: Any) -> None:
    old, stream, config = make(tiny, "image", foster())
    Trainer(old, stream, config).learn(stream[0])
    method, trainer, stage = at_stage(tiny, "image", foster(), "compress")
    batch = some(method, 3)
    student = method.model.eval()(batch).logits
    assert student.shape == (3, 4)
    torch.testing.assert_close(student[:, :2], old.model.eval()(batch).logits, rtol=0, atol=1e-12)
    before, teacher = weights(method.model), weights(method.teacher)
    trainer.train(stage, 2)
    assert_equal_bits(teacher, weights(method.teacher))
    changed = {name for name, value in weights(method.model).items() if not torch.equal(value, before[name])}
    assert {"head.blocks.0", "head.blocks.1", "encoder.norm.weight"} <= changed


def test_alignment_brings_new_rows_of_the_teacher_to_the_norm_of_the_old_ones(tiny: Any) -> None:
    aligned, _, _ = at_stage(tiny, "image", foster(align=True), "compress")
    plain, _, _ = at_stage(tiny, "image", foster(), "compress")
    rows, before = array(aligned.teacher.head.weight), array(plain.teacher.head.weight)
    norms, norms_before = np.linalg.norm(rows, axis=1), np.linalg.norm(before, axis=1)
    assert norms[2:].mean() == pytest.approx(norms[:2].mean(), rel=1e-5)
    assert norms_before[2:].mean() != pytest.approx(norms_before[:2].mean(), rel=1e-3)
    np.testing.assert_array_equal(rows[:2], before[:2])
    np.testing.assert_allclose(rows[2:], before[2:] * norms[2] / norms_before[2], rtol=1e-5)


# -- the end of a task


def test_the_student_predicts_and_the_teacher_is_scored_beside_it(tiny: Any) -> None:
    first = at_task(tiny, "image", foster(), task=0).eval()
    batch = some(first, 3)
    assert torch.equal(first.predict(batch, "teacher"), first.predict(batch))  # there is no teacher yet
    result = bace.run(tiny.settings("image", method=foster()))
    method, task = result.method, result.method.stream[2]
    with method.stream.licence("test", task.test):
        batch = method.stream.batch(task.test)
    np.testing.assert_array_equal(array(method.predict(batch)), logits_of(method.model, batch))
    np.testing.assert_array_equal(array(method.predict(batch, "teacher")), logits_of(method.teacher, batch))
    assert len(result.metrics["scorers"]["teacher"]["A"]) == 3


def test_exemplars_are_herded_by_the_teachers_features(tiny: Any) -> None:
    method, _, _ = at_stage(tiny, "image", foster(), "compress")
    stream = method.stream
    with torch.no_grad():
        for i, p in enumerate(method.teacher.others[0].parameters()):  # make the new branch give other features
            p += 0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
    method.eval()
    method.after_task(stream[1])
    kept = {c: method.memory.examples[method.memory.group == c].tolist() for c in (2, 3)}
    for c, found in kept.items():
        members = stream.by_group(stream[1].train)[c]
        batch = stream.batch(members)
        unit = np.concatenate([features_of(encoder, batch) for encoder in method.teacher.encoders], 1)
        unit /= np.linalg.norm(unit, axis=1, keepdims=True)
        chosen: list[int] = []
        for k in range(1, len(found) + 1):
            free = [i for i in range(len(unit)) if i not in chosen]
            gap = {i: np.linalg.norm(unit.mean(0) - (unit[chosen].sum(0) + unit[i]) / k) for i in free}
            chosen.append(min(free, key=gap.__getitem__))
        assert found == members[chosen].tolist()


@pytest.mark.parametrize("modality", ["image", "text"])
def test_one_task_is_seq_bit_for_bit(tiny: Any, modality: str) -> None:
    settings = {"benchmark.tasks": [4], "head.kind": "linear"}
    seq, own = (bace.run(tiny.settings(modality, method=m, **settings)) for m in ("seq", foster()))
    assert seq.matrix == own.matrix
    assert_equal_bits(weights(seq.method.model), weights(own.method.model))


def test_only_one_network_more_than_the_teacher_is_ever_kept(tiny: Any) -> None:
    method, stream, config = make(tiny, "image", foster(), **{"benchmark.tasks": [2, 1, 2]})
    encoder = sum(p.numel() for p in method.model.encoder.parameters())
    Trainer(method, stream, config).run()
    found = sum(p.numel() for p in method.parameters())
    assert 3 * encoder < found < 3.1 * encoder
    assert method.needs(2) == (3 * encoder, encoder)
    assert method.needs(0) == (encoder, encoder)


@pytest.mark.parametrize(
    "wrong", [{"boost_epochs": 0}, {"beta1": 1.0}, {"beta2": -0.1}, {"lambda_okd": -1.0}, {"T": 0.0}]
)
def test_wrong_values_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        FOSTER(**wrong)


def test_tokens_are_refused_with_a_reason(tiny: Any) -> None:
    with pytest.raises(ConfigError, match=r"FOSTER is not defined for token data .refused: classes are weighted"):
        bace.run(tiny.settings("token", method="foster"))
