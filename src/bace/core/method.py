"""The base class of methods. A method overrides only what differs from plain fine-tuning."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, cast, get_args, get_type_hints, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bace.core.stage import SMALLEST_BATCH, Loss, Stage, enough_steps
from bace.core.stream import Task
from bace.core.toolbox import Toolbox
from bace.data.batch import Batch
from bace.data.modalities import MODALITIES
from bace.models.heads import Head, imprint
from bace.models.model import Model, Output, frozen_copy, parameter_count
from bace.randomness import generator


@dataclass(frozen=True)
class Passes:
    """The cost of a task in passes through an encoder: forward counts one, forward and backward three.

    It is declared once for docs/methods.md and the estimates of `bace paper`; tests/test_cost.py compares it with runs.
    """

    new: float = 3.0  # for each example of the task, in every epoch
    replayed: float = 0.0  # for each replayed example, in every epoch
    task: float = 0.0  # for each example of the task, once: herding and other statistics
    memory: float = 0.0  # for each example in memory, once
    epochs: int | None = None  # epochs for `new` and `replayed`; default: the run's epochs
    steps: int = 0  # minimum number of steps of these epochs, for which they may become more (`enough_steps`)
    # for each example of the first task, in all its epochs; default: plain training, or `new` if that is less
    first: float | None = None

    def epochs_of(self, examples: int, epochs: int) -> int:
        """The epochs of a task with this many examples in a run with this many epochs."""
        return enough_steps(examples, self.epochs or epochs, SMALLEST_BATCH, self.steps)[0]

    def first_task(self, examples: int, epochs: int) -> float:
        """The passes of each example of the first task."""
        return min(self.new, 3.0) * self.epochs_of(examples, epochs) if self.first is None else self.first


@dataclass(frozen=True)
class Card:
    """What docs/methods.md says about a method in addition to its code."""

    mechanism: str
    o_rows: str  # entities: how words labelled O are treated, or why the method refuses tokens
    stages: tuple[str, ...] = ("main",)  # the stages of a task after the first
    replay: Literal["", "batch", "concat"] = ""  # the `mode` of replay in which the authors published it
    reading: str = ""  # what was decided where the originals disagree or are silent
    besides: str = ""  # costs that `Method.cost` does not include


@runtime_checkable
class HoldsClasses(Protocol):
    """A module with a part for each class: heads, class statistics."""

    def forget_classes(self, classes: Iterable[int]) -> None: ...


def holders(module: nn.Module) -> Iterator[HoldsClasses]:
    """All such modules inside this one, except those that are nested in them."""
    for part in module.children():
        if isinstance(part, HoldsClasses):
            yield part
        else:
            yield from holders(part)


class _Modalities:
    """The names of all modalities, including those that are registered later. Modalities with a background class are
    left out if the method has no place for one."""

    def __get__(self, _: object, method: type[Method]) -> AbstractSet[str]:
        return {name for name, known in MODALITIES.items() if method.takes_o or known.background is None}


class Method(Toolbox):
    """The hooks, in the order in which the trainer calls them; the defaults are plain fine-tuning.

    The tools that methods use are in toolbox.py. The annotated parameters of the constructor define the
    hyper-parameters, the command-line flags, the YAML keys and the documentation; the run attaches everything else.
    Whatever must survive a step is a parameter or buffer (buffers may change shape), so that it is in every checkpoint.
    """

    title: ClassVar[str]  # the paper's name for it; default: the name of the class
    paper: ClassVar[str] = ""
    card: ClassVar[Card | None] = None
    takes_o: ClassVar[bool] = True  # has a place for a class that hides others (O of entities)
    modalities: ClassVar[AbstractSet[str]] = cast(Any, _Modalities())  # by name; a method may list its own instead
    licence: ClassVar[Literal["task", "past"]] = "task"  # "past": may read all earlier training data; logged
    growing_head: ClassVar[bool] = True  # one head with one row per class, so forward transfer can be measured
    takes_known: bool = False  # learns more examples of known classes; not inherited, for a loss may differ
    one_encoder: ClassVar[bool] = True  # all features are in one space, so studies can compare them
    keeps_teacher: bool = False  # from the second task on, `teacher` is the network after the last task
    # networks of the encoder's size, kept while a later task is learned; without those of `keeps_teacher` and `expands`
    networks: ClassVar[int] = 1
    expands: ClassVar[bool] = False  # every task adds a network
    cost: Passes = Passes()
    own_batch: int = 0  # examples per step of stages that pass the encoder and do not use train.batch_size
    # why `bace export` refuses it: its prediction is more than a function of one example
    not_exportable: ClassVar[str | None] = None
    # why `Learner.forget` refuses it: its state mixes the classes, and the share of one cannot be removed
    cannot_forget: str | None = None
    by_class: ClassVar[tuple[str, ...]] = ()  # names of buffers with an entry for each class: (classes, ...)
    whole_batches: ClassVar[bool] = False  # a batch that is read in parts (train.accumulate) would not give the same
    scorers: ClassVar[tuple[str, ...]] = ()  # other prediction rules, by name; each is evaluated beside the main one

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
        return float(F.cross_entropy(*self.scored(examples)))

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
        features = self.outputs(task.train, model, logits=False).features
        return imprint(features, self.stream.labels(task.train)[1], task.classes, model.head.weight.detach())

    def transfer_scores(self, features: Tensor, head: Head) -> Tensor:  # (rows, width) -> (rows, seen and new classes)
        """The scores that `predict` would give to these features if `head`, the grown one, were the network's."""
        logits: Tensor = head(features)
        return logits

    # -- forgetting a class on purpose (Learner.forget)

    @torch.no_grad()
    def forget(self, classes: Sequence[int], examples: Tensor) -> None:
        """Remove these classes: their head rows, their statistics, and from memory these examples, which are all that
        show them. The classes keep their numbers, so shapes do not change. The encoder keeps what it has learned.

        If a method keeps more about a class than head rows, modules with `forget_classes` and the buffers in
        `by_class`, it removes this here, or says in `cannot_forget` why it cannot."""
        for memory in self.memories():
            memory.keep(torch.nonzero(~torch.isin(memory.examples, examples)).flatten())
        for module in holders(self):
            module.forget_classes(classes)
        for name in self.by_class:
            self.get_buffer(name)[list(classes)] = 0

    # -- for studies (docs/studies.md)

    def report(self) -> dict[str, float]:
        """A few numbers that the method has learned by the end of a task, by name."""
        return {}

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
