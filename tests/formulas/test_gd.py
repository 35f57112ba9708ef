"""GD's three losses are compared with the equations in numpy, and its class weights with counts by hand. Tests check
which weights each stage may change. Without distillation and last stage it equals ER bit for bit."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from steps import (
    array,
    assert_equal_bits,
    at_task,
    cross_entropy,
    kl_renorm,
    logits_of,
    make,
    recorded_passes,
    some,
    weights,
)
from torch import Tensor

import bace
from bace.core.trainer import Trainer
from bace.errors import ConfigError
from bace.methods import GD


def moved(module: torch.nn.Module, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p += 0.1 * torch.randn(p.shape, generator=source)


def taught(tiny: Any, *, task: int = 1, apart: bool = True, **options: Any) -> Any:
    """Return a method at the beginning of a task. Student, P and C differ if `apart`."""
    tasks = {"benchmark.tasks": [2, 1, 2]} if task == 2 else {}
    method = at_task(tiny, "image", {"name": "gd", **options}, task=task, **tasks)
    if apart:
        moved(method.local, 5)
        moved(method.model, 6)
    method.local.eval()
    return method


class Watching(Trainer):
    """Record the networks before and after each stage."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.networks: dict[tuple[int, str, str], dict[str, Tensor]] = {}

    def record(self, stage: str, when: str) -> None:
        method: Any = self.method
        for name in ("model", "teacher", "local"):
            if getattr(method, name) is not None:
                self.networks[method.now.task, f"{when} {stage}", name] = weights(getattr(method, name))

    def train(self, stage: Any, stages: int) -> None:
        self.record(stage.name, "before")
        super().train(stage, stages)
        self.record(stage.name, "after")


@pytest.fixture(scope="module")
def watched(tiny: Any) -> Watching:
    given = {"name": "gd", "finetune_epochs": 2, "finetune_lr": 1.0}
    trainer = Watching(*make(tiny, "image", given, **{"benchmark.tasks": [2, 1, 2]}))
    trainer.run()
    return trainer


# -- the teacher of the current task


def test_the_confidence_loss_is_the_divergence_from_uniform_and_zero_only_there(tiny: Any) -> None:
    method = taught(tiny, confidence=3.0)
    batch = some(method)
    with recorded_passes() as passes:
        loss = method.loss_teacher(batch)
    (one,) = passes
    assert one.model is method.local
    z = logits_of(method.local, one.batch)[4:, 2:]  # the replayed rows, over the new classes
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    divergence = (0.5 * (math.log(0.5) - np.log(p))).sum(1).mean()
    assert divergence > 1e-4
    assert loss["unsure"].item() == pytest.approx(3 * divergence, rel=1e-4)
    with torch.no_grad():
        method.local.head.blocks[1][1] = method.local.head.blocks[1][0]  # equal rows: a uniform soft-max
    assert method.loss_teacher(batch)["unsure"].item() == pytest.approx(0, abs=1e-6)


def test_the_current_teacher_learns_the_new_classes_alone(tiny: Any) -> None:
    method = taught(tiny, task=2)
    method.zero_grad()
    batch = some(method, 20)
    with recorded_passes() as passes:
        loss = method.loss_teacher(batch)
    both = passes[0].batch
    z = logits_of(method.local, both)[: len(batch), 3:]
    assert loss["new"].item() == pytest.approx(cross_entropy(z, batch.targets.numpy() - 3), rel=1e-4)
    assert (both.targets[len(batch) :] < 3).all()
    torch.stack(list(loss.values())).sum().backward()
    *old, new = (block.grad for block in method.local.head.blocks)
    assert all(grad is None or not grad.any() for grad in old)  # no label of an exemplar was learned
    assert (new.abs().sum(1) > 0).all()
    assert all(p.grad is None for p in method.model.parameters())


def test_in_concat_mode_exemplars_are_told_by_their_class(tiny: Any) -> None:
    method = taught(tiny, mode="concat")
    ids = torch.cat([method.memory.examples[:3], method.stream[1].train[:2]])
    batch = method.stream.batch(ids)
    loss = method.loss_teacher(batch)
    z = logits_of(method.local, batch)[:, 2:]
    assert loss["new"].item() == pytest.approx(cross_entropy(z[3:], batch.targets.numpy()[3:] - 2), rel=1e-4)
    log_p = z[:3] - np.log(np.exp(z[:3]).sum(1, keepdims=True))
    assert loss["unsure"].item() == pytest.approx(-log_p.mean() - math.log(2), rel=1e-4)
    only_old = method.loss_teacher(method.stream.batch(method.memory.examples[:3]))
    assert only_old.keys() == {"unsure"}


def test_a_confidence_of_zero_leaves_its_term_out(tiny: Any) -> None:
    method = taught(tiny, confidence=0.0)
    assert method.loss_teacher(some(method)).keys() == {"new"}


# -- the main loss


@pytest.mark.parametrize(("task", "old", "seen"), [(1, 2, 4), (2, 3, 5)])
def test_both_distillations_weigh_by_their_share_of_the_classes_and_by_the_squared_temperature(
    tiny: Any, task: int, old: int, seen: int
) -> None:
    method = taught(tiny, task=task, kd_weight=0.5, T=2.0)
    batch = some(method)
    with recorded_passes() as passes:
        loss = method.loss(batch)
    assert [p.model for p in passes] == [method.model, method.teacher, method.local]
    both = passes[0].batch
    assert all(p.batch is both for p in passes)
    assert len(both) == 8
    z, z_P, z_C = (logits_of(p.model, both) for p in passes)
    assert (z.shape[1], z_P.shape[1]) == (seen, old)
    previous, current = kl_renorm(z, z_P, 2.0).mean(), kl_renorm(z[:, old:], z_C[:, old:], 2.0).mean()
    # twice, because the cross-entropy is two means
    assert loss["previous"].item() == pytest.approx(2 * 0.5 * old / seen * 4 * previous, rel=1e-4)
    assert loss["current"].item() == pytest.approx(2 * 0.5 * (seen - old) / seen * 4 * current, rel=1e-4)
    targets = both.targets.numpy()
    assert loss["new"].item() == pytest.approx(cross_entropy(z[:4], targets[:4]), rel=1e-4)
    assert loss["replay"].item() == pytest.approx(cross_entropy(z[4:], targets[4:]), rel=1e-4)


def test_a_student_that_agrees_with_its_teachers_is_taught_nothing(tiny: Any) -> None:
    method = taught(tiny, apart=False)  # old rows as in P, new rows as in C
    loss = method.loss(some(method))
    assert loss["previous"].item() == pytest.approx(0, abs=1e-6)
    assert loss["current"].item() == pytest.approx(0, abs=1e-6)
    moved(method.local, 5)
    loss = method.loss(some(method))
    assert loss["previous"].item() == pytest.approx(0, abs=1e-6)
    assert loss["current"].item() > 1e-3


# -- the last stage


def finetune(method: Any) -> Any:
    stage = method.stages(method.stream[method.now.task])[-1]
    assert stage.name == "finetune"
    method.before_epoch(stage)
    return stage


def test_weights_balance_what_an_epoch_shows_and_average_to_one(tiny: Any) -> None:
    """An epoch has 20 new examples in 5 steps of 4, each with 4 examples from memory. So 20 examples of 3 old classes,
    with 3 slots each, are replayed."""
    method = taught(tiny, task=2)
    finetune(method)
    assert np.bincount(method.memory.group).tolist() == [3, 3, 3]
    counts = np.array([20 / 3, 20 / 3, 20 / 3, 10, 10])
    seen, old, new = array(method.weights)
    assert seen == pytest.approx(40 / (counts * 5))
    assert (counts * seen).sum() / counts.sum() == pytest.approx(1)
    assert old == pytest.approx([1] * 5)  # the old classes are balanced among themselves, so their weights are 1
    assert new == pytest.approx([1] * 5)


@pytest.mark.parametrize("mode", ["batch", "concat"])
def test_weights_of_unequal_classes_are_those_of_each_label_set(tiny: Any, mode: str) -> None:
    method = taught(tiny, mode=mode)
    task = method.stream[1]
    method.training_examples = lambda _: task.train[:13]  # 10 of class 2, 3 of class 3
    method.memory.keep(torch.tensor([0, 1, 2, 3, 5, 6]))  # 4 of class 0, 2 of class 1
    finetune(method)
    # batch: 4 steps (of 4 new examples) with 4 replayed ones each, two thirds of which are of class 0
    old = [16 * 4 / 6, 16 * 2 / 6] if mode == "batch" else [4, 2]
    counts = np.array([*old, 10, 3])
    seen, prev, local = array(method.weights)
    assert seen == pytest.approx(counts.sum() / (counts * 4), rel=1e-5)
    assert (counts * seen).sum() / counts.sum() == pytest.approx(1, rel=1e-5)
    assert prev == pytest.approx([6 / (4 * 2), 6 / (2 * 2), 1, 1], rel=1e-5)
    assert local == pytest.approx([1, 1, 13 / (10 * 2), 13 / (3 * 2)], rel=1e-5)


def test_the_last_loss_weights_each_row_by_its_class(tiny: Any) -> None:
    method = taught(tiny, kd_weight=0.5)
    stage = finetune(method)
    method.weights = torch.tensor([[0.5, 1.5, 2.0, 3.0], [0.25, 4.0, 1.0, 1.0], [1.0, 1.0, 0.2, 5.0]])
    batch = method.stream.batch(method.stream[1].train[8:12])  # both classes
    with recorded_passes() as passes:
        loss = stage.loss(batch)
    both = passes[0].batch
    y = both.targets.numpy()
    assert len(set(y.tolist())) == 4
    z, z_P, z_C = (logits_of(p.model, both) for p in passes)
    w = array(method.weights)[:, y]
    ce = -(z - np.log(np.exp(z).sum(1, keepdims=True)))[np.arange(8), y]
    assert loss["balanced"].item() == pytest.approx((w[0] * ce).mean(), rel=1e-4)
    assert loss["previous"].item() == pytest.approx(0.5 * 0.5 * 4 * (w[1] * kl_renorm(z, z_P, 2.0)).mean(), rel=1e-4)
    current = (w[2] * kl_renorm(z[:, 2:], z_C[:, 2:], 2.0)).mean()
    assert loss["current"].item() == pytest.approx(0.5 * 0.5 * 4 * current, rel=1e-4)
    assert loss.keys() == {"balanced", "previous", "current"}


def test_the_last_stage_has_a_tenth_of_the_heads_learning_rate(tiny: Any) -> None:
    method, stream, config = make(tiny, "image", {"name": "gd"}, **{"train.head_lr": 0.02})
    rates: set[tuple[str, float]] = set()

    class Noting(Trainer):
        def resume_point(self, kind: str, **options: Any) -> None:
            if kind == "step" and self.optimiser is not None and self.method.now.task:
                rates.update((self.method.now.stage, group["lr"]) for group in self.optimiser.param_groups)

    Noting(method, stream, config).run()
    assert {(stage, round(rate, 6)) for stage, rate in rates} == {
        ("teacher", 0.05), ("teacher", 0.02), ("main", 0.05), ("main", 0.02), ("finetune", 0.002),
    }  # fmt: skip


# -- what each stage changes


def test_the_last_stage_changes_the_head_and_no_parameter_of_the_backbone(watched: Watching) -> None:
    for task in (1, 2):
        before, after = (watched.networks[task, f"{when} finetune", "model"] for when in ("before", "after"))
        changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
        assert changed == {name for name in before if name.startswith("head.")}
    assert all(p.requires_grad for p in watched.method.model.parameters())


def test_each_stage_trains_one_network_and_leaves_both_teachers_alone(watched: Watching) -> None:
    for task in (1, 2):
        start = watched.networks[task, "before teacher", "model"]
        assert_equal_bits(watched.networks[task, "after teacher", "model"], start)
        trained = watched.networks[task, "after teacher", "local"]
        if task == 2:  # it has two classes
            assert all(not torch.equal(value, start[name]) for name, value in trained.items() if "encoder" in name)
        P = watched.networks[task, "before teacher", "teacher"]
        for stage in ("main", "finetune"):
            assert_equal_bits(watched.networks[task, f"after {stage}", "local"], trained)
            assert_equal_bits(watched.networks[task, f"after {stage}", "teacher"], P)
        last = watched.networks[task - 1, "after finetune" if task > 1 else "after main", "model"]
        assert_equal_bits(P, last)  # the network at the end of the previous task


def test_the_current_teacher_starts_as_the_network_with_its_new_rows(tiny: Any) -> None:
    method = taught(tiny, apart=False)
    assert_equal_bits(weights(method.local), weights(method.model))
    assert all(a is not b for a, b in zip(method.local.parameters(), method.model.parameters(), strict=True))


def test_the_first_task_is_one_plain_stage_and_both_teachers_are_gone_after_every_task(watched: Watching) -> None:
    assert [stage.name for stage in watched.method.stages(watched.stream[0])] == ["main"]
    assert [stage.name for stage in watched.method.stages(watched.stream[1])] == ["teacher", "main", "finetune"]
    assert not any(name.startswith(("local.", "teacher.")) for name in watched.method.state_dict())


def test_a_task_of_one_class_has_nothing_to_tell_its_teacher_and_stays_finite(watched: Watching) -> None:
    assert_equal_bits(watched.networks[1, "after teacher", "local"], watched.networks[1, "before teacher", "model"])
    assert all(value.isfinite().all() for value in watched.method.state_dict().values())


# -- equalities and refusals


@pytest.mark.parametrize(
    ("modality", "er"), [("image", {}), ("text", {"reduction": "joint"}), ("image", {"mode": "concat"})]
)
def test_without_distillation_and_last_stage_it_is_er_bit_for_bit(tiny: Any, modality: str, er: Any) -> None:
    off = {"name": "gd", "kd_weight": 0.0, "finetune_epochs": 0, **er}
    one, other = (bace.run(tiny.settings(modality, method=m)) for m in ({"name": "er", **er}, off))
    assert one.matrix == other.matrix
    assert_equal_bits(weights(one.method.model), weights(other.method.model))
    assert torch.equal(one.method.memory.examples, other.method.memory.examples)


@pytest.mark.parametrize(
    "wrong", [{"kd_weight": -1.0}, {"confidence": -0.1}, {"finetune_epochs": -1}, {"T": 0.0}, {"finetune_lr": 0.0}]
)
def test_values_out_of_range_are_refused_by_name(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match=rf"{name} \({wrong[name]}\)"):
        GD(**wrong)


def test_tokens_are_refused_with_the_reason(tiny: Any) -> None:
    with pytest.raises(ConfigError, match="O belongs to no single task"):
        bace.run(tiny.settings("token", method="gd"))
