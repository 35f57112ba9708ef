"""LUCIR: Hou, Pan, Loy, Wang, Lin, "Learning a Unified Classifier Incrementally via Rebalancing", CVPR 2019."""

import math
from typing import Unpack

from torch import Tensor

from bace.core.method import Card, Passes
from bace.core.stage import Loss, Stage
from bace.core.stream import Task
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.er import ER
from bace.methods.parts.losses import feature_cosine, margin_ranking
from bace.methods.parts.replay import ReplayOptions
from bace.models.heads import CosineHead
from bace.models.model import Model, Output


class LUCIR(ER):
    """Use a cosine head whose old rows are frozen and whose new rows start from data. Preserve the direction of
    features, and a margin between old examples and the new classes nearest to them.

    Args:
        lambda_base: weight of the feature term, times sqrt(old classes / new classes); 0 leaves it out. Default: 5; 50
            for entities.
        K: how many new classes an old example is ranked against, at most all of them. Default: 2; 1 for entities.
        margin: margin of the ranking, between cosines.
        margin_weight: weight of the ranking; 0 leaves it out.
        freeze_old: head rows of old classes are not trained.
    """

    title = "LUCIR"
    paper = "Hou et al., Learning a Unified Classifier Incrementally via Rebalancing, CVPR 2019"
    keeps_teacher = True
    learns_o = False
    cost = Passes(4, 4, task=2)
    card = Card(
        mechanism="cosine head with imprinted new and frozen old rows; feature distillation; margin ranking; replay",
        o_rows="in the first task, O is learned as class 0 with cross-entropy; in later tasks O rows get no "
        "cross-entropy (`train.replay_o` decides for replayed sentences), but only they get the feature term, and "
        "they are ranked like rows of old entities",
        replay="concat",
        reading="The feature term and the ranking are means over new and replayed rows together. The scale of the "
        "head starts at head.sigma_init, not at 1. There is no class-balanced fine-tuning.",
    )

    def __init__(
        self,
        lambda_base: float | None = None,
        K: int | None = None,
        margin: float = 0.5,
        margin_weight: float = 1.0,
        freeze_old: bool = True,
        **replay: Unpack[ReplayOptions],
    ) -> None:
        super().__init__(**replay)
        if min(lambda_base or 0, margin, margin_weight) < 0:
            raise ConfigError(
                f"{self.title}: lambda_base ({lambda_base}), margin ({margin}) and margin_weight ({margin_weight}) "
                "must be at least 0"
            )
        if K is not None and K < 1:
            raise ConfigError(
                f"{self.title}: K is {K}, but it must be at least 1; margin_weight = 0 leaves the ranking out"
            )
        self.lambda_base, self.K, self.margin, self.margin_weight = lambda_base, K, margin, margin_weight
        self.freeze_old = freeze_old

    def build(self, model: Model) -> Model:
        if not isinstance(model.head, CosineHead):
            model.head = CosineHead(model.encoder.width)
        return model

    def grow(self, task: Task) -> None:
        super().grow(task)
        for block in list(self.model.head.blocks)[:-1] if self.freeze_old else ():
            block.requires_grad_(False)

    def stages(self, task: Task) -> list[Stage]:
        (main,) = super().stages(task)
        if task.index:
            main.prepare = lambda: self.imprint(task)
        return [main]

    def loss(self, batch: Batch) -> Loss:
        both = self.with_replay(batch)
        out: Output = self.model(both)
        return self.cross_entropy(out.logits, both, len(batch)) | self.hold(out, both, len(batch))

    def hold(self, out: Output, both: Batch, new_rows: int) -> dict[str, Tensor]:
        """The terms that preserve the old classes, from the second task on."""
        terms: dict[str, Tensor] = {}
        if self.teacher is None:
            return terms
        old, new, background = self.now.known, self.now.seen - self.now.known, self.stream.background
        tokens = background is not None
        lambda_base = (50.0 if tokens else 5.0) if self.lambda_base is None else self.lambda_base
        held = self.labels(both) == background if tokens else slice(None)
        features, means = out.features[held], self.count_means(both, new_rows)
        if lambda_base and len(features):
            # lambda (1 - cos(h, h')), lambda = lambda_base sqrt(O / N)
            before = self.infer([both], self.teacher).features[held]
            terms["feature"] = means * lambda_base * math.sqrt(old / new) * feature_cosine(features, before)
        if self.margin_weight:
            head = self.model.head
            assert isinstance(head, CosineHead)
            k = self.K or (1 if tokens else 2)
            ranking = margin_ranking(out.logits / head.sigma, both.targets, old, k=k, margin=self.margin)
            terms["margin"] = means * self.margin_weight * ranking
        return terms
