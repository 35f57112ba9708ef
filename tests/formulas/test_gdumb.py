"""Whole runs show that GDumb's memory is balanced, that training starts from the pre-trained checkpoint and that it
reads only the memory. CutMix and its loss are checked by locating every pasted pixel. The learning rate is compared
with torch's own scheduler."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from steps import assert_equal_bits, cross_entropy, logits_of, make, recorded_passes, weights
from torch import Tensor

from bace.core.trainer import Trainer
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.gdumb import cutmix, warm_restarts
from bace.models.loading import load_encoder
from bace.randomness import generator


def gdumb(**changes: Any) -> dict[str, Any]:
    return {"name": "gdumb", "passes": 2, **changes}


def started(tiny: Any, modality: str, method: dict[str, Any], **changes: Any) -> Any:
    """Return a method at the first step on the memory of its first task."""
    learned, stream, config = make(tiny, modality, method, **changes)
    trainer = Trainer(learned, stream, config)
    trainer.enter(stream[0])
    learned.grow(stream[0])
    trainer.now.begin_stage("memory")
    learned.remember(stream[0])
    learned.model.train()
    return learned


def batch_of(method: Any, count: int = 8) -> Batch:
    found: Batch = method.stream.batch(method.memory.examples[:count], view=method.now.view())
    return found


# -- the memory


@pytest.mark.parametrize("modality", ["image", "token"])
def test_after_every_task_the_counts_differ_by_at_most_one_and_the_memory_is_full(tiny: Any, modality: str) -> None:
    changes = {"memory.size": 13, "benchmark.tasks": [2, 1, 2]}
    method, stream, config = make(tiny, modality, gdumb(passes=1), **changes)
    trainer = Trainer(method, stream, config)
    for groups, task in zip((2, 3, 5), stream, strict=True):
        trainer.learn(task)
        counts = Counter(method.memory.group.tolist())
        assert len(counts) == groups
        assert max(counts.values()) - min(counts.values()) <= 1
        assert max(counts.values()) <= -(-13 // groups)
        assert len(method.memory) == len(set(method.memory.examples.tolist())) <= 13
        for example, group in zip(method.memory.examples.tolist(), method.memory.group.tolist(), strict=True):
            rows, _ = stream.rows_of(torch.tensor([example]))
            assert group in stream.groups[stream.targets[rows]].tolist()  # the example shows its group


def test_per_class_budgets_fill_every_class_to_its_own(tiny: Any) -> None:
    method, stream, config = make(tiny, "image", gdumb(passes=1), **{"memory.size": 0, "memory.per_class": 3})
    Trainer(method, stream, config).run()
    assert Counter(method.memory.group.tolist()) == dict.fromkeys(range(4), 3)


def test_which_examples_are_kept_is_drawn_at_random(tiny: Any) -> None:
    kept = [set(started(tiny, "image", gdumb(), seed=seed).memory.examples.tolist()) for seed in (0, 1)]
    assert kept[0] != kept[1]


def test_a_memory_of_0_is_refused(tiny: Any) -> None:
    with pytest.raises(ConfigError, match=r"only from its memory, which is 0: set memory.size or memory.per_class"):
        make(tiny, "image", gdumb(), **{"memory.size": 0})


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"passes": 0}, r"passes \(0\)"), ({"batch": 0}, r"batch \(0\)"), ({"cutmix": 1.5}, "cutmix is 1.5")],
)
def test_what_cannot_work_is_refused(tiny: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tiny, "image", gdumb(**settings))


# -- the dumb learner


def test_every_task_starts_from_the_checkpoint_and_trains_on_each_memory_example_once_a_pass(tiny: Any) -> None:
    checkpoint = weights(load_encoder(tiny.vit))
    method, stream, config = make(tiny, "image", gdumb(passes=3, batch=4), **{"benchmark.tasks": [2, 1, 2]})
    shown: dict[tuple[int, int], list[int]] = {}
    starts = 0

    def before_epoch(stage: Any) -> None:
        nonlocal starts
        if method.now.epoch == 0:
            assert_equal_bits(weights(method.model.encoder), checkpoint)
            assert method.model.head.classes == method.now.seen
            for t, block in enumerate(method.model.head.blocks):  # old classes get new rows too
                bound = 1 / 4  # 1 / sqrt(width)
                drawn = torch.empty(block.shape).uniform_(-bound, bound, generator=generator(0, "head", t))
                assert torch.equal(block.data, drawn)
            starts += 1

    loss = method.loss

    def noted(batch: Batch) -> Any:
        assert len(batch) <= 4
        shown.setdefault((method.now.task, method.now.epoch), []).extend(batch.examples.tolist())
        return loss(batch)

    def after_task(task: Any) -> None:
        for epoch in range(3):
            assert sorted(shown[task.index, epoch]) == sorted(method.memory.examples.tolist())

    method.before_epoch, method.loss, method.after_task = before_epoch, noted, after_task  # type: ignore[method-assign]
    Trainer(method, stream, config).run()
    assert starts == 3
    assert len(shown) == 9
    assert not torch.equal(method.model.encoder.norm.weight, checkpoint["norm.weight"])


@pytest.mark.parametrize("history", ["other weights", "other order of slots", "other pictures outside the memory"])
def test_nothing_but_the_memory_matters(tiny: Any, history: str) -> None:
    def learn(change: str | None) -> Any:
        method, stream, config = make(tiny, "image", gdumb())
        trainer = Trainer(method, stream, config)
        trainer.learn(stream[0])
        remember = method.remember
        if change == "other weights":
            for p in method.model.parameters():
                p.data.zero_()

        def remembered(task: Any) -> None:
            remember(task)
            if change == "other order of slots":
                method.memory.keep(torch.arange(len(method.memory)).flip(0))
            if change == "other pictures outside the memory":
                gone = torch.ones(len(stream.data), dtype=torch.bool)
                gone[method.memory.examples] = False
                stream.data.pixels[gone] = 7  # type: ignore[attr-defined]

        method.remember = remembered  # type: ignore[method-assign]
        trainer.learn(stream[1])
        return method

    plain, changed = learn(None), learn(history)
    assert sorted(plain.memory.examples.tolist()) == sorted(changed.memory.examples.tolist())
    assert_equal_bits(weights(plain.model), weights(changed.model))


def test_a_class_without_an_example_in_memory_is_neither_trained_nor_predicted(tiny: Any) -> None:
    changes = {"memory.size": 3, "memory.allow_missing_classes": True, "benchmark.tasks": [5]}
    method = started(tiny, "image", gdumb(cutmix=0.0), **changes)
    there = sorted(set(method.memory.group.tolist()))
    absent = [c for c in range(5) if c not in there]
    assert len(there) == 3
    batch = batch_of(method)
    loss = method.loss(batch)
    logits = logits_of(method.model, batch)[:, there]
    targets = np.array([there.index(c) for c in batch.targets.tolist()])
    assert loss.item() == pytest.approx(cross_entropy(logits, targets), rel=1e-5)
    loss.backward()
    gradient = method.model.head.blocks[0].grad
    assert (gradient[absent] == 0).all()
    assert (gradient[there].abs().sum(1) > 0).all()
    scores = method.predict(batch)
    assert torch.isneginf(scores[:, absent]).all()
    assert scores[:, there].isfinite().all()


@pytest.mark.parametrize("modality", ["text", "token"])
def test_texts_and_sentences_are_never_mixed(tiny: Any, modality: str) -> None:
    method = started(tiny, modality, gdumb(cutmix=1.0))
    batch = batch_of(method)
    with recorded_passes() as passes:
        loss = method.loss(batch)
    assert passes[0].batch is batch
    expected = cross_entropy(logits_of(method.model, batch), batch.targets.numpy())
    assert loss.item() == pytest.approx(expected, rel=1e-5)


# -- CutMix


def pasted_from(mixed: Tensor, own: Tensor) -> tuple[list[int], float]:
    """Return the partner of each image, and the share of its pixels that was pasted."""
    partners, share = [], 0.0
    for i, picture in enumerate(mixed):
        changed = (picture != own[i]).any(0)
        if not changed.any():
            partners.append(i)
            continue
        partners.append(next(j for j, other in enumerate(own) if torch.equal(other[:, changed], picture[:, changed])))
        share = float(changed.double().mean())
        rows, columns = changed.any(1), changed.any(0)
        assert torch.equal(changed, rows[:, None] & columns)  # a box
        assert (torch.diff(torch.nonzero(rows).flatten()) == 1).all()
        assert (torch.diff(torch.nonzero(columns).flatten()) == 1).all()
    return partners, share


def test_the_pasted_share_is_1_minus_lam_and_the_pictures_given_stay_as_they_are() -> None:
    own = torch.rand(6, 3, 10, 14, generator=generator("own"))
    given = own.clone()
    shares = []
    for draw in range(150):
        mixed, partner, lam = cutmix(given, generator("cutmix", draw))
        assert torch.equal(given, own)
        found, share = pasted_from(mixed, own)
        assert sorted(partner.tolist()) == list(range(6))
        if share:
            assert share == pytest.approx(1 - lam)
            assert found == partner.tolist()
        shares.append(1 - lam)
    assert min(shares) < 0.05
    assert max(shares) > 0.7
    # on average a box of side s covers s - s^2/4 of a side; s^2 is uniform: 1/2 - 1/5 + 1/48 = 0.32
    assert abs(np.mean(shares) - 0.32) < 4.5 * 0.25 / np.sqrt(150) + 0.03  # sides are whole pixels


def test_the_loss_mixes_the_labels_as_the_pixels(tiny: Any) -> None:
    method = started(tiny, "image", gdumb(cutmix=1.0), **{"benchmark.augment": False})  # padded borders are all alike
    seen = 0
    for step in range(6):
        method.now.step = step
        batch = batch_of(method)
        before = batch.inputs["pixel_values"].clone()
        with recorded_passes() as passes:
            loss = method.loss(batch)
        assert torch.equal(batch.inputs["pixel_values"], before)
        partners, share = pasted_from(passes[0].batch.inputs["pixel_values"], before)
        logits, y = logits_of(method.model, passes[0].batch), batch.targets.numpy()
        if not share:
            continue
        # an image that is its own partner does not change, and neither does its label
        expected = (1 - share) * cross_entropy(logits, y) + share * cross_entropy(logits, y[partners])
        assert loss.item() == pytest.approx(expected, rel=1e-5)
        seen += 1
    assert seen >= 3


def test_pictures_are_mixed_in_half_of_the_steps(tiny: Any) -> None:
    method = started(tiny, "image", gdumb())
    batch = batch_of(method, 4)
    mixed = []
    for step in range(200):
        method.now.step = step
        with recorded_passes() as passes:
            method.loss(batch)
        mixed.append(passes[0].batch is not batch)
    assert abs(np.mean(mixed) - 0.5) < 4.5 * 0.5 / np.sqrt(200)


# -- the learning rate


def test_the_rate_is_a_tenth_in_the_first_pass_and_then_torchs_warm_restarts() -> None:
    """In the official order, pass 0 has a tenth of the rate, pass 1 the full rate, and the scheduler takes a step
    before each later pass."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimiser = torch.optim.SGD([weight], lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimiser, T_0=1, T_mult=2, eta_min=5e-4)
    optimiser.step()
    rates = [0.005, 0.05]
    for _ in range(62):
        scheduler.step()
        rates.append(optimiser.param_groups[0]["lr"])
    assert [0.05 * warm_restarts(epoch) for epoch in range(64)] == pytest.approx(rates)


def test_a_run_follows_it_pass_by_pass(tiny: Any) -> None:
    """The rate is constant within a pass and relative to the rate of the run. The factors of passes 0 to 4 are computed
    by hand."""
    changes = {"benchmark.tasks": [2], "train.lr": 0.02}
    method, stream, config = make(tiny, "image", gdumb(passes=5, batch=5), **changes)
    rates: list[tuple[int, float]] = []
    trainer = Trainer(method, stream, config)

    def after_step(batch: Batch) -> None:
        assert trainer.optimiser is not None
        rates.append((method.now.epoch, trainer.optimiser.param_groups[0]["lr"]))

    method.after_step = after_step  # type: ignore[method-assign]
    trainer.run()
    factor = [0.1, 1.0, 1.0, 0.505, 1.0]
    assert rates == [(epoch, pytest.approx(0.02 * factor[epoch])) for epoch in range(5) for _ in range(2)]
