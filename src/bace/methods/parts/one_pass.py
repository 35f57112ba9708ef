"""Methods that learn by statistics: a frozen encoder, and one look at every example."""

from torch import Tensor

from bace.core.method import Method, Passes
from bace.core.stage import Stage
from bace.core.stream import Task
from bace.data.batch import Batch
from bace.models.model import Model


class OnePass(Method):
    """The encoder is frozen, and the features of a task's examples, in clean views, are observed once, whatever the
    epochs. A method says what it makes of them (`observe`) and how it predicts.

    Entities: words labelled O are rows of class 0, in every task or (`learns_o = False`) in the first one only."""

    growing_head = False
    cost = Passes(0, task=1)

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
        """In double precision: statistics are inverted."""
        return self.infer([batch]).features.double()

    def observe(
        self,
        x: Tensor,  # (rows, width)
        y: Tensor,  # (rows,) class ids, on the CPU
    ) -> None:
        raise NotImplementedError

    def validation_loss(self, examples: Tensor) -> float | None:
        return None  # there is nothing to stop
