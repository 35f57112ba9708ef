"""The section of the report page about one benchmark."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

from markupsafe import Markup

from bace.data.modalities import MODALITIES
from bace.experiments.run_folder import Run
from bace.report import figures, setting_figures
from bace.report.figures import Figure
from bace.report.markup import NOTHING, cell, chip, count, grid, heading, joined, part, scale, slug, sortable, table_row
from bace.report.runs import Group, Row, Stat, leaf, setting_names, stat

Published = Mapping[tuple[str, str], tuple[float, float | None]]  # (method, metric) -> mean, deviation

# Columns of the table: name, meaning, and whether more is better.
COLUMNS = (
    ("A_last", "average score over all tasks after the last one (%)", True),
    ("A_avg", "mean of that average over all steps (%)", True),
    ("A_new", "mean score of a task right after it was learned, tasks 2 and later (%)", True),
    ("FGT", "forgetting: mean drop from a task's best score to its last (points)", False),
    ("FWT", "forward transfer: mean score on a task before learning it, above chance (points)", True),
    ("seconds", "wall-clock time", False),
)

# Scores of entities: the name in metrics.json, the name on the page, the meaning, and whether more is better.
ENTITY_SCORES = (
    ("macro_f1", "macro F1", "seqeval's, which makes A_t: mean over all types in the text or predicted", True),
    ("macro_f1_own", "own types", "mean over the task's own types only: a foreign type by itself costs nothing", True),
    ("micro_f1", "micro F1", "over entities of all types", True),
    ("precision", "precision", "share of the predicted entities that are right", True),
    ("recall", "recall", "share of the entities that are found", True),
    ("foreign_rate", "foreign", "share of the predicted entities whose type is not the task's", False),
)

# Costs of a run: the name in `Metrics`, the name on the page, the unit, and the meaning.
COSTS = (
    ("seconds", "Time", "seconds", "wall-clock time of a whole run"),
    ("passes", "Passes", "passes", "examples that passed the encoder; forward counts 1, forward and backward 3"),
    ("peak_memory_mb", "Peak memory", "MB", "the largest amount in use"),
    ("kept_mb", "Kept memory", "MB", "networks, statistics and slots held after a task"),
)
MOST_GALLERIES = 2
SHORT_COMMIT = 10  # letters of a commit's hash that are enough to find it


class Subsection(NamedTuple):
    """A heading, a line that explains the content, and the content."""

    heading: str
    aid: str
    content: Markup


@dataclass
class Section:
    """One benchmark, with its parts in the order in which they are shown. A part without content is left out.

    Args:
        made: the methods that ran on it, with their runs.
        rows: the same, summarised.
        index: the number of each method, which is its colour everywhere.
        published: numbers to show beside ours.
        anchor: its name within the page.

    Attributes:
        drawn: its figures, by the names that `html` uses for them.
    """

    made: Sequence[Group]
    rows: Sequence[Row]
    index: dict[str, int]
    published: Published
    anchor: str
    drawn: dict[str, Figure] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.name, self.runs = self.made[0].benchmark, [run for group in self.made for run in group.runs]
        self.measure = _measure(self.runs)
        self.many = len(self.made) > figures.MOST_BANDS
        self.tasks = max(len(run.tasks) for run in self.runs)
        one_seed = all(len(group.runs) == 1 for group in self.made)
        self.mean = "" if one_seed else ", mean over seeds"
        self.spread = "" if one_seed else ", with one sample standard deviation over seeds"
        self.point = " Point at a line, or touch it, to pick it out." if self.many else ""

    def html(self, *, titled: bool) -> Markup:
        """`titled` adds the benchmark's name, which a page with one benchmark does not need."""
        makers = (
            self.summary,
            self.entity_scores,
            self.against_published,
            self.curves,
            self.task_by_task,
            self.forgetting,
            self.probing,
            self.distances,
            self.confusion,
            self.classes,
            self.neighbours,
            self.bias,
            self.settings_compared,
            self.loss,
            self.cost,
            self.settings,
        )
        shown = {}
        for make in makers:
            if (made := make()) is not None:
                shown[f"{self.anchor}-{slug(made.heading)}"] = made
        link = Markup('<li><a href="#{}">{}</a></li>')
        links = joined(link.format(where, made.heading) for where, made in shown.items())
        header = Markup("<header><h2>{}</h2>{}</header>").format(self.name, facts(self.made)) if titled else ""
        return Markup(
            '<section class="benchmark" id="{}">{}'
            '<nav class="contents" aria-label="Contents of {}"><ul class="links">{}</ul></nav>{}</section>'
        ).format(self.anchor, header, self.name, links, joined(part(*made, where) for where, made in shown.items()))

    # -- plots

    def plot(self, kind: str, figure: Figure, shape: str = "wide", style: str = "") -> Markup:
        key = f"{self.anchor}-{kind}"
        self.drawn[key] = figure | {"file": slug(f"{self.name}-{kind}")}
        if figure.get("many"):
            style = f"--height: {max(27.0, 6 + 1.2 * len(self.made)):.1f}rem"
        elif shape == "wide":
            style = f"--rows: {figures.legend_rows(self.made)}"
        return Markup('<div class="plot {}" data-figure="{}" style="{}"></div>').format(shape, key, style)

    def tall(self, kind: str, figure: Figure, labels: Iterable[str]) -> Markup:
        """A plot with a separate line for each method, whose label may be broken."""
        lines = sum(0.9 + 0.9 * (label.count("<br>") + 1) for label in labels)
        return self.plot(kind, figure, "tall", f"--lines: {lines:.1f}rem")

    def small(self, kind: str, group: Group, figure: Figure, note: str = "", shape: str = "square") -> Markup:
        """A plot of one method."""
        number = self.index[group.label]  # slugs may coincide
        drawing = self.plot(f"{kind}-{slug(group.label)}-{number}", figure, shape)
        return Markup('<figure data-method="{}"><figcaption>{}<small>{}</small></figcaption>{}</figure>').format(
            group.label, chip(group.label, self.index), note, drawing
        )

    def each(self, kind: str, make: Callable[[Group], Figure | None]) -> Markup:
        """This figure of every method that has it, side by side; empty if none has it."""
        found = [(group, figure) for group in self.made if (figure := make(group)) is not None]
        if not found:
            return NOTHING
        figures.same_scale([figure for _, figure in found])
        return grid([self.small(kind, group, figure, shape="landscape") for group, figure in found], large=True)

    # -- parts

    def summary(self) -> Subsection:
        return Subsection("Summary", "", _table(self.rows, self.index, self.published))

    def entity_scores(self) -> Subsection | None:
        aid = "After the last task, averaged over the tasks (%). An entity is right if its words and its type are."
        content = _entity_table(self.made, self.index)
        return Subsection("Entity scores", aid, content) if content else None

    def against_published(self) -> Subsection | None:
        pairs = _against(self.rows, self.published, "A_last")
        if not pairs:
            return None
        aid = "A filled circle is our A_last, an open one the published number of the same method."
        figure = figures.against(pairs, self.index, "A_last (%)")
        return Subsection("Ours and published", aid, self.tall("published", figure, (label for label, _, _ in pairs)))

    def curves(self) -> Subsection:
        with_band = "" if self.many else self.spread
        aid = (
            f"Each line is the average {self.measure} over the tasks seen so far{with_band}: "
            f"the flatter, the less is lost.{self.point}"
        )
        content = self.plot("curves", figures.curves(self.made, self.index, self.measure))
        if self.many:
            table = figures.by_task(self.made, lambda run: run.metrics.A if run.metrics else (), "%", "tasks learned")
            content += scale() + self.tall("curves-table", table, table["data"][0]["y"])
        return Subsection(f"{self.measure[0].upper()}{self.measure[1:]} over tasks", aid, content)

    def task_by_task(self) -> Subsection:
        aid = (
            f"Row t is the model after task t, and column i is its {self.measure} on task i (%{self.mean}): "
            "a column that fades downwards is a task being forgotten; the diagonal is each task right after it was "
            "learned, and its mean from the second task on is A_new."
        )
        maps = [self.small("matrix", group, figures.matrix(group, self.measure)) for group in self.made]
        return Subsection("Task by task", aid, scale() + grid(maps, large=self.tasks > figures.MOST_SMALL))

    def forgetting(self) -> Subsection:
        if self.tasks == 1:
            return Subsection("Forgetting", "With a single task there is nothing to forget yet.", NOTHING)
        over = self.mean if self.many else self.spread
        aid = f"Points lost from a task's best {self.measure} to its last{over}; below zero, the task improved."
        figure = figures.forgetting(self.made, self.index)
        if self.many:
            return Subsection(
                "Forgetting", aid, scale("points") + self.tall("forgetting", figure, figure["data"][0]["y"])
            )
        return Subsection("Forgetting", aid, self.plot("forgetting", figure))

    def probing(self) -> Subsection | None:
        aid = (
            "The score of the model's own head (observed) and of fresh classifiers that are trained on its frozen "
            f"features of all data so far{self.spread}: the gap is knowledge that the head does not use."
        )
        content = self.each("probing", figures.probing)
        return Subsection("Probing", aid, content) if content else None

    def distances(self) -> Subsection | None:
        aid = (
            "The distance between the mean feature of a class and its row in the head: first for each task, from the "
            "time when it is learned, then for new, old and all classes."
        )
        by_task, by_age = self.each("distance", figures.distances), self.each("new-old", figures.new_and_old)
        return (
            Subsection("Distances", aid, _distance_table(self.made, self.index) + by_task + by_age) if by_task else None
        )

    def confusion(self) -> Subsection | None:
        found = [(group, *drawn) for group in self.made if (drawn := figures.confusion(group)) is not None]
        if not found:
            return None
        aid = (
            "Each row shows the predictions of the last model for a class (% of that class). Lines separate the tasks, "
            "so colour outside the blocks on the diagonal is confusion between old and new."
        )
        maps = [
            self.small("confusion", group, figure, f" {used} of {len(group.runs)} seeds" * (used < len(group.runs)))
            for group, figure, used in found
        ]
        classes = max(len(figure["data"][0]["z"]) for _, figure, _ in found)
        return Subsection("Confusion", aid, scale() + grid(maps, large=classes > figures.MOST_SMALL))

    def classes(self) -> Subsection | None:
        entities = any(run.metrics and run.metrics.per_type for run in self.runs)
        f1, share = "F1 of each entity type, on the sentences of its own task", "Share of each class that is recognised"
        aid = f"{f1 if entities else share}, after the last task (%{self.mean})."
        content = _class_table(self.made, self.index)
        return Subsection("Types" if entities else "Classes", aid, content) if content else None

    def neighbours(self) -> Subsection | None:
        galleries = [gallery for group in self.made if (gallery := _gallery(group, self.index))]
        if not galleries:
            return None
        aid = "Examples and their nearest neighbours in feature space, nearest first, with distances."
        key = Markup(
            '<p class="note"><span class="same">✓ of the same class</span> <span class="other">✗ of another</span></p>'
        )
        return Subsection("Neighbours", aid, key + grid(galleries, large=True, most=MOST_GALLERIES, kind="galleries"))

    def bias(self) -> Subsection | None:
        aid = "What it learned: the logits of new classes become A times the logit plus B."
        content = self.each("bias", figures.bias)
        return Subsection("Bias correction", aid, content) if content else None

    def settings_compared(self) -> Subsection | None:
        compared = setting_figures.compared(self.made)
        if not compared:
            return None
        aid = f"Where methods ran with several values of a setting{self.spread}."
        form = Markup("<figure><figcaption>{}</figcaption>{}</figure>")
        shown = [
            form.format(caption, self.plot(f"compared-{slug(caption)}", figure, "landscape"))
            for caption, figure in compared.items()
        ]
        return Subsection("Settings compared", aid, grid(shown, large=True))

    def loss(self) -> Subsection | None:
        figure = figures.losses(self.made, self.index)
        if figure is None:
            return None
        aid = "Mean loss of each epoch; methods minimise different sums, so compare shapes rather than heights."
        return Subsection("Training loss", aid + self.point, self.plot("loss", figure))

    def cost(self) -> Subsection | None:
        costs = []
        form = Markup("<figure><figcaption>{} <small>{}</small></figcaption>{}</figure>")
        for measured, name, unit, meaning in COSTS:
            if (bar := figures.cost(self.made, self.index, measured, unit)) is not None:
                kind = "cost" if measured == "seconds" else f"cost-{slug(measured)}"
                bars = self.tall(kind, bar, [trace["y"][0] for trace in bar["data"]])
                costs.append(form.format(name, meaning, bars))
        if not costs:
            return None
        aid = f"The cost of one run{self.spread}. Seconds are comparable only if all ran alone on the same machine."
        return Subsection("Cost", aid, grid(costs, large=len(costs) > 1, most=2 * len(COSTS), kind="costs"))

    def settings(self) -> Subsection:
        aid = "What each method ran with: seeds, commit, versions and the complete configuration."
        configurations = joined(_settings(group, self.index) for group in self.made)
        return Subsection("Settings", aid, _skipped(self.made) + configurations)


def facts(made: Sequence[Group]) -> Markup:
    runs = [run for group in made for run in group.runs]
    sizes = sorted({(len(run.tasks), sum(len(task.classes) for task in run.tasks)) for run in runs})
    seeds = [tuple(run.seed for run in group.runs) for group in made]
    counts = sorted({len(s) for s in seeds})
    facts = {
        "Benchmark": made[0].benchmark + (f" ({runs[0].modality})" if runs[0].modality else ""),
        "Tasks": "; ".join(f"{count(tasks, 'task')}, {count(classes, 'class')}" for tasks, classes in sizes),
        "Memory": ", ".join(dict.fromkeys(memory for run in runs for memory in _memory(run.config))),
        "Seeds": f"{counts[0]} ({', '.join(map(str, seeds[0]))})"
        if len(set(seeds)) == 1
        else f"{counts[0]} to {counts[-1]} a method"
        if len(counts) > 1
        else f"{counts[0]} a method",
        "Methods": str(len(made)),
        "Commit": ", ".join(dict.fromkeys(run.commit[:SHORT_COMMIT] for run in runs if run.commit)),
    }
    item = Markup("<div><dt>{}</dt><dd>{}</dd></div>")
    items = joined(item.format(name, value) for name, value in facts.items() if value)
    return Markup('<dl class="facts">{}</dl>').format(items)


def _memory(config: dict[str, Any]) -> list[str]:
    """The memory budget, from either setting that may hold it."""
    found = [
        value
        for key, value in setting_names(config).items()
        if leaf(key) == "memory" or f".{key}".endswith(".memory.size")
    ]
    return [str(value) for value in found if value is not None]


def _measure(runs: Sequence[Run]) -> str:
    """The name of the measure that the percentages show."""
    said = {run.metrics.score for run in runs if run.metrics is not None and run.metrics.score}
    if len(said) == 1:
        return said.pop()
    return "accuracy" if runs[0].modality in ("image", "text") else "score"


def _against(rows: Sequence[Row], published: Published, metric: str) -> list[tuple[str, Stat, Stat]]:
    """Label, our number and the published one, for the rows that have both."""
    found = []
    for row in rows:
        ours, theirs = getattr(row, metric), _printed(row, published, metric)
        if ours is not None and theirs is not None:
            found.append((row.label, ours, theirs))
    return found


def _printed(row: Row, published: Published, metric: str) -> Stat | None:
    """The published number of a row, by its whole label or else by its method's name."""
    found = published.get((row.label, metric)) or published.get((row.method, metric))
    return None if found is None else Stat(*found)


def _table(rows: Sequence[Row], index: dict[str, int], published: Published) -> Markup:
    head = heading("method", "", "") + heading("seeds", "number of runs", "ascending")
    printed = [name for name, _, _ in COLUMNS if any(_printed(one, published, name) is not None for one in rows)]
    for name, meaning, more in COLUMNS:
        first = "descending" if more else "ascending"
        head += heading(name, meaning, first, "↑" if more else "↓")
        if name in printed:
            head += heading("published", f"{name} as published, and ours minus it", first)
    body = NOTHING
    for one in rows:
        cells = [Markup('<td class="number" data-value="{0}">{0}</td>').format(len(one.seeds))]
        for name, _, more in COLUMNS:
            ours = getattr(one, name)
            others = [other.mean for r in rows if (other := getattr(r, name)) is not None]
            best = ours is not None and len(others) > 1 and ours.mean == (max if more else min)(others)
            cells.append(cell(ours, "best" if best else ""))
            if name in printed:
                theirs = _printed(one, published, name)
                after = f" ({ours.mean - theirs.mean:+.1f})" if ours and theirs else ""
                cells.append(cell(theirs, "published", after))
        body += table_row(one.label, index, cells)
    several = any(len(one.seeds) > 1 for one in rows)
    return sortable("Summary", head, body) + Markup('<p class="note">{}{}. {}{}</p>').format(
        "Mean ± sample standard deviation over seeds. " if several else "",
        _meanings((name, meaning) for name, meaning, _ in COLUMNS[:-1]),
        Markup("<b>published</b> the paper's number (in brackets: ours minus it). ") if printed else "",
        "Arrows point to the better side, the best is bold; a column's heading sorts by it.",
    )


def _meanings(pairs: Iterable[tuple[str, str]]) -> Markup:
    return Markup("; ").join(Markup("<b>{}</b> {}").format(name, meaning) for name, meaning in pairs)


def _entity_table(made: Sequence[Group], index: dict[str, int]) -> Markup:
    """All scores of entities, if the runs have them."""

    def score(run: Run, name: str) -> float | None:
        values = [task.get(name) for task in run.metrics.entities] if run.metrics else []
        return None if None in values else fmean(value for value in values if value is not None)

    found = [group for group in made if all(run.metrics and run.metrics.entities for run in group.runs)]
    if not found:
        return NOTHING
    head = heading("method", "", "")
    for _, title, meaning, more in ENTITY_SCORES:
        head += heading(title, meaning, "descending" if more else "ascending", "↑" if more else "↓")
    body = joined(
        table_row(
            group.label,
            index,
            (cell(stat([score(run, name) for run in group.runs])) for name, _, _, _ in ENTITY_SCORES),
        )
        for group in found
    )
    meanings = _meanings((title, meaning) for _, title, meaning, _ in ENTITY_SCORES)
    return sortable("Entity scores", head, body) + Markup('<p class="note">{}.</p>').format(meanings)


def _class_table(made: Sequence[Group], index: dict[str, int]) -> Markup:
    """A table with a row per class, with its task, and a column per method. A large table opens on request."""

    def score(run: Run, name: str) -> float | None:
        found = run.metrics and (run.metrics.per_class or run.metrics.per_type)
        return found.get(name) if found else None

    names = {name: task for group in made for run in group.runs for name, task in _tasks_of(run).items()}
    rows = {name: [stat([score(run, name) for run in group.runs]) for group in made] for name in names}
    shown = {name: row for name, row in rows.items() if any(row)}
    if not shown:
        return NOTHING
    head = heading("class", "", "") + heading("task", "with which the class came", "ascending")
    head += joined(heading(chip(group.label, index), "", "descending", method=group.label) for group in made)
    form = Markup('<tr><th scope="row" data-value="{0}">{0}</th><td class="number" data-value="{1}">{1}</td>{2}</tr>')
    body = joined(
        form.format(name, names[name], joined(cell(c, method=g.label) for c, g in zip(row, made, strict=True)))
        for name, row in shown.items()
    )
    table = sortable("Classes", head, body)
    if len(shown) <= figures.MOST_NAMED:
        return table
    return Markup("<details><summary>{}</summary>{}</details>").format(count(len(shown), "class"), table)


def _tasks_of(run: Run) -> dict[str, int]:
    """The classes of a run that have their own scores, with the numbers of their tasks."""
    own = MODALITIES[run.modality].own_names if run.modality in MODALITIES else list
    return {name: number for number, task in enumerate(run.tasks, 1) for name in own(list(task.classes))}


def _distance_table(made: Sequence[Group], index: dict[str, int]) -> Markup:
    """The distances of new, old and all classes, if the study has them."""
    rows = [(group.label, found) for group in made if (found := figures.mean_distances(group))]
    if not rows:
        return NOTHING
    head = heading("method", "", "") + joined(heading(name, "", "ascending") for name in rows[0][1])
    body = joined(table_row(label, index, (cell(away, decimals=3) for away in found.values())) for label, found in rows)
    note = "last: after the last task; average: over the tasks from the second on; old - new: after the last task."
    return sortable("Distances", head, body) + Markup('<p class="note">{}</p>').format(note)


def _gallery(group: Group, index: dict[str, int]) -> Markup:
    """The gallery of the first seed that has one, with a collapsible part for each task; the first is open."""
    for run in group.runs:
        tasks = run.studies.get("gallery", {}).get("tasks")
        if tasks:
            return Markup(
                '<figure class="gallery" data-method="{}" data-file="{}"><figcaption>{}<small>{}</small></figcaption>'
                "{}</figure>"
            ).format(
                group.label,
                slug(f"{group.benchmark}-neighbours-{group.label}"),
                chip(group.label, index),
                f" seed {run.seed}" if len(group.runs) > 1 else "",
                joined(_of_task(task, opened=not number) for number, task in enumerate(tasks)),
            )
    return NOTHING


def _of_task(task: dict[str, Any], *, opened: bool) -> Markup:
    return Markup("<details{}><summary>{}{}</summary>{}</details>").format(
        " open" if opened else "",
        task["task"],
        Markup(" <small>by the {}</small>").format(eyes) if (eyes := task.get("from")) else "",
        joined(map(_anchor, task["anchors"])),
    )


def _anchor(anchor: dict[str, Any]) -> Markup:
    neighbours = joined(_example(neighbour, "li") for neighbour in anchor["neighbours"])
    return Markup('<div class="anchor">{}<ol>{}</ol></div>').format(_example(anchor, "div"), neighbours)


def _example(example: dict[str, Any], tag: str) -> Markup:
    """A picture or text with its label: plain for an anchor, green or red for a neighbour."""
    label = str(example["label"])
    if example.get("image") is None:
        text = example["text"]
        begin, end = map(int, example.get("word") or (0, 0))  # the word that the label is for
        word = Markup("<mark>{}</mark>").format(text[begin:end]) if end else ""
        shown = Markup("<blockquote>{}{}{}</blockquote>").format(text[:begin], word, text[end:])
    else:
        shown = Markup('<img src="data:image/png;base64,{}" alt="{}">').format(example["image"], label)
    if "same" not in example:
        said = Markup("<b>{}</b>").format(label)
    else:
        kind, mark = ("same", "✓") if example["same"] else ("other", "✗")
        form = Markup('<span class="{}">{} {}</span><small>{:.3f}</small>')
        said = form.format(kind, mark, label, example["distance"])
    return Markup('<{0} class="example">{1}{2}</{0}>').format(tag, shown, said)


def _skipped(made: Sequence[Group]) -> Markup:
    """The studies that were skipped, and why."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for group in made:
        for name, study in group.runs[0].studies.items():
            if "skipped" in study:
                reasons.setdefault((name, str(study["skipped"])), []).append(group.label)
    item = Markup("<li>{} of {}: {}</li>")
    items = joined(item.format(name, ", ".join(labels), reason) for (name, reason), labels in reasons.items())
    return Markup("<p>Studies that were not made:</p><ul>{}</ul>").format(items) if items else NOTHING


def _settings(group: Group, index: dict[str, int]) -> Markup:
    line = Markup('<tr><td class="number">{}</td><td>{}</td><td>{}</td><td class="number">{}</td></tr>')
    first = group.runs[0]
    versions = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    item = Markup("<li>{}: {}</li>")
    return Markup(
        '<details data-method="{label}"><summary>{chip} <small>commit {commits}</small></summary>'
        '<div class="scroll"><table><thead><tr><th class="number">seed</th><th>folder</th><th>commit</th>'
        '<th class="number">threads</th></tr></thead><tbody>{rows}</tbody></table></div>{versions}'
        "<p>Configuration of seed {seed}:</p><pre>{config}</pre><p>Tasks of seed {seed}:</p>"
        '<ol class="tasks">{tasks}</ol></details>'
    ).format(
        label=group.label,
        chip=chip(group.label, index),
        commits=", ".join(dict.fromkeys((run.commit or "unknown")[:SHORT_COMMIT] for run in group.runs)),
        rows=joined(
            line.format(run.seed, run.folder.name, run.commit or "unknown", run.threads or "-") for run in group.runs
        ),
        versions=Markup("<p>{}</p>").format(versions) if versions else "",
        seed=first.seed,
        config=json.dumps(first.config, indent=2, ensure_ascii=False),
        tasks=joined(item.format(task.name, ", ".join(task.classes)) for task in first.tasks),
    )
