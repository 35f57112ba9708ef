"""The experiments behind explanations in docs/results.md.

    BACE_DATA=DATA BACE_MODELS=MODELS python benchmarks/explanations.py acil|fecam|seqstar|ridge|rows

All but the last are outside of the training loop, on features of the pre-trained encoders.

acil: ridge regression on random features of desk CIFAR-100, after each of ten tasks, for several numbers of features
and ridges. With a small ridge, accuracy dips where there are as many images as features.

fecam: nearest means and FeCAM's distances on desk CIFAR-100 and topics-desk, with as many examples of each class as the
desk settings have and with four or five times as many, for several shrinkages, with one covariance for all classes, and
with signed roots of the features.

seqstar: a cosine head on topics-desk whose rows are learned task by task on new texts alone, with the features as they
are and with the mean feature of the first task subtracted.

ridge: ridge regression on the words of all corpora of entities-desk, in which each word counts the same, and in which
each class does.

rows: networks that were trained task by task without a memory, on entities-desk and topics-desk. Their scores among
all classes, and among the classes of a task if the task is told. CODA-Prompt also without the components of later
tasks.
"""

import argparse
import math
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import bace
from bace.config.parse import config_from
from bace.core.evaluation import score
from bace.core.stream import Task
from bace.experiments.assemble import assemble
from bace.methods.codaprompt import CODAPrompt
from bace.methods.fecam import correlations, shrunk

Part = list[tuple[Tensor, Tensor]]  # of each task: (examples, width) features, (examples,) classes


def features(settings: dict[str, Any]) -> tuple[Part, Part]:
    """Of the training and the test examples."""
    method, stream = assemble(config_from({"method": "SimpleCIL", "train.threads": 1, **settings}))
    found: tuple[Part, Part] = ([], [])
    for task in stream:
        with stream.licence("evaluation", torch.cat([task.train, task.test])):
            for part, examples in zip(found, (task.train, task.test), strict=True):
                part.append((method.outputs(examples).features, stream.labels(examples)[1]))
    return found


def accuracy(scores: Any, asked: Part) -> float:
    """In percent, the mean over tasks."""
    return 100 * sum(float((scores(x).argmax(1) == y).float().mean()) for x, y in asked) / len(asked)


def desk_cifar(train: int, test: int) -> dict[str, Any]:
    """With this many training and test images per class."""
    cifar = {"benchmark.path": str(Path(os.environ["BACE_DATA"]) / "cifar100"), "benchmark.tasks": 10}
    counts = {"benchmark.train_per_class": train, "benchmark.test_per_class": test, "benchmark.augment": False}
    return {"benchmark": "my-images", **cifar, **counts, "backbone": "vit-tiny", "backbone.image_size": 112}


def acil() -> None:
    train, test = features(desk_cifar(40, 20))
    train, test = ([(x.double(), y) for x, y in part] for part in (train, test))
    print(f"mean norm of the features: {train[0][0].norm(dim=1).mean():.1f}")
    for count in (1000, 2000, 3000):
        rng, width = torch.Generator().manual_seed(0), train[0][0].shape[1]
        B = (2 * torch.rand(width, count, generator=rng, dtype=torch.float64) - 1) / math.sqrt(width)
        found: dict[float, list[str]] = {0.1: [], 1000.0: []}
        G, Q = torch.zeros(count, count, dtype=torch.float64), torch.zeros(count, 100, dtype=torch.float64)
        for t, (x, y) in enumerate(train):
            H = torch.relu(x @ B)
            G, Q = G + H.T @ H, Q + H.T @ F.one_hot(y, 100).double()
            for ridge, row in found.items():
                W = torch.linalg.solve(G + ridge * torch.eye(count, dtype=torch.float64), Q)[:, : 10 * (t + 1)]
                row.append(f"{accuracy(lambda x, B=B, W=W: torch.relu(x @ B) @ W, test[: t + 1]):.1f}")
        for ridge, row in found.items():
            print(f"{count} features, ridge {ridge:g}, after 400, 800, ... images: {' '.join(row)}", flush=True)


def fecam() -> None:
    topics = {"benchmark": "topics-desk", "benchmark.train_per_class": 400, "benchmark.test_per_class": 50}
    for name, settings, few, many in (("CIFAR-100", desk_cifar(200, 50), 40, 200), ("topics", topics, 100, 400)):
        train, test = ([(x.double(), y) for x, y in part] for part in features(settings))
        classes = [x[y == c] for x, y in train for c in y.unique()]
        print(f"{name}: {100 * (classes[0] < 0).double().mean():.0f} % of the first class's features are negative")
        for count in (few, many):
            for said, found in distances(classes, test, count, many).items():
                print(f"{name}, {count} of each class, {said}: {found:.1f}", flush=True)


def distances(classes: list[Tensor], test: Part, count: int, many: int) -> dict[str, float]:
    """Accuracies by class means and by Mahalanobis distances, which are made from the first `count` of each class."""

    def asked(x: Tensor, means: Tensor, metrics: list[Tensor]) -> Tensor:  # (rows, classes)
        gaps = [F.normalize(x, dim=1) - mean for mean in means]
        return torch.stack([-((gap @ metric) * gap).sum(1) for gap, metric in zip(gaps, metrics, strict=True)], 1)

    unit = [F.normalize(x[:count], dim=1) for x in classes]
    means, raw = torch.stack([x.mean(0) for x in unit]), torch.stack([x[:count].mean(0) for x in classes])
    own, common = [torch.cov(x.T) for x in unit], torch.stack([torch.cov(x.T) for x in unit]).mean(0)
    better = [torch.cov(F.normalize(x[:many], dim=1).T) for x in classes]
    found = {
        "cosine with means (SimpleCIL)": accuracy(lambda x: F.normalize(x, dim=1) @ F.normalize(raw, dim=1).T, test),
        "nearest mean of unit features": accuracy(lambda x: -torch.cdist(F.normalize(x, dim=1), means), test),
    }
    variants = {
        f"FeCAM, alpha1={alpha:g}": [correlations(shrunk(S, alpha, 0)) for S in own] for alpha in (0.1, 1, 3, 10)
    }
    variants["without normalisation to correlations"] = [shrunk(S, 1, 0) for S in own]
    variants["common=true"] = [correlations(shrunk(common, 1, 0))] * len(classes)
    variants[f"covariances of {many} of each class"] = [correlations(shrunk(S, 1, 0)) for S in better]
    for said, matrices in variants.items():
        metrics = [torch.linalg.inv(S) for S in matrices]
        found[said] = accuracy(lambda x, metrics=metrics: asked(x, means, metrics), test)
    rooted = [F.normalize(root(x[:count]), dim=1) for x in classes]
    metrics = [torch.linalg.inv(correlations(shrunk(torch.cov(x.T), 1, 0))) for x in rooted]
    centres = torch.stack([x.mean(0) for x in rooted])
    found["FeCAM on signed roots"] = accuracy(lambda x: asked(root(x), centres, metrics), test)
    return found


def root(x: Tensor) -> Tensor:
    """Tukey's transform with the power 1/2, of numbers that may be negative."""
    return x.sign() * x.abs().sqrt()


def seqstar() -> None:
    train, test = features({"benchmark": "topics-desk"})
    mean = train[0][0].mean(0)
    for name, other in (("its own task", train[0][0]), ("the next task", train[1][0])):
        cosine = F.cosine_similarity(train[0][0], other.mean(0)[None]).mean()
        print(f"cosine of a text with the mean of {name}: {cosine:.2f}")
    for steps in (200, 1000):
        for said, shift in (("as they are", torch.zeros_like(mean)), ("without the first task's mean", mean)):
            score = cosine_rows(train, test, shift, steps)
            print(f"{steps} steps, features {said}: A_last {score:.1f}", flush=True)


def cosine_rows(train: Part, test: Part, shift: Tensor, steps: int, scale: float = 16.0) -> float:
    """The accuracy after all tasks. Rows of earlier tasks stay, and rows of later tasks take part from the start."""
    torch.manual_seed(0)
    sizes = [len(y.unique()) for _, y in train]
    rows, known = torch.nn.Parameter(0.05 * torch.randn(sum(sizes), len(shift))), 0

    def logits(x: Tensor, rows: Tensor) -> Tensor:
        return scale * F.normalize(x - shift, dim=1) @ F.normalize(rows, dim=1).T

    for (x, y), size in zip(train, sizes, strict=True):
        optimiser, old = torch.optim.AdamW([rows], lr=1e-3, weight_decay=0.0), rows.detach()[:known].clone()
        for _ in range(steps):
            batch = torch.randint(len(x), (16,))
            loss = F.cross_entropy(logits(x[batch], torch.cat([old, rows[known:]])), y[batch])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        known += size
    return accuracy(lambda x: logits(x, rows.detach()), test)


def ridge() -> None:
    settings = {"benchmark": "entities-desk", "method": "SimpleCIL", "train.threads": 1}
    method, stream = assemble(config_from(settings))
    found = []
    for task in stream:
        with stream.licence("evaluation", torch.cat([task.train, task.test])):
            found.append([method.outputs(examples).features.double() for examples in (task.train, task.test)])
    classes, width = len(stream.names), found[0][0].shape[1]
    B = torch.randn(width, 2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = [stream.targets[stream.rows_of(task.train)[0]] for task in stream]
    shares = torch.bincount(torch.cat(labels), minlength=classes) / sum(map(len, labels))
    print(f"{100 * shares[stream.background]:.0f} % of the training words are labelled O")
    for said, weights in (("word", torch.ones(classes)), ("class", 1 / (classes * shares))):
        G, Q = torch.zeros(2000, 2000, dtype=torch.float64), torch.zeros(2000, classes, dtype=torch.float64)
        for (shown, _), y in zip(found, labels, strict=True):
            H, w = torch.relu(shown @ B), weights[y].double()[:, None]
            G, Q = G + H.T @ (w * H), Q + H.T @ (w * F.one_hot(y, classes).double())
        W = torch.linalg.solve(G + 1e-3 * G.diagonal().mean() * torch.eye(2000, dtype=torch.float64), Q)
        scores = []
        for task, (_, asked) in zip(stream, found, strict=True):
            predicted = (torch.relu(asked @ B) @ W).argmax(1)
            scores.append(score(stream, task, stream.rows_of(task.test)[0], predicted))
        names = ("macro_f1_own", "micro_f1", "precision", "recall")
        shown_scores = ", ".join(f"{name} {sum(each[name] for each in scores) / len(scores):.1f}" for name in names)
        print(f"every {said} counts the same: {shown_scores}", flush=True)


def rows() -> None:
    for benchmark, chosen in (
        ("entities-desk", {"name": "O-LoRA"}),
        ("entities-desk", {"name": "SD-LoRA", "tune_epochs": 2}),
        ("topics-desk", {"name": "CODA-Prompt", "tune_epochs": 5, "tune_steps": 0}),
    ):
        method = bace.run(benchmark=benchmark, method=chosen, train={"threads": 1}, measure={"fwt": False}).method
        found: dict[str, list[float]] = {"all classes": [], "the task is told": []}
        for task in method.stream:
            found["all classes"].append(score_of(method, task))
            told = set(task.classes) | ({method.stream.background} - {None})
            found["the task is told"].append(score_of(method, task, told))
            if method.stream.background is not None:
                found.setdefault("accuracy of entity words among the task's types", []).append(types_of(method, task))
        if isinstance(method, CODAPrompt):
            every = {name: list(getattr(method.prompts, name)) for name in "PKA"}
            found["without components of later tasks"] = []
            for task in method.stream:
                for name, parts in every.items():
                    setattr(method.prompts, name, torch.nn.ParameterList(parts[: task.index + 1]))
                found["without components of later tasks"].append(score_of(method, task))
        for said, scores in found.items():
            each = " ".join(f"{number:.1f}" for number in scores)
            print(f"{method.title}, {said}: {sum(scores) / len(scores):.1f} ({each})", flush=True)


def score_of(method: Any, task: Task, among: set[Any] | None = None) -> float:
    """On the test set of a task, after all tasks: accuracy, or macro F1 over the task's own types."""
    rows = method.stream.rows_of(task.test)[0]
    found = score(method.stream, task, rows, predicted(method, task, among))
    return float(found.get("macro_f1_own", found["score"]))


def types_of(method: Any, task: Task) -> float:
    """The percentage of a corpus's entity words whose type is found among the types of the corpus."""
    truth = method.stream.targets[method.stream.rows_of(task.test)[0]]
    entity = truth != method.stream.background
    types = set(task.classes) - {method.stream.background}
    return 100 * float((predicted(method, task, types) == truth)[entity].double().mean())


def predicted(method: Any, task: Task, among: set[Any] | None) -> Tensor:  # (rows,)
    """Classes of the rows of a task's test set, among these classes."""
    stream = method.stream
    method.eval()
    with stream.licence("evaluation", task.test), torch.inference_mode():
        scores = torch.cat([method.predict(stream.batch(part)) for part in task.test.split(50)])
        if among is not None:
            scores[:, [c for c in range(scores.shape[1]) if c not in among]] = -torch.inf
    return scores.argmax(1)


EXPERIMENTS = {"acil": acil, "fecam": fecam, "seqstar": seqstar, "ridge": ridge, "rows": rows}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    torch.set_num_threads(1)
    EXPERIMENTS[parser.parse_args().experiment]()
