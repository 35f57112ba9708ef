"""MORE: a multi-head model for continual learning via OOD replay. Kim, Ke, Liu, "A Multi-Head Model for Continual
Learning via Out-of-Distribution Replay", CoLLAs 2022.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from bace.core.method import Card, Passes
from bace.core.stage import Loss, Stage
from bace.core.stream import Task
from bace.data.batch import NO_IDS, Batch
from bace.errors import ConfigError
from bace.methods.hat import HAT
from bace.methods.parts.gaussians import class_gaussians, inverse_factor, mahalanobis, shrunk_whitening
from bace.models.heads import LinearHead
from bace.models.model import Model
from bace.randomness import generator


@dataclass
class HeadStage(Stage):
    """A stage that trains only one task's head, on fixed features under the gates and norms of the task."""

    task: int = 0
    others: Callable[[], Tensor] = lambda: NO_IDS  # ids; each step draws as many of them as its batch has


class MORE(HAT):
    """Extend HAT: each head has one more class for out-of-distribution examples, which it learns from the memory. At
    prediction each head is weighted by the distance to its task's classes. Each new task updates the earlier heads.

    Args:
        smax: the steepest slope of the gates; in training the slope rises from 1 / smax to smax.
        anneal: as in HAT: the slope rises once over the `stage`, or within every `epoch`.
        gate_steps: as in HAT: gates move as far as they would in at least this many steps.
        lamb: weight of the sparsity of the gates; 0 leaves it out.
        temperature: temperature of the heads' soft-max at prediction.
        distance: weight each head by 20 / the least Mahalanobis distance to its classes.
        back_epochs: epochs in which each earlier head is updated after a task; 0 means no update.
        latent: hidden units of the adapters, if the backbone has none (backbone.adapter).
        lr: learning rate of everything that is trained; default: the run's.
    """

    paper = "Kim, Ke, Liu, A Multi-Head Model for Continual Learning via Out-of-Distribution Replay, CoLLAs 2022"
    uses_memory = True
    cost = Passes(3, 3, task=2)
    cannot_forget = "its covariances belong to whole calls, not to classes"
    card = Card(
        mechanism="HAT; an out-of-distribution class in each head, taught with the memory; Mahalanobis weights",
        besides="prediction takes one pass and the distances for each task; heads train on cached features",
        o_rows="refused: O belongs to no task, and the heads of single tasks cannot tell which task a word belongs to",
        stages=("main", "back 1", "..."),
        reading="HAT's reading applies. The memory is herded (memory.select random is the original). The covariance "
        "is shrunk as in ROW. An earlier head is updated on features under its own gates (the official code takes "
        "those of the first task).",
    )
    means: Tensor  # (classes, width) mean features under the gates of the class's own task
    whitening: Tensor  # (tasks, width, width) W, lower triangular, with (W^T W)^-1 = 0.8 Sigma_t + 0.2 I

    def __init__(
        self,
        smax: float = 500.0,
        lamb: float = 0.75,
        temperature: float = 2.0,
        distance: bool = True,
        back_epochs: int = 10,
        latent: int = 64,
        lr: float | None = None,
        anneal: Literal["stage", "epoch"] = "stage",
        gate_steps: int = 3140,
    ) -> None:
        super().__init__(smax, lamb, "softmax", latent, lr, anneal, gate_steps)
        if temperature <= 0:
            raise ConfigError(f"{self.title}: temperature ({temperature}) must be above 0")
        if back_epochs < 0:
            raise ConfigError(f"{self.title}: back_epochs ({back_epochs}) must be at least 0; 0 means no update")
        self.temperature, self.distance, self.back_epochs = temperature, distance, back_epochs
        self.table: tuple[int, str] | None = None  # the task and stage of the cached features below
        self.ids = self.features = self.others = NO_IDS

    def build(self, model: Model) -> Model:
        width = model.encoder.width
        self.register_buffer("means", torch.zeros(0, width))
        self.register_buffer("whitening", torch.zeros(0, width, width))
        return super().build(model)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Version 0.1 saved L itself."""
        if (factors := state_dict.pop(f"{prefix}factors", None)) is not None:
            state_dict[f"{prefix}whitening"] = inverse_factor(factors)
        super()._load_from_state_dict(state_dict, prefix, *others)

    @property
    def extra(self) -> int:
        """One output for the out-of-distribution class, if there is a memory to learn it from."""
        return int(self.memory.size > 0 or self.memory.per_class > 0)

    # -- learning a task

    def loss(self, batch: Batch) -> Loss:
        """Cross-entropy over N + 1 outputs, as one mean over new and replayed rows, where replayed rows have label
        N."""
        return super().loss(Batch.cat(batch, self.replay()))

    def after_task(self, task: Task) -> None:
        self.describe(task)
        super().after_task(task)

    def describe(self, task: Task) -> None:
        """Means and covariance of the task's features under its own gates."""
        examples = self.training_examples(task)
        with self.gates.of(task.index):
            features = self.outputs(examples, logits=False).features
        means, covariance = class_gaussians(features, self.stream.labels(examples)[1], task.classes)
        self.means = torch.cat([self.means, means.to(self.means)])
        self.whitening = torch.cat([self.whitening, shrunk_whitening(covariance)[None].to(self.whitening)])

    # -- updating heads

    def stages(self, task: Task) -> list[Stage]:
        return [*super().stages(task), *self.back_updates(task)]

    def back_updates(self, task: Task) -> list[Stage]:
        """A stage for each earlier head whose classes are still in memory. It trains on the pool: its own and all other
        classes."""
        if not self.back_epochs:
            return []
        return [
            self.head_stage(f"back {p + 1}", p, self.head, lambda: self.pool(task), self.back_epochs, self.batch_size)
            for p in self.memory.task.unique().tolist()
        ]

    def head_stage(
        self,
        name: str,
        task: int,
        head: LinearHead,
        examples: Callable[[], Tensor],
        epochs: int,
        batch_size: int,
        **changes: Any,
    ) -> HeadStage:
        """A stage for the block of `task` in `head`."""
        return HeadStage(
            name,
            loss=lambda batch: self.head_loss(head, task, batch.examples),
            epochs=epochs,
            batch_size=batch_size,
            examples=examples,
            module=lambda: head,
            groups=lambda: {"head": head.of(task)},
            augment=False,
            lr=self.training_settings.head_lr if self.lr is None else self.lr,
            task=task,
            **changes,
        )

    def pool(self, task: Task) -> Tensor:  # (examples,) ids
        """Equally many examples of each class: from memory for the old classes, at random for the new ones."""
        found = [self.memory.examples[self.memory.group == c] for c in self.memory.group.unique()]
        for c, members in self.stream.by_group(self.training_examples(task)).items():
            order = torch.randperm(len(members), generator=generator(self.now.seed, "pool", task.index, c))
            found.append(members[order])
        count = min(len(members) for members in found)
        return torch.cat([members[:count] for members in found])

    def before_epoch(self, stage: Stage) -> None:
        super().before_epoch(stage)
        if isinstance(stage, HeadStage) and self.table != (self.now.task, stage.name):
            self.others = stage.others()
            self.ids = torch.cat([stage.examples(), self.others]).sort().values
            with self.gates.of(stage.task):
                self.features = self.outputs(self.ids, logits=False).features
            self.table = (self.now.task, stage.name)

    def head_loss(self, head: LinearHead, task: int, examples: Tensor) -> Tensor:
        if len(self.others):
            drawn = torch.randint(len(self.others), (len(examples),), generator=self.now.rng("others"))
            examples = torch.cat([examples, self.others[drawn]])
        features = self.features[torch.searchsorted(self.ids, examples)]
        targets = self.stream.labels(examples)[1].to(features.device)
        return F.cross_entropy(self.logits_of(task, head(features)), self.local(task, targets))

    # -- prediction

    def nearness(self, task: int, features: Tensor) -> Tensor:  # (rows, width) -> (rows, 1)
        """max_y 1 / MD(h; mu_y, Sigma_t) over the task's classes."""
        own = self.stream[task].classes
        distance = mahalanobis(features, self.means[own.start : own.stop], self.whitening[task])
        return 1 / distance.amin(1, keepdim=True).clamp(min=1e-6)

    @torch.inference_mode()
    def predict(self, batch: Batch, scorer: str | None = None) -> Tensor:
        """c_t softmax(z_t / T) without its last column, c_t = 20 max_y 1 / MD."""
        scores = []
        for t, out in enumerate(self.passes(batch)):
            likely = F.softmax(out.logits / self.temperature, 1)[:, : len(self.stream[t].classes)]
            scores.append(20 * self.nearness(t, out.features) * likely if self.distance else likely)
        return torch.cat(scores, 1)
