"""Files are written whole or not at all, never through a symbolic link; what we did not write is never deleted."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO


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
