"""APER's tuning is compared with a plain loop with torch's own SGD, and its means and cosines with numpy on the frozen
and the tuned features. Tests check what each task may change."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from steps import (
    Array,
    array,
    at_stage,
    changed_in_stages,
    features_of,
    learned_before,
    make,
    recorded_passes,
    some,
    weights,
)

from bace.core.trainer import Trainer
from bace.errors import ConfigError
from bace.methods.aper import APER
from bace.methods.parts.prototypes import class_means, cosines
from bace.models.parallel_adapters import ParallelAdapters
from bace.models.prompts import DeepPrompts
from bace.models.scale_shift import ScalesAndShifts

SHORT = {"name": "aper", "tune_epochs": 3, "tune_batch": 6}
TUNINGS = {"adapter": ParallelAdapters, "prompt": DeepPrompts, "scale-shift": ScalesAndShifts}


def both_features(method: Any, plain: Any, batch: Any) -> Array:
    """Return the features of an encoder that was never changed beside those of the tuned encoder."""
    return np.concatenate([features_of(plain, batch), features_of(method.model.encoder.eval(), batch)], 1)


def untouched(tiny: Any, modality: str) -> Any:
    return make(tiny, modality, {"name": "seq"})[0].model.encoder.eval()


def unit(x: Array) -> Array:
    result: Array = x / np.linalg.norm(x, axis=1, keepdims=True)
    return result


# -- means and scores


@pytest.mark.parametrize("tuning", TUNINGS)
@pytest.mark.parametrize("modality", ["image", "text"])
def test_classes_are_told_apart_by_the_cosine_with_their_means_of_frozen_and_tuned_features(
    tiny: Any, modality: str, tuning: str
) -> None:
    trainer = learned_before(tiny, modality, {**SHORT, "tuning": tuning}, 2)
    method, stream = trainer.method, trainer.stream
    assert isinstance(method.additions, TUNINGS[tuning])
    plain, means = untouched(tiny, modality), []
    with stream.licence("a test", torch.arange(len(stream.data))):
        for task in stream:
            batch = stream.batch(task.train)
            features = both_features(method, plain, batch)
            means += [features[batch.targets.numpy() == c].mean(0) for c in task.classes]
        asked = stream.batch(torch.cat([task.test for task in stream]))
        expected = unit(both_features(method, plain, asked)) @ unit(np.stack(means)).T
        np.testing.assert_allclose(array(method.statistics.means), np.stack(means), atol=1e-10)
        np.testing.assert_allclose(array(method.predict(asked)), expected, atol=1e-10)
    frozen, tuned = np.split(both_features(method, plain, asked), 2, axis=1)
    assert np.abs(frozen - tuned).max() > 1e-6


def test_without_concatenation_the_tuned_features_alone_count(tiny: Any) -> None:
    trainer = learned_before(tiny, "image", {**SHORT, "concatenate": False}, 2)
    method = trainer.method
    batch = some(method, 8)
    features = features_of(method.model.encoder.eval(), batch)
    expected = unit(features) @ unit(array(method.statistics.means)).T
    assert method.statistics.means.shape == (4, 16)
    np.testing.assert_allclose(array(method.predict(batch)), expected, atol=1e-10)


def test_the_mean_of_a_class_is_that_of_its_rows_and_zero_without_any() -> None:
    features = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 0.0]])
    found = class_means(features, torch.tensor([2, 4, 2]), range(2, 5))
    assert found.tolist() == [[3.0, 1.0], [0.0, 0.0], [3.0, 4.0]]


def test_a_class_without_examples_is_never_predicted() -> None:
    scores = cosines(torch.tensor([[-1.0, 0.0], [3.0, 4.0]]), torch.tensor([[2.0, 0.0], [0.0, 0.0], [0.0, 5.0]]))
    expected = torch.tensor([[-1.0, -math.inf, 0.0], [0.6, -math.inf, 0.8]])
    torch.testing.assert_close(scores, expected)


# -- tuning


def test_the_first_task_is_tuned_as_a_plain_loop_would(tiny: Any) -> None:
    """Scale and shift have no dropout. The loop uses SGD with momentum and weight decay (of matrices), a cosine
    schedule, and the cross-entropy of sigma cos(f, w), in which sigma starts at 1."""
    method, trainer, stage = at_stage(tiny, "image", {**SHORT, "tuning": "scale-shift"}, "tune", task=0)
    assert isinstance(trainer, Trainer)
    model = copy.deepcopy(method.model)
    assert float(model.head.sigma) == 1.0
    with recorded_passes() as passes:
        trainer.train(stage, 2)
    batches = [passed.batch for passed in passes if passed.training]
    steps = -(-20 // 6)
    assert len(batches) == 3 * steps

    tuned = [p for name, p in model.named_parameters() if "additions" in name or "head" in name]
    matrices, vectors = ([p for p in tuned if (p.ndim > 1) == matrix] for matrix in (True, False))
    optimiser = torch.optim.SGD(
        [{"params": matrices, "weight_decay": 5e-4}, {"params": vectors, "weight_decay": 0.0}], lr=0.01, momentum=0.9
    )
    for step, batch in enumerate(batches):
        for group in optimiser.param_groups:
            group["lr"] = 0.01 * (1 + math.cos(math.pi * step / len(batches))) / 2
        features = model.encoder(batch.inputs)[:, 0]
        cosine = F.normalize(features, dim=1) @ F.normalize(model.head.blocks[0], dim=1).T
        loss = F.cross_entropy(model.head.sigma * cosine, batch.targets)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(method.model.state_dict()[name], value, atol=1e-10, rtol=0)
    assert not torch.equal(model.head.sigma, torch.tensor(1.0))


@pytest.mark.parametrize("tuning", TUNINGS)
def test_only_what_was_added_is_tuned_and_only_in_the_first_task(tiny: Any, tuning: str) -> None:
    method, stream, config = make(tiny, "image", {**SHORT, "tuning": tuning}, **{"train.weight_decay": 0.1})
    before = weights(method.model.encoder)
    changed = changed_in_stages(Trainer(method, stream, config))
    added = {f"model.encoder.{name}" for name in weights(method.model.encoder) if name not in before}
    keys = {f"model.encoder.additions.0.{site}.shift" for site in (2, 10)}  # shifting keys does not change attention
    assert changed[0, "tune"] | keys == added | {"model.head.sigma", "model.head.blocks.0"} | keys
    statistics = {"statistics.means", "statistics.counts"}
    assert changed[0, "main"] == changed[1, "main"] == statistics
    assert set(changed) == {(0, "tune"), (0, "main"), (1, "main")}


def test_the_published_settings_are_the_default(tiny: Any) -> None:
    method, _, stage = at_stage(tiny, "image", {"name": "aper"}, "tune", task=0)
    assert (stage.epochs, stage.batch_size, stage.lr, stage.momentum, stage.weight_decay) == (20, 48, 0.01, 0.9, 5e-4)
    assert stage.optimiser == "sgd"
    assert [stage.schedule(e) for e in (0, 10, 20)] == pytest.approx([1, 0.5, 0])
    adapter = method.additions.sets[0][0]
    assert (adapter.down.out_features, adapter.scale, adapter.dropout.p) == (64, 0.1, 0.1)


def test_early_stopping_watches_the_head_that_is_tuned(tiny: Any) -> None:
    method, trainer, stage = at_stage(tiny, "image", SHORT, "tune", task=0, **{"benchmark.val_fraction": 0.2})
    task = trainer.stream[0]
    with trainer.stream.licence("a test", task.valid):
        batch = trainer.stream.batch(task.valid)
        method.model.eval()
        logits = float(method.model.head.sigma) * unit(features_of(method.model.encoder, batch))
        logits = logits @ unit(array(method.model.head.blocks[0])).T
        expected = F.cross_entropy(torch.from_numpy(logits), batch.targets)
        assert method.validation_loss(task.valid) == pytest.approx(float(expected))
    assert stage.name == "tune"


@pytest.mark.parametrize("wrong", [{"tune_epochs": 0}, {"tune_lr": 0.0}, {"tune_batch": 0}])
def test_impossible_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        APER(**wrong)
