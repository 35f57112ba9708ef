"""BaCE's terms are compared in double precision with the formulas of docs/bace.md (2, 3, 11.2) in numpy, over
neighbours found by brute force and by hand. Its gradient is compared with finite differences, and its teacher (4) with
averages of weights."""

import copy
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import (
    Neighbourhood,
    array,
    assert_equal_bits,
    at_task,
    begin,
    cross_entropy,
    kl_renorm,
    kl_slice,
    logits_of,
    make,
    picked,
    recorded_passes,
    softmax,
    take_step,
    weights,
)
from torch import Tensor

from bace.core.position import Position
from bace.core.trainer import Trainer
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.bace import BaCE
from bace.models.loading import load_encoder
from bace.models.model import Model


def bace(**changes: Any) -> dict[str, Any]:
    """Return settings in which Effect_new is large enough to be visible."""
    return {"name": "bace", "W0": 0.6, "K": 3, "neighbour_scores": "exact", **changes}


def new_batch(method: Any, count: int = 4) -> Batch:
    """Return the first few examples of the current task, in the view of the current epoch."""
    ids = method.stream[method.now.task].train
    found: Batch = method.stream.batch(ids[:: len(ids) // count][:count].contiguous(), view=method.now.view())
    return found


def terms_of(method: Any, batch: Batch) -> dict[str, float]:
    return {name: term.item() for name, term in method.loss(batch).items()}


def neighbourhood(method: Any, batch: Batch, teacher: Model | None = None) -> Neighbourhood:
    """Find neighbours by brute force. Anchors and pool are the rows of the task, for tokens only the rows of its own
    classes."""
    rows, targets = method.stream.labels(method.stream[method.now.task].train)
    if method.stream.background is not None:
        rows = rows[targets != 0]
    own = [i for i, row in enumerate(batch.rows.tolist()) if row in set(rows.tolist())]
    return Neighbourhood(method, batch, teacher or method.teacher, own, sorted(rows.tolist()))


# -- Effect_new (2)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("modality", ["image", "token"])
def test_loss_on_new_data_is_the_mixture_over_brute_force_neighbours(
    tiny: Any, modality: str, grad: bool, normalize: bool
) -> None:
    method = at_task(tiny, modality, bace(neighbor_grad=grad, knn_normalize=normalize))
    batch = new_batch(method)
    near = neighbourhood(method, batch)
    expected = near.loss(logits_of(method.model, batch), near.scores(method.model))
    assert terms_of(method, batch)["new"] == pytest.approx(expected, rel=1e-9)
    assert expected != pytest.approx(cross_entropy(logits_of(method.model, batch)[near.own], near.targets), rel=1e-5)


@pytest.mark.parametrize("grad", [True, False])
def test_gradient_of_the_whole_loss_on_new_data_by_finite_differences(tiny: Any, grad: bool) -> None:
    """The differences are taken along random directions of all weights. Without the neighbours' gradient, their scores
    are constant, and the gradient is the mean of r_0 times the anchor's cross-entropy gradient (2.3)."""
    method = at_task(tiny, "image", bace(neighbor_grad=grad))
    batch = new_batch(method)
    near = neighbourhood(method, batch)
    method.model.zero_grad()
    method.loss(batch)["new"].backward()
    parameters = list(method.model.parameters())
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]
    fixed = near.scores(method.model)

    def loss() -> float:
        return near.loss(logits_of(method.model, batch), near.scores(method.model) if grad else fixed)

    @torch.no_grad()
    def move(direction: list[Tensor], size: float) -> None:
        for p, d in zip(parameters, direction, strict=True):
            p += size * d

    for seed in range(3):
        rng = torch.Generator().manual_seed(seed)
        direction = [torch.randn(p.shape, generator=rng) for p in parameters]
        step = 1e-6
        move(direction, step)
        up = loss()
        move(direction, -2 * step)
        down = loss()
        move(direction, step)
        slope = sum(float((g * d).sum()) for g, d in zip(gradients, direction, strict=True))
        assert slope == pytest.approx((up - down) / (2 * step), rel=1e-5)

    if not grad:
        logits = method.model(batch).logits
        scores = softmax(array(logits))[np.arange(len(batch)), batch.targets.numpy()]
        r0 = torch.from_numpy(method.W0 * scores / near.mixture(array(logits), fixed))
        method.model.zero_grad()
        (r0 * F.cross_entropy(logits, batch.targets, reduction="none")).mean().backward()
        for p, gradient in zip(parameters, gradients, strict=True):
            torch.testing.assert_close(torch.zeros_like(p) if p.grad is None else p.grad, gradient)


@pytest.mark.parametrize("K", [1, 5])
def test_with_w0_one_the_loss_on_new_data_is_cross_entropy_bit_for_bit_whatever_k(tiny: Any, K: int) -> None:
    method = at_task(tiny, "image", {"name": "bace", "W0": 1.0, "K": K}, **{"memory.size": 0})
    batch = new_batch(method)
    expected = F.cross_entropy(method.model(batch).logits, batch.targets)
    assert torch.equal(method.loss(batch)["new"], expected)


@pytest.mark.parametrize("normalize", [True, False])
def test_scaling_all_features_changes_nothing(tiny: Any, normalize: bool) -> None:
    """The last LayerNorm of the teacher makes features 7 times as long. Neighbours and weights stay the same."""
    method = at_task(tiny, "image", bace(knn_normalize=normalize))
    before = method.table
    with torch.no_grad():
        method.teacher.encoder.norm.weight *= 7
        method.teacher.encoder.norm.bias *= 7
    method.before_epoch(method.stages(method.stream[1])[0])
    assert method.table is not before
    assert torch.equal(method.table.neighbours, before.neighbours)
    torch.testing.assert_close(method.table.log_weights, before.log_weights)


def test_weights_of_an_epochs_table_sum_to_one(tiny: Any) -> None:
    table = at_task(tiny, "image", bace()).table
    total = table.log_weight_anchor.exp() + table.log_weights.exp().sum(1)
    torch.testing.assert_close(total, torch.ones_like(total), rtol=1e-12, atol=0)


def test_an_exact_duplicate_gives_a_finite_loss_and_takes_nearly_all_of_the_neighbours_weight(tiny: Any) -> None:
    learned, stream, config = make(tiny, "image", bace(), **{"benchmark.augment": False})
    twins = stream[1].train[:2]
    stream.data.pixels[twins[1]] = stream.data.pixels[twins[0]]  # type: ignore[attr-defined]
    trainer = Trainer(learned, stream, config)
    trainer.learn(stream[0])
    begin(trainer, 1)
    method: Any = learned
    table = method.table
    at = torch.searchsorted(table.anchors, twins)
    assert table.neighbours[at[0], 0] == twins[1]
    assert table.neighbours[at[1], 0] == twins[0]
    assert ((1 - method.W0) - table.log_weights[at, 0].exp() < 1e-4).all()
    assert (table.log_weights[at, 0].exp() <= 1 - method.W0).all()
    assert all(math.isfinite(value) for value in terms_of(method, stream.batch(twins, view=method.now.view())).values())


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        (bace(), {"benchmark.tasks": [2, 1], "benchmark.train_per_class": 1}),  # N = 1
        (bace(effect_new="same"), {"benchmark.train_per_class": 1}),  # one example of each class
        (bace(effect_new="different"), {"benchmark.tasks": [2, 1]}),  # one class
        (bace(effect_new="random"), {"benchmark.tasks": [2, 1], "benchmark.train_per_class": 1}),
    ],
    ids=["one example", "same", "different", "random"],
)
def test_without_any_candidate_the_loss_on_new_data_is_cross_entropy(
    tiny: Any, method: dict[str, Any], changes: dict[str, Any]
) -> None:
    learned = at_task(tiny, "image", method, **changes)
    batch = new_batch(learned, len(learned.stream[1].train))
    assert (learned.table.neighbours == -1).all()
    expected = cross_entropy(logits_of(learned.model, batch), batch.targets.numpy())
    assert terms_of(learned, batch)["new"] == pytest.approx(expected, rel=1e-12)


# -- the six variants of Effect_new (2.6) on five points of the plane, by hand

POINTS = torch.tensor([[0, 0], [1, 0], [3, 0], [7, 0], [0, 2]], dtype=torch.float64)
LABELS = torch.tensor([0, 0, 1, 1, 1])
R5, R13, R53, NONE = 5**0.5, 13**0.5, 53**0.5, math.inf
NEAREST = ([[1, 4], [0, 2], [1, 0], [2, 1], [0, 1]], [[1, 2], [1, 2], [2, 3], [4, 6], [2, R5]])


def found(effect_new: str, features: Tensor = POINTS, epoch: int = 0, **changes: Any) -> tuple[Tensor, Tensor]:
    method: Any = BaCE(effect_new=effect_new, **{"K": 2, **changes})  # type: ignore[arg-type]
    method.now = Position(seed=0, task=1, stage="main", epoch=epoch)
    labels = LABELS if features is POINTS else torch.arange(len(features)) % 3
    result: tuple[Tensor, Tensor] = method.find_neighbours(features, labels)
    return result


@pytest.mark.parametrize(
    ("effect_new", "index", "distance"),
    [
        ("full", *NEAREST),
        ("uniform", *NEAREST),
        ("same", [[1, -1], [0, -1], [4, 3], [2, 4], [2, 3]], [[1, NONE], [1, NONE], [R13, 4], [4, R53], [R13, R53]]),
        ("different", [[4, 2], [2, 4], [1, 0], [1, 0], [0, 1]], [[2, 3], [2, R5], [2, 3], [6, 7], [2, R5]]),
        ("reverse", [[3, 2], [3, 4], [3, 4], [4, 0], [3, 2]], [[7, 3], [6, R5], [4, R13], [R53, 7], [R53, R13]]),
    ],
)
def test_neighbours_of_each_variant_by_hand(effect_new: str, index: list[Any], distance: list[Any]) -> None:
    chosen, lengths = found(effect_new)
    assert chosen.tolist() == index
    torch.testing.assert_close(lengths, torch.tensor(distance, dtype=torch.float64))


def test_random_neighbours_are_distinct_others_at_their_true_distances_and_change_every_epoch() -> None:
    draws = [found("random", epoch=epoch) for epoch in range(40)]
    met = torch.zeros(5, 5)
    for chosen, lengths in draws:
        for i in range(5):
            members = chosen[i].tolist()
            assert i not in members
            assert len(set(members)) == 2
            expected = [float((POINTS[j] - POINTS[i]).norm()) for j in members]
            assert lengths[i].tolist() == pytest.approx(expected)
            met[i, members] += 1
    assert len({str(chosen.tolist()) for chosen, _ in draws}) > 30
    assert torch.equal(draws[0][0], found("random", epoch=0)[0])
    others = ~torch.eye(5, dtype=torch.bool)
    assert (met[others] >= 8).all()  # 20 expected of each, standard deviation 3.2
    assert (met[others] <= 32).all()


def test_uniform_weighs_the_nearest_equally_and_the_other_variants_by_inverse_distance(tiny: Any) -> None:
    for effect_new in ("full", "uniform", "reverse", "random"):
        method = at_task(tiny, "image", bace(effect_new=effect_new))
        shares = method.table.log_weights.exp()
        if effect_new == "uniform":
            torch.testing.assert_close(shares, torch.full_like(shares, 0.4 / 3))
            continue
        stream, table = method.stream, method.table
        with torch.no_grad():
            features = method.teacher(stream.rows(table.anchors, view=method.now.view())).features
        unit = array(features) / np.linalg.norm(array(features), axis=1, keepdims=True)
        place = {row: i for i, row in enumerate(table.anchors.tolist())}
        for i, members in enumerate(table.neighbours.tolist()):
            closeness = np.array([1 / np.linalg.norm(unit[place[j]] - unit[i]) for j in members])
            np.testing.assert_allclose(shares[i].numpy(), 0.4 * closeness / closeness.sum(), rtol=1e-6)


@given(seed=st.integers(0, 10**6), rows=st.integers(2, 12), cap=st.integers(0, 5), K=st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_the_farthest_are_never_the_anchor_nor_outside_the_pool(seed: int, rows: int, cap: int, K: int) -> None:
    features = torch.randn(rows, 3, generator=torch.Generator().manual_seed(seed))
    chosen, lengths = found("reverse", features, knn_pool_cap=cap, K=K)
    pool = set(chosen.flatten().tolist()) - {-1}
    assert len(pool) <= (cap or rows)
    for i in range(rows):
        members = [j for j in chosen[i].tolist() if j >= 0]
        assert i not in members
        assert torch.isinf(lengths[i, len(members) :]).all()
        assert torch.isfinite(lengths[i, : len(members)]).all()


def test_a_capped_pool_is_a_random_part_of_the_candidates_and_the_search_in_it_is_exact() -> None:
    features = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
    pools = []
    for epoch in range(3):
        chosen, lengths = found("full", features, epoch=epoch, knn_pool_cap=6, K=6)
        pool = sorted(set(chosen.flatten().tolist()) - {-1})
        assert len(pool) == 6
        for i in range(30):
            expected = sorted(float((features[j] - features[i]).norm()) for j in pool if j != i)
            assert lengths[i, : len(expected)].tolist() == pytest.approx(expected)
            assert sorted(j for j in chosen[i].tolist() if j >= 0) == [j for j in pool if j != i]
        pools.append(pool)
    assert len({tuple(pool) for pool in pools}) == 3
    assert pools[0] != list(range(6))  # not the first ones in file order


# -- Effect_old (3)


@pytest.mark.parametrize("tau", [1.0, 2.0])
@pytest.mark.parametrize("mode", ["slice", "renorm"])
@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_distillation_and_logit_matching_by_the_formulas(tiny: Any, direction: str, mode: str, tau: float) -> None:
    changes = {"kl_direction": direction, "kl_mode": mode, "kl_tau": tau}
    method = at_task(tiny, "image", bace(alpha=0.5, lambda_mse=2.0, **changes))
    batch = new_batch(method)
    take_step(method, batch)
    with recorded_passes() as passes:
        terms = terms_of(method, batch)
    trained = [p.batch for p in passes if p.training]
    assert len(trained) == 1
    student = logits_of(method.model, trained[0])
    replayed = picked(trained[0], torch.arange(len(batch), len(trained[0])))
    formula = kl_slice if mode == "slice" else kl_renorm
    distilled = tau**2 * formula(student[: len(batch)], logits_of(method.teacher, batch), tau, direction).mean()
    assert terms["distil"] == pytest.approx(0.5 * distilled, rel=1e-9)
    assert terms["replay"] == pytest.approx(cross_entropy(student[len(batch) :], replayed.targets.numpy()), rel=1e-9)
    gap = student[len(batch) :, :2] - logits_of(method.teacher, replayed)
    assert terms["match"] == pytest.approx(2 * (gap**2).mean(), rel=1e-9)


def test_reductions_divide_as_they_say(tiny: Any) -> None:
    """`mean` of the distillation also divides by the number of old classes (here 2). `sum` of the matching does not
    divide by it."""
    plain, other = {}, {}
    for terms, reductions in ((plain, {}), (other, {"kl_reduction": "mean", "mse_reduction": "sum"})):
        method = at_task(tiny, "image", bace(**reductions))
        with torch.no_grad():
            method.model.head.sigma += 1  # the student differs from the teacher
        terms.update(terms_of(method, new_batch(method)))
    assert other["distil"] == pytest.approx(plain["distil"] / 2, rel=1e-9)
    assert other["match"] == pytest.approx(plain["match"] * 2, rel=1e-9)


def test_the_default_distils_as_the_paper_writes_it() -> None:
    """L_KL(S, S0) = sum over the old classes of S log(S / S0), with weight 1. This is KL(student || teacher), in which
    the student's old classes are cut out of its soft-max over all classes."""
    method = BaCE()
    assert (method.kl_direction, method.kl_mode, method.kl_reduction) == ("reverse", "slice", "batchmean")
    assert (method.alpha, method.teacher_head) == (1.0, "old")


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_at_the_first_step_of_a_task_distillation_and_matching_start_from_the_teacher(
    tiny: Any, direction: str
) -> None:
    """The student's old columns are the teacher's, so renormalised KL and MSE are 0, and sliced KL is the
    mean of -log m (forward) or m log m (reverse), where m is the old mass. One step later, both terms have changed."""
    for mode in ("renorm", "slice"):
        method = at_task(tiny, "image", bace(kl_mode=mode, kl_direction=direction))
        batch = new_batch(method)
        old_mass = softmax(logits_of(method.model, batch))[:, :2].sum(1)
        terms = terms_of(method, batch)
        of_mass = -np.log(old_mass) if direction == "forward" else old_mass * np.log(old_mass)
        expected = of_mass.mean() if mode == "slice" else 0.0
        assert terms["distil"] == pytest.approx(expected, abs=1e-12)
        assert terms["match"] == pytest.approx(0.0, abs=1e-20)
        take_step(method, batch)
        after = terms_of(method, batch)
        assert abs(after["distil"] - expected) > 1e-6
        assert after["match"] > 1e-6


def test_the_first_task_is_plain_cross_entropy(tiny: Any) -> None:
    method = at_task(tiny, "image", bace(), task=0)
    batch = new_batch(method)
    with recorded_passes() as passes:
        loss = method.loss(batch)
    assert len(passes) == 1
    assert loss.keys() == {"new"}
    assert torch.equal(loss["new"], F.cross_entropy(method.model(batch).logits, batch.targets))
    assert method.teacher is None


def test_effect_new_in_the_first_task_takes_the_pre_trained_encoder_as_teacher(tiny: Any) -> None:
    method = at_task(tiny, "image", bace(effect_new_first_task=True), task=0)
    batch = new_batch(method)
    teacher = Model(load_encoder(tiny.vit), copy.deepcopy(method.model.head)).double()
    near = neighbourhood(method, batch, teacher)
    terms = terms_of(method, batch)
    assert terms.keys() == {"new"}
    expected = near.loss(logits_of(method.model, batch), near.scores(method.model))
    assert terms["new"] == pytest.approx(expected, rel=1e-9)


def test_effect_new_in_the_first_task_works_with_a_linear_head_too(tiny: Any) -> None:
    method = at_task(tiny, "image", bace(effect_new_first_task=True), task=0, **{"head.kind": "linear"})
    assert math.isfinite(terms_of(method, new_batch(method))["new"])


def test_without_memory_the_loss_is_that_on_new_data_and_a_batch_is_all_new(tiny: Any) -> None:
    method = at_task(tiny, "image", bace(), **{"memory.size": 0})
    assert method.stages(method.stream[1])[0].batch_size == 8
    assert terms_of(method, new_batch(method)).keys() == {"new", "distil"}


def test_with_memory_half_of_a_batch_is_replayed_after_the_first_task(tiny: Any) -> None:
    for task, size in ((0, 8), (1, 4)):
        method = at_task(tiny, "image", bace(), task=task)
        assert method.stages(method.stream[task])[0].batch_size == size
        with recorded_passes() as passes:
            method.loss(new_batch(method))
        assert [len(p.batch) for p in passes if p.training] == [4 + (4 if task else 0)]


def test_terms_of_weight_zero_are_left_out(tiny: Any) -> None:
    method = at_task(tiny, "image", bace(alpha=0.0, lambda_mse=0.0))
    assert terms_of(method, new_batch(method)).keys() == {"new", "replay"}


def test_weights_outside_zero_and_one_are_refused() -> None:
    for wrong in ({"W0": 1.5}, {"W0": -0.1}, {"beta": 2.0}):
        with pytest.raises(ConfigError, match="between 0 and 1"):
            BaCE(**wrong)  # type: ignore[arg-type]


# -- the teacher (4)


def followed(
    tiny: Any, method: dict[str, Any], *, tasks: int = 2, epochs: int = 3
) -> tuple[Any, list[tuple[int, dict[str, Tensor], dict[str, Tensor]]]]:
    """Return a run, and (task, teacher, student) at the beginning of each epoch and at the end of each task."""
    classes = {2: [2, 2], 3: [2, 1, 2]}[tasks]
    learned, stream, config = make(
        tiny, "image", method, **{"benchmark.tasks": classes, "train.epochs": epochs, "benchmark.train_per_class": 5}
    )
    states = []

    def note() -> None:
        if learned.teacher is not None:
            states.append((learned.now.task, weights(learned.teacher), weights(learned.model)))

    before_epoch, after_task = learned.before_epoch, learned.after_task
    learned.before_epoch = lambda stage: (note(), before_epoch(stage))[1]  # type: ignore[method-assign,func-returns-value]
    learned.after_task = lambda task: (note(), after_task(task))[1]  # type: ignore[method-assign,func-returns-value]
    Trainer(learned, stream, config).run()
    return learned, states


OLD_ROWS = "head.blocks.0"
NEW_ROWS = "head.blocks.1"


@pytest.mark.parametrize("beta", [0.9, 0.5])
def test_after_each_epoch_the_teacher_averages_encoder_scale_and_old_rows_and_nothing_else(
    tiny: Any, beta: float
) -> None:
    _, states = followed(tiny, bace(beta=beta))
    assert len(states) == 4  # three epochs, and the end of the task
    for (_, earlier, _), (_, teacher, student) in itertools.pairwise(states[:3]):
        assert set(teacher) == set(student) - {NEW_ROWS}
        assert {OLD_ROWS, "head.sigma"} <= set(teacher)
        for name, value in teacher.items():
            expected = beta * earlier[name] + (1 - beta) * student[name]
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-14)
        moved = [name for name in teacher if not torch.equal(teacher[name], earlier[name])]
        assert OLD_ROWS in moved
        assert "head.sigma" in moved
        assert any(name.startswith("encoder.") for name in moved)
    assert_equal_bits(states[3][1], states[2][1])  # the teacher is not averaged after the last epoch


def test_a_task_starts_with_the_student_of_the_task_before_as_teacher(tiny: Any) -> None:
    _, states = followed(tiny, bace(), tasks=3, epochs=2)
    ends = {task: student for task, _, student in states}
    task, teacher, student = states[3]
    assert task == 2
    assert_equal_bits(teacher, ends[1])
    assert student.keys() - teacher.keys() == {"head.blocks.2"}


def test_teacher_init_ema_goes_on_with_the_averaged_teacher_and_takes_the_rows_it_lacks_from_the_student(
    tiny: Any,
) -> None:
    _, states = followed(tiny, bace(teacher_init="ema", beta=0.5), tasks=3, epochs=2)
    (_, first, _), (_, second, after_one), (_, third, after_two), (task, teacher, _) = states[:4]
    assert task == 2
    for name in first:
        torch.testing.assert_close(second[name], 0.5 * first[name] + 0.5 * after_one[name])
        torch.testing.assert_close(third[name], 0.5 * second[name] + 0.5 * after_two[name])
        assert torch.equal(teacher[name], third[name])
    assert set(teacher) == set(first) | {NEW_ROWS}
    assert torch.equal(teacher[NEW_ROWS], after_two[NEW_ROWS])
    assert not torch.equal(teacher[OLD_ROWS], after_two[OLD_ROWS])


def test_with_beta_zero_the_teacher_is_the_last_epochs_student_exactly(tiny: Any) -> None:
    _, states = followed(tiny, bace(beta=0.0))
    for _, teacher, student in states[1:3]:
        assert_equal_bits(teacher, {name: value for name, value in student.items() if name != NEW_ROWS})


def test_with_beta_one_the_teacher_is_frozen(tiny: Any) -> None:
    _, states = followed(tiny, bace(beta=1.0))
    for _, teacher, _ in states[1:]:
        assert_equal_bits(teacher, states[0][1])
    assert not torch.equal(states[0][2][OLD_ROWS], states[2][2][OLD_ROWS])


def test_a_full_width_teacher_masked_to_the_old_columns_gives_equal_losses(tiny: Any) -> None:
    """The reference also averages the new rows, and only its old columns are used."""
    method = at_task(tiny, "image", bace(beta=0.5))
    full = copy.deepcopy(method.model).requires_grad_(False).eval()
    assert full.head.classes == 4
    batch, stage = new_batch(method), method.stages(method.stream[1])[0]
    for _ in range(3):
        take_step(method, batch)
    method.after_epoch(stage)
    for p, student in zip(full.parameters(), method.model.parameters(), strict=True):
        p.data = 0.5 * p + 0.5 * student.detach()
    method.eval()
    method.before_epoch(stage)
    method.model.train()

    assert method.teacher.head.classes == 2
    with recorded_passes() as passes:
        terms = terms_of(method, batch)
    both = next(p.batch for p in passes if p.training)
    student, teacher = logits_of(method.model, both), logits_of(full, both)
    n = len(batch)
    distilled = kl_slice(student[:n], teacher[:n, :2], direction=method.kl_direction).mean()
    assert terms["distil"] == pytest.approx(distilled, rel=1e-9)
    assert terms["match"] == pytest.approx(((student[n:, :2] - teacher[n:, :2]) ** 2).mean(), rel=1e-9)
    near = neighbourhood(method, batch, full)
    assert terms["new"] == pytest.approx(near.loss(student[:n], near.scores(method.model)), rel=1e-9)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_a_teacher_with_all_classes_is_averaged_whole_and_cut_out_of_its_soft_max_over_all(
    tiny: Any, direction: str
) -> None:
    """With teacher_head = all, S0 is the soft-max over old and new classes, and only the old classes are compared. Its
    new rows start as copies of the student's and are averaged with the rest. Logits are matched only on the old
    columns."""
    method = at_task(tiny, "image", bace(beta=0.5, teacher_head="all", kl_direction=direction))
    assert_equal_bits(weights(method.teacher), weights(method.model))
    start = weights(method.teacher)
    batch, stage = new_batch(method), method.stages(method.stream[1])[0]
    for _ in range(3):
        take_step(method, batch)
    method.after_epoch(stage)
    for name, value in weights(method.teacher).items():
        expected = 0.5 * start[name] + 0.5 * weights(method.model)[name]
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-14)
    method.eval()
    method.before_epoch(stage)
    method.model.train()

    with recorded_passes() as passes:
        terms = terms_of(method, batch)
    both = next(p.batch for p in passes if p.training)
    student, teacher, n = logits_of(method.model, both), logits_of(method.teacher, both), len(batch)
    s, s0 = softmax(student[:n])[:, :2], softmax(teacher[:n])[:, :2]
    first, second = (s0, s) if direction == "forward" else (s, s0)
    assert terms["distil"] == pytest.approx((first * np.log(first / second)).sum(1).mean(), rel=1e-9)
    assert terms["match"] == pytest.approx(((student[n:, :2] - teacher[n:, :2]) ** 2).mean(), rel=1e-9)


def test_a_teacher_with_all_classes_can_go_on_from_task_to_task(tiny: Any) -> None:
    """teacher_init = ema keeps the averaged rows of the previous task's classes. The newest rows start as copies of the
    student's."""
    _, states = followed(tiny, bace(teacher_init="ema", teacher_head="all", beta=0.5), tasks=3, epochs=2)
    (_, averaged, _), (task, teacher, student) = states[2:4]
    assert task == 2
    assert torch.equal(teacher["head.blocks.2"], student["head.blocks.2"])
    for name, value in averaged.items():
        assert torch.equal(teacher[name], value), name


# -- tokens (11.2)


def test_tokens_entity_rows_take_effect_new_and_renormalised_distillation_and_o_rows_the_sliced_one(tiny: Any) -> None:
    """L = mean_E L_new + alpha mean_E KL_renorm + alpha mean_O KL_slice for every kl_mode, and O rows use the direction
    from teacher to student for every kl_direction. Replay uses CE over entities and MSE over all labelled tokens."""
    for mode, direction in (("slice", "reverse"), ("renorm", "forward")):
        method = at_task(tiny, "token", bace(alpha=0.7, kl_mode=mode, kl_direction=direction))
        batch = new_batch(method)
        take_step(method, batch)
        with recorded_passes() as passes:
            terms = terms_of(method, batch)
        both = next(p.batch for p in passes if p.training)
        student, n = logits_of(method.model, both), len(batch)
        teacher = logits_of(method.teacher, batch)
        entity = batch.targets.numpy() != 0
        assert entity.any()
        assert (~entity).any()
        assert teacher.shape[1] == method.now.known == 5  # O, and B- and I- of two types

        near = neighbourhood(method, batch)
        assert near.own == np.flatnonzero(entity).tolist()
        assert terms["new"] == pytest.approx(near.loss(student[:n], near.scores(method.model)), rel=1e-9)
        renorm = kl_renorm(student[:n][entity], teacher[entity], direction=direction).mean()
        sliced = kl_slice(student[:n][~entity], teacher[~entity]).mean()
        assert terms["distil"] == pytest.approx(0.7 * (renorm + sliced), rel=1e-9)

        replayed = picked(both, torch.arange(n, len(both)))
        assert (replayed.targets == 0).any()
        assert (replayed.targets != 0).any()
        rows = torch.cat([method.stream.labels(example[None])[0] for example in both.examples[4:]])
        assert torch.equal(replayed.rows, rows)  # every labelled token of the drawn sentences
        old = replayed.targets.numpy()  # O words of replayed sentences: test_replay_o.py
        expected = cross_entropy(student[n:][old != 0], old[old != 0])
        assert terms["replay"] == pytest.approx(expected, rel=1e-9)
        gap = student[n:, :5] - logits_of(method.teacher, replayed)
        assert terms["match"] == pytest.approx((gap**2).mean(), rel=1e-9)


def test_tokens_anchors_and_pool_are_the_rows_of_new_entities(tiny: Any) -> None:
    method = at_task(tiny, "token", bace())
    rows, targets = method.stream.labels(method.stream[1].train)
    entities = set(rows[targets != 0].tolist())
    assert set(method.table.anchors.tolist()) == entities
    assert set(method.table.neighbours.flatten().tolist()) <= entities
    assert set(rows.tolist()) - entities


def test_tokens_the_first_task_is_cross_entropy_on_all_rows(tiny: Any) -> None:
    method = at_task(tiny, "token", bace(), task=0)
    batch = new_batch(method)
    assert (batch.targets == 0).any()
    terms = terms_of(method, batch)
    assert terms.keys() == {"new"}
    expected = cross_entropy(logits_of(method.model, batch), batch.targets.numpy())
    assert terms["new"] == pytest.approx(expected, rel=1e-12)


def test_tokens_a_row_labelled_o_has_no_cross_entropy_after_the_first_task(tiny: Any) -> None:
    """Without the other terms, the gradient of the logits on O rows is exactly 0."""
    method = at_task(tiny, "token", bace(alpha=0.0), **{"memory.size": 0})
    batch = new_batch(method)
    kept: list[Tensor] = []

    def keep(module: Any, given: Any, logits: Tensor) -> None:
        if logits.requires_grad:
            logits.retain_grad()
            kept.append(logits)

    handle = method.model.head.register_forward_hook(keep)
    loss = method.loss(batch)
    handle.remove()
    assert loss.keys() == {"new"}
    loss["new"].backward()
    gradient = kept[0].grad
    assert gradient is not None
    background = batch.targets == 0
    assert (gradient[background] == 0).all()
    assert (gradient[~background].abs().sum(1) > 0).all()


@pytest.mark.parametrize("memory", [10, 0])
@pytest.mark.parametrize("alpha", [1.0, 0.0])
def test_tokens_a_batch_without_entities_trains_on_what_is_left_and_is_finite(
    tiny: Any, alpha: float, memory: int
) -> None:
    method = at_task(tiny, "token", bace(alpha=alpha), **{"memory.size": memory})
    rows, targets = method.stream.labels(method.stream[1].train)
    batch = method.stream.rows(rows[targets == 0][:5], view=method.now.view())
    loss = method.loss(batch)
    there = {"distil": alpha, "replay": memory, "match": memory, "replay_o": alpha and memory}
    assert loss.keys() == {name for name, weight in there.items() if weight}
    assert all(math.isfinite(term.item()) for term in loss.values())
    if alpha:
        sliced = kl_slice(logits_of(method.model, batch), logits_of(method.teacher, batch)).mean()
        assert loss["distil"].item() == pytest.approx(sliced, rel=1e-9)
