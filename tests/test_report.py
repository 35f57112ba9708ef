"""The report: hand-computed numbers, damaged folders, the table and the parts of the page (test_page.py renders it)."""

import csv
import dataclasses
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plotly import graph_objects
from plotly.offline import get_plotlyjs
from rich.console import Console
from run_folders import EVIL, MATRIX, Tags, figures_of, write_evil, write_run

from bace.cli.main import main
from bace.cli.report import show_report
from bace.config.parse import config_from
from bace.errors import ConfigError, DataError
from bace.report import load_runs, print_table, summary_rows, write_page
from bace.report.export import as_csv, as_latex, summary_tables
from bace.report.figures import shortened
from bace.report.runs import stat

# Summary


def test_summary_is_mean_and_sample_deviation_over_seeds(tmp_path: Path) -> None:
    for seed, last, seconds in [(0, 80.0, 10.0), (1, 82.0, 12.0), (2, 84.0, 17.0)]:
        write_run(
            tmp_path / f"run{seed}",
            seed=seed,
            A_last=last,
            A_avg=90.0,
            A_new=70.0 + seed,
            FGT=seed * 3.0,
            seconds=seconds,
        )
    (row,) = summary_rows(load_runs([tmp_path]))
    assert (row.benchmark, row.method, row.label, row.seeds) == ("digits", "ER", "ER", (0, 1, 2))
    assert row.A_last is not None
    assert (row.A_last.mean, row.A_last.std) == (82.0, 2.0)
    assert row.A_avg is not None
    assert (row.A_avg.mean, row.A_avg.std) == (90.0, 0.0)
    assert row.A_new is not None
    assert (row.A_new.mean, row.A_new.std) == (71.0, 1.0)
    assert row.FGT is not None
    assert (row.FGT.mean, row.FGT.std) == (3.0, 3.0)
    assert row.FWT is None
    assert row.seconds is not None
    assert (row.seconds.mean, row.seconds.std) == (13.0, pytest.approx(13**0.5))  # (9 + 1 + 16) / 2


def test_a_run_of_before_a_new_was_a_measure_has_it_from_its_matrix(tmp_path: Path) -> None:
    write_run(tmp_path / "several", "ER")
    write_run(tmp_path / "single", "SEQ", matrix=[[97.0]], FGT=None)
    for name in ("several", "single"):
        path = tmp_path / name / "metrics.json"
        scores = json.loads(path.read_text())
        del scores["A_new"]
        path.write_text(json.dumps(scores))
    several, single = summary_rows(load_runs([tmp_path]))
    assert several.A_new is not None
    assert several.A_new.mean == 75  # (80 + 70) / 2
    assert single.A_new is None  # a single task has no A_new


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=8))
def test_stat_agrees_with_numpy(values: list[float]) -> None:
    found = stat(values)
    assert found is not None
    assert found.mean == pytest.approx(np.mean(values), abs=1e-9)
    assert found.std == pytest.approx(np.std(values, ddof=1), abs=1e-9)


def test_one_seed_has_no_deviation_and_a_seed_without_fwt_leaves_no_mean(tmp_path: Path) -> None:
    write_run(tmp_path / "one", "SEQ", FWT=5.0)
    write_run(tmp_path / "two", "ER", seed=0, FWT=5.0)
    write_run(tmp_path / "two-b", "ER", seed=1, FWT=None)
    one, two = summary_rows(load_runs([tmp_path]))
    assert one.FWT is not None
    assert (one.FWT.mean, one.FWT.std) == (5.0, None)
    assert two.FWT is None


def test_settings_that_differ_part_a_method_and_name_its_rows(tmp_path: Path) -> None:
    def config(alpha: float, seed: int) -> dict[str, Any]:
        return {
            "method": {"class_path": "BaCE", "init_args": {"alpha": alpha, "k": 3}},
            "seed": seed,
            "order_seed": seed,
        }

    write_run(tmp_path / "a", "BaCE", 0, config=config(1, 0))
    write_run(tmp_path / "b", "ER", 0, config={"memory": 500})  # differs from BaCE's settings, but not within ER
    write_run(tmp_path / "c", "BaCE", 1, config=config(1.0, 1))  # 1.0 equals 1
    write_run(tmp_path / "d", "BaCE", 0, config=config(2, 0))
    rows = summary_rows(load_runs([tmp_path]))
    assert [(row.label, row.seeds) for row in rows] == [
        ("BaCE (alpha=1)", (0, 1)),
        ("ER", (0,)),
        ("BaCE (alpha=2)", (0,)),
    ]
    assert rows[2].settings == {"alpha": "2"}


def real_config(method: str, seed: int = 0, **changes: Any) -> dict[str, Any]:
    """The settings of a run as run.json has them."""
    return dataclasses.asdict(config_from({"benchmark": "digits", "method": method, "seed": seed, **changes}))


def labels(folder: Path) -> list[str]:
    return [row.label for row in summary_rows(load_runs([folder]))]


def test_an_ablation_beside_other_methods_is_named_as_such_also_on_the_page(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "SEQ", config=real_config("SEQ"))
    write_run(tmp_path / "b", "BaCE", config=real_config("BaCE", **{"method.W0": 1}))
    assert labels(tmp_path) == ["SEQ", "BaCE (W0=1)"]
    page = write_page(load_runs([tmp_path]), tmp_path / "page.html").read_text()
    assert "SEQ and BaCE (W0=1) on digits" in page
    write_run(tmp_path / "c", "BaCE", config=real_config("BaCE"))  # beside the full method, both names have the setting
    assert labels(tmp_path) == ["SEQ", "BaCE (W0=1)", "BaCE (W0=0.95)"]


def test_two_spellings_of_a_name_are_one_method(tmp_path: Path) -> None:
    for seed, name in enumerate(("er", "ER")):
        config = real_config("ER", seed)
        config["method"]["name"] = name  # as in version 0.1
        write_run(tmp_path / name, seed=seed, config=config)
    (row,) = summary_rows(load_runs([tmp_path]))
    assert (row.label, row.seeds) == ("ER", (0, 1))
    assert config_from({"method": "der++"}).method == config_from({"method": "DERpp"}).method


def test_methods_that_ran_with_other_epochs_say_so(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "SEQ", config=real_config("SEQ"))
    write_run(tmp_path / "b", "ER", config=real_config("ER", **{"train.epochs": 9, "checkpoint.keep": 7}))
    assert labels(tmp_path) == [f"SEQ (epochs={config_from({}).train.epochs})", "ER (epochs=9)"]


def test_a_memory_of_its_own_for_each_method_is_no_sweep_over_sizes(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "SEQ", config=real_config("SEQ", memory=0))
    write_run(tmp_path / "b", "ER", config=real_config("ER", memory=50))
    assert labels(tmp_path) == ["SEQ (size=0)", "ER (size=50)"]
    assert "Settings compared" not in write_page(load_runs([tmp_path]), tmp_path / "page.html").read_text()


def test_settings_of_one_name_keep_their_full_names_and_missing_ones_are_unset(tmp_path: Path) -> None:
    write_run(tmp_path / "a", config={"head": {"scale": 1}, "loss": {"scale": 5}})
    write_run(tmp_path / "b", config={"head": {"scale": 2}})
    assert [row.label for row in summary_rows(load_runs([tmp_path]))] == [
        "ER (head.scale=1, loss.scale=5)",
        "ER (head.scale=2, loss.scale=unset)",
    ]


def test_long_values_are_shortened_and_labels_stay_different(tmp_path: Path) -> None:
    for name in "ab":
        write_run(tmp_path / name, config={"backbone": "x" * 40 + name})
    assert [row.label for row in summary_rows(load_runs([tmp_path]))] == [
        f"ER (backbone={'x' * 23}…)",
        f"ER (backbone={'x' * 23}…) #2",
    ]


def test_runs_with_other_numbers_of_tasks_are_never_averaged(tmp_path: Path) -> None:
    write_run(tmp_path / "a", seed=0)
    write_run(tmp_path / "b", seed=1, matrix=MATRIX[:2])
    assert [row.label for row in summary_rows(load_runs([tmp_path]))] == ["ER (tasks=3)", "ER (tasks=2)"]


def test_benchmarks_are_parted(tmp_path: Path) -> None:
    write_run(tmp_path / "a", benchmark="digits")
    write_run(tmp_path / "b", benchmark="news")
    assert [(row.benchmark, row.label) for row in summary_rows(load_runs([tmp_path]))] == [
        ("digits", "ER"),
        ("news", "ER"),
    ]


def test_a_repeated_seed_counts_once_if_equal_and_is_refused_if_not(tmp_path: Path) -> None:
    write_run(tmp_path / "first")
    write_run(tmp_path / "again", seconds=99.0)
    (row,) = summary_rows(load_runs([tmp_path]))
    assert row.seeds == (0,)
    write_run(tmp_path / "other", matrix=[[90.0], [70.0, 80.0], [60.0, 50.0, 71.0]])
    with pytest.raises(DataError, match=r"again.*other.*seed 0"):
        summary_rows(load_runs([tmp_path]))


# Loading


def test_folders_are_searched_in_natural_order_and_a_run_named_twice_is_one(tmp_path: Path) -> None:
    for seed in (10, 2):
        write_run(tmp_path / "deep" / "er" / f"seed{seed}", seed=seed)
    (tmp_path / "deep" / "er" / "seed2" / "checkpoints").mkdir()
    runs = load_runs([tmp_path / "deep" / "er" / "seed10", tmp_path])
    assert [run.seed for run in runs] == [10, 2]
    assert runs[0].matrix == ((90.0,), (70.0, 80.0), (60.0, 50.0, 70.0))
    assert [(e.task, e.epoch, e.loss) for e in runs[1].epochs][:3] == [(1, 0, 4.0), (1, 1, 3.0), (2, 0, 4.0)]


def test_an_unfinished_run_is_loaded_but_enters_no_number(tmp_path: Path) -> None:
    write_run(tmp_path / "done")
    write_run(tmp_path / "half", "LwF", finished=False)
    (folder := tmp_path / "none").mkdir()
    (folder / "run.json").write_text((tmp_path / "half" / "run.json").read_text())
    runs = load_runs([tmp_path])
    assert [(run.method, run.metrics is None, len(run.matrix)) for run in runs] == [
        ("ER", False, 3),
        ("LwF", True, 1),
        ("LwF", True, 0),
    ]
    assert [row.label for row in summary_rows(runs)] == ["ER"]


def test_the_tasks_of_a_killed_run_are_those_in_its_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", finished=False)
    (folder / "matrix.csv").unlink()  # a run writes it only at its end
    lines = [json.dumps({"event": "task", "task": t, "scores": row}) for t, row in enumerate(MATRIX[:2], 1)]
    (folder / "log.jsonl").write_text("\n".join(['{"event": "start"}', *lines, '{"event": "epo']))
    (run,) = load_runs([folder])
    assert run.matrix == ((90.0,), (70.0, 80.0))
    show_report([folder], tmp_path / "page.html")
    assert f"{folder}: 2 of 3 tasks done" in capsys.readouterr().out
    assert "2 of 3 tasks done" in (tmp_path / "page.html").read_text()
    (folder / "log.jsonl").write_text(lines[1])
    with pytest.raises(DataError, match=r"log\.jsonl.*task 2"):
        load_runs([folder])


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["cat", "a-very-long-name-of-a-dog"], ["cat", "a-very-long-n…"]),
        (["electric-guitar-1", "electric-guitar-2"], ["electri…itar-1", "electri…itar-2"]),
        (["ab-0-cccccccccccccccccccc", "ab-1-cccccccccccccccccccc"], ["ab-0-cccccccc…", "ab-1-cccccccc…"]),
        ([f"aaaaaaaaa{i}{'b' * 20}" for i in "12"] + ["aaaaaaaaaz" + "b" * 20], None),
        ([f"{'a' * 20}{i}{'b' * 20}" for i in "12"], ["1…bbbbbbbbbbbb", "2…bbbbbbbbbbbb"]),
    ],
)
def test_class_names_that_are_cut_stay_different(names: list[str], shown: list[str] | None) -> None:
    found = shortened(names, 14)
    assert len(set(found)) == len(names)
    assert max(map(len, found)) <= 14
    assert shown is None or found == shown


ABOUT = '"method": "ER", "benchmark": "digits", "seed": 0, "config": {}'


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("run.json", None, "missing"),
        ("run.json", "{", "not JSON"),
        ("run.json", "[]", "JSON object"),
        ("run.json", '{"tasks": []}', "'method' is missing"),
        ("run.json", f'{{{ABOUT}, "tasks": []}}', "empty"),
        ("run.json", f'{{{ABOUT}, "tasks": [{{"name": "a"}}]}}', "classes"),
        ("run.json", f'{{"format": 3, {ABOUT}}}', "update bace"),
        ("run.json", f'{{"format": "x", {ABOUT}}}', "'format' is 'x'"),
        ("matrix.csv", None, "missing"),
        ("matrix.csv", "", "header"),
        ("matrix.csv", "task,1,2\n1,90,\n2,70,80\n", "header"),
        ("matrix.csv", "task,1,2,3\n1,90,,\n2,70,80,\n", "2 rows for 3 tasks"),
        ("matrix.csv", "task,1,2,3\n1,90,,\n2,70,x,\n3,60,50,70\n", "row 2"),
        ("matrix.csv", "task,1,2,3\n1,90,,\n2,70,,\n3,60,50,70\n", "row 2"),
        ("matrix.csv", "task,1,2,3\n1,90,5,\n2,70,80,\n3,60,50,70\n", "row 1"),
        ("matrix.csv", "task,1,2,3\n1,nan,,\n2,70,80,\n3,60,50,70\n", "row 1"),
        ("matrix.csv", b"\xff\xfe", "cannot be read"),
        ("metrics.json", '{"A_last": 1', "not JSON"),
        ("metrics.json", '{"A": [1, 2]}', "'A_last' is missing"),
        ("metrics.json", '{"A": [1, 2], "A_last": 80, "A_avg": 1, "seconds": 1}', "3 numbers"),
        ("metrics.json", '{"A": [1, 2, 3], "A_last": "80", "A_avg": 1, "seconds": 1}', "A_last"),
        ("metrics.json", '{"A": [1, 2, 3], "A_last": 80, "A_avg": 1}', "seconds"),
        ("metrics.json", '{"A": [1, 2, 3], "A_last": 80, "A_avg": 1, "A_new": "7", "seconds": 1}', "A_new"),
        ("metrics.json", '{"A": [1, 2, 3], "A_last": 8, "A_avg": 1, "seconds": 1, "entities": [{}]}', "3 objects"),
        (
            "metrics.json",
            '{"A": [1, 2, 3], "A_last": 8, "A_avg": 1, "seconds": 1, "confusion": {"classes": ["a"], "counts": []}}',
            "1 rows of 1",
        ),
        ("log.jsonl", None, "missing"),
        ("log.jsonl", '{"event": "epoch", "ta', "line 1"),
        ("log.jsonl", '\n{"event": "epoch", "task": 4, "epoch": 0, "loss": 1}', "line 2"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: str | bytes | None, says: str) -> None:
    folder = write_run(tmp_path / "run")
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(DataError) as error:
        load_runs([tmp_path])
    assert str(folder / name) in str(error.value)
    assert says in str(error.value)


def test_a_folder_without_runs_and_a_missing_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"No run in"):
        load_runs([tmp_path])
    with pytest.raises(DataError, match=r"nowhere' is not a folder"):
        load_runs([tmp_path / "nowhere"])


# Terminal


def printed(tmp_path: Path, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_table(summary_rows(load_runs([tmp_path])), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_shows_seeds_means_and_deviations_in_order(tmp_path: Path) -> None:
    write_run(tmp_path / "1", "[red]SEQ", seed=0, A_last=81.25, A_new=66.5, seconds=1234.5)
    write_run(tmp_path / "2", "BaCE", seed=0, A_last=80.0, FWT=40.0)
    write_run(tmp_path / "3", "BaCE", seed=1, A_last=81.2, FWT=42.0)
    lines = printed(tmp_path, 100).splitlines()
    assert lines[0].strip() == "digits"
    assert lines[1].split() == ["method", "seeds", "A_last", "A_avg", "A_new", "FGT", "FWT", "seconds"]
    assert lines[3].split() == ["[red]SEQ", "1", "81.2", "75.0", "66.5", "30.0", "-", "1234"]
    assert re.split(r"\s{2,}", lines[4].strip()) == [
        "BaCE",
        "2",
        "80.6 ± 0.8",  # 1.2 / sqrt(2)
        "75.0 ± 0.0",
        "75.0 ± 0.0",
        "30.0 ± 0.0",
        "41.0 ± 1.4",  # 2 / sqrt(2)
        "12.0 ± 0.0",
    ]


def test_a_narrow_terminal_loses_no_digit(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_run(tmp_path / f"{seed}", seed=seed, FWT=12.3, seconds=55.5)
    wide, narrow = printed(tmp_path, 120), printed(tmp_path, 40)
    assert "55.5 ± 0.0" in narrow
    assert "…" not in narrow
    assert wide.split() == narrow.split()


# Page


def test_the_page_loads_nothing_from_elsewhere_and_holds_plotly_once(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    page = write_page(load_runs([tmp_path / "run"]), tmp_path / "out" / "page.html")
    assert page == tmp_path / "out" / "page.html"
    source, plotly = page.read_text(), get_plotlyjs()
    assert source.count(plotly) == 1
    own = source.replace(plotly, "")
    assert not re.search(r"https?:|//[a-z]|@import|url\(", own)
    tags = Tags(own).found
    assert not [tag for tag, attributes in tags if {"src", "srcset", "data"} & set(attributes)]
    assert not [tag for tag, _ in tags if tag in ("link", "iframe", "object", "embed", "img", "base")]
    (policy,) = [a["content"] for tag, a in tags if tag == "meta" and a.get("http-equiv")]
    assert policy is not None
    assert policy.startswith("default-src 'none'")


def test_every_figure_is_embedded_with_its_numbers_and_plotly_accepts_it(tmp_path: Path) -> None:
    write_run(tmp_path / "0", seed=0)
    write_run(tmp_path / "1", seed=1, matrix=[[100.0], [90.0, 84.0], [60.0, 90.0, 90.0]])  # task 2 improves: -6
    page = write_page(load_runs([tmp_path]), tmp_path / "page.html")
    figures = figures_of(page)
    placed = [str(a["data-figure"]) for _, a in Tags(page.read_text()).found if "data-figure" in a]
    kinds = ["curves", "matrix-er-0", "forgetting", "confusion-er-0", "loss", "cost"]
    assert placed == list(figures) == [f"benchmark-0-{kind}" for kind in kinds]
    for figure in figures.values():  # plotly's own schema refuses an unknown key or a bad value
        graph_objects.Figure(data=figure["data"], layout=figure["layout"])
        assert figure["file"].startswith("digits-")
    curves, matrix, forgetting, confusion, loss, cost = (figures[name] for name in placed)

    band, line = curves["data"]
    assert line["y"] == [95.0, 81.0, 70.0]  # means of 90, 75, 60 and 100, 87, 80
    assert line["customdata"] == ["95.0 ± 7.1", "81.0 ± 8.5", "70.0 ± 14.1"]
    assert band["y"] == pytest.approx(
        [95 + 50**0.5, 81 + 72**0.5, 70 + 200**0.5, 70 - 200**0.5, 81 - 72**0.5, 95 - 50**0.5]
    )

    assert matrix["data"][0]["z"] == [[95.0, None, None], [80.0, 82.0, None], [60.0, 70.0, 80.0]]
    assert (matrix["data"][0]["zmin"], matrix["data"][0]["zmax"]) == (0, 100)
    assert matrix["data"][1]["text"] == ["95.0", "80.0", "82.0", "60.0", "70.0", "80.0"]

    assert forgetting["data"][0]["y"] == [35.0, 12.0]  # means of 30, 30 and 40, -6
    assert forgetting["data"][0]["error_y"]["array"] == pytest.approx([50**0.5, 648**0.5])

    heat_map = confusion["data"][0]
    assert heat_map["z"][0] == [80.0, 0.0, 0.0, 0.0, 0.0, 20.0]
    assert heat_map["customdata"][0] == [16, 0, 0, 0, 0, 4]  # two seeds, 8 and 2 each
    assert heat_map["z"][5] == [0.0, 0.0, 0.0, 0.0, 0.0, 100.0]
    edges = [shape["x0"] for shape in confusion["layout"]["shapes"] if shape["x0"] == shape["x1"]]
    assert edges == [1.5, 3.5]  # two classes per task

    assert loss["data"][0]["y"] == [2.5, 1.5, None] * 3  # means of 2, 1 and 3, 2
    assert loss["data"][0]["x"] == [0.25, 0.75, None, 1.25, 1.75, None, 2.25, 2.75, None]
    assert cost["data"][0]["x"] == [12.0]


def test_a_method_has_one_colour_everywhere(tmp_path: Path) -> None:
    for number, name in enumerate(["SEQ", "ER", "BaCE"]):
        write_run(tmp_path / "runs" / f"{number}", name)
        write_run(tmp_path / "runs" / f"{number}b", name, benchmark="news")
    page = write_page(load_runs([tmp_path]), tmp_path / "page.html")
    colours: dict[str, set[str]] = {}
    for figure in figures_of(page).values():
        for trace in figure["data"]:
            if "name" in trace:
                colours.setdefault(trace["name"], set()).add(trace["marker"]["color"])
    chips = re.findall(r'stroke="(#\w+)"/></svg>(\w+)<', page.read_text())
    assert len(chips) > 6
    for colour, name in chips:
        colours[name].add(colour)
    assert set(colours) == {"SEQ", "ER", "BaCE"}
    assert all(len(found) == 1 for found in colours.values())
    assert len(set.union(*colours.values())) == 3


def test_forgetting_over_all_rows_is_never_negative(tmp_path: Path) -> None:
    write_run(tmp_path / "run", matrix=[[50.0], [60.0, 80.0]], config={"metrics": {"fgt_max": "all"}})
    page = write_page(load_runs([tmp_path]), tmp_path / "page.html")
    assert figures_of(page)["benchmark-0-forgetting"]["data"][0]["y"] == [0.0]


def test_seeds_with_other_class_orders_do_not_mix_their_confusions(tmp_path: Path) -> None:
    write_run(tmp_path / "0", seed=0)
    names = ["5", "4", "3", "2", "1", "0"]
    write_run(tmp_path / "1", seed=1, confusion={"classes": names, "counts": [[7] * 6] * 6})
    page = write_page(load_runs([tmp_path]), tmp_path / "page.html")
    heat_map = figures_of(page)["benchmark-0-confusion-er-0"]["data"][0]
    assert heat_map["customdata"][0] == [8, 0, 0, 0, 0, 2]
    assert "1 of 2 seeds" in page.read_text()


def test_more_classes_than_a_map_has_cells_share_them(tmp_path: Path) -> None:
    """450 classes in 3 tasks become 150 rows of 3 classes, which hold all counts, with lines between the tasks."""
    names = [f"c{i}" for i in range(450)]
    counts = [[9 if i == j else int(j == 449) for j in range(450)] for i in range(450)]
    run = write_run(tmp_path / "run", confusion={"classes": names, "counts": counts}, per_class=None)
    about = json.loads((run / "run.json").read_text())
    about["tasks"] = [{"name": f"task {t}", "classes": names[150 * t : 150 * (t + 1)]} for t in range(3)]
    (run / "run.json").write_text(json.dumps(about))
    figure = figures_of(write_page(load_runs([run]), tmp_path / "page.html"))["benchmark-0-confusion-er-0"]
    heat_map, layout = figure["data"][0], figure["layout"]
    assert [len(row) for row in heat_map["customdata"]] == [150] * 150
    assert heat_map["customdata"][0] == [27, *[0] * 148, 3]
    assert heat_map["z"][0][0] == 90.0
    assert (heat_map["x"][0], heat_map["x"][-1]) == ("c0 to c2", "c447 to c449")
    assert {shape["x0"] for shape in layout["shapes"] if shape["x0"] == shape["x1"]} == {49.5, 99.5}
    assert layout["xaxis"]["tickvals"] == [24.5, 74.5, 124.5]
    assert layout["xaxis"]["range"] == [-0.5, 149.5]


def test_one_task_one_seed_and_nulls_still_make_a_page(tmp_path: Path) -> None:
    write_run(tmp_path / "run", matrix=[[97.0]], FGT=None, FWT=None, confusion=None)
    (tmp_path / "run" / "log.jsonl").write_text(
        '{"event": "epoch", "task": 1, "stage": "fit", "epoch": 0, "loss": null}\n'
    )
    page = write_page(load_runs([tmp_path / "run"]), tmp_path / "page.html")
    assert [name.removeprefix("benchmark-0-") for name in figures_of(page)] == ["curves", "matrix-er-0", "cost"]
    text = Tags(page.read_text()).text
    assert "nothing to forget" in text
    assert "±" not in text
    assert "1 task, 2 classes" in text


def test_only_unfinished_runs_make_a_page_that_says_so(tmp_path: Path) -> None:
    write_run(tmp_path / "half", "LwF", seed=7, finished=False)
    page = write_page(load_runs([tmp_path]), tmp_path / "page.html")
    text = Tags(page.read_text()).text
    assert figures_of(page) == {}
    assert "No finished run yet" in text
    assert "LwF on digits, seed 7 (half): 1 of 3 tasks done" in text


def test_the_header_says_what_was_compared_and_details_hold_config_and_commit(tmp_path: Path) -> None:
    for seed in (3, 4):
        write_run(tmp_path / f"{seed}", seed=seed, config={"stream": {"memory": 500}, "alpha": 0.125})
    write_run(tmp_path / "x", "BaCE", seed=3, config={"memory": {"size": 200}})
    source = write_page(load_runs([tmp_path]), tmp_path / "page.html").read_text()
    text = Tags(source).text
    assert "ER and BaCE on digits" in text
    for fact in ("digits (image)", "3 tasks, 6 classes", "500, 200", "1 to 2 a method"):
        assert fact in text
    details = re.findall(r"<details data-method=.*?</details>", source, re.DOTALL)
    assert len(details) == 2
    assert all(part in details[0] for part in ("abc123", "&#34;alpha&#34;: 0.125", "torch 2.13.0"))
    assert "Our &lt;title&gt;" in write_page(load_runs([tmp_path]), tmp_path / "p.html", "Our <title>").read_text()


def test_names_are_text_and_never_markup(tmp_path: Path) -> None:
    write_evil(tmp_path / "run")
    write_run(tmp_path / "half", EVIL, finished=False)
    page = write_page(load_runs([tmp_path]), tmp_path / "page.html", title=EVIL)
    tags = Tags(page.read_text().replace(get_plotlyjs(), ""))
    assert "img" not in {tag for tag, _ in tags.found}
    assert [tag for tag, _ in tags.found].count("script") == 3
    assert EVIL in tags.text
    for figure in figures_of(page).values():
        for trace in figure["data"]:
            shown = [trace.get("name", ""), trace.get("hovertemplate", ""), *map(str, trace.get("text", []))]
            shown += [str(value) for key in ("x", "y") for value in trace[key]]
            assert not any("<img" in value or "<script" in value for value in shown)
            assert "%{x}&" not in trace.get("hovertemplate", "")


def test_the_page_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "run")
    runs = load_runs([tmp_path / "run"])
    (out := tmp_path / "out").mkdir()
    (out / "page.html").write_text("old")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "plotly", None)  # this is how Python marks a module that cannot be imported
        patch.setitem(sys.modules, "plotly.offline", None)
        with pytest.raises(ConfigError, match=r'pip install "bace-cil\[report\]"'):
            write_page(runs, out / "page.html")
    assert (out / "page.html").read_text() == "old"
    write_page(runs, out / "page.html")
    assert (out / "page.html").read_text().startswith("<!doctype html>")
    (out / "taken").mkdir()
    with pytest.raises(ConfigError, match="taken"):
        write_page(runs, out / "taken")
    assert sorted(path.name for path in out.iterdir()) == ["page.html", "taken"]


def test_a_comparison_of_all_methods_is_ranked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, score in (("Low", 10.0), ("High", 90.0), ("Middle", 50.0)):
        write_run(tmp_path / name, name, A_last=score)
    for ranked, expected in ((True, ["High", "Middle", "Low"]), (False, ["Low", "High", "Middle"])):
        show_report([tmp_path / name for name in ("Low", "High", "Middle")], tmp_path / "page.html", ranked=ranked)
        shown = capsys.readouterr().out
        assert sorted(expected, key=shown.index) == expected


# Output for other programs


def test_the_table_as_csv_and_latex(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, last in ((0, 80.0), (1, 82.0)):
        write_run(tmp_path / "runs" / f"er{seed}", "ER_50%", seed, A_last=last)
    write_run(tmp_path / "runs" / "seq", "SEQ", FGT=None)
    words = [str(tmp_path / "runs"), "--out", str(tmp_path / "p.html")]
    assert main(["report", *words, "--csv", str(tmp_path / "t.csv"), "--latex", str(tmp_path / "t.tex")]) == 0
    assert f"written: {tmp_path / 't.csv'}" in capsys.readouterr().out
    with (tmp_path / "t.csv").open() as file:
        first, second = csv.DictReader(file)
    assert (first["benchmark"], first["method"], first["seeds"]) == ("digits", "ER_50%", "2")
    assert (float(first["A_last"]), float(first["A_last_std"])) == (81.0, pytest.approx(2**0.5))
    assert (second["FGT"], second["A_last_std"]) == ("", "")
    latex = (tmp_path / "t.tex").read_text()
    assert latex.startswith("% digits\n\\begin{tabular}{lrrrrrrr}\n\\hline\nmethod & seeds & A\\_last &")
    assert r"ER\_50\% & 2 & 81.0 $\pm$ 1.4 & 75.0 $\pm$ 0.0 &" in latex
    assert latex.count("\\\\\n") == 3


def test_a_table_without_rows_is_an_empty_one(tmp_path: Path) -> None:
    write_run(tmp_path / "half", finished=False)
    rows = summary_rows(load_runs([tmp_path]))
    assert as_csv(rows).strip() == ""
    assert as_latex(summary_tables(rows)) == ""


@pytest.mark.parametrize("text", ["\\input{x}", "{}%&#$_~^", "a\nb"])
def test_no_name_is_a_command_of_latex(text: str) -> None:
    line = as_latex([("t\nt", ["method"], [[text]])]).splitlines()
    assert len(line) == 8  # no text has started its own line
    assert re.sub(r"\\(textbackslash|textasciitilde|textasciicircum)\{\}|\\[{}_%&#$]|[\w ]", "", line[5]) == "\\\\"
