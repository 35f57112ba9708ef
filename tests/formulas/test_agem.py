"""A-GEM's projection is compared with hand-computed numbers and, on separately computed gradients of the real network,
with numpy. The loss on memory is checked by finite differences. Tests check what the reference is drawn from. Where
nothing conflicts it equals SEQ bit for bit."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from steps import Array, array, assert_equal_bits, at_task, make, recorded_passes, some, weights

from bace.core.trainer import Trainer
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.agem import AGEM, project


def gradient(method: Any, batch: Batch) -> Array:
    """Return the gradient of the cross-entropy over all classes seen, with all parameters in one vector."""
    loss = F.cross_entropy(method.model(batch).logits, batch.targets)
    return np.concatenate([array(g).ravel() for g in torch.autograd.grad(loss, list(method.model.parameters()))])


def before_step(method: Any, batch: Batch, conflict: bool) -> tuple[Array, Array, Array]:
    """Return the gradient before `before_step`, the gradient after it, and the reference gradient. The sign of the
    first is chosen so that it conflicts with the reference, or does not."""
    reference = method.reference()
    g_ref = gradient(method, reference)
    sign = -1.0 if (gradient(method, batch) @ g_ref < 0) != conflict else 1.0
    method.model.zero_grad()
    (sign * method.loss(batch)).backward()
    g = held(method)
    np.testing.assert_allclose(g, sign * gradient(method, batch), rtol=1e-4, atol=1e-6)
    with recorded_passes() as passes:
        method.before_step(batch)
    assert [(p.training, p.batch.examples.tolist()) for p in passes] == [(True, reference.examples.tolist())]
    return g, held(method), g_ref


def held(method: Any) -> Array:
    return np.concatenate([array(p.grad).ravel() for p in method.model.parameters()])


# -- the projection


@pytest.mark.parametrize(
    ("g", "g_ref", "expected"),
    [
        ([[1.0, -2.0]], [[0.0, 1.0]], [[1.0, 0.0]]),
        ([[3.0, 1.0]], [[-1.0, 1.0]], [[2.0, 2.0]]),  # -2 / 2
        ([[1.0], [-4.0]], [[1.0], [1.0]], [[2.5], [-2.5]]),  # one vector in two tensors: -3 / 2
        ([[1.0], [-4.0]], [[5.0], [1.0]], [[1.0], [-4.0]]),  # 5 - 4 > 0, although the second tensors conflict
        ([[1.0, 0.0]], [[0.0, 1.0]], [[1.0, 0.0]]),  # 0 is not a conflict
        ([[1.0, 2.0]], [[0.0, 0.0]], [[1.0, 2.0]]),  # the memory gives no gradient
        ([[-1.0, -2.0]], [[1.0, 2.0]], [[0.0, 0.0]]),
    ],
)
def test_projection_by_hand(g: list[list[float]], g_ref: list[list[float]], expected: list[list[float]]) -> None:
    projected = [torch.tensor(part) for part in g]
    reference = [torch.tensor(part) for part in g_ref]
    project(projected, reference)
    for found, wanted in zip(projected, expected, strict=True):
        torch.testing.assert_close(found, torch.tensor(wanted))
    assert [part.tolist() for part in reference] == g_ref


@pytest.mark.parametrize("modality", ["image", "text", "token"])
def test_a_gradient_against_the_memory_loses_that_part_and_nothing_else(tiny: Any, modality: str) -> None:
    """The result is g - (g.g_ref / g_ref.g_ref) g_ref. For tokens the gradients are over all words of both batches,
    including words labelled O."""
    method = at_task(tiny, modality, {"name": "a-gem"}, **{"train.replay_o": "label"})
    g, projected, g_ref = before_step(method, some(method), conflict=True)
    assert g @ g_ref < 0
    np.testing.assert_allclose(projected, g - g @ g_ref / (g_ref @ g_ref) * g_ref, rtol=1e-3, atol=1e-5)
    size = np.linalg.norm(g) * np.linalg.norm(g_ref)
    assert abs(projected @ g_ref) < 1e-5 * size < -g @ g_ref
    assert np.linalg.norm(projected) < np.linalg.norm(g)


@pytest.mark.parametrize("modality", ["image", "text", "token"])
def test_a_gradient_with_the_memory_keeps_every_bit(tiny: Any, modality: str) -> None:
    method = at_task(tiny, modality, {"name": "a-gem"})
    g, kept, g_ref = before_step(method, some(method), conflict=False)
    assert g @ g_ref > 0
    np.testing.assert_array_equal(kept, g)


def test_a_small_step_leaves_the_loss_on_memory_where_it_was(tiny: Any) -> None:
    """The difference quotient along the step is 0 with the projection and positive without it."""
    method = at_task(tiny, "image", {"name": "a-gem"})
    g, projected, _ = before_step(method, some(method), conflict=True)
    memory = method.reference()
    slopes = {name: slope(method, step, memory) for name, step in (("plain", g), ("projected", projected))}
    assert slopes["plain"] > 0.1
    assert abs(slopes["projected"]) < 1e-6 * slopes["plain"]


@torch.no_grad()
def slope(method: Any, step: Array, batch: Batch, size: float = 1e-5) -> float:
    """Return d/ds L(theta - s step) on this batch, at s = 0."""
    losses, start = [], weights(method.model)
    for sign in (1, -1):
        at = 0
        for p in method.model.parameters():
            p -= sign * size * torch.from_numpy(step[at : at + p.numel()]).view(p.shape)
            at += p.numel()
        losses.append(F.cross_entropy(method.model(batch).logits, batch.targets).item())
        method.model.load_state_dict(start)
    return (losses[0] - losses[1]) / (2 * size)


def test_parameters_that_the_step_does_not_move_have_no_part_in_it(tiny: Any) -> None:
    method = at_task(tiny, "image", {"name": "a-gem", "step": "plain"})
    batch = some(method)
    method.model.zero_grad()
    method.loss(batch).backward()
    still = method.model.encoder.norm.weight
    still.grad = None
    moving = [p for p in method.model.parameters() if p is not still]
    g = np.concatenate([array(p.grad).ravel() for p in moving])
    with recorded_passes() as passes:
        method.before_step(batch)
    reference = passes[0].batch
    loss = F.cross_entropy(method.model(reference).logits, reference.targets)
    g_ref = np.concatenate([array(x).ravel() for x in torch.autograd.grad(loss, moving)])
    assert still.grad is None
    assert g @ g_ref < 0
    projected = np.concatenate([array(p.grad).ravel() for p in moving])
    np.testing.assert_allclose(projected, g - g @ g_ref / (g_ref @ g_ref) * g_ref, rtol=1e-3, atol=1e-5)


# -- the reference


def test_reference_is_the_whole_memory_or_so_many_of_it_anew_at_each_step(tiny: Any) -> None:
    for size, expected in ((256, 10), (10, 10), (4, 4)):
        method = at_task(tiny, "image", {"name": "a-gem", "reference_size": size})
        stored = set(method.memory.examples.tolist())
        assert len(stored) == 10
        drawn = []
        for step in range(5):
            method.now.step = step
            drawn.append(method.reference().examples.tolist())
        assert all(len(set(ids)) == len(ids) == expected for ids in drawn)
        assert {e for ids in drawn for e in ids} <= stored
        assert len({frozenset(ids) for ids in drawn}) == (1 if expected == 10 else 5)


def test_reference_shows_earlier_tasks_only_in_fresh_views(tiny: Any) -> None:
    method = at_task(tiny, "image", {"name": "a-gem"}, task=2, **{"benchmark.tasks": [2, 1, 2]})
    assert set(method.reference().targets.tolist()) == {0, 1, 2}
    views = {}
    for step in (0, 1):
        method.now.step = step
        reference = method.reference()
        order = reference.examples.argsort()
        views[step] = reference.inputs["pixel_values"][order]
    assert not torch.equal(views[0], views[1])


def test_reference_pass_has_a_dropout_of_its_own(tiny: Any) -> None:
    method = at_task(tiny, "text", {"name": "a-gem"})
    names: list[str] = []
    method.model.register_forward_pre_hook(
        lambda _, arguments, options: names.append(options.get("name", "main")), with_kwargs=True
    )
    batch = some(method)
    method.loss(batch).backward()
    method.before_step(batch)
    assert names == ["main", "reference"]


def test_steps_take_whole_batches_of_new_data_and_no_momentum_unless_asked(tiny: Any) -> None:
    for momentum in (None, 0.5):
        options = {"name": "a-gem"} if momentum is None else {"name": "a-gem", "momentum": momentum}
        method, stream, config = make(tiny, "image", options)
        sizes: list[int] = []
        trainer = Trainer(method, stream, config)
        seen, loss = [], method.loss

        def noted(batch: Batch, seen: Any = seen, loss: Any = loss, trainer: Any = trainer, sizes: Any = sizes) -> Any:
            seen.append({group["momentum"] for group in trainer.optimiser.param_groups})
            sizes.append(len(batch))
            return loss(batch)

        method.loss = noted  # type: ignore[method-assign]
        trainer.run()
        assert config.train.momentum == 0.9
        assert seen == [{momentum or 0.0}] * len(seen)
        assert sizes == [8, 8, 4] * 4  # two tasks of 20 examples, two epochs each


@pytest.mark.parametrize(
    ("options", "settings", "rates"),
    [
        ({}, {}, [0.1, 0.2]),  # (1 - 0) / (1 - 0.9) of 0.01 and, for the head, of 0.02
        ({"step": "plain"}, {}, [0.01, 0.02]),
        ({"momentum": 0.5}, {}, [0.05, 0.1]),
        ({"momentum": 0.9}, {}, [0.01, 0.02]),
        ({}, {"train.momentum": 0.5}, [0.02, 0.04]),
        ({}, {"train.optimiser": "adamw"}, [0.01, 0.02]),  # AdamW keeps its own averages
    ],
)
def test_a_matched_step_goes_as_far_as_the_runs_with_its_momentum(
    tiny: Any, options: dict[str, Any], settings: dict[str, Any], rates: list[float]
) -> None:
    settings = {"train.lr": 0.01, "train.head_lr": 0.02, **settings}
    method, stream, config = make(tiny, "image", {"name": "a-gem", **options}, **settings)
    trainer = Trainer(method, stream, config)
    trainer.learn(stream[0])
    assert trainer.optimiser is not None
    assert sorted({group["lr"] for group in trainer.optimiser.param_groups}) == pytest.approx(rates)


def test_under_a_constant_gradient_matched_steps_end_where_those_with_momentum_do() -> None:
    """n steps of lr / (1 - m) go as far as n steps with momentum m, except for lr m / (1 - m)^2, which momentum loses
    at the start."""
    lr, m, n = 0.01, 0.9, 200
    ends = []
    for options in ({"lr": lr, "momentum": m}, {"lr": lr / (1 - m)}):
        p = torch.zeros((), dtype=torch.float64, requires_grad=True)
        optimiser = torch.optim.SGD([p], **options)
        for _ in range(n):
            p.grad = torch.ones_like(p)
            optimiser.step()
        ends.append(p.item())
    assert ends[1] == pytest.approx(-n * 0.1, abs=1e-9)
    assert ends[0] - ends[1] == pytest.approx(lr * m / (1 - m) ** 2, abs=1e-6)


# -- nothing conflicts


def end(tiny: Any, modality: str, options: dict[str, Any], same: bool = False, **changes: Any) -> Any:
    method, stream, config = make(tiny, modality, options, **changes)
    if same:  # the reference is the batch itself

        def remember(batch: Batch) -> Any:
            method.reference = lambda: batch  # type: ignore[method-assign]
            return AGEM.loss(method, batch)  # type: ignore[arg-type]

        method.loss = remember  # type: ignore[method-assign]
    results = Trainer(method, stream, config).run()
    return results.matrix, weights(method.model)


@pytest.mark.parametrize("modality", ["image", "text", "token"])
@pytest.mark.parametrize("case", ["empty memory", "no reference", "same batch"])
def test_without_a_conflict_it_is_seq_bit_for_bit(tiny: Any, modality: str, case: str) -> None:
    seq = end(tiny, modality, {"name": "seq"}, **{"train.momentum": 0.0})
    options = {"name": "a-gem", "step": "plain", **({"reference_size": 0} if case == "no reference" else {})}
    changes = {"memory.size": 0} if case == "empty memory" else {"train.replay_o": "label"}
    found = end(tiny, modality, options, same=case == "same batch", **changes)
    assert found[0] == seq[0]
    assert_equal_bits(found[1], seq[1])


def test_with_conflicts_it_is_not_seq(tiny: Any) -> None:
    """In its first task it equals SEQ."""
    one = {"benchmark.tasks": [2]}
    assert_equal_bits(
        end(tiny, "image", {"name": "a-gem", "step": "plain"}, **one)[1],
        end(tiny, "image", {"name": "seq"}, **{**one, "train.momentum": 0.0})[1],
    )
    agem, seq = (end(tiny, "image", {"name": name}, **{"train.momentum": 0.0})[1] for name in ("a-gem", "seq"))
    assert not torch.equal(agem["encoder.norm.weight"], seq["encoder.norm.weight"])


@pytest.mark.parametrize("wrong", [{"reference_size": -1}, {"momentum": -0.1}, {"momentum": 1.0}])
def test_values_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    name, value = next(iter(wrong.items()))
    with pytest.raises(ConfigError, match=rf"{name} \({value}\)"):
        AGEM(**wrong)
