"""ExtendNER's loss on new and replayed sentences is compared with numpy, and its gradient for the logits with a closed
form. Tests check its limits (a teacher that is sure of O, batches of only entities or only O words, no distillation).
On one task it equals ER bit for bit."""

from typing import Any

import numpy as np
import pytest
import torch
from steps import (
    Array,
    assert_equal_bits,
    at_task,
    cross_entropy,
    kl_slice,
    logits_of,
    make,
    picked,
    recorded_passes,
    some,
    take_step,
    weights,
)

from bace.core.trainer import Trainer
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.cfner import CFNER
from bace.methods.extendner import ExtendNER


def means(values: Array, new: Array, reduction: str) -> float:
    """Return the mean over the new rows plus the mean over the replayed rows, or one mean over both."""
    parts = [values[new], values[~new]] if reduction == "sum" else [values]
    return float(sum(part.mean() for part in parts if len(part)))


def row_losses(logits: Array, targets: Array) -> Array:
    return np.array([cross_entropy(row[None], np.array([y])) for row, y in zip(logits, targets, strict=True)])


# -- the loss


@pytest.mark.parametrize("tau", [1.0, 2.0])
@pytest.mark.parametrize("reduction", ["sum", "joint"])
def test_entities_are_under_cross_entropy_and_o_words_distilled_new_and_replayed(
    tiny: Any, reduction: str, tau: float
) -> None:
    """L = mean_E CE(z, y; S) + 2 mean_Q KL(softmax(z'/T) || softmax(z/T) cut to the old columns) T^2."""
    method = at_task(tiny, "token", {"name": "extendner", "reduction": reduction, "tau": tau})
    take_step(method, some(method, 6))  # away from the teacher
    batch = some(method, 6)
    with recorded_passes() as passes:
        terms = method.loss(batch)
    student, teacher = passes
    assert (student.model, teacher.model) == (method.model, method.teacher)
    assert student.training
    assert not teacher.training
    both = student.batch
    assert both is teacher.batch
    logits, old, targets = logits_of(method.model, both), logits_of(method.teacher, both), both.targets.numpy()
    assert old.shape[1] == method.now.known == 5 < logits.shape[1] == 9
    outside, new = targets == 0, np.arange(len(both)) < len(batch)
    replayed = targets[~new]
    assert 0 < (replayed == 0).sum() < len(replayed)  # both rules apply to some replayed words
    assert (replayed < 5).all()
    ce = means(row_losses(logits, targets)[~outside], new[~outside], reduction)
    kl = means(kl_slice(logits, old, tau)[outside] * tau**2, new[outside], reduction)
    assert sum(term.item() for name, term in terms.items() if name != "distil") == pytest.approx(ce, rel=1e-5)
    assert set(terms) == ({"new", "replay", "distil"} if reduction == "sum" else {"new", "distil"})
    assert terms["distil"].item() == pytest.approx(2 * kl, rel=1e-4)
    assert kl > 1e-3


def test_a_new_word_of_a_known_type_is_learned_from_its_label(tiny: Any) -> None:
    """A later call of a Learner may bring more examples of known types, unless the old rows of the head are frozen."""
    assert ExtendNER().takes_known
    assert not ExtendNER(head="frozen").takes_known
    assert not CFNER(head="trained").takes_known  # its neighbours are those of new types
    method = at_task(tiny, "token", "extendner", **{"memory.size": 0})
    batch = some(method, 6)
    again = int((batch.targets >= 5).nonzero()[0])
    method.stream.targets[batch.rows[again]] = 1
    batch = some(method, 6)
    targets, outside = batch.targets.numpy(), batch.targets.numpy() == 0
    assert targets[again] == 1
    losses = row_losses(logits_of(method.model, batch), targets)
    assert method.loss(batch)["new"].item() == pytest.approx(losses[~outside].mean(), rel=1e-5)


def test_gradient_of_the_distillation_is_the_soft_max_less_the_teachers_with_zeros_for_the_new_labels(
    tiny: Any,
) -> None:
    """d KL / d z_c = p_c - p'_c for an old label and p_c for a new label, which is pushed down through the normaliser.
    A renormalised student would leave new labels unchanged."""
    method = at_task(tiny, "token", {"name": "extendner", "lambda_kd": 3.0}, **{"memory.size": 0})
    batch = some(method, 6)
    take_step(method, batch)
    kept: list[torch.Tensor] = []
    forward = method.model.head.forward

    def remembering(features: torch.Tensor) -> torch.Tensor:
        kept.append(forward(features))
        kept[-1].retain_grad()
        return kept[-1]

    method.model.head.forward = remembering
    method.loss(batch)["distil"].backward()
    z, outside = kept[0], batch.targets == 0
    teacher = torch.from_numpy(logits_of(method.teacher, batch)).float()
    wanted = z.detach().softmax(1)
    wanted[:, :5] -= teacher.softmax(1)
    assert torch.allclose(z.grad[outside], 3 * wanted[outside] / outside.sum(), atol=1e-6)
    assert (z.grad[outside, 5:] > 0).all()
    assert (z.grad[~outside] == 0).all()


def test_a_teacher_sure_of_o_makes_it_cross_entropy_towards_o_over_all_labels(tiny: Any) -> None:
    method = at_task(tiny, "token", {"name": "extendner", "lambda_kd": 1.0}, **{"memory.size": 0})
    batch = some(method, 6)
    certain = torch.full((len(batch), 5), -1e4)
    certain[:, 0] = 0.0
    method.teacher.head.forward = lambda features: certain
    outside = batch.targets.numpy() == 0
    logits = logits_of(method.model, batch)
    wanted = cross_entropy(logits[outside], batch.targets.numpy()[outside])
    assert method.loss(batch)["distil"].item() == pytest.approx(wanted, rel=1e-5)


def test_only_words_count_not_their_later_pieces_special_tokens_or_padding(tiny: Any) -> None:
    method = at_task(tiny, "token", {"name": "extendner"}, **{"memory.size": 0})
    batch = some(method, 6)
    assert len(batch) < int(batch.inputs["attention_mask"].sum())
    padded = {key: torch.nn.functional.pad(value, (0, 7), value=0) for key, value in batch.inputs.items()}
    padded["input_ids"][padded["attention_mask"] == 0] = 11  # padding may hold any id
    longer = Batch(padded, batch.targets, batch.examples, batch.rows, batch.at)
    plain, other = method.loss(batch), method.loss(longer)
    for name, term in plain.items():
        assert other[name].item() == pytest.approx(term.item(), rel=1e-4)


# -- parts that a batch may lack


def test_a_batch_without_entities_is_distilled_alone_and_one_of_entities_alone_is_not(tiny: Any) -> None:
    method = at_task(tiny, "token", {"name": "extendner"}, **{"memory.size": 0})
    batch = some(method, 6)
    outside = torch.nonzero(batch.targets == 0).flatten()
    terms = method.loss(picked(batch, outside))
    assert set(terms) == {"distil"}
    terms["distil"].backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in method.model.parameters())
    assert method.model.head.blocks[1].grad.abs().sum() > 0
    terms = method.loss(picked(batch, torch.nonzero(batch.targets).flatten()))
    assert set(terms) == {"new"}


def test_without_distillation_and_replay_only_entities_are_learned_and_no_teacher_is_kept(tiny: Any) -> None:
    """In this case nothing is learned from O words."""
    method = at_task(tiny, "token", {"name": "extendner", "lambda_kd": 0.0}, **{"memory.size": 0})
    batch = some(method, 6)
    assert method.teacher is None
    with recorded_passes() as passes:
        terms = method.loss(batch)
    assert len(passes) == 1
    entity = batch.targets.numpy() != 0
    wanted = cross_entropy(logits_of(method.model, batch)[entity], batch.targets.numpy()[entity])
    assert set(terms) == {"new"}
    assert terms["new"].item() == pytest.approx(wanted, rel=1e-5)
    assert method.loss(picked(batch, torch.nonzero(batch.targets == 0).flatten())) == {}  # a step without gradient


def test_all_of_the_memory_is_shuffled_into_the_task_in_the_other_mode(tiny: Any) -> None:
    method = at_task(tiny, "token", {"name": "extendner", "mode": "concat"})
    (stage,) = method.stages(method.stream[1])
    assert set(method.memory.examples.tolist()) <= set(stage.examples().tolist())
    with recorded_passes() as passes:
        assert set(method.loss(some(method, 6))) == {"new", "distil"}
    assert len(passes[0].batch.examples) == 6


# -- special cases


def test_on_one_task_it_is_er_bit_for_bit(tiny: Any) -> None:
    ends = []
    for name in ("er", "extendner"):
        method, stream, config = make(tiny, "token", {"name": name}, **{"benchmark.tasks": [4]})
        results = Trainer(method, stream, config).run()
        ends.append((results.matrix, weights(method.model)))
        assert method.teacher is None
    assert ends[0][0] == ends[1][0]
    assert_equal_bits(ends[0][1], ends[1][1])


@pytest.mark.parametrize("wrong", [{"lambda_kd": -1.0}, {"tau": 0.0}])
def test_values_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}.*{next(iter(wrong.values()))}"):
        ExtendNER(**wrong)


def test_other_data_than_sentences_are_refused(tiny: Any) -> None:
    with pytest.raises(ConfigError, match="ExtendNER is not defined for text data"):
        make(tiny, "text", {"name": "extendner"})
