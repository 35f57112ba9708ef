"""EWC's Fisher information is compared with closed forms of soft-max regression (head, bias and last LayerNorm of the
real network), and its penalty, gradient and merge over tasks with the equations. Without penalty it equals SEQ bit for
bit."""

import warnings
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
    softmax,
    some,
    weights,
)

import bace.methods.parts.fisher
from bace.core.trainer import Trainer
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.ewc import EWC

LINEAR = {"head.kind": "linear"}
pytestmark = pytest.mark.filterwarnings("ignore:EWC")  # the tiny streams use a high learning rate


def learned(tiny: Any, modality: str, tasks: int = 1, method: dict[str, Any] | None = None, **changes: Any) -> Any:
    """Return a method that has just finished its last task."""
    made, stream, config = make(tiny, modality, {"name": "ewc", **(method or {})}, **{**LINEAR, **changes})
    trainer = Trainer(made, stream, config)
    for task in range(tasks):
        trainer.learn(stream[task])
    return made


def by_name(method: Any, values: torch.Tensor, new: str = "none") -> dict[str, Array]:
    """Split the values into the parameters of the model, in its order, without the rows whose name ends in `new`."""
    found, at = {}, 0
    for name, p in method.model.named_parameters():
        if p.requires_grad and not name.endswith(new):
            found[name] = array(values[at : at + p.numel()].view(p.shape))
            at += p.numel()
    assert at == len(values)
    return found


def closed_form(method: Any, batch: Batch, first: int = 0) -> dict[str, Array]:
    """Return E[(p - y)^2 x^2] and similar means for everything that depends only on a row's feature h, where z = W h +
    b and h = w n + v (the last LayerNorm). dz = p - y; dW = dz h, db = dz, dv = W'dz, dw = W'dz n."""
    with torch.no_grad():
        out = method.model(batch)
    h, z = array(out.features), array(out.logits)[:, first:]
    error = softmax(z) - np.eye(z.shape[1])[batch.targets.numpy() - first]
    error = np.concatenate([np.zeros((len(error), first)), error], 1)  # (rows, classes)
    pulled = error @ array(method.model.head.weight)  # (rows, width)
    if method.stream.modality.name == "image":
        norm, prefix = method.model.encoder.norm, "encoder.norm"
    else:
        norm, prefix = method.model.encoder.blocks[-1].output.LayerNorm, "encoder.blocks.1.output.LayerNorm"
    normed = (h - array(norm.bias)) / array(norm.weight)
    rows, biases, start = {}, {}, 0
    for i, block in enumerate(method.model.head.blocks):
        own = error[:, start : start + len(block)]
        rows[f"head.blocks.{i}"] = (own[:, :, None] ** 2 * h[:, None] ** 2).mean(0)
        biases[f"head.biases.{i}"] = (own**2).mean(0)
        start += len(block)
    return {
        **rows,
        **biases,
        f"{prefix}.bias": (pulled**2).mean(0),
        f"{prefix}.weight": ((pulled * normed) ** 2).mean(0),
    }


def assert_close(found: dict[str, Array], expected: dict[str, Array]) -> None:
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-3, atol=1e-4 * values.max(), err_msg=name)


# -- the Fisher information


@pytest.mark.parametrize("modality", ["image", "text", "token"])
def test_fisher_is_the_mean_squared_gradient_of_each_row(tiny: Any, modality: str) -> None:
    """For tokens the rows are words, including words labelled O. Dropout is off, although the backbone has dropout."""
    changes = {} if modality == "image" else {"backbone": tiny.bert}
    method = learned(tiny, modality, **changes)
    batch = method.stream.batch(method.stream[0].train)
    if modality == "token":
        assert 0 < int((batch.targets == 0).sum()) < len(batch)
    assert_close(by_name(method, method.fisher), closed_form(method, batch))


def test_fisher_with_labels_of_the_model_would_be_that_of_logistic_regression(tiny: Any) -> None:
    """For two classes, sum_y p(y) F(y) = p (1 - p) h^2. This shows that F depends on the label of the row and on no
    other label."""
    method = learned(tiny, "image")
    row = method.stream[0].train[:1]
    batch = method.stream.batch(row)
    p = softmax(logits_of(method.model, batch))[0]
    h = array(method.model(batch).features)[0]
    expected = 0.0
    for label in (0, 1):
        method.stream.targets[row] = label
        fisher = bace.methods.parts.fisher.fisher_diagonal(method.model, method.stream, row, method.cross_entropy)
        expected += p[label] * array(fisher["head.blocks.0"])
    np.testing.assert_allclose(expected, np.tile(p[0] * p[1] * h**2, (2, 1)), rtol=1e-4)


def test_fisher_of_every_parameter_by_a_pass_for_each_row(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes the case in which there is room for the gradients of only three rows at a time."""
    monkeypatch.setattr(bace.methods.parts.fisher, "ROOM", 3 * 14_000)
    method = learned(tiny, "token", **{"benchmark.train_per_class": 2, "head.kind": "cosine"})
    rows, _ = method.stream.labels(method.stream[0].train)
    named = {name: p for name, p in method.model.named_parameters() if p.requires_grad}
    assert 11_000 < sum(p.numel() for p in named.values()) < 14_000
    expected = dict.fromkeys(named, 0.0)
    for row in rows[:, None]:
        one = method.stream.rows(row)
        loss = torch.nn.functional.cross_entropy(method.model(one).logits, one.targets)
        for name, g in zip(named, torch.autograd.grad(loss, list(named.values())), strict=True):
            expected[name] += array(g) ** 2 / len(rows)
    found = by_name(method, method.fisher)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-8, atol=1e-18, err_msg=name)


def test_fisher_takes_so_many_rows_at_random_and_none_twice(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    rows_of = bace.methods.parts.fisher.Stream.rows

    def noted(stream: Any, rows: torch.Tensor, **options: Any) -> Batch:
        read.extend(rows.tolist())
        assert not options.get("view")
        return rows_of(stream, rows, **options)

    monkeypatch.setattr(bace.methods.parts.fisher.Stream, "rows", noted)
    method = learned(tiny, "image", method={"fisher_samples": 7})
    assert len(set(read)) == len(read) == 7
    assert read != sorted(read)
    assert_close(by_name(method, method.fisher), closed_form(method, method.stream.batch(torch.tensor(read))))


@pytest.mark.parametrize("span", ["seen", "new"])
def test_fisher_of_tasks_is_averaged_and_has_the_span_of_the_cross_entropy(tiny: Any, span: str) -> None:
    """F <- (F_t + t F) / (t + 1), and F = 0 for the rows of new classes. F_t does not include the penalty."""
    method, stream, config = make(
        tiny, "image", {"name": "ewc", "span": span}, **LINEAR, **{"benchmark.tasks": [2, 1, 2]}
    )
    trainer = Trainer(method, stream, config)
    merged: dict[str, Array] = {}
    for t, task in enumerate(stream):
        trainer.learn(task)
        new = closed_form(method, stream.batch(task.train), task.classes.start if span == "new" else 0)
        merged = {name: (values + t * merged.get(name, 0.0)) / (t + 1) for name, values in new.items()}
        assert_close(by_name(method, method.fisher), merged)
        assert_equal_bits({"anchor": method.anchor}, {"anchor": flat(method)})


def flat(method: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in method.model.parameters() if p.requires_grad])


def test_frozen_parameters_have_no_fisher_and_no_anchor(tiny: Any) -> None:
    method = learned(tiny, "image", **{"backbone.freeze": 1})
    sizes = [p.numel() for p in method.model.parameters() if p.requires_grad]
    assert sum(sizes) < sum(p.numel() for p in method.model.parameters())
    assert len(method.fisher) == len(method.anchor) == sum(sizes)


# -- the penalty


@pytest.mark.parametrize("modality", ["image", "text", "token"])
def test_penalty_and_its_gradient_are_zero_at_the_start_of_a_task(tiny: Any, modality: str) -> None:
    method = at_task(tiny, modality, {"name": "ewc"})
    batch = some(method)
    method.model.zero_grad()
    terms, first = method.loss(batch), 0 if modality == "token" else 2  # the default span is the new classes
    expected = cross_entropy(logits_of(method.model, batch)[:, first:], batch.targets.numpy() - first)
    assert terms["new"].item() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert terms["penalty"].item() == 0
    terms["penalty"].backward()
    assert not any(p.grad.any() for p in method.model.parameters() if p.grad is not None)


@pytest.mark.parametrize("head", ["linear", "cosine"])
def test_penalty_is_quadratic_and_its_gradient_is_lambda_f_times_the_way_gone(tiny: Any, head: str) -> None:
    method, stream, config = make(
        tiny, "image", {"name": "ewc", "lambda_ewc": 30.0, "max_pull": 0.0}, **{"head.kind": head}
    )
    trainer = Trainer(method, stream, config)
    trainer.learn(stream[0])
    start = weights(method.model)
    begin(trainer, 1)
    fisher = by_name(method, method.fisher, new=".1")
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in method.model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=rng)
    method.model.zero_grad()
    penalty = method.loss(some(method))["penalty"]
    penalty.backward()
    value = 0.0
    for name, p in method.model.named_parameters():
        if name.endswith(".1"):  # the new classes' rows (and biases) are free
            assert p.grad is None or not p.grad.any()
            continue
        gone = array(p) - array(start[name])
        value += 30.0 / 2 * (fisher[name] * gone**2).sum()
        np.testing.assert_allclose(array(p.grad), 30.0 * fisher[name] * gone, rtol=1e-4, atol=1e-7, err_msg=name)
    assert value > 0.01
    assert penalty.item() == pytest.approx(value, rel=1e-4)


def test_the_default_weight_is_the_papers() -> None:
    assert EWC().lambda_ewc == 5000


# -- where a gradient step would overshoot


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({"train.lr": 0.01}, 1 / (200 * 0.01)),
        ({"train.lr": 0.01, "train.head_lr": 0.04}, 1 / (200 * 0.04)),
        ({"train.lr": 0.04, "train.head_lr": 0.01}, 1 / (200 * 0.04)),
        ({"train.lr": 0.01, "train.optimiser": "adamw"}, np.inf),
        ({"train.lr": 0.0}, np.inf),
    ],
)
def test_fisher_is_cut_where_a_step_of_sgd_would_go_beyond_the_anchor(
    tiny: Any, settings: dict[str, Any], limit: float
) -> None:
    method = at_task(tiny, "image", {"name": "ewc", "lambda_ewc": 200.0}, **settings)
    method.fisher = torch.logspace(-3, 3, len(method.fisher))
    kept = method.fisher.clone()
    with torch.no_grad():
        for p in method.model.parameters():
            p += 0.01
    method.model.zero_grad()
    method.loss(some(method))["penalty"].backward()
    gradient = torch.cat([p.grad.flatten() for name, p in method.model.named_parameters() if not name.endswith(".1")])
    expected = 200 * 0.01 * np.minimum(array(kept), limit)
    np.testing.assert_allclose(array(gradient), expected, rtol=1e-3)
    assert torch.equal(method.fisher, kept)  # the Fisher information that is merged into later tasks is not cut


@pytest.mark.parametrize(("max_pull", "stays"), [(1.0, True), (0.0, False)])
def test_the_cut_keeps_steps_with_momentum_from_diverging(tiny: Any, max_pull: float, stays: bool) -> None:
    method = at_task(tiny, "image", {"name": "ewc", "max_pull": max_pull})
    method.fisher = torch.full_like(method.fisher, 1.0)  # lambda F lr = 5000 * 0.05
    with torch.no_grad():
        for p in method.model.parameters():
            p += 0.01
    optimiser = torch.optim.SGD(method.model.parameters(), lr=0.05, momentum=0.9)
    batch, start = some(method), method.loss(some(method))["penalty"].item()
    for _ in range(30):
        optimiser.zero_grad()
        penalty = method.loss(batch)["penalty"]
        penalty.backward()
        optimiser.step()
    assert bool(penalty.item() < start) == stays


def test_a_cut_is_told_with_its_size_and_a_gentle_penalty_is_silent(tiny: Any) -> None:
    with pytest.warns(UserWarning, match=r"EWC: after task 1 lambda F lr is up to .* cut .* of \d+ parameters") as told:
        method = learned(tiny, "image", method={"lambda_ewc": 1e6})
    largest = float(method.fisher.max()) * 1e6 * 0.05
    cut = int((method.fisher * 1e6 * 0.05 > 1).sum())
    assert f"up to {largest:.3g}," in str(told[0].message)
    assert f"for {cut} of {len(method.fisher)}" in str(told[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learned(tiny, "image", method={"lambda_ewc": 1e-3})
        learned(tiny, "image", method={"lambda_ewc": 1e6, "max_pull": 0.0})


# -- without penalty


@pytest.mark.parametrize("span", ["seen", "new"])
@pytest.mark.parametrize("modality", ["image", "text", "token"])
def test_ewc_without_penalty_is_seq_bit_for_bit(tiny: Any, modality: str, span: str) -> None:
    ends = []
    for options in ({"name": "seq"}, {"name": "ewc", "lambda_ewc": 0.0}):
        method, stream, config = make(tiny, modality, {**options, "span": span})
        results = Trainer(method, stream, config).run()
        ends.append((results.matrix, weights(method.model)))
    assert ends[0][0] == ends[1][0]
    assert_equal_bits(ends[0][1], ends[1][1])
    assert len(method.fisher) == 0  # none is computed


def test_the_first_task_has_no_penalty(tiny: Any) -> None:
    method = at_task(tiny, "image", {"name": "ewc"}, task=0)
    assert list(method.loss(some(method))) == ["new"]


@pytest.mark.parametrize("wrong", [{"lambda_ewc": -1.0}, {"fisher_samples": 0}, {"max_pull": -2.0}])
def test_values_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    name, value = next(iter(wrong.items()))
    with pytest.raises(ConfigError, match=rf"{name} +\({value}\)"):
        EWC(**wrong)
