"""BaCE without a single speed-up (docs/bace.md 9): every network is passed wherever the formulas name it, one neighbour
at a time, and every table and average is made whether it is read or not."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bace.core.method import Loss, Stage
from bace.data.batch import Batch
from bace.methods.bace import BaCE
from bace.methods.parts.neighbours import nearest
from bace.models.model import average_into


class PlainBaCE(BaCE):
    def find_neighbours(self, features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        assert self.effect_new == "full"
        assert not self.knn_pool_cap
        return nearest(features, self.K, block=len(features))

    def after_epoch(self, stage: Stage) -> None:
        if self.teacher is not None:
            average_into(self.teacher, self.model, self.beta)

    def loss(self, batch: Batch) -> Loss:
        new, own = self.model(batch).logits, self.own_rows(batch.targets)
        terms: dict[str, Tensor] = {}
        if own.any():
            joint = [self.joint(row, logits) for row, logits in zip(batch.rows[own], new[own], strict=True)]
            terms["new"] = F.nll_loss(torch.stack(joint).log(), batch.targets[own])
        if self.distils:
            self.rows, order = batch.rows.sort()
            self.log_old = self.log_scores_of_old(self.peek([batch], self.teacher).logits)[order]
            terms["distil"] = self.alpha * self.loss_distil(new, batch, own)
        if (replay := self.replay()) is not None:
            terms |= self.loss_memory(self.model(replay).logits, replay)
        return terms

    def joint(self, row: Tensor, logits: Tensor) -> Tensor:  # (), (classes,) -> (classes,)
        """W_0 S(x) + sum_j W_j S(x_j)."""
        scores = logits.softmax(0)
        if self.table is None:
            return scores
        at = int((self.table.anchors == row).nonzero())
        mixed: Any = self.table.log_weight_anchor[at].exp() * scores
        for neighbour, log_weight in zip(self.table.neighbours[at], self.table.log_weights[at], strict=True):
            if neighbour >= 0:
                with torch.set_grad_enabled(self.neighbor_grad):
                    beside = self.model(self.stream.rows(neighbour[None], view=self.now.view())).logits[0]
                mixed = mixed + log_weight.exp() * beside.softmax(0)
        return mixed
