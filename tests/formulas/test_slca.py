"""SLCA's Gaussians, alignment loss and rates are compared with numpy and hand-computed numbers. Without alignment and
with equal rates it equals SEQ over the new classes bit for bit."""

from typing import Any

import numpy as np
import pytest
import torch
from steps import array, assert_equal_bits, at_stage, changed_in_stages, cross_entropy, make, weights

from bace.core.optimiser import make_optimiser, stage_groups
from bace.core.trainer import Trainer
from bace.errors import ConfigError
from bace.methods.parts.alignment import normalised
from bace.methods.slca import SLCA

PLAIN = {"name": "slca", "lr": None, "slow": 1.0, "drop": 1.0, "weight_decay": 0.0, "align_epochs": 0}


@pytest.mark.parametrize("modality", ["image", "text"])
def test_without_alignment_and_with_equal_rates_it_is_seq_over_the_new_classes(tiny: Any, modality: str) -> None:
    found, same = [], {"head.kind": "linear", "train.schedule": "constant", "train.head_lr": None}
    for method in (PLAIN, {"name": "seq", "span": "new"}):
        made, stream, config = make(tiny, modality, method, **{**same, "benchmark.tasks": [2, 1, 2]})
        trainer = Trainer(made, stream, config)
        trainer.run()
        found.append((trainer.results.matrix, weights(made.model)))
    assert found[0][0] == found[1][0]
    assert_equal_bits(found[0][1], found[1][1])


@pytest.mark.parametrize("change", [{"slow": 0.01}, {"drop": 0.1}, {"weight_decay": 0.1}])
def test_each_of_its_settings_makes_a_difference(tiny: Any, change: dict[str, float]) -> None:
    found = []
    for method in (PLAIN, {**PLAIN, **change}):
        made, stream, config = make(tiny, "image", method, **{"train.epochs": 4})
        Trainer(made, stream, config).learn(stream[0])
        found.append(made.model.head.weight)
    assert not torch.equal(*found)


def test_the_encoder_learns_a_hundred_times_more_slowly_and_both_ten_times_at_the_end(tiny: Any) -> None:
    method, stream, config = make(tiny, "image", {"name": "slca"}, **{"train.epochs": 20})
    method.grow(stream[0])
    stage = method.stages(stream[0])[0]
    optimiser = make_optimiser(stage, stage_groups(stage), config.train)
    rates = {p: group["lr"] for group in optimiser.param_groups for p in group["params"]}
    assert {rates[p] for p in method.model.encoder.parameters()} == {1e-4}
    assert {rates[p] for p in method.model.head.parameters()} == {1e-2}
    assert {group["weight_decay"] for group in optimiser.param_groups} == {0.0, 5e-4}  # 0 for norms and biases
    assert [stage.schedule(done) for done in (0, 17.9, 18, 19.9)] == [1, 1, 0.1, 0.1]


def test_each_stage_changes_what_it_may(tiny: Any) -> None:
    """A task trains its own head and the encoder, statistics train nothing, and the alignment trains only a copy of the
    heads."""
    method, stream, config = make(tiny, "image", {"name": "slca", "align_epochs": 2})
    changed = changed_in_stages(Trainer(method, stream, config))
    assert list(changed) == [(0, "main"), (0, "statistics"), (1, "main"), (1, "statistics"), (1, "align")]
    heads = {name for name in changed[1, "main"] if name.startswith("model.head")}
    assert heads == {"model.head.blocks.1", "model.head.biases.1"}
    assert changed[1, "statistics"] == {"statistics.counts", "statistics.means", "statistics.scatter"}
    assert all(name.startswith("aligned.") for name in changed[1, "align"])
    assert len(changed[1, "align"]) == 4  # rows and biases of two tasks


def test_the_heads_are_aligned_as_a_copy_from_where_the_task_left_them(tiny: Any) -> None:
    method, trainer, stage = at_stage(tiny, "image", {"name": "slca"}, "align")
    assert_equal_bits(weights(method.aligned), weights(method.model.head))
    before = weights(method.model)
    trainer.train(stage, 3)
    assert_equal_bits(weights(method.model), before)  # the next task continues from these weights
    assert all(not torch.equal(p, q) for p, q in zip(method.aligned.blocks, method.model.head.blocks, strict=True))
    test = method.stream[0].test
    with method.stream.licence("a test", test):
        scores, features = method.predict(method.stream.batch(test)), method.outputs(test).features
    bias, rows = array(method.aligned.bias), array(method.aligned.weight)
    np.testing.assert_allclose(array(scores), array(features) @ rows.T + bias, rtol=1e-9, atol=1e-12)


def test_statistics_are_those_of_the_finished_encoder_on_clean_views(tiny: Any) -> None:
    method, _, _ = at_stage(tiny, "image", {"name": "slca"}, "align")
    own = method.stream[1]
    features, targets = method.outputs(own.train).features, method.stream.labels(own.train)[1]
    for c in own.classes:
        rows = array(features[targets == c])
        np.testing.assert_allclose(array(method.statistics.means[c]), rows.mean(0), atol=1e-12)
        np.testing.assert_allclose(array(method.statistics.covariance(c)), np.cov(rows.T), atol=1e-12)


def test_old_means_are_drawn_nearer_to_zero(tiny: Any) -> None:
    """In the second of two tasks, the factor is 0.9 + 0.1 / 2 for the classes of the first task and 1 for its own
    classes."""
    method, _, _ = at_stage(tiny, "image", {"name": "slca"}, "align")
    for c, factor in ((0, 0.95), (1, 0.95), (2, 1.0), (3, 1.0)):
        mean, covariance = method.gaussian(c)
        np.testing.assert_allclose(array(mean), factor * array(method.statistics.means[c]), rtol=1e-12)
        np.testing.assert_allclose(
            array(covariance), array(method.statistics.covariance(c)) + 1e-4 * np.eye(16), rtol=1e-12
        )


def test_an_epoch_draws_256_features_of_each_class_and_every_epoch_others(tiny: Any) -> None:
    method, trainer, stage = at_stage(tiny, "image", {"name": "slca"}, "align")
    features, targets = method.replayed
    assert torch.bincount(targets).tolist() == [256] * 4
    assert len(set(targets[:256].tolist())) == 4  # in random order
    for c in range(4):
        mean, covariance = method.gaussian(c)
        deviation = array(covariance.diagonal()) ** 0.5
        assert (np.abs(array(features[targets == c]).mean(0) - array(mean)) < 5 * deviation / 16).all()
    batches = []
    loss = method.align_loss
    stage.loss = lambda batch: batches.append(method.replayed[0][:1]) or loss(batch)
    trainer.train(stage, 3)
    assert len(batches) == 5 * 4  # each epoch has as many steps as there are classes
    assert len(torch.cat(batches).unique(dim=0)) == 5


def test_the_alignment_loss_is_that_of_numpy(tiny: Any) -> None:
    """The loss is CE(z / (0.1 n)), where n is the mean over tasks of |z_task|."""
    method, _, _ = at_stage(tiny, "image", {"name": "slca"}, "align", **{"benchmark.tasks": [2, 3]})
    method.now.step = 2
    features, targets = (array(part[512:768]) for part in method.replayed)
    logits = features @ array(method.aligned.weight).T + array(method.aligned.bias)
    n = (np.linalg.norm(logits[:, :2], axis=1) + np.linalg.norm(logits[:, 2:], axis=1)) / 2
    expected = cross_entropy(logits / (0.1 * n[:, None]), targets.astype(int))
    assert float(method.align_loss(None)) == pytest.approx(expected, rel=1e-10)


def test_logits_are_divided_by_the_mean_norm_of_the_tasks_by_hand() -> None:
    """|(3, 4)| = 5 and |(1)| = 1, so n = 3. Logits that are all zero stay finite."""
    logits = torch.tensor([[3.0, 4.0, -1.0], [0.0, 0.0, 0.0]])
    np.testing.assert_allclose(array(normalised(logits, [2, 1])), [[1, 4 / 3, -1 / 3], [0, 0, 0]], rtol=1e-12)


def test_a_class_without_examples_is_not_drawn(tiny: Any) -> None:
    method, _, stage = at_stage(tiny, "image", {"name": "slca", "samples": 8}, "align")
    method.statistics.counts[1] = 0
    method.before_epoch(stage)
    assert torch.bincount(method.replayed[1]).tolist() == [8, 0, 8, 8]
    assert len(stage.examples()) == 24


def test_forward_transfer_takes_the_aligned_rows_of_old_classes(tiny: Any) -> None:
    method, trainer, stage = at_stage(tiny, "image", {"name": "slca"}, "align")
    trainer.train(stage, 3)
    features = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    method.now.known = 4
    head = torch.nn.Linear(16, 6)
    scores = method.transfer_scores(features, head)
    assert torch.equal(scores[:, :4], method.aligned(features))
    assert torch.equal(scores[:, 4:], head(features)[:, 4:])


def test_values_without_meaning_are_refused() -> None:
    for change, said in (
        ({"slow": 0}, r"slow \(0\)"),
        ({"fade": 2}, r"fade \(2\)"),
        ({"samples": 0}, r"samples \(0\)"),
    ):
        with pytest.raises(ConfigError, match=said):
            SLCA(**change)  # type: ignore[arg-type]
