"""Figures that compare settings: sweeps of W0, alpha and K, variants of Effect_new, sizes of the memory. (F3 and T4 are
Figure 3 and Table IV of the paper.)

They are plain plotly.js dictionaries, as in figures.py, or None if the runs lack the content: there is no study, it was
skipped, or nothing differs.
"""

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, Literal

from bace.experiments.run_folder import Run
from bace.report.figures import DASHES, EXTRA, LEGEND, PALETTE, SYMBOLS, Figure, colour, error_bars, studies, text
from bace.report.runs import Group, Stat, setting_names, show, stat

Span = Literal["last", "average"]  # after the last task, or the mean over the tasks from the second on

VARIANTS = ("full", "same", "different", "uniform", "random", "reverse")  # of Effect_new
NEIGHBOURLESS = {"K": "0", "effect_new": "none"}  # the equivalent of W0 = 1: a sample without neighbours
MEASURES = {  # the metrics of a run that a sweep may show, and the titles of its axis
    "A_last": "A_last (%)",
    "A_avg": "A_avg (%)",
    "A_new": "A_new (%)",
    "FGT": "FGT (points)",
    "FWT": "FWT (points)",
    "seconds": "seconds",
}


def compared(groups: Sequence[Group]) -> dict[str, Figure]:
    """Every figure that these runs have, by its caption."""
    found = {key: sweep(groups, key) for key in ("W0", "alpha", "K", "size")}
    found |= {"K, seconds": sweep(groups, "K", "seconds"), "variants": variants(groups)}
    for method in dict.fromkeys(group.method for group in groups):
        own = [group for group in groups if group.method == method]
        if len({_memory(group) for group in own}) == len(own):  # only the memory differs
            found |= {
                f"{method}, scores by memory": memory_scores(own),
                f"{method}, distances by memory": memory_distances(own),
                f"{method}, scores by distance": distance_and_scores(own),
            }
    return {caption: figure for caption, figure in found.items() if figure is not None}


# -- comparisons of settings


def sweep(groups: Sequence[Group], key: str, measure: str = "A_last", baseline: str | None = None) -> Figure | None:
    """A score against the values of a setting, by its short name: W0, alpha, K, size (F7, F8, T4).

    There is one line for each combination of the other settings; methods without the setting are dotted horizontal
    lines. With a `baseline` (a value of the setting), the figure shows differences from it, seed by seed. For K, runs
    with W0 = 1 are at 0. `measure` is one of MEASURES; "seconds" is for K.
    """
    series, others = _series(groups, key)
    values = sorted({value for line in series.values() for value in line} - {baseline}, key=_number)
    if all(len(line.keys() - {baseline}) < 2 for line in series.values()):  # one value for each method is no sweep
        return None
    traces = []
    for number, (name, line) in enumerate(series.items()):
        if baseline is None:
            points = [_score(line.get(value), measure) for value in values]
        else:
            points = [_difference(line.get(value), line.get(baseline), measure) for value in values]
        traces.append(_curve(name, number, values, points, decimals=2))
    for number, group in enumerate(others if baseline is None else (), len(series)):
        trace = _curve(group.label, number, values, [_score(group, measure)] * len(values), decimals=2)
        trace |= {"mode": "lines", "line": {**trace["line"], "dash": "dot"}, "error_y": {"visible": False}}
        traces.append(trace)
    title = MEASURES[measure]
    layout = {
        "xaxis": {"title": {"text": key}, "type": "category", "categoryorder": "array", "categoryarray": values},
        "yaxis": {"title": {"text": title if baseline is None else f"{title}, less that at {key} = {baseline}"}},
        "hovermode": "x unified",
    }
    return {"data": traces, "layout": layout | LEGEND}


def variants(groups: Sequence[Group], measure: str = "A_last") -> Figure | None:
    """Variants of Effect_new, with W0 = 1 as "none": a bar for each variant, and a colour for each combination of other
    settings (F10)."""
    series, _ = _series(groups, "effect_new")
    values = [value for value in (*VARIANTS, "none") if any(value in line for line in series.values())]
    if len(values) < 2:
        return None
    traces = []
    for number, (name, line) in enumerate(series.items()):
        points = [_score(line.get(value), measure) for value in values]
        trace = {"type": "bar", "name": text(name), "marker": {"color": colour(number)}}
        traces.append(_filled(trace, values, points, decimals=2))
    drawn = [value for trace in traces for value in trace["y"] if value is not None]
    room = max(max(drawn) - min(drawn), 1.0)
    layout = {
        "xaxis": {"title": {"text": "Effect_new"}, "type": "category", "showgrid": False},
        # differences are small compared with the scores, so the axis does not begin at 0
        "yaxis": {"title": {"text": MEASURES[measure]}, "range": [max(min(drawn) - room, 0), max(drawn) + room / 2]},
        "hovermode": "x unified",
        "bargap": 0.25,
    }
    return {"data": traces, "layout": layout | LEGEND}


# -- against the size of the memory


def memory_scores(groups: Sequence[Group], span: Span = "last") -> Figure | None:
    """Probing and observed score, and forgetting, against the memory's size, for the groups of one method (F3)."""
    return _against_memory(groups, _scores(span), f"{span} score (%), forgetting (points)", decimals=1)


def memory_distances(groups: Sequence[Group]) -> Figure | None:
    """Feature-embedding distance of new, old and all classes, last and average, against the memory's size (F3 c)."""
    spans: tuple[Span, ...] = ("last", "average")

    def reader(kind: str, span: Span) -> Callable[[Run], float | None]:
        return lambda run: _distance(study, kind, span) if (study := _study(run, "tracking")) else None

    lines = {f"{kind}, {span}": reader(kind, span) for span in spans for kind in ("new", "old", "all")}
    return _against_memory(groups, lines, "feature-embedding distance", decimals=3)


def distance_and_scores(groups: Sequence[Group], span: Span = "last") -> Figure | None:
    """Observed and probing score and forgetting against the feature-embedding distance of all classes, with a point for
    each size of the memory (F3 a, b)."""
    readers, rows = _scores(span), []
    for group in sorted(groups, key=_memory):
        away = stat([_distance(study, "all", span) for study in studies(group, "tracking")])
        scores = {name: stat([read(run) for run in group.runs]) for name, read in readers.items()}
        if away is not None and scores["observed"] is not None:
            rows.append((away.mean, _memory(group), scores))
    if len(rows) < 2:
        return None
    traces = []
    for number, name in enumerate(readers):
        trace = _curve(name, number, [away for away, _, _ in rows], [scores[name] for _, _, scores in rows])
        trace["text"] = [f"memory {size}" for _, size, _ in rows]
        trace["hovertemplate"] = EXTRA.format("%{text}: %{customdata}", text(name))
        traces.append(trace)
    layout = {
        "xaxis": {"title": {"text": f"feature-embedding distance, all classes, {span}"}, "zeroline": False},
        "yaxis": {"title": {"text": f"{span} score (%), forgetting (points)"}},
        "hovermode": "closest",
    }
    return {"data": traces, "layout": layout | LEGEND}


# -- shared functions


def _study(run: Run, name: str) -> dict[str, Any] | None:
    """The result of a study in a run; None if the run has no such study or it was skipped."""
    found = run.studies.get(name)
    return found if isinstance(found, dict) and "skipped" not in found else None


def _over_steps(values: Sequence[float | None], span: Span) -> float | None:
    """The last value, or the mean from the second task on, because the first has no old classes."""
    known = [value for value in (values[-1:] if span == "last" else values[1:] or values) if value is not None]
    return fmean(known) if known else None


def _distance(study: dict[str, Any], kind: str, span: Span) -> float | None:
    return _over_steps(study[kind], span)


def _scores(span: Span) -> dict[str, Callable[[Run], float | None]]:
    def probed(key: str) -> Callable[[Run], float | None]:
        return lambda run: _over_steps(study[key], span) if (study := _study(run, "probing")) else None

    return {
        "observed": probed("observed"),
        "probing (cosine)": probed("cosine"),
        "forgetting": lambda run: None if run.metrics is None else run.metrics.FGT,
    }


def _memory(group: Group) -> int:
    return int(setting_names(group.runs[0].config).get("memory.size") or 0)


def _against_memory(
    groups: Sequence[Group], lines: dict[str, Callable[[Run], float | None]], title: str, decimals: int
) -> Figure | None:
    ordered = sorted(groups, key=_memory)
    sizes = [str(_memory(group)) for group in ordered]
    traces = []
    for number, (name, read) in enumerate(lines.items()):
        points = [stat([read(run) for run in group.runs]) for group in ordered]
        if any(point is not None for point in points):
            traces.append(_curve(name, number, sizes, points, decimals))
    if not traces or len(set(sizes)) < 2:
        return None
    layout = {
        "xaxis": {"title": {"text": "memory"}, "type": "category", "categoryorder": "array", "categoryarray": sizes},
        "yaxis": {"title": {"text": title}},
        "hovermode": "x unified",
    }
    return {"data": traces, "layout": layout | LEGEND}


def _series(groups: Sequence[Group], key: str) -> tuple[dict[str, dict[str, Group]], list[Group]]:
    """The groups with the setting, by their other settings and its value; and the groups without it."""
    without = NEIGHBOURLESS.get(key)
    neighbourless = [group for group in groups if without and group.settings.get("W0") == "1"]
    series: dict[tuple[tuple[str, str], ...], dict[str, Group]] = {}
    others = []
    for group in groups:
        if key in group.settings and group not in neighbourless:
            series.setdefault(_rest(group, key), {})[group.settings[key]] = group
        elif group not in neighbourless:
            others.append(group)
    for group in neighbourless:
        for rest, line in series.items():
            if without and _rest(group, key, "W0") == tuple(pair for pair in rest if pair[0] != "W0"):
                line[without] = group
    # the label contains other settings only as far as they distinguish lines
    told = [pair for rest in series for pair in rest if not all(pair in other for other in series)]
    labels = [", ".join(f"{k}={v}" for k, v in rest if (k, v) in told) for rest in series]
    methods = [next(iter(line.values())).method for line in series.values()]
    names = [f"{method} ({label})" if label else method for method, label in zip(methods, labels, strict=True)]
    return dict(zip(names, series.values(), strict=True)), others


def _rest(group: Group, *keys: str) -> tuple[tuple[str, str], ...]:
    return (("method", group.method), *((k, v) for k, v in group.settings.items() if k not in keys))


def _score(group: Group | None, measure: str) -> Stat | None:
    if group is None:
        return None
    return stat([getattr(run.metrics, measure) for run in group.runs if run.metrics is not None])


def _difference(group: Group | None, other: Group | None, measure: str) -> Stat | None:
    """The difference over the seeds that both have."""
    if group is None or other is None:
        return None
    theirs = {run.seed: getattr(run.metrics, measure) for run in other.runs}
    pairs = [(getattr(run.metrics, measure), theirs[run.seed]) for run in group.runs if run.seed in theirs]
    return stat([None if None in pair else pair[0] - pair[1] for pair in pairs])


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError:  # null, for a setting that is off
        return float("-inf")


def _curve(
    name: str, number: int, x: Sequence[object], points: Sequence[Stat | None], decimals: int = 1
) -> dict[str, Any]:
    turn = number // len(PALETTE)  # each further round of colours has its own line and marker
    trace = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": text(name),
        "line": {"color": colour(number), "width": 2, "dash": DASHES[turn % len(DASHES)]},
        "marker": {"color": colour(number), "size": 7, "symbol": SYMBOLS[turn % len(SYMBOLS)]},
    }
    return _filled(trace, x, points, decimals)


def _filled(trace: dict[str, Any], x: Sequence[object], points: Sequence[Stat | None], decimals: int) -> dict[str, Any]:
    """A trace with values, error bars if there are several seeds, and hover texts; a missing value is a gap."""
    spread = [0.0 if point is None or point.std is None else point.std for point in points]
    trace |= {"x": list(x), "y": [None if point is None else point.mean for point in points]}
    trace["customdata"] = [_shown(point, decimals) for point in points]
    trace["error_y"] = error_bars(points) | {"array": spread}
    trace["hovertemplate"] = EXTRA.format("%{customdata}", trace["name"])
    return trace


def _shown(point: Stat | None, decimals: int) -> str:
    if decimals == 1 or point is None:
        return show(point)
    spread = "" if point.std is None else f" ± {point.std:.{decimals}f}"
    return f"{point.mean:.{decimals}f}{spread}"
