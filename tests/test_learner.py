"""Learner beyond the conformance suite: the user's names, deleted data, what is kept, and pictures in many forms."""

import gc
import json
import shutil
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import torch
from checks import short, shown_examples, training_examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import bace
from bace.errors import CheckpointError, ConfigError, DataError
from bace.methods import METHODS
from bace.models.backbones import OWN
from bace.models.loading import load_encoder

MODALITIES = ("image", "text", "token")


def learner(tiny: Any, modality: str = "image", method: Any = "er", **changes: Any) -> bace.Learner:
    base = {k: v for k, v in tiny.settings(modality).items() if not k.startswith("benchmark")}
    return bace.Learner(method, **{**base, **changes})


@pytest.fixture(scope="module")
def taught(tiny: Any) -> dict[str, bace.Learner]:
    """A learner of four classes for each modality."""
    made = {}
    for modality in MODALITIES:
        made[modality] = learner(tiny, modality)
        for classes in ((0, 1), (2, 3)):
            made[modality].partial_fit(*training_examples(tiny, modality, classes))
    return made


# -- names


@pytest.mark.parametrize(
    ("labels", "more"),
    [
        ([7, 3], [11]),
        (np.array([7, 3]), np.array([11])),
        (torch.tensor([7, 3]), torch.tensor([11])),
        ([np.int64(7), np.int64(3)], [np.int64(11)]),
    ],
    ids=["list", "array", "tensor", "numpy numbers"],
)
def test_whole_numbers_come_back_as_the_numbers_they_were(tiny: Any, tmp_path: Path, labels: Any, more: Any) -> None:
    (x, _), (x2, _) = training_examples(tiny, "image", (0, 1)), training_examples(tiny, "image", (2,))
    index = [0] * 10 + [1] * 10
    y = [labels[i] for i in index] if isinstance(labels, list) else labels[index]
    own = learner(tiny)
    own.partial_fit(x, y).partial_fit(x2, [more[0]] * 10 if isinstance(more, list) else more[[0] * 10])
    assert own.classes_ == [3, 7, 11]  # classes of a task are sorted by value, tasks come in order of arrival
    assert all(type(name) is int for name in own.classes_)
    predicted = own.predict(x)
    assert set(predicted) <= {3, 7, 11}
    own.save(tmp_path)
    assert bace.Learner.load(tmp_path).predict(x) == predicted


def test_names_are_of_the_kind_of_the_first_call(tiny: Any, tmp_path: Path) -> None:
    first, second = training_examples(tiny, "image", (0, 1))[0], training_examples(tiny, "image", (2,))[0]
    for name in ("2", "-10"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        Image.fromarray(second[0]).save(tmp_path / "pictures" / name / "1.png")
    numbers = learner(tiny).partial_fit(first, [0] * 10 + [11] * 10)
    for strange in ("cat", "02", "-0"):
        with pytest.raises(DataError, match=rf"class '{strange}' is no whole number, .* are \(0, 11\): give it"):
            numbers.partial_fit(second, [strange] * 10)
    numbers.partial_fit(tmp_path / "pictures")  # class names are folder names
    assert sorted(numbers.classes_) == [-10, 0, 2, 11]
    numbers.save(tmp_path / "model")
    assert {type(name) for name in bace.Learner.load(tmp_path / "model").predict(first)} == {int}
    strings = learner(tiny).partial_fit(first, ["ant"] * 10 + ["7"] * 10).partial_fit(second, [8] * 10)
    assert sorted(strings.classes_) == ["7", "8", "ant"]
    mixed = learner(tiny).partial_fit(first, ["ant"] * 10 + [7] * 10)
    assert sorted(mixed.classes_) == ["7", "ant"]


@pytest.mark.parametrize("source", ["csv", "jsonl", "parquet", "frame", "dataset", "dicts", "columns"])
@pytest.mark.parametrize(("labels", "expected"), [([7, 10], [7, 10]), (["07", "10"], ["07", "10"])])
def test_labels_of_tables_have_the_type_of_their_column(
    tiny: Any, tmp_path: Path, source: str, labels: list[Any], expected: list[Any]
) -> None:
    """A CSV column is one of whole numbers if all of it reads so. Codes with leading zeros are strings."""
    frame = pytest.importorskip("pandas").DataFrame({"text": ["w1 w2", "w11 w12"], "label": labels})
    frame.to_csv(tmp_path / "t.csv", index=False)
    frame.to_parquet(tmp_path / "t.parquet")
    frame.to_json(tmp_path / "t.jsonl", orient="records", lines=True)
    given = {
        "frame": (frame,),
        "dataset": (pytest.importorskip("datasets").Dataset.from_pandas(frame),),
        "dicts": (frame.to_dict("records"),),
        "columns": (frame["text"], frame["label"]),
    }
    own = learner(tiny, "text", "simplecil").partial_fit(*given.get(source, (tmp_path / f"t.{source}",)))
    assert own.classes_ == expected
    own.save(tmp_path / "model")
    assert bace.Learner.load(tmp_path / "model").predict(["w1 w2", "w11 w12"]) == expected


def test_numbers_of_a_csv_become_strings_when_a_later_label_is_none(tiny: Any, tmp_path: Path) -> None:
    """A CSV file cannot say that its labels are strings, so the next month's must not be refused for it."""
    for name, label in (("january", "10115"), ("february", "20095"), ("march", "01067")):
        (tmp_path / f"{name}.csv").write_text(f"text,label\nw1 w2,{label}\nw3,{label}\n")
    own = learner(tiny, "text", "simplecil").partial_fit(tmp_path / "january.csv")
    assert own.partial_fit(tmp_path / "february.csv").classes_ == [10115, 20095]
    own.save(tmp_path / "model")
    own = bace.Learner.load(tmp_path / "model")
    with pytest.warns(UserWarning, match=r"class '01067' is no whole number, .* \(10115, 20095\) were read from a CSV"):
        own.partial_fit(tmp_path / "march.csv")
    assert own.classes_ == ["10115", "20095", "01067"]
    own.save(tmp_path / "model")
    own = bace.Learner.load(tmp_path / "model").partial_fit(["w7"], [3])
    assert own.classes_[-1] == "3"
    strings = learner(tiny, "text", "simplecil").partial_fit(["w1", "w2"], ["1", "2"])  # as all CSV labels once were
    assert strings.partial_fit(tmp_path / "january.csv").classes_ == ["1", "2", "10115"]


def test_a_call_that_warns_is_complete_where_warnings_are_errors(tiny: Any, tmp_path: Path) -> None:
    for name, label in (("january", "10115"), ("march", "01067")):
        (tmp_path / f"{name}.csv").write_text(f"text,label\nw1 w2,{label}\nw3,{label}\n")
    own = learner(tiny, "text", "simplecil").partial_fit(tmp_path / "january.csv")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="'01067' is no whole number"):
            own.partial_fit(tmp_path / "march.csv")
    assert own.classes_ == ["10115", "01067"]
    assert own.decision_function(["w1"]).shape == (1, 2)
    own.save(tmp_path / "model")
    assert bace.Learner.load(tmp_path / "model").classes_ == own.classes_


def test_strings_stay_strings_even_if_they_look_like_numbers(tiny: Any) -> None:
    x, _ = training_examples(tiny, "image", (0, 1))
    own = learner(tiny).partial_fit(x, ["07"] * 10 + ["é a"] * 10)
    assert own.classes_ == ["07", "é a"]
    assert set(own.predict(x)) <= {"07", "é a"}


def test_scores_are_in_the_order_of_the_classes(tiny: Any, taught: dict[str, bace.Learner]) -> None:
    own = taught["image"]
    x, _ = shown_examples(tiny, "image")
    scores = own.scores(x)
    assert scores.shape == (len(x), 4)
    assert own.predict(x) == [own.classes_[row.index(max(row))] for row in scores.tolist()]


def test_only_classes_with_examples_are_learned_from_a_part_of_a_set_that_names_all(tiny: Any, tmp_path: Path) -> None:
    """A `datasets.Dataset` keeps the names of all classes when it is filtered, and so does its Parquet file."""
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["x", "y", "z"])}
    )
    rows = {"text": ["w1 w2", "w3", "w4", "w5", "w6"], "label": [2, 1, 0, 2, 1]}
    whole = datasets.Dataset.from_dict(rows, features=features)
    first, second = (whole.select([i for i, c in enumerate(rows["label"]) if c in own]) for own in ((0, 2), (1,)))
    second.to_parquet(tmp_path / "second.parquet")
    own = learner(tiny, "text", "podnet").partial_fit(first)  # PODNet cannot learn more of known classes
    assert own.classes_ == ["x", "z"]
    assert own.partial_fit(tmp_path / "second.parquet").classes_ == ["x", "z", "y"]


def test_files_and_tables_are_read_as_data_of_the_kind_that_was_learned(tiny: Any, tmp_path: Path) -> None:
    """Words are in a file of any name, and paths are in the named column."""
    pandas = pytest.importorskip("pandas")
    (tmp_path / "words.ner").write_text("w1 B-river\nw2 O\n")
    own = learner(tiny, "token", "simplecil").partial_fit(*training_examples(tiny, "token", (0, 1)))
    assert own.partial_fit(tmp_path / "words.ner").classes_[-1] == "river"
    x, y = training_examples(tiny, "image", (0, 1))
    Image.fromarray(x[0]).save(tmp_path / "1.png")
    (tmp_path / "list.csv").write_text("photo,label\n1.png,cat\n")
    rows = pandas.DataFrame({"photo": [str(tmp_path / "1.png")], "label": ["dog"]})
    for data, name in ((tmp_path / "list.csv", "cat"), (rows, "dog")):
        own = learner(tiny, "image", "simplecil", **{"benchmark.input_column": "photo"})
        assert own.partial_fit(x, y).partial_fit(data).classes_[-1] == name


@pytest.mark.parametrize("made", ["folder", "sentence-transformers", "own"])
def test_strings_are_texts_for_an_encoder_of_texts_and_paths_for_one_of_pictures(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: str
) -> None:
    def mine() -> Any:
        encoder = load_encoder(tiny.bert)
        encoder.__class__ = type("Mine", (type(encoder),), {})  # of none of the families that a learner can pack
        return encoder

    backbone = tiny.bert
    if made == "own":
        backbone = "mine"
        monkeypatch.setitem(OWN, backbone, mine)
    elif made == "sentence-transformers":
        backbone = str(tmp_path / "sentences")
        shutil.copytree(tiny.bert, backbone)
        kinds = ({"type": "st.Transformer", "path": ""}, {"type": "st.Pooling", "path": "pooling"})
        (tmp_path / "sentences" / "modules.json").write_text(json.dumps(kinds))
        (tmp_path / "sentences" / "pooling").mkdir()
        (tmp_path / "sentences" / "pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    picture = Image.fromarray(training_examples(tiny, "image", (0,))[0][0])
    files = [str(tmp_path / f"{name}.png") for name in ("w1", "w2")]
    for file in files:
        picture.save(file)
    text = learner(tiny, "text", "simplecil", backbone=backbone)
    text.partial_fit(files, ["one", "two"]).partial_fit(["w3.png", "w4.jpg"], ["three", "four"])
    assert text.modality == "text"
    assert len(text.predict(["w1.png"])) == 1
    if made == "folder":
        image = learner(tiny, "image", "simplecil")
        image.partial_fit(files, ["one", "two"]).partial_fit(files, ["three", "four"])
        assert (image.modality, len(image.predict(files))) == ("image", 2)


# -- the old data are gone


@pytest.mark.parametrize("method", [method.title for method in METHODS if "image" in method.modalities])
def test_files_may_be_deleted_after_each_call_and_the_learner_moved_to_another_process(
    tiny: Any, tmp_path: Path, method: str
) -> None:
    """Pictures on disk are deleted after each call, and another process continues with the saved learner."""
    for name in ("ant", "bee", "cat"):
        shutil.copytree(tiny.folder / "pictures" / "train" / name, tmp_path / name)
    own, keeper = learner(tiny, method=short(method)), learner(tiny, method=short(method))
    first = sorted([*(tmp_path / "ant").iterdir(), *(tmp_path / "bee").iterdir()])
    for one in (own, keeper):
        one.partial_fit(first, [file.parent.name for file in first])
    own.save(tmp_path / "saved")
    del own
    for name in ("ant", "bee"):
        shutil.rmtree(tmp_path / name)
    second = sorted((tmp_path / "cat").iterdir())
    loaded = bace.Learner.load(tmp_path / "saved")
    loaded.partial_fit(second, ["cat"] * len(second))
    keeper.partial_fit(second, ["cat"] * len(second))
    x, _ = shown_examples(tiny, "image")
    assert torch.equal(loaded.scores(x), keeper.scores(x))
    assert loaded.classes_ == ["ant", "bee", "cat"]


def test_a_new_process_predicts_the_same(tiny: Any, taught: dict[str, bace.Learner], tmp_path: Path) -> None:
    taught["text"].save(tmp_path / "saved")
    x, _ = shown_examples(tiny, "text")
    code = (
        "import sys, json, torch, bace; torch.set_num_threads(1)\n"
        "print(json.dumps(bace.Learner.load(sys.argv[1]).predict(json.loads(sys.argv[2]))))"
    )
    done = processes.run(code, str(tmp_path / "saved"), json.dumps(x))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == taught["text"].predict(x)


def test_arrays_given_are_not_held_and_later_changes_to_them_do_nothing(tiny: Any) -> None:
    own, other = learner(tiny), learner(tiny)
    x, y = training_examples(tiny, "image", (0, 1))
    other.partial_fit(x.copy(), y)
    own.partial_fit(x, y)
    gone = weakref.ref(x)
    x[:] = 0
    del x
    gc.collect()
    assert gone() is None
    second = training_examples(tiny, "image", (2, 3))
    asked, _ = shown_examples(tiny, "image")
    assert torch.equal(own.partial_fit(*second).scores(asked), other.partial_fit(*second).scores(asked))


def test_the_memory_holds_real_examples_of_every_class_and_nothing_else(tiny: Any, tmp_path: Path) -> None:
    """The saved pixels are given pixels, in equal numbers for each class, and no more than the budget."""
    own = learner(tiny, "image", "er", **{"memory.size": 6})
    given_pictures: dict[bytes, str] = {}
    for classes in ((0, 1), (2,)):
        x, y = training_examples(tiny, "image", classes)
        given_pictures |= {picture.transpose(2, 0, 1).tobytes(): label for picture, label in zip(x, y, strict=True)}
        own.partial_fit(x, y)
    own.save(tmp_path)
    from safetensors.torch import load_file

    (file,) = tmp_path.glob("*/state.safetensors")
    kept = load_file(file)["kept.pixels"]
    owners = [given_pictures[picture.numpy().tobytes()] for picture in kept]
    assert sorted(owners) == ["ant", "ant", "bee", "bee", "cat", "cat"]
    assert load_file(file)["kept_targets"].tolist() == [own.classes_.index(name) for name in owners]


def test_nothing_is_kept_without_a_memory_and_everything_for_joint_training(tiny: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    for method, count in (("seq", 0), ("mtl", 30)):
        own = learner(tiny, "image", method)
        own.partial_fit(*training_examples(tiny, "image", (0, 1))).partial_fit(*training_examples(tiny, "image", (2,)))
        own.save(tmp_path / method)
        (file,) = (tmp_path / method).glob("*/state.safetensors")
        assert len(load_file(file)["kept.pixels"]) == count


def test_saving_again_replaces_the_older_state(tiny: Any, tmp_path: Path) -> None:
    own = learner(tiny).partial_fit(*training_examples(tiny, "image", (0, 1)))
    own.save(tmp_path)
    own.partial_fit(*training_examples(tiny, "image", (2,)))
    own.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["00000002"]
    assert bace.Learner.load(tmp_path).classes_ == ["ant", "bee", "cat"]


def test_replay_from_the_kept_examples_remembers_what_fine_tuning_forgets(tiny: Any) -> None:
    """With everything in memory, the learner still knows the first task after the second."""
    x, y = training_examples(tiny, "image", (0, 1))
    right = {}
    for method in ("seq", "er"):
        own = learner(tiny, "image", method, **{"train.epochs": 20, "memory.size": 40, "train.lr": 0.02})
        own.partial_fit(x, y).partial_fit(*training_examples(tiny, "image", (2, 3)))
        right[method] = np.mean([p == t for p, t in zip(own.predict(x), y, strict=True)])
    assert right["er"] >= 0.9
    assert right["seq"] <= 0.5


# -- prediction


@pytest.mark.parametrize("modality", MODALITIES)
@given(data=st.data())
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_a_prediction_does_not_depend_on_the_others_in_the_batch(
    tiny: Any, taught: dict[str, bace.Learner], modality: str, data: Any
) -> None:
    own = taught[modality]
    x, _ = shown_examples(tiny, modality)
    chosen = data.draw(st.lists(st.integers(0, len(x) - 1), min_size=1, max_size=12))
    together = own.scores([x[i] for i in chosen])
    for position, i in enumerate(chosen):
        alone = own.scores([x[i]])[0]
        assert together[position].shape == alone.shape
        torch.testing.assert_close(together[position], alone, rtol=1e-4, atol=1e-4)


def test_batches_of_prediction_are_put_together_in_order(tiny: Any) -> None:
    x, _ = shown_examples(tiny, "text")
    scores = []
    for size in (256, 7, 1):
        own = learner(tiny, "text", **{"train.eval_batch_size": size})
        scores.append(own.partial_fit(*training_examples(tiny, "text", (0, 1))).scores(x))
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scores[0], scores[2], rtol=1e-4, atol=1e-4)


def test_a_picture_among_others_of_other_sizes_is_predicted_as_alone(
    tiny: Any, taught: dict[str, bace.Learner]
) -> None:
    x, _ = shown_examples(tiny, "image")
    small, wide = Image.fromarray(x[0]), Image.fromarray(x[7]).resize((40, 20))
    own = taught["image"]
    together, alone = own.scores([small, wide, small]), [own.scores([small])[0], own.scores([wide])[0]]
    torch.testing.assert_close(together, torch.stack([alone[0], alone[1], alone[0]]), rtol=1e-4, atol=1e-4)


def test_photographs_of_any_shape_are_learned_and_predicted(tiny: Any, tmp_path: Path) -> None:
    """The first call has unequal sizes, the second equal landscapes, the prediction a portrait; saved and loaded."""
    rng = np.random.default_rng(0)

    def photographs(shapes: list[tuple[int, int]], red: int) -> list[Image.Image]:
        return [Image.fromarray(rng.integers(0, [red, 80, 80], (*shape, 3)).astype(np.uint8)) for shape in shapes]

    own = learner(tiny)
    own.partial_fit(photographs([(150, 200), (180, 160)] * 3, 255), ["red"] * 6)
    own.partial_fit(photographs([(150, 210)] * 6, 30), ["dark"] * 6)
    own.save(tmp_path)
    asked = photographs([(300, 140), (20, 20)], 255)
    scores = bace.Learner.load(tmp_path).scores(asked)
    assert torch.equal(scores, own.scores(asked))
    torch.testing.assert_close(scores[1:], own.scores(asked[1:]), rtol=1e-4, atol=1e-4)

    landscape = learner(tiny).partial_fit(photographs([(150, 210)] * 6, 255), ["red"] * 6)
    assert landscape.predict(asked) == ["red", "red"]


def test_sentences_longer_than_the_encoder_takes_get_a_tag_for_every_word(tiny: Any) -> None:
    own = learner(tiny, "token", **{"benchmark.max_length": 16})
    own.partial_fit(*training_examples(tiny, "token", (0, 1)))
    long = [f"w{i % 60}" for i in range(100)]
    tags = own.predict([long, ["w1"]])
    assert [len(sentence) for sentence in tags] == [100, 1]


# -- entities as character spans


@pytest.fixture(scope="module")
def tagger(tiny: Any) -> bace.Learner:
    """A learner that predicts tags from single words, with room for 6 word-pieces in a window."""
    tag_of = {"w1": "B-person", "w5s": "I-person", "w11": "B-place", "w14s": "I-place", "w55": "O", "?": "O"}
    rng = np.random.default_rng(0)
    entities = (["w1", "w5s"], ["w11", "w14s"], ["w55"], ["?"])
    sentences = [[word for i in rng.integers(4, size=12) for word in entities[i]] for _ in range(40)]
    tags = [[tag_of[word] for word in sentence] for sentence in sentences]
    more = {"benchmark.max_length": 8, "train.epochs": 12, "train.optimiser": "adamw"}
    return learner(tiny, "token", "seq", **more).partial_fit(sentences, tags)


def test_entities_of_strings_are_spans_of_the_string(tagger: bace.Learner) -> None:
    text = "  w55 (w1 w5s),\tw11   w14s w55."
    found = tagger.entities([text, "", "w55"])
    assert [(span.type, span.text) for span in found[0]] == [("person", "w1 w5s"), ("place", "w11   w14s")]
    assert all(text[span.start : span.end] == span.text for span in found[0])
    assert found[1:] == [[], []]
    assert tagger.predict([text, "", "w55"]) == found  # strings in, spans out


def test_entities_of_words_are_spans_of_the_words_joined_by_spaces(tagger: bace.Learner) -> None:
    words = ["w55", "w1", "w5s", "w55"]
    (found,) = tagger.entities([words])
    assert [tuple(span) for span in found] == [(4, 10, "person", "w1 w5s")]
    assert tagger.predict([words]) == [["O", "B-person", "I-person", "O"]]  # words in, tags out


def test_an_entity_across_two_windows_is_one_span(tagger: bace.Learner) -> None:
    """The sixth word-piece is the entity's first word: its second one is in the next window."""
    (found,) = tagger.entities(["w55 w55 w55 w55 w55 w1 w5s w55"])
    assert [(span.start, span.type, span.text) for span in found] == [(20, "person", "w1 w5s")]


def test_entities_are_asked_of_a_learner_of_tags_and_of_a_list(taught: dict[str, bace.Learner]) -> None:
    with pytest.raises(ConfigError, match="taught text data"):
        taught["text"].entities(["w1"])
    with pytest.raises(DataError, match="put it in a list"):
        taught["token"].entities("w1")
    with pytest.raises(DataError, match="example 1: expected a list of words"):
        taught["token"].entities(["w1", 7])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="learned nothing yet"):
        bace.Learner("er").entities(["w1"])


@pytest.mark.parametrize("modality", MODALITIES)
def test_what_is_not_a_list_of_examples_is_refused_and_not_taken_apart(
    tiny: Any, taught: dict[str, bace.Learner], modality: str
) -> None:
    """The list() of a table would be the names of its columns, and that of a string its letters."""
    pandas = pytest.importorskip("pandas")
    own, (x, y) = taught[modality], training_examples(tiny, modality, (4,))
    table = pandas.DataFrame({"image": ["1.png"], "text": ["w1 w2"]})
    for ask in (own.predict, own.describe, own.scores, lambda x: own.score(x, y), lambda x: own.partial_fit(x, y)):
        for given_examples, message in (
            (None, "the examples are None: give a list"),
            (3, "the examples are 3: give a list"),
            (table, r"a DataFrame is a table, not a list of examples: give one of its columns, such as table\["),
            ("w1 w2", "one str is not a list of examples: put it in a list"),
            ({"text": ["w1"]}, "one dict is not a list of examples"),
        ):
            with pytest.raises(DataError, match=message):
                ask(given_examples)
    for labels in (3, np.array(3), "ab"):
        with pytest.raises(DataError, match=r"labels are .*: give a list with one label per example"):
            own.score(x, labels)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="has no columns with labels: give the labels as the second argument"):
        own.score(x)
    for no_labels in (3, np.array(3), "ab"):
        with pytest.raises(DataError, match=r"labels are .*: give a list with one label per example"):
            own.partial_fit(x, no_labels)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="the data are None: give examples and labels"):
        own.partial_fit(None)
    for empty in ([], table[:0]):
        with pytest.raises(DataError, match=r"there are no examples: the (list|DataFrame) is empty"):
            own.partial_fit(empty)


def test_sentences_as_strings_and_what_is_no_sentence_are_refused_by_name(taught: dict[str, bace.Learner]) -> None:
    with pytest.raises(DataError, match="give them as lists of words, not as strings"):
        taught["token"].score(["w1 w2"], [["O", "O"]])
    with pytest.raises(DataError, match="example 1: expected a list of words, got 'None'"):
        taught["token"].describe(["w1", None])
    assert [row["words"] for row in taught["token"].describe([["w1", "w2"], "w3."])] == [["w1", "w2"], ["w3", "."]]


def test_one_picture_is_not_taken_for_many_narrow_grey_ones(tiny: Any, taught: dict[str, bace.Learner]) -> None:
    x, _ = training_examples(tiny, "image", (4,))
    with pytest.raises(DataError, match=r"shape \(8, 8, 3\) is one picture in colour: put it in a list"):
        taught["image"].predict(x[0])
    assert len(taught["image"].predict([x[0]])) == 1
    with pytest.raises(DataError, match=r"example 0: this is not a picture: \"\{'label': 3"):
        taught["image"].predict([{"label": 3}])  # a row of a table


def test_sentences_may_come_one_by_one(tagger: bace.Learner) -> None:
    assert tagger.predict(iter([["w1", "w5s"]])) == [["B-person", "I-person"]]
    assert tagger.predict(iter(["w1 w5s"])) == [[(0, 6, "person", "w1 w5s")]]


def test_a_finished_run_loads_and_keeps_the_names_of_its_classes(tiny: Any, tmp_path: Path) -> None:
    bace.run(tiny.settings("token", method="er"), out=tmp_path / "run")
    loaded = bace.load(str(tmp_path / "run"))
    from conftest import TYPES

    assert sorted(loaded.classes_) == sorted(TYPES)
    x, _ = shown_examples(tiny, "token")
    assert [len(tags) for tags in loaded.predict(x)] == [len(words) for words in x]


def test_what_is_interrupted_after_training_leaves_the_learner_as_before(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = bace.Learner("er", backbone=tiny.vit, memory=6, **{"train.epochs": 1, "train.lr": 0.01})
    learner.partial_fit(*training_examples(tiny, "image", (0, 1)))
    x, _ = shown_examples(tiny, "image")
    before = learner.scores(x)
    with monkeypatch.context() as patch:
        patch.setattr("bace.learner.take_stock", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            learner.partial_fit(*training_examples(tiny, "image", (2, 3)))
    assert len(learner.classes_) == 2
    torch.testing.assert_close(learner.scores(x), before, rtol=0, atol=0)
    learner.partial_fit(*training_examples(tiny, "image", (2, 3)))
    assert len(learner.classes_) == 4


def test_data_of_another_kind_are_refused_with_a_way_out(tiny: Any, taught: dict[str, bace.Learner]) -> None:
    pictures, texts = training_examples(tiny, "image", (0, 1))[0], ["w1 w2", "w3"]
    files = [Image.fromarray(picture) for picture in pictures[:2]]
    for ask, wrong, message in (
        ("image", texts, "example 0: there is no picture 'w1 w2'. Pictures are expected; texts need a model of texts"),
        ("image", ["w" * 5000], "Pictures are expected; texts need a model of texts"),
        ("text", pictures, r"an array of shape \(20, 8, 8, 3\) holds pictures, and texts are expected: give a list"),
        ("text", files, "example 0: 'text' is <PIL.* Expected a string. Pictures need a model of pictures"),
        ("text", [Path("a.png")], "Expected a string. Pictures need a model of pictures"),
    ):
        with pytest.raises(DataError, match=message):
            taught[ask].predict(wrong)
    with pytest.raises(
        DataError, match="this learner knows texts, and these are images: give it texts, or teach a new"
    ):
        taught["text"].partial_fit(files, ["a", "b"])
    with pytest.raises(
        DataError, match="this learner knows images, and these are texts: give it images, or teach a new"
    ):
        taught["image"].partial_fit(texts, ["a", "b"])
    with pytest.warns(UserWarning, match="end in .png, like names of pictures, but are read as texts"):
        taught["text"].predict(["a.png", "b.png"])


def test_three_grey_pictures_are_told_from_one_in_colour(tiny: Any, taught: dict[str, bace.Learner]) -> None:
    one = np.moveaxis(training_examples(tiny, "image", (0,))[0][0], -1, 0)  # channels first
    for array in (one, torch.from_numpy(one)):
        with pytest.warns(UserWarning, match=r"shape \(3, 8, 8\) is read as three grey pictures: put it in a list if"):
            assert len(taught["image"].predict(array)) == 3
        assert len(taught["image"].predict([array])) == 1


def test_no_epochs_are_refused(tiny: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"train\.epochs is 0: the method would train nothing. Give at least 1, or leave"
    ):
        bace.Learner("er", backbone=tiny.vit, train={"epochs": 0}).fit(*training_examples(tiny, "image", (0, 1)))


def test_load_opens_saved_learners_too(tiny: Any, tmp_path: Path) -> None:
    own = learner(tiny, "text", "simplecil").partial_fit(["w1", "w2"], ["a", "b"])
    own.save(tmp_path / "model")
    again = bace.load(str(tmp_path / "model"))
    assert again.predict(["w1", "w2"]) == own.predict(["w1", "w2"])
    assert again.partial_fit(["w3"], ["c"]).classes_ == ["a", "b", "c"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"there is no folder '.*nowhere': check the path"):
        bace.load(str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match=r"'.*empty' is neither a run folder nor a folder of runs"):
        bace.load(str(tmp_path / "empty"))


def test_a_probability_that_is_none_and_labels_that_are_missing_are_refused(tiny: Any) -> None:
    learner = bace.Learner("simplecil", backbone=tiny.vit)
    x, y = training_examples(tiny, "image", (0, 1))
    learner.partial_fit(x, y)
    assert learner.history_[0]["steps"] == 0
    assert not {"train.epochs", "train.lr"} & set(learner.history_[0]["settings"])
    for reject in (1.5, -0.1, "a"):
        with pytest.raises(ConfigError, match="from 0 to 1"):
            learner.predict(x, reject=reject)
    with pytest.raises(DataError, match=f"{len(x)} examples .* but 1 labels"):
        learner.score(x, y[:1])
