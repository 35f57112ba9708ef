"""GD: global distillation. K. Lee, K. Lee, Shin, H. Lee, "Overcoming Catastrophic Forgetting with Unlabeled Data in the
Wild", ICCV 2019; without external data.

P is the network of the previous task (`teacher`), and C is trained for the current task alone (`local`). The network
learns from the labels, from P over all old classes and from C over the new classes; then its head is balanced.
"""

import copy
import dataclasses
import math
from typing import Unpack, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from bace.core.method import Card, Passes
from bace.core.stage import Loss, Stage
from bace.core.stream import Task
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.er import ER
from bace.methods.parts.losses import distillation
from bace.methods.parts.replay import ReplayOptions
from bace.models.model import Model


class GD(ER):
    """Replay, distil from the previous network and from a teacher of the current task, then balance the head.

    Args:
        reduction: as in ER (the original uses `joint`); the last stage always takes one mean over all rows.
        kd_weight: weight of both distillations; 0 also leaves out the teacher of the current task.
        T: temperature of the distillations.
        confidence: weight of the loss that makes this teacher unsure about old examples.
        finetune_epochs: epochs of the last stage; 0 leaves it out.
        finetune_lr: its learning rate, as a factor of the main stage's.
    """

    paper = "Lee et al., Overcoming Catastrophic Forgetting with Unlabeled Data in the Wild, ICCV 2019"
    takes_o = False
    keeps_teacher = True
    networks = 2  # the student and the teacher of the task
    card = Card(
        mechanism="replay; distillation from the previous network and a teacher of the current task; balanced head",
        o_rows="refused: O belongs to no single task, so neither the current teacher nor the weights are defined",
        stages=("teacher", "main", "finetune"),
        replay="concat",
        reading="There is no external data. The first task is plain training, as in the authors' code. The memory is "
        "herded. The class counts of the last stage are how often an epoch shows a class. The last stage has 1 epoch "
        "to 5 epochs of the main stage (20 to 180 in the original).",
    )

    local: Model | None  # C, which exists only while a task is learned

    def __init__(
        self,
        kd_weight: float = 1.0,
        T: float = 2.0,
        confidence: float = 1.0,
        finetune_epochs: int = 1,
        finetune_lr: float = 0.1,
        **replay: Unpack[ReplayOptions],
    ) -> None:
        super().__init__(**replay)
        if min(kd_weight, confidence, finetune_epochs) < 0:
            raise ConfigError(
                f"GD: kd_weight ({kd_weight}), confidence ({confidence}) and finetune_epochs ({finetune_epochs}) must "
                "be at least 0; 0 leaves each of them out"
            )
        if min(T, finetune_lr) <= 0:
            raise ConfigError(f"GD: T ({T}) and finetune_lr ({finetune_lr}) must be above 0")
        self.kd_weight, self.T, self.confidence = kd_weight, T, confidence
        self.finetune_epochs, self.finetune_lr = finetune_epochs, finetune_lr
        self.cost = Passes(8, 8, task=1 + 6 * finetune_epochs)
        self.local = None
        # weights of the last stage, recomputed by before_epoch: (3, seen), among all seen, the old and the new classes
        self.weights = torch.ones(3, 0)

    def stages(self, task: Task) -> list[Stage]:
        (main,) = stages = super().stages(task)
        if not task.index:
            return stages
        if self.kd_weight:
            teacher = dataclasses.replace(
                main,
                name="teacher",
                loss=self.loss_teacher,
                module=lambda: cast(Model, self.local),
                structure=self.copy_network,
            )
            stages.insert(0, teacher)
        if self.finetune_epochs:
            finetune = dataclasses.replace(
                main,
                name="finetune",
                loss=self.loss_finetune,
                epochs=self.finetune_epochs,
                groups=lambda: {"head": self.model.head.parameters()},
                schedule=lambda epochs: self.finetune_lr,
            )
            stages.append(finetune)
        return stages

    def copy_network(self) -> None:
        self.local = copy.deepcopy(self.model)

    def shrink(self, task: Task) -> None:
        self.local = self.teacher = None

    # -- the teacher of the current task

    def loss_teacher(self, batch: Batch) -> Loss:
        """CE(z_new, y) on the task's rows; on the others KL(uniform || softmax(z_new)) = -mean_c log p_c - log N."""
        assert self.local is not None
        both, known = self.with_replay(batch), self.now.known
        log_p = F.log_softmax(self.local(both).logits[:, known:], 1)
        own = self.labels(both) >= known
        terms = {}
        if own.any():
            terms["new"] = F.nll_loss(log_p[own], both.targets[own] - known)
        if self.confidence and not own.all():
            terms["unsure"] = self.confidence * (-log_p[~own].mean() - math.log(log_p.shape[1]))
        return terms

    # -- the network

    def loss(self, batch: Batch) -> Loss:
        both = self.with_replay(batch)
        logits = self.model(both).logits
        means = self.count_means(both, len(batch))
        distil = {name: means * term for name, term in self.distil(logits, both).items()}
        return {**self.cross_entropy(logits, both, len(batch)), **distil}

    def loss_finetune(self, batch: Batch) -> Loss:
        """The same loss as one mean in which each row is weighted by its class."""
        both = self.with_replay(batch)
        logits = self.model(both).logits
        seen, old, new = self.weights[:, both.targets]
        balanced = (seen * F.cross_entropy(logits, both.targets, reduction="none")).mean()
        return {"balanced": balanced, **self.distil(logits, both, old, new)}

    def distil(
        self,
        logits: Tensor,  # (rows, seen)
        batch: Batch,
        old_weights: Tensor | None = None,  # (rows,)
        new_weights: Tensor | None = None,  # (rows,)
    ) -> dict[str, Tensor]:
        """O/S T^2 KL(P || z_old) + N/S T^2 KL(C || z_new), on all rows, where each soft-max spans its own classes."""
        if not self.kd_weight or self.teacher is None or self.local is None:
            return {}
        known, seen = self.now.known, self.now.seen
        previous = F.log_softmax(self.infer([batch], self.teacher).logits / self.T, 1)
        current = F.log_softmax(self.infer([batch], self.local).logits[:, known:] / self.T, 1)
        old = distillation(logits, previous, tau=self.T, weights=old_weights)
        new = distillation(logits[:, known:], current, tau=self.T, weights=new_weights)
        return {
            "previous": self.kd_weight * known / seen * old,
            "current": self.kd_weight * (seen - known) / seen * new,
        }

    # -- balance

    def before_epoch(self, stage: Stage) -> None:
        if stage.name == "finetune":
            known, counts = self.now.known, self.shown(stage)
            old, new = _balance(counts[:known]), _balance(counts[known:])
            parts = [_balance(counts), torch.cat([old, torch.ones_like(new)]), torch.cat([torch.ones_like(old), new])]
            self.weights = torch.stack(parts).to(self.stream.device)

    def shown(self, stage: Stage) -> Tensor:  # (seen,)
        """How often an epoch of the stage shows each class: the task's examples count once, examples from memory on
        average."""
        examples, seen = stage.examples(), self.now.seen
        counts = self.stream.labels(examples)[1].bincount(minlength=seen).to(torch.get_default_dtype())
        if self.policy.mode == "batch" and len(self.memory):
            slots = self.stream.labels(self.memory.examples)[1].bincount(minlength=seen)
            steps = math.ceil(len(examples) / stage.batch_size)
            counts += slots * (steps * self.replay_size / len(self.memory))
        return counts


def _balance(counts: Tensor) -> Tensor:  # (classes,) -> (classes,)
    """w_y = n_total / (n_y #classes): every class weighs the same, and the mean over samples is 1."""
    return counts.sum() / (counts * counts.count_nonzero())
