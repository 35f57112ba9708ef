"""Run folders made by hand, for the tests of the report."""

import html.parser
import json
import re
from pathlib import Path
from typing import Any

# Task 1 falls from 90 over 70 to 60, task 2 from 80 to 50. A = 90, 75, 60; A_new = (80 + 70) / 2 = 75;
# FGT = ((90 - 60) + (80 - 50)) / 2 = 30.
MATRIX = [[90.0], [70.0, 80.0], [60.0, 50.0, 70.0]]


def write_run(
    folder: Path,
    method: str = "ER",
    seed: int = 0,
    benchmark: str = "digits",
    matrix: list[list[float]] = MATRIX,
    config: dict[str, Any] | None = None,
    finished: bool = True,
    **metrics: Any,
) -> Path:
    """A run folder with two classes per task and the files a run leaves; `metrics` replace those of the matrix."""
    folder.mkdir(parents=True)
    tasks = len(matrix)
    names = [str(number) for number in range(2 * tasks)]
    about = {
        "method": method,
        "benchmark": benchmark,
        "seed": seed,
        "modality": "image",
        "config": {"memory": 100, "seed": seed} if config is None else config,
        "versions": {"torch": "2.13.0"},
        "commit": "abc123",
        "tasks": [{"name": f"task {t + 1}", "classes": names[2 * t : 2 * t + 2]} for t in range(tasks)],
        "threads": 2,
    }
    (folder / "run.json").write_text(json.dumps(about))
    lines = [",".join(["task", *(str(t + 1) for t in range(tasks))])]
    lines += [",".join([str(t + 1), *map(str, row), *[""] * (tasks - t - 1)]) for t, row in enumerate(matrix)]
    (folder / "matrix.csv").write_text("\n".join(lines if finished else lines[:2]) + "\n")
    if not finished:
        return folder
    curve = [sum(row) / len(row) for row in matrix]
    counts = [[8 if i == j else int(j == len(names) - 1) * 2 for j in range(len(names))] for i in range(len(names))]
    scores = {
        "A_last": curve[-1],
        "A_avg": sum(curve) / tasks,
        "A_new": sum(row[-1] for row in matrix[1:]) / (tasks - 1) if tasks > 1 else None,
        "FGT": 30.0,
        "FWT": None,
        "seconds": 12.0,
        "A": curve,
        "per_class": dict.fromkeys(names, 50.0),
        "confusion": {"classes": names, "counts": counts},
    }
    (folder / "metrics.json").write_text(json.dumps(scores | metrics))
    events = [
        {"event": "epoch", "task": t + 1, "stage": "main", "epoch": e, "loss": 2.0 - e + seed, "terms": {"new": 0.5}}
        for t in range(tasks)
        for e in range(2)
    ]
    log = [{"event": "start"}, *events, {"event": "task", "task": tasks}]
    (folder / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in log))
    return folder


def figures_of(page: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    figures: dict[str, Any] = json.loads(found[1])
    return figures


# A gallery shows an image as one black and one white pixel.
PICTURE = "iVBORw0KGgoAAAANSUhEUgAAAAIAAAABCAAAAADRSSBWAAAAC0lEQVR4nGP4zwAAAgEBADK6K5IAAAAASUVORK5CYII="


def example(label: str, **more: Any) -> dict[str, Any]:
    return {"example": 7, "label": label, "image": PICTURE, **more}


def studies() -> dict[str, Any]:
    """One of each study, for a run of three tasks."""
    beside = [example("cat", distance=0.1, same=True), example("dog", distance=0.25, same=False)]
    anchor = example("cat", neighbours=beside)
    return {
        "probing": {"observed": [90.0, 75.0, 60.0], "cosine": [92.0, 88.0, 84.0], "linear": [91.0, 86.0, 82.0]},
        "tracking": {
            "distance": [[0.1], [0.3, 0.1], [0.5, 0.4, 0.2]],
            "new": [0.1, 0.1, 0.2],
            "old": [None, 0.3, 0.45],
            "all": [0.1, 0.2, 0.35],
            "difference": 0.25,
        },
        "gallery": {"tasks": [{"task": "task 1", "from": "teacher", "anchors": [anchor]}]},
        "bias": {"A": [1.0, 0.9, 0.8], "B": [0.0, -0.1, -0.2]},
    }


EVIL = "<img src=x onerror=\"console.error('pwned')\"></script><script>console.error('pwned')</script>%{x}&amp;"


def write_evil(folder: Path) -> Path:
    run = write_run(folder, EVIL, benchmark=EVIL, config={EVIL: EVIL})
    about = json.loads((run / "run.json").read_text())
    about |= {"commit": EVIL, "modality": EVIL, "versions": {EVIL: EVIL}}
    about["tasks"][0] = {"name": EVIL, "classes": [EVIL, "1"]}
    (run / "run.json").write_text(json.dumps(about))
    metrics = json.loads((run / "metrics.json").read_text())
    metrics["confusion"]["classes"][0] = EVIL
    (run / "metrics.json").write_text(json.dumps(metrics))
    with (run / "log.jsonl").open("a") as log:
        log.write(json.dumps({"event": "epoch", "task": 3, "stage": EVIL, "epoch": 9, "loss": 1, "terms": {EVIL: 1}}))
    return run


class Tags(html.parser.HTMLParser):
    """Every start tag with its attributes, and the text outside scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.found and self.found[-1][0] not in ("script", "style"):
            self.text += data
