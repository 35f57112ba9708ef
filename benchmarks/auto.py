"""The measurements behind `Learner("auto")`: methods learn small sets of every modality, call by call, with default
settings.

A cell is a set, a number of examples of each class and a method. Its score is the mean over the calls of the score over
all classes seen so far: accuracy, or micro F1 for entities. Measured cells are written to benchmarks/auto.json and are
not measured again. Methods that train take minutes per cell, so they are measured only if a set names them. Without
--measure the table is printed from the file.

    python benchmarks/auto.py [--measure] [--sets NAME ...] [--methods NAME ...] [--sizes N ...] [--data FOLDER]
"""

import argparse
import hashlib
import json
import logging
import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import bace
from bace.data.digits import load_digits
from bace.data.modality import Table
from bace.data.scores import entity_scores
from bace.data.table import read
from bace.files import write_whole
from bace.methods import find_method
from bace.models.encoder import Encoder

RESULTS = Path(__file__).parent / "auto.json"
SIZES = (8, 30, 100)  # examples of each class
TESTED = 20  # test examples of each class
KEPT = 10  # examples of each class in memory, for methods with a memory

METHODS: dict[str, dict[str, Any]] = {
    "SimpleCIL": {"name": "simplecil"},
    "FeCAM": {"name": "fecam"},
    "SLDA": {"name": "slda"},
    "FeCAM(alpha1=10)": {"name": "fecam", "alpha1": 10.0},
    "SLDA(eps=0.01)": {"name": "slda", "eps": 0.01},
    "ACIL": {"name": "acil", "expansion": 2048},
    "ER": {"name": "er"},
    "LUCIR": {"name": "lucir"},
    "BaCE": {"name": "bace"},
    "ExtendNER": {"name": "extendner"},
}
TRAINED = ("ER", "LUCIR", "BaCE", "ExtendNER")


@dataclass(frozen=True)
class Set:
    """A set of the suite: the first `calls` x `classes` classes of a public set, with `classes` classes in each
    call."""

    name: str
    modality: str
    backbone: dict[str, Any]
    calls: int
    classes: int
    trained: tuple[str, ...] = ("ER", "BaCE")  # the methods that train which are measured on it


VIT = {"backbone": "vit-tiny", "backbone.image_size": 96}
MINILM = {"backbone": "minilm"}
SETS = (
    Set("digits", "image", {"backbone": "digits-vit"}, 5, 2, ("ER", "LUCIR", "BaCE")),
    Set("cifar10", "image", VIT, 5, 2),
    Set("fashion_mnist", "image", VIT, 5, 2),
    Set("ag_news", "text", MINILM, 2, 2),
    Set("stackoverflow_titles", "text", MINILM, 5, 4),
    Set("mit_restaurant", "token", MINILM, 4, 2, ("ER", "ExtendNER", "BaCE")),
    Set("wnut2017", "token", MINILM, 3, 2, ("ER", "ExtendNER", "BaCE")),
)


# -- data


def tables(one: Set, data: Path) -> tuple[Table, Table]:
    if one.name == "digits":
        return load_digits()
    train, test = (read(data / one.name, split=split, modality=one.modality) for split in ("train", "test"))
    return train, test


def call_data(table: Table, classes: Sequence[str], count: int) -> tuple[Any, list[Any]]:
    """Up to `count` examples of each of these classes. In sentences, all other types are labelled O, as by a user who
    labels only new types."""
    shown_by = table.shown()
    taken = [i for name in classes for i in [i for i, shown in enumerate(shown_by) if name in shown][:count]]
    some = table.take(sorted(set(taken)))
    if table.modality.one_label:
        return some.inputs, list(some.labels)
    return some.inputs, [[tag if tag[2:] in classes else "O" for tag in tags] for tags in some.labels]


def score(learner: bace.Learner, x: Any, y: list[Any]) -> float:
    if learner.modality != "token":
        return learner.score(x, y)
    types = [str(name) for name in learner.classes_]
    return entity_scores(y, learner.predict(x), types).micro_f1 / 100


# -- measuring


class Remembered:
    """The outputs of an untrained encoder for each example, computed once for all methods, calls and sizes."""

    def __init__(self) -> None:
        self.compute = Encoder.forward
        self.known: dict[bytes, Tensor] = {}  # (tokens, width) of an example, by its inputs
        self.used = True  # not by methods that train, whose frozen teachers are other encoders

    def forward(self, encoder: Encoder, inputs: dict[str, Tensor], taps: bool = False) -> Any:
        if taps or not self.used or any(p.requires_grad for p in encoder.parameters()):
            return self.compute(encoder, inputs, taps=taps)
        mask = inputs.get("attention_mask")
        first = next(iter(inputs.values()))
        lengths = [0] * len(first) if mask is None else mask.sum(1).tolist()
        cut = [row[:length] if length else row for row, length in zip(first, lengths, strict=True)]
        keys = [hashlib.sha256(row.numpy().tobytes()).digest() for row in cut]
        if not all(key in self.known for key in keys):
            for key, hidden, length in zip(keys, self.compute(encoder, inputs), lengths, strict=True):
                self.known[key] = hidden[: length or None].clone()
        return pad_sequence([self.known[key] for key in keys], batch_first=True)


def measure(one: Set, method: str, size: int, data: Path) -> dict[str, Any]:
    train, test = tables(one, data)
    names = train.names[: one.calls * one.classes]
    # statistics use only clean views, so random views are not chosen
    quick = one.modality == "image" and method not in TRAINED
    views = {"benchmark.augment": False, "benchmark.flip": False} if quick else {}
    learner = bace.Learner(settings(method), memory=KEPT * len(names), **one.backbone, **views)
    scores, began = [], time.perf_counter()
    for call in range(one.calls):
        start = call * one.classes
        learner.partial_fit(*call_data(train, names[start : start + one.classes], size))
        scores.append(round(score(learner, *call_data(test, names[: start + one.classes], TESTED)), 4))
    seconds = round(time.perf_counter() - began, 1)
    cell = {"modality": one.modality, "set": one.name, "examples": size, "method": method}
    return {**cell, "scores": scores, "seconds": seconds}


def settings(method: str) -> dict[str, Any]:
    return METHODS.get(method, {"name": method})


def wanted(sets: Sequence[str], methods: Sequence[str], sizes: Sequence[int]) -> list[tuple[Set, str, int]]:
    """The requested cells: first the quick ones, then those of methods that train."""
    chosen = [one for one in SETS if one.name in sets]
    quick = [(one, m, size) for size in SIZES for one in chosen for m in METHODS if m not in TRAINED]
    slow = [(one, m, size) for one in chosen for size in reversed(SIZES) for m in one.trained]
    cells = [cell for cell in (*quick, *slow) if cell[1] in methods and cell[2] in sizes]
    return [(one, m, size) for one, m, size in cells if one.modality in find_method(settings(m)["name"]).modalities]


def results() -> list[dict[str, Any]]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else []


# -- the table


def average(cell: dict[str, Any]) -> float:
    return mean(cell["scores"])


def table(cells: list[dict[str, Any]]) -> str:
    """A row for each modality, size and method: the mean over the sets, then each set."""
    lines = []
    for modality in dict.fromkeys(one.modality for one in SETS):
        sets = [one.name for one in SETS if one.modality == modality]
        lines += [f"| {modality} | examples | mean | {' | '.join(sets)} | seconds |"]
        lines += [f"|{' --- |' * (len(sets) + 4)}"]
        for size in SIZES:
            for method in dict.fromkeys(cell["method"] for cell in cells):
                mine = [cell for cell in cells if (cell["method"], cell["examples"]) == (method, size)]
                own = {cell["set"]: cell for cell in mine if cell["set"] in sets}
                if own:
                    whole = f"{100 * mean(map(average, own.values())):.1f}" if len(own) == len(sets) else ""
                    shown = " | ".join(f"{100 * average(own[s]):.1f}" if s in own else "" for s in sets)
                    seconds = sum(cell["seconds"] for cell in own.values()) / len(own)
                    lines.append(f"| {method} | {size} | {whole} | {shown} | {seconds:.0f} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--sets", nargs="+", default=[one.name for one in SETS])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("BACE_DATA", "../shared/data")))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    remembered = Remembered()
    Encoder.forward = lambda encoder, inputs, taps=False, pooled=False: remembered.forward(encoder, inputs, taps)
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    cells = results()
    done = {(cell["set"], cell["method"], cell["examples"]) for cell in cells}
    for one, method, size in wanted(asked.sets, asked.methods, asked.sizes) if asked.measure else ():
        if (one.name, method, size) not in done:
            remembered.used = method not in TRAINED
            cells.append(measure(one, method, size, asked.data))
            lines = ",\n".join(map(json.dumps, cells))
            write_whole(RESULTS, f"[\n{lines}\n]\n")
            print(json.dumps(cells[-1]), flush=True)
    print(table(cells))


if __name__ == "__main__":
    main()
