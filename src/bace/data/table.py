"""Raw labelled examples from wherever they are kept: hub sets, Parquet, image folders, CSV, JSONL, CoNLL files, arrays.

Every source ends as a `Table`. Pictures are decoded here, once, into one uint8 tensor, so that training never decodes.
"""

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from bace.data.batch import Modality
from bace.data.decode import (
    IMAGE_SUFFIXES,
    MEMORY_LIMIT,
    Pictures,
    Size,
    allocate,
    as_uint8,
    channels_last,
    decode_pictures,
    from_pixels,
    picture_of,
    stack,
)
from bace.data.files import INPUT_NAMES, TAG, Raw, not_iob, open_source, some
from bace.errors import ConfigError, DataError, nearest

InMemory = Tensor | list[str] | list[list[str]]
Inputs = InMemory | Pictures

_CLASS_NAMES = ("label", "fine_label", "labels", "class", "category", "target", "topic", "intent")
_TAG_NAMES = ("ner_tags", "tags", "labels", "ner", "label")


@dataclass(frozen=True, eq=False)
class Table:
    """Labelled examples of one modality.

    inputs: pictures as uint8 (examples, channels, height, width) or not yet decoded, texts, or the words of each
            sentence.
    labels: the class name of each example; for tokens the IOB2 tag of each word.
    names:  class names in the source's own order (sorted where it has none; whole numbers by value). For tokens the
            entity types, without B-, I- and O. A name may have no example here.
    mirror: whether a mirrored picture still shows its class; letters and digits do not.
    """

    modality: Modality
    inputs: Inputs
    labels: list[str] | list[list[str]]
    names: list[str]
    mirror: bool = True

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
            inputs = allocate((len(rows), *self.inputs.shape[1:]), MEMORY_LIMIT)
            torch.index_select(self.inputs, 0, torch.tensor(rows, dtype=torch.long), out=inputs)
        elif isinstance(self.inputs, Pictures):
            inputs = self.inputs.take(rows)
        else:
            inputs = cast("list[str] | list[list[str]]", [self.inputs[i] for i in rows])
        labels = cast("list[str] | list[list[str]]", [self.labels[i] for i in rows])
        return replace(self, inputs=inputs, labels=labels)


def read(
    source: str | Path,
    *,
    split: str = "train",
    modality: Modality | None = None,
    input_column: str | Sequence[str] | None = None,
    label_column: str | None = None,
    label_names: Sequence[str] | None = None,
    subset: str | None = None,
    limit_per_class: int | None = None,
    image_size: Size | None = None,
    channels: int = 3,
    memory_limit: int = MEMORY_LIMIT,
    decode: bool = True,
) -> Table:
    """Read one split of a labelled set.

    source: a file (.parquet, .csv, .tsv, .jsonl, CoNLL .txt or .conll), a folder with such files named after their
        splits (train.csv, test.csv; train-*.parquet), an image folder (<split>/<class>/* or <class>/*), the files of
        CIFAR (python version), SVHN (.mat), MNIST (idx) or Tiny-ImageNet as published, or a hub id "owner/name".
    split: "test" also finds a validation split where there is no test split. A single file, or an image folder without
        split folders, is a "train" split and no other, so that nobody tests on training data unawares.
    modality, input_column, label_column: found by name and type where not given. Several input columns are texts, to
        be joined by a space; of them one that is followed by "?" is left out where the source has no such column.
    label_names: the names of integer labels or tags, in order, for a source that does not carry them.
    subset: the configuration of a hub set that has several.
    limit_per_class: the first n examples of each class in file order; the others are never decoded. A sentence is
        taken while one of its entity types has fewer than n sentences; sentences without entities count as a type.
        Sentences without words are left out.
    image_size: shorter side and centre square of every picture. By default pictures stay as they are if all have one
        size, and become 256 pixels otherwise.
    channels: 3, or 1 for grey. Transparent pictures are laid over white; a picture's EXIF rotation is applied.
    memory_limit: bytes above which the pictures live in a memory-mapped file (in BACE_CACHE, default ~/.cache/bace).
    decode: False leaves pictures where they are, to be decoded later, all or some of them (`Pictures`).
    """
    _check_settings(modality, image_size, channels)
    if limit_per_class is not None and limit_per_class < 1:
        raise ConfigError(f"limit_per_class is {limit_per_class}: give at least 1, or None for all examples.")
    raw = open_source(source, split, modality, subset)
    modality, columns, label_column = _choose_columns(raw, modality, input_column, label_column)
    values = [value for (value,) in raw.values([label_column], range(raw.count))]
    names = list(label_names) if label_names is not None else raw.class_names.get(label_column)
    labels: list[str] | list[list[str]]
    if modality == "token":
        labels, names = _tags(values, names, raw.where)
        rows = first_of_each([{tag[2:] for tag in tags} for tags in labels], limit_per_class)
    else:
        labels, names = _classes(values, names, raw.where)
        rows = first_of_each([{label} for label in labels], limit_per_class)
    if not rows:
        raise DataError(f"{source}: the split '{split}' has no examples.")
    labels = cast("list[str] | list[list[str]]", [labels[i] for i in rows])

    def where(i: int) -> str:
        return raw.where(rows[i])

    inputs: Inputs
    if modality == "image":

        def cells(rows: Sequence[int]) -> Iterator[Any]:
            for row, (value,) in zip(rows, raw.values(columns, rows), strict=True):
                yield picture_of(value, raw.folder, raw.where(row))

        inputs = Pictures(cells, rows, raw.where)
        if decode:
            inputs = decode_pictures([inputs], image_size, channels, memory_limit)
    elif modality == "text":
        inputs = [_text(value, columns, where(i)) for i, value in enumerate(raw.values(columns, rows))]
    else:
        inputs = [_words_of(value, where(i)) for i, (value,) in enumerate(raw.values(columns, rows))]
        _check_lengths(inputs, cast("list[list[str]]", labels), where)
    table = Table(modality, inputs, labels, names)
    return table if all(labels) else table.take([i for i, tags in enumerate(labels) if tags])


def count(
    source: str | Path,
    *,
    split: str = "train",
    modality: Modality | None = None,
    input_column: str | Sequence[str] | None = None,
    label_column: str | None = None,
    label_names: Sequence[str] | None = None,
) -> tuple[int, int]:
    """How many examples and how many classes (entity types) a split has, without reading the examples. The classes are
    those that the source names; if it names none, those that have an example."""
    raw = open_source(source, split, modality)
    modality, _, label_column = _choose_columns(raw, modality, input_column, label_column)
    names = label_names or raw.class_names.get(label_column)
    if names is None:
        values = (value for (value,) in raw.values([label_column], range(raw.count)))
        names = list({str(name) for value in values for name in (value if modality == "token" else [value])})
    if modality == "token":
        names = list({name[2:] for name in names if name != "O"})
    return raw.count, len(names)


def from_arrays(
    inputs: Any,
    labels: Any,
    *,
    modality: Modality | None = None,
    label_names: Sequence[str] | None = None,
    image_size: Size | None = None,
    channels: int = 3,
    memory_limit: int = MEMORY_LIMIT,
) -> Table:
    """A table of what is already in memory: `inputs` as in `as_inputs`, `labels` as integers or strings.

    For tokens `labels` holds the IOB tags of each sentence. Integer labels become their decimal strings, or the
    entries of `label_names`. The inputs are copied: what the caller does to them later changes nothing here.
    """
    modality, values = as_inputs(
        inputs, modality=modality, image_size=image_size, channels=channels, memory_limit=memory_limit
    )
    if not isinstance(labels, Iterable) or isinstance(labels, str | bytes):
        raise DataError(f"labels are {labels!r:.80}: give a list with one label per example.")
    raw = labels.tolist() if isinstance(labels, np.ndarray | Tensor) else list(labels)
    raw = [label.item() if isinstance(label, Tensor) and label.ndim == 0 else label for label in raw]
    if len(raw) != len(values):
        raise DataError(f"{len(values)} examples but {len(raw)} labels: give one label per example.")
    names = list(label_names) if label_names is not None else None
    if modality != "token":
        return Table(modality, values, *_classes(raw, names, _example))
    tags, names = _tags(raw, names, _example)
    _check_lengths(cast("list[list[str]]", values), tags, _example)
    if [] in tags:
        raise DataError(f"{_example(tags.index([]))}: the sentence has no words. Remove it.")
    return Table(modality, values, tags, names)


def as_inputs(
    inputs: Any,
    *,
    modality: Modality | None = None,
    image_size: Size | None = None,
    channels: int = 3,
    memory_limit: int = MEMORY_LIMIT,
) -> tuple[Modality, InMemory]:
    """Unlabelled examples in memory, as the `modality` and `inputs` of a table.

    Pictures: an array or tensor (examples, height, width), with channels last or second, of integers in 0..255 or
    floats in 0..1; or a list of PIL pictures, of arrays, or of paths. Where both layouts fit (three channels and three
    columns), NumPy arrays are taken as channels-last, tensors as channels-second. A list of strings is a list of texts,
    unless all of them end like a picture's file name or `modality` is "image". Lists of words are sentences.
    """
    _check_settings(modality, image_size, channels)
    if isinstance(inputs, np.ndarray) and inputs.dtype.kind in "OU":
        inputs = inputs.tolist()
    if isinstance(inputs, np.ndarray | Tensor):
        if modality not in (None, "image"):
            raise DataError(f"an array of shape {tuple(inputs.shape)} holds pictures, not {modality}s.")
        pixels = channels_last(inputs)
        if not len(pixels):
            raise DataError("there are no examples: the array is empty.")
        if image_size is None or tuple(pixels.shape[1:3]) == image_size:
            return "image", from_pixels(pixels, channels, memory_limit)
        inputs = list(pixels.numpy())
    if isinstance(inputs, str | bytes | Path | dict | Image.Image):
        raise DataError(f"one {type(inputs).__name__} is no list of examples. Put it in a list; files go to read().")
    items = list(inputs)
    if not items:
        raise DataError("there are no examples: the list is empty.")
    if modality is None:
        if isinstance(items[0], list | tuple):
            modality = "token"
        elif isinstance(items[0], str):
            files = all(isinstance(item, str) and Path(item).suffix.lower() in IMAGE_SUFFIXES for item in items)
            modality = "image" if files else "text"
        else:
            modality = "image"
    if modality == "text":
        return "text", [_text((item,), ["text"], _example(i)) for i, item in enumerate(items)]
    if modality == "token":
        return "token", [_words_of(item, _example(i)) for i, item in enumerate(items)]

    def pictures() -> Iterator[Any]:
        for i, item in enumerate(items):
            if isinstance(item, np.ndarray | Tensor):
                pixels = as_uint8(channels_last(item[None]))[0]
                yield Image.fromarray((pixels[..., 0] if pixels.shape[-1] == 1 else pixels).numpy())
            else:
                yield picture_of(item, None, _example(i))

    return "image", stack(pictures, len(items), _example, image_size, channels, memory_limit)


def iob2(tags: Iterable[str]) -> list[str]:
    """IOB1 or careless IOB2 as IOB2: an I- that continues no entity of its type begins one."""
    result: list[str] = []
    before = "O"
    for tag in tags:
        before = "B-" + tag[2:] if tag.startswith("I-") and before[2:] != tag[2:] else tag
        result.append(before)
    return result


# --- columns, labels and words -------------------------------------------------------------------------------------


def _choose_columns(
    raw: Raw, modality: Modality | None, input_column: str | Sequence[str] | None, label_column: str | None
) -> tuple[Modality, list[str], str]:
    """Modality, input columns and label column: what is given, else by known names, else by type."""
    if isinstance(input_column, str):
        given = [input_column]
    else:
        present = [name for name in input_column or () if not name.endswith("?") or name[:-1] in raw.columns]
        given = [name.removesuffix("?") for name in present]
    for name in [*given, *([label_column] if label_column else [])]:
        if name not in raw.columns:
            raise DataError(f"{raw.source} has no column '{name}'.{nearest(name, raw.columns)}")
    if len(given) > 1 and modality not in (None, "text"):
        raise ConfigError(f"{len(given)} input columns, {some(given)}: only texts can be joined, not {modality}s.")
    order: tuple[Modality, ...] = ("image", "token", "text")
    unlabelled: Modality | None = None
    for candidate in (modality,) if modality else ("text",) if len(given) > 1 else order:
        tokens = candidate == "token"
        label_kinds = ("classes", "strings", "integers") if tokens else ("class", "string", "integer")
        label = label_column or _pick(raw.columns, _TAG_NAMES if tokens else _CLASS_NAMES, label_kinds)
        kinds = {"image": ["picture"], "token": ["strings"], "text": ["string"]}[candidate]
        if modality == "image":
            kinds.append("string")  # a column of paths
        rest = {name: kind for name, kind in raw.columns.items() if name != label}
        inputs = given or [name for name in [_pick(rest, INPUT_NAMES[candidate], kinds)] if name]
        if not inputs or any(raw.columns[name] not in kinds for name in inputs):
            continue
        if label and raw.columns[label] in label_kinds:
            return candidate, inputs, label
        if not label:
            unlabelled = unlabelled or candidate
    columns = ", ".join(f"{name} ({kind})" for name, kind in raw.columns.items())
    if unlabelled:
        wanted = "ner_tags" if unlabelled == "token" else "label"
        hint = nearest(wanted, raw.columns)
        raise DataError(
            f"{raw.source} has no column '{wanted}'.{hint} Name one with benchmark.label_column. Columns: {columns}."
        )
    raise DataError(
        f"{raw.source} has no column of {f'{modality} inputs' if modality else 'pictures, sentences or texts'} "
        "with labels to go with it. Name them with benchmark.input_column and benchmark.label_column. "
        f"Columns: {columns}."
    )


def _pick(columns: dict[str, str], known: Sequence[str], kinds: Sequence[str]) -> str | None:
    """The first known name of a fitting kind, else the only column of the most telling kind, which comes first."""
    lower = {name.lower(): name for name in columns}
    for name in known:
        if name in lower and columns[lower[name]] in kinds:
            return lower[name]
    only = [name for name, kind in columns.items() if kind == kinds[0]]
    return only[0] if len(only) == 1 else None


def _classes(
    values: Sequence[Any], names: list[str] | None, where: Callable[[int], str]
) -> tuple[list[str], list[str]]:
    """The class name of each raw label, and all class names in order."""
    known: dict[Any, str] = {}  # by type too: to Python 1, True and 1.0 are one key
    labels: list[str] = []
    for i, value in enumerate(values):
        label = known.get((type(value), value)) if isinstance(value, Hashable) else None
        if label is None:
            label = _class_name(value, names, where(i))
            known[type(value), value] = label
        labels.append(label)
    return labels, names if names is not None else _in_order(labels)


def _class_name(value: Any, names: list[str] | None, where: str) -> str:
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
    name = _valid(value.strip(), where)
    if names is None or name in names:
        return name
    if name.isdecimal():
        return _class_name(int(name), names, where)
    raise DataError(f"{where}: label '{name}' is none of the given class names.{nearest(name, names)}")


def _tags(
    values: Sequence[Any], names: list[str] | None, where: Callable[[int], str]
) -> tuple[list[list[str]], list[str]]:
    """The IOB2 tags of each sentence, and the entity types in order."""
    for name in names or []:
        if not TAG.fullmatch(name):
            raise DataError(not_iob("the list of tag names", name))
    known: dict[Any, str] = {}
    sentences: list[list[str]] = []
    for i, value in enumerate(values):
        if not isinstance(value, list | tuple | np.ndarray):
            raise DataError(f"{where(i)}: the tags are {value!r}. Expected a list with one tag per word.")
        for tag in value:
            if not isinstance(tag, Hashable) or (type(tag), tag) not in known:
                name = _class_name(tag, names, where(i))
                if not TAG.fullmatch(name):
                    raise DataError(not_iob(where(i), name))
                known[type(tag), tag] = name
        sentences.append(iob2(known[type(tag), tag] for tag in value))
    if names is not None:
        return sentences, list(dict.fromkeys(name[2:] for name in names if name != "O"))
    return sentences, _in_order(tag[2:] for tags in sentences for tag in tags if tag != "O")


def _in_order(names: Iterable[str]) -> list[str]:
    """Each name once, sorted: whole numbers by value (2 before 10), else by letters."""
    unique = set(names)
    if all(re.fullmatch(r"-?[0-9]+", name) for name in unique):
        return sorted(unique, key=lambda name: (int(name), name))
    return sorted(unique)


def first_of_each(kinds: Sequence[set[str]], limit: int | None) -> list[int]:
    """The rows, in order, that have a kind of which fewer than `limit` rows came before."""
    if limit is None:
        return list(range(len(kinds)))
    taken: Counter[str] = Counter()
    rows: list[int] = []
    for row, present in enumerate(kinds):
        present = present - {""} or present  # O, cut to "", counts only where nothing else is
        if any(taken[kind] < limit for kind in present):
            taken.update(present)
            rows.append(row)
    return rows


def _text(values: Sequence[Any], columns: Sequence[str], where: str) -> str:
    for value, column in zip(values, columns, strict=True):
        if not isinstance(value, str):
            raise DataError(f"{where}: '{column}' is {value!r}. Expected a string.")
    text = " ".join(filter(None, map(str.strip, values))) if len(values) > 1 else cast(str, values[0])
    return _valid(text, where)


def _words_of(value: Any, where: str) -> list[str]:
    if not isinstance(value, list | tuple | np.ndarray) or not all(isinstance(word, str) for word in value):
        raise DataError(f"{where}: expected a list of words, got {str(value)[:80]!r}.")
    return [_valid(str(word), where) for word in value]


def _valid(text: str, where: str) -> str:
    """A text that can be written as UTF-8: JSON may hold halves of characters, which no tokenizer takes."""
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: {ascii(text)[:80]} holds half a character ({error.reason}). Repair it.") from error
    return text


def _check_lengths(sentences: list[list[str]], tags: list[list[str]], where: Callable[[int], str]) -> None:
    for i, (words, of_words) in enumerate(zip(sentences, tags, strict=True)):
        if len(words) != len(of_words):
            raise DataError(f"{where(i)}: {len(words)} words but {len(of_words)} tags. Give each word one tag.")


# --- small things --------------------------------------------------------------------------------------------------


def _check_settings(modality: str | None, image_size: Size | None, channels: int) -> None:
    if modality is not None and modality not in get_args(Modality):
        raise ConfigError(f"modality '{modality}' is unknown.{nearest(modality, get_args(Modality))}")
    if image_size is not None and min(image_size if isinstance(image_size, tuple) else (image_size,)) < 1:
        raise ConfigError(f"image_size is {image_size}: give a number of pixels, or None.")
    if channels not in (1, 3):
        raise ConfigError(f"channels is {channels}: give 3 (colour) or 1 (grey).")


def _example(i: int) -> str:
    return f"example {i}"
