"""Malformed inputs are mutated real files of every format, made-up files, and files that try to run code. Each must be
refused in one sentence or give a right answer, within a stated memory limit."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bace.config.parse import config_from
from bace.errors import BaceError
from bace.experiments.assemble import assemble
from bace.models.loading import describe_backbone
from campaign import folders, specimens
from campaign.work import UNCAUGHT, Case, Work, cases_in_turn, one_line

TITLE = "malformed inputs"
MOST_MEGABYTES = 2000  # the most memory that a case may hold beyond the imported library
PATIENCE = 60.0
Answer = str | None  # what is wrong with the answer, if anything


def cases(work: Work) -> Iterator[Case]:
    made = specimens.Specimens(work)
    yield from cases_in_turn(
        *(series(work, f"pictures {name}", 25, made.picture(name), read_pictures) for name in specimens.PICTURES),
        *(series(work, f"texts {name}", 45, made.texts(name), read_texts) for name in specimens.TEXTS),
        *(series(work, f"parquet {name}", 35, made.parquet(name), read_any) for name in specimens.PARQUET),
        *(series(work, f"published {name}", 25, made.published(name), read_pictures) for name in specimens.PUBLISHED),
        *(series(work, f"weights {name}", 30, made.weights(name), load_weights) for name in specimens.WEIGHTS),
        *(
            series(work, f"folder {name}", 25, folders.mutate(work, name), folders.ask(work, name))
            for name in folders.KINDS
        ),
        *(series(work, f"code in {name}", 1, made.code(name), ask) for name, ask in asks_of_code(work).items()),
    )


def series(
    work: Work, kind: str, count: int, make: Callable[[Path, random.Random], None], ask: Callable[[Path], Answer]
) -> Iterator[Case]:
    for number in range(count):
        name = f"{kind} {number}"
        yield name, lambda n=name: judged(work, n, make, ask)


def judged(
    work: Work, name: str, make: Callable[[Path, random.Random], None], ask: Callable[[Path], Answer]
) -> dict[str, Any]:
    place = work.fresh()
    make(place, random.Random(name))
    marker = work.folder / specimens.MARKER
    marker.unlink(missing_ok=True)

    def inside() -> dict[str, Any]:
        try:
            return {"wrong": ask(place)}
        except BaceError as error:
            return {"refused": str(error)}

    ended = work.ask(inside, PATIENCE)
    answer = ended.answer or {}
    record = {"outcome": "refused" if "refused" in answer else "answered", "megabytes": ended.megabytes}
    fault = None
    if marker.exists():
        fault = "code was run"
    elif ended.seconds > PATIENCE:
        fault = f"no end after {PATIENCE:.0f} seconds"
    elif ended.code:
        fault = one_line(ended.said) if ended.code == UNCAUGHT else f"exit code {ended.code}: {one_line(ended.said)}"
    elif "\n" in answer.get("refused", ""):
        fault = f"more than a sentence: {answer['refused']!r}"
    elif answer.get("wrong"):
        fault = answer["wrong"]
    elif ended.megabytes > MOST_MEGABYTES:
        fault = f"{ended.megabytes:.0f} MB"
    return {**record, "said": answer.get("refused", "")[:200], "fault": fault}


# -- the operations on an input


def read_pictures(place: Path) -> Answer:
    from bace.data.table import read

    table = read(place, modality="image")
    pixels = table.inputs
    if pixels.dtype.itemsize != 1 or pixels.ndim != 4 or pixels.shape[1] != 3 or min(pixels.shape) < 1:
        return f"pixels of {pixels.shape}, {pixels.dtype}"
    return fits(table)


def read_any(place: Path) -> Answer:
    from bace.data.table import read

    return fits(read(place))


def fits(table: Any) -> Answer:
    labels = set().union(*table.shown())
    unknown = set(labels) - set(table.names)
    return f"labels without a name: {unknown}" if unknown or len(table.inputs) != len(table.labels) else None


def read_texts(place: Path) -> Answer:
    """Read the texts, split them into tasks and turn them into numbers, as a run does. Compare the labels with those of
    a reader that is as simple as the format."""
    settings = json.loads((place / "settings.json").read_text())
    _, stream = assemble(config_from(settings))
    if not all(0 <= target < len(stream.names) for target in stream.targets.tolist()):
        return "a target that is no class"
    file = next(path for path in place.iterdir() if path.stem == "train")
    expected = specimens.SIMPLE_READERS[file.suffix](file)
    found = {name[2:] if file.suffix == ".conll" else name for name in stream.names if name != "O"}
    return None if found == expected else f"classes {sorted(found)[:5]}, not {sorted(expected)[:5]}"


def load_weights(place: Path) -> Answer:
    file = next((path for path in place.iterdir() if path.stem == "weights"), place / "vit")
    about = describe_backbone(str(file))
    return None if about["width"] else "no width"


def asks_of_code(work: Work) -> dict[str, Callable[[Path], Answer]]:
    """Return the operations on files that would create a marker if any code in them ran."""
    return {
        "a pickle of weights": load_weights,
        "a zipped pickle of weights": load_weights,
        "pickled arrays of weights": load_weights,
        "a module beside a ViT": load_weights,
        "a pickle of CIFAR": read_pictures,
        "a PostScript file named .png": read_pictures,
        "a YAML file": lambda place: yaml_settings(place),
        "a method beside a run": lambda place: folders.open_run(place / "run"),
        "a method beside a learner": lambda place: folders.open_learner(place / "learner"),
    }


def yaml_settings(place: Path) -> Answer:
    from bace.config.parse import read_yaml

    config_from(read_yaml(str(place / "settings.yaml")))
    return None


def summary(records: list[dict[str, Any]]) -> list[str]:
    kinds = [record["case"].split(" ")[0] for record in records]
    counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    refused = sum(record["outcome"] == "refused" for record in records)
    most = max(records, key=lambda record: record["megabytes"])
    return [
        f"{len(records)} inputs ({', '.join(f'{count} {kind}' for kind, count in counts.items())}): {refused} "
        f"were refused in one sentence, and {len(records) - refused} gave a right answer.",
        f"Peak memory beyond the imported library was at most {most['megabytes']:.0f} MB (`{most['case']}`); the "
        f"stated limit is {MOST_MEGABYTES:,} MB.",
    ]
