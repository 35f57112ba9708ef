"""The benchmarks can be run: their parts are found, and a part that fails does not lose the table."""

import importlib
import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The module behind `python benchmarks`."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    yield SimpleNamespace(**runpy.run_path(str(FOLDER / "__main__.py"), run_name="bench"))
    for name in set(sys.modules) - before:  # `common` and others are names that any test may use
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(FOLDER)):
            del sys.modules[name]


def test_every_part_has_bars(bench: SimpleNamespace) -> None:
    for part in bench.PARTS:
        assert callable(importlib.import_module(part).bars)
    others = ("bank", "explanations", "imagenet", "imagenet_cost", "learner", "methods", "settings", "step_profile")
    for script in others:
        importlib.import_module(script)


def test_the_table_says_what_was_measured_what_it_must_be_and_what_failed(bench: SimpleNamespace) -> None:
    bar = bench.Bar
    bars = {"a": bar(1.0, 2.0), "b": bar(1.0, 2.0, least=True), "c": bar(3.0)}
    lines = bench.table(bars, {"d": "no such thing"}).splitlines()
    assert [line.split() for line in lines] == [
        ["a", "1.000", "<=", "2", "pass"],
        ["b", "1.000", ">=", "2", "FAIL"],
        ["c", "3.000"],
        ["d", "not", "measured", "(no", "such", "thing)"],
    ]
    assert json.loads(bench.as_json(bars)) == {
        "a": {"value": 1.0, "limit": 2.0, "pass": True},
        "b": {"value": 1.0, "limit": 2.0, "pass": False},
        "c": {"value": 3.0, "limit": None, "pass": True},
    }


def test_an_epoch_is_told_from_its_first_steps(bench: SimpleNamespace) -> None:
    common = importlib.import_module("common")
    assert common.least([[5.0, 1.0, 3.0], [4.0, 2.0, 2.0]]) == 4.0 + 1.0 + 2.0
    assert common.least([[5.0, 1.0, 3.0], [4.0, 2.0, 2.0]], steps=11) == pytest.approx(4.0 + 10 * 1.5)
    done = []

    def epoch(mark):
        for step in range(10):
            done.append(step)
            mark()

    assert len(common.step_times(epoch, 3)) == 3
    assert done == [0, 1, 2]
    assert len(common.step_times(epoch)) == 10


def test_the_simulation_of_imagenet_can_be_run(bench: SimpleNamespace) -> None:
    imagenet = importlib.import_module("imagenet")
    rows = {name: part(imagenet.TINY) for name, part in imagenet.PARTS.items()}
    assert all(row.seconds is not None or row.size for found in rows.values() for row in found)
    lines = imagenet.table([row for found in rows.values() for row in found]).splitlines()
    seconds = [float(line.split("|")[3].replace(",", "")) for line in lines[2:] if line.split("|")[3].strip() != "-"]
    assert seconds == sorted(seconds, reverse=True)
    assert len(lines) == 2 + sum(map(len, rows.values()))


def test_the_cost_of_imagenet_is_that_of_its_passes(bench: SimpleNamespace) -> None:
    cost = importlib.import_module("imagenet_cost")
    seen, tests = 1_281_167, 50_000 * 5.5
    assert cost.cost("SEQ").passes == pytest.approx(3 * 5 * seen + tests)
    assert cost.cost("ER").passes == pytest.approx(seen / 10 * (15 + 9 * 31) + tests)  # 256 replayed beside 256
    assert len(cost.table(100).splitlines()) == 2 + len(cost.METHODS)
