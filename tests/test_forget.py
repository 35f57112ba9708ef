"""Learner.forget removes a class from the learner and from every byte of its folder. It is never predicted again."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checks import short, shown_examples, training_examples
from torch import Tensor

import bace
from bace.cli.main import main
from bace.errors import ConfigError, DataError

GONE = {"image": "okapi", "text": "okapi", "token": "thing"}  # the third class


def examples(tiny: Any, modality: str, classes: Any) -> tuple[Any, Any]:
    """The third class gets a name that is not part of a word in our own files, unlike "cat"."""
    x, y = training_examples(tiny, modality, classes)
    return x, y if modality == "token" else ["okapi" if label == "cat" else label for label in y]


def taught(tiny: Any, modality: str, method: Any, calls: Any = ((0, 1), (2, 3))) -> bace.Learner:
    settings = {k: v for k, v in tiny.settings(modality).items() if not k.startswith("benchmark")}
    learner = bace.Learner(short(method), **settings)
    for classes in calls:
        learner.partial_fit(*examples(tiny, modality, classes))
    return learner


def everything(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file())


def of_class(learner: bace.Learner, name: str) -> Iterator[bytes]:
    """The bytes of everything that a learner keeps for one class: head rows, statistics, and examples that show it."""
    assert learner.method is not None
    stream = learner.method.stream
    classes = [c for c, own in enumerate(stream.names) if own.endswith(name)]
    starts = np.cumsum([0, *(len(task.classes) for task in stream)])
    for key, value in learner.method.state_dict().items():
        if ".blocks." in key and "head" in key:
            task = int(key.rpartition(".")[2])
            own = [c - starts[task] for c in classes if c in stream[task].classes]
            yield from (value[row].numpy().tobytes() for row in own)
        elif key.startswith(("statistics.means", "statistics.scatter", "means", "shares")):
            yield from (value[c].contiguous().numpy().tobytes() for c in classes if value[c].any())
    everywhere = torch.arange(len(stream.data))
    with stream.licence("a test", everywhere):
        shown = [i for i in everywhere.tolist() if set(stream.labels(torch.tensor([i]))[1].tolist()) & set(classes)]
    for i in shown:
        taken: dict[str, Tensor] = stream.data.take(torch.tensor([i]))
        yield taken["pixels" if learner.modality == "image" else "ids"].numpy().tobytes()


@pytest.mark.parametrize("modality", ["image", "text", "token"])
@pytest.mark.parametrize("method", ["ER", "SimpleCIL", "FeCAM", {"name": "SLDA", "forgettable": True}], ids=str)
def test_no_byte_of_a_forgotten_class_is_left_in_the_folder(
    tiny: Any, tmp_path: Path, modality: str, method: Any
) -> None:
    name = GONE[modality]
    learner = taught(tiny, modality, method)
    learner.save(tmp_path)
    kept = list(of_class(learner, name))
    assert len(kept) >= (2 if modality == "token" else 1) + 2 * (method == "ER")
    before = everything(tmp_path)
    assert all(piece in before for piece in kept)
    assert name.encode() in before
    learner.forget(name)
    learner.save(tmp_path)
    after = everything(tmp_path)
    assert not [piece for piece in kept if piece in after]
    assert name.encode() not in after
    loaded = bace.Learner.load(tmp_path)
    assert name not in loaded.classes_
    inputs, _ = shown_examples(tiny, modality)
    assert loaded.predict(inputs) == learner.predict(inputs)


@pytest.mark.parametrize("modality", ["image", "text", "token"])
def test_a_forgotten_class_may_come_again_as_a_new_one(tiny: Any, modality: str, tmp_path: Path) -> None:
    name = GONE[modality]
    learner = taught(tiny, modality, "SimpleCIL").forget(name)
    x, _ = shown_examples(tiny, modality)
    words = {tag[2:] if modality == "token" else tag for shown in learner.predict(x) for tag in np.atleast_1d(shown)}
    assert name not in words
    assert len(learner.history_) == 2
    assert all(name not in call["classes"] for call in learner.history_)
    learner.partial_fit(*examples(tiny, modality, (2, 4)))
    assert learner.classes_[-2:] == sorted([name, "eel" if modality != "token" else "time"])
    assert learner.history_[-1]["known"] == []
    learner.save(tmp_path)
    assert bace.Learner.load(tmp_path).predict(x) == learner.predict(x)


def test_a_reservoir_with_forgotten_slots_takes_further_classes(tiny: Any) -> None:
    learner = taught(tiny, "image", "DER++").forget("okapi")
    assert learner.config is not None
    size, before = learner.config.memory.size, sum(learner.memory_.values())
    assert before < size  # although more examples were offered than it can hold
    learner.partial_fit(*examples(tiny, "image", (4,)))
    assert before <= sum(learner.memory_.values()) <= size


def test_other_classes_are_scored_as_before(tiny: Any) -> None:
    learner = taught(tiny, "image", "ER")
    x, _ = shown_examples(tiny, "image")
    before = learner.decision_function(x)
    after = learner.forget("okapi").decision_function(x)
    np.testing.assert_allclose(after, before[:, :3], atol=1e-6)
    assert learner.memory_ == {"ant": 2, "bee": 2, "dog": 2}


def test_slda_forgets_as_if_the_class_had_never_come(tiny: Any) -> None:
    """The exact covariance is a sum over classes, so what remains is the covariance of the other classes alone."""
    method = {"name": "SLDA", "exact": True, "forgettable": True}
    forgot, never = taught(tiny, "image", method).forget("okapi"), taught(tiny, "image", method, ((0, 1), (3,)))
    x, _ = shown_examples(tiny, "image")
    # features have single precision, and the inverse covariance of 30 examples in 16 dimensions amplifies the errors
    np.testing.assert_allclose(forgot.decision_function(x), never.decision_function(x), rtol=1e-4, atol=1e-2)


def test_shares_of_the_covariance_change_nothing(tiny: Any) -> None:
    plain, forgettable = (taught(tiny, "text", {"name": "SLDA", "forgettable": f}) for f in (False, True))
    x, _ = shown_examples(tiny, "text")
    np.testing.assert_array_equal(plain.decision_function(x), forgettable.decision_function(x))


def test_sentences_that_show_the_type_beside_another_are_gone(tiny: Any) -> None:
    learner = taught(tiny, "token", "MTL", ((0, 1, 2, 3),))
    assert learner.method is not None
    learner.forget("thing")
    stream = learner.method.stream
    assert not set(stream.targets.tolist()) & set(stream.forgotten)


@pytest.mark.parametrize("method", ["ACIL", "RanPAC", "SLDA", "EWC"])
def test_what_mixes_classes_refuses_by_name(tiny: Any, method: str) -> None:
    learner = taught(tiny, "image", method, ((0, 1),))
    with pytest.raises(ConfigError, match=f"{method} cannot forget a class: its .* Teach a new learner without 'ant'"):
        learner.forget("ant")
    assert learner.classes_ == ["ant", "bee"]


def test_unknown_and_only_classes_are_refused(tiny: Any) -> None:
    learner = taught(tiny, "image", "SimpleCIL", ((0,),))
    with pytest.raises(DataError, match=r"no class 'amt' to forget\. Did you mean 'ant'"):
        learner.forget("amt")
    with pytest.raises(ConfigError, match="only class"):
        learner.forget("ant")


def test_numbers_are_forgotten_as_they_were_given(tiny: Any, tmp_path: Path) -> None:
    x, _ = training_examples(tiny, "image", (0, 1, 2))
    learner = bace.Learner("simplecil", backbone=tiny.vit).fit(x, [71] * 10 + [82] * 10 + [93] * 10)
    learner.forget(82).save(tmp_path)
    assert learner.classes_ == [71, 93]
    assert b'"82"' not in everything(tmp_path)


def test_a_class_may_be_called_like_an_entry_of_the_history(tiny: Any) -> None:
    x, _ = training_examples(tiny, "image", (0, 1))
    learner = bace.Learner("simplecil", backbone=tiny.vit).fit(x, ["new"] * 10 + ["settings"] * 10).forget("new")
    assert learner.history_[0]["classes"] == ["settings"]
    assert learner.history_[0]["new"] == 1.0


def test_the_command_replaces_the_model(tiny: Any, tmp_path: Path, capsys: Any) -> None:
    taught(tiny, "image", "ER").save(tmp_path / "model")
    assert main(["forget", str(tmp_path / "model"), "okapi"]) == 0
    assert "knows 3 classes: ant, bee, dog" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "model").iterdir()} == {"00000002", "README.md", "config.json"}
    assert b"okapi" not in everything(tmp_path / "model")
    assert main(["forget", str(tmp_path / "model"), "okapi"]) != 0


def test_an_exported_model_has_no_column_for_it(tiny: Any, tmp_path: Path) -> None:
    from bace.serving.export import export

    learner = taught(tiny, "image", "SimpleCIL").forget("okapi")
    export(learner, tmp_path / "model.pt2", "torch")
    files = {"bace.json": ""}
    torch.export.load(tmp_path / "model.pt2", extra_files=files)
    assert json.loads(files["bace.json"])["classes"] == ["ant", "bee", "dog"]


@pytest.mark.parametrize("method", ["simplecil", "er"])
def test_probabilities_after_a_forgotten_class_are_as_sharp_as_before(tiny: Any, method: str) -> None:
    learner = taught(tiny, "text", method)
    learner.forget("okapi")
    learner.partial_fit(*examples(tiny, "text", (4,)))
    x, _ = training_examples(tiny, "text", (0, 1))
    shares = learner.predict_proba(x)
    assert shares.shape[1] == 4
    assert shares.max(1).mean() > 0.4  # more than a quarter for each of the four
    assert learner.describe(x)[0]["probability"] == pytest.approx(shares[0].max(), abs=1e-4)
    assert learner.history_[-1]["temperature"] < 100


def test_a_class_that_cannot_be_forgotten_now_changes_nothing(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = taught(tiny, "image", "er", ((0, 1),))
    x, _ = shown_examples(tiny, "image")
    before = learner.scores(x)
    monkeypatch.setattr(bace.Learner, "_restore", lambda *_: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(MemoryError):
        learner.forget("ant")
    assert learner.classes_ == ["ant", "bee"]
    torch.testing.assert_close(learner.scores(x), before, rtol=0, atol=0)
