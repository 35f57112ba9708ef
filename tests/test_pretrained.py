"""A saved learner is a model that others can use: its folder needs nothing else, and the hub understands it."""

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from checks import shown_examples, training_examples
from conftest import Tiny
from huggingface_hub import HfApi, ModelCard

import bace
from bace.errors import BaceError

QUICK = {"train.epochs": 2, "train.batch_size": 8, "train.lr": 0.01, "memory": 10}
BACKBONES = {"image": "vit", "text": "bert", "token": "bert"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """A folder for each modality and its learner's predictions; the original encoders are gone."""
    made = Tiny(tmp_path_factory.mktemp("origin"))
    found = {}
    for modality, backbone in BACKBONES.items():
        learner = bace.Learner("er", backbone=str(made.folder / backbone), **QUICK)
        learner.partial_fit(*training_examples(made, modality, (0, 1)))
        folder = tmp_path_factory.mktemp("model") / modality
        learner.save_pretrained(folder)
        inputs, _ = shown_examples(made, modality)
        found[modality] = folder, learner.predict(inputs)
    shutil.rmtree(made.folder)
    return found


@pytest.mark.parametrize("modality", BACKBONES)
def test_it_loads_without_the_encoders_files_and_learns_on(models: Any, tiny: Any, modality: str) -> None:
    folder, predicted = models[modality]
    learner = bace.Learner.from_pretrained(str(folder))
    inputs, _ = shown_examples(tiny, modality)
    assert learner.predict(inputs) == predicted
    learner.partial_fit(*training_examples(tiny, modality, (2,)))
    assert len(learner.classes_) == 3


def test_the_card_is_what_the_hub_reads(models: Any) -> None:
    folder, _ = models["image"]
    _, front, body = (folder / "README.md").read_text().split("---\n", 2)
    data = yaml.safe_load(front)
    assert data["pipeline_tag"] == "image-classification"
    assert (data["library_name"], data["metrics"]) == ("bace", ["accuracy"])
    assert "base_model" not in data  # the hub does not know our folder
    assert "| 1 | ant, bee | 20 |" in body
    labels = json.loads((folder / "config.json").read_text())
    assert labels["id2label"] == {"0": "ant", "1": "bee"}


@pytest.mark.parametrize("modality", BACKBONES)
def test_the_hub_reads_the_measured_scores_and_what_they_were_measured_on(
    models: Any, tiny: Any, tmp_path: Path, modality: str
) -> None:
    learner = bace.Learner.load(models[modality][0])
    learner.partial_fit(*training_examples(tiny, modality, (2,)))
    learner.save(tmp_path / "m")
    found = ModelCard.load(tmp_path / "m" / "README.md").data.eval_results
    assert found is not None
    first, second = learner.history_
    measured = [(1, "training examples", first["new"]), (2, "training examples", second["new"])]
    measured.insert(2, (2, "old examples in memory", second["old"]))
    assert [result.metric_value for result in found] == [value for _, _, value in measured]
    for result, (call, what, _) in zip(found, measured, strict=True):
        assert result.metric_name.startswith(what)
        assert f"call {call}" in result.metric_name
        assert result.dataset_name == f"the user's own data of call {call}: no test set"
        assert (result.task_type, result.dataset_split) == (f"{modality}-classification", "train")
        assert result.metric_type == ("f1" if modality == "token" else "accuracy")


def test_names_of_the_hub_are_the_base_model() -> None:
    from bace.learner.card import hub_id

    assert hub_id("google/vit-base-patch16-224") == "google/vit-base-patch16-224"
    assert hub_id("vit-tiny") == "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    assert hub_id("minilm") == "sentence-transformers/all-MiniLM-L6-v2"
    assert hub_id("owner/model") == "owner/model"
    assert hub_id("digits-vit") is hub_id("/some/folder") is None


def test_a_card_of_the_users_own_stays(models: Any, tmp_path: Path) -> None:
    folder, _ = models["image"]
    learner = bace.Learner.load(folder)
    learner.save(tmp_path)
    (tmp_path / "README.md").write_text("mine")
    learner.save(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_the_encoder_is_known_exactly(models: Any) -> None:
    folder, _ = models["text"]
    encoder = json.loads((folder / "00000001" / "state.json").read_text())["encoder"]
    assert len(encoder["sha256"]) == 64
    assert encoder["name"].endswith("bert")
    assert encoder["config"]["model_type"] == "bert"
    assert "tokenizer.json" in encoder["tokenizer"]


def test_push_uploads_the_folder(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's own code runs up to the network, where the test records the files and their destination."""
    folder, _ = models["image"]
    sent: dict[str, Any] = {}

    def upload(self: HfApi, *, repo_id: str, folder_path: Any, **_: Any) -> Any:
        sent.update({path.relative_to(folder_path).as_posix(): repo_id for path in Path(folder_path).rglob("*.*")})

    monkeypatch.setattr(HfApi, "create_repo", lambda self, repo_id, **_: type("Repo", (), {"repo_id": repo_id}))
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    bace.Learner.load(folder).push_to_hub("someone/birds")
    files = ("state.safetensors", "state.json", "sha256.json")
    assert set(sent) == {"README.md", "config.json", *(f"00000001/{name}" for name in files)}
    assert set(sent.values()) == {"someone/birds"}


def test_parameters_survive(models: Any) -> None:
    folder, _ = models["image"]
    learner = bace.Learner.load(folder)
    assert learner.get_params()["method"] == "er"
    assert repr(learner).startswith("<Learner('er', backbone.name=")
    x = np.zeros((2, 8, 8, 3), dtype=np.uint8)
    assert learner.decision_function(x).shape == (2, 2)


# -- a stranger's folder


def forged(folder: Path, to: Path, change: Any) -> Path:
    """A copy of a model whose state.json was changed, with correct checksums."""
    from bace.core import checkpoint

    shutil.copytree(folder, to)
    tensors, state = checkpoint.load(to) or pytest.fail("no model")
    change(state)
    shutil.rmtree(to)
    checkpoint.save(to, tensors, state, keep=1)
    return to


def test_a_config_beside_the_model_cannot_ask_for_trust(
    models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ModelHubMixin would pass its entries on as arguments."""

    def change(state: dict[str, Any]) -> None:
        state["given"]["method"] = "evilmethod.Evil"

    folder = forged(models["image"][0], tmp_path / "model", change)
    (folder / "config.json").write_text('{"trust": true, "model_id": "other"}')
    (folder / "evilmethod.py").write_text("raise SystemExit('code was run')")
    monkeypatch.chdir(folder)
    with pytest.raises(BaceError, match="evilmethod"):
        bace.Learner.from_pretrained(str(folder))


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state["encoder"]["config"].update(num_labels=10**9),  # this field is dropped, and the model opens
        lambda state: state["encoder"].update(image_size=10**7),
        lambda state: state["encoder"]["config"].update(hidden_size=10**6),
        lambda state: state["given"].update(method={"name": "RanPAC", "M": 60_000}),
    ],
)
def test_forged_sizes_take_no_memory(models: Any, tmp_path: Path, change: Any) -> None:
    folder = forged(models["image"][0], tmp_path / "model", change)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is measured from here on, not from earlier tests
    before = peak_kilobytes()
    with contextlib.suppress(BaceError):
        assert bace.Learner.load(folder).classes_ == ["ant", "bee"]
    assert peak_kilobytes() - before < 200_000


def peak_kilobytes() -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1])


def test_a_folder_that_is_not_there_is_not_looked_for_on_the_hub() -> None:
    with pytest.raises(BaceError, match="there is no folder 'nowhere'"):
        bace.Learner.from_pretrained("nowhere")
