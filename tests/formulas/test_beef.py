"""The expansion, energy and fusion losses are compared with numpy, the sampler with finite differences, and folding
with the formula of the parts. Tests check bit for bit which weights each stage may change. On one task without energy
it equals SEQ bit for bit."""

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from steps import (
    Array,
    array,
    assert_equal_bits,
    at_stage,
    cross_entropy,
    features_of,
    logits_of,
    make,
    picked,
    recorded_passes,
    softmax,
    some,
    weights,
)

import bace
from bace.core.trainer import Trainer
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.beef import BEEF

UNEQUAL = {"benchmark.tasks": [2, 1, 2]}


def beef(**changes: Any) -> dict[str, Any]:
    return {"name": "beef", "init_epochs": 1, "expand_epochs": 1, "fuse_epochs": 1, "fuse_steps": 0, **changes}


def linear(features: Array, head: Any) -> Array:
    result: Array = features @ array(head.weight).T + array(head.bias)
    return result


def expansion(method: Any, batch: Batch) -> tuple[Array, Array]:
    """Return u and Wf h_t, computed by the newest encoder alone."""
    head, h = method.model.head, features_of(method.model.encoders[-1], batch)
    new = h @ array(head.blocks[-1]).T + array(head.biases[-1])
    parts = [linear(h, head.backward_prototypes)] if method.now.task else []
    beyond = linear(h, head.forward_prototypes) if method.energy else new[:, :0]
    return np.concatenate([*parts, new], 1), beyond


# -- expansion


@pytest.mark.parametrize("modality", ["image", "text"])
def test_expansion_loss_in_numpy(tiny: Any, modality: str) -> None:
    """With three tasks of 2, 1 and 2 classes, u has a column for each of the two old tasks and for each of the two new
    classes."""
    method, _, _ = at_stage(tiny, modality, beef(energy=0.0, alignment=1.3), "expand", 2, **UNEQUAL)
    batch = some(method, 20)
    with recorded_passes() as passes:
        terms = method.loss(batch)
    assert len(passes) == 1
    both, n = passes[0].batch, len(batch)
    u, _ = expansion(method, both)
    assert u.shape[1] == 2 + 2
    u[:, :2] /= 1.3
    own = np.array([{0: 0, 1: 0, 2: 1, 3: 2, 4: 3}[c] for c in both.targets.tolist()])
    assert set(own[:n]) == {2, 3}
    assert terms.keys() == {"new", "replay"}
    assert terms["new"].item() == pytest.approx(cross_entropy(u[:n], own[:n]), rel=1e-4)
    assert terms["replay"].item() == pytest.approx(cross_entropy(u[n:], own[n:]), rel=1e-4)


@pytest.mark.parametrize(
    ("options", "alignment"), [({}, 1.0), ({"mode": "concat"}, 1.7), ({"alignment": 1.3}, 1.3)], ids=str
)
def test_old_logits_are_divided_where_new_examples_outnumber_the_old(
    tiny: Any, options: dict[str, Any], alignment: float
) -> None:
    method, _, _ = at_stage(tiny, "image", beef(energy=0.0, **options), "expand")
    batch = some(method, 10)
    with recorded_passes() as passes:
        terms = method.loss(batch)
    u, _ = expansion(method, passes[0].batch)
    u[:, :1] /= alignment
    own = np.array([{0: 0, 1: 0, 2: 1, 3: 2}[c] for c in passes[0].batch.targets.tolist()])
    assert terms["new"].item() == pytest.approx(cross_entropy(u[:10], own[:10]), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("tasks", [[2, 1, 2], [1, 3, 1]])
def test_targets_are_a_bijection_of_old_tasks_and_new_classes(tiny: Any, tasks: list[int]) -> None:
    method, _, _ = at_stage(tiny, "image", beef(), "expand", 2, **{"benchmark.tasks": tasks})
    column = method.model.head.column(torch.arange(5)).tolist()
    task_of = [task for task, count in enumerate(tasks) for _ in range(count)]
    old = {task_of[c]: column[c] for c in range(sum(tasks[:2]))}
    assert all(column[c] == old[task_of[c]] for c in range(sum(tasks[:2])))  # one column per task
    reached = [*old.values(), *column[sum(tasks[:2]) :]]
    assert sorted(reached) == list(range(2 + tasks[2]))  # each column once


def test_expansion_passes_no_old_encoder(tiny: Any) -> None:
    method, _, _ = at_stage(tiny, "image", beef(), "expand", 2, **UNEQUAL)
    run = []
    for i, encoder in enumerate(method.model.encoders):
        encoder.register_forward_hook(lambda *_, i=i: run.append(i))
    method.loss(some(method, 3))
    assert run == [2] * (1 + 3 + 1)  # the loss, three steps of the sampler, the energy term


def test_expansion_changes_no_old_encoder_and_no_old_row(tiny: Any) -> None:
    method, trainer, stage = at_stage(tiny, "text", beef(), "expand", 2, backbone=tiny.bert, **UNEQUAL)
    before, head = weights(method.model), method.model.head
    assert_equal_bits(weights(method.model.others[1]), weights(method.model.encoder))  # starts as a copy of the first
    assert not torch.equal(
        before["others.0.blocks.0.output.dense.weight"], before["encoder.blocks.0.output.dense.weight"]
    )
    trainer.train(stage, 2)
    after = weights(method.model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    own = {"head.blocks.2", "head.biases.2", *(n for n in before if "_prototypes" in n or n.startswith("others.1."))}
    assert changed <= own
    assert {n for n in own if n.startswith("head.")} <= changed
    assert not head.scale.any()
    assert not head.shift.any()


def test_frozen_encoders_drop_nothing_while_the_newest_does(tiny: Any) -> None:
    method, _, _ = at_stage(tiny, "text", beef(energy=0.0), "expand", 2, backbone=tiny.bert, **UNEQUAL)
    *old, new = method.model.encoders
    for encoder in old:
        assert not any(m.training for m in encoder.modules())
        assert not any(p.requires_grad for p in encoder.parameters())
    assert all(m.training for m in new.modules())
    assert all(p.requires_grad for p in new.parameters())


# -- energy


@pytest.mark.parametrize("task", [0, 1])
def test_energy_loss_in_numpy(tiny: Any, task: int) -> None:
    """In each row the sample's own column is left out. The target is the forward prototype of its class."""
    method, _, _ = at_stage(tiny, "image", beef(), ["main", "expand"][task], task)
    batch = some(method, 20)
    own = method.model.head.column(batch.targets)
    assert len(set(own.tolist())) == 2  # rows with different own columns
    loss = method.open_space(batch, own).item()
    u, beyond = expansion(method, batch)
    assert beyond.shape[1] == 2 + 2 * task
    total = 0.0
    for i, y in enumerate(batch.targets.tolist()):
        others = [u[i, c] for c in range(u.shape[1]) if c != own[i]]
        total -= np.log(softmax(np.array([*others, *beyond[i]]))[len(others) + y])
    assert loss == pytest.approx(total / 20, rel=1e-4)


def test_a_step_of_the_sampler_by_finite_differences(tiny: Any) -> None:
    """x~ is x rotated by 180 degrees, minus lr times the gradient of log(mass of the forward prototypes)."""
    method, _, _ = at_stage(tiny, "image", beef(energy_steps=1, energy_noise=0.0, energy_lr=0.3), "expand")
    batch = some(method, 2)
    turned = torch.flip(batch.inputs["pixel_values"], (2, 3))

    def log_mass(pixels: torch.Tensor) -> Array:
        u, beyond = expansion(method, dataclasses.replace(batch, inputs={"pixel_values": pixels}))
        result: Array = np.log(softmax(np.concatenate([u, beyond], 1))[:, u.shape[1] :].sum(1))
        return result

    found = method.sample(batch).inputs["pixel_values"]
    for at in [(0, 0, 0), (1, 3, 5), (2, 7, 7)]:
        change = torch.zeros_like(turned)
        change[(slice(None), *at)] = 1e-5
        slope = (log_mass(turned + change) - log_mass(turned - change)) / 2e-5  # separately for each sample
        expected = array(turned[(slice(None), *at)]) - 0.3 * slope
        np.testing.assert_allclose(array(found[(slice(None), *at)]), expected, rtol=1e-6, atol=1e-8)
        assert np.abs(slope).min() > 1e-7
    assert (log_mass(found) < log_mass(turned)).all()


def test_what_is_sampled_for_one_picture_does_not_depend_on_the_others(tiny: Any) -> None:
    method, _, _ = at_stage(tiny, "image", beef(energy_noise=0.0, energy_lr=1.0), "expand")
    batch = some(method, 4)
    together = method.sample(batch).inputs["pixel_values"]
    for i in range(4):
        alone = method.sample(picked(batch, torch.tensor([i]))).inputs["pixel_values"]
        torch.testing.assert_close(alone[0], together[i])


def test_the_sampler_adds_the_steps_noise_and_leaves_gradients_modes_and_weights_alone(tiny: Any) -> None:
    options = beef(energy_lr=0.0, energy_noise=0.1, energy_steps=4)
    method, _, _ = at_stage(tiny, "text", options, "expand", backbone=tiny.bert)
    batch, before = some(method, 20), weights(method.model)
    method.model.zero_grad()
    draws = []
    for step in (0, 1, 0):
        method.now.step = step
        draws.append(method.sample(batch).inputs["inputs_embeds"])
    assert torch.equal(draws[0], draws[2])
    assert not torch.equal(draws[0], draws[1])
    method.now.step = 0
    clean = method.disturbed(batch, method.now.rng("energy"))["inputs_embeds"]
    spread = (draws[0] - clean).std().item()
    assert spread == pytest.approx(0.2, rel=0.05)  # four steps of 0.1
    assert not draws[0].requires_grad
    assert all(p.grad is None for p in method.model.parameters())
    assert all(module.training for module in method.model.encoders[-1].modules())
    assert_equal_bits(before, weights(method.model))


def test_texts_start_from_their_own_word_vectors_in_another_order(tiny: Any) -> None:
    method, _, _ = at_stage(tiny, "text", beef(), "expand")
    batch = some(method, 6)
    ids, mask = batch.inputs["input_ids"], batch.inputs["attention_mask"]
    start = method.disturbed(batch, method.now.rng("energy"))
    assert torch.equal(start["attention_mask"], mask)
    assert "input_ids" not in start
    table = method.model.encoders[-1].embeddings.word_embeddings.weight.detach()
    moved = 0
    for vectors, words, length in zip(start["inputs_embeds"], ids, mask.sum(1).tolist(), strict=True):
        found = [int((table == vector).all(1).nonzero()[0]) for vector in vectors]
        assert found[0] == words[0]  # the class token is read at the first position
        assert Counter(found[:length]) == Counter(words[:length].tolist())
        assert found[length:] == words[length:].tolist()  # padding
        moved += found != words.tolist()
    assert moved >= 5


def test_the_energy_term_is_weighted_and_left_out_at_zero(tiny: Any) -> None:
    values = {}
    for weight in (0.0, 0.5, 1.0):
        method, _, _ = at_stage(tiny, "image", beef(energy=weight), "main", 0)
        terms = method.loss(some(method, 3))
        values[weight] = terms.get("energy")
        assert (method.model.head.forward_prototypes is None) == (weight == 0)
    assert values[0.0] is None
    assert 2 * values[0.5].item() == pytest.approx(values[1.0].item())


# -- fusion


def test_fused_logits_in_numpy(tiny: Any) -> None:
    """The logit z of an old class c of task i is (W_old [h_0 .. h_{t-1}])_c + (1 + a_i) (Wb_i h_t + b_i) + c_i; that of
    a new class is Wn h_t."""
    method, _, _ = at_stage(tiny, "image", beef(), "fuse", 2, **UNEQUAL)
    head, batch = method.model.head, some(method, 3)
    with torch.no_grad():
        head.scale.copy_(torch.tensor([0.3, -0.2]))
        head.shift.copy_(torch.tensor([0.5, 2.0]))
        head.backward_prototypes.biases[0].copy_(torch.tensor([0.7, -0.4]))
    h = [features_of(encoder, batch) for encoder in method.model.encoders]
    first, second = array(head.blocks[0]), array(head.blocks[1])
    W = np.concatenate([np.concatenate([first, array(head.columns[0])], 1), np.pad(second, ((0, 0), (16, 0)))])
    old = np.concatenate(h[:2], 1) @ W.T + np.concatenate([array(b) for b in head.biases[:2]])
    back = linear(h[2], head.backward_prototypes)
    expected = np.stack(
        [old[:, 0] + 1.3 * back[:, 0] + 0.5, old[:, 1] + 1.3 * back[:, 0] + 0.5, old[:, 2] + 0.8 * back[:, 1] + 2], 1
    )
    expected = np.concatenate([expected, h[2] @ array(head.blocks[2]).T + array(head.biases[2])], 1)
    found = logits_of(method.model, batch)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    loss = method.fuse(batch)
    assert loss.item() == pytest.approx(cross_entropy(expected, batch.targets.numpy()), rel=1e-4)

    biases, back_bias = [array(b) for b in head.biases], array(head.backward_prototypes.bias)
    head.fold()
    np.testing.assert_allclose(logits_of(method.model, batch), expected, rtol=1e-4, atol=1e-5)
    assert not head.backward_prototypes.weight.any()
    plain = np.concatenate(h, 1) @ array(head.weight).T + array(head.bias)  # the matrix holds everything
    np.testing.assert_allclose(plain, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(array(head.biases[0]), biases[0] + 1.3 * back_bias[0] + 0.5, rtol=1e-5)  # added
    assert (head.weight[3:, :32] == 0).all()  # new classes read only their own module


def test_fusion_trains_two_scalars_for_each_old_task_and_nothing_else(tiny: Any) -> None:
    method, trainer, stage = at_stage(tiny, "image", beef(fuse_lr=0.1), "fuse", 2, **UNEQUAL)
    before = weights(method)
    trainer.train(stage, 2)
    after = weights(method)
    assert {n for n in before if not torch.equal(before[n], after[n])} == {"model.head.scale", "model.head.shift"}
    (group,) = trainer.optimiser.param_groups
    assert sum(p.numel() for p in group["params"]) == 2 * 2
    assert isinstance(trainer.optimiser, torch.optim.SGD)
    assert group["lr"] == 0.1
    assert [p for p in method.model.parameters() if p.requires_grad] == [
        method.model.head.scale,
        method.model.head.shift,
    ]


@pytest.mark.parametrize(("least", "epochs"), [(0, 3), (6, 3), (7, 4), (20, 10)])
def test_fusion_gets_the_steps_it_needs_however_small_its_set_is(tiny: Any, least: int, epochs: int) -> None:
    """15 examples in batches of 8 are two steps per epoch."""
    options = beef(fuse_epochs=3, fuse_steps=least)
    method, trainer, stage = at_stage(tiny, "image", options, "fuse", 2, **UNEQUAL)
    steps = []
    stage.loss = lambda batch: steps.append(len(batch)) or method.fuse(batch)  # type: ignore[func-returns-value]
    trainer.train(stage, 2)
    assert steps == [8, 7] * epochs


def test_fusion_sees_as_many_examples_of_each_class(tiny: Any) -> None:
    method, _, stage = at_stage(tiny, "image", beef(), "fuse", 2, **UNEQUAL)
    examples = stage.examples()
    assert len(set(examples.tolist())) == len(examples)
    counts = Counter(method.stream.targets[examples].tolist())
    assert counts == {0: 3, 1: 3, 2: 3, 3: 3, 4: 3}  # ten slots for three classes
    assert set(method.memory.examples.tolist()) <= set(examples.tolist())
    assert torch.equal(examples, stage.examples())


def test_the_model_is_folded_when_the_task_is_over(tiny: Any) -> None:
    method, trainer, stage = at_stage(tiny, "image", beef(), "fuse", 2, **UNEQUAL)
    trainer.train(stage, 2)
    head = method.model.head
    expected = (1 + head.scale).repeat_interleave(torch.tensor([2, 1]))[:, None]
    expected = expected * head.backward_prototypes.weight.repeat_interleave(torch.tensor([2, 1]), 0)
    trainer.now.phase = "finish"
    trainer.learn(method.stream[2])
    torch.testing.assert_close(head.columns[1].data, expected.data)
    assert not any(p.any() for p in (head.scale, head.shift, *head.backward_prototypes.parameters()))


def test_without_a_memory_there_is_nothing_to_fuse(tiny: Any) -> None:
    method, stream, config = make(tiny, "image", beef(), **{"memory.size": 0})
    results = Trainer(method, stream, config).run()
    assert [stage.name for stage in method.stages(stream[1])] == ["expand"]
    assert len(results.matrix) == 2


# -- equalities, memory, bad values


@pytest.mark.parametrize("modality", ["image", "text"])
def test_one_task_without_energy_is_seq_bit_for_bit(tiny: Any, modality: str) -> None:
    settings = {"benchmark.tasks": [4], "head.kind": "linear"}
    own = {"name": "beef", "energy": 0.0, "init_epochs": 2}
    seq, beef_run = (bace.run(tiny.settings(modality, method=m, **settings)) for m in ("seq", own))
    assert seq.matrix == beef_run.matrix
    assert_equal_bits(weights(seq.method.model), weights(beef_run.method.model))


def test_each_task_adds_a_whole_encoder_or_with_adapters_only_these(tiny: Any) -> None:
    for adapter, low, high in ((0, 3.0, 3.2), (2, 1.0, 1.9)):
        method, stream, config = make(tiny, "image", beef(), **UNEQUAL, **{"backbone.adapter": adapter})
        encoder = sum(p.numel() for p in method.model.encoder.parameters())
        trained = sum(p.numel() for p in method.model.encoder.parameters() if p.requires_grad)
        announced = [method.needs(task) for task in range(3)]
        assert announced == [(encoder + task * trained, trained) for task in range(3)]
        assert (trained == encoder) == (adapter == 0)
        Trainer(method, stream, config).run()
        found = sum(p.numel() for p in method.parameters())
        assert low < found / encoder < high
        assert method.needs(3) == (encoder + 3 * trained, trained)  # also when everything is frozen


@pytest.mark.parametrize(
    "wrong",
    [
        {"expand_epochs": 0},
        {"fuse_steps": -1},
        {"energy": -1.0},
        {"energy_lr": -1.0},
        {"alignment": 0.0},
        {"fuse_lr": 0.0},
    ],
)
def test_wrong_values_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        BEEF(**wrong)


def test_tokens_are_refused_with_a_reason(tiny: Any) -> None:
    with pytest.raises(ConfigError, match=r"BEEF is not defined for token data .refused: a word labelled O"):
        bace.run(tiny.settings("token", method="beef"))
