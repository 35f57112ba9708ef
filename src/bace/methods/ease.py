"""EASE: expandable subspace ensemble.

Zhou, Sun, Ye, Zhan, "Expandable Subspace Ensemble for Pre-Trained Model-Based Class-Incremental Learning", CVPR 2024.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from bace.core.method import Card, Method, Passes
from bace.core.stage import Stage
from bace.core.stream import Task
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.parts.prototypes import class_means, cosines
from bace.methods.parts.tuning import begin_tuning, check_tuning, local_validation_loss, tuning_stage
from bace.models.model import Model, parameter_count
from bace.models.parallel_adapters import ParallelAdapters


class EASE(Method):
    """Tune new adapters for every task and keep them, so that each task has its own feature space. A class has a
    prototype in every space. In later spaces it is synthesised from the classes that were seen there.

    Args:
        alpha: weight of the spaces of other tasks, divided by the t tasks so far; a class's own space has weight 1.
        hidden: units in the bottleneck of an adapter.
        tune_epochs: epochs of a task; the run's train.epochs, lr and batch_size are not used.
        tune_lr: learning rate, which falls to 0 along a cosine.
        tune_batch: examples per step.
    """

    title = "EASE"
    paper = (
        "Zhou et al., Expandable Subspace Ensemble for Pre-Trained Model-Based Class-Incremental Learning, CVPR 2024"
    )
    takes_o = False
    growing_head = False
    one_encoder = False
    by_class = ("prototypes",)
    card = Card(
        mechanism="adapters for each task; prototypes in all spaces, synthesised by similarity in later ones",
        besides="once, and in prediction, a pass for each task so far (3 for three tasks); every task adds adapters",
        o_rows="refused: O belongs to no task, so it has no space of its own",
        stages=("tune",),
        reading="The tuning uses a cosine head whose scale starts at 1, as in the authors' code. Prototypes in later "
        "spaces are synthesised again after every task, from all classes seen there (the authors' `recalc_sim`).",
    )

    adapters: ParallelAdapters
    prototypes: Tensor  # (classes, tasks, width)

    def __init__(
        self,
        alpha: float = 0.1,
        hidden: int = 64,
        tune_epochs: int = 20,
        tune_lr: float = 0.025,
        tune_batch: int = 48,
    ) -> None:
        super().__init__()
        check_tuning(self.title, tune_epochs, tune_lr, tune_batch)
        if alpha < 0:
            raise ConfigError(f"EASE: alpha ({alpha}) must be at least 0; 0 leaves out the spaces of other tasks")
        self.alpha, self.hidden = alpha, hidden
        self.tune_epochs, self.tune_lr, self.tune_batch = tune_epochs, tune_lr, tune_batch
        self.own_batch = tune_batch
        self.cost = Passes(3, task=3, epochs=tune_epochs)
        self.register_buffer("prototypes", torch.zeros(0, 0, 0))

    def build(self, model: Model) -> Model:
        self.adapters = ParallelAdapters(model.encoder, self.hidden)
        return model

    def needs(self, task: int) -> tuple[int, int]:
        return parameter_count(self.model.encoder) + self.adapters.missing(task + 1), self.adapters.size

    def grow(self, task: Task) -> None:
        begin_tuning(self, task, self.adapters)
        grown = torch.zeros(task.classes.stop, task.index + 1, self.model.encoder.width, device=self.stream.device)
        if task.index:
            grown[: task.classes.start, :-1] = self.prototypes
        self.prototypes = grown

    def stages(self, task: Task) -> list[Stage]:
        epochs, lr, batch = self.tune_epochs, self.tune_lr, self.tune_batch
        return [tuning_stage(self, task, self.adapters, epochs=epochs, lr=lr, batch_size=batch)]

    def validation_loss(self, examples: Tensor) -> float:
        return local_validation_loss(self, self.stream[self.now.task], examples)

    # -- prototypes

    def after_task(self, task: Task) -> None:
        """Compute the prototypes of the task's classes in all spaces, then synthesise all others."""
        examples = self.training_examples(task)
        targets = self.stream.labels(examples)[1]
        for j in range(task.index + 1):
            with self.adapters.of(j):
                means = class_means(self.outputs(examples, logits=False).features, targets, task.classes)
            self.prototypes[task.classes.start :, j] = means.to(self.prototypes)
        complete(self.prototypes, [earlier.classes for earlier in self.stream[: task.index + 1]])

    def forget(self, classes: Sequence[int], examples: Tensor) -> None:
        """Prototypes that were synthesised from these classes are synthesised again. Only the tuning used the head."""
        super().forget(classes, examples)
        self.model.head.forget_classes(range(self.model.head.classes))
        complete(self.prototypes, [task.classes for task in self.stream])

    @torch.inference_mode()
    def predict(self, batch: Batch, scorer: str | None = None) -> Tensor:  # (rows, seen)
        """sum_j w_ij cos(f_j, p_cj) for a class c of task i, with w_ii = 1 and otherwise w_ij = alpha / t."""
        tasks = self.prototypes.shape[1]
        scores = torch.zeros(batch.targets.shape[0], len(self.prototypes), device=self.prototypes.device)
        for j in range(tasks):
            weight = torch.full((len(self.prototypes),), self.alpha / tasks, device=scores.device)
            weight[list(self.stream[j].classes)] = 1.0
            with self.adapters.of(j):
                scores += weight * cosines(self.model(batch).features, self.prototypes[:, j])
        return scores


def complete(
    prototypes: Tensor,  # (classes, tasks, width), changed in place
    tasks: list[range],  # their classes
) -> None:
    """Synthesise p_cj for the classes c of task i in a later space j, which had no examples of c. The classes of task j
    and later tasks have prototypes in both spaces, and p_cj is their mean in space j, weighted by their similarity to c
    in space i: P_ij = softmax(cos(P_ii, P_{>=j, i})) P_{>=j, j}."""
    for i, old in enumerate(tasks):
        for j in range(i + 1, len(tasks)):
            own, later = slice(old.start, old.stop), slice(tasks[j].start, None)
            similar = cosines(prototypes[own, i], prototypes[later, i]).softmax(1)  # (old, later classes)
            prototypes[own, j] = similar.nan_to_num() @ prototypes[later, j]  # 0 if all of the later ones are forgotten
