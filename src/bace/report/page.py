"""One HTML page for a comparison of runs. It loads nothing from elsewhere, so it can be mailed or archived."""

from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from markupsafe import Markup

from bace.errors import ConfigError
from bace.experiments.run_folder import Run
from bace.files import in_turn, write_whole
from bace.report import figures
from bace.report.markup import NOTHING, chip, count, joined, listed, part
from bace.report.runs import Group, groups, summary_rows
from bace.report.section import Published, Section, facts


def write_page(
    runs: Iterable[Run], path: Path, title: str | None = None, *, published: Published | None = None
) -> Path:
    """Write the comparison of `runs` to the HTML file `path` and return it. Needs plotly.

    The file is complete or untouched, never half written. Unfinished runs are listed, but no number includes them.
    Methods come in the given order, or best first if there are too many to distinguish by colour. `published` has
    numbers to show beside ours: (method or label of a row, metric) -> (mean, standard deviation or None).
    """
    runs, path = list(runs), Path(path)
    made, rows = groups(runs), summary_rows(runs)
    many = len({group.label for group in made}) > figures.MOST_BANDS
    if many:
        last = {(row.benchmark, row.label): row.A_last.mean if row.A_last else 0.0 for row in rows}
        made.sort(key=lambda group: -last[group.benchmark, group.label])
        rows.sort(key=lambda row: -last[row.benchmark, row.label])
    labels = list(dict.fromkeys(group.label for group in made))
    index = {label: number for number, label in enumerate(labels)}  # number -> colour, the same everywhere
    benchmarks = list(dict.fromkeys(group.benchmark for group in groups(runs)))
    sections = [
        Section(
            [group for group in made if group.benchmark == name],
            [row for row in rows if row.benchmark == name],
            index,
            published or {},
            anchor=f"benchmark-{number}",
        )
        for number, name in enumerate(benchmarks)
    ]
    content = {
        "title": title or _title(labels, benchmarks),
        "lead": _lead(made, benchmarks),
        "picker": _picker(labels, index, ranked=len(benchmarks) == 1) if many else "",
        "body": Markup("\n").join(section.html(titled=len(benchmarks) > 1) for section in sections),
        "unfinished": _unfinished([run for run in runs if run.metrics is None]),
        "figures": {key: figures.literal(figure) for section in sections for key, figure in section.drawn.items()},
        "plotly": _plotly(),
    }
    return _write(path, _rendered(content))


def _title(labels: Sequence[str], benchmarks: Sequence[str]) -> str:
    if not labels:
        return "No finished run yet"
    methods = listed(labels) if len(labels) <= 4 else f"{len(labels)} methods"
    return f"{methods} on {listed(benchmarks)}" if len(benchmarks) <= 3 else f"{methods}, {len(benchmarks)} benchmarks"


def _lead(made: Sequence[Group], benchmarks: Sequence[str]) -> Markup:
    """A few facts about what was compared, and links to the benchmarks if there are several."""
    if not made:
        return NOTHING
    if len(benchmarks) == 1:
        return facts(made)
    link = Markup('<li><a href="#benchmark-{}">{}</a></li>')
    links = joined(link.format(number, name) for number, name in enumerate(benchmarks))
    return Markup('<nav aria-label="Benchmarks"><ul class="links">{}</ul></nav>').format(links)


def _picker(labels: Sequence[str], index: dict[str, int], *, ranked: bool) -> Markup:
    """The choice of methods that the page shows, if there are many; it is also a legend that stays visible."""
    box = Markup('<label><input type="checkbox" checked value="{}">{}</label>')
    button = Markup('<button type="button" data-first="{}">{}</button>')
    choices = {"all": "all", "0": "none"} | ({"5": "best 5"} if ranked else {})
    return Markup(
        '<details class="picker"><summary>Methods shown: <output>{0} of {0}</output></summary>'
        '<div class="choices"><p>{1}</p>{2}</div></details>'
    ).format(
        len(labels),
        Markup(" ").join(button.format(first, name) for first, name in choices.items()),
        joined(box.format(label, chip(label, index)) for label in labels),
    )


def _unfinished(runs: Sequence[Run]) -> Markup:
    if not runs:
        return NOTHING
    item = Markup("<li>{} on {}, seed {} ({}): {} done</li>")
    done = [f"{len(run.matrix)} of {count(len(run.tasks), 'task')}" for run in runs]
    items = joined(
        item.format(run.method, run.benchmark, run.seed, run.folder.name, tasks)
        for run, tasks in zip(runs, done, strict=True)
    )
    aid = "These have no final scores yet. No number above includes them."
    return part("Unfinished runs", aid, Markup("<ul>{}</ul>").format(items))


def _rendered(content: dict[str, Any]) -> str:
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, keep_trailing_newline=True
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    template = environment.get_template("template.html")
    # The nonce depends on every letter of the page, so no text on the page can contain it, and a page that is made
    # again from the same runs is the same.
    nonce = sha256(template.render(content, nonce="").encode()).hexdigest()
    return template.render(content, nonce=nonce)


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ConfigError('The report page needs plotly: pip install "bace-cil[report]"') from None
    script: str = get_plotlyjs()
    return script


def _write(path: Path, page: str) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with in_turn(path.parent):
            write_whole(path, page)
    except OSError as error:
        raise ConfigError(f"the page '{path}' cannot be written ({error.strerror}): choose another --out") from error
    return path
