"""Methods that learn by statistics: the encoder is frozen, and every example is seen once."""

from torch import Tensor

from bace.core.method import Method, Passes
from bace.core.stage import Stage
from bace.core.stream import Task
from bace.data.batch import Batch
from bace.models.model import Model


class OnePass(Method):
    """The encoder is frozen, and the features of a task's examples, in clean views, are observed once, whatever the
    number of epochs. A method defines what it learns from them (`observe`) and how it predicts.

    Words labelled O are rows of class 0, in every task or (`learns_o = False`) only in the first."""

    growing_head = False
    cost = Passes(0, task=1, first=1)

    def build(self, model: Model) -> Model:
        model.encoder.requires_grad_(False)
        return model

    def stages(self, task: Task) -> list[Stage]:
        return [self.stage(task, epochs=1, optimise=False, augment=False)]

    def loss(self, batch: Batch) -> None:
        labels = self.labels(batch)
        learned = self.labelled(labels, len(batch))
        self.observe(self.features(batch)[learned], labels[learned])

    def features(self, batch: Batch) -> Tensor:  # (rows, width)
        """The features in double precision, because statistics are inverted."""
        return self.infer([batch]).features.double()

    def observe(
        self,
        x: Tensor,  # (rows, width)
        y: Tensor,  # (rows,) class ids, on the CPU
    ) -> None:
        raise NotImplementedError

    def validation_loss(self, examples: Tensor) -> float | None:
        return None  # there is nothing to stop
