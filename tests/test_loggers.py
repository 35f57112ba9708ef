"""TensorBoard, Weights & Biases and MLflow contain everything in log.jsonl exactly once, even if the run was
interrupted. Tests read them with their own readers."""

import json
import struct
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import bace
from bace.errors import ConfigError
from bace.experiments.loggers import LOGGED, Loggers, Point, Sink, as_point
from bace.experiments.run_folder import load_run

NAMES = ("tensorboard", "wandb", "mlflow")
pytestmark = pytest.mark.xdist_group("loggers")  # all tests share one run
Logged = dict[str, list[tuple[int, float]]]  # by name: (step, value), in order


@pytest.fixture(scope="module")
def run(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was interrupted in the last epoch of its second task, after events that are in no checkpoint, and was
    then resumed."""
    folder = tmp_path_factory.mktemp("logged") / "run"

    def interrupt(share: float, text: str) -> None:
        if text.startswith("task 2/3 main epoch 2/2"):
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        for name in ("WANDB_MODE", "WANDB_PROJECT", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
            patch.delenv(name, raising=False)
        settings = tiny.settings("image", method="ER", log=list(NAMES))
        with pytest.raises(KeyboardInterrupt):
            bace.run(settings, out=folder, show=interrupt)
        before = (folder / "log.jsonl").read_text().splitlines()
        assert [json.loads(line)["event"] for line in before[-2:]] == ["transfer", "epoch"]
        bace.run(resume=folder)
    return folder


@pytest.fixture(scope="module")
def expected(run: Path) -> Logged:
    """The expected points, read from log.jsonl."""
    found: Logged = defaultdict(list)
    epochs = 0
    for line in (run / "log.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "epoch":
            epochs += 1
            found["epoch/loss"].append((epochs, event["loss"]))
            for name, value in event["terms"].items() if len(event["terms"]) > 1 else ():
                found[f"epoch/term {name}"].append((epochs, value))
        elif event["event"] == "task":
            found["task/A_t"].append((event["task"], event["A"]))
            for t, score in enumerate(event["scores"], 1):
                found[f"task/score of task {t}"].append((event["task"], score))
            found["task/kept bytes"].append((event["task"], event["kept"]))
        elif event["event"] == "transfer":
            found["task/before learning"].append((event["task"], event["before"]))
            found["task/by chance"].append((event["task"], event["chance"]))
    assert len(found["epoch/loss"]) == 6
    assert len(found["task/A_t"]) == 3
    return found


def check(found: Logged, expected: Logged, run: Path) -> None:
    """Each point appears once, in the same order, with the measures of the finished run."""
    final = {name.removeprefix("final/"): points for name, points in found.items() if name.startswith("final/")}
    assert {name: points for name, points in found.items() if not name.startswith("final/")}.keys() == expected.keys()
    for name, points in expected.items():
        assert [step for step, _ in found[name]] == [step for step, _ in points], name
        assert [value for _, value in found[name]] == pytest.approx([value for _, value in points], rel=1e-5), name
    metrics = json.loads((run / "metrics.json").read_text())
    assert {"A_last", "A_avg", "FGT", "seconds"} <= final.keys()
    for name, [(_, value)] in final.items():
        assert value == pytest.approx(metrics[name], rel=1e-5)


def test_tensorboard_has_every_point_once(run: Path, expected: Logged) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: Logged = defaultdict(list)
    files = sorted((run / "tensorboard").iterdir())
    assert len(files) == 2  # before and after the interruption
    for file in files:  # each separately, because the reader would hide repeated steps
        events = EventAccumulator(str(file)).Reload()
        for tag in events.Tags()["scalars"]:
            found[tag] += [(event.step, event.value) for event in events.Scalars(tag)]
    check(found, expected, run)
    together = EventAccumulator(str(run / "tensorboard")).Reload()
    assert [event.step for event in together.Scalars("epoch/loss")] == [1, 2, 3, 4, 5, 6]
    [settings] = together.Tensors("settings/text_summary")
    assert b"method.name: er" in settings.tensor_proto.string_val[0].lower()


def test_mlflow_has_every_point_once_in_one_run(run: Path, expected: Logged) -> None:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{run / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("bace")
    assert experiment is not None
    [logged] = client.search_runs([experiment.experiment_id])
    assert logged.info.status == "FINISHED"
    assert logged.data.params["method.name"].lower() == "er"
    assert logged.data.params["memory.size"] == "10"
    found: Logged = {}
    for name in logged.data.metrics:
        history = client.get_metric_history(logged.info.run_id, name)
        found[name] = sorted((point.step, point.value) for point in history)
    check(found, expected, run)


def records_of(content: bytes) -> Iterator[bytes]:
    """The records of a .wandb file, which is LevelDB's log after seven bytes. A record has one or several pieces
    (first, middle, last) in blocks of 32 KB. A piece follows its checksum (4 bytes), length (2) and kind (1)."""
    assert content[:4] == b":W&B"
    place, record = 7, b""
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:  # the rest of a block is too short for another piece
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack_from("<HB", content, place + 4)
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or last
            yield record
            record = b""


def test_wandb_has_every_point_once_in_two_parts_of_one_run(run: Path, expected: Logged) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    files = sorted(path for path in (run / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2
    assert files[0].name == files[1].name  # the same identity, which joins them when they are uploaded
    found: Logged = defaultdict(list)
    steps: list[int] = []
    for file in files:
        for data in records_of(file.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
                steps.append(row["_step"])
                for name, value in row.items():
                    if "/" in name:
                        found[name].append((row[name.partition("/")[0]], value))
            if record.WhichOneof("record_type") == "summary":
                for item in record.summary.update:
                    name = item.key or "/".join(item.nested_key)
                    if name.startswith("final/"):
                        found[name] = [(0, json.loads(item.value_json))]
    assert steps == sorted(set(steps))  # the lines of log.jsonl, each once
    check(found, expected, run)


def test_where_a_run_is_logged_does_not_change_it(run: Path, tiny: Any, tmp_path: Path) -> None:
    bace.run(tiny.settings("image", method="ER"), out=tmp_path / "plain")
    assert (tmp_path / "plain" / "log.jsonl").read_text() == (run / "log.jsonl").read_text()
    assert not (tmp_path / "plain" / LOGGED).exists()
    assert load_run(tmp_path / "plain").matrix == load_run(run).matrix


def test_numbers_of_events_are_points() -> None:
    event = {"event": "epoch", "task": 2, "loss": 3.0, "terms": {"new": 1.0, "old/ä": 2.0}}
    values = {"epoch/loss": 3.0, "epoch/term new": 1.0, "epoch/term old__": 2.0}
    assert as_point(event, 5, 9) == Point(values, "epoch", 5, 9)
    assert as_point({"event": "epoch", "task": 1, "loss": None, "terms": {}}, 1, 1) is None  # trained without gradient
    assert as_point({"event": "licence", "reason": "joint"}, 1, 1) is None


def test_a_log_that_fails_is_given_up_and_the_run_goes_on(run: Path, tmp_path: Path) -> None:
    def fail(point: Point) -> None:
        raise OSError("no room")

    written: list[Point] = []
    (tmp_path / "log.jsonl").write_text("")
    loggers = Loggers([], tmp_path, load_run(run))
    loggers.sinks = [Sink("bad", fail, lambda _: None), Sink("good", written.append, lambda _: None)]
    with pytest.warns(UserWarning, match="the log of bad is given up"):
        loggers({"event": "epoch", "task": 1, "loss": 1.0, "terms": {}})
    loggers({"event": "epoch", "task": 1, "loss": 0.5, "terms": {}})
    loggers.close(None)
    assert [point.values["epoch/loss"] for point in written] == [1.0, 0.5]


def test_what_cannot_be_logged_is_said(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="needs a run folder"):
        bace.run(tiny.settings("image", method="ER", log=["wandb"]))
    with pytest.raises(ConfigError, match="log"):
        bace.run(tiny.settings("image", method="ER", log=["paper"]), out=tmp_path / "run")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"bace-cil\[wandb\]"):
        bace.run(tiny.settings("image", method="ER", log=["wandb"]), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://here")
    with pytest.raises(ConfigError, match="the log of mlflow cannot be opened"):
        bace.run(tiny.settings("image", method="ER", log=["mlflow"]), out=tmp_path / "run")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / LOGGED).write_text("nonsense\n")
    (tmp_path / "other" / "log.jsonl").write_text("")
    with pytest.raises(ConfigError, match="is damaged"):
        Loggers([], tmp_path / "other", None)  # type: ignore[arg-type]
