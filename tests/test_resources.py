"""The memory that a run needs is compared with hand-computed numbers. It is printed before the run starts, and the run
is refused if it does not fit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checks import copying_at, training_examples

import bace
from bace.config.parse import config_from
from bace.core import resources
from bace.core.trainer import Trainer
from bace.errors import ConfigError
from bace.experiments.assemble import assemble


def assembled(tiny: Any, method: str, **changes: Any) -> Any:
    return assemble(config_from(tiny.settings("image", method=method, **changes)))[0]


def size_of(module: torch.nn.Module) -> int:
    return 4 * sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("method", "networks"),  # networks kept at task 3, plus one gradient and one momentum
    [("seq", 1 + 2), ("er", 1 + 2), ("bace", 2 + 2), ("foster", 3 + 2), ("beef", 3 + 2)],
)
def test_needed_bytes_by_hand(tiny: Any, method: str, networks: int) -> None:
    learned = assembled(tiny, method)
    assert resources.bytes_needed(learned, range(3)) == networks * size_of(learned.model.encoder)


@pytest.mark.parametrize(
    ("changes", "slots"), [({"train.momentum": 0.0}, 0), ({}, 1), ({"train.optimiser": "adamw"}, 2)]
)
def test_the_optimiser_counts(tiny: Any, changes: dict[str, Any], slots: int) -> None:
    learned = assembled(tiny, "seq", **changes)
    assert resources.bytes_needed(learned, range(3)) == (2 + slots) * size_of(learned.model.encoder)


def test_what_is_frozen_has_no_gradient_and_the_greediest_task_decides(tiny: Any) -> None:
    half = assembled(tiny, "seq", **{"backbone.freeze": 1})
    trained = 4 * sum(p.numel() for p in half.model.encoder.parameters() if p.requires_grad)
    assert resources.bytes_needed(half, range(3)) == size_of(half.model.encoder) + 2 * trained
    memo = assembled(tiny, "memo")  # trains everything in the first task, tips later
    tip = size_of(torch.nn.ModuleList([memo.model.encoder.blocks[-1], memo.model.encoder.norm]))
    whole = size_of(memo.model.encoder)
    assert resources.bytes_needed(memo, [0]) == 3 * whole
    assert resources.bytes_needed(memo, [2]) == whole + 2 * tip + 2 * tip
    assert resources.bytes_needed(memo, range(3)) == max(3 * whole, whole + 4 * tip)


def test_beef_needs_a_network_for_every_task(tiny: Any) -> None:
    learned = assembled(tiny, "beef")
    growth = [resources.bytes_needed(learned, [task]) / size_of(learned.model.encoder) for task in range(20)]
    assert growth == [3 + task for task in range(20)]


def test_a_run_that_cannot_fit_is_refused_with_the_number_before_it_begins(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = size_of(assembled(tiny, "seq").model.encoder)
    # SEQ holds a network and asks for 2 more; BEEF asks for 4 more
    monkeypatch.setattr(resources, "bytes_free", lambda device: 3 * encoder)
    monkeypatch.setattr("bace.core.trainer.Trainer.run", lambda self: pytest.fail("it began"))
    with pytest.raises(ConfigError) as refused:
        bace.run(tiny.settings("image", method="beef"), out=tmp_path / "run")
    assert f"BEEF will need up to {5 * encoder / 1e3:.1f} kB" in str(refused.value)
    assert f"only {3 * encoder / 1e3:.1f} kB are free on cpu" in str(refused.value)
    assert "fewer tasks" in str(refused.value)
    monkeypatch.undo()
    monkeypatch.setattr(resources, "bytes_free", lambda device: 3 * encoder)
    assert len(bace.run(tiny.settings("image", method="seq")).matrix) == 3
    said: list[str] = []
    two = {"benchmark.tasks": [2, 2], "method": {"name": "beef", "energy": 0.0}}  # this run fits
    bace.run(tiny.settings("image", **two), out=tmp_path / "run", tell=said.append)  # the folder is still unused
    line = said[0]  # the other lines are about tasks
    assert line.startswith(f"BEEF will need up to {4 * encoder / 1e3:.1f} kB for parameters, gradients and optimiser")
    assert "and more for activations" in line


def test_a_learner_is_refused_the_task_that_does_not_fit_and_stays_as_it_was(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {k: v for k, v in tiny.settings("image").items() if not k.startswith("benchmark")}
    learner = bace.Learner("beef", **settings)
    (x, y), more = (training_examples(tiny, "image", classes) for classes in ((0, 1), (2, 3)))
    learner.partial_fit(x, y)
    before = learner.scores(x)
    monkeypatch.setattr(resources, "bytes_free", lambda device: 10_000)
    with pytest.raises(ConfigError, match="BEEF will need"):
        learner.partial_fit(*more)
    assert torch.equal(learner.scores(x), before)
    monkeypatch.undo()
    learner.partial_fit(*more)
    assert len(learner.classes_) == 4


@pytest.mark.parametrize(
    ("limit", "meminfo", "free"),
    [
        ("max\n", "MemTotal: 9 kB\nMemAvailable:    3 kB\nSwapFree: 1 kB\n", 3 * 1024),
        ("2048\n", "MemAvailable: 3 kB\n", 2048),
        (None, "MemAvailable: 3 kB\n", 3 * 1024),
        ("max\n", None, None),
        (None, None, None),
    ],
)
def test_free_memory_is_what_the_container_and_the_system_can_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str | None, meminfo: str | None, free: int | None
) -> None:
    files = {"limit": limit, "meminfo": meminfo}
    for name, text in files.items():
        if text is not None:
            (tmp_path / name).write_text(text)
    monkeypatch.setattr(resources, "LIMITS", tuple(tmp_path / name for name in files))
    assert resources.bytes_free(torch.device("cpu")) == free


def test_growth_is_measured_after_every_task(tiny: Any) -> None:
    result = bace.run(tiny.settings("image", method={"name": "beef", "energy": 0.0}))
    encoder = size_of(result.method.model.encoder)
    kept = result.metrics["kept"]
    assert kept[-1] == resources.bytes_kept(result.method)
    for task, found in enumerate(kept):
        assert (task + 1) * encoder < found < (task + 1.5) * encoder


@pytest.mark.parametrize(("size", "words"), [(999, "1.0 kB"), (1_500_000, "1.5 MB"), (3_440_000_000, "3.4 GB")])
def test_sizes_in_words(size: int, words: str) -> None:
    assert resources.in_words(size) == words


def test_the_peak_is_that_of_the_run_and_not_of_what_ran_before() -> None:
    cpu = torch.device("cpu")
    large = torch.ones(60_000_000)  # 240 MB, touched
    with_it = resources.peak_bytes(cpu)
    if with_it is None:
        pytest.skip("this system does not tell")
    del large
    resources.forget_peak(cpu)
    after = resources.peak_bytes(cpu)
    assert after is not None
    assert after < with_it - 200_000_000


def test_passes_are_counted_forward_as_one_and_there_and_back_as_three(tiny: Any) -> None:
    settings = tiny.settings("image", method="seq", **{"measure.fwt": False, "train.epochs": 2})
    _, stream = assemble(config_from(settings))
    trained = sum(len(task.train) for task in stream)
    asked = sum(len(seen.test) for task in stream for seen in stream[: task.index + 1])
    assert bace.run(settings).metrics["passes"] == 3 * 2 * trained + asked
    frozen = bace.run(settings | {"backbone.freeze": 1}).metrics["passes"]  # one of two blocks has no backward pass
    assert frozen == 2 * 2 * trained + asked


@pytest.mark.parametrize("method", ["er", "mtl"])  # MTL trains a fresh network in every task
def test_a_resumed_run_counts_the_passes_of_the_straight_one(tiny: Any, tmp_path: Path, method: str) -> None:
    settings = tiny.settings("image", method=method, **{"train.epochs": 1})
    points = [("step", 4), ("task", 1)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bace.experiments.run.Trainer", copying_at(points, tmp_path))
        straight = bace.run(settings, out=tmp_path / "copied").metrics["passes"]
    assert straight > 0
    assert [bace.run(resume=tmp_path / f"{kind}-{n}").metrics["passes"] for kind, n in points] == [straight, straight]


def test_runs_side_by_side_count_their_own_passes(tiny: Any) -> None:
    config = config_from(tiny.settings("image", method="mtl", **{"train.epochs": 1, "measure.fwt": False}))
    one, other = (Trainer(*assemble(config), config) for _ in range(2))
    for task in one.stream[:2]:
        one.learn(task)
    first, second = (len(task.train) for task in one.stream[:2])
    assert one.spent()[1] == 3 * (first + first + second)
    assert other.spent()[1] == 0
