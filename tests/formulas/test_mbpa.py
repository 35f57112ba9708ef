"""MBPA's adapted heads are compared with Adam and the gradients of both heads in numpy, its adapted networks with a
loop over a copy of the network, and its neighbours with brute force. Training, and prediction with 0 steps, equal SEQ
bit for bit. Predictions leave no trace, need no data and do not depend on each other."""

import copy
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from checks import (
    check_a_finished_run_predicts_the_same,
    check_learner,
    check_resume_equals_the_straight_run,
    counted_run,
    straight_run,
)
from steps import Array, array, assert_equal_bits, make, picked, recorded_passes, softmax, weights
from torch import Tensor

import bace
from bace.core.trainer import Trainer
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.mbpa import MBPA
from bace.models.loading import load_encoder

FAST = {"name": "mbpa", "K": 3, "steps": 4, "lr_local": 0.02}


def learned(tiny: Any, modality: str, tasks: int = 2, **changes: Any) -> Any:
    """Return the method after some tasks, ready to predict, with all examples open."""
    options = {name: changes.pop(name) for name in list(changes) if "." not in name}
    method, stream, config = make(tiny, modality, {**FAST, **options}, **changes)
    trainer = Trainer(method, stream, config)
    for task in stream[:tasks]:
        trainer.learn(task)
    stream._open[:] = True
    return method


def asked(method: Any, count: int = 5) -> Batch:
    """Return test examples of all tasks."""
    tests = [task.test[: count - count // 2] for task in method.stream]
    found: Batch = method.stream.batch(torch.cat(tests)[:count])
    return found


# -- the memory: keys, neighbours


def pre_trained_key(tiny: Any, modality: str, method: Any, example: int) -> Array:
    """Return the first token of the encoder on disk for a single example."""
    encoder = load_encoder(tiny.vit if modality == "image" else tiny.bert).to(torch.get_default_dtype()).eval()
    with torch.no_grad():
        return array(encoder(method.stream.data.inputs(torch.tensor([example]), None, torch.device("cpu")))[0, 0])


@pytest.mark.parametrize("modality", ["image", "text", "token"])
def test_neighbours_are_the_nearest_by_brute_force_with_the_pre_trained_encoder(tiny: Any, modality: str) -> None:
    method = learned(tiny, modality)
    slots = method.memory.examples.tolist()
    keys = np.stack([pre_trained_key(tiny, modality, method, e) for e in slots])
    np.testing.assert_allclose(array(method.memory.keys), keys, atol=1e-12)
    batch = asked(method)
    for example, found in zip(batch.examples.tolist(), method.neighbours(batch).tolist(), strict=True):
        distance = np.linalg.norm(keys - pre_trained_key(tiny, modality, method, example), axis=1)
        assert found == sorted(np.argsort(distance, kind="stable")[:3].tolist())


def test_a_key_never_changes_once_it_is_written(tiny: Any) -> None:
    method, stream, config = make(tiny, "image", FAST, **{"benchmark.tasks": [2, 1, 2]})
    trainer = Trainer(method, stream, config)
    written: dict[int, Tensor] = {}
    start = weights(method.key_model)
    for task in stream:
        trainer.learn(task)
        found = dict(zip(method.memory.examples.tolist(), method.memory.get_buffer("keys"), strict=True))
        assert not any(key.isnan().any() for key in found.values())
        kept = written.keys() & found.keys()
        assert len(kept) > 0 or task.index == 0
        assert all(torch.equal(written[e], found[e]) for e in kept)
        written |= found
    assert_equal_bits(weights(method.key_model), start)


# -- the adapted heads


class ByHand:
    """One head in numpy: z, and the gradient of sum_k (1/K) CE(z_W(x_k), y_k) for each of its parameters."""

    def __init__(self, head: Any) -> None:
        self.start = {name: array(p) for name, p in head.named_parameters()}
        self.blocks = [name for name in self.start if name.startswith("blocks")]
        self.sizes = [len(self.start[name]) for name in self.blocks]
        self.cosine = "sigma" in self.start

    def logits(self, w: dict[str, Array], h: Array) -> Array:
        rows = np.concatenate([w[name] for name in self.blocks])
        if not self.cosine:
            return h @ rows.T + np.concatenate([w[name.replace("blocks", "biases")] for name in self.blocks])
        unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        return w["sigma"] * (h / np.linalg.norm(h, axis=1, keepdims=True)) @ unit.T

    def gradient(self, w: dict[str, Array], h: Array, y: Array) -> dict[str, Array]:
        z = self.logits(w, h)
        error = (softmax(z) - np.eye(z.shape[1])[y]) / len(y)  # dL/dz
        if not self.cosine:
            by_rows = error.T @ h
            biases = np.split(error.sum(0), np.cumsum(self.sizes)[:-1])
            rest = {name.replace("blocks", "biases"): g for name, g in zip(self.blocks, biases, strict=True)}
        else:
            rows = np.concatenate([w[name] for name in self.blocks])
            norm = np.linalg.norm(rows, axis=1, keepdims=True)
            unit = rows / norm
            by_unit = w["sigma"] * error.T @ (h / np.linalg.norm(h, axis=1, keepdims=True))
            by_rows = (by_unit - (by_unit * unit).sum(1, keepdims=True) * unit) / norm
            rest = {"sigma": (error * z).sum() / w["sigma"]}
        return rest | dict(zip(self.blocks, np.split(by_rows, np.cumsum(self.sizes)[:-1]), strict=True))

    def adapted(self, h: Array, y: Array, steps: int, lr: float, pull: float) -> dict[str, Array]:
        """Run Adam (Kingma and Ba, 2015, algorithm 1) on the loss and pull * |W - W_base|^2."""
        w = {name: value.copy() for name, value in self.start.items()}
        first, second = ({name: np.zeros_like(value) for name, value in w.items()} for _ in range(2))
        for t in range(1, steps + 1):
            for name, g in self.gradient(w, h, y).items():
                g = g + 2 * pull * (w[name] - self.start[name])
                first[name] = 0.9 * first[name] + 0.1 * g
                second[name] = 0.999 * second[name] + 0.001 * g**2
                step = (first[name] / (1 - 0.9**t)) / (np.sqrt(second[name] / (1 - 0.999**t)) + 1e-8)
                w[name] = w[name] - lr * step
        return w


@pytest.mark.parametrize("kind", ["cosine", "linear"])
@pytest.mark.parametrize("modality", ["image", "token"])
def test_every_example_is_predicted_by_a_head_adapted_to_its_own_neighbours(
    tiny: Any, modality: str, kind: str
) -> None:
    method = learned(tiny, modality, lambda_local=0.3, **{"head.kind": kind})
    batch = asked(method)
    scores, base = method.predict(batch), method.predict(batch, "base")
    features = array(method.infer([batch]).features)
    hand = ByHand(method.model.head)
    np.testing.assert_allclose(hand.logits(hand.start, features), array(base), atol=1e-10)
    assert len({tuple(slots) for slots in method.neighbours(batch).tolist()}) > 1
    for i, slots in enumerate(method.neighbours(batch)):
        near = method.stream.batch(method.memory.examples[slots])  # clean views
        known = array(method.infer([near]).features)
        w = hand.adapted(known, near.targets.numpy(), 4, 0.02, 0.3)
        own = (batch.owner == i).numpy()
        np.testing.assert_allclose(array(scores)[own], hand.logits(w, features[own]), atol=1e-7)
        assert not np.allclose(array(scores)[own], array(base)[own], atol=1e-2)


def test_a_fixed_scale_stays_fixed(tiny: Any) -> None:
    method = learned(tiny, "image", **{"head.sigma_learn": False})
    adapted = method.adapted_heads(method.model.head.merged(), method.neighbours(asked(method)))
    assert {name: value.shape for name, value in adapted.items()} == {"blocks.0": (5, 4, 16)}


def test_many_heads_are_adapted_in_parts(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    method = learned(tiny, "token")
    batch = asked(method, 8)
    together = method.predict(batch)
    monkeypatch.setattr("bace.methods.mbpa.AT_ONCE", 1)
    torch.testing.assert_close(method.predict(batch), together)


# -- the adapted networks


def by_copy(method: Any, near: Batch, query: Batch) -> Tensor:
    """Return the logits of a copy of the network after Adam on the whole objective, by autograd."""
    model = copy.deepcopy(method.model).eval()
    base = [p.detach().clone() for p in model.parameters()]
    optimiser = torch.optim.Adam(model.parameters(), lr=method.lr_local)
    for _ in range(method.steps):
        away = torch.stack([((p - b) ** 2).sum() for p, b in zip(model.parameters(), base, strict=True)]).sum()
        loss = F.cross_entropy(model(near).logits, near.targets) + method.lambda_local * away
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    logits: Tensor = model(query).logits.detach()
    return logits


@pytest.mark.parametrize("modality", ["image", "text", "token"])
def test_the_whole_network_is_adapted_as_a_copy_of_it_would_be_trained(tiny: Any, modality: str) -> None:
    method = learned(tiny, modality, adapt="all", steps=3, lr_local=0.002, lambda_local=0.5)
    batch = asked(method, 3)
    scores, base = method.predict(batch), method.predict(batch, "base")
    for i, slots in enumerate(method.neighbours(batch)):
        near = method.stream.batch(method.memory.examples[slots])
        own = (batch.owner == i).nonzero().flatten()
        expected = by_copy(method, near, picked(batch, own))
        torch.testing.assert_close(scores[own], expected, atol=1e-7, rtol=0)
        assert not torch.allclose(expected, base[own], atol=1e-2)


def test_frozen_blocks_are_not_adapted(tiny: Any) -> None:
    method = learned(tiny, "text", adapt="all", **{"backbone.freeze": 1})
    adapted = method.adapted_network(method.neighbours(asked(method))[0])
    assert set(adapted) == {name for name, p in method.model.named_parameters() if p.requires_grad}
    assert any("encoder" in name for name in adapted)
    assert len(adapted) < len(list(method.model.named_parameters()))


def test_examples_with_the_same_neighbours_share_one_adaptation(tiny: Any) -> None:
    method = learned(tiny, "image", adapt="all", K=32)  # eight slots, all of them neighbours of every example
    batch = asked(method)
    with recorded_passes() as passes:
        method.predict(batch)
    own = [p.batch for p in passes if p.model is method.model]
    assert [len(b) for b in own] == [8] * 4 + [5]  # four steps, and one pass for all queries
    assert not any(p.training for p in passes)


# -- the objective


@pytest.mark.parametrize("adapt", ["head", "all"])
def test_a_strong_pull_keeps_the_weights_where_they_were(tiny: Any, adapt: str) -> None:
    method = learned(tiny, "image", adapt=adapt, steps=20, lr_local=0.001)

    def moved(pull: float) -> float:
        method.lambda_local = pull
        slots, head = method.neighbours(asked(method)), method.model.head.merged()
        new = method.adapted_heads(head, slots) if adapt == "head" else method.adapted_network(slots[0])
        base = dict((head if adapt == "head" else method.model).named_parameters())
        return max((w - base[name].detach()).abs().max().item() for name, w in new.items())

    assert moved(0.0) > 10 * method.lr_local
    assert moved(1e6) < 3 * method.lr_local  # Adam's steps have the size of its rate, so weights go back and forth


# -- prediction changes nothing


@pytest.mark.parametrize("adapt", ["head", "all"])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_predicting_leaves_every_parameter_and_buffer_bit_for_bit(tiny: Any, adapt: str, mode: Any) -> None:
    method = learned(tiny, "text", adapt=adapt)
    method.zero_grad()
    before = weights(method)
    batch = asked(method)
    with mode():
        scores = method.predict(batch)
        again = method.predict(batch)
    assert_equal_bits(weights(method), before)
    assert torch.equal(scores, again)
    assert all(p.grad is None for p in method.parameters())
    assert all(p.requires_grad for p in method.model.parameters())
    assert torch.equal(method.predict(batch), scores)


@pytest.mark.parametrize("adapt", ["head", "all"])
@pytest.mark.parametrize("modality", ["image", "token"])
def test_a_prediction_does_not_depend_on_what_else_is_asked(tiny: Any, modality: str, adapt: str) -> None:
    method = learned(tiny, modality, adapt=adapt)
    batch = asked(method)
    together = method.predict(batch)
    alone = [method.predict(method.stream.batch(example[None])) for example in batch.examples]
    torch.testing.assert_close(together, torch.cat(alone))


# -- SEQ


@pytest.mark.parametrize("modality", ["image", "text", "token"])
def test_without_steps_it_is_seq_bit_for_bit_and_with_them_it_is_trained_so(tiny: Any, modality: str) -> None:
    seq, off, on = (bace.run(tiny.settings(modality, method=m)) for m in ("seq", {"name": "mbpa", "steps": 0}, FAST))
    assert seq.matrix == off.matrix
    assert_equal_bits(weights(seq.method.model), weights(off.method.model))
    assert_equal_bits(weights(seq.method.model), weights(on.method.model))
    without = on.metrics["scorers"]["base"]
    assert without["A"] == seq.metrics["A"]
    stream = seq.method.stream
    with stream.licence("test", stream[2].test):
        batch = stream.batch(stream[2].test[:3])
    assert not torch.equal(on.method.predict(batch), seq.method.predict(batch))


# -- without the data


@pytest.mark.parametrize("modality", ["image", "text", "token"])
def test_a_saved_network_is_adapted_without_the_data(tiny: Any, modality: str, tmp_path: Path) -> None:
    method: Any = {**FAST, "adapt": "all", "sample": 0, "steps": 2}
    straight_run(tiny, method, modality, tmp_path / "straight")
    check_a_finished_run_predicts_the_same(tiny, method, modality, tmp_path)
    if modality == "token":
        check_learner(tiny, method, modality, tmp_path)


def test_resume_with_the_whole_network_adapted_is_exact(tiny: Any, tmp_path: Path) -> None:
    method: Any = {**FAST, "adapt": "all", "sample": 2, "steps": 2}
    counted_run(tiny, method, "token", tmp_path)
    check_resume_equals_the_straight_run(tiny, method, "token", tmp_path)


# -- cost


def test_a_sample_is_evaluated_and_said_to_be_one(tiny: Any, tmp_path: Path) -> None:
    method: Any = {**FAST, "adapt": "all", "sample": 7, "steps": 1}
    result = straight_run(tiny, method, "image", tmp_path / "run")
    assert result.metrics["evaluated"] == [7, 6, 7]  # out of 12, 6 and 12
    assert all((7 * score / 100) == pytest.approx(round(7 * score / 100)) for score in result.matrix[2][::2])
    first, last = (result.method.evaluated(result.method.stream[t]) for t in (0, 2))
    assert len(set(first.tolist())) == 7
    assert set(first.tolist()) <= set(result.method.stream[0].test.tolist())
    assert (first - first[0]).tolist() != (last - last[0]).tolist()  # each task has its own draw
    assert torch.equal(first, result.method.evaluated(result.method.stream[0]))  # the same after every task
    assert "evaluated" not in bace.run(tiny.settings("image", method=FAST)).metrics


@pytest.mark.parametrize(("adapt", "what", "examples"), [("head", "head", 18), ("all", "whole network", 12)])
def test_its_cost_is_logged_before_each_evaluation(
    tiny: Any, tmp_path: Path, adapt: str, what: str, examples: int
) -> None:
    straight_run(tiny, {**FAST, "adapt": adapt, "sample": 6}, "image", tmp_path / "run")
    events = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    kinds = [event["event"] for event in events if event["event"] in ("cost", "task")]
    assert kinds == ["cost", "task"] * 3
    said = next(event["prediction"] for event in events if event["event"] == "cost" and event["task"] == 2)
    assert f"the {what} to 3 neighbours for each of {examples} examples: up to {4 * examples} forward" in said


def test_a_learner_says_the_cost_to_those_who_listen(tiny: Any, caplog: pytest.LogCaptureFixture) -> None:
    settings = {k: v for k, v in tiny.settings("text").items() if not k.startswith("benchmark")}
    learner = bace.Learner(FAST, **settings).partial_fit(["w1 w2", "w11 w12"], ["ant", "bee"])
    with caplog.at_level(logging.INFO, logger="bace"):
        learner.predict(["w1 w1", "w13", "w14"])
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "MBPA adapts the head to 2 neighbours for each of 3 examples"
    ]


@pytest.mark.parametrize("wrong", [{"K": 0}, {"steps": -1}, {"lr_local": 0.0}, {"lambda_local": -1.0}, {"sample": -1}])
def test_impossible_values_are_refused(wrong: dict[str, Any]) -> None:
    (name, value), *_ = wrong.items()
    with pytest.raises(ConfigError, match=rf"{name} \({value}\)"):
        MBPA(**wrong)


def test_no_memory_is_refused(tiny: Any) -> None:
    with pytest.raises(ConfigError, match="memory is 0"):
        make(tiny, "image", FAST, **{"memory.size": 0})
