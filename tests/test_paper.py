"""The paper's tables, figures and claims are declared, read and judged correctly."""

import csv
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import scipy.stats
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from bace.cli.main import main
from bace.config.parse import config_from, make_parser
from bace.config.schema import Backbone, Config, MemoryBudget, Training
from bace.data.benchmarks import BENCHMARKS
from bace.experiments.compare import parse_method
from bace.experiments.run_folder import load_runs
from bace.methods import METHODS, find_method
from bace.paper import claims, cost, results, tables
from bace.paper.claims import Outcome, judge, printed_value, together
from bace.paper.comparisons import Among, Comparison, Leaf, greater, lies, rising, spread, within
from bace.paper.statements import CLAIMS, CORRECTED, FOUR, SMALL, Encoded, Untestable
from bace.paper.tables import (
    ABLATIONS,
    CIFAR,
    CONTROLS_OF,
    DEITS,
    ENTRIES,
    FIVE,
    HARD,
    LONGER,
    NER,
    RIVALS,
    TEXT,
    Block,
    Cell,
    Entry,
    all_published,
    published,
    rows_of,
)

TITLES = [
    "SEQ",
    "ER",
    "BiC",
    "LUCIR",
    "PODNet",
    "DDE",
    "DER++",
    "CLS-ER",
    "FOSTER",
    "MEMO",
    "BEEF",
    "GDumb",
    "Co2L",
    "L2P",
    "IL2M",
    "EWC",
    "LwF",
    "OWM",
    "SLDA",
    "PASS",
    "HAT",
    "MORE",
    "ROW",
    "A-GEM",
    "EEIL",
    "GD",
    "HAL",
    "iCaRL",
    "Sparse-ER",
    "MBPA",
    "MBPA++",
    "IDBR",
    "ExtendNER",
    "CFNER",
    "BaCE",
    "MTL",
]
ALL_CELLS = {cell.key: cell for entry in ENTRIES.values() for cell in entry.cells()}
COMPLETE = (
    {method.title for method in METHODS} >= set(TITLES)
    and {cell.settings(scale)["benchmark.name"] for cell in ALL_CELLS.values() for scale in tables.SCALES}
    <= set(BENCHMARKS)
    and "studies" in make_parser(find_method("SEQ")).get_defaults()
)
complete = pytest.mark.skipif(not COMPLETE, reason="not all 36 methods, benchmarks and studies are here")


def say(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(["paper", *words]) == 0
    return capsys.readouterr().out


# -- printed numbers


@pytest.mark.parametrize("name", ["published.csv", "claims.csv"])
def test_the_facts_are_those_of_the_paper(name: str) -> None:
    source = ROOT.parent / "shared" / "paper" / name
    if not source.exists():
        pytest.skip("the paper is not here")
    assert rows_of(name) == list(csv.DictReader(source.read_text().splitlines()))


def test_every_printed_number_of_a_table_has_its_cell_and_every_cell_its_printed_number() -> None:
    for name in ("cifar100", "five_datasets", "alpha", "deit", "challenging", "text", "ner"):
        entry = ENTRIES[name]
        cells = {(c.block.dataset, str(c.steps), str(c.buffer), c.method) for c in entry.cells()}
        printed = {key[1:5] for key in all_published() if key[0] == name and key[1] != "Average"}
        assert printed <= cells
        controls = {row for rows in CONTROLS_OF.values() for row in rows}
        assert {cell for cell in cells - printed if cell[3] not in controls and cell[3] != "BEEF"} == set()
        columns = {key[5] for key in all_published() if key[0] == name}
        assert columns <= set(entry.columns)


def test_entity_methods_that_distil_o_words_run_with_both_rules_for_replayed_ones() -> None:
    rules = {}
    for cell in [*ENTRIES["ner"].cells(), *ENTRIES["controls"].cells()]:
        if cell.block.benchmark == "entities" and cell.buffer == 100 and cell.method in ("ExtendNER", "CFNER", "BaCE"):
            rules[cell.method, cell.config("desk", 0).train.replay_o] = cell.folder(Path("out"), "desk", 0)
    assert set(rules) == {(name, rule) for name in ("ExtendNER", "CFNER", "BaCE") for rule in ("distil", "label")}
    assert len(set(rules.values())) == 6  # each has a folder of its own


def test_controls_stand_behind_the_printed_row_of_their_method_and_have_no_printed_number() -> None:
    shown = {"cifar100": CIFAR, "five_datasets": FIVE, "deit": DEITS[1], "challenging": HARD[0]}
    shown |= {"text": TEXT, "ner": NER}
    expected = {
        "cifar100": ["ER", "ER (reduction=joint)", "ER (mode=concat)", "BiC", "BiC (mode=concat)", "LUCIR",
                     "LUCIR (mode=concat)", "PODNet", "PODNet (mode=concat)", "DDE", "DDE (mode=concat)", "DER++",
                     "DER++ (logits=stored)", "CLS-ER", "FOSTER", "FOSTER (mode=concat)", "MEMO", "MEMO (mode=concat)",
                     "BEEF", "BEEF (mode=concat)", *ABLATIONS],
        "five_datasets": ["ER", "ER (reduction=joint)", "ER (mode=concat)", "GDumb", "BiC", "BiC (mode=concat)",
                          "DER++", "DER++ (logits=teacher)", "Co2L", "Co2L (mode=concat)", "CLS-ER", "FOSTER",
                          "FOSTER (mode=concat)", "MEMO", "MEMO (mode=concat)", "BEEF", "BEEF (mode=concat)",
                          *ABLATIONS, "L2P"],
        "deit": ["iCaRL", "iCaRL (mode=concat)", "A-GEM", "EEIL", "EEIL (mode=concat)", "GD", "GD (mode=concat)",
                 "DER++", "DER++ (logits=teacher)", "HAL", "MORE", "ROW", "BaCE"],
        "challenging": ["ER", "ER (reduction=joint)", "ER (mode=concat)", "BiC", "BiC (mode=concat)", "LUCIR",
                        "LUCIR (mode=concat)", "IL2M", "IL2M (mode=batch)", "DER++", "DER++ (logits=stored)", "CLS-ER",
                        "BaCE", "BaCE + bias correction"],
        "text": ["Sparse-ER", "ER", "ER (reduction=joint)", "ER (mode=concat)", "MBPA", "MBPA++", "IDBR", "BaCE"],
        "ner": ["Sparse-ER", "ER", "ER (reduction=joint)", "ER (mode=concat)", "MBPA", "MBPA++", "ExtendNER",
                "ExtendNER (head=frozen)", "CFNER", "CFNER (head=trained, adaptive=false)", "BaCE"],
    }  # fmt: skip
    for name, block in shown.items():
        steps, buffer = block.steps[-1], block.buffers[-1]
        cells = [
            cell
            for cell in ENTRIES[name].cells()
            if cell.key[0] == (block.group or block.benchmark) and (cell.steps, cell.buffer) == (steps, buffer)
        ]
        assert [cell.method for cell in cells] == expected[name]
        for row in {row for rows in CONTROLS_OF.values() for row in rows}:
            cell = Cell(block, steps, buffer, row)
            assert not any(published(name, cell, column) for column in ENTRIES[name].columns)


@complete
def test_every_printed_method_with_two_modes_of_replay_is_shown_in_both() -> None:
    for title in {parse_method(cell.method)[0] for cell in ALL_CELLS.values() if cell.method != CORRECTED} - {"BaCE"}:
        method = find_method(title)
        if method.card is None or not method.card.replay:
            continue
        default = method.hyper_parameters()["mode"].default
        other = {"batch": "concat", "concat": "batch"}[default]
        assert f"{title} (mode={other})" in CONTROLS_OF[title]
        assert method.card.replay in (default, other)


def test_der_is_read_as_the_paper_reads_it_but_where_it_is_quoted() -> None:
    """The paper's own tables herd for every method, so the row has a teacher, at its own weights; the original follows.
    The numbers of Tables III and V belong to the original."""
    for entry, row, behind in (
        ("cifar100", "teacher", "stored"),
        ("challenging", "teacher", "stored"),
        ("five_datasets", "stored", "teacher"),
        ("deit", "stored", "teacher"),
    ):
        cells = [cell for cell in ENTRIES[entry].cells() if cell.method.startswith("DER++")]
        assert {cell.method for cell in cells} == {"DER++", f"DER++ (logits={behind})"}
        for cell in cells:
            for scale in tables.SCALES:
                asked = cell.settings(scale)
                assert asked["method.logits"] == (row if cell.method == "DER++" else behind)
                assert not {"method.alpha", "method.beta"} & asked.keys()
                # the fixed total of a reservoir equals what the others have in the end
                if asked["method.logits"] == "stored":
                    assert asked["memory.size"] > 0 == asked.get("memory.per_class", 0)


def test_the_total_of_a_reservoir_is_what_the_others_have_after_the_last_task() -> None:
    classes = {"omnibenchmark": 300, "imagenet-r": 200, "objectnet": 200, "vtab": 50}
    for block in HARD:
        stored, er = (Cell(block, 10, block.buffers[0], row) for row in ("DER++ (logits=stored)", "ER"))
        for scale in tables.SCALES:
            each = er.settings(scale)["memory.per_class"]
            assert stored.settings(scale)["memory.size"] == each * classes[block.benchmark]


def test_printed_numbers_are_found_by_their_place() -> None:
    found = published("cifar100", Cell(CIFAR, 20, 100, "BaCE (W0=1, alpha=0)"), "FGT")
    assert found is not None
    assert (found.mean, found.std) == (46.06, 1.64)
    assert published("cifar100", Cell(CIFAR, 20, 100, "BEEF"), "A_last") is None  # out of memory
    average = tables.published_average("deit", "BaCE", "A_last")
    assert average is not None
    assert average.mean == 74.02


# -- the catalogue


def test_every_table_and_figure_is_there() -> None:
    tables = {"cifar100", "five_datasets", "alpha", "deit", "challenging", "text", "ner"}
    figures = {f"f{n}" for n in (1, 2, 3, 6, 7, 8, 9, 10, 11, 12, 13)}
    assert set(ENTRIES) == tables | figures | {"controls", "ptm"}


def test_columns_curves_and_matrices_are_known() -> None:
    for entry in ENTRIES.values():
        assert set(entry.columns) <= {*results.NUMBERS, "delta_A_last"}
        assert ("delta_A_last" in entry.columns) == bool(entry.baseline)
        assert set(entry.curves) <= set(results.CURVES)
        assert set(entry.matrices) <= set(results.MATRICES)


def test_entries_share_the_runs_they_have_in_common() -> None:
    def keys(name: str) -> set[Any]:
        return {cell.key for cell in ENTRIES[name].cells()}

    assert keys("f11") < keys("cifar100")
    assert {key[3] for key in keys("cifar100") - keys("f11")} == {
        row for title in RIVALS for row in CONTROLS_OF.get(title, ()) if row != "DER++ (logits=teacher)"
    }
    assert keys("f1") == keys("f2")
    assert keys("f9") | keys("f13") < keys("challenging")
    assert len(keys("alpha") & keys("cifar100")) == 8
    # a run of the table measures what a figure needs
    cell = next(c for c in ENTRIES["cifar100"].cells() if c.key == ("cifar100", 20, 500, "BaCE"))
    assert cell.settings("desk")["studies"] == ["gallery"]
    assert "studies" not in Cell(CIFAR, 10, 500, "BaCE").settings("desk")


def test_cells_with_one_key_have_the_same_settings() -> None:
    for entry in ENTRIES.values():
        for cell in entry.cells():
            for scale in tables.SCALES:
                assert cell.settings(scale) == ALL_CELLS[cell.key].settings(scale)


def test_runs_with_different_settings_have_different_folders() -> None:
    for scale in tables.SCALES:
        folders = {str(cell.folder(Path("x"), scale, 0)) for cell in ALL_CELLS.values()}
        assert len(folders) == len(ALL_CELLS)
        settings = {json.dumps(cell.settings(scale), sort_keys=True) for cell in ALL_CELLS.values()}
        assert len(settings) == len(ALL_CELLS)


def test_the_protocol_of_pre_trained_encoders_has_tasks_of_their_sizes_in_their_order() -> None:
    """LAMDA-PILOT's B0-IncN has N classes in every task, also in the first; VTAB's classes are not reordered."""
    increments: dict[str, set[int]] = {}
    classes = {"cifar100": 100, "imagenet-r": 200, "imagenet-a": 200, "cub": 200, "omnibenchmark": 300, "vtab": 50}
    for cell in ENTRIES["ptm"].cells():
        name = cell.block.benchmark
        assert classes[name] == BENCHMARKS[name].corpora[0].counts.classes
        increments.setdefault(name, set()).add(classes[name] // cell.steps)
        assert classes[name] % cell.steps == 0
        for scale in tables.SCALES:
            asked = cell.settings(scale)
            order = None if name == "vtab" else "numpy"
            assert (asked["benchmark.class_order"], asked["benchmark.seed"]) == (order, 1993)
            assert (asked["benchmark.crop"], asked["backbone.normalise"]) == ("area", False)
        assert cell.settings("full")["backbone.name"] == "vit-b16-in21k"
        kept = cell.settings("full").get("memory.per_class", 0)
        assert (kept, cell.buffer) == ((20, 20 * classes[name]) if find_method(cell.method).uses_memory else (0, 0))
    expected = {"cifar100": {5, 10}, "imagenet-r": {5, 20}, "imagenet-a": {20}, "cub": {10}}
    assert increments == {**expected, "omnibenchmark": {30}, "vtab": {10}}


def test_the_protocol_of_pre_trained_encoders_trains_as_long_as_published() -> None:
    """ImageNet-R in 40 tasks has 600 training images per task, for which these methods have a minimum of steps."""
    cells = [cell for cell in ENTRIES["ptm"].cells() if "tune_steps" in find_method(cell.method).hyper_parameters()]
    assert {cell.method for cell in cells} == {"CODA-Prompt", "DualPrompt", "SD-LoRA"}
    for cell in cells:
        assert cell.settings("full")["method.tune_steps"] == 0
        assert cell.config("full", 0).method["tune_steps"] == 0
        assert "method.tune_steps" not in cell.settings("desk")  # a task of 250 images needs the minimum
    schedule = {"DualPrompt": (5, 24), "CODA-Prompt": (20, 128), "SD-LoRA": (20, 128)}
    for title, published_by_authors in schedule.items():
        method = find_method(title)()
        assert (method.tune_epochs, method.tune_batch) == published_by_authors


def test_the_components_of_coda_prompt_are_divided_among_the_tasks_of_the_protocol() -> None:
    cells = [cell for cell in ENTRIES["ptm"].cells() if cell.method == "CODA-Prompt"]
    for scale in tables.SCALES:
        found = {cell.steps: cell.settings(scale)["method.components"] for cell in cells}
        assert found == {5: 20, 10: 10, 20: 5, 40: 2}


def test_l2p_has_the_settings_of_lamda_pilot_in_its_protocol() -> None:
    """LAMDA-PILOT's exps/l2p.json."""
    for cell in (cell for cell in ENTRIES["ptm"].cells() if cell.method == "L2P"):
        config = cell.config("full", 0)
        method = find_method("L2P")(**{key: value for key, value in config.method.items() if key != "name"})
        assert (method.pool, method.length, method.top, method.gamma, method.prompt_mask) == (10, 5, 5, 0.1, False)
        assert (config.train.epochs, config.train.batch_size, config.train.weight_decay) == (5, 16, 0)


def test_printed_numbers_of_the_protocol_have_their_cells_and_name_their_sources() -> None:
    cells = {(c.block.dataset, str(c.steps), str(c.buffer), c.method) for c in ENTRIES["ptm"].cells()}
    printed = {key: value for key, value in all_published().items() if key[0] == "ptm"}
    assert {key[1:5] for key in printed} <= cells
    assert {key[5] for key in printed} == {"A_last", "A_avg"} == set(ENTRIES["ptm"].columns)
    assert all(value.note for value in printed.values())
    ranpac = next(c for c in ENTRIES["ptm"].cells() if c.key == ("ptm-cifar100", 10, 0, "RanPAC"))
    assert [published("ptm", ranpac, metric).mean for metric in ("A_last", "A_avg")] == [92.2, 94.4]


def test_desk_scale_is_the_same_declaration_with_other_numbers() -> None:
    for cell in ALL_CELLS.values():
        desk, full = cell.settings("desk"), cell.settings("full")
        assert desk["benchmark.name"] == full["benchmark.name"] + "-desk"
        for key, value in desk.items():
            if key == "method.M":  # the number of RanPAC's random features is a size, like that of the data
                continue
            if key.startswith("method.") or key in ("benchmark.tasks", "studies"):
                assert full[key] == value


def test_settings_of_a_few_cells_are_the_papers() -> None:
    ablated = Cell(CIFAR, 20, 100, "BaCE (W0=1, alpha=0)").settings("full")
    assert ablated["method.name"] == "BaCE"
    assert (ablated["method.W0"], ablated["method.alpha"], ablated["memory.size"]) == (1, 0, 100)
    assert ablated["benchmark.tasks"] == 20
    hard = Cell(HARD[1], 10, 4000, "BaCE + bias correction").settings("full")
    assert (hard["memory.per_class"], hard["method.alpha"], hard["method.bias_correction"]) == (20, 2, True)
    assert Cell(HARD[1], 10, 4000, "BaCE (alpha=1)").settings("full")["method.alpha"] == 1
    assert Cell(CIFAR, 20, "inf", "MTL").settings("full")["memory.size"] == 0
    assert Cell(CIFAR, 20, "all", "ER").settings("full")["memory.per_class"] >= 500
    row = next(cell for cell in ENTRIES["deit"].cells() if cell.key == ("deit-cifar10", 5, 200, "ROW"))
    assert (row.settings("full")["backbone.adapter"], row.settings("desk")["memory.size"]) == (64, 40)
    assert (row.settings("full")["train.lr"], row.settings("full")["train.epochs"]) == (0.005, 20)


@complete
def test_every_cell_asks_for_settings_that_exist_and_data_that_its_method_can_learn() -> None:
    titles = {str(cell.settings("full")["method.name"]) for cell in ALL_CELLS.values()}
    settings_of = {title: set(make_parser(find_method(title)).get_defaults().keys()) for title in titles}
    for cell in ALL_CELLS.values():
        for scale in tables.SCALES:
            asked = cell.settings(scale)
            assert set(asked) <= settings_of[asked["method.name"]], str(cell)
            modality = BENCHMARKS[asked["benchmark.name"]].modality
            assert modality in find_method(asked["method.name"]).modalities, str(cell)


# a full configuration takes a tenth of a second, so test one of each method as printed and one of each block
BY_METHOD = {cell.method: cell for cell in ALL_CELLS.values()}
BY_BLOCK = {cell.key[:2]: cell for cell in ALL_CELLS.values()}


@complete
@pytest.mark.parametrize("scale", tables.SCALES)
@pytest.mark.parametrize("cell", {**BY_METHOD, **BY_BLOCK}.values(), ids=str)
def test_cells_make_valid_configurations(cell: Cell, scale: tables.Scale) -> None:
    config = cell.config(scale, 1)
    assert config.seed == 1
    assert list(config.studies) == cell.settings(scale).get("studies", [])


def test_configurations_are_made_of_what_is_here() -> None:
    cell = next(cell for cell in ENTRIES["text"].cells() if cell.method == "BaCE")
    config = cell.config("desk", 3)
    assert (config.seed, config.memory.size, config.method["name"]) == (3, 100, "BaCE")
    assert config.benchmark["name"] == "topics-desk"


# -- the commands


def test_list_names_every_entry_also_those_that_cannot_be_run_here(capsys: pytest.CaptureFixture[str]) -> None:
    shown = say(capsys, "list")
    for name in ENTRIES:
        assert re.search(rf"^{name} ", shown, re.M), name


def test_print_config_shows_every_cell(capsys: pytest.CaptureFixture[str]) -> None:
    shown = say(capsys, "run", "text", "--print_config")
    assert shown.count("---\n# ") == len(ENTRIES["text"].cells())
    assert "name: topics-desk" in shown
    assert "optimiser: adamw" in shown


def test_a_dry_run_prints_the_estimate_and_starts_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shown = say(capsys, "run", "text", "--dry_run", "--out", str(tmp_path))
    assert re.search(r"estimate for text at desk scale: [\d.]+ million passes, [\d.]+ hours at \d+ GFLOP/s", shown)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["run", "cifar10"], "Did you mean 'cifar100'"),
        (["run"], "bace paper run needs ID: an ID"),
        (["run", "f1", "--scale", "tiny"], "it must be 'desk' or 'full'"),
        (["runn", "f1"], "Did you mean 'run'"),
        (["run", "f1", "--seeds", "0"], "at least 1"),
        (["show", "f1", "--seed", "1"], "there is no option '--seed'"),
    ],
)
def test_mistakes_are_named(capsys: pytest.CaptureFixture[str], words: list[str], complaint: str) -> None:
    assert main(["paper", *words]) == 2
    assert complaint in capsys.readouterr().err


@pytest.fixture
def small(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> Entry:
    """An entry that runs in seconds, on tiny pictures."""
    settings = {key: value for key, value in tiny.settings("image").items() if key not in ("benchmark", "memory.size")}
    settings["backbone.name"] = settings.pop("backbone")
    block = Block("my-images", "pictures", (3,), (10,), ("BaCE (alpha=0)", "BaCE"), full=settings)
    entry = Entry("small", "Table 0", "a small table", (block,), ("A_last", "FGT", "delta_A_last"), curves=("A",))
    entry = tables.replace(entry, baseline="BaCE (alpha=0)")
    monkeypatch.setitem(ENTRIES, "small", entry)
    return entry


def test_a_table_is_run_continued_and_shown(capsys: pytest.CaptureFixture[str], small: Entry, tmp_path: Path) -> None:
    words = ["small", "--scale", "full", "--out", str(tmp_path)]
    shown = say(capsys, "run", *words, "--seeds", "1")
    assert "estimate for small at full scale" in shown  # printed before a full-scale run
    folders = [cell.folder(tmp_path, "full", 0) for cell in small.cells()]
    first = {folder: json.loads((folder / "metrics.json").read_text()) for folder in folders}
    assert re.search(r"10 +BaCE +1 +\d", shown)
    assert "Table 0: a small table" in (tmp_path / "full" / "small.html").read_text()

    # a finished cell is skipped, and a stopped one is resumed to the same numbers
    untouched = (folders[0] / "metrics.json").stat().st_mtime_ns
    (folders[1] / "metrics.json").unlink()
    shown = say(capsys, "show", *words)
    assert re.search(r"10 +BaCE +0 +- ", shown)  # partial results
    say(capsys, "run", *words)
    assert (folders[0] / "metrics.json").stat().st_mtime_ns == untouched
    again = json.loads((folders[1] / "metrics.json").read_text())
    assert again["A"] == first[folders[1]]["A"]

    table, latex = tmp_path / "t.csv", tmp_path / "t.tex"
    say(capsys, "show", *words, "--csv", str(table), "--latex", str(latex))
    rows = list(csv.DictReader(table.read_text().splitlines()))
    delta = next(r for r in rows if (r["method"], r["metric"]) == ("BaCE", "delta_A_last"))
    expected = first[folders[1]]["A_last"] - first[folders[0]]["A_last"]
    assert float(delta["mean"]) == pytest.approx(expected)
    curve = [float(r["mean"]) for r in rows if (r["method"], r["metric"]) == ("BaCE (alpha=0)", "A")]
    assert curve == pytest.approx(first[folders[0]]["A"])
    assert latex.read_text().count(r"\begin{tabular}") == 2
    assert r"A\_last" in latex.read_text()


@complete
def test_studies_of_a_run_give_the_numbers_of_figures_and_claims(
    capsys: pytest.CaptureFixture[str], small: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    studies = ("probing", "tracking", "gallery", "bias")
    block = small.blocks[0].of("BaCE + bias correction", studies=studies, group="studied")
    entry = tables.replace(
        small, blocks=(block,), columns=tuple(results.NUMBERS), curves=tuple(results.CURVES), baseline=""
    )
    monkeypatch.setitem(ENTRIES, "small", tables.replace(entry, matrices=tuple(results.MATRICES)))
    say(capsys, "run", "small", "--scale", "full", "--out", str(tmp_path))
    values = results.collect(ENTRIES["small"], tmp_path, "full")
    assert {value.column for value in values if not value.seeds} <= {"FWT", "distance_trend"}
    assert {value.column for value in values if value.place} == {*results.CURVES, *results.MATRICES}


def test_what_cannot_be_run_does_not_stop_the_rest(
    capsys: pytest.CaptureFixture[str], small: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = small.blocks[0].of("NoSuch", "ER")
    monkeypatch.setitem(ENTRIES, "small", tables.replace(small, blocks=(block,), columns=("A_last",), baseline=""))
    assert main(["paper", "run", "small", "--scale", "full", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert "1 of 2 runs failed:\n  NoSuch on " in said.err
    assert "there is no method 'NoSuch'" in said.err
    assert re.search(r"10 +ER +1 +\d", said.out)


# -- numbers of a run


def make_run(folder: Path, matrix: list[list[float]], seed: int = 0, **more: Any) -> None:
    """A finished run with these scores and two classes per task."""
    folder.mkdir(parents=True)
    tasks = [{"name": f"t{t}", "classes": [f"c{2 * t}", f"c{2 * t + 1}"]} for t in range(len(matrix))]
    config = {"seed": seed, **more.pop("config", {})}
    about = {"method": "ER", "benchmark": "x", "seed": seed, "config": config, "tasks": tasks}
    (folder / "run.json").write_text(json.dumps(about))
    (folder / "log.jsonl").write_text("")
    blank = [[str(t + 1), *map(str, row), *[""] * (len(matrix) - t - 1)] for t, row in enumerate(matrix)]
    header = ["task", *(str(t + 1) for t in range(len(matrix)))]
    (folder / "matrix.csv").write_text("\n".join(",".join(row) for row in [header, *blank]) + "\n")
    curve = [sum(row) / len(row) for row in matrix]
    numbers = {"A": curve, "A_last": curve[-1], "A_avg": sum(curve) / len(curve), "FGT": 1.0, "FWT": None}
    numbers |= {"seconds": 2.0, **more.pop("metrics", {})}
    (folder / "metrics.json").write_text(json.dumps(numbers))
    if more:
        (folder / "studies.json").write_text(json.dumps(more))


def anchor(*same: bool) -> dict[str, Any]:
    """An anchor of a gallery with neighbours that have, or do not have, its class."""
    return {
        "label": "c0",
        "text": "a",
        "neighbours": [{"label": "c", "text": "b", "distance": 0.5, "same": each} for each in same],
    }


@pytest.fixture
def found(tmp_path: Path) -> results.Finished:
    counts = [[4, 0, 0, 0, 6, 0], [0, 10, 0, 0, 0, 0], [0, 0, 5, 0, 5, 0], [0, 0, 0, 10, 0, 0], *[[0] * 4 + [5, 5]] * 2]
    make_run(
        tmp_path / "run",
        [[90.0], [60.0, 80.0], [30.0, 50.0, 70.0]],
        metrics={"confusion": {"classes": [f"c{i}" for i in range(6)], "counts": counts}},
        probing={"observed": [90, 70, 50], "cosine": [95, 85, 80], "linear": [94, 84, 79]},
        tracking={
            "distance": [[0.1], [0.3, 0.2], [0.5, 0.15, 0.1]],
            "new": [0.1, 0.2, 0.1],
            "old": [None, 0.3, 0.4],
            "all": [0.1, 0.25, 0.3],
        },
        gallery={
            "tasks": [{"task": "t0", "anchors": [anchor(True, False)]}, {"task": "t1", "anchors": [anchor(True, True)]}]
        },
        bias={"A": [1.0, 0.95, 0.9], "B": [0.0, -0.01, -0.02]},
    )
    return results.Finished(load_runs([tmp_path / "run"])[0])


@pytest.mark.parametrize(
    ("name", "value"),
    {
        "A_last": 50,
        "A_new": 75,
        "Acc": 50,
        "FWT": None,
        "Prob.Acc": 80,
        "gap": 30,
        "A_observed": (70 + 50) / 2,
        "A_probing": (85 + 80) / 2,
        "observed_slope": -20,
        "probing_slope": -5,
        "Feat.Embed.Dist": 0.3,
        "distance_all": 0.3,
        "distance_all_avg": (0.1 + 0.25 + 0.3) / 3,
        "distance_growth": ((0.5 - 0.1) + (0.15 - 0.2)) / 2,
        "distance_trend": 1,  # only the first task has more than two distances
        "lowest_when_learned": 0.5,
        "pushed_away": 2 / 3,
        "new_below_old": 1,
        "distance_and_accuracy": -0.5 * 2,  # 0.5 > 0.15 > 0.1 against 30 < 50 < 70
        "old_accuracy": 40,
        "new_accuracy": 70,
        "imbalance": 100 * (31 - 20) / 60,
        "neighbour_purity": 75,
        "chance_purity": 50,
        "bias_alpha": 0.9,
        "bias_beta": -0.02,
        "seconds": 2,
    }.items(),
)
def test_numbers_of_a_run(found: results.Finished, name: str, value: float | None) -> None:
    assert results.NUMBERS[name](found) == (None if value is None else pytest.approx(value))


def test_confusion_between_tasks(found: results.Finished) -> None:
    assert results.task_confusion(found) == [[70, 0, 30], [0, 75, 25], [0, 0, 100]]


def test_a_run_without_studies_or_with_skipped_ones_has_none_of_their_numbers(tmp_path: Path) -> None:
    make_run(tmp_path / "a", [[90.0], [60.0, 80.0]])
    make_run(tmp_path / "b", [[90.0], [60.0, 80.0]], tracking={"skipped": "no one encoder"}, probing={"skipped": "why"})
    for run in load_runs([tmp_path]):
        for name in ("Prob.Acc", "gap", "Feat.Embed.Dist", "distance_growth", "neighbour_purity", "bias_alpha"):
            assert results.NUMBERS[name](results.Finished(run)) is None


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=9))
def test_rank_correlation_is_spearmans(pairs: list[tuple[int, int]]) -> None:
    x, y = zip(*pairs, strict=True)
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert results.rank_correlation(x, y) == 0
    else:
        assert results.rank_correlation(x, y) == pytest.approx(scipy.stats.spearmanr(x, y).statistic, abs=1e-12)


def test_slope_is_that_of_least_squares() -> None:
    values = [3.0, 1.0, 4.0, 1.0, 5.0]
    assert results.slope(values) == pytest.approx(numpy.polyfit(range(5), values, 1)[0])


def test_the_page_gets_the_printed_numbers_of_its_rows(tmp_path: Path) -> None:
    entry = ENTRIES["alpha"]
    runs = {}
    for cell in entry.cells()[:3]:
        runs[cell.folder(tmp_path, "desk", 0)] = cell
        make_run(cell.folder(tmp_path, "desk", 0), [[50.0]], config={"method": {"label": cell.method}})
    found = results.for_page(entry, load_runs(runs), runs)
    assert found == {
        ("ER (label=BaCE (alpha=0))", "A_last"): (57.15, None),
        ("ER (label=BaCE (alpha=0.01))", "A_last"): (57.68, None),
        ("ER (label=BaCE (alpha=0.1))", "A_last"): (64.13, None),
    }
    assert results.for_page(ENTRIES["challenging"], load_runs(runs), runs) == {}


def test_a_table_shows_ours_beside_the_printed_numbers_and_the_average(tmp_path: Path) -> None:
    entry = ENTRIES["deit"]
    for cell in entry.cells():
        if cell.method == "BaCE" or cell.key == ("deit-cifar10", 5, 200, "ROW"):
            for seed, score in ((0, 60.0), (1, 62.0)):
                make_run(cell.folder(tmp_path, "full", seed), [[score]], seed)
    values = results.collect(entry, tmp_path, "full")
    shown = {title: rows for title, _, rows in results.tables(entry, values)}
    row = next(row for row in shown["CIFAR-10, 5 tasks"] if row[1] == "BaCE")
    assert row == ["200", "BaCE", "2", "61.00 ± 1.41", "91.54 ± 0.31", "-30.54"]
    average = next(row for row in shown["Average"] if row[1] == "BaCE")
    assert average == ["", "BaCE", "2", "61.00 ± 1.41", "74.02", "-13.02"]
    assert next(row for row in shown["Average"] if row[1] == "ROW")[2:4] == ["0", "-"]  # some data sets have no run


# -- costs


def vit_config(method: str, **changes: Any) -> Config:
    benchmark = {"name": "cifar100", "max_length": 128}
    return Config(
        benchmark,
        {"name": method, **changes},
        backbone=Backbone(name="google/vit-base-patch16-224"),
        memory=MemoryBudget(size=100),
        train=Training(),
    )


def test_a_cache_saves_operations_but_no_passes_and_takes_memory() -> None:
    plain, kept = (
        cost.estimate(config_from({"benchmark": "topics-desk", "method": "ER", "backbone.cache": megabytes}), 5)
        for megabytes in (0, 1000)
    )
    assert plain is not None
    assert kept is not None
    assert plain.passes == kept.passes
    assert 0.2 < kept.flop / plain.flop < 0.6  # 5 of 6 blocks are frozen
    assert 1e8 < kept.memory - plain.memory < 1e9  # the texts of the stream fit


@pytest.mark.parametrize(
    ("method", "changes", "petaflop"),
    [
        ("ER", {}, 53),
        ("BaCE", {}, 53 * 8 / 6),
        ("BaCE", {"neighbour_scores": "exact"}, 123),
        ("BaCE", {"neighbour_scores": "exact", "neighbor_grad": True}, 211),
    ],
)
def test_estimates_agree_with_the_specification(method: str, changes: dict[str, Any], petaflop: float) -> None:
    found = cost.estimate(vit_config(method, **changes), 20)
    assert found is not None
    assert found.flop / 1e15 == pytest.approx(petaflop, rel=0.15)


def test_er_trains_as_long_as_bace_where_a_claim_is_about_equal_cost() -> None:
    bace, er = find_method("BaCE")(neighbour_scores="exact").cost, find_method("ER")().cost
    longer = (bace.new + bace.replayed) / (er.new + er.replayed)
    assert LONGER.full["train.epochs"] == round(5 * longer)
    assert LONGER.desk["train.epochs"] == round(3 * longer)


def test_estimates_grow_with_what_is_done() -> None:
    def passes(*words: Any, **changes: Any) -> float:
        found = cost.estimate(vit_config(*words, **changes), 20)
        assert found is not None
        return found.passes

    assert passes("SEQ") < passes("ER", mode="concat") < passes("LwF") < passes("ER")
    exact = {"neighbour_scores": "exact"}
    assert passes("ER") < passes("BaCE", W0=1) == passes("BaCE") < passes("BaCE", **exact)
    assert passes("BaCE", **exact) < passes("BaCE", **exact, K=10)
    assert passes("MTL") == pytest.approx(10.5 * passes("MTL", only_last=True), rel=0.2)
    found = cost.estimate(vit_config("ER"), 20)
    assert found is not None
    assert 10e9 < found.memory < 24e9  # the paper's card holds 24 GB
    frozen = vit_config("SEQ")
    frozen.backbone.freeze = 12
    assert cost.estimate(frozen, 1).passes == pytest.approx(50_000 * 5 + 10_000)  # type: ignore[union-attr]
    assert found.hours(1000) == pytest.approx(found.flop / 1e12 / 3600)


# -- claims


def every_comparison(claim: Encoded) -> list[Comparison]:
    """The comparisons of a claim, for all spans of the soft-max."""
    return [comparison for check in claim.checks().values() for comparison in check.comparisons()]


def test_every_claim_is_declared_and_its_runs_are_in_the_catalogue() -> None:
    assert [row["id"] for row in rows_of("claims.csv")] == sorted(CLAIMS, key=lambda name: int(name[1:]))
    for name, claim in CLAIMS.items():
        if isinstance(claim, Untestable):
            assert len(claim.reason) > 20
            continue
        assert claim.check.comparisons(), name
        for comparison in every_comparison(claim):
            assert comparison.low < comparison.high
            for cell, metric, _ in comparison.quantity.leaves:
                assert cell.key in ALL_CELLS, (name, str(cell))
                assert cell.settings("full") == ALL_CELLS[cell.key].settings("full")
                assert metric in results.NUMBERS


def test_runs_of_claims_on_studies_measure_them() -> None:
    of_study = {
        "probing": {"Prob.Acc", "gap", "A_probing", "probing_slope"},
        "tracking": {"Feat.Embed.Dist", "distance_growth", "distance_trend", "lowest_when_learned", "pushed_away",
                     "new_below_old", "distance_and_accuracy", "distance_old", "distance_new", "distance_all",
                     "distance_all_avg"},
        "gallery": {"neighbour_purity"},
        "bias": {"bias_alpha", "bias_beta"},
    }  # fmt: skip
    for name, claim in CLAIMS.items():
        for comparison in every_comparison(claim) if isinstance(claim, Encoded) else ():
            for cell, metric, _ in comparison.quantity.leaves:
                for study, metrics in of_study.items():
                    assert metric not in metrics or study in tables.studies_of(cell), (name, str(cell), metric)


def test_claims_about_seq_lwf_and_ewc_are_asked_for_both_spans_of_their_soft_max() -> None:
    spans = {  # for each setting, the row of each method that has this span
        "span=seen": {"SEQ": "SEQ", "LwF": "LwF (span=seen)", "EWC": "EWC (span=seen)"},
        "span=new": {"SEQ": "SEQ (span=new)", "LwF": "LwF", "EWC": "EWC"},
    }
    for title, default in (("SEQ", "seen"), ("LwF", "new"), ("EWC", "new")):
        assert find_method(title).hyper_parameters()["span"].default == default
    asked = 0
    for name, claim in CLAIMS.items():
        if isinstance(claim, Untestable):
            continue
        leaves = [leaf for c in claim.check.comparisons() for leaf in c.quantity.leaves]
        about = {cell.method for cell, _, _ in leaves if cell.block.benchmark != "entities"} & {"SEQ", "LwF", "EWC"}
        asked += bool(about)
        assert list(claim.checks()) == (list(spans) if about else [""]), name
        for setting, check in claim.checks().items():
            got = [leaf for c in check.comparisons() for leaf in c.quantity.leaves]
            for (cell, *rest), (other, *same) in zip(leaves, got, strict=True):
                assert rest == same
                entities = cell.block.benchmark == "entities"  # O is a class of every task, so there is only one span
                expected = cell.method if entities else spans.get(setting, {}).get(cell.method, cell.method)
                assert other == tables.replace(cell, method=expected), name
    assert asked == 22


def test_the_printed_numbers_of_seq_are_those_of_a_soft_max_over_all_seen_classes() -> None:
    """The paper prints 14.1 % on average over 20 steps; with the other span there is nothing to compare."""
    claim = CLAIMS["C01"]
    assert isinstance(claim, Encoded)
    printed = {setting: claims.printed_verdict(check)[1] for setting, check in claim.checks().items()}
    assert printed == {"span=seen": True, "span=new": None}


ERRATA = {  # claims that the paper's own numbers contradict (docs/paper.md), with the comparisons that fail
    "C09": ["Prob.Acc of BaCE + bias correction > BaCE + bias correction, objectnet"],
    "C48": ["CLS-ER > CLS-ER: cifar100, 10 tasks"],
    "C60": ["FGT of L2P > FGT of BaCE, five-datasets, 5 tasks, memory 250", "FGT of L2P > FGT of BaCE, five-datasets"],
    "C68": ["FGT of BaCE (W0=1, alpha=0) > FGT of BaCE (alpha=0), five-datasets, 5 tasks, memory 250"],
    "C92": ["BaCE > ROW, deit-cifar100, 10 tasks"],
    "C100": ["BaCE > ROW, deit-cifar100, 10 tasks"],
    "C124": ["gap of BiC > gap of BaCE, imagenet-r"],
    "C159": ["FWT of BaCE > FWT of Sparse-ER, entities, 5 tasks, memory 500"],
}


def test_the_printed_means_support_every_claim_but_the_errata() -> None:
    judged = 0
    for name, claim in CLAIMS.items():
        if isinstance(claim, Untestable):
            continue
        against, agrees = claims.printed_verdict(claim.check)
        judged += agrees is not None
        assert (agrees is False) == (name in ERRATA), (name, against)
        expected = ERRATA.get(name, [])
        assert len(against) == len(expected)
        assert all(text.startswith(start) for text, start in zip(against, expected, strict=True)), against
    assert judged == 117


SIGNED = re.compile(r"(?<![\w.])[+-]\d+\.\d+")
WITH_MARGINS = [
    *(f"C{n}" for n in (28, 30, 31, *range(33, 42), 44, *range(62, 68), 72, 81, 83, *range(93, 113))),
    *(f"C{n}" for n in (*range(113, 121), 131, *range(142, 147), *range(151, 157))),
    *(f"C{n}" for n in range(50, 60)),
]


@pytest.mark.parametrize("name", WITH_MARGINS)
def test_the_margins_quoted_in_a_claim_are_those_of_its_comparisons(name: str) -> None:
    row = next(row for row in rows_of("claims.csv") if row["id"] == name)
    text = row["comparison"].split("5-datasets (DER++ quoted)")[0]  # C31: quoted numbers are not claimed
    quoted = [abs(float(number)) for number in SIGNED.findall(text)]
    assert quoted
    claim = CLAIMS[name]
    assert isinstance(claim, Encoded)
    values = set()
    for comparison in claim.check.comparisons():
        value = printed_value(comparison.quantity)
        if value is not None:
            values.add(round(abs(value), 4))
        for a, b in _differences(comparison):
            values.add(round(abs(a - b), 4))
    for number in quoted:
        assert number in values, (name, number)


def _differences(comparison: Comparison) -> list[tuple[float, float]]:
    """Printed differences inside a comparison of differences."""
    means = [p.mean if (p := published(t, c, m)) else math.nan for c, m, t in comparison.quantity.leaves]
    return list(zip(means[::2], means[1::2], strict=False))


def test_printed_ranges_and_correlations_are_those_quoted() -> None:
    spearman = [printed_value(c.quantity) for c in _comparisons("C125")]
    assert spearman == pytest.approx([-0.75, -0.75, -0.75, -0.86], abs=0.005)
    ranges = [printed_value(c.quantity) for c in _comparisons("C123")]
    assert ranges == pytest.approx([6.12 - 1.32, 8.60 - 6.49, 6.15 - 1.16, 6.33 - 1.05])
    additive = [printed_value(c.quantity) for c in _comparisons("C73")]
    assert additive == pytest.approx([11.76 - 11.76, 13.01 - 10.74, 6.43 - 6.62, 9.14 - 9.83], abs=1e-9)
    assert [printed_value(c.quantity) for c in _comparisons("C01")] == pytest.approx([83.2 - 14.1])


def _comparisons(name: str) -> list[Comparison]:
    claim = CLAIMS[name]
    assert isinstance(claim, Encoded)
    return claim.check.comparisons()


@given(st.lists(st.floats(-50, 50), min_size=2, max_size=8).filter(lambda v: max(v) - min(v) > 1e-3))
def test_the_interval_is_students(values: list[float]) -> None:
    expected = scipy.stats.t.interval(0.95, len(values) - 1, numpy.mean(values), scipy.stats.sem(values))
    assert claims.confidence_interval(values) == pytest.approx(expected)


def of(*columns: dict[int, float | None]) -> Callable[[Leaf], dict[int, float | None]]:
    """Numbers of the leaves in the order in which they are asked for."""
    asked = iter(columns)
    return lambda leaf: next(asked)


AT = SMALL[0]


@pytest.mark.parametrize(
    ("bace", "er", "verdict", "seeds"),
    [
        ({0: 60.0, 1: 61.0, 2: 62.0}, {0: 50.0, 1: 51.2, 2: 51.9}, "supported", 3),
        ({0: 50.0, 1: 51.2, 2: 51.9}, {0: 60.0, 1: 61.0, 2: 62.0}, "not supported", 3),
        ({0: 60.0, 1: 50.0}, {0: 50.0, 1: 52.0}, "undecided", 2),
        ({0: 60.0}, {0: 50.0, 1: 52.0}, "undecided", 1),  # one pair is not enough
        ({0: 60.0}, {1: 50.0}, "missing runs", 0),  # no seed in common
        ({}, {0: 50.0}, "missing runs", 0),
        ({0: None, 1: None}, {0: 1.0, 1: 1.0}, "not measured", 0),
        ({0: 60.0, 1: 61.0, 2: None}, {0: 50.0, 1: 51.0, 2: 1.0}, "supported", 2),
    ],
)
def test_a_comparison_is_judged_by_paired_seeds(bace: Any, er: Any, verdict: str, seeds: int) -> None:
    outcome = judge(greater(AT("BaCE"), AT("ER")), of(bace, er))
    assert (outcome.verdict, outcome.seeds) == (verdict, seeds)


def test_pairing_removes_what_seeds_have_in_common() -> None:
    bace, er = {0: 90.0, 1: 50.0, 2: 70.0}, {0: 88.0, 1: 48.5, 2: 67.5}
    outcome = judge(greater(AT("BaCE"), AT("ER")), of(bace, er))
    assert outcome.verdict == "supported"
    assert outcome.mean == pytest.approx(2)
    half = 4.302652729911275 * 0.5 / 3**0.5  # Student's t with two degrees of freedom
    assert outcome.interval == pytest.approx((2 - half, 2 + half))


def test_within_is_supported_only_by_an_interval_inside() -> None:
    near = within(AT("BaCE"), AT("ER"), 1)
    zero = {0: 0.0, 1: 0.0, 2: 0.0}
    assert judge(near, of({0: 0.1, 1: -0.1, 2: 0.0}, zero)).verdict == "supported"
    assert judge(near, of({0: 2.1, 1: 1.9, 2: 2.0}, zero)).verdict == "not supported"
    assert judge(near, of({0: 0.9, 1: 0.5, 2: 1.3}, zero)).verdict == "undecided"


@pytest.mark.parametrize(
    ("verdicts", "need", "expected"),
    [
        ("ss", 2, "supported"),
        ("sn", 2, "not supported"),
        ("su", 2, "undecided"),
        ("nu", 2, "not supported"),
        ("sm", 2, "undecided"),
        ("mm", 2, "missing runs"),
        ("nm", 2, "not supported"),
        ("s-", 2, "supported"),  # unmeasured comparisons do not count
        ("--", 2, "not measured"),
        ("sn", 1, "supported"),
        ("nn", 1, "not supported"),
        ("nu", 1, "undecided"),
        ("sssn", 3, "supported"),
        ("ssnn", 3, "not supported"),
    ],
)
def test_verdicts_together(verdicts: str, need: int, expected: str) -> None:
    names = {"s": "supported", "n": "not supported", "u": "undecided", "m": "missing runs", "-": "not measured"}
    parts = tuple(lies(AT(method), 0) for method in ("ER", "BiC", "DDE", "BaCE")[: len(verdicts)])
    given_verdicts: Any = {id(part): names[letter] for part, letter in zip(parts, verdicts, strict=True)}
    assert together(Among(parts, need), lambda part: given_verdicts[id(part)]) == expected


def test_quantities_compute_in_order() -> None:
    a, b = AT("BaCE"), AT("ER")
    assert (a - b).compute([5, 3]) == 2
    assert (0.5 * (a - b) + b).compute([5, 3, 10]) == 11
    assert abs(b - a).compute([3, 5]) == 2
    assert ((a - b) / (a + b)).compute([5, 3, 6, 2]) == 0.25
    assert spread([a, b], "x").compute([1, 4]) == 3
    assert [c.quantity.compute([2, 1]) for c in rising([a, b]).comparisons()] == [1]


def test_claims_are_told_from_finished_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for place in FOUR:
        for method, score in (("ER", 50.0), ("BaCE", 60.0)):
            cell = place(method).leaves[0][0]
            for seed in range(3):
                folder = cell.folder(tmp_path, "desk", seed)
                make_run(folder, [[score + seed + (0.1 * seed if method == "ER" else 0)]], seed)
    found = {v.name: v for v in claims.evaluate(tmp_path, "desk")}
    assert len(found) == 165 + 22
    assert len({v.id for v in found.values()}) == 165
    for setting, seq in (("span=seen", "SEQ"), ("span=new", "SEQ (span=new)")):
        assert f"{seq} on cifar100, 20 tasks, memory 0" in [str(cell) for cell in found[f"C10 {setting}"].missing]
    assert found["C33"].verdict == "supported"  # BaCE over ER, in all four settings
    assert not found["C33"].missing
    assert found["C34"].verdict == "missing runs"
    assert [str(cell) for cell in found["C34"].missing] == [f"BiC on {place.name}" for place in FOUR]
    assert found["C16"].verdict == "not testable"
    assert found["C163"].verdict == "undecided"  # supported where there are runs, but others are missing
    assert found["C71"].verdict == "missing runs"

    shown = say(capsys, "claims", "--out", str(tmp_path), "--markdown")
    rows = [line for line in shown.splitlines() if re.match(r"\| C\d+( span=(seen|new))? \|", line)]
    assert len(rows) == 165 + 22
    assert all(len(re.split(r"(?<!\\)\|", row)) == 8 for row in rows)
    (row,) = (row for row in rows if row.startswith("| C33 |"))
    assert "| supported | +9.9 [+9.65, +10.1] (3 seeds) | agrees |" in row
    shown = say(capsys, "claims", "--out", str(tmp_path))
    assert "not testable" in shown.splitlines()[-1]


def test_an_evaluated_claim_shows_its_weakest_comparison() -> None:
    outcomes = (
        Outcome("a", "supported", 3, 5.0, (4.0, 6.0)),
        Outcome("b", "undecided", 2, 1.0, (-3.0, 5.0)),
        Outcome("c", "missing runs"),
    )
    found = claims.Evaluated("C01", "text", "undecided", outcomes, (), None, (), "")
    assert claims.weakest(found) == outcomes[1]
    assert claims.interval_text(found) == "+1 [-3, +5] (2 seeds)"
    assert "1 of 3 comparisons supported; weakest: b" in claims.about_text(found)
