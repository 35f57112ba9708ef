"""Probing accuracy: the accuracy of a fresh classifier that is trained on the method's features of all data so far.

The observed accuracy belongs to the method's own classifier. The gap between the two is what the classifier has
forgotten but the encoder has not.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from bace.config.schema import Config
from bace.core import metrics
from bace.core.evaluation import score
from bace.core.stream import Stream
from bace.core.study import Observation, Record, Study, columns
from bace.models.heads import CosineHead, Head, LinearHead
from bace.randomness import generator

PROBES: dict[str, type[Head]] = {"cosine": CosineHead, "linear": LinearHead}  # the first is the main number


def after_task(seen: Observation) -> Record:
    seen.check_one_encoder()
    method, stream, tasks = seen.method, seen.stream, seen.tasks
    with seen.licence("probing", *(task.test for task in tasks)):
        features, targets = seen.training
        tests = [(stream.labels(task.test)[0], method.outputs(task.test, logits=False).features) for task in tasks]
    found: Record = {"observed": metrics.average_accuracy(seen.scores)}
    for kind, make in PROBES.items():
        name = (method.now.seed, "probing", kind, seen.task.index)
        head = make(features.shape[1])
        head.grow(seen.task.classes.stop, generator(*name, "rows"))
        fit_probe(head.to(stream.device), features, targets, generator(*name, "order"))
        scores = []
        for task, (rows, asked) in zip(tasks, tests, strict=True):
            with torch.inference_mode():
                predicted = head(asked).argmax(1).cpu()
            scores.append(score(stream, task, rows, predicted, lenient=seen.lenient)["score"])
        found[kind] = metrics.average_accuracy(scores)
    return found


def fit_probe(
    head: Head,
    features: Tensor,  # (rows, width)
    targets: Tensor,  # (rows,)
    order: torch.Generator,
    *,
    epochs: int = 20,
    least_steps: int = 400,
    batch_size: int = 128,
    lr: float = 1e-3,
) -> None:
    """Train a classifier on features: cross-entropy, Adam, shuffled batches.

    20 epochs over one task of the paper's CIFAR-100 (2,500 images) are 400 steps. A smaller dataset is passed more
    often, to reach this number: a probe that has not converged says nothing about the features."""
    device = head.no_rows.device
    features, targets = features.to(device), targets.to(device)
    optimiser = torch.optim.Adam(head.parameters(), lr=lr, fused=True)
    with torch.enable_grad():
        for _ in range(max(epochs, -(-least_steps // max(-(-len(features) // batch_size), 1)))):
            for rows in torch.randperm(len(features), generator=order).to(device).split(batch_size):
                optimiser.zero_grad(set_to_none=True)
                F.cross_entropy(head(features[rows]), targets[rows]).backward()
                optimiser.step()


def collect(records: list[Record], stream: Stream, config: Config) -> Record:
    """Percent after each task: accuracy, or seqeval's macro F1 for tokens, where every task counts the same."""
    return columns(records)


STUDY = Study(after_task, collect)
