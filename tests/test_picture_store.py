"""Decoded pictures are kept beside their data: they are found again, checked, shared, and written completely or not at
all."""

import io
import os
import shutil
from pathlib import Path

import processes
import pytest
import torch
from PIL import Image

from bace.data import decode, picture_store
from bace.data.decode import Pictures, decode_pictures
from bace.data.table import read
from bace.errors import DataError


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(decode, "STORED_FROM", 3)
    monkeypatch.setenv("BACE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six pictures of two classes."""
    rng = torch.Generator().manual_seed(0)
    for name in ("ant", "bee"):
        (tmp_path / "data" / "train" / name).mkdir(parents=True)
        for i in range(3):
            pixels = torch.randint(0, 256, (8, 8, 3), generator=rng).to(torch.uint8)
            Image.fromarray(pixels.numpy()).save(tmp_path / "data" / "train" / name / f"{i}.png")
    return tmp_path / "data"


def stores(place: Path) -> list[Path]:
    return sorted(place.rglob("*.pixels"))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The pictures that were decoded."""
    seen: list[str] = []
    plain = decode._decode

    def counting(picture: object, where: str, *rest: object) -> object:
        seen.append(where)
        return plain(picture, where, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(decode, "_decode", counting)
    return seen


def test_the_second_run_decodes_nothing_and_reads_the_same(folder, counted):
    first = read(folder).inputs
    (store,) = stores(folder)
    assert store.parent == folder / "train" / ".bace"
    assert len(counted) == 6
    second = read(folder).inputs
    assert len(counted) == 6
    assert torch.equal(first, second)
    assert read(folder).labels == ["ant"] * 3 + ["bee"] * 3  # the store is not taken for a class
    assert not list(folder.rglob("*.draft"))


def test_no_room_is_asked_for_at_the_size_of_the_first_of_unequal_pictures(folder, monkeypatch):
    """A million pictures of the first one's size may not fit on a disk that has room for as many squares."""
    Image.new("RGB", (50, 90), "red").save(folder / "train" / "ant" / "0.png")
    asked, plain = [], picture_store.Draft.allocate

    def noting(self: picture_store.Draft, shape: tuple[int, ...]) -> object:
        asked.append(shape)
        return plain(self, shape)

    monkeypatch.setattr(picture_store.Draft, "allocate", noting)
    read(folder)
    assert asked == [(6, 3, 256, 256)]


def test_another_process_reads_the_same_store(folder):
    expected = read(folder).inputs
    code = (
        "from bace.data import decode; decode.STORED_FROM = 3; decode._decode = None\n"
        f"from bace.data.table import read; print(int(read({str(folder)!r}).inputs.long().sum()))"
    )
    done = processes.run(code)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == int(expected.long().sum())


@pytest.mark.parametrize("change", ["content", "removed", "size"])
def test_changed_data_are_decoded_again(folder, counted, change):
    read(folder)
    del counted[:]
    picture = folder / "train" / "ant" / "0.png"
    if change == "content":
        Image.new("RGB", (8, 8), "red").save(picture)
    elif change == "removed":
        picture.unlink()
    again = read(folder, image_size=4 if change == "size" else None).inputs
    assert len(counted) == (5 if change == "removed" else 6)
    if change == "content":
        assert again[0, :, 0, 0].tolist() == [255, 0, 0]


def test_bytes_in_a_table_are_found_by_their_content(tmp_path, counted):
    def source(colours: list[str]) -> Pictures:
        files = []
        for colour in colours:
            file = io.BytesIO()
            Image.new("RGB", (4, 4), colour).save(file, "PNG")
            files.append(file.getvalue())
        return Pictures(lambda rows: iter([files[row] for row in rows]), range(len(files)), str, tmp_path)

    first = decode_pictures([source(["red", "blue", "red"])], None)
    assert torch.equal(decode_pictures([source(["red", "blue", "red"])], None), first)
    assert len(counted) == 3
    other = decode_pictures([source(["blue", "blue", "red"])], None)
    assert len(counted) == 6
    assert not torch.equal(other, first)


def test_a_store_of_the_wrong_size_is_written_again(folder, counted):
    expected = read(folder).inputs.clone()
    (store,) = stores(folder)
    with store.open("r+b") as file:
        file.truncate(100)
    assert torch.equal(read(folder).inputs, expected)
    assert len(counted) == 12
    assert store.stat().st_size == expected.numel()


def test_what_a_program_does_to_its_pictures_is_not_stored(folder):
    expected = read(folder).inputs.clone()
    read(folder).inputs.zero_()
    assert torch.equal(read(folder).inputs, expected)


def test_pictures_of_unequal_sizes_are_stored_as_squares(folder):
    Image.new("RGB", (5, 9), "red").save(folder / "train" / "ant" / "0.png")
    assert read(folder).inputs.shape == (6, 3, 256, 256)
    (store,) = stores(folder)
    assert store.name.endswith("-6x3x256x256.pixels")
    assert not list(folder.rglob("*.draft"))


def test_a_folder_that_cannot_be_written_falls_back_to_the_cache(folder, tmp_path, monkeypatch, counted):
    plain = Path.mkdir

    def read_only(path: Path, *args: object, **options: object) -> None:
        if path.is_relative_to(folder):
            raise PermissionError(13, "read-only")
        plain(path, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", read_only)
    first = read(folder).inputs
    assert stores(folder) == []
    assert len(stores(tmp_path / "cache")) == 1
    assert torch.equal(read(folder).inputs, first)
    assert len(counted) == 6


def test_without_room_anywhere_pictures_are_decoded_every_time(folder, tmp_path, monkeypatch, counted):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    first, second = read(folder).inputs, read(folder).inputs
    assert torch.equal(first, second)
    assert len(counted) == 12
    assert not list(folder.rglob("*.draft"))
    assert stores(tmp_path) == []


def test_nothing_is_written_through_a_link(folder, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (folder / "train" / ".bace").symlink_to(elsewhere)
    read(folder)
    assert list(elsewhere.iterdir()) == []
    assert len(stores(tmp_path / "cache")) == 1


def test_a_picture_that_cannot_be_decoded_leaves_no_store(folder):
    (folder / "train" / "bee" / "2.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match="cannot be decoded"):
        read(folder)
    assert stores(folder) == []
    assert not list(folder.rglob("*.draft"))


def test_a_missing_picture_is_named(folder):
    raw = Pictures(lambda rows: (folder / "nothing.png" for _ in rows), range(4), str, folder)
    assert picture_store.fingerprint(raw.cells(raw.rows), 0) is None
    with pytest.raises(DataError, match=r"there is no picture .*nothing.png"):
        decode_pictures([raw], None)


def test_few_pictures_are_not_stored(folder):
    shutil.rmtree(folder / "train" / "bee")
    (folder / "train" / "ant" / "0.png").unlink()
    read(folder)
    assert stores(folder) == []
