"""SD-LoRA: scalable decoupled low-rank adaptation.

Wu, Piao, Huang, Wang, Li, Pfister, Meng, Ma, Wei, "SD-LoRA: Scalable Decoupled Low-Rank Adaptation for Class
Incremental Learning", ICLR 2025.
"""

from typing import cast

import torch
from torch import Tensor, nn

from bace.core.method import Card, Passes
from bace.core.stage import Stage
from bace.core.stream import Task
from bace.errors import ConfigError
from bace.methods.parts.tuning import check_tuning, long_stage
from bace.methods.seq import SEQ
from bace.models.encoder import Encoder
from bace.models.heads import LinearHead
from bace.models.lora import LoRA, LowRank
from bace.models.model import Model, parameter_count
from bace.randomness import generator


class SDLoRA(SEQ):
    """For every task, learn a low-rank change of the query and value projections. The directions of earlier tasks are
    fixed, and their magnitudes are learned again.

    Args:
        rank: rank of each change.
        magnitude: magnitude of each direction at the start of a task.
        tune_epochs: epochs of a task; the run's train.epochs, lr and batch_size are not used.
        tune_lr: learning rate.
        tune_batch: examples per step.
        tune_steps: minimum number of steps of a task; if there are too few, batches become smaller (down to 8), and
            then there are more epochs. 0 means no minimum.
    """

    title = "SD-LoRA"
    paper = "Wu et al., SD-LoRA: Scalable Decoupled Low-Rank Adaptation for Class Incremental Learning, ICLR 2025"
    growing_head = False  # its rows start at zero
    card = Card(
        mechanism="a low-rank change for each task; old directions are fixed, all magnitudes are learned again",
        besides="every task adds a change",
        o_rows="O is learned as class 0 with cross-entropy; for entities the soft-max spans all seen classes",
        stages=("tune",),
        reading="As in the authors' code, each task has one magnitude for all blocks, which starts at 0.8 in every "
        "task, and SGD has a constant learning rate and no weight decay. The rows of the linear head start at zero "
        "(the authors start them at random; see CODA-Prompt). The authors' 20 epochs are 800 steps; here a task has at "
        "least 400 (`tune_steps`).",
    )

    lora: "Decoupled"

    def __init__(
        self,
        rank: int = 10,
        magnitude: float = 0.8,
        tune_epochs: int = 20,
        tune_lr: float = 0.008,
        tune_batch: int = 128,
        tune_steps: int = 400,
    ) -> None:
        super().__init__(span="new")
        check_tuning(self.title, tune_epochs, tune_lr, tune_batch, tune_steps)
        if rank < 1:
            raise ConfigError(f"SD-LoRA: rank ({rank}) must be at least 1")
        self.rank, self.magnitude = rank, magnitude
        self.tune_epochs, self.tune_lr, self.tune_batch, self.tune_steps = tune_epochs, tune_lr, tune_batch, tune_steps
        self.own_batch = tune_batch
        self.cost = Passes(3, epochs=tune_epochs, steps=tune_steps)

    def build(self, model: Model) -> Model:
        self.lora = Decoupled(model.encoder, self.rank, self.magnitude)
        model.head = LinearHead(model.encoder.width, zero=True).to(self.stream.device)
        return model

    def needs(self, task: int) -> tuple[int, int]:
        return parameter_count(self.model.encoder) + self.lora.missing(task + 1), self.lora.size

    def grow(self, task: Task) -> None:
        super().grow(task)
        self.lora.grow(generator(self.now.seed, "additions", task.index), self.stream.device)

    def stages(self, task: Task) -> list[Stage]:
        lora, head = self.lora, self.model.head
        stage = long_stage(
            self,
            task,
            epochs=self.tune_epochs,
            batch_size=self.tune_batch,
            least=self.tune_steps,
            groups=lambda: {"lora": [*lora.parameters_of(-1), *lora.magnitudes], "head": head.parameters()},
            optimiser="sgd",
            lr=self.tune_lr,
            momentum=0.9,
        )
        return [stage]

    def report(self) -> dict[str, float]:
        return {f"magnitude {i + 1}": float(a) for i, a in enumerate(self.lora.magnitudes)}


class Decoupled(LoRA):
    """dW = sum_{i < t} a_i B_i A_i / (|B_i| |A_i|) + a_t B_t A_t, with an a_i for each set."""

    def __init__(self, encoder: Encoder, rank: int, magnitude: float) -> None:
        super().__init__(encoder, rank)
        self.magnitude, self.magnitudes = magnitude, nn.ParameterList()  # () each
        encoder.add_module("magnitudes", self.magnitudes)

    def grow(self, generator: torch.Generator, device: torch.device) -> None:
        super().grow(generator, device)
        self.magnitudes.append(nn.Parameter(torch.zeros((), device=device)))
        for a in self.magnitudes:
            nn.init.constant_(a, self.magnitude)

    def weight(self, index: int, part: LowRank) -> Tensor:
        a = cast(Tensor, self.magnitudes[index])
        newest = index == len(self.sets) - 1
        return a if newest else a / (part.B.norm() * part.A.norm()).clamp(min=1e-12)
