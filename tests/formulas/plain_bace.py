"""A second implementation of BaCE, written from the formulas of docs/bace.md without using `methods/bace.py`. It works
row by row, with probabilities instead of their logarithms, and passes a network wherever a formula names it."""

from typing import Literal

import torch
from torch import Tensor

from bace.core.method import Method
from bace.core.stage import Loss, Stage
from bace.core.stream import Task
from bace.data.batch import Batch
from bace.models.model import frozen_copy


class PlainBaCE(Method):
    uses_memory = True

    def __init__(
        self,
        alpha: float = 1.0,
        W0: float = 0.95,
        K: int = 5,
        beta: float = 0.9,
        lambda_mse: float = 1.0,
        neighbor_grad: bool = False,
        teacher_init: Literal["student", "ema"] = "student",
    ) -> None:
        super().__init__()
        self.alpha, self.W0, self.K, self.beta, self.lambda_mse = alpha, W0, K, beta, lambda_mse
        self.neighbor_grad, self.teacher_init = neighbor_grad, teacher_init
        self.beside: dict[int, list[tuple[int, float]]] = {}  # row: its neighbours' rows and weights W(x_j, x)

    # -- the teacher (4)

    def grow(self, task: Task) -> None:
        """The teacher is the student of the previous task, or its averaged teacher, which lacks the head rows that the
        previous task added."""
        averaged = self.teacher.state_dict() if self.teacher is not None and self.teacher_init == "ema" else {}
        if task.index:
            self.teacher = frozen_copy(self.model)
            self.teacher.load_state_dict(averaged, strict=False)
        super().grow(task)

    @torch.no_grad()
    def after_epoch(self, stage: Stage) -> None:
        """theta0 <- beta theta0 + (1 - beta) theta. This also happens after a task's last epoch, although that average
        may never be read."""
        if self.teacher is not None:
            student = dict(self.model.named_parameters())
            for name, value in self.teacher.named_parameters():
                value.copy_(self.beta * value + (1 - self.beta) * student[name])

    # -- the neighbours of an epoch (2.1, 2.2)

    @torch.no_grad()
    def before_epoch(self, stage: Stage) -> None:
        """Compare every row of the task's own classes with every other one, by the teacher's unit features."""
        unit: dict[int, Tensor] = {}
        for example in stage.examples() if self.teacher is not None else ():
            batch = self.stream.batch(example[None], view=self.now.view())
            features = self.teacher(batch).features  # type: ignore[misc]
            for i in self.own(batch.targets):
                unit[int(batch.rows[i])] = features[i] / features[i].square().sum().sqrt()
        self.beside = {}
        for row, feature in unit.items():
            others = [(float((feature - other).square().sum().sqrt()), j) for j, other in unit.items() if j != row]
            nearest = sorted(others)[: self.K]  # ties go to the lower index
            total = sum(1 / max(d, 1e-6) for d, _ in nearest)
            self.beside[row] = [(j, (1 - self.W0) / max(d, 1e-6) / total) for d, j in nearest]

    def own(self, targets: Tensor) -> list[int]:
        """Return the rows that are learned by their labels: all rows, except O words after the first task, because old
        entities are labelled O there."""
        hiding = self.stream.background if self.now.known else None
        return [i for i, target in enumerate(targets.tolist()) if target != hiding]

    # -- the loss of a step

    def loss(self, batch: Batch) -> Loss:
        terms = self.new_terms(batch)
        if (replay := self.replay()) is not None:
            terms |= self.memory_terms(replay)
        return terms

    def new_terms(self, batch: Batch) -> dict[str, Tensor]:
        """Compute L_new = mean -log joint(x)[y] and the distillation alpha KL_new (3.1), which depends on the label of
        a word for entities (11.2)."""
        S, own, terms = self.model(batch).logits.softmax(1), self.own(batch.targets), {}
        if own:
            joint = [self.joint(int(batch.rows[i]), S[i])[batch.targets[i]] for i in own]
            terms["new"] = -torch.stack(joint).log().mean()
        if self.teacher is not None and self.alpha:
            P, P0 = S[:, : self.now.known], self.old_scores(batch)
            if self.stream.background is None:
                terms["distil"] = self.alpha * kl(P, P0)  # student first, as the paper writes it
            else:
                within = P / P.sum(1, keepdim=True)  # entity words: renormalised over the old classes
                hidden = [i for i in range(len(batch)) if i not in own]  # O words: teacher first
                parts = [kl(within[own], P0[own])] if own else []
                parts += [kl(P0[hidden], P[hidden])] if hidden else []
                terms["distil"] = self.alpha * torch.stack(parts).sum()
        return terms

    def joint(self, row: int, scores: Tensor) -> Tensor:  # (classes,) -> (classes,)
        """Return W_0 S(x) + sum_j W_j S(x_j), or S(x) alone if there are no neighbours."""
        if not self.beside.get(row):
            return scores
        mixed = self.W0 * scores
        for neighbour, weight in self.beside[row]:
            with torch.set_grad_enabled(self.neighbor_grad):
                shown = self.model(self.stream.rows(torch.tensor([neighbour]), view=self.now.view()))
            mixed = mixed + weight * shown.logits[0].softmax(0)
        return mixed

    def memory_terms(self, replay: Batch) -> dict[str, Tensor]:
        """Compute the cross-entropy over all classes, the match with the teacher's logits of the old classes
        (docs/bace.md, 3.3), and the distillation of replayed O words."""
        Z, own, terms = self.model(replay).logits, self.own(replay.targets), {}
        S = Z.softmax(1)
        if own:
            terms["replay"] = -torch.stack([S[i, replay.targets[i]] for i in own]).log().mean()
        if self.teacher is not None:
            with torch.no_grad():
                Z0 = self.teacher(replay).logits
            terms["match"] = self.lambda_mse * (Z[:, : self.now.known] - Z0).square().mean()
            hidden = [i for i in range(len(replay)) if i not in own]
            if hidden and self.alpha:
                terms["replay_o"] = self.alpha * kl(self.old_scores(replay)[hidden], S[hidden, : self.now.known])
        return terms

    @torch.no_grad()
    def old_scores(self, batch: Batch) -> Tensor:  # (rows, old)
        """Return S0. The teacher knows only the old classes."""
        assert self.teacher is not None
        scores: Tensor = self.teacher(batch).logits.softmax(1)
        return scores


def kl(P: Tensor, Q: Tensor) -> Tensor:  # (rows, classes) twice
    """Return the mean over rows of sum_c P_c (log P_c - log Q_c)."""
    return (P * (P.log() - Q.log())).sum(1).mean()
