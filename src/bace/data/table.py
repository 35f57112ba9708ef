"""Raw labelled examples from hub sets, Parquet, image folders, CSV, JSONL, CoNLL files and arrays.

Every source becomes a `Table`. Pictures are decoded here, once, into one uint8 tensor, so that training never decodes.
"""

import difflib
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack, cast

import numpy as np
from torch import Tensor

from bace.data.decode import IMAGE_SUFFIXES, PictureOptions, check_options
from bace.data.files import TABLE_SUFFIXES, Raw, files_in, in_memory, in_records, open_source, open_table, some
from bace.data.modalities import MODALITIES, find_modality
from bace.data.modality import InMemory, Labels, Modality, Table, check_not_splits, listed, type_of
from bace.errors import ConfigError, DataError


def read(
    source: str | Path,
    *,
    split: str = "train",
    modality: str | None = None,
    input_column: str | Sequence[str] | None = None,
    label_column: str | None = None,
    label_names: Sequence[str] | None = None,
    subset: str | None = None,
    limit_per_class: int | None = None,
    **pictures: Unpack[PictureOptions],
) -> Table:
    """Read one split of a labelled set.

    source: a file (.parquet, .csv, .tsv, .jsonl, CoNLL .txt or .conll), a folder with such files named after their
        splits (train.csv, test.csv; train-*.parquet), an image folder (<split>/<class>/* or <class>/*), the files of
        CIFAR (python version), SVHN (.mat), MNIST (idx) or Tiny-ImageNet as published, or a hub id "owner/name".
    split: "test" also finds a validation split if there is no test split. A single file, or an image folder without
        split folders, is only a "train" split, so that nobody tests on training data by accident.
    modality, input_column, label_column: found by name and type if not given. Several input columns hold texts, which
        are joined by a space. A column that is followed by "?" is left out if the source does not have it.
    label_names: the names of integer labels or tags, in order, for a source that does not contain them.
    subset: the configuration of a hub set that has several.
    limit_per_class: the first n examples of each class in file order; the others are never decoded. A sentence is
        taken while one of its entity types has fewer than n sentences; sentences without entities count as a type.
        Texts and sentences without words are left out first, with a warning.
    pictures: image_size, channels, memory_limit and decode, which PictureOptions explains.
    """
    check_options(pictures)
    asked = None if modality is None else find_modality(modality)
    if limit_per_class is not None and limit_per_class < 1:
        raise ConfigError(f"limit_per_class is {limit_per_class}: give at least 1, or None for all examples.")
    raw = open_source(source, split, subset, conll=asked is not None and asked.conll)
    return _table_of(raw, asked, input_column, label_column, label_names, limit_per_class, pictures)


def from_records(
    rows: Any,
    *,
    modality: str | None = None,
    input_column: str | Sequence[str] | None = None,
    label_column: str | None = None,
    **pictures: Unpack[PictureOptions],
) -> Table:
    """A table from rows and columns in memory: a `datasets.Dataset`, a pandas DataFrame, or a list of dicts."""
    check_options(pictures)
    check_not_splits(rows)
    if not isinstance(rows, Iterable):
        raise DataError(f"the data are {rows!r:.80}: give examples and labels, or a folder, file or table with both.")
    records = rows.to_dict("records") if hasattr(rows, "to_dict") and hasattr(rows, "iloc") else list(rows)
    if not records:
        raise DataError(f"there are no examples: the {type(rows).__name__} is empty.")
    if not all(isinstance(record, dict) for record in records):
        raise DataError(f"a {type(rows).__name__} has no columns with labels: give the labels as the second argument.")
    raw = _with_names(in_records(records), rows)
    asked = None if modality is None else find_modality(modality)
    return _table_of(raw, asked, input_column, label_column, None, None, pictures)


def _with_names(raw: Raw, rows: Any) -> Raw:
    """Add what a `datasets.Dataset` knows about its columns: the names of integer labels and tags."""
    kinds, names = dict(raw.columns), {}
    for column, feature in (getattr(rows, "features", None) or {}).items():
        inner = getattr(feature, "feature", None)  # of a list of tags
        if found := getattr(feature, "names", None) or getattr(inner, "names", None):
            kinds[column], names[column] = "classes" if inner else "class", list(found)
    return replace(raw, columns=kinds, class_names=names)


def _table_of(
    raw: Raw,
    asked: Modality | None,
    input_column: str | Sequence[str] | None,
    label_column: str | None,
    label_names: Sequence[str] | None,
    limit_per_class: int | None,
    pictures: PictureOptions,
) -> Table:
    found, columns, label_column = _choose_columns(raw, asked, input_column, label_column)
    values = [value for (value,) in raw.values([label_column], range(raw.count))]
    names = list(label_names) if label_names is not None else raw.class_names.get(label_column)
    given = "strings" if names is not None else type_of(values, typed=raw.typed)
    labels, names = found.labels(values, names, raw.where)

    def table_of(rows: Sequence[int]) -> Table:
        own = cast(Labels, [labels[i] for i in rows])
        inputs = found.read(raw, columns, rows, pictures)
        found.check_labels(inputs, own, lambda i: raw.where(rows[i]))
        return Table(found, inputs, own, names, given=given)

    rows = first_of_each([found.shows(label) for label in labels], limit_per_class)
    if not rows:
        raise DataError(f"{raw.source}: there are no examples.")
    table = table_of(rows)
    if not found.empty(table.inputs):
        return table
    # later examples take the places of empty ones, so all are read; as this is rare, large files are seldom read whole
    whole = table if len(table) == raw.count else table_of(range(raw.count))
    full = _without_empty(whole, raw.where, raw.source)
    return full if limit_per_class is None else full.take(first_of_each(full.shown(), limit_per_class))


def _without_empty(table: Table, where: Callable[[int], str], source: str) -> Table:
    """The examples that contain something to learn from. A warning names the others, at least one."""
    empty, plural = table.modality.empty(table.inputs), table.modality.plural
    left = table.take(sorted(set(range(len(table))) - set(empty)))
    places = some(where(i).removeprefix(f"{source}, ") for i in empty)
    if not len(left):
        raise DataError(f"{source}: all {plural} are empty. Fill them in.")
    before, after = table.counts(), left.counts()
    if gone := [name for name in before if before[name] and not after[name]]:
        raise DataError(f"{source}: class '{gone[0]}' has only empty {plural} ({places}). Fill them in or remove them.")
    warnings.warn(f"{source}: {len(empty)} of {len(table)} {plural} are empty and left out: {places}", stacklevel=2)
    return left


def count(
    source: str | Path,
    *,
    split: str = "train",
    modality: str,
    input_column: str | Sequence[str] | None = None,
    label_column: str | None = None,
    label_names: Sequence[str] | None = None,
) -> tuple[int, int]:
    """The numbers of examples and of classes (entity types) in a split, without reading the examples. All classes count
    that the source names; if it names none, all that have an example."""
    asked = find_modality(modality)
    raw = open_source(source, split, conll=asked.conll)
    found, _, label_column = _choose_columns(raw, asked, input_column, label_column)
    names = list(label_names or raw.class_names.get(label_column) or ())
    values = [] if names else [value for (value,) in raw.values([label_column], range(raw.count))]
    return raw.count, len(found.labels(values, names or None, raw.where)[1])


def from_arrays(
    inputs: Any,
    labels: Any,
    *,
    modality: str | None = None,
    encoder: Callable[[], str | None] = lambda: None,
    label_names: Sequence[str] | None = None,
    **pictures: Unpack[PictureOptions],
) -> Table:
    """A table from data in memory: `inputs` as in `as_inputs`, `labels` as integers or strings.

    For tokens `labels` holds the IOB tags of each sentence. Integer labels become their decimal strings, or the
    entries of `label_names`. The inputs are copied, so the caller may change them later.
    """
    found, values = as_inputs(inputs, modality=modality, encoder=encoder, **pictures)
    raw = as_labels(labels)
    if len(raw) != len(values):
        raise DataError(f"{len(values)} examples but {len(raw)} labels: give one label per example.")
    where = in_memory(raw, "label").where
    made, names = found.labels(raw, list(label_names) if label_names is not None else None, where)
    found.check_labels(values, made, where)
    if empty := found.empty(values):
        count = f"{len(empty)} of {len(values)} {found.plural} are empty"
        raise DataError(f"{where(empty[0])}: there are no words in it. {count}: remove them.")
    return Table(found, values, made, names, given="strings" if label_names is not None else type_of(raw, typed=True))


def as_labels(labels: Any) -> list[Any]:
    """Labels as Python values."""
    unordered = isinstance(labels, str | bytes | Set | Mapping)
    if not isinstance(labels, Iterable) or unordered or getattr(labels, "ndim", 1) == 0:
        raise DataError(f"labels are {labels!r:.80}: give a list with one label per example.")
    values = labels.tolist() if isinstance(labels, np.ndarray | Tensor) else list(labels)
    single = (np.generic, Tensor)
    return [value.item() if isinstance(value, single) and value.ndim == 0 else value for value in values]


def as_inputs(
    inputs: Any,
    *,
    modality: str | None = None,
    encoder: Callable[[], str | None] = lambda: None,
    **pictures: Unpack[PictureOptions],
) -> tuple[Modality, InMemory]:
    """Unlabelled examples in memory, as the `modality` and `inputs` of a table.

    Pictures are an array or tensor (examples, height, width), with channels last or second, of integers in 0..255 or
    floats in 0..1; or a list of PIL pictures, of arrays, or of paths. If both layouts fit (three channels and three
    columns), NumPy arrays are read as channels-last and tensors as channels-second. A list of strings is a list of
    texts, unless all of them end like a picture's file name or `modality` is "image". With `modality` "text", or if
    `encoder`, which returns what the encoder reads, says so, they are always texts, and no file of that name is opened.
    Lists of words are sentences.
    """
    check_options(pictures)
    asked = None if modality is None else find_modality(modality)
    if isinstance(inputs, np.ndarray) and inputs.dtype.kind in "OU":
        inputs = inputs.tolist()
    array = inputs if isinstance(inputs, np.ndarray | Tensor) else None
    items = listed(inputs) if array is None else []
    if array.shape[:1] == (0,) if array is not None else not items:
        raise DataError(f"there are no examples: the {'list' if array is None else 'array'} is empty.")
    found = asked or _recognised(items if array is None else array, encoder)
    if items and not found.picture_input and MODALITIES["image"].recognises(items):
        warnings.warn(
            f"these strings end in {Path(items[0]).suffix}, like names of pictures, but are read as {found.plural}: "
            "pictures need a model of pictures",
            stacklevel=4,
        )
    if array is not None:
        return found, found.from_array(array, pictures)
    column = found.input_names[0]
    return found, cast(InMemory, found.read(in_memory(items, column), [column], range(len(items)), pictures))


def _recognised(examples: Any, encoder: Callable[[], str | None]) -> Modality:
    """The modality of these examples; for strings that may be paths or texts, the encoder decides, if it is known."""
    found = [known for known in MODALITIES.values() if known.recognises(examples)]
    if len(found) < 2:
        return found[0] if found else MODALITIES["image"]  # its errors explain best what is wrong with other inputs
    reads = encoder()
    return next((known for known in found if known.encoder == reads), found[0])


def unlabelled(
    source: Path, modality: Modality, input_column: str | Sequence[str] | None = None, label_column: str | None = None
) -> list[tuple[str, Any]]:
    """The examples to predict in a file or folder, each with its place. It reads everything that `read` reads, with or
    without labels, and also pictures, text files line by line, and ("-") the lines of standard input."""
    if str(source) == "-":
        return modality.from_lines((line.rstrip("\n") for line in sys.stdin), "-")
    if source.is_dir():
        own, tables = (files_in(source, suffixes) for suffixes in (modality.file_suffixes, TABLE_SUFFIXES))
        files = own if modality.picture_input and own else own + tables  # a table beside pictures lists them
        if not files:
            held = "pictures" if files_in(source, IMAGE_SUFFIXES) else "nothing that can be read"
            raise DataError(f"'{source}' holds {held}, and this model takes {modality.plural}: name another folder")
        return [found for file in files for found in unlabelled(file, modality, input_column, label_column)]
    if not source.is_file():
        piped = "" if modality.picture_input else "; `-` in its place reads lines from standard input"
        raise DataError(f"there is no file '{source}': check the path{piped}")
    raw = open_table(source)
    if raw is None:
        return modality.from_files([source])
    asked = [input_column] if isinstance(input_column, str) else [name.removesuffix("?") for name in input_column or ()]
    given, label = [name for name in asked if name in raw.columns], label_column
    label = label if label in raw.columns else None
    columns = modality.input_columns(raw.columns, given, label) if given or not asked else []
    if not columns:
        wanted = f"'{asked[0]}'" if asked else f"of {modality.plural}"
        raise DataError(
            f"{source} has no column {wanted}, or none that holds {modality.plural}: name one with --column. "
            f"{_columns_in_words(raw)}"
        )
    return modality.from_rows(raw, columns)


def first_of_each(shown: Sequence[set[str]], limit: int | None) -> list[int]:
    """The rows, in order, that show a class with fewer than `limit` rows so far; no class counts as a class."""
    if limit is None:
        return list(range(len(shown)))
    taken: Counter[str] = Counter()
    rows: list[int] = []
    for row, classes in enumerate(shown):
        if any(taken[name] < limit for name in classes or {""}):
            taken.update(classes or {""})
            rows.append(row)
    return rows


# -- columns


def _choose_columns(
    raw: Raw, asked: Modality | None, input_column: str | Sequence[str] | None, label_column: str | None
) -> tuple[Modality, list[str], str]:
    """The modality, the input columns and the label column: as given, or else found by name, or else by type."""
    given = _given_columns(raw, input_column, label_column)
    if len(given) > 1 and asked and not asked.joins:
        raise ConfigError(f"{len(given)} input columns, {some(given)}: only texts can be joined, not {asked.name}s.")
    candidates = [asked] if asked else [known for known in MODALITIES.values() if known.joins or len(given) < 2]
    without_labels: Modality | None = None
    unfit: str | None = None
    for candidate in candidates:
        inputs, label = candidate.columns(raw.columns, given, label_column, asked=asked is not None)
        if inputs and label and raw.columns[label] in candidate.label_kinds:
            return candidate, inputs, label
        if inputs and not label:
            without_labels = without_labels or candidate
            unfit = unfit or next((name for name in raw.columns if name.lower() in candidate.label_names), None)
        elif inputs:
            unfit = unfit or label
    columns = _columns_in_words(raw)
    if unfit:
        ((value,),) = raw.values([unfit], [0])
        hint = " pandas turns whole numbers into floats where one is missing." if isinstance(value, float) else ""
        raise DataError(f"{raw.where(0)}: '{unfit}' is {value!r:.80}. Labels are whole numbers or strings.{hint}")
    if without_labels:
        raise DataError(_no_column(raw, without_labels.label_names[0]) + " Name one with benchmark.label_column.")
    fitting = [known for known in MODALITIES.values() if known is not asked and _fits(known, raw)]
    if asked and fitting:
        raise DataError(
            f"{raw.source} holds {fitting[0].plural}, not {asked.plural}: give it to a model of {fitting[0].plural} "
            f"(`bace run --benchmark {fitting[0].own_data}`), or name the columns with benchmark.input_column and "
            f"benchmark.label_column. {columns}"
        )
    raise DataError(
        f"{raw.source} has no column of {f'{asked.name} inputs' if asked else 'pictures, sentences or texts'} "
        "with labels to go with it. Name them with benchmark.input_column and benchmark.label_column. "
        f"{columns}"
    )


def _given_columns(raw: Raw, input_column: str | Sequence[str] | None, label_column: str | None) -> list[str]:
    """The input columns that the user names, without those that may be missing (`name?`) and are."""
    if isinstance(input_column, str):
        given = [input_column]
    else:
        present = [name for name in input_column or () if not name.endswith("?") or name[:-1] in raw.columns]
        given = [name.removesuffix("?") for name in present]
    for name in [*given, *([label_column] if label_column else [])]:
        if name not in raw.columns:
            raise DataError(_no_column(raw, name))
    return given


def _no_column(raw: Raw, name: str) -> str:
    """The error for a missing column. It suggests a column only if the name looks misspelt."""
    close = difflib.get_close_matches(name, raw.columns, n=1, cutoff=0.75)
    hint = f" Did you mean '{close[0]}'?" if close else ""
    return f"{raw.source} has no column '{name}'.{hint} {_columns_in_words(raw)}"


def _columns_in_words(raw: Raw) -> str:
    """The columns there are; and a hint, if none of a CSV file's has a name that we know."""
    found = f"Columns: {', '.join(f'{name} ({kind})' for name, kind in raw.columns.items())}."
    known = {name for modality in MODALITIES.values() for name in (*modality.input_names, *modality.label_names)}
    if raw.typed or known & {name.lower() for name in raw.columns}:
        return found
    return f"{found} If its first line holds an example and not the names of the columns, put a line of names above it."


def _fits(modality: Modality, raw: Raw) -> bool:
    """Whether these columns clearly belong to this modality."""
    inputs, label = modality.columns(raw.columns, [], None, asked=False)
    return bool(inputs and label and raw.columns[label] in modality.label_kinds)
