"""Co2L's contrast and relations are compared with loops over rows in numpy and with finite differences. Its two views
and two stages are checked by the inputs of the network and by the weights that move."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from steps import Array, array, assert_equal_bits, at_task, enter, make, recorded_passes, some, weights
from torch import Tensor

from bace.core.optimiser import make_optimiser, stage_groups
from bace.core.trainer import Trainer
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.co2l import Co2L
from bace.methods.parts.losses import relation_distillation, supervised_contrast

LABELS = np.array([0, 0, 1, 1, 2, 2, 2, 3])


def unit(seed: int = 0, rows: int = 8) -> Array:
    x = np.random.default_rng(seed).normal(size=(rows, 4))
    result: Array = x / np.linalg.norm(x, axis=1, keepdims=True)
    return result


def contrast_by_loops(u: Array, y: Any, anchors: Any, tau: float) -> float:
    """Return -tau/0.07 times the sum over anchors of the mean over positives of log soft-max of u.u/tau, divided by the
    number of rows."""
    total = 0.0
    for i in range(len(u)):
        others = [a for a in range(len(u)) if a != i]
        denominator = sum(np.exp(u[i] @ u[a] / tau) for a in others)
        positives = [p for p in others if y[p] == y[i]]
        if anchors[i] and positives:
            total -= np.mean([np.log(np.exp(u[i] @ u[p] / tau) / denominator) for p in positives]) * tau / 0.07
    return total / len(u)


def relations_by_loops(u: Array, v: Array, kappa: float, kappa_teacher: float) -> float:
    total = 0.0
    for i in range(len(u)):
        others = [a for a in range(len(u)) if a != i]
        p = np.array([np.exp(u[i] @ u[a] / kappa) for a in others])
        q = np.array([np.exp(v[i] @ v[a] / kappa_teacher) for a in others])
        total -= (q / q.sum() * np.log(p / p.sum())).sum()
    return total / len(u)


def contrast(u: Array, y: Any, anchors: Any, tau: float) -> float:
    tensors = (torch.from_numpy(u), torch.from_numpy(y), torch.tensor(anchors))
    return float(supervised_contrast(*tensors, tau=tau))


# -- the formulas


@pytest.mark.parametrize("tau", [0.1, 0.5])
@pytest.mark.parametrize("known", [0, 2, 4])
def test_the_contrast_is_that_of_the_anchors_divided_by_all_rows(tau: float, known: int) -> None:
    anchors = (known <= LABELS).tolist()
    assert contrast(unit(), LABELS, anchors, tau) == pytest.approx(contrast_by_loops(unit(), LABELS, anchors, tau))


def test_three_rows_by_hand() -> None:
    """u = e1, e1, e2 with labels 0, 0, 1 and tau = 1. Rows 0 and 1 give log(e + 1) - 1, and row 2 has no positive."""
    u = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    found = supervised_contrast(u, torch.tensor([0, 0, 1]), torch.ones(3, dtype=torch.bool), tau=1.0, base=1.0)
    assert float(found) == pytest.approx(2 * (np.log(np.e + 1) - 1) / 3)
    found = supervised_contrast(u, torch.tensor([0, 0, 1]), torch.tensor([True, False, False]), tau=1.0, base=0.5)
    assert float(found) == pytest.approx(2 * (np.log(np.e + 1) - 1) / 3)


def test_with_anchors_everywhere_it_is_symmetric_supervised_contrast() -> None:
    """The reference is Khosla et al. 2020, eq. 2: the sum over i of -1/|P(i)| sum over p of log..., here as a mean and
    times tau/0.07."""
    u, tau = unit(3), 0.3
    similarity = u @ u.T / tau
    np.fill_diagonal(similarity, -np.inf)
    log_share = similarity - np.log(np.exp(similarity).sum(1, keepdims=True))
    rows = [log_share[i, (y == LABELS) & (np.arange(8) != i)] for i, y in enumerate(LABELS)]
    reference = np.mean([-row.mean() if len(row) else 0.0 for row in rows]) * tau / 0.07
    assert contrast(u, LABELS, [True] * 8, tau) == pytest.approx(reference)


def test_old_rows_are_no_anchors_but_still_opposites() -> None:
    """Rows 0 and 1 are old. As anchors they count nothing; as negatives they push new rows away."""
    u = torch.from_numpy(unit()).requires_grad_(True)
    anchors = torch.from_numpy(LABELS > 0)
    supervised_contrast(u, torch.from_numpy(LABELS), anchors, tau=0.5).backward()
    step, base = 1e-6, unit()
    for i, d in ((0, 0), (1, 2), (5, 3)):
        moved = base.copy()
        moved[i, d] += step
        # the gradient reaches an old row only through the sums of the new rows
        difference = contrast_by_loops(moved, LABELS, LABELS > 0, 0.5) - contrast_by_loops(
            base, LABELS, LABELS > 0, 0.5
        )
        assert float(u.grad[i, d]) == pytest.approx(difference / step, abs=1e-5)  # type: ignore[index]
    assert u.grad is not None
    assert u.grad[0].abs().sum() > 1e-4
    alone = torch.from_numpy(unit()).requires_grad_(True)  # only old rows: no gradient at all
    supervised_contrast(alone, torch.from_numpy(LABELS), torch.zeros(8, dtype=torch.bool), tau=0.5).backward()
    assert alone.grad is not None
    assert not alone.grad.any()


def test_relations_by_loops_and_their_gradient() -> None:
    u, v = torch.from_numpy(unit(1)).requires_grad_(True), torch.from_numpy(unit(2))
    found = relation_distillation(u, v, kappa=0.2, kappa_teacher=0.05)
    assert found.item() == pytest.approx(relations_by_loops(unit(1), unit(2), 0.2, 0.05))
    found.backward()
    moved = unit(1)
    moved[3, 1] += 1e-6
    change = relations_by_loops(moved, unit(2), 0.2, 0.05) - found.item()
    assert float(u.grad[3, 1]) == pytest.approx(change / 1e-6, abs=1e-4)  # type: ignore[index]


def test_relations_have_no_gradient_where_student_and_teacher_agree() -> None:
    u = torch.from_numpy(unit()).requires_grad_(True)
    relation_distillation(u, u.detach(), kappa=0.2, kappa_teacher=0.2).backward()
    assert u.grad is not None
    assert float(u.grad.abs().max()) < 1e-12
    u.grad = None
    relation_distillation(u, u.detach(), kappa=0.2, kappa_teacher=0.01).backward()
    assert float(u.grad.abs().max()) > 1e-3


def test_the_order_of_a_batch_does_not_matter() -> None:
    order = np.random.default_rng(1).permutation(8)
    anchors = LABELS > 1
    one, other = (
        contrast(unit(), LABELS, anchors.tolist(), 0.5),
        contrast(unit()[order], LABELS[order], anchors[order].tolist(), 0.5),
    )
    assert one == pytest.approx(other, rel=1e-12)
    u, v = torch.from_numpy(unit(1)), torch.from_numpy(unit(2))
    both = {
        float(relation_distillation(a, b, kappa=0.2, kappa_teacher=0.05)) for a, b in ((u, v), (u[order], v[order]))
    }
    assert max(both) - min(both) < 1e-12


# -- the step


def projected(projector: Any, features: Array) -> Array:
    """Return the projection d -> d -> 128 with a ReLU in between, normalised to length 1."""
    first, _, second = projector.head
    hidden = np.maximum(features @ array(first.weight).T + array(first.bias), 0)
    out = hidden @ array(second.weight).T + array(second.bias)
    result: Array = out / np.linalg.norm(out, axis=1, keepdims=True)
    return result


def features_of(model: Any, batch: Batch) -> Array:
    with torch.no_grad():
        return array(model(batch).features)


@pytest.mark.parametrize("modality", ["image", "text"])
def test_the_terms_of_a_step_by_numpy(tiny: Any, modality: str) -> None:
    method = at_task(tiny, modality, {"name": "co2l", "lambda_ird": 0.5})
    rng = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in (*method.model.encoder.parameters(), *method.projector.parameters()):
            p += 0.02 * torch.randn(p.shape, generator=rng)  # the student differs from its teacher
    batch = some(method)
    with recorded_passes() as passes:
        loss = method.loss(batch)
    (pair,) = (p.batch for p in passes if p.model is method.model)
    assert [p.model for p in passes] == [method.model, method.teacher]
    assert passes[1].batch is pair
    u = projected(method.projector, features_of(method.model, pair))
    y = pair.targets.numpy()
    assert 0 < (y < 2).sum() < len(y)
    assert loss["contrast"].item() == pytest.approx(contrast_by_loops(u, y, y >= 2, 0.5), rel=1e-4)
    v = projected(method.old_projector, features_of(method.teacher, pair))
    assert np.abs(u - v).max() > 1e-2
    assert loss["relations"].item() == pytest.approx(0.5 * relations_by_loops(u, v, 0.2, 0.01), rel=1e-3)


def test_a_picture_is_seen_in_two_views_replayed_ones_too(tiny: Any) -> None:
    method = at_task(tiny, "image", {"name": "co2l"})
    batch = some(method)
    with recorded_passes() as passes:
        method.loss(batch)
    pair = passes[0].batch
    half = len(pair) // 2
    assert len(pair.examples) == 2 * (4 + 4)
    assert pair.examples[:half].tolist() == pair.examples[half:].tolist()
    assert pair.examples[:4].tolist() == batch.examples.tolist()
    assert set(pair.examples[4:half].tolist()) <= set(method.memory.examples.tolist())
    one, other = pair.inputs["pixel_values"].split(half)
    differ = (one != other).flatten(1).any(1)
    assert differ[:4].any()
    assert differ[4:].any()
    assert torch.equal(one[:4], batch.inputs["pixel_values"])  # the view of the epoch


def test_two_views_of_a_text_are_two_dropouts_and_the_teacher_sees_none(tiny: Any) -> None:
    method = at_task(tiny, "text", {"name": "co2l"}, **{"backbone": tiny.bert})
    batch = some(method)
    seen: list[Tensor] = []
    method.projector.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    method.old_projector.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    method.loss(batch)
    student, teacher = (x.split(len(x) // 2) for x in seen)
    assert not torch.allclose(student[0], student[1], atol=1e-3)
    torch.testing.assert_close(teacher[0], teacher[1])
    assert not teacher[0].requires_grad
    method = at_task(tiny, "text", {"name": "co2l"})  # without dropout both views are equal
    method.projector.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    method.loss(some(method))
    one, other = seen[-1].split(len(seen[-1]) // 2)
    torch.testing.assert_close(one, other)


def test_a_weight_of_0_skips_the_teacher_and_the_first_task_has_none(tiny: Any) -> None:
    method = at_task(tiny, "image", {"name": "co2l", "lambda_ird": 0.0})
    with recorded_passes() as passes:
        assert set(method.loss(some(method))) == {"contrast"}
    assert len(passes) == 1
    method = at_task(tiny, "image", {"name": "co2l"}, task=0)
    assert set(method.loss(some(method))) == {"contrast"}
    assert method.old_projector is None


# -- the stages


def after_stages(tiny: Any, modality: str, **options: Any) -> tuple[Any, dict[str, dict[str, Tensor]]]:
    """Return a method that has learned two tasks, and its state after each stage of the second task."""
    found: dict[str, dict[str, Tensor]] = {}

    class Watching(Trainer):
        def train(self, stage: Any, stages: int) -> None:
            found[f"before {stage.name}"] = weights(self.method)
            super().train(stage, stages)
            found[stage.name] = weights(self.method)

    method, stream, config = make(tiny, modality, {"name": "co2l", **options})
    trainer = Watching(method, stream, config)
    for task in stream:
        trainer.learn(task)
    return method, found


@pytest.mark.parametrize("modality", ["image", "text"])
def test_contrast_trains_encoder_and_projector_and_the_linear_stage_the_head_alone(tiny: Any, modality: str) -> None:
    _, states = after_stages(tiny, modality, linear_epochs=3)

    def moved(stage: str) -> set[str]:
        before, after = states[f"before {stage}"], states[stage]
        return {name for name in after if not torch.equal(after[name], before[name])}

    contrast_moved, linear_moved = moved("contrast"), moved("linear")
    assert any(name.startswith("model.encoder.embeddings") for name in contrast_moved)
    assert {name for name in contrast_moved if not name.startswith("model.encoder.")} == {
        f"projector.head.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")
    }
    assert linear_moved == {"model.head.blocks.0", "model.head.biases.0"}


def test_the_teacher_is_encoder_and_projector_of_the_task_before(tiny: Any) -> None:
    method, stream, config = make(tiny, "image", {"name": "co2l", "linear_epochs": 2})
    trainer = Trainer(method, stream, config)
    trainer.learn(stream[0])
    encoder, projector = weights(method.model.encoder), weights(method.projector)
    trainer.learn(stream[1])
    assert_equal_bits(weights(method.teacher.encoder), encoder)  # type: ignore[union-attr]
    assert_equal_bits(weights(method.old_projector), projector)
    assert not torch.equal(method.projector.head[0].weight, projector["head.0.weight"])
    assert not method.old_projector.training


def test_the_projector_learns_at_the_rate_of_new_layers(tiny: Any) -> None:
    method, stream, config = make(tiny, "image", {"name": "co2l"}, **{"train.lr": 0.01, "train.head_lr": 0.5})
    trainer = Trainer(method, stream, config)
    enter(trainer, 0)
    stage = method.stages(stream[0])[0]
    made = make_optimiser(stage, stage_groups(stage), config.train)
    rates = {p: group["lr"] for group in made.param_groups for p in group["params"]}
    assert {rates[p] for p in method.projector.parameters()} == {0.5}
    assert {rates[p] for p in method.model.encoder.parameters()} == {0.01}


def test_the_classifier_starts_anew_for_all_classes_at_every_task(tiny: Any) -> None:
    method = at_task(tiny, "image", {"name": "co2l", "linear_epochs": 2})
    assert [tuple(block.shape) for block in method.model.head.blocks] == [(4, 16)]
    bound = 1 / 16**0.5
    assert float(method.model.head.blocks[0].abs().max()) <= bound
    assert not method.model.head.biases[0].any()


def test_the_linear_stage_draws_every_class_alike_from_task_and_memory(tiny: Any) -> None:
    settings = {"memory.size": 4, "benchmark.tasks": [2, 2]}
    method = at_task(tiny, "image", {"name": "co2l"}, **settings)
    stage = method.stages(method.stream[1])[1]
    assert len(stage.examples()) == 20 + 4
    drawn = torch.cat([stage.sampler(torch.Generator().manual_seed(seed)) for seed in range(50)])
    assert len(drawn) == 50 * 24
    counts = Counter(method.stream.targets[drawn].tolist())
    assert all(240 < counts[c] < 360 for c in range(4))  # 300 each, although old classes have 2 examples, new ones 10
    assert set(drawn.tolist()) == set(stage.examples().tolist())


def test_the_classifiers_loss_is_cross_entropy_on_clean_features(tiny: Any) -> None:
    method = at_task(tiny, "image", {"name": "co2l"})
    contrast_stage, stage = method.stages(method.stream[1])
    method.before_epoch(contrast_stage)
    method.eval()
    method.before_epoch(stage)
    ids = stage.examples()[[0, 5, 21, 5]]
    batch = method.stream.batch(ids, inputs=False)
    assert not batch.inputs
    clean = method.stream.batch(ids)
    with torch.no_grad():
        expected = F.cross_entropy(method.model(clean).logits, clean.targets)
    assert float(method.classify(batch).detach()) == pytest.approx(float(expected), rel=1e-5)


def test_the_classifiers_rate_falls_to_a_fifth_three_times(tiny: Any) -> None:
    method = at_task(tiny, "image", {"name": "co2l", "linear_epochs": 20})
    stage = method.stages(method.stream[1])[1]
    found = [stage.schedule(epochs) for epochs in (0, 11.9, 12, 14.9, 15, 17.9, 18, 19.9)]
    assert found == pytest.approx([1, 1, 0.2, 0.2, 0.04, 0.04, 0.008, 0.008])


def test_only_the_linear_stage_is_validated(tiny: Any) -> None:
    method = at_task(tiny, "image", {"name": "co2l"})
    ids = method.stream[1].train
    method.now.stage = "contrast"
    assert method.validation_loss(ids) is None
    method.now.stage = "linear"
    assert method.validation_loss(ids) > 0


@pytest.mark.parametrize("wrong", [{"tau": 0.0}, {"kappa": 0.0}, {"lambda_ird": -1.0}, {"projection": 0}])
def test_impossible_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Co2L(**wrong)
