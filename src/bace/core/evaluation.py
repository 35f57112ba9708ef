"""Predictions and scores of test sets, by the measure of their modality."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bace import ranks
from bace.core.calibration import calibrate, finite
from bace.core.method import Method
from bace.core.stream import Stream, Task
from bace.data.batch import NO_IDS
from bace.data.modality import Predicted
from bace.randomness import generator

LOW = 0.6  # the share of examples below which learning is said to have failed
ENOUGH_STEPS = 200  # of the optimiser, for a task or a call
ASKED = 100  # training examples that are asked for this
STOCK = 300  # examples of a task, or of the memory, that probabilities are calibrated with
CHANCE_DRAWS = 5  # random heads that are averaged for "chance" in forward transfer


def evaluate_seen(method: Method, task: Task, *, lenient: bool = False) -> tuple[list[float], dict[str, Any]]:
    """The score of every task up to `task`, and details. The method does not know which task an example belongs to. The
    details are entity scores, or accuracy over all examples and per class, with the confusion matrix after the last
    task; the scores of each of the method's other scorers; and the number of test examples if not all were
    evaluated."""
    stream, tasks = method.stream, method.stream[: task.index + 1]
    asked = [method.evaluated(earlier) for earlier in tasks]
    together = torch.cat(asked)  # one pass for all tasks and scorers
    with stream.licence("evaluation", together):
        rows, predicted = predict(method, together, method.scorers)
    sizes = [len(stream.rows_of(examples)[0]) for examples in asked]

    def by_task(scorer: str | None) -> list[dict[str, Any]]:
        parts = zip(tasks, rows.split(sizes), predicted[scorer].split(sizes), strict=True)
        return [score(stream, *part, lenient=lenient) for part in parts]

    details = by_task(None)
    row = [detail.pop("score") for detail in details]
    detail: dict[str, Any] = {"scorers": {name: [found["score"] for found in by_task(name)] for name in method.scorers}}
    if any(len(examples) < len(earlier.test) for earlier, examples in zip(tasks, asked, strict=True)):
        detail["evaluated"] = [len(examples) for examples in asked]
    seen = _predicted(stream, rows, predicted[None], task)
    return row, detail | stream.modality.details(seen, details, last=task.index == len(stream) - 1)


def predict(
    method: Method, examples: Tensor, scorers: Sequence[str] = ()
) -> tuple[Tensor, dict[str | None, Tensor]]:  # (rows,) ids, (rows,) predicted classes
    """Predicted classes of all rows of these examples, among all classes seen so far: by the method's own rule (under
    None) and by other scorers. Each process of a run predicts its share of them."""
    method.eval()
    stream = method.stream
    size = min(method.training_settings.eval_batch_size, max(-(-len(examples) // ranks.size()), 1))
    parts, in_order = stream.bucketed(examples, size)
    predicted: dict[str | None, list[Tensor]] = {scorer: [NO_IDS] for scorer in (None, *scorers)}
    with ranks.alone():
        for part in ranks.dealt(parts):
            batch = stream.batch(part)
            with method.model.passed_once(batch):
                for scorer, found in predicted.items():
                    found.append(stream.eligible(method.predict(batch, scorer)).argmax(1).cpu())
    rows = stream.rows_of(examples)[0]
    places = torch.arange(len(rows)).split([len(stream.rows_of(part)[0]) for part in parts])

    def of_all_ranks(own: Tensor) -> Tensor:
        return ranks.gather(own, torch.cat([NO_IDS, *ranks.dealt(places)]), len(rows)) if ranks.several() else own

    return rows, {scorer: in_order(of_all_ranks(torch.cat(found))) for scorer, found in predicted.items()}


def recognised(method: Method, examples: Tensor) -> float | None:
    """The share of these examples, which the stream must allow to read, that the method recognises among all classes
    seen. For sentences, it is the F1 over words of the types that the sentence's task labels: misses and false alarms
    both count, and types of other tasks, which hide among the words labelled O, do not. None if there is nothing to
    recognise."""
    stream = method.stream
    if not len(examples):
        return None
    rows, by_scorer = predict(method, examples)
    predicted, targets = by_scorer[None], stream.targets[rows]
    if stream.background is None:
        return float((predicted == targets).double().mean())
    task_of = torch.full((len(stream.names),), -1)  # of each class; -1 for O
    for task in stream:
        task_of[task.classes.start : task.classes.stop] = task.index
    task_of[stream.background] = -1
    sentences, at = stream.owners(rows).unique(return_inverse=True)
    labelled_by = torch.full((len(sentences),), -1).scatter_reduce(0, at, task_of[targets], "amax")[at]  # the task
    labelled = task_of[targets] >= 0
    found = (task_of[predicted] >= 0) & (task_of[predicted] == labelled_by)
    right = labelled & (predicted == targets)
    return 2 * int(right.sum()) / int(labelled.sum() + found.sum()) if labelled.any() else None


def stock(examples: Tensor, most: int = STOCK) -> Tensor:  # (examples,)
    """Some of these examples, the same every time."""
    return examples[torch.randperm(len(examples), generator=generator(0, "stock"))[:most]]


def scores_of(method: Method, examples: Tensor) -> tuple[Tensor, Tensor]:  # (examples, known classes), (examples,)
    """The scores of these examples, which the stream must allow to read and which show one class each, and the columns
    of their classes. A forgotten class has no column: with a score of -inf no temperature could be fitted."""
    stream, known = method.stream, torch.tensor(method.stream.known)
    method.eval()
    with ranks.alone():
        parts, in_order = stream.bucketed(examples, method.training_settings.eval_batch_size)
        scores = in_order(torch.cat([method.predict(stream.batch(part)).cpu() for part in parts]))
    return finite(scores[:, known]), torch.searchsorted(known, stream.targets[examples])


def calibration(method: Method) -> dict[str, Any]:
    """The temperature of the probabilities of a method that has learned all tasks, and the calibration error without
    and with it: on training examples of the last task and of the memory, never on test examples.

    It is empty for sentences, if predicting would take longer than learning, and for a method that trains but does not
    remember every class: the last task alone does not show how unsure it is of what it has forgotten."""
    stream, last = method.stream, method.stream[-1]
    asked = torch.unique(torch.cat([stock(last.train), stock(method.remembered())]))
    if not stream.modality.one_label or not len(asked) or method.prediction_cost(len(asked)):
        return {}
    remembered = len(stream.targets[asked].unique()) == len(stream.known)
    if not remembered and any(stage.optimise for stage in method.stages(last)):
        return {}
    stream.begin(last, method.remembered())
    found = calibrate(*scores_of(method, asked))
    return {"temperature": found["temperature"], "training_ece": found["ece"]} if found else {}


def known_shares(method: Method, task: Task) -> tuple[float | None, float | None]:
    """The shares of a task's training examples and of old examples in memory that are recognised, as far as they are
    measured."""
    memory = torch.unique(method.remembered())
    shown, old = stock(task.train, ASKED), stock(memory[~torch.isin(memory, task.train)], ASKED)
    if method.prediction_cost(len(shown) + len(old)):  # it would take longer than learning
        return None, None
    return recognised(method, shown), recognised(method, old)


def complaints(what: str, new: float | None, old: float | None, method: Method, steps: int) -> Iterator[str]:
    """Sentences that say that a task or call was hardly learned, or that remembered examples were forgotten, and what
    to do: low scores alone do not tell a hard task from a fault.

    what: the name of the task or call. new, old: the recognised shares of its training examples and of older ones in
    memory. steps: of an epoch, 0 without an optimiser."""
    train = method.training_settings
    steps_and_rate = f"more steps (train.epochs, now {train.epochs}), another rate (train.lr, now {train.lr:g})"
    remedy = f"give {steps_and_rate}, or more examples"
    if not steps:
        remedy = "give more examples, another backbone, or a method that trains the encoder (docs/which-method.md)"
    elif method.own_batch or method.cost.epochs:
        remedy = f"raise {method.title}'s own epochs or rate (bace run --method {method.title} --help)"
    if new is not None and new < LOW:
        yield f"{what} was hardly learned: {new:.0%} of its training examples are recognised; {remedy}"
    if old is not None and old < LOW:
        yield (
            f"after {what}, {old:.0%} of the old examples in memory are recognised: a larger memory, a lower rate "
            f"(train.lr, now {train.lr:g}) or another method (docs/which-method.md) may forget less"
        )
    if steps == 1 and train.epochs < ENOUGH_STEPS and not method.own_batch:
        yield f"an epoch of {what} is one step: lower train.batch_size (now {train.batch_size})"


def score(stream: Stream, task: Task, rows: Tensor, predicted: Tensor, *, lenient: bool = False) -> dict[str, Any]:
    """The scores of predictions on a test set, in percent; "score" is the one in the accuracy matrix."""
    own = [stream.names[c] for c in task.classes]
    return stream.modality.score(_predicted(stream, rows, predicted, stream.tasks[-1]), own, lenient=lenient)


def _predicted(stream: Stream, rows: Tensor, predicted: Tensor, task: Task) -> Predicted:
    return Predicted(predicted, stream.targets[rows], stream.owners(rows), stream.names[: task.classes.stop])


def transfer(method: Method, task: Task, *, lenient: bool = False) -> dict[str, float]:
    """Forward transfer to a task that is not yet learned. Its test examples are scored by the method's own rule, with
    the current network and a copy of its head that has grown by rows for the task's classes.

    `before`: the score with rows made from the task's training data, among all classes; `chance`: the same with random
    rows; `within`: with rows from data, among the task's own classes only. The measurement does not influence the
    run."""
    stream, model = method.stream, method.transfer_model()
    with stream.licence("forward transfer (measured before the task, fed back to nothing)", task.test):
        rows_from_data, asked = method.transfer_rows(task), method.outputs(task.test, model, logits=False).features
        rows = stream.labels(task.test)[0]

    def scores_with(new_rows: Tensor | None, draw: int) -> Tensor:  # (rows, classes)
        head = copy.deepcopy(model.head)
        head.grow(len(task.classes), generator(method.now.seed, "transfer", task.index, draw))
        if new_rows is not None:
            head.imprint(new_rows)
        with torch.inference_mode():
            return method.transfer_scores(asked, head).cpu()

    def scored(scores: Tensor) -> float:
        return float(score(stream, task, rows, scores.argmax(1), lenient=lenient)["score"])

    informed = scores_with(rows_from_data, 0)
    foreign = torch.ones(informed.shape[1], dtype=torch.bool)
    foreign[list(task.classes)] = False
    if stream.background is not None:
        foreign[stream.background] = False
    return {
        "before": scored(informed),
        "chance": sum(scored(scores_with(None, draw)) for draw in range(CHANCE_DRAWS)) / CHANCE_DRAWS,
        "within": scored(informed.masked_fill(foreign, -torch.inf)),
    }
