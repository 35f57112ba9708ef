"""The losses of SEQ, MTL and ER are compared with numpy. The examples that each method sees are counted over whole
runs, and its weights show where it starts and what it leaves unchanged. Equalities (ER without replay is SEQ) hold bit
for bit."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from steps import (
    array,
    assert_equal_bits,
    at_task,
    begin,
    cross_entropy,
    logits_of,
    make,
    recorded_passes,
    some,
    weights,
)

import bace
from bace.core.trainer import Trainer
from bace.data.batch import Batch
from bace.methods.parts.replay import Replay
from bace.models.loading import load_encoder


def trained_examples(tiny: Any, method: str | dict[str, Any], **changes: Any) -> tuple[dict[Any, list[list[int]]], Any]:
    """Return by (task, epoch) the examples of every batch that the network was trained on, and the method."""
    options = {"name": method} if isinstance(method, str) else method
    settings = {"benchmark.tasks": [2, 1, 2], **changes}
    learned, stream, config = make(tiny, "image", options, **settings)
    epochs: dict[Any, list[list[int]]] = {}
    loss = learned.loss

    def noted(batch: Batch) -> Any:
        with recorded_passes() as passes:
            value = loss(batch)
        key = (learned.now.task, learned.now.epoch)
        epochs.setdefault(key, []).extend(p.batch.examples.tolist() for p in passes if p.training)
        return value

    learned.loss = noted  # type: ignore[method-assign]
    Trainer(learned, stream, config).run()
    return epochs, learned


# -- SEQ


@pytest.mark.parametrize("modality", ["image", "text", "token"])
def test_seq_is_cross_entropy_over_all_classes_seen(tiny: Any, modality: str) -> None:
    method = at_task(tiny, modality, {"name": "seq"})
    batch = some(method)
    logits = method.model(batch).logits
    assert logits.shape[1] == method.now.seen
    loss = method.loss(batch)
    assert torch.equal(loss, F.cross_entropy(logits, batch.targets))
    assert loss.item() == pytest.approx(cross_entropy(array(logits), batch.targets.numpy()), rel=1e-5)


@pytest.mark.parametrize(("span", "reached"), [("seen", True), ("new", False)])
@pytest.mark.parametrize("head", ["cosine", "linear"])
def test_seq_reaches_old_rows_only_with_a_softmax_over_all_classes(
    tiny: Any, span: str, reached: bool, head: str
) -> None:
    method = at_task(tiny, "image", {"name": "seq", "span": span}, **{"head.kind": head})
    method.model.zero_grad()
    batch = some(method)
    loss = method.loss(batch)
    loss.backward()
    old, new = (block.grad for block in method.model.head.blocks)
    assert old is not None
    assert (old.abs().sum(1) > 0).all() if reached else (old == 0).all()
    assert (new.abs().sum(1) > 0).all()
    if span == "new":
        logits = array(method.model(batch).logits)[:, 2:]
        assert loss.item() == pytest.approx(cross_entropy(logits, batch.targets.numpy() - 2), rel=1e-5)


def test_seq_growing_the_head_leaves_old_logits_their_values(tiny: Any) -> None:
    method, stream, config = make(tiny, "image", {"name": "seq"})
    trainer = Trainer(method, stream, config)
    trainer.learn(stream[0])
    stream.begin(stream[1], stream[0].train)
    batch = stream.batch(torch.cat([stream[0].train, stream[1].train]))
    before = method.model.eval()(batch).logits
    begin(trainer, 1)
    after = method.model.eval()(batch).logits
    torch.testing.assert_close(after[:, :2], before, rtol=0, atol=1e-12)
    assert after.shape[1] == 4


def test_seq_trains_on_each_example_of_the_task_once_an_epoch_and_on_nothing_else(tiny: Any) -> None:
    epochs, method = trained_examples(tiny, "seq")
    assert len(epochs) == 3 * 2
    for (task, _), batches in epochs.items():
        assert sorted(e for batch in batches for e in batch) == method.stream[task].train.tolist()
        assert {len(batch) for batch in batches[:-1]} <= {8}
    assert epochs[0, 0] != epochs[0, 1]  # reshuffled


def test_new_rows_are_trained_from_the_first_step_of_their_task(tiny: Any) -> None:
    """An optimiser that still held the old head would leave them unchanged."""
    result = bace.run(tiny.settings("image", method="seq"))
    fresh = at_task(tiny, "image", {"name": "seq"}, task=2, **{"benchmark.tasks": [2, 1, 2], "train.lr": 0.01})
    trained, started = result.method.model.head.blocks[2], fresh.model.head.blocks[2]
    assert trained.shape == started.shape
    assert (trained != started).all()


# -- MTL


def test_mtl_shows_every_class_as_often_as_it_has_examples_in_one_epoch(tiny: Any) -> None:
    epochs, method = trained_examples(tiny, "mtl", **{"benchmark.train_per_class": 7})
    for (task, _), batches in epochs.items():
        shown = torch.tensor([e for batch in batches for e in batch])
        counts = Counter(method.stream.targets[shown].tolist())
        assert counts == dict.fromkeys(range(method.stream[task].classes.stop), 7)
        assert len(set(shown.tolist())) == len(shown)


@pytest.mark.parametrize("modality", ["image", "text"])
def test_mtl_on_one_task_is_seq_bit_for_bit(tiny: Any, modality: str) -> None:
    seq, mtl = (bace.run(tiny.settings(modality, method=m, **{"benchmark.tasks": [4]})) for m in ("seq", "mtl"))
    assert seq.matrix == mtl.matrix
    assert_equal_bits(weights(seq.method.model), weights(mtl.method.model))


def test_mtl_starts_every_task_from_the_pre_trained_weights(tiny: Any) -> None:
    checkpoint = weights(load_encoder(tiny.vit))
    method, stream, config = make(tiny, "image", {"name": "mtl"}, **{"benchmark.tasks": [2, 1, 2]})
    trainer = Trainer(method, stream, config)
    for task in stream:
        begin(trainer, task.index)
        assert_equal_bits(weights(method.model.encoder), checkpoint)
        assert method.model.head.classes == task.classes.stop
        trainer.now.phase = "train"
        trainer.learn(task)
        assert not torch.equal(method.model.encoder.norm.weight, checkpoint["norm.weight"])


def test_mtl_loss_is_cross_entropy_over_all_classes_seen(tiny: Any) -> None:
    method = at_task(tiny, "image", {"name": "mtl"})
    union = torch.cat([method.stream[0].train[:3], method.stream[1].train[:3]])
    batch = method.stream.batch(union)
    expected = cross_entropy(logits_of(method.model, batch), batch.targets.numpy())
    assert method.loss(batch).item() == pytest.approx(expected, rel=1e-5)


def test_mtl_only_last_trains_once(tiny: Any) -> None:
    epochs, method = trained_examples(tiny, {"name": "mtl", "only_last": True})
    assert {task for task, _ in epochs} == {2}
    everything = torch.cat([task.train for task in method.stream]).tolist()
    assert sorted(e for batch in epochs[2, 0] for e in batch) == everything


# -- ER


@pytest.mark.parametrize("modality", ["image", "token"])
def test_er_sums_or_joins_the_means_of_new_and_replayed_rows(tiny: Any, modality: str) -> None:
    values = {}
    for reduction in ("sum", "joint"):
        method = at_task(tiny, modality, {"name": "er", "reduction": reduction}, **{"train.replay_o": "label"})
        batch = some(method, 2)
        with recorded_passes() as passes:
            loss = method.loss(batch)
        assert len(passes) == 1
        both = passes[0].batch
        logits, targets = logits_of(method.model, both), both.targets.numpy()
        n = len(batch)
        new, old = cross_entropy(logits[:n], targets[:n]), cross_entropy(logits[n:], targets[n:])
        if reduction == "sum":
            assert loss["new"].item() == pytest.approx(new, rel=1e-5)
            assert loss["replay"].item() == pytest.approx(old, rel=1e-5)
        else:
            m = len(both) - n
            assert m > 0
            assert loss["new"].item() == pytest.approx((n * new + m * old) / (n + m), rel=1e-5)
        values[reduction] = (new, old)
    assert values["sum"] == values["joint"]


@pytest.mark.parametrize(
    "name", ["er", "icarl", "bic", "lucir", "podnet", "dde", "eeil", "gd", "cls-er", "hal", "foster", "memo", "beef"]
)
def test_with_as_many_replayed_as_new_rows_two_means_are_twice_the_published_loss(tiny: Any, name: str) -> None:
    """This holds for the sum of all terms. The published loss is one mean over the batch (`joint`), with the authors'
    auxiliary weights."""
    method = at_task(tiny, "image", {"name": name})
    source = torch.Generator().manual_seed(1)
    with torch.no_grad():  # move away from the teachers, so that no term is trivial
        for p in method.model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=source)
    loss, found = method.boost if name == "foster" else method.loss, {}
    for reduction, rate in (("sum", 0.1), ("joint", 0.2)):  # HAL looks ahead by one step with this rate
        method.policy, method.now.lr = Replay(reduction=reduction), rate
        terms = loss(some(method, 4))
        found[reduction] = torch.stack(list(terms.values())).sum().item()
    assert found["sum"] == pytest.approx(2 * found["joint"], rel=1e-9)


def test_er_replays_half_a_batch_after_the_first_task(tiny: Any) -> None:
    epochs, method = trained_examples(tiny, "er")
    for (task, _), batches in epochs.items():
        new = set(method.stream[task].train.tolist())
        split = [(len([e for e in batch if e in new]), len([e for e in batch if e not in new])) for batch in batches]
        # ten examples per class: 20, 10, 20
        assert split == ([(8, 0), (8, 0), (4, 0)], [(4, 4), (4, 4), (2, 4)], [(4, 4)] * 5)[task]
        assert sorted(e for batch in batches for e in batch if e in new) == sorted(new)


def test_er_replays_only_what_is_in_memory_and_draws_anew_each_step(tiny: Any) -> None:
    method = at_task(tiny, "image", {"name": "er"})
    draws = []
    for step in range(6):
        method.now.step = step
        draws.append(method.replay().examples.tolist())
    assert {e for draw in draws for e in draw} <= set(method.memory.examples.tolist())
    assert len({tuple(draw) for draw in draws}) > 1
    method.now.step = 0
    assert method.replay().examples.tolist() == draws[0]


def test_er_concat_shuffles_the_memory_into_the_epoch(tiny: Any) -> None:
    epochs, method = trained_examples(tiny, {"name": "er", "mode": "concat"}, **{"benchmark.tasks": [2, 2]})
    orders = []
    for epoch in range(2):
        shown = [e for batch in epochs[1, epoch] for e in batch]
        remembered = [e for e in shown if e in set(method.stream[0].train.tolist())]
        assert len(remembered) == len(set(remembered)) == 2 * 5  # ten slots for two classes, each example shown once
        assert sorted(set(shown) - set(remembered)) == method.stream[1].train.tolist()
        assert [len(batch) for batch in epochs[1, epoch]] == [8, 8, 8, 6]
        assert shown.index(remembered[0]) < 20  # mixed with the new examples, not after them
        orders.append(shown)
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])


@pytest.mark.parametrize("modality", ["image", "text"])
def test_er_without_replay_is_seq_bit_for_bit(tiny: Any, modality: str) -> None:
    seq, er = (bace.run(tiny.settings(modality, method=m, **{"train.replay_ratio": 0.0})) for m in ("seq", "er"))
    assert seq.matrix == er.matrix
    assert_equal_bits(weights(seq.method.model), weights(er.method.model))


def test_er_and_bace_without_teacher_terms_are_the_same_bit_for_bit(tiny: Any) -> None:
    """alpha = 0, W0 = 1 and lambda_mse = 0 leave cross-entropy on new and on replayed data."""
    off = {"name": "bace", "alpha": 0.0, "W0": 1.0, "lambda_mse": 0.0}
    er, off_bace = (bace.run(tiny.settings("text", method=m)) for m in ("er", off))
    assert er.matrix == off_bace.matrix
    assert_equal_bits(weights(er.method.model), weights(off_bace.method.model))
