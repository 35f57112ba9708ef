"""The tasks that a method learns from, in a stream that refuses what a task may not see."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import overload

import torch
from torch import Tensor

from bace.data.batch import Batch, View, moved
from bace.data.modality import Examples, Modality
from bace.errors import DataError, StreamRefused

COMPARED = 64  # examples whose inputs are part of a stream's fingerprint
BUCKET = 50  # with bucketing, the examples of this many training batches are sorted by length together


@dataclass(frozen=True)
class Task:
    """One step of the stream: new classes and the examples that show them."""

    index: int
    name: str
    classes: range
    train: Tensor  # (examples,) ids
    valid: Tensor  # (examples,) ids; empty unless `val_fraction` holds some out
    test: Tensor  # (examples,) ids


@dataclass
class Stream(Sequence[Task]):
    """The tasks in order, and the only access to their examples.

    While task t is learned, only its training examples and those in the memory are served; asking for anything else
    raises StreamRefused. Evaluation, joint training and probing take an explicit `licence`, which is logged.
    """

    data: Examples
    targets: Tensor  # (rows,) class ids in order of arrival
    tasks: list[Task]
    names: list[str]  # of the classes in order of arrival; for tokens: "O", then "B-type", "I-type"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    forgotten: tuple[int, ...] = ()  # classes that a Learner has forgotten: they keep their numbers, but never win
    licences: list[str] = field(default_factory=list)
    _open: Tensor = field(init=False, repr=False)  # (examples,) bool: what may be read now

    def __post_init__(self) -> None:
        self._open = torch.zeros(len(self.data), dtype=torch.bool)
        self._check_classes()

    # -- the sequence of tasks

    def __len__(self) -> int:
        return len(self.tasks)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        return self.tasks[index]

    @property
    def modality(self) -> Modality:
        return self.data.modality

    @property
    def background(self) -> int | None:
        """The class shared by all tasks that hides old and future ones: O, tokens only."""
        return self.modality.background

    @property
    def one_row(self) -> bool:
        """Whether every example is one row, so that its features are the row's."""
        return self.data.row_start is None

    @property
    def groups(self) -> Tensor:
        """(classes,) the group of each class in a memory's quota: the class itself or its entity type; -1 for the
        background and for forgotten classes."""
        groups = torch.tensor(self.modality.groups(self.names), dtype=torch.int64)
        groups[list(self.forgotten)] = -1
        return groups

    @property
    def known(self) -> list[int]:
        """The classes that are not forgotten."""
        return [c for c in range(len(self.names)) if c not in self.forgotten]

    def eligible(self, scores: Tensor) -> Tensor:  # (rows, classes) -> (rows, classes)
        """The scores of a method, with -inf for the classes that are forgotten."""
        if not self.forgotten:
            return scores
        return scores.index_fill(1, torch.tensor(self.forgotten, device=scores.device), -torch.inf)

    # -- reading

    def batch(self, examples: Tensor, *, view: View = None, inputs: bool = True) -> Batch:
        """These examples with all their rows; without `inputs`, only their ids and targets."""
        self.check(examples)
        made = self.data.inputs(examples, view, self.device) if inputs else {}
        rows, owner = self.rows_of(examples)
        return Batch(made, moved(self.targets[rows], self.device), examples, rows, self._at(owner, rows))

    def rows(self, rows: Tensor, *, view: View = None) -> Batch:
        """Exactly these rows, in this order; a sentence that holds several of them is passed once."""
        if self.one_row:
            return self.batch(rows, view=view)
        examples, inverse = torch.unique(self.owners(rows), return_inverse=True)
        self.check(examples)
        inputs = self.data.inputs(examples, view, self.device)
        return Batch(inputs, moved(self.targets[rows], self.device), examples, rows, self._at(inverse, rows))

    def labels(self, examples: Tensor) -> tuple[Tensor, Tensor]:  # (rows,) row ids, (rows,) class ids
        """The rows of these examples and their classes, without their inputs."""
        self.check(examples)
        rows, _ = self.rows_of(examples)
        return rows, self.targets[rows]

    def by_group(self, examples: Tensor) -> dict[int, Tensor]:
        """The examples that show each group (class or entity type), in their order."""
        self.check(examples)
        rows, owner = self.rows_of(examples)
        groups = self.groups[self.targets[rows]]
        found = sorted(set(groups.tolist()) - {-1})
        return {group: examples[torch.unique(owner[groups == group])] for group in found}

    def group_of(self, examples: Tensor) -> Tensor:  # (examples,) ids -> (examples,) groups
        """The group of each example: its class or, for a sentence, the one of its entity types that is rarest among
        these examples; -1 if it shows none."""
        self.check(examples)
        rows, owner = self.rows_of(examples)
        groups = self.groups[self.targets[rows]]
        if self.one_row:
            return groups
        shows = {group: torch.unique(owner[groups == group]) for group in set(groups.tolist()) - {-1}}
        chosen = torch.full_like(examples, -1)
        for group in sorted(shows, key=lambda group: (-len(shows[group]), group)):
            chosen[shows[group]] = group
        return chosen

    # -- batches of similar lengths, to reduce padding

    def bucketed(self, examples: Tensor, size: int) -> tuple[Sequence[Tensor], Callable[[Tensor], Tensor]]:
        """These examples in parts of `size`, the longest first, and a function that brings results for the rows of all
        parts back into the order of the examples. Images keep their order."""
        lengths = self.data.lengths
        if lengths is None or len(examples) <= size:
            return examples.split(size), lambda values: values
        order = torch.argsort(lengths[examples], descending=True, stable=True)
        _, owner = self.rows_of(examples[order])
        back = torch.argsort(order[owner], stable=True)
        return examples[order].split(size), lambda values: values[back]

    def shuffled(self, examples: Tensor, size: int, rng: torch.Generator, *, bucketing: bool) -> list[Tensor]:
        """These examples in random batches. With `bucketing`, each batch has texts of similar lengths: the shuffled
        examples are sorted inside windows of BUCKET batches, and then the batches are shuffled. If one batch is not
        full, its examples are random, so that no length is always in it."""
        order = examples[torch.randperm(len(examples), generator=rng)]
        lengths = self.data.lengths if bucketing else None
        if lengths is None:
            return list(order.split(size))
        rest = len(order) % size
        batches = [order[:rest]] if rest else []
        for start in range(rest, len(order), BUCKET * size):
            window = order[start : start + BUCKET * size]
            batches += window[torch.argsort(lengths[window], stable=True)].split(size)
        return [batches[i] for i in torch.randperm(len(batches), generator=rng).tolist()]

    def fingerprint(self) -> str:
        """A fingerprint that is equal for streams with the same tasks, labels and (compared on a few) examples."""
        ids = [part for task in self.tasks for part in (task.train, task.valid, task.test)]
        few = torch.linspace(0, len(self.data) - 1, min(len(self.data), COMPARED)).long()
        shown = self.data.inputs(few, None, torch.device("cpu")) if len(few) else {}
        digest = hashlib.blake2b(repr((self.names, list(map(len, ids)), sorted(shown))).encode(), digest_size=16)
        for tensor in (self.targets, *ids, *(shown[name] for name in sorted(shown))):
            digest.update(tensor.contiguous().numpy().data)
        return digest.hexdigest()

    # -- access

    def begin(self, task: Task, memory: Tensor, *, past: bool = False) -> None:
        """Allow reading the training examples of `task` and those in memory, and nothing else."""
        self._open.zero_()
        self._open[task.train] = True
        self._open[memory] = True
        if past:
            for earlier in self.tasks[: task.index]:
                self._open[earlier.train] = True

    @contextmanager
    def licence(self, reason: str, examples: Tensor) -> Iterator[None]:
        """Allow reading more examples for a stated and logged reason (evaluation, probing)."""
        if reason not in self.licences:
            self.licences.append(reason)
        before = self._open.clone()
        self._open[examples] = True
        try:
            yield
        finally:
            self._open = before

    def check(self, examples: Tensor) -> None:
        """Raise StreamRefused unless every one of these examples may be read now."""
        allowed = self._open[examples]
        if not bool(allowed.all()):
            refused = examples[~allowed]
            raise StreamRefused(
                f"the stream refuses example {int(refused[0])} ({len(refused)} of {len(examples)} requested): it is "
                "neither in the current task's training set nor in the memory. A method may read only those; joint "
                "training declares `licence = 'past'`."
            )

    # -- rows and examples

    def rows_of(self, examples: Tensor) -> tuple[Tensor, Tensor]:  # (rows,) ids, (rows,) position of their example
        """All rows of these examples."""
        start = self.data.row_start
        if start is None:
            return examples, torch.arange(len(examples))
        first, count = start[examples], start[examples + 1] - start[examples]
        owner = torch.repeat_interleave(torch.arange(len(examples)), count)
        before = torch.cumsum(count, 0) - count
        return torch.arange(len(owner)) - before[owner] + first[owner], owner

    def owners(self, rows: Tensor) -> Tensor:  # (rows,) ids -> (rows,) examples
        start = self.data.row_start
        return rows if start is None else torch.searchsorted(start, rows, right=True) - 1

    def _at(self, owner: Tensor, rows: Tensor) -> Tensor | None:  # (rows, 2)
        if self.data.positions is None:
            return None
        return moved(torch.stack([owner, self.data.positions[rows]], dim=1), self.device)

    def _check_classes(self) -> None:
        expected = 0
        for task in self.tasks:
            if task.classes.start != expected:
                raise DataError(f"task '{task.name}' starts at class {task.classes.start}, expected {expected}")
            expected = task.classes.stop
