"""MOS: model surgery.

Sun, Zhou, Zhao, Gan, Zhan, Ye, "MOS: Model Surgery for Pre-Trained Model-Based Class-Incremental Learning", AAAI 2025.
"""

from collections.abc import Iterable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bace.core.method import Card, Passes
from bace.core.stage import Stage
from bace.core.stream import Task
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.parts.alignment import Alignment
from bace.methods.parts.gaussians import ClassStatistics
from bace.methods.parts.prototypes import cosines
from bace.methods.parts.tuning import check_tuning, tuning_stage
from bace.models.heads import LinearHead
from bace.models.model import Model
from bace.models.parallel_adapters import ParallelAdapters
from bace.randomness import generator


class MOS(Alignment):
    """Tune adapters for every task and merge them with the earlier ones at each step. At prediction, a first guess
    selects a task, and its adapters may guess another task, until the guess no longer changes.

    Args:
        momentum: share of the mean of the earlier adapters that a step merges into the new ones; 0 merges nothing.
        contrast: weight of the term that keeps features apart from each other and from the means of old classes; 0
            leaves it out.
        temperature: temperature of the contrast.
        rounds: maximum number of predictions for an example until its guessed task no longer changes.
        hidden: units in the bottleneck of an adapter.
        tune_epochs: epochs of a task; the run's train.epochs, lr and batch_size are not used.
        tune_lr: learning rate of the adapters, which falls to 0 along a cosine; the head's is a tenth of it.
        tune_batch: examples per step.
        align_epochs: epochs of the alignment of all heads on features drawn from Gaussians; 0 leaves it out.
        align_lr: learning rate of the alignment, which falls to 0 along a cosine.
        samples: number of features drawn for each class in an epoch of the alignment, and batch size of the alignment.
    """

    title = "MOS"
    paper = "Sun et al., MOS: Model Surgery for Pre-Trained Model-Based Class-Incremental Learning, AAAI 2025"
    takes_o = False
    growing_head = False
    one_encoder = False
    card = Card(
        mechanism="adapters for each task, merged step by step; heads aligned on drawn features; the adapters of a "
        "guessed task refine the guess",
        besides="prediction takes a pass for each task; a covariance for each class; every task adds adapters",
        o_rows="refused: O belongs to no task, so it has no adapters",
        stages=("tune", "statistics", "align"),
        reading="As in the authors' code, adapters start as copies of the last task's. The contrast does not normalise "
        "features, and the alignment does not normalise logits or fade means. The first guess, by class means under "
        "the first task's adapters, is sharpened by the number of tasks and added to the last guess. Each task "
        "continues from the rows before the alignment, as in SLCA (in the authors' code, from the rows after it).",
    )

    adapters: ParallelAdapters

    def __init__(
        self,
        momentum: float = 0.1,
        contrast: float = 0.1,
        temperature: float = 0.8,
        rounds: int = 4,
        hidden: int = 16,
        tune_epochs: int = 20,
        tune_lr: float = 0.03,
        tune_batch: int = 48,
        align_epochs: int = 30,
        align_lr: float = 0.005,
        samples: int = 240,
    ) -> None:
        super().__init__(align_epochs, align_lr, samples, logit_norm=0.0, weight_decay=5e-4)
        check_tuning(self.title, tune_epochs, tune_lr, tune_batch)
        if not 0 <= momentum <= 1 or contrast < 0 or rounds < 1 or temperature <= 0:
            raise ConfigError(
                f"MOS: momentum ({momentum}) must lie between 0 and 1, contrast ({contrast}) be at least 0, rounds "
                f"({rounds}) at least 1, temperature ({temperature}) above 0"
            )
        self.momentum, self.contrast, self.temperature = momentum, contrast, temperature
        self.rounds, self.hidden = rounds, hidden
        self.tune_epochs, self.tune_lr, self.tune_batch = tune_epochs, tune_lr, tune_batch
        self.own_batch = tune_batch
        self.cost = Passes(3, task=2, epochs=tune_epochs)
        self.first = ClassStatistics(scatter=False)  # of the features under the first task's adapters

    def build(self, model: Model) -> Model:
        self.adapters = ParallelAdapters(model.encoder, self.hidden)
        model.head = LinearHead(model.encoder.width).to(self.stream.device)
        return model

    def needs(self, task: int) -> tuple[int, int]:
        return super().needs(task)[0] + self.adapters.missing(task + 1), self.adapters.size

    @torch.no_grad()
    def grow(self, task: Task) -> None:
        super().grow(task)
        self.first.grow(len(task.classes), self.model.encoder.width)
        self.adapters.grow(generator(self.now.seed, "additions", task.index), self.stream.device)
        if task.index:
            for new, old in zip(self.adapters.parameters_of(-1), self.adapters.parameters_of(-2), strict=True):
                new.copy_(old)

    # -- learning a task

    def stages(self, task: Task) -> list[Stage]:
        tune = tuning_stage(
            self,
            task,
            self.adapters,
            epochs=self.tune_epochs,
            lr=self.tune_lr,
            batch_size=self.tune_batch,
            loss=self.loss,
            groups=lambda: self.tuned(task),
            rates={"head": 0.1 * self.tune_lr},
        )
        return [tune, self.statistics_stage(task), *self.alignment_stages(task)]

    def tuned(self, task: Task) -> dict[str, Iterable[nn.Parameter]]:
        head = cast(LinearHead, self.model.head)
        return {"additions": self.adapters.parameters_of(-1), "head": head.of(task.index)}

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        out, known = self.model(batch), self.now.known
        terms = {"new": F.cross_entropy(out.logits[:, known:], batch.targets - known)}
        if self.contrast:
            terms["contrast"] = self.contrast * apart(self.statistics.means[:known], out.features, self.temperature)
        return terms

    @torch.no_grad()
    def after_step(self, batch: Batch) -> None:
        """A_t <- (1 - m) A_t + m mean_{i < t} A_i."""
        if self.now.stage == "tune" and self.now.task and self.momentum:
            *earlier, newest = (self.adapters.parameters_of(index) for index in range(self.now.task + 1))
            for new, *old in zip(newest, *earlier, strict=True):
                new.lerp_(torch.stack(old).mean(0), self.momentum)

    def validation_loss(self, examples: Tensor) -> float:
        logits, targets = self.scored(examples)
        return float(F.cross_entropy(logits[:, self.now.known :], targets - self.now.known))

    # -- statistics of its classes

    def describe(self, batch: Batch) -> None:
        super().describe(batch)
        with self.adapters.of(0):
            self.first.observe(self.infer([batch]).features.double(), self.labels(batch))

    def gaussian(self, c: int) -> tuple[Tensor, Tensor]:  # (width,), (width, width)
        """N(mu_c, S_c + 1e-4 I)."""
        mean, covariance = self.statistics.means[c], self.statistics.covariance(c)
        return mean, covariance + 1e-4 * torch.eye(len(mean), dtype=mean.dtype, device=mean.device)

    # -- prediction

    @torch.inference_mode()
    def predict(self, batch: Batch, scorer: str | None = None) -> Tensor:  # (rows, seen)
        """softmax(z) + softmax(t cos(f_1, mu_c)), where z comes from the adapters that each row has found."""
        features = []
        for index in range(len(self.adapters.sets)):
            with self.adapters.of(index):
                features.append(self.model(batch).features)
        first = cosines(features[0], self.first.means)
        scores = [self.stream.eligible(self.predicting_head(f)) for f in features]
        logits = torch.stack(scores, 1)  # (rows, tasks, seen)
        found = refined(self.stream.eligible(first).argmax(1), logits, self.tasks_of_classes(), self.rounds)
        return found.softmax(1) + (len(features) * first).softmax(1).to(found)

    @property
    def predicting_head(self) -> nn.Module:
        return self.model.head if self.aligned is None else self.aligned

    def tasks_of_classes(self) -> Tensor:  # (seen,)
        sizes = cast(LinearHead, self.model.head).sizes
        return torch.tensor([task for task, size in enumerate(sizes) for _ in range(size)], device=self.stream.device)


def apart(
    means: Tensor,  # (old classes, width)
    features: Tensor,  # (rows, width)
    temperature: float,
) -> Tensor:  # ()
    """CE(M M^T / T, identity) with M = [mu ; f]: each vector is more similar to itself than to any other."""
    vectors = torch.cat([means.to(features), features])
    return F.cross_entropy(vectors @ vectors.T / temperature, torch.arange(len(vectors), device=vectors.device))


def refined(
    guess: Tensor,  # (rows,) classes
    logits: Tensor,  # (rows, tasks, classes) under each task's adapters
    tasks: Tensor,  # (classes,) the task of each class
    rounds: int,
) -> Tensor:  # (rows, classes)
    """The logits under the adapters of the guessed class's task, which guess again until the task stays the same. A row
    whose guess stays would not change in further rounds."""
    rows = torch.arange(guess.shape[0], device=guess.device)
    for _ in range(rounds - 1):
        guess = logits[rows, tasks[guess]].argmax(1)
    return logits[rows, tasks[guess]]
