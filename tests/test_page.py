"""The report page is checked with hand-made studies, published numbers and many methods, then in a real browser if one
is installed."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, Page, browser
from plotly import graph_objects
from run_folders import MATRIX, PICTURE, Tags, example, figures_of, studies, write_evil, write_run

from bace.errors import DataError
from bace.report import load_runs, write_page

ARTEFACTS = Path(__file__).parents[1] / "artefacts"


def write_studies(folder: Path, **changes: Any) -> Path:
    (folder / "studies.json").write_text(json.dumps(studies() | changes))
    return folder


def write_many(folder: Path, methods: int = 22, seeds: int = 2) -> list[str]:
    """Methods with increasing scores; returns their names, best first."""
    names = [f"Method {number:02}" for number in range(methods)]
    for number, name in enumerate(names):
        for seed in range(seeds):
            matrix = [[score * (number + 1) / methods for score in row] for row in MATRIX]
            write_run(folder / f"{name}-{seed}", name, seed, matrix=matrix)
    return names[::-1]


def gallery(anchor: dict[str, Any]) -> dict[str, Any]:
    return {"gallery": {"tasks": [{"task": "one", "anchors": [anchor]}]}}


# Studies


def test_each_study_has_its_figure_with_the_numbers_of_the_file(tmp_path: Path) -> None:
    write_studies(write_run(tmp_path / "0", seed=0))
    later = studies()["probing"] | {"cosine": [94.0, 90.0, 80.0]}
    write_studies(write_run(tmp_path / "1", seed=1), probing=later)
    figures = figures_of(write_page(load_runs([tmp_path]), tmp_path / "page.html"))
    kinds = ["curves", "matrix", "forgetting", "probing", "distance", "new-old", "confusion", "bias", "loss", "cost"]
    assert [re.sub(r"-er-0$", "", key.removeprefix("benchmark-0-")) for key in figures] == kinds
    for figure in figures.values():
        graph_objects.Figure(data=figure["data"], layout=figure["layout"])
    probing = figures["benchmark-0-probing-er-0"]["data"]
    assert [(trace["name"], trace["y"]) for trace in probing] == [
        ("observed", [90.0, 75.0, 60.0]),
        ("cosine probe", [93.0, 89.0, 82.0]),
        ("linear probe", [91.0, 86.0, 82.0]),
    ]
    assert probing[1]["error_y"]["array"] == pytest.approx([2**0.5, 2**0.5, 8**0.5])
    distance = figures["benchmark-0-distance-er-0"]["data"]
    assert [(trace["x"], trace["y"]) for trace in distance] == [
        ([1, 2, 3], [0.1, 0.3, 0.5]),
        ([2, 3], [0.1, 0.4]),
        ([3], [0.2]),
    ]
    old = figures["benchmark-0-new-old-er-0"]["data"][1]
    assert (old["name"], old["x"], old["y"]) == ("old", [1, 2, 3], [None, 0.3, 0.45])
    bias = figures["benchmark-0-bias-er-0"]["data"]
    assert [(trace["name"], trace["x"], trace["y"]) for trace in bias] == [
        ("A", [1, 2, 3], [1.0, 0.9, 0.8]),
        ("B", [1, 2, 3], [0.0, -0.1, -0.2]),
    ]


def test_distances_are_summed_up_by_hand(tmp_path: Path) -> None:
    write_studies(write_run(tmp_path / "run"))
    source = write_page(load_runs([tmp_path / "run"]), tmp_path / "page.html").read_text()
    table = source[source.index('aria-label="Distances"') :].split("</table>")[0]
    heads = re.findall(r"<button type=\"button\">([^<]+)<", table)
    assert heads == [
        "method",
        "last new",
        "last old",
        "last all",
        "average new",
        "average old",
        "average all",
        "old - new",
    ]
    found = [float(value) for value in re.findall(r'<td class="number" data-value="([^"]+)"', table)]
    assert found == pytest.approx([0.2, 0.45, 0.35, 0.15, 0.375, 0.275, 0.25])


def test_figures_side_by_side_share_their_axis(tmp_path: Path) -> None:
    write_studies(write_run(tmp_path / "a", "Near"))
    far = studies()["tracking"] | {"distance": [[0.1], [0.3, 0.1], [1.0, 0.4, 0.2]]}
    write_studies(write_run(tmp_path / "b", "Far"), tracking=far)
    figures = figures_of(write_page(load_runs([tmp_path]), tmp_path / "page.html"))
    ranges = [figures[f"benchmark-0-distance-{name}"]["layout"]["yaxis"]["range"] for name in ("near-0", "far-1")]
    assert ranges[0] == ranges[1] == [0, 1.06]


def test_the_gallery_shows_pictures_or_texts_and_marks_neighbours_of_other_classes(tmp_path: Path) -> None:
    text = {"example": 1, "label": "<sport>", "text": "The <b>match</b>", "word": [7, 12], "neighbours": []}
    tasks = [*studies()["gallery"]["tasks"], {"task": "<two>", "from": "network", "anchors": [text]}]
    write_studies(write_run(tmp_path / "run"), gallery={"tasks": tasks})
    source = write_page(load_runs([tmp_path / "run"]), tmp_path / "page.html").read_text()
    gallery = source[source.index('<figure class="gallery"') :].split("</figure>")[0]
    assert gallery.count(f'<img src="data:image/png;base64,{PICTURE}"') == 3
    opened = re.findall(r"<details( open)?><summary>(.*?)</summary>", gallery)
    assert opened == [
        (" open", "task 1 <small>by the teacher</small>"),
        ("", "&lt;two&gt; <small>by the network</small>"),
    ]
    assert re.findall(r'<span class="(same|other)">(. \w+)</span><small>([\d.]+)', gallery) == [
        ("same", "✓ cat", "0.100"),
        ("other", "✗ dog", "0.250"),
    ]
    words = "<blockquote>The &lt;b&gt;<mark>match</mark>&lt;/b&gt;</blockquote><b>&lt;sport&gt;</b>"
    assert words in gallery


def test_a_study_that_was_not_made_says_why_and_leaves_no_section(tmp_path: Path) -> None:
    reasons = {name: {"skipped": f"no {name}"} for name in studies()}
    write_studies(write_run(tmp_path / "a", "ER"), **reasons)
    write_studies(write_run(tmp_path / "b", "SEQ"), **reasons)
    page = write_page(load_runs([tmp_path]), tmp_path / "page.html")
    text = Tags(page.read_text()).text
    assert "probing of ER, SEQ: no probing" in text
    assert not {"Probing", "Distances", "Neighbours", "Bias correction"} & set(
        re.findall("<h3>(.*?)<", page.read_text())
    )


@pytest.mark.parametrize(
    ("study", "says"),
    [
        ({"probing": {"observed": [1.0, 2.0]}}, "3 numbers"),
        ({"probing": {"cosine": [1.0, 2.0, 3.0]}}, "observed"),
        ({"probing": {"observed": [1.0, 2.0, "x"]}}, "3 numbers"),
        ({"probing": {"observed": [1.0, 2.0, 3.0], "cosine": 4.0}}, "3 numbers"),
        ({"probing": [1.0]}, "must be an object"),
        ({"bias": {"A": [1.0, 1.0, 1.0]}}, "'B'"),
        ({"tracking": studies()["tracking"] | {"old": [0.1]}}, "'old'"),
        ({"tracking": studies()["tracking"] | {"distance": [[1.0], [1.0], [1.0]]}}, "row t with t numbers"),
        ({"gallery": {}}, "'tasks'"),
        (gallery({"label": "cat", "image": PICTURE}), "'neighbours'"),
        (gallery(example("cat", neighbours=[example("cat", distance=0.1)])), "'same'"),
        (gallery({"label": "cat", "image": 'x" onerror="alert(1)', "neighbours": []}), "PNG"),
        (gallery({"label": "cat", "text": "a cat", "word": [2], "neighbours": []}), "'word'"),
        (gallery({"label": "cat", "neighbours": []}), "'text'"),
    ],
)
def test_a_damaged_study_is_named(tmp_path: Path, study: dict[str, Any], says: str) -> None:
    folder = write_studies(write_run(tmp_path / "run"), **study)
    with pytest.raises(DataError) as error:
        load_runs([tmp_path])
    assert str(folder / "studies.json") in str(error.value)
    assert says in str(error.value)


# Published numbers and cost


def test_published_numbers_stand_beside_ours_with_the_difference(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "ER", config={"alpha": 1})
    write_run(tmp_path / "b", "ER", config={"alpha": 2}, A_last=62.0)
    write_run(tmp_path / "c", "SEQ")
    published = {("ER", "A_last"): (58.5, 0.5), ("ER (alpha=2)", "A_last"): (63.25, None), ("MTL", "FWT"): (1.0, None)}
    page = write_page(load_runs([tmp_path]), tmp_path / "page.html", published=published)
    table = page.read_text().split("</table>")[0]
    assert re.findall(r"<button type=\"button\">([\w]+)<", table)[:5] == [
        "method",
        "seeds",
        "A_last",
        "published",
        "A_avg",
    ]
    assert re.findall(r"<button type=\"button\">([\w]+)<", table)[5:] == ["A_new", "FGT", "FWT", "seconds"]
    cells = re.findall(r'<td class="number published" data-value="([\d.]+)">([\d.]+)<small>(.*?)</small>', table)
    assert cells == [("58.5", "58.5", " ± 0.5 (+1.5)"), ("63.25", "63.2", " (-1.2)")]
    figure = figures_of(page)["benchmark-0-published"]
    assert [trace["x"] for trace in figure["data"]] == [[60.0, 58.5], [60.0], [58.5], [62.0, 63.25], [62.0], [63.25]]
    assert ">published<" not in write_page(load_runs([tmp_path]), tmp_path / "page.html").read_text()


def test_passes_and_memory_are_drawn_where_they_were_recorded(tmp_path: Path) -> None:
    write_run(tmp_path / "0", seed=0, passes=1000, peak_memory_mb=300.0, kept=[1_000_000, 3_000_000, 2_000_000])
    write_run(tmp_path / "1", seed=1, passes=3000, peak_memory_mb=310.0, kept=[1_000_000, 4_000_000, 5_000_000])
    write_run(tmp_path / "2", "SEQ")
    figures = figures_of(write_page(load_runs([tmp_path]), tmp_path / "page.html"))
    assert [trace["x"] for trace in figures["benchmark-0-cost"]["data"]] == [[12.0], [12.0]]
    assert [trace["x"] for trace in figures["benchmark-0-cost-passes"]["data"]] == [[2000.0]]
    assert [trace["x"] for trace in figures["benchmark-0-cost-peak-memory-mb"]["data"]] == [[305.0]]
    assert [trace["x"] for trace in figures["benchmark-0-cost-kept-mb"]["data"]] == [[4.0]]


def test_entities_have_a_table_of_every_score_averaged_over_tasks(tmp_path: Path) -> None:
    scores = {"macro_f1": 40.0, "macro_f1_own": 60.0, "micro_f1": 50.0, "precision": 45.0, "recall": 55.0}
    for seed, foreign in ((0, (10.0, 20.0, 30.0)), (1, (0.0, 0.0, 12.0))):
        tasks = [scores | {"foreign_rate": rate} for rate in foreign]
        write_run(tmp_path / f"{seed}", "ER", seed=seed, score="seqeval macro F1", entities=tasks)
    old = [{"micro_f1": 70.0, "precision": 70.0, "recall": 70.0, "foreign_rate": 0.0}] * 3  # without the macro F1s
    write_run(tmp_path / "old", "SEQ", score="macro F1", entities=old)
    page = write_page(load_runs([tmp_path]), tmp_path / "page.html").read_text()
    table = page.split("<h3>Entity scores</h3>")[1].split("</table>")[0]
    titles = ["method", "macro F1", "own types", "micro F1", "precision", "recall", "foreign"]
    assert re.findall(r"<button type=\"button\">([\w ]+)<", table) == titles
    rows = [re.findall(r'data-value="([\d.]*)">', row) for row in table.split("<tr data-method")[1:]]
    assert rows == [["40.0", "60.0", "50.0", "45.0", "55.0", "12.0"], ["", "", "70.0", "70.0", "70.0", "0.0"]]
    write_run(tmp_path / "pictures" / "run")
    pictures = write_page(load_runs([tmp_path / "pictures"]), tmp_path / "pictures.html")
    assert "Entity scores" not in pictures.read_text()


def class_rows(page: Path, part: str) -> list[list[str]]:
    """The cells of the table of classes, without the chips in its headings."""
    table = page.read_text().split(f"<h3>{part}</h3>")[1].split("</table>")[0]
    return [re.findall(r'data-value="([^"]*)"', row) for row in table.split("<tr>")[2:]]


def test_each_class_has_a_row_with_its_task_and_a_column_for_each_method(tmp_path: Path) -> None:
    names = [str(number) for number in range(6)]
    for seed, score in ((0, 40.0), (1, 60.0)):
        write_run(tmp_path / f"er-{seed}", "ER", seed, per_class=dict.fromkeys(names, score))
    write_run(tmp_path / "seq", "SEQ", per_class={**dict.fromkeys(names, 10.0), "5": None})
    page = write_page(load_runs([tmp_path]), tmp_path / "page.html")
    rows = class_rows(page, "Classes")
    assert rows[0] == ["0", "1", "50.0", "10.0"]
    assert rows[5] == ["5", "3", "50.0", ""]
    assert len(rows) == 6
    write_run(tmp_path / "none" / "run", per_class=None)
    assert "<h3>Classes</h3>" not in write_page(load_runs([tmp_path / "none"]), tmp_path / "n.html").read_text()


def test_each_entity_type_has_a_row_with_its_f1(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", per_class=None, confusion=None, per_type={"person": 70.0, "place": 30.0})
    about = json.loads((run / "run.json").read_text()) | {"modality": "token"}
    types = ("person", "place", "time")
    tags = {kind: ["O"] * (kind == "person") + [f"B-{kind}", f"I-{kind}"] for kind in types}
    about["tasks"] = [{"name": kind, "classes": own} for kind, own in tags.items()]
    (run / "run.json").write_text(json.dumps(about))
    page = write_page(load_runs([run]), tmp_path / "page.html")
    assert class_rows(page, "Types") == [["person", "1", "70.0"], ["place", "2", "30.0"]]


def test_more_classes_than_fit_open_when_asked_for(tmp_path: Path) -> None:
    matrix = [[50.0] * (t + 1) for t in range(11)]
    write_run(tmp_path / "run", matrix=matrix)
    source = write_page(load_runs([tmp_path]), tmp_path / "page.html").read_text()
    assert "<details><summary>22 classes</summary>" in source.split("<h3>Classes</h3>")[1]


def test_scores_are_called_what_the_runs_call_them(tmp_path: Path) -> None:
    write_run(tmp_path / "run", score="macro F1")
    page = write_page(load_runs([tmp_path]), tmp_path / "page.html")
    assert "<h3>Macro F1 over tasks</h3>" in page.read_text()
    assert figures_of(page)["benchmark-0-curves"]["layout"]["yaxis"]["title"]["text"] == "A_t: average macro F1 (%)"


# Many methods


def test_many_methods_come_best_first_and_as_rows_instead_of_bands_and_bars(tmp_path: Path) -> None:
    names = write_many(tmp_path / "runs")
    page = write_page(load_runs([tmp_path / "runs"]), tmp_path / "page.html")
    figures = figures_of(page)
    assert re.findall(r'<tr data-method="([^"]+)"', page.read_text()) == names
    curves, rows, forgetting = (figures[f"benchmark-0-{kind}"] for kind in ("curves", "curves-table", "forgetting"))
    assert [trace["name"] for trace in curves["data"]] == names  # no bands
    looks = {(trace["line"]["color"], trace["line"]["dash"]) for trace in curves["data"]}
    assert len(looks) == 22
    assert rows["methods"] == forgetting["methods"] == rows["data"][0]["y"] == names
    assert rows["data"][0]["z"][0] == [90.0, 75.0, 60.0]
    assert forgetting["data"][0]["z"][0] == [30.0, 30.0]
    assert forgetting["data"][0]["z"][-1] == [pytest.approx(30 / 22, abs=0.01)] * 2
    for figure in figures.values():
        graph_objects.Figure(data=figure["data"], layout=figure["layout"])


def test_few_methods_keep_their_order_and_need_no_picker(tmp_path: Path) -> None:
    names = write_many(tmp_path / "runs", methods=7, seeds=1)
    source = write_page(load_runs([tmp_path / "runs"]), tmp_path / "page.html").read_text()
    assert re.findall(r'<tr data-method="([^"]+)"', source) == names[::-1]
    assert 'class="picker"' not in source


# Browser

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")
pytestmark = pytest.mark.xdist_group("page")  # all tests share one browser


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with everything: studies, published numbers, costs, two benchmarks, hostile names."""
    folder = tmp_path_factory.mktemp("full")
    for number, method in enumerate(("SEQ", "ER", "BiC", "BaCE")):
        for seed in (0, 1):
            matrix = [[score * (1 + 0.1 * number) * 0.7 for score in row] for row in MATRIX]
            cost = {"passes": 5000 * number + 100 * seed, "peak_memory_mb": 300.0, "kept": [5_000_000] * 3}
            write_studies(write_run(folder / "runs" / f"{method}-{seed}", method, seed, matrix=matrix, **cost))
    write_evil(folder / "runs" / "evil")
    write_run(folder / "runs" / "one task", matrix=[[97.0]], FGT=None, benchmark="single")
    published = {("BaCE", "A_last"): (60.0, 1.0), ("ER", "A_last"): (40.0, None)}
    return write_page(load_runs([folder / "runs"]), folder / "page.html", published=published)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    write_many(folder / "runs", methods=12)
    return write_page(load_runs([folder / "runs"]), folder / "page.html")


@needs_chromium
def test_a_column_of_the_classes_goes_with_its_method(tab: Page, many: Path) -> None:
    tab.open(many)
    tab.run("document.querySelector('.picker button[data-first=\"5\"]').click()")
    heads = "#benchmark-0-classes thead th[data-method]"
    assert len(tab.run(SHOWN.replace("SELECTOR", heads))) == 5
    assert tab.complaints == []


def show_all(tab: Page) -> None:
    tab.run("document.querySelectorAll('.more').forEach(more => { if (!more.hidden) more.click(); })")


UNDRAWN = """Array.from(document.querySelectorAll('[data-figure]'))
  .filter(plot => !plot.querySelector('.main-svg')).map(plot => plot.dataset.figure)"""
# Elements that reach out of the window, except those that scroll in their own box.
WIDE = """Array.from(document.querySelectorAll('body *')).filter(e => !e.closest('.scroll, pre, svg') &&
  e.getClientRects().length && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"""
INKS = """[getComputedStyle(document.body).color,
  ...Array.from(document.querySelectorAll('.xtick text')).map(text => text.style.fill)]"""
SHOWN = """Array.from(document.querySelectorAll('SELECTOR'))
  .filter(element => element.offsetParent !== null).map(element => element.dataset.method)"""


@needs_chromium
@pytest.mark.parametrize(
    ("kind", "width", "dark"), [("full", 1280, False), ("full", 390, True), ("many", 1280, True), ("many", 390, False)]
)
def test_every_figure_is_drawn_without_complaint_or_overflow(
    tab: Page, request: pytest.FixtureRequest, kind: str, width: int, dark: bool
) -> None:
    page: Path = request.getfixturevalue(kind)
    tab.open(page, width=width, dark=dark)
    show_all(tab)
    assert tab.run(UNDRAWN) == []
    assert tab.run("document.querySelectorAll('[data-figure]').length") == len(figures_of(page))
    assert tab.run("[document.documentElement.scrollWidth, innerWidth]") == [width, width]
    assert tab.run(WIDE) == []
    assert tab.run("Array.from(document.images).every(image => image.complete && image.naturalWidth > 0)")
    ink = {False: "rgb(29, 35, 41)", True: "rgb(228, 231, 234)"}[dark]
    assert set(tab.run(INKS)) == {ink}
    assert tab.complaints == []
    shot = tab.screenshot(ARTEFACTS / f"report-{kind}-{width}-{'dark' if dark else 'light'}.png")
    assert shot.read_bytes().startswith(b"\x89PNG")


@needs_chromium
def test_twenty_tasks_keep_their_numbers_upright_on_a_phone(tab: Page, tmp_path: Path) -> None:
    matrix = [[90.0 - t + i for i in range(t + 1)] for t in range(20)]
    for number in range(8):
        write_run(tmp_path / "runs" / str(number), f"Method {number}", matrix=matrix, confusion=None)
    tab.open(write_page(load_runs([tmp_path / "runs"]), tmp_path / "page.html"), width=390)
    kinds = ("curves", "curves-table", "forgetting", "loss")
    ticks = "Array.from(document.querySelectorAll('[data-figure=\"benchmark-0-KIND\"] .xtick text'))"
    for kind in kinds:
        found = ticks.replace("KIND", kind)
        assert 3 <= tab.run(f"{found}.length") <= 13, kind
        assert not any(re.search(r"rotate\((?!0)", how) for how in tab.run(f"{found}.map(t => t.outerHTML)")), kind
    assert tab.complaints == []


def order(tab: Page) -> list[str]:
    rows: list[str] = tab.run(
        "Array.from(document.querySelectorAll('#benchmark-0 .sortable tr[data-method]')).map(r => r.dataset.method)"
    )
    return rows


@needs_chromium
def test_the_table_sorts_by_click_and_by_keyboard(tab: Page, tmp_path: Path) -> None:
    for name, FWT, last in (("None", None, 50.0), ("Low", 9.0, 40.0), ("High", 80.0, 60.0)):
        write_run(tmp_path / "runs" / name, name, FWT=FWT, A_last=last)
    runs = load_runs([tmp_path / "runs" / name for name in ("None", "Low", "High")])
    tab.open(write_page(runs, tmp_path / "page.html"))
    assert order(tab) == ["None", "Low", "High"]
    tab.run("document.querySelectorAll('.sortable th button')[6].click()")
    assert order(tab) == ["High", "Low", "None"]  # the better values come first
    tab.run("document.querySelectorAll('.sortable th button')[6].click()")
    assert order(tab) == ["Low", "High", "None"]  # missing values come last in both directions
    assert tab.run("Array.from(document.querySelectorAll('[aria-sort]')).map(h => h.getAttribute('aria-sort'))") == [
        "ascending"
    ]
    tab.run("document.querySelectorAll('.sortable th button')[1].focus()")
    tab.press("Tab")
    tab.press("Enter")
    assert order(tab) == ["High", "None", "Low"]
    tab.press(" ")
    assert order(tab) == ["Low", "None", "High"]
    assert tab.complaints == []


@needs_chromium
def test_figures_and_galleries_are_saved_as_svg_in_dark_ink(tab: Page, full: Path) -> None:
    tab.open(full, dark=True)
    # A download is a click on a link to a blob, so catch both.
    caught = """new Promise(done => {
      const make = URL.createObjectURL;
      let last = null;
      URL.createObjectURL = blob => { last = blob; return make(blob); };
      HTMLAnchorElement.prototype.click = function () { last.text().then(text => done([this.download, text])); };
      BUTTON.dispatchEvent(new MouseEvent('click', {bubbles: true}));
    })"""
    camera = "document.querySelector('[data-figure$=\"-0-curves\"] .modebar-btn')"
    name, svg = tab.run(caught.replace("BUTTON", camera))
    assert name == "digits-curves.svg"
    assert svg.startswith("<svg")
    assert "rgb(29, 35, 41)" in svg
    assert "rgb(228, 231, 234)" not in svg
    assert "BaCE" in svg
    name, svg = tab.run(caught.replace("BUTTON", "document.querySelector('.gallery .save')"))
    assert name == "digits-neighbours-bace.svg"
    assert svg.count("<image ") == 3
    assert "✗ dog" in svg


@needs_chromium
def test_the_reader_chooses_which_of_many_methods_to_see(tab: Page, many: Path) -> None:
    tab.open(many)
    best = [f"Method {number}" for number in ("11", "10", "09", "08", "07", "06")]
    maps = SHOWN.replace("SELECTOR", "#benchmark-0-task-by-task figure")
    assert tab.run(maps) == best
    assert tab.run("document.querySelector('#benchmark-0-task-by-task .more').textContent") == "Show 6 more"
    show_all(tab)
    assert len(tab.run(maps)) == 12
    tab.run("document.querySelector('.picker button[data-first=\"5\"]').click()")
    assert tab.run("document.querySelector('.picker output').textContent") == "5 of 12"
    assert tab.run(maps) == best[:5]
    assert tab.run(SHOWN.replace("SELECTOR", ".sortable tr[data-method]")) == best[:5]
    drawn = "document.querySelector('[data-figure=\"benchmark-0-curves\"]').data.map(trace => trace.legendgroup)"
    assert tab.run(drawn) == best[:5]
    rows = "document.querySelector('[data-figure=\"benchmark-0-forgetting\"]').data[0].y"
    assert tab.run(rows) == best[:5]
    height = "document.querySelector('[data-figure=\"benchmark-0-forgetting\"]').clientHeight"
    low = tab.run(height)
    tab.run("document.querySelector('.picker input[value=\"Method 10\"]').click()")
    assert tab.run(drawn) == [best[0], *best[2:5]]
    tab.run("document.querySelector('.picker button[data-first=all]').click()")
    assert len(tab.run(drawn)) == 12
    assert tab.run(height) - low == pytest.approx(7 * 1.8 * 16, abs=1)  # 1.8rem for each of seven methods
    tab.run("document.querySelector('.picker button[data-first=\"0\"]').click()")
    assert tab.run(drawn) == []
    assert tab.complaints == []


@needs_chromium
def test_pointing_at_one_of_many_lines_lets_the_others_fade(tab: Page, many: Path) -> None:
    tab.open(many)
    tab.run("document.querySelector('#benchmark-0-accuracy-over-tasks').scrollIntoView()")
    lines = "Array.from(document.querySelectorAll('[data-figure=\"benchmark-0-curves\"] .trace'))"
    place = f"""(() => {{ const mark = {lines}[3].querySelector('.point').getBoundingClientRect();
      return [mark.x + mark.width / 2, mark.y + mark.height / 2]; }})()"""
    x, y = tab.run(place)
    tab.move(x - 1, y)
    tab.move(x, y)
    tab.run("new Promise(done => setTimeout(done, 200))")
    faded = tab.run(f"{lines}.map(line => line.classList.contains('away'))")
    assert [number for number, away in enumerate(faded) if not away] == [3]
