"""Every command as a user types it, in-process and on the tiny data, and its equivalent in Python."""

import contextlib
import csv
import fcntl
import io
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
import yaml
from run_folders import write_run

import bace
from bace.cli.main import NAMES, main
from bace.config.parse import config_from, make_parser
from bace.config.schema import Training
from bace.core.calibration import calibration_error, fit_temperature
from bace.data.benchmarks import find_benchmark
from bace.errors import ConfigError
from bace.experiments.compare import methods_asked
from bace.methods import METHODS
from bace.progress import duration


def flags(tiny: Any, modality: str, **changes: object) -> list[str]:
    settings = tiny.settings(modality, **{"method": "er", **changes})
    return [f"--{k}={json.dumps(v) if isinstance(v, list) else v}" for k, v in settings.items()]


def without_seconds(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "metrics.json").read_text())
    assert found.pop("seconds") > 0
    assert found.pop("passes") > 0
    assert found.pop("peak_memory_mb") > 0
    return found


@pytest.fixture(scope="module")
def runs(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A finished run of each modality, made by the command line."""
    folder = tmp_path_factory.mktemp("runs")
    for modality in ("image", "text", "token"):
        assert main(["run", *flags(tiny, modality), "--out", str(folder / modality)]) == 0
    return {modality: folder / modality for modality in ("image", "text", "token")}


def say(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The output of a command."""
    capsys.readouterr()
    assert main(list(words)) == 0
    return capsys.readouterr().out


# -- help and lists


def test_help_and_version_answer_without_importing_torch() -> None:
    code = (
        "import sys; from bace.cli.main import main\n"
        "for words in (['--help'], ['--version'], [], ['compare', '--help'], ['list', '-h']): assert main(words) == 0\n"
        "assert not {'torch', 'transformers', 'numpy', 'rich'} & set(sys.modules), 'slow imports'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for command in NAMES:
        assert re.search(rf"^    {command} +[A-Z]", done.stdout, re.MULTILINE)  # with a description
    assert bace.__version__ in done.stdout.splitlines()


def test_the_package_is_a_command_too() -> None:
    done = subprocess.run([sys.executable, "-m", "bace", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{bace.__version__}\n")


def test_the_package_names_what_it_offers_before_it_imports_it() -> None:
    code = "import sys, bace; print(dir(bace)); assert 'torch' not in sys.modules; print(bace.Learner)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'Learner'" in done.stdout
    assert "bace.learner.Learner" in done.stdout
    with pytest.raises(AttributeError, match="no attribute 'Leaner'"):
        bace.Leaner  # noqa: B018


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes_commands_and_settings(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    script = say(capsys, "--print_completion", f"shtab-{shell}")
    expected = (*NAMES, "claims", "--train.lr", "--method.alpha", "--dry_run")
    assert [name for name in expected if name not in script] == []


OPTIONS = {
    "demo": ["--out"],
    "compare": ["--method", "--seeds", "--seed", "--out", "--config", "--workers", "--on"],
    "tune": ["--search", "--trials", "--first_tasks", "--held_out", "--out", "--config"],
    "report": ["--out", "--csv", "--latex"],
    "list": ["--json"],
    "check data": ["--path", "--json"],
    "check backbone": ["--json"],
    "learn": ["--new", "--method", "--backbone", "--memory", "--config", "--column", "--label_column"],
    "forget": ["--trust"],
    "export": ["--format", "--trust", "--force"],
    "predict": ["--json", "--column", "--reject", "--trust", "--force"],
    "paper run": ["--scale", "--seeds", "--out", "--dry_run"],
    "paper show": ["--scale", "--out", "--csv", "--latex"],
    "paper claims": ["--markdown"],
    "run": ["--out", "--resume", "--config", "--print_config", "--train.lr"],
}


@pytest.mark.parametrize("command", OPTIONS)
def test_help_of_a_command_names_its_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = say(capsys, *command.split(), "--help")
    assert page.startswith(f"usage: bace {command} ")
    assert [option for option in OPTIONS[command] if not re.search(rf"{option}\b", page)] == []
    assert say(capsys, "help", *command.split()) == page


def test_help_of_an_unknown_command_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "compere"]) == 2
    assert "there is no command 'bace compere'. Did you mean 'compare'?" in capsys.readouterr().err


def test_a_method_in_the_form_of_a_comparison_is_answered_with_the_form_of_a_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["run", "--method", "BaCE(W0=1, alpha=0)"]) != 0
    assert "--method BaCE --method.W0 VALUE" in capsys.readouterr().err


def test_report_names_the_runs_that_are_not_finished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done, cut = write_run(tmp_path / "done"), write_run(tmp_path / "cut", seed=1, finished=False)
    told = say(capsys, "report", str(done), str(cut), "--out", str(tmp_path / "page.html"))
    assert f"unfinished (bace run --resume DIR):\n  {cut}: 1 of 3 tasks done\n" in told


@pytest.mark.parametrize("kind", ["methods", "benchmarks", "backbones"])
def test_list_names_the_same_things_as_json_and_as_a_table(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(say(capsys, "list", kind, "--json"))
    names = {row["name"] for row in rows}
    table = say(capsys, "list", kind)
    shown = {line.split()[0] for line in table.splitlines() if line.strip()}
    assert names <= shown  # whole names, which can be copied
    some = {"methods": {"SEQ", "MTL", "ER", "BaCE"}, "benchmarks": {"digits", "my-texts"}, "backbones": {"minilm"}}
    assert some[kind] <= names


def test_help_of_run_explains_the_settings_of_the_chosen_method(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")  # one setting per line
    bace_help, er_help = (say(capsys, "run", "--method", name, "--help") for name in ("bace", "er"))
    assert re.search(r"--method.alpha ALPHA +weight of the distillation on new.*type: float, default: 1.0", bace_help)
    assert re.search(r"--method.mode \{batch,concat\}\s+`batch`: a separate .*default: batch", er_help)
    assert "--method.alpha" not in er_help
    rate = find_benchmark("digits").defaults["train.lr"]  # the default of the benchmark, not of the trainer
    assert re.search(rf"--train.lr LR +the learning rate of the encoder.*default: {rate}\)", er_help)
    assert re.search(r"--train.lr LR .*default: 0.5\)", say(capsys, "run", "--method", "er", "-h", "--train.lr", "0.5"))


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.title)
def test_every_setting_of_a_method_is_an_option_with_its_default_and_meaning(method: Any) -> None:
    """This includes settings that a constructor passes on as `**options`."""
    parser = make_parser(method)
    named = {name: parameter.default for name, parameter in method.hyper_parameters().items()}
    found = vars(parser.get_defaults()["method"])
    assert {name: value for name, value in found.items() if name != "name"} == named
    assert [action.dest for action in parser._actions if not action.help] == []


# -- settings


def test_flags_override_the_file_and_the_file_the_benchmark(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("benchmark: digits\nmethod: {name: bace, alpha: 3}\ntrain:\n  lr: 0.5\n  epochs: 7\nmemory: 40\n")
    words = ["run", "--config", str(file), "--train.epochs", "9", "--method.W0=1", "--print_config"]
    shown = yaml.safe_load(say(capsys, *words))
    assert shown["train"]["epochs"] == 9
    assert shown["train"]["lr"] == 0.5
    assert shown["train"]["batch_size"] == find_benchmark("digits").defaults["train.batch_size"] != Training.batch_size
    assert shown["method"] == {**shown["method"], "name": "BaCE", "alpha": 3.0, "W0": 1.0, "K": 5}
    assert shown["memory"]["size"] == 40


@pytest.mark.parametrize("method", ["SEQ", "MTL", "ER", "BaCE"])
def test_a_printed_config_read_again_is_the_same(
    tiny: Any, method: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    changes = {"train.clip": 2, "benchmark.class_order": ["time", "person"]}
    words = flags(tiny, "token", method=method, seed=3, **changes)
    printed = say(capsys, "run", *words, "--print_config")
    (tmp_path / "again.yaml").write_text(printed)
    assert say(capsys, "run", "--config", str(tmp_path / "again.yaml"), "--print_config") == printed


def test_a_hyper_parameter_may_have_no_value_where_it_says_so() -> None:
    assert config_from({"method": {"name": "slca", "lr": None}}).method["lr"] is None
    assert config_from({"train.clip": None}).train.clip is None


def test_a_configuration_can_be_changed_without_changing_the_next_one() -> None:
    one, expected = config_from({"method": "er"}), config_from({"method": "er"})
    one.studies.append("bias")
    one.benchmark["tasks"] = one.method["mode"] = one.train.lr = 7
    assert config_from({"method": "er"}) == expected


@pytest.mark.parametrize(("name", "value"), [("train.deterministic", 1), ("backbone.freeze", False), ("seed", False)])
def test_a_value_that_equals_the_default_but_is_of_another_type_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name} is '{value}': it must be"):
        config_from({name: value})


# -- run


def test_a_run_folder_holds_what_it_should(runs: dict[str, Path], tiny: Any) -> None:
    for modality, folder in runs.items():
        names = {path.name for path in folder.iterdir()} - {".lock"}
        assert names == {"run.json", "log.jsonl", "matrix.csv", "metrics.json", "sha256.json", "checkpoints"}

        about = json.loads((folder / "run.json").read_text())
        assert {"config", "seed", "versions", "commit", "method", "benchmark", "tasks"} <= about.keys()
        assert about["method"] == "ER"
        assert about["seed"] == 0
        assert about["versions"].keys() >= {"bace", "torch", "python"}
        assert config_from(about["config"]) == config_from(tiny.settings(modality, method="er"))
        assert [len(task["classes"]) for task in about["tasks"]] == ([5, 2, 4] if modality == "token" else [2, 1, 2])

        rows = list(csv.reader((folder / "matrix.csv").open()))
        assert rows[0] == ["task", "1", "2", "3"]
        filled = [[cell != "" for cell in row] for row in rows[1:]]
        assert filled == [[True] * 2 + [False] * 2, [True] * 3 + [False], [True] * 4]
        matrix = [[float(cell) for cell in row[1:] if cell] for row in rows[1:]]
        assert all(0 <= score <= 100 for row in matrix for score in row)

        metrics = json.loads((folder / "metrics.json").read_text())
        assert {"A_last", "A_avg", "A_new", "FGT", "FWT", "seconds"} <= metrics.keys()
        assert metrics["A_last"] == pytest.approx(sum(matrix[2]) / 3)
        assert metrics["A_avg"] == pytest.approx(sum(sum(row) / len(row) for row in matrix) / 3)
        assert metrics["A_new"] == pytest.approx((matrix[1][1] + matrix[2][2]) / 2)
        best = [max(matrix[0][0], matrix[1][0]), matrix[1][1]]
        assert metrics["FGT"] == pytest.approx((best[0] - matrix[2][0] + best[1] - matrix[2][1]) / 2)
        assert metrics["seconds"] > 0

        events = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        assert [e["scores"] for e in events if e["event"] == "task"] == matrix
        assert len([e for e in events if e["event"] == "epoch"]) == 3 * 2
        assert len(list((folder / "checkpoints").iterdir())) == 2  # the value of checkpoint.keep


def test_checkpoint_interval_and_number_kept_are_settings(tiny: Any, tmp_path: Path) -> None:
    words = flags(tiny, "image", **{"checkpoint.every": 2, "checkpoint.keep": 3})
    assert main(["run", *words, "--out", str(tmp_path / "x")]) == 0
    numbers = sorted(int(path.name) for path in (tmp_path / "x" / "checkpoints").iterdir())
    assert len(numbers) == 3
    assert numbers[-1] > 6  # three at the ends of tasks, and those in between


def test_run_prints_its_numbers_and_its_folder(tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = say(capsys, "run", *flags(tiny, "image", method="seq"), "--out", str(tmp_path / "x"))
    metrics = json.loads((tmp_path / "x" / "metrics.json").read_text())
    for key in ("A_last", "A_avg", "A_new", "FGT", "FWT", "seconds"):
        assert f"{key} {metrics[key]:.2f}" in out
    assert f"run folder: {tmp_path / 'x'}" in out


def test_the_numbers_of_entities_are_of_seqevals_macro_f1_with_the_others_beside_it_and_no_row_accuracy(
    runs: dict[str, Path], tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = say(capsys, "run", *flags(tiny, "token", method="seq"), "--out", str(tmp_path / "x"))
    assert "(of seqeval macro F1)" in out
    metrics = json.loads((tmp_path / "x" / "metrics.json").read_text())
    assert metrics["score"] == "seqeval macro F1"
    assert metrics["A_last"] == pytest.approx(sum(scores["macro_f1"] for scores in metrics["entities"]) / 3)
    assert not {"sample_accuracy", "per_class", "confusion"} & metrics.keys()
    assert metrics["per_type"].keys() <= {"person", "place", "thing", "event", "time"}
    assert len(metrics["per_type"]) >= 3  # every type in the test data
    own = [scores["macro_f1_own"] for scores in metrics["entities"]]
    about = json.loads((tmp_path / "x" / "run.json").read_text())
    for task, mean in zip(about["tasks"], own, strict=True):
        kinds = {name[2:] for name in task["classes"] if name != "O"}
        assert mean == pytest.approx(sum(metrics["per_type"][kind] for kind in kinds) / len(kinds))
    log = [json.loads(line) for line in (tmp_path / "x" / "log.jsonl").read_text().splitlines()]
    tasks = [event for event in log if event["event"] == "task"]
    for name in ("macro_f1_own", "micro_f1"):
        assert [len(event[name]) for event in tasks] == [1, 2, 3]
        assert tasks[-1][name] == [scores[name] for scores in metrics["entities"]]
    page = tmp_path / "page.html"
    say(capsys, "report", str(tmp_path / "x"), "--out", str(page))
    assert "Seqeval macro F1 over tasks" in page.read_text()
    say(capsys, "report", str(runs["text"]), "--out", str(page))
    assert "Accuracy over tasks" in page.read_text()


def test_run_in_python_is_the_run_of_the_command_line(runs: dict[str, Path], tiny: Any, tmp_path: Path) -> None:
    result = bace.run(
        benchmark={"name": "my-images", "path": str(tiny.folder / "pictures"), "tasks": [2, 1, 2]},
        method="ER",
        backbone=tiny.vit,
        memory=10,
        train={"epochs": 2, "batch_size": 8, "lr": 0.01},
        out=tmp_path / "x",
    )
    assert without_seconds(tmp_path / "x") == without_seconds(runs["image"])
    assert (tmp_path / "x" / "log.jsonl").read_text() == (runs["image"] / "log.jsonl").read_text()
    kept_nothing = bace.run(tiny.settings("image"), method="er")
    assert kept_nothing.folder is None
    assert kept_nothing.matrix == result.matrix
    assert bace.run(tiny.settings("image"), method="er", seed=1).matrix != result.matrix


MINE = """
from pathlib import Path
import torch.nn.functional as F
from bace import Method

class MyMethod(Method):
    '''A user's own.

    Args:
        scale: of the loss.
    '''

    title = "Mine"

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def loss(self, batch):
        if self.now.task == 1 and self.now.epoch == 1 and Path("stop").exists():
            raise KeyboardInterrupt
        return {"scaled": self.scale * F.cross_entropy(self.model(batch).logits, batch.targets)}
"""


@pytest.fixture
def my_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A user's module in the working folder."""
    (tmp_path / "mypackage.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mypackage", raising=False)
    return "mypackage.MyMethod"


def test_a_class_of_the_users_own_is_a_method_with_flags(
    tiny: Any, my_method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = flags(tiny, "text", method=my_method)
    page = say(capsys, "run", *words, "--method.scale=2", "--help")
    assert re.search(r"--method.scale SCALE\s+of the loss. \(type: float, default: 2.0\)", page)
    assert main(["run", *words, "--method.scale", "2", "--out", "mine"]) == 0
    about = json.loads(Path("mine/run.json").read_text())
    assert about["method"] == "Mine"
    assert about["config"]["method"] == {"name": my_method, "scale": 2.0}
    first = json.loads(Path("mine/log.jsonl").read_text().splitlines()[1])  # line 0 reports the memory it needs
    main(["run", *flags(tiny, "text", method="seq"), "--out", "seq"])
    same = json.loads(Path("seq/log.jsonl").read_text().splitlines()[1])  # line 0 reports the memory it needs
    assert first["terms"].keys() == {"scaled"}
    assert first["loss"] > 1.5 * same["loss"]  # about twice the loss of plain fine-tuning, which falls more slowly
    assert len(bace.load("mine").predict(["w1 w2", "w11"])) == 2


def test_the_working_folder_is_searched_for_a_users_class(tiny: Any, my_method: str, tmp_path: Path) -> None:
    """The installed `bace` script does not search the working folder by itself."""
    code = "import sys; sys.path = [p for p in sys.path if p]; from bace.cli.main import main; sys.exit(main())"
    words = ["run", "--method", my_method, "--print_config"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "scale: 1.0" in done.stdout


def test_a_stopped_run_is_continued_to_the_same_result(
    tiny: Any, my_method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = flags(tiny, "image", method=my_method, **{"checkpoint.every": 2})
    assert main(["run", *words, "--out", "straight"]) == 0
    Path("stop").touch()
    assert main(["run", *words, "--out", "stopped"]) == 130
    assert "--resume" in capsys.readouterr().err
    assert not Path("stopped/metrics.json").exists()
    Path("stop").unlink()
    assert "run folder: stopped" in say(capsys, "run", "--resume", "stopped")
    assert without_seconds(Path("stopped")) == without_seconds(Path("straight"))
    assert Path("stopped/log.jsonl").read_text() == Path("straight/log.jsonl").read_text()


# -- the same command again


def test_the_same_command_with_out_shows_what_is_finished_and_continues_what_is_not(
    tiny: Any, my_method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", *flags(tiny, "image", method=my_method), "--out", "mine"]
    assert main(words) == 0
    said = capsys.readouterr()
    stamp = Path("mine/metrics.json").stat().st_mtime_ns
    assert main(words) == 0
    again = capsys.readouterr()
    assert "kept in mine, finished before" in again.err
    assert again.out == said.out
    assert Path("mine/metrics.json").stat().st_mtime_ns == stamp
    Path("mine/metrics.json").unlink()  # as if it had been killed at its end
    assert main(words) == 0
    assert "kept in mine, continued" in capsys.readouterr().err
    assert main([*words, "--train.epochs", "1"]) == 2
    assert "holds a run with other settings (train.epochs)" in capsys.readouterr().err


def test_a_run_without_out_is_kept_in_a_folder_that_is_said_at_the_start(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["run", *flags(tiny, "image", method="bace", **{"method.W0": 1.0, "seed": 4})]
    assert main(words) == 0
    said = capsys.readouterr()
    folder = Path("runs/my-images-BaCE-W0=1.0-4")
    assert said.err.splitlines()[0] == f"BaCE (W0=1.0) on my-images, seed 4, kept in {folder}"
    assert (folder / "metrics.json").exists()
    stamp = (folder / "metrics.json").stat().st_mtime_ns
    assert main(words) == 0  # finished: shown again
    again = capsys.readouterr()
    assert "finished before" in again.err
    assert again.out == said.out
    (folder / "metrics.json").unlink()  # as if it had been killed at its end
    assert main(words) == 0
    assert "continued" in capsys.readouterr().err
    assert (folder / "metrics.json").stat().st_mtime_ns > stamp


def test_other_settings_in_the_default_folder_are_refused_and_named(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["run", *flags(tiny, "text")]
    assert main(words) == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    assert main([*words, "--train.epochs", "1"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "'runs/my-texts-ER-0' holds a run with other settings (train.epochs): choose another folder" in error
    assert "--out" in error
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.json")} == before


# -- progress


def test_a_line_a_task_is_printed_also_where_no_terminal_is(
    tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    say(capsys, "run", *flags(tiny, "image"), "--out", str(tmp_path / "x"))
    capsys.readouterr()
    told: list[str] = []
    result = bace.run(tiny.settings("image", method="er"), tell=told.append)
    matrix = result.matrix
    lines = [line for line in told if re.match(r"task \d/", line)]
    assert re.fullmatch(rf"task 1/3: A_t {matrix[0][0]:.2f}, \d+ s left", lines[0])
    assert re.fullmatch(rf"task 2/3: A_t {sum(matrix[1]) / 2:.2f}, A_new {matrix[1][1]:.2f}, \d+ s left", lines[1])
    new = (matrix[1][1] + matrix[2][2]) / 2
    assert lines[2] == f"task 3/3: A_t {sum(matrix[2]) / 3:.2f}, A_new {new:.2f}"  # no time is left
    assert main(["run", *flags(tiny, "image"), "--out", str(tmp_path / "y")]) == 0
    printed = [line for line in capsys.readouterr().err.splitlines() if re.match(r"task \d/", line)]
    assert [line.partition(" s left")[0].rpartition(",")[0] for line in printed[:2]] == [
        line.partition(" s left")[0].rpartition(",")[0] for line in lines[:2]
    ]
    assert printed[2] == lines[2]


def test_the_bar_shows_the_loss_of_the_last_epoch_the_score_and_the_time_left(tiny: Any) -> None:
    shown: list[tuple[float, str]] = []
    bace.run(tiny.settings("image", method="er"), show=lambda done, text: shown.append((done, text)))
    shares = [done for done, _ in shown]
    assert shares == sorted(shares)
    assert shown[0][1] == "task 1/3 main epoch 1/2"  # nothing is known yet
    assert re.fullmatch(r"task 1/3 main epoch 2/2, loss [\d.]+, \d+ s left", shown[5][1])
    assert re.search(r"task 3/3 main epoch 2/2, loss [\d.]+, A_t [\d.]+, \d+ s left", shown[-2][1])


@pytest.mark.parametrize(("seconds", "words"), [(40.4, "40 s"), (89, "89 s"), (600, "10 min"), (9000, "2.5 h")])
def test_durations_have_as_many_digits_as_an_estimate_deserves(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_the_bar_is_drawn_on_a_terminal_and_lines_stay_above_it(tiny: Any, tmp_path: Path) -> None:
    """Run a command on a pseudo-terminal; only the results go to standard output."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 150, 0, 0))
    command = [sys.executable, "-m", "bace", "run", *flags(tiny, "image"), "--out", str(tmp_path / "x")]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env={**os.environ, "TERM": "xterm"})
    os.close(theirs)
    seen = b""
    with contextlib.suppress(OSError):  # the end of a pseudo-terminal raises an error
        while part := os.read(ours, 4096):
            seen += part
    os.close(ours)
    out, _ = child.communicate()
    assert child.returncode == 0
    text = seen.decode()
    assert "task 3/3: A_t" in text
    assert re.search(r"ER on my-images, seed 0.*task \d/3 main epoch", text)
    assert re.fullmatch(r"networks and memory held: .*\nA_last .*\nrun folder: .*\n", out.decode())


# -- compare and report


def test_compare_makes_one_table_and_skips_what_is_finished(
    tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [word for word in flags(tiny, "image") if not word.startswith("--method")]
    words = ["compare", *given, "--seeds", "2", "--out", str(tmp_path / "c")]
    words += ["--method", "ER", "BaCE(W0=1, alpha=0)", "BaCE"]
    assert main(words) == 0
    table, told = capsys.readouterr()
    assert "run 2 of 6: BaCE (alpha=0.0, W0=1.0), seed 0\n" in told
    assert "run 6 of 6: BaCE, seed 1\n" in told
    assert told.count("task 3/3: A_t") == 6
    for label in ("ER ", "BaCE (alpha=0, W0=1) ", "BaCE (alpha=1, W0=0.95) "):
        line = next(line for line in table.splitlines() if line.startswith(label))
        assert re.match(rf"{re.escape(label)} *2 +\d", line)  # two seeds
    folders = {path.name for path in (tmp_path / "c").iterdir()}
    labels = ("ER", "BaCE", "BaCE-alpha=0.0-W0=1.0")
    assert folders == {f"{label}-seed{seed}" for label in labels for seed in (0, 1)} | {"report.html"}
    changed = json.loads((tmp_path / "c" / "BaCE-alpha=0.0-W0=1.0-seed1" / "run.json").read_text())
    assert changed["seed"] == 1
    assert (changed["config"]["method"]["W0"], changed["config"]["method"]["alpha"]) == (1.0, 0.0)

    page = tmp_path / "c" / "report.html"
    assert "ER" in page.read_text()
    page.unlink()
    (tmp_path / "c" / "ER-seed1" / "metrics.json").unlink()  # this run is not finished
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "c").glob("*/metrics.json")}
    assert len(stamps) == 5
    assert main(words) == 0
    again, told = capsys.readouterr()
    assert ": ER, seed 1, continued\n" in told
    assert "BaCE (alpha=0.0, W0=1.0), seed 1: finished before\n" in told
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert (tmp_path / "c" / "ER-seed1" / "metrics.json").exists()
    assert page.exists()
    assert numbers(again) == numbers(table)

    assert main([*words, "--memory", "7"]) == 2  # these folders hold runs with other settings
    assert "other settings" in capsys.readouterr().err


def test_a_comparison_without_out_is_kept_under_the_name_of_its_benchmark(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [word for word in flags(tiny, "text") if not word.startswith("--method")]
    assert main(["compare", *given, "--method", "seq"]) == 0
    out, told = capsys.readouterr()
    assert told.splitlines()[0] == "methods: 1, seeds: 1, on my-texts, kept in runs/my-texts"
    assert "page: runs/my-texts/report.html" in out
    assert main(["compare", *given, "--method", "SEQ"]) == 0  # another spelling of the same method
    assert "finished before" in capsys.readouterr().err


def numbers(table: str) -> list[str]:
    """A table's lines without the time that the runs took."""
    return [re.sub(r" +[\d.]+( ± [\d.]+)?\s*$", "", line) for line in table.splitlines()]


def test_compare_in_python_is_the_command_with_a_table(tiny: Any, tmp_path: Path) -> None:
    told: list[str] = []
    settings = {**tiny.settings("text"), "train.epochs": 1}
    found = bace.compare(["SEQ", "BaCE(W0=1)"], seeds=2, out=tmp_path / "c", tell=told.append, **settings)
    assert [row.label for row in found.rows] == ["SEQ", "BaCE (W0=1)"]
    assert any(line.startswith("run 4 of 4: BaCE (W0=1.0), seed 1") for line in told)
    frame = found.frame
    assert list(frame.columns[:5]) == ["benchmark", "method", "seeds", "A_last", "A_last_std"]
    metrics = [json.loads((tmp_path / "c" / f"SEQ-seed{seed}" / "metrics.json").read_text()) for seed in (0, 1)]
    assert frame.loc[0, "A_last"] == pytest.approx(sum(m["A_last"] for m in metrics) / 2)
    lines = repr(found).splitlines()
    assert lines[0] == "my-texts"
    assert re.match(r"BaCE \(W0=1\)  2 ", lines[3])
    assert "<td>BaCE (W0=1)</td>" in found._repr_html_()
    assert found.page(tmp_path / "page.html").read_text().count("BaCE (W0=1)") > 1
    stamp = (tmp_path / "c" / "SEQ-seed0" / "metrics.json").stat().st_mtime_ns
    again = bace.compare("SEQ", out=tmp_path / "c", **settings)
    assert (tmp_path / "c" / "SEQ-seed0" / "metrics.json").stat().st_mtime_ns == stamp
    assert [row.seeds for row in again.rows] == [(0,)]
    for bad in ({"methods": [], "seeds": 1}, {"methods": "SEQ", "seeds": 0}, {"methods": "SEQ", "method.alpha": 1}):
        with pytest.raises(ConfigError):
            bace.compare(**bad)


def test_a_result_is_shown_in_a_line_and_in_a_notebook(tiny: Any) -> None:
    result = bace.run(tiny.settings("image", method="seq"))
    last = f"{result.metrics['A_last']:.2f}"
    assert repr(result).startswith(f"<Result of SEQ: A_last {last}, A_avg ")
    assert len(repr(result)) < 150
    shown = result._repr_html_()
    assert f"<td>{last}</td>" in shown
    assert f"<td>after 3</td><td>{result.matrix[2][0]:.1f}</td>" in shown


def test_dir_names_what_is_meant_to_be_used() -> None:
    names = [name for name in dir(bace) if not name.startswith("_")]
    assert names == sorted(bace.__all__, key=str)
    assert all(getattr(bace, name).__doc__ for name in names)


def test_compare_takes_the_method_of_the_file_when_none_is_asked_for(
    tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(tiny.settings("text", method={"name": "ER", "mode": "concat"})))
    say(capsys, "compare", "--config", str(tmp_path / "my.yaml"), "--seed", "4", "--out", str(tmp_path / "c"))
    assert {path.name for path in (tmp_path / "c").iterdir()} == {"ER-mode=concat-seed4", "report.html"}


def test_report_of_finished_runs(runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    table = say(capsys, "report", str(runs["image"]), str(runs["text"]), "--out", str(page))
    metrics = json.loads((runs["image"] / "metrics.json").read_text())
    assert "my-images" in table
    assert "my-texts" in table
    assert f"{metrics['A_last']:.1f}" in table
    assert f"page: {page}" in table
    assert page.read_text().startswith("<!doctype html>") or "<html" in page.read_text()[:200].lower()


# -- predict


def test_predict_names_the_class_of_each_picture(
    runs: dict[str, Path], tiny: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(tiny.folder / "pictures" / "test" / name / "0.png") for name in tiny.classes]
    lines = [line.split("\t") for line in say(capsys, "predict", str(runs["image"]), *files).splitlines()]
    rows = [json.loads(line) for line in say(capsys, "predict", "--json", str(runs["image"]), *files).splitlines()]
    expected = bace.load(str(runs["image"])).predict(files)
    assert [row["where"] for row in rows] == files
    assert [row["class"] for row in rows] == expected
    assert all(1 / 5 <= row["probability"] <= 1 for row in rows)  # a share of the soft-max over five classes
    assert lines == [[row["where"], row["class"], str(row["probability"])] for row in rows]


def test_predicting_the_test_set_gives_the_accuracy_of_the_run(
    runs: dict[str, Path], tiny: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    files = sorted((tiny.folder / "pictures" / "test").glob("*/*.png"))
    out = say(capsys, "predict", str(runs["image"]), *map(str, files)).splitlines()
    right = sum(line.split("\t")[1] == file.parent.name for line, file in zip(out, files, strict=True))
    metrics = json.loads((runs["image"] / "metrics.json").read_text())
    assert 100 * right / len(files) == pytest.approx(metrics["sample_accuracy"])


def test_a_run_that_trained_without_a_memory_of_every_class_is_not_calibrated(tiny: Any) -> None:
    """What it has forgotten would count as sure as what it has just learned. Statistics are the same for all tasks."""
    found = {name: bace.run(**tiny.settings("image", method=name)).metrics for name in ("seq", "simplecil", "er")}
    assert {name: metrics.get("temperature") is None for name, metrics in found.items()} == {
        "seq": True, "simplecil": False, "er": False,
    }  # fmt: skip


@pytest.mark.filterwarnings("always:the probabilities of the run")
def test_the_model_of_a_run_is_calibrated_as_a_learner_is_and_never_with_test_examples(
    tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last task's training examples and the memory fit the temperature. Without it, probabilities are called
    uncalibrated wherever the model is opened."""
    run, file = tmp_path / "run", str(tiny.folder / "pictures" / "test" / "ant" / "0.png")
    result = bace.run(**tiny.settings("image", method="er"), out=run)
    metrics = json.loads((run / "metrics.json").read_text())
    stream, method = result.method.stream, result.method
    asked = torch.unique(torch.cat([stream[-1].train, method.remembered()]))
    with stream.licence("test", asked):
        scores, targets = method.predict(stream.batch(asked)).double(), stream.targets[asked]
    assert not torch.isin(asked, torch.cat([task.test for task in stream])).any()
    assert metrics["temperature"] == fit_temperature(scores, targets) != 1
    shares = [torch.softmax(scores / t, 1) for t in (1.0, metrics["temperature"])]
    assert metrics["training_ece"] == pytest.approx([calibration_error(p, targets) for p in shares], abs=1e-4)
    assert "calibration" not in " ".join(metrics["licences"])

    model = bace.load(str(run))
    raw = torch.from_numpy(model.decision_function([file])).double()
    expected = torch.softmax(raw / metrics["temperature"], 1).numpy()
    assert model.predict_proba([file]) == pytest.approx(expected, abs=1e-6)
    assert main(["predict", str(run), file]) == 0
    assert "not calibrated" not in capsys.readouterr().err

    del metrics["temperature"], metrics["training_ece"]  # as an older version wrote it
    (run / "metrics.json").write_text(json.dumps(metrics))
    assert main(["predict", str(run), file]) == 0
    assert "are not calibrated: its metrics.json has no temperature" in capsys.readouterr().err
    (run / "metrics.json").write_text(json.dumps({**metrics, "temperature": -1}))
    assert main(["predict", str(run), file]) == 2
    assert "'temperature' is -1.0, not a positive number" in capsys.readouterr().err


def test_predict_calls_examples_below_a_probability_unknown_and_shows_the_probability(
    runs: dict[str, Path], tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(tiny.folder / "pictures" / "test" / name / "0.png") for name in tiny.classes]
    run = str(runs["image"])
    shares = bace.load(run).predict_proba(files).max(1)
    limit = float(sorted(shares)[2])  # two of five are below it
    rows, sure = rows_of(capsys, run, *files, "--reject", repr(limit)), rows_of(capsys, run, *files)
    expected = ["unknown" if share < limit else row["class"] for share, row in zip(shares, sure, strict=True)]
    assert [row["class"] for row in rows] == expected == bace.load(run).predict(files, reject=limit)
    assert expected.count("unknown") == 2
    assert [row["probability"] for row in rows] == [row["probability"] for row in sure]
    lines = say(capsys, "predict", run, *files, "--reject", repr(limit)).splitlines()
    assert lines == ["\t".join(map(str, row.values())) for row in rows]
    assert main(["predict", run, files[0], "--reject", "1.5"]) == 2
    assert "reject is 1.5: it must be a probability" in capsys.readouterr().err
    (tmp_path / "s.txt").write_text("w1 w2\n")
    assert main(["predict", str(runs["token"]), str(tmp_path / "s.txt"), "--reject", "0.5"]) == 2
    assert "reject is 0.5, and this model tags words" in capsys.readouterr().err


def test_predict_reads_texts_line_by_line(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("w1 w2 w3\n\nw41 w42\n")
    rows = [json.loads(line) for line in say(capsys, "predict", str(runs["text"]), str(file), "--json").splitlines()]
    assert [row["where"] for row in rows] == [f"{file}:1", f"{file}:3"]  # numbers as an editor shows them
    assert [row["class"] for row in rows] == bace.load(str(runs["text"])).predict(["w1 w2 w3", "w41 w42"])


def test_predict_says_where_a_text_goes_that_is_no_file(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", str(runs["text"]), "where is my parcel"]) == 2
    assert "there is no file 'where is my parcel': check the path; `-` in its place reads" in capsys.readouterr().err
    assert main(["predict", "nowhere", "a.png"]) == 2
    assert "there is no folder 'nowhere': check the path" in capsys.readouterr().err


def test_predict_tags_every_word_of_each_line(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "s.txt").write_text("w50 w1 w5s\nw41\n")
    (tmp_path / "empty.txt").touch()
    rows = [
        json.loads(line)
        for line in say(capsys, "predict", str(runs["token"]), str(tmp_path / "s.txt"), "--json").splitlines()
    ]
    assert [row["words"] for row in rows] == [["w50", "w1", "w5s"], ["w41"]]
    tags = {"O"} | {f"{prefix}-{kind}" for prefix in "BI" for kind in ("person", "place", "thing", "event", "time")}
    assert [len(row["tags"]) for row in rows] == [3, 1]
    assert {tag for row in rows for tag in row["tags"]} <= tags
    plain = say(capsys, "predict", str(runs["token"]), str(tmp_path / "s.txt")).splitlines()
    assert plain[0].split("\t")[1:3] == ["w50 w1 w5s", " ".join(rows[0]["tags"])]
    assert plain[0].split("\t")[3] == " ".join(
        f'{e["start"]}-{e["end"]} {e["type"]} "{e["text"]}"' for e in rows[0]["entities"]
    )
    assert say(capsys, "predict", str(runs["token"]), str(tmp_path / "empty.txt")) == ""


def test_predict_marks_entities_in_the_characters_of_each_line(
    tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learning = {"method": "seq", "benchmark.tasks": [5], "train.epochs": 20, "train.optimiser": "adamw"}
    run = str(tmp_path / "run")
    say(capsys, "run", *flags(tiny, "token", **learning), "--out", run)
    lines = ["  w55 (w1 w5s), w11 w14s.", "w21 w24s w30 w34s w41 w45s"]
    (tmp_path / "s.txt").write_text("\n".join(lines))
    out = say(capsys, "predict", run, str(tmp_path / "s.txt"), "--json").splitlines()
    rows = [json.loads(line) for line in out]
    assert rows[0]["words"] == ["w55", "(", "w1", "w5s", ")", ",", "w11", "w14s", "."]
    found = bace.load(run).entities(lines)
    assert [row["entities"] for row in rows] == [[span._asdict() for span in spans] for spans in found]
    assert any(found)


def rows_of(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in say(capsys, "predict", "--json", *words).splitlines()]


def test_predict_reads_the_column_of_a_table_and_not_its_header_or_labels(
    runs: dict[str, Path], tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of(capsys, str(runs["text"]), str(tiny.folder / "texts" / "test.csv"))
    assert len(rows) == 6 * 5
    assert rows[0]["where"].endswith("test.csv, line 2")
    truth = [line.rpartition(",")[2] for line in (tiny.folder / "texts" / "test.csv").read_text().splitlines()[1:]]
    right = sum(row["class"] == label for row, label in zip(rows, truth, strict=True))
    assert 100 * right / 30 == pytest.approx(json.loads((runs["text"] / "metrics.json").read_text())["sample_accuracy"])
    (tmp_path / "asked.jsonl").write_text('{"id": "7", "said": "w1 w2"}\n{"id": "8", "said": "w11"}\n')
    asked = rows_of(capsys, str(runs["text"]), str(tmp_path / "asked.jsonl"), "--column", "said")
    assert [row["class"] for row in asked] == bace.load(str(runs["text"])).predict(["w1 w2", "w11"])
    assert main(["predict", str(runs["text"]), str(tmp_path / "asked.jsonl"), "--column", "text"]) == 2
    error = capsys.readouterr().err
    assert "no column 'text'" in error
    assert "Columns: id (string), said (string)" in error


def test_predict_reads_conll_files_sentence_by_sentence(
    runs: dict[str, Path], tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "words.conll").write_text("w50\nw1\n\nw41\n")  # without tags, as before annotation
    (tmp_path / "tagged.txt").write_text("-DOCSTART- -X- O\n\nw50 NN O\nw1 NN B-person\n\nw41 NN O\n")
    (tmp_path / "sentences.txt").write_text("w50 w1\nw41\n")
    found = [rows_of(capsys, str(runs["token"]), str(tmp_path / name)) for name in ("words.conll", "tagged.txt")]
    assert [row["words"] for row in found[0]] == [["w50", "w1"], ["w41"]]
    assert [row["where"].rpartition(":")[2] for row in found[1]] == ["3", "6"]
    lines = rows_of(capsys, str(runs["token"]), str(tmp_path / "sentences.txt"))
    keys = ("words", "tags", "entities")
    assert [[row[key] for key in keys] for row in found[0]] == [[row[key] for key in keys] for row in lines]
    assert [row["tags"] for row in found[1]] == [row["tags"] for row in lines]
    (tmp_path / "t.csv").write_text("text\nw50 w1\n")
    assert rows_of(capsys, str(runs["token"]), str(tmp_path / "t.csv"))[0]["tags"] == lines[0]["tags"]


def test_predict_takes_folders_and_the_standard_input(
    runs: dict[str, Path],
    tiny: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    test = tiny.folder / "pictures" / "test"
    files = sorted(str(path) for path in test.rglob("*.png"))
    rows = rows_of(capsys, str(runs["image"]), str(test))
    assert [row["where"] for row in rows] == files
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(files[:3]) + "\n"))
    assert rows_of(capsys, str(runs["image"]), "-") == rows[:3]
    (tmp_path / "list.csv").write_text("image\n0.png\n1.png\n")
    for name in ("0.png", "1.png"):
        (tmp_path / name).write_bytes((test / "ant" / name).read_bytes())
    listed = rows_of(capsys, str(runs["image"]), str(tmp_path / "list.csv"))
    assert [row["class"] for row in listed] == [row["class"] for row in rows[:2]]
    monkeypatch.setattr(sys, "stdin", io.StringIO("w1 w2\n\nw11\n"))
    assert [row["where"] for row in rows_of(capsys, str(runs["text"]), "-")] == ["-:1", "-:3"]
    assert len(rows_of(capsys, str(runs["text"]), str(tiny.folder / "texts"))) == 16 * 5  # train.csv and test.csv
    assert main(["predict", str(runs["text"]), files[0]]) == 2
    assert "is a picture, and this model takes texts" in capsys.readouterr().err
    assert main(["predict", str(runs["text"]), str(test)]) == 2
    assert "holds pictures, and this model takes texts" in capsys.readouterr().err


def test_predict_opens_comparisons_and_saved_learners(
    runs: dict[str, Path], tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts.txt").write_text("w1 w2 w3\nw41 w42\n")
    best = shutil.copytree(runs["text"], tmp_path / "c" / "best")
    worse = shutil.copytree(runs["text"], tmp_path / "c" / "worse")
    metrics = json.loads((worse / "metrics.json").read_text())
    (worse / "metrics.json").write_text(json.dumps({**metrics, "A_last": metrics["A_last"] - 1}))
    expected = rows_of(capsys, str(best), str(tmp_path / "texts.txt"))
    assert main(["predict", str(tmp_path / "c"), str(tmp_path / "texts.txt"), "--json"]) == 0
    out, told = capsys.readouterr()
    assert [json.loads(line) for line in out.splitlines()] == expected
    assert f"{best} has the highest A_last ({metrics['A_last']:.2f})" in told
    learner = bace.Learner("seq", backbone=tiny.bert, **{"train.epochs": 1})
    learner.partial_fit(["w1 w2", "w41"], ["one", "four"]).save(tmp_path / "learner")
    taught = rows_of(capsys, str(tmp_path / "learner"), str(tmp_path / "texts.txt"))
    assert [row["class"] for row in taught] == learner.predict(["w1 w2 w3", "w41 w42"])


def test_predict_names_the_picture_that_it_cannot_read(
    tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures = tmp_path / "pictures"
    shutil.copytree(tiny.folder / "pictures" / "train", pictures)
    words = ["--new", "--backbone", tiny.vit, "--method", "simplecil"]
    say(capsys, "learn", str(tmp_path / "model"), str(pictures), *words)
    broken = pictures / "bee" / "größe.png"
    broken.write_bytes((pictures / "bee" / "0.png").read_bytes()[:60])
    assert main(["predict", str(tmp_path / "model"), str(pictures)]) == 2
    assert f"the picture '{broken}' cannot be decoded (image file is truncated)" in capsys.readouterr().err


# -- learn


def test_learn_begins_a_model_and_teaches_it_further_classes(
    tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tmp_path / "model")
    (tmp_path / "first.csv").write_text("text,label\nw1 w2,one\nw3,one\nw11 w12,two\nw13,two\n")
    (tmp_path / "second.csv").write_text("text,label\nw21 w22,three\nw23,three\n")
    words = ["--backbone", tiny.bert, "--method", "er", "--memory", "6"]
    (tmp_path / "more.yaml").write_text("train: {epochs: 1}\n")
    words += ["--config", str(tmp_path / "more.yaml")]
    assert f"{model} knows 2 classes: one, two" in say(
        capsys, "learn", model, str(tmp_path / "first.csv"), "--new", *words
    )
    assert "knows 3 classes: one, two, three" in say(capsys, "learn", model, str(tmp_path / "second.csv"))
    assert bace.Learner.load(model).classes_ == ["one", "two", "three"]
    assert len(rows_of(capsys, model, str(tmp_path / "second.csv"))) == 2
    for bad in (["--new"], ["--memory", "9"]):
        assert main(["learn", model, str(tmp_path / "second.csv"), *bad]) == 2
    assert "add --new" in capsys.readouterr().err


def test_learn_keeps_the_columns_and_names_its_own_options_in_errors(
    tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, words = str(tmp_path / "model"), ["--config", str(tmp_path / "more.yaml")]
    (tmp_path / "more.yaml").write_text(f"method: simplecil\nbackbone: {tiny.bert}\n")
    (tmp_path / "first.csv").write_text("id,body,subject\n1,w1 w2,one\n2,w11 w12,two\n")
    (tmp_path / "second.csv").write_text("id,body,subject\n1,w21 w22,three\n")
    assert main(["learn", model, str(tmp_path / "first.csv"), "--new", *words]) == 2
    assert "Name them with --column and --label_column" in capsys.readouterr().err
    columns = ["--column", "body", "--label_column", "subject"]
    say(capsys, "learn", model, str(tmp_path / "first.csv"), "--new", *words, *columns)
    assert "knows 3 classes" in say(capsys, "learn", model, str(tmp_path / "second.csv"))
    assert len(rows_of(capsys, model, str(tmp_path / "second.csv"))) == 1
    sentences = tmp_path / "words.conll"
    sentences.write_text("w1 B-person\n")
    assert main(["learn", model, str(sentences), "--column", "tokens", "--label_column", "ner_tags"]) == 2
    assert "holds sentences, not texts: give it to a model of sentences" in capsys.readouterr().err


def test_learn_reads_texts_that_end_like_names_of_pictures_as_texts(
    tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --backbone, too, where the data decide which encoder it is."""
    shutil.copytree(tiny.bert, tmp_path / "bert-base-cased")
    monkeypatch.setenv("BACE_MODELS", str(tmp_path))
    (tmp_path / "files.csv").write_text("text,label\nw1.png,one\nw2.png,two\n")
    say(capsys, "learn", str(tmp_path / "model"), str(tmp_path / "files.csv"), "--new", "--method", "simplecil")
    assert bace.Learner.load(tmp_path / "model").modality == "text"


def test_a_model_whose_lesson_is_killed_is_as_it_was(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = bace.Learner("seq", backbone=tiny.bert, **{"train.epochs": 1})
    learner.partial_fit(["w1 w2", "w11"], ["one", "two"]).save(tmp_path / "model")
    before = learner.predict(["w1", "w12"])
    (tmp_path / "more.csv").write_text("text,label\nw21 w22,three\n")
    kills = {  # while it learns, while the new model is written, and when it is written but not yet in place
        "learn": "Trainer.learn = lambda *rest: end()",
        "write": "checkpoint.save_file = lambda *rest: end()",
        "place": "files.Path.replace = lambda *rest: end()",
    }
    for name, change in kills.items():
        code = (
            "import os, signal, sys\nfrom bace import files\nfrom bace.cli.main import main\n"
            "from bace.core import checkpoint\nfrom bace.core.trainer import Trainer\n"
            f"end = lambda: os.kill(os.getpid(), signal.SIGKILL)\n{change}\nmain(sys.argv[1:])"
        )
        words = ["learn", str(tmp_path / "model"), str(tmp_path / "more.csv")]
        child = processes.run(code, *words)
        assert child.returncode == -9, (name, child.stderr)
        again = bace.Learner.load(tmp_path / "model")
        assert again.classes_ == ["one", "two"], name
        assert again.predict(["w1", "w12"]) == before, name
    assert main(["learn", str(tmp_path / "model"), str(tmp_path / "more.csv")]) == 0
    assert bace.Learner.load(tmp_path / "model").classes_ == ["one", "two", "three"]


def test_a_class_in_a_file_is_a_method_and_a_folder_that_names_the_file_needs_trust(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("methods").mkdir()
    Path("methods/my-own.py").write_text("Path = __import__('pathlib').Path\nPath('ran').touch()\n" + MINE)
    name = "methods/my-own.py:MyMethod"
    assert main(["run", *flags(tiny, "text", method=name), "--method.scale", "2", "--out", "mine"]) == 0
    assert json.loads(Path("mine/run.json").read_text())["config"]["method"] == {"name": name, "scale": 2.0}
    for module in [known for known in sys.modules if known.startswith("bace_method_")]:
        monkeypatch.delitem(sys.modules, module)  # as in another process
    Path("ran").unlink()
    Path("texts.txt").write_text("w1 w2\n")
    assert main(["predict", "mine", "texts.txt"]) == 2
    error = capsys.readouterr().err
    assert f"method '{name}' is not part of bace: using it imports the file 'methods/my-own.py'" in error
    assert main(["report", "mine"]) == 0  # a report needs no method
    assert not Path("ran").exists()
    assert main(["predict", "mine", "texts.txt", "--trust"]) == 0
    assert Path("ran").exists()
    assert main(["run", "--method", "methods/other.py:MyMethod"]) == 2
    assert "methods/other.py" in capsys.readouterr().err
    assert main(["run", "--method", "methods/my-own.py:Absent"]) == 2
    assert "Absent" in capsys.readouterr().err


def test_a_users_method_without_title_or_summary_line_is_named_and_explained(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        "import bace",
        "class Plain(bace.Method):",
        '    """Args:',
        '        weight: how much it weighs."""',
        "    def __init__(self, weight: float = 1.0) -> None:",
        "        super().__init__()",
        "    def loss(self, batch):",
        "        return {}",
    ]
    (tmp_path / "plainly.py").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["run", "--method", "plainly.Plain", "--help"]) == 0
    assert "how much it weighs" in capsys.readouterr().out
    result = bace.run(tiny.settings("image", method="plainly.Plain"), out=tmp_path / "run")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["method"] == "Plain"
    assert "evaluation" in result.metrics["licences"]


def test_compare_reads_lists_in_method_settings() -> None:
    assert methods_asked(["BaCE(K=[1,2], W0=1)"], "digits") == [("BaCE", {"K": [1, 2], "W0": 1})]
    with pytest.raises(ConfigError, match="setting=value"):
        methods_asked(["BaCE(K=[1)"], "digits")


def test_a_run_says_that_a_task_was_hardly_learned_and_what_to_do(tiny: Any, tmp_path: Path, capsys: Any) -> None:
    settings = tiny.settings("image", method="er", **{"train.lr": 1e-9, "train.batch_size": 200, "measure.fwt": False})
    heard: list[str] = []
    bace.run(settings, tell=heard.append)
    said = " ".join(heard)
    assert re.search(
        "task 3 was hardly learned: [0-9]+% of its training examples are recognised; give more steps", said
    )
    assert "(train.epochs, now 2), another rate (train.lr, now 1e-09), or more examples" in said
    assert "of the old examples in memory are recognised: a larger memory" in said
    assert "an epoch of task 2 is one step: lower train.batch_size (now 200)" in said


def test_a_task_that_is_learned_later_is_no_reason_to_complain(tiny: Any) -> None:
    settings = tiny.settings("image", method="mtl", **{"method.only_last": True, "measure.fwt": False})
    heard: list[str] = []
    bace.run(settings, tell=heard.append)
    assert not [line for line in heard if "task 1 was hardly" in line or "task 2 was hardly" in line]


def test_a_run_that_learns_does_not_complain() -> None:
    heard: list[str] = []
    bace.run(benchmark="digits", method="slda", tell=heard.append, **{"benchmark.train_per_class": 40})
    assert not [line for line in heard if "learned" in line or "recognised" in line or "one step" in line]
