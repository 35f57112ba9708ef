"""Features and both cross-entropies are compared with numpy and with a second encoder assembled by hand. Frozen parts
stay the same bit for bit. On one task it equals SEQ bit for bit."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from steps import (
    Array,
    array,
    assert_equal_bits,
    at_task,
    begin,
    cross_entropy,
    logits_of,
    make,
    recorded_passes,
    some,
    weights,
)

import bace
from bace.core.trainer import Trainer
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.memo import MEMO


def memo(**changes: Any) -> dict[str, Any]:
    return {"name": "memo", **changes}


def features_of(model: Any, tip: int, batch: Batch) -> Array:
    """Return the features of one tip, from a whole encoder with that tip as its last block and final LayerNorm."""
    whole = copy.deepcopy(model.encoder).eval()
    if tip:
        whole.blocks[-1], whole.norm = model.others[tip - 1]
    with torch.no_grad():
        return array(whole(batch.inputs)[:, 0])


def learned(tiny: Any, tasks: int, options: dict[str, Any], **changes: Any) -> tuple[Any, Trainer]:
    """Return a method that has learned this many of three tasks, and its trainer."""
    method, stream, config = make(tiny, "image", options, **{"benchmark.tasks": [2, 1, 2], **changes})
    trainer = Trainer(method, stream, config)
    for task in range(tasks):
        trainer.learn(stream[task])
    return method, trainer


# -- features and head


@pytest.mark.parametrize("modality", ["image", "text"])
def test_features_of_all_tips_stand_side_by_side(tiny: Any, modality: str) -> None:
    method = at_task(tiny, modality, memo(), task=2, **{"benchmark.tasks": [2, 1, 2]})
    with torch.no_grad():
        for i, p in enumerate(method.model.others[1].parameters()):  # the newest is a copy, so make it differ
            p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
    batch = some(method, 3)
    method.model.eval()
    out = method.model(batch)
    expected = [features_of(method.model, tip, batch) for tip in range(3)]
    np.testing.assert_allclose(array(out.features), np.concatenate(expected, 1), rtol=1e-5, atol=1e-6)
    assert all(np.abs(expected[tip] - expected[tip - 1]).max() > 1e-3 for tip in (1, 2))


def test_the_head_is_as_wide_as_all_tips_and_classifies_by_all_of_them(tiny: Any) -> None:
    for task, classes in enumerate([2, 3, 5]):
        method = at_task(tiny, "image", memo(), task=task, **{"benchmark.tasks": [2, 1, 2]})
        head = method.model.head
        assert head.weight.shape == (classes, (task + 1) * 16)
        assert method.model(some(method, 3)).features.shape == (3, (task + 1) * 16)
    assert [block.shape for block in head.blocks] == [(2, 16), (1, 32), (2, 48)]
    assert [block.shape for block in head.columns] == [(2, 16), (3, 16)]


def test_a_new_tip_starts_as_a_copy_of_the_last_one_and_is_not_the_same_memory(tiny: Any) -> None:
    method, trainer = learned(tiny, 2, memo())
    last = weights(method.model.others[0])
    assert not torch.equal(last["0.mlp.fc1.weight"], method.model.encoder.blocks[-1].mlp.fc1.weight)
    begin(trainer, 2)
    assert_equal_bits(last, weights(method.model.others[1]))
    pointers = [{p.data_ptr() for p in tip.parameters()} for tip in method.model.tips]
    assert not pointers[0] & pointers[1] | pointers[1] & pointers[2] | pointers[0] & pointers[2]


def test_old_logits_do_not_jump_when_a_tip_is_added(tiny: Any) -> None:
    """The new columns of old rows are zero."""
    method, trainer = learned(tiny, 2, memo())
    stream = method.stream
    stream.begin(stream[2], stream[0].train)
    batch = stream.batch(torch.cat([stream[0].train[:4], stream[2].train[:4]]))
    before = logits_of(method.model.eval(), batch)
    begin(trainer, 2)
    after = logits_of(method.model.eval(), batch)
    np.testing.assert_allclose(after[:, :3], before, rtol=1e-5, atol=1e-6)
    assert after.shape[1] == 5


# -- the loss


@pytest.mark.parametrize("reduction", ["sum", "joint"])
def test_loss_in_numpy_with_one_target_for_all_old_classes(tiny: Any, reduction: str) -> None:
    options = memo(alpha_aux=0.7, reduction=reduction)
    method = at_task(tiny, "image", options, task=2, **{"benchmark.tasks": [2, 1, 2]})
    method.stream.begin(method.stream[2], method.remembered())
    batch = some(method, 20)  # both new classes
    with recorded_passes() as passes:
        terms = method.loss(batch)
    assert len(passes) == 1
    both, n = passes[0].batch, len(batch)
    y = both.targets.numpy()
    assert set(y[:n]) == {3, 4}
    assert set(y[n:]) <= {0, 1, 2}
    head = method.model.head
    h = [features_of(method.model, tip, both) for tip in range(3)]
    z = np.concatenate(h, 1) @ array(head.weight).T + array(head.bias)
    aux = h[2] @ array(head.auxiliary.blocks[0]).T + array(head.auxiliary.biases[0])
    assert aux.shape[1] == 3
    own = np.array([{0: 0, 1: 0, 2: 0, 3: 1, 4: 2}[c] for c in y])
    parts = {"new": slice(n), "replay": slice(n, None)} if reduction == "sum" else {"new": slice(None)}
    assert terms.keys() == set(parts) | {f"auxiliary {name}" for name in parts}
    for name, rows in parts.items():
        assert terms[name].item() == pytest.approx(cross_entropy(z[rows], y[rows]), rel=1e-4)
        expected = 0.7 * cross_entropy(aux[rows], own[rows])
        assert terms[f"auxiliary {name}"].item() == pytest.approx(expected, rel=1e-4)


def test_the_first_task_has_no_auxiliary_classifier_and_a_weight_of_zero_leaves_it_out(tiny: Any) -> None:
    first = at_task(tiny, "image", memo(), task=0)
    assert first.loss(some(first, 3)).keys() == {"new"}
    off = at_task(tiny, "image", memo(alpha_aux=0.0))
    assert off.loss(some(off, 3)).keys() == {"new", "replay"}
    assert off.model.head.auxiliary is None


# -- what is trained


@pytest.mark.parametrize("trunk", [False, True])
def test_old_tips_never_change_and_the_trunk_only_if_asked(tiny: Any, trunk: bool) -> None:
    method, trainer = learned(tiny, 2, memo(train_trunk=trunk))
    model = method.model
    old = [weights(tip) for tip in model.tips]
    shared = weights(torch.nn.ModuleList([model.encoder.embeddings, *model.encoder.blocks[:-1]]))
    rows = [block.detach().clone() for block in model.head.blocks]
    trainer.learn(method.stream[2])
    for before, tip in zip(old, model.tips, strict=False):
        assert_equal_bits(before, weights(tip))
    assert not torch.equal(old[1]["0.mlp.fc1.weight"], weights(model.tips[2])["0.mlp.fc1.weight"])
    now = weights(torch.nn.ModuleList([model.encoder.embeddings, *model.encoder.blocks[:-1]]))
    moved = {name for name, value in shared.items() if not torch.equal(value, now[name])}
    assert bool(moved) == trunk
    assert all(not torch.equal(a, b) for a, b in zip(rows, model.head.blocks, strict=False))  # the head is trained


def test_frozen_parts_drop_nothing_while_the_newest_tip_does(tiny: Any) -> None:
    method = at_task(tiny, "text", memo(), backbone=tiny.bert)
    encoder, (old, new) = method.model.encoder, method.model.tips
    assert method.model.training
    for frozen in (encoder.embeddings, *encoder.blocks[:-1], old):
        assert not any(m.training for m in frozen.modules() if isinstance(m, torch.nn.Dropout))
        assert not any(p.requires_grad for p in frozen.parameters())
    assert all(m.training for m in new.modules())
    assert all(p.requires_grad for p in new.parameters())


@pytest.mark.parametrize("align", [False, True])
def test_alignment_makes_the_mean_norms_of_new_and_old_rows_equal(tiny: Any, align: bool) -> None:
    method, _ = learned(tiny, 2, memo(align=align))
    norms = np.linalg.norm(array(method.model.head.weight), axis=1)
    assert (norms[2:].mean() == pytest.approx(norms[:2].mean(), rel=1e-5)) == align


def test_exemplars_are_herded_by_all_tips(tiny: Any) -> None:
    method, _ = learned(tiny, 2, memo())
    found = method.memory.examples[method.memory.group == 2].tolist()
    members = method.stream.by_group(method.stream[1].train)[2]
    batch = method.stream.batch(members)
    unit = np.concatenate([features_of(method.model, tip, batch) for tip in range(2)], 1)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    first = int(np.linalg.norm(unit - unit.mean(0), axis=1).argmin())
    assert found[0] == members[first]
    assert len(found) == 3  # ten slots for three classes


# -- equalities, memory, bad values


@pytest.mark.parametrize("modality", ["image", "text"])
def test_one_task_is_seq_bit_for_bit(tiny: Any, modality: str) -> None:
    settings = {"benchmark.tasks": [4], "head.kind": "linear"}
    seq, own = (bace.run(tiny.settings(modality, method=m, **settings)) for m in ("seq", "memo"))
    assert seq.matrix == own.matrix
    assert_equal_bits(weights(seq.method.model), weights(own.method.model))


def test_a_task_adds_one_tip_and_trains_it_alone(tiny: Any) -> None:
    method, _, _ = make(tiny, "image", memo())
    encoder, tip = (
        method.model.encoder,
        torch.nn.ModuleList([method.model.encoder.blocks[-1], method.model.encoder.norm]),
    )
    whole, last = (sum(p.numel() for p in part.parameters()) for part in (encoder, tip))
    assert method.needs(0) == (whole, whole)
    assert method.needs(3) == (whole + 3 * last, last)
    assert make(tiny, "image", memo(train_trunk=True))[0].needs(3) == (whole + 3 * last, whole)


def test_wrong_values_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="alpha_aux is -1"):
        MEMO(alpha_aux=-1.0)


def test_tokens_are_refused_with_a_reason(tiny: Any) -> None:
    with pytest.raises(ConfigError, match=r"MEMO is not defined for token data .refused: the auxiliary classifier"):
        bace.run(tiny.settings("token", method="memo"))
