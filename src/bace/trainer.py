"""The one loop. A method returns losses; the trainer owns the steps, the order of things, checkpoints and measures.

Read it from `Trainer.run` down. A run can be cut at every `resume_point` and goes on from there, bit for bit.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from bace import metrics
from bace.checkpoint import split_state, understood
from bace.config import Config
from bace.errors import CheckpointError, Stopped, TrainingError
from bace.evaluation import evaluate_seen, transfer
from bace.method import Method, Stage
from bace.models.encoders import Encoder
from bace.randomness import derive, seed_dropout
from bace.room import bytes_kept
from bace.stream import Stream, Task
from bace.studies import STUDIES, Seen


@dataclass
class At:
    """The next thing to do."""

    task: int = 0
    phase: Literal["begin", "train", "finish", "evaluate"] = "begin"
    stage: int = 0
    prepared: bool = False
    epoch: int = 0
    step: int = 0
    sums: dict[str, float] = field(default_factory=dict)  # loss terms of the epoch so far
    best: float | None = None  # validation loss, for early stopping
    stale: int = 0
    noted: dict[str, dict[str, Any]] = field(default_factory=dict)  # by studies, in the task's last epoch


@dataclass
class Results:
    """What was measured so far; plain JSON."""

    matrix: list[list[float]] = field(default_factory=list)  # row t: score of each task up to t after learning task t
    before: list[float] = field(default_factory=list)  # score of tasks 2.. with imprinted rows, before learning them
    chance: list[float] = field(default_factory=list)  # the same with random rows
    details: list[dict[str, Any]] = field(default_factory=list)  # per task: everything else
    studies: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by study: a record of each task
    seconds: float = 0.0
    passes: float = 0.0  # of examples through an encoder, forward; there and back counts three

    def check(self) -> None:
        """Raises what summing up would raise, but before the rest is computed: a file may hold anything."""
        if self.matrix:
            metrics.summary(self.matrix)
        for detail in self.details:
            float(detail["kept"]), detail["scorers"].keys()


Saved = TypeVar("Saved", At, Results)


class Trainer:
    """Learns a stream with a method.

    Args:
        method, stream: attached to each other (`runner.attach`).
        config: training, measures and checkpoint settings.
        log: takes one JSON-able event at a time.
        save: called with (tensors, JSON state) when a checkpoint is due; None: never saved.
        show: called with the current position for a progress bar.
        stopping: asked at every resume point for the signal that asks the run to stop there, if one has come.
    """

    def __init__(
        self,
        method: Method,
        stream: Stream,
        config: Config,
        *,
        log: Callable[[dict[str, Any]], None] = lambda event: None,
        save: Callable[[dict[str, Tensor], dict[str, Any]], None] | None = None,
        show: Callable[[float, str], None] = lambda done, text: None,
        stopping: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.method, self.stream, self.config = method, stream, config
        self.log, self.save, self.show, self.stopping = log, save, show, stopping
        self.studies = {name: STUDIES[name] for name in config.studies}
        self.at, self.results = At(), Results()
        self.optimiser: torch.optim.Optimizer | None = None
        self.saved_optimiser: dict[str, Tensor] = {}  # by parameter and slot, from the checkpoint
        self.steps_since_save, self.saved_at = 0, time.monotonic()
        self.clock = spent()

    # -- the story

    def run(self) -> Results:
        """All tasks, from wherever the run is."""
        while self.at.task < len(self.stream):
            task = self.stream[self.at.task]
            self.learn(task)
            self.evaluate(task)
            self.at = At(task=task.index + 1)
            self.resume_point("task", due=True)
        return self.results

    def learn(self, task: Task) -> None:
        """One task: before_task, grow, the stages, after_task, shrink."""
        method, at = self.method, self.at
        self.enter(task)
        if at.phase == "begin":
            self.measure_transfer(task)
            method.before_task(task)
            method.grow(task)
            if self.config.head.head_init == "imprint" and method.growing_head:
                method.imprint(task)
            at.phase = "train"
        if at.phase == "train":
            stages = method.stages(task)
            while at.stage < len(stages):
                self.train(stages[at.stage], len(stages))
                at.stage, at.prepared, at.epoch, at.step, at.best, at.stale = at.stage + 1, False, 0, 0, None, 0
                self.resume_point("stage")
            at.phase = "finish"
            self.resume_point("finish")
        if at.phase == "finish":
            self.set_stage("after task")
            method.eval()
            method.after_task(task)
            method.shrink(task)
            at.phase = "evaluate"
            self.resume_point("evaluate")

    def train(self, stage: Stage, stages: int) -> None:
        """One stage: epochs of shuffled batches."""
        method, at, now = self.method, self.at, self.method.now
        self.set_stage(stage.name)
        if not at.prepared:
            if stage.structure:
                stage.structure()
            if stage.prepare:
                stage.prepare()
            at.prepared = True
        examples, module = stage.examples(), stage.module()
        parameters = list(stage.parameters() if stage.parameters else module.parameters())
        chosen = {id(p) for p in parameters}
        resting = [p for p in module.parameters() if p.requires_grad and id(p) not in chosen]
        for p in resting:  # no gradient is computed for what is not trained
            p.requires_grad_(False)
        self.optimiser = self.make_optimiser(stage, parameters) if stage.optimise else None
        self.saved_optimiser = {}
        now.steps = -(-len(examples) // stage.batch_size)
        now.epochs = stage.epochs = max(stage.epochs, -(-stage.min_steps // max(now.steps, 1)))
        while at.epoch < stage.epochs:
            now.epoch, now.step = at.epoch, 0
            self.open()  # what has left the memory since is closed
            method.eval()
            method.before_epoch(stage)
            self.note()
            module.train()
            for ids in self.batches(stage, examples)[at.step :]:
                now.step = at.step
                self.set_learning_rate(stage, at.epoch + at.step / now.steps)
                view = now.view() if stage.augment else None
                batch = self.stream.batch(ids, view=view, inputs=not stage.cached)
                for part, piece in enumerate(method.expand(batch)):
                    # every step's dropout has its own seed, and every named pass its own again (Model.forward)
                    seed_dropout(derive(now.seed, "dropout", now.task, now.stage, now.epoch, now.step, part))
                    self.step(stage, piece, parameters)
                at.step += 1
                self.show_progress(stage, stages)
                self.resume_point("step", steps=1)
            now.step = at.step  # also when the run was resumed after the last step
            method.after_epoch(stage)
            self.log_epoch(stage)
            at.epoch, at.step, at.sums = at.epoch + 1, 0, {}
            if self.converged(stage):
                break
        for p in resting:
            p.requires_grad_(True)
        module.eval()
        if self.optimiser is not None:
            self.optimiser.zero_grad(set_to_none=True)  # not to be kept beside those of the next stage

    def batches(self, stage: Stage, examples: Tensor) -> list[Tensor]:
        """The ids of an epoch, batch by batch."""
        rng = self.method.now.rng("order")
        if stage.sampler:
            return list(stage.sampler(rng).split(stage.batch_size))
        bucketing = self.config.train.bucketing and not stage.cached
        return self.stream.shuffled(examples, stage.batch_size, rng, bucketing=bucketing)

    def step(self, stage: Stage, batch: Any, parameters: list[nn.Parameter]) -> None:
        """Loss, gradient, update."""
        method, optimiser = self.method, self.optimiser
        loss = stage.loss(batch)
        terms = {"loss": loss} if isinstance(loss, Tensor) else loss
        if terms:
            total = functools.reduce(torch.add, terms.values())
            self.check_finite(total, terms)
            assert optimiser is not None
            optimiser.zero_grad(set_to_none=True)
            total.backward()
            method.before_step(batch)
            if clip := self.config.train.clip if stage.clip is None else stage.clip:
                nn.utils.clip_grad_norm_(parameters, clip)
            optimiser.step()
            for name, term in terms.items():
                self.at.sums[name] = self.at.sums.get(name, 0.0) + float(term.detach())
            self.at.sums["steps"] = self.at.sums.get("steps", 0) + 1
        method.after_step(batch)

    def evaluate(self, task: Task) -> None:
        """One more row of the accuracy matrix."""
        self.set_stage("evaluate")
        asked = sum(len(self.method.evaluated(earlier)) for earlier in self.stream[: task.index + 1])
        if cost := self.method.prediction_cost(asked):
            self.log({"event": "cost", "task": task.index + 1, "prediction": cost})
            self.show((task.index + 1) / len(self.stream), cost)
        row, detail = evaluate_seen(self.method, task, lenient=self.config.measure.map_foreign_types_to_O)
        self.results.matrix.append(row)
        average, kept = metrics.average_accuracy(row), bytes_kept(self.method)
        self.results.details.append({**detail, "kept": kept})
        names = ("macro_f1_own", "micro_f1") if "scores" in detail else ()
        other = {name: [score[name] for score in detail["scores"]] for name in names}
        self.log({"event": "task", "task": task.index + 1, "scores": row, "A": average, **other, "kept": kept})
        self.observe(task, row)

    def note(self) -> None:
        """Let the studies see the epoch's tables. Again on resume, to the same end."""
        for name, study in self.studies.items():
            found = study.before_epoch and study.before_epoch(self.method, self.stream[self.at.task])
            if found:
                self.at.noted[name] = found

    def observe(self, task: Task, scores: list[float]) -> None:
        """Let the studies look at what the task has left. What they spend is not counted as the method's."""
        self.tick()
        seen = Seen(self.method, task, scores, self.config.measure.map_foreign_types_to_O, self.at.noted)
        for name, study in self.studies.items():
            self.show((task.index + 1) / len(self.stream), f"task {task.index + 1}/{len(self.stream)} {name}")
            self.results.studies.setdefault(name, []).append(study.observe(seen))
        self.clock = spent()

    def findings(self) -> dict[str, Any]:
        """What the studies have found in the whole run: studies.json."""
        records = self.results.studies
        return {n: study.findings(records[n], self.stream, self.config) for n, study in self.studies.items()}

    def measure_transfer(self, task: Task) -> None:
        """Forward transfer, before a task is learned."""
        wanted = self.config.measure.fwt and self.method.growing_head and len(task.test)
        if task.index and wanted:
            found = transfer(self.method, task, lenient=self.config.measure.map_foreign_types_to_O)
            self.results.before.append(found["before"])
            self.results.chance.append(found["chance"])
            self.log({"event": "transfer", "task": task.index + 1, **found})

    def converged(self, stage: Stage) -> bool:
        """Early stopping on the network's validation loss; off unless `train.early_stop` is set, and in a stage that
        trains nothing of the network."""
        valid = self.stream[self.at.task].valid
        if not self.config.train.early_stop or not len(valid):
            return False
        trained = {p for p in stage.module().parameters() if p.requires_grad}
        if trained.isdisjoint(self.method.model.parameters()):
            return False
        with self.stream.licence("validation", valid):
            loss = self.method.validation_loss(valid)
        if loss is None:
            return False
        better = self.at.best is None or loss < self.at.best
        self.at.best, self.at.stale = (loss, 0) if better else (self.at.best, self.at.stale + 1)
        return self.at.stale >= self.config.train.early_stop

    # -- the optimiser

    def make_optimiser(self, stage: Stage, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """A new one, with the state it had in the checkpoint, or (reset_optimiser off) in the stage before."""
        train = self.config.train
        lr = stage.lr if stage.lr is not None else train.lr
        head_lr = stage.head_lr if stage.lr is not None or stage.head_lr is not None else train.head_lr
        head_lr = lr if head_lr is None else head_lr
        names = {id(p): name for name, p in self.method.named_parameters()}
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for p in parameters:
            if p.requires_grad:
                rate = head_lr if ".head." in f".{names.get(id(p), '')}" else lr
                decay = train.weight_decay if p.ndim > 1 else 0.0
                groups.setdefault((rate, decay), []).append(p)
        if not groups:
            raise TrainingError(f"stage '{stage.name}' of {type(self.method).__name__} has no trainable parameter")
        kind = stage.optimiser or train.optimiser
        momentum = train.momentum if stage.momentum is None else stage.momentum
        # fused: one kernel instead of a Python loop over parameters
        options = [{"params": ps, "lr": r, "base_lr": r, "weight_decay": d} for (r, d), ps in groups.items()]
        optimiser: torch.optim.Optimizer
        if kind == "sgd":
            optimiser = torch.optim.SGD(options, lr=lr, momentum=momentum, fused=True)
        else:
            optimiser = torch.optim.AdamW(options, lr=lr, fused=True)
        for p in parameters:
            slots = self.saved_optimiser_slots(names.get(id(p), ""))
            if slots:
                if any(value.ndim and (value.shape != p.shape or value.dtype != p.dtype) for value in slots.values()):
                    raise CheckpointError(f"the checkpoint's optimiser state of '{names[id(p)]}' does not fit it")
                optimiser.state[p] = {slot: value.to(p.device) for slot, value in slots.items()}
            elif not train.reset_optimiser and type(self.optimiser) is type(optimiser) and p in self.optimiser.state:
                optimiser.state[p] = self.optimiser.state[p]
            elif kind == "sgd" and momentum and p.requires_grad:
                # what the first step would make; fused SGD cannot take some parameters with and some without
                optimiser.state[p] = {"momentum_buffer": torch.zeros_like(p)}
        return optimiser

    def set_learning_rate(self, stage: Stage, epochs: float) -> None:
        """For the step after so many epochs (a fraction too)."""
        if stage.schedule:
            factor = stage.schedule(epochs)
        else:
            progress = epochs / stage.epochs
            factor = {
                "constant": 1.0,
                "linear": 1.0 - progress,
                "cosine": 0.5 * (1.0 + float(torch.cos(torch.tensor(torch.pi * progress)))),
            }[self.config.train.schedule]
        self.method.now.lr = (self.config.train.lr if stage.lr is None else stage.lr) * factor
        for group in self.optimiser.param_groups if self.optimiser else ():
            group["lr"] = group["base_lr"] * factor

    # -- where we are

    def enter(self, task: Task) -> None:
        self.set_task(task)
        self.open()
        if self.method.licence == "past" and "joint training" not in self.stream.licences:
            self.stream.licences.append("joint training")
            self.log({"event": "licence", "reason": "joint training: all earlier training data may be read"})
        self.set_stage("before task")

    def open(self) -> None:
        """The task's training examples and what is in memory now may be read."""
        task = self.stream[self.method.now.task]
        self.stream.begin(task, self.method.remembered(), past=self.method.licence == "past")

    def set_task(self, task: Task) -> None:
        now = self.method.now
        now.task, now.known, now.seen = task.index, task.classes.start, task.classes.stop

    def set_stage(self, name: str) -> None:
        now = self.method.now
        now.stage, now.epoch, now.step = name, 0, 0

    def show_progress(self, stage: Stage, stages: int) -> None:
        at, tasks = self.at, len(self.stream)
        share_of_stage = (at.epoch + at.step / self.method.now.steps) / stage.epochs
        text = f"task {at.task + 1}/{tasks} {stage.name} epoch {at.epoch + 1}/{stage.epochs}"
        self.show((at.task + (at.stage + share_of_stage) / stages) / tasks, text)

    def log_epoch(self, stage: Stage) -> None:
        sums = dict(self.at.sums)
        steps = sums.pop("steps", 0)
        terms = {name: value / steps for name, value in sums.items()} if steps else {}
        event = {"event": "epoch", "task": self.at.task + 1, "stage": stage.name, "epoch": self.at.epoch}
        self.log({**event, "loss": sum(terms.values()) if terms else None, "terms": terms})

    def check_finite(self, total: Tensor, terms: dict[str, Tensor]) -> None:
        if bool(torch.isfinite(total)):
            return
        now = self.method.now
        guilty = [name for name, term in terms.items() if not bool(torch.isfinite(term))] or list(terms)
        raise TrainingError(
            f"the loss is not finite: term '{guilty[0]}' is {terms[guilty[0]].item()} in task {now.task + 1}, stage "
            f"'{now.stage}', epoch {now.epoch + 1}, step {now.step + 1}. The last good checkpoint is kept; try a "
            "lower train.lr, or train.clip 1."
        )

    # -- saving and going on

    def resume_point(self, kind: str, *, steps: int = 0, due: bool = False) -> None:
        """A place where a run may be cut; a checkpoint is written if one is due, and before the run is stopped."""
        self.steps_since_save += steps
        every, minutes = self.config.checkpoint.every, self.config.checkpoint.minutes
        due = due or bool(every and self.steps_since_save >= every)
        due = due or bool(minutes and time.monotonic() - self.saved_at >= 60 * minutes)
        signal = self.stopping()
        if self.save is not None and (due or signal):
            self.tick()
            self.save(*self.state())
            self.steps_since_save, self.saved_at = 0, time.monotonic()
        if signal:
            raise Stopped(signal)

    def tick(self) -> None:
        """Add what was spent since the last time."""
        before, self.clock = self.clock, spent()
        self.results.seconds += self.clock[0] - before[0]
        self.results.passes += self.clock[1] - before[1]

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that the rest of the run depends on."""
        tensors, plain = split_state(self.method.state_dict())
        tensors = {f"method.{name}": value for name, value in tensors.items()}
        names: dict[Tensor, str] = {p: name for name, p in self.method.named_parameters()}
        for p, slots in self.optimiser.state.items() if self.optimiser and not self.optimiser_is_over() else ():
            for slot, value in slots.items():
                if value is not None:
                    tensors[f"optimiser.{names[p]}|{slot}"] = torch.as_tensor(value)
        # restored, and not yet taken over by a stage
        tensors.update({f"optimiser.{name}": value for name, value in self.saved_optimiser.items()})
        at, results = dataclasses.asdict(self.at), dataclasses.asdict(self.results)
        return tensors, {"at": at, "results": results, "method": plain, "licences": self.stream.licences}

    def optimiser_is_over(self) -> bool:
        return self.config.train.reset_optimiser and not self.at.prepared

    def restore(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Make the shapes again (grow, structure, shrink), then fill in the saved values."""
        with understood("the checkpoint"):
            self._restore(tensors, state)

    def _restore(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        self.at, self.results = _as_saved(At, state["at"]), _as_saved(Results, state["results"])
        self.results.check()
        self.stream.licences = list(state["licences"])
        for task in self.stream[: self.at.task + 1]:
            current = task.index == self.at.task
            if current and self.at.phase == "begin":
                break
            self.set_task(task)
            self.method.grow(task)
            stages = self.method.stages(task)
            begun = self.at.stage + int(self.at.prepared) if current and self.at.phase == "train" else len(stages)
            for stage in stages[:begun]:
                if stage.structure:
                    stage.structure()
            if not current or self.at.phase == "evaluate":
                self.method.shrink(task)
        values = {name.removeprefix("method."): t for name, t in tensors.items() if name.startswith("method.")}
        self.method.load_state_dict({**values, **state["method"]})
        slots = {name: t for name, t in tensors.items() if name.startswith("optimiser.")}
        self.saved_optimiser = {name.removeprefix("optimiser."): t for name, t in slots.items()}
        self.clock = spent()

    def saved_optimiser_slots(self, parameter: str) -> dict[str, Tensor]:
        prefix = f"{parameter}|"
        return {n.removeprefix(prefix): t for n, t in self.saved_optimiser.items() if n.startswith(prefix)}


def _as_saved(kind: type[Saved], values: dict[str, Any]) -> Saved:
    """A record from its JSON; a value of another type than the record's own is refused."""
    made, usual = kind(**values), kind()
    for name, own in vars(usual).items():
        found = getattr(made, name)
        if own is not None and type(found) is not type(own) and not isinstance(own, float):
            raise TypeError(f"'{name}' is {found!r:.50}")
    return made


def spent() -> tuple[float, float]:
    """Seconds on the clock, and passes of examples through encoders, up to now."""
    return time.monotonic(), Encoder.passes
