"""The page's figures, as plain plotly.js dictionaries.

They contain no theme: the page's script sets fonts, grids and heat-map colours for the reader's light or dark theme.
"""

import math
import textwrap
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from markupsafe import Markup, escape

from bace.experiments.run_folder import Epoch, Run
from bace.report.runs import Group, Stat, leaf, setting_names, show, stat

Figure = dict[str, Any]
UNDRAWN = ("legendgroup", "methods", "file")  # for the page's script, which compares them with names

# Okabe and Ito's colour-blind-safe palette, with a grey for black and yellow, which vanish on a dark or a white page.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C")
# With more methods than colours, each further round of colours has its own line and marker.
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star")
PATTERNS = ("", "/", ".", "x", "-", "+")
MOST_SMALL = 12  # the most cells per side of a heat map that is a third of the page wide; larger ones get half of it
MOST_ANNOTATED = 20  # the largest number of cells per side that leaves room for numbers
MOST_NAMED = 20  # classes that still have room for a name on an axis
MOST_CELLS = 200  # a side of a confusion map; more classes share cells, or a page of many methods would not open
MOST_BARS = 60
MOST_BANDS = len(PALETTE)  # methods whose bands and bars can still be told apart; more are "many"
# The names of classifiers in a probing study and on the page.
PROBES = {"observed": "observed", "cosine": "cosine probe", "linear": "linear probe"}

EXTRA = Markup("{}<extra>{}</extra>")  # a hover text, and whose it is


def colour(index: int) -> str:
    """The colour of the method with this number, the same in every figure and table of a page."""
    return PALETTE[index % len(PALETTE)]


def turn(index: int) -> int:
    """The round of colours of this method: methods of one colour differ in line and marker."""
    return index // len(PALETTE) % len(DASHES)


def curves(groups: Sequence[Group], index: dict[str, int], measure: str) -> Figure:
    """The average score over the tasks so far, after each task: a line per method with a band of one standard
    deviation."""
    traces: list[dict[str, Any]] = []
    for group in groups:
        runs = [run.metrics.A for run in group.runs if run.metrics is not None]
        points = [stat(values) for values in zip(*runs, strict=True)]
        line = [point.mean for point in points if point is not None]
        spread = [point.std or 0.0 for point in points if point is not None]
        x = list(range(1, len(line) + 1))
        banded = len(runs) > 1 and len(line) > 1
        if banded and len(groups) <= MOST_BANDS:
            band = {
                "x": x + x[::-1],
                "y": [m + s for m, s in zip(line, spread, strict=True)]
                + [m - s for m, s in zip(line[::-1], spread[::-1], strict=True)],
                "fill": "toself",
                "fillcolor": colour(index[group.label]),
                "opacity": 0.16,
                "line": {"width": 0},
                "mode": "lines",
                "hoverinfo": "skip",
                "showlegend": False,
                "legendgroup": group.label,
            }
            traces.append({"type": "scatter", **band})
        trace = _line(group, index) | {"x": x, "y": line, "customdata": [show(p) for p in points]}
        trace["hovertemplate"] = EXTRA.format("%{customdata}", text(group.label))
        if not banded:  # a single point has no band
            trace["error_y"] = {"type": "data", "array": spread, "visible": len(runs) > 1}
        traces.append(trace)
    tasks = max(len(group.runs[0].tasks) for group in groups)
    layout = {
        "xaxis": {"title": {"text": "tasks learned"}, **_task_axis(tasks)},
        "yaxis": {"title": {"text": f"A_t: average {measure} (%)"}},
    }
    return _of_methods(traces, layout, groups)


def by_task(groups: Sequence[Group], values: Callable[[Run], Sequence[float]], unit: str, axis: str) -> Figure:
    """A heat map with a row per method and a column per task, mean over seeds. It stays readable when tens of lines do
    not."""
    width = max(len(values(group.runs[0])) for group in groups)
    cells: list[list[float | None]] = []
    spread: list[list[str]] = []
    for group in groups:
        points = [stat(column) for column in zip(*map(values, group.runs), strict=True)]
        cells.append([None if p is None else round(p.mean, 2) for p in points] + [None] * (width - len(points)))
        spread.append([show(p) for p in points] + [""] * (width - len(points)))
    names = [_wrapped(group.label, 26) for group in groups]
    trace = _heat_map(cells, list(range(1, width + 1)), names) | {"customdata": spread}
    trace["hovertemplate"] = EXTRA.format(f"%{{y}}, task %{{x}}: %{{customdata}} {unit}", "")
    layout = {
        "xaxis": {"title": {"text": axis}, "range": [0.5, width + 0.5], "showgrid": False, **_task_axis(width)},
        "yaxis": {"type": "category", "autorange": "reversed", "showgrid": False},
    }
    figure: Figure = {"data": [trace, *_numbers(trace, decimals=1 if width <= 10 else 0)], "layout": layout}
    return figure | {"methods": [group.label for group in groups]}


def matrix(group: Group, measure: str) -> Figure:
    """Mean over seeds of the score on task i (column) after learning task t (row)."""
    tasks = len(group.runs[0].tasks)
    cells: list[list[float | None]] = [[None] * tasks for _ in range(tasks)]
    spread = [[""] * tasks for _ in range(tasks)]
    for t in range(tasks):
        for i in range(t + 1):
            cell = stat([run.matrix[t][i] for run in group.runs])
            cells[t][i] = None if cell is None else round(cell.mean, 2)
            spread[t][i] = show(cell)
    numbers = list(range(1, tasks + 1))
    trace = _heat_map(cells, numbers, numbers) | {"customdata": spread}
    said = Markup("task %{{x}} after task %{{y}}: {} %{{customdata}}").format(text(measure))
    trace["hovertemplate"] = EXTRA.format(said, "")
    axis = _task_axis(tasks, most=10) | {"showgrid": False, "constrain": "domain"}
    ends = [0.5, tasks + 0.5]
    layout = {
        "xaxis": {"title": {"text": f"{measure} on task"}, "range": ends, **axis},
        "yaxis": {"title": {"text": "after task"}, "range": ends[::-1], "scaleanchor": "x", **axis},
    }
    return {"data": [trace, *_numbers(trace, decimals=1 if tasks <= 6 else 0)], "layout": layout}


def forgetting(groups: Sequence[Group], index: dict[str, int]) -> Figure:
    """The drop of each task's score from its best to the end, with a bar per method. The mean of a method's bars is its
    FGT."""
    if len(groups) > MOST_BANDS:
        return by_task(groups, forgotten, "points", "points lost of task")
    tasks = max(len(group.runs[0].tasks) for group in groups) - 1
    form = _bar if tasks * len(groups) <= MOST_BARS else _line  # bars of a pixel or two cannot be told apart
    traces = []
    for group in groups:
        per_run = [forgotten(run) for run in group.runs]
        points = [stat(values) for values in zip(*per_run, strict=True)]
        means = [point.mean for point in points if point is not None]
        trace = form(group, index) | {"x": list(range(1, len(means) + 1)), "y": means}
        trace["customdata"] = [show(p) for p in points]
        trace["hovertemplate"] = EXTRA.format("%{customdata}", text(group.label))
        trace["error_y"] = error_bars(points)
        traces.append(trace)
    layout = {
        "xaxis": {"title": {"text": "task"}, **_task_axis(tasks), "showgrid": False},
        "yaxis": {"title": {"text": "points lost"}},
        "bargap": 0.25,
    }
    return _of_methods(traces, layout, groups)


def confusion(group: Group) -> tuple[Figure, int] | None:
    """The predictions of the last model for each class, and the number of seeds; None without counts.

    Seeds are added up if their classes arrived in the same order; otherwise only the first seed is shown. With more
    than MOST_CELLS classes, neighbouring classes share a row and a column.
    """
    found = [(run, run.metrics.confusion) for run in group.runs if run.metrics is not None and run.metrics.confusion]
    if not found:
        return None
    run, first = found[0]
    same = all(other.classes == first.classes and one.tasks == run.tasks for one, other in found)
    used = [c.counts for _, c in found] if same else [first.counts]
    size = len(first.classes)
    per = max(1, -(-size // MOST_CELLS))  # classes that share a cell
    starts = range(0, size, per)
    counts = _merged([[sum(cells) for cells in zip(*rows, strict=True)] for rows in zip(*used, strict=True)], per)
    shares = [[round(100 * n / total, 2) if total else None for n in row] for row in counts for total in [sum(row)]]
    names = [text(first.classes[start]) for start in starts]
    if per > 1:
        last = (text(first.classes[min(start + per, size) - 1]) for start in starts)
        names = [Markup("{} to {}").format(*ends) for ends in zip(names, last, strict=True)]
    trace = _heat_map(shares, names, names) | {"customdata": counts}
    trace["hovertemplate"] = EXTRA.format("%{y} taken for %{x}: %{z:.1f} % (%{customdata})", "")
    task_of = {name: number for number, task in enumerate(run.tasks, 1) for name in task.classes}
    owners = [task_of.get(name) for name in first.classes]
    edges = [i / per - 0.5 for i in range(1, size) if owners[i] != owners[i - 1]]
    end = len(counts) - 0.5
    width = 1.5 if size <= MOST_NAMED else 0.5
    shapes = []
    for edge in edges:
        across = {"x0": -0.5, "x1": end, "y0": edge, "y1": edge}
        down = {"x0": edge, "x1": edge, "y0": -0.5, "y1": end}
        shapes += [{"type": "line", "line": {"width": width}, **line} for line in (across, down)]
    axis: dict[str, Any] = {"type": "category", "showgrid": False, "zeroline": False, "constrain": "domain"}
    if size <= MOST_NAMED:
        ticks = [text(name) for name in shortened(first.classes, 14)]
        axis |= {"tickmode": "array", "tickvals": list(range(size)), "ticktext": ticks}
        titles = ("taken for", "true class")
    else:  # too many to name: the number of each task is in the middle of its classes
        known = sorted({owner for owner in owners if owner is not None})
        known = known[:: -(-len(known) // 10)]
        middles = [(fmean(i for i in range(size) if owners[i] == owner) + 0.5) / per - 0.5 for owner in known]
        axis |= {"tickmode": "array", "tickvals": middles, "ticktext": [str(owner) for owner in known]}
        titles = ("taken for class of task", "true class of task")
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": titles[0]}, "range": [-0.5, end], **axis},
        "yaxis": {"title": {"text": titles[1]}, "range": [end, -0.5], "scaleanchor": "x", **axis},
        "shapes": shapes,
    }
    numbers = _numbers(trace, decimals=0, zeros=False)  # they would only hide the rest
    return {"data": [trace, *numbers], "layout": layout}, len(used)


def _merged(counts: list[list[int]], per: int) -> list[list[int]]:
    """The same counts with `per` neighbouring classes in one row and column; there may be fewer in the last."""
    starts = range(0, len(counts), per)
    rows = [[sum(row[start : start + per]) for start in starts] for row in counts]
    return [[sum(column) for column in zip(*rows[start : start + per], strict=True)] for start in starts]


def shortened(names: Sequence[str], most: int) -> list[str]:
    """Names of at most `most` letters, which stay different: they are cut at the end, else in the middle, else also
    numbered."""
    for head in (most - 1, most // 2, 2):
        tail = most - 1 - head
        short = [n if len(n) <= most else f"{n[:head]}…{n[len(n) - tail :]}" for n in names]
        if len(set(short)) == len(set(names)):
            return short
    numbers = [f"{number}…" for number in range(1, len(names) + 1)]
    return [n if len(n) <= most else own + n[len(own) - most :] for n, own in zip(names, numbers, strict=True)]


def losses(groups: Sequence[Group], index: dict[str, int]) -> Figure | None:
    """Training loss by epoch, mean over seeds. Every task is one unit wide, however many epochs a method takes."""
    traces: list[dict[str, Any]] = []
    for group in groups:
        x: list[float | None] = []
        y: list[float | None] = []
        hover: list[str] = []
        logs = [{(e.task, e.stage, e.epoch): e for e in run.epochs} for run in group.runs]
        shared = [key for key in logs[0] if all(key in log for log in logs)]
        for task in sorted({key[0] for key in shared}):
            keys = [key for key in shared if key[0] == task]
            for position, key in enumerate(keys):
                epochs = [log[key] for log in logs]
                x.append(round(task - 1 + (position + 0.5) / len(keys), 4))
                y.append(fmean(epoch.loss for epoch in epochs))
                hover.append(_loss_text(epochs))
            x, y, hover = [*x, None], [*y, None], [*hover, ""]  # no line from one task to the next
        if x:
            trace = _line(group, index) | {"x": x, "y": y, "text": hover}
            trace["mode"] = "lines+markers" if len(x) <= 60 else "lines"
            trace["marker"] = {**trace["marker"], "size": 4}
            trace["hovertemplate"] = EXTRA.format("%{text}", text(group.label))
            traces.append(trace)
    if not traces:
        return None
    tasks = max(len(group.runs[0].tasks) for group in groups)
    every = -(-tasks // 20)
    drawn = [value for trace in traces for value in trace["y"] if value is not None]
    logarithmic = min(drawn) > 0 and max(drawn) > 30 * min(drawn)
    axis: dict[str, Any] = {"title": {"text": "task"}, "range": [0, tasks], "showgrid": False, "zeroline": False}
    axis |= {"tickmode": "array", "tickvals": [t + 0.5 for t in range(0, tasks, every)]}
    axis["ticktext"] = [str(t + 1) for t in range(0, tasks, every)]
    line = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "layer": "below", "line": {"width": 1, "dash": "dot"}}
    layout = {
        "xaxis": axis,
        "yaxis": {"title": {"text": "training loss"}} | ({"type": "log", "dtick": 1} if logarithmic else {}),
        "shapes": [{**line, "x0": t, "x1": t} for t in range(1, tasks)],
    }
    figure = _of_methods(traces, layout, groups)
    figure["layout"]["hovermode"] = "closest"  # methods differ in their epochs
    return figure


def cost(groups: Sequence[Group], index: dict[str, int], measure: str, unit: str) -> Figure | None:
    """The cost of each method by a measure in metrics.json, mean over seeds; None if it was not recorded."""
    traces = []
    for group in groups:
        taken = stat([None if run.metrics is None else getattr(run.metrics, measure) for run in group.runs])
        if taken is not None:
            trace = _bar(group, index) | {"orientation": "h", "x": [taken.mean], "y": [_wrapped(group.label, 20)]}
            trace |= {"error_x": error_bars([taken]), "customdata": [show(taken)], "showlegend": False}
            trace["hovertemplate"] = EXTRA.format(f"%{{customdata}} {unit}", text(group.label))
            traces.append(trace)
    layout = {
        "xaxis": {"title": {"text": unit}, "rangemode": "tozero"},
        "yaxis": {"type": "category", "autorange": "reversed", "showgrid": False},
        "barmode": "overlay",
        "bargap": 0.4,
    }
    return {"data": traces, "layout": layout} if traces else None


def against(rows: Sequence[tuple[str, Stat, Stat]], index: dict[str, int], name: str) -> Figure:
    """Ours (filled, in the method's colour) and the published number (open) of each row: label, ours, published."""
    traces: list[dict[str, Any]] = []
    for label, ours, published in rows:
        y = _wrapped(label, 20)
        common = {"type": "scatter", "y": [y], "legendgroup": label, "showlegend": False}
        traces.append(common | {"x": [ours.mean, published.mean], "y": [y, y], "mode": "lines", "hoverinfo": "skip"})
        traces[-1]["line"] = {"color": colour(index[label]), "width": 2}
        for kind, point, symbol in (("ours", ours, "circle"), ("published", published, "circle-open")):
            marker = {"color": colour(index[label]), "size": 11, "symbol": symbol}
            marker["line"] = {"width": 2, "color": colour(index[label])}
            trace = common | {"x": [point.mean], "mode": "markers", "marker": marker, "error_x": error_bars([point])}
            trace["hovertemplate"] = EXTRA.format(f"{kind} {show(point)}", text(label))
            traces.append(trace)
    layout = {
        "xaxis": {"title": {"text": name}},
        "yaxis": {"type": "category", "autorange": "reversed"},
        "hovermode": "closest",
    }
    return {"data": traces, "layout": layout}


def probing(group: Group) -> Figure | None:
    """Observed accuracy and the accuracy of fresh classifiers on the same features, after each task; None without
    study."""
    found = studies(group, "probing")
    if not found:
        return None
    traces = []
    for number, key in enumerate(key for key in found[0] if all(key in study for study in found)):
        traces.append(_series([study[key] for study in found], PROBES.get(key, key), number))
    axis = _task_axis(len(group.runs[0].tasks), most=10)
    layout = {
        "xaxis": {"title": {"text": "tasks learned"}, **axis},
        "yaxis": {"title": {"text": "accuracy (%)"}, "range": [0, 103]},
        "hovermode": "x unified",
    }
    return {"data": traces, "layout": layout | LEGEND}


def distances(group: Group) -> Figure | None:
    """Distance between features and class embeddings over time, a line for each task; None without study."""
    found = studies(group, "tracking")
    if not found:
        return None
    tasks = len(group.runs[0].tasks)
    traces = []
    for task in range(tasks):
        columns = [[row[task] for row in study["distance"][task:]] for study in found]
        trace = _series(columns, f"task {task + 1}", 0, first=task + 1)
        shade = _blend(PALETTE[0], PALETTE[4], task / max(1, tasks - 1))  # early tasks blue, late ones orange
        trace["line"]["color"] = trace["marker"]["color"] = shade
        traces.append(trace | {"showlegend": task in (0, tasks - 1)})
    layout = {
        "xaxis": {"title": {"text": "tasks learned"}, **_task_axis(tasks, most=10)},
        "yaxis": {"title": {"text": "distance"}, "rangemode": "tozero"},
        "hovermode": "closest",
    }
    return {"data": traces, "layout": layout | LEGEND}


def new_and_old(group: Group) -> Figure | None:
    """Mean distance over the classes of the current task, of earlier tasks and of all tasks; None without study."""
    return _parts(group, "tracking", ("new", "old", "all"), {"title": {"text": "distance"}, "rangemode": "tozero"})


def bias(group: Group) -> Figure | None:
    """The two parameters of bias correction after each task; None without study."""
    return _parts(group, "bias", ("A", "B"), {"title": {"text": "learned value"}})


def same_scale(made: Sequence[Figure]) -> None:
    """Give figures that stand side by side one y axis, so that they can be compared."""
    drawn = [y for figure in made for trace in figure["data"] for y in trace["y"] if y is not None]
    low, high = min(0.0, *drawn), max(0.0, *drawn)
    margin = 0.06 * (high - low) or 1.0
    for figure in made:
        figure["layout"]["yaxis"]["range"] = [low - margin if low < 0 else 0.0, high + margin]


def mean_distances(group: Group) -> dict[str, Stat | None]:
    """Distances of new, old and all classes after the last task, and on average from the second task on, the first with
    old classes; and old minus new after the last task. Empty without study."""
    found = studies(group, "tracking")
    row: dict[str, Stat | None] = {}
    if found and len(group.runs[0].tasks) > 1:
        for name in ("new", "old", "all"):
            row[f"last {name}"] = stat([study[name][-1] for study in found])
        for name in ("new", "old", "all"):
            later = [stat(study[name][1:]) for study in found]
            row[f"average {name}"] = stat([None if seed is None else seed.mean for seed in later])
        ends = [(study["old"][-1], study["new"][-1]) for study in found]
        row["old - new"] = stat([None if old is None or new is None else old - new for old, new in ends])
    return row


def text(name: str) -> Markup:
    """A user's name as literal text, also in a hover template: plotly would read tags in it, and %{...}."""
    return escape(name).replace("%", Markup("&#37;"))


def literal(value: Any) -> Any:
    """A figure for plotly.js. Plotly reads tags in every text, so everything that is not `Markup` is escaped."""
    if isinstance(value, dict):
        return {key: part if key in UNDRAWN else literal(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [literal(part) for part in value]
    return escape(value) if isinstance(value, str) else value


def legend_rows(groups: Sequence[Group]) -> int:
    """The approximate number of lines of the legend on a phone, which is about 40 letters wide; a key takes as much
    space as 6."""
    share = [min(1.0, (len(group.label) + 6) / 40) for group in groups]
    lines = [_wrapped(group.label, 34).count("<br>") + 1 for group in groups]
    return math.ceil(sum(n * (1 if part > 0.5 else part) for n, part in zip(lines, share, strict=True)))


def _wrapped(label: str, width: int) -> Markup:
    return Markup("<br>").join(text(line) for line in textwrap.wrap(label, width))


def studies(group: Group, name: str) -> list[dict[str, Any]]:
    """This study of every seed; empty unless all seeds have it."""
    found = [run.studies.get(name) for run in group.runs]
    made = [study for study in found if study is not None and "skipped" not in study]
    return made if len(made) == len(found) else []


def _parts(group: Group, name: str, keys: Sequence[str], axis: dict[str, Any]) -> Figure | None:
    """Some parts of a study over the tasks, with a line for each part."""
    found = studies(group, name)
    if not found:
        return None
    traces = [_series([study[key] for study in found], key, number) for number, key in enumerate(keys)]
    tasks = _task_axis(len(group.runs[0].tasks), most=10)
    layout = {"xaxis": {"title": {"text": "tasks learned"}, **tasks}, "yaxis": axis, "hovermode": "x unified"}
    return {"data": traces, "layout": layout | LEGEND}


def _series(seeds: Sequence[Sequence[float | None]], name: str, number: int, first: int = 1) -> dict[str, Any]:
    """A line of means over seeds, from task `first` on, with a bar of one deviation at each point."""
    points = [stat(values) for values in zip(*seeds, strict=True)]
    bars = error_bars([point or Stat(0.0, 0.0) for point in points])
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": text(name),
        "x": list(range(first, first + len(points))),
        "y": [None if point is None else round(point.mean, 4) for point in points],
        "customdata": [_precise(point) for point in points],
        "hovertemplate": EXTRA.format("%{customdata}", text(name)),
        "error_y": bars | {"visible": len(seeds) > 1},
        "line": {"color": PALETTE[number % len(PALETTE)], "width": 2, "dash": DASHES[number % len(DASHES)]},
        "marker": {"color": PALETTE[number % len(PALETTE)], "size": 6, "symbol": SYMBOLS[number % len(SYMBOLS)]},
    }


def _precise(point: Stat | None) -> str:
    """Distances and parameters are near 1, so three decimals are more useful than the one of `show`."""
    if point is None:
        return "-"
    decimals = 3 if abs(point.mean) < 10 else 1
    return f"{point.mean:.{decimals}f}" + ("" if point.std is None else f" ± {point.std:.{decimals}f}")


def _blend(start: str, end: str, share: float) -> str:
    """The colour at this fraction of the way from one colour to another (both #rrggbb)."""
    pairs = [(int(start[i : i + 2], 16), int(end[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def _of_methods(traces: list[dict[str, Any]], layout: dict[str, Any], groups: Sequence[Group]) -> Figure:
    """A figure with a line or bars for each method. With many methods, the legend is beside the figure (or hidden if
    there is no room), and pointing at a line highlights it."""
    if len(groups) <= MOST_BANDS:
        return {"data": traces, "layout": layout | {"hovermode": "x unified"} | LEGEND}
    for trace in traces:
        if trace["type"] == "scatter":
            trace["line"] |= {"width": 1.6}
            trace["marker"] |= {"size": 5}
            trace["error_y"] = {"visible": False}
    legend = {"orientation": "v", "x": 1.01, "xanchor": "left", "y": 1, "yanchor": "top", "tracegroupgap": 0}
    legend["font"] = {"size": 12}
    return {
        "data": traces,
        "layout": layout | {"hovermode": "closest", "showlegend": True, "legend": legend},
        "many": True,
    }


LEGEND: dict[str, Any] = {
    "showlegend": True,
    "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.03, "yanchor": "bottom", "maxheight": 0.9},
}


def forgotten(run: Run) -> list[float]:
    """The best score of each task except the last, minus its final score. The best is that of the rows before the last,
    unless `measure.fgt_max` says otherwise."""
    last = run.matrix[-1]
    best = [max(row[i] for row in run.matrix[i:-1]) for i in range(len(last) - 1)]
    if any(leaf(key) == "fgt_max" and value == "all" for key, value in setting_names(run.config).items()):
        best = [max(score, last[i]) for i, score in enumerate(best)]
    return [score - last[i] for i, score in enumerate(best)]


def _line(group: Group, index: dict[str, int]) -> dict[str, Any]:
    number = index[group.label]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": _wrapped(group.label, 34),
        "legendgroup": group.label,
        "line": {"color": colour(number), "width": 2, "dash": DASHES[turn(number)]},
        "marker": {"color": colour(number), "size": 7, "symbol": SYMBOLS[turn(number)]},
    }


def _bar(group: Group, index: dict[str, int]) -> dict[str, Any]:
    number = index[group.label]
    marker: dict[str, Any] = {"color": colour(number)}
    if round_ := turn(number):
        marker["pattern"] = {"shape": PATTERNS[round_], "solidity": 0.25}
    return {"type": "bar", "name": _wrapped(group.label, 34), "legendgroup": group.label, "marker": marker}


def error_bars(points: Sequence[Stat | None]) -> dict[str, Any]:
    spread = [point.std or 0.0 for point in points if point is not None]
    visible = any(point is not None and point.std is not None for point in points)
    return {"type": "data", "array": spread, "visible": visible, "thickness": 1.2, "width": 3}


def _heat_map(cells: Sequence[Sequence[float | None]], x: Sequence[object], y: Sequence[object]) -> dict[str, Any]:
    trace: dict[str, Any] = {"type": "heatmap", "x": x, "y": y, "z": cells, "zmin": 0, "zmax": 100}
    gap = 1 if len(x) <= MOST_NAMED else 0
    return trace | {"showscale": False, "xgap": gap, "ygap": gap, "hoverongaps": False}


def _numbers(heat_map: dict[str, Any], decimals: int, zeros: bool = True) -> list[dict[str, Any]]:
    """The cells' values as text, if there is room. plotly's own cell texts are hard to read on the middle colours, so
    the page's script sets the colour of each number by its value in `customdata`."""
    x, y, cells = heat_map["x"], heat_map["y"], heat_map["z"]
    if len(x) > MOST_ANNOTATED:
        return []
    shown = [
        (x[j], y[i], value, f"{value:.{decimals}f}")
        for i, row in enumerate(cells)
        for j, value in enumerate(row)
        if value is not None and (zeros or round(value, decimals))
    ]
    trace: dict[str, Any] = {"type": "scatter", "mode": "text", "hoverinfo": "skip", "showlegend": False}
    trace |= {key: [cell[k] for cell in shown] for k, key in enumerate(("x", "y", "customdata", "text"))}
    return [trace | {"textfont": {"size": 12 if len(x) <= 6 else 10 if len(x) <= MOST_SMALL else 9}}]


def _task_axis(tasks: int, most: int = 20) -> dict[str, Any]:
    every = -(-tasks // most)
    return {"tickmode": "array", "tickvals": list(range(1, tasks + 1, every)), "zeroline": False}


def _loss_text(epochs: Sequence[Epoch]) -> Markup:
    first = epochs[0]
    names = [name for name in first.terms if all(name in epoch.terms for epoch in epochs)]
    term = Markup("<br>{} {:.4g}")
    terms = Markup("").join(term.format(name, fmean(epoch.terms[name] for epoch in epochs)) for name in names)
    form = Markup("task {}, {}, epoch {}<br>loss {:.4g}{}")
    return form.format(first.task, first.stage, first.epoch + 1, fmean(epoch.loss for epoch in epochs), terms)
