"""Checkpoints are written completely or not at all, checked when read, and never pickled."""

import json
import os
import random
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import bace
from bace.core import checkpoint
from bace.errors import CheckpointError

FILES = ("state.safetensors", "state.json", "sha256.json")


def tensors(number: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(number)
    return {
        "weight": torch.randn(7, 5, generator=rng),
        "ids": torch.randint(1 << 40, (4,), generator=rng),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(0.1 + number),
        "mask": torch.tensor([True, False]),
    }


def state(number: int) -> dict[str, Any]:
    return {"at": {"task": number, "phase": "train", "best": 0.1}, "names": ["ä", "b"], "none": None}


def assert_is(found: Any, number: int) -> None:
    assert found is not None
    assert found[1] == state(number)
    expected = tensors(number)
    assert found[0].keys() == expected.keys()
    for name, value in expected.items():
        assert found[0][name].dtype == value.dtype
        assert torch.equal(found[0][name], value), name


def test_what_was_saved_is_loaded(tmp_path):
    assert checkpoint.load(tmp_path / "none") is None
    saved = checkpoint.save(tmp_path / "c", tensors(1), state(1), keep=2)
    assert saved == tmp_path / "c" / "00000001"
    assert sorted(path.name for path in saved.iterdir()) == sorted(FILES)
    assert_is(checkpoint.load(tmp_path / "c"), 1)


@given(st.lists(st.floats(allow_nan=False), max_size=5), st.integers())
@settings(max_examples=25, deadline=None)
def test_floats_come_back_bit_for_bit(tmp_path_factory, values, number):
    folder = tmp_path_factory.mktemp("floats")
    checkpoint.save(folder, {"x": torch.tensor(values, dtype=torch.float64)}, {"v": values, "n": number}, keep=1)
    found = checkpoint.load(folder)
    assert found is not None
    assert found[1] == {"v": values, "n": number}
    assert found[0]["x"].tolist() == values


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept(tmp_path, keep):
    for number in range(1, 6):
        checkpoint.save(tmp_path, tensors(number), state(number), keep=keep)
        assert_is(checkpoint.load(tmp_path), number)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{n:08d}" for n in range(6 - keep, 6)]


def test_tensors_that_share_storage_are_saved_each_for_itself(tmp_path):
    base = torch.arange(12.0).view(3, 4)
    shared = {
        "base": base,
        "tied": base,
        "row": base[1],
        "transposed": base.t(),
        "strided": base[:, ::2],
        "parameter": torch.nn.Parameter(base[:2]),
        "expanded": torch.tensor([5.0]).expand(4),
    }
    checkpoint.save(tmp_path, shared, {}, keep=1)
    found = checkpoint.load(tmp_path)
    assert found is not None
    assert found[0].keys() == shared.keys()
    for name, value in shared.items():
        assert torch.equal(found[0][name], value.detach()), name
    assert base.tolist() == torch.arange(12.0).view(3, 4).tolist()


def test_tied_parameters_are_saved(tmp_path):
    layer = torch.nn.Linear(3, 3)
    tied = torch.nn.ModuleDict({"a": layer, "b": layer})
    checkpoint.save(tmp_path, tied.state_dict(), {}, keep=1)
    found = checkpoint.load(tmp_path)
    assert found is not None
    assert torch.equal(found[0]["b.weight"], layer.weight)


# -- interrupted


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("victim", ["core.checkpoint.save_file", "core.checkpoint._sha256", "files.to_disk"])
@pytest.mark.parametrize("error", [Interrupted, OSError, KeyboardInterrupt])
def test_an_interrupted_save_leaves_the_previous_checkpoint_and_no_half_one(tmp_path, monkeypatch, victim, error):
    checkpoint.save(tmp_path, tensors(1), state(1), keep=1)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise error("stop")

    with monkeypatch.context() as patch:
        patch.setattr(f"bace.{victim}", fail)
        with pytest.raises(CheckpointError if error is OSError else error):
            checkpoint.save(tmp_path, tensors(2), state(2), keep=1)
    assert_is(checkpoint.load(tmp_path), 1)
    checkpoint.save(tmp_path, tensors(3), state(3), keep=1)
    assert_is(checkpoint.load(tmp_path), 3)
    assert [path.name for path in tmp_path.iterdir()] == ["00000002"]  # leftovers have been removed


def test_state_that_json_cannot_hold_leaves_the_previous_checkpoint(tmp_path):
    checkpoint.save(tmp_path, tensors(1), state(1), keep=1)
    with pytest.raises(TypeError):
        checkpoint.save(tmp_path, tensors(2), {"bad": object()}, keep=1)
    assert_is(checkpoint.load(tmp_path), 1)


def test_a_half_written_checkpoint_is_not_seen(tmp_path):
    """A killed process leaves the folder beside, which is not renamed yet."""
    checkpoint.save(tmp_path, tensors(1), state(1), keep=2)
    shutil.copytree(tmp_path / "00000001", tmp_path / ".00000002.unfinished")
    assert_is(checkpoint.load(tmp_path), 1)
    saved = checkpoint.save(tmp_path, tensors(2), state(2), keep=2)
    assert saved.name == "00000002"
    assert_is(checkpoint.load(tmp_path), 2)


# -- damaged


@pytest.fixture
def two(tmp_path: Path) -> Path:
    for number in (1, 2):
        checkpoint.save(tmp_path, tensors(number), state(number), keep=2)
    return tmp_path


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("how", ["truncated", "flipped"])
def test_damage_anywhere_is_noticed_and_the_one_before_is_used(two, file, how):
    path = two / "00000002" / file
    whole = path.read_bytes()
    rng = random.Random(f"{file} {how}")
    for position in {0, len(whole) - 1, *(rng.randrange(len(whole)) for _ in range(60))}:
        broken = bytearray(whole)
        if how == "truncated":
            del broken[position:]
        else:
            broken[position] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(broken))
        with pytest.warns(UserWarning, match=r"00000002' is damaged .*; using the previous one"):
            found = checkpoint.load(two)
        assert_is(found, 1)
    path.write_bytes(whole)
    assert_is(checkpoint.load(two), 2)


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file_is_damage(two, file):
    (two / "00000002" / file).unlink()
    with pytest.warns(UserWarning, match="00000002"):
        assert_is(checkpoint.load(two), 1)


@pytest.mark.parametrize("content", ["[]", '"x"', "null", "{}", "3"])
def test_checksums_of_another_shape_are_damage(two, content):
    (two / "00000002" / "sha256.json").write_text(content)
    with pytest.warns(UserWarning, match="00000002"):
        assert_is(checkpoint.load(two), 1)


def test_when_all_are_damaged_it_is_an_error(two):
    for name in ("00000001", "00000002"):
        (two / name / "state.json").write_text("{}")
    with (
        pytest.warns(UserWarning, match="is damaged") as warned,
        pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged"),
    ):
        checkpoint.load(two)
    assert ["00000002" in str(warned[0].message), "00000001" in str(warned[1].message)] == [True, True]


def test_saving_after_damage_goes_on_beyond_it(two):
    (two / "00000002" / "state.json").write_text("{}")
    checkpoint.save(two, tensors(3), state(3), keep=2)
    assert_is(checkpoint.load(two), 3)


# -- a full disk, for real: the kernel refuses to write beyond a limit

FULL_DISK = """
    import resource, signal, sys
    from pathlib import Path
    import torch
    from bace.core import checkpoint
    from bace.errors import CheckpointError

    folder, numbers = Path(sys.argv[1]), int(sys.argv[2])
    state = {"long": "x" * int(sys.argv[3])}
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        checkpoint.save(folder, {"big": torch.ones(numbers)}, state, keep=1)
    except CheckpointError as error:
        print(error)
        sys.exit(7)
"""


@pytest.mark.parametrize(("numbers", "text"), [(100_000, 10), (10, 500_000)], ids=["tensors", "json"])
def test_a_full_disk_is_an_error_that_says_so_and_loses_nothing(tmp_path, numbers, text):
    checkpoint.save(tmp_path, tensors(1), state(1), keep=1)
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FULL_DISK), str(tmp_path), str(numbers), str(text)],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    assert child.returncode == 7, child.stderr
    assert f"could not save a checkpoint in '{tmp_path}'" in child.stdout
    assert "the last good checkpoint is 00000001" in child.stdout
    assert "--resume" in child.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["00000001"]
    assert_is(checkpoint.load(tmp_path), 1)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(bace.__file__).parents[1])}


# -- in a run


def test_a_run_whose_newest_checkpoint_is_damaged_goes_on_from_the_one_before(tiny, tmp_path):
    config = tiny.settings("image", method="ER", **{"checkpoint.every": 4, "checkpoint.keep": 3})
    expected = bace.run(config, out=tmp_path / "straight")
    shutil.copytree(tmp_path / "straight", tmp_path / "cut")
    (tmp_path / "cut" / "metrics.json").unlink()
    newest = max((tmp_path / "cut" / "checkpoints").iterdir())
    weights = newest / "state.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.warns(UserWarning, match=newest.name):
        result = bace.run(resume=tmp_path / "cut")
    assert result.matrix == expected.matrix
    for name in ("matrix.csv", "log.jsonl"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()


def test_a_checkpoint_is_readable_without_this_library(tmp_path):
    """A checkpoint holds safetensors and JSON, and nothing that could run code."""
    from safetensors import safe_open

    path = checkpoint.save(tmp_path, tensors(1), state(1), keep=1)
    with safe_open(path / "state.safetensors", "pt") as file:
        assert set(file.keys()) == set(tensors(1))
    assert json.loads((path / "state.json").read_text()) == state(1)
