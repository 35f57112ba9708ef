"""DER++: dark experience replay. Buzzega, Boschini, Porrello, Abati, Calderara, "Dark Experience for General Continual
Learning: a Strong, Simple Baseline", NeurIPS 2020."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from bace.core.memory import stack_rows, unstack_rows
from bace.core.method import Card, Passes
from bace.core.stage import Loss, Stage
from bace.core.stream import Task
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.er import ER
from bace.methods.parts.losses import old_logit_mse
from bace.models.model import Model


class DERpp(ER):
    """Replay labels and the logits that the network had: L = CE(z, y) + alpha MSE + beta CE on memory.

    Args:
        alpha: weight of the logit matching; 0 leaves it out. Default: 0.2 for `stored`, 0.5 for a `teacher`.
        beta: weight of the cross-entropy on replayed examples; 0 leaves it out.
        logits: which logits are matched. `stored`: those stored with an example when the reservoir took it in, with
            two independent draws for the two terms (the original). `teacher`: those of the frozen network before this
            task, for the old classes, with one draw from a herded memory (the reading of BaCE's authors).
    """

    title = "DER++"
    paper = "Buzzega et al., Dark Experience for General Continual Learning: a Strong, Simple Baseline, 2020"
    cost = Passes(3, 6)
    takes_known = True
    card = Card(
        mechanism="replay; matching of past logits on memory",
        o_rows="O is learned as class 0 with cross-entropy, also in replayed sentences, all rows of which are matched",
        reading="The weights are the original's for CIFAR-10 with 500 slots. With `logits=teacher`, the reading of "
        "BaCE's authors, the weights are theirs. The reservoir is offered every example of every step, so replay "
        "starts in the first task (beside a whole batch). Logits are matched after scaling, over the columns that "
        "existed when they were stored.",
    )

    def __init__(
        self, alpha: float | None = None, beta: float = 0.5, logits: Literal["stored", "teacher"] = "stored"
    ) -> None:
        super().__init__()
        if alpha is None:
            alpha = {"stored": 0.2, "teacher": 0.5}[logits]
        if min(alpha, beta) < 0:
            raise ConfigError(f"DER++: alpha ({alpha}) and beta ({beta}) must be at least 0")
        self.alpha, self.beta, self.logits = alpha, beta, logits
        self.keeps_teacher = logits == "teacher" and alpha > 0
        if logits == "teacher":
            self.cost = Passes(3, 4, task=1)
        self.before: Tensor  # (rows, classes) logits of a step's new rows, before its update

    def build(self, model: Model) -> Model:
        if self.logits == "stored":
            if self.memory.per_class:
                raise ConfigError(
                    f"DER++ keeps a reservoir of fixed total size, but memory.per_class is {self.memory.per_class}: "
                    "set memory.size instead, or use logits=teacher"
                )
            self.memory.note("logits", torch.zeros(0, 0, 0))  # (slots, rows of a sentence, classes)
        return super().build(model)

    def stages(self, task: Task) -> list[Stage]:
        if self.logits == "teacher":
            return super().stages(task)
        # the first task has whole batches, as with other memories, although the reservoir fills from its first step on
        share = self.replay_share if self.memory.size and self.replays and task.index else 0
        return [self.stage(task, batch_size=self.batch_size - share)]

    def loss(self, batch: Batch) -> Loss:
        return self.loss_stored(batch) if self.logits == "stored" else self.loss_teacher(batch)

    def loss_stored(self, batch: Batch) -> Loss:
        """CE(z(x), y) + alpha MSE(z(x1), z1) + beta CE(z(x2), y2), with x1 and x2 drawn independently."""
        first = self.replay(1) if self.alpha else None
        second = self.replay(2) if self.beta else None
        both = Batch.cat(batch, second)
        logits = self.model(Batch.cat(both, first)).logits
        self.before = logits[: len(batch)].detach()
        terms = self.cross_entropy(logits[: len(both)], both, len(batch))
        if "replay" in terms:
            terms["replay"] = self.beta * terms["replay"]
        if first is not None:
            stored = unstack_rows(
                self.memory.get_buffer("logits")[self.replayed_slots(1)].to(logits.device), first.owner
            )
            terms["match"] = self.alpha * known_mse(logits[len(both) :, : stored.shape[1]], stored)
        return terms

    def loss_teacher(self, batch: Batch) -> Loss:
        """CE(z(x), y) + beta CE(z(x1), y1) + alpha MSE(z(x1)_old, z_teacher(x1)_old)."""
        replay = self.replay()
        both = Batch.cat(batch, replay)
        logits = self.model(both).logits
        terms = self.cross_entropy(logits, both, len(batch))
        if "replay" in terms:
            terms["replay"] = self.beta * terms["replay"]
        if replay is not None and self.alpha:
            target = self.infer([replay], self.teacher).logits
            terms["match"] = self.alpha * old_logit_mse(logits[len(batch) :], target)
        return terms

    def after_step(self, batch: Batch) -> None:
        if self.logits == "stored":
            _, owner = self.stream.rows_of(batch.examples)
            notes = stack_rows(self.before, owner, len(batch.examples))
            group, rng = self.stream.group_of(batch.examples), self.now.rng("reservoir")
            self.memory.offer_reservoir(batch.examples, self.now.task, group, rng, logits=notes)

    def remember(self, task: Task) -> None:
        if self.logits == "teacher":
            super().remember(task)

    @torch.no_grad()
    def forget(self, classes: Sequence[int], examples: Tensor) -> None:
        """The logits that other examples had for these classes go too."""
        super().forget(classes, examples)
        if self.logits == "stored":
            stored = self.memory.get_buffer("logits")
            stored[..., [c for c in classes if c < stored.shape[-1]]] = torch.nan

    @property
    def replays(self) -> bool:
        return self.alpha > 0 or self.beta > 0

    @property
    def replay_size(self) -> int:
        return super().replay_size if self.replays else 0


def known_mse(logits: Tensor, stored: Tensor) -> Tensor:  # (rows, columns) twice -> ()
    """The mean of (z - z')^2 where z' is known; NaN stands for the columns of classes that came later."""
    known = ~stored.isnan()
    return (logits - stored.where(known, logits.detach())).square().sum() / known.sum().clamp(min=1)
