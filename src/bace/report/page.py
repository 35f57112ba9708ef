"""One HTML page for a comparison of runs: nothing is loaded from elsewhere, so it can be mailed or archived."""

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from bace.errors import ConfigError
from bace.report import figures, setting_figures
from bace.report.figures import Figure
from bace.report.runs import Group, Row, Run, Stat, flatten, groups, leaf, show, summary

Published = Mapping[tuple[str, str], tuple[float, float | None]]  # (method, metric) -> mean, deviation

# Column of the table, what it is, and whether more is better.
COLUMNS = (
    ("A_last", "average score over all tasks after the last one (%)", True),
    ("A_avg", "mean of that average over all steps (%)", True),
    ("FGT", "forgetting: mean drop from a task's best score to its last (points)", False),
    ("FWT", "forward transfer: mean score on a task before learning it, above chance (points)", True),
    ("seconds", "wall-clock time", False),
)


# What a run costs: the name in `Metrics`, for the reader, the unit, and what it is.
COSTS = (
    ("seconds", "Time", "seconds", "wall-clock, of a whole run"),
    ("passes", "Passes", "passes", "of examples through the encoder, forward; forward and backward counts three"),
    ("peak_memory_mb", "Peak memory", "MB", "most that was in use"),
    ("kept_mb", "Kept memory", "MB", "networks, statistics and slots held after a task"),
)
KEYS = ("", "6 2", "2 2", "6 2 2 2", "9 3", "9 2 2 2")  # figures.DASHES, as SVG draws them
MOST_SHOWN = 6  # heat maps shown before the reader asks for more
MOST_GALLERIES = 2
SHORT_COMMIT = 10  # letters of a commit's name that are enough to find it


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
    drawn: dict[str, Figure] = {}
    parts = [
        _benchmark(
            [group for group in made if group.benchmark == name],
            [row for row in rows if row.benchmark == name],
            index,
            drawn,
            anchor=f"benchmark-{number}",
            several=len(benchmarks) > 1,
            published=published or {},
        )
        for number, name in enumerate(benchmarks)
    ]
    title = title or _title(labels, benchmarks)
    page = Template(Path(__file__).with_name("template.html").read_text(encoding="utf-8")).substitute(
        title=escape(title),
        lead=_lead(made, benchmarks),
        picker=_picker(labels, index, ranked=len(benchmarks) == 1) if many else "",
        body="\n".join(parts),
        unfinished=_unfinished([run for run in runs if run.metrics is None]),
        figures=_embedded(drawn),
        plotly=_plotly(),
    )
    return _write(path, page)


def _title(labels: Sequence[str], benchmarks: Sequence[str]) -> str:
    if not labels:
        return "No finished run yet"
    methods = _listed(labels) if len(labels) <= 4 else f"{len(labels)} methods"
    return f"{methods} on {_listed(benchmarks)}" if len(benchmarks) <= 3 else f"{methods}, {len(benchmarks)} benchmarks"


def _lead(made: Sequence[Group], benchmarks: Sequence[str]) -> str:
    """What was compared, in a few facts; with several benchmarks, links to each."""
    if not made:
        return ""
    if len(benchmarks) == 1:
        return _facts(made)
    links = (f'<li><a href="#benchmark-{n}">{escape(name)}</a></li>' for n, name in enumerate(benchmarks))
    return f'<nav aria-label="Benchmarks"><ul class="links">{"".join(links)}</ul></nav>'


def _facts(made: Sequence[Group]) -> str:
    runs = [run for group in made for run in group.runs]
    sizes = sorted({(len(run.tasks), sum(len(task.classes) for task in run.tasks)) for run in runs})
    seeds = [tuple(run.seed for run in group.runs) for group in made]
    counts = sorted({len(s) for s in seeds})
    facts = {
        "Benchmark": made[0].benchmark + (f" ({runs[0].modality})" if runs[0].modality else ""),
        "Tasks": "; ".join(f"{_count(tasks, 'task')}, {_count(classes, 'class')}" for tasks, classes in sizes),
        "Memory": ", ".join(dict.fromkeys(memory for run in runs for memory in _memory(run.config))),
        "Seeds": f"{counts[0]} ({', '.join(map(str, seeds[0]))})"
        if len(set(seeds)) == 1
        else f"{counts[0]} to {counts[-1]} a method"
        if len(counts) > 1
        else f"{counts[0]} a method",
        "Methods": str(len(made)),
        "Commit": ", ".join(dict.fromkeys(run.commit[:SHORT_COMMIT] for run in runs if run.commit)),
    }
    items = (f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items() if value)
    return f'<dl class="facts">{"".join(items)}</dl>'


def _memory(config: dict[str, Any]) -> list[str]:
    """The memory budget, wherever the configuration keeps it."""
    found = [
        value for key, value in flatten(config).items() if leaf(key) == "memory" or f".{key}".endswith(".memory.size")
    ]
    return [str(value) for value in found if value is not None]


def _benchmark(
    made: Sequence[Group],
    rows: Sequence[Row],
    index: dict[str, int],
    drawn: dict[str, Figure],
    anchor: str,
    several: bool,
    published: Published,
) -> str:
    """The section of one benchmark. Its figures are put into `drawn`, by the name that the page refers to them with."""
    name, runs = made[0].benchmark, [run for group in made for run in group.runs]
    measure = _measure(runs)
    many = len(made) > figures.MOST_BANDS
    one_seed = all(len(group.runs) == 1 for group in made)
    mean = "" if one_seed else ", mean over seeds"
    spread = "" if one_seed else ", with one sample standard deviation over seeds"
    parts: list[str] = []
    links: list[str] = []

    def part(heading: str, aid: str, content: str) -> None:
        where = f"{anchor}-{_slug(heading)}"
        links.append(f'<li><a href="#{where}">{heading}</a></li>')
        parts.append(_part(heading, aid, content, where))

    def plot(kind: str, figure: Figure, shape: str = "wide", style: str = "") -> str:
        key = f"{anchor}-{kind}"
        drawn[key] = figure | {"file": _slug(f"{name}-{kind}")}
        if figure.get("many"):
            style = f"--height: {max(27.0, 6 + 1.2 * len(made)):.1f}rem"
        elif shape == "wide":
            style = f"--rows: {figures.legend_rows(made)}"
        return f'<div class="plot {shape}" data-figure="{key}" style="{style}"></div>'

    def tall(kind: str, figure: Figure, labels: Iterable[str]) -> str:
        """A plot with a line of its own for each method, whose label may be broken."""
        lines = sum(0.9 + 0.9 * (label.count("<br>") + 1) for label in labels)
        return plot(kind, figure, "tall", f"--lines: {lines:.1f}rem")

    def small(kind: str, group: Group, figure: Figure, note: str = "", shape: str = "square") -> str:
        heading = f"<figcaption>{_chip(group.label, index)}<small>{note}</small></figcaption>"
        drawing = plot(f"{kind}-{_slug(group.label)}-{index[group.label]}", figure, shape)  # slugs may coincide
        return f'<figure data-method="{escape(group.label)}">{heading}{drawing}</figure>'

    def each(kind: str, make: Callable[[Group], Figure | None]) -> str:
        """The methods that have this figure, side by side; empty if none has."""
        found = [(group, figure) for group in made if (figure := make(group)) is not None]
        if not found:
            return ""
        figures.same_scale([figure for _, figure in found])
        return _grid([small(kind, group, figure, shape="landscape") for group, figure in found], large=True)

    part("Summary", "", _table(rows, index, published))
    if pairs := _against(rows, published, "A_last"):
        aid = "A filled circle is our A_last, an open one the published number of the same method."
        figure = figures.against(pairs, index, "A_last (%)")
        part("Ours and published", aid, tall("published", figure, (label for label, _, _ in pairs)))

    point = " Point at a line, or touch it, to pick it out." if many else ""
    with_band = "" if many else spread
    aid = f"Each line is the average {measure} over the tasks seen so far{with_band}: the flatter, the less is lost."
    content = plot("curves", figures.curves(made, index, measure))
    if many:
        table = figures.by_task(made, lambda run: run.metrics.A if run.metrics else (), "%", "tasks learned")
        content += _scale() + tall("curves-table", table, table["data"][0]["y"])
    part(f"{measure[0].upper()}{measure[1:]} over tasks", aid + point, content)

    aid = (
        f"Row t is the model after task t, column i its {measure} on task i (%{mean}): "
        "a column that fades downwards is a task being forgotten."
    )
    most = max(len(run.tasks) for run in runs)
    maps = [small("matrix", group, figures.matrix(group, measure)) for group in made]
    part("Task by task", aid, _scale() + _grid(maps, large=most > figures.MOST_SMALL))

    if most == 1:
        part("Forgetting", "With a single task there is nothing to forget yet.", "")
    else:
        over = mean if many else spread
        aid = f"Points lost from a task's best {measure} to its last{over}; below zero, the task improved."
        figure = figures.forgetting(made, index)
        in_rows = many and _scale("points") + tall("forgetting", figure, figure["data"][0]["y"])
        part("Forgetting", aid, in_rows or plot("forgetting", figure))

    if content := each("probing", figures.probing):
        aid = (
            "What the model's own head gets right (observed) against fresh classifiers, trained on all data of the "
            f"tasks so far over its frozen features{spread}: the gap is knowledge that the head does not reach."
        )
        part("Probing", aid, content)

    if content := each("distance", figures.distances):
        aid = (
            "Distance between the mean feature of a class and its row in the head. First by task, each line from the "
            "task's own time on; then over new, old and all classes."
        )
        part("Distances", aid, _distance_table(made, index) + content + each("new-old", figures.new_and_old))

    confusions = [(group, found) for group in made if (found := figures.confusion(group)) is not None]
    if confusions:
        aid = (
            "Each row shows what the last model takes a class for (% of that class); lines part the tasks, "
            "so colour outside the blocks on the diagonal is confusion between old and new."
        )
        grid = [
            small("confusion", group, figure, f" {used} of {len(group.runs)} seeds" if used < len(group.runs) else "")
            for group, (figure, used) in confusions
        ]
        most = max(len(figure["data"][0]["z"]) for _, (figure, _) in confusions)
        part("Confusion", aid, _scale() + _grid(grid, large=most > figures.MOST_SMALL))

    if galleries := [gallery for group in made if (gallery := _gallery(group, index))]:
        aid = "Examples and their nearest neighbours in feature space, nearest first, with distances."
        key = (
            '<p class="note"><span class="same">✓ of the same class</span> <span class="other">✗ of another</span></p>'
        )
        part("Neighbours", aid, key + _grid(galleries, large=True, most=MOST_GALLERIES, kind="galleries"))

    if content := each("bias", figures.bias):
        part("Bias correction", "What it learned: the logits of new classes become A times the logit plus B.", content)

    if compared := setting_figures.compared(made):
        aid = f"Where methods ran with several values of a setting{spread}."
        drawings = {caption: plot(f"compared-{_slug(caption)}", fig, "landscape") for caption, fig in compared.items()}
        shown = [f"<figure><figcaption>{escape(c)}</figcaption>{drawing}</figure>" for c, drawing in drawings.items()]
        part("Settings compared", aid, _grid(shown, large=True))

    if (loss := figures.losses(made, index)) is not None:
        aid = "Mean loss of each epoch; methods minimise different sums, so compare shapes rather than heights."
        part("Training loss", aid + point, plot("loss", loss))

    costs = []
    for measured, heading, unit, meaning in COSTS:
        if (bar := figures.cost(made, index, measured, unit)) is not None:
            kind = "cost" if measured == "seconds" else f"cost-{_slug(measured)}"
            bars = tall(kind, bar, [trace["y"][0] for trace in bar["data"]])
            costs.append(f"<figure><figcaption>{heading} <small>{meaning}</small></figcaption>{bars}</figure>")
    if costs:
        aid = f"Of one run{spread}. Seconds are comparable only if all ran on the same machine, and nothing beside."
        part("Cost", aid, _grid(costs, large=len(costs) > 1, most=2 * len(COSTS), kind="costs"))

    aid = "What each method ran with: seeds, commit, versions and the complete configuration."
    part("Settings", aid, _skipped(made) + "".join(_settings(group, index) for group in made))
    header = f"<header><h2>{escape(name)}</h2>{_facts(made)}</header>" if several else ""
    contents = (
        f'<nav class="contents" aria-label="Contents of {escape(name)}"><ul class="links">{"".join(links)}</ul></nav>'
    )
    return f'<section class="benchmark" id="{anchor}">{header}{contents}{"".join(parts)}</section>'


def _measure(runs: Sequence[Run]) -> str:
    """What the percentages are of."""
    said = {run.metrics.score for run in runs if run.metrics is not None and run.metrics.score}
    if len(said) == 1:
        return said.pop()
    return "accuracy" if runs[0].modality in ("image", "text") else "score"


def _part(heading: str, aid: str, content: str, where: str = "") -> str:
    place = f' id="{where}"' if where else ""
    return f'<section class="part"{place}><h3>{heading}</h3>{f"<p>{escape(aid)}</p>" if aid else ""}{content}</section>'


def _scale(unit: str = "%") -> str:
    return f'<p class="scale" aria-hidden="true"><span>0</span><i></i><span>100 {unit}</span></p>'


def _grid(members: Sequence[str], *, large: bool = False, most: int = MOST_SHOWN, kind: str = "") -> str:
    """Figures side by side: the first `most` (half of that on a phone), the rest when the reader asks for them."""
    classes = f"grid{' large' if large else ''}{f' {kind}' if kind else ''}"
    more = '<p><button type="button" class="more" hidden></button></p>' if len(members) > most // 2 else ""
    return f'<div><div class="{classes}" data-most="{most}">{"".join(members)}</div>{more}</div>'


def _picker(labels: Sequence[str], index: dict[str, int], *, ranked: bool) -> str:
    """Which of many methods the page shows; it is also the legend that stays in reach."""
    boxes = "".join(
        f'<label><input type="checkbox" checked value="{escape(label)}">{_chip(label, index)}</label>'
        for label in labels
    )
    buttons = '<button type="button" data-first="all">all</button> <button type="button" data-first="0">none</button>'
    if ranked:
        buttons += ' <button type="button" data-first="5">best 5</button>'
    return (
        f'<details class="picker"><summary>Methods shown: <output>{len(labels)} of {len(labels)}</output></summary>'
        f'<div class="choices"><p>{buttons}</p>{boxes}</div></details>'
    )


def _against(rows: Sequence[Row], published: Published, metric: str) -> list[tuple[str, Stat, Stat]]:
    """Label, our number and the published one, of the rows that have both."""
    found = []
    for row in rows:
        ours, theirs = getattr(row, metric), _printed(row, published, metric)
        if ours is not None and theirs is not None:
            found.append((row.label, ours, theirs))
    return found


def _printed(row: Row, published: Published, metric: str) -> Stat | None:
    """The published number of a row: under its whole label, or else its method's name."""
    found = published.get((row.label, metric)) or published.get((row.method, metric))
    return None if found is None else Stat(*found)


def _table(rows: Sequence[Row], index: dict[str, int], published: Published) -> str:
    head = _heading("method", "", "") + _heading("seeds", "number of runs", "ascending")
    printed = [name for name, _, _ in COLUMNS if any(_printed(row, published, name) is not None for row in rows)]
    for name, meaning, more in COLUMNS:
        first = "descending" if more else "ascending"
        head += _heading(name, meaning, first, "↑" if more else "↓")
        if name in printed:
            head += _heading("published", f"{name} as published, and ours minus it", first)
    body = ""
    for row in rows:
        label = escape(row.label)
        body += f'<tr data-method="{label}"><th scope="row" data-value="{label}">{_chip(row.label, index)}</th>'
        body += f'<td class="number" data-value="{len(row.seeds)}">{len(row.seeds)}</td>'
        for name, _, more in COLUMNS:
            cell = getattr(row, name)
            others = [other.mean for r in rows if (other := getattr(r, name)) is not None]
            best = cell is not None and len(others) > 1 and cell.mean == (max if more else min)(others)
            body += _cell(cell, "best" if best else "")
            if name in printed:
                theirs = _printed(row, published, name)
                body += _cell(theirs, "published", f" ({cell.mean - theirs.mean:+.1f})" if cell and theirs else "")
        body += "</tr>"
    meanings = "; ".join(f"<b>{name}</b> {escape(meaning)}" for name, meaning, _ in COLUMNS[:4])
    several = any(len(row.seeds) > 1 for row in rows)
    return _sortable("Summary", head, body) + (
        f'<p class="note">{"Mean ± sample standard deviation over seeds. " if several else ""}{meanings}. '
        + ("<b>published</b> the paper's number (in brackets: ours minus it). " if printed else "")
        + "Arrows point to the better side, the best is bold; a column's heading sorts by it.</p>"
    )


def _distance_table(made: Sequence[Group], index: dict[str, int]) -> str:
    """The distances of new, old and all classes, where the study has them."""
    rows = [(group.label, row) for group in made if (row := figures.mean_distances(group))]
    if not rows:
        return ""
    head = _heading("method", "", "") + "".join(_heading(name, "", "ascending") for name in rows[0][1])
    body = "".join(
        f'<tr data-method="{escape(label)}"><th scope="row" data-value="{escape(label)}">{_chip(label, index)}</th>'
        + "".join(_cell(cell, decimals=3) for cell in row.values())
        + "</tr>"
        for label, row in rows
    )
    note = "last: after the last task; average: over the tasks from the second on; old - new: after the last task."
    return _sortable("Distances", head, body) + f'<p class="note">{note}</p>'


def _sortable(name: str, head: str, body: str) -> str:
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{name}"><table class="sortable">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _heading(name: str, meaning: str, first: str, arrow: str = "") -> str:
    """A column's heading, a button that sorts by it; without `first` it is a column of names."""
    kind = f' class="number" data-first="{first}"' if first else ""
    title = f' title="{escape(meaning)}"' if meaning else ""
    small = f'<small aria-hidden="true"> {arrow}</small>' if arrow else ""
    return f'<th scope="col"{kind}{title}><button type="button">{name}{small}</button></th>'


def _cell(cell: Stat | None, kind: str = "", after: str = "", decimals: int | None = None) -> str:
    if cell is None:
        return '<td class="number" data-value="">-</td>'
    shown = show(cell)
    if decimals is not None:
        shown = f"{cell.mean:.{decimals}f}" + ("" if cell.std is None else f" ± {cell.std:.{decimals}f}")
    mean, plus, spread = shown.partition(" ±")
    small = f"<small>{plus}{spread}{after}</small>" if plus or after else ""
    return f'<td class="number{f" {kind}" if kind else ""}" data-value="{cell.mean!r}">{mean}{small}</td>'


def _gallery(group: Group, index: dict[str, int]) -> str:
    """The gallery of the first seed that has one: a part that opens for each task, the first of them open."""
    for run in group.runs:
        tasks = run.studies.get("gallery", {}).get("tasks")
        if tasks:
            note = f" seed {run.seed}" if len(group.runs) > 1 else ""
            parts = "".join(
                f"<details{'' if number else ' open'}><summary>{escape(str(task['task']))}"
                f"{f' <small>by the {escape(str(eyes))}</small>' if (eyes := task.get('from')) else ''}</summary>"
                f"{''.join(map(_anchor, task['anchors']))}</details>"
                for number, task in enumerate(tasks)
            )
            heading = f"<figcaption>{_chip(group.label, index)}<small>{note}</small></figcaption>"
            file = _slug(f"{group.benchmark}-neighbours-{group.label}")
            attributes = f'class="gallery" data-method="{escape(group.label)}" data-file="{file}"'
            return f"<figure {attributes}>{heading}{parts}</figure>"
    return ""


def _anchor(anchor: dict[str, Any]) -> str:
    neighbours = "".join(_example(neighbour, "li") for neighbour in anchor["neighbours"])
    return f'<div class="anchor">{_example(anchor, "div")}<ol>{neighbours}</ol></div>'


def _example(example: dict[str, Any], tag: str) -> str:
    """A picture or text with its label: plain for an anchor, green or red for a neighbour."""
    label = escape(str(example["label"]))
    if example.get("image") is None:
        text = example["text"]
        begin, end = map(int, example.get("word") or (0, 0))  # the word that the label is for
        word = f"<mark>{escape(text[begin:end])}</mark>" if end else ""
        shown = f"<blockquote>{escape(text[:begin])}{word}{escape(text[end:])}</blockquote>"
    else:
        shown = f'<img src="data:image/png;base64,{example["image"]}" alt="{label}">'
    if "same" not in example:
        return f'<{tag} class="example">{shown}<b>{label}</b></{tag}>'
    kind, mark = ("same", "✓") if example["same"] else ("other", "✗")
    distance = f"<small>{example['distance']:.3f}</small>"
    return f'<{tag} class="example">{shown}<span class="{kind}">{mark} {label}</span>{distance}</{tag}>'


def _skipped(made: Sequence[Group]) -> str:
    """Which studies were not made, and why."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for group in made:
        for name, study in group.runs[0].studies.items():
            if "skipped" in study:
                reasons.setdefault((name, str(study["skipped"])), []).append(group.label)
    items = "".join(
        f"<li>{escape(name)} of {escape(', '.join(labels))}: {escape(reason)}</li>"
        for (name, reason), labels in reasons.items()
    )
    return f"<p>Studies that were not made:</p><ul>{items}</ul>" if items else ""


def _settings(group: Group, index: dict[str, int]) -> str:
    commits = list(dict.fromkeys((run.commit or "unknown")[:SHORT_COMMIT] for run in group.runs))
    rows = "".join(
        f'<tr><td class="number">{run.seed}</td><td>{escape(run.folder.name)}</td>'
        f"<td>{escape(run.commit or 'unknown')}</td>"
        f'<td class="number">{"-" if run.threads is None else run.threads}</td></tr>'
        for run in group.runs
    )
    first = group.runs[0]
    versions = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    tasks = "".join(f"<li>{escape(task.name)}: {escape(', '.join(task.classes))}</li>" for task in first.tasks)
    config = json.dumps(first.config, indent=2, ensure_ascii=False)
    return (
        f'<details data-method="{escape(group.label)}"><summary>{_chip(group.label, index)} '
        f"<small>commit {escape(', '.join(commits))}</small></summary>"
        '<div class="scroll"><table><thead><tr><th class="number">seed</th><th>folder</th><th>commit</th>'
        f'<th class="number">threads</th></tr></thead><tbody>{rows}</tbody></table></div>'
        + (f"<p>{escape(versions)}</p>" if versions else "")
        + f"<p>Configuration of seed {first.seed}:</p><pre>{escape(config)}</pre><p>Tasks of seed {first.seed}:</p>"
        f'<ol class="tasks">{tasks}</ol></details>'
    )


def _unfinished(runs: Sequence[Run]) -> str:
    if not runs:
        return ""
    items = "".join(
        f"<li>{escape(run.method)} on {escape(run.benchmark)}, seed {run.seed} ({escape(run.folder.name)}): "
        f"{len(run.matrix)} of {_count(len(run.tasks), 'task')} done</li>"
        for run in runs
    )
    return _part("Unfinished runs", "These have no final scores yet and enter no number above.", f"<ul>{items}</ul>")


def _chip(label: str, index: dict[str, int]) -> str:
    """A method's name behind a piece of its line, in its colour and dashes."""
    number = index[label]
    dashes = KEYS[figures.turn(number)]
    line = f'<path d="M0 5h22" stroke="{figures.colour(number)}"{f" stroke-dasharray={dashes!r}" if dashes else ""}/>'
    key = f'<svg class="key" viewBox="0 0 22 10" aria-hidden="true">{line}</svg>'
    return f'<span class="chip">{key}{escape(label)}</span>'


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
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(page)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)  # mkstemp's 0600 would keep a web server from showing the page
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    return path


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number} {noun if number == 1 else plural}"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
