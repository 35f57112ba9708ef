"""The binary files in which some picture sets are published: CIFAR's pickles, SVHN's .mat files, MNIST's idx files."""

import gzip
import math
import pickle
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from bace.errors import DataError

Bytes = npt.NDArray[np.uint8]
MOST_BYTES = 2**30  # in the pictures of one idx file, unpacked
_DIGITS = [str(digit) for digit in range(10)]


@dataclass(frozen=True)
class Arrays:
    """One split of a set.

    labels: the label of each picture, as a position in `names`, or as a number if the files have no names.
    pixels: reads the pictures, (examples, height, width) or (examples, height, width, 3); they are large.
    """

    source: Path
    labels: Sequence[int]
    names: list[str] | None
    pixels: Callable[[], Bytes]


def find_arrays(folder: Path, split: str) -> Arrays | None:
    """The split "train" or "test", if the folder holds the files of such a set."""
    if split not in ("train", "test"):
        return None
    for find in (_find_cifar, _find_svhn, _find_idx):
        if found := find(folder, split):
            return found
    return None


# --- CIFAR-10 and CIFAR-100: cifar-10-batches-py, cifar-100-python


def _find_cifar(folder: Path, split: str) -> Arrays | None:
    ten = (folder / "batches.meta").is_file()
    if ten:
        files = sorted(folder.glob("data_batch_*")) if split == "train" else [folder / "test_batch"]
    else:
        files = [folder / split]
    meta = folder / ("batches.meta" if ten else "meta")
    if not meta.is_file() or not files or not all(file.is_file() for file in files):
        return None
    labels, names = ("labels", "label_names") if ten else ("fine_labels", "fine_label_names")
    batches = [read_pickle(file) for file in files]
    found: list[int] = []
    for file, batch in zip(files, batches, strict=True):
        own, data = batch.get(labels), batch.get("data")
        if not isinstance(own, list) or not all(type(label) is int for label in own):
            raise DataError(f"{file} has no list of whole numbers '{labels}': it is not a file of CIFAR.")
        if not isinstance(data, np.ndarray) or data.shape != (len(own), 3 * 32 * 32):
            raise DataError(f"{file}: 'data' should hold {len(own)} pictures of 3 x 32 x 32 bytes, one per label.")
        found += own
    of_meta = read_pickle(meta).get(names)
    if not isinstance(of_meta, list) or not all(isinstance(name, bytes | str) for name in of_meta):
        raise DataError(f"{meta} has no list of class names '{names}': it is not a file of CIFAR.")

    def pixels() -> Bytes:
        stacked: Bytes = np.concatenate([batch["data"] for batch in batches])
        return stacked.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)

    return Arrays(folder, found, [_text(name) for name in of_meta], pixels)


def read_pickle(path: Path) -> dict[str, Any]:
    """The dictionary of lists, strings, numbers and byte arrays in a pickle file. No code in it is ever run: everything
    else that it asks for is refused, and our own classes replace even NumPy's."""
    try:
        with path.open("rb") as file:
            content = _Unpickler(file, encoding="bytes").load()
    except DataError as error:
        raise DataError(f"{path} {error}") from error
    except Exception as error:  # a damaged pickle can raise anything
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"{path} is not a readable pickle ({reason}): fetch it again.") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} holds a {type(content).__name__}, not a dictionary: it is not a file of CIFAR.")
    return {_text(key): _array(value) for key, value in content.items() if isinstance(key, bytes | str)}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _STAND_INS[module, name]
        except KeyError:
            raise DataError(
                f"asks for {module}.{name}, which a file of pictures does not need: it is refused. Get it elsewhere."
            ) from None


class _PickledArray:
    """Replaces a NumPy array during unpickling."""

    array: Bytes

    def __init__(self, *_: Any) -> None:
        """NumPy's class, shape and type follow later, as the state."""

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, fortran, content = state
        if not isinstance(kind, _PickledType) or kind.code != "u1" or fortran or not isinstance(content, bytes):
            raise DataError("holds an array that is not of bytes in rows: it is not a file of CIFAR.")
        self.array = np.frombuffer(content, np.uint8).reshape(shape)


class _PickledType:
    """Replaces a NumPy dtype during unpickling."""

    def __init__(self, code: bytes | str, *_: Any) -> None:
        self.code = _text(code)

    def __setstate__(self, state: Any) -> None:
        """Ignore byte order and similar facts, which bytes do not have."""


def _encode(text: str, encoding: str) -> bytes:
    """The function by which Python 3 writes bytes in the old protocols."""
    return text.encode(encoding)


_STAND_INS: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _PickledArray,
    ("numpy._core.multiarray", "_reconstruct"): _PickledArray,
    ("numpy", "ndarray"): None,
    ("numpy", "dtype"): _PickledType,
    ("_codecs", "encode"): _encode,
}


def _array(value: Any) -> Any:
    return value.array if isinstance(value, _PickledArray) else value


def _text(value: bytes | str) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value


# --- SVHN: train_32x32.mat, test_32x32.mat


def _find_svhn(folder: Path, split: str) -> Arrays | None:
    path = folder / f"{split}_32x32.mat"
    if not path.is_file():
        return None
    labels = _read_mat(path, "y").reshape(-1)
    if labels.size and not (labels.min() >= 1 and labels.max() <= 10):
        raise DataError(f"{path}: 'y' should hold 1 to 10, where 10 is the digit 0.")

    def pixels() -> Bytes:
        found = _read_mat(path, "X")
        if found.dtype != np.uint8 or found.shape != (32, 32, 3, len(labels)):
            raise DataError(f"{path}: 'X' should hold {len(labels)} pictures, 32 x 32 x 3 bytes; it is {found.shape}.")
        return cast(Bytes, found.transpose(3, 0, 1, 2))

    return Arrays(path, (labels.astype(int) % 10).tolist(), _DIGITS, pixels)


def _read_mat(path: Path, name: str) -> npt.NDArray[Any]:
    from scipy.io import loadmat

    try:
        found = loadmat(path, variable_names=[name])[name]
    except Exception as error:  # scipy raises many kinds; to the user they all mean the same
        raise DataError(
            f"{path} is not a .mat file with '{name}' ({type(error).__name__}: {error}): fetch it again."
        ) from error
    return cast("npt.NDArray[Any]", found)


# --- MNIST and Fashion-MNIST: train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-..., packed with gzip or not


def _find_idx(folder: Path, split: str) -> Arrays | None:
    images, labels = (_idx_file(folder, split, kind, axes) for kind, axes in (("images", 3), ("labels", 1)))
    if images is None or labels is None:
        return None
    numbers = _read_idx(labels, axes=1)

    def pixels() -> Bytes:
        found = _read_idx(images, axes=3)
        if len(found) != len(numbers):
            raise DataError(f"{images} has {len(found)} pictures, {labels.name} {len(numbers)} labels: get both again.")
        return found

    return Arrays(images, numbers.tolist(), None, pixels)


def _idx_file(folder: Path, split: str, kind: str, axes: int) -> Path | None:
    prefix = {"train": "train", "test": "t10k"}[split]
    names = [f"{prefix}-{kind}{dot}idx{axes}-ubyte{end}" for dot in "-." for end in ("", ".gz")]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _read_idx(path: Path, axes: int) -> Bytes:
    """Read two zeros, the type (8: bytes), the number of axes, the length of each axis (big-endian) and the bytes."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            begin = file.read(4)
            if begin != bytes([0, 0, 8, axes]):
                wanted = f"an idx file of bytes with {axes} axes"
                raise DataError(f"{path} is not {wanted}: its first bytes are {begin.hex(' ')}.")
            shape = struct.unpack(f">{axes}I", file.read(4 * axes))
            size = math.prod(shape)
            if size > MOST_BYTES:
                raise DataError(f"{path} announces {size:,} bytes; at most {MOST_BYTES:,} are read.")
            content = file.read(size + 1)  # no more, however large a packed file may be
        if len(content) != size:
            found = f"{len(content)}" if len(content) < size else "more"
            raise DataError(f"{path} announces {size} bytes and has {found}: fetch it again.")
        return np.frombuffer(content, np.uint8).reshape(shape)
    except (OSError, EOFError, struct.error, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}): fetch it again.") from error
