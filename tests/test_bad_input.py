"""Bad input gets a clear error and loses nothing. Each row of one table goes through the public interface."""

import contextlib
import hashlib
import json
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import torch
from checks import training_examples

import bace
from bace.cli.main import main
from bace.data.benchmarks import TaskTables, check_parts
from bace.data.table import from_arrays
from bace.errors import CheckpointError, ConfigError, DataError, TrainingError


@dataclass
class Place:
    """The files and folders that a row uses."""

    tiny: Any
    folder: Path  # empty at first
    straight: Path  # a finished run of ER on pictures with all its checkpoints

    def flags(self, modality: str, **changes: object) -> list[str]:
        settings = self.tiny.settings(modality, **{"method": "er", **changes})
        return [f"--{k}={json.dumps(v) if isinstance(v, list) else v}" for k, v in settings.items()]

    def learner(self, modality: str = "image", method: str = "er", **changes: object) -> bace.Learner:
        settings = {k: v for k, v in self.tiny.settings(modality).items() if not k.startswith("benchmark")}
        return bace.Learner(method, **{**settings, **changes})

    def examples(self, classes: tuple[int, ...], modality: str = "image") -> tuple[Any, Any]:
        return training_examples(self.tiny, modality, classes)

    def copied(self, name: str) -> Path:
        """A copy of a backbone or data set that a row may damage."""
        target = self.folder / name
        shutil.copytree(self.tiny.folder / name, target)
        return target

    def cut(self, checkpoints: int = 4) -> Path:
        """The remains of the uninterrupted run, as if it had been killed after this many checkpoints."""
        target = self.folder / "cut"
        shutil.copytree(self.straight, target)
        for name in ("metrics.json", "matrix.csv"):
            (target / name).unlink()
        for path in sorted((target / "checkpoints").iterdir())[checkpoints:]:
            shutil.rmtree(path)
        return target

    def newest(self, run: Path, file: str = "state.safetensors", back: int = 1) -> Path:
        return sorted((run / "checkpoints").iterdir())[-back] / file

    def assert_ended_like_the_straight_run(self, run: Path) -> None:
        for name in ("matrix.csv", "log.jsonl"):
            assert (run / name).read_text() == (self.straight / name).read_text()


Action = Callable[[], Any]


@dataclass
class Row:
    name: str
    prepare: Callable[[Place], Action]  # makes the bad input, and returns the call that receives it
    outcome: int | type[Exception]  # exit status of the command line, or the exception of Python
    says: tuple[str, ...]  # patterns: the thing, the value, what to do


def cli(name: str, words: str, *says: str) -> Row:
    """A row of plain command-line words."""
    return Row(name, lambda place: lambda: main(_filled(words, place)), 2, says)


def run(name: str, words: str, *says: str, data: str = "image") -> Row:
    """A valid `bace run` that the last words spoil."""
    return Row(name, lambda place: lambda: main(["run", *place.flags(data), *_filled(words, place)]), 2, says)


def _filled(words: str, place: Place) -> list[str]:
    tiny = place.tiny
    return [
        word.format(tmp=place.folder, run=place.straight, vit=tiny.vit, bert=tiny.bert, data=tiny.folder)
        for word in words.split()
    ]


ROWS: list[Row] = [
    # names
    cli("unknown command", "runn", "no command 'bace runn'", "Did you mean 'run'"),
    run("unknown method", "--method bacee", "no method 'bacee'", "Did you mean 'BaCE'"),
    run("unknown benchmark", "--benchmark digitz", "no benchmark 'digitz'", "Did you mean 'digits'"),
    run("unknown backbone", "--backbone minilmm", "backbone 'minilmm'", "Did you mean 'minilm'"),
    run("unknown flag", "--memroy 3", "no setting 'memroy'", "Did you mean 'memory'"),
    run("unknown flag of a section", "--methd ER", "no setting 'methd'", "Did you mean 'method'"),
    run("unknown nested flag", "--train.lrr 3", "no setting 'train.lrr'", r"Did you mean 'train\.lr'"),
    run("unknown section", "--trian.lr 3", "no setting 'trian.lr'", r"Did you mean 'train\.lr'"),
    run(
        "unknown flag of the method",
        "--method bace --method.alpa 2",
        "BaCE has no setting 'method.alpa'",
        r"Did you mean 'method\.alpha'",
    ),
    run("a flag of another method", "--method.alpha 2", "ER has no setting 'method.alpha'", "mode, name, reduction"),
    cli("unknown list", "list method", "kind is 'method'", "Did you mean 'methods'"),
    cli("unknown option of list", "list methods --jsno", "'--jsno'", "Did you mean '--json'"),
    cli("unknown option of report", "report {run} --ouut x", "'--ouut'", "Did you mean '--out'"),
    cli("unknown option of demo", "demo --owt x", "'--owt'", "Did you mean '--out'"),
    # values
    run("a word for a number", "--train.lr fast", "train.lr is 'fast'", "must be a number$"),
    run("a fraction for a whole number", "--train.epochs 1.5", "train.epochs is '1.5'", "a whole number"),
    run("a value that is no choice", "--train.optimiser lion", "optimiser is 'lion'", "'sgd' or 'adam' or 'adamw'"),
    run("a word for a list", "--benchmark.tasks [2,x]", r"benchmark.tasks is '\[2, 'x'\]'", "each a whole number"),
    run("a word for yes or no", "--benchmark.flip maybe", "benchmark.flip is 'maybe'", "true or false"),
    run("a word for the seed", "--seed one", "seed is 'one'", "a whole number"),
    run("a method's setting of the wrong type", "--method bace --method.K five", "method.K is 'five'", "whole number"),
    run("a negative rate", "--train.lr -1", r"train.lr is -1\.0", "at least 0"),
    run("an empty batch", "--train.batch_size 0", "train.batch_size is 0", "at least 1"),
    run("a share above one", "--train.replay_ratio 2", "train.replay_ratio is 2", "between 0 and 1"),
    run("a negative memory", "--memory -3", "memory.size is -3", "at least 0"),
    run("two budgets", "--memory.per_class 2", r"`size` \(10\)", r"`per_class` \(2\)", "not both"),
    run("more tasks than classes", "--benchmark.tasks 9", "benchmark.tasks is 9", "between 1 and 5"),
    run("more blocks frozen than there are", "--backbone.freeze 9", "freeze 9 blocks", "has 2"),
    run("an option without a value", "--out", "--out needs a value"),
    run("an option with an empty value", "--out=", "--out needs a value"),
    run("a setting without a value", "--train.lr --seed 3", "--train.lr needs a value"),
    run("a stray word", "--benchmark.tasks 2 1 2", "'1' is not expected behind '--benchmark.tasks 2'", r"\[2,1,2\]"),
    cli("seeds that are no number", "compare --method ER --seeds two", "--seeds is 'two'", "whole number"),
    cli("no seeds", "compare --method ER --seeds 0", "--seeds is '0'", "at least 1"),
    cli("no workers", "compare --method ER --workers 0", "--workers is '0'", "at least 1"),
    cli("an unknown cluster", "compare --method ER --on lsf", "--on is 'lsf'", "'ray' or 'slurm'"),
    cli("no trials", "tune --method ER --trials 0", "--trials is '0'", "at least 1"),
    cli("a method's setting for all", "compare --method ER --method.mode concat", "'--method.mode'", "in brackets"),
    cli("a method cut short", "compare --method BaCE(W0=1", r"'BaCE\(W0=1'", r"write .*'BaCE\(W0=1, alpha=0\)'"),
    cli("a change without a value", "compare --method BaCE(W0)", "'W0'", "setting=value"),
    cli("an unknown change", "compare --method BaCE(W9=1)", "'method.W9'", r"Did you mean 'method\.W0'"),
    run("a device that is not there", "--train.device gpu", "train.device 'gpu'", "use auto, cpu or cuda"),
    # data
    run("pictures missing", "--benchmark.path {tmp}/none", "{tmp}/none", "Check the path"),
    run("texts missing", "--benchmark.path {tmp}/none.csv", "none.csv", "Check the path", data="text"),
    run("sentences missing", "--benchmark.path {tmp}/none.conll", "none.conll", "Check the path", data="token"),
    run("no path at all", "--benchmark.path null", "your own data", "--benchmark.path"),
    run("texts for pictures", "--benchmark.path {data}/texts", r"train\.csv holds texts", "images", "Columns: text"),
    run("pictures for texts", "--benchmark.path {data}/pictures", "holds images", "my-images", data="text"),
    run("a column unlike any", "--benchmark.label_column target", r"Columns: text \(string\), label", data="text"),
    run("a column that is not there", "--benchmark.label_column lable", "no column 'lable'", "'label'", data="text"),
    run("a class in two tasks", "--benchmark.class_order [ant,bee,ant]", "class_order", "'ant' twice", "one task"),
    run("an unknown class in the order", "--benchmark.class_order [ant,bea]", "'bea'", "Did you mean 'bee'"),
    run("a memory too small for the classes", "--memory 3", "memory of 3", "5 classes", "memory.size at least 5"),
    run("a memory too small for the types", "--memory 4", "memory of 4", "5 classes .*entity types", data="token"),
    # backbones
    run("a backbone of texts for pictures", "--backbone {bert}", "{bert}", "takes texts", "images", "--backbone"),
    run("a backbone of pictures for texts", "--backbone {vit}", "{vit}", "takes images", "texts", data="text"),
    run("a backbone of pictures for sentences", "--backbone {vit}", "{vit}", "sentences", data="token"),
    run("a backbone folder that is missing", "--backbone {tmp}/none", "{tmp}/none", "not a file or folder"),
    run("a backbone folder without a model", "--backbone {data}/texts", "{data}/texts", "config.json"),
    # run folders
    run("a folder of another run", "--out {run} --seed 9", "{run}' holds a run with other settings", "--out"),
    run("a folder of something else", "--out {data}", "{data}' is already in use", "--out", "--resume"),
    run("a file for a run folder", "--out {run}/run.json", "run.json' is already in use"),
    run("a run folder that cannot be made", "--out {run}/run.json/x", "cannot be made", "choose another"),
    cli("resume of no run", "run --resume {data}", "{data}", "not a run folder", "run.json"),
    cli("resume of nothing", "run --resume {tmp}/none", "{tmp}/none", "not a run folder"),
    cli("resume of a finished run", "run --resume {run}", "{run}", "finished", "nothing to resume"),
    cli("resume with other settings", "run --resume {run} --seed 3", "--resume", "own settings", "give it alone"),
    cli("resume with another folder", "run --resume {run} --out {tmp}/x", "--resume", "give it alone"),
    cli("a report of nothing", "report", "at least one run folder"),
    cli("a report of no run", "report {tmp}", "{tmp}", "run.json"),
    # prediction
    cli("prediction without files", "predict {run}", "bace predict needs FILES: at least one file"),
    cli("prediction of a missing file", "predict {run} {tmp}/x.png", "no file '{tmp}/x.png'", "check the path"),
    cli("prediction of no picture", "predict {run} {run}/run.json", "run.json", "cannot be decoded"),
    cli("prediction with no run", "predict {tmp} {run}/run.json", "{tmp}", "no saved learner", "neither a run folder"),
    # configuration files
    cli("a missing config file", "run --config {tmp}/none.yaml", "none.yaml", "cannot be read: No such file"),
    # a user's class
    run("a module that is not there", "--method nowhere.Mine", "'nowhere.Mine' cannot be imported", "No module"),
    run("a class that is not there", "--method json.Mine", "'json.Mine' cannot be imported", "no attribute 'Mine'"),
    run("a class that is no method", "--method json.JSONDecoder", "json.JSONDecoder", "derived from bace.Method"),
]


def row(name: str, outcome: int | type[Exception], *says: str) -> Callable[[Callable[[Place], Action]], None]:
    """A row that needs more than words."""

    def add(prepare: Callable[[Place], Action]) -> None:
        ROWS.append(Row(name, prepare, outcome, says))

    return add


# -- configuration files


def with_config(place: Place, content: bytes) -> Action:
    (place.folder / "my.yaml").write_bytes(content)
    return lambda: main(["run", "--config", str(place.folder / "my.yaml")])


@row("config that is not YAML", 2, r"my\.yaml' is not YAML", "line 1")
def _(place: Place) -> Action:
    return with_config(place, b"method: [er\n")


@row("config that is not text", 2, r"my\.yaml' is not YAML")
def _(place: Place) -> Action:
    return with_config(place, b"\xff\xfe\x00")


@row("config that is a list", 2, r"my\.yaml' holds a list", "'method: bace'")
def _(place: Place) -> Action:
    return with_config(place, b"- method\n- er\n")


@row("config with a setting without a value", 2, r"backbone\.name has no value", "leave it out")
def _(place: Place) -> Action:
    return with_config(place, b"method: er\nbackbone:\n")


@row("config with a hyper-parameter without a value", 2, r"method\.alpha has no value", "leave it out")
def _(place: Place) -> Action:
    return with_config(place, b"method:\n  name: bace\n  alpha:\n")


@row("config that is empty", 2, r"my\.yaml' is empty", "'method: bace'")
def _(place: Place) -> Action:
    return with_config(place, b"")


@row("unknown key in the config", 2, "no setting 'train.epoch'", r"Did you mean 'train\.epochs'")
def _(place: Place) -> Action:
    return with_config(place, b"method: er\ntrain:\n  epoch: 3\n")


@row("wrong type in the config", 2, r"train.epochs is '\[3\]'", "a whole number")
def _(place: Place) -> Action:
    return with_config(place, b"method: er\ntrain:\n  epochs: [3]\n")


@row("settings of Python of the wrong type", ConfigError, "train.epochs is 'many'", "a whole number")
def _(place: Place) -> Action:
    return lambda: bace.run(place.tiny.settings("image", method="er"), **{"train.epochs": "many"})


# -- data


def with_data(place: Place, modality: str, path: Path) -> Action:
    return lambda: main(["run", *place.flags(modality, **{"benchmark.path": str(path)}), "--out", f"{path}-run"])


@row("a picture of garbage", 2, r"bee.3\.png", "cannot be decoded", "Replace or remove")
def _(place: Place) -> Action:
    data = place.copied("pictures")
    (data / "train" / "bee" / "3.png").write_bytes(b"no picture")
    return with_data(place, "image", data)


@row("a picture cut short", 2, r"cat.0\.png", "cannot be decoded", "Replace or remove")
def _(place: Place) -> Action:
    file = place.copied("pictures") / "test" / "cat" / "0.png"
    file.write_bytes(file.read_bytes()[:60])
    return with_data(place, "image", place.folder / "pictures")


@row("a class folder without a picture", 2, "train.fox", "holds no picture", "Fill it or remove it")
def _(place: Place) -> Action:
    data = place.copied("pictures")
    (data / "train" / "fox").mkdir()
    return with_data(place, "image", data)


@row("no test split", 2, "pictures", "no split 'test'", "It has: train")
def _(place: Place) -> Action:
    data = place.copied("pictures")
    shutil.rmtree(data / "test")
    return with_data(place, "image", data)


@row("a class without a test example", 2, "class 'eel' of 'task 3'", "no test example", "add some or drop it")
def _(place: Place) -> Action:
    data = place.copied("pictures")
    shutil.rmtree(data / "test" / "eel")
    return with_data(place, "image", data)


@row("a label that only the test has", 2, "label 'bea'", "no training example", "Did you mean 'bee'", "class_order")
def _(place: Place) -> Action:
    data = place.copied("texts")
    (data / "test.csv").write_text((data / "test.csv").read_text() + "w1 w2,bea\n")
    return with_data(place, "text", data)


@row("texts with an open quote", 2, r"train\.csv, line \d+", "Check the quotes")
def _(place: Place) -> Action:
    data = place.copied("texts")
    (data / "train.csv").write_text((data / "train.csv").read_text() + '"w1 w2,bee\n')
    return with_data(place, "text", data)


@row("texts that are binary", 2, r"train\.csv", "not in UTF-8", "Convert it")
def _(place: Place) -> Action:
    data = place.copied("texts")
    (data / "train.csv").write_bytes(b"text,label\n\xff\xfe\x01,bee\n")
    return with_data(place, "text", data)


@row("a text without a label", 2, r"train\.csv, line 52", "label is missing", "Fill it in or remove")
def _(place: Place) -> Action:
    data = place.copied("texts")
    (data / "train.csv").write_text((data / "train.csv").read_text() + "w1 w2,\n")
    return with_data(place, "text", data)


@row("a tag that is no tag", 2, r"train\.conll, line 1", "'PERSON' is not an IOB tag", "Expected O, B-<type>")
def _(place: Place) -> Action:
    data = place.copied("sentences")
    (data / "train.conll").write_text("w1 PERSON\n\n" + (data / "train.conll").read_text())
    return with_data(place, "token", data)


@row("a word without a tag", 2, r"test\.conll, line 1", "only one column", "Expected a word and its tag")
def _(place: Place) -> Action:
    data = place.copied("sentences")
    (data / "test.conll").write_text("w1\n\n" + (data / "test.conll").read_text())
    return with_data(place, "token", data)


@row("a label that is not of the task", DataError, "test example of 'second'", "label 'a'", r"not a class .*\(c, d\)")
def _(place: Place) -> Action:
    first, second = from_arrays(["x", "y"], ["a", "b"]), from_arrays(["x", "y"], ["c", "d"])
    wrong = from_arrays(["x", "y", "z"], ["c", "d", "a"])
    parts = [TaskTables("first", ["a", "b"], first, first), TaskTables("second", ["c", "d"], second, wrong)]
    return lambda: check_parts(parts)


@row("a class declared in two tasks", DataError, "class 'a'", "'first' and in 'second'", "give it to one")
def _(place: Place) -> Action:
    table = from_arrays(["x", "y"], ["a", "b"])
    return lambda: check_parts(
        [TaskTables("first", ["a", "b"], table, table), TaskTables("second", ["a"], table, table)]
    )


# -- backbones


@row("a tokenizer without its vocabulary", 2, "bert", "tokenizer", "vocabulary", "tokenizer.json")
def _(place: Place) -> Action:
    folder = place.copied("bert")
    for file in folder.glob("*token*"):
        file.unlink()
    return lambda: main(["run", *place.flags("text", backbone=str(folder))])


@row("a backbone without weights", 2, "vit has no model.safetensors", "save_pretrained")
def _(place: Place) -> Action:
    folder = place.copied("vit")
    (folder / "model.safetensors").unlink()
    return lambda: main(["run", *place.flags("image", backbone=str(folder))])


@row("a backbone cut short", 2, r"model\.safetensors cannot be read", "cut short or damaged")
def _(place: Place) -> Action:
    weights = place.copied("vit") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return lambda: main(["run", *place.flags("image", backbone=str(weights.parent))])


@row("a backbone for grey pictures", 2, "grey' takes pictures of 1 channels", "choose one that takes 3")
def _(place: Place) -> Action:
    from transformers import ViTConfig, ViTModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = ViTConfig(**sizes, image_size=8, patch_size=4, num_channels=1)
    ViTModel(config, add_pooling_layer=False).save_pretrained(place.folder / "grey")
    (place.folder / "grey" / "preprocessor_config.json").write_text('{"image_mean": [0.5], "image_std": [0.5]}')
    return lambda: main(["run", *place.flags("image", backbone=str(place.folder / "grey"))])


# -- run folders and checkpoints


@row("a run folder that another process uses", 2, "cut' is already in use by another process", "wait for it")
def _(place: Place) -> Action:
    folder = place.cut()
    hold = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True)"
    words = [sys.executable, "-c", f"{hold}; input()", str(folder / ".lock")]

    def action() -> int:
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "held\n"
            status = main(["run", "--resume", str(folder)])
            other.communicate("\n")
        assert main(["run", "--resume", str(folder)]) == 0  # the lock went with its holder
        place.assert_ended_like_the_straight_run(folder)
        return status

    return action


@row("a run that was refused can be started again in its folder", 2, "none", "Check the path")
def _(place: Place) -> Action:
    out = str(place.folder / "new")

    def action() -> int:
        status = main(["run", *place.flags("image", **{"benchmark.path": str(place.folder / "none")}), "--out", out])
        assert main(["run", *place.flags("image"), "--out", out]) == 0
        return status

    return action


@row("a run.json that is no JSON", 2, r"run\.json' cannot be read")
def _(place: Place) -> Action:
    (place.cut() / "run.json").write_text("{")
    return lambda: main(["run", "--resume", str(place.folder / "cut")])


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def resumed_after_damage(place: Place, damage: Callable[[Path], None], *files: Path) -> Action:
    for file in files:
        damage(file)

    def action() -> int:
        status = main(["run", "--resume", str(place.folder / "cut")])
        if status == 0:
            place.assert_ended_like_the_straight_run(place.folder / "cut")
        return status

    return action


TOLD = (r"warning: checkpoint '.*00000004' is damaged", "does not match its checksum", "using the previous one")


@row("a truncated checkpoint", 0, *TOLD)
def _(place: Place) -> Action:
    return resumed_after_damage(place, truncate, place.newest(place.cut()))


@row("a checkpoint with a flipped bit", 0, *TOLD)
def _(place: Place) -> Action:
    return resumed_after_damage(place, flip_a_bit, place.newest(place.cut()))


@row("a checkpoint whose state has a flipped bit", 0, *TOLD)
def _(place: Place) -> Action:
    return resumed_after_damage(place, flip_a_bit, place.newest(place.cut(), "state.json"))


@row("a checkpoint that lacks a file", 0, "warning: .*00000004' is damaged", "using the previous one")
def _(place: Place) -> Action:
    return resumed_after_damage(place, Path.unlink, place.newest(place.cut(), "sha256.json"))


@row("every checkpoint damaged", 2, "00000002", "every checkpoint in .*cut.checkpoints' is damaged", "start .*again")
def _(place: Place) -> Action:
    run = place.cut(checkpoints=2)
    return resumed_after_damage(place, flip_a_bit, place.newest(run), place.newest(run, back=2))


@contextlib.contextmanager
def disk_with_room_for(size: int) -> Iterator[None]:
    """No file may grow beyond this size: writing fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@row(
    "a disk that is full at a checkpoint",
    2,
    "not save a checkpoint in .*cut",
    "00000004",
    "Free some space",
    "--resume",
)
def _(place: Place) -> Action:
    folder = place.cut()
    before = {path.name for path in (folder / "checkpoints").iterdir()}

    def action() -> int:
        with disk_with_room_for(8192):
            status = main(["run", "--resume", str(folder)])
        assert {path.name for path in (folder / "checkpoints").iterdir()} == before
        assert main(["run", "--resume", str(folder)]) == 0
        place.assert_ended_like_the_straight_run(folder)
        return status

    return action


@row("a disk that is full from the start", 2, r"could not write .*run\.json'", "make room")
def _(place: Place) -> Action:
    def action() -> int:
        with disk_with_room_for(100):
            return main(["run", *place.flags("image"), "--out", str(place.folder / "new")])

    return action


# -- training


@row(
    "a loss that is not finite", 2, "term '(new|loss)' is (nan|inf)", "task 1", "epoch 1", r"step \d", "lower train.lr"
)
def _(place: Place) -> Action:
    return lambda: main(["run", *place.flags("image", **{"train.lr": 1e30}), "--out", str(place.folder / "new")])


@row("a GPU that is not there", 2, "train.device 'cuda'", "use auto, cpu or cuda")
def _(place: Place) -> Action:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    return lambda: main(["run", *place.flags("image", **{"train.device": "cuda"})])


@row("a method that is not for the data", 2, "Pictures is not defined for text data", "image")
def _(place: Place) -> Action:
    (place.folder / "only_pictures.py").write_text(
        "from bace.methods import SEQ\nclass Pictures(SEQ):\n    title, modalities = 'Pictures', frozenset({'image'})\n"
    )
    sys.path.insert(0, str(place.folder))
    return lambda: main(["run", *place.flags("text", method="only_pictures.Pictures")])


# -- Learner


@row("prediction before learning", ConfigError, "learned nothing yet", "partial_fit")
def _(place: Place) -> Action:
    return lambda: place.learner().predict(place.examples((0,))[0])


@row("saving before learning", ConfigError, "learned nothing yet", "nothing to save")
def _(place: Place) -> Action:
    return lambda: place.learner().save(place.folder / "saved")


def taught(place: Place, x: Any, y: Any, **changes: object) -> Action:
    """Give these data to a learner of two classes; whatever happens, its scores must not change by a bit."""
    learner = place.learner(**changes)
    learner.partial_fit(*place.examples((0, 1)))
    asked = place.examples((0, 1, 2))[0]
    before = learner.scores(asked)

    def action() -> None:
        try:
            learner.partial_fit(x, y)
        finally:
            assert torch.equal(learner.scores(asked), before)
            assert learner.classes_ == ["ant", "bee"]

    return action


@row("a class taught twice", DataError, "class 'bee' was learned before", "new classes only")
def _(place: Place) -> Action:
    return taught(place, *place.examples((1, 2)), method="lucir")


@row("data of another kind", DataError, "knows images, and these are texts", "give it images, or teach a new one")
def _(place: Place) -> Action:
    return taught(place, ["w1 w2", "w3 w4"], ["good", "bad"])


@row("pictures of another shape", DataError, r"\(9, 9\) pixels", r"\(8, 8\)", "resize")
def _(place: Place) -> Action:
    return taught(place, np.zeros((4, 9, 9, 3), np.uint8), ["x", "x", "y", "y"])


@row("pictures of another shape without a memory", DataError, r"\(9, 9\) pixels", r"\(8, 8\)", "resize")
def _(place: Place) -> Action:
    return taught(place, np.zeros((4, 9, 9, 3), np.uint8), ["x", "x", "y", "y"], method="seq")


@row("pictures of two channels", DataError, r"shape \(4, 8, 8, 2\)", "1, 3 or 4 channels")
def _(place: Place) -> Action:
    return taught(place, np.zeros((4, 8, 8, 2), np.uint8), ["x", "x", "y", "y"])


@row("sentences without entities", DataError, "all words of these sentences are tagged O", "with entities")
def _(place: Place) -> Action:
    return lambda: place.learner("token").partial_fit([["w1", "w2"]], [["O", "O"]])


@row("a name with NUL, which marks forgotten classes", DataError, r"class '\\x00cat'", "another name")
def _(place: Place) -> Action:
    return taught(place, place.examples((2,))[0], ["\0cat"] * 10)


@row("fewer labels than pictures", DataError, "10 examples but 1 labels", "one label per example")
def _(place: Place) -> Action:
    return taught(place, place.examples((2,))[0], ["cat"])


@row("a learner's memory smaller than its classes", ConfigError, "memory of 2", "3 classes", "at least 3")
def _(place: Place) -> Action:
    return taught(place, *place.examples((2,)), **{"memory.size": 2})


@row("a learner's loss that is not finite", TrainingError, "not finite", "task 2", "epoch 1")
def _(place: Place) -> Action:
    x, y = place.examples((2, 3))
    learner = place.learner()
    learner.partial_fit(*place.examples((0, 1)))
    asked = place.examples((0, 1, 2))[0]
    before, rate = learner.scores(asked), learner._given["train.lr"]

    def action() -> None:
        try:
            learner._given["train.lr"] = 1e30
            learner.partial_fit(x, y)
        finally:  # the learner is unchanged and can learn
            learner._given["train.lr"] = rate
            assert torch.equal(learner.scores(asked), before)
            learner.partial_fit(x, y)
            assert learner.classes_ == ["ant", "bee", "cat", "dog"]

    return action


@row("a first call that fails leaves nothing behind", ConfigError, "takes images", "texts")
def _(place: Place) -> Action:
    learner = place.learner("image")

    def action() -> None:
        try:
            learner.partial_fit(["w1", "w2"], ["good", "bad"])
        finally:
            learner.partial_fit(*place.examples((0, 1)))

    return action


@row("loading what is no learner", CheckpointError, "holds no saved learner")
def _(place: Place) -> Action:
    return lambda: bace.Learner.load(place.folder)


@row("loading a run as a learner", CheckpointError, "not a saved learner", "bace.load")
def _(place: Place) -> Action:
    return lambda: bace.Learner.load(place.straight / "checkpoints")


@row("a saved learner that is damaged", CheckpointError, "every checkpoint in .*saved' is damaged")
def _(place: Place) -> Action:
    learner = place.learner()
    learner.partial_fit(*place.examples((0, 1)))
    learner.save(place.folder / "saved")
    flip_a_bit(next((place.folder / "saved").glob("*/state.safetensors")))

    def action() -> None:
        with pytest.warns(UserWarning, match="damaged"):
            bace.Learner.load(place.folder / "saved")

    return action


@row("teaching a model of a run", ConfigError, "loaded from a run", "only predict")
def _(place: Place) -> Action:
    return lambda: bace.load(str(place.straight)).partial_fit(*place.examples((0, 1)))


@row("a model of an unfinished run", CheckpointError, "cut' is not finished", "--resume")
def _(place: Place) -> Action:
    folder = place.cut()
    return lambda: bace.load(str(folder))


# -- the test


@pytest.fixture(scope="module")
def straight(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight") / "run"
    bace.run(tiny.settings("image", method="er", **{"checkpoint.every": 1, "checkpoint.keep": 100}), out=folder)
    return folder


def contents(*folders: Path) -> dict[Path, str]:
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("case", ROWS, ids=[row.name for row in ROWS])
def test_bad_input_gets_a_clear_error_and_loses_nothing(
    case: Row, tiny: Any, straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    place = Place(tiny, tmp_path, straight)
    action = case.prepare(place)
    before = contents(tiny.folder, straight, tmp_path)
    capsys.readouterr()
    if isinstance(case.outcome, int):
        assert action() == case.outcome
        message = capsys.readouterr().err
    else:
        with pytest.raises(case.outcome) as raised:
            action()
        message = str(raised.value)
    for pattern in case.says:
        for name, path in (("tmp", tmp_path), ("run", straight), ("data", tiny.folder), ("vit", tiny.vit)):
            pattern = pattern.replace(f"{{{name}}}", re.escape(str(path)))
        assert re.search(pattern.replace("{bert}", re.escape(tiny.bert)), message), (pattern, message)
    assert "Traceback" not in message
    after = contents(tiny.folder, straight, tmp_path)
    cut = tmp_path / "cut"  # some cases end by resuming it
    mended = {path for path in before if path.is_relative_to(cut)} if (cut / "metrics.json").exists() else set()
    assert {path: after.get(path) for path in before if path not in mended} == {
        path: digest for path, digest in before.items() if path not in mended
    }


def test_bfloat16_is_used_or_refused_but_never_kills(tiny: Any, tmp_path: Path) -> None:
    """Some CPUs report support but crash with an illegal instruction, so it is tried in a separate process."""
    flags = Place(tiny, tmp_path, tmp_path).flags("image", **{"train.precision": "bfloat16"})
    done = processes.run(processes.BACE, "run", *flags, "--out", str(tmp_path / "run"))
    assert done.returncode in (0, 2), done.stderr  # a negative status would be a signal
    assert done.returncode == 0 or re.search("bfloat16 .*this CPU.* use float32", done.stderr)
