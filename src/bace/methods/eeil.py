"""EEIL: end-to-end incremental learning. Castro, Marín-Jiménez, Guil, Schmid, Alahari, ECCV 2018.

The first stage learns the new classes and the exemplars, and distils from the network of the previous task. The second
stage fine-tunes on a class-balanced set and distils from the network of the first stage.
"""

from typing import Unpack

import torch
from torch import Tensor

from bace.core.method import Card, Passes
from bace.core.stage import Loss, Stage
from bace.core.stream import Task
from bace.data.batch import NO_IDS, Batch
from bace.errors import ConfigError
from bace.methods.er import ER
from bace.methods.parts.losses import soft_cross_entropy
from bace.methods.parts.replay import ReplayOptions
from bace.models.model import frozen_copy


class EEIL(ER):
    """Replay and distil each task's block of the head, then fine-tune on a balanced set.

    Args:
        kd_weight: weight of the distillation, in both stages.
        T: temperature of the distillation.
        noise: standard deviation of the noise added to every gradient in the first epoch; it falls as
            (1 + epoch)^-0.55. The original adds 0.3 to gradients summed over 128 examples, which is 0.3/128 here.
        balanced_epochs: epochs of the second stage; 0 leaves it out.
        balanced_lr: its learning rate, as a factor of the first stage's.
    """

    paper = "Castro et al., End-to-End Incremental Learning, ECCV 2018"
    takes_o = False
    keeps_teacher = True
    card = Card(
        mechanism="replay; distillation of each task's block of the head; balanced fine-tuning",
        o_rows="refused: every sentence shows O, so there is no class-balanced set of sentences",
        stages=("main", "balanced"),
        replay="concat",
        reading="There is no factor T^2. The second stage also distils the newest block, from the network of the "
        "first stage, at a constant learning rate. Gradient noise is off, because a pre-trained network does not need "
        "it.",
    )

    balanced: Tensor  # (examples,) ids of the second stage; empty outside of it

    def __init__(
        self,
        kd_weight: float = 1.0,
        T: float = 2.0,
        noise: float = 0.0,
        balanced_epochs: int = 30,
        balanced_lr: float = 0.1,
        **replay: Unpack[ReplayOptions],
    ) -> None:
        super().__init__(**replay)
        if min(kd_weight, noise, balanced_epochs) < 0:
            raise ConfigError(
                f"EEIL: kd_weight ({kd_weight}), noise ({noise}) and balanced_epochs ({balanced_epochs}) must be at "
                "least 0; 0 leaves each of them out"
            )
        if min(T, balanced_lr) <= 0:
            raise ConfigError(f"EEIL: T ({T}) and balanced_lr ({balanced_lr}) must be above 0")
        self.kd_weight, self.T, self.noise = kd_weight, T, noise
        self.balanced_epochs, self.balanced_lr = balanced_epochs, balanced_lr
        self.cost = Passes(4, 4, task=2, memory=4 * balanced_epochs)
        self.register_buffer("balanced", NO_IDS.clone())

    def stages(self, task: Task) -> list[Stage]:
        stages = super().stages(task)
        if task.index and self.balanced_epochs and (self.memory.size or self.memory.per_class):
            balanced = self.stage(
                task,
                name="balanced",
                loss=lambda batch: self.terms(batch, len(batch)),
                epochs=self.balanced_epochs,
                batch_size=self.batch_size,
                examples=lambda: self.balanced.cpu(),
                schedule=lambda epochs: self.balanced_lr,
                structure=self.renew_teacher,
                prepare=lambda: self.balance(task),
            )
            stages.append(balanced)
        return stages

    def renew_teacher(self) -> None:
        """The network after the first stage, with all classes."""
        self.teacher = None  # free the previous teacher first
        self.teacher = frozen_copy(self.model)

    def balance(self, task: Task) -> None:
        """All exemplars of the old classes, and as many herded examples of each new class as an old class has."""
        count = int(self.memory.group.bincount().max())
        new = self.choose(self.training_examples(task), task, count)
        self.balanced = torch.cat([self.memory.examples, *new.values()])

    def loss(self, batch: Batch) -> Loss:
        return self.terms(self.with_replay(batch), len(batch))

    def terms(self, batch: Batch, new: int) -> dict[str, Tensor]:
        """CE(z, y) + weight sum_k KD(z_k, z'_k; T) over the teacher's blocks k."""
        logits = self.model(batch).logits
        terms = self.cross_entropy(logits, batch, new)
        if self.teacher is not None and self.kd_weight:
            taught = self.infer([batch], self.teacher).logits
            sizes = [len(block) for block in self.teacher.head.blocks]
            pairs = zip(logits[:, : taught.shape[1]].split(sizes, 1), taught.split(sizes, 1), strict=True)
            kd = torch.stack([soft_cross_entropy(z, z0, self.T) for z, z0 in pairs])  # a soft-max for each block
            terms["distil"] = self.count_means(batch, new) * self.kd_weight * kd.sum()
        return terms

    def before_step(self, batch: Batch) -> None:
        if not self.noise:
            return
        deviation = self.noise / (1 + self.now.epoch) ** 0.55
        source = self.now.rng("gradient noise")
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad += deviation * torch.randn(p.shape, generator=source, dtype=p.dtype).to(p.device)

    def after_task(self, task: Task) -> None:
        super().after_task(task)
        self.balanced = NO_IDS.clone()

    def shrink(self, task: Task) -> None:
        self.teacher = None
