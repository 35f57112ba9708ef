"""The one loop. A method returns losses; the trainer owns the steps, the order of things, checkpoints and measures.

Read it from `Trainer.run` down. A run can be cut at every `resume_point` and goes on from there, bit for bit.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bace.config.schema import Config
from bace.core import metrics
from bace.core.checkpoint import as_saved, fill, split_state, understood
from bace.core.evaluation import evaluate_seen, transfer
from bace.core.method import Method, Stage
from bace.core.optimiser import (
    learning_rate_factor,
    make_optimiser,
    resting,
    restore_state,
    set_learning_rate,
    stage_groups,
    state_of,
)
from bace.core.resources import bytes_kept
from bace.core.stream import Stream, Task
from bace.core.study import Seen, Study
from bace.errors import Stopped, TrainingError
from bace.models.encoders import Encoder
from bace.models.model import Model
from bace.randomness import seed_dropout


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
        for value in (*self.before, *self.chance):
            float(value)
        for records in self.studies.values():
            records.copy()


class Trainer:
    """Learns a stream with a method.

    Args:
        method, stream: attached to each other (`experiments.run.attach`).
        config: training, measures and checkpoint settings.
        log: takes one JSON-able event at a time.
        save: called with (tensors, JSON state) when a checkpoint is due; None: never saved.
        show: called with the current position for a progress bar.
        studies: what looks on, by name.
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
        studies: Mapping[str, Study] | None = None,
    ) -> None:
        self.method, self.stream, self.config = method, stream, config
        self.log, self.save, self.show, self.stopping = log, save, show, stopping
        self.studies = studies or {}
        self.now, self.results = method.now, Results()
        self.optimiser: torch.optim.Optimizer | None = None
        self.saved_optimiser: dict[str, Tensor] = {}  # by parameter and slot, from the checkpoint
        self.steps_since_save, self.saved_at = 0, time.monotonic()
        self.clock = spent()

    # -- the story

    def run(self) -> Results:
        """All tasks, from wherever the run is."""
        for task in self.stream[self.now.tasks_done :]:
            self.learn(task)
            self.evaluate(task)
            self.now.phase = "end"
            self.resume_point("task", due=True)
        return self.results

    def learn(self, task: Task) -> None:
        """One task, from its beginning or from where it was cut: before_task, grow, the stages, after_task, shrink."""
        method, now = self.method, self.now
        self.enter(task)
        if now.phase == "begin":
            self.measure_transfer(task)
            method.before_task(task)
            method.grow(task)
            if self.config.head.head_init == "imprint" and method.growing_head:
                method.imprint(task)
            now.phase = "train"
        if now.phase == "train":
            stages = method.stages(task)
            for stage in stages[now.stages_done :]:
                self.train(stage, len(stages))
                now.stages_done += 1
                now.begin_stage(now.stage)
                self.resume_point("stage")
            now.phase = "finish"
            self.resume_point("finish")
        if now.phase == "finish":
            now.begin_stage("after task")
            method.eval()
            method.after_task(task)
            method.shrink(task)
            now.phase = "evaluate"
            self.resume_point("evaluate")

    def train(self, stage: Stage, stages: int) -> None:
        """One stage, from its beginning or from where it was cut: epochs of shuffled batches."""
        method, now, (first_epoch, first_step) = self.method, self.now, (self.now.epoch, self.now.step)
        now.stage, now.epoch, now.step = stage.name, 0, 0  # what a stage needs is made, or made again, at its start
        if not now.prepared:
            if stage.structure:
                stage.structure()
            if stage.prepare:
                stage.prepare()
            now.prepared = True
        for model in method.modules():
            if isinstance(model, Model):
                model.dropout_seed = now.dropout_seed
        examples, module, groups = stage.examples(), stage.module(), stage_groups(stage)
        trained = {p for group in groups.values() for p in group}
        parameters = [p for p in method.parameters() if p in trained]  # in an order that no grouping changes
        now.steps = -(-len(examples) // stage.batch_size)
        now.epochs = stage.epochs = max(stage.epochs, -(-stage.min_steps // max(now.steps, 1)))
        with resting(module, parameters):
            self.optimiser = self.begin_optimiser(stage, groups) if stage.optimise else None
            self.saved_optimiser = {}
            for now.epoch in range(first_epoch, stage.epochs):
                now.step = 0
                self.open()  # what has left the memory since is closed
                method.eval()
                method.before_epoch(stage)
                self.note()
                module.train()
                batches = self.batches(stage, examples)
                now.step, first_step = first_step, 0
                for ids in batches[now.step :]:
                    self.set_learning_rate(stage)
                    view = now.view() if stage.augment else None
                    batch = self.stream.batch(ids, view=view, inputs=not stage.cached)
                    for now.part, piece in enumerate(method.expand(batch)):
                        seed_dropout(now.dropout_seed())  # for modules of a method's own; models ask for theirs
                        self.step(stage, piece, parameters)
                    now.step += 1
                    self.show_progress(stage, stages)
                    self.resume_point("step", steps=1)
                method.after_epoch(stage)
                self.log_epoch(stage)
                now.sums = {}
                if self.converged(stage):
                    break
        module.eval()
        if self.optimiser is not None:
            self.optimiser.zero_grad(set_to_none=True)  # not to be kept beside those of the next stage

    def batches(self, stage: Stage, examples: Tensor) -> list[Tensor]:
        """The ids of an epoch, batch by batch."""
        rng = self.now.rng("order")
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
                self.now.sums[name] = self.now.sums.get(name, 0.0) + float(term.detach())
            self.now.sums["steps"] = self.now.sums.get("steps", 0) + 1
        method.after_step(batch)

    def evaluate(self, task: Task) -> None:
        """One more row of the accuracy matrix."""
        self.now.begin_stage("evaluate")
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
            found = study.before_epoch and study.before_epoch(self.method, self.stream[self.now.task])
            if found:
                self.now.noted[name] = found

    def observe(self, task: Task, scores: list[float]) -> None:
        """Let the studies look at what the task has left. What they spend is not counted as the method's."""
        self.tick()
        seen = Seen(self.method, task, scores, self.config.measure.map_foreign_types_to_O, self.now.noted)
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
        valid = self.stream[self.now.task].valid
        if not self.config.train.early_stop or not len(valid):
            return False
        trained = {p for p in stage.module().parameters() if p.requires_grad}
        if trained.isdisjoint(self.method.model.parameters()):
            return False
        with self.stream.licence("validation", valid):
            loss = self.method.validation_loss(valid)
        if loss is None:
            return False
        better = self.now.best is None or loss < self.now.best
        self.now.best, self.now.stale = (loss, 0) if better else (self.now.best, self.now.stale + 1)
        return self.now.stale >= self.config.train.early_stop

    # -- the optimiser

    def begin_optimiser(self, stage: Stage, groups: dict[str, list[nn.Parameter]]) -> torch.optim.Optimizer:
        """A new one, with the state it had in the checkpoint, or (reset_optimiser off) in the stage before."""
        optimiser, before = make_optimiser(stage, groups, self.config.train), self.optimiser
        if before is not None and not self.config.train.reset_optimiser and type(before) is type(optimiser):
            optimiser.state.update({p: before.state[p] for ps in groups.values() for p in ps if p in before.state})
        restore_state(optimiser, self.names(), self.saved_optimiser)
        return optimiser

    def set_learning_rate(self, stage: Stage) -> None:
        train, now = self.config.train, self.now
        factor = learning_rate_factor(stage, train, now.epoch + now.step / now.steps, now.steps)
        now.lr = (train.lr if stage.lr is None else stage.lr) * factor
        if self.optimiser:
            set_learning_rate(self.optimiser, factor)

    def names(self) -> dict[Tensor, str]:
        return {p: name for name, p in self.method.named_parameters()}

    # -- where we are

    def enter(self, task: Task) -> None:
        """The start of a task, or (on resume) the place in it where the run was cut."""
        if self.now.task != task.index or self.now.phase in ("begin", "end"):
            self.now.begin(task)
        self.now.show_task(task)
        self.open()
        if self.method.licence == "past" and "joint training" not in self.stream.licences:
            self.stream.licences.append("joint training")
            self.log({"event": "licence", "reason": "joint training: all earlier training data may be read"})

    def open(self) -> None:
        """The task's training examples and what is in memory now may be read."""
        task = self.stream[self.now.task]
        self.stream.begin(task, self.method.remembered(), past=self.method.licence == "past")

    def show_progress(self, stage: Stage, stages: int) -> None:
        now, tasks = self.now, len(self.stream)
        share_of_stage = (now.epoch + now.step / now.steps) / stage.epochs
        text = f"task {now.task + 1}/{tasks} {stage.name} epoch {now.epoch + 1}/{stage.epochs}"
        self.show((now.task + (now.stages_done + share_of_stage) / stages) / tasks, text)

    def log_epoch(self, stage: Stage) -> None:
        sums = dict(self.now.sums)
        steps = sums.pop("steps", 0)
        terms = {name: value / steps for name, value in sums.items()} if steps else {}
        event = {"event": "epoch", "task": self.now.task + 1, "stage": stage.name, "epoch": self.now.epoch}
        self.log({**event, "loss": sum(terms.values()) if terms else None, "terms": terms})

    def check_finite(self, total: Tensor, terms: dict[str, Tensor]) -> None:
        if bool(torch.isfinite(total)):
            return
        now = self.now
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
        optimiser = self.saved_optimiser  # restored, and not yet taken over by a stage
        if self.optimiser and not self.optimiser_is_over():
            optimiser = state_of(self.optimiser, self.names()) | optimiser
        tensors |= {f"optimiser.{name}": value for name, value in optimiser.items()}
        results = dataclasses.asdict(self.results)
        return tensors, {"at": self.now.state(), "results": results, "method": plain, "licences": self.stream.licences}

    def optimiser_is_over(self) -> bool:
        return self.config.train.reset_optimiser and not self.now.prepared

    def restore(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Make the shapes again (grow, structure, shrink), then fill in the saved values."""
        with understood("the checkpoint"):
            self._restore(tensors, state)

    def _restore(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        self.now.restore(state["at"])
        self.results = Results(**as_saved(state["results"], Results()))
        self.results.check()
        self.stream.licences = list(state["licences"])
        self.method.rebuild(self.stream[: self.now.task + 1])
        fill(self.method, tensors, state["method"])
        slots = {name: t for name, t in tensors.items() if name.startswith("optimiser.")}
        self.saved_optimiser = {name.removeprefix("optimiser."): t for name, t in slots.items()}
        self.clock = spent()


def spent() -> tuple[float, float]:
    """Seconds on the clock, and passes of examples through encoders, up to now."""
    return time.monotonic(), Encoder.passes
