"""One HTML page for a comparison of runs: nothing is loaded from elsewhere, so it can be mailed or archived."""

import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template

from bace.errors import ConfigError
from bace.files import write_whole
from bace.report import figures
from bace.report.figures import Figure
from bace.report.markup import chip, count, listed, part
from bace.report.runs import Group, Run, groups, summary
from bace.report.section import Published, Section, facts


def write_page(
    runs: Iterable[Run], path: Path, title: str | None = None, *, published: Published | None = None
) -> Path:
    """Write the comparison of `runs` to the HTML file `path` and return it. Needs plotly.

    The file is complete or untouched, never half written. Unfinished runs are listed, and enter no number. Methods come
    as given, and best first where they are too many to be told apart by colour. `published` has numbers to show beside
    ours: (method or label of a row, metric) -> (mean, standard deviation or None).
    """
    runs, path = list(runs), Path(path)
    made, rows = groups(runs), summary(runs)
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
    body = "\n".join(section.html(titled=len(benchmarks) > 1) for section in sections)
    title = title or _title(labels, benchmarks)
    page = Template(Path(__file__).with_name("template.html").read_text(encoding="utf-8")).substitute(
        title=escape(title),
        lead=_lead(made, benchmarks),
        picker=_picker(labels, index, ranked=len(benchmarks) == 1) if many else "",
        body=body,
        unfinished=_unfinished([run for run in runs if run.metrics is None]),
        figures=_embedded({key: figure for section in sections for key, figure in section.drawn.items()}),
        plotly=_plotly(),
    )
    return _write(path, page)


def _title(labels: Sequence[str], benchmarks: Sequence[str]) -> str:
    if not labels:
        return "No finished run yet"
    methods = listed(labels) if len(labels) <= 4 else f"{len(labels)} methods"
    return f"{methods} on {listed(benchmarks)}" if len(benchmarks) <= 3 else f"{methods}, {len(benchmarks)} benchmarks"


def _lead(made: Sequence[Group], benchmarks: Sequence[str]) -> str:
    """What was compared, in a few facts; with several benchmarks, links to each."""
    if not made:
        return ""
    if len(benchmarks) == 1:
        return facts(made)
    links = (f'<li><a href="#benchmark-{n}">{escape(name)}</a></li>' for n, name in enumerate(benchmarks))
    return f'<nav aria-label="Benchmarks"><ul class="links">{"".join(links)}</ul></nav>'


def _picker(labels: Sequence[str], index: dict[str, int], *, ranked: bool) -> str:
    """Which of many methods the page shows; it is also the legend that stays in reach."""
    boxes = "".join(
        f'<label><input type="checkbox" checked value="{escape(label)}">{chip(label, index)}</label>'
        for label in labels
    )
    buttons = '<button type="button" data-first="all">all</button> <button type="button" data-first="0">none</button>'
    if ranked:
        buttons += ' <button type="button" data-first="5">best 5</button>'
    return (
        f'<details class="picker"><summary>Methods shown: <output>{len(labels)} of {len(labels)}</output></summary>'
        f'<div class="choices"><p>{buttons}</p>{boxes}</div></details>'
    )


def _unfinished(runs: Sequence[Run]) -> str:
    if not runs:
        return ""
    items = "".join(
        f"<li>{escape(run.method)} on {escape(run.benchmark)}, seed {run.seed} ({escape(run.folder.name)}): "
        f"{len(run.matrix)} of {count(len(run.tasks), 'task')} done</li>"
        for run in runs
    )
    return part("Unfinished runs", "These have no final scores yet and enter no number above.", f"<ul>{items}</ul>")


def _embedded(drawn: dict[str, Figure]) -> str:
    # "<" is the one character that could end the script element, or open a comment, from within a name.
    return json.dumps(drawn, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


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
        write_whole(path, page)
    except OSError as error:
        raise ConfigError(f"the page '{path}' cannot be written ({error.strerror}): choose another --out") from error
    return path
