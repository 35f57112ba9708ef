"""CLS-ER: complementary learning systems. Arani, Sarfraz, Zonooz, "Learning Fast, Learning Slow: A General Continual
Learning Method based on Complementary Learning System", ICLR 2022."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from bace.core.method import Card, Passes
from bace.core.stage import Loss
from bace.core.stream import Task
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.er import ER
from bace.methods.parts.losses import old_logit_mse
from bace.models.model import Model, average_into, frozen_copy
from bace.randomness import generator


class CLSER(ER):
    """Two averaged copies of the network, a fast (plastic) and a slow (stable) one, give the target logits of replayed
    examples. The stable network predicts.

    Args:
        lambda_mse: weight of the logit matching on memory; 0 leaves it out.
        r_plastic: probability that a step updates the plastic network.
        a_plastic: share of its weights that the plastic network keeps at an update. It averages over about
            1 / (r (1 - a)) steps, which should be fewer than a task has (0.999 in the original, for thousands).
        r_stable: probability that a step updates the stable network; at most `r_plastic`.
        a_stable: share of its weights that the stable network keeps at an update.
        reduction: `sum`: mean over the new rows + mean over the replayed ones; `joint`: one mean over both (the
            original).
    """

    title = "CLS-ER"
    paper = "Arani et al., Learning Fast, Learning Slow, 2022"
    networks = 3
    scorers = ("working", "plastic")
    cost = Passes(3, 5, task=1)
    card = Card(
        mechanism="replay; matching of the logits of the better of two averaged networks on memory",
        besides="one pass over the weights for each average",
        o_rows="O is learned as class 0 with cross-entropy, also in replayed sentences, all rows of which are matched",
        reading="The memory is herded instead of a reservoir, and the averaging rates suit short tasks. The averaged "
        "networks are always in eval mode, and new head rows start equal in all three networks. The stable network "
        "predicts, also in forward transfer; the others are scored beside it.",
    )

    plastic: Model
    stable: Model
    steps: Tensor  # () taken so far, in all tasks

    def __init__(
        self,
        lambda_mse: float = 0.1,
        r_plastic: float = 0.9,
        a_plastic: float = 0.98,
        r_stable: float = 0.7,
        a_stable: float = 0.98,
        reduction: Literal["sum", "joint"] = "sum",
    ) -> None:
        super().__init__(reduction=reduction)
        if lambda_mse < 0:
            raise ConfigError(f"CLS-ER: lambda_mse is {lambda_mse}, but it must be at least 0")
        if not 0 <= r_stable <= r_plastic <= 1:
            raise ConfigError(
                f"CLS-ER: r_stable ({r_stable}) and r_plastic ({r_plastic}) must lie between 0 and 1, and the "
                "stable network must not be updated more often than the plastic one"
            )
        if not (0 <= a_plastic <= 1 and 0 <= a_stable <= 1):
            raise ConfigError(f"CLS-ER: a_plastic ({a_plastic}) and a_stable ({a_stable}) must lie between 0 and 1")
        self.lambda_mse = lambda_mse
        self.rates = {"plastic": (r_plastic, a_plastic), "stable": (r_stable, a_stable)}
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def grow(self, task: Task) -> None:
        super().grow(task)
        if task.index == 0:
            self.plastic, self.stable = frozen_copy(self.model), frozen_copy(self.model)
            return
        for average in (self.plastic, self.stable):  # the same draw as for the working network's new rows
            average.head.grow(len(task.classes), generator(self.now.seed, "head", task.index))
            average.requires_grad_(False)

    def imprint(self, task: Task) -> None:
        super().imprint(task)
        for average in (self.plastic, self.stable):
            average.head.blocks[-1].data.copy_(self.model.head.blocks[-1].data)

    def loss(self, batch: Batch) -> Loss:
        """CE + lambda mean (z(x1) - z'(x1))^2, where z' comes from the better averaged network."""
        replay = self.replay()
        both = Batch.cat(batch, replay)
        logits = self.model(both).logits
        terms = self.cross_entropy(logits, both, len(batch))
        if replay is not None and self.lambda_mse:
            match = old_logit_mse(logits[len(batch) :], self.target(replay))
            terms["match"] = self.count_means(both, len(batch)) * self.lambda_mse * match
        return terms

    def target(self, replay: Batch) -> Tensor:  # (rows, classes)
        """For each row, the logits of the network that gives its true class the higher probability."""
        plastic, stable = (self.infer([replay], average).logits for average in (self.plastic, self.stable))
        true = replay.targets[:, None]
        better = F.softmax(stable, 1).gather(1, true) > F.softmax(plastic, 1).gather(1, true)
        return torch.where(better, stable, plastic)

    def after_step(self, batch: Batch) -> None:
        """theta' <- a theta' + (1 - a) theta with probability r; a = min(1 - 1/(n + 1), a_max) at step n."""
        self.steps += 1
        for name, (chance, most) in self.rates.items():
            if float(torch.rand((), generator=self.now.rng(name))) < chance:
                average_into(getattr(self, name), self.model, (1 - 1 / (self.steps + 1)).clamp(max=most))

    def transfer_model(self) -> Model:
        return self.stable

    def predict(self, batch: Batch, scorer: str | None = None) -> Tensor:
        network = {None: self.stable, "plastic": self.plastic, "working": self.model}[scorer]
        with torch.inference_mode():
            logits: Tensor = network(batch).logits
        return logits
