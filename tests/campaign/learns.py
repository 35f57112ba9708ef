"""`bace learn` is killed with `kill -9` at a random moment. The model must load afterwards and give exactly the scores
from before, or those of a model that has learned everything."""

import json
import random
import shutil
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from checks import short, shown_examples, training_examples

import bace
from bace.cli.main import main
from campaign.work import Case, Work, one_line

TITLE = "kill -9 of bace learn at random moments"
MODELS = [(method, modality) for method in ("ER", "SimpleCIL", "BaCE") for modality in ("image", "text")]
TRIES = 20  # a kill after the end does not count


def cases(work: Work) -> Iterator[Case]:
    number = 0
    while True:
        for method, modality in MODELS:
            yield f"{number} {method} {modality}", lambda m=method, o=modality, n=number: killed(work, m, o, n)
            number += 1


def killed(work: Work, method: str, modality: str, number: int) -> dict[str, Any]:
    rng = random.Random(f"learn {number}")
    model, known = prepared(work, method, modality)
    for _ in range(TRIES):
        folder = work.fresh() / "model"
        shutil.copytree(model, folder)
        words = ["learn", str(folder), str(data(work, modality))]
        child = work.start(partial(main, words))
        time.sleep(rng.uniform(0, known["seconds"]))
        child.send(signal.SIGKILL)
        if child.wait().code == -signal.SIGKILL:
            break
    else:
        return {"place": "after the end", "fault": None}
    written = any(folder.glob(".*.unfinished"))
    ended = work.ask(lambda: scores(work, folder, modality))
    if ended.code:
        return {"place": "", "fault": f"the model does not load: {one_line(ended.said)}"}
    found = [when for when in ("before", "after") if ended.answer == known[when]]
    if not found:
        return {"place": "", "fault": "the model gives other scores than before, and than afterwards"}
    place = "while the new model was written" if written else f"with the model as it was {found[0]}"
    return {"place": place, "fault": None}


def prepared(work: Work, method: str, modality: str) -> tuple[Path, dict[str, Any]]:
    """Return a model of two classes, its scores before and after it learns two more classes, and the seconds that this
    takes."""
    folder = work.folder / "learned" / f"{method}-{modality}"
    known = folder.with_suffix(".json")
    if not known.exists():
        shutil.rmtree(folder, ignore_errors=True)
        settings = {k: v for k, v in work.tiny.settings(modality).items() if not k.startswith("benchmark")}

        def teach() -> None:
            learner = bace.Learner(short(method), **settings)
            learner.partial_fit(*training_examples(work.tiny, modality, (0, 1))).save(folder)

        made = work.ask(teach)
        before = work.ask(lambda: scores(work, folder, modality)).answer
        later = work.fresh() / "model"
        shutil.copytree(folder, later)
        learned = work.ask(lambda: main(["learn", str(later), str(data(work, modality))]))
        after = work.ask(lambda: scores(work, later, modality)).answer
        if made.code or learned.code or before == after:
            raise RuntimeError(f"{method} on {modality} could not be taught: {made.said} {learned.said}")
        known.write_text(json.dumps({"before": before, "after": after, "seconds": learned.seconds}))
    return folder, json.loads(known.read_text())


def scores(work: Work, folder: Path, modality: str) -> Any:
    return bace.Learner.load(folder).decision_function(shown_examples(work.tiny, modality)[0]).tolist()


def data(work: Work, modality: str) -> Path:
    """Return two more classes as users have them: class folders, or a table."""
    folder = work.folder / "more"
    if modality == "image":
        for name in work.tiny.classes[2:4]:
            shutil.copytree(work.tiny.folder / "pictures" / "train" / name, folder / name, dirs_exist_ok=True)
        return folder
    file = work.folder / "more.csv"
    rows = zip(*training_examples(work.tiny, "text", (2, 3)), strict=True)
    file.write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))
    return file


def summary(records: list[dict[str, Any]]) -> list[str]:
    places = [record["place"] for record in records if record["place"]]
    counts = {place: places.count(place) for place in sorted(set(places))}
    intact = sum(not record["fault"] for record in records)
    return [
        f"`bace learn` was killed {len(records)} times ({len(MODELS)} pairs of method and modality); **{intact} of "
        f"{len(records)} models were intact**.",
        f"Kills by moment: {', '.join(f'{count} {place}' for place, count in counts.items())}.",
    ]
