"""Unusable files from strangers are refused in one sentence, early, within limits of memory and time, and without
starting another program. test_page_safety.py tests the report page, and test_safety.py tests code and folders."""

import gzip
import json
import os
import resource
import shutil
import signal
import struct
import threading
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import torch
from PIL import EpsImagePlugin, Image
from run_folders import write_run
from test_safety import edited, with_sums

import bace
from bace.cli.main import main
from bace.core import checkpoint
from bace.data import decode
from bace.data.published import find_arrays
from bace.data.table import from_arrays, read
from bace.errors import BaceError, CheckpointError, DataError
from bace.files import inside, parse_json
from bace.models.loading import load_encoder
from bace.models.weights import read_weights

NESTED = "[" * 100_000 + "]" * 100_000
DEEP = "[" * 500 + "]" * 500  # Python's reader accepts it, but recursive functions may not
LONG = "1" * 5000  # Python refuses to convert so many digits to a number
HALF = '"\\ud800"'  # half of a surrogate pair


@contextmanager
def within(seconds: float) -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def one_sentence(capsys: pytest.CaptureFixture[str]) -> str:
    """The message of the command line, which must be an error for the user and not a fault of bace."""
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "unexpected error" not in said
    return next(line for line in said.splitlines() if line.startswith("bace: error:"))


# -- 7: pictures and arrays


def class_folder(folder: Path, picture: str, content: bytes) -> Path:
    (folder / "train" / "cat").mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(folder / "train" / "cat" / "a.png")
    (folder / "train" / "cat" / picture).write_bytes(content)
    return folder


def test_a_picture_starts_no_other_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    ghostscript = tmp_path / "bin" / "gs"
    ghostscript.write_text(f"#!/bin/sh\ntouch '{tmp_path}/it ran'\n")
    ghostscript.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # forget the program that was found before
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\nshowpage\n%%EOF\n"
    with pytest.raises(DataError, match=r"b\.png: the picture cannot be decoded"):
        read(class_folder(tmp_path / "data", "b.png", eps), split="train")
    assert not (tmp_path / "it ran").exists()


@pytest.mark.parametrize("suffix", ["png", "jpg", "bmp", "gif", "webp", "tif", "ppm"])
def test_the_formats_that_we_say_we_read_are_read(tmp_path: Path, suffix: str) -> None:
    folder = class_folder(tmp_path, "b.png", b"")
    (folder / "train" / "cat" / "b.png").unlink()
    Image.new("RGB", (4, 4), "white").save(folder / "train" / "cat" / f"b.{suffix}")
    assert read(folder, split="train").inputs[1].min() == 255  # type: ignore[union-attr]


def bomb(width: int, height: int) -> bytes:
    """A black PNG with one bit per pixel; its bytes are a thousandth of its pixels."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">2I5B", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes((1 + -(-width // 8)) * height), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_a_picture_of_too_many_pixels_is_refused_by_its_header(tmp_path: Path) -> None:
    content = bomb(8001, 8000)
    assert len(content) < 20_000
    with pytest.raises(DataError, match=r"8001 x 8000 pixels; at most 64,000,000 are read"):
        read(class_folder(tmp_path, "b.png", content), split="train")
    with pytest.raises(DataError, match="8001 x 8000 pixels"):
        decode.decode_pictures([decode.Pictures(lambda rows: iter([content]), [0], lambda row: "here")], 8)


def test_a_file_of_too_many_bytes_is_not_read(tmp_path: Path) -> None:
    folder = class_folder(tmp_path, "b.png", b"")
    os.truncate(folder / "train" / "cat" / "b.png", 257 * 1024**2)  # a sparse file, which takes no space
    tracemalloc.start()
    with pytest.raises(DataError, match=r"bytes; at most 268,435,456 are read"):
        read(folder, split="train")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10e6


def test_large_pictures_are_decoded_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, most, lock, plain = [0], [0], threading.Lock(), decode._plain

    def watched(image: Image.Image, channels: int) -> Image.Image:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.001)
        with lock:
            now[0] -= 1
        return plain(image, channels)

    monkeypatch.setattr(decode, "_plain", watched)
    monkeypatch.setattr(decode, "LARGE", 10, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    content = [bomb(4, 4)] * 128
    decoded = decode.decode_pictures([decode.Pictures(lambda rows: iter(content), range(128), str)], None)
    assert decoded.shape == (128, 3, 4, 4)
    assert most == [1]


def write_idx(folder: Path, announced: int, count: int) -> None:
    folder.mkdir()
    labels = bytes([0, 0, 8, 1]) + struct.pack(">I", announced) + bytes(count)
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    images = bytes([0, 0, 8, 3]) + struct.pack(">3I", 2, 4, 4) + bytes(32)
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))


def test_a_packed_idx_file_is_unpacked_no_further_than_it_announces(tmp_path: Path) -> None:
    write_idx(tmp_path / "good", 2, 2)
    assert find_arrays(tmp_path / "good", "train") is not None
    write_idx(tmp_path / "bomb", 2, 40_000_000)
    tracemalloc.start()
    with pytest.raises(DataError, match="announces 2 bytes and has more"):
        find_arrays(tmp_path / "bomb", "train")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4e6
    write_idx(tmp_path / "large", 2**31, 2)
    with pytest.raises(DataError, match=r"announces 2,147,483,648 bytes; at most 1,073,741,824 are read"):
        find_arrays(tmp_path / "large", "train")


# -- 8: inputs without an end


def test_a_state_dict_that_holds_itself_ends(tmp_path: Path) -> None:
    state: dict[str, Any] = {"weight": torch.zeros(1)}
    state["model"] = {"state_dict": state}
    torch.save(state, tmp_path / "vit.pth")
    with within(20), pytest.raises(BaceError, match=r"vit\.pth"):
        read_weights(tmp_path / "vit.pth")


def test_a_pipe_named_like_a_picture_is_refused(tmp_path: Path) -> None:
    folder = class_folder(tmp_path, "b.png", b"")
    os.mkfifo(folder / "train" / "cat" / "pipe.jpg")
    (folder / "train" / "cat" / "b.png").unlink()
    program = f"from bace.data.table import read; read({str(folder)!r}, split='train')"
    child = processes.run(program)  # a separate process, because waiting for a pipe cannot be interrupted
    assert "DataError" in child.stderr
    assert "pipe.jpg: the picture cannot be decoded (it is not an ordinary file)" in child.stderr


def test_no_number_of_threads_ends_the_process(
    tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda number: pytest.fail(f"{number} threads"))
    words = ["run", "--method", "SEQ", "--train.threads", "100000"]
    assert main(words) == 2
    assert "train.threads" in one_sentence(capsys)
    write_run(tmp_path / "run", finished=False)
    for threads in (100_000, -1, "many", None):
        edited(tmp_path / "run" / "run.json", lambda about, threads=threads: about.update(threads=threads))  # type: ignore[misc]
        assert main(["run", "--resume", str(tmp_path / "run")]) == 2
        assert "'threads'" in one_sentence(capsys)


# -- 9: data files


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (f'{{"text": {HALF}, "label": "a"}}', "half a character"),
        (f'{{"text": "b", "label": {HALF}}}', "half a character"),
        (f'{{"tokens": [{HALF}], "tags": ["O"]}}', "half a character"),
        (f'{{"text": "b", "label": {NESTED}}}', "this is not readable as JSON"),
        (f'{{"text": "b", "label": {LONG}}}', "this is not readable as JSON"),
        ('{"text": "b", "label": NaN}', "label is missing"),
        ('{"text": "b", "label": 1e999}', "Labels are whole numbers or strings"),
        ('{"text": "b", "label": [[]]}', "Labels are whole numbers or strings"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path: Path, line: str, says: str) -> None:
    first = '{"tokens": ["b"], "tags": ["O"]}' if "tokens" in line else '{"text": "b", "label": "a"}'
    (tmp_path / "train.jsonl").write_text(f"{first}\n{line}\n")
    with pytest.raises(DataError, match=says) as error:
        read(tmp_path, split="train")
    assert "train.jsonl, line 2" in str(error.value)
    str(error.value).encode()  # the message can be printed


@pytest.mark.parametrize("y", [None, 3, "ab", b"ab", object()])
def test_labels_that_are_no_list_are_refused(y: Any) -> None:
    with pytest.raises(DataError, match="one label per example"):
        from_arrays(["a text", "another"], y)


def test_labels_that_python_takes_for_one_are_not(tmp_path: Path) -> None:
    for labels in ([1, True], [True, 1], [1, 1.0], [1.0, 1], [1.0, True]):
        with pytest.raises(DataError, match="Labels are whole numbers or strings"):
            from_arrays(["a text", "another"], labels)
    assert from_arrays(["a text", "another"], [1, "1"]).names == ["1"]
    assert from_arrays(["a text", "another"], np.array([1, 1], np.int8)).names == ["1"]


def test_a_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,label,label\nhello,a,b\n")
    with pytest.raises(DataError, match="has the column 'label' twice"):
        read(tmp_path, split="train")


@pytest.mark.parametrize(
    "metadata",
    [
        *("{", "[]", '"x"', '{"info": 3}', '{"info": {"features": []}}', '{"info": {"features": {"label": 3}}}'),
        *('{"info": {"features": {"label": {"_type": "ClassLabel", "names": 7}}}}', NESTED),
        '{"info": {"features": {"label": {"_type": "ClassLabel", "names": [["a"]]}}}}',
    ],
)
def test_parquet_with_broken_metadata_is_refused(tmp_path: Path, metadata: str) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"text": ["hello"], "label": [0]}).replace_schema_metadata({"huggingface": metadata})
    parquet.write_table(table, tmp_path / "train.parquet")
    with pytest.raises(DataError, match=r"train\.parquet"):
        read(tmp_path, split="train")


# -- 9: run folders and learners


@pytest.fixture(scope="module")
def finished(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    bace.run(tiny.settings("image", method="SEQ", **{"train.epochs": 1}), out=folder)
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("text", [NESTED, DEEP, LONG, HALF, "[]", "3", "", '{"config": {}}', f'{{"config": {DEEP}}}'])
@pytest.mark.parametrize("name", ["run.json", "metrics.json", "log.jsonl", "studies.json"])
def test_json_that_cannot_be_used_is_named(run: Path, name: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (run / name).write_text(text)
    status = main(["report", str(run), "--out", str(run / "page.html")])
    unknown = {"log.jsonl": ("[]", "3", "", '{"config": {}}'), "studies.json": ('{"config": {}}',)}  # these are ignored
    if text in unknown.get(name, ()):
        assert status == 0
    else:
        assert status == 2
        assert name in one_sentence(capsys)
    if name == "run.json":
        for words in (["predict", str(run), str(run / name)], ["run", "--resume", str(run)]):
            assert main(words) == 2
            assert "run" in one_sentence(capsys)


def without(key: str) -> Callable[[dict[str, Any]], object]:
    return lambda content: content.pop(key)


def put(*path: Any) -> Callable[[dict[str, Any]], object]:
    *way, last, value = path

    def change(content: dict[str, Any]) -> None:
        for key in way:
            content = content[key]
        content[last] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        *map(without, ("config", "tasks", "modality")),
        *(put("tasks", []), put("tasks", [3]), put("tasks", [{}]), put("tasks", 0, "classes", 3)),
        *(put("picture", "x"), put("picture", [1, 2, 3]), put("modality", "smell"), put("config", {"method": [1]})),
        *(put("config", "method", None), put("config", "train", 3), put("config", DEEP)),
    ],
)
def test_fields_that_are_missing_or_wrong_in_run_json_get_one_sentence(run: Path, change: Any) -> None:
    edited(run / "run.json", change)
    with pytest.raises(BaceError):
        bace.load(str(run), force=True)


FORGED = [
    *map(without, ("at", "results", "method", "licences")),
    *(put("at", 3), put("at", {}), put("at", "task", "x"), put("at", "task", -1), put("at", "task", 10**30)),
    *(put("at", "unknown", 1), put("results", []), put("results", {"unknown": 1}), put("method", [])),
    *(put("method", {"unknown": 1}), put("licences", 3), put("run", 3), put("log", "x")),
]


@pytest.mark.parametrize("change", FORGED)
def test_a_forged_checkpoint_with_right_sums_gets_one_sentence(
    run: Path, change: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in (run / "checkpoints").iterdir():
        edited(folder / "state.json", change)
        with_sums(folder)
    about_data = change in FORGED[-1:]  # this change matters only when the run continues
    if not about_data:
        assert main(["predict", str(run), str(run / "run.json")]) == 2
        one_sentence(capsys)
    (run / "metrics.json").unlink()
    assert main(["run", "--resume", str(run)]) in (0, 2)
    assert "unexpected error" not in capsys.readouterr().err


@pytest.mark.parametrize("text", [NESTED, DEEP, LONG, HALF, "[]", "null", "3"])
@pytest.mark.parametrize("name", ["state.json", "sha256.json"])
def test_a_checkpoint_of_wrong_json_is_passed_over(tmp_path: Path, name: str, text: str) -> None:
    for value in (1, 2):
        checkpoint.save(tmp_path, {"a": torch.full((1,), value)}, {"value": value}, keep=2)
    newest = tmp_path / "00000002"
    (newest / name).write_text(text)
    if name == "state.json":
        with_sums(newest)
    with pytest.warns(UserWarning, match="is damaged"):
        found = checkpoint.load(tmp_path)
    assert found is not None
    assert found[1] == {"value": 1}


def test_tensors_that_are_none_are_passed_over_in_spite_of_right_sums(tmp_path: Path) -> None:
    for value in (1, 2):
        checkpoint.save(tmp_path, {"a": torch.full((1,), value)}, {"value": value}, keep=2)
    (tmp_path / "00000002" / "state.safetensors").write_bytes(b"\xff" * 64)
    with_sums(tmp_path / "00000002")
    with pytest.warns(UserWarning, match="is damaged"):
        found = checkpoint.load(tmp_path)
    assert found is not None
    assert found[1] == {"value": 1}


def test_stray_entries_among_checkpoints_are_passed_over(run: Path, tiny: Any) -> None:
    strays = run / "checkpoints"
    (strays / "notes.txt").touch()
    (strays / "99999999").touch()
    for name in ("99999998", "123", "²", ".00000009.unfinished", "latest"):
        (strays / name).mkdir()
    (strays / "99999997").symlink_to("/nowhere")
    assert bace.load(str(run)).classes_ == list(tiny.classes)


def saved(tiny: Any, folder: Path) -> Path:
    learner = bace.Learner("ER", backbone=tiny.vit, memory=4, **{"train.epochs": 1})
    learner.partial_fit(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), ["a", "a", "b", "b"])
    learner.save(folder)
    return folder


def test_a_file_is_no_learner(tiny: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("file", "nothing"):
        with pytest.raises(CheckpointError, match="holds no saved learner"):
            bace.Learner.load(tmp_path / name)
    for name in ("file", "nothing"):
        with pytest.raises(BaceError):
            bace.load(str(tmp_path / name))


def test_a_forged_learner_with_right_sums_gets_one_sentence(tiny: Any, tmp_path: Path) -> None:
    folder = saved(tiny, tmp_path / "saved")
    state = folder / "00000001" / "state.json"
    before = state.read_text()
    newer = ("format", "chosen", "history", "temperature", "auto", "encoder", "guessed")  # older folders lack these
    changes = [without(key) for key in json.loads(before) if key not in newer]
    changes += [put("format", 99), put("chosen", {"seed": 1}), put("history", 3), put("temperature", "hot")]
    changes += [put("given", 3), put("given", {"unknown": 1}), put("tasks", 3)]
    changes += [put("tasks", [["a"]]), put("tasks", []), put("modality", "smell"), put("picture", 3)]
    changes += [put("train", [["x"]]), put("train", [[10**9]])]
    changes += [put("numbers", 3), put("guessed", 3), put("method", {"unknown": 1}), put("given", "method", "x")]
    changes += [put("tasks", [["a", 3]]), put("tasks", ["ab"]), put("tasks", [["a", "b", "c"]])]
    changes += [put("picture", [8, -8]), put("picture", "x"), put("auto", {"name": "LwF"})]
    changes += [put("encoder", 3), put("encoder", "config", {}), put("encoder", "config", "model_type", "smell")]
    changes += [put("encoder", "config", "hidden_size", 2**20), put("encoder", "config", "num_hidden_layers", 10**9)]
    changes += [put("encoder", "image_size", 7), put("encoder", "pooling", "x"), put("encoder", "mean", [0])]
    changes += [put("encoder", "tokenizer", {"../x": "{}"})]
    for change in changes:
        state.write_text(before)
        edited(state, change)
        with_sums(folder / "00000001")
        with pytest.raises(BaceError):
            bace.Learner.load(folder).predict(torch.zeros(1, 3, 8, 8, dtype=torch.uint8))
    state.write_text(before)
    with_sums(folder / "00000001")
    assert bace.Learner.load(folder).classes_ == ["a", "b"]


# -- 9: disks that cannot be written


def test_a_full_disk_under_the_page_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "page.html").write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # no file may grow beyond this, as on a full disk
    try:
        assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "page.html")]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "cannot be written" in one_sentence(capsys)
    assert (tmp_path / "page.html").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "run"]


@pytest.mark.parametrize("out", ["/proc/page.html", "/dev/null/page.html", "/sys/a/page.html"])
def test_a_place_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run")
    assert main(["report", str(tmp_path / "run"), "--out", out]) == 2
    assert "cannot be written" in one_sentence(capsys)


# -- 9: control characters


def test_control_characters_are_shown_escaped(tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clear = "\x1b[2J\x07\u202e"  # clears the screen, rings the bell, and reverses the text
    write_run(tmp_path / "runs" / f"done{clear}", f"ER{clear}", benchmark=f"digits{clear}")
    write_run(tmp_path / "runs" / f"half{clear}", finished=False)
    assert main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "page.html")]) == 0
    shown = capsys.readouterr()
    assert not set(clear[:1] + clear[-2:]) & set(shown.out + shown.err)
    assert shown.out.count("\\x1b[2J\\x07\\u202e") == 3
    assert main(["report", f"nothing{clear}"]) == 2
    assert "\x1b" not in (said := one_sentence(capsys))
    assert "nothing\\x1b" in said
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.csv").write_text(f"text,label\nhello,\nbye,cat{clear}\n")
    words = ["--benchmark", "my-texts", "--benchmark.path", str(tmp_path / "data"), "--out", str(tmp_path / "out")]
    assert main(["run", "--method", "SEQ", *words]) == 2
    assert "\x1b" not in one_sentence(capsys)


def test_a_class_of_control_characters_is_predicted_escaped(
    tiny: Any, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def rename(about: dict[str, Any]) -> None:
        for task in about["tasks"]:
            task["classes"] = ["\x1b[2J" + name for name in task["classes"]]

    edited(run / "run.json", rename)
    picture = run / "picture\x1b[2J.png"
    Image.new("RGB", (8, 8)).save(picture)
    assert main(["predict", str(run), str(picture), "--force"]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert shown.count("\\x1b[2J") == 2


# -- paths stay in their folder, nothing from a hub runs


@pytest.mark.parametrize("name", ["../secret.png", "/etc/secret.png", "a/../../secret.png", "{outside}"])
@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet", "annotations"])
def test_a_path_in_a_data_file_leads_to_nowhere_else(tmp_path: Path, name: str, kind: str) -> None:
    name = name.replace("{outside}", str(tmp_path / "secret.png"))
    Image.new("RGB", (4, 4)).save(tmp_path / "secret.png")
    folder = tmp_path / "data"
    folder.mkdir()
    if kind == "csv":
        (folder / "train.csv").write_text(f"image,label\n{name},cat\n")
    elif kind == "jsonl":
        (folder / "train.jsonl").write_text(json.dumps({"image": name, "label": "cat"}))
    elif kind == "parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        table = pyarrow.table({"image": [{"bytes": None, "path": name}], "label": [0]})
        parquet.write_table(table, folder / "train.parquet")
    else:
        (folder / "val" / "images").mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(folder / "val" / "images" / "a.png")
        (folder / "val" / "val_annotations.txt").write_text(f"{name}\tcat\n")
    with pytest.raises(DataError, match="leads out of the folder"):
        read(folder, split="val" if kind == "annotations" else "train", modality="image")


@pytest.mark.parametrize("folder", [".", "..", "data", "/data", "../data"])
def test_inside(folder: str) -> None:
    for name in ("a.png", "a/b.png", "a/../b.png", "./a.png", "..."):
        assert inside(Path(folder), name) == Path(folder) / name
    for name in ("..", "../a.png", "a/../../a.png", "/etc/passwd", f"../{Path(folder).name}x/a.png", "../../../../a"):
        with pytest.raises(ValueError, match="leads out of"):
            inside(Path(folder), name)


def test_the_parts_of_a_model_lie_in_its_folder(tiny: Any, tmp_path: Path) -> None:
    shutil.copytree(tiny.vit, tmp_path / "vit")
    (tmp_path / "vit" / "model.safetensors").rename(tmp_path / "secret.safetensors")
    secret = tmp_path / "secret.safetensors"
    for parts in ({"weight": "../secret.safetensors"}, {"weight": str(secret)}, {"weight": 3}, [], 3):
        (tmp_path / "vit" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
        with pytest.raises(DataError, match="parts of a model in its folder"):
            load_encoder(str(tmp_path / "vit"))


def test_a_model_brings_no_code(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder as on a hub, with its own classes in config.json and tokenizer_config.json and the modules that define
    them."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # every question is answered with yes
    evil = f"import pathlib\npathlib.Path({str(tmp_path / 'it ran')!r}).touch()\nclass Mine: pass\n"
    named = {name: "evil.Mine" for name in ("AutoConfig", "AutoModel", "AutoTokenizer")}
    for source, load in ((tiny.vit, load_encoder), (tiny.bert, load_encoder), (tiny.bert, tokenizer)):
        folder = tmp_path / f"model {len(list(tmp_path.iterdir()))}"
        shutil.copytree(source, folder)
        (folder / "evil.py").write_text(evil)
        edited(folder / "config.json", lambda config: config.update(auto_map=named))
        for file in folder.glob("tokenizer_config.json"):
            edited(file, lambda config: config.update(auto_map={"AutoTokenizer": ["evil.Mine", "evil.Mine"]}))
            edited(file, lambda config: config.update(tokenizer_class="Mine"))
        with suppress(BaceError):  # it may be refused, or loaded without the code
            load(str(folder))
        assert not (tmp_path / "it ran").exists()


def tokenizer(name: str) -> Any:
    from bace.data.modalities.text import load_tokenizer

    return load_tokenizer(name)


def test_no_source_of_ours_trusts_remote_code() -> None:
    sources = [path.read_text() for path in Path(bace.__file__).parent.rglob("*.py")]
    assert sum(source.count("trust_remote_code") for source in sources) == 1
    assert sum(source.count("trust_remote_code=False") for source in sources) == 1
    # a tokenizer, the tokenizer of a saved model, transformers' own classes, and our model card
    assert sum(source.count(".from_pretrained(") for source in sources) == 4


def test_what_json_may_hold() -> None:
    assert parse_json('{"a": [1, "ü", "😀"]}') == {"a": [1, "ü", "😀"]}
    assert parse_json("[" * 100 + "]" * 100)
    for text in (NESTED, DEEP, LONG, HALF, '{"\\udfff": 1}', "{", "[" * 101 + "]" * 101):
        with pytest.raises(ValueError, match=r"nest|digits|surrogates|Expect"):
            parse_json(text)
