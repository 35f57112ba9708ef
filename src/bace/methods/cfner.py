"""CFNER. Zheng, Liang, Chen, Ma, "Distilling Causal Effect from Miscellaneous Other-Class for Continual Named Entity
Recognition", EMNLP 2022."""

import math
from typing import Literal, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from bace.core.method import Card, Passes
from bace.core.stage import Stage
from bace.core.stream import Task
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.extendner import ExtendNER
from bace.methods.parts.losses import mixture, neighbour_log_weights
from bace.methods.parts.neighbours import NeighbourTable, nearest
from bace.methods.parts.replay import ReplayOptions


class CFNER(ExtendNER):
    """Extend ExtendNER: predict an entity jointly with its nearest entities in the teacher's feature space. Do the same
    for a word labelled O that the teacher takes for an old entity (a "defined O" word), towards the teacher's best
    guess.

    Args:
        top_k: number of neighbours of a word among words of its kind.
        dce: predict entities jointly.
        odce: predict defined O words jointly.
        curriculum: epochs over which defined O words are admitted, the most certain first: in the first epoch those to
            which the student gives an old label with 0.9 or more, from the last epoch on all. 0 means all at once.
        lambda_kd: weight of the distillation; 0 leaves it out.
        adaptive: multiply the weight by sqrt((old labels - 1) / new labels), where O is one of the old labels.
        head: `frozen`: a cosine head whose old rows, including O's, are not trained and whose new rows start from data;
            `trained`: the run's head.
    """

    paper = (
        "Zheng et al., Distilling Causal Effect from Miscellaneous Other-Class for Continual Named Entity Recognition, "
        "EMNLP 2022"
    )
    cost = Passes(8, 4, task=1)  # with about four sentences of neighbours for each new sentence
    card = Card(
        mechanism="ExtendNER; entities, and O words that the teacher takes for old entities, are predicted jointly "
        "with neighbours",
        besides="4 of the 8 are sentences of neighbours",
        o_rows="as in ExtendNER; O words that the teacher takes for old entities are predicted jointly with their "
        "nearest such words, towards the teacher's best guess",
        reading="All words of the task are candidates (the first 5000 in the original). Replayed words have no "
        "neighbours. There is no curriculum by default, as in the released settings. The adaptive weight and the "
        "frozen head follow the original code.",
    )

    def __init__(
        self,
        top_k: int = 3,
        dce: bool = True,
        odce: bool = True,
        curriculum: int = 0,
        lambda_kd: float = 2.0,
        adaptive: bool = True,
        head: Literal["frozen", "trained"] = "frozen",
        **replay: Unpack[ReplayOptions],
    ) -> None:
        super().__init__(lambda_kd, head=head, **replay)
        if top_k < 1:
            raise ConfigError(f"CFNER: top_k is {top_k}, but it must be at least 1; dce and odce switch neighbours off")
        if curriculum < 0:
            raise ConfigError(f"CFNER: curriculum is {curriculum} epochs, but it must be at least 0; 0 means none")
        self.top_k, self.dce, self.odce = top_k, dce, odce and lambda_kd > 0
        self.curriculum, self.adaptive = curriculum, adaptive
        self.keeps_teacher = lambda_kd > 0 or dce
        self.table: NeighbourTable | None = None  # of a task, recomputed by before_epoch after a resume

    def grow(self, task: Task) -> None:
        super().grow(task)
        self.table = None

    def before_epoch(self, stage: Stage) -> None:
        """The top_k nearest neighbours of each entity among the entities, and of each defined O word among those words.
        Computed once per task, because sentences have one view and the teacher does not change."""
        if self.teacher is None or self.table is not None or not (self.dce or self.odce):
            return
        examples = self.training_examples(self.stream[self.now.task]).sort().values
        rows, targets = self.stream.labels(examples)
        out = self.outputs(examples, self.teacher)
        entity = ~self.outside(targets)
        defined = ~entity & ~self.outside(out.logits.argmax(1).cpu())
        anchor = (entity & self.dce) | (defined & self.odce)
        if anchor.any():
            features = F.normalize(out.features[anchor], dim=1)
            kind = entity[anchor].to(features.device)
            found = nearest(features, self.top_k, labels=kind, among="same")
            index, distance = (part.cpu() for part in found)  # the table holds row ids, which the CPU reads
            weights = neighbour_log_weights(distance, 0.5, uniform=True)  # one half, and the other half shared equally
            anchors = rows[anchor]
            self.table = NeighbourTable(anchors, torch.where(index < 0, -1, anchors[index]), *weights, distance)

    def epoch_table(self) -> NeighbourTable | None:
        return self.table

    def joint(self, logits: Tensor, log_old: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """log (p + q)/2 in place of the logits, where q is the mean prediction of the neighbours, without gradient:
        over all labels for an entity, over the old labels for a defined O word. The soft-max of log-probabilities gives
        the same probabilities."""
        if self.table is None:
            return logits, log_old
        anchor = torch.isin(batch.rows, self.table.anchors)
        outside = self.outside(self.labels(batch))
        if self.threshold:  # without a curriculum, nothing is read from the device
            sure = F.softmax(logits[: len(batch)].detach(), 1)[:, : self.now.known].amax(1) >= self.threshold
            anchor &= ~outside | sure.cpu()
        at = torch.nonzero(anchor).flatten()
        if not len(at):
            return logits, log_old
        near = self.table.of(batch.rows[at], logits.device)
        parts = near.rows.split(self.training_settings.eval_batch_size)
        beside = self.infer(self.stream.rows(part) for part in parts).logits
        beside[self.outside(self.stream.targets[near.rows]), self.now.known :] = -torch.inf
        logits = logits.index_put((at,), (mixture(logits[at], beside, near) + 1e-12).log())
        if log_old is not None:  # a defined O word has only the best guess: its old entity
            at = at[outside[at]]
            guess = F.one_hot(log_old[at].argmax(1), log_old.shape[1])
            log_old = log_old.index_put((at,), guess.to(log_old).log())
        return logits, log_old

    @property
    def threshold(self) -> float:
        """The probability that the most likely old label of a defined O word must reach: 0.9 in the first epoch,
        falling to 0 in the last epoch of the curriculum."""
        return 0.9 * max(1 - self.now.epoch / (self.curriculum - 1), 0.0) if self.curriculum > 1 else 0.0

    @property
    def weight(self) -> float:
        """lambda sqrt((|old| - 1) / |new|)."""
        old, new = self.now.known, self.now.seen - self.now.known
        return self.lambda_kd * math.sqrt((old - 1) / new) if self.adaptive else self.lambda_kd
