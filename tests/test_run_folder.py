"""The schema of a run folder: what is written is read back, each file is read once, and invalid content is named."""

import dataclasses
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from run_folders import MATRIX, studies, write_run

import bace
from bace.cli.main import main
from bace.core import checkpoint
from bace.errors import CheckpointError, DataError
from bace.experiments import run_folder
from bace.experiments.run_folder import Confusion, Description, Metrics, Task, load_run
from bace.files import in_place, typed, write_whole

DESCRIBED = Description(
    method="ER",
    benchmark="digits",
    seed=3,
    modality="image",
    picture=(8, 9),
    config={"train": {"lr": 0.1}, "studies": ["bias"]},
    versions={"torch": "2"},
    threads=2,
    tasks=(Task("one", ("a", "b")), Task("two", ("c",)), Task("three", ("d",))),
)


def full_metrics() -> Metrics:
    names = ("A_last", "A_avg", "A_new", "FGT", "FGT_all", "seconds", "passes", "peak_memory_mb")
    counts = tuple(tuple(int(i == j) for j in range(4)) for i in range(4))
    return Metrics(
        A=(90.0, 75.0, 60.0),
        **dict.fromkeys(names, 1.5),
        kept=(1, 2, 3),
        licences=("evaluation",),
        score="accuracy",
        evaluated=(5, 5, 5),
        scorers={"raw": {"A_last": 1.0}},
        confusion=Confusion(("a", "b", "c", "d"), counts),
        sample_accuracy=12.5,
        per_class={"a": 1.0, "b": None},
        entities=({"macro_f1": 1.0}, {"macro_f1": None}, {}),
    )


@pytest.fixture
def written(tmp_path: Path) -> Path:
    run_folder.write_description(tmp_path, DESCRIBED)
    epoch = {"event": "epoch", "task": 3, "stage": "main", "epoch": 1, "loss": 0.5, "terms": {"a": 0.5}}
    run_folder.Log(tmp_path)(epoch)
    run_folder.write_results(tmp_path, MATRIX, full_metrics(), studies())
    return tmp_path


def test_what_is_written_is_read_back(written: Path) -> None:
    run = load_run(written)
    assert {f.name: getattr(run, f.name) for f in dataclasses.fields(DESCRIBED)} == vars(DESCRIBED)
    assert run.matrix == tuple(map(tuple, MATRIX))
    assert run.metrics == full_metrics()
    assert run.studies == studies()
    assert run.epochs == (run_folder.Epoch(task=3, stage="main", epoch=1, loss=0.5, terms={"a": 0.5}),)
    assert run.changed == ()
    assert run_folder.read_description(written) == DESCRIBED


def test_the_numbers_of_a_list_stand_in_one_line_and_texts_stay_as_they_are(tmp_path: Path) -> None:
    """A confusion matrix of 1,000 classes has a million numbers."""
    classes = ("[1, 2]", "[\n 3 ]", "[ -4.5e-3,\n]")
    metrics = dataclasses.replace(full_metrics(), confusion=Confusion(classes, ((1, 0, 2), (0, 3, 0), (0, 0, 4))))
    run_folder.write_description(tmp_path, DESCRIBED)
    run_folder.Log(tmp_path)({"event": "start"})
    run_folder.write_results(tmp_path, MATRIX, metrics, {})
    lines = [line.strip(" ,") for line in (tmp_path / "metrics.json").read_text().splitlines()]
    assert {"[1, 0, 2]", "[0, 3, 0]", "[0, 0, 4]", '"A": [90.0, 75.0, 60.0]'} <= set(lines)
    assert load_run(tmp_path).metrics == metrics
    assert load_run(tmp_path).changed == ()


def test_what_a_run_does_not_have_is_left_out_or_null(tmp_path: Path) -> None:
    found = Metrics(A=[1.0], A_last=1.0, A_avg=1.0, seconds=0.0).as_json()
    assert found["FWT"] is None
    assert not {"confusion", "scorers", "evaluated", "entities", "per_class"} & found.keys()


def test_each_file_is_read_once(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: (opened.append(path.name), read(path))[1])
    load_run(written)
    assert sorted(opened) == sorted(path.name for path in written.iterdir())


def test_changed_files_are_named(written: Path) -> None:
    with (written / "log.jsonl").open("a") as log:
        log.write("\n")
    (written / "studies.json").unlink()
    assert load_run(written).changed == ("studies.json", "log.jsonl")


# -- versions


def test_a_folder_of_a_newer_format_is_refused_by_all_who_read_it(
    tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bace.run(tiny.settings("image", method="SEQ", **{"train.epochs": 1}), out=tmp_path / "run")
    path = tmp_path / "run" / "run.json"
    assert json.loads(path.read_text())["format"] == run_folder.FORMAT
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": run_folder.FORMAT + 1}))
    for words in (["report"], ["run", "--resume"], ["predict"]):
        more = [str(path)] if words == ["predict"] else []
        assert main([*words, str(tmp_path / "run"), *more]) == 2
        assert "update bace" in capsys.readouterr().err


def test_a_run_that_goes_on_with_other_instructions_says_so(tiny: Any, tmp_path: Path) -> None:
    folder, heard = tmp_path / "run", list[str]()
    bace.run(tiny.settings("image", method="SEQ", **{"train.epochs": 1}), out=folder)
    shutil.copytree(folder, tmp_path / "same")
    about = json.loads((folder / "run.json").read_text())
    for run, instructions in ((folder, "VSX"), (tmp_path / "same", about["instructions"])):
        (run / "metrics.json").unlink()
        shutil.rmtree(max((run / "checkpoints").iterdir()))
        (run / "run.json").write_text(json.dumps(about | {"instructions": instructions}))
        bace.run(resume=run, force=True, tell=heard.append)
    said = [line for line in heard if "instructions" in line]
    assert len(said) == 1
    assert f"VSX instructions, and this machine computes with {about['instructions']}:" in said[0]


def test_a_run_without_a_format_number_goes_on_and_is_opened_again(tiny: Any, tmp_path: Path) -> None:
    """Version 0.1 began the run: its run.json does not change, and new checkpoints have the number."""
    folder = tmp_path / "run"
    bace.run(tiny.settings("image", method="SEQ", **{"train.epochs": 1}), out=folder)
    (folder / "metrics.json").unlink()
    shutil.rmtree(max((folder / "checkpoints").iterdir()))
    about = json.loads((folder / "run.json").read_text())
    del about["format"], about["threads"], about["instructions"]
    (folder / "run.json").write_text(json.dumps(about))
    with pytest.raises(CheckpointError, match=r"threads, instructions"):  # recorded before, but now missing
        bace.run(resume=folder)
    bace.run(resume=folder, force=True)
    assert "format" not in json.loads((folder / "run.json").read_text())
    assert bace.load(str(folder)).classes_ == list(tiny.classes)


def test_a_learner_of_a_newer_format_is_refused(tiny: Any, tmp_path: Path) -> None:
    learner = bace.Learner("SEQ", backbone=tiny.vit, **{"train.epochs": 1})
    learner.partial_fit(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), ["a", "a", "b", "b"])
    learner.save(tmp_path)
    tensors, state = checkpoint.load(tmp_path) or ({}, {})
    checkpoint.save(tmp_path, tensors, state | {"format": state["format"] + 1}, keep=1)
    with pytest.raises(CheckpointError, match="update bace"):
        bace.Learner.load(tmp_path)


# -- JSON that matches annotations


@dataclass
class Inner:
    name: str
    size: tuple[int, int] | None = None


@dataclass
class Outer:
    number: float
    count: int
    flag: bool
    inner: Inner
    many: Sequence[Inner] = ()
    table: dict[str, float | None] = field(default_factory=dict)
    free: Any = None


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
finite = st.floats(allow_nan=False, allow_infinity=False)
inner = st.builds(Inner, names, st.none() | st.tuples(st.integers(), st.integers()))
outer = st.builds(
    Outer, finite, st.integers(), st.booleans(), inner, st.lists(inner, max_size=3).map(tuple),
    st.dictionaries(names, st.none() | finite, max_size=3), st.none() | names | st.lists(st.integers(), max_size=2),
)  # fmt: skip


@given(outer)
def test_a_dataclass_comes_back_from_its_json(value: Outer) -> None:
    assert typed(json.loads(json.dumps(dataclasses.asdict(value))), Outer, "it") == value


VALUE = {"number": 1, "count": 2, "flag": True, "inner": {"name": "a", "size": [1, 2]}}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"number": "1"}, "'number' must be a number, got '1'"),
        ({"number": True}, "'number' must be a number"),
        ({"number": float("inf")}, "'number' must be a number, got inf"),
        ({"number": 10**400}, "'number' must be a number"),
        ({"number": None}, "'number' must be a number, got None"),
        ({"count": 2.0}, "'count' must be a whole number"),
        ({"count": True}, "'count' must be a whole number"),
        ({"flag": 1}, "'flag' must be true or false"),
        ({"inner": []}, "'inner' must be an object"),
        ({"inner": {}}, "'name' is missing"),
        ({"inner": {"name": 3}}, "'name' must be a text, got 3"),
        ({"inner": {"name": "a", "size": [1]}}, r"'size' must be a list, got \[1\]"),
        ({"inner": {"name": "a", "size": [1, "2"]}}, "'size' must be a whole number"),
        ({"many": {}}, "'many' must be a list"),
        ({"many": [3]}, "'many' must be an object, got 3"),
        ({"table": {"x": "y"}}, "'x' must be a number"),
    ],
)
def test_what_is_not_as_the_annotation_says_is_named(change: dict[str, Any], says: str) -> None:
    assert typed(VALUE, Outer, "it").inner == Inner("a", (1, 2))
    with pytest.raises(ValueError, match=says):
        typed(VALUE | change, Outer, "it")


def test_none_stands_for_numbers_that_are_not_finite_where_it_may() -> None:
    assert typed(VALUE | {"table": {"x": float("nan")}}, Outer, "it").table == {"x": None}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tasks": []}, "'tasks' is empty"),
        ({"picture": [0, 8]}, "not a height and a width"),
        ({"picture": [10**9, 10**9]}, "not a height and a width"),
        ({"threads": 100_000}, "'threads' is 100000"),
        ({"threads": None}, "'threads' must be a whole number"),
        ({"seed": "0"}, "'seed' must be a whole number"),
        ({"versions": {"torch": 2}}, "'torch' must be a text"),
    ],
)
def test_a_description_that_cannot_be_is_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    path = write_run(tmp_path / "run") / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataError, match=says) as refused:
        load_run(path.parent)
    assert str(path) in str(refused.value)


# -- the atomic writer


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, error: type[BaseException]) -> None:
    write_whole(tmp_path / "file", "old")

    def fail() -> None:
        with in_place(tmp_path / "file") as beside:
            beside.write_text("half")
            raise error

    with pytest.raises(error):
        fail()
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]


def test_a_link_in_the_place_of_an_unfinished_checkpoint_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "state.json").write_text("mine")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ".00000001.unfinished").symlink_to(tmp_path / "precious")
    checkpoint.save(tmp_path / "checkpoints", {"a": torch.zeros(1)}, {}, keep=1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["00000001"]
    assert [path.name for path in (tmp_path / "precious").iterdir()] == ["state.json"]
    assert (tmp_path / "precious" / "state.json").read_text() == "mine"
