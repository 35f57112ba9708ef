"""PASS: prototype augmentation and self-supervision.

Zhu, Zhang, Wang, Yin, Liu, "Prototype Augmentation and Self-Supervision for Incremental Learning", CVPR 2021.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from bace.core.method import Card, Method, Passes
from bace.core.stage import Stage
from bace.core.stream import Task
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.models.heads import AugmentedHead
from bace.models.model import Model

ROTATIONS = 4


class PASS(Method):
    """Keep no examples: replay one noisy prototype per class into the head, keep the features near the teacher's, and
    learn each image in four rotations, as four classes.

    Args:
        lambda_kd: weight of the distance between the features of student and teacher; 0 leaves it out.
        lambda_proto: weight of the cross-entropy on prototypes; 0 leaves it out.
        temp: temperature of both cross-entropies.
        head_rate: learning rate of the head as a multiple of the encoder's, unless the run sets train.head_lr.
            The features are preserved, so the head must learn the new classes.
    """

    title = "PASS"
    paper = "Zhu et al., Prototype Augmentation and Self-Supervision for Incremental Learning, 2021"
    takes_o = False
    growing_head = False
    keeps_teacher = True
    cost = Passes(16, task=1)
    by_class = ("prototypes",)
    card = Card(
        mechanism="noisy class prototypes replayed into the head; feature distillation; rotations as classes",
        besides="4 new for texts, which are not rotated",
        o_rows="refused: words labelled O may be entities of other tasks, and one prototype of O would mix them",
        reading="The head is linear and the optimiser is Adam, as in the original (SGD diverges at this temperature). "
        "If the run uses SGD, the encoder learns at a tenth of its learning rate, which suits pre-trained weights, "
        "and the head at the full learning rate: in a few epochs (the authors train for 100) at the encoder's rate, "
        "new rows would stay near their initial values. Texts are not rotated; everything else is the same. The "
        "radius is the first task's. The feature distance is scaled as for the authors' batches of 64 images in "
        "4 rotations, whatever the batch size is.",
    )

    prototypes: Tensor  # (classes, width)
    radius: Tensor  # ()

    def __init__(
        self, lambda_kd: float = 10.0, lambda_proto: float = 10.0, temp: float = 0.1, head_rate: float = 10.0
    ) -> None:
        super().__init__()
        if min(lambda_kd, lambda_proto) < 0 or min(temp, head_rate) <= 0:
            raise ConfigError(
                f"PASS: lambda_kd ({lambda_kd}) and lambda_proto ({lambda_proto}) must be at least 0, temp ({temp}) "
                f"and head_rate ({head_rate}) above 0"
            )
        self.lambda_kd, self.lambda_proto, self.temp, self.head_rate = lambda_kd, lambda_proto, temp, head_rate
        self.register_buffer("prototypes", torch.zeros(0, 0))
        self.register_buffer("radius", torch.zeros(()))

    @property
    def head(self) -> AugmentedHead:
        return cast(AugmentedHead, self.model.head)

    def build(self, model: Model) -> Model:
        views = ROTATIONS if self.stream.modality.picture_input else 1
        model.head = AugmentedHead(model.encoder.width, views).to(self.stream.device)
        self.prototypes = torch.zeros(0, model.encoder.width)
        return model

    def stages(self, task: Task) -> list[Stage]:
        train = self.training_settings
        lr = train.lr / 10 if train.optimiser == "sgd" else train.lr
        head_lr = lr * self.head_rate if train.head_lr is None else train.head_lr
        return [self.stage(task, optimiser="adam", lr=lr, rates={"head": head_lr})]

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        batch = self.rotated(batch)
        features = self.model(batch).features
        terms = {"new": self.cross_entropy(features, batch.targets)}
        if self.teacher is not None and self.lambda_kd:
            difference = features - self.infer([batch], self.teacher).features
            # |H - H'|_F over the whole batch grows with the root of its rows; at 0 the root has no gradient
            norm = (difference.square().sum() + 1e-12).sqrt() * (64 * ROTATIONS / len(batch)) ** 0.5
            terms["distil"] = self.lambda_kd * norm
        if self.teacher is not None and self.lambda_proto:
            terms["prototypes"] = self.lambda_proto * self.prototype_loss(len(batch) // self.head.views)
        return terms

    def cross_entropy(self, features: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head.all(features) / self.temp, labels)

    def rotated(self, batch: Batch) -> Batch:
        """Every picture turned by k quarters, k = 0 to 3, with the label 4 y + k."""
        views, key = self.head.views, self.stream.modality.picture_input
        if key is None:
            return batch
        return Batch(
            {key: torch.cat([torch.rot90(batch.inputs[key], k, (2, 3)) for k in range(views)])},
            torch.cat([views * batch.targets + k for k in range(views)]),
            batch.examples.repeat(views),
            batch.rows.repeat(views),
        )

    def prototype_loss(self, count: int) -> Tensor:
        """CE of g(mu_c + r e) for random old classes c, e ~ N(0, I). Only the head g gets a gradient."""
        rng = self.now.rng("prototypes")
        old = torch.tensor([c for c in self.stream.known if c < len(self.prototypes)])  # none that were forgotten
        classes = old[torch.randint(len(old), (count,), generator=rng)].to(self.prototypes.device)
        noise = torch.randn(count, self.prototypes.shape[1], generator=rng).to(self.prototypes)
        return self.cross_entropy(self.prototypes[classes] + self.radius * noise, self.head.views * classes)

    def after_task(self, task: Task) -> None:
        super().after_task(task)
        examples = self.training_examples(task)
        features, targets = self.outputs(examples, logits=False).features, self.stream.labels(examples)[1]
        of_class = [features[targets == c] for c in task.classes]
        means = torch.stack([rows.mean(0) for rows in of_class])
        self.prototypes = torch.cat([self.prototypes, means.to(self.prototypes)])
        if task.index == 0:  # r^2 = mean over classes of tr(cov_c) / d
            variances = [rows.var(0).mean() if len(rows) > 1 else rows.new_zeros(()) for rows in of_class]
            self.radius.copy_(torch.stack(variances).mean().sqrt())
