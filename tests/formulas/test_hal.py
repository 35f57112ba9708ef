"""HAL's look-ahead step is compared with a network that is moved by hand and with finite differences, its anchors with
a loop over single inputs, and its ring and means with plain lists. With a weight of 0 it equals ER with a ring buffer
bit for bit."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from steps import (
    array,
    assert_equal_bits,
    at_task,
    begin,
    cross_entropy,
    logits_of,
    make,
    recorded_passes,
    some_of_all,
    weights,
)
from torch import Tensor

import bace
from bace.core.stream import Stream
from bace.core.trainer import Trainer
from bace.data.batch import NO_IDS, Batch
from bace.errors import ConfigError
from bace.methods import ER, HAL


def hal(**changes: Any) -> dict[str, Any]:
    """Return settings with few steps, for speed, and a large weight of the anchors."""
    return {"name": "hal", "lambda_anchor": 2.0, "anchor_steps": 3, "memory_steps": 3, **changes}


def anchors_of(method: Any) -> Batch:
    inputs = {"pixel_values": method.anchors}
    if method.stream.modality.name == "text":
        inputs = {"inputs_embeds": method.anchors, "attention_mask": method.anchor_masks}
    return Batch(inputs, method.anchor_targets, NO_IDS, NO_IDS)


def ahead_of(method: Any, batch: Batch, lr: float) -> Any:
    """Return a copy of the network after one plain gradient step on CE(new) + CE(replayed)."""
    other = copy.deepcopy(method.model).train()
    other.zero_grad()
    logits, n = other(batch).logits, len(batch) - method.replay_size
    (F.cross_entropy(logits[:n], batch.targets[:n]) + F.cross_entropy(logits[n:], batch.targets[n:])).backward()
    with torch.no_grad():
        for p in other.parameters():
            p -= lr * p.grad
    return other


# -- the look-ahead


@pytest.mark.parametrize("modality", ["image", "text"])
def test_the_anchor_loss_is_the_squared_change_of_the_anchors_logits_over_one_step(tiny: Any, modality: str) -> None:
    method = at_task(tiny, modality, hal(), task=2, **{"benchmark.tasks": [2, 1, 1]})
    method.now.lr = 0.3
    with recorded_passes() as passes:
        loss = method.loss(some_of_all(method))
    both = passes[0].batch
    anchors = anchors_of(method)
    z, z_ahead = logits_of(method.model, anchors), logits_of(ahead_of(method, both, 0.3), anchors)
    assert z.shape == (3, 4)  # anchors of old classes, scores of all classes
    assert len(passes) == 3
    expected = ((z - z_ahead) ** 2).sum(1).mean()
    assert expected > 1e-3
    assert loss["anchor"].item() == pytest.approx(2 * 2 * expected, rel=1e-8)  # the cross-entropy is two means
    logits, targets = logits_of(method.model, both), both.targets.numpy()
    assert loss["new"].item() == pytest.approx(cross_entropy(logits[:4], targets[:4]), rel=1e-8)
    assert loss["replay"].item() == pytest.approx(cross_entropy(logits[4:], targets[4:]), rel=1e-8)


def test_its_gradient_moves_both_sides_and_holds_the_look_aheads_gradient_constant(tiny: Any) -> None:
    """The oracle is finite differences of |z(theta + s d) - z(theta + s d - lr g)|^2 in s, with g fixed at theta."""
    method = at_task(tiny, "image", hal())
    method.now.lr = 0.3
    with recorded_passes() as passes:
        method.loss(some_of_all(method))
    moved, anchors = ahead_of(method, passes[0].batch, 0.3), anchors_of(method)
    theta = list(method.model.parameters())
    source = torch.Generator().manual_seed(1)
    direction = [torch.randn(p.shape, generator=source) for p in theta]
    step = [q.detach() - p.detach() for p, q in zip(theta, moved.parameters(), strict=True)]  # -lr g

    def value(s: float) -> float:
        here, there = copy.deepcopy(method.model), copy.deepcopy(method.model)
        with torch.no_grad():
            for p, q, d, g in zip(here.parameters(), there.parameters(), direction, step, strict=True):
                p += s * d
                q += s * d + g
        return float(2 * 2 * ((logits_of(here, anchors) - logits_of(there, anchors)) ** 2).sum(1).mean())

    expected = (value(1e-5) - value(-1e-5)) / 2e-5
    gradient = torch.autograd.grad(method.loss(some_of_all(method))["anchor"], theta, materialize_grads=True)
    found = sum(float((g * d).sum()) for g, d in zip(gradient, direction, strict=True))
    assert abs(expected) > 1e-3
    assert found == pytest.approx(expected, rel=1e-5)


def test_the_loss_leaves_parameters_gradients_and_the_optimiser_as_they_were(tiny: Any) -> None:
    method = at_task(tiny, "image", hal())
    for p in method.model.parameters():
        p.grad = torch.ones_like(p)
    before = weights(method.model)
    method.loss(some_of_all(method))
    assert_equal_bits(weights(method.model), before)
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in method.model.parameters())


@pytest.mark.parametrize("modality", ["image", "text"])
def test_without_a_learning_rate_nothing_changes_on_anchors_even_with_dropout(tiny: Any, modality: str) -> None:
    backbone = {"backbone": tiny.bert} if modality == "text" else {}
    method = at_task(tiny, modality, hal(), **backbone)
    assert method.model.has_dropout == (modality == "text")
    method.now.lr = 0.0
    assert method.loss(some_of_all(method))["anchor"].item() == 0
    method.now.lr = 0.1
    assert method.loss(some_of_all(method))["anchor"].item() > 0


def test_frozen_parameters_take_no_part_in_the_look_ahead(tiny: Any) -> None:
    method = at_task(tiny, "image", hal(), **{"backbone.freeze": 1})
    loss = method.loss(some_of_all(method))
    loss["anchor"].backward()
    assert all(p.grad is None or not p.grad.any() for p in method.model.encoder.blocks[0].parameters())
    assert loss["anchor"].item() > 0


# -- anchors


def at_end(tiny: Any, modality: str = "image", task: int = 1, **options: Any) -> Any:
    """Return a method after the last step of a task, before its anchors are made."""
    method, stream, config = make(tiny, modality, hal(**options), **{"benchmark.tasks": [2, 2, 1]})
    trainer = Trainer(method, stream, config)
    for index in range(task + 1):
        if index == task:
            method.after_task = lambda task: None  # type: ignore[method-assign]
        trainer.learn(stream[index])
    del method.after_task
    trainer.now.begin_stage("after task")
    return method


def class_mean(stream: Stream, task: int, c: int) -> Tensor:
    ids = stream[task].train
    return stream.batch(ids[stream.targets[ids] == c]).inputs["pixel_values"].mean(0, keepdim=True)


def objective(method: Any, later: Any, e: Tensor, y: int) -> Tensor:
    """Return CE(theta_t; e, y) - CE(theta_M; e, y) + gamma (1 - cos(h(e), phi_y)) of one image."""
    batch = Batch({"pixel_values": e}, torch.tensor([y]), NO_IDS, NO_IDS)
    out, then = method.model(batch), later(batch).logits[0]
    now, phi = out.logits[0], method.phi[y - method.now.known]
    cosine = (out.features[0] * phi).sum() / (out.features[0].norm() * phi.norm())
    forgetting = (then.logsumexp(0) - then[y]) - (now.logsumexp(0) - now[y])
    return -forgetting + method.gamma * (1 - cosine)


def test_each_anchor_descends_its_own_objective_from_the_mean_picture_by_adam(tiny: Any) -> None:
    method = at_end(tiny, anchor_steps=5, anchor_lr=0.01, gamma=0.5, memory_steps=20)
    later = method.hindsight(method.stream[1])
    method.after_task(method.stream[1])
    for c in (2, 3):
        e = class_mean(method.stream, 1, c)
        assert len(method.anchors) == 4
        m = v = torch.zeros_like(e)
        before = objective(method, later, e, c).item()
        for k in range(1, 6):
            e.requires_grad_()
            (g,) = torch.autograd.grad(objective(method, later, e, c), e)
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
            e = e.detach() - 0.01 * (m / (1 - 0.9**k)) / ((v / (1 - 0.999**k)).sqrt() + 1e-8)
            e = e.clamp(-1, 1)  # (0 - 0.5) / 0.5 to (1 - 0.5) / 0.5
        torch.testing.assert_close(method.anchors[c], e[0], rtol=0, atol=1e-9)
        assert objective(method, later, method.anchors[c : c + 1], c).item() < before


def test_every_small_step_lowers_the_objective_of_every_anchor(tiny: Any) -> None:
    method = at_end(tiny, anchor_steps=0, memory_steps=20)
    later = method.hindsight(method.stream[1])
    method.hindsight = lambda task: later
    paths = []
    for steps in range(5):
        again = copy.copy(method)
        again._buffers = dict(method._buffers)
        again.anchor_steps, again.anchor_lr = steps, 1e-4
        again.after_task(method.stream[1])
        paths.append([objective(method, later, again.anchors[c : c + 1], c).item() for c in (2, 3)])
    assert (np.diff(np.array(paths), axis=0) < 0).all()


def test_an_anchor_is_what_the_network_would_forget(tiny: Any) -> None:
    """Without phi, the loss of theta_M on the anchor rises above that of theta_t."""
    method = at_end(tiny, anchor_steps=30, anchor_lr=0.02, gamma=0.0, memory_steps=20)
    later = method.hindsight(method.stream[1])
    method.after_task(method.stream[1])

    def forgotten(e: Tensor, y: int) -> float:
        batch = Batch({"pixel_values": e}, torch.tensor([y]), NO_IDS, NO_IDS)
        then, now = (cross_entropy(logits_of(m, batch), np.array([y])) for m in (later, method.model))
        return then - now

    for c in (2, 3):
        assert forgotten(method.anchors[c : c + 1], c) > forgotten(class_mean(method.stream, 1, c), c) + 0.01


def test_hindsight_learns_the_memory_of_older_tasks_by_plain_steps_and_leaves_the_network(tiny: Any) -> None:
    method = at_end(tiny, memory_steps=4)
    before = weights(method.model)
    with recorded_passes() as passes:
        later = method.hindsight(method.stream[1])
    assert_equal_bits(weights(method.model), before)
    assert len(passes) == 4
    old = set(method.memory.examples[method.memory.task == 0].tolist())
    drawn = {e for p in passes for e in p.batch.examples.tolist()}
    assert drawn <= old
    assert [len(p.batch) for p in passes] == [10] * 4
    assert len({tuple(p.batch.examples.tolist()) for p in passes}) == 4
    by_hand = copy.deepcopy(method.model)
    for p in passes:
        by_hand.zero_grad()
        F.cross_entropy(by_hand(p.batch).logits, p.batch.targets).backward()
        with torch.no_grad():
            for q in by_hand.parameters():
                q -= 0.05 * q.grad
    for q, r in zip(by_hand.parameters(), later.parameters(), strict=True):
        torch.testing.assert_close(q, r, rtol=0, atol=1e-12)


def test_in_the_first_task_only_phi_moves_anchors(tiny: Any) -> None:
    method = at_end(tiny, task=0, gamma=0.0, anchor_steps=5)
    assert_equal_bits(weights(method.hindsight(method.stream[0])), weights(method.model))
    method.after_task(method.stream[0])
    for c in (0, 1):
        torch.testing.assert_close(method.anchors[c : c + 1], class_mean(method.stream, 0, c), rtol=0, atol=1e-12)
    method = at_end(tiny, task=0, gamma=1.0, anchor_steps=20, anchor_lr=0.01)
    method.after_task(method.stream[0])
    with torch.no_grad():
        h = method.model(anchors_of(method)).features
        start = torch.cat([class_mean(method.stream, 0, c) for c in (0, 1)])
        h0 = method.model(Batch({"pixel_values": start}, method.anchor_targets, NO_IDS, NO_IDS)).features
    assert (F.cosine_similarity(h, method.phi) > F.cosine_similarity(h0, method.phi) + 1e-3).all()


@pytest.mark.parametrize("modality", ["image", "text"])
def test_there_is_one_anchor_for_each_class_seen(tiny: Any, modality: str) -> None:
    method, stream, config = make(tiny, modality, hal(), **{"benchmark.tasks": [2, 1, 2]})
    trainer = Trainer(method, stream, config)
    made: list[Tensor] = []
    for task in stream:
        trainer.learn(task)
        found: Any = method
        assert len(found.anchors) == task.classes.stop
        assert found.anchor_targets.tolist() == list(range(task.classes.stop))
        length = made[-1].shape[1] if made else 0
        assert not made or torch.equal(found.anchors[: len(made[-1]), :length], made[-1])  # earlier anchors are kept
        made.append(found.anchors)
    assert found.anchors.isfinite().all()


def test_anchors_stay_in_the_range_of_pixels(tiny: Any) -> None:
    method = at_end(tiny, anchor_steps=4, anchor_lr=2.0)
    method.after_task(method.stream[1])
    new = method.anchors[2:]
    assert (new.min(), new.max()) == (-1, 1)
    assert method.anchors.shape[1:] == (3, 8, 8)


def test_anchors_of_texts_are_mean_word_vectors_as_long_as_the_median_text(tiny: Any) -> None:
    method = at_end(tiny, "text", anchor_steps=0)
    method.after_task(method.stream[1])
    stream, table = method.stream, array(method.model.encoder.embeddings.word_embeddings.weight)
    lengths = []
    for c in (2, 3):
        ids = stream[1].train[stream.targets[stream[1].train] == c].tolist()
        texts = [stream.data.ids[stream.data.start[i] : stream.data.start[i + 1]].tolist() for i in ids]
        length = sorted(len(text) for text in texts)[(len(texts) - 1) // 2]
        mean = [np.mean([table[text[at]] for text in texts if len(text) > at], axis=0) for at in range(length)]
        assert array(method.anchors[c, :length]) == pytest.approx(np.stack(mean), abs=1e-12)
        assert array(method.anchors[c, 0]) == pytest.approx(table[2])  # every text begins with [CLS]
        assert (method.anchors[c, length:] == 0).all()
        assert method.anchor_masks[c].tolist() == [1] * length + [0] * (method.anchors.shape[1] - length)
        lengths.append(length)
    assert len(set(method.anchor_masks.sum(1).tolist())) > 1, lengths  # some are padded


def test_a_padded_anchor_of_a_text_reads_as_without_padding(tiny: Any) -> None:
    method = at_task(tiny, "text", hal(), task=2, **{"benchmark.tasks": [2, 2, 1]})
    z = logits_of(method.model.eval(), anchors_of(method))
    for i, (e, mask) in enumerate(zip(method.anchors, method.anchor_masks, strict=True)):
        length = int(mask.sum())
        inputs = {"inputs_embeds": e[None, :length], "attention_mask": mask[None, :length]}
        alone = logits_of(method.model, Batch(inputs, torch.tensor([i]), NO_IDS, NO_IDS))
        assert alone[0] == pytest.approx(z[i], abs=1e-10)


# -- the state after a step


def test_phi_is_a_running_mean_of_each_new_classs_features_and_starts_anew_with_the_task(tiny: Any) -> None:
    method = at_task(tiny, "image", hal(beta=0.7))
    assert method.phi.shape == (2, 16)
    assert not method.phi.any()
    ids = method.stream[1].train
    expected = np.zeros((2, 16))
    for step, rows in enumerate(([0, 1, 12], [2, 3], [13, 14, 4, 5])):
        method.now.step = step
        batch = method.stream.batch(ids[rows])
        method.loss(batch)
        with torch.no_grad():
            h = array(method.model(batch).features)
        method.after_step(batch)
        for c in (0, 1):
            own = [i for i, row in enumerate(rows) if row // 10 == c]
            if own:  # the mean of a class that is not in the batch does not change
                expected[c] = 0.7 * expected[c] + 0.3 * h[own].mean(0)
        assert array(method.phi) == pytest.approx(expected, abs=1e-12)


def offered(tiny: Any, options: dict[str, Any], **changes: Any) -> tuple[list[list[int]], Any]:
    """Return the ids of each task in the order of its first epoch, and the method at the end."""
    method, stream, config = make(tiny, "image", hal(lambda_anchor=0.0, **options), **changes)
    orders: list[list[int]] = [[] for _ in stream]
    sizes = []
    after_step = method.after_step

    def noted(batch: Batch) -> None:
        after_step(batch)
        if method.now.epoch == 0:
            orders[method.now.task] += batch.examples.tolist()
        sizes.append(len(method.memory))

    method.after_step = noted  # type: ignore[method-assign]
    Trainer(method, stream, config).run()
    assert max(sizes) <= (config.memory.size or config.memory.per_class * 5)
    return orders, method


def test_the_ring_keeps_the_newest_examples_of_each_task_and_divides_by_the_tasks_known_so_far(tiny: Any) -> None:
    for tasks in ([2], [2, 1], [2, 1, 2]):
        orders, method = offered(tiny, {}, **{"benchmark.tasks": tasks, "memory.size": 11})
        quota = 11 // len(tasks)
        kept: list[int] = []
        for t, order in enumerate(orders):
            at_most = 11 // (t + 1)  # the task itself could keep this many; later tasks remove only its oldest
            kept += order[-at_most:][-quota:]
        assert method.memory.examples.tolist() == kept
        assert method.memory.task.tolist() == [t for t in range(len(tasks)) for _ in range(quota)]


@pytest.mark.parametrize("changes", [{"memory.size": 11}, {"memory.size": 0, "memory.per_class": 2}])
def test_the_ring_may_be_one_for_each_class(tiny: Any, changes: dict[str, int]) -> None:
    options = {"ring": "class"} if changes["memory.size"] else {}
    orders, method = offered(tiny, options, **{"benchmark.tasks": [2, 1, 2], **changes})
    targets = method.stream.targets
    for c in range(5):
        shown = [e for order in orders for e in order if targets[e] == c]
        kept = [e for e in method.memory.examples.tolist() if targets[e] == c]
        assert kept == shown[-2:]


class RingER(ER):
    """ER with a ring buffer of |M| / tasks slots for each task, implemented with lists."""

    modalities = frozenset(("image", "text"))

    def before_task(self, task: Any) -> None:
        self.rings: list[list[int]] = [] if task.index == 0 else self.rings
        self.rings.append([])

    @property
    def replay_size(self) -> int:
        return super().replay_size if self.now.task else 0

    def after_step(self, batch: Batch) -> None:
        if self.now.epoch == 0:
            self.rings[-1] += batch.examples.tolist()
            self.rings = [ring[-(self.memory.size // len(self.rings)) :] for ring in self.rings]
            ids = torch.tensor([e for ring in self.rings for e in ring])
            self.memory.keep(NO_IDS)
            self.memory.add(ids, self.now.task, torch.zeros_like(ids))

    def remember(self, task: Any) -> None:
        pass


@pytest.mark.parametrize("modality", ["image", "text"])
def test_without_anchors_it_is_er_with_the_same_ring_bit_for_bit(tiny: Any, modality: str) -> None:
    methods = ({"name": "hal", "lambda_anchor": 0.0}, {"name": "test_hal.RingER"})
    one, other = (bace.run(tiny.settings(modality, method=m)) for m in methods)
    assert one.matrix == other.matrix
    assert_equal_bits(weights(one.method.model), weights(other.method.model))
    assert torch.equal(one.method.memory.examples, other.method.memory.examples)
    assert len(one.method.anchors) == 0  # type: ignore[arg-type]


def test_the_first_task_replays_nothing_and_later_ones_half_a_batch(tiny: Any) -> None:
    method, stream, config = make(tiny, "image", hal(), **{"benchmark.tasks": [2, 2]})
    trainer = Trainer(method, stream, config)
    begin(trainer, 0)
    method.after_step(some_with_features(method))
    assert len(method.memory) > 0
    assert method.replay_size == 0
    assert method.stages(stream[0])[0].batch_size == 8  # also when the run is resumed here
    trainer.learn(stream[0])
    begin(trainer, 1)
    assert method.replay_size == 4


def some_with_features(method: Any) -> Batch:
    batch = some_of_all(method)
    method.loss(batch)
    return batch


def test_without_a_memory_there_are_anchors_all_the_same(tiny: Any) -> None:
    method, stream, config = make(tiny, "image", hal(), **{"memory.size": 0})
    Trainer(method, stream, config).run()
    assert len(method.memory) == 0
    assert len(method.anchors) == 4  # type: ignore[arg-type]


# -- refusals


@pytest.mark.parametrize(
    "wrong",
    [
        {"lambda_anchor": -1.0},
        {"beta": 1.0},
        {"gamma": -0.1},
        {"anchor_steps": -1},
        {"anchor_lr": 0.0},
        {"memory_steps": -1},
    ],
)
def test_values_out_of_range_are_refused_by_name(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match=rf"{name} \({wrong[name]}\)"):
        HAL(**wrong)


def test_tokens_are_refused_with_the_reason(tiny: Any) -> None:
    with pytest.raises(ConfigError, match="an anchor is one input of one class"):
        bace.run(tiny.settings("token", method="hal"))
