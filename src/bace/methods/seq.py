"""SEQ: sequential fine-tuning, the lower bound."""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from bace.core.method import Card, Method
from bace.core.stage import Loss
from bace.data.batch import Batch


class SEQ(Method):
    """Train on each task's data only and do nothing against forgetting.

    Args:
        span: the classes of the soft-max: all `seen` so far (new data pushes old logits down), or only the `new` ones
            (a different and much less forgetful baseline).
    """

    title = "SEQ"
    paper = "sequential fine-tuning; the standard lower bound, no single origin"
    takes_known = True
    card = Card(
        mechanism="fine-tuning only",
        o_rows="O is learned as class 0 with cross-entropy",
        reading="The soft-max spans all seen classes, or only the new ones with `span=new`.",
    )

    def __init__(self, span: Literal["seen", "new"] = "seen") -> None:
        super().__init__()
        self.span, self.takes_known = span, type(self).takes_known and span == "seen"

    def loss(self, batch: Batch) -> Loss:
        return self.cross_entropy(self.model(batch).logits, batch.targets)

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """CE(z, y; K) over the classes K of `span`."""
        first = self.now.known if self.span == "new" and self.stream.background is None else 0
        return F.cross_entropy(logits[:, first:], targets - first)
