"""A gallery of neighbours: a few anchors of each task beside their nearest rows, as in the paper's Figures 6, 12.

The neighbours are those that the method itself used in the task's last epoch, if it used any; otherwise the nearest
training examples of the task in the eyes of the teacher, or of the network where there is no teacher.
"""

import base64
import io
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from bace.config.schema import Config
from bace.core.method import Method
from bace.core.stream import Stream, Task
from bace.core.study import Record, Seen, Study
from bace.data.modalities.image import Images
from bace.data.modalities.text import Texts, load_tokenizer
from bace.data.modalities.token import Entities
from bace.methods.parts.neighbours import NeighbourTable
from bace.models.backbones import backbone_path
from bace.randomness import generator

ANCHORS = 3  # shown of each task
NEIGHBOURS = 5  # where the method does not say how many
SIDE = 64  # pixels of a thumbnail, at most
LETTERS = 300  # of a text, at most
LICENCE = "gallery (a study: neighbours of a few examples are shown, fed back to nothing)"


@runtime_checkable
class HasNeighbours(Protocol):
    """A method that uses neighbours: those of this epoch, if there are any."""

    def epoch_table(self) -> NeighbourTable | None: ...


def before_epoch(method: Method, task: Task) -> Record | None:
    """Anchors and their neighbours in the method's own table of the epoch."""
    table = method.epoch_table() if isinstance(method, HasNeighbours) else None
    if table is None:
        return None
    targets = method.stream.targets[table.anchors]
    own = torch.nonzero((targets >= task.classes.start) & (targets < task.classes.stop)).flatten()
    chosen = own[choose(targets[own], generator(method.now.seed, "gallery", task.index))]
    return record("epoch table", table.anchors[chosen], table.neighbours[chosen], table.distances[chosen])


def after_task(seen: Seen) -> Record:
    if "gallery" in seen.noted:
        return seen.noted["gallery"]
    method, stream, task = seen.method, seen.stream, seen.task
    with stream.licence(LICENCE, task.train):
        rows, targets = stream.labels(task.train)
        features = F.normalize(method.outputs(task.train, method.teacher).features, dim=1)
    if stream.background is not None:
        own = targets != stream.background
        rows, targets, features = rows[own], targets[own], features[own]
    chosen = choose(targets, generator(method.now.seed, "gallery", task.index))
    away = torch.cdist(features[chosen], features, compute_mode="donot_use_mm_for_euclid_dist")  # exact near duplicates
    away[torch.arange(len(chosen)), chosen] = torch.inf
    distance, index = away.sort(stable=True)
    distance, neighbours = distance[:, :NEIGHBOURS], rows[index[:, :NEIGHBOURS]]
    source = "network" if method.teacher is None else "teacher"
    return record(source, rows[chosen], neighbours.masked_fill(distance == torch.inf, -1), distance)


def choose(targets: Tensor, rng: torch.Generator) -> Tensor:  # (rows,) class ids -> (at most ANCHORS,) positions
    """Random rows of different classes; of the same class again only when all classes have had their turn."""
    shuffled = torch.randperm(len(targets), generator=rng).tolist()
    count: dict[int, int] = {}
    turn: dict[int, int] = {}  # of each position: how many of its class come before it
    for position in shuffled:
        target = int(targets[position])
        turn[position] = count[target] = count.get(target, -1) + 1
    return torch.tensor(sorted(shuffled, key=lambda position: turn[position])[:ANCHORS], dtype=torch.int64)


def record(source: str, anchors: Tensor, neighbours: Tensor, distances: Tensor) -> Record:
    """Ids of rows, and distances; pictures and texts come in at the end."""
    found = [
        {
            "row": anchor,
            "neighbours": [{"row": row, "distance": d} for row, d in zip(near, away, strict=True) if row >= 0],
        }
        for anchor, near, away in zip(anchors.tolist(), neighbours.tolist(), distances.tolist(), strict=True)
    ]
    return {"from": source, "anchors": found}


def collect(records: list[Record], stream: Stream, config: Config) -> Record:
    """For each task: whose eyes (`from`), and anchors with `example` id, `label`, what there is to see (`image`: PNG
    in base64; or `text`, for tokens with the place of the `word` in it) and `neighbours`, which have a `distance` and
    whether they are of the `same` class besides."""
    see = viewer(stream, config)

    def shown(row: int) -> Record:
        example = stream.owners(torch.tensor([row]))
        with stream.licence(LICENCE, example):
            stream.check(example)
            return {"example": int(example), "label": stream.names[int(stream.targets[row])], **see(int(example), row)}

    tasks = []
    for found, task in zip(records, stream, strict=False):
        anchors = []
        for anchor in found["anchors"]:
            target = stream.targets[anchor["row"]]
            beside = [
                shown(near["row"]) | {"distance": near["distance"], "same": bool(stream.targets[near["row"]] == target)}
                for near in anchor["neighbours"]
            ]
            anchors.append(shown(anchor["row"]) | {"neighbours": beside})
        tasks.append({"task": task.name, "from": found["from"], "anchors": anchors})
    return {"tasks": tasks}


# -- what there is to see of a row


def viewer(stream: Stream, config: Config) -> Callable[[int, int], Record]:
    """Example and row -> its picture or text."""
    data = stream.data
    if isinstance(data, Images):
        return lambda example, row: {"image": thumbnail(data.pixels[example])}
    assert isinstance(data, Texts)
    tokenizer = load_tokenizer(str(backbone_path(config.backbone.name)))
    if isinstance(data, Entities):
        return lambda example, row: word_in_sentence(data, tokenizer, example, row)
    return lambda example, row: {"text": text_of(data, tokenizer, example)}


def thumbnail(pixels: Tensor) -> str:  # (1 or 3, height, width) uint8
    """A PNG in base64."""
    picture = Image.fromarray(pixels.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy())
    picture.thumbnail((SIDE, SIDE))  # never larger than it was
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def text_of(data: Texts, tokenizer: Any, example: int) -> str:
    ids = data.ids[data.start[example] : data.start[example + 1]].tolist()
    text = str(tokenizer.decode(ids, skip_special_tokens=True))
    return text if len(text) <= LETTERS else text[: LETTERS - 1] + "…"


def word_in_sentence(data: Entities, tokenizer: Any, example: int, row: int) -> Record:
    """The sentence's words with a blank between them, and where the row's begins and ends."""
    ids = data.ids[data.start[example] : data.start[example + 1]].tolist()
    first = int(data.row_start[example])
    starts = data.positions[first : int(data.row_start[example + 1])].tolist()
    pieces = [ids[start:end] for start, end in zip(starts, [*starts[1:], len(ids)], strict=True)]
    # a word that the tokenizer does not know is a special token, as are those at the ends
    words = [str(tokenizer.decode(piece, skip_special_tokens=True)) or str(tokenizer.unk_token) for piece in pieces]
    begin = sum(len(word) + 1 for word in words[: row - first])
    return {"text": " ".join(words), "word": [begin, begin + len(words[row - first])]}


STUDY = Study(after_task, collect, before_epoch)
