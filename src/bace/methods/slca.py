"""SLCA: slow learner with classifier alignment.

Zhang, Wang, Kang, Chen, Wei, "SLCA: Slow Learner with Classifier Alignment for Continual Learning on a Pre-trained
Model", ICCV 2023.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from bace.core.method import Card, Passes
from bace.core.stage import Stage
from bace.core.stream import Task
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.parts.alignment import Alignment
from bace.models.heads import LinearHead
from bace.models.model import Model


class SLCA(Alignment):
    """Fine-tune the whole encoder a hundred times more slowly than the head of each task; then draw features from the
    Gaussians of all classes and train the heads on them together.

    Args:
        lr: learning rate of the head; default: the run's.
        slow: learning rate of the encoder, as a share of the head's; 1 means equal rates.
        drop: factor of both rates in the last tenth of the epochs; 1 means no drop.
        weight_decay: weight decay of weights, in both stages.
        align_epochs: epochs of the alignment; 0 leaves it out.
        align_lr: learning rate of the alignment, which falls to 0 along a cosine.
        samples: number of features drawn for each class in an epoch of the alignment, and batch size of the alignment.
        logit_norm: temperature of the normalised logits in the alignment; 0 means that logits are not normalised.
        fade: how far the means of old classes shrink to zero: mu_c (1 - fade + fade (t_c + 1) / (t + 1)), where t_c is
            the task of the class and t the current one, counted from 0.
        ridge: number added to the variances of the Gaussians.
    """

    title = "SLCA"
    paper = (
        "Zhang et al., SLCA: Slow Learner with Classifier Alignment for Continual Learning on a Pre-trained Model, "
        "ICCV 2023"
    )
    takes_o = False
    cost = Passes(3, task=1)
    card = Card(
        mechanism="slow fine-tuning with a head for each task; heads aligned on features drawn from class Gaussians",
        besides="a covariance for each class; the heads' alignment on drawn features",
        o_rows="refused: O belongs to no task's head, and one Gaussian cannot stand for all words labelled O",
        stages=("main", "statistics", "align"),
        reading="The optimiser is SGD with momentum, as published, whatever the run's optimiser is. Batch size and "
        "number of epochs are the run's (128 and 20 in the original). The fade counts tasks from 0, so while the "
        "second task is learned, the means of the first shrink to 0.95. The head is linear and has a bias.",
    )

    def __init__(
        self,
        lr: float | None = 0.01,
        slow: float = 0.01,
        drop: float = 0.1,
        weight_decay: float = 5e-4,
        align_epochs: int = 5,
        align_lr: float = 0.01,
        samples: int = 256,
        logit_norm: float = 0.1,
        fade: float = 0.1,
        ridge: float = 1e-4,
    ) -> None:
        super().__init__(align_epochs, align_lr, samples, logit_norm, weight_decay)
        if min(slow, drop) <= 0 or (lr is not None and lr <= 0):
            raise ConfigError(f"SLCA: lr ({lr}), slow ({slow}) and drop ({drop}) must be above 0")
        if not 0 <= fade <= 1 or ridge <= 0:
            raise ConfigError(f"SLCA: fade ({fade}) must lie between 0 and 1, ridge ({ridge}) above 0")
        self.lr, self.slow, self.drop, self.fade, self.ridge = lr, slow, drop, fade, ridge

    def build(self, model: Model) -> Model:
        model.head = LinearHead(model.encoder.width).to(self.stream.device)
        return model

    def stages(self, task: Task) -> list[Stage]:
        lr, epochs = self.training_settings.lr if self.lr is None else self.lr, self.training_settings.epochs
        head = self.model.head
        assert isinstance(head, LinearHead)
        slow = self.stage(
            task,
            groups=lambda: {"encoder": self.model.encoder.parameters(), "head": head.of(task.index)},
            optimiser="sgd",
            momentum=0.9,
            weight_decay=self.weight_decay,
            lr=lr,
            rates={"encoder": lr * self.slow},
            schedule=lambda done: self.drop if done >= 0.9 * epochs else 1.0,
        )
        return [slow, self.statistics_stage(task), *self.alignment_stages(task)]

    def loss(self, batch: Batch) -> Tensor:
        """CE over the task's classes."""
        return F.cross_entropy(self.model(batch).logits[:, self.now.known :], batch.targets - self.now.known)

    def gaussian(self, c: int) -> tuple[Tensor, Tensor]:  # (width,), (width, width)
        """N(mu_c (0.9 + 0.1 (t_c + 1) / (t + 1)), S_c + 1e-4 I), where t_c is the task of class c and t the current
        one."""
        t_c = next(task.index for task in self.stream if c in task.classes)
        mean = self.statistics.means[c] * (1 - self.fade + self.fade * (t_c + 1) / (self.now.task + 1))
        identity = torch.eye(len(mean), dtype=mean.dtype, device=mean.device)
        return mean, self.statistics.covariance(c) + self.ridge * identity
