"""Decoded pictures are stored beside their data, so that only the first run decodes them.

A store is one file of raw bytes, mapped into memory: runs and processes share its pages, and unread pictures take no
memory. Its name contains the fingerprint of its sources and its shape, it gets this name only when it is complete, and
its size must match its shape. A file with the right name is therefore correct. Any store may be deleted at any time.
"""

import contextlib
import hashlib
import math
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VERSION = 1  # of the decoding; a change makes new stores
FOLDER = ".bace"


def cache_folder() -> Path:
    return Path(os.environ.get("BACE_CACHE") or "~/.cache/bace").expanduser()


def fingerprint(pictures: Iterable[Any], about: object) -> str | None:
    """A hash of everything that decoded pictures depend on: the bytes of each, or the path, size and time of its file,
    and the options. None if this is unknown before decoding, or if a file is missing."""
    digest = hashlib.blake2b(repr((VERSION, about)).encode(), digest_size=16)
    for picture in pictures:
        if isinstance(picture, Path):
            try:
                found = picture.stat()
            except OSError:
                return None
            digest.update(f"{picture}|{found.st_size}|{found.st_mtime_ns}|".encode(errors="surrogateescape"))
        elif isinstance(picture, bytes):
            digest.update(b"%d|" % len(picture))
            digest.update(picture)
        else:
            return None
    return digest.hexdigest()


def find(key: str, data: Path) -> Tensor | None:  # (pictures, channels, height, width)
    """The pictures with this fingerprint, beside their data or in the cache folder."""
    for folder in _folders(data):
        for path in folder.glob(f"{key}-*.pixels"):
            shape = re.fullmatch(rf"{key}-(\d+)x(\d+)x(\d+)x(\d+)\.pixels", path.name)
            if shape and not path.is_symlink() and path.is_file():
                size = tuple(int(side) for side in shape.groups())
                if path.stat().st_size == math.prod(size):
                    return _mapped(path, size)
    return None


def _folders(data: Path) -> list[Path]:
    beside = data / FOLDER
    return [*([] if beside.is_symlink() else [beside]), cache_folder() / "pictures"]


def _mapped(path: Path, shape: tuple[int, ...]) -> Tensor:
    # private: a program that writes to its pictures does not change the store
    return torch.from_file(str(path), shared=False, size=math.prod(shape), dtype=torch.uint8).view(shape)


class Draft:
    """A store that is being written. Nobody finds it until it is `finished`; otherwise it is deleted."""

    def __init__(self, key: str, data: Path) -> None:
        self.key, self.data = key, data
        self.path: Path | None = None
        self.shape: tuple[int, ...] = ()

    def allocate(self, shape: tuple[int, ...]) -> Tensor | None:
        """A file for the pictures in the first folder that has enough space; None if no folder has."""
        self.drop()
        size = math.prod(shape)
        for folder in _folders(self.data):
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                handle, name = tempfile.mkstemp(".draft", self.key, folder)
                self.path, self.shape = Path(name), shape
                try:
                    # Reserve the blocks now: writing to a mapped file on a full disk would kill the process.
                    getattr(os, "posix_fallocate", lambda file, _, length: os.truncate(file, length))(handle, 0, size)
                    return torch.from_file(name, shared=True, size=size, dtype=torch.uint8).view(shape)
                except OSError:
                    self.drop()
                finally:
                    os.close(handle)
        return None

    def finished(self) -> Tensor | None:
        """The store under its own name, mapped; None if none was written."""
        if self.path is None:
            return None
        path = self.path.with_name(f"{self.key}-{'x'.join(map(str, self.shape))}.pixels")
        os.chmod(self.path, 0o644)  # others may read it: the data are theirs, too
        os.replace(self.path, path)
        self.path = None
        return _mapped(path, self.shape)

    def drop(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)
            self.path = None


@contextlib.contextmanager
def draft(key: str, data: Path) -> Iterator[Draft]:
    made = Draft(key, data)
    try:
        yield made
    finally:
        made.drop()
