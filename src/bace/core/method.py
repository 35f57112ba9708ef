"""The base class of methods. A method overrides only what differs from plain fine-tuning."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, cast, get_args, get_type_hints

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bace.config.schema import OptimiserName, Training
from bace.core.memory import ElasticBuffers, Memory, herd
from bace.core.position import Position
from bace.core.stream import Stream, Task
from bace.data.batch import Batch
from bace.data.modalities import MODALITIES
from bace.models.heads import Head, imprint
from bace.models.model import Model, Output, frozen_copy, parameter_count
from bace.randomness import generator

Loss = Tensor | dict[str, Tensor] | None


@dataclass
class Stage:
    """One stage of training. `examples` and `groups` are called after `prepare`, so they may be decided late.

    On resume, `Method.stages` creates the stages again: `structure` (modules and buffers of the right shape, without
    values) is replayed, but `prepare` (values) runs only once.
    """

    name: str
    loss: Callable[[Batch], Loss]
    epochs: int
    batch_size: int
    examples: Callable[[], Tensor]  # ids
    module: Callable[[], nn.Module]  # is trained and in train mode; everything else is in eval mode
    # the optimised parameters by group; the other parameters of the module get no gradient meanwhile. Default: all
    # parameters of the module, in the groups that its modules name (`optimiser_group`)
    groups: Callable[[], Mapping[str, Iterable[nn.Parameter]]] | None = None
    # the ids of an epoch in order, as many as `examples`; default: each once, shuffled
    sampler: Callable[[torch.Generator], Tensor] | None = None
    augment: bool = True  # random views; otherwise clean ones
    cached: bool = False  # the loss takes outputs that before_epoch keeps: its batches come without inputs
    optimise: bool = True  # False: a stage without gradients
    min_steps: int = 0  # the epochs are raised until there are at least so many optimiser steps
    lr: float | None = None  # default: the run's, as for the optimiser, momentum, weight decay, clip and schedule
    rates: Mapping[str, float] = field(default_factory=dict)  # learning rates of groups that have their own
    optimiser: OptimiserName | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    clip: float | None = None
    schedule: Callable[[float], float] | None = None  # epochs so far (may be fractional) -> factor of the learning rate
    structure: Callable[[], None] | None = None
    prepare: Callable[[], None] | None = None


@dataclass(frozen=True)
class Passes:
    """The cost of a task after the first in passes through an encoder: forward counts one, forward and backward three.

    It is declared once for docs/methods.md and the estimates of `bace paper`; tests/test_cost.py compares it with runs.
    """

    new: float = 3.0  # for each example of the task, in every epoch
    replayed: float = 0.0  # for each replayed example, in every epoch
    task: float = 0.0  # for each example of the task, once: herding and other statistics
    memory: float = 0.0  # for each example in memory, once
    epochs: int | None = None  # epochs for `new` and `replayed`; default: the run's epochs


@dataclass(frozen=True)
class Card:
    """What docs/methods.md says about a method in addition to its code."""

    mechanism: str
    o_rows: str  # entities: how words labelled O are treated, or why the method refuses tokens
    stages: tuple[str, ...] = ("main",)  # the stages of a task after the first
    replay: Literal["", "batch", "concat"] = ""  # the `mode` of replay in which the authors published it
    reading: str = ""  # what was decided where the originals disagree or are silent
    besides: str = ""  # costs that `Method.cost` does not include


class _Modalities:
    """Names of all modalities, those registered later too; without those that have a background class if the method has
    no place for one."""

    def __get__(self, _: object, method: type[Method]) -> AbstractSet[str]:
        return {name for name, known in MODALITIES.items() if method.takes_o or known.background is None}


class Method(ElasticBuffers):
    """The hooks, in the order in which the trainer calls them; the defaults are plain fine-tuning.

    The annotated parameters of the constructor define the hyper-parameters, the command-line flags, the YAML keys and
    the documentation; the run attaches everything else. Whatever must survive a step is a parameter or buffer (buffers
    may change shape), so that it is in every checkpoint.
    """

    title: ClassVar[str]  # the paper's name for it; default: the name of the class
    paper: ClassVar[str] = ""
    card: ClassVar[Card | None] = None
    takes_o: ClassVar[bool] = True  # has a place for a class that hides others: O, of entities
    modalities: ClassVar[AbstractSet[str]] = cast(Any, _Modalities())  # by name; a method may list its own instead
    uses_memory: ClassVar[bool] = False
    licence: ClassVar[Literal["task", "past"]] = "task"  # "past": may read all earlier training data; logged
    growing_head: ClassVar[bool] = True  # one head with one row per class, so forward transfer can be measured
    takes_known: bool = False  # learns more examples of known classes; not inherited, for a loss may differ
    one_encoder: ClassVar[bool] = True  # all features are in one space, so studies can compare them
    learns_o: ClassVar[bool] = True  # entities: words labelled O in a later task's sentences are learned as class 0
    keeps_teacher: bool = False  # from the second task on, `teacher` is the network after the last task
    # networks of the encoder's size, kept while a later task is learned; without those of `keeps_teacher` and `expands`
    networks: ClassVar[int] = 1
    expands: ClassVar[bool] = False  # every task adds a network
    cost: Passes = Passes()
    # why `bace export` refuses it: its prediction is more than a function of one example
    not_exportable: ClassVar[str | None] = None
    whole_batches: ClassVar[bool] = False  # a batch that is read in parts (train.accumulate) would not give the same
    scorers: ClassVar[tuple[str, ...]] = ()  # other prediction rules, by name; each is evaluated beside the main one

    model: Model
    teacher: Model | None
    memory: Memory
    stream: Stream
    now: Position
    training_settings: Training
    fresh_model: Callable[[], Model]  # a new model with the pre-trained weights

    def __init__(self) -> None:
        super().__init__()
        self.teacher = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "title" not in vars(cls):
            cls.title = cls.__name__
        if "takes_known" not in vars(cls):
            cls.takes_known = False

    # -- hooks

    def build(self, model: Model) -> Model:
        """Called once, before the first task: replace the head, add adapters or prompts, register buffers."""
        return model

    def before_task(self, task: Task) -> None:
        """Called before the network grows; it is still the one after the last task."""

    def grow(self, task: Task) -> None:
        """Create what the task needs: head rows, and teachers as a copy of the network before it grows.

        On resume it is replayed to create the shapes, into which the saved values are loaded. It must depend only on
        the task and the shapes before it."""
        if self.keeps_teacher and task.index:
            self.teacher = frozen_copy(self.model)  # before the head grows: old classes only
        self.model.head.grow(len(task.classes), generator(self.now.seed, "head", task.index))

    def start_over(self, task: Task) -> None:
        """An alternative to growing: start from the pre-trained weights, with new head rows for all tasks up to this
        one."""
        self.model = self.build(self.fresh_model())
        for earlier in self.stream[: task.index + 1]:
            self.model.head.grow(len(earlier.classes), generator(self.now.seed, "head", earlier.index))

    def rebuild(self, tasks: Sequence[Task]) -> None:
        """Create the shapes after these tasks, up to the position of the run in the last one; values are loaded
        later."""
        now, current = self.now, self.now.task
        for task in tasks:
            last = task.index == current
            if last and now.phase == "begin":
                break
            now.show_task(task)
            self.grow(task)
            stages = self.stages(task)
            for stage in stages[: now.stages_done + now.prepared] if last and now.phase == "train" else stages:
                if stage.structure:
                    stage.structure()
            if not last or now.phase in ("evaluate", "end"):
                self.shrink(task)
        now.task = current

    def stages(self, task: Task) -> list[Stage]:
        return [self.stage(task)]

    def before_epoch(self, stage: Stage) -> None:
        """Compute tables and teacher outputs of an epoch. It runs again on resume, so it must be idempotent."""

    def expand(self, batch: Batch) -> Iterable[Batch]:
        """Turn one batch into several, with one optimiser step each."""
        return (batch,)

    def loss(self, batch: Batch) -> Loss:
        """A number, or named terms, which are summed and logged. None or no terms: a step without gradient."""
        return F.cross_entropy(self.model(batch).logits, batch.targets)

    def before_step(self, batch: Batch) -> None:
        """Called with gradients computed, before clipping and the optimiser's step."""

    def after_step(self, batch: Batch) -> None: ...

    def after_epoch(self, stage: Stage) -> None: ...

    def after_task(self, task: Task) -> None:
        if self.uses_memory:
            self.remember(task)

    def shrink(self, task: Task) -> None:
        """Drop modules that only the task's stages needed, so that no later checkpoint holds them.

        Called after `after_task` and, like `grow`, replayed on resume."""

    def predict(self, batch: Batch, scorer: str | None = None) -> Tensor:  # (rows, seen)
        """Scores of all classes seen so far, by the method's own rule or one of its `scorers`. The method chooses its
        own grad mode."""
        with torch.inference_mode():
            out: Output = self.model(batch)
        return out.logits

    def evaluated(self, task: Task) -> Tensor:  # (examples,) ids
        """The test examples of a task that are evaluated: all of them, unless predictions take too long. If it is a
        sample, metrics.json says so."""
        return task.test

    def prediction_cost(self, examples: int) -> str | None:
        """A sentence about the cost of predicting this many examples, if it is far more than one pass each. It is
        printed before the evaluation starts."""
        return None

    def validation_loss(self, examples: Tensor) -> float | None:
        """The loss that early stopping watches, on clean views; None: the stage is never stopped early."""
        return float(F.cross_entropy(self.outputs(examples).logits, self.stream.labels(examples)[1]))

    def needs(self, task: int) -> tuple[int, int]:
        """The number of parameters kept, and of those trained at the same time, while task `task` (from 0) is learned.
        The run prints the memory that they need and is refused if it cannot fit. Heads are too small to count."""
        encoder = self.model.encoder
        networks = self.networks + (self.keeps_teacher and task > 0) + self.expands * task
        return parameter_count(encoder) * networks, parameter_count(encoder, trained_only=True)

    # -- forward transfer: a task that is not yet learned, scored by the method's own rule (evaluation.transfer)

    def transfer_model(self) -> Model:
        """The network that predicts. Its features are scored with a copy of its head that grows by the task's
        classes."""
        return self.model

    def transfer_rows(self, task: Task) -> Tensor:  # (classes of the task, width)
        """The head rows of these classes, imprinted from the task's training examples."""
        model = self.transfer_model()
        features, targets = self.outputs(task.train, model).features, self.stream.labels(task.train)[1]
        return imprint(features, targets, task.classes, model.head.weight.detach().cpu())

    def transfer_scores(self, features: Tensor, head: Head) -> Tensor:  # (rows, width) -> (rows, seen and new classes)
        """The scores that `predict` would give to these features if `head`, the grown one, were the network's."""
        logits: Tensor = head(features)
        return logits

    # -- for studies (docs/studies.md)

    def report(self) -> dict[str, float]:
        """A few numbers that the method has learned by the end of a task, by name."""
        return {}

    # -- building blocks of methods

    def stage(self, task: Task, **changes: Any) -> Stage:
        """The default stage over the task's own examples; `changes` replace its fields."""
        fields: dict[str, Any] = {
            "name": "main",
            "loss": self.loss,
            "epochs": self.training_settings.epochs,
            "batch_size": self.batch_size - self.replay_size,
            "examples": lambda: self.training_examples(task),
            "module": lambda: self.model,
        }
        return Stage(**{**fields, **changes})

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
        fresh = self.training_settings.buffer_view == "fresh"
        return self.stream.batch(
            self.memory.examples[self.replayed_slots(draw)], view=self.now.view(draw if fresh else 0)
        )

    def replayed_slots(self, draw: int = 1) -> Tensor:  # (replay_size,) slots
        """The slots that `replay(draw)` draws at this step."""
        return self.memory.draw(self.replay_size, self.now.rng(f"memory {draw}"))

    def labelled(self, targets: Tensor, new: int) -> Tensor:  # (rows,) class ids -> (rows,) bool, on the CPU
        """Which rows are learned from their labels, where the first `new` rows are new and the others are replayed.
        After the first task, words labelled O may hide entities of other tasks: the method decides about them in new
        sentences (`learns_o`), and `train.replay_o` in replayed ones. All other rows are learned."""
        rows = torch.ones(len(targets), dtype=torch.bool)  # on the CPU, where counting them waits for nothing
        if self.stream.background is not None and self.now.known:
            entity = (targets != self.stream.background).cpu()
            if not self.learns_o:
                rows[:new] = entity[:new]
            if self.training_settings.replay_o == "distil":
                rows[new:] = entity[new:]
        return rows

    def remember(self, task: Task) -> None:
        """Refill the memory at the end of a task, within its budget."""
        if self.memory.size or self.memory.per_class:
            quota = self.quota(task)
            # a known class of which there are more examples is chosen again, from these and its old ones
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
        taken = torch.zeros(len(self.stream.data), dtype=torch.bool)
        for group, members in self.stream.by_group(examples).items():
            free = members[~taken[members]]
            if self.memory.select == "herding" and self.stream.one_row:
                order = herd(self.herding_features(free), count)
            else:
                order = torch.randperm(len(free), generator=generator(self.now.seed, "keep", task.index, group))
            chosen[group] = free[order[:count]]
            taken[chosen[group]] = True
        return chosen

    def herding_features(self, examples: Tensor) -> Tensor:  # (examples, width)
        """The features that herding uses."""
        return self.outputs(examples).features

    def imprint(self, task: Task) -> None:
        """Set the task's head rows to the mean features of their classes."""
        head, trained = self.model.head, self.training_examples(task)
        old_rows = head.weight.detach().cpu()[: task.classes.start]
        rows = imprint(self.outputs(trained).features, self.stream.labels(trained)[1], task.classes, old_rows)
        head.imprint(rows)

    def memories(self) -> list[Memory]:
        return [module for module in self.modules() if isinstance(module, Memory)]

    def remembered(self) -> Tensor:
        """Ids of all examples in memory."""
        return torch.cat([memory.examples for memory in self.memories()])

    def outputs(self, examples: Tensor, model: Model | None = None, *, view: int | None = None) -> Output:
        """Features and logits of all rows of these examples, on the CPU (see `infer`)."""
        out = self.outputs_on_device(examples, model, view=view)
        return Output(out.features.cpu(), out.logits.cpu())

    def outputs_on_device(self, examples: Tensor, model: Model | None = None, *, view: int | None = None) -> Output:
        """The same, where the network is: for tables that steps read."""
        parts, in_order = self.stream.bucketed(examples, self.training_settings.eval_batch_size)
        out = self.infer((self.stream.batch(part, view=view) for part in parts), model)
        return Output(in_order(out.features), in_order(out.logits))

    def infer(self, batches: Iterable[Batch], model: Model | None = None, *, taps: bool = False) -> Output:
        """Features, logits and taps (for texts, only with batches of one length), without gradient and in eval mode. A
        model in train mode is put back into train mode."""
        model = model or self.model
        was_training = model.training
        if was_training:
            model.eval()
        with torch.inference_mode():
            features, logits, tapped, *_ = zip(*(model(batch, taps=taps) for batch in batches), strict=True)
        if was_training:
            model.train()
        # concatenating outside inference mode gives ordinary tensors, which a loss may use
        return Output(torch.cat(features), torch.cat(logits), tuple(map(torch.cat, zip(*tapped, strict=True))))

    # -- the constructor is the configuration

    @classmethod
    def hyper_parameters(cls) -> dict[str, inspect.Parameter]:
        """The parameters of the constructor. Parameters that it passes on (`**options: Unpack[Options]`) are taken from
        the base class that declares them."""
        own = dict(inspect.signature(cls).parameters)
        options = [own.pop(name) for name, p in list(own.items()) if p.kind is p.VAR_KEYWORD]
        wanted = [name for p in options for kind in get_args(p.annotation) for name in get_type_hints(kind)]
        for base in cls.__mro__[1:]:
            above = inspect.signature(base).parameters if wanted and issubclass(base, Method) else {}
            own |= {name: above[name] for name in wanted if name in above and name not in own}
        return own
