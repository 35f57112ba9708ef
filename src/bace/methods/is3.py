"""IS3: incremental sequence labelling without semantic shifts.

Qiu, Zheng, Liu, Luo, Ma, "Incremental Sequence Labeling: A Tale of Two Shifts", Findings of ACL 2024.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from bace.core.method import Card, Passes
from bace.core.stage import Loss
from bace.core.stream import Task
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.extendner import ExtendNER
from bace.methods.parts.losses import distillation
from bace.methods.parts.prototypes import class_means
from bace.models.model import Model


class IS3(ExtendNER):
    """Keep old entities from turning into O by distillation on words labelled O, as ExtendNER does. Keep O and old
    entities from turning into new ones: labels of new entities push the rows of old entities down less, and the head
    also learns a prototype of each old label.

    Args:
        lambda_kd: weight of the distillation on O words; 0 leaves it out.
        lambda_proto: weight of the cross-entropy on prototypes of old labels; 0 leaves it out.
        old_gradient: factor of the gradient from labels of new entities to the rows of old entities, but not to the
            row of O; 1 changes nothing.
        head: `trained`: the run's head; `frozen`: CFNER's, whose old rows are not trained.
    """

    paper = "Qiu et al., Incremental Sequence Labeling: A Tale of Two Shifts, Findings of ACL 2024"
    uses_memory = False
    cost = Passes(4, task=1)
    by_class = ("prototypes",)
    card = Card(
        mechanism="ExtendNER without replay; weaker gradient from new labels to rows of old entities; prototypes of "
        "old labels in the head",
        o_rows="in the first task, O is learned as class 0 with cross-entropy; later O rows are only distilled, over "
        "the old columns of the soft-max over all classes",
        reading="The factor weakens the gradient of the cross-entropy for rows and biases (not for biases in the "
        "authors' code), but not for the encoder. As in the authors' code, a prototype is the mean of unit features at "
        "the end of its task and is never updated; O has none. Every step learns the prototypes (in the authors' code, "
        "every step with new entities).",
    )

    prototypes: Tensor  # (classes, width), 0 for O and for classes without examples

    def __init__(
        self,
        lambda_kd: float = 2.0,
        lambda_proto: float = 0.1,
        old_gradient: float = 0.6,
        head: Literal["trained", "frozen"] = "trained",
    ) -> None:
        super().__init__(lambda_kd, head=head)
        if min(lambda_proto, old_gradient) < 0:
            raise ConfigError(
                f"IS3: lambda_proto ({lambda_proto}) and old_gradient ({old_gradient}) must be at least 0"
            )
        self.lambda_proto, self.old_gradient = lambda_proto, old_gradient
        self.register_buffer("prototypes", torch.zeros(0, 0))

    def build(self, model: Model) -> Model:
        self.prototypes = torch.zeros(0, model.encoder.width)
        return super().build(model)

    def loss(self, batch: Batch) -> Loss:
        out = self.model(batch)
        if not self.now.known:
            return {"new": F.cross_entropy(out.logits, batch.targets)}
        terms, entity = {}, self.labelled(self.labels(batch), len(batch))
        if entity.any():  # CE over the words with a new type
            logits = out.logits if self.old_gradient == 1 else self.debiased(out.features)
            terms["new"] = F.cross_entropy(logits[entity], batch.targets[entity])
        if self.lambda_kd and not entity.all():  # + 2 KL(softmax(z') || softmax(z) cut to the old columns) on O words
            log_old = F.log_softmax(self.infer([batch], self.teacher).logits[~entity], 1)
            terms["distil"] = self.lambda_kd * distillation(out.logits[~entity], log_old, mode="slice")
        if self.lambda_proto:  # + 0.1 CE(head(p_c), c) over the old labels c; O and labels without words have no p_c
            known, labels = self.prototypes.any(1), torch.arange(len(self.prototypes), device=out.logits.device)
            each = F.cross_entropy(self.model.head(self.prototypes), labels, reduction="none")
            terms["prototypes"] = self.lambda_proto * (each * known).sum() / known.sum().clamp(min=1)
        return terms

    def debiased(self, features: Tensor) -> Tensor:  # (rows, width) -> (rows, classes)
        """The head's logits. Their gradient for the rows of old entities is multiplied by `old_gradient`; the gradient
        for the features is unchanged: w + (factor - 1)(w - stop(w)) is w, with the gradient of factor w."""
        head, weakened = self.model.head, {}
        for name, rows in head.named_parameters():
            kind, _, task = name.rpartition(".")
            if kind and int(task) < self.now.task:  # blocks.0, biases.0; the scale belongs to all rows
                o = self.outside(torch.tensor(self.stream[int(task)].classes, device=rows.device))
                factor = torch.where(o, 1.0, self.old_gradient).to(rows).reshape(-1, *[1] * (rows.ndim - 1))
                weakened[name] = rows + (factor - 1) * (rows - rows.detach())
        logits: Tensor = functional_call(head, weakened, (features,))
        return logits

    def after_task(self, task: Task) -> None:
        """p_c = mean of f/|f| over the words of label c, for all labels except O."""
        super().after_task(task)
        trained = self.training_examples(task)
        features, targets = self.outputs(trained, logits=False).features, self.stream.labels(trained)[1]
        means = class_means(F.normalize(features, dim=1), targets, task.classes).to(self.prototypes)
        means[self.outside(torch.tensor(task.classes))] = 0.0
        self.prototypes = torch.cat([self.prototypes, means])
