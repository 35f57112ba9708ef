"""O-LoRA: orthogonal low-rank adaptation.

Wang, Chen, Ge, Xia, Bao, Zheng, Zhang, Gui, Huang, "Orthogonal Subspace Learning for Language Model Continual
Learning", Findings of EMNLP 2023.
"""

import torch
from torch import Tensor

from bace.core.method import Card
from bace.core.stage import Stage
from bace.core.stream import Task
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.seq import SEQ
from bace.models.lora import LoRA
from bace.models.model import Model, parameter_count
from bace.randomness import generator


class OLoRA(SEQ):
    """Learn for every task a low-rank change of the query and value projections, in a subspace orthogonal to those of
    the tasks before, whose changes stay as they are.

    Args:
        rank: the rank of each change.
        orthogonality: weight of the products between the new subspace and the old ones; 0 leaves it out.
    """

    title = "O-LoRA"
    paper = "Wang et al., Orthogonal Subspace Learning for Language Model Continual Learning, Findings of EMNLP 2023"
    card = Card(
        mechanism="a low-rank change for each task, in a subspace orthogonal to the earlier ones",
        besides="every task adds a change",
        o_rows="class 0 under cross-entropy, whose soft-max is over all seen classes then",
        reading="the run's head and cross-entropy over the new classes (the authors generate the labels as text); a "
        "sum of absolute products, as in their code (the paper squares them); W + B A without a factor",
    )

    lora: LoRA

    def __init__(self, rank: int = 8, orthogonality: float = 0.5) -> None:
        super().__init__(span="new")
        if rank < 1 or orthogonality < 0:
            raise ConfigError(f"O-LoRA: rank ({rank}) must be at least 1, orthogonality ({orthogonality}) at least 0")
        self.rank, self.orthogonality = rank, orthogonality

    def build(self, model: Model) -> Model:
        self.lora = LoRA(model.encoder, self.rank)
        return model

    def needs(self, task: int) -> tuple[int, int]:
        return parameter_count(self.model.encoder) + self.lora.missing(task + 1), self.lora.size

    def grow(self, task: Task) -> None:
        super().grow(task)
        self.lora.grow(generator(self.now.seed, "additions", task.index), self.stream.device)

    def stages(self, task: Task) -> list[Stage]:
        head = self.model.head
        return [self.stage(task, groups=lambda: {"lora": self.lora.parameters_of(-1), "head": head.parameters()})]

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
