"""Classifier alignment: train heads that were learned task by task together, on features drawn from class Gaussians.

Zhang et al., SLCA, ICCV 2023.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from bace.core.method import Method
from bace.core.stage import Stage
from bace.core.stream import Task
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.parts.gaussians import ClassStatistics, draw_features
from bace.methods.parts.tuning import cosine
from bace.models.heads import Head


class Alignment(Method):
    """Store the mean and covariance of each class's features after its task. From the second task on, train a copy of
    the head, `aligned`, on features drawn from all classes. The copy predicts; the next task continues from the head.

    Args:
        align_epochs: epochs of the alignment; 0 leaves it out.
        align_lr: learning rate of the alignment, which falls to 0 along a cosine.
        samples: number of features drawn for each class in an epoch, and batch size.
        logit_norm: temperature of the normalised logits; 0 means that logits are not normalised.
        weight_decay: weight decay of weights.
    """

    aligned: Head | None

    def __init__(
        self, align_epochs: int, align_lr: float, samples: int, logit_norm: float, weight_decay: float = 0.0
    ) -> None:
        super().__init__()
        if min(align_epochs, weight_decay, logit_norm) < 0 or samples < 1 or align_lr <= 0:
            raise ConfigError(
                f"{self.title}: align_epochs ({align_epochs}), weight_decay ({weight_decay}) and logit_norm "
                f"({logit_norm}) must be at least 0, samples ({samples}) at least 1, align_lr ({align_lr}) above 0"
            )
        self.align_epochs, self.align_lr, self.weight_decay = align_epochs, align_lr, weight_decay
        self.samples, self.logit_norm = samples, logit_norm
        self.statistics = ClassStatistics()
        self.aligned = None
        self.replayed = torch.zeros(0), torch.zeros(0)  # an epoch's features and classes, in random order

    def grow(self, task: Task) -> None:
        super().grow(task)
        self.statistics.grow(len(task.classes), self.model.head.width)

    def needs(self, task: int) -> tuple[int, int]:
        kept, trained = super().needs(task)
        return kept + 2 * self.stream[task].classes.stop * self.model.head.width**2, trained  # double precision

    # -- statistics of the task's classes

    def statistics_stage(self, task: Task) -> Stage:
        return self.stage(task, name="statistics", loss=self.describe, epochs=1, optimise=False, augment=False)

    def describe(self, batch: Batch) -> None:
        self.statistics.observe(self.infer([batch]).features.double(), self.labels(batch))

    # -- the alignment

    def alignment_stages(self, task: Task) -> list[Stage]:
        """There is no alignment in the first task, which has only one head."""
        if not (task.index and self.align_epochs):
            return []
        stage = self.stage(
            task,
            name="align",
            loss=self.align_loss,
            epochs=self.align_epochs,
            batch_size=self.samples,
            examples=lambda: self.places(task),
            module=self.aligned_head,
            groups=lambda: {"head": self.aligned_head().parameters()},
            cached=True,
            optimiser="sgd",
            momentum=0.9,
            weight_decay=self.weight_decay,
            lr=self.align_lr,
            schedule=cosine(self.align_epochs),
            structure=self.copy_head,
        )
        return [stage]

    def places(self, task: Task) -> Tensor:  # (samples of all classes,) ids
        """One id for each feature that an epoch draws. Batches consist of these features; the ids only count them."""
        trained = self.training_examples(task)
        return trained[torch.arange(self.samples * len(self.statistics.observed)) % len(trained)]

    def copy_head(self) -> None:
        self.aligned = copy.deepcopy(self.model.head)

    def aligned_head(self) -> Head:
        assert self.aligned is not None
        return self.aligned

    def before_epoch(self, stage: Stage) -> None:
        super().before_epoch(stage)
        if stage.name == "align":
            self.replayed = self.draw(self.now.rng("features"))

    def draw(self, rng: torch.Generator) -> tuple[Tensor, Tensor]:  # (samples, width), (samples,)
        """Draw `samples` features of each class from N(mu_c, S_c), as given by `gaussian`, in random order."""
        classes = self.statistics.observed
        features = draw_features((self.gaussian(c) for c in classes), self.samples, rng)
        targets = torch.tensor(classes).repeat_interleave(self.samples).to(features.device)
        order = torch.randperm(len(targets), generator=rng).to(features.device)
        return features[order].to(self.model.head.weight), targets[order]

    def gaussian(self, c: int) -> tuple[Tensor, Tensor]:  # (width,), (width, width)
        """The mean and the regularised covariance from which features of a class are drawn."""
        raise NotImplementedError

    def align_loss(self, batch: Batch) -> Tensor:
        features, targets = (part[self.now.step * self.samples :][: self.samples] for part in self.replayed)
        logits = self.aligned_head()(features)
        if self.logit_norm:
            sizes = [len(task.classes) for task in self.stream[: self.now.task + 1]]
            logits = normalised(logits, sizes) / self.logit_norm
        return F.cross_entropy(logits, targets)

    # -- prediction

    def predict(self, batch: Batch, scorer: str | None = None) -> Tensor:  # (rows, seen)
        with torch.inference_mode():
            out = self.model(batch)
            scores: Tensor = out.logits if self.aligned is None else self.aligned(out.features)
        return scores

    def transfer_scores(self, features: Tensor, head: Head) -> Tensor:  # (rows, width) -> (rows, seen and new classes)
        logits = super().transfer_scores(features, head)
        return logits if self.aligned is None else torch.cat([self.aligned(features), logits[:, self.now.known :]], 1)


def normalised(logits: Tensor, sizes: list[int]) -> Tensor:  # (rows, classes) -> (rows, classes)
    """z / n, where n is the mean over tasks of |z_task|, for tasks with these numbers of classes."""
    norms = torch.stack([part.norm(dim=1) for part in logits.split(sizes, 1)])  # (tasks, rows)
    return logits / norms.mean(0).clamp(min=1e-7)[:, None]
