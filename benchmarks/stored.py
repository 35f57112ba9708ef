"""Runs whose encoder hands on stored features, so that all that they take is the library's own work."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bace.config.schema import Backbone, Checkpoints, Config, HeadSettings, Measures, MemoryBudget, Training
from bace.core.memory import Memory
from bace.core.position import Position
from bace.core.stream import Stream, Task
from bace.core.trainer import Trainer
from bace.data.batch import NO_IDS, View
from bace.data.modality import Modality
from bace.methods import find_method
from bace.models.encoder import Encoder, PassCounter
from bace.models.heads import CosineHead
from bace.models.model import Model
from bace.randomness import generator


class Feature(Modality):
    name, plural, encoder, own_data = "feature", "features", "feature", ""


class Features:
    """Features around the centres of their classes, made when they are asked for: those of ImageNet would take 4 GB."""

    modality: Modality = Feature()
    row_start = positions = lengths = None  # one row per example
    random_views = True  # like those of ImageNet's images, so BaCE's teacher passes replayed examples at every step

    def __init__(self, targets: Tensor, classes: int, width: int) -> None:
        rng = torch.Generator().manual_seed(0)
        self.targets = targets
        self.centres, self.noise = torch.randn(classes, width, generator=rng), torch.randn(8192, width, generator=rng)

    def __len__(self) -> int:
        return len(self.targets)

    def inputs(self, examples: Tensor, view: View, device: torch.device) -> dict[str, Tensor]:
        return {"feature": self.centres[self.targets[examples]] + self.noise[examples % len(self.noise)]}

    def take(self, examples: Tensor) -> dict[str, Tensor]:
        raise NotImplementedError  # only a Learner calls this

    def prepend(self, kept: dict[str, Tensor]) -> None:
        raise NotImplementedError


class Stored(Encoder):
    """Hands features on as they are."""

    def __init__(self, width: int) -> None:
        nn.Module.__init__(self)
        self.embeddings, self.blocks, self.norm = nn.Identity(), nn.ModuleList(), nn.Identity()
        self.width, self.passes, self.frozen, self.cache = width, PassCounter(), None, None

    def embed(self, inputs: dict[str, Tensor]) -> tuple[Tensor, None]:
        return inputs["feature"][:, None], None


@dataclass(frozen=True)
class Size:
    """A run of equal tasks. Half of each batch is replayed, as by default."""

    classes: int
    tasks: int
    train: int  # examples per class
    test: int
    memory: int
    width: int
    batch: int = 512
    epochs: int = 5

    @property
    def examples(self) -> int:
        return self.classes * self.train

    @property
    def steps(self) -> int:
        """Of an epoch of all tasks."""
        return self.examples // (self.batch // 2)

    def stream(self) -> Stream:
        targets = torch.cat([torch.arange(self.classes).repeat_interleave(count) for count in (self.train, self.test)])
        train, test = torch.arange(len(targets)).split([self.examples, self.classes * self.test])
        own = self.classes // self.tasks
        parts = enumerate(zip(train.split(own * self.train), test.split(own * self.test), strict=True))
        made = [Task(t, f"task {t + 1}", range(t * own, (t + 1) * own), a, NO_IDS, b) for t, (a, b) in parts]
        names = [f"class {c}" for c in range(self.classes)]
        return Stream(Features(targets, self.classes, self.width), targets, made, names)

    def last_task(self, name: str, encoder: Encoder | None = None, **settings: Any) -> Trainer:
        """A method at the start of the last task, with the first examples of each old class in its memory."""
        stream, encoder = self.stream(), encoder or Stored(self.width)
        training = Training(epochs=self.epochs, batch_size=self.batch, threads=1)
        others = (Backbone(), HeadSettings(), MemoryBudget(self.memory), training, Measures(fwt=False), Checkpoints())
        method = find_method(name)(**settings)
        method.stream, method.training_settings, method.now = stream, training, Position(0)
        method.memory = Memory(self.memory)
        method.model = method.build(Model(encoder, CosineHead(encoder.width)))
        for task in stream[:-1]:
            method.model.head.grow(len(task.classes), generator("head", task.index))
            for examples in task.train.split(self.train):
                kept = examples[: self.memory // stream[-1].classes.start]
                method.memory.add(kept, task.index, stream.targets[kept])
        trainer = Trainer(method, stream, Config({"name": "features"}, {"name": name}, *others))
        trainer.enter(stream[-1])
        method.grow(stream[-1])
        return trainer
