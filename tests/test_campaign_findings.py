"""What the campaigns (tests/campaign) found, each as a small test."""

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from test_safety import edited, with_sums

import bace
from bace.cli.main import main
from bace.core import checkpoint
from bace.data.table import read
from bace.errors import BaceError, CheckpointError, ConfigError, DataError
from bace.models.loading import load_encoder


@pytest.fixture(scope="module")
def finished(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("findings") / "run"
    settings = tiny.settings("image", method="ER", **{"train.epochs": 1, "checkpoint.every": 2, "train.momentum": 0.9})
    bace.run(settings, out=folder)
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def cut(run: Path) -> Path:
    """The same run before its last checkpoint."""
    (run / "metrics.json").unlink()
    shutil.rmtree(max((run / "checkpoints").iterdir()))
    return run


@pytest.fixture(scope="module")
def taught(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    learner = bace.Learner("SEQ", backbone=tiny.vit, **{"train.epochs": 1})
    learner.partial_fit(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), [1, 1, 2, 2])
    folder = tmp_path_factory.mktemp("findings") / "learner"
    learner.save(folder)
    return folder


# -- kills and disks


def test_a_kill_while_tensors_are_written_does_not_stop_the_next_checkpoint(tmp_path: Path) -> None:
    """safetensors first writes to a temporary file, which a kill leaves behind."""
    unfinished = tmp_path / ".00000001.unfinished"
    unfinished.mkdir()
    (unfinished / ".tmp4I5Mxh").write_bytes(b"half a file")
    checkpoint.save(tmp_path, {"a": torch.zeros(1)}, {}, keep=1)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == sorted(checkpoint.FILES)


def test_an_old_checkpoint_that_cannot_be_deleted_does_not_end_the_run(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"a": torch.zeros(1)}, {}, keep=1)
    (tmp_path / "00000001" / "state.json").unlink()
    (tmp_path / "00000001" / "state.json").mkdir()  # a folder, which cannot be deleted as a file
    with pytest.warns(UserWarning, match=r"00000001' could not be deleted"):
        checkpoint.save(tmp_path, {"a": torch.ones(1)}, {}, keep=1)
    found = checkpoint.load(tmp_path)
    assert found is not None
    assert found[0]["a"].item() == 1


def test_an_unexpected_error_on_a_full_disk_is_a_sentence_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    monkeypatch.setattr("bace.cli.list.KINDS", {"methods": None})  # None cannot be called
    assert main(["list", "methods"]) == 1
    assert "its traceback could not be written (No such file or directory)" in capsys.readouterr().err


# -- damaged files


@pytest.mark.parametrize("name", ["log.jsonl", "matrix.csv", "metrics.json", "run.json", "sha256.json"])
def test_a_report_says_which_file_of_a_run_was_changed(
    run: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page = str(run.parent / "page.html")
    assert main(["report", str(run), "--out", page]) == 0
    assert "warning" not in capsys.readouterr().err
    with (run / name).open("a") as file:
        file.write("\n" if name != "sha256.json" else "x")
    assert main(["report", str(run), "--out", page]) == 0
    assert f"was changed after its run: {name}" in capsys.readouterr().err


def test_a_resumed_run_says_that_its_log_was_changed(cut: Path) -> None:
    log = cut / "log.jsonl"
    log.write_text(log.read_text().replace("1", "2", 1))
    with pytest.warns(UserWarning, match=r"log\.jsonl' was changed after the run wrote it"):
        bace.run(resume=cut)


# -- forged files with matching checksums


def forged_state(path: str, value: Any) -> Callable[[Path], None]:
    """state.json with another value at a dotted path; `...` removes the entry."""

    def change(state: dict[str, Any]) -> None:
        *inside, last = path.split(".")
        for key in inside:
            state = state[key]
        if value is ...:
            del state[last]
        else:
            state[last] = value

    return lambda folder: edited(folder / "state.json", change)


def forged_tensor(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def forge(folder: Path) -> None:
        tensors = load_file(folder / "state.safetensors")
        name = next(name for name in tensors if part in name)
        tensors[name] = change(tensors[name])
        save_file(tensors, folder / "state.safetensors")

    return forge


@pytest.mark.parametrize(
    "forge",
    [
        *(forged_state(key, ...) for key in ("train", "complete", "modality", "numbers", "method")),
        forged_state("modality", "smell"),
        forged_state("numbers", ["one"]),
        forged_state("tasks", [[["a"], ["b"]]]),
        forged_state("given", 3),
        *(forged_state("picture", value) for value in (5, [None, None], [10**9, 10**9], [8])),
        lambda folder: (folder / "state.json").write_text("{"),
        lambda folder: (folder / "state.json").write_text("[]"),
    ],
)
@pytest.mark.filterwarnings("ignore:checkpoint '.*' is damaged")
def test_a_forged_learner_is_refused_in_a_sentence(taught: Path, tmp_path: Path, forge: Any) -> None:
    folder = Path(shutil.copytree(taught, tmp_path / "learner"))
    forge(folder / "00000001")
    with_sums(folder / "00000001")
    with pytest.raises(BaceError):
        bace.Learner.load(folder)


@pytest.mark.parametrize(
    "forge",
    [
        forged_state("results.details", 3),
        forged_state("results.matrix", [["a"]]),
        forged_state("results.chance", [["a"]]),
        forged_state("results.studies", {"probing": "x"}),
        forged_state("at.epoch", "1"),
        forged_state("at.task", None),
        forged_state("log", "x"),
        forged_state("method", "x"),
        forged_tensor("momentum_buffer", lambda tensor: tensor.to(torch.int8)),
        forged_tensor("momentum_buffer", lambda tensor: torch.zeros(3)),
    ],
)
def test_a_forged_checkpoint_is_refused_in_a_sentence(cut: Path, forge: Any) -> None:
    newest = max((cut / "checkpoints").iterdir())
    forge(newest)
    with_sums(newest)
    with pytest.raises(CheckpointError, match=r"this version of bace|does not fit"):
        bace.run(resume=cut)


def test_a_checkpoint_that_was_never_whole_is_passed_over(cut: Path) -> None:
    checkpoints = cut / "checkpoints"
    newest = max(checkpoints.iterdir())
    shutil.copytree(newest, checkpoints / "00000099")
    (checkpoints / "00000099" / "state.json").write_text('{"at": ')
    with_sums(checkpoints / "00000099")
    with pytest.warns(UserWarning, match="00000099' is damaged"):
        found = checkpoint.load(checkpoints)
    assert found is not None
    assert found[1] == json.loads((newest / "state.json").read_text())


# -- inputs


def test_no_setting_is_too_large_for_torch(tiny: Any) -> None:
    with pytest.raises(ConfigError, match=r"train\.eval_batch_size is 1e\+30"):
        bace.run(tiny.settings("image", **{"train.eval_batch_size": 10**30}))


def test_a_picture_of_endless_rows_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "train" / name).mkdir(parents=True)
        Image.new("L", (1, 70_000)).save(tmp_path / "train" / name / "1.png")
    with pytest.raises(DataError, match="1 x 70000 pixels; at most"):
        read(tmp_path)


def test_errors_of_other_libraries_become_one_line(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow.parquet").write_table(
        __import__("pyarrow").table({"text": ["a"], "label": ["b"]}), tmp_path / "train.parquet"
    )
    content = bytearray((tmp_path / "train.parquet").read_bytes())
    content[-60:-40] = b"\xff" * 20
    (tmp_path / "train.parquet").write_bytes(content)
    with pytest.raises(DataError, match="not a readable Parquet") as refused:
        read(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["norm.bias", "pos_embed", "blocks.0.attn.qkv.weight", "patch_embed.proj.weight"])
def test_weights_of_another_shape_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    from campaign.specimens import timm_tensors

    save_file(timm_tensors() | {name: torch.zeros(1)}, tmp_path / "vit.safetensors")
    with pytest.raises(DataError, match=r"no(t a)? plain ViT") as refused:
        load_encoder(str(tmp_path / "vit.safetensors"))
    assert "\n" not in str(refused.value)
