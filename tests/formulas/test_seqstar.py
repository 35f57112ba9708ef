"""SEQ*'s warm-up equals SEQ's training bit for bit. Tests check what each stage changes: the encoder in the warm-up
alone, and later only the rows of the task, so that old logits stay as they are. The head's loss and its AdamW steps are
compared with numpy."""

from typing import Any

import numpy as np
import pytest
import torch
from steps import (
    Array,
    array,
    assert_equal_bits,
    at_stage,
    changed_in_stages,
    cross_entropy,
    features_of,
    learned_before,
    logits_of,
    make,
    recorded_passes,
    softmax,
    weights,
)

from bace.core.trainer import Trainer
from bace.errors import ConfigError
from bace.experiments.compare import folder_name
from bace.methods import find_method
from bace.methods.seqstar import SEQStar

STAR = {"name": "seqstar", "warmup_epochs": 2, "head_epochs": 3, "head_steps": 0}


def some_task(tiny: Any, modality: str) -> Any:
    """Return the second task."""
    return make(tiny, modality, STAR)[1][1]


# -- the stages


@pytest.mark.parametrize("modality", ["image", "text", "token"])
def test_without_future_rows_the_warm_up_is_seq_on_the_first_task_bit_for_bit(tiny: Any, modality: str) -> None:
    star, _, _ = at_stage(tiny, modality, {**STAR, "future": 0}, "head", task=0)
    rates = {"train.epochs": 2, "train.optimiser": "adamw", "train.lr": 1e-5, "train.head_lr": 1e-3}
    seq = learned_before(tiny, modality, {"name": "seq"}, 1, **rates).method
    learned = {name: value for name, value in weights(star.model).items() if ".future." not in name}
    assert_equal_bits(learned, weights(seq.model))


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_the_encoder_learns_in_the_warm_up_alone_and_a_later_task_only_its_own_rows(tiny: Any, kind: str) -> None:
    method, stream, config = make(tiny, "text", STAR, **{"benchmark.tasks": [2, 1, 2], "head.kind": kind})
    changed = changed_in_stages(Trainer(method, stream, config))
    assert list(changed) == [(0, "main"), (0, "head"), (1, "head"), (2, "head")]
    shared, rows = ({"model.head.sigma"}, ["blocks"]) if kind == "cosine" else (set(), ["blocks", "biases"])
    for task in range(3):
        own = {f"model.head.{name}.{task}" for name in rows}
        own |= {f"model.head.future.{name}.0" for name in rows} if task < 2 else set()
        assert changed[task, "head"] == (own | shared if task == 0 else own)
    assert {name for name in changed[0, "main"] if name.startswith("model.encoder.")}


def test_without_a_warm_up_the_encoder_stays_as_it_was_loaded(tiny: Any) -> None:
    method, stream, config = make(tiny, "text", {**STAR, "warmup_epochs": 0})
    before = weights(method.model.encoder)
    Trainer(method, stream, config).run()
    assert [stage.name for stage in method.stages(stream[0])] == ["head"]
    assert_equal_bits(before, weights(method.model.encoder))


def test_scores_of_old_classes_do_not_change_by_a_bit(tiny: Any) -> None:
    trainer = learned_before(tiny, "text", STAR, 1)
    method, stream = trainer.method, trainer.stream
    with stream.licence("a test", stream[0].test):
        batch = stream.batch(stream[0].test)
    before = method.predict(batch)
    trainer.learn(stream[1])
    after = method.predict(batch)
    assert before.shape[1] == 2
    assert torch.equal(after[:, :2], before)


# -- the head


@pytest.mark.parametrize("modality", ["image", "text", "token"])
def test_rows_are_learned_by_cross_entropy_over_all_classes_on_fixed_clean_features(
    tiny: Any, modality: str
) -> None:
    """The classes are those of earlier tasks, of the task and (here three) of the future. O is class 0, like any
    other."""
    method, _, stage = at_stage(tiny, modality, {**STAR, "future": len(some_task(tiny, modality).classes) + 3}, "head")
    ids = method.stream[1].train
    clean = method.stream.batch(ids[:6])
    with recorded_passes() as passes:
        loss = stage.loss(method.stream.batch(ids[:6], inputs=False))
    assert not passes  # features were computed before the epoch
    logits, targets = logits_of(method.model, clean), clean.targets.numpy()
    assert logits.shape[1] == method.now.seen > method.now.known
    future = array(method.model.head.future.blocks[0])
    assert len(future) == 3
    unit = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (method.outputs(ids[:6]).features.numpy(), future)]
    logits = np.concatenate([logits, float(method.model.head.sigma) * unit[0] @ unit[1].T], 1)
    assert loss.item() == pytest.approx(cross_entropy(logits, targets), rel=1e-9)
    assert (targets == 0).any() == (modality == "token")


def test_the_steps_are_adamws_on_the_new_rows(tiny: Any) -> None:
    """All examples are in one batch. m, v and the step are computed by hand, with the gradient (p - y)^T f of a linear
    head."""
    changes = {"train.batch_size": 100, "head.kind": "linear", "train.weight_decay": 0.1}
    method, trainer, stage = at_stage(tiny, "text", {**STAR, "head_lr": 0.02, "future": 0}, "head", **changes)
    ids = method.stream[1].train
    f, y = features_of(method.model.encoder, method.stream.batch(ids)), method.stream.labels(ids)[1].numpy()
    old, rows = array(method.model.head.blocks[0]), array(method.model.head.blocks[1])
    old_b, b = array(method.model.head.biases[0]), array(method.model.head.biases[1])

    m, v = [np.zeros_like(rows), np.zeros_like(b)], [np.zeros_like(rows), np.zeros_like(b)]
    for step in range(1, 4):
        z = f @ np.concatenate([old, rows]).T + np.concatenate([old_b, b])
        error = (softmax(z) - np.eye(z.shape[1])[y])[:, 2:] / len(y)
        gradients: list[Array] = [error.T @ f, error.sum(0)]
        rows = rows * (1 - 0.02 * 0.1)  # weight decay applies to weights, not to biases
        for i, g in enumerate(gradients):
            m[i], v[i] = 0.9 * m[i] + 0.1 * g, 0.999 * v[i] + 0.001 * g**2
            change = 0.02 * (m[i] / (1 - 0.9**step)) / (np.sqrt(v[i] / (1 - 0.999**step)) + 1e-8)
            rows, b = (rows - change, b) if i == 0 else (rows, b - change)

    trainer.train(stage, 1)
    np.testing.assert_allclose(array(method.model.head.blocks[1]), rows, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(array(method.model.head.biases[1]), b, rtol=1e-7, atol=1e-9)


def test_a_task_costs_one_pass_and_its_features_go_with_it(tiny: Any) -> None:
    trainer = learned_before(tiny, "text", STAR, 1)
    method, stream = trainer.method, trainer.stream
    passes = method.model.encoder.passes.total
    trainer.learn(stream[1])
    assert method.model.encoder.passes.total - passes == len(stream[1].train)
    assert not len(method.features)


def test_the_features_of_a_task_are_announced(tiny: Any) -> None:
    method, stream, _ = make(tiny, "token", STAR)
    encoder = sum(p.numel() for p in method.model.encoder.parameters())
    with stream.licence("a test", stream[1].train):
        words = len(stream.batch(stream[1].train))
    assert method.needs(0)[1] == encoder
    assert method.needs(1) == (encoder + words * method.model.encoder.width, 0)


# -- rows of the future


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_a_task_takes_its_rows_from_those_of_the_future_as_they_were_left(tiny: Any, kind: str) -> None:
    changes = {"benchmark.tasks": [2, 1, 2], "head.kind": kind}
    trainer = learned_before(tiny, "text", STAR, 1, **changes)
    method, stream = trainer.method, trainer.stream
    parts = ["blocks", "biases"] if kind == "linear" else ["blocks"]
    held = [getattr(method.model.head.future, name)[0].detach().clone() for name in parts]
    assert [len(rows) for rows in held] == [3] * len(parts)  # the rows of the second and third task
    method.now.begin(stream[1])
    method.now.show_task(stream[1])
    method.grow(stream[1])
    for name, rows in zip(parts, held, strict=True):
        assert torch.equal(getattr(method.model.head, name)[1], rows[:1])
        assert torch.equal(getattr(method.model.head.future, name)[0], rows[1:])


def test_rows_of_the_future_learn_to_score_low_on_the_tasks_before_them(tiny: Any) -> None:
    def score(**more: Any) -> float:
        trainer = learned_before(tiny, "text", {**STAR, "head_epochs": 30, "head_lr": 0.02, **more}, 2)
        method, task = trainer.method, trainer.stream[0]
        with trainer.stream.licence("a test", task.train):
            logits = method.outputs(task.train).logits
        return float((logits[:, 2:] - logits[:, :2].mean(1, keepdim=True)).mean())

    assert score() < score(future=0)


def test_more_classes_than_were_foreseen_get_new_rows(tiny: Any) -> None:
    trainer = learned_before(tiny, "text", {**STAR, "future": 1}, 2, **{"benchmark.tasks": [2, 2]})
    assert trainer.method.model.head.classes == 4
    assert trainer.method.model.head.future.classes == 0
    random = make(tiny, "text", {**STAR, "future": 0}, **{"benchmark.tasks": [2, 2]})
    assert random[0].model.head.future.classes == 0


# -- its name


def test_it_is_found_with_a_star_and_by_a_plain_name_and_its_folder_is_not_seqs() -> None:
    assert find_method("SEQ*") is find_method("seq*") is find_method("SEQstar") is find_method("seqstar") is SEQStar
    assert find_method("SEQ") is not SEQStar
    assert folder_name("SEQ*") == "SEQstar"
    assert folder_name("SEQ* (head_lr=0.1)") == "SEQstar-head-lr=0.1"


@pytest.mark.parametrize(
    "wrong",
    [
        {"warmup_epochs": -1},
        {"warmup_lr": 0.0},
        {"head_epochs": 0},
        {"head_lr": 0.0},
        {"head_steps": -1},
        {"future": -1},
    ],
)
def test_values_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"{next(iter(wrong))} \({next(iter(wrong.values()))}\)"):
        SEQStar(**wrong)
