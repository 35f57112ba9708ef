"""BaCE: balancing the causal effects of new and old data. Zheng, Wang, Zhang, Feng, Ma, arXiv 2402.10063, 2024.

The loss is L = L_new + L_old. Section numbers refer to docs/bace.md, which says how we read the paper where it is
silent.
"""

import functools
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from bace.core.method import Card, Passes
from bace.core.stage import Loss, Stage
from bace.core.stream import Task
from bace.data.batch import NO_IDS, Batch
from bace.errors import ConfigError
from bace.methods.parts.bias_correction import correct_bias, fit_bias
from bace.methods.parts.held_out import HoldOut
from bace.methods.parts.losses import distillation, mixture_nll, neighbour_log_weights, old_logit_mse
from bace.methods.parts.neighbours import Neighbourhood, NeighbourTable, nearest, random_neighbours
from bace.models.model import average_into, frozen_copy


class BaCE(HoldOut):
    """Predict each new sample jointly with its neighbours in the teacher's feature space (Effect_new). Distil on new
    data, replay and match logits on memory (Effect_old). Average the teacher once per epoch.

    Args:
        alpha: weight of the distillation on new data; 0 leaves it out.
        W0: weight of the sample itself relative to its neighbours; 1 leaves Effect_new out.
        K: number of neighbours.
        beta: teacher <- beta teacher + (1 - beta) student, after each epoch.
        lambda_mse: weight of the logit matching on memory.
        effect_new: which rows are a sample's neighbours: the nearest (`full`), the nearest of the `same` or a
            `different` class, the nearest with equal weights (`uniform`), `random` ones, or the farthest (`reverse`).
        neighbor_grad: whether neighbours carry gradient; with `bank`, one of each sample's neighbours does, drawn by
            its weight, and counts for all of them.
        neighbour_scores: the student's scores of the neighbours: those of the last pass that showed each neighbour, at
            most two epochs ago (`bank`), or computed at every step (`exact`), which takes longer.
        kl_direction: the direction of the distillation: KL(student || teacher), as the paper writes it (`reverse`), or
            KL(teacher || student) (`forward`), which holds new tasks back at alpha = 1.
        kl_mode: the student's scores of the old classes: a slice of the soft-max over all (`slice`) or renormalised.
        kl_tau: temperature of the distillation.
        kl_reduction: `mean` also divides by the number of old classes.
        mse_reduction: reduction of the logit matching: mean over rows and classes, or sum over classes.
        knn_normalize: compare unit features.
        knn_pool_cap: maximum number of random candidates for neighbours; 0 means all.
        effect_new_first_task: use Effect_new also in the first task, with the pre-trained encoder as teacher.
        teacher_head: classes of the teacher: the `old` ones, or `all`. With `all`, new rows start with the student's
            values and are averaged like the rest, and the scores of the old classes are a slice of the soft-max.
        teacher_init: a task's first teacher is the `student` of the task before, or its averaged teacher (`ema`).
        bias_correction: after the last task, fit a scale and shift of the new logits on held-out memory.
        bic_solver: solver of the bias correction.
    """

    title = "BaCE"
    paper = "Zheng et al., Balancing the Causal Effects in Class-Incremental Learning, 2024"
    networks = 2  # student and teacher
    learns_o = False
    takes_known = True
    card = Card(
        mechanism="joint prediction with neighbours; distillation, replay and logit matching; averaged teacher",
        besides="`neighbour_scores=exact` adds K for each new example, but neighbours that are shared or in the "
        "batch are passed once; 1 of the 4 replayed is the teacher's, which passes each example in memory only once an "
        "epoch where its views repeat (docs/bace.md, S20)",
        o_rows="O rows are neither anchors nor neighbours; they are distilled over the old columns of the soft-max "
        "over all classes; O rows of replayed sentences are treated in the same way or learned as class 0 with "
        "cross-entropy (`train.replay_o`), and their logits are always matched",
        reading="See docs/bace.md.",
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
        neighbour_scores: Literal["bank", "exact"] = "bank",
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
        self.effect_new, self.neighbor_grad, self.neighbour_scores = effect_new, neighbor_grad, neighbour_scores
        self.kl_direction, self.kl_mode, self.kl_tau, self.kl_reduction = kl_direction, kl_mode, kl_tau, kl_reduction
        self.mse_reduction = mse_reduction
        self.knn_normalize, self.knn_pool_cap = knn_normalize, knn_pool_cap
        self.effect_new_first_task = effect_new_first_task
        self.teacher_head, self.teacher_init = teacher_head, teacher_init
        self.bic_solver = bic_solver
        if K < 1:
            raise ConfigError(f"BaCE: K is {K}, but it must be at least 1; W0 = 1 leaves the neighbours out")
        if min(alpha, lambda_mse) < 0 or kl_tau <= 0:
            raise ConfigError(
                f"BaCE: alpha ({alpha}) and lambda_mse ({lambda_mse}) must be at least 0, kl_tau ({kl_tau}) above 0"
            )
        if not 0 <= W0 <= 1 or not 0 <= beta <= 1:
            raise ConfigError(f"BaCE: W0 ({W0}) and beta ({beta}) must lie between 0 and 1")
        self.holds_out, self.takes_known = bias_correction, not bias_correction
        passed = {"exact": K, "bank": int(neighbor_grad)}[neighbour_scores] if W0 < 1 else 0
        neighbours = passed * (3 if neighbor_grad else 1)
        self.cost = Passes(3 + (W0 < 1 or alpha > 0) + neighbours, 3 + (lambda_mse > 0), task=1)
        # tables of an epoch; before_epoch recomputes them, so no checkpoint holds them
        self.table: NeighbourTable | None = None
        self.rows = self.log_old = NO_IDS  # (task rows,) ids, ascending; (task rows, old) teacher log-probabilities
        self.remembered_rows = self.remembered_logits = NO_IDS  # the same for the memory, with the teacher's logits
        self.given_again = False  # whether there are more examples of old classes, which only a Learner is given
        self.bank: Tensor | None  # (task rows, new classes) the student's last log-probabilities of each row
        self.register_buffer("bank", None)
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

    def shrink(self, task: Task) -> None:
        self.bank = None

    def after_epoch(self, stage: Stage) -> None:
        unused = self.now.epoch == stage.epochs - 1 and self.teacher_init == "student"  # nothing reads it again
        if self.teacher is not None and not unused:
            average_into(self.teacher, self.model, self.beta)

    # -- tables of an epoch (sections 2.2, 2.6)

    def before_epoch(self, stage: Stage) -> None:
        self.table = None
        self.teach_memory()
        examples = stage.examples().sort().values
        rows, targets = self.stream.labels(examples)
        self.given_again = bool(self.old_rows(targets).any())
        if self.teacher is None or not (self.W0 < 1 or self.distils):
            return
        self.rows = rows
        out = self.outputs(examples, self.teacher, view=self.now.view())
        self.log_old = self.log_scores_of_old(out.logits)
        own = self.own_rows(targets)  # anchors, and candidates for neighbours
        if own.any() and self.W0 < 1:
            features = F.normalize(out.features[own], dim=1) if self.knn_normalize else out.features[own]
            # where the features are; the table itself holds row ids, which the CPU reads
            index, distance = (found.cpu() for found in self.find_neighbours(features, targets[own]))
            weights = neighbour_log_weights(distance, self.W0, uniform=self.effect_new == "uniform")
            anchors = self.rows[own]
            self.table = NeighbourTable(anchors, torch.where(index < 0, -1, anchors[index]), *weights, distance)
            if self.neighbour_scores == "bank" and self.bank is None:
                self.bank = self.first_scores(examples, out.features)

    def teach_memory(self) -> None:
        """Pass the memory through the teacher once, if its views repeat and steps draw more examples than it has."""
        self.remembered_rows = NO_IDS
        hides = self.stream.background is not None and self.training_settings.replay_o == "distil"
        read = self.lambda_mse or (self.distils and hides)  # the logits of all rows, or of replayed O rows
        if self.teacher is not None and read and self.replay_repeats:
            examples = self.memory.examples.unique()
            if len(examples) < self.now.steps * self.replay_size:
                self.remembered_rows = self.stream.rows_of(examples)[0]
                self.remembered_logits = self.outputs(examples, self.teacher, view=self.now.view()).logits

    def first_scores(self, examples: Tensor, features: Tensor) -> Tensor:  # (task rows, width) -> (task rows, new)
        """The student's scores before its first step. Its encoder then equals the teacher's, unless the teacher is an
        average over tasks, so the grown head is applied to the teacher's features."""
        if self.teacher_init == "ema":
            features = self.outputs(examples, view=self.now.view(), logits=False).features
        with torch.no_grad():
            return self.log_scores_of_new(self.model.head(features))

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
            pool = pool.to(features.device)
        targets = targets.to(features.device)
        among = self.effect_new if self.effect_new in ("same", "different") else "all"
        farthest = self.effect_new == "reverse"
        return nearest(features, self.K, labels=targets, among=among, farthest=farthest, candidates=pool)

    def epoch_table(self) -> NeighbourTable | None:
        return self.table

    # -- the loss of a step (sections 2, 3)

    def loss(self, batch: Batch) -> Loss:
        replay, near = self.replay(), self.neighbourhood(batch)
        new, old, carried = self.passes(batch, replay, near)
        own = self.own_rows(self.labels(batch))
        terms: dict[str, Tensor] = {}
        if own.any():
            terms["new"] = self.loss_new(new, batch, own, near, carried)
        if (again := self.rows_again(self.labels(batch))).any():
            terms["again"] = F.cross_entropy(new[again], batch.targets[again])
        if self.distils:
            terms["distil"] = self.alpha * self.loss_distil(new, batch, own)
        if replay is not None and old is not None:
            terms |= self.loss_memory(old, replay)
        return terms  # empty for a batch of O rows without anything to learn

    def loss_new(
        self, logits: Tensor, batch: Batch, own: Tensor, near: Neighbourhood | None, carried: Tensor | None
    ) -> Tensor:
        """Effect_new: mean of -log sum_j W(x_j, x) S(x_j)[y], where the x_j include x; without neighbours, CE."""
        if near is None:
            return F.cross_entropy(logits[own], batch.targets[own])
        y = batch.targets[own, None] - self.now.known  # (anchors, 1) column of its class, which is a new one
        log_anchor = self.log_scores_of_new(logits[own]).gather(1, y)[:, 0]
        log_beside = self.log_scores_beside(near, y, batch.rows, logits.detach(), carried)
        return mixture_nll(log_anchor, log_beside, near.log_weight_anchor, near.log_weights)

    def loss_distil(self, logits: Tensor, batch: Batch, own: Tensor) -> Tensor:
        """Effect_old on new data: L_KL(S, S0) over the old classes (3.1)."""
        log_old = self.log_old[torch.searchsorted(self.rows, batch.rows)]
        if self.stream.background is None:
            return self.kl(logits, log_old, self.kl_mode)
        terms = []
        if own.any():  # entity words: renormalised, because `slice` would tie O to the new type (11.2)
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
        """Only the teacher labels words labelled O, so their distillation is forward and sliced: new types must lose
        (11.2)."""
        return distillation(logits, log_old, mode="slice", tau=self.kl_tau, reduction=self.kl_reduction)

    def loss_memory(self, logits: Tensor, replay: Batch) -> dict[str, Tensor]:
        """Effect_old on memory: cross-entropy and matching of the teacher's logits for the old classes (3.3)."""
        labelled = self.labelled(self.labels(replay), new=0)
        terms: dict[str, Tensor] = {}
        if labelled.any():
            terms["replay"] = F.cross_entropy(logits[labelled], replay.targets[labelled])
        distils = self.distils and not labelled.all()
        if self.teacher is not None and (self.lambda_mse or distils):
            target = self.teacher_logits(replay)
            if self.lambda_mse:
                match = old_logit_mse(logits, target[:, : self.now.known], self.mse_reduction)
                terms["match"] = self.lambda_mse * match
            if distils:
                log_old = self.log_scores_of_old(target[~labelled])
                terms["replay_o"] = self.alpha * self.distil_o(logits[~labelled], log_old)
        return terms

    def teacher_logits(self, replay: Batch) -> Tensor:  # (rows, teacher's classes)
        """The live teacher's, of the view that the student sees (3.3)."""
        if len(self.remembered_rows):
            return self.remembered_logits[torch.searchsorted(self.remembered_rows, replay.rows)]
        return self.infer([replay], self.teacher).logits

    def log_scores_of_old(self, logits: Tensor) -> Tensor:  # (rows, teacher's classes) -> (rows, old)
        """log S0 over the old classes."""
        return F.log_softmax(logits / self.kl_tau, 1)[:, : self.now.known]

    def log_scores_of_new(self, logits: Tensor) -> Tensor:  # (rows, classes) -> (rows, new)
        """log S over the new classes."""
        return F.log_softmax(logits, 1)[:, self.now.known :]

    def own_rows(self, labels: Tensor) -> Tensor:  # (rows,) class ids -> (rows,) bool, both on the CPU
        """The rows of the task's own classes. After the first task they exclude O rows, which may hide old entities,
        and more examples of old classes, which only a Learner is given."""
        return self.labelled(labels, new=len(labels)) & ~self.rows_again(labels)

    def rows_again(self, labels: Tensor) -> Tensor:  # (rows,) class ids -> (rows,) bool, both on the CPU
        """More examples of old classes, which are learned like those in memory."""
        return self.old_rows(labels) if self.given_again else torch.zeros(len(labels), dtype=torch.bool)

    def old_rows(self, labels: Tensor) -> Tensor:  # (rows,) class ids -> (rows,) bool
        old = labels < self.now.known
        return old if self.stream.background is None else old & (labels != self.stream.background)

    def neighbourhood(self, batch: Batch) -> Neighbourhood | None:
        rows = batch.rows[self.own_rows(self.labels(batch))]
        if self.table is None or not len(rows):
            return None
        draws = self.neighbor_grad and self.neighbour_scores == "bank"
        return self.table.of(rows, batch.targets.device, draw=self.now.rng("drawn") if draws else None)

    def passes(
        self, batch: Batch, replay: Batch | None, near: Neighbourhood | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The student's logits on the new rows, the replayed ones and the neighbours that carry gradient, in one
        pass."""
        trained = {"new": batch}
        if replay is not None:
            trained["replay"] = replay
        if near is not None and self.neighbor_grad:
            trained["neighbours"] = self.stream.rows(near.drawn.rows if near.drawn else near.rows, view=self.now.view())
        logits = self.model(functools.reduce(Batch.cat, trained.values())).logits
        got = dict(zip(trained, logits.split([len(b) for b in trained.values()]), strict=True))
        return got["new"], got.get("replay"), got.get("neighbours")

    def log_scores_beside(
        self,
        near: Neighbourhood,
        y: Tensor,  # (anchors, 1) columns
        rows: Tensor,  # (new,) of the batch
        scored: Tensor,  # (new, classes) the student's logits of them, without gradient
        carried: Tensor | None,  # (neighbours that carry gradient, classes) its logits of those
    ) -> Tensor:  # (anchors, K)
        """log S(x_j)[y] for each neighbour x_j of the anchors, where y is the anchor's class."""
        if self.bank is None:
            logits = self.beside(near.rows, rows, scored) if carried is None else carried
            return self.log_scores_of_new(logits)[near.position, y]
        self.bank[torch.searchsorted(self.rows, rows)] = self.log_scores_of_new(scored)
        if near.drawn is not None and carried is not None:  # every pass refreshes the bank
            self.bank[torch.searchsorted(self.rows, near.drawn.rows)] = self.log_scores_of_new(carried.detach())
        log_beside = self.bank[torch.searchsorted(self.rows, near.rows)][near.position, y]
        if near.drawn is None or carried is None:
            return log_beside
        return near.drawn.carry(log_beside, self.log_scores_of_new(carried)[near.drawn.position, y[:, 0]])

    def beside(
        self,
        neighbours: Tensor,  # (neighbours,) rows
        anchors: Tensor,  # (new,) rows of the batch
        scored: Tensor,  # (new, classes) their logits
    ) -> Tensor:  # (neighbours, classes)
        """The student's logits on the neighbours, without gradient. Those of anchors are already known."""
        logits = scored.new_empty(len(neighbours), scored.shape[1])
        known = torch.isin(neighbours, anchors) & (not self.model.has_dropout)
        if known.any():
            order = anchors.argsort()
            logits[known] = scored[order[torch.searchsorted(anchors[order], neighbours[known])]]
        if not known.all():
            parts = neighbours[~known].split(self.training_settings.eval_batch_size)
            logits[~known] = self.infer(self.stream.rows(part, view=self.now.view()) for part in parts).logits
        return logits

    @property
    def distils(self) -> bool:
        return self.teacher is not None and self.alpha > 0 and self.now.known > 0

    # -- bias correction after the last task (section 7)

    def check_share(self, quota: int) -> None:
        if self.stream.background is not None:
            raise ConfigError("BaCE's bias correction is not defined for tokens: switch it off")
        super().check_share(quota)

    def after_task(self, task: Task) -> None:
        super().after_task(task)
        if self.holds_out and task.index == len(self.stream) - 1 and task.index > 0:
            logits, targets = (part.cpu() for part in self.scored(self.held.examples))  # each step reads its loss
            A, B = fit_bias(logits, targets, task.classes, solver=self.bic_solver)
            self.bias.copy_(torch.tensor([A, B, float(task.classes.start)]))

    def report(self) -> dict[str, float]:
        return dict(zip(("A", "B"), self.bias.tolist(), strict=False)) if self.holds_out else {}

    def predict(self, batch: Batch, scorer: str | None = None) -> Tensor:
        A, B, start = self.bias.tolist()
        logits = super().predict(batch)
        return correct_bias(logits, range(int(start), logits.shape[1]), A, B)
