"""Tuning the additions to a frozen encoder on one task, with a head that is used for nothing else.

Methods for pre-trained encoders do this on the first task only (APER, RanPAC) or on every task (EASE, MOS).
"""

import math
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from bace.core.method import Method
from bace.core.stage import Stage, enough_steps
from bace.core.stream import Task
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.models.additions import Additions
from bace.models.heads import CosineHead
from bace.randomness import generator


def begin_tuning(method: Method, task: Task, additions: Additions, sigma: float = 1.0) -> None:
    """For `Method.grow`: add a set of additions, and replace the model's head by a cosine head for the task's classes
    whose scale starts at `sigma`."""
    seed, device = method.now.seed, method.stream.device
    additions.grow(generator(seed, "additions", task.index), device)
    head = CosineHead(method.model.encoder.width, sigma).to(device)
    head.grow(len(task.classes), generator(seed, "head", task.index))
    method.model.head = head


def tuning_stage(
    method: Method, task: Task, additions: Additions, *, epochs: int, lr: float, batch_size: int, **changes: Any
) -> Stage:
    """A stage that trains the newest set and the head with cross-entropy over the task's classes, by SGD with momentum
    0.9, weight decay 5e-4 and a learning rate that falls to 0 along a cosine."""
    fields: dict[str, Any] = {
        "name": "tune",
        "loss": lambda batch: local_cross_entropy(method, task, batch),
        "epochs": epochs,
        "batch_size": batch_size,
        "groups": lambda: {"additions": additions.parameters_of(-1), "head": method.model.head.parameters()},
        "optimiser": "sgd",
        "lr": lr,
        "momentum": 0.9,
        "weight_decay": 5e-4,
        "schedule": cosine(epochs),
    }
    return method.stage(task, **{**fields, **changes})


def local_cross_entropy(method: Method, task: Task, batch: Batch) -> Tensor:
    """CE over the classes of this task; the head has no others."""
    return F.cross_entropy(method.model(batch).logits, batch.targets - task.classes.start)


def local_validation_loss(method: Method, task: Task, examples: Tensor) -> float:
    """The same on clean views, for early stopping."""
    logits, targets = method.scored(examples)
    return float(F.cross_entropy(logits, targets - task.classes.start))


def cosine(epochs: int) -> Callable[[float], float]:
    """(1 + cos(pi e / E)) / 2: from 1 at the start to 0 at the end."""
    return lambda done: 0.5 * (1.0 + math.cos(math.pi * min(done / epochs, 1.0)))


def long_stage(
    method: Method, task: Task, *, epochs: int, batch_size: int, least: int, falls: bool = False, **fields: Any
) -> Stage:
    """A stage of at least `least` steps without weight decay. Its learning rate is constant or falls to 0 along a
    cosine."""
    epochs, batch_size = enough_steps(len(method.training_examples(task)), epochs, batch_size, least)
    schedule = cosine(epochs) if falls else lambda done: 1.0
    named: dict[str, Any] = {"name": "tune", "weight_decay": 0.0, "schedule": schedule}
    return method.stage(task, epochs=epochs, batch_size=batch_size, **{**named, **fields})


def check_tuning(title: str, epochs: int, lr: float, batch: int, steps: int = 0) -> None:
    if min(epochs, batch) < 1 or lr <= 0:
        raise ConfigError(
            f"{title}: tune_epochs ({epochs}) and tune_batch ({batch}) must be at least 1, tune_lr ({lr}) above 0"
        )
    if steps < 0:
        raise ConfigError(f"{title}: tune_steps ({steps}) must be at least 0")
