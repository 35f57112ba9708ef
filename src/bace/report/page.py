"""One HTML page for a comparison of runs: nothing is loaded from elsewhere, so it can be mailed or archived."""

import json
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from bace.errors import ConfigError
from bace.report import figures
from bace.report.figures import Figure
from bace.report.runs import Group, Row, Run, flatten, groups, leaf, show, summary

# Column of the table, what it is, and whether more is better.
COLUMNS = (
    ("A_last", "average score over all tasks after the last one (%)", True),
    ("A_avg", "mean of that average over all steps (%)", True),
    ("FGT", "forgetting: mean drop from a task's best score to its last (points)", False),
    ("FWT", "forward transfer: mean score on a task before learning it, above chance (points)", True),
    ("seconds", "wall-clock time", False),
)


def write_page(runs: Iterable[Run], path: Path, title: str | None = None) -> Path:
    """Write the comparison of `runs` to the HTML file `path` and return it. Needs plotly.

    The file is complete or untouched, never half written. Unfinished runs are listed, and enter no number.
    """
    runs, path = list(runs), Path(path)
    made, rows = groups(runs), summary(runs)
    labels = list(dict.fromkeys(group.label for group in made))
    index = {label: number for number, label in enumerate(labels)}  # number -> colour, the same everywhere
    benchmarks = list(dict.fromkeys(group.benchmark for group in made))
    drawn: dict[str, Figure] = {}
    parts = [
        _benchmark(
            [group for group in made if group.benchmark == name],
            [row for row in rows if row.benchmark == name],
            index,
            drawn,
            anchor=f"benchmark-{number}",
            several=len(benchmarks) > 1,
        )
        for number, name in enumerate(benchmarks)
    ]
    title = title or _title(labels, benchmarks)
    page = Template(Path(__file__).with_name("template.html").read_text(encoding="utf-8")).substitute(
        title=escape(title),
        lead=_lead(made, benchmarks),
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
) -> str:
    """The section of one benchmark. Its figures are put into `drawn`, by the name that the page refers to them with."""
    name, runs = made[0].benchmark, [run for group in made for run in group.runs]
    measure = {"image": "accuracy", "text": "accuracy", "token": "macro F1"}.get(runs[0].modality, "score")
    one_seed = all(len(group.runs) == 1 for group in made)
    mean = "" if one_seed else ", mean over seeds"
    spread = "" if one_seed else ", with one sample standard deviation over seeds"

    def plot(kind: str, figure: Figure, shape: str = "wide", style: str = "") -> str:
        key = f"{anchor}-{kind}"
        drawn[key] = figure | {"file": _slug(f"{name}-{kind}")}
        style = style or (f"--rows: {figures.legend_rows(made)}" if shape == "wide" else "")
        return f'<div class="plot {shape}" data-figure="{key}" style="{style}"></div>'

    def small(kind: str, group: Group, figure: Figure, note: str = "") -> str:
        heading = f"<figcaption>{_chip(group.label, index)}<small>{note}</small></figcaption>"
        drawing = plot(f"{kind}-{_slug(group.label)}-{index[group.label]}", figure, "square")  # slugs may coincide
        return f"<figure>{heading}{drawing}</figure>"

    parts = [_part("Summary", "", _table(rows, index))]
    aid = f"Each line is the average {measure} over the tasks seen so far{spread}: the flatter, the less is lost."
    parts.append(
        _part(
            f"{measure[0].upper()}{measure[1:]} over tasks", aid, plot("curves", figures.curves(made, index, measure))
        )
    )
    aid = (
        f"Row t is the model after task t, column i its {measure} on task i (%{mean}): "
        "a column that fades downwards is a task being forgotten."
    )
    most = max(len(run.tasks) for run in runs)
    parts.append(
        _part("Task by task", aid, _grid([small("matrix", g, figures.matrix(g, measure)) for g in made], most))
    )
    if most > 1:
        aid = f"Points lost from a task's best {measure} to its last{spread}; below zero, the task improved."
        parts.append(_part("Forgetting", aid, plot("forgetting", figures.forgetting(made, index))))
    else:
        parts.append(_part("Forgetting", "With a single task there is nothing to forget yet.", ""))
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
        parts.append(_part("Confusion", aid, _grid(grid, most)))
    if (figure := figures.losses(made, index)) is not None:
        aid = "Mean loss of each epoch; methods minimise different sums, so compare shapes rather than heights."
        parts.append(_part("Training loss", aid, plot("loss", figure)))
    if (figure := figures.cost(made, index)) is not None:
        aid = f"Wall-clock seconds of a whole run{spread}; comparable only if all ran on the same machine."
        lines = max(trace["y"][0].count("<br>") for trace in figure["data"]) + 1
        height = 5 + (1.1 + 1.1 * lines) * len(figure["data"])
        parts.append(_part("Cost", aid, plot("cost", figure, style=f"height: {height:.1f}rem")))
    aid = "What each method ran with: seeds, commit, versions and the complete configuration."
    parts.append(_part("Settings", aid, "".join(_settings(group, index) for group in made)))
    header = f"<header><h2>{escape(name)}</h2>{_facts(made)}</header>" if several else ""
    return f'<section class="benchmark" id="{anchor}">{header}{"".join(parts)}</section>'


def _part(heading: str, aid: str, content: str) -> str:
    return f'<section class="part"><h3>{heading}</h3>{f"<p>{escape(aid)}</p>" if aid else ""}{content}</section>'


def _grid(heat_maps: Sequence[str], cells: int) -> str:
    scale = '<p class="scale" aria-hidden="true"><span>0 %</span><i></i><span>100 %</span></p>'
    return f'{scale}<div class="grid{" large" if cells > figures.MOST_SMALL else ""}">{"".join(heat_maps)}</div>'


def _table(rows: Sequence[Row], index: dict[str, int]) -> str:
    head = '<th scope="col"><button type="button">method</button></th>'
    head += '<th scope="col" class="number"><button type="button">seeds</button></th>'
    for name, meaning, more in COLUMNS:
        first = "descending" if more else "ascending"
        arrow = "↑" if more else "↓"
        head += (
            f'<th scope="col" class="number" data-first="{first}" title="{escape(meaning)}">'
            f'<button type="button">{name}<small aria-hidden="true"> {arrow}</small></button></th>'
        )
    body = ""
    for row in rows:
        body += f'<tr><th scope="row" data-value="{escape(row.label)}">{_chip(row.label, index)}</th>'
        body += f'<td class="number" data-value="{len(row.seeds)}">{len(row.seeds)}</td>'
        for name, _, more in COLUMNS:
            cell = getattr(row, name)
            if cell is None:
                body += '<td class="number" data-value="">-</td>'
                continue
            others = [other.mean for r in rows if (other := getattr(r, name)) is not None]
            best = len(others) > 1 and cell.mean == (max if more else min)(others)
            mean, plus, spread = show(cell).partition(" ±")
            small = f"<small>{plus}{spread}</small>" if plus else ""
            body += f'<td class="number{" best" if best else ""}" data-value="{cell.mean!r}">{mean}{small}</td>'
        body += "</tr>"
    meanings = "; ".join(f"<b>{name}</b> {escape(meaning)}" for name, meaning, _ in COLUMNS[:4])
    several = any(len(row.seeds) > 1 for row in rows)
    return (
        f'<div class="scroll"><table class="sortable"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        f'<p class="note">{"Mean ± sample standard deviation over seeds. " if several else ""}{meanings}. '
        "Arrows point to the better side, the best is bold; a column's heading sorts by it.</p>"
    )


def _settings(group: Group, index: dict[str, int]) -> str:
    commits = list(dict.fromkeys(run.commit or "unknown" for run in group.runs))
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
        f"<details><summary>{_chip(group.label, index)} <small>commit {escape(', '.join(commits))}</small></summary>"
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
    return f'<span class="chip"><i style="background:{figures.colour(index[label])}"></i>{escape(label)}</span>'


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
