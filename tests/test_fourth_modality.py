"""A modality that bace does not know (vectors.py) works with run, compare, Learner and predict like the others."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checks import short
from torch import Tensor
from vectors import NUMBERS, VECTOR, VectorEncoder

import bace
from bace.cli.main import main
from bace.data.benchmarks import BENCHMARKS, Benchmark, own_data
from bace.data.modalities import MODALITIES
from bace.data.table import from_arrays, read
from bace.errors import ConfigError, DataError
from bace.methods import METHODS
from bace.models.backbones import OWN

CLASSES = ("ant", "bee", "cat", "dog", "eel")
SETTINGS = {"benchmark": "my-vectors", "benchmark.tasks": [2, 1, 2], "train.epochs": 5}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new modality needs only its name, its encoder's name, and the defaults of a user's own data."""
    defaults = {"backbone.name": "tiny-vectors", "memory.size": 10, "train.lr": 0.05, "train.batch_size": 8}
    monkeypatch.setitem(MODALITIES, "vector", VECTOR)
    monkeypatch.setitem(OWN, "tiny-vectors", VectorEncoder)
    monkeypatch.setitem(BENCHMARKS, "my-vectors", Benchmark("my-vectors", "vector", "", own_data("vector"), defaults))


def examples(classes: tuple[int, ...], count: int = 10, seed: int = 0) -> tuple[Tensor, list[str]]:
    """Vectors around the centres of their classes, and the names of the classes."""
    centres = 2 * torch.randn(len(CLASSES), NUMBERS, generator=torch.Generator().manual_seed(1))
    noise = 0.3 * torch.randn(len(classes) * count, NUMBERS, generator=torch.Generator().manual_seed(seed))
    index = torch.tensor(classes).repeat(count)
    return centres[index] + noise, [CLASSES[c] for c in index]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("vectors")
    for split, seed in (("train", 2), ("test", 3)):
        x, y = examples((0, 1, 2, 3, 4), seed=seed)
        rows = [{"vector": vector, "label": label} for vector, label in zip(x.tolist(), y, strict=True)]
        (place / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


PREFIXES = ("CODA-Prompt", "DualPrompt")  # they need attention in the blocks, which this encoder lacks


@pytest.mark.parametrize(
    "method", [m.title for m in METHODS if {"image", "text"} <= m.modalities and m.title not in PREFIXES]
)
def test_every_method_of_pictures_and_texts_runs(folder: Path, tmp_path: Path, method: str) -> None:
    settings = {**SETTINGS, "benchmark.path": str(folder), "method": short(method), "measure.fwt": True}
    result = bace.run(settings, out=tmp_path / "run")
    assert [len(row) for row in result.matrix] == [1, 2, 3]
    assert set(result.metrics["per_class"]) == set(CLASSES)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["modality"] == "vector"
    if method in ("ER", "BaCE", "SLDA"):
        assert result.metrics["A_last"] > 60  # chance is 20


def test_a_method_that_lists_its_modalities_refuses_others(folder: Path) -> None:
    with pytest.raises(ConfigError, match="IDBR is not defined for vector data: it works on text"):
        bace.run({**SETTINGS, "benchmark.path": str(folder), "method": "idbr"})


@pytest.mark.parametrize("method", PREFIXES)
def test_a_method_that_needs_attention_refuses_an_encoder_without_it_by_name(folder: Path, method: str) -> None:
    with pytest.raises(ConfigError, match="VectorEncoder takes no keys and values before those of its blocks"):
        bace.run({**SETTINGS, "benchmark.path": str(folder), "method": method})


def test_an_encoder_of_something_else_is_refused(folder: Path, tiny: Any) -> None:
    with pytest.raises(ConfigError, match="takes images, but the data are vectors: choose another with --backbone"):
        bace.run({**SETTINGS, "benchmark.path": str(folder), "method": "er", "backbone": tiny.vit})


def test_compare_and_predict(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*("--benchmark", "my-vectors", "--benchmark.path", str(folder), "--benchmark.tasks", "[2, 1, 2]")]
    methods = ["--method", "ER", "BaCE", "SLDA"]
    assert main(["compare", *flags, *methods, "--studies", "gallery", "--out", str(tmp_path / "all")]) == 0
    assert all(name in (tmp_path / "all" / "report.html").read_text() for name in ("ER", "BaCE", "SLDA"))
    x, y = examples((0, 1, 2, 3, 4), count=1, seed=4)
    (tmp_path / "asked.txt").write_text("".join(f"{vector}\n" for vector in x.tolist()))
    capsys.readouterr()
    assert main(["predict", str(tmp_path / "all" / "SLDA-seed0"), str(tmp_path / "asked.txt"), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["where"] for row in rows] == [f"{tmp_path / 'asked.txt'}:{n}" for n in range(1, 6)]
    assert [row["class"] for row in rows] == y


@pytest.mark.parametrize("method", ["er", "bace", "slda"])
def test_a_learner_learns_predicts_and_goes_on_after_it_was_saved(tmp_path: Path, method: str) -> None:
    learner = bace.Learner(method, backbone="tiny-vectors", train={"epochs": 10}, memory=10)
    learner.partial_fit(*examples((0, 1))).save(tmp_path / "saved")
    again = bace.Learner.load(tmp_path / "saved")
    x, y = examples((0, 1, 2), seed=5)
    for taught in (learner, again):
        taught.partial_fit(*examples((2,)))
    assert torch.equal(learner.scores(x), again.scores(x))
    assert again.classes_ == ["ant", "bee", "cat"]
    assert sum(np.array(again.predict(x)) == np.array(y)) > 0.8 * len(y)
    with pytest.raises(DataError, match="this learner knows vectors, and these are texts"):
        again.partial_fit(["a text"], ["dog"])


def test_the_other_modalities_are_recognised_as_before(folder: Path, tiny: Any) -> None:
    assert read(folder).modality.name == "vector"
    for name, place in (("image", "pictures"), ("text", "texts"), ("token", "sentences")):
        assert read(tiny.folder / place).modality.name == name
    with pytest.raises(DataError, match="pictures of shape"):
        from_arrays(np.zeros((3, 4)), [0, 1, 2])  # this test's vectors are tensors
