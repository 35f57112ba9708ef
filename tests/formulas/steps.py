"""Helpers for the formula tests of whole methods. They bring a method to the first step of a task, record the passes of
the network, and compute the formulas of the specification in numpy, independently of the code under test."""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook

from bace.config.parse import config_from
from bace.config.schema import Config
from bace.core.method import Method
from bace.core.stage import Stage
from bace.core.stream import Stream
from bace.core.trainer import Trainer
from bace.data.batch import Batch
from bace.experiments.assemble import assemble
from bace.models.model import Model

Array = NDArray[np.float64]


# -- bringing a method to a task or stage


def make(tiny: Any, modality: str, method: dict[str, Any], **changes: Any) -> tuple[Method, Stream, Config]:
    """Return a method before its first task, without dropout."""
    backbone = {} if modality == "image" else {"backbone": without_dropout(tiny.bert)}
    settings = {"measure.fwt": False, "benchmark.tasks": [2, 2], "train.lr": 0.05, **backbone, **changes}
    config = config_from(tiny.settings(modality, method=method, **settings))
    learned, stream = assemble(config)
    return learned, stream, config


def at_task(tiny: Any, modality: str, method: dict[str, Any], task: int = 1, **changes: Any) -> Any:
    """Return a method that has learned the tasks before `task` and is at the first step of the first epoch of
    `task`."""
    trainer = learned_before(tiny, modality, method, task, **changes)
    begin(trainer, task)
    return trainer.method


def learned_before(tiny: Any, modality: str, method: dict[str, Any], task: int, **changes: Any) -> Trainer:
    learned, stream, config = make(tiny, modality, method, **changes)
    trainer = Trainer(learned, stream, config)
    for earlier in range(task):
        trainer.learn(stream[earlier])
    return trainer


def some(method: Any, count: int = 4) -> Batch:
    """Return the first examples of the current task, in the view of the current epoch."""
    found: Batch = method.stream.batch(method.stream[method.now.task].train[:count], view=method.now.view())
    return found


def some_of_all(method: Any, count: int = 4) -> Batch:
    """Return examples spread over the whole current task, in which the classes follow one another."""
    ids = method.stream[method.now.task].train
    found: Batch = method.stream.batch(ids[:: len(ids) // count][:count].contiguous(), view=method.now.view())
    return found


def features_of(encoder: Any, batch: Batch) -> Array:  # (examples, width)
    """Return the class tokens."""
    with torch.no_grad():
        return array(encoder(batch.inputs)[:, 0])


def begin(trainer: Trainer, task: int) -> None:
    enter(trainer, task)
    stand_at(trainer, trainer.method.stages(trainer.stream[task])[0])


def enter(trainer: Trainer, task: int) -> None:
    current = trainer.stream[task]
    trainer.enter(current)
    trainer.method.before_task(current)
    trainer.method.grow(current)


def stand_at(trainer: Trainer, stage: Stage) -> None:
    """Bring the trainer to the first step of a stage."""
    trainer.now.begin_stage(stage.name)
    for make_ready in (stage.structure, stage.prepare):
        if make_ready:
            make_ready()
    trainer.method.eval()
    trainer.method.before_epoch(stage)
    stage.module().train()


def at_stage(
    tiny: Any, modality: str, method: dict[str, Any], name: str, task: int = 1, **changes: Any
) -> tuple[Any, Trainer, Stage]:
    """Return a method that has learned the tasks before `task` and the stages of `task` before `name`, at the first
    step of stage `name`."""
    trainer = learned_before(tiny, modality, method, task, **changes)
    enter(trainer, task)
    trainer.now.phase, stages = "train", trainer.method.stages(trainer.stream[task])
    while stages[trainer.now.stages_done].name != name:
        trainer.train(stages[trainer.now.stages_done], len(stages))
        next_stage(trainer)
    stage = stages[trainer.now.stages_done]
    stand_at(trainer, stage)
    trainer.now.prepared = True
    return trainer.method, trainer, stage


def next_stage(trainer: Trainer) -> None:
    trainer.now.stages_done += 1
    trainer.now.begin_stage("")


def changed_in_stages(trainer: Trainer) -> dict[tuple[int, str], set[str]]:
    """Learn all tasks. Return, for each (task, stage), the names of the tensors that the stage changed or created,
    including in `prepare`."""
    method, found, train = trainer.method, {}, trainer.train

    def noted(stage: Any, stages: int) -> None:
        before = weights(method)
        train(stage, stages)
        after = weights(method)
        found[method.now.task, stage.name] = {
            name for name, value in after.items() if name not in before or not torch.equal(before[name], value)
        }

    trainer.train = noted  # type: ignore[method-assign]
    for task in trainer.stream:
        trainer.learn(task)
    return found


def take_step(method: Any, batch: Batch, lr: float = 0.05) -> None:
    """Take one plain gradient step."""
    method.model.zero_grad()
    torch.stack(list(method.loss(batch).values())).sum().backward()
    with torch.no_grad():
        for p in method.model.parameters():
            if p.grad is not None:
                p -= lr * p.grad
    method.model.zero_grad()


def without_dropout(backbone: str) -> str:
    """Return a folder with the same weights and a configuration without dropout."""
    folder = Path(f"{backbone}-without-dropout")
    if not folder.exists():
        shutil.copytree(backbone, folder)
        config = json.loads((folder / "config.json").read_text())
        config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def weights(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items() if isinstance(value, Tensor)}


def assert_equal_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


# -- the passes of the network


@dataclass
class Pass:
    model: Model
    training: bool
    batch: Batch


@contextmanager
def recorded_passes() -> Iterator[list[Pass]]:
    """Record every pass of a student (in training mode or not) or a teacher, in order."""
    passes: list[Pass] = []

    def record(module: torch.nn.Module, arguments: Any) -> None:
        if isinstance(module, Model):
            passes.append(Pass(module, module.training, arguments[0]))

    handle = register_module_forward_pre_hook(record)
    try:
        yield passes
    finally:
        handle.remove()


# -- formulas, in numpy


def softmax(logits: Array) -> Array:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    result: Array = powers / powers.sum(-1, keepdims=True)
    return result


def cross_entropy(logits: Array, targets: Array) -> float:
    return float(-np.log(softmax(logits)[np.arange(len(targets)), targets]).mean())


def kl_slice(student: Array, teacher: Array, tau: float = 1.0, direction: str = "forward") -> Array:
    """Return the divergence of each row. P is the soft-max over all columns, cut to the teacher's columns
    (docs/bace.md, 3.1)."""
    return divergence(softmax(teacher / tau), softmax(student / tau)[:, : teacher.shape[1]], direction)


def kl_renorm(student: Array, teacher: Array, tau: float = 1.0, direction: str = "forward") -> Array:
    """Return the divergence of each row. Both distributions are renormalised over the teacher's columns."""
    return divergence(softmax(teacher / tau), softmax(student[:, : teacher.shape[1]] / tau), direction)


def divergence(p0: Array, p: Array, direction: str) -> Array:
    """Return for each row KL(P0 || P), with the teacher's P0 first (`forward`), or KL(P || P0) (`reverse`)."""
    first, second = (p0, p) if direction == "forward" else (p, p0)
    result: Array = (first * (np.log(first) - np.log(second))).sum(1)
    return result


def array(tensor: Tensor) -> Array:
    """Return a copy, which later training does not change."""
    result: Array = tensor.detach().to(torch.float64, copy=True).numpy()
    return result


def logits_of(model: Model, batch: Batch) -> Array:
    with torch.no_grad():
        return array(model(batch).logits)


class Neighbourhood:
    """Effect_new of a batch, computed by brute force over the task's own rows: indices, weights and the mixture."""

    def __init__(self, method: Any, batch: Batch, teacher: Model, own: list[int], pool: list[int]) -> None:
        stream, view = method.stream, method.now.view()
        with torch.no_grad():
            features = array(teacher.eval()(stream.rows(torch.tensor(pool), view=view)).features)
        if method.knn_normalize:
            features /= np.linalg.norm(features, axis=1, keepdims=True)
        self.own, self.targets = own, batch.targets[own].numpy()
        self.members: list[list[int]] = []
        self.shares: list[Array] = []
        for row in batch.rows[own].tolist():
            i = pool.index(row)
            distance = {j: max(float(np.linalg.norm(features[j] - features[i])), 1e-6) for j in range(len(pool))}
            del distance[i]
            nearest = sorted(distance, key=lambda j: (distance[j], j))[: method.K]
            closeness = np.array([1 / distance[j] for j in nearest])
            self.members.append([pool[j] for j in nearest])
            self.shares.append((1 - method.W0) * closeness / closeness.sum())
        self.method, self.view = method, view

    def scores(self, model: Model) -> Array:  # (anchors, K)
        """Return S(x_j)[y_i] of the neighbours."""
        found = []
        for members, y in zip(self.members, self.targets, strict=True):
            rows = self.method.stream.rows(torch.tensor(members), view=self.view)
            found.append(softmax(logits_of(model, rows))[:, y])
        return np.stack(found)

    def mixture(self, logits: Array, neighbours: Array) -> Array:  # (anchors,)
        anchor = softmax(logits[self.own])[np.arange(len(self.own)), self.targets]
        result: Array = self.method.W0 * anchor + (np.stack(self.shares) * neighbours).sum(1)
        return result

    def loss(self, logits: Array, neighbours: Array) -> float:
        return float(-np.log(self.mixture(logits, neighbours)).mean())


def picked(batch: Batch, rows: Tensor) -> Batch:  # rows: positions in the batch
    """Return the same inputs with only these rows selected (tokens), or only these examples (images, texts)."""
    if batch.at is not None:
        return dataclasses.replace(batch, targets=batch.targets[rows], rows=batch.rows[rows], at=batch.at[rows])
    inputs = {key: value[rows] for key, value in batch.inputs.items()}
    return Batch(inputs, batch.targets[rows], batch.examples[rows], batch.rows[rows])
