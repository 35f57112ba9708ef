"""SimpleCIL: class means of a frozen encoder.

Zhou, Cai, Ye, Zhan, Liu, "Revisiting Class-Incremental Learning with Pre-Trained Models: Generalizability and
Adaptivity are All You Need", 2023 (IJCV 2024).
"""

import torch
from torch import Tensor

from bace.core.method import Card
from bace.core.stage import Stage
from bace.core.stream import Task
from bace.methods.parts.gaussians import ClassStatistics
from bace.methods.parts.one_pass import OnePass
from bace.models.heads import CosineHead
from bace.models.model import Model


class SimpleCIL(OnePass):
    """Freeze the encoder and take the mean feature of a class as its row of a cosine head. Nothing is trained."""

    title = "SimpleCIL"
    paper = (
        "Zhou et al., Revisiting Class-Incremental Learning with Pre-Trained Models: Generalizability and Adaptivity "
        "are All You Need, 2023 (IJCV 2024)"
    )
    growing_head = True
    takes_known = True
    card = Card(
        mechanism="frozen encoder; class means as rows of a cosine head",
        o_rows="O is class 0 in every task: its mean covers all words labelled O so far, including hidden entities",
        reading="There is one pass over clean views, whatever the number of epochs. Means are of the features "
        "themselves, not of unit features.",
    )

    def __init__(self) -> None:
        super().__init__()
        self.statistics = ClassStatistics(scatter=False)

    def build(self, model: Model) -> Model:
        model.head = CosineHead(model.encoder.width, sigma_init=1.0).to(self.stream.device)
        return super().build(model)

    def grow(self, task: Task) -> None:
        super().grow(task)
        self.model.head.requires_grad_(False)
        self.statistics.grow(len(task.classes), self.model.head.width)

    def observe(self, x: Tensor, y: Tensor) -> None:  # (rows, width), (rows,)
        self.statistics.observe(x, y)

    def after_epoch(self, stage: Stage) -> None:
        """w_c = mean of f over the examples of class c; a class without examples keeps its random row."""
        head, rows = self.model.head, self.statistics.means
        for block, means in zip(head.blocks, rows.split(head.sizes), strict=True):
            block.copy_(torch.where(means.any(1, keepdim=True), means.to(block), block))

    def transfer_rows(self, task: Task) -> Tensor:  # (classes of the task, width)
        statistics = ClassStatistics(scatter=False).to(self.stream.device)
        statistics.grow(task.classes.stop, self.model.head.width)
        features = self.outputs(task.train, logits=False).features.double()
        statistics.observe(features, self.stream.labels(task.train)[1])
        return statistics.means[task.classes.start :].to(self.model.head.weight)
