"""The parts of a method (its network, stream and memory) and the tools that many methods use on them.

The hooks, which a method overrides, are in method.py. A few of the tools may be overridden, too: which examples a task
is learned from, and which of them are remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ClassVar

import torch
from torch import Tensor

from bace.config.schema import Training
from bace.core.memory import ElasticBuffers, Memory, herd
from bace.core.position import Position
from bace.core.stream import Stream, Task
from bace.core.task_features import TaskFeatures
from bace.data.batch import Batch
from bace.models.heads import imprint
from bace.models.model import Model, Output
from bace.randomness import generator


class Toolbox(ElasticBuffers):
    """The parts of a method that the run attaches, and the tools that work on them."""

    uses_memory: ClassVar[bool] = False
    learns_o: ClassVar[bool] = True  # words labelled O in later tasks are learned as class 0, not from a teacher

    model: Model
    teacher: Model | None
    memory: Memory
    stream: Stream
    now: Position
    training_settings: Training
    fresh_model: Callable[[], Model]  # a new model with the pre-trained weights

    def __init__(self) -> None:
        super().__init__()
        self.task_features = TaskFeatures()

    def training_examples(self, task: Task) -> Tensor:  # (examples,)
        """The task's examples that are used for training."""
        return task.train

    @property
    def batch_size(self) -> int:
        return self.training_settings.batch_size

    @property
    def replay_size(self) -> int:
        """The number of examples in a batch that come from memory, 0 while it is empty (docs/bace.md 1.6)."""
        return self.replay_share if self.uses_memory and len(self.memory) else 0

    @property
    def replay_share(self) -> int:
        """This number once the memory is not empty."""
        ratio = self.training_settings.replay_ratio
        wanted = max(round(self.batch_size * ratio), 1) if ratio else 0
        return min(wanted, self.batch_size - 1)  # at least one new example per step

    def replay(self, draw: int = 1) -> Batch | None:
        """A batch drawn uniformly, with replacement, from memory; None while it is empty."""
        if not self.replay_size:
            return None
        return self.stream.batch(self.memory.examples[self.replayed_slots(draw)], view=self.replay_view(draw))

    def replay_view(self, draw: int = 1) -> int:
        """The key of the view in which a draw from memory is shown."""
        return self.now.view(0 if self.replay_repeats else draw)

    @property
    def replay_repeats(self) -> bool:
        """Whether all steps of an epoch show a remembered example in the same view."""
        return self.training_settings.buffer_view != "fresh" or not self.stream.data.random_views

    def replayed_slots(self, draw: int = 1) -> Tensor:  # (replay_size,) slots
        """The slots that `replay(draw)` draws at this step."""
        return self.memory.draw(self.replay_size, self.now.rng(f"memory {draw}"))

    def labels(self, batch: Batch) -> Tensor:  # (rows,) class ids, on the CPU
        """The classes of a batch's rows, read from the stream. Unlike `batch.targets`, they can be read without waiting
        for the device."""
        return self.stream.targets[batch.rows]

    def labelled(self, labels: Tensor, new: int) -> Tensor:  # (rows,) class ids -> (rows,) bool, both on the CPU
        """Which rows are learned from their labels, where the first `new` rows are new and the others are replayed.
        After the first task, words labelled O may hide entities of other tasks. A method that leaves them to its
        teacher (`learns_o = False`) leaves them out in new sentences and, with `train.replay_o=distil`, in replayed
        ones. All other rows are learned."""
        rows = torch.ones(len(labels), dtype=torch.bool)
        if self.stream.background is not None and self.now.known and not self.learns_o:
            taught = len(labels) if self.training_settings.replay_o == "distil" else new
            rows[:taught] = labels[:taught] != self.stream.background
        return rows

    def remember(self, task: Task) -> None:
        """Refill the memory at the end of a task, within its budget."""
        if self.memory.size or self.memory.per_class:
            quota = self.quota(task)
            # for a known class with more examples, the selection is repeated over these and the old ones
            again = torch.isin(self.memory.group, self.stream.group_of(task.train))
            chosen = self.choose(torch.cat([task.train, self.memory.examples[again]]), task, max(quota, 1))
            self.memory.keep(torch.nonzero(~again).flatten())
            self.memory.fill(chosen, task.index, quota, generator(self.now.seed, "missing", task.index))

    def quota(self, task: Task) -> int:
        """The number of memory slots for each class (entity type) known by the end of this task."""
        groups = self.stream.groups[: task.classes.stop]
        return self.memory.quota(len(set(groups.tolist()) - {-1}))

    def choose(self, examples: Tensor, task: Task, count: int) -> dict[int, Tensor]:
        """Select up to `count` of these examples for each group, in order of preference: by herding on the student's
        clean features, or at random. Sentences are selected at random, each for one of the entity types it shows."""
        chosen: dict[int, Tensor] = {}
        groups = self.stream.by_group(examples)
        if groups and self.memory.select == "herding" and self.stream.one_row:  # an example is of one group
            features, at = self.herding_features(examples), torch.empty(len(self.stream.data), dtype=torch.int64)
            at[examples] = torch.arange(len(examples))
            return {group: members[herd(features[at[members]], count)] for group, members in groups.items()}
        taken = torch.zeros(len(self.stream.data), dtype=torch.bool)
        for group, members in groups.items():
            free = members[~taken[members]]
            order = torch.randperm(len(free), generator=generator(self.now.seed, "keep", task.index, group))
            chosen[group] = free[order[:count]]
            taken[chosen[group]] = True
        return chosen

    def herding_features(self, examples: Tensor) -> Tensor:  # (examples, width)
        """The features that herding uses."""
        return self.outputs(examples, logits=False).features

    def imprint(self, task: Task) -> None:
        """Set the task's head rows to the mean features of their classes."""
        head, trained = self.model.head, self.training_examples(task)
        features, targets = self.outputs(trained, logits=False).features, self.stream.labels(trained)[1]
        head.imprint(imprint(features, targets, task.classes, head.weight.detach()[: task.classes.start]))

    def memories(self) -> list[Memory]:
        return [module for module in self.modules() if isinstance(module, Memory)]

    def remembered(self) -> Tensor:
        """Ids of all examples in memory."""
        return torch.cat([memory.examples for memory in self.memories()])

    def outputs(
        self, examples: Tensor, model: Model | None = None, *, view: int | None = None, logits: bool = True
    ) -> Output:
        """Features and logits of all rows of these examples, on the network's device (see `infer`). Where only features
        are read, `logits=False` saves the memory of the logits. Of the task's training examples, in their clean view,
        the features are kept (`TaskFeatures`)."""
        shared = view is None and model in (None, self.model)
        rows = self.stream.rows_of(examples)[0]
        if shared and (features := self.task_features.find(self.model, self.stream, rows)) is not None:
            self.stream.check(examples)
            with torch.no_grad():
                return Output(features, self.model.head(features) if logits else features[:, :0])
        parts, in_order = self.stream.bucketed(examples, self.training_settings.eval_batch_size)
        out = self.infer((self.stream.batch(part, view=view) for part in parts), model, logits=logits)
        found = Output(in_order(out.features), in_order(out.logits))
        if shared and torch.equal(examples, self.stream[self.now.task].train):
            self.task_features.keep(self.model, self.stream, rows, found.features)
        return found

    def scored(self, examples: Tensor) -> tuple[Tensor, Tensor]:  # (rows, classes) logits, (rows,) class ids
        """The network's logits of all rows of these examples, and their classes, on the same device."""
        logits = self.outputs(examples).logits
        return logits, self.stream.labels(examples)[1].to(logits.device)

    def infer(
        self, batches: Iterable[Batch], model: Model | None = None, *, taps: bool = False, logits: bool = True
    ) -> Output:
        """Features, logits (unless they are left out: then there are 0 columns) and taps (for texts, only with batches
        of one length), without gradient and in eval mode. A model in train mode is put back into train mode."""
        model = model or self.model
        was_training = model.training
        if was_training:
            model.eval()
        with torch.inference_mode():
            passed = (model(batch, taps=taps) for batch in batches)
            kept = (out if logits else out._replace(logits=out.features[:, :0]) for out in passed)
            features, scores, tapped, *_ = zip(*kept, strict=True)
        if was_training:
            model.train()
        # concatenating outside inference mode gives ordinary tensors, which a loss may use
        return Output(torch.cat(features), torch.cat(scores), tuple(map(torch.cat, zip(*tapped, strict=True))))
