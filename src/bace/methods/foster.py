"""FOSTER: feature boosting and compression. Wang, Zhou, Ye, Zhan, "FOSTER: Feature Boosting and Compression for
Class-Incremental Learning", ECCV 2022."""

import dataclasses
import math
from typing import Literal, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from bace.core.method import Card, Passes
from bace.core.stage import Loss, Stage
from bace.core.stream import Task
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.er import ER
from bace.methods.parts.losses import soft_cross_entropy
from bace.methods.parts.replay import ReplayOptions
from bace.models.expanded import Expanded, shallow_copy, trained_part
from bace.models.heads import LinearHead, WideningHead, align
from bace.models.model import Model, parameter_count
from bace.randomness import generator


class FOSTER(ER):
    """Add a second encoder that learns what the frozen old one lacks (boost), then distil both into one (compress).

    Args:
        init_epochs: epochs of the first task; the run's train.epochs is not used.
        boost_epochs: epochs of the two-branch teacher.
        compress_epochs: epochs of the student.
        beta1: how much the teacher's training balances unequal classes: not at all for 0, by their counts towards 1.
        beta2: the same for the student's targets.
        lambda_okd: weight of the distillation of the old network into the teacher; 0 leaves it out.
        T: temperature of both distillations.
        new_rows: `ft`: the teacher's rows for new classes read both branches; `az`: only the new branch.
        align: after boosting, scale the teacher's new rows to the mean norm of its old ones.
    """

    title = "FOSTER"
    paper = "Wang et al., FOSTER: Feature Boosting and Compression for Class-Incremental Learning, ECCV 2022"
    takes_o = False
    scorers = ("teacher",)
    networks = 3  # the student, and the two networks of its teacher
    card = Card(
        mechanism="replay; a second encoder boosts the frozen one, and both are distilled into one",
        o_rows="refused: classes are weighted by their counts, and O outnumbers all of them",
        stages=("boost", "compress"),
        replay="concat",
        reading="The heads are linear. The student predicts, and its teacher is scored beside it. The count of a "
        "class is how often an epoch shows it (in the official code, 500 for a new class and the number of exemplars "
        "for an old one, which is true in mode `concat`). Old rows start at zero on the new branch.",
    )

    teacher: Expanded | None

    def __init__(
        self,
        init_epochs: int = 5,
        boost_epochs: int = 5,
        compress_epochs: int = 5,
        beta1: float = 0.96,
        beta2: float = 0.97,
        lambda_okd: float = 1.0,
        T: float = 2.0,
        new_rows: Literal["ft", "az"] = "ft",
        align: bool = False,
        **replay: Unpack[ReplayOptions],
    ) -> None:
        super().__init__(**replay)
        if min(init_epochs, boost_epochs, compress_epochs) < 1:
            raise ConfigError(
                f"FOSTER: init_epochs ({init_epochs}), boost_epochs ({boost_epochs}) and compress_epochs "
                f"({compress_epochs}) must be at least 1"
            )
        if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
            raise ConfigError(f"FOSTER: beta1 ({beta1}) and beta2 ({beta2}) must be at least 0 and below 1")
        if lambda_okd < 0 or T <= 0:
            raise ConfigError(f"FOSTER: lambda_okd ({lambda_okd}) must be at least 0 and T ({T}) above 0")
        self.init_epochs, self.boost_epochs, self.compress_epochs = init_epochs, boost_epochs, compress_epochs
        self.beta1, self.beta2, self.lambda_okd, self.T = beta1, beta2, lambda_okd, T
        self.new_rows, self.align = new_rows, align
        epochs = boost_epochs + compress_epochs
        each = (4 * boost_epochs + 5 * compress_epochs) / epochs
        self.cost = Passes(each, each, task=2, epochs=epochs, first=1 + 3 * init_epochs)
        self.counts = torch.zeros(0)  # (seen,) examples of each class; recomputed by before_epoch

    def build(self, model: Model) -> Model:
        return Model(model.encoder, LinearHead(model.encoder.width), model.precision)

    def grow(self, task: Task) -> None:
        """The student continues from the old network with rows for the new classes; the teacher is new."""
        if task.index:
            self.teacher = None  # free the previous teacher first
            self.teacher = self.boosted(task)
        super().grow(task)

    def boosted(self, task: Task) -> Expanded:
        """The frozen old network and a trainable copy of it, with one head over both that copies the old rows."""
        model, rng = self.model, generator(self.now.seed, "boosted head", task.index)
        head = WideningHead(model.encoder.width).to(self.stream.device)
        head.grow(task.classes.start, rng)
        head.blocks[0].data.copy_(model.head.weight)
        head.biases[0].data.copy_(model.head.bias)
        head.grow(len(task.classes), rng, newest_only=self.new_rows == "az")
        head.assist(task.classes.stop, rng)
        teacher = Expanded(shallow_copy(model.encoder, trained_part(model.encoder)), head, model.precision)
        teacher.add_branch()
        return teacher

    def stages(self, task: Task) -> list[Stage]:
        (main,) = super().stages(task)
        if task.index == 0:
            return [dataclasses.replace(main, epochs=self.init_epochs)]
        teacher = self.teacher
        assert teacher is not None
        boost, compress = (dataclasses.replace(main, name=name) for name in ("boost", "compress"))
        boost.loss, boost.epochs, boost.module = self.boost, self.boost_epochs, lambda: teacher
        compress.loss, compress.epochs = self.compress, self.compress_epochs
        if self.align:
            compress.prepare = lambda: align(teacher.head)
        return [boost, compress]

    def before_epoch(self, stage: Stage) -> None:
        """How often an epoch shows each class: its examples count once, or as often as they are replayed."""
        examples, seen = stage.examples(), self.now.seen
        self.counts = torch.bincount(self.stream.labels(examples)[1], minlength=seen).double()
        if self.policy.mode == "batch" and self.replay_size:
            replayed = self.replay_size * math.ceil(len(examples) / stage.batch_size) / len(self.memory)
            self.counts += replayed * torch.bincount(self.memory.group, minlength=seen)

    def boost(self, batch: Batch) -> Loss:
        """L = CE(z / w, y) + CE(W_e h_B, y) + lambda_okd KD(z_old, W_old h_A; T), z = W [h_A; h_B]."""
        assert self.teacher is not None
        both, head = self.with_replay(batch), self.teacher.head
        out = self.teacher(both)
        old_features, new_features = out.features.split(head.branch, 1)
        weights = class_weights(self.counts, self.beta1).to(out.logits)
        terms = self.cross_entropy(out.logits / weights, both, len(batch))
        assert head.auxiliary is not None
        beside = self.cross_entropy(head.auxiliary(new_features), both, len(batch))
        terms |= {f"branch {name}": term for name, term in beside.items()}
        if self.lambda_okd:
            old = self.now.known
            with torch.no_grad():  # the student is not trained yet: its encoder is h_A, its old rows are W_old
                target = self.model.head(old_features)[:, :old]
            parts = self.policy.parts(len(batch), len(both)).values()
            distils = [soft_cross_entropy(out.logits[rows, :old], target[rows], self.T) for rows in parts]
            terms["distil"] = self.lambda_okd * torch.stack(distils).sum()  # as many means as in the cross-entropy
        return terms

    def compress(self, batch: Batch) -> Loss:
        """L = KD with the target w' softmax(z_T / T), renormalised: softmax(z_T / T + log w')."""
        both = self.with_replay(batch)
        target = self.infer([both], self.teacher).logits
        weights = class_weights(self.counts, self.beta2).to(target)
        return {"distil": soft_cross_entropy(self.model(both).logits, target + self.T * weights.log(), self.T)}

    def herding_features(self, examples: Tensor) -> Tensor:
        return self.outputs(examples, self.teacher, logits=False).features

    def predict(self, batch: Batch, scorer: str | None = None) -> Tensor:
        if scorer is None or self.teacher is None:
            return super().predict(batch)
        with torch.inference_mode():
            logits: Tensor = self.teacher(batch).logits
        return logits

    def needs(self, task: int) -> tuple[int, int]:
        encoder = self.model.encoder
        trained = parameter_count(encoder, trained_only=True)
        return parameter_count(encoder) + ((self.networks - 1) * trained if task else 0), trained


def class_weights(counts: Tensor, beta: float) -> Tensor:  # (classes,) counts -> (classes,)
    """w_c = (1 - beta) / (1 - beta^n_c), scaled to sum to the number of classes: rare classes weigh more (Cui et al.,
    Class-Balanced Loss Based on Effective Number of Samples, CVPR 2019)."""
    weights = (1 - beta) / (1 - beta ** counts.clamp(min=1))
    return F.normalize(weights, p=1, dim=0) * len(weights)
