"""BaCE: balancing the causal effects of new and old data. Zheng, Wang, Zhang, Feng, Ma, arXiv 2402.10063, 2024.

The loss is L = L_new + L_old. Section numbers are those of docs/bace.md, where the paper is silent and a reading had to
be taken.
"""

import functools
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from bace.core.method import Card, Loss, Passes, Stage
from bace.core.stream import Task
from bace.data.batch import NO_IDS, Batch
from bace.errors import ConfigError
from bace.methods.parts.bias_correction import correct_bias, fit_bias
from bace.methods.parts.held_out import HoldOut
from bace.methods.parts.losses import distillation, mixture_nll, neighbour_log_weights, old_logit_mse
from bace.methods.parts.neighbours import Near, NeighbourTable, nearest, random_neighbours
from bace.models.model import average_into, frozen_copy


class BaCE(HoldOut):
    """Predict each new sample jointly with its neighbours in the teacher's eyes (Effect_new); distil on new data,
    replay and match logits on memory (Effect_old); average the teacher once an epoch.

    Args:
        alpha: weight of the distillation on new data; 0 leaves it out.
        W0: weight of a sample itself among its neighbours; 1 leaves Effect_new out.
        K: number of neighbours.
        beta: teacher <- beta teacher + (1 - beta) student, after each epoch.
        lambda_mse: weight of the logit matching on memory.
        effect_new: which rows stand beside a sample: its nearest (`full`), nearest of the `same` or a `different`
            class, nearest with equal weights (`uniform`), `random` ones, or the farthest (`reverse`).
        neighbor_grad: whether neighbours carry gradient.
        kl_direction: of the distillation: KL(student || teacher), as the paper writes it (`reverse`), or
            KL(teacher || student) (`forward`), which holds new tasks back at alpha = 1.
        kl_mode: student's scores of the old classes: cut out of the soft-max over all (`slice`) or renormalised.
        kl_tau: temperature of the distillation.
        kl_reduction: `mean` also divides by the number of old classes.
        mse_reduction: of the logit matching: mean over rows and classes, or sum over classes.
        knn_normalize: compare unit features.
        knn_pool_cap: at most this many random candidates as neighbours; 0: all.
        effect_new_first_task: Effect_new in the first task too, with the pre-trained encoder as teacher.
        teacher_head: classes of the teacher: the `old` ones, or `all` (new rows start as the head grew them and are
            averaged with the rest); its scores of the old classes are then cut out of a soft-max over all.
        teacher_init: a task's first teacher is the `student` of the task before, or its averaged teacher (`ema`).
        bias_correction: after the last task, fit a scale and shift of the new logits on held-out memory.
        bic_solver: of the bias correction.
    """

    title = "BaCE"
    paper = "Zheng et al., Balancing the Causal Effects in Class-Incremental Learning, 2024"
    networks = 2  # student and teacher
    learns_o = False
    card = Card(
        mechanism="joint prediction with neighbours; distillation, replay and logit matching; averaged teacher",
        besides="neighbours in common, or in the batch, are passed once",
        o_rows="no anchors and no neighbours; distilled over all columns cut to the old ones; in replayed sentences so "
        "too, or class 0 under cross-entropy (`train.replay_o`), and always matched",
        reading="docs/bace.md",
    )

    def __init__(
        self,
        alpha: float = 1.0,
        W0: float = 0.95,
        K: int = 5,
        beta: float = 0.9,
        lambda_mse: float = 1.0,
        effect_new: Literal["full", "same", "different", "uniform", "random", "reverse"] = "full",
        neighbor_grad: bool = False,
        kl_direction: Literal["forward", "reverse"] = "reverse",
        kl_mode: Literal["slice", "renorm"] = "slice",
        kl_tau: float = 1.0,
        kl_reduction: Literal["batchmean", "mean"] = "batchmean",
        mse_reduction: Literal["mean", "sum"] = "mean",
        knn_normalize: bool = True,
        knn_pool_cap: int = 0,
        effect_new_first_task: bool = False,
        teacher_head: Literal["old", "all"] = "old",
        teacher_init: Literal["student", "ema"] = "student",
        bias_correction: bool = False,
        bic_solver: Literal["sgd", "adam", "lbfgs"] = "sgd",
    ) -> None:
        super().__init__()
        self.alpha, self.W0, self.K, self.beta, self.lambda_mse = alpha, W0, K, beta, lambda_mse
        self.effect_new, self.neighbor_grad = effect_new, neighbor_grad
        self.kl_direction, self.kl_mode, self.kl_tau, self.kl_reduction = kl_direction, kl_mode, kl_tau, kl_reduction
        self.mse_reduction = mse_reduction
        self.knn_normalize, self.knn_pool_cap = knn_normalize, knn_pool_cap
        self.effect_new_first_task = effect_new_first_task
        self.teacher_head, self.teacher_init = teacher_head, teacher_init
        self.bic_solver = bic_solver
        if K < 1:
            raise ConfigError(f"BaCE: K is {K}, it must be at least 1; W0 = 1 leaves the neighbours out")
        if min(alpha, lambda_mse) < 0 or kl_tau <= 0:
            raise ConfigError(
                f"BaCE: alpha ({alpha}) and lambda_mse ({lambda_mse}) must be at least 0, kl_tau ({kl_tau}) above 0"
            )
        if not 0 <= W0 <= 1 or not 0 <= beta <= 1:
            raise ConfigError(f"BaCE: W0 ({W0}) and beta ({beta}) must lie between 0 and 1")
        self.holds_out = bias_correction
        neighbours = K * (3 if neighbor_grad else 1) if W0 < 1 else 0
        self.cost = Passes(3 + (W0 < 1 or alpha > 0) + neighbours, 3 + (lambda_mse > 0), task=1)
        # tables of an epoch, made again by before_epoch, so they are in no checkpoint
        self.table: NeighbourTable | None = None
        self.rows = self.log_old = NO_IDS  # (task rows,) ids, ascending; (task rows, old) teacher log-probabilities
        self.bias: Tensor  # (3,) A, B, and the first column they act on
        self.register_buffer("bias", torch.tensor([1.0, 0.0, 0.0]))

    # -- the teacher (section 4)

    def grow(self, task: Task) -> None:
        averaged, taught = self.teacher, task.index > 0 or self.effect_new_first_task
        if taught and self.teacher_head == "old":
            self.teacher = frozen_copy(self.model)  # before the head grows: old classes only
        super().grow(task)
        if taught and self.teacher_head == "all":
            self.teacher = frozen_copy(self.model)
        if self.teacher is not None and averaged is not None and self.teacher_init == "ema":
            self.teacher.load_state_dict({**self.teacher.state_dict(), **averaged.state_dict()})

    def after_epoch(self, stage: Stage) -> None:
        unused = self.now.epoch == stage.epochs - 1 and self.teacher_init == "student"  # nobody reads it again
        if self.teacher is not None and not unused:
            average_into(self.teacher, self.model, self.beta)

    # -- tables of an epoch (sections 2.2, 2.6)

    def before_epoch(self, stage: Stage) -> None:
        self.table = None
        if self.teacher is None or not (self.W0 < 1 or self.distils):
            return
        examples = stage.examples().sort().values
        self.rows, targets = self.stream.labels(examples)
        out = self.outputs(examples, self.teacher, view=self.now.view())
        self.log_old = self.log_scores_of_old(out.logits)
        own = self.own_rows(targets)  # anchors, and candidates for neighbours
        if own.any() and self.W0 < 1:
            features = F.normalize(out.features[own], dim=1) if self.knn_normalize else out.features[own]
            index, distance = self.find_neighbours(features, targets[own])
            weights = neighbour_log_weights(distance, self.W0, uniform=self.effect_new == "uniform")
            anchors = self.rows[own]
            self.table = NeighbourTable(anchors, torch.where(index < 0, -1, anchors[index]), *weights, distance)

    def find_neighbours(
        self,
        features: Tensor,  # (anchors, width)
        targets: Tensor,  # (anchors,)
    ) -> tuple[Tensor, Tensor]:  # (anchors, K) positions, (anchors, K) distances
        if self.effect_new == "random":
            return random_neighbours(features, self.K, self.now.rng("neighbours"))
        pool = None
        if self.knn_pool_cap and self.knn_pool_cap < len(features):
            pool = torch.randperm(len(features), generator=self.now.rng("pool"))[: self.knn_pool_cap].sort().values
        among = self.effect_new if self.effect_new in ("same", "different") else "all"
        farthest = self.effect_new == "reverse"
        return nearest(features, self.K, labels=targets, among=among, farthest=farthest, candidates=pool)

    def epoch_table(self) -> NeighbourTable | None:
        return self.table

    # -- the loss of a step (sections 2, 3)

    def loss(self, batch: Batch) -> Loss:
        replay, near = self.replay(), self.neighbourhood(batch)
        new, old, beside = self.passes(batch, replay, near)
        own = self.own_rows(batch.targets)
        terms: dict[str, Tensor] = {}
        if own.any():
            terms["new"] = self.loss_new(new[own], batch.targets[own], near, beside)
        if self.distils:
            terms["distil"] = self.alpha * self.loss_distil(new, batch, own)
        if replay is not None and old is not None:
            terms |= self.loss_memory(old, replay)
        return terms  # none, for a batch of O rows that has nothing to learn from

    def loss_new(self, logits: Tensor, targets: Tensor, near: Near | None, beside: Tensor | None) -> Tensor:
        """Effect_new: mean of -log sum_j W(x_j, x) S(x_j)[y], x itself among the x_j; without neighbours, CE."""
        if near is None or beside is None:
            return F.cross_entropy(logits, targets)
        log_anchor = F.log_softmax(logits, 1).gather(1, targets[:, None])[:, 0]
        log_beside = F.log_softmax(beside, 1)[near.position, targets[:, None]]  # column y alone
        return mixture_nll(log_anchor, log_beside, near.log_weight_anchor, near.log_weights)

    def loss_distil(self, logits: Tensor, batch: Batch, own: Tensor) -> Tensor:
        """Effect_old on new data: L_KL(S, S0) over the old classes (3.1)."""
        log_old = self.log_old[torch.searchsorted(self.rows, batch.rows)].to(logits.device)
        if self.stream.background is None:
            return self.kl(logits, log_old, self.kl_mode)
        terms = []
        if own.any():  # entity words: renormalised, for `slice` would tie O with the new type (11.2)
            terms.append(self.kl(logits[own], log_old[own], "renorm"))
        if not own.all():
            terms.append(self.distil_o(logits[~own], log_old[~own]))
        return torch.stack(terms).sum()

    def kl(self, logits: Tensor, log_old: Tensor, mode: Literal["slice", "renorm"]) -> Tensor:
        """(rows, classes), (rows, old) -> (); `renorm` renormalises both sides over the old classes."""
        teacher = log_old if mode == "slice" else log_old.log_softmax(1)
        reading: dict[str, Any] = {"tau": self.kl_tau, "reduction": self.kl_reduction, "direction": self.kl_direction}
        return distillation(logits, teacher, mode=mode, **reading)

    def distil_o(self, logits: Tensor, log_old: Tensor) -> Tensor:  # (rows, classes), (rows, old) -> ()
        """Words labelled O: the teacher is all that labels them, so forward and sliced: new types must lose (11.2)."""
        return distillation(logits, log_old, mode="slice", tau=self.kl_tau, reduction=self.kl_reduction)

    def loss_memory(self, logits: Tensor, replay: Batch) -> dict[str, Tensor]:
        """Effect_old on memory: cross-entropy, and the teacher's logits of the old classes (3.3)."""
        labelled = self.labelled(replay.targets, new=0)
        terms: dict[str, Tensor] = {}
        if labelled.any():
            terms["replay"] = F.cross_entropy(logits[labelled], replay.targets[labelled])
        distils = self.distils and not labelled.all()
        if self.teacher is not None and (self.lambda_mse or distils):
            target = self.peek([replay], self.teacher).logits  # live, on the same view (3.3)
            if self.lambda_mse:
                match = old_logit_mse(logits, target[:, : self.now.known], self.mse_reduction)
                terms["match"] = self.lambda_mse * match
            if distils:
                log_old = self.log_scores_of_old(target[~labelled])
                terms["replay_o"] = self.alpha * self.distil_o(logits[~labelled], log_old)
        return terms

    def log_scores_of_old(self, logits: Tensor) -> Tensor:  # (rows, teacher's classes) -> (rows, old)
        """log S0 over the old classes."""
        return F.log_softmax(logits / self.kl_tau, 1)[:, : self.now.known]

    def own_rows(self, targets: Tensor) -> Tensor:  # (rows,) class ids -> (rows,) bool
        """Rows of the task's own classes. Not those labelled O after the first task: old entities hide among them."""
        return self.labelled(targets, new=len(targets))

    def neighbourhood(self, batch: Batch) -> Near | None:
        rows = batch.rows[self.own_rows(batch.targets).cpu()]
        if self.table is None or not len(rows):
            return None
        return self.table.of(rows, batch.targets.device)

    def passes(
        self, batch: Batch, replay: Batch | None, near: Near | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The student's logits on the new rows, the replayed ones and the neighbours: one pass over all."""
        trained = {"new": batch}
        if replay is not None:
            trained["replay"] = replay
        if near is not None and self.neighbor_grad:
            trained["neighbours"] = self.stream.rows(near.rows, view=self.now.view())
        logits = self.model(functools.reduce(Batch.cat, trained.values())).logits
        got = dict(zip(trained, logits.split([len(b) for b in trained.values()]), strict=True))
        if near is not None and not self.neighbor_grad:
            got["neighbours"] = self.beside(near.rows, batch.rows, got["new"].detach())
        return got["new"], got.get("replay"), got.get("neighbours")

    def beside(
        self,
        neighbours: Tensor,  # (neighbours,) rows
        anchors: Tensor,  # (new,) rows of the batch
        scored: Tensor,  # (new, classes) their logits
    ) -> Tensor:  # (neighbours, classes)
        """The student's logits on the neighbours, without gradient. Those that are anchors too are there already."""
        logits = scored.new_empty(len(neighbours), scored.shape[1])
        known = torch.isin(neighbours, anchors) & (not self.model.has_dropout)
        if known.any():
            order = anchors.argsort()
            logits[known] = scored[order[torch.searchsorted(anchors[order], neighbours[known])]]
        if not known.all():
            parts = neighbours[~known].split(self.training_settings.eval_batch_size)
            logits[~known] = self.peek(self.stream.rows(part, view=self.now.view()) for part in parts).logits
        return logits

    @property
    def distils(self) -> bool:
        return self.teacher is not None and self.alpha > 0 and self.now.known > 0

    # -- bias correction after the last task (section 7)

    def check_share(self, quota: int) -> None:
        if self.stream.modality == "token":
            raise ConfigError("BaCE's bias correction is not defined for tokens: switch it off")
        super().check_share(quota)

    def after_task(self, task: Task) -> None:
        super().after_task(task)
        if self.holds_out and task.index == len(self.stream) - 1 and task.index > 0:
            logits, targets = self.outputs(self.held.examples).logits, self.stream.labels(self.held.examples)[1]
            A, B = fit_bias(logits, targets, task.classes, solver=self.bic_solver)
            self.bias.copy_(torch.tensor([A, B, float(task.classes.start)]))

    def report(self) -> dict[str, float]:
        return dict(zip(("A", "B"), self.bias.tolist(), strict=False)) if self.holds_out else {}

    def predict(self, batch: Batch, scorer: str | None = None) -> Tensor:
        A, B, start = self.bias.tolist()
        logits = super().predict(batch)
        return correct_bias(logits, range(int(start), logits.shape[1]), A, B)
