"""Feature-embedding distance: the distance of a class's mean feature from its row in the classifier."""

import torch
import torch.nn.functional as F
from torch import Tensor

from bace.config.schema import Config
from bace.core.stream import Stream
from bace.core.study import Observation, Record, Skipped, Study, columns


def after_task(seen: Observation) -> Record:
    rows = class_rows(seen)
    with seen.licence("tracking"):
        features, targets = seen.training
    if features.shape[1] != rows.shape[1]:
        raise Skipped(
            f"{seen.method.title}'s classifier has rows of width {rows.shape[1]}, its features {features.shape[1]}"
        )
    # on the CPU, which has double precision and always sums in the same order
    distance = class_distances(features.cpu(), targets, rows.cpu())
    if seen.stream.background is not None:
        distance[seen.stream.background] = torch.nan  # shared by all tasks: neither old nor new
    euclidean = (2 * distance).sqrt()  # of the unit vectors
    by_task = [slice(task.classes.start, task.classes.stop) for task in seen.tasks]
    return {
        "distance": [mean(distance[own]) for own in by_task],
        "euclidean": [mean(euclidean[own]) for own in by_task],
        "new": mean(distance[seen.task.classes.start :]),
        "old": mean(distance[: seen.task.classes.start]),
        "all": mean(distance),
    }


def class_rows(seen: Observation) -> Tensor:  # (classes, width)
    """The classifier's row of each class seen so far."""
    seen.check_one_encoder()
    rows, classes = seen.method.model.head.weight.detach(), seen.task.classes.stop
    if len(rows) != classes:
        raise Skipped(f"{seen.method.title}'s classifier has {len(rows)} rows for {classes} classes, not one for each")
    return rows


def class_distances(
    features: Tensor,  # (rows, width)
    targets: Tensor,  # (rows,)
    weight: Tensor,  # (classes, width)
) -> Tensor:  # (classes,) float64; NaN for a class without rows
    """D_c = 1 - cos(mu_c, w_c), where mu_c is the mean unit feature of the class."""
    unit = F.normalize(features.double(), dim=1)
    total = torch.zeros(weight.shape, dtype=torch.float64).index_add_(0, targets, unit)  # the direction of the mean
    distance = 1 - F.cosine_similarity(total, weight.double(), dim=1)
    shown = targets.bincount(minlength=len(weight)) > 0
    return distance.clamp(min=0).masked_fill(~shown, torch.nan)


def mean(distances: Tensor) -> float | None:
    """The mean over the classes that have a distance."""
    known = distances[~distances.isnan()]
    return float(known.mean()) if len(known) else None


def collect(records: list[Record], stream: Stream, config: Config) -> Record:
    """Row t of `distance` and `euclidean` is each task's mean after task t. `new`, `old` and `all` are means over these
    classes after each task; `difference` is old minus new after the last task."""
    last = records[-1]
    both = last["old"] is not None and last["new"] is not None
    return columns(records) | {"difference": last["old"] - last["new"] if both else None}


STUDY = Study(after_task, collect)
