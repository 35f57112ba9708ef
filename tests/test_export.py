"""A model that was exported to one file gives the learner's scores without bace."""

import json
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checks import short, shown_examples, training_examples
from conftest import save_bert, save_vit

import bace
from bace.cli.main import main
from bace.data.modalities import MODALITIES
from bace.data.modality import Table
from bace.data.settings import data_settings
from bace.data.table import as_inputs
from bace.errors import ConfigError
from bace.methods import METHODS
from bace.serving.export import export, sample

INPUTS = {"input_ids": "ids", "attention_mask": "attention_mask"}  # names in the file, and in encodings of tokenizers
CASES = [(method.title, sorted(method.modalities)[0]) for method in METHODS if method.not_exportable is None]


@pytest.fixture(scope="module")
def one_block(tiny: Any) -> dict[str, str]:
    """A backbone with one block for each modality, because tracing two takes long."""
    vit, bert = tiny.folder / "vit of one block", tiny.folder / "bert of one block"
    save_vit(vit, blocks=1)
    save_bert(bert, blocks=1)
    return {"image": str(vit), "text": str(bert), "token": str(bert)}


def taught(tiny: Any, method: str, modality: str, **changes: str) -> bace.Learner:
    settings = {k: v for k, v in tiny.settings(modality).items() if not k.startswith("benchmark")}
    learner = bace.Learner(short(method), **{**settings, "train.epochs": 1, **changes})
    for classes in ((0, 1), (2, 3)):
        learner.partial_fit(*training_examples(tiny, modality, classes))
    return learner


def encoder_inputs(learner: bace.Learner, x: Any) -> dict[str, torch.Tensor]:
    """The encoder's inputs for these examples, which all have one length."""
    assert learner.method is not None
    assert learner.config is not None
    modality = MODALITIES[str(learner.modality)]
    _, inputs = as_inputs(x, modality=modality.name, image_size=learner.picture)
    table = Table(modality, inputs, [""] * len(inputs), [])
    data, _ = modality.encode([table], data_settings(learner.config), learner.method.model.encoder)
    return data.inputs(torch.arange(len(data)), None, torch.device("cpu"))


@pytest.mark.parametrize(("method", "modality"), CASES)
def test_the_exported_program_gives_the_learner_s_scores(
    tiny: Any, one_block: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, modality: str
) -> None:
    learner = taught(tiny, method, modality, backbone=one_block[modality])
    loaded = []  # `export` reads the file once, because reading it takes longer than teaching the learner

    def load(path: Path) -> Any:
        loaded.append(torch_load(path))
        return loaded[-1]

    torch_load = torch.export.load
    monkeypatch.setattr("torch.export.load", load)
    export(learner, tmp_path / "model.pt2", "torch")  # it compares them on its own inputs
    x = shown_examples(tiny, modality)[0]
    inputs = encoder_inputs(learner, x)
    program = loaded[0].module()
    with zipfile.ZipFile(tmp_path / "model.pt2") as packed:
        held = {Path(name).name for name in packed.namelist()}
    assert "bace.json" in held
    assert ("tokenizer.json" in held) == (modality != "image")
    names = ("pixel_values", "input_ids", "attention_mask")
    found = program(**{name: inputs[name] for name in names if name in inputs})
    if modality != "token":
        expected = learner.scores(x)
        assert isinstance(expected, torch.Tensor)
        assert torch.equal(found.argmax(1), expected.argmax(1))
        torch.testing.assert_close(found, expected.to(found), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("method", "modality"), [("ER", "image"), ("ER", "text"), ("ER", "token"), ("SLDA", "image"), ("iCaRL", "text")]
)
def test_onnxruntime_gives_the_learner_s_scores(tiny: Any, tmp_path: Path, method: str, modality: str) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    learner = taught(tiny, method, modality)
    assert learner.method is not None
    export(learner, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    noted = json.loads(session.get_modelmeta().custom_metadata_map["bace"])
    assert noted["classes"] == learner.method.stream.names
    for examples in (1, 6):
        inputs = sample(learner.method.model.encoder, examples, 4)
        [found] = session.run(None, {name: value.numpy() for name, value in inputs.items()})
        assert found.shape[0] == examples
        assert found.shape[-1] == len(noted["classes"])
        assert np.isfinite(found).all()
    if modality != "image":
        assert_needs_nothing_else(session, learner, shown_examples(tiny, modality)[0])


def assert_needs_nothing_else(session: Any, learner: bace.Learner, x: list[Any]) -> None:
    """The file, onnxruntime and tokenizers are enough to score raw texts and sentences."""
    tokenizers = pytest.importorskip("tokenizers")
    about = session.get_modelmeta().custom_metadata_map
    tokenizer = tokenizers.Tokenizer.from_str(about["tokenizer.json"])
    sentences = learner.modality == "token"
    if not sentences:
        x = [*x, "w1 w2 " * 200]  # longer than the model can read
    encoded = tokenizer.encode_batch(x, is_pretokenized=sentences)
    assert len({len(text.ids) for text in encoded}) == 1
    given = {name: np.array([getattr(text, of) for text in encoded]) for name, of in INPUTS.items()}
    [found] = session.run(None, given)
    for i, (expected, text) in enumerate(zip(learner.scores(x), encoded, strict=True)):
        first = {word: place for place, word in reversed([*enumerate(text.word_ids)]) if word is not None}
        own = found[i][[first[word] for word in range(len(x[i]))]] if sentences else found[i]
        np.testing.assert_allclose(own, expected.numpy(), rtol=1e-4, atol=1e-4)


def test_the_command_writes_the_model_of_a_run(tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bace.run(tiny.settings("image", method="ER", **{"train.epochs": 1}), out=tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "model.pt2"), "--format", "torch"]) == 0
    assert capsys.readouterr().out == f"written: {tmp_path / 'model.pt2'}\n"
    files = {"bace.json": ""}
    torch.export.load(tmp_path / "model.pt2", extra_files=files)
    assert json.loads(files["bace.json"])["classes"] == list(tiny.classes)


def test_an_export_does_not_pass_on_the_chatter_of_other_packages(tiny: Any, tmp_path: Path, caplog: Any) -> None:
    pytest.importorskip("onnxruntime")
    learner = taught(tiny, "SLDA", "text")
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", FutureWarning)
        export(learner, tmp_path / "model.onnx")
    assert [str(warning.message) for warning in heard if warning.category is FutureWarning] == []
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []


def test_a_method_that_adapts_to_each_example_is_refused(tiny: Any, tmp_path: Path) -> None:
    learner = taught(tiny, "MBPA", "text")
    with pytest.raises(ConfigError, match="MBPA cannot be exported: it trains the head"):
        export(learner, tmp_path / "model.onnx")
    with pytest.raises(ConfigError, match="learned nothing yet"):
        export(bace.Learner("er"), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_is_refused_before_the_model_is_traced(tiny: Any, tmp_path: Path) -> None:
    learner = taught(tiny, "SimpleCIL", "image")
    for place, why in ((tmp_path, "is a folder"), (tmp_path / "none" / "x.onnx", "in a folder that does not exist")):
        with pytest.raises(ConfigError, match=rf"{why}: name a file in a folder that exists"):
            export(learner, place)
