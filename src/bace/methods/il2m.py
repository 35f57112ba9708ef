"""IL2M. Belouadah, Popescu, "IL2M: Class Incremental Learning With Dual Memory", ICCV 2019."""

import warnings
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from bace.core.method import Card, Passes
from bace.core.stream import Task
from bace.data.batch import NO_IDS, Batch
from bace.methods.er import ER

PROB, LOGITS = 0, 1  # the rows of the statistics


class IL2M(ER):
    """Train like ER. When a new class wins, rescale the scores of the old classes by statistics from the time when they
    were new.

    Args:
        score: what is rescaled: soft-max probabilities, or raw `logits` (the authors'). A ratio of mean logits needs
            positive means; otherwise probabilities are rescaled, with a warning.
        mode: `concat`: the memory is shuffled into the task's data; `batch`: a separate batch from memory at each step,
            which fits old examples so well that nothing is left to rescale.
        reduction: `sum`: mean over the new rows + mean over the replayed ones; `joint`: one mean over both.
    """

    title = "IL2M"
    paper = "Belouadah and Popescu, IL2M: Class Incremental Learning With Dual Memory, ICCV 2019"
    takes_o = False
    cost = Passes(3, 3, task=2, memory=1)
    card = Card(
        mechanism="replay; old scores rescaled by stored statistics",
        o_rows="refused: mean scores of a class when it was new do not exist for O, which every task changes",
        replay="concat",
        reading="The memory is shuffled into the task's data. With a separate batch from memory (`mode`), the scores "
        "on digits equal those of ER in every digit. Probabilities take the place of the authors' logits (`score`), "
        "because the logits of a cosine head are signed. The learning rate is the run's at every task. A class "
        "without exemplars counts as unchanged.",
    )

    # statistics of probabilities and of logits:
    initial: Tensor  # (2, classes) mean score of a class on its own training data, when it was new
    current: Tensor  # (2, classes) mean score of a class on its exemplars now
    confidence: Tensor  # (2, tasks) mean score of the top class over a task's data when the task was new
    learned: Tensor  # (classes,) the task that introduced a class

    def __init__(
        self,
        score: Literal["prob", "logits"] = "prob",
        mode: Literal["batch", "concat"] = "concat",
        reduction: Literal["sum", "joint"] = "sum",
    ) -> None:
        super().__init__(mode, reduction)
        self.score = score
        for name in ("initial", "current", "confidence"):
            self.register_buffer(name, torch.zeros(2, 0))
        self.register_buffer("learned", NO_IDS.clone())

    def after_task(self, task: Task) -> None:
        """One clean pass over the task's data and the memory, before the memory is trimmed."""
        scores, targets = self.scores(task.train)
        new = self.initial.new_ones(2, len(task.classes))
        self.initial = mean_by_class(scores, targets, torch.cat([self.initial, new], 1))
        self.confidence = torch.cat([self.confidence, scores.amax(2).mean(1, keepdim=True)], 1)
        self.learned = torch.cat([self.learned, self.learned.new_full((len(task.classes),), task.index)])
        self.current = self.initial.clone()
        if len(self.memory):
            self.current = mean_by_class(*self.scores(self.memory.examples), self.current)
        if self.score == "logits" and self.kind() == PROB:
            warnings.warn("IL2M: a mean logit is not positive, so probabilities are rescaled instead", stacklevel=2)
        super().after_task(task)

    @torch.no_grad()
    def forget(self, classes: Sequence[int], examples: Tensor) -> None:
        super().forget(classes, examples)
        for means in (self.initial, self.current):
            means[:, list(classes)] = 1.0  # as before any example

    def scores(self, examples: Tensor) -> tuple[Tensor, Tensor]:  # (2, rows, classes), (rows,) class ids
        logits = self.stream.eligible(self.outputs(examples).logits)  # a forgotten class is never the top one
        probabilities = logits.softmax(1).clamp(min=torch.finfo(logits.dtype).tiny)  # never 0: they are divisors
        return torch.stack([probabilities, logits]).to(self.initial), self.stream.labels(examples)[1]

    def kind(self) -> int:
        """The row of the statistics that is used."""
        means = torch.cat([self.initial, self.current, self.confidence], 1)[LOGITS]
        return LOGITS if self.score == "logits" and bool((means > 0).all()) else PROB

    def predict(self, batch: Batch, scorer: str | None = None) -> Tensor:
        logits, kind = super().predict(batch), self.kind()
        learned: list[int] = self.learned.tolist()
        known = sum(task < max(learned) for task in learned)
        # r_c = mu_init(c) / mu_cur(c) * conf(t) / conf(k), for a class c of task k when t is the latest
        confidence = self.confidence[kind]
        ratio = (self.initial / self.current)[kind, :known] * confidence[-1] / confidence[self.learned[:known]]
        z = logits[:, :known]
        # p_c r_c in the log domain, without the soft-max's denominator, which is the same for all classes
        rescaled = torch.cat([z + ratio.log() if kind == PROB else z * ratio, logits[:, known:]], 1)
        new_on_top = self.stream.eligible(logits).argmax(1, keepdim=True) >= known
        return torch.where(new_on_top, rescaled, logits)


def mean_by_class(
    scores: Tensor,  # (2, rows, classes)
    targets: Tensor,  # (rows,)
    means: Tensor,  # (2, classes)
) -> Tensor:  # (2, classes)
    """A copy of `means` in which each class that has rows gets its mean score on these rows."""
    means = means.clone()
    for c in targets.unique().tolist():
        means[:, c] = scores[:, targets == c, c].mean(1)
    return means
