"""The differences between pictures, texts and sentences. A `Modality` reads `Table`s, turns them into `Examples` for an
encoder, and scores and shows predictions. The three modalities are in `modalities/`."""

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from bace.data.batch import View
from bace.data.decode import MEMORY_LIMIT, PictureOptions, Pictures, allocate
from bace.data.files import Raw
from bace.data.scores import accuracy, confusion_matrix, per_class_accuracy
from bace.data.settings import DataSettings
from bace.errors import ConfigError, DataError, closest_name

InMemory = Tensor | list[str] | list[list[str]]
Inputs = InMemory | Pictures
Labels = list[str] | list[list[str]]
Scorer = Callable[[Any], Any]  # examples as the user gives them -> scores, by row (or by row for each example)


@dataclass(frozen=True, eq=False)
class Table:
    """Labelled examples of one modality.

    inputs: pictures as uint8 (examples, channels, height, width) or not yet decoded, texts, or the words of each
            sentence.
    labels: the class name of each example; for tokens the IOB2 tag of each word.
    names:  class names in the source's order (sorted if it has none; whole numbers by value). For tokens the entity
            types, without B-, I- and O. A name may have no example here.
    mirror: whether a mirrored picture still shows its class; letters and digits do not.
    given:  the type of the labels in the source: "strings"; whole "numbers"; or "digits", which a file without types
            (CSV) has and which read as whole numbers. As there are leading zeros in codes, 07 is no such number.
    """

    modality: "Modality"
    inputs: Inputs
    labels: Labels
    names: list[str]
    mirror: bool = True
    given: Literal["strings", "numbers", "digits"] = "strings"

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.labels):
            raise DataError(f"{len(self.inputs)} examples but {len(self.labels)} labels: give one label per example.")

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: Sequence[int]) -> "Table":
        """The examples at `indices`, in that order, as a copy; the class names stay."""
        rows = [int(i) for i in indices]
        if rows and not 0 <= min(rows) <= max(rows) < len(self):
            raise IndexError(f"indices {min(rows)} to {max(rows)} do not fit a table of {len(self)} examples")
        inputs: Inputs
        if isinstance(self.inputs, Tensor):
            inputs = allocate((len(rows), *self.inputs.shape[1:]), MEMORY_LIMIT, self.inputs.dtype)
            torch.index_select(self.inputs, 0, torch.tensor(rows, dtype=torch.long), out=inputs)
        elif isinstance(self.inputs, Pictures):
            inputs = self.inputs.take(rows)
        else:
            inputs = cast("list[str] | list[list[str]]", [self.inputs[i] for i in rows])
        return replace(self, inputs=inputs, labels=cast(Labels, [self.labels[i] for i in rows]))

    def shown(self) -> list[set[str]]:
        """The classes that each example shows."""
        return [self.modality.shows(label) for label in self.labels]

    def counts(self) -> dict[str, int]:
        """The number of examples that show each class."""
        found = Counter(name for shown in self.shown() for name in shown)
        return {name: found[name] for name in self.names}

    def present(self) -> "Table":
        """The same table without the names of classes that have no example in it."""
        return replace(self, names=[name for name, count in self.counts().items() if count])


class Examples(Protocol):
    """Raw examples of one modality, turned into batched tensors."""

    modality: "Modality"

    @property
    def row_start(self) -> Tensor | None: ...  # (examples + 1,) first row of each example; None if each is one row

    @property
    def positions(self) -> Tensor | None: ...  # (rows,) token position of each row in its sentence; tokens only

    @property
    def lengths(self) -> Tensor | None: ...  # (examples,) tokens of each example; None if all have one size

    @property
    def random_views(self) -> bool: ...  # whether the inputs of an example depend on the view

    def __len__(self) -> int: ...

    def inputs(self, examples: Tensor, view: View, device: torch.device) -> dict[str, Tensor]: ...

    def take(self, examples: Tensor) -> dict[str, Tensor]: ...

    def prepend(self, kept: dict[str, Tensor]) -> None: ...


class Predicted(NamedTuple):
    """Rows and their predictions."""

    predicted: Tensor  # (rows,) class ids
    targets: Tensor  # (rows,) class ids
    examples: Tensor  # (rows,) the example of each row
    names: Sequence[str]  # of the classes seen


class Modality:
    """One kind of data: how it is read, encoded, scored and shown. The defaults suit examples that each show one class.
    `modalities.MODALITIES` has the only instance of each modality, by its name."""

    name: str  # in run.json, in cards, on the command line
    plural: str  # the name of the examples in messages
    encoder: str  # the `modality` of the encoders that serve it
    own_data: str  # the benchmark of a user's own data, whose defaults a Learner takes

    # columns of a source: their names, the likeliest first, and their kinds (`Raw.columns`), the most telling first
    input_names: tuple[str, ...]
    input_kinds: tuple[str, ...]
    asked_kinds: tuple[str, ...] = ()  # further kinds, where the user says that the data are of this modality
    label_names: tuple[str, ...] = ("label", "fine_label", "labels", "class", "category", "target", "topic", "intent")
    label_kinds: tuple[str, ...] = ("class", "string", "integer")
    joins = False  # several input columns can be joined
    conll = False  # files of an unknown kind are tables of words and tags

    one_label = True  # an example shows one class
    background: int | None = None  # the class shared by all tasks that hides old and future ones
    measure = "accuracy"  # what a score is, as metrics.json says
    file_suffixes: frozenset[str] = frozenset()  # suffixes of files that hold examples and are not tables
    picture_input: str | None = None  # the input that holds square pictures, which can be turned and mixed

    # -- read

    def columns(
        self, found: dict[str, str], given: list[str], label: str | None, *, asked: bool
    ) -> tuple[list[str], str | None]:
        """The input columns and the label column: those given, or else those found by name, or else by kind."""
        kinds = self.input_kinds + (self.asked_kinds if asked else ())
        label = label or _pick(found, self.label_names, self.label_kinds)
        rest = {name: kind for name, kind in found.items() if name != label}
        inputs = given or [name for name in [_pick(rest, self.input_names, kinds)] if name]
        return inputs if all(found[name] in kinds for name in inputs) else [], label

    def read(self, raw: Raw, columns: Sequence[str], rows: Sequence[int], options: PictureOptions) -> Inputs:
        """The inputs of a table, from these columns at these rows of a source."""
        raise NotImplementedError

    def recognises(self, examples: Any) -> bool:
        """Whether these examples in memory, an array or a list that is not empty, are of this modality."""
        raise NotImplementedError

    def from_array(self, array: Any, options: PictureOptions) -> Tensor:
        """The inputs of a table, from an array or a tensor."""
        raise DataError(
            f"an array of shape {tuple(array.shape)} holds pictures, and {self.plural} are expected: give a list of "
            f"{self.plural}, or choose a model of pictures."
        )

    def labels(
        self, values: Sequence[Any], names: list[str] | None, where: Callable[[int], str]
    ) -> tuple[Labels, list[str]]:
        """The labels of a table from raw ones, and all class names in order."""
        known: dict[Any, str] = {}  # the key includes the type: to Python 1, True and 1.0 are one key
        labels: list[str] = []
        for i, value in enumerate(values):
            label = known.get((type(value), value)) if isinstance(value, Hashable) else None
            if label is None:
                label = class_name(value, names, where(i))
                known[type(value), value] = label
            labels.append(label)
        return labels, names if names is not None else in_order(labels)

    def check_labels(self, inputs: Inputs, labels: Labels, where: Callable[[int], str]) -> None:
        """Raise an error if the label of an example does not fit the example."""

    def empty(self, inputs: Inputs) -> list[int]:
        """The examples that contain nothing to learn from."""
        return []

    # -- classes

    def shows(self, label: Any) -> set[str]:
        """The classes that an example with this label shows."""
        return {label}

    def renamed(self, label: Any, rename: Callable[[str], str]) -> Any:
        """The label with other names of its classes."""
        return rename(label)

    def class_names(self, tasks: Sequence[Sequence[str]]) -> list[str]:
        """The names of all class ids, in order of arrival, from the names that tables have for each task's classes."""
        return [name for own in tasks for name in own]

    def own_names(self, classes: Sequence[str]) -> list[str]:
        """The inverse: the names that tables have for a task's classes, from the names of its class ids."""
        return list(classes)

    def class_ranges(self, tasks: Sequence[Sequence[str]]) -> list[range]:
        """The class ids of each task."""
        ends = [len(self.class_names(tasks[: t + 1])) for t in range(len(tasks))]
        return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def targets(self, labels: Labels, own: Sequence[str], number: dict[str, int]) -> Tensor:  # (rows,)
        """The class ids of a table's rows, in a task whose classes are `own`."""
        return torch.tensor([number[str(label)] for label in labels], dtype=torch.int64)

    def groups(self, names: Sequence[str]) -> list[int]:
        """The group of each class in a memory's quota; -1 for the background."""
        return list(range(len(names)))

    # -- encode

    def check_encoder(self, encoder: Any, backbone: str) -> None:
        """Raise an error if the encoder, one of bace.models, cannot read these data."""
        if encoder.modality != self.encoder:
            raise ConfigError(
                f"backbone '{backbone}' takes {encoder.modality}s, but the data are {self.plural}: choose another with "
                "--backbone (see `bace list backbones`)"
            )

    def encode(self, tables: Sequence[Table], settings: DataSettings, encoder: Any) -> tuple[Examples, list[int]]:
        """The examples of all tables as one, for this encoder, and how many each table has become."""
        raise NotImplementedError

    def restore(self, kept: dict[str, Tensor]) -> Examples:
        """Restore the examples that `Examples.take` returned; an empty dict gives no examples."""
        raise NotImplementedError

    def picture(self, data: Examples) -> tuple[int, int] | None:
        """Height and width of the examples if they are pictures. Later pictures are resized to these."""
        return None

    def disturbed(self, inputs: dict[str, Tensor], rng: torch.Generator) -> dict[str, Tensor]:
        """Inputs, in the form whose values can change (`Encoder.relax`), altered so that they hide their class."""
        return inputs

    # -- score

    def score(self, rows: Predicted, own: Sequence[str], *, lenient: bool) -> dict[str, Any]:
        """The scores of predictions in percent, for a task whose classes are `own`. The matrix holds "score"."""
        return {"score": accuracy(rows.predicted, rows.targets)}

    def details(self, rows: Predicted, scores: list[dict[str, Any]], *, last: bool) -> dict[str, Any]:
        """The record after a task (`last`: after all tasks) over all rows so far, in addition to each task's scores."""
        predicted, targets, classes = rows.predicted, rows.targets, len(rows.names)
        detail: dict[str, Any] = {
            "sample_accuracy": accuracy(predicted, targets),
            "per_class": per_class_accuracy(predicted, targets, classes),
        }
        return detail | ({"confusion": confusion_matrix(predicted, targets, classes).tolist()} if last else {})

    # -- show

    def by_example(self, scores: Tensor, inputs: InMemory) -> Tensor | list[Tensor]:  # (rows, classes)
        """The scores of rows as a Learner returns them: a row per example, or a tensor per example."""
        return scores

    def show(self, examples: Any, scores: Scorer, names: Sequence[Any]) -> list[Any]:
        """The prediction that a Learner returns for each of these examples."""
        return [names[c] for c in scores(examples).argmax(1).tolist()]

    def from_files(self, files: Sequence[Path]) -> list[tuple[str, Any]]:
        """The examples to predict in files that are not tables, each with its place."""
        return [(str(file), file) for file in files]

    def from_lines(self, lines: Iterable[str], source: str) -> list[tuple[str, Any]]:
        """The examples to predict in lines, each with its place; empty lines are skipped."""
        raise DataError(f"'{source}' is read as lines of text, and this model takes {self.plural}: name files")

    def from_rows(self, raw: Raw, columns: Sequence[str]) -> list[tuple[str, Any]]:
        """The examples to predict in these columns of a table, each with its place."""
        examples = cast("Iterable[Any]", self.read(raw, columns, range(raw.count), {}))
        return [(raw.where(row), example) for row, example in enumerate(examples)]

    def input_columns(self, found: dict[str, str], given: list[str], label: str | None) -> list[str]:
        """The columns of a table to predict that hold the examples; none if it has no such column."""
        return self.columns(found, given, label, asked=True)[0]

    def describe(self, examples: Sequence[Any], scores: Scorer, names: Sequence[Any]) -> list[dict[str, Any]]:
        """The output of `bace predict` for each of these examples: its class and the probability of the class."""
        share, best = torch.softmax(scores(examples), 1).max(1)
        found = zip(best.tolist(), share.tolist(), strict=True)
        return [{"class": names[c], "probability": round(p, 4)} for c, p in found]

    def view(self, data: Any, example: int, row: int, backbone: Callable[[], str]) -> dict[str, Any]:
        """An example and its row for display: an `image` (PNG in base64) or a `text`. `backbone` returns the place of
        the encoder's files."""
        return {"text": f"example {example}"}


def _pick(columns: dict[str, str], known: Sequence[str], kinds: Sequence[str]) -> str | None:
    """The first known name of a suitable kind, or else the only column of the most specific kind, which comes first."""
    lower = {name.lower(): name for name in columns}
    for name in known:
        if name in lower and columns[lower[name]] in kinds:
            return lower[name]
    only = [name for name, kind in columns.items() if kind == kinds[0]]
    return only[0] if len(only) == 1 else None


# -- for readers of examples, labels and texts


def listed(examples: Any) -> list[Any]:
    """The examples of a list, of a column or of another collection. A list() of anything else would be of something
    else: of letters, of keys, of names of columns."""
    kind = type(examples).__name__
    check_not_splits(examples)
    if hasattr(examples, "columns") or hasattr(examples, "column_names"):
        raise DataError(f"a {kind} is a table, not a list of examples: give one of its columns, such as table['text'].")
    if isinstance(examples, str | bytes | Path | dict):
        raise DataError(f"one {kind} is not a list of examples: put it in a list. `bace predict` reads files")
    if not isinstance(examples, Iterable):
        raise DataError(f"the examples are {examples!r:.80}: give a list of examples.")
    return list(examples)


def check_not_splits(data: Any) -> None:
    """Refuse a `datasets.DatasetDict`, which is a dict of tables."""
    if isinstance(data, dict) and data and all(hasattr(table, "column_names") for table in data.values()):
        first, kind = next(iter(data)), type(data).__name__
        raise DataError(f"a {kind} has several splits ({', '.join(data)}): give one of them, such as data['{first}'].")


def class_name(value: Any, names: list[str] | None, where: str) -> str:
    """The name of a raw label."""
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        if names is None:
            return str(int(value))
        if 0 <= value < len(names):
            return names[int(value)]
        hint = " (-1 marks examples published without a label)" if value == -1 else ""
        raise DataError(f"{where}: label {value}{hint} is none of the {len(names)} classes, 0 to {len(names) - 1}.")
    if value is None or (isinstance(value, str) and not value.strip()) or (isinstance(value, float) and value != value):
        raise DataError(f"{where}: the label is missing. Fill it in or remove the example.")
    if not isinstance(value, str):
        kind = type(value).__name__
        raise DataError(f"{where}: label {value!r} is of type {kind}. Labels are whole numbers or strings.")
    name = valid(value.strip(), where)
    if names is None or name in names:
        return name
    if name.isdecimal():
        return class_name(int(name), names, where)
    raise DataError(f"{where}: label '{name}' is none of the given class names.{closest_name(name, names)}")


def type_of(labels: Sequence[Any], *, typed: bool) -> Literal["strings", "numbers", "digits"]:
    """The `given` of a table with these raw labels, which have no other names."""
    if all(isinstance(label, int | np.integer) for label in labels):
        return "numbers"
    digits = not typed and all(isinstance(label, str) and is_whole(label.strip()) for label in labels)
    return "digits" if digits else "strings"


def is_whole(name: str) -> bool:
    """Whether a name is a whole number as Python writes it."""
    return re.fullmatch("0|-?[1-9][0-9]*", name) is not None


def in_order(names: Iterable[str]) -> list[str]:
    """Each name once, sorted by value if all are whole numbers (2 before 10), or else by letters."""
    unique = set(names)
    if all(re.fullmatch(r"-?[0-9]+", name) for name in unique):
        return sorted(unique, key=lambda name: (int(name), name))
    return sorted(unique)


def valid(text: str, where: str) -> str:
    """Check that a text can be written as UTF-8: JSON may hold halves of characters, which no tokenizer accepts."""
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: {ascii(text)[:80]} holds half a character ({error.reason}). Repair it.") from error
    return text
