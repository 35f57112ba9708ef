"""LwF: learning without forgetting. Li, Hoiem, "Learning without Forgetting", ECCV 2016 (TPAMI 2018)."""

from typing import Literal

from bace.core.method import Card, Loss, Passes
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.parts.losses import soft_cross_entropy
from bace.methods.seq import SEQ


class LwF(SEQ):
    """Hold on to the last network's soft outputs for the old classes, on the new data.

    Args:
        lambda_kd: weight of the distillation; 0 leaves SEQ.
        tau: temperature of the distillation, without a factor tau^2.
        span: the classes of the cross-entropy: only the `new` ones, or all `seen` so far (new data then push the old
            logits down, which the distillation, over the old classes alone, does not feel).
    """

    paper = "Li and Hoiem, Learning without Forgetting, 2016"
    keeps_teacher = True
    cost = Passes(4)
    card = Card(
        mechanism="distillation from the last network on new data",
        o_rows="class 0 under cross-entropy; distilled like all other words, over the old labels (O among them)",
        reading="cross-entropy over the new classes, as FACIL and PyCIL have it (`span=seen`: over all, which is SEQ's "
        "level); both soft-maxes of the distillation over the old classes alone; teacher on the augmented batch; no "
        "warm-up of the new head rows",
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
            old = self.peek([batch], self.teacher).logits  # (rows, known): the teacher's head is as it was frozen
            terms["distil"] = self.lambda_kd * soft_cross_entropy(logits[:, : self.now.known], old, self.tau)
        return terms
