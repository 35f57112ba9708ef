"""LwF: learning without forgetting. Li, Hoiem, "Learning without Forgetting", ECCV 2016 (TPAMI 2018)."""

from typing import Literal

from bace.core.method import Card, Passes
from bace.core.stage import Loss
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.parts.losses import soft_cross_entropy
from bace.methods.seq import SEQ


class LwF(SEQ):
    """Preserve the soft outputs of the previous network for the old classes, on the new data.

    Args:
        lambda_kd: weight of the distillation; 0 gives SEQ.
        tau: temperature of the distillation, without a factor tau^2.
        span: the classes of the cross-entropy: only the `new` ones, or all `seen` so far. With `seen`, new data pushes
            the old logits down, and the distillation over the old classes alone does not notice.
    """

    paper = "Li and Hoiem, Learning without Forgetting, 2016"
    keeps_teacher = True
    cost = Passes(4)
    card = Card(
        mechanism="distillation from the previous network on new data",
        o_rows="O is learned as class 0 with cross-entropy; O words are distilled like all other words, over the old "
        "labels including O",
        reading="The cross-entropy spans the new classes, as in FACIL and PyCIL. With `span=seen` it spans all seen "
        "classes, which gives SEQ's level. Both soft-maxes of the distillation span only the old classes. The teacher "
        "sees the augmented batch. There is no warm-up of the new head rows.",
    )

    def __init__(self, lambda_kd: float = 5.0, tau: float = 2.0, span: Literal["seen", "new"] = "new") -> None:
        super().__init__(span)
        self.lambda_kd, self.tau = lambda_kd, tau
        if lambda_kd < 0 or tau <= 0:
            raise ConfigError(f"LwF: lambda_kd ({lambda_kd}) must be at least 0 and tau ({tau}) above 0")

    def loss(self, batch: Batch) -> Loss:
        """L = CE(z, y; K) + lambda KD(z, z'; old classes, tau)."""
        logits = self.model(batch).logits
        terms = {"new": self.cross_entropy(logits, batch.targets)}
        if self.teacher is not None and self.lambda_kd:
            old = self.infer([batch], self.teacher).logits  # (rows, known): the teacher has only the old classes
            terms["distil"] = self.lambda_kd * soft_cross_entropy(logits[:, : self.now.known], old, self.tau)
        return terms
