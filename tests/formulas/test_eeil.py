"""EEIL's loss, noise, balanced set and second teacher are compared with the equations in numpy, and herding with brute
force. Tests check the weights between its stages. With both additions off it equals ER bit for bit."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from steps import (
    array,
    assert_equal_bits,
    at_task,
    cross_entropy,
    logits_of,
    make,
    recorded_passes,
    softmax,
    some,
    weights,
)
from torch import Tensor

import bace
from bace.core.trainer import Trainer
from bace.errors import ConfigError
from bace.methods import EEIL


def kd(student: Any, teacher: Any, T: float = 2.0) -> float:
    """Return the mean over rows of -sum_c softmax(z'/T)_c log softmax(z/T)_c."""
    return float(-(softmax(teacher / T) * np.log(softmax(student / T))).sum(1).mean())


def moved(method: Any) -> None:
    """Move the student away from its teacher, so that no term is trivial."""
    source = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for p in method.model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=source)


class Watching(Trainer):
    """Record the student at the end of each stage and, at each step of the second stage, its teacher, the rate of every
    parameter group and the examples."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.after: dict[tuple[int, str], dict[str, Tensor]] = {}
        self.teachers: dict[int, list[dict[str, Tensor]]] = {}
        self.rates: set[float] = set()
        self.sets: dict[int, Tensor] = {}
        self.memory: dict[int, Tensor] = {}

    def resume_point(self, kind: str, **options: Any) -> None:
        now: Any = self.method.now
        method: Any = self.method
        if kind == "stage":
            self.after[now.task, now.stage] = weights(method.model)
        if kind == "step" and now.stage == "balanced":
            self.teachers.setdefault(now.task, []).append(weights(method.teacher))
            self.sets[now.task], self.memory[now.task] = method.balanced, method.memory.examples.clone()
            assert self.optimiser is not None
            self.rates |= {group["lr"] for group in self.optimiser.param_groups}


def watched(tiny: Any, modality: str = "image", **changes: Any) -> Watching:
    given = {"name": "eeil", "balanced_epochs": 2}
    trainer = Watching(*make(tiny, modality, given, **{"benchmark.tasks": [2, 1, 2], "memory.size": 12, **changes}))
    trainer.run()
    return trainer


# -- stage 1


def test_with_one_old_block_the_distillation_is_that_of_lwf(tiny: Any) -> None:
    method = at_task(tiny, "image", {"name": "eeil", "kd_weight": 3.0})
    moved(method)
    batch = some(method)
    with recorded_passes() as passes:
        loss = method.loss(batch)
    student, teacher = passes
    assert (student.model, teacher.model) == (method.model, method.teacher)
    assert student.batch is teacher.batch
    assert len(student.batch) == 4 + 4  # both new and replayed rows
    assert set(student.batch.examples.tolist()) > set(batch.examples.tolist())
    z, z0 = logits_of(method.model, student.batch), logits_of(method.teacher, student.batch)
    assert (z.shape[1], z0.shape[1]) == (4, 2)
    assert loss["distil"].item() == pytest.approx(2 * 3 * kd(z[:, :2], z0), rel=1e-4)  # the cross-entropy is two means
    targets = student.batch.targets.numpy()
    assert loss["new"].item() == pytest.approx(cross_entropy(z[:4], targets[:4]), rel=1e-4)
    assert loss["replay"].item() == pytest.approx(cross_entropy(z[4:], targets[4:]), rel=1e-4)


@pytest.mark.parametrize("T", [1.0, 2.0])
def test_each_old_block_has_a_softmax_of_its_own(tiny: Any, T: float) -> None:
    method = at_task(tiny, "image", {"name": "eeil", "T": T}, task=2, **{"benchmark.tasks": [2, 2, 1]})
    moved(method)
    with recorded_passes() as passes:
        loss = method.loss(some(method))
    z, z0 = (logits_of(p.model, p.batch) for p in passes)
    blocks = kd(z[:, :2], z0[:, :2], T) + kd(z[:, 2:4], z0[:, 2:4], T)
    assert loss["distil"].item() == pytest.approx(2 * blocks, rel=1e-9)
    assert loss["distil"].item() != pytest.approx(2 * kd(z[:, :4], z0, T), rel=1e-3)


def test_the_first_task_and_a_weight_of_zero_pass_no_teacher(tiny: Any) -> None:
    for options, task in (({}, 0), ({"kd_weight": 0.0}, 1)):
        method = at_task(tiny, "image", {"name": "eeil", **options}, task=task)
        with recorded_passes() as passes:
            loss = method.loss(some(method))
        assert [p.model for p in passes] == [method.model]
        assert "distil" not in loss


@pytest.mark.parametrize("epoch", [0, 3])
def test_gradient_noise_has_the_standard_deviation_of_the_schedule(tiny: Any, epoch: int) -> None:
    method = at_task(tiny, "text", {"name": "eeil", "noise": 0.3})
    frozen = method.model.encoder.embeddings.position_embeddings.weight
    noises = []
    for step in (0, 0, 1):
        method.now.epoch, method.now.step = epoch, step
        for p in method.model.parameters():
            p.grad = None if p is frozen else torch.full_like(p, 2.0)
        method.before_step(some(method))
        assert frozen.grad is None
        noises.append(torch.cat([p.grad.flatten() - 2 for p in method.model.parameters() if p.grad is not None]))
    first, again, later = noises
    assert len(first) > 5000
    assert float(first.std()) == pytest.approx(0.3 / (1 + epoch) ** 0.55, rel=0.05)
    assert abs(float(first.mean())) < 0.02
    assert torch.equal(first, again)
    assert abs(float(np.corrcoef(array(first), array(later))[0, 1])) < 0.05


def test_without_noise_gradients_keep_every_bit(tiny: Any) -> None:
    method = at_task(tiny, "image", {"name": "eeil"})
    for p in method.model.parameters():
        p.grad = torch.rand_like(p)
    before = [p.grad.clone() for p in method.model.parameters()]
    method.before_step(some(method))
    assert all(torch.equal(p.grad, old) for p, old in zip(method.model.parameters(), before, strict=True))


# -- stage 2


def test_the_balanced_set_shows_every_class_equally_often(tiny: Any) -> None:
    trainer = watched(tiny)
    for task, each in ((1, 12 // 2), (2, 12 // 3)):  # as many as an old class had before this task
        shown = trainer.sets[task]
        assert set(trainer.memory[task].tolist()) <= set(shown.tolist())
        seen = trainer.stream[task].classes.stop
        assert Counter(trainer.stream.targets[shown].tolist()) == dict.fromkeys(range(seen), each)
        assert len(set(shown.tolist())) == len(shown)


def test_new_examples_of_the_balanced_set_are_herded_by_the_network_of_stage_1(tiny: Any) -> None:
    trainer = watched(tiny)
    method: Any = trainer.method
    task = trainer.stream[2]
    method.model.load_state_dict(trainer.after[2, "main"])
    trainer.stream.begin(task, trainer.memory[2])
    for c in task.classes:
        members = task.train[trainer.stream.targets[task.train] == c]
        with torch.no_grad():
            h = array(method.model.eval()(trainer.stream.batch(members)).features)
        h /= np.linalg.norm(h, axis=1, keepdims=True)
        chosen: list[int] = []
        for k in range(1, 5):
            rest = [i for i in range(len(h)) if i not in chosen]
            chosen.append(min(rest, key=lambda i: np.linalg.norm(h.mean(0) - h[[*chosen, i]].sum(0) / k)))
        shown = trainer.sets[2][trainer.stream.targets[trainer.sets[2]] == c]
        assert shown.tolist() == members[chosen].tolist()


def test_the_second_teacher_is_the_network_of_stage_1_to_the_end(tiny: Any) -> None:
    trainer = watched(tiny)
    for task in (1, 2):
        assert len(trainer.teachers[task]) == 2 * -(-len(trainer.sets[task]) // 8)
        for teacher in trainer.teachers[task]:
            assert_equal_bits(teacher, trainer.after[task, "main"])
        changed = trainer.after[task, "balanced"]
        assert all(not torch.equal(changed[name], old) for name, old in trainer.after[task, "main"].items())


def test_the_second_stage_distils_every_block_and_replays_nothing(tiny: Any) -> None:
    method = at_task(tiny, "image", {"name": "eeil"}, task=2, **{"benchmark.tasks": [2, 1, 2]})
    stage = method.stages(method.stream[2])[1]
    assert (stage.name, stage.epochs, stage.batch_size) == ("balanced", 30, 8)
    assert method.teacher.head.classes == 3
    stage.structure()
    assert method.teacher.head.classes == 5
    moved(method)
    batch = some(method)
    with recorded_passes() as passes:
        loss: Any = stage.loss(batch)
    assert [p.batch for p in passes] == [batch, batch]
    z, z0 = (logits_of(p.model, batch) for p in passes)
    assert loss.keys() == {"new", "distil"}
    assert loss["new"].item() == pytest.approx(cross_entropy(z, batch.targets.numpy()), rel=1e-4)
    blocks = sum(kd(z[:, a:b], z0[:, a:b]) for a, b in ((0, 2), (2, 3), (3, 5)))  # including the newest block
    assert loss["distil"].item() == pytest.approx(blocks, rel=1e-4)


def test_the_second_stage_has_a_tenth_of_both_learning_rates(tiny: Any) -> None:
    trainer = watched(tiny, **{"train.lr": 0.05, "train.head_lr": 0.02})
    assert sorted(trainer.rates) == pytest.approx([0.002, 0.005])


def test_nothing_of_the_second_stage_outlives_the_task(tiny: Any) -> None:
    trainer = watched(tiny)
    state = trainer.method.state_dict()
    assert len(state["balanced"]) == 0
    assert not any(name.startswith("teacher.") for name in state)
    counts = Counter(trainer.stream.targets[trainer.method.memory.examples].tolist())
    assert counts == dict.fromkeys(range(5), 12 // 5)  # the memory is chosen again, for all classes


def test_without_a_memory_there_is_nothing_to_balance(tiny: Any) -> None:
    method, stream, _ = make(tiny, "image", {"name": "eeil"}, **{"memory.size": 0})
    assert [stage.name for stage in method.stages(stream[1])] == ["main"]
    method, stream, _ = make(tiny, "image", {"name": "eeil"}, **{"memory.size": 0, "memory.per_class": 2})
    assert [stage.name for stage in method.stages(stream[1])] == ["main", "balanced"]
    assert [stage.name for stage in method.stages(stream[0])] == ["main"]


# -- equalities and refusals


@pytest.mark.parametrize(
    ("modality", "er"), [("image", {}), ("text", {"reduction": "joint"}), ("image", {"mode": "concat"})]
)
def test_without_distillation_and_second_stage_it_is_er_bit_for_bit(tiny: Any, modality: str, er: Any) -> None:
    off = {"name": "eeil", "kd_weight": 0.0, "balanced_epochs": 0, **er}
    one, other = (bace.run(tiny.settings(modality, method=m)) for m in ({"name": "er", **er}, off))
    assert one.matrix == other.matrix
    assert_equal_bits(weights(one.method.model), weights(other.method.model))
    assert torch.equal(one.method.memory.examples, other.method.memory.examples)


@pytest.mark.parametrize(
    "wrong", [{"kd_weight": -1.0}, {"noise": -0.1}, {"balanced_epochs": -1}, {"T": 0.0}, {"balanced_lr": 0.0}]
)
def test_values_out_of_range_are_refused_by_name(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match=rf"{name} \({wrong[name]}\)"):
        EEIL(**wrong)


def test_tokens_are_refused_with_the_reason(tiny: Any) -> None:
    with pytest.raises(ConfigError, match="no class-balanced set of sentences"):
        bace.run(tiny.settings("token", method="eeil"))
