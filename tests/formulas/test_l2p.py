"""L2P's selection of prompts is compared with brute force, its prompted pass with a block-by-block composition on ViT
and BERT, and its loss with numpy. Tests check what may and may not get a gradient."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from steps import Array, array, at_task, cross_entropy, make, recorded_passes, weights
from torch import Tensor

from bace.core.trainer import Trainer
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.l2p import L2P

OPTIONS = {"name": "l2p", "recipe": "cifar100", "pool": 6, "length": 3, "top": 2}


def some(method: Any, count: int = 5, task: int | None = None) -> Batch:
    task = method.now.task if task is None else task
    found: Batch = method.stream.batch(method.stream[task].train[:count])
    return found


def standing(tiny: Any, modality: str, task: int = 1, **options: Any) -> Any:
    """Return a method at a task, with different prompts and keys, so that inputs choose differently."""
    method = at_task(tiny, modality, {**OPTIONS, **options}, task=task)
    rng = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in method.model.pool.parameters():
            p.copy_(torch.randn(p.shape, generator=rng))
        keys, features = method.model.pool.keys, method.model.encoder(some(method, 6).inputs)[:, 0]
        keys[:3] = features[:3]  # each is the nearest key of one input
    method.zero_grad()  # clear what the last step of the previous task left
    return method


def queries(method: Any, batch: Batch) -> Array:
    """Return the class tokens of the frozen encoder, without prompts."""
    with torch.no_grad():
        return array(method.model.encoder(batch.inputs)[:, 0])


def cosines(method: Any, batch: Batch) -> Array:
    q, k = queries(method, batch), array(method.model.pool.keys)
    result: Array = (q / np.linalg.norm(q, axis=1, keepdims=True)) @ (k / np.linalg.norm(k, axis=1, keepdims=True)).T
    return result


def nearest(method: Any, batch: Batch) -> list[list[int]]:
    return [sorted(range(6), key=lambda j: -row[j])[:2] for row in cosines(method, batch).tolist()]


def by_hand(method: Any, batch: Batch, chosen: list[list[int]]) -> Tensor:
    """Pass one input at a time, without padding: prompts and its own tokens go through the blocks, and the result is
    the mean over the prompts."""
    encoder, pool, rows = method.model.encoder, method.model.pool, []
    for i, index in enumerate(chosen):
        inputs = {key: value[i : i + 1] for key, value in batch.inputs.items()}
        if "attention_mask" in inputs:
            length = int(inputs["attention_mask"].sum())
            inputs = {key: value[:, :length] for key, value in inputs.items()}
        hidden = encoder.embed(inputs)[0]
        hidden = torch.cat([pool.prompts[index[0]][None], pool.prompts[index[1]][None], hidden], 1)
        for block in encoder.blocks:
            hidden = block(hidden, None)
        rows.append(encoder.norm(hidden)[0, :6].mean(0))
    return torch.stack(rows)


# -- the pass


@pytest.mark.parametrize("modality", ["image", "text"])
def test_inputs_take_the_prompts_with_the_nearest_keys_before_all_their_tokens(tiny: Any, modality: str) -> None:
    method = standing(tiny, modality)
    batch = some(method)
    chosen = nearest(method, batch)
    assert len({tuple(sorted(index)) for index in chosen}) > 1
    with torch.no_grad():
        out, expected = method.model(batch), by_hand(method, batch, chosen)
    torch.testing.assert_close(out.features, expected, atol=1e-5, rtol=1e-4)
    found = np.sort(array(out.match), axis=1)
    np.testing.assert_allclose(
        found, np.sort(np.take_along_axis(cosines(method, batch), np.array(chosen), 1)), atol=1e-5
    )
    logits = array(expected) @ array(method.model.head.weight).T + np.concatenate(
        [array(b) for b in method.model.head.biases]
    )
    np.testing.assert_allclose(array(out.logits), logits, atol=1e-4)


def test_the_query_does_not_depend_on_the_prompts(tiny: Any) -> None:
    method = standing(tiny, "image")
    batch = some(method)
    with torch.no_grad():
        before = method.model(batch)
        method.model.pool.prompts.mul_(-3)
        after = method.model(batch)
    assert torch.equal(before.match, after.match)
    assert not torch.allclose(before.features, after.features)


@pytest.mark.parametrize("vote", [False, True])
def test_a_prediction_does_not_depend_on_what_else_is_in_the_batch(tiny: Any, vote: bool) -> None:
    method = standing(tiny, "image", vote=vote)
    method.eval()
    batch = some(method, 6)
    together = method.predict(batch)
    alone = torch.cat([method.predict(method.stream.batch(batch.examples[i : i + 1])) for i in range(6)])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_with_a_vote_all_inputs_of_a_training_batch_take_the_most_wanted_prompts(tiny: Any) -> None:
    method = standing(tiny, "image", vote=True)
    found = torch.tensor(
        [[0.9, 0.8, 0.1, 0.0, 0.0, 0.0], [0.0, 0.8, 0.1, 0.9, 0.0, 0.0], [0.0, 0.1, 0.0, 0.9, 0.8, 0.0]]
    )
    method.model.train()
    assert method.model.choose(found).tolist() == [[1, 3]] * 3  # twice each; prompts 0 and 4 once
    method.model.eval()
    assert method.model.choose(found).tolist() == [[0, 1], [3, 1], [3, 4]]


def test_the_frozen_encoder_drops_nothing_in_training(tiny: Any) -> None:
    method = at_task(tiny, "text", OPTIONS, **{"backbone": tiny.bert})
    batch = some(method)
    assert method.model.training
    assert method.model.has_dropout
    one, other = (method.model(batch, name=name).features for name in ("main", "other"))
    assert torch.equal(one, other)
    assert torch.equal(one, method.model.eval()(batch).features)


# -- the loss


@pytest.mark.parametrize("modality", ["image", "text"])
def test_the_loss_is_cross_entropy_over_the_new_classes_less_the_cosines_of_the_chosen(
    tiny: Any, modality: str
) -> None:
    method = standing(tiny, modality, gamma=0.5)
    batch = some(method)
    with recorded_passes() as passes:
        loss = method.loss(batch)
    assert len(passes) == 1
    with torch.no_grad():
        logits = array(method.model(batch).logits)
    assert logits.shape[1] == 4
    assert loss["new"].item() == pytest.approx(cross_entropy(logits[:, 2:], batch.targets.numpy() - 2), rel=1e-4)
    found = cosines(method, batch)
    pulled = np.mean([sum(found[i, j] for j in index) for i, index in enumerate(nearest(method, batch))])
    assert loss["pull"].item() == pytest.approx(-0.5 * pulled, rel=1e-4)
    method.gamma = 0.0
    assert set(method.loss(batch)) == {"new"}


def test_only_chosen_prompts_and_keys_and_the_new_rows_get_a_gradient(tiny: Any) -> None:
    method = standing(tiny, "image")
    nudge = torch.Generator().manual_seed(0)
    with torch.no_grad():
        method.model.head.blocks[1].copy_(torch.randn(2, 16, generator=nudge))  # rows of zeros would stop the gradient
    batch = some(method)
    sum(method.loss(batch).values()).backward()
    used = {j for index in nearest(method, batch) for j in index}
    assert 2 <= len(used) < 6
    pool, head = method.model.pool, method.model.head
    for j in range(6):
        assert bool(pool.prompts.grad[j].any()) == bool(pool.keys.grad[j].any()) == (j in used), j
    assert not head.blocks[0].grad.any()
    assert not head.biases[0].grad.any()
    assert head.blocks[1].grad.any(1).all()
    assert all(p.grad is None for p in method.model.encoder.parameters())


def test_the_gradient_of_the_keys_is_the_pull_alone(tiny: Any) -> None:
    """The choice itself is not differentiable. The reference is finite differences of the pull term."""
    method = standing(tiny, "image", gamma=2.0)
    batch = some(method)
    sum(method.loss(batch).values()).backward()
    chosen, found = nearest(method, batch), method.model.pool.keys.grad
    q, keys, step = queries(method, batch), array(method.model.pool.keys), 1e-5

    def pull(k: Array) -> float:
        total = [q[i] @ k[j] / np.linalg.norm(q[i]) / np.linalg.norm(k[j]) for i, own in enumerate(chosen) for j in own]
        return -2.0 * sum(total) / len(chosen)

    for j, d in ((0, 0), (1, 7), (2, 15)):
        moved = keys.copy()
        moved[j, d] += step
        assert float(found[j, d]) == pytest.approx((pull(moved) - pull(keys)) / step, abs=1e-4)


# -- training


@pytest.mark.parametrize("modality", ["image", "text"])
def test_training_changes_prompts_keys_and_head_and_nothing_else(tiny: Any, modality: str) -> None:
    method, stream, config = make(tiny, modality, OPTIONS)
    before = weights(method.model)
    trainer = Trainer(method, stream, config)
    trainer.learn(stream[0])
    first = weights(method.model.head)
    trainer.learn(stream[1])
    after = weights(method.model)
    changed = {name for name in before if not torch.equal(after[name], before[name])}
    assert changed == {"pool.prompts", "pool.keys"}
    assert all(torch.equal(method.model.head.state_dict()[name], value) for name, value in first.items())
    assert all(value.any() for value in first.values())
    assert method.model.head.blocks[1].any()


def test_the_head_starts_at_zero_and_the_pool_just_above(tiny: Any) -> None:
    method = at_task(tiny, "image", {"name": "l2p", "recipe": "cifar100"}, task=0)
    assert not any(p.any() for p in method.model.head.parameters())
    assert method.model.pool.prompts.shape == (10, 10, 16)
    assert method.model.pool.keys.shape == (10, 16)
    for p in method.model.pool.parameters():
        assert float(p.min()) >= 0
        assert 0.009 < float(p.max()) < 0.01


def test_adam_has_a_rate_scaled_to_the_batch_and_its_own_clipping(tiny: Any) -> None:
    method = at_task(tiny, "image", OPTIONS)
    (stage,) = method.stages(method.stream[1])
    assert stage.optimiser == "adam"
    assert stage.lr == pytest.approx(0.03 * 8 / 256)
    assert stage.clip == 1.0


# -- prompts that belong to a task


def test_under_a_prompt_mask_each_task_trains_its_own_prompts_from_copies_of_the_last(tiny: Any) -> None:
    options = {**OPTIONS, "pool": 5, "prompt_mask": True}
    method, stream, config = make(tiny, "image", options, **{"benchmark.tasks": [2, 1, 2]})
    trainer = Trainer(method, stream, config)
    prompts = [method.model.pool.prompts.detach().clone()]
    for task in stream:
        trainer.learn(task)
        prompts.append(method.model.pool.prompts.detach().clone())
    moved = [(new != old).flatten(1).any(1).tolist() for old, new in itertools.pairwise(prompts)]
    assert moved[0] == [True, True, False, False, False]
    assert moved[1] == [False, False, True, True, False]
    assert sum(moved[2]) >= 2  # the fifth prompt alone is not enough for a third task, so inputs choose
    trainer = Trainer(*make(tiny, "image", options)[:2], config)
    trainer.learn(stream[0])
    method = trainer.method
    trainer.enter(stream[1])
    method.before_task(stream[1])
    assert torch.equal(method.model.pool.prompts[2:4], method.model.pool.prompts[:2])


def test_each_recipe_is_what_the_authors_published_and_every_value_of_it_can_be_replaced() -> None:
    """The recipes are configs/five_datasets_l2p and configs/cifar100_l2p of google-research/l2p."""

    def values(**options: Any) -> tuple[Any, ...]:
        method = L2P(**options)
        return method.pool, method.length, method.top, method.gamma, method.prompt_mask, method.lr, method.clip

    assert values(recipe="5-datasets") == values() == (20, 10, 4, 0.5, True, 0.03, 1.0)
    assert values(recipe="cifar100") == (10, 10, 4, 1.0, False, 0.03, 1.0)
    assert values(pool=8, gamma=0.0, prompt_mask=False) == (8, 10, 4, 0.0, False, 0.03, 1.0)
    assert values(recipe="cifar100", prompt_mask=True, top=2) == (10, 10, 2, 1.0, True, 0.03, 1.0)


@pytest.mark.parametrize("recipe", ["5-datasets", "cifar100"])
def test_in_the_recipe_for_cifar100_a_task_changes_the_prompts_of_the_task_before(tiny: Any, recipe: str) -> None:
    method, stream, config = make(tiny, "image", {"name": "l2p", "recipe": recipe})
    trainer, moved = Trainer(method, stream, config), []
    for task in stream:
        before = method.model.pool.prompts.detach().clone()
        trainer.learn(task)
        moved.append((method.model.pool.prompts.detach() != before).flatten(1).any(1))
    assert int(moved[0].sum()) >= 4
    assert bool((moved[0] & moved[1]).any()) == (recipe == "cifar100")


def test_what_a_task_must_take_is_taken_by_all(tiny: Any) -> None:
    method = standing(tiny, "image", prompt_mask=True)
    batch = some(method)
    expected = cosines(method, batch)[:, 2:4].sum(1).mean()
    assert float(method.loss(batch)["pull"]) == pytest.approx(-expected, rel=1e-4)
    with torch.no_grad():
        features = method.model(batch, chosen=torch.tensor([2, 3])).features
        torch.testing.assert_close(features, by_hand(method, batch, [[2, 3]] * 5), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "wrong", [{"top": 21}, {"pool": 3}, {"top": 0}, {"length": 0}, {"gamma": -1.0}, {"lr": 0.0}, {"clip": -1.0}]
)
def test_impossible_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        L2P(**wrong)
