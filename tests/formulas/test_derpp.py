"""DER++'s two losses are compared with numpy on images and sentences. What is stored, and when, is compared with a
separate record of the reservoir. Special cases equal SEQ, ER and BaCE bit for bit over whole runs. The teacher variant
resumes exactly."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checks import check_resume_equals_the_straight_run, counted_run
from steps import (
    Array,
    array,
    assert_equal_bits,
    at_task,
    cross_entropy,
    logits_of,
    make,
    recorded_passes,
    weights,
)
from torch import Tensor

import bace
from bace.core.trainer import Trainer
from bace.data.batch import Batch
from bace.errors import ConfigError


def derpp(**changes: Any) -> dict[str, Any]:
    return {"name": "derpp", "alpha": 0.3, "beta": 0.7, **changes}


def new_batch(method: Any, step: int = 0, count: int = 8) -> Batch:
    method.now.step = step
    examples = method.stream[method.now.task].train[step * count : (step + 1) * count]
    found: Batch = method.stream.batch(examples, view=method.now.view())
    return found


def by_slot(method: Any, slots: Tensor) -> list[Array]:
    """Return the stored logits of each row of these slots without padding: one array per row, as wide as when it was
    stored."""
    found: list[Array] = []
    for slot in slots.tolist():
        _, owner = method.stream.rows_of(method.memory.examples[slot : slot + 1])
        classes = method.stream[int(method.memory.task[slot])].classes.stop
        found += [row[:classes] for row in array(method.memory.logits[slot, : len(owner)])]
        assert method.memory.logits[slot, :, classes:].isnan().all()
        assert method.memory.logits[slot, len(owner) :].isnan().all()
    return found


# -- the original: stored logits


@pytest.mark.parametrize("modality", ["image", "token"])
def test_three_terms_over_two_draws_and_each_row_is_matched_on_the_columns_it_had(tiny: Any, modality: str) -> None:
    """L = CE(z, y) + alpha mean (z(x1) - z1)^2 + beta CE(z(x2), y2). The mean is over all entries that were stored."""
    method = at_task(tiny, modality, derpp(), **{"train.batch_size": 16, "train.replay_o": "label"})
    for step in range(2):  # some slots are now of this task, so wider notes are beside narrower ones
        batch = new_batch(method, step)
        method.loss(batch)
        method.after_step(batch)
    assert set(method.memory.task.tolist()) == {0, 1}
    batch = new_batch(method, count=4)

    def drawn(draw: int) -> Tensor:
        slots: Tensor = method.memory.draw(8, method.now.rng(f"memory {draw}"))
        return slots

    while len(set(method.memory.task[drawn(1)].tolist())) == 1:  # find a step that matches both kinds
        method.now.step += 1
    with recorded_passes() as passes:
        loss = method.loss(batch)
    assert len(passes) == 1
    assert passes[0].training
    both = passes[0].batch
    slots = [drawn(1), drawn(2)]
    first, second = (method.memory.examples[s].tolist() for s in slots)
    assert both.examples.tolist() == [*batch.examples.tolist(), *second, *first]

    logits, targets = logits_of(method.model, both), both.targets.numpy()
    n, end = len(batch), len(batch) + len(method.stream.rows_of(torch.tensor(second))[0])
    assert loss["new"].item() == pytest.approx(cross_entropy(logits[:n], targets[:n]), rel=1e-5)
    assert loss["replay"].item() == pytest.approx(0.7 * cross_entropy(logits[n:end], targets[n:end]), rel=1e-5)
    stored = by_slot(method, slots[0])
    assert len({len(row) for row in stored}) == 2
    squares = [(z[: len(old)] - old) ** 2 for z, old in zip(logits[end:], stored, strict=True)]
    assert loss["match"].item() == pytest.approx(0.3 * np.concatenate(squares).mean(), rel=1e-4)


def test_the_two_draws_are_independent_in_slots_and_in_views(tiny: Any) -> None:
    method = at_task(tiny, "image", derpp(), **{"train.batch_size": 32})
    pairs, views = [], set()
    for step in range(20):
        method.now.step = step
        one, two = method.replay(1), method.replay(2)
        pairs += list(zip(one.examples.tolist(), two.examples.tolist(), strict=True))
        for a, b in zip(*np.where(one.examples.numpy()[:, None] == two.examples.numpy()), strict=True):
            views.add(torch.equal(one.inputs["pixel_values"][a], two.inputs["pixel_values"][b]))
    assert len(pairs) == 320
    same = sum(a == b for a, b in pairs)
    slots = method.memory.examples.numpy()
    chance = (slots[:, None] == slots).mean()  # each draw is a uniform slot; an example may have two slots
    assert abs(same - 320 * chance) < 4.5 * np.sqrt(320 * chance * (1 - chance))
    assert False in views


@pytest.mark.parametrize("modality", ["image", "token"])
def test_nothing_is_left_to_match_right_after_storing(tiny: Any, modality: str) -> None:
    """With the same inputs and weights, the replayed logits equal the stored ones."""
    method, stream, config = make(tiny, modality, derpp(), **{"benchmark.augment": False, "memory.size": 8})
    trainer = Trainer(method, stream, config)
    trainer.enter(stream[0])
    method.grow(stream[0])
    method.model.train()
    batch = new_batch(method)
    assert set(method.loss(batch)) == {"new"}  # nothing to replay yet
    method.after_step(batch)
    assert sorted(method.memory.examples.tolist()) == sorted(batch.examples.tolist())
    assert method.loss(batch)["match"].item() < 1e-10
    with torch.no_grad():
        method.model.head.blocks[0].neg_()
    assert method.loss(batch)["match"].item() > 1e-3


def test_what_is_stored_is_the_augmented_pass_before_the_update_and_never_changes(tiny: Any) -> None:
    method, stream, config = make(tiny, "image", derpp(), **{"memory.size": 12})
    offered: dict[int, list[Tensor]] = {}  # by example, the logits from every time it was shown
    kept: dict[int, Tensor] = {}
    before_update = method.before_step

    def before_step(batch: Batch) -> None:
        with torch.no_grad():  # the weights are still those of the loss
            for example, row in zip(batch.examples.tolist(), method.model(batch).logits, strict=True):
                offered.setdefault(example, []).append(row.clone())
        before_update(batch)
        nonlocal kept
        kept = dict(enumerate(method.memory.logits.clone()))

    def after_step(batch: Batch) -> None:
        type(method).after_step(method, batch)
        assert not method.memory.logits.requires_grad
        for slot, (example, note) in enumerate(zip(method.memory.examples.tolist(), method.memory.logits, strict=True)):
            own = note[0][~note[0].isnan()]
            assert any(len(own) == len(z) and torch.allclose(own, z, rtol=0, atol=1e-5) for z in offered[example])
            fresh = example in batch.examples.tolist()
            if slot in kept and not fresh:
                old = kept[slot][0]
                assert torch.equal(old[~old.isnan()], own)

    method.before_step, method.after_step = before_step, after_step  # type: ignore[method-assign]
    Trainer(method, stream, config).run()
    assert set(method.memory.task.tolist()) == {0, 1}
    # all examples that were offered: 20 examples, 2 epochs, 2 tasks
    assert int(method.memory.seen) == 80


def test_columns_newer_than_what_was_stored_get_no_gradient_from_the_matching(tiny: Any) -> None:
    method = at_task(tiny, "image", derpp())
    assert method.memory.task.tolist() == [0] * 10
    method.model.zero_grad()
    method.loss(new_batch(method))["match"].backward()
    old, new = (block.grad for block in method.model.head.blocks)
    assert (old.abs().sum(1) > 0).all()
    assert new is None or (new == 0).all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in method.model.parameters())


def test_replay_starts_in_the_first_task_beside_a_whole_batch_and_takes_its_share_later(tiny: Any) -> None:
    method, stream, config = make(tiny, "image", derpp())
    sizes: list[tuple[int, int, int]] = []  # task, new, replayed
    loss = method.loss

    def noted(batch: Batch) -> Any:
        with recorded_passes() as passes:
            value = loss(batch)
        sizes.append((method.now.task, len(batch), len(passes[0].batch) - len(batch)))
        return value

    method.loss = noted  # type: ignore[method-assign]
    Trainer(method, stream, config).run()
    first = [(0, 8, 0), (0, 8, 8), (0, 4, 8), (0, 8, 8), (0, 8, 8), (0, 4, 8)]
    assert sizes == first + [(1, 4, 8)] * 10


# -- the variant of BaCE's authors: a teacher


@pytest.mark.parametrize("modality", ["image", "token"])
def test_with_a_teacher_both_terms_share_one_draw_and_the_old_columns_are_matched(tiny: Any, modality: str) -> None:
    method = at_task(tiny, modality, derpp(logits="teacher"), **{"train.replay_o": "label"})
    teacher, old = method.teacher, method.now.known
    for p in method.model.parameters():  # away from the teacher
        p.data += 0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(p.shape)))
    batch = new_batch(method, count=4)
    with recorded_passes() as passes:
        loss = method.loss(batch)
    (student, target) = passes
    assert (student.model, target.model) == (method.model, teacher)
    assert not target.training
    assert all(not p.requires_grad for p in teacher.parameters())
    n = len(batch)
    assert student.batch.examples.tolist() == [*batch.examples.tolist(), *target.batch.examples.tolist()]
    logits, targets = logits_of(method.model, student.batch), student.batch.targets.numpy()
    expected = {
        "new": cross_entropy(logits[:n], targets[:n]),
        "replay": 0.7 * cross_entropy(logits[n:], targets[n:]),
        "match": 0.3 * float(((logits[n:, :old] - logits_of(teacher, target.batch)) ** 2).mean()),
    }
    assert {name: term.item() for name, term in loss.items()} == pytest.approx(expected, rel=1e-4)
    assert expected["match"] > 1e-3


def test_with_a_teacher_the_memory_is_herded_as_in_er(tiny: Any) -> None:
    er, teacher = (at_task(tiny, "image", {"name": "er"}), at_task(tiny, "image", derpp(logits="teacher")))
    assert teacher.memory.examples.tolist() == er.memory.examples.tolist()
    assert "logits" not in teacher.memory.notes


@pytest.mark.parametrize("modality", ["image", "text"])
def test_with_a_teacher_and_unit_weights_it_is_bace_without_its_new_effects(tiny: Any, modality: str) -> None:
    """Texts are equal up to rounding, because BaCE's teacher passes the memory once per epoch, in other batches."""
    reduced = {"name": "bace", "W0": 1.0, "alpha": 0.0, "beta": 1.0}
    one, other = (
        bace.run(tiny.settings(modality, method=m)) for m in (derpp(logits="teacher", alpha=1.0, beta=1.0), reduced)
    )
    assert one.matrix == other.matrix
    found, expected = weights(one.method.model), weights(other.method.model)
    if modality == "image":
        assert_equal_bits(found, expected)
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-11, msg=name)


def test_with_a_teacher_and_no_matching_it_is_er_bit_for_bit(tiny: Any) -> None:
    method = derpp(logits="teacher", alpha=0.0, beta=1.0)
    one, other = (bace.run(tiny.settings("token", method=m)) for m in (method, "er"))
    assert one.method.teacher is None
    assert one.matrix == other.matrix
    assert_equal_bits(weights(one.method.model), weights(other.method.model))


def test_with_a_teacher_resume_is_exact(tiny: Any, tmp_path: Path) -> None:
    method: Any = {"name": "derpp", "logits": "teacher"}
    counted_run(tiny, method, "image", tmp_path)
    check_resume_equals_the_straight_run(tiny, method, "image", tmp_path)


# -- special cases


@pytest.mark.parametrize("modality", ["image", "text", "token"])
def test_without_both_terms_it_is_seq_bit_for_bit(tiny: Any, modality: str) -> None:
    seq = bace.run(tiny.settings(modality, method="seq"))
    for logits in ("stored", "teacher"):
        off = bace.run(tiny.settings(modality, method=derpp(alpha=0.0, beta=0.0, logits=logits)))
        assert off.matrix == seq.matrix
        assert_equal_bits(weights(off.method.model), weights(seq.method.model))


@pytest.mark.parametrize(("off", "left"), [("alpha", "memory 2"), ("beta", "memory 1")])
def test_a_term_of_weight_0_is_not_passed_and_does_not_change_the_others_draw(tiny: Any, off: str, left: str) -> None:
    method = at_task(tiny, "image", derpp(**{off: 0.0}))
    batch = new_batch(method)
    with recorded_passes() as passes:
        loss = method.loss(batch)
    drawn = method.memory.examples[method.memory.draw(4, method.now.rng(left))]
    assert passes[0].batch.examples.tolist() == [*batch.examples.tolist(), *drawn.tolist()]
    assert set(loss) == {"new", "replay" if off == "alpha" else "match"}


@pytest.mark.parametrize(("logits", "alpha"), [("stored", 0.2), ("teacher", 0.5)])
def test_the_matching_has_the_published_weight_of_its_variant_unless_one_is_given(
    tiny: Any, logits: str, alpha: float
) -> None:
    """The weights are 0.2 and 0.5 in the original (CIFAR-10, 500 slots), and 0.5 and 0.5 in the code of BaCE's
    authors."""
    method = at_task(tiny, "image", {"name": "derpp", "logits": logits})
    for p in method.model.parameters():  # away from the targets of the matching
        p.data += 0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(p.shape)))
    batch = new_batch(method, count=4)
    by_default = method.loss(batch)
    method.alpha = method.beta = 1.0
    plain = method.loss(batch)
    assert plain["match"].item() > 1e-3
    assert by_default["match"].item() == pytest.approx(alpha * plain["match"].item(), rel=1e-5)
    assert by_default["replay"].item() == pytest.approx(0.5 * plain["replay"].item(), rel=1e-5)
    assert make(tiny, "image", derpp(alpha=0.7, logits=logits))[0].alpha == 0.7


def test_what_cannot_work_is_refused(tiny: Any) -> None:
    with pytest.raises(ConfigError, match=r"alpha \(-1.0\).*at least 0"):
        make(tiny, "image", derpp(alpha=-1.0))
    budget = {"memory.size": 0, "memory.per_class": 3}
    with pytest.raises(ConfigError, match=r"memory.per_class is 3.*memory.size.*logits=teacher"):
        make(tiny, "image", derpp(), **budget)
    assert make(tiny, "image", derpp(logits="teacher"), **budget)
