"""iCaRL: nearest mean of exemplars. Rebuffi, Kolesnikov, Sperl, Lampert, "iCaRL: Incremental Classifier and
Representation Learning", CVPR 2017."""

from typing import Literal, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from bace.core.method import Card, Passes
from bace.core.stage import Loss
from bace.core.stream import Task
from bace.data.batch import MIRRORED, Batch
from bace.errors import ConfigError
from bace.methods.er import ER
from bace.methods.parts.replay import ReplayOptions
from bace.models.heads import Head, imprint
from bace.models.model import Model


class ICaRL(ER):
    """Learn features with one binary classifier per class and distil the old classifiers; classify by the nearest mean
    of the stored exemplars.

    Args:
        columns: how the binary cross-entropies of a row are reduced: `sum` over the classes, or `mean` (the authors',
            with a learning rate of 2.0).
        mirror: average each exemplar with its mirror image, if training also mirrors images.
    """

    title = "iCaRL"
    paper = "Rebuffi et al., iCaRL: Incremental Classifier and Representation Learning, CVPR 2017"
    takes_o = False
    keeps_teacher = True
    scorers = ("linear",)
    cost = Passes(4, 4, task=1, memory=2)
    by_class = ("means",)
    card = Card(
        mechanism="replay; binary distillation; nearest mean of exemplars",
        o_rows="refused: the mean of all words that are not an entity of this task says nothing about the next such "
        "word",
        replay="concat",
        reading="The loss is the authors': in old columns the teacher's sigmoid is the target of every row, including "
        "exemplars. It is summed over columns, because the authors' mean over columns belongs to a learning rate of "
        "2.0 (`columns`). The ordinary head gives the logits in training and for the scorer `linear`. Forward "
        "transfer also uses class means.",
    )

    means: Tensor  # (classes, width) unit vectors; zero for a class without exemplars

    def __init__(
        self,
        columns: Literal["sum", "mean"] = "sum",
        mirror: bool = True,
        **replay: Unpack[ReplayOptions],
    ) -> None:
        super().__init__(**replay)
        self.columns, self.mirror = columns, mirror
        self.register_buffer("means", torch.zeros(0, 0))

    def build(self, model: Model) -> Model:
        if not self.memory.size and not self.memory.per_class:
            raise ConfigError("iCaRL classifies by stored exemplars, but the memory is empty: set memory.size")
        return super().build(model)

    def loss(self, batch: Batch) -> Loss:
        both = self.with_replay(batch)
        logits = self.model(both).logits
        # sum_c -G_c log sigmoid(z_c) - (1 - G_c) log(1 - sigmoid(z_c))
        bce = F.binary_cross_entropy_with_logits(logits, self.wanted(both, logits), reduction="none")
        rows = bce.sum(1) if self.columns == "sum" else bce.mean(1)
        return {name: rows[part].mean() for name, part in self.policy.parts(len(batch), len(both)).items()}

    def wanted(self, batch: Batch, logits: Tensor) -> Tensor:  # (rows, seen)
        """G: one-hot in the new columns, sigmoid(z') of the teacher in the old ones, for every row."""
        targets = F.one_hot(batch.targets, self.now.seen).to(logits)
        if self.teacher is not None:
            targets[:, : self.now.known] = self.infer([batch], self.teacher).logits.sigmoid()
        return targets

    def after_task(self, task: Task) -> None:
        super().after_task(task)
        # for all classes, because the features of old ones have moved, too
        self.means = self.class_means(self.memory.examples, range(task.classes.stop))

    def class_means(self, examples: Tensor, classes: range) -> Tensor:  # (len(classes), width)
        """mu_c = mean of h/|h|, then mu_c/|mu_c|."""
        views = (None, MIRRORED) if self.mirror else (None,)
        features = torch.cat([self.outputs(examples, view=view, logits=False).features for view in views])
        labels = self.stream.labels(examples)[1].repeat(len(views))
        return imprint(features, labels, classes, features[:0])

    def predict(self, batch: Batch, scorer: str | None = None) -> Tensor:
        return super().predict(batch) if scorer == "linear" else nearness(self.infer([batch]).features, self.means)

    # -- forward transfer: the rows of coming classes are their means, beside the exemplar means of known classes

    def transfer_rows(self, task: Task) -> Tensor:
        return self.class_means(task.train, task.classes)

    def transfer_scores(self, features: Tensor, head: Head) -> Tensor:
        coming = F.normalize(head.weight[len(self.means) :], dim=1)
        return nearness(features, torch.cat([self.means, coming]))


def nearness(features: Tensor, means: Tensor) -> Tensor:  # (rows, width), (classes, width) -> (rows, classes)
    scores = 2 * F.normalize(features, dim=1) @ means.T - 2  # -|h/|h| - mu_c|^2, of unit vectors
    # memory.allow_missing_classes: a class without exemplars is never predicted
    return scores.masked_fill(~means.any(1), -torch.inf)
