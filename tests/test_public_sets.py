"""The paper's picture benchmarks on small sets in their published layouts, and `bace check data`."""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from test_layouts import pictures, write_cifar10, write_idx, write_svhn

from bace.cli.main import main
from bace.config.parse import config_from
from bace.data import datasets
from bace.data.batch import MIRRORED
from bace.data.benchmarks import BENCHMARKS, find_benchmark, order_classes
from bace.data.check import check, compare, sets_of
from bace.data.datasets import CIFAR10, Corpus, Counts
from bace.data.decode import Pictures
from bace.data.settings import DataSettings
from bace.errors import ConfigError, DataError
from bace.experiments.stream import make_stream
from bace.models.loading import load_encoder

LATER = ("imagenet-a", "cub")  # benchmarks that are not in the paper
NAMES = ("cifar100", "cifar10", "five-datasets", "tiny-imagenet", "imagenet-r", "objectnet", "omnibenchmark", "vtab")


def write_folders(folder: Path, classes: list[str], per_class: int, side: int = 8) -> None:
    for c, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for i in range(per_class):
            Image.fromarray(pictures(1, side, side, 3, seed=100 * c + i)[0]).save(folder / name / f"{i}.png")


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with nothing in it."""
    monkeypatch.setenv("BACE_DATA", str(tmp_path))
    return tmp_path


@pytest.fixture
def five(nowhere: Path) -> Path:
    """The five datasets, a few pictures each, in five layouts: 10 + 2 + 3 + 2 + 10 classes."""
    for split in ("train", "test"):
        write_svhn(nowhere / "svhn", split, list(range(1, 11)))
        idx = "t10k" if split == "test" else split
        write_idx(nowhere / "mnist" / "MNIST" / "raw", idx, [0, 1, 1, 0])
        write_idx(nowhere / "fashion_mnist", idx, list(range(10)), packed=True)
        write_folders(nowhere / "notmnist" / "notMNIST" / split.title(), ["A", "B"], 2, side=28)
    write_cifar10(nowhere / "cifar-10-batches-py", 2, test_labels=(0, 1, 2))
    return nowhere


# -- the declarations


def test_every_dataset_of_the_paper_is_declared_with_a_desk_version_that_differs_in_numbers_only() -> None:
    for name in (*NAMES, *LATER, "topics", "entities"):
        full, desk = find_benchmark(name), find_benchmark(f"{name}-desk")
        assert full.corpora
        if name in (*NAMES, *LATER):
            assert (desk.parts, desk.corpora, desk.modality) == (full.parts, full.corpora, full.modality)
            assert set(full.defaults) <= set(desk.defaults)
            config = config_from({"benchmark": desk.name})
            assert (config.backbone.name, config.backbone.image_size) == ("vit-tiny", 64)
            assert config.benchmark["train_per_class"] <= 50


@pytest.mark.parametrize(
    ("name", "tasks", "memory", "backbone", "adapter"),
    [
        ("cifar100", 20, (500, 0), "vit-b16", 0),
        ("cifar10", 5, (200, 0), "deit-small-611", 64),
        ("five-datasets", 5, (500, 0), "vit-b16", 0),
        ("tiny-imagenet", 5, (2000, 0), "deit-small-611", 128),
        ("imagenet-r", 10, (0, 20), "vit-b16-in21k", 0),
        ("objectnet", 10, (0, 5), "vit-b16-in21k", 0),
        ("omnibenchmark", 10, (0, 5), "vit-b16-in21k", 0),
        ("vtab", 10, (0, 5), "vit-b16-in21k", 0),
        ("imagenet-a", 10, (0, 20), "vit-b16-in21k", 0),
        ("cub", 20, (0, 20), "vit-b16-in21k", 0),
    ],
)
def test_the_papers_settings_are_the_defaults(
    name: str, tasks: int, memory: tuple[int, int], backbone: str, adapter: int
) -> None:
    config = config_from({"benchmark": name})
    assert config.benchmark["tasks"] == tasks
    assert (config.memory.size, config.memory.per_class) == memory
    assert (config.backbone.name, config.backbone.adapter) == (backbone, adapter)
    shuffled = name in ("imagenet-r", "objectnet", "omnibenchmark", *LATER)
    assert config.benchmark["class_order"] == ("numpy" if shuffled else None)


def test_the_counts_are_those_of_the_papers_first_table() -> None:
    """T1 of the paper; MNIST has 60,000 training pictures, not the 50,000 printed there."""
    table = {
        datasets.OMNIBENCHMARK: (300, 89697, 5985),
        datasets.TINY_IMAGENET: (200, 100000, 10000),
        datasets.OBJECTNET: (200, 26509, 6628),
        datasets.IMAGENET_R: (200, 24000, 6000),
        datasets.CIFAR100: (100, 50000, 10000),
        datasets.VTAB: (50, 1796, 8619),
        datasets.SVHN: (10, 73257, 26032),
        datasets.FASHION_MNIST: (10, 60000, 10000),
        datasets.CIFAR10: (10, 50000, 10000),
        datasets.MNIST: (10, 60000, 10000),
        datasets.NOTMNIST: (10, 18265, 459),
    }
    assert {corpus: corpus.counts for corpus in table} == table
    assert set(table) == {corpus for name in NAMES for corpus in BENCHMARKS[name].corpora}


def test_the_order_of_numpy_is_that_of_its_global_generator_over_names_as_text() -> None:
    names = [str(c) for c in range(4, 304)]  # OmniBenchmark's folders
    np.random.seed(1993)
    order = np.random.permutation(300)
    folders = sorted(names)  # other code numbers folders in this order
    expected = [folders[i] for i in order]
    assert order_classes(names, DataSettings(class_order="numpy", seed=1993)) == expected
    assert order_classes(names, DataSettings(class_order="numpy", seed=1)) != expected


# -- reading


@pytest.mark.filterwarnings("ignore:.*the published set")
def test_the_five_datasets_are_five_tasks_of_one_size_in_the_papers_order(five: Path, tiny: Any) -> None:
    cut = DataSettings(image_size=32)
    parts = find_benchmark("five-datasets").parts(cut)
    assert [part.name for part in parts] == ["SVHN", "MNIST", "CIFAR-10", "notMNIST", "Fashion-MNIST"]
    assert all(isinstance(part.train.inputs, Pictures) for part in parts)  # nothing is decoded yet
    stream = make_stream(parts, cut, load_encoder(tiny.vit), "", 0)
    assert [len(task.classes) for task in stream] == [10, 2, 3, 2, 10]
    names = ["svhn.0", "mnist.0", "cifar10.plane", "notmnist.A", "fashion_mnist.T - shirt / top"]
    assert [stream.names[task.classes[0]] for task in stream] == names
    assert [(len(task.train), len(task.test)) for task in stream] == [(10, 10), (4, 4), (4, 3), (4, 4), (10, 10)]
    assert stream.data.pixels.shape == (63, 3, 32, 32)
    with Image.open(five / "notmnist" / "notMNIST" / "Train" / "B" / "1.png") as letter:
        larger = np.asarray(letter.resize((32, 32), Image.Resampling.BICUBIC)).copy()
    assert torch.equal(stream.data.pixels[stream[3].train[3]], torch.from_numpy(larger).permute(2, 0, 1))


@pytest.mark.filterwarnings("ignore:.*the published set")
def test_digits_and_letters_are_never_mirrored_but_the_others_are(five: Path, tiny: Any) -> None:
    cut = DataSettings(image_size=32)
    parts = find_benchmark("five-datasets").parts(cut)
    encoder = load_encoder(tiny.vit)
    stream = make_stream(parts, cut, encoder, "", 0)
    for task, mirrored in zip(stream, [False, False, True, False, True], strict=True):
        assert stream.data.flip[torch.cat([task.train, task.test])].unique().tolist() == [mirrored]
    seen = stream.data.inputs(torch.arange(63), MIRRORED, torch.device("cpu"))["pixel_values"]
    clean = stream.data.inputs(torch.arange(63), None, torch.device("cpu"))["pixel_values"]
    for task, mirrored in zip(stream, [False, False, True, False, True], strict=True):
        expected = clean[task.train].flip(3) if mirrored else clean[task.train]
        torch.testing.assert_close(seen[task.train], expected)
    assert not make_stream(parts, replace(cut, flip=False), encoder, "", 0).data.flip.any()


@pytest.mark.usefixtures("five")
def test_a_part_of_a_set_is_read_with_a_warning_unless_a_part_was_asked_for() -> None:
    with pytest.warns(UserWarning, match="the published set has") as told:
        find_benchmark("five-datasets").parts(DataSettings())
    of_svhn, *others = (str(warning.message) for warning in told)
    assert "svhn has 10 training and 10 test examples, but the published set has 73,257 and" in of_svhn
    assert [text.split(" has ")[0] for text in others] == ["mnist", "cifar10", "notmnist", "fashion_mnist"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        find_benchmark("five-datasets").parts(DataSettings(train_per_class=1))


def test_a_set_without_a_test_split_holds_out_its_published_share(nowhere: Path) -> None:
    write_folders(nowhere / "imagenet-r" / "imagenet-r", [f"n{c}" for c in range(12)], 10)
    parts = find_benchmark("imagenet-r").parts(
        DataSettings(tasks=10, class_order="numpy", seed=1993, train_per_class=7)
    )
    assert [len(part.classes) for part in parts] == [2, 2, *[1] * 8]
    assert [len(part.train) for part in parts] == [14, 14, *[7] * 8]
    assert [len(part.test) for part in parts] == [4, 4, *[2] * 8]
    train, test = (set(getattr(parts[0], split).inputs.rows) for split in ("train", "test"))
    assert not train & test


@pytest.mark.parametrize(
    ("name", "folder", "total"),
    [("imagenet-a", "imagenet-a/imagenet-a", 7_500), ("cub", "CUB_200_2011/images", 11_788)],
)
def test_the_later_sets_are_read_as_published_and_as_cut_for_their_literature(
    nowhere: Path, name: str, folder: str, total: int
) -> None:
    corpus = find_benchmark(name).corpora[0]
    assert corpus.counts is not None
    assert corpus.counts.train + corpus.counts.test == total  # the whole set; four fifths of each class to train on
    classes = [f"{c:03}.Bird_{c}" for c in range(1, 11)]
    write_folders(nowhere / folder, classes, 5)
    (nowhere / folder / "README.txt").write_text("as in the archive")
    cut = DataSettings(tasks=5, class_order="numpy", seed=1993)
    with pytest.warns(UserWarning, match=f"{name} has 40 training and 10 test examples, but the published set"):
        parts = find_benchmark(name).parts(cut)
    assert [(len(part.train), len(part.test)) for part in parts] == [(8, 2)] * 5
    np.random.seed(1993)
    first = np.random.permutation(10)[:2]
    assert parts[0].classes == [classes[i] for i in first]
    own = nowhere / "cut" / name
    write_folders(own / "train", classes[:5], 3)
    write_folders(own / "test", classes[:5], 2)
    with pytest.warns(UserWarning, match="the published set"):
        parts = find_benchmark(name).parts(replace(cut, path=str(own)))
    assert [(len(part.train), len(part.test)) for part in parts] == [(3, 2)] * 5


def test_unequal_pictures_are_kept_at_256_pixels_or_as_told_and_decoded_once(
    nowhere: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folders(nowhere / "vtab-cil" / "vtab" / "train", [str(c) for c in range(10, 16)], 2, side=20)
    write_folders(nowhere / "vtab-cil" / "vtab" / "test", [str(c) for c in range(10, 16)], 1, side=12)
    opened: list[Any] = []
    real = Image.open
    monkeypatch.setattr(Image, "open", lambda file, **options: opened.append(file) or real(file, **options))
    for size, side in ((None, 256), (16, 16)):
        cut = DataSettings(tasks=3, image_size=size)
        with pytest.warns(UserWarning, match="vtab has 12 training"):
            parts = find_benchmark("vtab").parts(cut)
        assert opened == []
        stream = make_stream(parts, cut, load_encoder(tiny.vit), "", 0)
        assert stream.data.pixels.shape == (18, 3, side, side)
        assert [stream.names[c] for c in stream[0].classes] == ["10", "11"]
        if size:
            assert len(opened) == len(set(opened)) == 18
        opened.clear()


def test_a_set_that_is_not_here_says_where_to_get_it_and_what_is_expected(nowhere: Path) -> None:
    with pytest.raises(DataError, match=r"omnibenchmark does not exist: get .*RevisitingCIL.*train/<class>/"):
        find_benchmark("omnibenchmark-desk").parts(DataSettings())
    with pytest.raises(DataError, match=r"'ufldl-stanford/svhn'.*Or get it from http://ufldl.*`bace check data`"):
        find_benchmark("five-datasets").parts(DataSettings())


# -- bace check data


def say(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(list(words))
    return code, *capsys.readouterr()


def test_check_data_tells_what_is_here_from_what_is_missing(five: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = say(capsys, "check", "data", "five-datasets", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert list(rows) == ["svhn", "mnist", "cifar10", "notmnist", "fashion_mnist"]
    assert rows["svhn"]["status"] == rows["fashion_mnist"]["status"] == "subset"
    assert (rows["svhn"]["train"], rows["svhn"]["test"]) == ("10 of 73,257", "10 of 26,032")
    assert rows["mnist"]["status"] == "wrong count"  # it has two classes instead of ten
    assert rows["mnist"]["classes"] == "2 of 10"
    assert rows["mnist"]["remark"] == str(five / "mnist" / "MNIST" / "raw")
    assert code == 2
    assert "3 of the 5 sets of 'five-datasets'" in err
    code, out, err = say(capsys, "check", "data", "svhn")
    assert (code, err) == (0, "")
    assert "subset" in out


def test_check_data_without_a_name_lists_every_set_and_never_fails(
    nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = say(capsys, "check", "data", "--json")
    rows = json.loads(out)
    assert code == 0
    assert {row["status"] for row in rows} == {"missing"}
    assert len(rows) == len({row["name"] for row in rows}) == len(sets_of(None)) >= 23
    vtab = next(row for row in rows if row["name"] == "vtab")
    assert vtab["train"] == "- of 1,796"
    assert "RevisitingCIL" in vtab["remark"]
    assert str(nowhere / "vtab") in vtab["remark"]
    code, _, err = say(capsys, "check", "data", "vtabb")
    assert code == 2
    assert "Did you mean 'vtab" in err


def test_check_counts_a_complete_set_by_its_folders_and_decodes_nothing(nowhere: Path) -> None:
    corpus = Corpus("small", None, "", counts=Counts(3, 12, 3))
    for split, count in (("train", 4), ("test", 1)):
        for name in "abc":
            (nowhere / "small" / split / name).mkdir(parents=True)
            for i in range(count):
                (nowhere / "small" / split / name / f"{i}.jpg").write_bytes(b"no picture at all")
    found = check(corpus, "image")
    assert (found.status, found.found) == ("present", (3, 12, 3))
    (nowhere / "small" / "train" / "a" / "more.jpg").write_bytes(b"")
    assert check(corpus, "image").status == "wrong count"
    assert check(corpus, "image").numbers() == ["3", "13 instead of 12", "3"]


def test_check_of_a_set_that_cannot_be_read_says_what_was_expected(nowhere: Path) -> None:
    (nowhere / "mnist").mkdir()
    found = check(datasets.MNIST, "image")
    assert found.status == "wrong count"
    assert "holds nothing to read" in found.remark
    assert "idx3-ubyte" in found.remark


@pytest.mark.parametrize(
    ("found", "status"),
    [
        ((10, 100, 20), "present"),
        ((10, 50, 20), "subset"),
        ((10, 50, 40), "subset"),  # another split of a subset
        ((9, 50, 20), "wrong count"),
        ((10, 101, 20), "wrong count"),
        ((10, 80, 40), "wrong count"),
    ],
)
def test_counts_are_compared(found: tuple[int, int, int], status: str) -> None:
    assert compare(Counts(*found), Counts(10, 100, 20)) == status
    assert compare(Counts(*found), None) == "present"


def test_sets_fetched_from_the_hub_are_counted_from_its_notes(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(nowhere / "cache"))
    folder = nowhere / "cache" / "uoft-cs___cifar10" / "plain_text" / "0.0.0" / "abc"
    folder.mkdir(parents=True)
    about = {
        "features": {"img": {"_type": "Image"}, "label": {"names": list("abcdefghij"), "_type": "ClassLabel"}},
        "splits": {"train": {"num_examples": 50000}, "test": {"num_examples": 10000}},
    }
    (folder / "dataset_info.json").write_text(json.dumps(about))
    found = check(CIFAR10, "image")
    assert (found.status, found.found) == ("present", (10, 50000, 10000))
    assert "uoft-cs/cifar10" in found.remark


def test_check_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["check"], ["check", "dat"], ["check", "data", "a", "b"], ["check", "backbone"]):
        code, _, err = say(capsys, *words)
        assert code == 2, words
        assert "bace check" in err
    with pytest.raises(ConfigError, match="no benchmark and no set"):
        sets_of("nothing")


def test_the_shared_subsets_are_known_as_such(real_data: Path) -> None:
    found = check(datasets.CIFAR100, "image", str(real_data))
    assert (found.status, found.found) == ("subset", (100, 20000, 5000))


def test_four_real_sets_become_one_stream_of_colour_pictures_of_one_size(real_data: Path, tiny: Any) -> None:
    cut = DataSettings(path=str(real_data), image_size=32, train_per_class=2, test_per_class=1)
    stream = make_stream(find_benchmark("four-datasets-desk").parts(cut), cut, load_encoder(tiny.vit), "", 0)
    assert [task.name for task in stream] == ["MNIST", "CIFAR-10", "notMNIST", "Fashion-MNIST"]
    assert [len(task.classes) for task in stream] == [10] * 4
    assert stream.data.pixels.shape == (4 * 10 * 3, 3, 32, 32)
    grey = [bool((stream.data.pixels[task.train] == stream.data.pixels[task.train, :1]).all()) for task in stream]
    assert grey == [True, False, True, True]
