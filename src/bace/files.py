"""Files are written completely or not at all, and never through a symbolic link. Files of others are never deleted.
JSON that anyone may have written is read with limits, and a path in it cannot lead out of its folder."""

import fcntl
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import IO, Any, get_args, get_origin, get_type_hints

MOST_NESTED = 100  # JSON that is nested deeper has no meaning here and would cause a RecursionError somewhere


def parse_json(text: str) -> Any:
    """Parse JSON from a file. A ValueError says why it cannot be used. Two things are refused that Python's own reader
    accepts: halves of characters, which cannot be written again, and unlimited nesting."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not _is_flat(found, MOST_NESTED):
        raise ValueError(f"nested more than {MOST_NESTED} deep")
    json.dumps(found, ensure_ascii=False).encode()  # UnicodeEncodeError is a ValueError
    return found


def _is_flat(value: Any, most: int) -> bool:
    """Whether at most this many lists and objects are nested in each other."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return parts is None or (most > 0 and all(_is_flat(part, most - 1) for part in parts))


def typed(found: Any, kind: Any, name: str) -> Any:
    """Convert JSON to an annotated type: an object to a dataclass, a list to a tuple. A ValueError says what does not
    fit. Numbers must be finite. If None is allowed, it replaces numbers that are not finite."""
    origin, kinds = get_origin(kind), get_args(kind)
    if NoneType in kinds:
        infinite = isinstance(found, float) and not is_number(found)
        return None if found is None or infinite else typed(found, kinds[0], name)
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(found, dict):
        needed = [each.name for each in fields(kind) if each.default is MISSING and each.default_factory is MISSING]
        if absent := [field for field in needed if field not in found]:
            raise ValueError(f"'{absent[0]}' is missing")
        hints = get_type_hints(kind)
        return kind(**{field: typed(found[field], hint, field) for field, hint in hints.items() if field in found})
    if origin is dict and isinstance(found, dict):
        return {key: typed(value, kinds[1], key) for key, value in found.items()}
    if origin in (tuple, Sequence) and isinstance(found, list):
        each = kinds if origin is tuple and kinds[-1] is not ... else kinds[:1] * len(found)
        if len(each) == len(found):
            return tuple(typed(value, own, name) for value, own in zip(found, each, strict=True))
    if kind is float and is_number(found):
        return float(found)
    if kind is Any or (type(found) is kind and kind is not float):
        return found
    words = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
    wanted = words.get(kind, "a list" if origin in (tuple, Sequence) else "an object")
    raise ValueError(f"'{name}' must be {wanted}, got {found!r:.100}")


def is_number(found: Any) -> bool:
    """Whether this is a finite number that a float can hold."""
    return type(found) in (int, float) and abs(found) <= sys.float_info.max


def check_format(found: dict[str, Any], newest: int) -> None:
    """Raise a ValueError if a newer version wrote this. A file without a number has format 1."""
    number = found.get("format", 1)
    if type(number) is not int or not 1 <= number <= newest:
        raise ValueError(f"'format' is {number!r:.20}, and this version of bace reads 1 to {newest}: update bace")


def inside(folder: Path, name: str | Path) -> Path:
    """The path that a file in `folder` names; ValueError if it leads out of the folder."""
    if not Path(os.path.abspath(folder / name)).is_relative_to(os.path.abspath(folder)):
        raise ValueError(f"'{name}' leads out of the folder {folder}")
    return folder / name


@contextmanager
def in_place(path: Path, ours: Sequence[str] = ()) -> Iterator[Path]:
    """Give a place beside `path` for a new file or folder, and rename it when it is complete and on the disk. Readers
    find either the old one or the new one, even after a power loss. `ours`: the files of a folder, by glob patterns."""
    beside = path.with_name(f".{path.name}.unfinished")
    discard(beside, ours)  # remains of a killed process
    try:
        yield beside
        for written in beside.iterdir() if beside.is_dir() else [beside]:
            to_disk(written)
        beside.replace(path)
        to_disk(path.parent)
    except BaseException:
        discard(beside, ours)
        raise


def write_whole(path: Path, text: str) -> None:
    """Write a file completely or not at all."""
    with in_place(path) as beside, open_own(beside, "w") as file:
        file.write(text)


@contextmanager
def in_turn(folder: Path) -> Iterator[None]:
    """Wait until no other process is in this block with the same folder. This protects files that several processes may
    write at the same time. The kernel holds the lock, on the folder itself."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def open_own(path: Path, mode: str) -> IO[str]:
    """Open a file of ours for writing. A symbolic link in its place is refused: someone else chose where it leads."""
    return open(path, mode, encoding="utf-8", opener=_no_link)


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def to_disk(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def discard(path: Path, ours: Sequence[str] = ()) -> None:
    """Delete a file, or a link but never its target. In a folder, delete the files of these glob patterns, and then the
    folder itself if nothing else is in it."""
    if path.is_symlink() or not path.is_dir():
        return path.unlink(missing_ok=True)
    for own in [own for pattern in ours for own in path.glob(pattern)]:
        own.unlink()
    if not any(path.iterdir()):
        path.rmdir()
