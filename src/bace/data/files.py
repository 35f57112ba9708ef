"""Files, folders and hub sets as rows of named columns, before anything is decoded: Parquet, pictures in folders, CSV,
JSONL, CoNLL, and the published layouts of `published.py`."""

import csv
import importlib
import json
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from bace.data.decode import IMAGE_SUFFIXES, PICTURE_COLUMNS
from bace.data.published import Arrays, find_arrays
from bace.errors import ConfigError, DataError
from bace.files import inside

_CSV_SUFFIXES = {".csv", ".tsv"}
_JSONL_SUFFIXES = {".jsonl", ".ndjson"}
CONLL_SUFFIXES = {".txt", ".conll", ".iob", ".iob2", ".bio"}
TABLE_SUFFIXES = _CSV_SUFFIXES | _JSONL_SUFFIXES | {".parquet"}

# The words for a split in file and folder names, best first. Many sets publish no labelled test split and are
# scored on the validation one, so "test" falls back to it.
_HELD_OUT = ("validation", "valid", "val", "dev")
_SPLITS: dict[str, tuple[str, ...]] = {"train": ("train", "training"), "test": ("test", "testing", *_HELD_OUT)}
_SPLITS |= {word: _HELD_OUT for word in _HELD_OUT}

TAG = re.compile(r"O|[BI]-.+")


@dataclass(frozen=True)
class Raw:
    """A source before its columns are chosen and anything is decoded."""

    source: str
    columns: dict[str, str]  # name -> picture, string, strings, integer, integers, numbers, class, classes or other
    values: Callable[[Sequence[str], Sequence[int]], Iterator[tuple[Any, ...]]]  # of these columns at ascending rows
    count: int
    where: Callable[[int], str]  # the name of a row in error messages
    class_names: dict[str, list[str]]  # of the columns that carry them
    folder: Path | None  # paths of pictures are relative to it and may not leave it; None: no file names pictures
    typed: bool = True  # False: every value is a text, because the file (CSV) knows no other type


def in_memory(examples: Sequence[Any], column: str) -> Raw:
    """A list as a source of one column."""
    return in_records([{column: example} for example in examples])


def in_records(records: list[dict[str, Any]]) -> Raw:
    """A list of rows, by column, as a source."""
    return _from_records(Path("memory"), records, lambda i: f"example {i}", None)


def open_source(source: str | Path, split: str, subset: str | None = None, *, conll: bool = False) -> Raw:
    """One split of a file, a folder or a hub set; `read` in table.py explains what can be read. With `conll`, a file of
    unknown kind holds words and tags."""
    path = Path(source).expanduser()
    if path.is_dir():
        return _open_folder(path, split)
    if path.is_file():
        if split != "train" and not any(_mentions(path.stem, word) for word in _words(split)):
            raise DataError(
                f"{path} is one file without a split '{split}'. Put train and test files in a folder and name that, "
                "or hold out a share of it with benchmark.test_fraction."
            )
        return _open_file(path, conll)
    if isinstance(source, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", source) and not _is_data_file(path):
        return _open_hub(source, subset, split)
    raise DataError(f"{path} is not a file or folder. Check the path, or give a hub id of the form owner/name.")


def open_table(path: Path) -> Raw | None:
    """A file of named columns; None if it is another kind of file."""
    return _open_file(path) if path.suffix.lower() in TABLE_SUFFIXES else None


def files_in(folder: Path, suffixes: Collection[str]) -> list[Path]:
    """The files in a folder and its subfolders that have one of these suffixes, without hidden files."""
    found = (path for path in folder.rglob("*") if path.suffix.lower() in suffixes and path.is_file())
    return sorted(path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts))


def has_split(source: str | Path, split: str) -> bool:
    """Whether a local folder has this split. A file has none, and for a hub set it is not known."""
    path = Path(source).expanduser()
    return path.is_dir() and (find_arrays(path, split) is not None or any(_find_split(path, w) for w in _words(split)))


def _open_file(path: Path, conll: bool = False) -> Raw:
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _open_parquet([path])
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty.")
    if suffix in _CSV_SUFFIXES:
        return _open_csv(path)
    if suffix in _JSONL_SUFFIXES:
        return _open_jsonl(path)
    if suffix in CONLL_SUFFIXES or conll:
        return _open_conll(path)
    raise DataError(
        f"{path}: files ending in '{suffix}' cannot be read. Give .parquet, .csv, .tsv, .jsonl, .txt or .conll, "
        "or modality='token' for a CoNLL file of another name."
    )


def _open_folder(folder: Path, split: str) -> Raw:
    for word in _words(split):
        if found := _find_split(folder, word):
            if found[0].is_dir():
                return _open_images(found[0])
            if found[0].suffix.lower() == ".parquet":
                if len({path.parent for path in found}) > 1:
                    parents = sorted({path.parent for path in found})
                    raise DataError(f"{folder}: the split '{word}' is in several folders, {some(parents)}. Pass one.")
                return _open_parquet(found)
            if len(found) > 1:
                raise DataError(f"{folder}: several files for the split '{word}', {some(found)}. Pass one of them.")
            return _open_file(found[0])
    if arrays := find_arrays(folder, split):
        return _open_arrays(arrays)
    every_word = dict.fromkeys(word for words in _SPLITS.values() for word in words)
    splits = [word for word in every_word if _find_split(folder, word) or find_arrays(folder, word)]
    if splits:
        raise DataError(f"{folder} has no split '{split}'. It has: {', '.join(splits)}.")
    if loose := _loose_pictures(folder):
        raise DataError(
            f"{loose} holds pictures, but no folders of classes: put the pictures of each class in a folder of its "
            f"name ({loose}/<class>/), or list them in {folder}/train.csv with the columns image and label."
        )
    if any(_image_files(sub) for sub in _folders(folder)):
        if split == "train":
            return _open_images(folder)
        raise DataError(
            f"{folder} has no split '{split}': its folders are classes ({some(_folders(folder))}). "
            "Put them under train/ and test/, or hold a part out with --benchmark.test_fraction 0.2."
        )
    raise DataError(
        f"{folder} holds nothing to read. Expected <split>-*.parquet, <split>.csv, .tsv, .jsonl, .txt or .conll, "
        "<split>/<class>/ or <class>/ with pictures, or the files of CIFAR (python version), SVHN (.mat) or MNIST "
        "(idx); a single file of another name can be passed itself."
    )


def _open_parquet(files: list[Path]) -> Raw:
    """Read with pyarrow, which makes no second copy in the cache of `datasets` and reads pictures by row groups."""
    parquet = _import("pyarrow.parquet")
    ends: list[int] = []  # of each file, in rows
    columns: dict[str, str] = {}
    class_names: dict[str, list[str]] = {}
    for path in files:
        try:
            with parquet.ParquetFile(path) as file:
                ends.append((ends[-1] if ends else 0) + file.metadata.num_rows)
                described = _describe(file.schema_arrow)
        except ConfigError:
            raise
        except Exception as error:  # pyarrow has no common class for what a broken file can raise
            raise _broken_parquet(path, error) from error
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
    return Raw(source, columns, values, ends[-1], where, class_names, files[0].parent)


def _open_hub(name: str, subset: str | None, split: str) -> Raw:
    datasets = _import("datasets")
    try:
        splits = datasets.load_dataset(name, subset)
    except Exception as error:  # network, cache, permission, unknown name, missing configuration: the error says which
        reason = " ".join(str(error).split())[:300]
        raise DataError(
            f"'{name}' is not a file or folder here and could not be loaded from the hub "
            f"({type(error).__name__}: {reason}). Check name and network, or pass a folder with its Parquet files."
        ) from error
    found = next((word for word in _words(split) if word in splits), None)
    if found is None:
        raise DataError(f"'{name}' has no split '{split}'. It has: {', '.join(map(str, splits))}.")
    dataset = splits[found]
    columns, class_names = _describe(dataset.features.arrow_schema)
    table = dataset.with_format("arrow")[:]  # stays memory-mapped
    cached = Path(datasets.config.HF_CACHE_HOME)

    def values(names: Sequence[str], rows: Sequence[int]) -> Iterator[tuple[Any, ...]]:
        picked = [table.column(name) for name in names]
        for row in rows:
            yield tuple(column[row].as_py() for column in picked)

    return Raw(name, columns, values, table.num_rows, lambda row: f"{name}, {found}, row {row}", class_names, cached)


def _open_arrays(arrays: Arrays) -> Raw:
    pixels = cache(arrays.pixels)  # large, and not needed for counting

    def values(names: Sequence[str], rows: Sequence[int]) -> Iterator[tuple[Any, ...]]:
        for row in rows:
            cells: dict[str, Any] = {"label": arrays.labels[row]}
            if "image" in names:
                cells["image"] = Image.fromarray(np.ascontiguousarray(pixels()[row]))
            yield tuple(cells[name] for name in names)

    columns = {"image": "picture", "label": "class" if arrays.names else "integer"}
    class_names = {"label": arrays.names} if arrays.names else {}
    count = len(arrays.labels)
    return Raw(
        str(arrays.source), columns, values, count, lambda row: f"{arrays.source}, picture {row}", class_names, None
    )


def _open_images(folder: Path) -> Raw:
    pictures: list[dict[str, Any]] = []
    annotations = folder / "val_annotations.txt"  # Tiny-ImageNet's validation split: one folder, classes in a list
    if annotations.is_file():
        for number, line in enumerate(_lines(annotations), start=1):
            file, *label = line.split("\t")
            if not label:
                raise DataError(f"{annotations}, line {number}: expected a file name, a tab and a class, got {line!r}.")
            try:
                pictures.append({"image": inside(folder / "images", file), "label": label[0]})
            except ValueError as error:
                raise DataError(f"{annotations}, line {number}: {error}.") from error
    for class_folder in [] if pictures else _folders(folder):
        files = _image_files(class_folder)
        if not files:
            raise DataError(f"{class_folder}: the class folder holds no picture. Fill it or remove it.")
        pictures.extend({"image": file, "label": class_folder.name} for file in files)
    raw = _from_records(folder, pictures, lambda row: str(pictures[row]["image"]), None)
    return _in_words(raw, pictures, folder.parent / "words.txt")


def _in_words(raw: Raw, pictures: list[dict[str, Any]], file: Path) -> Raw:
    """Replace ImageNet's class numbers (n01443537) by words (goldfish), if the set has a list of them. The classes stay
    in the order of their numbers. Two classes with the same word keep their numbers."""
    if not file.is_file():
        return raw
    words = {number: text.split(",")[0].strip() for number, _, text in (line.partition("\t") for line in _lines(file))}
    numbers = sorted({picture["label"] for picture in pictures})
    shared = Counter(words.get(number) for number in numbers)
    names = {number: words.get(number) or number for number in numbers}
    names |= {number: number for number in numbers if shared[words.get(number)] > 1}
    for picture in pictures:
        picture["label"] = names[picture["label"]]
    return replace(raw, class_names={"label": [names[number] for number in numbers]})


def _open_csv(path: Path) -> Raw:
    records: list[dict[str, Any]] = []
    numbers: list[int] = []
    limit = csv.field_size_limit(2**31 - 1)  # for long documents; the default refuses more than 131,072 characters
    try:
        separator = "\t" if path.suffix.lower() == ".tsv" else ","
        reader = csv.reader(_lines(path, keep_ends=True), delimiter=separator, strict=True)
        header = [name.strip() for name in next(reader, [])]
        if len(header) == 1 and (other := next((mark for mark in ";\t|," if mark in header[0]), None)):
            said = "commas" if separator == "," else "tabs"
            raise DataError(
                f"{path} is separated by {other!r}, not by {said} (its first line is {header[0][:80]!r}): save it with "
                f"{said}" + (", or rename it to .tsv." if other == "\t" else ".")
            )
        if repeated := [name for name, times in Counter(header).items() if times > 1]:
            raise DataError(f"{path} has the column '{repeated[0]}' twice: rename or remove one of them.")
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
    raw = _from_records(path, records, lambda row: f"{path}, line {numbers[row]}", path.parent)
    return replace(raw, typed=False)


def _open_jsonl(path: Path) -> Raw:
    records: list[dict[str, Any]] = []
    numbers: list[int] = []
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # no JSON, a number of thousands of digits, nested too deeply
            raise DataError(f"{path}, line {number}: this is not readable as JSON ({error}): {line[:80]}") from error
        if not isinstance(record, dict):
            raise DataError(f'{path}, line {number}: expected {{"text": ..., "label": ...}}, got {line[:80]}')
        records.append(record)
        numbers.append(number)
    if not records:
        raise DataError(f"{path} has no rows.")
    return _from_records(path, records, lambda row: f"{path}, line {numbers[row]}", path.parent)


def _open_conll(path: Path) -> Raw:
    records: list[dict[str, Any]] = []
    numbers: list[int] = []  # the first line of each sentence
    for first, words, tags in conll_sentences(_lines(path)):
        for number, (word, tag) in enumerate(zip(words, tags, strict=True), first):
            if tag is None:
                raise DataError(f"{path}, line {number}: only one column, {word!r}. Expected a word and its tag.")
            if not TAG.fullmatch(tag):
                raise DataError(not_iob(f"{path}, line {number}", tag))
        records.append({"tokens": words, "ner_tags": tags})
        numbers.append(first)
    if not records:
        raise DataError(f"{path} has no sentences.")
    return _from_records(path, records, lambda row: f"{path}, the sentence from line {numbers[row]}", path.parent)


def conll_sentences(lines: Iterable[str]) -> Iterator[tuple[int, list[str], list[str | None]]]:
    """Sentences with one word per line: the line on which each begins, its words, and the last column of each word, if
    there is one."""
    words: list[str] = []
    tags: list[str | None] = []
    first = 0
    for number, line in enumerate([*lines, ""], start=1):
        # Words may contain no-break and other exotic spaces, so only tabs and blanks separate.
        fields = [field for field in re.split(r"[ \t]+", line.strip(" \t")) if field]
        if fields and fields[0] != "-DOCSTART-":
            first = first if words else number
            words.append(fields[0])
            tags.append(fields[-1] if len(fields) > 1 else None)
        elif words:
            yield first, words, tags
            words, tags = [], []


def _from_records(source: Path, records: list[dict[str, Any]], where: Callable[[int], str], folder: Path | None) -> Raw:
    def kind(name: str, value: Any) -> str:
        named = isinstance(value, str) and Path(value).suffix.lower() in IMAGE_SUFFIXES
        array = getattr(value, "ndim", 0)  # of NumPy or torch; rows of pandas hold them in place of lists
        if isinstance(value, Path | Image.Image) or array > 1 or (named and name.lower() in PICTURE_COLUMNS):
            return "picture"
        if isinstance(value, list) or array == 1:
            first = next(iter(value.tolist() if array else value), "")
            whole, real = isinstance(first, int), isinstance(first, float)
            return "integers" if whole else "numbers" if real else "strings"
        return "string" if isinstance(value, str) or value is None else "integer" if isinstance(value, int) else "other"

    def values(names: Sequence[str], rows: Sequence[int]) -> Iterator[tuple[Any, ...]]:
        for row in rows:
            yield tuple(records[row].get(name) for name in names)

    columns = {name: kind(name, value) for name, value in records[0].items()}
    return Raw(str(source), columns, values, len(records), where, {}, folder)


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
            class_names[field.name] = [*map(_as_text, feature["names"])]
            columns[field.name] = "classes" if many else "class"
        elif types.is_integer(kind):
            columns[field.name] = "integer" + many
        elif many and types.is_floating(kind):
            columns[field.name] = "numbers"
        elif types.is_string(kind) or types.is_large_string(kind):
            columns[field.name] = "string" + many
        else:
            in_struct = types.is_struct(kind) and kind.get_field_index("bytes") >= 0
            picture = in_struct or types.is_binary(kind) or types.is_large_binary(kind)
            columns[field.name] = "picture" if picture and not many else "other"
    return columns, class_names


# --- small things


def _as_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a class name that is not a text: {value!r:.50}")
    return value


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"Parquet files and hub sets need the package '{module.split('.')[0]}': pip install \"bace-cil[datasets]\""
        ) from error


def _broken_parquet(path: Path, error: Exception) -> DataError:
    reason = " ".join(str(error).split())
    return DataError(f"{path} is not a readable Parquet file ({reason}). It may be cut short: fetch it again.")


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
    """Whether a file name contains a split: train, train-00000-of-00002, ag_news.train."""
    return re.fullmatch(rf"(.*[-_.])?{re.escape(word)}([-_.].*)?", stem.lower()) is not None


def _find_split(folder: Path, word: str) -> list[Path]:
    """The Parquet files of a split, or else its other files, or else its image folder."""
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
    return tables or images or [path for path in files if path.suffix.lower() in CONLL_SUFFIXES]


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _has_classes(folder: Path) -> bool:
    # Tiny-ImageNet's unlabelled test split is one folder of that name.
    names = [sub.name for sub in _folders(folder)]
    return bool(names) and (names != ["images"] or (folder / "val_annotations.txt").is_file())


def _loose_pictures(folder: Path) -> Path | None:
    """The folder whose pictures are in no class folder: this one or, if it only has split folders, one of those."""
    splits = {word for words in _SPLITS.values() for word in words}
    below = _folders(folder)
    if not any(path.suffix.lower() in IMAGE_SUFFIXES for path in folder.iterdir()):
        only_splits = below and all(sub.name.lower() in splits for sub in below)
        return next((sub for sub in below if _image_files(sub)), None) if only_splits else None
    return None if any(_image_files(sub) for sub in below) else folder


def _image_files(folder: Path) -> list[Path]:
    found = (path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES and not path.is_dir())
    return sorted(path for path in found if not path.name.startswith("."))


def _is_data_file(path: Path) -> bool:
    return path.suffix.lower() in TABLE_SUFFIXES | CONLL_SUFFIXES


def some(things: Iterable[Any]) -> str:
    names = [thing.name if isinstance(thing, Path) else str(thing) for thing in things]
    return ", ".join(names[:4]) + (" ..." if len(names) > 4 else "")


def not_iob(where: str, tag: str) -> str:
    number = " Integer tags need names: replace them, or give `read` label_names=." if tag.isdecimal() else ""
    return f"{where}: '{tag}' is not an IOB tag. Expected O, B-<type> or I-<type>.{number}"
