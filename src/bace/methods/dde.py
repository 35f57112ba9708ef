"""DDE: Hu, Tang, Miao, Hua, Zhang, "Distilling Causal Effect of Data in Class-Incremental Learning", CVPR 2021."""

from typing import Literal, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bace.core.method import Card, Passes
from bace.core.stage import Loss, Stage
from bace.core.stream import Task
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.lucir import LUCIR
from bace.methods.parts.losses import mixture, neighbour_log_weights
from bace.methods.parts.neighbours import NeighbourTable, nearest
from bace.methods.parts.replay import ReplayOptions
from bace.models.heads import Head
from bace.models.model import Model, Output


class Removal(nn.Module):
    """z - a2 ((1 - a1) b' + a1 b): removes from the logits what the momentum features of the last two tasks explain."""

    def __init__(self, a: float) -> None:
        super().__init__()
        self.a = a
        self.a1, self.a2 = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(float(a)))

    def reset(self) -> None:
        self.a1.data.fill_(1.0)
        self.a2.data.fill_(self.a)

    def forward(self, logits: Tensor, before: Tensor, now: Tensor) -> Tensor:  # (rows, classes) each
        result: Tensor = logits - self.a2 * ((1 - self.a1) * before + self.a1 * now)
        return result


class DDE(LUCIR):
    """Extend LUCIR: predict each example jointly with its nearest neighbours in the teacher's feature space, and at
    test time remove the direction in which training has moved all features.

    Args:
        top_k: number of neighbours of an example among the examples of new classes; 0 leaves them out.
        mu: e <- mu e + mean feature of the batch, where the momentum feature e starts a task at 0.
        a: share of the momentum direction that is removed from a prediction; 0 leaves it in.
        removal: `fixed` uses `a`; `learned` uses two numbers, fitted on the class-balanced memory after each task.
        lambda_base: weight of the feature term, times sqrt(old classes / new classes); 0 leaves it out.
        K: how many new classes an old example is ranked against, at most all of them.
        margin: margin of the ranking, between cosines.
        margin_weight: weight of the ranking; 0 leaves it out.
        freeze_old: head rows of old classes are not trained.
    """

    title = "DDE"
    paper = "Hu et al., Distilling Causal Effect of Data in Class-Incremental Learning, CVPR 2021"
    takes_o = False
    cannot_forget = "its momentum features are means over whole calls, not over classes"
    card = Card(
        mechanism="LUCIR; joint prediction with neighbours; momentum direction removed at test time",
        besides="shared neighbours are passed once",
        o_rows="refused: neighbours of O words are not defined; CFNER applies this idea to entities",
        replay="concat",
        reading="The neighbours of a replayed example belong to its epoch view, although the step sees a fresh "
        "view. Both momentum features act through the current head rows, also in forward transfer. `removal=learned` "
        "is a separate stage that starts from (1, a) each time.",
    )

    def __init__(
        self,
        top_k: int = 10,
        mu: float = 0.9,
        a: float = 0.5,
        removal: Literal["fixed", "learned"] = "fixed",
        lambda_base: float = 5.0,
        K: int = 2,
        margin: float = 0.5,
        margin_weight: float = 1.0,
        freeze_old: bool = True,
        **replay: Unpack[ReplayOptions],
    ) -> None:
        super().__init__(lambda_base, K, margin, margin_weight, freeze_old, **replay)
        if top_k < 0:
            raise ConfigError(f"DDE: top_k is {top_k}, but it must be at least 0; 0 leaves the neighbours out")
        if a < 0:
            raise ConfigError(f"DDE: a is {a}, but it must be at least 0; 0 removes nothing")
        if not 0 <= mu < 1:
            raise ConfigError(
                f"DDE: mu is {mu}, but it must be at least 0 and below 1, or the momentum feature grows for ever"
            )
        self.top_k, self.mu, self.learned = top_k, mu, removal == "learned"
        self.cost = Passes(5 + top_k, 4 + top_k, task=2)
        self.removal = Removal(a)
        self.table: NeighbourTable | None = None  # of an epoch, recomputed by before_epoch
        self.batch_mean: Tensor | None = None  # (width,) of the step
        self.e: Tensor  # (2, width) momentum features of the previous and of the current task

    def build(self, model: Model) -> Model:
        self.register_buffer("e", torch.zeros(2, model.encoder.width))
        return super().build(model)

    def before_task(self, task: Task) -> None:
        self.e = torch.stack([self.e[1], torch.zeros_like(self.e[1])])

    def stages(self, task: Task) -> list[Stage]:
        (main,) = super().stages(task)
        if not self.fits_removal(task):
            return [main]
        fit = self.stage(
            task,
            name="removal",
            loss=self.removal_loss,
            epochs=20,
            batch_size=self.batch_size,
            examples=lambda: self.memory.examples,
            module=lambda: self.removal,
            lr=2e-3,
            optimiser="adam",
            schedule=lambda epochs: 1.0 if epochs < 10 else 0.1,
            prepare=lambda: self.begin_removal(task),
        )
        return [main, fit]

    def fits_removal(self, task: Task) -> bool:
        return self.learned and task.index > 0 and bool(self.memory.size or self.memory.per_class)

    def begin_removal(self, task: Task) -> None:
        self.remember(task)  # the network is fixed from now on, so this is the memory after the task
        self.removal.reset()

    # -- the joint prediction

    def before_epoch(self, stage: Stage) -> None:
        """The top_k nearest neighbours of all examples in the teacher's feature space, among those of new classes."""
        self.table = None
        if self.teacher is None or not self.top_k or stage.name != "main":
            return
        examples = torch.unique(torch.cat([stage.examples(), self.memory.examples]))
        targets = self.stream.labels(examples)[1]
        out = self.outputs(examples, self.teacher, view=self.now.view(), logits=False)
        new = torch.nonzero(targets >= self.now.known).flatten()
        found = nearest(F.normalize(out.features, dim=1), self.top_k, candidates=new)
        index, distance = (part.cpu() for part in found)  # the table holds row ids, which the CPU reads
        weights = neighbour_log_weights(distance, 0.5, uniform=True)  # one half, and the other half shared equally
        self.table = NeighbourTable(examples, torch.where(index < 0, -1, examples[index]), *weights, distance)

    def epoch_table(self) -> NeighbourTable | None:
        return self.table

    def loss(self, batch: Batch) -> Loss:
        both = self.with_replay(batch)
        out: Output = self.model(both)
        if self.teacher is not None:
            self.batch_mean = out.features.detach().mean(0)
        terms = self.cross_entropy(self.joint(out.logits, both), both, len(batch))
        return terms | self.hold(out, both, len(batch))

    def joint(self, logits: Tensor, both: Batch) -> Tensor:  # (rows, classes) -> (rows, classes)
        """log (p + q)/2, where q is the mean prediction of the neighbours, without gradient. The soft-max of
        log-probabilities gives the same probabilities, so they take the place of the logits."""
        if self.table is None:
            return logits
        near = self.table.of(both.rows, logits.device)
        parts = near.rows.split(self.training_settings.eval_batch_size)
        beside = self.infer(self.stream.rows(part, view=self.now.view()) for part in parts).logits
        return (mixture(logits, beside, near) + 1e-12).log()

    # -- the momentum feature and its removal

    def after_step(self, batch: Batch) -> None:
        if self.batch_mean is not None:
            self.e[1] = self.mu * self.e[1] + self.batch_mean
            self.batch_mean = None

    def predict(self, batch: Batch, scorer: str | None = None) -> Tensor:
        with torch.inference_mode():
            out: Output = self.model(batch)
            return self.direct_effect(out, self.model.head)

    def transfer_scores(self, features: Tensor, head: Head) -> Tensor:
        return self.direct_effect(Output(features, head(features)), head)

    def removal_loss(self, batch: Batch) -> Tensor:
        return 5 * F.cross_entropy(self.direct_effect(self.infer([batch]), self.model.head), batch.targets)

    def direct_effect(self, out: Output, head: Head) -> Tensor:  # (rows, classes)
        """The logits minus the biases b_i = cos(h, e_i) sigma W e_i, where the rows of W and e_i have length 1."""
        with torch.no_grad():
            cosines = F.cosine_similarity(out.features[:, None], self.e, dim=-1)  # (rows, 2)
            before, now = cosines.T[:, :, None] * head(self.e)[:, None]  # (rows, classes) each
        result: Tensor = self.removal(out.logits, before, now)
        return result

    def after_task(self, task: Task) -> None:
        if not self.fits_removal(task):  # otherwise the memory was already refilled
            super().after_task(task)
