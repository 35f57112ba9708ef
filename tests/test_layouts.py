"""Picture sets in their published file formats, written here by hand."""

import gzip
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from bace.data.decode import Pictures, decode_pictures
from bace.data.files import has_split
from bace.data.published import find_arrays, read_pickle
from bace.data.table import read
from bace.errors import DataError


def pictures(count: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


# --- CIFAR


def python2_pickle(data: np.ndarray, labels: list[int], key: bytes = b"labels") -> bytes:
    """A pickle as Python 2 wrote it in 2009, with byte strings, NumPy's old module names and protocol 2."""
    rows, columns = data.shape
    return b"".join(
        (
            b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04",
            b"K\x00\x85U\x01b\x87Rq\x05(K\x01",  # _reconstruct(ndarray, (0,), "b"), then its state: version 1,
            b"K" + bytes([rows]) + b"M" + struct.pack("<H", columns) + b"\x86",  # (rows, columns)
            b"cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb",
            b"\x89T" + struct.pack("<i", data.size) + data.tobytes() + b"tb",  # rows first, and the bytes
            b"U" + bytes([len(key)]) + key + b"](",
            b"".join(b"K" + bytes([label]) for label in labels),
            b"eu.",
        )
    )


def write_cifar10(
    folder: Path, protocol: int | None, test_labels: tuple[int, ...] = (2,)
) -> tuple[np.ndarray, np.ndarray]:
    """Two batches of two pictures and a test batch; protocol None means Python 2's."""
    train, test = pictures(4, 3072), pictures(len(test_labels), 3072, seed=1)
    folder.mkdir(parents=True)
    batches = {
        "data_batch_1": (train[:2], [1, 0]),
        "data_batch_2": (train[2:], [1, 2]),
        "test_batch": (test, list(test_labels)),
    }
    for name, (data, labels) in batches.items():
        new = {"data": data, "labels": labels, "filenames": ["a.png"] * len(labels)}
        content = python2_pickle(data, labels) if protocol is None else pickle.dumps(new, protocol)
        (folder / name).write_bytes(content)
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": ["plane", "car", "bird"]}, protocol or 2))
    return train.reshape(-1, 3, 32, 32), test.reshape(-1, 3, 32, 32)


@pytest.mark.parametrize("protocol", [None, 0, 2, 4])
def test_cifar10s_batches_are_read_in_order_with_names_and_pixels(tmp_path: Path, protocol: int | None) -> None:
    train, test = write_cifar10(tmp_path / "set", protocol)
    table = read(tmp_path / "set")
    assert (table.labels, table.names) == (["car", "plane", "car", "bird"], ["plane", "car", "bird"])
    assert torch.equal(table.inputs, torch.from_numpy(train))
    table = read(tmp_path / "set", split="test")
    assert table.labels == ["bird"]
    assert torch.equal(table.inputs, torch.from_numpy(test))


def test_cifar100_has_the_fine_labels(tmp_path: Path) -> None:
    data = pictures(3, 3072)
    (tmp_path / "train").write_bytes(python2_pickle(data, [2, 0, 2], b"fine_labels"))
    (tmp_path / "test").write_bytes(pickle.dumps({b"data": data[:1], b"fine_labels": [1], b"coarse_labels": [0]}, 2))
    meta = {"fine_label_names": ["apple", "baby", "bear"], "coarse_label_names": ["things"]}
    (tmp_path / "meta").write_bytes(pickle.dumps(meta, 2))
    assert read(tmp_path).labels == ["bear", "apple", "bear"]
    assert read(tmp_path, split="test").labels == ["baby"]
    assert read(tmp_path).names == ["apple", "baby", "bear"]
    with pytest.raises(DataError, match=r"no split 'extra'\. It has: train, test"):
        read(tmp_path, split="extra")


class Hostile:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_would_run_something_is_refused_and_runs_nothing(tmp_path: Path, protocol: int) -> None:
    write_cifar10(tmp_path / "set", 2)
    marker = tmp_path / "it ran"
    hostile = {"data": pictures(1, 3072), "labels": [0], "more": Hostile(marker)}
    (tmp_path / "set" / "data_batch_1").write_bytes(pickle.dumps(hostile, protocol))
    with pytest.raises(DataError, match=r"data_batch_1 asks for (posix|nt)\.mkdir.*refused"):
        read(tmp_path / "set")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"data": pictures(2, 3072), "labels": [0]}, r"'data' should hold 1 pictures"),
        ({"data": pictures(1, 3072)}, r"no list of whole numbers 'labels'"),
        ({"data": pictures(1, 3072), "labels": ["car"]}, r"no list of whole numbers 'labels'"),
        ({"data": pictures(1, 3072).astype(np.float32), "labels": [0]}, r"not of bytes in rows"),
        ([1, 2], "holds a list"),
        (np.array([{"an": "object"}], dtype=object), "not of bytes in rows"),
    ],
)
def test_pickles_of_other_things_are_named(tmp_path: Path, content: Any, message: str) -> None:
    write_cifar10(tmp_path / "set", 2)
    (tmp_path / "set" / "test_batch").write_bytes(pickle.dumps(content, 2))
    with pytest.raises(DataError, match=rf"test_batch.*{message}"):
        read(tmp_path / "set", split="test")


def test_a_pickle_cut_short_is_named(tmp_path: Path) -> None:
    write_cifar10(tmp_path / "set", 2)
    file = tmp_path / "set" / "test_batch"
    for length in (0, 1, 40, 2000):
        file.write_bytes(file.read_bytes()[:length])
        with pytest.raises(DataError, match="test_batch is not a readable pickle"):
            read_pickle(file)


# --- SVHN


def write_svhn(folder: Path, split: str, labels: list[int], seed: int = 0) -> np.ndarray:
    from scipy.io import savemat

    folder.mkdir(exist_ok=True, parents=True)
    pixels = pictures(len(labels), 32, 32, 3, seed=seed)
    content = {"X": pixels.transpose(1, 2, 3, 0), "y": np.array(labels, np.uint8)[:, None]}
    savemat(folder / f"{split}_32x32.mat", content, do_compression=True)
    return pixels


def test_svhns_tenth_label_is_the_digit_zero(tmp_path: Path) -> None:
    pixels = write_svhn(tmp_path, "train", [10, 1, 9])
    write_svhn(tmp_path, "test", [2])
    table = read(tmp_path)
    assert (table.labels, table.names) == (["0", "1", "9"], [str(digit) for digit in range(10)])
    assert torch.equal(table.inputs, torch.from_numpy(pixels).permute(0, 3, 1, 2))
    assert read(tmp_path, split="test").labels == ["2"]


def test_svhn_files_of_another_shape_or_damaged_are_named(tmp_path: Path) -> None:
    from scipy.io import savemat

    file = tmp_path / "train_32x32.mat"
    savemat(file, {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.array([[1]], np.uint8)})
    with pytest.raises(DataError, match=r"train_32x32\.mat: 'X' should hold 1 pictures"):
        read(tmp_path)
    savemat(file, {"X": np.zeros((32, 32, 3, 1), np.uint8), "y": np.array([[11]], np.uint8)})
    with pytest.raises(DataError, match=r"'y' should hold 1 to 10"):
        read(tmp_path)
    savemat(file, {"X": np.zeros((32, 32, 3, 1), np.uint8)})
    with pytest.raises(DataError, match=r"train_32x32\.mat is not a \.mat file with 'y'"):
        read(tmp_path)
    file.write_bytes(b"no such file" * 20)
    with pytest.raises(DataError, match=r"train_32x32\.mat is not a \.mat file"):
        read(tmp_path)


# --- idx


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_idx(folder: Path, prefix: str, labels: list[int], *, packed: bool = False, dot: str = "-") -> np.ndarray:
    folder.mkdir(exist_ok=True, parents=True)
    pixels = pictures(len(labels), 28, 28)
    for name, array in ((f"images{dot}idx3", pixels), (f"labels{dot}idx1", np.array(labels, np.uint8))):
        content = gzip.compress(idx(array)) if packed else idx(array)
        (folder / f"{prefix}-{name}-ubyte{'.gz' if packed else ''}").write_bytes(content)
    return pixels


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dot", ["-", "."])
def test_idx_files_are_read_packed_and_unpacked(tmp_path: Path, packed: bool, dot: str) -> None:
    pixels = write_idx(tmp_path, "train", [7, 2, 7, 0], packed=packed, dot=dot)
    write_idx(tmp_path, "t10k", [5], packed=packed, dot=dot)
    table = read(tmp_path, channels=1)
    assert (table.labels, table.names) == (["7", "2", "7", "0"], ["0", "2", "7"])
    assert torch.equal(table.inputs[:, 0], torch.from_numpy(pixels))
    assert read(tmp_path, split="test").inputs.shape == (1, 3, 28, 28)  # grey is repeated
    names = [f"digit {i}" for i in range(10)]
    assert read(tmp_path, label_names=names).labels[:2] == ["digit 7", "digit 2"]


def test_damaged_idx_files_are_named(tmp_path: Path) -> None:
    write_idx(tmp_path, "train", [1, 2])
    images, labels = tmp_path / "train-images-idx3-ubyte", tmp_path / "train-labels-idx1-ubyte"
    whole = images.read_bytes()
    images.write_bytes(whole[:-5])
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte announces 1568 bytes and has 1563"):
        read(tmp_path)
    images.write_bytes(labels.read_bytes())
    with pytest.raises(DataError, match=r"not an idx file of bytes with 3 axes: its first bytes are 00 00 08 01"):
        read(tmp_path)
    images.write_bytes(whole)
    labels.write_bytes(idx(np.array([1], np.uint8)))
    with pytest.raises(DataError, match=r"2 pictures, train-labels-idx1-ubyte 1 labels"):
        read(tmp_path)
    labels.unlink()
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.array([1, 2], np.uint8)))[:-4])
    with pytest.raises(DataError, match=r"labels-idx1-ubyte\.gz cannot be read"):
        read(tmp_path)


# --- Tiny-ImageNet


def test_tiny_imagenets_class_numbers_become_words_in_the_order_of_the_numbers(tmp_path: Path) -> None:
    for i, number in enumerate(["n03", "n01", "n02", "n04"]):
        folder = tmp_path / "train" / number / "images"
        folder.mkdir(parents=True)
        Image.fromarray(pictures(1, 8, 8, 3, seed=i)[0]).save(folder / f"{number}_0.png")
        (tmp_path / "val" / "images").mkdir(parents=True, exist_ok=True)
        Image.fromarray(pictures(1, 8, 8, 3, seed=i)[0]).save(tmp_path / "val" / "images" / f"val_{i}.png")
    lines = [f"val_{i}.png\t{number}\t0\t0\t8\t8\n" for i, number in enumerate(["n03", "n01", "n02", "n04"])]
    (tmp_path / "val" / "val_annotations.txt").write_text("".join(lines))
    (tmp_path / "words.txt").write_text("n00\tentity\nn01\tzebra, horse\nn02\tcrane\nn03\tant, pismire\nn04\tcrane\n")
    train, test = read(tmp_path), read(tmp_path, split="test")
    assert train.names == test.names == ["zebra", "n02", "ant", "n04"]
    assert train.labels == ["zebra", "n02", "ant", "n04"]
    assert test.labels == ["ant", "zebra", "n02", "n04"]


# --- which splits there are, and decoding late


def test_a_folder_says_which_splits_it_has(tmp_path: Path) -> None:
    write_idx(tmp_path / "idx", "train", [1])
    write_svhn(tmp_path / "svhn", "test", [1])
    (tmp_path / "folders" / "A").mkdir(parents=True)
    Image.fromarray(pictures(1, 8, 8)[0]).save(tmp_path / "folders" / "A" / "x.png")
    answers = {name: [has_split(tmp_path / name, split) for split in ("train", "test")] for name in ("idx", "svhn")}
    assert answers == {"idx": [True, False], "svhn": [False, True]}
    assert not has_split(tmp_path / "folders", "test")
    assert not has_split("owner/name", "test")
    assert find_arrays(tmp_path / "idx", "validation") is None


def test_pictures_left_undecoded_are_decoded_as_they_were_taken_reading_each_source_once(tmp_path: Path) -> None:
    pixels = torch.from_numpy(write_svhn(tmp_path / "svhn", "train", [1, 2, 3, 1, 2, 3])).permute(0, 3, 1, 2)
    other = torch.from_numpy(write_idx(tmp_path / "mnist", "train", [4, 5])).unsqueeze(1).expand(-1, 3, -1, -1)
    svhn, mnist = (read(tmp_path / name, decode=False) for name in ("svhn", "mnist"))
    assert isinstance(svhn.inputs, Pictures)
    parts = [svhn.take([1, 4]), mnist, svhn.take([5, 0]), svhn.take([])]
    got = decode_pictures([part.inputs for part in parts], 32)
    assert torch.equal(got[[0, 1, 4, 5]], pixels[[1, 4, 5, 0]])
    assert got.shape == (6, 3, 32, 32)
    small = decode_pictures([mnist.inputs, mnist.take([1]).inputs], None)
    assert torch.equal(small, other[[0, 1, 1]])
    asked = []

    def cells(rows: Any) -> Any:
        asked.append(list(rows))
        return svhn.inputs.cells(rows)

    counted = Pictures(cells, [0, 1, 2, 3, 4, 5], str)
    decode_pictures([counted.take([4, 1]), counted.take([0])], None)
    assert asked == [[0, 1, 4]]
