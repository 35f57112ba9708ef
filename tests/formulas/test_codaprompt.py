"""CODA-Prompt's weights are compared with loops over components, and its prompts and its pass with one example at a
time. Gram-Schmidt is checked by its properties. Tests check what a task may change."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from steps import (
    Array,
    array,
    at_stage,
    cross_entropy,
    features_of,
    learned_before,
    logits_of,
    some,
    some_of_all,
    weights,
)
from torch import Tensor

from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.codaprompt import CODAPrompt, Components, attended, orthonormal

SHORT = {"name": "coda-prompt", "tune_epochs": 2, "tune_batch": 6, "tune_lr": 0.05, "components": 3, "length": 4}
SHORT["tune_steps"] = 0


def standing(tiny: Any, modality: str) -> Any:
    """Return a method at the second task, with components far from their initial values."""
    method, _, _ = at_stage(tiny, modality, SHORT, "tune", task=1)
    rng = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in method.model.prompts.parameters():
            p.copy_(torch.randn(p.shape, generator=rng))
    method.zero_grad()
    return method


def weighed(q: Array, K: Array, A: Array) -> Array:
    """Return cos(q * A_k, K_k), component by component."""
    result = [(q * a) @ k / np.linalg.norm(q * a) / np.linalg.norm(k) for k, a in zip(K, A, strict=True)]
    return np.array(result)


def by_hand(method: Any, batch: Batch) -> Tensor:
    """Return the class tokens, computed one example at a time and without padding."""
    encoder, prompts, rows = method.model.encoder, method.model.prompts, []
    P, K, A = (np.concatenate([array(p) for p in parts], 1) for parts in (prompts.P, prompts.K, prompts.A))
    for i, q in enumerate(features_of(encoder, batch)):
        inputs = {key: value[i : i + 1] for key, value in batch.inputs.items()}
        if "attention_mask" in inputs:
            inputs = {key: value[:, : int(inputs["attention_mask"].sum())] for key, value in inputs.items()}
        hidden = encoder.embed(inputs)[0]
        for block in range(2):
            prompt = sum(a * p for a, p in zip(weighed(q, K[block], A[block]), P[block], strict=True))
            keys, values = torch.from_numpy(prompt[None, :2]), torch.from_numpy(prompt[None, 2:])
            hidden = encoder.run_block(block, hidden, None, (keys, values))
        rows.append(encoder.norm(hidden)[0, 0])
    return torch.stack(rows)


# -- the pass


def test_the_weight_of_a_component_is_the_cosine_of_the_attended_query_and_its_key() -> None:
    rng = np.random.default_rng(0)
    q, K, A = (rng.normal(size=(count, 7)) for count in (4, 5, 5))
    found = attended(*(torch.from_numpy(x) for x in (q, K, A)))
    np.testing.assert_allclose(found.numpy(), [weighed(row, K, A) for row in q], atol=1e-12)
    one = attended(torch.tensor([[3.0, 4.0]]), torch.tensor([[2.0, 0.0]]), torch.tensor([[1.0, 1.0]]))
    assert one.tolist() == [[pytest.approx(0.6)]]
    assert attended(torch.tensor([[3.0, 4.0]]), torch.tensor([[2.0, 0.0]]), torch.tensor([[1.0, 0.0]])) == 1


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("modality", ["image", "text"])
def test_the_prompt_of_an_example_is_the_weighted_sum_of_all_tasks_components(
    tiny: Any, modality: str, training: bool
) -> None:
    method = standing(tiny, modality)
    method.model.train(training)
    batch = some_of_all(method)
    features = by_hand(method, batch)
    torch.testing.assert_close(method.model(batch).features, features, atol=1e-10, rtol=0)
    torch.testing.assert_close(method.predict(batch), method.model.head(features), atol=1e-10, rtol=0)


@pytest.mark.parametrize("modality", ["image", "text"])
def test_a_prediction_does_not_depend_on_what_else_is_in_the_batch(tiny: Any, modality: str) -> None:
    method = standing(tiny, modality)
    method.eval()
    batch = some_of_all(method)
    together = method.predict(batch)
    alone = torch.cat([method.predict(batch.pick(torch.tensor([row]))) for row in range(len(batch))])
    torch.testing.assert_close(together, alone, atol=1e-10, rtol=0)


# -- new components


@given(st.integers(0, 12), st.integers(1, 6), st.integers(0, 1000))
def test_new_vectors_are_orthonormal_to_each_other_and_to_the_old_ones(old: int, count: int, seed: int) -> None:
    """After the training of their own task, the old vectors are neither orthogonal nor of length 1."""
    rng = torch.Generator().manual_seed(seed)
    before = torch.randn(old, 18, generator=rng, dtype=torch.float64) * 3
    new = orthonormal(count, before, rng)
    torch.testing.assert_close(new @ new.T, torch.eye(count, dtype=torch.float64), atol=1e-10, rtol=0)
    torch.testing.assert_close(new @ before.T, torch.zeros(count, old, dtype=torch.float64), atol=1e-8, rtol=0)


def test_old_vectors_that_depend_on_each_other_do_not_disturb() -> None:
    one = torch.arange(1.0, 7.0, dtype=torch.float64)
    new = orthonormal(3, torch.stack([one, 2 * one, -one]), torch.Generator().manual_seed(0))
    torch.testing.assert_close(new @ new.T, torch.eye(3, dtype=torch.float64), atol=1e-10, rtol=0)
    assert float((new @ one).abs().max()) < 1e-10


@pytest.mark.parametrize(("old", "count"), [(4, 2), (9, 3), (3, 3), (0, 6)])
def test_where_no_direction_is_left_they_begin_again(old: int, count: int) -> None:
    """In four dimensions, new vectors are orthogonal to the old ones as long as there is room. The next ones are
    orthogonal to each other."""
    rng = torch.Generator().manual_seed(1)
    before = torch.randn(old, 4, generator=rng, dtype=torch.float64)
    new = orthonormal(count, before, rng)
    torch.testing.assert_close(new.norm(dim=1), torch.ones(count, dtype=torch.float64), atol=1e-10, rtol=0)
    room = max(4 - old, 0)
    assert (new[:room] @ before.T).abs().sum() < 1e-8
    again = new[room : room + 4]
    eye = torch.eye(len(again), dtype=torch.float64)
    torch.testing.assert_close(again @ again.T, eye, atol=1e-10, rtol=0)


@pytest.mark.parametrize("modality", ["image", "text"])
def test_a_task_begins_with_components_keys_and_attentions_orthonormal_to_the_trained_ones(
    tiny: Any, modality: str
) -> None:
    method, _, _ = at_stage(tiny, modality, SHORT, "tune", task=1)
    for parts in (method.model.prompts.P, method.model.prompts.K, method.model.prompts.A):
        for block in range(2):
            old, new = (array(p)[block].reshape(3, -1) for p in parts)
            np.testing.assert_allclose(new @ new.T, np.eye(3), atol=1e-10)
            np.testing.assert_allclose(new @ old.T, 0, atol=1e-10)
            assert np.abs(old @ old.T - np.eye(3)).max() > 1e-6  # changed by training
    assert [p.shape for p in method.model.prompts.newest()] == [(2, 3, 4, 16), (2, 3, 16), (2, 3, 16)]


# -- learning


@pytest.mark.parametrize("modality", ["image", "text"])
def test_a_task_changes_nothing_that_was_there_before_it(tiny: Any, modality: str) -> None:
    trainer = learned_before(tiny, modality, SHORT, 1)
    method, first = trainer.method, weights(trainer.method)
    started: dict[str, Tensor] = {}
    grow = method.grow

    def noted(task: Any) -> None:
        grow(task)
        started.update(weights(method))

    method.grow = noted  # type: ignore[method-assign]
    trainer.learn(trainer.stream[1])
    last = weights(method)
    assert all(torch.equal(value, last[name]) for name, value in first.items())
    new = {f"model.{name}.1" for name in ("prompts.P", "prompts.K", "prompts.A", "head.blocks", "head.biases")}
    assert last.keys() - first.keys() == new
    assert all(not torch.equal(last[name], started[name]) for name in new)


def test_the_loss_is_cross_entropy_over_the_new_classes(tiny: Any) -> None:
    method, _, stage = at_stage(tiny, "image", SHORT, "tune", task=1)
    batch = some(method, 5)
    expected = cross_entropy(logits_of(method.model, batch)[:, 2:], batch.targets.numpy() - 2)
    assert float(stage.loss(batch)) == pytest.approx(expected)
    named = {id(p) for group in stage.groups().values() for p in group}
    assert named == {id(p) for p in [*method.model.prompts.newest(), *method.model.head.of(1)]}
    assert not any(p.requires_grad for p in method.model.encoder.parameters())


def test_the_gradient_of_every_part_is_that_of_its_formula(tiny: Any) -> None:
    """The gradient is compared with differences of the loss, which is computed by hand."""
    method = standing(tiny, "image")
    batch = some_of_all(method)
    method.loss(batch).backward()

    def loss() -> float:
        return cross_entropy(array(method.model.head(by_hand(method, batch)))[:, 2:], batch.targets.numpy() - 2)

    for p in method.model.prompts.newest():
        with torch.no_grad():
            before, step = loss(), 1e-6
            p[1, 2].flatten()[3] += step
            slope = (loss() - before) / step
            p[1, 2].flatten()[3] -= step
        assert slope == pytest.approx(float(p.grad[1, 2].flatten()[3]), rel=1e-3, abs=1e-7)


def test_the_published_settings_are_the_default(tiny: Any) -> None:
    method, _, stage = at_stage(tiny, "image", {"name": "coda-prompt", "tune_steps": 0}, "tune", task=0)
    assert (method.components, method.length, method.blocks) == (10, 8, 5)
    assert (stage.optimiser, stage.epochs, stage.batch_size, stage.lr) == ("adam", 20, 128, 0.001)
    assert [stage.schedule(e) for e in (0, 10, 20)] == pytest.approx([1.0, 0.5, 0.0])
    assert stage.weight_decay == 0.0
    prompts = Components(5, 10, 8, 16)
    prompts.grow(torch.Generator().manual_seed(0), torch.device("cpu"))
    prefixes, _ = prompts(torch.randn(2, 16))
    assert {block: (keys.shape, values.shape) for block, (keys, values) in prefixes.items()} == dict.fromkeys(
        range(5), ((2, 4, 16), (2, 4, 16))
    )
    assert sum(p.numel() for p in prompts.parameters()) == prompts.size


@pytest.mark.parametrize(
    "wrong",
    [
        {"components": 0},
        {"length": 0},
        {"length": 5},
        {"blocks": 0},
        {"tune_epochs": 0},
        {"tune_lr": 0.0},
        {"tune_batch": 0},
        {"tune_steps": -1},
    ],
)
def test_impossible_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        CODAPrompt(**wrong)
