"""APER: adapt and merge, first called ADAM.

Zhou, Cai, Ye, Zhan, Liu, "Revisiting Class-Incremental Learning with Pre-Trained Models: Generalizability and
Adaptivity are All You Need", 2023 (IJCV 2024).
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from bace.core.method import Card, Passes
from bace.core.stage import Stage
from bace.core.stream import Task
from bace.data.batch import Batch
from bace.methods.parts.gaussians import ClassStatistics
from bace.methods.parts.one_pass import OnePass
from bace.methods.parts.prototypes import cosines
from bace.methods.parts.tuning import begin_tuning, check_tuning, local_validation_loss, tuning_stage
from bace.models.additions import Additions
from bace.models.model import Model
from bace.models.parallel_adapters import ParallelAdapters
from bace.models.prompts import DeepPrompts
from bace.models.scale_shift import ScalesAndShifts


class APER(OnePass):
    """Tune a small addition to the frozen encoder on the first task, and nothing afterwards. Classify by class means of
    the features of the original and the tuned encoder.

    Args:
        tuning: what is tuned: an `adapter` beside the MLP of each block, `prompt` tokens before each block, or a
            `scale-shift` of every linear map and LayerNorm.
        hidden: units in the bottleneck of an adapter.
        length: prompt tokens before each block.
        concatenate: use the features of both encoders; otherwise only those of the tuned one.
        tune_epochs: epochs of the tuning; the run's train.epochs, lr and batch_size are not used.
        tune_lr: learning rate of the tuning, which falls to 0 along a cosine.
        tune_batch: examples per step of the tuning.
    """

    title = "APER"
    paper = (
        "Zhou et al., Revisiting Class-Incremental Learning with Pre-Trained Models: Generalizability and Adaptivity "
        "are All You Need, 2023 (IJCV 2024)"
    )
    card = Card(
        mechanism="adapters, prompts or scales tuned on the first task; class means of frozen and tuned features",
        besides="prediction takes 2 passes",
        o_rows="O is class 0 in every task: its mean covers all words labelled O so far, including hidden entities; "
        "in the tuning O is a class of the first task",
        reading="The tuning uses a cosine head whose scale starts at 1, as in the authors' code; prediction uses means "
        "of clean views. Every block has its own prompts (VPT-deep), which start as in VPT (APER starts them at 0, "
        "where a LayerNorm has almost no gradient). Scales and shifts start at N(1, 0.02) and N(0, 0.02).",
    )

    additions: Additions

    def __init__(
        self,
        tuning: Literal["adapter", "prompt", "scale-shift"] = "adapter",
        hidden: int = 64,
        length: int = 5,
        concatenate: bool = True,
        tune_epochs: int = 20,
        tune_lr: float = 0.01,
        tune_batch: int = 48,
    ) -> None:
        super().__init__()
        check_tuning(self.title, tune_epochs, tune_lr, tune_batch)
        self.tuning, self.hidden, self.length, self.concatenate = tuning, hidden, length, concatenate
        self.tune_epochs, self.tune_lr, self.tune_batch = tune_epochs, tune_lr, tune_batch
        self.own_batch = tune_batch
        means = 1 + concatenate  # a pass of each encoder
        self.cost = Passes(0, task=means, first=3 * tune_epochs + means)
        self.statistics = ClassStatistics(scatter=False)

    def build(self, model: Model) -> Model:
        if self.tuning == "adapter":
            self.additions = ParallelAdapters(model.encoder, self.hidden)
        elif self.tuning == "prompt":
            self.additions = DeepPrompts(model.encoder, self.length)
        else:
            self.additions = ScalesAndShifts(model.encoder)
        return model

    def needs(self, task: int) -> tuple[int, int]:
        kept, _ = super().needs(task)
        return kept + self.additions.missing(1), 0 if task else self.additions.size

    def grow(self, task: Task) -> None:
        if task.index == 0:
            begin_tuning(self, task, self.additions)
        width = self.model.encoder.width
        self.statistics.grow(len(task.classes), 2 * width if self.concatenate else width)

    # -- the first task

    def stages(self, task: Task) -> list[Stage]:
        means = super().stages(task)
        if task.index:
            return means
        epochs, lr, batch = self.tune_epochs, self.tune_lr, self.tune_batch
        return [tuning_stage(self, task, self.additions, epochs=epochs, lr=lr, batch_size=batch), *means]

    def validation_loss(self, examples: Tensor) -> float | None:
        if self.now.stage == "tune":
            return local_validation_loss(self, self.stream[self.now.task], examples)
        return None

    # -- every task

    def features(self, batch: Batch) -> Tensor:  # (rows, width)
        """[f ; f*]: the features of the frozen encoder and of the tuned one."""
        tuned = super().features(batch)
        if not self.concatenate:
            return tuned
        with self.additions.of():
            return torch.cat([super().features(batch), tuned], 1)

    def observe(self, x: Tensor, y: Tensor) -> None:  # (rows, width), (rows,)
        self.statistics.observe(x, y)

    def forget(self, classes: Sequence[int], examples: Tensor) -> None:
        super().forget(classes, examples)
        self.model.head.forget_classes(range(self.model.head.classes))  # only the tuning used the head

    def predict(self, batch: Batch, scorer: str | None = None) -> Tensor:  # (rows, seen)
        """cos([f ; f*], mu_c)."""
        return cosines(self.features(batch), self.statistics.means)
