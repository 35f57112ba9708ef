"""Studies observe a method after every task and change nothing."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bace.config.schema import Config
from bace.core.method import Method
from bace.core.stream import Stream, Task

Record = dict[str, Any]  # plain JSON, so that it is in every checkpoint


class Skipped(Exception):
    """A study does not apply to a method; the message says why."""


@dataclass
class Observation:
    """What studies see after a task. They need a licence from the stream to read data of other tasks."""

    method: Method
    task: Task
    scores: list[float]  # of the method on each task so far: the newest row of the accuracy matrix
    lenient: bool = False  # entities: foreign types count as O (measure.map_foreign_types_to_O)
    noted: dict[str, Record] = field(default_factory=dict)  # by study: its record of the task's last epoch

    @property
    def stream(self) -> Stream:
        return self.method.stream

    @property
    def tasks(self) -> Sequence[Task]:
        """All tasks so far."""
        return self.stream[: self.task.index + 1]

    @functools.cached_property
    def training_ids(self) -> Tensor:  # (examples,)
        return torch.cat([task.train for task in self.tasks])

    @functools.cached_property
    def training(self) -> tuple[Tensor, Tensor]:  # (rows, width) features, (rows,) class ids
        """The network's features of all training data so far, in clean views, computed once for all studies; the
        features are on the network's device, the class ids on the CPU."""
        outputs = [self.method.outputs(task.train, logits=False) for task in self.tasks]  # the last is known already
        return torch.cat([out.features for out in outputs]), self.stream.labels(self.training_ids)[1]

    @contextmanager
    def licence(self, study: str, *more: Tensor) -> Iterator[None]:
        """Allow a study to read all training data so far, and `more`."""
        reason = f"{study} (a study: all data of the tasks so far, fed back to nothing)"
        with self.stream.licence(reason, torch.cat([self.training_ids, *more])):
            yield

    def check_one_encoder(self) -> None:
        """Raise Skipped unless one encoder computes the features of all classes."""
        if not self.method.one_encoder:
            raise Skipped(f"{self.method.title} has a separate encoder for each task, so features share no space")


@dataclass(frozen=True)
class Study:
    """The hooks of a study. Everything that is kept between them is JSON."""

    after_task: Callable[[Observation], Record]
    collect: Callable[[list[Record], Stream, Config], Record]  # after the last task: what studies.json holds
    before_epoch: Callable[[Method, Task], Record | None] | None = None  # called again on resume; None keeps the last

    def observe(self, seen: Observation) -> Record:
        try:
            return self.after_task(seen)
        except Skipped as why:
            return {"skipped": str(why)}

    def findings(self, records: list[Record], stream: Stream, config: Config) -> Record:
        refused = [record for record in records if "skipped" in record]
        return refused[0] if refused else self.collect(records, stream, config)


def columns(records: list[Record]) -> dict[str, list[Any]]:
    """[{"a": 1}, {"a": 2}] -> {"a": [1, 2]}."""
    return {key: [record[key] for record in records] for key in (records[0] if records else ())}
