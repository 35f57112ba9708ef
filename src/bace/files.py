"""Files are written whole or not at all, never through a symbolic link; what we did not write is never deleted. JSON
that anyone may have written is read with limits, and a path in it leads to nowhere but its folder."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

MOST_NESTED = 100  # JSON deeper than this has no meaning here, and would end in a RecursionError somewhere


def parse_json(text: str) -> Any:
    """JSON from a file. ValueError says why it cannot be used, also for what Python's own reader lets through: halves
    of characters, which cannot be written again, and nesting without end."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not _is_flat(found, MOST_NESTED):
        raise ValueError(f"nested more than {MOST_NESTED} deep")
    json.dumps(found, ensure_ascii=False).encode()  # UnicodeEncodeError is a ValueError
    return found


def _is_flat(value: Any, most: int) -> bool:
    """Whether at most so many lists and objects are nested in each other."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return parts is None or (most > 0 and all(_is_flat(part, most - 1) for part in parts))


def inside(folder: Path, name: str | Path) -> Path:
    """The path that a file in `folder` names; ValueError if it leads out of the folder."""
    if not Path(os.path.abspath(folder / name)).is_relative_to(os.path.abspath(folder)):
        raise ValueError(f"'{name}' leads out of the folder {folder}")
    return folder / name


def write_whole(path: Path, text: str) -> None:
    """Write beside and rename into place: whoever reads finds the old file or the new one, also after a power loss."""
    beside = path.with_name(f".{path.name}.unfinished")
    beside.unlink(missing_ok=True)  # what a killed process left; of a link, the link
    try:
        with open_own(beside, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        to_disk(path.parent)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


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


def delete_folder(folder: Path, names: Iterable[str]) -> None:
    """Delete these files of ours, and the folder if nothing else is in it."""
    for name in names:
        (folder / name).unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()
