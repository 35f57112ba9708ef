"""SD-LoRA's change of the weights is compared with directions and magnitudes merged by hand. With one task it equals
LoRA bit for bit. Tests check what a task may change."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from steps import array, at_stage, cross_entropy, learned_before, logits_of, make, some, weights

from bace.core.trainer import Trainer
from bace.errors import ConfigError
from bace.methods.sdlora import Decoupled, SDLoRA
from bace.models.lora import LoRA

SHORT = {"name": "sd-lora", "tune_epochs": 2, "tune_batch": 6, "tune_lr": 0.1, "tune_steps": 0, "rank": 3}
PROJECTIONS = {
    "image": ("attention.q_proj", "attention.v_proj"),
    "text": ("attention.self.query", "attention.self.value"),
}


@pytest.mark.parametrize("modality", ["image", "text"])
def test_earlier_changes_are_normalised_directions_and_the_newest_is_as_it_is(tiny: Any, modality: str) -> None:
    """dW = a_1 B_1 A_1 / (|B_1| |A_1|) + a_2 B_2 A_2 / (|B_2| |A_2|) + a_3 B_3 A_3 is added to the weights."""
    trainer = learned_before(tiny, modality, SHORT, 3, **{"benchmark.tasks": [2, 1, 2]})
    method, lora = trainer.method, trainer.method.lora
    with torch.no_grad():
        for p in [*lora.sets.parameters(), *lora.magnitudes]:
            p += torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
        lora.magnitudes[1] *= -0.5
    magnitudes = [float(a) for a in lora.magnitudes]
    merged = make(tiny, modality, {"name": "seq"})[0].model.encoder.eval()
    with torch.no_grad():
        sites = [block.get_submodule(path) for block in merged.blocks for path in PROJECTIONS[modality]]
        for site, linear in enumerate(sites):
            for t, a in enumerate(magnitudes):
                A, B = array(lora.sets[t][site].A), array(lora.sets[t][site].B)
                size = 1.0 if t == 2 else np.sqrt((A**2).sum()) * np.sqrt((B**2).sum())
                linear.weight += torch.from_numpy(a * B @ A / size)
        batch = some(method, 6)
        found, expected = method.model.eval().encoder(batch.inputs), merged(batch.inputs)
        lengths = batch.inputs["attention_mask"].sum(1).tolist() if modality == "text" else [found.shape[1]] * 6
        for one, other, length in zip(found, expected, lengths, strict=True):
            torch.testing.assert_close(one[:length], other[:length], atol=1e-10, rtol=0)


def test_with_one_task_and_magnitude_one_it_is_lora_bit_for_bit(tiny: Any) -> None:
    encoder = make(tiny, "image", {"name": "seq"})[0].model.encoder.eval()
    one, other = copy.deepcopy(encoder), copy.deepcopy(encoder)
    plain, decoupled = LoRA(one, 3), Decoupled(other, 3, 1.0)
    for lora in (plain, decoupled):
        lora.grow(torch.Generator().manual_seed(1), torch.device("cpu"))
        with torch.no_grad():
            for p in lora.parameters_of(0):
                p += torch.randn(p.shape, generator=torch.Generator().manual_seed(2))
    pixels = {"pixel_values": torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(3))}
    assert torch.equal(one(pixels), other(pixels))
    assert not torch.equal(one(pixels), encoder(pixels))


def test_a_task_changes_its_own_change_all_magnitudes_and_its_head_rows(tiny: Any) -> None:
    method, stream, config = make(tiny, "image", SHORT, **{"train.weight_decay": 0.1, "head.kind": "linear"})
    trainer = Trainer(method, stream, config)
    trainer.learn(stream[0])
    first = weights(method)
    trainer.learn(stream[1])
    last = weights(method)
    changed = {name for name in first if not torch.equal(first[name], last[name])}
    assert changed == {"model.encoder.magnitudes.0"}
    new = {name: value for name, value in last.items() if name not in first}
    assert {name.rpartition(".")[0].split(".1")[0] for name in new} == {
        "model.encoder.additions",
        "model.encoder.magnitudes",
        "model.head.blocks",
        "model.head.biases",
    }
    assert all(value.any() for value in new.values())


def test_magnitudes_start_at_the_same_value_in_every_task(tiny: Any) -> None:
    method, _, _ = at_stage(tiny, "image", SHORT, "tune", task=1)
    assert [float(a) for a in method.lora.magnitudes] == pytest.approx([0.8, 0.8])
    method, _, _ = at_stage(tiny, "image", {**SHORT, "magnitude": 0.3}, "tune", task=1)
    assert [float(a) for a in method.lora.magnitudes] == pytest.approx([0.3, 0.3])


def test_the_loss_is_over_the_new_classes_and_gives_no_gradient_to_what_is_fixed(tiny: Any) -> None:
    method, trainer, stage = at_stage(tiny, "image", SHORT, "tune", task=1)
    batch = some(method, 5)
    expected = cross_entropy(logits_of(method.model, batch)[:, 2:], batch.targets.numpy() - 2)
    assert float(stage.loss(batch)) == pytest.approx(expected)
    groups = stage.groups()
    assert {id(p) for p in groups["lora"]} == {
        id(p) for p in [*method.lora.sets[1].parameters(), *method.lora.magnitudes]
    }
    assert [id(p) for p in groups["head"]] == [id(p) for p in method.model.head.parameters()]
    assert trainer.stream.background is None


def test_the_published_settings_are_the_default(tiny: Any) -> None:
    method, _, stage = at_stage(tiny, "image", {"name": "sd-lora", "tune_steps": 0}, "tune", task=0)
    assert (stage.epochs, stage.batch_size, stage.lr, stage.momentum, stage.weight_decay) == (20, 128, 0.008, 0.9, 0.0)
    assert stage.optimiser == "sgd"
    assert {stage.schedule(e) for e in (0, 10, 19)} == {1.0}
    assert method.lora.sets[0][0].A.shape == (10, 16)


def test_a_change_that_never_moved_is_no_division_by_zero(tiny: Any) -> None:
    encoder = make(tiny, "image", {"name": "seq"})[0].model.encoder.eval()
    plain = copy.deepcopy(encoder)
    lora = Decoupled(encoder, 3, 0.8)
    for seed in range(2):
        lora.grow(torch.Generator().manual_seed(seed), torch.device("cpu"))
    pixels = {"pixel_values": torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(3))}
    assert torch.equal(encoder(pixels), plain(pixels))


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"tune_epochs": 0}, {"tune_lr": 0.0}, {"tune_steps": -1}])
def test_impossible_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SDLoRA(**wrong)
