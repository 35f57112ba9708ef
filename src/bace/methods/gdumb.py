"""GDumb: greedy sampler and dumb learner. Prabhu, Torr, Dokania, "GDumb: A Simple Approach that Questions Our Progress
in Continual Learning", ECCV 2020."""

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bace.core.method import Card, Method, Passes
from bace.core.stage import Stage
from bace.core.stream import Task
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.models.model import Model


class GDumb(Method):
    """Keep only a class-balanced memory; after each task, train the pre-trained network on the memory alone.

    Args:
        passes: passes over the memory after each task. With 500 examples, 128 passes cost as much as five epochs of
            12,800 examples. A power of two ends with a complete cycle of the learning rate.
        batch: examples per step.
        cutmix: probability that CutMix mixes the images of a step; never used for texts and tokens.
    """

    title = "GDumb"
    paper = "Prabhu et al., GDumb: A Simple Approach that Questions Our Progress in Continual Learning, 2020"
    uses_memory = True
    growing_head = False  # no head outlives its task
    takes_known = True
    by_class = ("present",)
    card = Card(
        mechanism="greedy balanced memory; a new model trained on the memory alone",
        o_rows="O is learned as class 0 with cross-entropy; a sentence counts for the rarest entity type it shows",
        stages=("memory",),
        reading="The model is trained after every task, from the pre-trained weights, with the run's learning rate "
        "and the original's schedule. It makes half of the original's 256 passes, because it does not start from "
        "scratch.",
    )

    present: Tensor  # (seen,) bool: classes that have an example in memory

    def __init__(self, passes: int = 128, batch: int = 16, cutmix: float = 0.5) -> None:
        super().__init__()
        if min(passes, batch) < 1:
            raise ConfigError(f"GDumb: passes ({passes}) and batch ({batch}) must be at least 1")
        if not 0 <= cutmix <= 1:
            raise ConfigError(f"GDumb: cutmix is {cutmix}, but it must lie between 0 and 1")
        self.passes, self.batch, self.cutmix = passes, batch, cutmix
        self.own_batch = batch
        self.cost = Passes(0, memory=3 * passes)
        self.register_buffer("present", torch.zeros(0, dtype=torch.bool))

    def build(self, model: Model) -> Model:
        if not (self.memory.size or self.memory.per_class):
            raise ConfigError("GDumb learns only from its memory, which is 0: set memory.size or memory.per_class")
        return super().build(model)

    def grow(self, task: Task) -> None:
        self.start_over(task)

    def stages(self, task: Task) -> list[Stage]:
        train = self.stage(
            task,
            name="memory",
            epochs=self.passes,
            batch_size=self.batch,
            examples=lambda: self.memory.examples.sort().values,  # independent of the order of arrival
            schedule=warm_restarts,
            prepare=lambda: self.remember(task),
        )
        return [train]

    def remember(self, task: Task) -> None:
        """Offer the task's examples one by one, in a random order."""
        order = task.train[torch.randperm(len(task.train), generator=self.now.rng("arrival"))]
        group = self.stream.group_of(order)
        shown = group >= 0  # sentences without an entity belong to no type
        self.memory.offer_greedy(order[shown], task.index, group[shown], self.now.rng("leaves"))
        self.present = torch.zeros(task.classes.stop, dtype=torch.bool, device=self.present.device)
        self.present[self.stream.labels(self.memory.examples)[1]] = True

    def after_task(self, task: Task) -> None:
        """The memory was filled before training."""

    def loss(self, batch: Batch) -> Tensor:
        """CE over the classes in memory; after CutMix lam CE(z, y) + (1 - lam) CE(z, y of the partner)."""
        rng, key = self.now.rng("cutmix"), self.stream.modality.picture_input
        if key is None or float(torch.rand((), generator=rng)) >= self.cutmix:
            return F.cross_entropy(self.scores(batch), batch.targets)
        pixels, partner, lam = cutmix(batch.inputs[key], rng)
        scores = self.scores(dataclasses.replace(batch, inputs={**batch.inputs, key: pixels}))
        targets = batch.targets
        return lam * F.cross_entropy(scores, targets) + (1 - lam) * F.cross_entropy(scores, targets[partner])

    def predict(self, batch: Batch, scorer: str | None = None) -> Tensor:
        with torch.inference_mode():
            return self.scores(batch)

    def scores(self, batch: Batch) -> Tensor:  # (rows, seen)
        """A class without an example in memory cannot be learned: it takes no part in the soft-max."""
        logits: Tensor = self.model(batch).logits
        return logits.masked_fill(~self.present, -math.inf)


def warm_restarts(epochs: float) -> float:
    """Factor of the learning rate: 0.1 in the first pass, then a cosine from 1 to 0.01 over 1, 2, 4, 8, ... passes."""
    whole = int(epochs)
    if whole == 0:
        return 0.1
    length = 1 << (whole.bit_length() - 1)  # the cycle that starts at pass 2^k is 2^k passes long
    return 0.01 + 0.99 * (1 + math.cos(math.pi * (whole - length) / length)) / 2


def cutmix(
    pixels: Tensor,  # (images, channels, height, width)
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, float]:  # the mixed images, (images,) their partners, the share that is still their own
    """CutMix (Yun et al., ICCV 2019): a box of each image's partner is pasted into it, the same box for all images."""
    height, width = pixels.shape[-2:]
    share, row, column = torch.rand(3, generator=generator).tolist()  # Beta(1, 1) is uniform
    tall, wide = int(height * math.sqrt(1 - share)), int(width * math.sqrt(1 - share))
    top, left = int(row * height) - tall // 2, int(column * width) - wide // 2
    inside = torch.zeros(height, width, dtype=torch.bool)
    inside[max(top, 0) : top + tall, max(left, 0) : left + wide] = True  # what lies outside the image is cut off
    own = 1 - float(inside.double().mean())
    partner = torch.randperm(len(pixels), generator=generator).to(pixels.device)
    return torch.where(inside.to(pixels.device), pixels[partner], pixels), partner, own
