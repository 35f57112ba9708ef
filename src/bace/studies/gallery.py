"""A gallery of neighbours: a few anchors of each task with their nearest rows, as in the paper's Figures 6 and 12.

The neighbours are those that the method itself used in the task's last epoch. If it used none, they are the nearest
training examples of the task in the feature space of the teacher or, without a teacher, of the network.
"""

from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from bace.config.schema import Config
from bace.core.method import Method
from bace.core.stream import Stream, Task
from bace.core.study import Observation, Record, Study
from bace.methods.parts.neighbours import NeighbourTable
from bace.models.backbones import backbone_path
from bace.randomness import generator

ANCHORS = 3  # anchors shown for each task
NEIGHBOURS = 5  # number of neighbours if the method does not define it
LICENCE = "gallery (a study: neighbours of a few examples are shown, fed back to nothing)"


@runtime_checkable
class HasNeighbours(Protocol):
    """A method that uses neighbours; `epoch_table` gives those of this epoch, if there are any."""

    def epoch_table(self) -> NeighbourTable | None: ...


def before_epoch(method: Method, task: Task) -> Record | None:
    """Record anchors and their neighbours from the method's own table of the epoch."""
    table = method.epoch_table() if isinstance(method, HasNeighbours) else None
    if table is None:
        return None
    targets = method.stream.targets[table.anchors]
    own = torch.nonzero((targets >= task.classes.start) & (targets < task.classes.stop)).flatten()
    chosen = own[choose(targets[own], generator(method.now.seed, "gallery", task.index))]
    return record("epoch table", table.anchors[chosen], table.neighbours[chosen], table.distances[chosen])


def after_task(seen: Observation) -> Record:
    if "gallery" in seen.noted:
        return seen.noted["gallery"]
    method, stream, task = seen.method, seen.stream, seen.task
    with stream.licence(LICENCE, task.train):
        rows, targets = stream.labels(task.train)
        features = F.normalize(method.outputs(task.train, method.teacher, logits=False).features, dim=1)
    if stream.background is not None:
        own = targets != stream.background
        rows, targets, features = rows[own], targets[own], features[own]
    chosen = choose(targets, generator(method.now.seed, "gallery", task.index))
    away = torch.cdist(features[chosen], features, compute_mode="donot_use_mm_for_euclid_dist")  # exact near duplicates
    away[torch.arange(len(chosen)), chosen] = torch.inf
    distance, index = (found[:, :NEIGHBOURS].cpu() for found in away.sort(stable=True))
    neighbours = rows[index]
    source = "network" if method.teacher is None else "teacher"
    return record(source, rows[chosen], neighbours.masked_fill(distance == torch.inf, -1), distance)


def choose(targets: Tensor, rng: torch.Generator) -> Tensor:  # (rows,) class ids -> (at most ANCHORS,) positions
    """Random rows of different classes; a class repeats only after all classes were chosen."""
    shuffled = torch.randperm(len(targets), generator=rng).tolist()
    count: dict[int, int] = {}
    turn: dict[int, int] = {}  # for each position, the number of rows of its class before it
    for position in shuffled:
        target = int(targets[position])
        turn[position] = count[target] = count.get(target, -1) + 1
    return torch.tensor(sorted(shuffled, key=lambda position: turn[position])[:ANCHORS], dtype=torch.int64)


def record(source: str, anchors: Tensor, neighbours: Tensor, distances: Tensor) -> Record:
    """A record of row ids and distances; images and texts are added at the end."""
    found = [
        {
            "row": anchor,
            "neighbours": [{"row": row, "distance": d} for row, d in zip(near, away, strict=True) if row >= 0],
        }
        for anchor, near, away in zip(anchors.tolist(), neighbours.tolist(), distances.tolist(), strict=True)
    ]
    return {"from": source, "anchors": found}


def collect(records: list[Record], stream: Stream, config: Config) -> Record:
    """For each task: the network that computed the features (`from`), and anchors with `example` id, `label`, `image`
    (PNG in base64) or `text` (for tokens with the place of the `word`), and `neighbours`, which also have a `distance`
    and say whether they belong to the `same` class."""

    def backbone() -> str:
        return str(backbone_path(config.backbone.name))

    def shown(row: int) -> Record:
        example = stream.owners(torch.tensor([row]))
        with stream.licence(LICENCE, example):
            stream.check(example)
            seen = stream.modality.view(stream.data, int(example), row, backbone)
            return {"example": int(example), "label": stream.names[int(stream.targets[row])], **seen}

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


STUDY = Study(after_task, collect, before_epoch)
