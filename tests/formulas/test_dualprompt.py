"""DualPrompt's selection of an E-prompt and its loss are compared with numpy, and its pass with a block-by-block
composition on one example at a time. Tests check what a task may change, and that results do not depend on the rest of
a batch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from steps import Array, array, at_stage, cross_entropy, features_of, learned_before, make, some, some_of_all, weights
from torch import Tensor

from bace.core.trainer import Trainer
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.dualprompt import DualPrompt, GeneralAndExpert

SHORT = {"name": "dualprompt", "tune_epochs": 2, "tune_batch": 6, "tune_steps": 0, "g_length": 2, "e_length": 3}


def standing(tiny: Any, modality: str, **options: Any) -> Any:
    """Return a method at the second task, with different prompts and keys, so that examples choose differently."""
    method, _, _ = at_stage(tiny, modality, {**SHORT, **options}, "tune", task=1)
    rng = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in method.model.prompts.parameters():
            p.copy_(torch.randn(p.shape, generator=rng))
        features = torch.from_numpy(features_of(method.model.encoder, some_of_all(method)))
        for key, mean in zip(method.model.prompts.keys, (features[:2].mean(0), features[2:].mean(0)), strict=True):
            key.copy_(mean - features.mean(0))
        method.model.head.blocks[1].copy_(torch.randn(2, 16, generator=rng))  # rows of zeros would stop the gradient
    method.zero_grad()
    return method


def cosines(method: Any, batch: Batch) -> Array:
    q, k = features_of(method.model.encoder, batch), np.stack([array(key) for key in method.model.prompts.keys])
    result: Array = (q / np.linalg.norm(q, axis=1, keepdims=True)) @ (k / np.linalg.norm(k, axis=1, keepdims=True)).T
    return result


def by_hand(method: Any, batch: Batch, chosen: list[int]) -> Tensor:
    """Return the class tokens, computed one example at a time and without padding. The G-prompt is put before the keys
    and values of block 1, and the E-prompt before those of block 2."""
    encoder, prompts, rows = method.model.encoder, method.model.prompts, []
    for i, task in enumerate(chosen):
        inputs = {key: value[i : i + 1] for key, value in batch.inputs.items()}
        if "attention_mask" in inputs:
            inputs = {key: value[:, : int(inputs["attention_mask"].sum())] for key, value in inputs.items()}
        hidden = encoder.embed(inputs)[0]
        for block, prompt in ((0, prompts.general[0]), (1, prompts.expert[task][0])):
            hidden = encoder.run_block(block, hidden, None, (prompt[0][None], prompt[1][None]))
        rows.append(encoder.norm(hidden)[0, 0])
    return torch.stack(rows)


@pytest.mark.parametrize("modality", ["image", "text"])
def test_an_example_is_predicted_with_the_g_prompt_and_the_e_prompt_of_the_nearest_key(
    tiny: Any, modality: str
) -> None:
    method = standing(tiny, modality)
    method.eval()
    batch = some_of_all(method)
    nearest = cosines(method, batch).argmax(1).tolist()
    assert set(nearest) == {0, 1}
    out, features = method.model(batch), by_hand(method, batch, nearest)
    torch.testing.assert_close(out.features, features, atol=1e-10, rtol=0)
    torch.testing.assert_close(method.predict(batch), method.model.head(features), atol=1e-10, rtol=0)
    np.testing.assert_allclose(array(out.match)[:, 0], cosines(method, batch).max(1), atol=1e-12)


@pytest.mark.parametrize("modality", ["image", "text"])
def test_in_training_all_examples_take_the_e_prompt_of_the_task(tiny: Any, modality: str) -> None:
    method = standing(tiny, modality)
    batch = some_of_all(method)
    out = method.model(batch)
    torch.testing.assert_close(out.features, by_hand(method, batch, [1] * len(batch)), atol=1e-10, rtol=0)
    np.testing.assert_allclose(array(out.match)[:, 0], cosines(method, batch)[:, 1], atol=1e-12)


@pytest.mark.parametrize("modality", ["image", "text"])
def test_the_loss_is_cross_entropy_over_the_new_classes_less_the_cosine_with_the_key_of_the_task(
    tiny: Any, modality: str
) -> None:
    method = standing(tiny, modality, pull=0.5)
    batch = some_of_all(method)
    loss = method.loss(batch)
    logits = array(method.model.head(by_hand(method, batch, [1] * len(batch))))[:, 2:]
    assert float(loss["new"]) == pytest.approx(cross_entropy(logits, batch.targets.numpy() - 2))
    assert float(loss["pull"]) == pytest.approx(-0.5 * cosines(method, batch)[:, 1].mean())


@pytest.mark.parametrize("modality", ["image", "text"])
def test_a_prediction_does_not_depend_on_what_else_is_in_the_batch(tiny: Any, modality: str) -> None:
    method = standing(tiny, modality)
    method.eval()
    batch = some_of_all(method)
    together = method.predict(batch)
    alone = torch.cat([method.predict(batch.pick(torch.tensor([row]))) for row in range(len(batch))])
    torch.testing.assert_close(together, alone, atol=1e-10, rtol=0)


def test_the_query_does_not_depend_on_the_prompts(tiny: Any) -> None:
    method = standing(tiny, "image")
    batch = some(method)
    with torch.no_grad():
        before = method.model(batch)
        method.model.prompts.general.mul_(-3)
        after = method.model(batch)
    assert torch.equal(before.match, after.match)
    assert not torch.allclose(before.features, after.features)


@pytest.mark.parametrize("modality", ["image", "text"])
def test_a_task_changes_the_g_prompt_its_e_prompt_its_key_and_its_rows_and_nothing_else(
    tiny: Any, modality: str
) -> None:
    trainer = learned_before(tiny, modality, SHORT, 1)
    method, first = trainer.method, weights(trainer.method)
    trainer.learn(trainer.stream[1])
    last = weights(method)
    changed = {name for name in first if not torch.equal(first[name], last[name])}
    assert changed == {"model.prompts.general"}
    new = {f"model.{name}" for name in ("prompts.expert.1", "prompts.keys.1", "head.blocks.1", "head.biases.1")}
    assert last.keys() - first.keys() == new
    assert not torch.equal(last["model.prompts.expert.1"], last["model.prompts.expert.0"])
    assert all(last[name].any() for name in new)


def test_an_e_prompt_starts_as_the_one_before_and_its_key_is_new(tiny: Any) -> None:
    method, _, _ = at_stage(tiny, "image", SHORT, "tune", task=1)
    prompts = method.model.prompts
    assert torch.equal(prompts.expert[1], prompts.expert[0])
    assert prompts.expert[1] is not prompts.expert[0]
    assert not torch.equal(prompts.keys[1], prompts.keys[0])
    assert not any(p.any() for p in method.model.head.of(1))
    method, _, _ = at_stage(tiny, "image", {"name": "dualprompt", "tune_steps": 0}, "tune", task=0)
    for p in method.model.prompts.parameters():
        assert float(p.min()) >= 0
        assert 0.005 < float(p.max()) < 0.01


def test_only_what_the_stage_names_gets_a_gradient_and_the_key_that_of_the_pull(tiny: Any) -> None:
    method = standing(tiny, "image")
    (stage,) = method.stages(method.stream[1])
    batch = some_of_all(method)
    sum(method.loss(batch).values()).backward()
    prompts, head = method.model.prompts, method.model.head
    named = [prompts.general, prompts.expert[1], prompts.keys[1], head.blocks[1], head.biases[1]]
    assert {id(p) for group in stage.groups().values() for p in group} == {id(p) for p in named}
    assert all(p.grad.any() for p in named)
    assert not any(p.grad.any() for p in (prompts.expert[0], prompts.keys[0], head.blocks[0]) if p.grad is not None)
    assert all(p.grad is None for p in method.model.encoder.parameters())
    q, k = features_of(method.model.encoder, batch), array(prompts.keys[1])
    unit, size = k / np.linalg.norm(k), np.linalg.norm(k)
    expected = -np.mean([(u - (u @ unit) * unit) / size for u in (x / np.linalg.norm(x) for x in q)], 0)
    np.testing.assert_allclose(array(prompts.keys[1].grad), expected, atol=1e-12)


def test_g_prompts_are_in_the_lowest_blocks_and_e_prompts_above_them(tiny: Any, tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTModel

    shape = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 8, "patch_size": 4}
    for depth, general, expert in ((12, 2, 3), (4, 2, 2), (3, 1, 2), (1, 0, 1)):
        folder = tmp_path / str(depth)
        ViTModel(ViTConfig(num_hidden_layers=depth, **shape), add_pooling_layer=False).save_pretrained(folder)
        method = make(tiny, "image", {"name": "dualprompt"}, backbone=str(folder))[0]
        prompts: Any = method.model.prompts
        assert (len(prompts.general), prompts.shape) == (general, (expert, 2, 5, 16))
    prompts = GeneralAndExpert(2, 3, 4, 6, 16, torch.Generator().manual_seed(0))
    prompts.grow(torch.Generator().manual_seed(1))
    prefixes, match = prompts(torch.randn(7, 16))
    assert {block: keys.shape[1] for block, (keys, _) in prefixes.items()} == {0: 4, 1: 4, 2: 6, 3: 6, 4: 6}
    assert match.shape == (7, 1)
    for block, (keys, values) in prefixes.items():
        own = prompts.general[block] if block < 2 else prompts.expert[0][block - 2]
        assert torch.equal(keys, own[0].expand(7, -1, -1))
        assert torch.equal(values, own[1].expand(7, -1, -1))


def test_without_a_g_prompt_a_task_changes_nothing_of_another(tiny: Any) -> None:
    method, stream, config = make(tiny, "image", {**SHORT, "g_blocks": 0})
    trainer = Trainer(method, stream, config)
    trainer.learn(stream[0])
    first = weights(method)
    trainer.learn(stream[1])
    last = weights(method)
    assert all(torch.equal(value, last[name]) for name, value in first.items())
    assert last["model.prompts.expert.1"].shape == (2, 2, 3, 16)


def test_the_published_settings_are_the_default(tiny: Any) -> None:
    method, _, stage = at_stage(tiny, "image", {"name": "dualprompt", "tune_steps": 0}, "tune", task=0)
    assert (method.g_blocks, method.e_blocks, method.g_length, method.e_length) == (2, 3, 5, 5)
    assert (stage.optimiser, stage.epochs, stage.batch_size, stage.clip) == ("adam", 5, 24, 1.0)
    assert (method.pull, stage.weight_decay) == (1.0, 0.0)
    assert stage.lr == pytest.approx(0.03 * 24 / 256)
    assert {stage.schedule(e) for e in (0, 2.5, 5)} == {1.0}


@pytest.mark.parametrize(
    "wrong",
    [
        {"g_blocks": -1},
        {"e_blocks": 0},
        {"g_length": 0},
        {"e_length": 0},
        {"pull": -1.0},
        {"clip": -1.0},
        {"tune_epochs": 0},
        {"tune_lr": 0.0},
        {"tune_batch": 0},
        {"tune_steps": -1},
    ],
)
def test_impossible_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        DualPrompt(**wrong)
