"""CFNER's joint predictions of entities, and of O words taken for old entities, are compared with brute force in numpy
(neighbours, groups, curriculum, weight). Tests check the head that it freezes and imprints. Without its terms it equals
ExtendNER bit for bit."""

import dataclasses
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
    kl_slice,
    logits_of,
    make,
    recorded_passes,
    softmax,
    some,
    take_step,
    weights,
)

from bace.core.trainer import Trainer
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.cfner import CFNER

OFF = {"dce": False, "odce": False, "adaptive": False, "head": "trained"}


def wavering(tiny: Any, task: int = 1, **changes: Any) -> Any:
    """Return a method whose teacher takes some O words for old entities and others not, with neighbours found by that
    teacher."""
    settings = {key: changes.pop(key) for key in list(changes) if "." in key}
    method = at_task(tiny, "token", {"name": "cfner", **changes}, task=task, **settings)
    batch = some(method, 6)
    with torch.no_grad():
        features = method.teacher(batch).features[batch.targets == 0]
        own, row = method.teacher.head.blocks[0][0].clone(), method.teacher.head.blocks[0][0]
        mean = torch.nn.functional.normalize(features.mean(0), dim=0)
        for share in np.linspace(1, -1, 400):  # turn O's row away from the O words until some are misclassified
            row.copy_((1 - abs(share)) * own / own.norm() + share * mean)
            if 0.3 < (method.teacher.head(features).argmax(1) != 0).float().mean() < 0.7:
                break
    method.table = None
    method.before_epoch(method.stages(method.stream[task])[0])
    take_step(method, batch)  # away from the teacher
    return method


class ByHand:
    """Groups and neighbours of the task's words, found by brute force in the teacher's features."""

    def __init__(self, method: Any, k: int = 3) -> None:
        self.method, stream = method, method.stream
        self.batch = stream.batch(stream[method.now.task].train.sort().values)
        with torch.no_grad():
            out = method.teacher(self.batch)
        features = array(out.features)
        features /= np.linalg.norm(features, axis=1, keepdims=True)
        targets = self.batch.targets.numpy()
        self.defined = (targets == 0) & (array(out.logits).argmax(1) != 0)
        self.entity = targets != 0
        self.rows = self.batch.rows.tolist()
        self.near: dict[int, list[int]] = {}
        for group in (self.entity, self.defined):
            members = np.flatnonzero(group)
            for i in members:
                away = {j: np.linalg.norm(features[i] - features[j]) for j in members if j != i}
                self.near[self.rows[i]] = [self.rows[j] for j in sorted(away, key=lambda j: (away[j], j))[:k]]

    def scores(self, old: int | None = None) -> dict[int, Array]:
        """Return the student's soft-max of each word of the task, over all labels or over the old labels alone."""
        self.method.model.eval()
        found = dict(zip(self.rows, softmax(logits_of(self.method.model, self.batch)[:, :old]), strict=True))
        self.method.model.train()
        return found

    def is_defined(self, row: int) -> bool:
        return bool(self.defined[self.rows.index(row)])


def expected(method: Any, both: Batch, new: int, threshold: float = 0.0) -> dict[str, float]:
    """Compute the three terms word by word."""
    hand, known = ByHand(method), method.now.known
    everything, old = hand.scores(), hand.scores(known)
    student, teacher = softmax(logits_of(method.model, both)), softmax(logits_of(method.teacher, both))
    kls = kl_slice(logits_of(method.model, both), logits_of(method.teacher, both))
    entities: dict[str, list[float]] = {"new": [], "replay": []}
    outside: dict[str, list[float]] = {"new": [], "replay": []}
    for i, (row, y) in enumerate(zip(both.rows.tolist(), both.targets.tolist(), strict=True)):
        part = "new" if i < new else "replay"
        if y:
            joint = student[i]
            if part == "new":
                joint = (student[i] + np.mean([everything[j] for j in hand.near[row]], axis=0)) / 2
            entities[part].append(-np.log(joint[y]))
        elif part == "new" and hand.is_defined(row) and student[i, :known].max() >= threshold:
            joint = (student[i, :known] + np.mean([old[j] for j in hand.near[row]], axis=0)) / 2
            outside[part].append(-np.log(joint[teacher[i].argmax()]))
        else:
            outside[part].append(kls[i])
    return {
        "new": float(np.mean(entities["new"])),
        "replay": float(np.mean(entities["replay"])),
        "distil": float(method.weight * (np.mean(outside["new"]) + np.mean(outside["replay"]))),
    }


# -- the loss


@pytest.mark.parametrize("task", [1, 2])
def test_words_and_their_neighbours_predict_jointly_and_defined_o_words_take_the_teachers_guess(
    tiny: Any, task: int
) -> None:
    """L = mean_E -log((p + q)/2)[y] + w mean_Q KL. For a defined O word, p is cut to the old labels, q is renormalised
    over them, and the teacher is sharpened to its best guess. Replayed words have no neighbours."""
    method = wavering(tiny, task, **{"benchmark.tasks": [2, 1, 2], "train.lr": 0.002})
    batch = some(method, 6)
    with recorded_passes() as passes:
        terms = method.loss(batch)
    student, teacher, *neighbours = passes
    assert student.training
    assert teacher.model is method.teacher
    assert neighbours
    assert all(p.model is method.model and not p.training for p in neighbours)
    assert method.model.training
    hand = ByHand(method)
    kinds = {hand.is_defined(row) for row, y in zip(batch.rows.tolist(), batch.targets.tolist(), strict=True) if not y}
    assert kinds == {True, False}
    wanted = expected(method, student.batch, len(batch))
    assert {name: term.item() for name, term in terms.items()} == pytest.approx(wanted, rel=1e-4)


def test_neighbours_carry_no_gradient(tiny: Any) -> None:
    """Half of the weight is on constant neighbours, so the gradient for z_y comes only from the word's own half: d/dz
    -log((p_y + q_y)/2) = -p_y (1 - p_y) / (p_y + q_y)."""
    method = wavering(tiny, **{"memory.size": 0, "odce": False})
    batch, kept = some(method, 1), []
    forward = method.model.head.forward

    def remembering(features: torch.Tensor) -> torch.Tensor:
        kept.append(forward(features))
        if kept[-1].requires_grad:
            kept[-1].retain_grad()
        return kept[-1]

    everything, near = ByHand(method).scores(), ByHand(method).near
    method.model.head.forward = remembering
    method.loss(batch)["new"].backward()
    entity = np.flatnonzero(batch.targets.numpy())
    p, y = softmax(array(kept[0])), batch.targets.numpy()
    for i in entity:
        q = np.mean([everything[j][y[i]] for j in near[int(batch.rows[i])]])
        own = p[i, y[i]]
        assert kept[0].grad[i, y[i]].item() == pytest.approx(-own * (1 - own) / (own + q) / len(entity), rel=1e-4)
    assert all(not z.requires_grad for z in kept[1:])


def test_a_word_whose_neighbours_are_its_own_likeness_is_learned_by_plain_cross_entropy(tiny: Any) -> None:
    method = wavering(tiny, **{"memory.size": 0, "odce": False})
    anchors = method.table.anchors
    itself = anchors[:, None].repeat(1, 3)
    method.table = dataclasses.replace(method.table, neighbours=itself)
    batch = some(method, 6)
    entity = batch.targets.numpy() != 0
    plain = cross_entropy(logits_of(method.model, batch)[entity], batch.targets.numpy()[entity])
    assert method.loss(batch)["new"].item() == pytest.approx(plain, rel=1e-5)


def test_neighbours_are_the_nearest_others_of_the_same_group(tiny: Any) -> None:
    method = wavering(tiny)
    hand = ByHand(method)
    found = dict(zip(method.table.anchors.tolist(), method.table.neighbours.tolist(), strict=True))
    assert found == hand.near
    assert all(row not in near for row, near in found.items())
    groups = {row: hand.is_defined(row) for row in found}
    assert set(groups.values()) == {True, False}
    assert all(groups[row] == groups[other] for row, near in found.items() for other in near)
    assert torch.allclose(method.table.log_weight_anchor.exp(), torch.tensor(0.5))
    assert torch.allclose(method.table.log_weights.exp(), torch.tensor(1 / 6))


@pytest.mark.parametrize("count", [1, 2])
def test_where_there_are_too_few_neighbours_those_there_share_their_half_or_the_word_stands_alone(
    tiny: Any, count: int
) -> None:
    method = wavering(tiny, **{"memory.size": 0, "odce": False})
    task = method.stream[1]
    method.stream.tasks[1] = type(task)(1, task.name, task.classes, task.train[:count], task.valid, task.test)
    method.table = None
    method.before_epoch(None)
    batch = some(method, 6)
    assert len(method.table.anchors) == int((batch.targets != 0).sum())
    hand = ByHand(method)
    everything = hand.scores()
    student, losses = softmax(logits_of(method.model, batch)), []
    for i, (row, y) in enumerate(zip(batch.rows.tolist(), batch.targets.tolist(), strict=True)):
        if y:
            q = np.mean([everything[j][y] for j in hand.near[row]]) if hand.near[row] else student[i, y]
            losses.append(-np.log((student[i, y] + q) / 2))
    assert method.loss(batch)["new"].item() == pytest.approx(np.mean(losses), rel=1e-4)


def test_the_loss_of_a_sentence_does_not_depend_on_the_order_of_the_task(tiny: Any) -> None:
    method = wavering(tiny)
    batch = some(method, 6)
    before = {name: term.item() for name, term in method.loss(batch).items()}
    task = method.stream[1]
    shuffled = task.train[torch.randperm(len(task.train), generator=torch.Generator().manual_seed(1))]
    method.stream.tasks[1] = type(task)(1, task.name, task.classes, shuffled, task.valid, task.test)
    method.table = None
    method.before_epoch(None)
    assert {name: term.item() for name, term in method.loss(batch).items()} == before


def test_the_weight_grows_with_the_root_of_old_labels_without_o_over_new_ones(tiny: Any) -> None:
    """Tasks of two types, one type and two types give 5, 7 and 11 labels."""
    for task, wanted in ((1, 2 * np.sqrt(4 / 2)), (2, 2 * np.sqrt(6 / 4))):
        method = at_task(tiny, "token", {"name": "cfner"}, task=task, **{"benchmark.tasks": [2, 1, 2]})
        assert method.weight == pytest.approx(wanted)
        method.adaptive = False
        assert method.weight == 2.0


# -- the curriculum


def test_the_threshold_falls_evenly_to_nothing(tiny: Any) -> None:
    method = make(tiny, "token", {"name": "cfner", "curriculum": 10})[0]
    found = []
    for epoch in range(12):
        method.now.epoch = epoch
        found.append(method.threshold)
    assert found == pytest.approx([*np.linspace(0.9, 0, 10), 0, 0])
    for curriculum in (0, 1):
        method.curriculum, method.now.epoch = curriculum, 0
        assert method.threshold == 0


def test_only_defined_o_words_above_the_threshold_are_predicted_jointly_the_others_distilled(tiny: Any) -> None:
    method = wavering(tiny, curriculum=5)
    batch, hand = some(method, 6), ByHand(method)
    sure = softmax(logits_of(method.model, batch))[:, :5].max(1)
    defined = [s for s, row in zip(sure, batch.rows.tolist(), strict=True) if row in hand.near and hand.is_defined(row)]
    found = []
    for epoch in range(5):
        method.now.epoch = epoch
        with recorded_passes() as passes:
            terms = method.loss(batch)
        wanted = expected(method, passes[0].batch, len(batch), threshold=0.9 * (1 - epoch / 4))
        assert {name: term.item() for name, term in terms.items()} == pytest.approx(wanted, rel=1e-4)
        found.append(sum(s >= 0.9 * (1 - epoch / 4) for s in defined))
    assert 0 <= found[0] < found[-1] == len(defined)


# -- the head


def test_old_rows_and_os_stay_while_new_ones_start_from_data(tiny: Any) -> None:
    method, stream, config = make(tiny, "token", {"name": "cfner"})
    trainer = Trainer(method, stream, config)
    trainer.learn(stream[0])
    old = method.model.head.blocks[0].detach().clone()
    encoder = method.model.encoder.blocks[0].attention.output.dense.weight.detach().clone()
    sigma = method.model.head.sigma.item()
    starts: list[torch.Tensor] = []
    features: list[torch.Tensor] = []

    def before_epoch(stage: Any) -> None:
        starts.append(method.model.head.blocks[1].detach().clone())
        features.append(method.outputs(stream[1].train).features)
        type(method).before_epoch(method, stage)

    method.before_epoch = before_epoch  # type: ignore[method-assign]
    trainer.learn(stream[1])
    assert torch.equal(method.model.head.blocks[0], old)
    assert not torch.equal(method.model.head.blocks[1], starts[0])
    assert not torch.equal(method.model.encoder.blocks[0].attention.output.dense.weight, encoder)
    assert method.model.head.sigma.item() != sigma
    unit = torch.nn.functional.normalize(features[0], dim=1)
    targets = stream.targets[stream.rows_of(stream[1].train)[0]]
    for row, c in enumerate(stream[1].classes):
        mean = unit[targets == c].mean(0)
        wanted = mean / mean.norm() * old.norm(dim=1).mean()
        assert torch.allclose(starts[0][row], wanted, atol=1e-5)


def test_an_inner_tag_that_is_never_shown_starts_like_its_first_tag(tiny: Any) -> None:
    method = at_task(tiny, "token", {"name": "cfner"})
    stream = method.stream
    c = stream.names.index("I-thing")
    stream.targets[stream.targets == c] = 0
    method.imprint(stream[1])
    rows = method.model.head.blocks[1]
    first = stream[1].classes.start
    assert torch.equal(rows[c - first], rows[c - first - 1])
    other = stream.names.index("I-place") - first
    assert not torch.equal(rows[other], rows[other - 1])


def test_a_trained_head_is_the_runs(tiny: Any) -> None:
    for head, kind in (("frozen", "CosineHead"), ("trained", "LinearHead")):
        method = at_task(tiny, "token", {"name": "cfner", "head": head}, **{"head.kind": "linear"})
        assert type(method.model.head).__name__ == kind
        assert [block.requires_grad for block in method.model.head.blocks] == [head == "trained", True]


# -- without its terms


@pytest.mark.parametrize("reduction", ["sum", "joint"])
def test_without_its_terms_it_is_extendner_bit_for_bit(tiny: Any, reduction: str) -> None:
    ends = []
    for options in ({"name": "extendner"}, {"name": "cfner", **OFF}):
        settings = {"benchmark.tasks": [2, 1, 2]}
        method, stream, config = make(tiny, "token", {**options, "reduction": reduction}, **settings)
        results = Trainer(method, stream, config).run()
        ends.append((results.matrix, weights(method.model)))
    assert ends[0][0] == ends[1][0]
    assert_equal_bits(ends[0][1], ends[1][1])


def test_without_neighbours_none_are_looked_for_or_passed(tiny: Any) -> None:
    method = at_task(tiny, "token", {"name": "cfner", **OFF})
    assert method.table is None
    with recorded_passes() as passes:
        method.loss(some(method, 6))
    assert [p.model is method.model for p in passes] == [True, False]


@pytest.mark.parametrize(("on", "group"), [("dce", "entity"), ("odce", "defined")])
def test_one_term_alone_has_only_its_own_neighbours(tiny: Any, on: str, group: str) -> None:
    method = wavering(tiny, **{**OFF, on: True})
    hand = ByHand(method)
    assert method.table.anchors.tolist() == [
        row for row, own in zip(hand.rows, getattr(hand, group), strict=True) if own
    ]


def test_without_distillation_entities_keep_their_neighbours_and_o_words_have_none(tiny: Any) -> None:
    method = at_task(tiny, "token", {"name": "cfner", "lambda_kd": 0.0})
    assert (method.stream.targets[method.table.anchors] != 0).all()
    with recorded_passes() as passes:
        assert set(method.loss(some(method, 6))) == {"new", "replay"}
    assert all(p.model is method.model for p in passes)  # no teacher


def test_with_a_curriculum_resume_is_exact(tiny: Any, tmp_path: Path) -> None:
    method: Any = {"name": "cfner", "curriculum": 2}
    counted_run(tiny, method, "token", tmp_path)
    check_resume_equals_the_straight_run(tiny, method, "token", tmp_path)


@pytest.mark.parametrize("wrong", [{"top_k": 0}, {"curriculum": -1}, {"lambda_kd": -0.5}])
def test_values_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}.*{next(iter(wrong.values()))}"):
        CFNER(**wrong)
