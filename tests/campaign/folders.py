"""Make run folders and learners that a stranger could forge: invalid JSON or tensors with matching checksums."""

import contextlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import bace
from bace.core import checkpoint
from bace.report import load_runs, summary_rows, write_page
from campaign.damage import STUDIES
from campaign.disk import learner
from campaign.mutations import mutated, strange_json
from campaign.work import Work, unfinished

KINDS = (
    "run.json opened",
    "run.json resumed",
    "run.json reported",
    "metrics.json reported",
    "studies.json reported",
    "log.jsonl reported",
    "matrix.csv reported",
    "state.json opened",
    "state.json resumed",
    "state.safetensors opened",
    "state.safetensors resumed",
    "state.json loaded",
    "state.safetensors loaded",
)


def mutate(work: Work, kind: str) -> Callable[[Path, random.Random], None]:
    name, verb = kind.split(" ")

    def make(place: Path, rng: random.Random) -> None:
        if verb == "loaded":
            folder = Path(shutil.copytree(learner(work), place / "learner"))
        elif verb == "resumed":
            folder = unfinished(work.straight("ER", "image", **STUDIES)[0], place / "run")
        else:
            folder = Path(shutil.copytree(work.straight("ER", "image", **STUDIES)[0], place / "run"))
        newest = max((folder if verb == "loaded" else folder / "checkpoints").glob("[0-9]*"))
        path = newest / name if name.startswith("state") else folder / name
        if name == "state.safetensors":
            tensors = strange_tensors(load_file(path), rng)
            save_file(tensors, path)
        elif path.suffix == ".json" and rng.random() < 0.9:
            path.write_text(json.dumps(strange_json(json.loads(path.read_text()), rng)))
        else:
            path.write_bytes(mutated(path.read_bytes(), rng))
        if name == "run.json" and rng.random() < 0.5:  # a forger would also change the copy in the checkpoint
            state = json.loads((newest / "state.json").read_text())
            with contextlib.suppress(ValueError):
                state["run"] = json.loads(path.read_text())
            (newest / "state.json").write_text(json.dumps(state))
        with_sums(newest)

    return make


def strange_tensors(tensors: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    name = rng.choice(list(tensors))
    tensor = tensors[name]
    way = rng.randrange(8)
    if way == 0:
        del tensors[name]
    elif way == 1:
        tensors[f"{name}x"] = tensor.clone()
    else:
        tensors[name] = [
            torch.zeros(0),
            torch.zeros(2, 2, 2, 2, 2),
            tensor.flatten()[:0],
            tensor.to(torch.int8),
            torch.full_like(tensor, -1),
            torch.full_like(tensor, 2**31 - 1 if not tensor.is_floating_point() and tensor.element_size() > 2 else 1),
        ][way - 2].contiguous()
    return tensors


def with_sums(folder: Path) -> None:
    """Write checksums that match the files as they are now. A forger can compute them too."""
    sums = {name: checkpoint._sha256(folder / name) for name in ("state.safetensors", "state.json")}
    (folder / "sha256.json").write_text(json.dumps(sums))


def ask(work: Work, kind: str) -> Callable[[Path], str | None]:
    verb = kind.split(" ")[1]
    return {
        "opened": lambda place: open_run(place / "run", work),
        "resumed": lambda place: resume(place / "run"),
        "reported": lambda place: report(place / "run"),
        "loaded": lambda place: open_learner(place / "learner", work),
    }[verb]


def open_run(folder: Path, work: Work | None = None) -> str | None:
    return predict(bace.load(folder), work)


def open_learner(folder: Path, work: Work | None = None) -> str | None:
    return predict(bace.Learner.load(folder), work)


def predict(taught: bace.Learner, work: Work | None) -> str | None:
    if work is None:
        return None
    pictures = sorted((work.tiny.folder / "pictures" / "test" / "ant").iterdir())
    found = taught.predict(pictures)
    return None if len(found) == len(pictures) and set(found) <= set(taught.classes_) else f"predicted {found}"


def resume(folder: Path) -> str | None:
    result = bace.run(resume=folder)
    return None if len(result.matrix) == 3 else "a matrix of another size"


def report(folder: Path) -> str | None:
    runs = load_runs([folder])
    summary_rows(runs)
    write_page(runs, folder.parent / "page.html")
    return None
