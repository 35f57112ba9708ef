"""Raw labelled examples from wherever they are kept: hub sets, Parquet, image folders, CSV, JSONL, CoNLL files, arrays.

Every source ends as a `Table`. Pictures are decoded here, once, into one uint8 tensor, so that training never decodes.
"""

import csv
import importlib
import json
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from bace.data.pictures import (
    IMAGE_SUFFIXES,
    MEMORY_LIMIT,
    Size,
    allocate,
    as_uint8,
    channels_last,
    from_pixels,
    picture_of,
    stack,
)
from bace.errors import ConfigError, DataError, nearest
from bace.stream import Modality

Inputs = Tensor | list[str] | list[list[str]]

_CSV_SUFFIXES = {".csv", ".tsv"}
_JSONL_SUFFIXES = {".jsonl", ".ndjson"}
_CONLL_SUFFIXES = {".txt", ".conll", ".iob", ".iob2", ".bio"}

# The words for a split in file and folder names, best first. Many sets publish no labelled test split and are
# scored on the validation one, so "test" falls back to it.
_HELD_OUT = ("validation", "valid", "val", "dev")
_SPLITS: dict[str, tuple[str, ...]] = {"train": ("train", "training"), "test": ("test", "testing", *_HELD_OUT)}
_SPLITS |= {word: _HELD_OUT for word in _HELD_OUT}

_INPUT_NAMES: dict[Modality, tuple[str, ...]] = {
    "image": ("image", "img", "picture", "file_name", "filename", "path"),
    "token": ("tokens", "words"),
    "text": ("text", "content", "sentence", "document", "title", "question"),
}
_CLASS_NAMES = ("label", "fine_label", "labels", "class", "category", "target", "topic", "intent")
_TAG_NAMES = ("ner_tags", "tags", "labels", "ner", "label")
_TAG = re.compile(r"O|[BI]-.+")


@dataclass(frozen=True, eq=False)
class Table:
    """Labelled examples of one modality.

    inputs: pictures as uint8 (examples, channels, height, width), texts, or the words of each sentence.
    labels: the class name of each example; for tokens the IOB2 tag of each word.
    names:  class names in the source's own order (sorted where it has none; whole numbers by value). For tokens the
            entity types, without B-, I- and O. A name may have no example here.
    """

    modality: Modality
    inputs: Inputs
    labels: list[str] | list[list[str]]
    names: list[str]

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
        else:
            inputs = cast("list[str] | list[list[str]]", [self.inputs[i] for i in rows])
        labels = cast("list[str] | list[list[str]]", [self.labels[i] for i in rows])
        return Table(self.modality, inputs, labels, self.names)


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
) -> Table:
    """Read one split of a labelled set.

    source: a file (.parquet, .csv, .tsv, .jsonl, CoNLL .txt or .conll), a folder with such files named after their
        splits (train.csv, test.csv; train-*.parquet), an image folder (<split>/<class>/* or <class>/*), or a hub id
        "owner/name".
    split: "test" also finds a validation split where there is no test split. A single file, or an image folder without
        split folders, is a "train" split and no other, so that nobody tests on training data unawares.
    modality, input_column, label_column: found by name and type where not given. Several input columns are texts, to
        be joined by a space.
    label_names: the names of integer labels or tags, in order, for a source that does not carry them.
    subset: the configuration of a hub set that has several.
    limit_per_class: the first n examples of each class in file order; the others are never decoded. A sentence is
        taken while one of its entity types has fewer than n sentences; sentences without entities count as a type.
        Sentences without words are left out.
    image_size: shorter side and centre square of every picture. By default pictures stay as they are if all have one
        size, and become 256 pixels otherwise.
    channels: 3, or 1 for grey. Transparent pictures are laid over white; a picture's EXIF rotation is applied.
    memory_limit: bytes above which the pictures live in a memory-mapped file (in BACE_CACHE, default ~/.cache/bace).
    """
    _check_settings(modality, image_size, channels)
    if limit_per_class is not None and limit_per_class < 1:
        raise ConfigError(f"limit_per_class is {limit_per_class}: give at least 1, or None for all examples.")
    path = Path(source).expanduser()
    if path.is_dir():
        raw = _open_folder(path, split)
    elif path.is_file():
        if split != "train" and not any(_mentions(path.stem, word) for word in _words(split)):
            raise DataError(
                f"{path} is one file without a split '{split}'. Put train and test files in a folder and name that, "
                "or hold out a share of it with benchmark.test_fraction."
            )
        raw = _open_file(path, modality)
    elif isinstance(source, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", source) and not _is_data_file(path):
        raw = _open_hub(source, subset, split)
    else:
        raise DataError(f"{path} is no file or folder. Check the path, or give a hub id of the form owner/name.")

    modality, columns, label_column = _choose_columns(raw, modality, input_column, label_column)
    values = [value for (value,) in raw.values([label_column], range(raw.count))]
    names = list(label_names) if label_names is not None else raw.class_names.get(label_column)
    labels: list[str] | list[list[str]]
    if modality == "token":
        labels, names = _tags(values, names, raw.where)
        rows = _first_of_each([{tag[2:] for tag in tags} for tags in labels], limit_per_class)
    else:
        labels, names = _classes(values, names, raw.where)
        rows = _first_of_each([{label} for label in labels], limit_per_class)
    if not rows:
        raise DataError(f"{source}: the split '{split}' has no examples.")
    labels = cast("list[str] | list[list[str]]", [labels[i] for i in rows])

    def where(i: int) -> str:
        return raw.where(rows[i])

    inputs: Inputs
    if modality == "image":

        def pictures() -> Iterator[Any]:
            for i, (value,) in enumerate(raw.values(columns, rows)):
                yield picture_of(value, raw.folder, where(i))

        inputs = stack(pictures, len(rows), where, image_size, channels, memory_limit)
    elif modality == "text":
        inputs = [_text(value, columns, where(i)) for i, value in enumerate(raw.values(columns, rows))]
    else:
        inputs = [_words_of(value, where(i)) for i, (value,) in enumerate(raw.values(columns, rows))]
        _check_lengths(inputs, cast("list[list[str]]", labels), where)
    table = Table(modality, inputs, labels, names)
    return table if all(labels) else table.take([i for i, tags in enumerate(labels) if tags])


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
) -> tuple[Modality, Inputs]:
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


# --- sources -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Raw:
    """A source before its columns are chosen and anything is decoded."""

    source: str
    columns: dict[str, str]  # name -> picture, string, strings, integer, integers, class, classes or other
    values: Callable[[Sequence[str], Sequence[int]], Iterator[tuple[Any, ...]]]  # of these columns at ascending rows
    count: int
    where: Callable[[int], str]  # what an error message calls a row
    class_names: dict[str, list[str]]  # of the columns that carry them
    folder: Path  # what paths of pictures are relative to


def _open_file(path: Path, modality: Modality | None) -> _Raw:
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _open_parquet([path])
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty.")
    if suffix in _CSV_SUFFIXES:
        return _open_csv(path)
    if suffix in _JSONL_SUFFIXES:
        return _open_jsonl(path)
    if suffix in _CONLL_SUFFIXES or modality == "token":
        return _open_conll(path)
    raise DataError(
        f"{path}: files ending in '{suffix}' cannot be read. Give .parquet, .csv, .tsv, .jsonl, .txt or .conll, "
        "or modality='token' for a CoNLL file of another name."
    )


def _open_folder(folder: Path, split: str) -> _Raw:
    for word in _words(split):
        if found := _find_split(folder, word):
            if found[0].is_dir():
                return _open_images(found[0])
            if found[0].suffix.lower() == ".parquet":
                if len({path.parent for path in found}) > 1:
                    parents = sorted({path.parent for path in found})
                    raise DataError(f"{folder}: the split '{word}' is in several folders, {_some(parents)}. Pass one.")
                return _open_parquet(found)
            if len(found) > 1:
                raise DataError(f"{folder}: several files for the split '{word}', {_some(found)}. Pass one of them.")
            return _open_file(found[0], None)
    every_word = dict.fromkeys(word for words in _SPLITS.values() for word in words)
    splits = [word for word in every_word if _find_split(folder, word)]
    if splits:
        raise DataError(f"{folder} has no split '{split}'. It has: {', '.join(splits)}.")
    if any(_image_files(sub) for sub in _folders(folder)):
        if split == "train":
            return _open_images(folder)
        raise DataError(
            f"{folder} has no split '{split}': its folders are classes ({_some(_folders(folder))}). "
            "Put them under train/ and test/, or divide what read() returns with take()."
        )
    raise DataError(
        f"{folder} holds nothing to read. Expected <split>-*.parquet, <split>.csv, .tsv, .jsonl, .txt or .conll, "
        "<split>/<class>/ or <class>/ with pictures; a single file of another name can be passed itself."
    )


def _open_parquet(files: list[Path]) -> _Raw:
    """Straight from pyarrow: no second copy in the cache of `datasets`, and pictures come row group by row group."""
    parquet = _import("pyarrow.parquet")
    ends: list[int] = []  # of each file, in rows
    columns: dict[str, str] = {}
    class_names: dict[str, list[str]] = {}
    for path in files:
        try:
            with parquet.ParquetFile(path) as file:
                ends.append((ends[-1] if ends else 0) + file.metadata.num_rows)
                schema = file.schema_arrow
        except Exception as error:  # pyarrow has no common class for what a broken file can raise
            raise _broken_parquet(path, error) from error
        described = _describe(schema)
        if path == files[0]:
            columns, class_names = described
        elif described != (columns, class_names):
            raise DataError(f"{path} has other columns or class names than {files[0]}. Pass one kind of file only.")

    def values(names: Sequence[str], rows: Sequence[int]) -> Iterator[tuple[Any, ...]]:
        start = 0
        for path in files:
            try:
                with parquet.ParquetFile(path) as file:
                    for group in range(file.num_row_groups):
                        end = start + file.metadata.row_group(group).num_rows
                        here = rows[bisect_left(rows, start) : bisect_left(rows, end)]
                        if here:
                            table = file.read_row_group(group, columns=list(names))
                            picked = [table.column(name) for name in names]
                            for row in here:
                                yield tuple(column[row - start].as_py() for column in picked)
                        start = end
            except Exception as error:
                raise _broken_parquet(path, error) from error

    def where(row: int) -> str:
        file = bisect_right(ends, row)
        return f"{files[file]}, row {row - (ends[file - 1] if file else 0)}"

    source = str(files[0] if len(files) == 1 else files[0].parent)
    return _Raw(source, columns, values, ends[-1], where, class_names, files[0].parent)


def _open_hub(name: str, subset: str | None, split: str) -> _Raw:
    datasets = _import("datasets")
    try:
        splits = datasets.load_dataset(name, subset)
    except Exception as error:  # network, cache, permission, unknown name, missing configuration: all say what in words
        reason = " ".join(str(error).split())[:300]
        raise DataError(
            f"'{name}' is no file or folder here and could not be loaded from the hub "
            f"({type(error).__name__}: {reason}). Check name and network, or pass a folder with its Parquet files."
        ) from error
    found = next((word for word in _words(split) if word in splits), None)
    if found is None:
        raise DataError(f"'{name}' has no split '{split}'. It has: {', '.join(map(str, splits))}.")
    dataset = splits[found]
    columns, class_names = _describe(dataset.features.arrow_schema)
    table = dataset.with_format("arrow")[:]  # stays memory-mapped

    def values(names: Sequence[str], rows: Sequence[int]) -> Iterator[tuple[Any, ...]]:
        picked = [table.column(name) for name in names]
        for row in rows:
            yield tuple(column[row].as_py() for column in picked)

    return _Raw(name, columns, values, table.num_rows, lambda row: f"{name}, {found}, row {row}", class_names, Path())


def _open_images(folder: Path) -> _Raw:
    pictures: list[dict[str, Any]] = []
    annotations = folder / "val_annotations.txt"  # Tiny-ImageNet's validation split: one folder, classes in a list
    if annotations.is_file():
        for number, line in enumerate(_lines(annotations), start=1):
            file, *label = line.split("\t")
            if not label:
                raise DataError(f"{annotations}, line {number}: expected a file name, a tab and a class, got {line!r}.")
            pictures.append({"image": folder / "images" / file, "label": label[0]})
    for class_folder in [] if pictures else _folders(folder):
        files = _image_files(class_folder)
        if not files:
            raise DataError(f"{class_folder}: the class folder holds no picture. Fill it or remove it.")
        pictures.extend({"image": file, "label": class_folder.name} for file in files)
    return _from_records(folder, pictures, lambda row: str(pictures[row]["image"]), Path())


def _open_csv(path: Path) -> _Raw:
    records: list[dict[str, Any]] = []
    numbers: list[int] = []
    limit = csv.field_size_limit(2**31 - 1)  # long documents; the default refuses more than 131,072 characters
    try:
        separator = "\t" if path.suffix.lower() == ".tsv" else ","
        reader = csv.reader(_lines(path, keep_ends=True), delimiter=separator, strict=True)
        header = [name.strip() for name in next(reader, [])]
        for fields in reader:
            if not fields:
                continue
            if len(fields) > len(header):
                raise DataError(
                    f"{path}, line {reader.line_num}: {len(fields)} fields under {len(header)} column names. "
                    "Put texts that contain the separator in double quotes."
                )
            records.append(dict.fromkeys(header) | dict(zip(header, fields, strict=False)))
            numbers.append(reader.line_num)
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}. Check the quotes.") from error
    finally:
        csv.field_size_limit(limit)
    if not records:
        raise DataError(f"{path} has no rows under its column names.")
    return _from_records(path, records, lambda row: f"{path}, line {numbers[row]}", path.parent)


def _open_jsonl(path: Path) -> _Raw:
    records: list[dict[str, Any]] = []
    numbers: list[int] = []
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            column = f"{error.msg}, column {error.colno}"
            raise DataError(f"{path}, line {number}: no JSON ({column}): {line[:80]}") from error
        if not isinstance(record, dict):
            raise DataError(f'{path}, line {number}: expected {{"text": ..., "label": ...}}, got {line[:80]}')
        records.append(record)
        numbers.append(number)
    if not records:
        raise DataError(f"{path} has no rows.")
    return _from_records(path, records, lambda row: f"{path}, line {numbers[row]}", path.parent)


def _open_conll(path: Path) -> _Raw:
    records: list[dict[str, Any]] = []
    numbers: list[int] = []  # the line each sentence begins on
    words: list[str] = []
    for number, line in enumerate(_lines(path), start=1):
        # Words may contain no-break and other exotic spaces, so only tabs and blanks separate.
        fields = [field for field in re.split(r"[ \t]+", line.strip(" \t")) if field]
        if not fields or fields[0] == "-DOCSTART-":
            words = []
            continue
        if len(fields) == 1:
            raise DataError(f"{path}, line {number}: only one column, {fields[0]!r}. Expected a word and its tag.")
        if not _TAG.fullmatch(fields[-1]):
            raise DataError(_not_iob(f"{path}, line {number}", fields[-1]))
        if not words:
            words = []
            records.append({"tokens": words, "ner_tags": []})
            numbers.append(number)
        words.append(fields[0])
        records[-1]["ner_tags"].append(fields[-1])
    if not records:
        raise DataError(f"{path} has no sentences.")
    return _from_records(path, records, lambda row: f"{path}, the sentence from line {numbers[row]}", path.parent)


def _from_records(source: Path, records: list[dict[str, Any]], where: Callable[[int], str], folder: Path) -> _Raw:
    def kind(name: str, value: Any) -> str:
        named = isinstance(value, str) and Path(value).suffix.lower() in IMAGE_SUFFIXES
        if isinstance(value, Path) or (named and name.lower() in _INPUT_NAMES["image"]):
            return "picture"
        if isinstance(value, list):
            return "integers" if value and isinstance(value[0], int) else "strings"
        return "string" if isinstance(value, str) or value is None else "integer" if isinstance(value, int) else "other"

    def values(names: Sequence[str], rows: Sequence[int]) -> Iterator[tuple[Any, ...]]:
        for row in rows:
            yield tuple(records[row].get(name) for name in names)

    columns = {name: kind(name, value) for name, value in records[0].items()}
    return _Raw(str(source), columns, values, len(records), where, {}, folder)


def _describe(schema: Any) -> tuple[dict[str, str], dict[str, list[str]]]:
    """The kind of each column of an Arrow schema, and the class names that `datasets` left in its metadata."""
    metadata = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features = metadata.get("info", {}).get("features", {})
    types = _import("pyarrow.types")
    columns: dict[str, str] = {}
    class_names: dict[str, list[str]] = {}
    for field in schema:
        kind, many = field.type, ""
        feature = features.get(field.name) or {}
        if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
            kind, many = kind.value_type, "s"
            feature = feature[0] if isinstance(feature, list) else feature.get("feature") or {}
        if types.is_dictionary(kind):  # pandas' categories
            kind = kind.value_type
        if feature.get("_type") == "ClassLabel" and feature.get("names"):
            class_names[field.name] = list(feature["names"])
            columns[field.name] = "classes" if many else "class"
        elif types.is_integer(kind):
            columns[field.name] = "integer" + many
        elif types.is_string(kind) or types.is_large_string(kind):
            columns[field.name] = "string" + many
        else:
            in_struct = types.is_struct(kind) and kind.get_field_index("bytes") >= 0
            picture = in_struct or types.is_binary(kind) or types.is_large_binary(kind)
            columns[field.name] = "picture" if picture and not many else "other"
    return columns, class_names


# --- columns, labels and words -------------------------------------------------------------------------------------


def _choose_columns(
    raw: _Raw, modality: Modality | None, input_column: str | Sequence[str] | None, label_column: str | None
) -> tuple[Modality, list[str], str]:
    """Modality, input columns and label column: what is given, else by known names, else by type."""
    given = [input_column] if isinstance(input_column, str) else list(input_column or [])
    for name in [*given, *([label_column] if label_column else [])]:
        if name not in raw.columns:
            raise DataError(f"{raw.source} has no column '{name}'.{nearest(name, raw.columns)}")
    if len(given) > 1 and modality not in (None, "text"):
        raise ConfigError(f"{len(given)} input columns, {_some(given)}: only texts can be joined, not {modality}s.")
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
        inputs = given or [name for name in [_pick(rest, _INPUT_NAMES[candidate], kinds)] if name]
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
        raise DataError(f"{raw.source} has no column '{wanted}'.{hint} Pass label_column=. Columns: {columns}.")
    raise DataError(
        f"{raw.source} has no column of {f'{modality} inputs' if modality else 'pictures, sentences or texts'} "
        f"with labels to go with it. Pass input_column= and label_column=. Columns: {columns}."
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
    known: dict[Any, str] = {}
    labels: list[str] = []
    for i, value in enumerate(values):
        label = known.get(value) if isinstance(value, Hashable) else None
        if label is None:
            label = _class_name(value, names, where(i))
            known[value] = label
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
    name = value.strip()
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
        if not _TAG.fullmatch(name):
            raise DataError(_not_iob("the list of tag names", name))
    known: dict[Any, str] = {}
    sentences: list[list[str]] = []
    for i, value in enumerate(values):
        if not isinstance(value, list | tuple | np.ndarray):
            raise DataError(f"{where(i)}: the tags are {value!r}. Expected a list with one tag per word.")
        for tag in value:
            if not isinstance(tag, Hashable) or tag not in known:
                name = _class_name(tag, names, where(i))
                if not _TAG.fullmatch(name):
                    raise DataError(_not_iob(where(i), name))
                known[tag] = name
        sentences.append(iob2(known[tag] for tag in value))
    if names is not None:
        return sentences, list(dict.fromkeys(name[2:] for name in names if name != "O"))
    return sentences, _in_order(tag[2:] for tags in sentences for tag in tags if tag != "O")


def _not_iob(where: str, tag: str) -> str:
    number = " Integer tags need label_names=." if tag.isdecimal() else ""
    return f"{where}: '{tag}' is no IOB tag. Expected O, B-<type> or I-<type>.{number}"


def _in_order(names: Iterable[str]) -> list[str]:
    """Each name once, sorted: whole numbers by value (2 before 10), else by letters."""
    unique = set(names)
    if all(re.fullmatch(r"-?[0-9]+", name) for name in unique):
        return sorted(unique, key=lambda name: (int(name), name))
    return sorted(unique)


def _first_of_each(kinds: Sequence[set[str]], limit: int | None) -> list[int]:
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
    return " ".join(value for value in values if value) if len(values) > 1 else cast(str, values[0])


def _words_of(value: Any, where: str) -> list[str]:
    if not isinstance(value, list | tuple | np.ndarray) or not all(isinstance(word, str) for word in value):
        raise DataError(f"{where}: expected a list of words, got {str(value)[:80]!r}.")
    return [str(word) for word in value]


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


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"Parquet files and hub sets need the package '{module.split('.')[0]}': pip install \"bace-cil[datasets]\""
        ) from error


def _broken_parquet(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} is no readable Parquet file ({error}). It may be cut short: fetch it again.")


def _lines(path: Path, keep_ends: bool = False) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8-sig", newline="" if keep_ends else None) as file:
            for line in file:
                yield line if keep_ends else line.rstrip("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not in UTF-8 ({error.reason}, byte {error.start}). Convert it first.") from error


def _words(split: str) -> list[str]:
    return list(dict.fromkeys((split, *_SPLITS.get(split, ()))))


def _mentions(stem: str, word: str) -> bool:
    """Whether a file name speaks of a split: train, train-00000-of-00002, ag_news.train."""
    return re.fullmatch(rf"(.*[-_.])?{re.escape(word)}([-_.].*)?", stem.lower()) is not None


def _find_split(folder: Path, word: str) -> list[Path]:
    """The Parquet files, else the other files, else the image folder of a split."""
    shards = [
        path
        for path in sorted([*folder.glob("*.parquet"), *folder.glob("*/*.parquet")])
        if not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and (_mentions(path.stem, word) or word in path.relative_to(folder).parts[:-1])
    ]
    if shards:
        return shards
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and _mentions(path.stem, word)]
    tables = [path for path in files if path.suffix.lower() in _CSV_SUFFIXES | _JSONL_SUFFIXES]
    # A folder of pictures right inside is a class of that name (CIFAR-100 has the class "train"), not a split.
    images = [sub for sub in _folders(folder) if sub.name.lower() == word and _has_classes(sub)]
    return tables or images or [path for path in files if path.suffix.lower() in _CONLL_SUFFIXES]


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _has_classes(folder: Path) -> bool:
    # Tiny-ImageNet's unlabelled test split is one folder of that name.
    names = [sub.name for sub in _folders(folder)]
    return bool(names) and (names != ["images"] or (folder / "val_annotations.txt").is_file())


def _image_files(folder: Path) -> list[Path]:
    found = (path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
    return sorted(path for path in found if not path.name.startswith("."))


def _is_data_file(path: Path) -> bool:
    return path.suffix.lower() in _CSV_SUFFIXES | _JSONL_SUFFIXES | _CONLL_SUFFIXES | {".parquet"}


def _some(things: Iterable[Any]) -> str:
    names = [thing.name if isinstance(thing, Path) else str(thing) for thing in things]
    return ", ".join(names[:4]) + (" ..." if len(names) > 4 else "")


def _example(i: int) -> str:
    return f"example {i}"
