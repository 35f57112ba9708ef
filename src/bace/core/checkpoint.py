"""Checkpoints: safetensors and JSON with checksums, written beside and renamed into place. No pickle, ever.

A checkpoint is a folder `checkpoints/00000042/` with `state.safetensors`, `state.json` and `sha256.json`. It appears
whole or not at all; older ones are deleted only when the new one is in place.
"""

import hashlib
import json
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bace.errors import BaceError, CheckpointError
from bace.files import delete_folder, parse_json, to_disk

MANIFEST = "sha256.json"
FILES = ("state.safetensors", "state.json", MANIFEST)


def save(folder: Path, tensors: dict[str, Tensor], state: dict[str, Any], *, keep: int) -> Path:
    """Write the next checkpoint into `folder` and keep the newest `keep`."""
    existing = _numbers(folder)
    final = folder / f"{(existing[-1] if existing else 0) + 1:08d}"
    beside = folder / f".{final.name}.unfinished"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in _leftovers(folder):
            # .tmp: what safetensors writes to, before it renames it
            delete_folder(leftover, [*FILES, *(path.name for path in leftover.glob(".tmp*"))])
        beside.mkdir(exist_ok=True)
        save_file(_unshared(tensors), beside / "state.safetensors")
        (beside / "state.json").write_text(json.dumps(state))
        sums = {name: _sha256(beside / name) for name in ("state.safetensors", "state.json")}
        (beside / MANIFEST).write_text(json.dumps(sums))
        for path in beside.iterdir():
            to_disk(path)
        beside.rename(final)
        to_disk(folder)
    except (OSError, SafetensorError) as error:
        if beside.is_dir():
            delete_folder(beside, FILES)
        last = f"the last good checkpoint is {existing[-1]:08d}" if existing else "there is no earlier checkpoint"
        raise CheckpointError(
            f"could not save a checkpoint in '{folder}': {error}. Nothing is lost: {last}. "
            "Make room (or lower checkpoint.keep) and continue with --resume."
        ) from error
    for number in _numbers(folder)[:-keep]:
        try:
            delete_folder(folder / f"{number:08d}", FILES)
        except OSError as error:  # the new one is in place: no reason to stop
            warnings.warn(f"an old checkpoint, '{folder / f'{number:08d}'}', is not deleted: {error}", stacklevel=2)
    return final


def load(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The newest checkpoint that is whole; a damaged one is named in a warning and the one before is used.

    None if there is no checkpoint at all; CheckpointError if there are only damaged ones."""
    numbers = _numbers(folder)
    for number in reversed(numbers):
        path = folder / f"{number:08d}"
        try:
            return _read(path)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
            damage = f"{type(error).__name__}: {error}"
        warnings.warn(f"checkpoint '{path}' is damaged ({damage}); using the one before it", stacklevel=2)
    if numbers:
        raise CheckpointError(f"every checkpoint in '{folder}' is damaged: start the run again in another folder")
    return None


def is_foreign(folder: Path) -> bool:
    """Whether there are things in a folder, but no checkpoint: it is somebody else's."""
    if not folder.exists() or _numbers(folder):
        return False
    if not folder.is_dir():
        return True
    ours = {path.name for path in _leftovers(folder)}
    return any(path.name not in ours for path in folder.iterdir())


def _numbers(folder: Path) -> list[int]:
    """Of the checkpoints in a folder: folders with a number of eight digits that hold a file of ours."""
    found = folder.iterdir() if folder.is_dir() else ()
    numbered = [path for path in found if re.fullmatch(r"[0-9]{8}", path.name) and path.is_dir()]
    return sorted(int(path.name) for path in numbered if any((path / name).is_file() for name in FILES))


def _leftovers(folder: Path) -> list[Path]:
    """Checkpoints that were being written when their process was killed."""
    return [path for path in folder.iterdir() if re.fullmatch(r"\.[0-9]{8}\.unfinished", path.name) and path.is_dir()]


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    sums = parse_json((path / MANIFEST).read_text(encoding="utf-8"))
    for name in ("state.safetensors", "state.json"):
        if _sha256(path / name) != sums[name]:
            raise ValueError(f"{name} does not match its checksum")
    state = parse_json((path / "state.json").read_text(encoding="utf-8"))
    if not isinstance(state, dict):
        raise ValueError("state.json holds no object")
    return load_file(path / "state.safetensors"), state


@contextmanager
def understood(what: str) -> Iterator[None]:
    """Sums say that a checkpoint is whole, not who wrote it: whatever does not fit together inside it is one error."""
    try:
        yield
    except BaceError:
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [""])[-1].strip()
        raise CheckpointError(
            f"{what} is not what this version of bace saves for its settings ({type(error).__name__}: {reason:.200})"
        ) from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(file)


def _digest(file: Any) -> str:  # Python 3.10 has no file_digest
    total = hashlib.sha256()
    while chunk := file.read(1 << 20):
        total.update(chunk)
    return total.hexdigest()


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Plain CPU tensors, no two of them in the same storage (safetensors refuses those)."""
    seen: set[int] = set()
    plain = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        if tensor.untyped_storage().data_ptr() in seen or tensor.numel() != tensor.untyped_storage().nbytes() // max(
            tensor.element_size(), 1
        ):
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        plain[name] = tensor
    return plain


def split_state(state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A state dict as its tensors and the rest, which must be JSON."""
    tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
    return tensors, {k: v for k, v in state.items() if k not in tensors}


def fill(method: nn.Module, tensors: dict[str, Tensor], plain: dict[str, Any]) -> None:
    """Give a method that has its shapes the values of a checkpoint: the tensors under "method.", and the rest."""
    values = {name.removeprefix("method."): t for name, t in tensors.items() if name.startswith("method.")}
    method.load_state_dict({**values, **plain})


def as_saved(values: dict[str, Any], usual: object) -> dict[str, Any]:
    """The fields of a record from its JSON; a value of another type than the usual one is refused."""
    for name, own in vars(usual).items():
        found = values.get(name, own)
        if own is not None and type(found) is not type(own) and not isinstance(own, float):
            raise TypeError(f"'{name}' is {found!r:.50}")
    return values
