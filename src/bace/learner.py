"""Class-incremental learning on your own data: partial_fit, predict, save, load. Old data may be deleted in between."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bace.config.parse import config_from, current, flatten, import_named_method
from bace.config.schema import Config
from bace.core import checkpoint
from bace.core.method import Method
from bace.core.position import tasks_done
from bace.core.resources import check_room
from bace.core.stream import Stream, Task
from bace.core.trainer import Trainer
from bace.data.batch import NO_IDS, Examples, Modality
from bace.data.benchmarks import Part, cut_of
from bace.data.decode import MOST_PIXELS
from bace.data.modalities.image import Images
from bace.data.modalities.text import Texts
from bace.data.modalities.token import Entities, Span, joined, spans, split_words
from bace.data.table import Table, as_inputs, from_arrays
from bace.errors import CheckpointError, ConfigError, DataError
from bace.experiments.run import (
    attach,
    check_memory,
    check_unchanged,
    is_picture,
    load_backbone,
    make_method,
    prepare_torch,
    read_run,
)
from bace.experiments.stream import class_names, class_ranges, make_examples, table_targets
from bace.methods import find_method

if TYPE_CHECKING:
    from typing_extensions import Self

BENCHMARK = {"image": "my-images", "text": "my-texts", "token": "my-entities"}  # whose defaults a modality takes


class Learner:
    """A classifier that is taught new classes, call by call.

    >>> learner = Learner("bace", backbone="google/vit-base-patch16-224", memory=500)
    >>> learner.partial_fit(pictures, labels)        # then delete them
    >>> learner.partial_fit(new_pictures, new_labels)
    >>> learner.predict(more_pictures)

    Args:
        method: a name of `bace list methods`, a dict with its hyper-parameters ({"name": "bace", "alpha": 2}), or
            "package.Class".
        settings: any setting of `bace run`, nested or dotted: `memory=500`, `backbone="minilm"`,
            `train={"epochs": 3}`, `seed=1`.

    The memory's examples are kept inside (methods trained jointly keep everything), so nothing else is needed later.
    """

    def __init__(self, method: str | dict[str, Any] = "bace", **settings: Any) -> None:
        self._given = {"method": method, **settings}
        import_named_method(self._given)
        config_from(self._given)  # refuse what is wrong now, not at the first data
        self.config: Config | None = None
        self.tasks: list[list[str]] = []  # class names, by task
        self.picture: tuple[int, int] | None = None  # height and width of the pictures learned from
        self._numbers: set[str] = set()  # names that the user gave as whole numbers, and gets back as such
        self.modality: Modality | None = None
        self.method: Method | None = None
        self._kept: dict[str, Tensor] = {}  # raw examples, as tensors
        self._kept_targets = NO_IDS
        self._train: list[Tensor] = []  # ids of each task's kept training examples
        self._complete = True  # False: made from a run, whose memory examples are elsewhere

    @property
    def classes_(self) -> list[Any]:
        """Names of all classes (entity types) learned, as they were given, in order of arrival."""
        return [self._as_given(name) for names in self.tasks for name in names]

    def partial_fit(self, x: Any, y: Sequence[Any]) -> Self:
        """Learn the classes of `y`, all of them new, from the examples `x`. If it fails, the learner is as before.

        Args:
            x: pictures (uint8 array or tensor, PIL images, paths), texts (strings), or sentences (lists of words).
                Pictures are brought to the size of the first call's, but arrays of another shape are refused.
            y: a label per example; for sentences a list of IOB2 tags each.
        """
        array = isinstance(x, Tensor | np.ndarray)
        table = from_arrays(x, y, image_size=None if array else self.picture)
        self._check_new(table)
        config = self._configured(table.modality)
        if config.train.early_stop or not config.train.reset_optimiser:
            raise ConfigError(
                "a Learner has no validation data and makes a new optimiser at each call: leave out train.early_stop "
                "and train.reset_optimiser"
            )
        if config.studies:
            raise ConfigError("a Learner has no test data and observes nothing: leave out studies")
        part = Part(f"task {len(self.tasks) + 1}", table.names, table, table)
        tasks = [*self.tasks, table.names]
        stream = self._stream(table, part, tasks, config)
        check_memory(config, find_method(str(config.method["name"])), stream)
        saved = None if self.method is None else {k: _copied(v) for k, v in self.method.state_dict().items()}
        try:
            method = self._method_for(stream, config)
            check_room(method, [len(self.tasks)])
            Trainer(method, stream, config).learn(stream[-1])
        except BaseException:  # also when interrupted: half a task learned is no use
            if saved is not None:
                tensors, plain = checkpoint.split_state(saved)
                self.method = None
                self._restore({f"method.{name}": value for name, value in tensors.items()}, plain)
            raise
        self.config, self.modality, self.tasks, self.method = config, table.modality, tasks, method
        if isinstance(stream.data, Images):
            self.picture = (stream.data.pixels.shape[2], stream.data.pixels.shape[3])
        self._numbers |= {str(label) for label in _labels(y) if isinstance(label, int)}
        self._keep(stream)
        return self

    def predict(self, x: Any) -> list[Any]:
        """The class of each example, named as it was given. Of sentences: the tag of each word where they are lists of
        words, the `entities` where they are strings."""
        if self.modality == "token" and not isinstance(x, str):
            x = list(x)
            if any(isinstance(item, str) for item in x):
                return self.entities(x)
        rows = self.scores(x)
        names = self._names() if self.modality == "token" else self.classes_
        if isinstance(rows, list):
            return [[names[c] for c in sentence.argmax(1).tolist()] for sentence in rows]
        return [names[c] for c in rows.argmax(1).tolist()]

    def entities(self, x: Sequence[str | Sequence[str]]) -> list[list[Span]]:
        """The entities of each sentence, as (start, end, type, text) with positions in characters.

        Args:
            x: sentences, or longer texts, as strings; or as lists of words, whose positions are then those in the words
                joined by spaces.
        """
        if self.modality not in (None, "token"):
            raise ConfigError(f"this learner was taught {self.modality} data: entities are found by one taught tags")
        if isinstance(x, str):
            raise DataError("one string is no list of sentences: put it in a list")
        items = list(x)
        words = [[s[i:j] for i, j in split_words(s)] if isinstance(s, str) else s for s in items]
        tags = self.predict(words)  # says what is wrong with a list of words
        placed = [(s, split_words(s)) if isinstance(s, str) else joined(s) for s in items]
        return [spans(text, offsets, own) for (text, offsets), own in zip(placed, tags, strict=True)]

    def scores(self, x: Any) -> Tensor | list[Tensor]:
        """A score per class, in the order of `classes_`; for sentences one (words, tags) tensor each."""
        if self.method is None or self.config is None or self.modality is None:
            raise ConfigError("this learner has learned nothing yet: call partial_fit first")
        _, inputs = as_inputs(x, modality=self.modality, image_size=self.picture)
        words = [["O"] * len(sentence) for sentence in inputs] if self.modality == "token" else [""] * len(inputs)
        table = Table(self.modality, inputs, words, [])
        cut = cut_of(self.config)
        encoder = self.method.model.encoder
        data, _ = make_examples(self.modality, [table], cut, encoder, self.config.backbone.name)
        everything = torch.arange(len(data))
        rows = len(data) if data.positions is None else len(data.positions)
        asked = Stream(data, torch.zeros(rows, dtype=torch.int64), [], self._names())
        asked.device = self.method.stream.device
        self.method.eval()
        if cost := self.method.prediction_cost(len(data)):
            logging.getLogger("bace").info(cost)
        with asked.licence("prediction", everything):
            parts, in_order = asked.bucketed(everything, self.config.train.eval_batch_size)
            scores = in_order(torch.cat([self.method.predict(asked.batch(part)).cpu() for part in parts]))
        return list(scores.split([len(sentence) for sentence in inputs])) if self.modality == "token" else scores

    # -- saving

    def save(self, folder: str | Path) -> None:
        """Everything needed to predict and to go on learning, without the data."""
        if self.method is None or self.config is None:
            raise ConfigError("this learner has learned nothing yet: there is nothing to save")
        if checkpoint.is_foreign(Path(folder)):
            raise ConfigError(f"'{folder}' is not empty and holds no saved learner: choose a new folder")
        tensors, plain = checkpoint.split_state(self.method.state_dict())
        state = {
            "given": self._given,
            "tasks": self.tasks,
            "modality": self.modality,
            "picture": self.picture,
            "numbers": sorted(self._numbers),
            "method": plain,
            "train": [ids.tolist() for ids in self._train],
            "complete": self._complete,
        }
        kept = {f"kept.{name}": value for name, value in self._kept.items()} | {"kept_targets": self._kept_targets}
        tensors = {f"method.{name}": value for name, value in tensors.items()} | kept
        checkpoint.save(Path(folder), tensors, state, keep=1)

    @classmethod
    def load(cls, folder: str | Path, *, trust: bool = False) -> Self:
        """A saved learner. `trust`: a method that is not part of bace, but named in the folder, may be imported."""
        found = checkpoint.load(Path(folder))
        if found is None:
            raise CheckpointError(f"'{folder}' holds no saved learner")
        tensors, state = found
        if "given" not in state:
            raise CheckpointError(f"'{folder}' is not a saved learner; a run folder is opened with bace.load")
        with checkpoint.understood(f"the learner in '{folder}'"):
            if not is_picture(state["picture"]) or not _are_names(state["tasks"]):
                raise ValueError("'picture' is no height and width, or 'tasks' are no lists of names")
            learner = cls._opened(state["given"], trust, complete=False)
            learner.modality, learner.tasks, learner._complete = state["modality"], state["tasks"], state["complete"]
            learner.picture = tuple(state["picture"]) if state["picture"] else None
            learner._numbers = set(state["numbers"])
            learner.config = learner._configured(state["modality"])
            learner._kept = {n.removeprefix("kept."): t for n, t in tensors.items() if n.startswith("kept.")}
            learner._kept_targets = tensors["kept_targets"]
            learner._train = [torch.tensor(ids, dtype=torch.int64) for ids in state["train"]]
            learner._restore(tensors, state["method"])
            learner._check_kept()
        return learner

    @classmethod
    def from_run(cls, folder: str | Path, *, trust: bool = False, force: bool = False) -> Self:
        """The model of a finished run, for prediction; `trust` as in `load`. `force`: also if run.json was changed."""
        folder = Path(folder)
        described = read_run(folder)
        found = checkpoint.load(folder / "checkpoints")
        if found and not force:
            check_unchanged(folder, described, found[1])
        if not (folder / "metrics.json").exists() or found is None:
            raise CheckpointError(f"the run in '{folder}' is not finished: continue it with --resume")
        with checkpoint.understood(f"the checkpoint of the run in '{folder}'"):
            done = tasks_done(found[1]["at"])
        if done != len(described["tasks"]):
            raise CheckpointError(
                f"the last checkpoint of the run in '{folder}' is damaged, and the one before it is not that of the "
                "finished model: run it again"
            )
        with checkpoint.understood(f"the run in '{folder}'"):
            learner = cls._opened(described["config"], trust, complete=True)
            learner.config = config_from(learner._given)
            learner.modality, learner._complete = described["modality"], False
            learner.picture = tuple(described["picture"]) if described.get("picture") else None
            learner.tasks = [_user_names(task["classes"], described["modality"]) for task in described["tasks"]]
            learner._restore(found[0], found[1]["method"])
        return learner

    # -- inside

    @classmethod
    def _opened(cls, given: dict[str, Any], trust: bool, *, complete: bool) -> Self:
        """An empty learner with settings from a file: all there were (`complete`), or those that a user gave."""
        given = current(given, complete=complete)
        if not trust:
            config_from(given)  # refuses a method that would have to be imported
        return cls(**given)

    def _restore(self, tensors: dict[str, Tensor], plain: dict[str, Any]) -> None:
        """The method with its shapes made again for all tasks, then its saved values."""
        assert self.config is not None
        self._check_described()
        stream = self._kept_stream()
        self.method = self._method_for(stream, self.config)
        self.method.now.task, self.method.now.phase = len(stream) - 1, "end"
        self.method.rebuild(list(stream))
        checkpoint.fill(self.method, tensors, plain)

    def _check_kept(self) -> None:
        assert self.method is not None
        ids = torch.cat([*self._train, self.method.remembered()])
        if not ((ids >= 0) & (ids < len(self.method.stream.data))).all():
            raise ValueError("it remembers examples that it does not hold")

    def _check_described(self) -> None:
        """What a file says of the classes and pictures can be so."""
        if not all(isinstance(name, str) for names in self.tasks for name in names):
            raise CheckpointError("the saved model has class names that are no text: it is damaged or forged")
        if not all(re.fullmatch("-?[0-9]+", name) for name in self._numbers):
            raise CheckpointError("the saved model has numbers of classes that are none: it is damaged or forged")
        sides = self.picture or (1, 1)
        if (
            len(sides) != 2
            or not all(isinstance(side, int) and side > 0 for side in sides)
            or prod(sides) > MOST_PIXELS
        ):
            raise CheckpointError(f"the saved model has pictures of {self.picture} pixels: it is damaged or forged")

    def _configured(self, modality: Modality) -> Config:
        if self.modality not in (None, modality):
            raise DataError(f"this learner was taught {self.modality} data; it cannot take {modality} data")
        return self.config or config_from({"benchmark.name": BENCHMARK[modality], **flatten(self._given)})

    def _method_for(self, stream: Stream, config: Config) -> Method:
        """The method so far with its new stream; made at the first call."""
        if self.method is None:
            prepare_torch(config)
            method = make_method(config, stream.modality)
            # old texts must be gone when they are deleted, and what is predicted is read once: nothing is kept of them
            config = replace(config, backbone=replace(config.backbone, cache=0))
            attach(method, stream, config, load_backbone(config))
            return method
        stream.device = self.method.stream.device
        self.method.stream = stream
        return self.method

    def _check_new(self, table: Table) -> None:
        if not self._complete:
            raise ConfigError("a model loaded from a run can only predict: its memory's examples are in the benchmark")
        if known := [name for name in table.names if any(name in names for names in self.tasks)]:
            raise DataError(
                f"class '{known[0]}' was learned before: for now each call of partial_fit takes new classes only"
            )
        if isinstance(table.inputs, Tensor) and self.picture not in (None, tuple(table.inputs.shape[2:])):
            raise DataError(
                f"these pictures are {tuple(table.inputs.shape[2:])} pixels, the ones learned before {self.picture}: "
                "resize them alike"
            )

    def _stream(self, table: Table, part: Part, tasks: list[list[str]], config: Config) -> Stream:
        """Kept examples first, then the new ones; only the new task has a training set (joint methods keep all)."""
        cut, modality = cut_of(config), table.modality
        encoder = self.method.model.encoder if self.method else load_backbone(config)
        data, (count,) = make_examples(modality, [table], cut, encoder, config.backbone.name)
        first = 0
        if self._kept:
            before = len(data)
            data.prepend(self._kept)
            first = len(data) - before
        names = class_names(modality, tasks)
        number = {name: c for c, name in enumerate(names)}
        targets = torch.cat([self._kept_targets, table_targets(table, part, number)])
        train = [*(self._train or [NO_IDS] * (len(tasks) - 1)), torch.arange(first, first + count)]
        return Stream(data, targets, _tasks(tasks, modality, train), names)

    def _keep(self, stream: Stream) -> None:
        """Keep the memory's examples (all, for a method that trains jointly) under new ids, and let go of the rest."""
        assert self.method is not None
        assert self.config is not None
        joint = self.method.licence == "past"
        ids = torch.arange(len(stream.data)) if joint else torch.unique(self.method.remembered())
        rows, _ = stream.rows_of(ids)
        self._kept, self._kept_targets = stream.data.take(ids), stream.targets[rows]
        new_id = torch.full((len(stream.data),), -1)
        new_id[ids] = torch.arange(len(ids))
        for memory in self.method.memories():
            memory.examples = new_id[memory.examples]
        self._train = [new_id[task.train] if joint else NO_IDS for task in stream]
        self.method = self._method_for(self._kept_stream(), self.config)

    def _kept_stream(self) -> Stream:
        """The tasks so far, over the kept examples. Nothing of it is open: the next call puts the examples before its
        own, and only then are they read."""
        assert self.modality is not None
        tasks = _tasks(self.tasks, self.modality, self._train or [NO_IDS] * len(self.tasks))
        return Stream(_examples(self.modality, self._kept), self._kept_targets, tasks, self._names())

    def _as_given(self, name: str) -> Any:
        return int(name) if name in self._numbers else name

    def _names(self) -> list[str]:
        assert self.modality is not None
        return class_names(self.modality, self.tasks)


def _are_names(tasks: Any) -> bool:
    """Whether these are lists of names, one a task."""
    return isinstance(tasks, list) and all(
        isinstance(names, list) and all(isinstance(name, str) for name in names) for names in tasks
    )


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _labels(y: Any) -> list[Any]:
    """Labels as Python values."""
    values = y.tolist() if isinstance(y, Tensor | np.ndarray) else list(y)
    return [value.item() if isinstance(value, Tensor | np.generic) else value for value in values]


def _examples(modality: Modality, kept: dict[str, Tensor]) -> Examples:
    """Raw examples as they were taken out of a stream; none of a model that was made from a run."""
    if modality == "image":
        pixels = kept.get("pixels", torch.zeros(0, 3, 1, 1, dtype=torch.uint8))
        return Images(pixels, size=pixels.shape[-1])
    start = torch.zeros(1, dtype=torch.int64)
    texts = Texts(NO_IDS, start) if modality == "text" else Entities(NO_IDS, start, NO_IDS, start)
    if kept:
        texts.prepend(kept)
    return texts


def _tasks(names: list[list[str]], modality: Modality, train: list[Tensor]) -> list[Task]:
    ranges = class_ranges(modality, names)
    return [Task(t, f"task {t + 1}", ranges[t], train[t], NO_IDS, NO_IDS) for t in range(len(names))]


def _user_names(classes: list[str], modality: Modality) -> list[str]:
    """Entity types of a task's tags; class names otherwise."""
    return list(dict.fromkeys(name[2:] for name in classes if name != "O")) if modality == "token" else classes
