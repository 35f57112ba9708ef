"""LwF's loss on every modality is compared with the equation in numpy, and its gradient with closed forms (zero at the
start of a task, zero for new logits, centred logits at high temperature). Without distillation it equals SEQ bit for
bit."""

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
    logits_of,
    make,
    recorded_passes,
    softmax,
    some,
    take_step,
    weights,
)

from bace.core.trainer import Trainer
from bace.errors import ConfigError
from bace.methods.lwf import LwF


def soft_targets(student: Array, teacher: Array, tau: float) -> float:
    """Return KD(z, z'; old, T) = mean_i sum_c -softmax(z'/T)_c log softmax(z_old/T)_c."""
    old = student[:, : teacher.shape[1]]
    return float(-(softmax(teacher / tau) * np.log(softmax(old / tau))).sum(1).mean())


# -- the loss


@pytest.mark.parametrize("modality", ["image", "text", "token"])
def test_loss_is_cross_entropy_and_five_times_the_soft_targets_at_temperature_two(tiny: Any, modality: str) -> None:
    """The cross-entropy is over the new classes by default. For tokens it is over all labels and all words, including
    words labelled O, and O is among the old labels."""
    method = at_task(tiny, modality, {"name": "lwf"})
    batch = some(method)
    take_step(method, batch, lr=0.5)  # away from the teacher
    student, teacher = logits_of(method.model, batch), logits_of(method.teacher, batch)
    assert teacher.shape[1] == method.now.known < student.shape[1] == method.now.seen
    if modality == "token":
        assert 0 < int((batch.targets == 0).sum()) < len(batch)
    terms, first = method.loss(batch), 0 if modality == "token" else 2
    expected = cross_entropy(student[:, first:], batch.targets.numpy() - first)
    assert terms["new"].item() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    distilled, entropy = (soft_targets(logits, teacher, 2.0) for logits in (student, teacher))
    assert terms["distil"].item() == pytest.approx(5 * distilled, rel=1e-5)
    assert distilled > entropy + 1e-4  # minimal where the student equals the teacher


def test_loss_of_one_row_by_hand(tiny: Any) -> None:
    """Logits (2 ln 3, 0, 5) and a teacher's (0, 0) at T = 2 give the soft-maxes (3/4, 1/4) and (1/2, 1/2)."""
    method = at_task(tiny, "image", {"name": "lwf", "lambda_kd": 1.0})
    batch = some(method, 1)

    def fixed(values: list[float]) -> Any:
        return lambda *_, **__: torch.tensor([values])

    method.model.head.forward = fixed([2 * np.log(3), 0.0, 5.0])
    method.teacher.head.forward = fixed([0.0, 0.0])
    assert method.loss(batch)["distil"].item() == pytest.approx(-0.5 * np.log(3 / 4) - 0.5 * np.log(1 / 4), rel=1e-6)


@pytest.mark.parametrize("span", ["seen", "new"])
def test_span_is_of_the_cross_entropy_alone(tiny: Any, span: str) -> None:
    method = at_task(tiny, "image", {"name": "lwf", "span": span})
    batch = some(method)
    take_step(method, batch)
    student, teacher = logits_of(method.model, batch), logits_of(method.teacher, batch)
    first = {"seen": 0, "new": 2}[span]
    terms = method.loss(batch)
    expected = cross_entropy(student[:, first:], batch.targets.numpy() - first)
    assert terms["new"].item() == pytest.approx(expected, rel=1e-5)
    assert terms["distil"].item() == pytest.approx(5 * soft_targets(student, teacher, 2.0), rel=1e-5)


# -- its gradient


def test_distillation_has_no_gradient_before_the_first_update_of_a_task(tiny: Any) -> None:
    method = at_task(tiny, "image", {"name": "lwf"})
    batch = some(method)

    def largest(term: str) -> float:
        method.model.zero_grad()
        method.loss(batch)[term].backward()
        return max(float(p.grad.abs().max()) for p in method.model.parameters() if p.grad is not None)

    assert largest("distil") < 1e-5 < 0.01 < largest("new")
    teacher = logits_of(method.teacher, batch)
    assert method.loss(batch)["distil"].item() == pytest.approx(5 * soft_targets(teacher, teacher, 2.0), rel=1e-5)
    take_step(method, batch)
    assert largest("distil") > 1e-3


def test_distillation_does_not_reach_new_head_rows(tiny: Any) -> None:
    """Its soft-max is over the old classes only. Cut out of a soft-max over all classes, it would push the new logits
    down."""
    method = at_task(tiny, "image", {"name": "lwf"}, **{"head.kind": "linear"})
    batch = some(method)
    take_step(method, batch)
    method.loss(batch)["distil"].backward()
    old, new = (block.grad for block in method.model.head.blocks)
    assert (old.abs().sum(1) > 0).all()
    assert new is None or not new.any()
    assert all(p.grad is None for p in method.teacher.parameters())


def test_gradient_of_the_old_logits_is_the_difference_of_the_soft_maxes_over_the_temperature(tiny: Any) -> None:
    """d(lambda KD)/dz_old = lambda / (n T) (softmax(z_old/T) - softmax(z'/T)). The gradient of a linear head's bias is
    the sum over rows."""
    method = at_task(tiny, "image", {"name": "lwf", "lambda_kd": 3.0, "tau": 1.5}, **{"head.kind": "linear"})
    batch = some(method)
    take_step(method, batch)
    student, teacher = logits_of(method.model, batch), logits_of(method.teacher, batch)
    method.loss(batch)["distil"].backward()
    expected = 3.0 / 1.5 * (softmax(student[:, :2] / 1.5) - softmax(teacher / 1.5)).mean(0)
    np.testing.assert_allclose(array(method.model.head.biases[0].grad), expected, rtol=1e-4, atol=1e-7)


def test_at_a_high_temperature_it_matches_centred_logits(tiny: Any) -> None:
    """T^2 (KD - entropy) tends to the mean over rows of |(z - mean z) - (z' - mean z')|^2 / (2 old)."""
    method = at_task(tiny, "image", {"name": "lwf", "lambda_kd": 1.0, "tau": 1000.0})
    batch = some(method)
    take_step(method, batch)
    student, teacher = logits_of(method.model, batch)[:, :2], logits_of(method.teacher, batch)
    above = method.loss(batch)["distil"].item() - soft_targets(teacher, teacher, 1000.0)
    apart = (student - student.mean(1, keepdims=True)) - (teacher - teacher.mean(1, keepdims=True))
    assert 1000.0**2 * above == pytest.approx((apart**2).sum(1).mean() / (2 * 2), rel=1e-3)


# -- the teacher


def test_teacher_is_the_network_of_the_task_before_and_stays_so(tiny: Any) -> None:
    method, stream, config = make(tiny, "image", {"name": "lwf"})
    trainer = Trainer(method, stream, config)
    trainer.learn(stream[0])
    assert method.teacher is None
    last = weights(method.model)
    trainer.learn(stream[1])
    assert_equal_bits(weights(method.teacher), last)  # with only the rows of the old classes
    assert not torch.equal(method.model.encoder.norm.weight, last["encoder.norm.weight"])


def test_teacher_sees_the_very_batch_of_the_student_in_eval_mode(tiny: Any) -> None:
    method = at_task(tiny, "text", {"name": "lwf"})
    batch = some(method)
    with recorded_passes() as passes:
        method.loss(batch)
    assert [(p.model is method.model, p.training) for p in passes] == [(True, True), (False, False)]
    assert passes[1].model is method.teacher
    assert all(p.batch is batch for p in passes)


# -- without distillation


@pytest.mark.parametrize("span", ["seen", "new"])
@pytest.mark.parametrize("modality", ["image", "text", "token"])
def test_lwf_without_distillation_is_seq_bit_for_bit(tiny: Any, modality: str, span: str) -> None:
    ends = []
    for options in ({"name": "seq"}, {"name": "lwf", "lambda_kd": 0.0}):
        method, stream, config = make(tiny, modality, {**options, "span": span})
        results = Trainer(method, stream, config).run()
        ends.append((results.matrix, weights(method.model)))
    assert ends[0][0] == ends[1][0]
    assert_equal_bits(ends[0][1], ends[1][1])


def test_the_first_task_and_a_weight_of_zero_pass_no_teacher(tiny: Any) -> None:
    for options, task in (({}, 0), ({"lambda_kd": 0.0}, 1)):
        method = at_task(tiny, "image", {"name": "lwf", **options}, task=task)
        with recorded_passes() as passes:
            assert list(method.loss(some(method))) == ["new"]
        assert len(passes) == 1


@pytest.mark.parametrize("wrong", [{"lambda_kd": -1.0}, {"tau": 0.0}, {"tau": -2.0}])
def test_values_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}.*{next(iter(wrong.values()))}"):
        LwF(**wrong)
