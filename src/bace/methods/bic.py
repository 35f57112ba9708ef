"""BiC. Wu, Chen, Wang, Ye, Liu, Guo, Fu, "Large Scale Incremental Learning", CVPR 2019."""

from typing import Literal, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bace.core.memory import draw_balanced
from bace.core.method import Card, Passes
from bace.core.stage import Loss, Stage
from bace.core.stream import Task
from bace.data.batch import NO_IDS, Batch
from bace.errors import ConfigError
from bace.methods.er import ER
from bace.methods.parts.bias_correction import correct_bias
from bace.methods.parts.held_out import HoldOut
from bace.methods.parts.losses import soft_cross_entropy
from bace.methods.parts.replay import ReplayOptions
from bace.models.heads import Head


class BiC(HoldOut, ER):
    """Replay and distil. Then freeze the network and fit a scale and a shift of the new classes' logits on a small
    balanced held-out set.

    Args:
        T: temperature of the distillation.
        corrections: which logits are corrected. `latest`: those of the latest task's classes. `cumulative`: those of
            every task by its own pair, also while later tasks are trained.
        bias_epochs: number of steps of the second stage, each over the whole balanced set; 0 leaves it out.
        bias_lr: learning rate of the second stage (SGD with momentum 0.9).
    """

    title = "BiC"
    paper = "Wu et al., Large Scale Incremental Learning, CVPR 2019"
    holds_out = True
    keeps_teacher = True
    scorers = ("raw",)
    cost = Passes(4, 4, task=1)
    card = Card(
        mechanism="replay; distillation; scale and shift of the new logits, fitted on held-out examples",
        o_rows="O is class 0, an old class: it is learned with cross-entropy and distilled, but never scaled; the "
        "balanced set takes as many words of each tag as the rarest tag has",
        stages=("main", "bias"),
        replay="concat",
        reading="Only the latest pair is active, as in the original (`corrections`). Both terms are sums of a mean "
        "over new rows and a mean over replayed rows. With one slot per class nothing is held out, and the balanced "
        "set consists of the memory and as many herded new examples of each class.",
    )

    def __init__(
        self,
        T: float = 2.0,
        corrections: Literal["latest", "cumulative"] = "latest",
        bias_epochs: int = 200,
        bias_lr: float = 0.01,
        **replay: Unpack[ReplayOptions],
    ) -> None:
        super().__init__(**replay)
        if T <= 0 or bias_lr <= 0 or bias_epochs < 0:
            raise ConfigError(
                f"BiC: T ({T}) and bias_lr ({bias_lr}) must be above 0, bias_epochs ({bias_epochs}) at least 0"
            )
        self.T, self.corrections = T, corrections
        self.bias_epochs, self.bias_lr = bias_epochs, bias_lr
        self.pairs = nn.ParameterList()  # (2,) scale a and shift c of each task's logits
        # second stage: the rows of the balanced set, their logits, and which of them this epoch takes
        self.rows = self.logits = self.picked = NO_IDS

    def grow(self, task: Task) -> None:
        super().grow(task)
        self.pairs.append(nn.Parameter(torch.tensor([1.0, 0.0], device=self.stream.device)))

    def stages(self, task: Task) -> list[Stage]:
        main = super().stages(task)
        if not task.index or not self.bias_epochs:
            return main
        bias = self.stage(
            task,
            name="bias",
            loss=self.bias_loss,
            epochs=self.bias_epochs,
            batch_size=max(len(self.stream.data), 1),  # the whole set at once
            examples=lambda: self.balanced(task),
            module=lambda: self.pairs,
            groups=lambda: {"pair": [self.pairs[task.index]]},
            cached=True,
            lr=self.bias_lr,
            optimiser="sgd",
            momentum=0.9,
            schedule=lambda epochs: 1.0,
            prepare=self.drop_rows,
        )
        return [*main, bias]

    # -- the first stage

    def loss(self, batch: Batch) -> Loss:
        both = self.with_replay(batch)
        logits = self.model(both).logits
        if self.corrections == "cumulative":
            logits = self.corrected(logits, self.now.task)
        terms = self.cross_entropy(logits, both, len(batch))
        if self.teacher is None:
            return terms
        # L = lam KD(z, z'; old, T) + (1 - lam) CE(z, y), lam = O/S; z' with the teacher's own correction
        old, lam = self.now.known, self.now.known / self.now.seen
        teacher = self.corrected(self.infer([both], self.teacher).logits, self.now.task)
        parts = self.policy.parts(len(batch), len(both)).values()
        distil = [soft_cross_entropy(logits[rows, :old], teacher[rows], self.T) for rows in parts]
        return {name: (1 - lam) * term for name, term in terms.items()} | {"distil": lam * torch.stack(distil).sum()}

    # -- the second stage

    def balanced(self, task: Task) -> Tensor:  # (examples,)
        """Equally many held-out examples of each old and each new class. A class without held-out examples gives its
        first examples in memory or by herding."""
        count = max(self.spare(self.quota(task)), 1)
        old = {**self.memory.first(count), **self.held.first(count)}
        new = {group: held for group, held in self.choose_held(task).items() if len(held)}
        lacking = [members for group, members in self.stream.by_group(task.train).items() if group not in new]
        if lacking:
            new = {**self.choose(torch.cat(lacking).unique(), task, count), **new}
        return torch.cat([*old.values(), *new.values()]).sort().values

    def drop_rows(self) -> None:
        self.rows = NO_IDS

    def before_epoch(self, stage: Stage) -> None:
        if stage.name != "bias":
            return
        if not len(self.rows):  # only once, because the network is frozen
            examples = stage.examples()
            self.rows, self.logits = self.stream.labels(examples)[0], self.outputs(examples).logits
        self.picked = self.rows[draw_balanced(self.stream.targets[self.rows], self.now.rng("balanced"))]

    def bias_loss(self, batch: Batch) -> Loss:
        """CE([z_old, a z_new + c], y) + 0.1 c^2 / 2."""
        taken = torch.isin(batch.rows, self.picked)
        logits = self.logits[torch.searchsorted(self.rows, batch.rows[taken])]
        if self.corrections == "cumulative":
            logits = self.corrected(logits, self.now.task)
        a, c = self.pairs[self.now.task]
        corrected = correct_bias(logits, self.stream[self.now.task].classes, a, c)
        return {"bias": F.cross_entropy(corrected, batch.targets[taken]), "shift": 0.1 * c**2 / 2}

    # -- corrected logits

    def corrected(self, logits: Tensor, tasks: int) -> Tensor:  # (rows, classes)
        """The logits of the network, corrected as after learning `tasks` tasks."""
        first = 0 if self.corrections == "cumulative" else max(tasks - 1, 0)
        for t in range(first, tasks):
            logits = correct_bias(logits, self.stream[t].classes, *self.pairs[t].detach())
        return logits

    def predict(self, batch: Batch, scorer: str | None = None) -> Tensor:
        logits = super().predict(batch)
        return logits if scorer == "raw" else self.corrected(logits, len(self.pairs))

    def transfer_scores(self, features: Tensor, head: Head) -> Tensor:
        return self.corrected(super().transfer_scores(features, head), len(self.pairs))  # known classes are corrected

    def report(self) -> dict[str, float]:
        """The pair of the newest task's classes; 1 and 0 mean no correction."""
        return dict(zip(("A", "B"), self.pairs[-1].tolist(), strict=True))

    def check_share(self, quota: int) -> None:
        if not self.memory.size and not self.memory.per_class:
            raise ConfigError("BiC fits its correction on stored examples, but the memory is 0: set memory.size")
