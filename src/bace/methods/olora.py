"""O-LoRA: orthogonal low-rank adaptation.

Wang, Chen, Ge, Xia, Bao, Zheng, Zhang, Gui, Huang, "Orthogonal Subspace Learning for Language Model Continual
Learning", Findings of EMNLP 2023.
"""

import torch
from torch import Tensor

from bace.core.method import Card, Passes
from bace.core.stage import Stage
from bace.core.stream import Task
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.parts.tuning import check_tuning, long_stage
from bace.methods.seq import SEQ
from bace.models.heads import LinearHead
from bace.models.lora import LoRA
from bace.models.model import Model, parameter_count
from bace.randomness import generator


class OLoRA(SEQ):
    """For every task, learn a low-rank change of the query and value projections in a subspace that is orthogonal to
    those of earlier tasks. Earlier changes are fixed.

    Args:
        rank: rank of each change.
        orthogonality: weight of the products between the new subspace and the old ones; 0 leaves it out.
        tune_epochs: epochs of a task; the run's train.epochs, lr, batch_size and optimiser are not used.
        tune_lr: learning rate of AdamW.
        tune_batch: examples per step.
        tune_steps: minimum number of steps of a task; if there are too few, batches become smaller (down to 8), and
            then there are more epochs. 0 means no minimum.
    """

    title = "O-LoRA"
    paper = "Wang et al., Orthogonal Subspace Learning for Language Model Continual Learning, Findings of EMNLP 2023"
    growing_head = False  # its rows start at zero
    card = Card(
        mechanism="a low-rank change for each task, in a subspace orthogonal to the earlier ones",
        besides="every task adds a change",
        o_rows="O is learned as class 0 with cross-entropy; for entities the soft-max spans all seen classes",
        stages=("tune",),
        reading="The rows of the linear head start at zero (see CODA-Prompt), and the cross-entropy spans the new "
        "classes (the authors generate the labels as text). The penalty is a sum of absolute products, as in the "
        "authors' code (the paper squares them). W + B A has no factor. AdamW trains at 0.001 for one epoch, as "
        "published, but for at least 400 steps (`tune_steps`).",
    )

    lora: LoRA

    def __init__(
        self,
        rank: int = 8,
        orthogonality: float = 0.5,
        tune_epochs: int = 1,
        tune_lr: float = 0.001,
        tune_batch: int = 64,
        tune_steps: int = 400,
    ) -> None:
        super().__init__(span="new")
        check_tuning(self.title, tune_epochs, tune_lr, tune_batch, tune_steps)
        if rank < 1 or orthogonality < 0:
            raise ConfigError(f"O-LoRA: rank ({rank}) must be at least 1, orthogonality ({orthogonality}) at least 0")
        self.rank, self.orthogonality = rank, orthogonality
        self.tune_epochs, self.tune_lr, self.tune_batch, self.tune_steps = tune_epochs, tune_lr, tune_batch, tune_steps
        self.own_batch = tune_batch
        self.cost = Passes(3, epochs=tune_epochs, steps=tune_steps)

    def build(self, model: Model) -> Model:
        self.lora = LoRA(model.encoder, self.rank)
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
            groups=lambda: {"lora": lora.parameters_of(-1), "head": head.parameters()},
            optimiser="adamw",
            lr=self.tune_lr,
        )
        return [stage]

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        terms = {"new": self.cross_entropy(self.model(batch).logits, batch.targets)}
        if self.now.task and self.orthogonality:
            terms["orthogonal"] = self.orthogonality * self.overlap()
        return terms

    def overlap(self) -> Tensor:  # ()
        """sum over projections and earlier tasks i of the absolute entries of A_i A_t^T."""
        *earlier, newest = (self.lora.subspaces(index) for index in range(len(self.lora.sets)))
        found = [(old @ new.T).abs().sum() for parts in earlier for old, new in zip(parts, newest, strict=True)]
        return torch.stack(found).sum()
