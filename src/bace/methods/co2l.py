"""Co2L: contrastive continual learning. Cha, Lee, Shin, "Co2L: Contrastive Continual Learning", ICCV 2021."""

import copy
import dataclasses
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bace.core.method import Card, Passes
from bace.core.stage import Stage
from bace.core.stream import Task
from bace.data.batch import NO_IDS, Batch
from bace.errors import ConfigError
from bace.methods.er import ER
from bace.methods.parts.losses import relation_distillation, supervised_contrast
from bace.models.heads import LinearHead
from bace.models.model import Model, frozen_copy, parameter_count
from bace.randomness import generator


class Projector(nn.Module):
    """The projection into the space in which examples are contrasted."""

    optimiser_group = "head"

    def __init__(self, width: int, outputs: int, rng: torch.Generator) -> None:
        super().__init__()
        self.head = nn.Sequential(linear(width, width, rng), nn.ReLU(), linear(width, outputs, rng))

    def forward(self, features: Tensor) -> Tensor:  # (rows, width) -> (rows, outputs) of length 1
        return F.normalize(self.head(features), dim=1)


class Co2L(ER):
    """Learn features by contrast, with new examples as anchors and old examples among their negatives, and preserve the
    teacher's similarities between the examples of a batch. Then fit a linear classifier to the features.

    Args:
        mode: `batch`: a separate batch from memory at each step; `concat`: the memory is shuffled into the task's data.
        tau: temperature of the contrast.
        kappa: temperature of the similarities that are distilled.
        kappa_teacher: the same temperature for the teacher.
        lambda_ird: weight of the distillation; 0 leaves it out.
        projection: width of the space in which examples are contrasted.
        linear_epochs: epochs of the classifier.
        linear_lr: learning rate of the classifier, which falls to a fifth after 60, 75 and 90 per cent of its epochs.
    """

    title = "Co2L"
    paper = "Cha, Lee, Shin, Co2L: Contrastive Continual Learning, 2021"
    takes_o = False
    growing_head = False
    keeps_teacher = True
    cost = Passes(8, 8, task=2, memory=1)
    card = Card(
        mechanism="asymmetric supervised contrast of two views; distilled similarities; a classifier afterwards",
        besides="the classifier trains on cached features",
        o_rows="refused: words labelled O may be entities of other tasks, and as one class they would be pulled "
        "together",
        stages=("contrast", "linear"),
        replay="concat",
        reading="Memory and views are the same as for other methods (the authors use a random memory and strong "
        "augmentation). For texts, the two views are two dropout passes of one text. Without augmentation or dropout, "
        "the two views are equal. The classifier restarts at every task and sees cached clean features. Its "
        "learning rate is a tenth of the authors', who train it on the features of a ResNet.",
    )

    def __init__(
        self,
        mode: Literal["batch", "concat"] = "batch",
        tau: float = 0.5,
        kappa: float = 0.2,
        kappa_teacher: float = 0.01,
        lambda_ird: float = 1.0,
        projection: int = 128,
        linear_epochs: int = 100,
        linear_lr: float = 0.1,
    ) -> None:
        super().__init__(mode)
        if min(tau, kappa, kappa_teacher, linear_lr) <= 0:
            raise ConfigError(
                f"Co2L: tau ({tau}), kappa ({kappa}), kappa_teacher ({kappa_teacher}) and linear_lr ({linear_lr}) must "
                "be above 0"
            )
        if lambda_ird < 0 or projection < 1 or linear_epochs < 0:
            raise ConfigError(
                f"Co2L: lambda_ird ({lambda_ird}) and linear_epochs ({linear_epochs}) must be at least 0, projection "
                f"({projection}) at least 1"
            )
        self.tau, self.kappa, self.kappa_teacher, self.lambda_ird = tau, kappa, kappa_teacher, lambda_ird
        self.projection, self.linear_epochs, self.linear_lr = projection, linear_epochs, linear_lr
        self.old_projector: nn.Module | None = None
        self.kept = NO_IDS, torch.zeros(0)  # (examples,) ids, ascending; (examples, width) their features

    def build(self, model: Model) -> Model:
        width, rng = model.encoder.width, generator(self.now.seed, "projector")
        self.projector = Projector(width, self.projection, rng)
        return model

    def grow(self, task: Task) -> None:
        if task.index:
            self.teacher = frozen_copy(self.model)
            self.old_projector = copy.deepcopy(self.projector).requires_grad_(False).eval()
        self.model.head = LinearHead(self.model.encoder.width).to(self.stream.device)
        self.model.head.grow(task.classes.stop, generator(self.now.seed, "head", task.index))

    def stages(self, task: Task) -> list[Stage]:
        contrast = dataclasses.replace(
            super().stages(task)[0],
            name="contrast",
            module=lambda: nn.ModuleList([self.model, self.projector]),
            groups=lambda: {"encoder": self.model.encoder.parameters(), "head": self.projector.parameters()},
        )
        classify = self.stage(
            task,
            name="linear",
            loss=self.classify,
            epochs=self.linear_epochs,
            batch_size=self.batch_size,
            examples=lambda: self.union(task),
            sampler=lambda rng: self.balanced(self.union(task), rng),
            module=lambda: self.model.head,
            cached=True,
            optimiser="sgd",
            momentum=0.9,
            lr=self.linear_lr,
            schedule=lambda epochs: 0.2 ** sum(epochs >= share * self.linear_epochs for share in (0.6, 0.75, 0.9)),
        )
        return [contrast, classify]

    def union(self, task: Task) -> Tensor:  # (examples,)
        return torch.cat([self.training_examples(task), self.memory.examples])

    # -- features

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        both = self.with_replay(batch)
        pair = Batch.cat(both, self.stream.batch(both.examples, view=self.now.view(2)))  # the memory used draw 1
        u = self.projector(self.model(pair).features)
        current = pair.targets >= self.now.known
        terms = {"contrast": supervised_contrast(u, pair.targets, current, tau=self.tau)}
        if self.teacher is not None and self.old_projector is not None and self.lambda_ird:
            with torch.no_grad():
                old = self.old_projector(self.infer([pair], self.teacher).features)
            kappas = {"kappa": self.kappa, "kappa_teacher": self.kappa_teacher}
            terms["relations"] = self.lambda_ird * relation_distillation(u, old, **kappas)
        return terms

    def needs(self, task: int) -> tuple[int, int]:
        kept, trained = super().needs(task)
        projector = parameter_count(self.projector)
        return kept + projector * (2 if task else 1), trained + projector

    # -- the classifier

    def before_epoch(self, stage: Stage) -> None:
        if stage.name == "linear" and (self.now.epoch == 0 or not len(self.kept[0])):
            examples = stage.examples().unique()
            self.kept = examples, self.outputs(examples, logits=False).features

    def classify(self, batch: Batch) -> Tensor:
        ids, features = self.kept
        return F.cross_entropy(self.model.head(features[torch.searchsorted(ids, batch.examples)]), batch.targets)

    def balanced(self, examples: Tensor, rng: torch.Generator) -> Tensor:  # (examples,)
        """The same number of examples, drawn with replacement so that every class is equally likely."""
        targets = self.stream.labels(examples)[1]
        weight = 1 / torch.bincount(targets).double()[targets]
        return examples[torch.multinomial(weight, len(examples), replacement=True, generator=rng)]

    def validation_loss(self, examples: Tensor) -> float | None:
        return super().validation_loss(examples) if self.now.stage == "linear" else None


def linear(inputs: int, outputs: int, rng: torch.Generator) -> nn.Linear:
    """Uniform in ±1/sqrt(inputs), like torch's own initialisation, but from the given generator."""
    layer = nn.Linear(inputs, outputs, device="meta").to_empty(device="cpu")
    for p in layer.parameters():
        nn.init.uniform_(p, -(inputs**-0.5), inputs**-0.5, generator=rng)
    return layer
