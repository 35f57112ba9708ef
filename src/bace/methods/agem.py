"""A-GEM: averaged gradient episodic memory. Chaudhry, Ranzato, Rohrbach, Elhoseiny, "Efficient Lifelong Learning with
A-GEM", ICLR 2019."""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from bace import ranks
from bace.core.method import Card, Method, Passes
from bace.core.stage import Stage
from bace.core.stream import Task
from bace.data.batch import Batch
from bace.errors import ConfigError


class AGEM(Method):
    """Learn from new data alone, but remove from each gradient what would raise the loss on examples from memory.

    Args:
        reference_size: number of examples drawn from memory at each step, without replacement, for the reference
            gradient; the whole memory if it holds fewer. 0 gives SEQ.
        momentum: momentum of SGD, instead of the run's. Momentum adds earlier gradients after the projection, so the
            original has none. (AdamW has its own.)
        step: with SGD, `matched`: the learning rate times (1 - momentum) / (1 - the run's momentum), so that constant
            gradients move the weights as far as in other methods; `plain`: the run's learning rate, with which a step
            without momentum is a tenth as long.
    """

    title = "A-GEM"
    paper = "Chaudhry et al., Efficient Lifelong Learning with A-GEM, 2019"
    uses_memory = True
    cost = Passes(3, 3, task=1)
    card = Card(
        mechanism="gradient projected so that the loss on memory does not rise",
        besides="min(`reference_size`, memory) examples are replayed in each step",
        o_rows="O is learned as class 0 with cross-entropy, also in the reference gradient",
        reading="The soft-max spans all seen classes. The memory is herded and filled at the end of a task. SGD has "
        "no momentum, and its learning rate is raised so that steps are as long as those of other methods with "
        "momentum. With `step=plain` they are a tenth as long, which forgets less because it learns less. Clipping "
        "and weight decay come after the projection.",
    )

    def __init__(
        self, reference_size: int = 256, momentum: float = 0.0, step: Literal["matched", "plain"] = "matched"
    ) -> None:
        super().__init__()
        self.reference_size, self.momentum, self.step = reference_size, momentum, step
        if reference_size < 0 or not 0 <= momentum < 1:
            raise ConfigError(
                f"A-GEM: reference_size ({reference_size}) must be at least 0, momentum ({momentum}) at least 0 and "
                "below 1"
            )

    def stages(self, task: Task) -> list[Stage]:
        train, factor = self.training_settings, 1.0
        if self.step == "matched" and train.optimiser == "sgd":
            # under a constant gradient g a step of SGD with momentum m grows to lr g / (1 - m)
            factor = (1 - self.momentum) / (1 - train.momentum)
        rates = {} if train.head_lr is None else {"head": train.head_lr * factor}
        # whole batches of new data
        return [self.stage(task, batch_size=self.batch_size, momentum=self.momentum, lr=train.lr * factor, rates=rates)]

    def before_step(self, batch: Batch) -> None:
        reference = self.reference()
        if reference is None:
            return
        moving = [p for p in self.model.parameters() if p.grad is not None]
        loss = F.cross_entropy(self.model(reference, name="reference").logits, reference.targets)
        # without backward(), because .grad holds g
        g_ref = ranks.mean(torch.autograd.grad(loss, moving, allow_unused=True, materialize_grads=True))
        project([p.grad for p in moving if p.grad is not None], g_ref)

    def reference(self) -> Batch | None:
        """Examples of earlier tasks, or the whole memory if it is small; None if there are none."""
        if not len(self.memory) or not self.reference_size:
            return None
        slots = torch.randperm(len(self.memory), generator=self.now.rng("reference"))[: self.reference_size]
        return self.stream.batch(self.memory.examples[slots], view=self.replay_view())


@torch.no_grad()
def project(
    g: Sequence[Tensor],  # changed in place
    g_ref: Sequence[Tensor],
) -> None:
    """g <- g - (g.g_ref / g_ref.g_ref) g_ref where g.g_ref < 0; otherwise g is unchanged."""
    conflict = dot(g, g_ref)
    scale = torch.where(conflict < 0, conflict / dot(g_ref, g_ref), 0.0)  # on the device: nothing waits for the sign
    for own, reference in zip(g, g_ref, strict=True):
        own -= scale * reference


def dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:  # ()
    return torch.stack([(x * y).sum() for x, y in zip(a, b, strict=True)]).sum()
