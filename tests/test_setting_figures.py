"""Figures that compare settings: the numbers are compared with hand-computed ones, plotly accepts the figures, and the
page shows them in the right place."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from plotly import graph_objects
from test_report import write_run

from bace.report import load_runs, setting_figures, write_page
from bace.report.runs import Group, groups

PROBING = {"observed": [90.0, 70.0, 50.0], "cosine": [95.0, 90.0, 85.0], "linear": [94.0, 89.0, 84.0]}
TRACKING = {
    "distance": [[0.5], [0.7, 0.4], [0.9, 0.8, 0.3]],
    "euclidean": [[1.0], [1.2, 0.9], [1.3, 1.2, 0.8]],
    "new": [0.5, 0.4, 0.3],
    "old": [None, 0.7, 0.85],
    "all": [0.5, 0.55, 0.7],
    "difference": 0.55,
}


def made(tmp_path: Path, *runs: dict[str, Any]) -> list[Group]:
    for number, run in enumerate(runs):
        studies = run.pop("studies", None)
        folder = write_run(tmp_path / f"run{number}", **run)
        if studies is not None:
            (folder / "studies.json").write_text(json.dumps(studies))
    return groups(load_runs([tmp_path]))


def drawn(figure: Any) -> dict[str, list[Any]]:
    """The values of each line or bar, by its name. The page's script needs both axes, and a line for each shape."""
    assert figure is not None
    graph_objects.Figure(data=figure["data"], layout=figure["layout"])  # refuses keys that plotly does not know
    json.dumps(figure, allow_nan=False)
    assert {"xaxis", "yaxis"} <= figure["layout"].keys()
    return {trace["name"]: trace["y"] for trace in figure["data"]}


def bace(seed: int = 0, size: int = 100, **settings: Any) -> dict[str, Any]:
    method = {"W0": 0.95, "K": 5, "alpha": 1.0, "effect_new": "full"} | settings
    return {"method": "BaCE", "seed": seed, "config": {"method": method, "memory": {"size": size}, "seed": seed}}


@pytest.mark.parametrize("studies", [None, {}, {"probing": {"skipped": "no"}, "tracking": {"skipped": "no"}}])
def test_there_is_no_figure_without_a_study(tmp_path, studies):
    found = made(tmp_path, {"studies": studies})
    assert setting_figures.memory_scores(found) is None
    assert setting_figures.memory_distances(found) is None
    assert setting_figures.distance_and_scores(found) is None
    assert setting_figures.sweep(found, "W0") is None
    assert setting_figures.variants(found) is None


def test_a_sweep_has_a_line_for_each_memory_and_the_other_methods_across(tmp_path):
    runs = [bace(size=size, W0=W0) | {"A_last": size / 10 + W0} for size in (100, 500) for W0 in (0.95, 0.5)]
    found = made(tmp_path, *runs, {"method": "ER", "A_last": 40.0})
    figure = setting_figures.sweep(found, "W0")
    lines = drawn(figure)
    assert lines == {
        "BaCE (size=100)": pytest.approx([10.5, 10.95]),
        "BaCE (size=500)": pytest.approx([50.5, 50.95]),
        "ER": [40.0, 40.0],
    }
    assert figure is not None
    assert figure["data"][0]["x"] == ["0.5", "0.95"]


def test_differences_to_a_baseline_are_taken_seed_by_seed(tmp_path):
    scores = {(0, 0.5): 60.0, (0, 0.9): 63.0, (0, 1): 61.0, (1, 0.5): 70.0, (1, 0.9): 71.0, (1, 1): 68.0, (2, 0.9): 5.0}
    runs = [
        bace(seed=seed, W0=W0) | {"A_last": value, "matrix": [[value]], "A": [value]}
        for (seed, W0), value in scores.items()
    ]
    figure = setting_figures.sweep(made(tmp_path, *runs), "W0", baseline="1")
    assert drawn(figure)["BaCE"] == pytest.approx([(-1 + 2) / 2, (2 + 3) / 2])  # seed 2 has no run at W0 = 1
    assert figure is not None
    assert figure["data"][0]["error_y"]["array"][0] == pytest.approx(4.5**0.5)


def test_a_sweep_of_k_starts_without_neighbours_and_may_show_seconds(tmp_path):
    runs = [bace(K=K) | {"A_last": 60.0 + K, "seconds": 10.0 * K} for K in (1, 10, 3)]
    runs.append(bace(W0=1) | {"A_last": 59.0, "seconds": 8.0})
    found = made(tmp_path, *runs)
    figure = setting_figures.sweep(found, "K")
    assert drawn(figure) == {"BaCE": [59.0, 61.0, 63.0, 70.0]}
    assert figure is not None
    assert figure["data"][0]["x"] == ["0", "1", "3", "10"]
    assert drawn(setting_figures.sweep(found, "K", "seconds")) == {"BaCE": [8.0, 10.0, 30.0, 100.0]}


def test_variants_stand_in_the_paper_s_order_with_none_at_the_end(tmp_path):
    scores = {"reverse": 55.0, "full": 61.0, "random": 58.0}
    runs = [bace(effect_new=name) | {"A_last": value} for name, value in scores.items()]
    figure = setting_figures.variants(made(tmp_path, *runs, bace(W0=1) | {"A_last": 57.0}))
    assert drawn(figure) == {"BaCE": [61.0, 58.0, 55.0, 57.0]}
    assert figure is not None
    assert figure["data"][0]["x"] == ["full", "random", "reverse", "none"]


def test_scores_and_distances_against_the_memory(tmp_path):
    def run(size: int, shift: float) -> dict[str, Any]:
        probing = {name: [value + shift for value in values] for name, values in PROBING.items()}
        tracking = TRACKING | {"all": [0.5, 0.55, 0.7 - shift / 100]}
        config = {"memory": {"size": size}}
        return {"config": config, "FGT": 30.0 - shift, "studies": {"probing": probing, "tracking": tracking}}

    found = made(tmp_path, run(1000, 20.0), run(100, 0.0))
    scores = setting_figures.memory_scores(found)
    assert drawn(scores) == {"observed": [50, 70], "probing (cosine)": [85, 105], "forgetting": [30, 10]}
    assert scores is not None
    assert scores["data"][0]["x"] == ["100", "1000"]
    assert drawn(setting_figures.memory_scores(found, "average"))["observed"] == [60, 80]
    distances = drawn(setting_figures.memory_distances(found))
    assert distances["all, last"] == pytest.approx([0.7, 0.5])
    assert distances["old, average"] == pytest.approx([0.775, 0.775])
    both = setting_figures.distance_and_scores(found)
    assert drawn(both)["observed"] == [50, 70]
    assert both is not None
    assert both["data"][0]["x"] == pytest.approx([0.7, 0.5])
    assert both["data"][0]["text"] == ["memory 100", "memory 1000"]


def test_runs_that_differ_only_in_what_was_studied_are_one_group(tmp_path):
    configs = ({"memory": 100, "studies": []}, {"memory": 100, "studies": ["probing"]})
    found = made(tmp_path, *({"seed": seed, "config": config} for seed, config in enumerate(configs)))
    assert [len(group.runs) for group in found] == [2]


def test_the_page_compares_settings_where_they_differ(tmp_path):
    runs = [bace(W0=W0, K=K) for W0, K in ((0.95, 5), (0.5, 5), (0.95, 3))]
    made(tmp_path / "runs", *runs, bace(effect_new="same"), bace(size=500))
    page = write_page(load_runs([tmp_path / "runs"]), tmp_path / "page.html").read_text()
    assert set(re.findall(r'data-figure="benchmark-0-compared-([\w-]+)"', page)) == {
        "w0",
        "k",
        "k-seconds",
        "size",
        "variants",
    }
    made(tmp_path / "plain", {"method": "ER"}, {"method": "SEQ"})
    plain = write_page(load_runs([tmp_path / "plain"]), tmp_path / "plain.html").read_text()
    assert "compared-" not in plain
