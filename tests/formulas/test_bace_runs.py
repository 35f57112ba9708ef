"""Whole runs of BaCE equal simpler methods when its terms are off. Tests also check that draws are paired between
variants, and the bias correction (docs/bace.md 7)."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from steps import array, assert_equal_bits, recorded_passes, softmax, weights
from torch import Tensor

import bace
from bace.config.parse import config_from
from bace.core.trainer import Trainer
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.experiments.assemble import assemble

# -- equalities


@pytest.mark.parametrize("modality", ["image", "text"])  # the text encoder has dropout
def test_without_its_terms_and_without_memory_bace_is_seq_bit_for_bit(tiny: Any, modality: str) -> None:
    changes = {"memory.size": 0, "train.lr": 0.05}
    seq = bace.run(tiny.settings(modality, method="seq", **changes))
    off = bace.run(tiny.settings(modality, method={"name": "bace", "alpha": 0, "W0": 1}, **changes))
    assert seq.matrix == off.matrix
    assert_equal_bits(weights(seq.method.model), weights(off.method.model))
    on = bace.run(tiny.settings(modality, method={"name": "bace", "alpha": 0}, **changes))
    assert not torch.equal(on.method.model.head.weight, off.method.model.head.weight)


# -- paired draws

VARIANTS: list[dict[str, Any]] = [
    {},
    {"W0": 1.0},
    {"alpha": 0.0},
    {"alpha": 0.0, "W0": 1.0},
    {"effect_new": "random", "lambda_mse": 0.0},
    {"knn_pool_cap": 5},
]


def trained_batches(tiny: Any, modality: str, **method: Any) -> tuple[list[Batch], list[float], Any]:
    """Return every batch that the student was trained on (new and replayed rows in one pass), and the replay term."""
    changes = {"memory.select": "random", "checkpoint.every": 0, "measure.fwt": False}
    config = config_from(tiny.settings(modality, method={"name": "bace", **method}, **changes))
    learned, stream = assemble(config)
    replayed: list[float] = []
    loss = learned.loss

    def noted(batch: Batch) -> Any:
        terms: Any = loss(batch)
        replayed.extend([terms["replay"].item()] if "replay" in terms else [])
        return terms

    learned.loss = noted  # type: ignore[method-assign]
    with recorded_passes() as passes:
        Trainer(learned, stream, config).run()
    return [p.batch for p in passes if p.training], replayed, learned


@pytest.fixture(scope="module")
def as_it_is(tiny: Any) -> dict[str, Any]:
    return {modality: trained_batches(tiny, modality) for modality in ("image", "text")}


@pytest.mark.parametrize("modality", ["image", "text"])
@pytest.mark.parametrize("variant", VARIANTS[1:], ids=str)
def test_switching_terms_changes_no_batch_no_draw_no_view_and_no_memory(
    tiny: Any, as_it_is: dict[str, Any], variant: dict[str, Any], modality: str
) -> None:
    expected, expected_replay, first = as_it_is[modality]
    batches, replay, other = trained_batches(tiny, modality, **variant)
    assert len(batches) == len(expected) > 20
    for one, two in zip(batches, expected, strict=True):
        assert torch.equal(one.examples, two.examples)  # the order of new examples and the draws of replayed examples
        for key in one.inputs:
            assert torch.equal(one.inputs[key], two.inputs[key])  # their views
    assert torch.equal(other.memory.examples, first.memory.examples)
    assert replay[0] == expected_replay[0]  # the first step of task 2, including the dropout of its pass
    assert not torch.equal(other.model.head.weight, first.model.head.weight)


def test_replayed_examples_are_seen_in_a_new_view_each_time_and_new_ones_in_one_view_an_epoch(tiny: Any) -> None:
    batches, _, learned = trained_batches(tiny, "image")
    views: dict[tuple[int, bool], set[bytes]] = {}
    for batch in batches[-2 * 5 :]:  # the last task: 20 examples, 4 per step, 2 epochs
        for example, picture in zip(batch.examples.tolist(), batch.inputs["pixel_values"], strict=True):
            new = example in learned.stream[2].train.tolist()
            views.setdefault((example, new), set()).add(picture.numpy().tobytes())
    assert all(len(seen) <= 2 for (_, new), seen in views.items() if new)
    assert max(len(seen) for (_, new), seen in views.items() if not new) > 2


# -- bias correction (7)


class Corrected:
    """A run with bias correction, and a record of what it did."""

    def __init__(self, tiny: Any, memory: int, **changes: Any) -> None:
        settings = {"memory.size": memory, "train.lr": 0.05, "measure.fwt": False, **changes}
        config = config_from(tiny.settings("image", method={"name": "bace", "bias_correction": True}, **settings))
        learned, stream = assemble(config)
        self.method: Any = learned
        self.stream = stream
        self.ever_held: set[int] = set()
        self.sizes: list[tuple[int, int]] = []
        self.biases: list[list[float]] = []
        self.before_fit: dict[str, Tensor] = {}
        after_task = learned.after_task

        def noted(task: Any) -> None:
            self.before_fit = weights(learned.model)
            after_task(task)
            held = self.method.held.examples.tolist()
            self.ever_held |= set(held)
            self.sizes.append((len(self.method.memory), len(held)))
            assert not set(held) & set(self.method.memory.examples.tolist())
            self.biases.append(self.method.bias.tolist())

        learned.after_task = noted  # type: ignore[method-assign]
        with recorded_passes() as passes:
            self.results = Trainer(learned, stream, config).run()
        self.trained = {e for p in passes if p.training for e in p.batch.examples.tolist()}
        self.passes = passes

    def test_batch(self) -> Batch:
        examples = torch.cat([task.test for task in self.stream])
        with self.stream.licence("test", examples):
            return self.stream.batch(examples)


@pytest.fixture(scope="module")
def corrected(tiny: Any) -> Corrected:
    return Corrected(tiny, 60)


def test_held_out_examples_are_never_trained_on_nor_replayed(corrected: Corrected) -> None:
    assert len(corrected.ever_held) >= 5
    assert not corrected.ever_held & corrected.trained
    everything = {e for task in corrected.stream for e in task.train.tolist()}
    # ceil(q/10) of each class: q = 30, 20, 12 slots per class after the three tasks, but a class has only 10 examples
    assert len(everything - corrected.trained) == 5
    assert everything - corrected.trained == corrected.ever_held


def test_memory_and_held_out_examples_stay_within_the_budget(tiny: Any, corrected: Corrected) -> None:
    assert all(memory + held <= 60 for memory, held in corrected.sizes)
    small = Corrected(tiny, 25, **{"train.epochs": 1})
    # q = 12, 8, 5 slots per class, 2, 1 and 1 of them for held-out examples; of ten examples, only one is held out
    assert small.sizes == [(2 * 9, 2 * 1), (3 * 7, 3 * 1), (5 * 4, 5 * 1)]
    assert not small.ever_held & small.trained


def test_the_correction_is_fitted_once_after_the_last_task_on_the_held_out_examples(corrected: Corrected) -> None:
    """The pair is compared with 200 full-batch steps of SGD (lr 1e-3, momentum 0.9) on CE + 0.1 B^2 / 2 in numpy."""
    assert corrected.biases[:2] == [[1.0, 0.0, 0.0]] * 2
    A, B, start = corrected.biases[2]
    assert start == 3
    method, held = corrected.method, corrected.method.held.examples
    with corrected.stream.licence("test", held):
        batch = corrected.stream.batch(held)
    with torch.no_grad():
        logits = array(method.model(batch).logits)
    targets = batch.targets.numpy()
    assert sorted(targets) == sorted(range(5))
    pair, velocity = np.array([1.0, 0.0]), np.zeros(2)
    new = np.arange(5) >= 3
    for _ in range(200):
        corrected_logits = np.where(new, pair[0] * logits + pair[1], logits)
        error = (softmax(corrected_logits) - np.eye(5)[targets])[:, new] / len(targets)
        gradient = np.array([(error * logits[:, new]).sum(), error.sum() + 0.1 * pair[1]])
        velocity = 0.9 * velocity + gradient
        pair -= 1e-3 * velocity
    assert pair == pytest.approx([A, B], rel=1e-4, abs=1e-5)
    assert (A, B) != (1.0, 0.0)


def test_the_correction_changes_new_columns_only_and_neither_encoder_nor_head(corrected: Corrected) -> None:
    method, batch = corrected.method, corrected.test_batch()
    assert_equal_bits(weights(method.model), corrected.before_fit)
    with torch.no_grad():
        raw = method.model(batch).logits
    scores = method.predict(batch)
    A, B, _ = method.bias.tolist()
    assert torch.equal(scores[:, :3], raw[:, :3])
    torch.testing.assert_close(scores[:, 3:], A * raw[:, 3:] + B)
    assert torch.equal(scores[:, :3].argsort(1), raw[:, :3].argsort(1))
    assert not torch.equal(scores[:, 3:], raw[:, 3:])


def test_the_corrected_scores_are_the_ones_that_are_evaluated(corrected: Corrected) -> None:
    batch = corrected.test_batch()
    right = (corrected.method.predict(batch).argmax(1) == batch.targets).double()
    row = [100 * right[batch.targets < 2].mean(), 100 * right[batch.targets == 2].mean(), 100 * right[-12:].mean()]
    assert corrected.results.matrix[-1] == pytest.approx([float(value) for value in row])


def test_one_task_needs_no_correction(tiny: Any) -> None:
    one = Corrected(tiny, 10, **{"benchmark.tasks": [2], "train.epochs": 1})
    assert one.biases == [[1.0, 0.0, 0.0]]


def test_classes_smaller_than_their_share_of_the_memory_keep_examples_to_train_on(tiny: Any) -> None:
    few = Corrected(tiny, 0, **{"memory.per_class": 100, "benchmark.train_per_class": 2, "train.epochs": 1})
    assert len(few.ever_held) == len(few.trained) == 5
    assert all(math.isfinite(value) for value in few.biases[-1])


def test_bias_correction_refuses_tokens_before_training(tiny: Any) -> None:
    with pytest.raises(ConfigError, match="not defined for tokens"):
        assemble(config_from(tiny.settings("token", method={"name": "bace", "bias_correction": True})))


@pytest.mark.parametrize("memory", [{"memory.size": 9}, {"memory.per_class": 1, "memory.size": 0}, {"memory.size": 0}])
def test_bias_correction_refuses_a_memory_too_small_before_training(tiny: Any, memory: dict[str, int]) -> None:
    """There are five classes in the end. With 9 slots each class has one, so nothing is left to replay beside the
    held-out example."""
    with pytest.raises(ConfigError, match="too few, use 2 or more"):
        assemble(config_from(tiny.settings("image", method={"name": "bace", "bias_correction": True}, **memory)))
    enough = {"name": "bace", "bias_correction": True}
    assemble(config_from(tiny.settings("image", method=enough, **{"memory.size": 10})))
