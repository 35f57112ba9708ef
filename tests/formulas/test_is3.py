"""IS3's loss and prototypes are compared with numpy, and the gradient of its cross-entropy for each row, bias and
feature with the closed form. With its factors at 1 and 0 it equals ExtendNER without memory bit for bit."""

from typing import Any

import numpy as np
import pytest
import torch
from steps import (
    array,
    assert_equal_bits,
    at_task,
    cross_entropy,
    kl_slice,
    learned_before,
    logits_of,
    make,
    picked,
    recorded_passes,
    softmax,
    some,
    take_step,
    weights,
)

from bace.core.trainer import Trainer
from bace.errors import ConfigError
from bace.methods.is3 import IS3

IS = {"name": "is3"}


# -- the loss


def test_new_entities_are_under_cross_entropy_o_words_distilled_and_prototypes_learned(tiny: Any) -> None:
    """L = mean_E CE(z, y) + 2 mean_O KL(softmax(z') || softmax(z) cut to the old columns) + 0.1 CE(head(p_c), c)."""
    method = at_task(tiny, "token", IS)
    take_step(method, some(method, 6))  # away from the teacher
    batch = some(method, 6)
    with recorded_passes() as passes:
        terms = method.loss(batch)
    assert [made.model for made in passes] == [method.model, method.teacher]
    logits, old, targets = logits_of(method.model, batch), logits_of(method.teacher, batch), batch.targets.numpy()
    entity = targets != 0
    assert set(targets[entity]) <= set(range(5, 9))
    assert terms["new"].item() == pytest.approx(cross_entropy(logits[entity], targets[entity]), rel=1e-9)
    assert terms["distil"].item() == pytest.approx(2 * kl_slice(logits, old)[~entity].mean(), rel=1e-9)
    with torch.no_grad():
        scores = array(method.model.head(method.prototypes[1:5]))
    assert terms["prototypes"].item() == pytest.approx(0.1 * cross_entropy(scores, np.arange(1, 5)), rel=1e-9)
    assert set(terms) == {"new", "distil", "prototypes"}


def test_the_first_task_is_plain_cross_entropy_with_o_as_class_0(tiny: Any) -> None:
    method = at_task(tiny, "token", IS, task=0)
    batch = some(method, 6)
    assert (batch.targets == 0).any()
    wanted = cross_entropy(logits_of(method.model, batch), batch.targets.numpy())
    terms = method.loss(batch)
    assert set(terms) == {"new"}
    assert terms["new"].item() == pytest.approx(wanted, rel=1e-9)


def test_a_batch_may_lack_entities_or_o_words(tiny: Any) -> None:
    method = at_task(tiny, "token", IS)
    batch = some(method, 6)
    without = method.loss(picked(batch, torch.nonzero(batch.targets == 0).flatten()))
    assert set(without) == {"distil", "prototypes"}
    alone = method.loss(picked(batch, torch.nonzero(batch.targets).flatten()))
    assert set(alone) == {"new", "prototypes"}
    torch.stack(list(alone.values())).sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in method.model.parameters())


# -- the weakened gradient


def test_the_gradient_of_new_labels_is_weakened_for_old_entities_not_for_o_new_rows_or_features(tiny: Any) -> None:
    """For a linear head, dW = r (p - y)^T f / n and db = r (p - y) / n, where r = 0.6 for the old entities of both
    earlier tasks and r = 1 for O and the new rows; df = (p - y) W / n."""
    changes = {"benchmark.tasks": [2, 1, 2], "head.kind": "linear"}
    method = at_task(tiny, "token", {**IS, "lambda_kd": 0.0, "lambda_proto": 0.0}, task=2, **changes)
    batch, head = some(method, 6), method.model.head
    features: list[torch.Tensor] = []
    debiased = method.debiased
    method.debiased = lambda f: debiased(features.append(f.detach().requires_grad_()) or features[0])
    terms = method.loss(batch)
    assert set(terms) == {"new"}
    terms["new"].backward()

    targets = batch.targets.numpy()
    entity, f, W = targets != 0, array(features[0]), array(head.weight)
    error = (softmax(logits_of(method.model, batch)) - np.eye(11)[targets]) * entity[:, None] / entity.sum()
    r = np.array([1.0] + [0.6] * 6 + [1.0] * 4)
    dW, db = r[:, None] * (error.T @ f), r * error.sum(0)
    assert [len(block) for block in head.blocks] == [5, 2, 4]
    np.testing.assert_allclose(np.concatenate([array(block.grad) for block in head.blocks]), dW, rtol=1e-7, atol=1e-10)
    np.testing.assert_allclose(np.concatenate([array(b.grad) for b in head.biases]), db, rtol=1e-7, atol=1e-10)
    np.testing.assert_allclose(array(features[0].grad), error @ W, rtol=1e-7, atol=1e-10)
    assert np.abs(dW[1:7]).max() > 1e-4


def test_a_cosine_heads_scale_and_the_other_terms_keep_their_gradient(tiny: Any) -> None:
    """The gradient of each old row is 0.6 times that of the cross-entropy plus that of the other terms. O, the new
    rows, the scale and the encoder keep the whole gradient."""
    method = at_task(tiny, "token", IS)
    take_step(method, some(method, 6))
    batch = some(method, 6)

    def gradients(old_gradient: float, *names: str) -> dict[str, torch.Tensor]:
        method.old_gradient = old_gradient
        method.model.zero_grad()
        terms = method.loss(batch)
        torch.stack([terms[name] for name in names]).sum().backward()
        return {name: p.grad.clone() for name, p in method.model.named_parameters() if p.grad is not None}

    ce, rest = gradients(1.0, "new"), gradients(1.0, "distil", "prototypes")
    found = gradients(0.6, "new", "distil", "prototypes")
    assert found.keys() == ce.keys()
    for name, gradient in found.items():
        wanted = ce[name] + rest[name]
        if name == "head.blocks.0":
            assert ce[name][1:].abs().max() > 1e-4
            wanted[1:] = 0.6 * ce[name][1:] + rest[name][1:]
        np.testing.assert_allclose(array(gradient), array(wanted), rtol=1e-6, atol=1e-10)


# -- prototypes


def test_a_prototype_is_the_mean_unit_feature_at_the_end_of_its_task_and_o_has_none(tiny: Any) -> None:
    trainer = learned_before(tiny, "token", IS, 1)
    method, stream = trainer.method, trainer.stream
    wanted = np.zeros((5, method.model.encoder.width))
    out, targets = method.outputs(stream[0].train), stream.labels(stream[0].train)[1].numpy()
    unit = array(out.features) / np.linalg.norm(array(out.features), axis=1, keepdims=True)
    for c in range(1, 5):
        wanted[c] = unit[targets == c].mean(0)
    np.testing.assert_allclose(array(method.prototypes), wanted, rtol=1e-9, atol=1e-12)
    trainer.learn(stream[1])
    assert method.prototypes.shape[0] == 9
    np.testing.assert_array_equal(array(method.prototypes[:5]).round(12), wanted.round(12))
    assert method.prototypes[5:].any(1).all()


def test_prototypes_train_the_head_alone(tiny: Any) -> None:
    method = at_task(tiny, "token", IS)
    method.loss(some(method, 6))["prototypes"].backward()
    assert all(p.grad is None for p in method.model.encoder.parameters())
    assert method.model.head.blocks[1].grad.abs().sum() > 0


# -- special cases


def test_with_factor_1_and_without_prototypes_it_is_extendner_without_memory_bit_for_bit(tiny: Any) -> None:
    ends = []
    for chosen in ({"name": "extendner"}, {**IS, "old_gradient": 1.0, "lambda_proto": 0.0}):
        method, stream, config = make(tiny, "token", chosen, **{"memory.size": 0, "benchmark.tasks": [2, 1, 2]})
        results = Trainer(method, stream, config).run()
        ends.append((results.matrix, weights(method.model)))
    assert ends[0][0] == ends[1][0]
    assert_equal_bits(ends[0][1], ends[1][1])


def test_it_keeps_no_examples(tiny: Any) -> None:
    trainer = learned_before(tiny, "token", IS, 2)
    assert not len(trainer.method.remembered())


@pytest.mark.parametrize("wrong", [{"lambda_proto": -1.0}, {"old_gradient": -0.1}, {"lambda_kd": -2.0}])
def test_values_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"IS3.*{next(iter(wrong))}.*{next(iter(wrong.values()))}"):
        IS3(**wrong)


def test_other_data_than_sentences_are_refused(tiny: Any) -> None:
    with pytest.raises(ConfigError, match="IS3 is not defined for text data"):
        make(tiny, "text", IS)
