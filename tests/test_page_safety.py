"""The report page of a stranger's runs shows the content of their files as text and executes none of it."""

import csv
import html
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, Page, browser
from markupsafe import Markup
from run_folders import Tags, example, figures_of, studies, write_run

from bace.errors import DataError
from bace.report import figures, load_runs, write_page
from bace.report.markup import part

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")
pytestmark = pytest.mark.xdist_group("page")  # all tests share one browser
POLICY = re.compile(r"<meta http-equiv=\"Content-Security-Policy\" content=\"(.*?)\">")


def payload(number: int) -> str:
    """A text that breaks out of text, attributes with both quotes, comments, titles, styles and scripts, and that has a
    meaning for Jinja, str.format, string.Template and plotly's hover templates."""
    run = f"window.hit={1000 + number}"
    return (
        f"~{number}\"'><script>{run}</script><img src=x onerror={run}></title></style></script><script>{run}</script>"
        f'--><svg onload="{run}"></svg><a href="javascript:{run}">go</a><b onmouseover={run} onfocus={run} tabindex=0>'
        f"{{{{ 7 * 7 }}}}{{0}}{{}}%{{x}}$title&amp;javascript:{run}~"
    )


class Poisoned:
    """A run folder with a payload wherever the page reads a text."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.where: list[str] = []  # the place of each payload, by its number
        self.refused: set[str] = set()
        for name in ("run.json", "metrics.json", "studies.json"):
            self.poison(name, json.loads, json.dumps)
        self.poison(
            "log.jsonl",
            lambda text: [json.loads(line) for line in text.splitlines()],
            lambda events: "".join(json.dumps(event) + "\n" for event in events),
        )
        self.poison("matrix.csv", lambda text: list(csv.reader(text.splitlines())), in_csv)

    def poison(self, name: str, read: Callable[[str], Any], write: Callable[[Any], str]) -> None:
        path = self.folder / name
        content = read(path.read_text())
        for holder, key, where in list(places(content)):
            before, number = holder.get(key) if isinstance(holder, dict) else holder[key], len(self.where)
            holder[payload(number) if key == "" else key] = payload(number)
            path.write_text(write(content))
            try:
                load_runs([self.folder])
            except DataError:
                self.refused.add(f"{name}{where}")
                holder.pop(payload(number)) if key == "" else holder.__setitem__(key, before)
            else:
                self.where.append(f"{name}{where}")
        path.write_text(write(content))


def places(content: Any, where: str = "") -> Iterator[tuple[Any, Any, str]]:
    """Every value in JSON with its container, its key and its path; "" is a key that an object does not have yet."""
    keys = list(content) if isinstance(content, dict) else range(len(content))
    for key in keys:
        if isinstance(content[key], dict | list):
            yield from places(content[key], f"{where}.{key}")
        elif key not in ("event", "loss", payload(906)):  # the page does not show an event that lacks these
            yield content, key, f"{where}.{key}"
    if isinstance(content, dict):
        yield content, "", f"{where}.new"


def in_csv(rows: list[list[str]]) -> str:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Poisoned:
    folder = tmp_path_factory.mktemp("poisoned") / "run <img src=x onerror=window.hit=-1>"
    write_run(folder, score="accuracy", entities=[{"macro_f1": 1.0}] * 3, kept=[1, 2, 3], passes=9)
    text = {"label": "cat", "text": "a cat", "word": [2, 5], "neighbours": [example("x", distance=0.1, same=True)]}
    tasks = [*studies()["gallery"]["tasks"], {"task": "two", "from": "network", "anchors": [text]}]
    with (folder / "log.jsonl").open("a") as log:
        event = {"event": "epoch", "task": 3, "stage": "main", "epoch": 9, "loss": 1.0, "terms": {payload(906): 1.0}}
        log.write(json.dumps(event))
    made = studies() | {"gallery": {"tasks": tasks}, "other": {"skipped": "no reason"}}
    (folder / "studies.json").write_text(json.dumps(made))
    return Poisoned(folder)


@pytest.fixture(scope="module")
def page(poisoned: Poisoned) -> Path:
    """A page with further runs, which add all other parts of a page: many methods, two benchmarks, compared settings
    and an unfinished run."""
    runs, name = [poisoned.folder], payload(900)
    for number in range(8):
        runs.append(write_run(poisoned.folder.parent / f"{number}", f"{number}{payload(901)}", benchmark=name))
    for number, K in enumerate((payload(902), payload(903))):
        config = {"K": K, "memory": {"size": number}}
        runs.append(write_run(poisoned.folder.parent / f"K{number}", "K" + name, benchmark=name, config=config))
    half = write_run(poisoned.folder.parent / "half", payload(904), benchmark=payload(905), finished=False)
    return write_page(load_runs([*runs, half]), poisoned.folder.parent / "page.html")


SHOWN = {
    *("run.json.method", "run.json.benchmark", "run.json.modality", "run.json.commit", "run.json.versions.torch"),
    *("run.json.versions.new", "run.json.config.memory", "run.json.config.seed", "run.json.config.new"),
    *("run.json.tasks.name", "run.json.tasks.classes", "metrics.json.score", "metrics.json.confusion.classes"),
    *("studies.json.gallery.tasks.task", "studies.json.gallery.tasks.from", "studies.json.gallery.tasks.anchors.label"),
    *("studies.json.gallery.tasks.anchors.text", "studies.json.gallery.tasks.anchors.neighbours.label"),
    *("studies.json.other.skipped", "log.jsonl.stage"),
}
REFUSED = {
    *("run.json.seed", "matrix.csv", "metrics.json.A", "metrics.json.A_last", "metrics.json.confusion.counts"),
    *("studies.json.new", "studies.json.probing.observed", "studies.json.bias.A", "studies.json.tracking.distance"),
    *("studies.json.gallery.tasks.anchors.image", "studies.json.gallery.tasks.anchors.neighbours.distance"),
    *("log.jsonl.task", "log.jsonl.epoch"),
}


def test_texts_are_shown_literally_and_refused_where_numbers_belong(poisoned: Poisoned, page: Path) -> None:
    source = page.read_text()
    texts = [Tags(source).text, *(html.unescape(text) for text in strings(figures_of(page)))]
    shown, literally = "\n".join(texts), set()
    there = {int(number) for number in re.findall(r"window\.hit=1(\d{3})", source)}
    for number in there:
        settings = json.dumps(payload(number))[1:-1]  # settings are shown as JSON
        assert payload(number) in shown or settings in shown, number
        literally.add(re.sub(r"\.\d+", "", poisoned.where[number]) if number < 900 else str(number))
    assert literally >= SHOWN | {str(number) for number in range(900, 907)}
    assert payload(poisoned.where.index("metrics.json.score")) in texts[0]  # the measure, shown in a heading
    assert poisoned.folder.name in texts[0]
    assert {re.sub(r"\.\d+", "", where) for where in poisoned.refused} >= REFUSED
    assert not any(where.startswith("matrix.csv") for where in poisoned.where)


def strings(content: Any) -> Iterator[str]:
    if isinstance(content, dict | list):
        for part in content.values() if isinstance(content, dict) else content:
            yield from strings(part)
    elif isinstance(content, str):
        yield content


# -- in a browser


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    with browser() as opened:
        yield opened


TOUCH_EVERYTHING = """(() => {
  document.querySelectorAll('.more').forEach(more => { if (!more.hidden) more.click(); });
  document.querySelectorAll('details').forEach(part => { part.open = true; });
  for (const plot of document.querySelectorAll('[data-figure]'))
    try { Plotly.Fx.hover(plot, plot.data.map((_, k) => ({curveNumber: k, pointNumber: 0}))); } catch (error) {}
  for (const element of document.querySelectorAll('body *')) {
    for (const kind of ['mouseover', 'mouseenter', 'focus', 'toggle'])
      element.dispatchEvent(new Event(kind, {bubbles: true}));
    if (element.matches('a') || element.closest('a')) element.dispatchEvent(new MouseEvent('click', {bubbles: true}));
  }
  return new Promise(done => setTimeout(done, 300));
})()"""
FOREIGN = """document.querySelectorAll("img:not([src^='data:image/png;base64,']), [onload], [onerror], [onmouseover], "
  + "[onfocus], a:not([href^='#']):not([data-title]), script:not([nonce]):not([type='application/json'])").length"""
SCREEN = "Array.from(document.querySelectorAll('svg text')).map(text => text.textContent).join('\\n')"


@needs_chromium
def test_nothing_runs(tab: Page, page: Path) -> None:
    tab.open(page)
    tab.run(TOUCH_EVERYTHING)
    assert tab.run("window.hit") is None
    assert tab.run(FOREIGN) == 0
    assert tab.run("document.querySelectorAll('script').length") == 3
    drawn = tab.run(SCREEN)
    assert "~902\"'><script>" in drawn  # the value of a setting on an axis
    assert "&lt;" not in drawn
    assert tab.complaints == []  # no payload even tried to run, so the policy had nothing to stop


@needs_chromium
def test_escaping_alone_would_do(tab: Page, page: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare.html"
    bare.write_text(POLICY.sub("", page.read_text()))
    tab.open(bare)
    tab.run(TOUCH_EVERYTHING)
    assert tab.run("window.hit") is None
    assert tab.complaints == []


@needs_chromium
def test_the_policy_alone_would_do(tab: Page, page: Path, tmp_path: Path) -> None:
    source = page.read_text()
    broken = tmp_path / "broken.html"
    broken.write_text(source.replace("<main>", f"<main>{payload(0)}<base href=https://example.org/>", 1))
    tab.open(broken)
    tab.run(TOUCH_EVERYTHING)
    assert tab.run("window.hit") is None
    assert tab.run("document.querySelectorAll('[onerror]').length") == 1  # the payload is on the page but was stopped
    assert any("Content Security Policy" in complaint for complaint in tab.complaints)
    assert not tab.run("document.baseURI").startswith("https")
    unprotected = tmp_path / "unprotected.html"
    unprotected.write_text(POLICY.sub("", broken.read_text()))
    tab.open(unprotected)
    assert tab.run("window.hit") == 1000  # the payload works without protection


# -- the structure of the page


def test_the_policy_allows_the_pages_own_scripts_by_a_nonce_that_no_text_can_hold(page: Path) -> None:
    source = page.read_text()
    policy = POLICY.search(source)
    assert policy is not None
    rules = dict(rule.split(" ", 1) for rule in policy[1].split("; "))
    nonce = re.fullmatch(r"'nonce-([0-9a-f]{64})'", rules.pop("script-src"))
    assert nonce is not None
    unsafe = "'unsafe-inline'"
    assert rules == {
        "default-src": "'none'",
        "style-src": unsafe,
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    assert source.count(nonce[1]) == 3  # the policy and two scripts
    assert source.index("Content-Security-Policy") < source.index("<title>")  # before any text from a file


def test_a_page_made_again_is_the_same_and_one_of_other_runs_has_another_nonce(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", "SEQ")
    first, again, other = (
        write_page(load_runs([tmp_path / name]), tmp_path / f"{number}.html").read_bytes()
        for number, name in enumerate("aab")
    )
    assert first == again
    nonces = {re.search(rb"'nonce-(.*?)'", source)[1] for source in (first, other)}  # type: ignore[index]
    assert len(nonces) == 2


def test_what_nobody_escaped_is_escaped() -> None:
    tag = "<script>"
    assert tag not in part(tag, tag, tag, tag)  # type: ignore[arg-type]
    drawn = figures.literal({"name": tag, "data": [{"text": [tag, Markup("<br>")], "y": (1.5, tag, None)}]})
    assert drawn == {
        "name": "&lt;script&gt;",
        "data": [{"text": ["&lt;script&gt;", "<br>"], "y": [1.5, "&lt;script&gt;", None]}],
    }
