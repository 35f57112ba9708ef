"""PODNet: Douillard, Cord, Ollion, Robert, Valle, "PODNet: Pooled Outputs Distillation for Small-Tasks Incremental
Learning", ECCV 2020."""

import math
from typing import Literal, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from bace.core.method import Card, Passes
from bace.core.stage import Loss, Stage
from bace.core.stream import Task
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.er import ER
from bace.methods.parts.losses import feature_cosine, nca, pooled_distance
from bace.methods.parts.replay import ReplayOptions
from bace.models.heads import CosineHead, ProxyHead, imprint, kmeans
from bace.models.image_encoder import ImageEncoder
from bace.models.model import Model, Output
from bace.randomness import generator


class PODNet(ER):
    """Distil the output of every block, pooled along each axis, and the direction of the feature. Classify by several
    proxies per class, and tune them on the class-balanced memory at the end of a task.

    Args:
        lambda_flat: weight of the feature's direction, times sqrt(seen classes / new classes); 0 leaves it out.
        lambda_spatial: weight of the pooled outputs of the blocks, times the same factor; 0 leaves them out.
        proxies: head rows of each class.
        margin: margin of the classification loss. `as_code`: as the published code computes it, where the margin
            cancels out; `intended`: as the paper writes it.
        delta: the intended margin, between similarities (2 cos - 2).
        tune_epochs: epochs of the classifier on the balanced memory; 0 leaves them out.
        tune_lr: learning rate of the classifier on the balanced memory.
    """

    title = "PODNet"
    paper = "Douillard et al., PODNet: Pooled Outputs Distillation for Small-Tasks Incremental Learning, ECCV 2020"
    takes_o = False
    keeps_teacher = True
    # Student and teacher start equal, and there the norm of their difference has a kink: the rounding of a batch that
    # is read in parts determines the gradient.
    whole_batches = True
    scorers = ("nme",)
    by_class = ("means",)
    card = Card(
        mechanism="pooled distillation of all blocks; multi-proxy cosine head, tuned on the balanced memory; replay",
        o_rows="refused: the block outputs of a sentence belong to old and to new entities",
        stages=("main", "classifier"),
        replay="concat",
        reading="The similarity to a proxy is 2 cos - 2 (the negative squared distance of unit vectors), in the "
        "attention and in the score, as in the code. For images, the map of patch tokens is pooled without the class "
        "token. For texts, outputs are pooled over tokens and over channels, without padding. The second stage has no "
        "distillation, which would not affect a fixed encoder, and it also trains old proxies. The scorer nme is the "
        "nearest mean of exemplars.",
    )

    def __init__(
        self,
        lambda_flat: float = 1.0,
        lambda_spatial: float = 3.0,
        proxies: int = 10,
        margin: Literal["as_code", "intended"] = "as_code",
        delta: float = 0.6,
        tune_epochs: int = 20,
        tune_lr: float = 0.05,
        **replay: Unpack[ReplayOptions],
    ) -> None:
        super().__init__(**replay)
        if min(lambda_flat, lambda_spatial, delta, tune_epochs, tune_lr) < 0:
            raise ConfigError(
                f"PODNet: lambda_flat ({lambda_flat}), lambda_spatial ({lambda_spatial}), delta ({delta}), tune_epochs "
                f"({tune_epochs}) and tune_lr ({tune_lr}) must be at least 0"
            )
        if proxies < 1:
            raise ConfigError(f"PODNet: proxies is {proxies}, but each class needs at least 1")
        self.lambda_flat, self.lambda_spatial, self.proxies = lambda_flat, lambda_spatial, proxies
        self.margin, self.delta, self.tune_epochs, self.tune_lr = margin, delta, tune_epochs, tune_lr
        self.cost = Passes(4, 4, task=2, memory=1 + tune_epochs)
        self.means: Tensor  # (classes, width) unit means of the exemplars' unit features
        self.register_buffer("means", torch.zeros(0, 0))

    def build(self, model: Model) -> Model:
        sigma = model.head.sigma if isinstance(model.head, CosineHead) else CosineHead(0).sigma
        model.head = ProxyHead(model.encoder.width, self.proxies, sigma.item(), sigma.requires_grad)
        return model

    def grow(self, task: Task) -> None:
        super().grow(task)
        for block in list(self.model.head.blocks)[:-1]:
            block.requires_grad_(False)

    def imprint(self, task: Task) -> None:
        """New proxies are the centres of clusters of their class's unit features, at the mean norm of the old ones."""
        head, trained = self.model.head, self.training_examples(task)
        features, targets = self.outputs(trained, logits=False).features, self.stream.labels(trained)[1]
        unit = F.normalize(features, dim=-1).cpu()  # where k-means draws
        old = head.weight.detach().cpu()[: -len(head.blocks[-1])]
        norm = old.norm(dim=1).mean() if len(old) else torch.tensor(1.0)
        names = ((c, generator(self.now.seed, "proxies", task.index, c)) for c in task.classes)
        rows = torch.cat([kmeans(unit[targets == c], self.proxies, rng) for c, rng in names])
        head.imprint(F.normalize(rows, dim=-1) * norm)

    def stages(self, task: Task) -> list[Stage]:
        (main,) = super().stages(task)
        if task.index:
            main.prepare = lambda: self.imprint(task)
        if not self.tunes(task):
            return [main]
        tune = self.stage(
            task,
            name="classifier",
            loss=self.tuning_loss,
            epochs=self.tune_epochs,
            batch_size=self.batch_size,
            examples=lambda: self.memory.examples,
            module=lambda: self.model.head,
            groups=lambda: {"head": self.model.head.blocks},
            lr=self.tune_lr,
            optimiser="sgd",
            momentum=0.9,
            schedule=lambda epochs: 1.0,
            structure=lambda: self.model.head.blocks.requires_grad_(True),
            prepare=lambda: self.remember(task),
        )
        return [main, tune]

    def tunes(self, task: Task) -> bool:
        return task.index > 0 and self.tune_epochs > 0 and bool(self.memory.size or self.memory.per_class)

    # -- losses

    def loss(self, batch: Batch) -> Loss:
        both = self.with_replay(batch)
        tapped = self.teacher is not None and self.lambda_spatial > 0
        out: Output = self.model(both, taps=tapped)
        terms = self.cross_entropy(out.logits, both, len(batch))
        if self.teacher is None or not (self.lambda_flat or self.lambda_spatial):
            return terms
        before = self.infer([both], self.teacher, taps=tapped)
        grown = math.sqrt(self.now.seen / (self.now.seen - self.now.known))
        factor = self.count_means(both, len(batch)) * grown
        if self.lambda_flat:
            terms["flat"] = self.lambda_flat * factor * feature_cosine(out.features, before.features)
        if self.lambda_spatial:
            pairs = zip(out.taps, before.taps, strict=True)
            layers = [pooled_distance(self.pool(a, both), self.pool(b, both)) for a, b in pairs]
            terms["spatial"] = self.lambda_spatial * factor * torch.stack(layers).mean()
        return terms

    def criterion(self, logits: Tensor, targets: Tensor) -> Tensor:
        head = self.model.head
        assert isinstance(head, ProxyHead)
        return nca(logits, targets, None if self.margin == "as_code" else head.sigma * self.delta)

    def pool(self, tap: Tensor, batch: Batch) -> Tensor:  # (examples, tokens, width) -> (examples, any)
        """Squares, summed over each of the last two axes: height and width of an image's map, or tokens and channels of
        a text."""
        encoder = self.model.encoder
        if isinstance(encoder, ImageEncoder):
            squares = encoder.patch_map(tap, batch.inputs).square()  # (examples, channels, height, width)
        else:
            mask = batch.inputs.get("attention_mask")
            squares = tap.square() * (1 if mask is None else mask[:, :, None])  # (examples, tokens, channels)
        return torch.cat([squares.sum(-1).flatten(1), squares.sum(-2).flatten(1)], 1)

    def tuning_loss(self, batch: Batch) -> Tensor:
        return self.criterion(self.model.head(self.infer([batch]).features), batch.targets)

    # -- exemplars

    def after_task(self, task: Task) -> None:
        if not self.tunes(task):  # otherwise the memory was already refilled with the current encoder
            super().after_task(task)
        kept, nothing = self.memory.examples, torch.zeros(0, self.model.encoder.width, device=self.stream.device)
        features = self.outputs(kept, logits=False).features if len(kept) else nothing
        self.means = imprint(features, self.stream.labels(kept)[1], range(task.classes.stop), nothing)

    def predict(self, batch: Batch, scorer: str | None = None) -> Tensor:
        with torch.inference_mode():
            out: Output = self.model(batch)
            return out.logits if scorer is None else F.normalize(out.features, dim=1) @ self.means.T
