"""Checkpoints: safetensors and JSON with checksums, written to a temporary name and renamed into place. Never pickle.

A checkpoint is a folder `checkpoints/00000042/` with `state.safetensors`, `state.json` and `sha256.json`. It appears
complete or not at all, and older checkpoints are deleted only when the new one is in place.
"""

import hashlib
import json
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bace.errors import BaceError, CheckpointError
from bace.files import discard, in_place, parse_json
from bace.models.weights import raw_bytes

MANIFEST = "sha256.json"
FILES = ("state.safetensors", "state.json", MANIFEST)
OURS = (*FILES, ".tmp*")  # including the temporary files of safetensors


def save(folder: Path, tensors: dict[str, Tensor], state: dict[str, Any], *, keep: int) -> Path:
    """Write the next checkpoint into `folder` and keep the newest `keep`."""
    existing = _numbers(folder)
    final = folder / f"{(existing[-1] if existing else 0) + 1:08d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in _leftovers(folder):
            discard(leftover, OURS)
        with in_place(final, OURS) as beside:
            beside.mkdir(exist_ok=True)
            save_file(_unshared(tensors), beside / "state.safetensors")
            (beside / "state.json").write_text(json.dumps(state))
            sums = {name: _sha256(beside / name) for name in ("state.safetensors", "state.json")}
            (beside / MANIFEST).write_text(json.dumps(sums))
    except (OSError, SafetensorError) as error:
        last = f"the last good checkpoint is {existing[-1]:08d}" if existing else "there is no earlier checkpoint"
        raise CheckpointError(
            f"could not save a checkpoint in '{folder}': {error}. Nothing is lost: {last}. "
            "Free some space (or lower checkpoint.keep) and continue with --resume."
        ) from error
    for number in _numbers(folder)[:-keep]:
        try:
            discard(folder / f"{number:08d}", FILES)
        except OSError as error:  # the new checkpoint is in place, so the run can continue
            old = folder / f"{number:08d}"
            warnings.warn(f"the old checkpoint '{old}' could not be deleted: {error}", stacklevel=2)
    return final


def load(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The newest intact checkpoint. If one is damaged, a warning names it and the previous one is used.

    None if there is no checkpoint; CheckpointError if all are damaged."""
    numbers = _numbers(folder)
    for number in reversed(numbers):
        path = folder / f"{number:08d}"
        try:
            return _read(path)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
            damage = f"{type(error).__name__}: {error}"
        warnings.warn(f"checkpoint '{path}' is damaged ({damage}); using the previous one", stacklevel=2)
    if numbers:
        raise CheckpointError(f"every checkpoint in '{folder}' is damaged: start again in another folder")
    return None


def is_foreign(folder: Path) -> bool:
    """Whether a folder holds files but no checkpoint, so that it is not one of ours."""
    if not folder.exists() or _numbers(folder):
        return False
    if not folder.is_dir():
        return True
    ours = {path.name for path in _leftovers(folder)}
    return any(path.name not in ours for path in folder.iterdir())


def generations(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest last."""
    return [folder / f"{number:08d}" for number in _numbers(folder)]


def _numbers(folder: Path) -> list[int]:
    """The numbers of the checkpoints in a folder: folders named by eight digits that hold one of our files."""
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
        raise ValueError("state.json does not hold an object")
    return load_file(path / "state.safetensors"), state


@contextmanager
def understood(what: str) -> Iterator[None]:
    """Turn every inconsistency inside a checkpoint into one error: checksums say that it is intact, not who wrote
    it."""
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
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Plain CPU tensors that do not share storage (safetensors refuses shared storage)."""
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


def take_state(method: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of a method for a checkpoint: its tensors, under "method.", and the rest, which must be JSON."""
    state = method.state_dict()
    tensors = {f"method.{name}": value for name, value in state.items() if isinstance(value, Tensor)}
    return tensors, {name: value for name, value in state.items() if not isinstance(value, Tensor)}


def fingerprints(tensors: dict[str, Tensor]) -> dict[str, str]:
    """A fingerprint of the values of each tensor."""
    return {name: hashlib.blake2b(raw_bytes(tensor), digest_size=16).hexdigest() for name, tensor in tensors.items()}


def method_state(tensors: dict[str, Tensor], plain: dict[str, Any]) -> dict[str, Any]:
    """The state dict of a method that already has its shapes, from the result of `take_state`."""
    return {name.removeprefix("method."): t for name, t in tensors.items() if name.startswith("method.")} | plain


def as_saved(values: dict[str, Any], usual: object) -> dict[str, Any]:
    """The fields of a record from its JSON; values of an unexpected type are refused."""
    for name, own in vars(usual).items():
        found = values.get(name, own)
        if own is not None and type(found) is not type(own) and not isinstance(own, float):
            raise TypeError(f"'{name}' is {found!r:.50}")
    return values
