"""ExtendNER. Monaikul, Castellucci, Filice, Rokhlenko, "Continual Learning for Named Entity Recognition", AAAI 2021."""

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
from bace.methods.parts.losses import distillation
from bace.methods.parts.replay import ReplayOptions
from bace.models.heads import CosineHead
from bace.models.model import Model


class ExtendNER(ER):
    """Learn entities from their labels. Learn words labelled O, which may hide old entities, from the predictions of
    the previous network.

    Args:
        lambda_kd: weight of the distillation; 0 leaves it out, and then nothing is learned about O after the first
            task.
        tau: temperature of the distillation, which is multiplied by tau^2.
        head: `trained`: the run's head; `frozen`: CFNER's, a cosine head whose old rows, including O's, are not
            trained and whose new rows start from data.
    """

    paper = "Monaikul et al., Continual Learning for Named Entity Recognition, AAAI 2021"
    modalities = frozenset(("token",))
    learns_o = False
    takes_known = True
    cost = Passes(4, 4)
    card = Card(
        mechanism="labels teach entities, the previous network teaches O words; replay",
        o_rows="in the first task, O is learned as class 0 with cross-entropy; later O rows are only distilled, over "
        "the old columns of the soft-max over all classes, which pushes new columns down; O rows of replayed "
        "sentences are treated in the same way or learned as class 0 (`train.replay_o`)",
        reading="The original has no replay. The weight is 2, as in the code of BaCE's authors. The head is the "
        "run's, and all of its rows are trained.",
    )

    def __init__(
        self,
        lambda_kd: float = 2.0,
        tau: float = 1.0,
        head: Literal["trained", "frozen"] = "trained",
        **replay: Unpack[ReplayOptions],
    ) -> None:
        super().__init__(**replay)
        if lambda_kd < 0 or tau <= 0:
            raise ConfigError(f"{self.title}: lambda_kd ({lambda_kd}) must be at least 0 and tau ({tau}) above 0")
        self.lambda_kd, self.tau, self.frozen = lambda_kd, tau, head == "frozen"
        self.keeps_teacher = lambda_kd > 0
        self.takes_known = type(self).takes_known and not self.frozen

    # -- the head

    def build(self, model: Model) -> Model:
        if self.frozen and not isinstance(model.head, CosineHead):
            model.head = CosineHead(model.encoder.width)
        return super().build(model)

    def grow(self, task: Task) -> None:
        super().grow(task)
        if self.frozen:
            self.model.head.freeze_old()

    def stages(self, task: Task) -> list[Stage]:
        (main,) = super().stages(task)
        if task.index and self.frozen:
            main.prepare = lambda: self.imprint(task)
        return [main]

    def imprint(self, task: Task) -> None:
        """As in other methods; an I- tag that the task does not show starts like its B- tag."""
        super().imprint(task)
        shown, newest = set(self.stream.labels(self.training_examples(task))[1].tolist()), self.model.head.blocks[-1]
        for row, c in enumerate(task.classes):
            if c not in shown and self.stream.names[c].startswith("I-"):
                newest.data[row] = newest.data[row - 1]

    # -- the loss

    def loss(self, batch: Batch) -> Loss:
        both = self.with_replay(batch)
        logits = self.model(both).logits
        if not self.now.known:  # no old entities hide among the O words
            return self.cross_entropy(logits, both, len(batch))
        log_old = F.log_softmax(self.infer([both], self.teacher).logits / self.tau, 1) if self.weight else None
        logits, log_old = self.joint(logits, log_old, batch)
        # CE(z, y; S) over the words E with an entity label
        terms = self.cross_entropy(logits, both, len(batch))
        rest = ~self.labelled(self.labels(both), len(batch))
        if log_old is not None and rest.any():
            # + lambda KL(softmax(z'/T) || softmax(z/T) cut to the old columns) over the words Q labelled O
            student, teacher, new = logits[rest], log_old[rest], int(rest[: len(batch)].sum())
            parts = self.policy.parts(new, len(student)).values()
            kls = [distillation(student[rows], teacher[rows], mode="slice", tau=self.tau) for rows in parts]
            terms["distil"] = self.weight * torch.stack(kls).sum()
        return terms

    def joint(
        self,
        logits: Tensor,  # (rows, seen) of the new words, then of the replayed ones
        log_old: Tensor | None,  # (rows, known) the teacher's log-probabilities for them
        batch: Batch,  # the new words
    ) -> tuple[Tensor, Tensor | None]:
        """The logits and the targets that are learned; CFNER also uses neighbours."""
        return logits, log_old

    def outside(self, targets: Tensor) -> Tensor:  # (rows,) class ids -> (rows,) bool
        """Whether each word is labelled O."""
        assert self.stream.background is not None
        return targets == self.stream.background

    @property
    def weight(self) -> float:
        """The weight of the distillation in this task."""
        return self.lambda_kd
