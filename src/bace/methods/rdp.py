"""RDP: task relation distillation and prototypical pseudo labels.

Zhang, Li, Cong, Xu, Dong, Chen, "Task Relation Distillation and Prototypical Pseudo Label for Incremental Named Entity
Recognition", CIKM 2023.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from bace.core.method import Card, Passes
from bace.core.stage import Loss, Stage
from bace.core.stream import Task
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.extendner import ExtendNER
from bace.methods.parts.losses import distillation
from bace.methods.parts.prototypes import class_means
from bace.models.model import Output


class RDP(ExtendNER):
    """Give words labelled O the label that the previous network predicts, corrected by their distance to the prototypes
    of its labels, and learn from these labels. Distil the previous network's scores and make predictions certain.

    Args:
        pseudo: relabel O words; otherwise they are learned as O.
        lambda_kd: weight of the distillation on O words; 0 leaves it out.
        lambda_soft: weight of the soft labels (the teacher's scores for old labels, the word's own label for new ones);
            0 leaves them out.
        lambda_entropy: weight of the entropy of predictions; 0 leaves it out.
        soft: the loss of the soft labels: binary cross-entropy for each label (`bce`); or, as the authors' code
            computes it, the cross-entropy of the soft-max with the soft-max of the soft labels (`softmax`).
        head: `frozen`: a cosine head whose old rows, including O's, are not trained and whose new rows start from data;
            `trained`: the run's head.
    """

    paper = (
        "Zhang et al., Task Relation Distillation and Prototypical Pseudo Label for Incremental Named Entity "
        "Recognition, CIKM 2023"
    )
    uses_memory = False
    learns_o = True
    cost = Passes(4, task=2)
    card = Card(
        mechanism="O words get pseudo labels from the previous network and its prototypes; distillation, soft labels, "
        "self-entropy; frozen old rows",
        o_rows="in the first task, O is learned as class 0 with cross-entropy; later O rows are learned with the "
        "previous network's label, which may be O, and distilled as in ExtendNER",
        reading="Weights, frozen rows, and the means of soft labels and entropy over words and labels follow the "
        "authors' code. What the code calls BCE is a soft-max cross-entropy (`soft`). A prototype is the mean of the "
        "previous network's features over the task's O words that get this label; a label that no word gets is not "
        "used as a pseudo label (in the code, its prototype is 0).",
    )

    def __init__(
        self,
        pseudo: bool = True,
        lambda_kd: float = 2.0,
        lambda_soft: float = 0.3,
        lambda_entropy: float = 0.1,
        soft: Literal["bce", "softmax"] = "bce",
        head: Literal["frozen", "trained"] = "frozen",
    ) -> None:
        super().__init__(lambda_kd, head=head)
        if min(lambda_soft, lambda_entropy) < 0:
            raise ConfigError(
                f"RDP: lambda_soft ({lambda_soft}) and lambda_entropy ({lambda_entropy}) must be at least 0"
            )
        self.pseudo, self.lambda_soft, self.lambda_entropy, self.soft = pseudo, lambda_soft, lambda_entropy, soft
        self.keeps_teacher = pseudo or lambda_kd > 0 or lambda_soft > 0
        self.prototypes: Tensor | None = None  # (old, width) of a task, recomputed by before_epoch after a resume

    def grow(self, task: Task) -> None:
        super().grow(task)
        self.prototypes = None

    # -- prototypical pseudo labels

    def before_epoch(self, stage: Stage) -> None:
        """The mean feature of each old label over the words labelled O that the teacher gives this label. Computed once
        per task, because sentences have one view and the teacher does not change."""
        if self.teacher is None or not self.pseudo or self.prototypes is not None:
            return
        examples = self.training_examples(self.stream[self.now.task])
        out = self.outputs(examples, self.teacher)
        outside = self.outside(self.stream.labels(examples)[1])
        self.prototypes = class_means(out.features[outside], out.logits[outside].argmax(1), range(self.now.known))

    def pseudo_labels(self, old: Output) -> Tensor:  # (rows,)
        """argmax_c softmax(z')_c softmax(-|f' - p|)_c, in the log domain. Both soft-maxes only scale a row."""
        assert self.prototypes is not None
        distance = torch.cdist(old.features, self.prototypes, compute_mode="donot_use_mm_for_euclid_dist")
        return (old.logits - distance).masked_fill(~self.prototypes.any(1), -torch.inf).argmax(1)

    # -- the loss

    def loss(self, batch: Batch) -> Loss:
        logits = self.model(batch).logits
        old = None if self.teacher is None else self.infer([batch], self.teacher)
        outside, labels = self.outside(self.labels(batch)), batch.targets
        if old is not None and self.pseudo:
            labels = torch.where(outside.to(labels.device), self.pseudo_labels(old), labels)
        terms = {"new": F.cross_entropy(logits, labels)}
        if old is not None and self.lambda_kd and outside.any():
            # + 2 KL(softmax(z') || softmax(z) cut to the old columns) on O words
            log_old = F.log_softmax(old.logits[outside], 1)
            terms["distil"] = self.lambda_kd * distillation(logits[outside], log_old, mode="slice")
        if old is not None and self.lambda_soft:
            terms["soft"] = self.lambda_soft * self.soft_label_loss(logits, old.logits, batch.targets)
        if self.now.known and self.lambda_entropy:  # + 0.1 mean of -p log p over words and labels
            log_p = F.log_softmax(logits, 1)
            terms["entropy"] = -self.lambda_entropy * (log_p.exp() * log_p).mean()
        return terms

    def soft_label_loss(
        self,
        logits: Tensor,  # (rows, seen)
        old: Tensor,  # (rows, known) the teacher's
        targets: Tensor,  # (rows,)
    ) -> Tensor:  # ()
        """Against y = [sigmoid(z') ; one-hot of the new labels], as a mean over words and labels."""
        y = torch.cat([old.sigmoid(), F.one_hot(targets, logits.shape[1])[:, self.now.known :]], 1)
        if self.soft == "softmax":
            return -(y.softmax(1) * F.log_softmax(logits, 1)).mean()
        return F.binary_cross_entropy_with_logits(logits, y)
