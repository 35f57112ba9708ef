"""Benchmarks: from labelled data to tasks."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits as sklearn_digits

import bace
from bace.config.parse import config_from
from bace.core.stream import Stream
from bace.data.benchmarks import TaskTables, cut_by_class, find_benchmark, order_classes, share_out
from bace.data.digits import load_digits
from bace.data.modalities import MODALITIES
from bace.data.modality import Table
from bace.data.settings import DataSettings
from bace.errors import ConfigError, DataError
from bace.experiments.assemble import assemble
from bace.experiments.stream import make_stream
from bace.models.loading import load_encoder


@pytest.fixture(scope="module")
def vit(tiny: Any) -> Any:
    return load_encoder(tiny.vit)


@pytest.fixture(scope="module")
def bert(tiny: Any) -> Any:
    return load_encoder(tiny.bert)


def pictures(labels: str, names: str = "abcdef") -> Table:
    """One 8 x 8 picture per letter, whose grey level is its position."""
    pixels = torch.arange(len(labels), dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 8, 8).clone()
    return Table(MODALITIES["image"], pixels, list(labels), list(names))


def stream_of(parts: list[TaskTables], encoder: Any, backbone: str = "", seed: int = 0, **cut: Any) -> Stream:
    return make_stream(parts, DataSettings(**cut), encoder, backbone, seed)


# -- the embedded digits


def test_digits_are_all_there_and_every_fifth_of_a_class_is_for_the_test():
    train, test = load_digits()
    raw = sklearn_digits()
    assert len(train) + len(test) == 1797
    per_class = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert Counter(test.labels) == {str(c): n // 5 for c, n in enumerate(per_class)}
    assert Counter(train.labels) == {str(c): n - n // 5 for c, n in enumerate(per_class)}
    assert train.names == [str(c) for c in range(10)]
    for c in range(10):  # by hand: the 5th, 10th, ... picture of each class, in order
        own = raw.images[raw.target == c]
        expected = np.round(own * 255 / 16).astype(np.uint8)
        of_test = test.inputs[[label == str(c) for label in test.labels], 0].numpy()
        of_train = train.inputs[[label == str(c) for label in train.labels], 0].numpy()
        np.testing.assert_array_equal(of_test, expected[4::5])
        np.testing.assert_array_equal(of_train, np.delete(expected, np.s_[4::5], axis=0))


def test_the_digits_benchmark_is_five_tasks_of_two_classes(vit):
    cut = DataSettings()
    stream = make_stream(find_benchmark("digits").parts(cut), cut, vit, "", 0)
    assert [task.classes for task in stream] == [range(2 * t, 2 * t + 2) for t in range(5)]
    assert stream.names == [str(c) for c in range(10)]
    assert [len(task.train) for task in stream] == [143 + 146, 142 + 147, 145 + 146, 145 + 144, 140 + 144]
    assert sum(len(task.test) for task in stream) == 355
    everything = torch.cat([ids for task in stream for ids in (task.train, task.valid, task.test)])
    assert sorted(everything.tolist()) == list(range(1797))
    for task in stream:
        assert set(stream.targets[torch.cat([task.train, task.test])].tolist()) == set(task.classes)


def test_limits_per_class_take_the_first_in_file_order(vit):
    whole, cut = DataSettings(), DataSettings(train_per_class=7, test_per_class=2)
    full = make_stream(find_benchmark("digits").parts(whole), whole, vit, "", 0)
    stream = make_stream(find_benchmark("digits").parts(cut), cut, vit, "", 0)
    for task, all_of_it in zip(stream, full, strict=True):
        for few, many, count in ((task.train, all_of_it.train, 7), (task.test, all_of_it.test, 2)):
            for c in task.classes:
                own = few[stream.targets[few] == c]
                first = many[full.targets[many] == c][:count]
                assert len(own) == count
                assert torch.equal(stream.data.pixels[own], full.data.pixels[first])  # type: ignore[attr-defined]


# -- class order


def test_the_order_is_the_sources_unless_said_otherwise():
    names = list("dbca")
    assert order_classes(names, DataSettings()) == names
    assert order_classes(names, DataSettings(class_order=["a", "b", "c", "d"])) == list("abcd")
    assert order_classes(names, DataSettings(class_order=["c", "a"])) == ["c", "a"]  # the others are left out


def test_a_shuffled_order_depends_on_its_seed_alone():
    names = [f"c{i}" for i in range(30)]
    orders = [order_classes(names, DataSettings(class_order="shuffled", seed=seed)) for seed in (0, 1, 2)]
    assert all(sorted(order) == sorted(names) for order in orders)
    assert len({tuple(order) for order in [*orders, names]}) == 4
    assert order_classes(names, DataSettings(class_order="shuffled", seed=1)) == orders[1]


def test_a_class_order_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"'catt' that the data lack\. Did you mean 'cat'"):
        order_classes(["cat", "dog"], DataSettings(class_order=["dog", "catt"]))
    with pytest.raises(ConfigError, match="class 'dog' twice"):
        order_classes(["cat", "dog"], DataSettings(class_order=["dog", "cat", "dog"]))


# -- sharing out classes


@given(st.integers(1, 50), st.data())
def test_classes_are_shared_out_equally_with_the_rest_to_the_first_tasks(classes, data):
    tasks = data.draw(st.integers(1, classes))
    counts = share_out(classes, tasks)
    assert len(counts) == tasks
    assert sum(counts) == classes
    assert counts == sorted(counts, reverse=True)
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("tasks", [0, -1, 11])
def test_a_number_of_tasks_out_of_range_is_refused(tasks):
    with pytest.raises(ConfigError, match=f"benchmark.tasks is {tasks}; with 10 classes it must lie between 1 and 10"):
        share_out(10, tasks)


@pytest.mark.parametrize("tasks", [[5, 6], [0, 3], [3, -1], []])
def test_a_list_of_tasks_that_does_not_fit_is_refused(tasks):
    with pytest.raises(ConfigError, match=r"benchmark.tasks \["):
        share_out(10, tasks)


def test_unequal_tasks_get_the_classes_in_order(vit):
    train, test = pictures("abcdefabcdef"), pictures("abcdef")
    parts = cut_by_class(train, test, DataSettings(tasks=[1, 3, 2], class_order=list("fedcba")))
    assert [part.classes for part in parts] == [["f"], ["e", "d", "c"], ["b", "a"]]
    stream = stream_of(parts, vit)
    assert stream.names == list("fedcba")
    assert [task.classes for task in stream] == [range(0, 1), range(1, 4), range(4, 6)]
    for task in stream:  # the grey value of an image is the position of its letter in "abcdefabcdef"
        for split, letters in ((task.train, "abcdefabcdef"), (task.test, "abcdef")):
            grey = stream.data.pixels[split, 0, 0, 0].tolist()  # type: ignore[attr-defined]
            assert [letters[g] for g in grey] == [stream.names[c] for c in stream.targets[split].tolist()]


def test_classes_beyond_a_list_of_tasks_are_left_out(vit):
    parts = cut_by_class(pictures("abcdef"), pictures("abcdef"), DataSettings(tasks=[2, 1]))
    stream = stream_of(parts, vit)
    assert stream.names == ["a", "b", "c"]
    assert len(stream.data) == 6


# -- validation


def test_validation_examples_are_a_share_of_each_class_and_of_training_only(vit):
    parts = cut_by_class(
        pictures("a" * 10 + "b" * 20 + "c" * 30), pictures("abc"), DataSettings(tasks=[2, 1], class_order=list("abc"))
    )
    stream = stream_of(parts, vit, val_fraction=0.2)
    shares = [Counter(stream.targets[task.valid].tolist()) for task in stream]
    assert shares == [{0: 2, 1: 4}, {2: 6}]
    for task in stream:
        train, valid, test = (set(ids.tolist()) for ids in (task.train, task.valid, task.test))
        assert not train & valid
        assert not (train | valid) & test
        assert len(train) + len(valid) == 30
        assert task.train.tolist() == sorted(train)
    again, other = (stream_of(parts, vit, val_fraction=0.2, seed=seed) for seed in (0, 1))
    assert torch.equal(again[0].valid, stream[0].valid)
    assert not torch.equal(other[0].valid, stream[0].valid)


def test_no_class_loses_all_its_training_examples_to_validation(vit):
    parts = cut_by_class(pictures("ab" * 3), pictures("ab"), DataSettings(tasks=1, class_order=["a", "b"]))
    for seed in range(20):
        task = stream_of(parts, vit, val_fraction=0.6, seed=seed)[0]
        assert sorted(task.train.tolist() + task.valid.tolist()) == list(range(6))
        assert len(task.valid) == 4
        assert {int(i) % 2 for i in task.train} == {0, 1}


def test_without_a_fraction_nothing_is_held_out(vit):
    stream = stream_of(cut_by_class(pictures("abcdef"), pictures("abcdef"), DataSettings(tasks=3)), vit)
    assert all(len(task.valid) == 0 for task in stream)


@pytest.mark.parametrize("fraction", [1.0, -0.1, 2.0])
def test_a_fraction_that_leaves_nothing_to_train_on_is_refused(vit, fraction):
    parts = cut_by_class(pictures("ab"), pictures("ab"), DataSettings(tasks=1, class_order=["a", "b"]))
    with pytest.raises(ConfigError, match=f"benchmark.val_fraction is {fraction}"):
        stream_of(parts, vit, val_fraction=fraction)


# -- errors in the data are reported


def part(name: str, classes: str, train: str, test: str) -> TaskTables:
    return TaskTables(name, list(classes), pictures(train), pictures(test))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            [part("one", "ab", "ab", "ab"), part("two", "bc", "bc", "bc")],
            "class 'b' is declared in 'one' and in 'two'",
        ),
        ([part("one", "ab", "a", "ab")], "class 'b' of 'one' has no training example"),
        ([part("one", "ab", "ab", "b")], "class 'a' of 'one' has no test example"),
        ([part("one", "ab", "abc", "ab")], "a training example of 'one' has the label 'c'.*a, b"),
        ([part("one", "ab", "ab", "abd")], "a test example of 'one' has the label 'd'"),
    ],
)
def test_parts_that_contradict_themselves_are_refused(vit, parts, message):
    with pytest.raises(DataError, match=message):
        stream_of(parts, vit)


def test_pictures_of_different_shapes_in_one_stream_are_refused(vit):
    other = Table(MODALITIES["image"], torch.zeros(2, 1, 9, 9, dtype=torch.uint8), ["c", "d"], ["c", "d"])
    with pytest.raises(DataError, match="different shapes"):
        stream_of([part("one", "ab", "ab", "ab"), TaskTables("two", ["c", "d"], other, other)], vit)


def test_a_backbone_of_another_kind_is_refused(bert):
    with pytest.raises(ConfigError, match="backbone 'some-bert' takes texts, but the data are images"):
        stream_of([part("one", "ab", "ab", "ab")], bert, "some-bert")


def test_an_unknown_benchmark_suggests_a_name():
    with pytest.raises(ConfigError, match="Did you mean 'digits'"):
        find_benchmark("digit")


def test_own_data_need_a_path():
    with pytest.raises(ConfigError, match=r"--benchmark\.path"):
        find_benchmark("my-images").parts(DataSettings())


# -- texts and entities


def test_texts_become_tasks(bert, tiny):
    texts = Table(MODALITIES["text"], ["w1 w2", "w3", "w4 w5", "w6"], ["x", "y", "x", "z"], ["x", "y", "z"])
    stream = stream_of(cut_by_class(texts, texts, DataSettings(tasks=[2, 1])), bert, tiny.bert)
    assert stream.modality.name == "text"
    assert [stream.targets[task.train].tolist() for task in stream] == [[0, 1, 0], [2]]
    stream.begin(stream[1], stream[0].train)
    assert stream.batch(stream[1].train).inputs["input_ids"].tolist() == [[2, 4 + 6, 3]]


def sentences() -> Table:
    tagged = [
        "w0/B-per w1/I-per w2/O w3/B-loc",  # shows types of two tasks, so it is two examples
        "w4/O w5/B-loc",
        "w6/O w7/O",  # shows no type, so it is no example
        "w8/B-org w9/O",
        "w10/B-per w11/B-org",
    ]
    pairs = [[word.split("/") for word in line.split()] for line in tagged]
    words, tags = ([[pair[k] for pair in line] for line in pairs] for k in (0, 1))
    return Table(MODALITIES["token"], words, tags, ["per", "loc", "org"])


def test_in_an_entity_task_only_its_own_types_are_labelled(bert, tiny):
    stream = stream_of(cut_by_class(sentences(), sentences(), DataSettings(tasks=[1, 2])), bert, tiny.bert)
    assert stream.names == ["O", "B-per", "I-per", "B-loc", "I-loc", "B-org", "I-org"]
    assert stream.background == 0
    assert [task.classes for task in stream] == [range(0, 3), range(3, 7)]
    labelled = []
    for task in stream:
        stream.begin(task, task.test)
        for ids in (task.train, task.test):
            own = []
            for example in ids:
                rows, targets = stream.labels(example[None])
                own.append([stream.names[c] for c in targets.tolist()])
                assert len(rows) == len(targets)
            labelled.append(own)
    first = [["B-per", "I-per", "O", "O"], ["B-per", "O"]]
    second = [["O", "O", "O", "B-loc"], ["O", "B-loc"], ["B-org", "O"], ["O", "B-org"]]
    assert labelled == [first, first, second, second]


def test_a_sentence_of_two_tasks_is_two_examples(bert, tiny):
    stream = stream_of(cut_by_class(sentences(), sentences(), DataSettings(tasks=[1, 2])), bert, tiny.bert)
    assert [len(task.train) for task in stream] == [2, 4]
    one, two = stream[0].train[0], stream[1].train[0]  # the first sentence in both tasks
    assert one != two
    stream.begin(stream[1], stream[0].train)
    batch = stream.batch(torch.stack([one, two]))
    assert torch.equal(batch.inputs["input_ids"][0], batch.inputs["input_ids"][1])
    first, second = batch.targets.split(4)
    assert first.tolist() == [1, 2, 0, 0]
    assert second.tolist() == [0, 0, 0, 3]


def test_windows_of_a_long_sentence_are_examples_of_its_task_with_all_its_labels(bert, tiny):
    long = [f"w{i}" for i in range(20)]
    tags = [["O"] * 18 + ["B-per", "I-per"]]
    table = Table(MODALITIES["token"], [long], tags, ["per"])
    stream = stream_of(cut_by_class(table, table, DataSettings(tasks=1)), bert, tiny.bert, max_length=8)
    (task,) = stream
    assert (len(task.train), len(task.test)) == (4, 4)  # six words per window
    stream.begin(task, task.test)
    for ids in (task.train, task.test):
        targets = stream.labels(ids)[1].tolist()
        assert targets == [0] * 18 + [1, 2]


def test_real_entities_keep_every_tag_of_their_task(bert, tiny, real_data):
    """WNUT-2017's six types, two per task: there are as many B- tags as in the files, wherever the windows are cut."""
    folder: Path = real_data / "wnut2017"
    cut = DataSettings(path=str(folder), tasks=3, max_length=32)
    parts = find_benchmark("my-entities").parts(cut)
    stream = make_stream(parts, cut, bert, tiny.bert, 0)
    for task, source in zip(stream, parts, strict=True):
        stream.begin(task, task.test)
        for ids, table in ((task.train, source.train), (task.test, source.test)):
            expected = Counter(tag for tags in table.labels for tag in tags if tag[2:] in source.classes)
            found = Counter(stream.names[c] for c in stream.labels(ids)[1].tolist())
            del found["O"]
            assert found == expected
            assert sum(found.values()) > 50


def test_relative_paths_and_a_held_out_test_share_work_from_the_users_folder(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny.folder)
    chosen = {"benchmark.path": "pictures", "train.epochs": 1}
    whole = bace.run(tiny.settings("image", method="seq", **chosen))
    assert len(whole.matrix) == 3
    folders = {**chosen, "benchmark.path": "pictures/train", "benchmark.test_fraction": 0.3}
    config = config_from(tiny.settings("image", method="seq", **folders))
    _, stream = assemble(config)
    for task in stream:
        assert len(task.test) == 3 * len(task.classes)  # 3 of 10 of each class
        assert len(task.train) == 7 * len(task.classes)
