import io
import json
import os
import sys
from collections import Counter
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before anything imports huggingface_hub

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from bace.data.modalities import MODALITIES
from bace.data.modalities.token import iob2
from bace.data.modality import Table
from bace.data.table import as_inputs, from_arrays, from_records, read, unlabelled
from bace.errors import ConfigError, DataError

DATA = Path(os.environ.get("BACE_DATA") or Path(__file__).parents[1] / ".." / "shared" / "data")


def picture(seed, size=(8, 6), grey=False):
    shape = (size[1], size[0]) if grey else (size[1], size[0], 3)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def png(image):
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def save(image, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    return path


def parquet(path, columns, features=None, row_group_size=None):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    table = pa.table(columns)
    if features is not None:
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=row_group_size)
    return path


def as_tensor(image):
    return torch.from_numpy(np.asarray(image.convert("RGB")).copy()).permute(2, 0, 1)


# --- Table ---------------------------------------------------------------------------------------------------------


def test_take_returns_the_rows_in_the_given_order_and_keeps_all_names():
    pixels = torch.arange(8, dtype=torch.uint8).view(4, 1, 1, 2)
    table = Table(MODALITIES["image"], pixels, ["a", "b", "a", "c"], ["c", "b", "a"])
    taken = table.take([3, 0, 0])
    assert taken.inputs.flatten().tolist() == [6, 7, 0, 1, 0, 1]
    assert (taken.labels, taken.names, len(taken)) == (["c", "a", "a"], ["c", "b", "a"], 3)
    assert Table(MODALITIES["text"], ["x", "y"], ["a", "b"], ["a", "b"]).take([1]).inputs == ["y"]
    assert len(table.take([])) == 0


@pytest.mark.parametrize("index", [-1, 4])
def test_take_outside_the_table_is_refused(index):
    with pytest.raises(IndexError, match="4 examples"):
        Table(MODALITIES["text"], ["w", "x", "y", "z"], ["a"] * 4, ["a"]).take([0, index])


# --- Parquet -------------------------------------------------------------------------------------------------------

IMAGE = {"_type": "Image"}
STRING = {"dtype": "string", "_type": "Value"}


def class_label(*names):
    return {"names": list(names), "_type": "ClassLabel"}


def test_parquet_shards_are_read_in_order_with_images_and_class_names_of_the_metadata(tmp_path):
    pictures = [picture(i) for i in range(5)]
    features = {"img": IMAGE, "fine_label": class_label("zebra", "ant", "unused")}
    for shard, rows in enumerate([range(0, 3), range(3, 5)]):
        columns = {
            "img": [{"bytes": png(pictures[i]), "path": None} for i in rows],
            "fine_label": [i % 2 for i in rows],
        }
        parquet(tmp_path / "data" / f"train-0000{shard}-of-00002.parquet", columns, features, row_group_size=2)
    table = read(tmp_path)
    assert table.modality.name == "image"
    assert table.inputs.dtype == torch.uint8
    assert torch.equal(table.inputs, torch.stack([as_tensor(p) for p in pictures]))
    assert table.labels == ["zebra", "ant", "zebra", "ant", "zebra"]
    assert table.names == ["zebra", "ant", "unused"]


def test_a_file_written_by_the_datasets_package_is_understood(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"picture": datasets.Image(), "kind": datasets.ClassLabel(names=["two", "one"])})
    image = picture(3)
    dataset = datasets.Dataset.from_dict({"picture": [image, image], "kind": [1, 0]}, features=features)
    dataset.to_parquet(str(tmp_path / "validation.parquet"))
    table = read(tmp_path, split="test")  # falls back to the validation split
    assert torch.equal(table.inputs[1], as_tensor(image))
    assert (table.labels, table.names) == (["one", "two"], ["two", "one"])


def test_tokens_of_parquet_take_their_types_from_the_label_list_in_its_order(tmp_path):
    tags = {"feature": class_label("O", "B-ZIP", "I-ZIP", "B-ART", "I-ART"), "_type": "List"}
    parquet(
        tmp_path / "train.parquet",
        {"tokens": [["a", "b", "c"], [], ["d"]], "ner_tags": [[1, 2, 0], [], [4]]},
        {"tokens": {"feature": STRING, "_type": "List"}, "ner_tags": tags},
    )
    with pytest.warns(UserWarning, match="1 of 3 sentences are empty and left out: row 1"):
        table = read(tmp_path)
    assert table.modality.name == "token"
    assert table.inputs == [["a", "b", "c"], ["d"]]  # the sentence without words is left out
    assert table.labels == [["B-ZIP", "I-ZIP", "O"], ["B-ART"]]
    assert table.names == ["ZIP", "ART"]


def test_the_old_spellings_of_lists_in_the_metadata_are_understood(tmp_path):
    columns = {"words": [["a"]], "tags": [[1]]}
    for feature in ({"feature": class_label("O", "B-X"), "_type": "Sequence"}, [class_label("O", "B-X")]):
        path = parquet(tmp_path / "old.parquet", columns, {"tags": feature})
        assert read(path).labels == [["B-X"]]


def test_integer_tags_without_names_take_label_names(tmp_path):
    path = parquet(tmp_path / "train.parquet", {"tokens": [["a", "b"]], "tags": [[0, 2]]})
    with pytest.raises(DataError, match=r"'0' is not an IOB tag.*label_names"):
        read(path)
    table = read(path, label_names=["B-Q", "I-Q", "O", "B-A"])
    assert (table.labels, table.names) == ([["B-Q", "O"]], ["Q", "A"])


def test_texts_of_several_columns_are_joined_and_integers_sort_by_value(tmp_path):
    columns = {"title": ["t1", "t2", "t3"], "content": ["c1", "", "c3"], "label": [10, 2, 2]}
    path = parquet(tmp_path / "all.parquet", columns)
    with pytest.warns(UserWarning, match="1 of 3 texts are empty"):
        assert read(path).inputs == ["c1", "c3"]  # content is the more likely name
    table = read(path, input_column=["title", "content"])
    assert table.inputs == ["t1 c1", "t2", "t3 c3"]
    assert (table.labels, table.names) == (["10", "2", "2"], ["2", "10"])
    assert read(path, input_column=["title?", "content", "answer?"]).inputs == table.inputs
    with pytest.raises(DataError, match="has no column 'answer'"):
        read(path, input_column=["title", "answer"])
    with pytest.raises(ConfigError, match="only texts can be joined"):
        read(path, input_column=["title", "content"], modality="token")


def test_columns_of_unknown_names_are_found_by_their_type(tmp_path):
    columns = {"photo": [png(picture(0))], "id": [7], "animal": [0]}
    path = parquet(tmp_path / "train.parquet", columns, {"animal": class_label("cat")})
    table = read(path)
    assert (table.modality.name, table.labels) == ("image", ["cat"])


def test_columns_that_do_not_go_together_are_listed(tmp_path):
    path = parquet(tmp_path / "train.parquet", {"height": [1.5], "weight": [2.5]})
    with pytest.raises(DataError, match=r"no column of pictures.*Columns: height \(other\), weight \(other\)"):
        read(path)
    with pytest.raises(DataError, match="no column of image inputs"):
        read(parquet(path, {"text": ["a"], "label": [1.5]}), modality="image")


def test_a_limit_takes_the_first_of_each_class_and_never_decodes_the_rest(tmp_path):
    labels = [0, 0, 1, 0, 1, 1, 0, 2]
    taken = [0, 1, 2, 4, 7]
    cells = [{"bytes": png(picture(i)) if i in taken else b"broken", "path": None} for i in range(8)]
    features = {"image": IMAGE, "label": class_label("x", "y", "z")}
    path = parquet(tmp_path / "train.parquet", {"image": cells, "label": labels}, features, row_group_size=3)
    table = read(path, limit_per_class=2)
    assert table.labels == ["x", "x", "y", "y", "z"]
    assert torch.equal(table.inputs, torch.stack([as_tensor(picture(i)) for i in taken]))
    with pytest.raises(DataError, match=r"train\.parquet, row 3: the picture cannot be decoded"):
        read(path)


def test_parquet_cells_with_a_path_only_are_read_beside_the_file(tmp_path):
    save(picture(1), tmp_path / "pictures" / "one.png")

    def second(path):
        cells = [{"bytes": None, "path": "pictures/one.png"}, {"bytes": None, "path": path}]
        return read(parquet(tmp_path / "train.parquet", {"image": cells, "label": ["a", "b"]}))

    assert torch.equal(second("pictures/one.png").inputs[1], as_tensor(picture(1)))
    with pytest.raises(DataError, match=r"row 1: this is not a picture: \"\{'bytes': None, 'path': None\}\""):
        second(None)
    with pytest.raises(DataError, match=r"row 1: there is no picture .*two\.png"):
        second("pictures/two.png")


def test_a_truncated_parquet_file_is_named(tmp_path):
    path = parquet(tmp_path / "train-0.parquet", {"text": ["x" * 100] * 50, "label": ["a"] * 50})
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match=r"train-0\.parquet is not a readable Parquet file.*fetch it again"):
        read(tmp_path)


def test_parquet_damaged_in_its_pages_is_named(tmp_path):
    texts = [str(i) * 20 for i in range(500)]
    path = parquet(tmp_path / "train.parquet", {"text": texts, "label": ["a"] * 500})
    content = bytearray(path.read_bytes())
    content[4:1500] = b"\xff" * 1496
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match=r"train\.parquet is not a readable Parquet file"):
        read(path)


def test_an_empty_parquet_file_has_no_examples(tmp_path):
    pa = pytest.importorskip("pyarrow")
    columns = {"text": pa.array([], pa.string()), "label": pa.array([], pa.int64())}
    with pytest.raises(DataError, match="no examples"):
        read(parquet(tmp_path / "train.parquet", columns))


def test_shards_of_different_class_names_are_refused(tmp_path):
    columns = {"text": ["x"], "label": [0]}
    parquet(tmp_path / "train-0.parquet", columns, {"label": class_label("a", "b")})
    parquet(tmp_path / "train-1.parquet", columns, {"label": class_label("b", "a")})
    with pytest.raises(DataError, match=r"train-1\.parquet has other columns or class names"):
        read(tmp_path)


def test_an_error_in_a_later_shard_names_that_shard_and_its_own_row(tmp_path):
    parquet(tmp_path / "train-0.parquet", {"text": ["x", "y"], "label": ["a", "b"]})
    parquet(tmp_path / "train-1.parquet", {"text": ["x", "y"], "label": ["a", None]})
    with pytest.raises(DataError, match=r"train-1\.parquet, row 1: the label is missing"):
        read(tmp_path)


def test_configurations_in_several_folders_are_not_mixed(tmp_path):
    for language in ("de", "en"):
        parquet(tmp_path / language / "train.parquet", {"text": ["x"], "label": ["a"]})
    with pytest.raises(DataError, match="several folders, de, en"):
        read(tmp_path)
    assert len(read(tmp_path / "de")) == 1


@pytest.mark.parametrize(
    ("label", "message"), [(-1, "published without a label"), (2, "none of the 2 classes, 0 to 1")]
)
def test_integer_labels_outside_the_class_names_are_refused(tmp_path, label, message):
    columns = {"text": ["x", "y"], "label": [0, label]}
    path = parquet(tmp_path / "train.parquet", columns, {"label": class_label("a", "b")})
    with pytest.raises(DataError, match=rf"train\.parquet, row 1: label {label}.*{message}"):
        read(path)


@pytest.mark.parametrize("module", ["pyarrow.parquet", "datasets"])
def test_a_missing_package_says_how_to_install_it(tmp_path, monkeypatch, module):
    write(tmp_path / "train.parquet", "never opened")
    monkeypatch.setitem(sys.modules, module, None)  # the import fails as for a package that is not installed
    with pytest.raises(ConfigError, match=r'pip install "bace-cil\[datasets\]"'):
        read(tmp_path if module == "pyarrow.parquet" else "owner/name")


# --- hub -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """The cache that `datasets` leaves behind after a download, with one set in it."""
    datasets = pytest.importorskip("datasets")
    from datasets.arrow_writer import ArrowWriter

    folder = tmp_path / "someone___small_set" / "default" / "0.0.0" / "0123"
    folder.mkdir(parents=True)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["z", "a"])})
    splits = datasets.SplitDict(dataset_name="small_set")
    for split, labels in {"train": [0, 1, 1], "validation": [1]}.items():
        with ArrowWriter(path=str(folder / f"small_set-{split}.arrow"), features=features) as writer:
            for i, label in enumerate(labels):
                writer.write({"image": {"bytes": png(picture(i)), "path": None}, "label": label})
            writer.finalize()
        splits.add(datasets.SplitInfo(split, num_examples=len(labels), dataset_name="small_set"))
    info = datasets.DatasetInfo(features=features, splits=splits, version="0.0.0")
    info.config_name, info.dataset_name, info.builder_name = "default", "small_set", "parquet"
    info.write_to_directory(str(folder))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))


@pytest.mark.usefixtures("hub_cache")
def test_a_hub_set_is_read_with_its_class_order():
    table = read("someone/small_set")
    assert torch.equal(table.inputs, torch.stack([as_tensor(picture(i)) for i in range(3)]))
    assert (table.labels, table.names) == (["z", "a", "a"], ["z", "a"])
    assert read("someone/small_set", limit_per_class=1).labels == ["z", "a"]
    assert read("someone/small_set", split="test").labels == ["a"]
    with pytest.raises(DataError, match=r"no split 'extra'\. It has: train, validation"):
        read("someone/small_set", split="extra")


@pytest.mark.usefixtures("hub_cache")
def test_a_hub_set_that_cannot_be_reached_says_so():
    with pytest.raises(DataError, match="'nobody/no_such_set' is not a file or folder here and could not be loaded"):
        read("nobody/no_such_set")


@pytest.mark.parametrize("source", ["nothing_here", "some/folder/of/mine", "data/train.csv"])
def test_a_path_that_is_not_there_is_no_hub_id(source):
    with pytest.raises(DataError, match=r"not a file or folder\. Check the path"):
        read(source)


# --- image folders -------------------------------------------------------------------------------------------------


def test_an_image_folder_with_splits(tmp_path):
    save(picture(0), tmp_path / "train" / "dog" / "b.png")
    save(picture(1), tmp_path / "train" / "dog" / "a.PNG")
    save(picture(2), tmp_path / "train" / "cat" / "nested" / "x.bmp")
    write(tmp_path / "train" / "cat" / "notes.txt", "no picture")
    write(tmp_path / "train" / "cat" / "._x.png", "resource fork")
    save(picture(3), tmp_path / "val" / "cat" / "x.png")
    train, test = read(tmp_path), read(str(tmp_path), split="test")
    assert (train.labels, train.names) == (["cat", "dog", "dog"], ["cat", "dog"])
    assert torch.equal(train.inputs, torch.stack([as_tensor(picture(i)) for i in (2, 1, 0)]))
    assert torch.equal(test.inputs, as_tensor(picture(3))[None])
    with pytest.raises(DataError, match=r"no split 'extra'\. It has: train, val"):
        read(tmp_path, split="extra")


def test_an_image_folder_without_splits_is_training_data_only(tmp_path):
    for i, name in enumerate(["10", "9", "train"]):  # CIFAR-100 has a class "train"
        save(picture(i), tmp_path / name / "x.png")
    table = read(tmp_path)
    assert (table.labels, table.names) == (["10", "9", "train"], ["10", "9", "train"])
    with pytest.raises(DataError, match=r"no split 'test': its folders are classes \(10, 9, train\)"):
        read(tmp_path, split="test")


def test_class_folders_named_by_numbers_are_in_numeric_order(tmp_path):
    for name in ["10", "9", "2"]:
        save(picture(0), tmp_path / name / "x.png")
    assert read(tmp_path).names == ["2", "9", "10"]


def test_tiny_imagenets_validation_list_is_read_and_stands_for_its_unlabelled_test_split(tmp_path):
    save(picture(0), tmp_path / "train" / "n02" / "images" / "n02_0.JPEG")
    for i in range(2):
        save(picture(i), tmp_path / "val" / "images" / f"val_{i}.png")
    save(picture(9), tmp_path / "test" / "images" / "test_0.png")
    write(tmp_path / "val" / "val_annotations.txt", "val_1.png\tn02\t0\t0\t5\t5\nval_0.png\tn01\t0\t0\t5\t5\n")
    assert read(tmp_path).labels == ["n02"]
    table = read(tmp_path, split="test")
    assert (table.labels, table.names) == (["n02", "n01"], ["n01", "n02"])
    assert torch.equal(table.inputs, torch.stack([as_tensor(picture(i)) for i in (1, 0)]))


def test_a_class_folder_without_pictures_is_named(tmp_path):
    save(picture(0), tmp_path / "train" / "dog" / "a.png")
    (tmp_path / "train" / "cat").mkdir()
    with pytest.raises(DataError, match="cat: the class folder holds no picture"):
        read(tmp_path)


@pytest.mark.parametrize(
    "content", [b"not a picture", b"", png(picture(0, (40, 40)))[:200]], ids=["text", "empty", "cut short"]
)
def test_a_corrupt_picture_is_named(tmp_path, content):
    save(picture(0), tmp_path / "dog" / "a.png")
    (tmp_path / "dog" / "b.png").write_bytes(content)
    with pytest.raises(DataError, match=r"b\.png: the picture cannot be decoded"):
        read(tmp_path)


def test_a_folder_with_nothing_to_read_says_what_is_expected(tmp_path):
    write(tmp_path / "README.md", "hello")
    with pytest.raises(DataError, match=r"holds nothing to read.*<split>/<class>/"):
        read(tmp_path)


# --- pictures ------------------------------------------------------------------------------------------------------


def test_pictures_of_unequal_sizes_become_centre_squares(tmp_path):
    image, square = picture(0, (40, 20)), picture(1, (20, 20))
    save(image, tmp_path / "a" / "wide.png")
    save(square, tmp_path / "a" / "x.png")
    assert read(tmp_path).inputs.shape == (2, 3, 256, 256)
    table = read(tmp_path, image_size=10)
    # by definition, the shorter side becomes 10 by the antialiased bicubic filter, and the longer one is cropped
    expected = as_tensor(image.resize((20, 10), Image.Resampling.BICUBIC).crop((5, 0, 15, 10)))
    assert table.inputs.shape == (2, 3, 10, 10)
    difference = (table.inputs[0].int() - expected.int()).abs()
    assert difference[:, :, 2:-2].max() <= 1  # closer to the border, the filter would reach beyond the square
    assert torch.equal(read(tmp_path, image_size=20).inputs[1], as_tensor(square))


def test_grey_palette_alpha_and_sixteen_bit_pictures_become_three_channels(tmp_path):
    grey = picture(0, grey=True)
    deep = Image.fromarray(np.asarray(grey).astype(np.uint16) * 256 + 77)
    clear = Image.new("RGBA", (8, 6), (10, 20, 30, 0))
    thin = Image.new("RGBA", (8, 6), (0, 100, 200, 51))  # one fifth opaque over white: 204, 224, 244
    palette = picture(1).quantize(16)
    for name, image in zip("abcde", [grey, deep, clear, thin, palette], strict=True):
        save(image, tmp_path / "c" / f"{name}.png")
    inputs = read(tmp_path).inputs
    stacked = torch.from_numpy(np.asarray(grey).copy()).expand(3, 6, 8)
    assert torch.equal(inputs[0], stacked)
    assert torch.equal(inputs[1], stacked)
    assert (inputs[2] == 255).all()
    assert inputs[3, :, 0, 0].tolist() == [204, 224, 244]
    assert torch.equal(inputs[4], as_tensor(palette))
    assert torch.equal(read(tmp_path, channels=1).inputs[0], stacked[:1])


def test_pictures_of_floats_are_refused(tmp_path):
    save(Image.fromarray(np.zeros((4, 4), np.float32)), tmp_path / "c" / "a.tiff")
    with pytest.raises(DataError, match=r"a\.tiff.*mode F.*save it with 8 bits"):
        read(tmp_path)


def test_a_photograph_stored_on_its_side_is_set_upright(tmp_path):
    image = Image.new("RGB", (16, 8), "black")
    image.paste("white", (0, 0, 8, 8))  # the left half
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees clockwise: left becomes top
    image.save(tmp_path / "a.png", exif=exif)
    _, inputs = as_inputs([tmp_path / "a.png"])
    assert inputs.shape == (1, 3, 16, 8)
    assert (inputs[0, :, :8] == 255).all()
    assert (inputs[0, :, 8:] == 0).all()


def test_large_tables_live_in_a_mapped_file_that_leaves_nothing_behind(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    monkeypatch.setenv("BACE_CACHE", str(cache))
    pictures = [picture(i, (20, 10)) for i in range(40)]
    for i, image in enumerate(pictures):
        save(image, tmp_path / "set" / "a" / f"{i:02}.png")
    size = 40 * 3 * 10 * 20
    in_memory = read(tmp_path / "set", memory_limit=size)
    assert not cache.exists()
    mapped = read(tmp_path / "set", memory_limit=size - 1)
    assert cache.is_dir()
    assert torch.equal(mapped.inputs, torch.stack([as_tensor(image) for image in pictures]))
    assert torch.equal(mapped.inputs, in_memory.inputs)
    maps = Path("/proc/self/maps")
    if maps.exists():
        ranges = [line.split()[0].split("-") for line in maps.read_text().splitlines() if str(cache) in line]
        assert any(int(a, 16) <= mapped.inputs.data_ptr() < int(b, 16) for a, b in ranges)
        assert list(cache.iterdir()) == []
    arrays = from_arrays(in_memory.inputs, [0] * 40, memory_limit=1)
    assert torch.equal(arrays.inputs, in_memory.inputs)


def test_a_cache_that_cannot_be_written_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("BACE_CACHE", str(write(tmp_path / "file", "x") / "cache"))
    with pytest.raises(DataError, match="BACE_CACHE"):
        from_arrays(np.zeros((2, 4, 4), np.uint8), [0, 1], memory_limit=1)


# --- CSV and JSONL -------------------------------------------------------------------------------------------------


def test_csv_with_quotes_line_breaks_and_a_byte_order_mark(tmp_path):
    write(tmp_path / "train.csv", '\ufefftext,label,id\r\n"one, ""two""\nthree", sport ,1\r\n\r\nfour,art,2\r\n')
    write(tmp_path / "test.csv", "text,label\nfive,art\n")
    table = read(tmp_path)
    assert table.modality.name == "text"
    assert table.inputs == ['one, "two"\nthree', "four"]
    assert (table.labels, table.names) == (["sport", "art"], ["art", "sport"])
    assert read(tmp_path, split="test").inputs == ["five"]


def test_csv_with_other_columns_tabs_long_texts_and_numbered_classes(tmp_path):
    long = "word " * 40_000
    path = write(tmp_path / "mine.tsv", f"Kind\tBody\tOther\n1\t{long}\tz\n0\tshort, really\tz\n")
    table = read(path, input_column="Body", label_column="Kind", label_names=["no", "yes"])
    assert table.inputs == [long, "short, really"]
    assert (table.labels, table.names) == (["yes", "no"], ["no", "yes"])


def test_csv_of_picture_paths(tmp_path):
    save(picture(0), tmp_path / "pictures" / "a.png")
    path = write(tmp_path / "train.csv", "file_name,label\npictures/a.png,cat\n")
    assert torch.equal(read(path).inputs, as_tensor(picture(0))[None])
    path = write(tmp_path / "other.csv", "where,label\npictures/a.png,cat\n")
    assert read(path).modality.name == "text"
    assert torch.equal(read(path, modality="image", input_column="where").inputs, as_tensor(picture(0))[None])
    path = write(tmp_path / "third.csv", "text,label,path\nhello,greeting,a/b\n")
    assert read(path).inputs == ["hello"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("text,label\na,x\nb,\n", r"t\.csv, line 3: the label is missing"),
        ("text,label\na,x\nb\n", r"t\.csv, line 3: the label is missing"),
        ("text,label\na,x\nb,c,x\n", r"t\.csv, line 3: 3 fields under 2 column names.*double quotes"),
        ('text,label\na,x\n"b,x\n', r"t\.csv, line 3: .*quotes"),
        ("text,lable\na,x\n", "no column 'label'. Did you mean 'lable'"),
        ("text,number\na,x\n", r"no column 'label'. Columns: text \(string\), number \(string\)\. Name"),
        (
            "good day,hello\nbye,end\n",
            r"Columns: good day .* If its first line holds an example .* put a line of names",
        ),
        ("text;label\na, b;x\n", r"t\.csv is separated by ';', not by commas.*'text;label'"),
        ("text\tlabel\na\tx\n", r"separated by '\\t'.*rename it to \.tsv"),
        ("text,label\n", "no rows"),
        ("", r"t\.csv is empty"),
    ],
)
def test_csv_errors_name_the_line(tmp_path, content, message):
    with pytest.raises(DataError, match=message):
        read(write(tmp_path / "t.csv", content))


def test_a_csv_file_in_another_encoding_is_named(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes("text,label\nfranz\xf6sisch,x\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"t\.csv is not in UTF-8"):
        read(path)


def test_a_table_of_one_column_is_no_table_of_another_separator(tmp_path):
    path = write(tmp_path / "t.csv", "text\na;b\n")
    with pytest.raises(DataError, match="no column 'label'"):
        read(path)


@pytest.mark.parametrize("inside", [".", "train", "train/deeper"])
def test_pictures_without_folders_of_classes_are_said_to_be_so(tmp_path, inside):
    for name in (inside, "test") if inside != "." else (inside,):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "1.png").write_bytes(png(picture(0)))
    if inside == "train/deeper":  # this is a class
        assert read(tmp_path).labels == ["deeper"]
        return
    with pytest.raises(DataError, match=r"holds pictures, but no folders of classes.*<class>/.*train\.csv"):
        read(tmp_path)


def test_a_text_is_a_text_though_a_picture_has_its_name(tmp_path):
    path = tmp_path / "1.png"
    path.write_bytes(png(picture(0)))
    assert as_inputs([str(path)], modality="text")[1] == [str(path)]


def test_empty_texts_are_left_out_with_a_warning_that_says_where_they_are(tmp_path):
    path = write(tmp_path / "t.csv", "text,label\na,x\n,x\nb,y\n \t,y\n")
    with pytest.warns(UserWarning, match=r"/t\.csv: 2 of 4 texts are empty and left out: line 3, line 5$"):
        table = read(path)
    assert (table.inputs, table.labels, table.names) == (["a", "b"], ["x", "y"], ["x", "y"])
    with pytest.warns(UserWarning, match="memory: 1 of 2 texts are empty and left out: example 1"):
        assert len(from_records([{"text": "a", "label": "x"}, {"text": "", "label": "x"}])) == 1
    predicted = unlabelled(path, MODALITIES["text"])
    assert [text for _, text in predicted] == ["a", "", "b", " \t"]  # every row is kept


def test_a_limit_counts_only_examples_with_words(tmp_path):
    path = write(tmp_path / "t.csv", "text,label\n,x\na,x\nb,y\n ,x\nc,y\nd,x\ne,x\nf,y\n")
    with pytest.warns(UserWarning, match=r"t\.csv: 2 of 8 texts are empty and left out: line 2, line 5$"):
        table = read(path, limit_per_class=2)
    assert (table.inputs, table.labels) == (["a", "b", "c", "d"], ["x", "y", "y", "x"])
    sentences = [{"tokens": words, "tags": ["O"] * len(words)} for words in ([], ["a"], ["b"])]
    path = write(tmp_path / "t.jsonl", "\n".join(map(json.dumps, sentences)))
    with pytest.warns(UserWarning, match="1 of 3 sentences are empty"):
        assert read(path, limit_per_class=1).inputs == [["a"]]


def test_rows_of_pandas_may_hold_arrays_of_words_and_pictures(tmp_path):
    """Lists become arrays if pandas reads them from Parquet."""
    pandas = pytest.importorskip("pandas")
    parquet(tmp_path / "t.parquet", {"tokens": [["a", "b"], ["c"]], "tags": [["B-X", "O"], ["B-Y"]]})
    rows = pandas.read_parquet(tmp_path / "t.parquet")
    for table in (from_records(rows), from_arrays(rows["tokens"], rows["tags"])):
        assert (table.inputs, table.labels) == ([["a", "b"], ["c"]], [["B-X", "O"], ["B-Y"]])
    pictures = [picture(0), picture(1)]
    for cells in (pictures, [np.asarray(image) for image in pictures], [as_tensor(image) for image in pictures]):
        table = from_records(pandas.DataFrame({"image": cells, "label": ["x", "y"]}))
        assert torch.equal(table.inputs, torch.stack([as_tensor(image) for image in pictures]))


def test_labels_of_another_kind_are_shown(tmp_path):
    pandas = pytest.importorskip("pandas")
    rows = pandas.DataFrame({"text": ["a", "b"], "label": [1, None], "score": [0.5, 0.25]})
    with pytest.raises(DataError, match=r"example 0: 'label' is 1\.0\. Labels are .* floats where one is missing"):
        from_records(rows)
    with pytest.raises(DataError, match=r"example 0: 'score' is 0\.5\. Labels are whole numbers or strings"):
        from_records(rows, label_column="score")
    with pytest.raises(DataError, match=r"t\.jsonl, line 1: 'label' is \['x'\]\. Labels are whole numbers"):
        read(write(tmp_path / "t.jsonl", '{"text": "a", "label": ["x"]}'))


def test_a_class_of_empty_texts_alone_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"t\.csv: class 'y' has only empty texts \(line 3\)\. Fill them in or remove"):
        read(write(tmp_path / "t.csv", "text,label\na,x\n,y\n"))
    with pytest.raises(DataError, match=r"u\.csv: all texts are empty"):
        read(write(tmp_path / "u.csv", "text,label\n ,x\n"))


@pytest.mark.parametrize("column", ["input_column", "label_column"])
def test_a_column_that_is_not_there_suggests_the_nearest(tmp_path, column):
    path = write(tmp_path / "t.csv", "headline,topic\na,x\n")
    with pytest.raises(DataError, match=r"t\.csv has no column 'headlin'. Did you mean 'headline'"):
        read(path, **{column: "headlin"})


def test_jsonl_of_texts_and_of_tokens(tmp_path):
    write(tmp_path / "train.jsonl", '{"text": "a", "label": 10}\n\n{"text": "b", "label": 9}\n')
    table = read(tmp_path)
    assert (table.inputs, table.labels, table.names) == (["a", "b"], ["10", "9"], ["9", "10"])
    rows = '{"tokens": ["New", "York", "!"], "ner_tags": ["I-LOC", "I-LOC", "O"], "id": "7"}\n'
    table = read(write(tmp_path / "words.jsonl", rows))
    assert (table.modality.name, table.inputs) == ("token", [["New", "York", "!"]])
    assert (table.labels, table.names) == ([["B-LOC", "I-LOC", "O"]], ["LOC"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "b", "label": }', r"t\.jsonl, line 2: this is not readable as JSON"),
        ('["b", "x"]', r"t\.jsonl, line 2: expected \{"),
        ('{"text": "b"}', r"t\.jsonl, line 2: the label is missing"),
        ('{"text": "b", "label": 1.5}', r"t\.jsonl, line 2: label 1.5 is of type float"),
        ('{"text": "b", "label": true}', r"t\.jsonl, line 2: label True is of type bool"),
        ('{"text": "b", "label": ["x"]}', r"t\.jsonl, line 2: label \['x'\] is of type list"),
        ('{"text": null, "label": "x"}', r"t\.jsonl, line 2: 'text' is None"),
    ],
)
def test_jsonl_errors_name_the_line(tmp_path, line, message):
    with pytest.raises(DataError, match=message):
        read(write(tmp_path / "t.jsonl", '{"text": "a", "label": "x"}\n' + line + "\n"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"tokens": ["b", "c"], "ner_tags": ["O"]}', "line 2: 2 words but 1 tags"),
        ('{"tokens": ["b"], "ner_tags": []}', "line 2: 1 words but 0 tags"),
        ('{"tokens": ["b"], "ner_tags": ["S-X"]}', "line 2: 'S-X' is not an IOB tag"),
        ('{"tokens": ["b"], "ner_tags": [["O"]]}', r"line 2: label \['O'\] is of type list"),
        ('{"tokens": ["b"], "ner_tags": "O"}', "line 2: the tags are 'O'"),
        ('{"tokens": "b", "ner_tags": ["O"]}', "line 2: expected a list of words, got 'b'"),
    ],
)
def test_jsonl_errors_in_sentences_name_the_line(tmp_path, line, message):
    with pytest.raises(DataError, match=message):
        read(write(tmp_path / "t.jsonl", '{"tokens": ["a"], "ner_tags": ["O"]}\n' + line + "\n"))


def test_a_single_file_is_no_other_split_unless_named_so(tmp_path):
    write(tmp_path / "mine.csv", "text,label\na,x\n")
    write(tmp_path / "mine-test.csv", "text,label\nb,x\n")
    with pytest.raises(DataError, match="one file without a split 'test'"):
        read(tmp_path / "mine.csv", split="test")
    assert read(tmp_path / "mine-test.csv", split="test").inputs == ["b"]


def test_a_missing_split_lists_those_there_are(tmp_path):
    write(tmp_path / "train.csv", "text,label\na,x\n")
    with pytest.raises(DataError, match=r"no split 'test'\. It has: train\."):
        read(tmp_path, split="test")


def test_two_files_for_one_split_are_refused(tmp_path):
    write(tmp_path / "train.csv", "text,label\na,x\n")
    write(tmp_path / "train.jsonl", '{"text": "a", "label": "x"}\n')
    with pytest.raises(DataError, match=r"several files for the split 'train', train\.csv, train\.jsonl"):
        read(tmp_path)


def test_a_file_of_unknown_kind_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"files ending in '\.xlsx' cannot be read"):
        read(write(tmp_path / "t.xlsx", "x"))


# --- CoNLL ---------------------------------------------------------------------------------------------------------


def test_conll_2003_layout_with_iob1_tags(tmp_path):
    write(
        tmp_path / "train.txt",
        "-DOCSTART- -X- -X- O\n\nEU NNP I-NP I-ORG\nrejects VBZ I-VP O\n\n\n"
        "Peter NNP I-NP I-PER\nHans NNP I-NP B-PER\nBerlin NNP I-NP I-LOC\nWest NNP I-NP I-LOC\n",
    )
    table = read(tmp_path)
    assert table.inputs == [["EU", "rejects"], ["Peter", "Hans", "Berlin", "West"]]
    assert table.labels == [["B-ORG", "O"], ["B-PER", "B-PER", "B-LOC", "I-LOC"]]
    assert table.names == ["LOC", "ORG", "PER"]


def test_conll_with_tabs_windows_line_ends_and_exotic_spaces(tmp_path):
    write(tmp_path / "test.conll", "a\u00a0b\tB-X\r\nc\u2028\tI-X\r\n \t\r\nd\tO\r\n")
    table = read(tmp_path, split="test")
    assert table.inputs == [["a\u00a0b", "c\u2028"], ["d"]]
    assert table.labels == [["B-X", "I-X"], ["O"]]


def test_a_conll_file_of_any_name_is_read_when_told(tmp_path):
    path = write(tmp_path / "eng.testb", "a O\nb B-X\n")
    assert read(path, modality="token").labels == [["O", "B-X"]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a O\n\nb\n", r"t\.txt, line 3: only one column, 'b'"),
        ("a O\nb PER\n", r"t\.txt, line 2: 'PER' is not an IOB tag. Expected O, B-<type> or I-<type>"),
        ("a O\nb E-PER\n", r"t\.txt, line 2: 'E-PER' is not an IOB tag"),
        ("a O\nb B-\n", r"t\.txt, line 2: 'B-' is not an IOB tag"),
        ("\n-DOCSTART- O\n\n", "no sentences"),
        ("", "is empty"),
    ],
)
def test_conll_errors_name_the_line(tmp_path, content, message):
    with pytest.raises(DataError, match=message):
        read(write(tmp_path / "t.txt", content))


def test_a_limit_counts_sentences_per_entity_type(tmp_path):
    sentences = ["a B-X", "b B-X", "c O", "d B-X\ne B-Y", "f O", "g B-Y", "h B-Z\ni O", "j O"]
    path = write(tmp_path / "t.txt", "\n\n".join(sentences))
    assert [words[0] for words in read(path, limit_per_class=1).inputs] == ["a", "c", "d", "h"]
    assert [words[0] for words in read(path, limit_per_class=2).inputs] == ["a", "b", "c", "d", "f", "g", "h"]


def spans(tags, begins):
    """Entities as (type, start, end), by scanning for the words that begin one."""
    found = []
    for i, tag in enumerate(tags):
        if tag != "O" and begins(i):
            end = i + 1
            while end < len(tags) and tags[end] != "O" and tags[end][2:] == tag[2:] and not begins(end):
                end += 1
            found.append((tag[2:], i, end))
    return found


@given(st.lists(st.sampled_from(["O", "B-X", "I-X", "B-Y", "I-Y"])))
def test_iob2_keeps_the_entities_and_is_strict(tags):
    result = iob2(tags)
    old = spans(tags, lambda i: tags[i][0] == "B" or i == 0 or tags[i - 1] == "O" or tags[i - 1][2:] != tags[i][2:])
    new = spans(result, lambda i: result[i][0] == "B")  # strict: only B- begins an entity
    assert new == old
    assert [tag[2:] for tag in result] == [tag[2:] for tag in tags]


# --- arrays --------------------------------------------------------------------------------------------------------

PIXELS = np.random.default_rng(0).integers(0, 256, (4, 6, 8, 3), dtype=np.uint8)  # (examples, height, width, channels)
READ_ONLY = PIXELS.copy()
READ_ONLY.flags.writeable = False
EXPECTED = torch.from_numpy(PIXELS.transpose(0, 3, 1, 2).copy())


@pytest.mark.parametrize(
    "inputs",
    [
        pytest.param(PIXELS, id="channels last"),
        pytest.param(PIXELS.transpose(0, 3, 1, 2), id="channels second"),
        pytest.param(torch.from_numpy(PIXELS), id="tensor, channels last"),
        pytest.param(EXPECTED, id="tensor, channels second"),
        pytest.param(PIXELS.astype(np.float32) / 255, id="float32"),
        pytest.param(EXPECTED.double() / 255, id="float64"),
        pytest.param(PIXELS.astype(">f4") / np.array(255, ">f4"), id="big-endian"),
        pytest.param(PIXELS.astype(np.int32), id="int32"),
        pytest.param(np.ascontiguousarray(PIXELS[:, ::-1])[:, ::-1], id="negative strides"),
        pytest.param(READ_ONLY, id="read-only"),
        pytest.param([Image.fromarray(p) for p in PIXELS], id="PIL"),
        pytest.param(list(PIXELS), id="list of arrays"),
        pytest.param(list(EXPECTED), id="list of tensors"),
    ],
)
def test_pictures_in_memory_of_every_layout_and_type(inputs):
    table = from_arrays(inputs, np.array([3, 10, 3, -1]))
    assert table.modality.name == "image"
    assert table.inputs.dtype == torch.uint8
    assert torch.equal(table.inputs, EXPECTED)
    assert (table.labels, table.names) == (["3", "10", "3", "-1"], ["-1", "3", "10"])


@settings(max_examples=40, deadline=None)
@given(
    examples=st.integers(1, 3),
    depth=st.sampled_from([1, 3]),
    height=st.integers(5, 7),
    width=st.integers(5, 7),
    last=st.booleans(),
    floats=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_layout_and_scale_do_not_change_the_pixels(examples, depth, height, width, last, floats, seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (examples, depth, height, width), dtype=np.uint8)
    inputs = pixels.transpose(0, 2, 3, 1) if last else pixels
    table = from_arrays(inputs / 255 if floats else inputs, ["a"] * examples)
    assert np.array_equal(table.inputs.numpy(), np.broadcast_to(pixels, (examples, 3, height, width)))


def test_arrays_that_fit_both_layouts_follow_the_custom_of_their_library():
    pixels = np.arange(27, dtype=np.uint8).reshape(1, 3, 3, 3)
    assert torch.equal(from_arrays(torch.from_numpy(pixels), [0]).inputs, torch.from_numpy(pixels))
    assert torch.equal(from_arrays(torch.from_numpy(pixels), [0], image_size=3).inputs, torch.from_numpy(pixels))
    assert np.array_equal(from_arrays(pixels, [0]).inputs.numpy(), pixels.transpose(0, 3, 1, 2))
    assert np.array_equal(from_arrays(pixels, [0], image_size=3).inputs.numpy(), pixels.transpose(0, 3, 1, 2))


def test_grey_arrays_and_channels():
    grey = PIXELS[..., 0]
    assert np.array_equal(from_arrays(grey, range(4)).inputs.numpy(), np.stack([grey] * 3, axis=1))
    assert np.array_equal(from_arrays(grey[..., None], range(4), channels=1).inputs.numpy(), grey[:, None])
    luma = np.stack([np.asarray(Image.fromarray(p).convert("L")) for p in PIXELS])
    assert np.array_equal(from_arrays(PIXELS, range(4), channels=1).inputs.numpy(), luma[:, None])


def test_transparent_arrays_are_laid_over_white_as_files_are():
    pixels = np.random.default_rng(1).integers(0, 256, (3, 6, 8, 4), dtype=np.uint8)
    expected = pixels[..., :3] * (pixels[..., 3:] / 255) + 255 - pixels[..., 3:].astype(float)
    for inputs in (pixels, [Image.fromarray(p) for p in pixels]):
        got = from_arrays(inputs, [0, 1, 2]).inputs.permute(0, 2, 3, 1).numpy()
        assert np.abs(got - expected).max() <= 1


def test_arrays_are_resized_when_asked_and_lists_when_needed():
    assert from_arrays(PIXELS / 255, range(4), image_size=5).inputs.shape == (4, 3, 5, 5)
    table = from_arrays([picture(0, (9, 7)), picture(1, (8, 8))], ["a", "b"])
    assert table.inputs.shape == (2, 3, 256, 256)


def test_what_the_caller_does_to_the_array_later_changes_nothing():
    pixels = EXPECTED.clone()
    table = from_arrays(pixels, range(4))
    pixels.zero_()
    assert torch.equal(table.inputs, EXPECTED)


@pytest.mark.parametrize("shape", [(4, 6, 8, 2), (4, 5, 6, 7), (4, 8), (2, 4, 6, 8, 3), (4, 0, 3, 3)])
def test_wrong_shapes_are_named(shape):
    with pytest.raises(DataError, match=rf"shape \({', '.join(map(str, shape))}\): expected .*1, 3 or 4 channels"):
        from_arrays(np.zeros(shape, np.uint8), [0] * shape[0])


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (np.full((1, 4, 4), 16.0), "from 16 to 16"),
        (np.full((1, 4, 4), -0.5), "from -0.5"),
        (np.full((1, 4, 4), np.nan), "nan"),
        (np.full((1, 4, 4), 256), "from 256 to 256"),
        (np.zeros((1, 4, 4), bool), "type bool"),
        (torch.zeros((1, 4, 4), dtype=torch.bool), "type torch.bool"),
    ],
)
def test_pixels_of_wrong_range_or_type_are_named(pixels, message):
    with pytest.raises(DataError, match=message + r".*integers in 0\.\.255 or floats in 0\.\.1"):
        from_arrays(pixels, [0])


def test_paths_are_pictures_and_other_strings_are_texts(tmp_path):
    path = tmp_path / "a.png"
    save(picture(0), path)
    for inputs in ([path], [str(path)]):
        assert torch.equal(from_arrays(inputs, ["x"]).inputs, as_tensor(picture(0))[None])
    assert from_arrays([str(path), "see a.png for more"], ["x", "y"]).inputs == [str(path), "see a.png for more"]
    with pytest.raises(DataError, match="example 0: there is no picture"):
        from_arrays(["missing.png"], ["x"])


def test_texts_and_sentences_in_memory():
    table = from_arrays(np.array(["b", "a"]), ["y", "x"])
    assert (table.modality.name, table.inputs, table.names) == ("text", ["b", "a"], ["x", "y"])
    table = from_arrays([("New", "York"), ["!"]], [["I-LOC", "I-LOC"], ["O"]])
    assert (table.modality.name, table.inputs) == ("token", [["New", "York"], ["!"]])
    assert (table.labels, table.names) == ([["B-LOC", "I-LOC"], ["O"]], ["LOC"])
    table = from_arrays([["New", "York"]], [[1, 2]], label_names=["O", "B-LOC", "I-LOC"])
    assert table.labels == [["B-LOC", "I-LOC"]]
    assert from_arrays(["a"], [torch.tensor(4)]).labels == ["4"]


@pytest.mark.parametrize(
    ("inputs", "labels", "message"),
    [
        (["a", "b"], ["x"], "2 examples but 1 labels"),
        (["a", "b"], ["x", None], "example 1: the label is missing"),
        (["a", "b"], ["x", float("nan")], "example 1: the label is missing"),
        (["a", 5], ["x", "y"], "example 1: 'text' is 5"),
        ([["a", "b"]], [["O"]], "example 0: 2 words but 1 tags"),
        (["a", " ", ""], ["x", "y", "z"], "example 1: there are no words in it. 2 of 3 texts are empty: remove them"),
        ([["a"], []], [["O"], []], "example 1: there are no words in it. 1 of 2 sentences"),
        ([["a"]], [["PER"]], "example 0: 'PER' is not an IOB tag"),
        ([], [], "no examples"),
        (np.zeros((0, 4, 4), np.uint8), [], "no examples"),
        ("text", ["x"], "one str is not a list of examples"),
        ([7], ["x"], "example 0: this is not a picture: '7'"),
    ],
)
def test_examples_in_memory_that_cannot_be_used_are_named(inputs, labels, message):
    with pytest.raises(DataError, match=message):
        from_arrays(inputs, labels)


@pytest.mark.parametrize(
    ("pixels", "remedy"),
    [
        (np.zeros((5, 64)), r"shape \(5, 64\): expected .* reshape rows of pixels"),
        (np.zeros((8, 8), np.uint8), r"shape \(8, 8\): expected .* Put one picture in a list"),
        (
            np.full((2, 8, 8), 16.0),
            r"from 16 to 16: expected .* floats in 0\.\.1\. Divide them by the largest possible value",
        ),
        (np.full((2, 8, 8), -1.0), r"from -1 to -1: expected integers in 0\.\.255 or floats in 0\.\.1\.$"),
    ],
)
def test_arrays_that_are_no_pictures_yet_get_a_remedy(pixels, remedy):
    with pytest.raises(DataError, match=remedy):
        as_inputs(pixels)


def test_labels_unlike_the_given_names_suggest_the_nearest():
    with pytest.raises(DataError, match=r"label 'sprot' is none of the given class names\. Did you mean 'sport'"):
        from_arrays(["a"], ["sprot"], label_names=["sport", "art"])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"modality": "images"}, "modality 'images' is unknown. Did you mean 'image'"),
        ({"channels": 2}, "channels is 2: give 3"),
        ({"image_size": 0}, "image_size is 0"),
        ({"limit_per_class": 0}, "limit_per_class is 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path, setting, message):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, **setting)


# --- real data -----------------------------------------------------------------------------------------------------


def real(name):
    if not (DATA / name).is_dir():
        pytest.skip(f"no {name} in BACE_DATA")
    return DATA / name


def test_real_cifar100_has_the_published_class_order_and_the_pixels_that_datasets_decodes():
    folder = real("cifar100")
    table = read(folder, split="test", limit_per_class=3)
    assert table.inputs.shape == (300, 3, 32, 32)
    assert (len(table.names), table.names[0], table.names[90], table.names[99]) == (100, "apple", "train", "worm")
    assert set(Counter(table.labels).values()) == {3}
    datasets = pytest.importorskip("datasets")
    files = str(folder / "test-*.parquet")
    first = next(iter(datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)))
    assert torch.equal(table.inputs[0], as_tensor(first["img"]))
    assert table.labels[0] == table.names[first["fine_label"]]


def test_real_mnist_is_grey_in_three_channels():
    table = read(real("mnist"), split="test")
    assert table.inputs.shape == (1000, 3, 28, 28)
    assert torch.equal(table.inputs[:, 0], table.inputs[:, 2])
    assert table.names == list("0123456789")
    assert set(Counter(table.labels).values()) == {100}


@pytest.mark.parametrize(
    ("name", "count", "first", "classes"),
    [
        ("ag_news", 800, "World", 4),
        ("dbpedia_14", 2800, "Company", 14),
        ("stackoverflow_titles", 4000, "wordpress", 20),
    ],
)
def test_real_texts(name, count, first, classes):
    table = read(real(name), split="test")
    assert (table.modality.name, len(table), len(table.names), table.names[0]) == ("text", count, classes, first)
    assert set(Counter(table.labels).values()) == {count // classes}
    assert all(isinstance(text, str) and text for text in table.inputs)


@pytest.mark.parametrize(
    ("name", "types"), [("mit_movie", 12), ("mit_restaurant", 8), ("wnut2017", 6), ("bionlp13cg", 16), ("btc", 3)]
)
def test_real_entities_are_strict_iob2(name, types):
    table = read(real(name), split="test")
    assert (table.modality.name, len(table), len(table.names)) == ("token", 1200, types)
    for words, tags in zip(table.inputs, table.labels, strict=True):
        assert len(words) == len(tags)
        for before, tag in zip(["O", *tags], tags, strict=False):
            assert tag == "O" or tag[2:] in table.names
            assert tag[0] != "I" or before[2:] == tag[2:]
