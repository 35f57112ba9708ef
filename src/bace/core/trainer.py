"""The training loop. A method returns losses; the trainer owns the steps, their order, checkpoints and metrics.

Read it from `Trainer.run` down. A run can be interrupted at every `resume_point` and continues from there, bit for bit.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bace import ranks
from bace.config.schema import Config
from bace.core import metrics
from bace.core.checkpoint import as_saved, fingerprints, method_state, take_state, understood
from bace.core.evaluation import complaints, evaluate_seen, known_shares, transfer
from bace.core.loss_log import LossLog
from bace.core.method import Method
from bace.core.optimiser import (
    OptimiserState,
    learning_rate_factor,
    make_optimiser,
    resting,
    set_learning_rate,
    stage_groups,
)
from bace.core.prefetch import made_ahead
from bace.core.resources import bytes_kept
from bace.core.stage import Stage
from bace.core.stream import Stream, Task
from bace.core.study import Observation, Study
from bace.data.batch import Batch
from bace.errors import Stopped
from bace.models.model import Model
from bace.progress import Show, Tell, duration, quiet, silent
from bace.randomness import seed_dropout


@dataclass
class Results:
    """What has been measured so far, as plain JSON."""

    matrix: list[list[float]] = field(default_factory=list)  # row t: score of each task up to t after learning task t
    before: list[float] = field(default_factory=list)  # score of tasks 2.. with imprinted rows, before learning them
    chance: list[float] = field(default_factory=list)  # the same with random rows
    details: list[dict[str, Any]] = field(default_factory=list)  # per task: everything else
    studies: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by study: a record of each task
    seconds: float = 0.0
    passes: float = 0.0  # of examples through an encoder: forward counts one, forward and backward three

    def check(self) -> None:
        """Raise the errors of summing up before the rest is computed, because a file may contain anything."""
        if self.matrix:
            metrics.summary(self.matrix)
        for detail in self.details:
            float(detail["kept"]), detail["scorers"].keys()
        for value in (*self.before, *self.chance):
            float(value)
        for records in self.studies.values():
            records.copy()


class Trainer:
    """Trains a method on a stream.

    Args:
        method, stream: attached to each other (`experiments.assemble.attach`).
        config: training, measures and checkpoint settings.
        log: takes one JSON-able event at a time.
        save: called with (tensors, JSON state) when a checkpoint is due; None means that nothing is saved.
        show: called with the share done and the current position, for a progress bar.
        tell: called after each task of a run with a line of its scores and of the time that is left.
        studies: the studies that observe the run, by name.
        stopping: called at every resume point; returns the signal that asks the run to stop, if one has arrived.
    """

    def __init__(
        self,
        method: Method,
        stream: Stream,
        config: Config,
        *,
        log: Callable[[dict[str, Any]], None] = lambda event: None,
        save: Callable[[dict[str, Tensor], dict[str, Any]], None] | None = None,
        show: Show = quiet,
        tell: Tell = silent,
        stopping: Callable[[], int | None] = lambda: None,
        studies: Mapping[str, Study] | None = None,
    ) -> None:
        ranks.check_count(config.train.devices)
        self.method, self.stream, self.config = method, stream, config
        self.log, self.save, self.show, self.tell, self.stopping = log, save, show, tell, stopping
        self.studies = studies or {}
        self.now, self.results, self.losses = method.now, Results(), LossLog()
        self.optimiser: torch.optim.Optimizer | None = None
        self.scaler = self.new_scaler()
        self.restored: OptimiserState | None = None  # from the checkpoint, until a stage uses it
        self.steps_since_save, self.saved_at = 0, time.monotonic()
        self.clock = self.spent()
        self.began: tuple[float, float] | None = None  # the time of this process's first step, and the share done then
        self.loss: float | None = None  # of the last epoch
        self.optimised = False  # whether a stage with an optimiser was trained
        self.steps: list[int] = []  # of an epoch, for each such stage of the task

    # -- the main path

    def run(self) -> Results:
        """Learn all tasks, from the current position on."""
        self.check_ranks()
        for task in self.stream[self.now.tasks_done :]:
            self.learn(task)
            self.evaluate(task)
            self.tell(self.task_in_words(task))
            self.method.task_features.clear()
            self.now.end(task)
            self.resume_point("task", due=True)
            self.complain(task)
        return self.results

    def learn(self, task: Task) -> None:
        """Learn one task, from its beginning or from the resume point: before_task, grow, the stages, after_task,
        shrink."""
        method, now = self.method, self.now
        self.enter(task)
        if now.phase == "begin":
            self.measure_transfer(task)
            method.before_task(task)
            method.grow(task)
            if self.config.head.head_init == "imprint" and method.growing_head and len(task.classes):
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
        """Train one stage, from its beginning or from the resume point, in epochs of shuffled batches."""
        method, now, (first_epoch, first_step) = self.method, self.now, (self.now.epoch, self.now.step)
        method.task_features.clear()
        now.stage, now.epoch, now.step = stage.name, 0, 0  # tables of a stage are made (again) at its start
        if not now.prepared:
            if stage.structure:
                stage.structure()
            if stage.prepare:
                stage.prepare()
                method.task_features.clear()
            if self.config.train.reset_optimiser:
                self.scaler = self.new_scaler()
            now.prepared = True
        for model in method.modules():
            if isinstance(model, Model):
                model.dropout_seed = now.dropout_seed
        examples, module, groups = stage.examples(), stage.module(), stage_groups(stage)
        trained = {p for group in groups.values() for p in group}
        parameters = [p for p in method.parameters() if p in trained]  # in an order that does not depend on the groups
        now.steps = -(-len(examples) // stage.batch_size)
        now.epochs = stage.epochs = max(stage.epochs, -(-stage.min_steps // max(now.steps, 1)))
        with resting(module, parameters):
            self.optimiser = self.begin_optimiser(stage, groups) if stage.optimise else None
            self.optimised |= stage.optimise
            self.steps += [now.steps] if stage.optimise else []
            self.restored = None
            for now.epoch in range(first_epoch, stage.epochs):
                now.step = 0
                self.open()  # examples that have left the memory can no longer be read
                method.eval()
                method.before_epoch(stage)
                self.note()
                module.train()
                batches = self.batches(stage, examples)
                now.step, first_step = first_step, 0
                for batch in self.made(stage, batches[now.step :]):
                    self.set_learning_rate(stage)
                    for now.part, piece in enumerate(method.expand(batch)):
                        seed_dropout(now.dropout_seed())  # for a method's own modules; models seed themselves
                        self.step(stage, piece, parameters)
                    now.step, now.part = now.step + 1, 0
                    self.show_progress(stage, stages)
                    if self.losses.due:
                        self.losses.read_into(now.sums)
                    self.resume_point("step", steps=1)
                self.losses.read_into(now.sums)
                method.after_epoch(stage)
                self.log_epoch(stage)
                now.sums = {}
                if self.converged(stage):
                    break
        module.eval()
        if self.optimiser is not None:
            self.optimiser.zero_grad(set_to_none=True)  # free the gradients before the next stage

    def batches(self, stage: Stage, examples: Tensor) -> list[Tensor]:
        """The example ids of an epoch, batch by batch."""
        rng = self.now.rng("order")
        if stage.sampler:
            return list(stage.sampler(rng).split(stage.batch_size))
        bucketing = self.config.train.bucketing and not stage.cached
        return self.stream.shuffled(examples, stage.batch_size, rng, bucketing=bucketing)

    def made(self, stage: Stage, batches: list[Tensor]) -> Iterator[Batch]:
        """The batches of these ids, made ahead of their steps."""
        view = self.now.view() if stage.augment else None
        make = functools.partial(self.stream.batch, view=view, inputs=not stage.cached)
        ahead = self.config.train.prefetch
        return made_ahead(make, batches, (self.stream.device.type != "cpu") * 2 if ahead is None else ahead)

    def step(self, stage: Stage, batch: Batch, parameters: list[nn.Parameter]) -> None:
        """Loss, gradient, update."""
        method, optimiser = self.method, self.optimiser
        loss = stage.loss(batch)
        terms = {"loss": loss} if isinstance(loss, Tensor) else loss
        if terms:
            assert optimiser is not None
            optimiser.zero_grad(set_to_none=True)
            self.scaler.scale(functools.reduce(torch.add, terms.values())).backward()
            ranks.average(parameters)
            self.scaler.unscale_(optimiser)
            method.before_step(batch)
            if clip := self.config.train.clip if stage.clip is None else stage.clip:
                nn.utils.clip_grad_norm_(parameters, clip)
            self.scaler.step(optimiser)  # not if a gradient of float16 has overflowed
            self.scaler.update()
            self.losses.note(self.now.in_words(), terms)
        method.after_step(batch)

    def evaluate(self, task: Task) -> None:
        """Add a row to the accuracy matrix."""
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

    def complain(self, task: Task) -> None:
        """Tell if little was learned or kept, unless the method learns this task later. This is not counted as the
        method's time."""
        steps, self.steps = self.steps, []
        (heard,) = ranks.agree(int(self.tell is not silent))  # by some rank: then all of them predict
        if heard and self.method.stages(task):
            self.tick()
            shares = known_shares(self.method, task)
            for line in complaints(f"task {task.index + 1}", *shares, self.method, max(steps, default=0)):
                self.tell(line)
            self.clock = self.spent()

    def note(self) -> None:
        """Show the epoch's tables to the studies. On resume this is repeated, with the same result."""
        for name, study in self.studies.items():
            found = study.before_epoch and study.before_epoch(self.method, self.stream[self.now.task])
            if found:
                self.now.noted[name] = found

    def observe(self, task: Task, scores: list[float]) -> None:
        """Show the learned task to the studies. Their time is not counted as the method's."""
        self.tick()
        seen = Observation(self.method, task, scores, self.config.measure.map_foreign_types_to_O, self.now.noted)
        for name, study in self.studies.items():
            self.show((task.index + 1) / len(self.stream), f"task {task.index + 1}/{len(self.stream)} {name}")
            self.results.studies.setdefault(name, []).append(study.observe(seen))
        self.clock = self.spent()

    def findings(self) -> dict[str, Any]:
        """The findings of the studies over the whole run: studies.json."""
        records = self.results.studies
        return {n: study.findings(records[n], self.stream, self.config) for n, study in self.studies.items()}

    def measure_transfer(self, task: Task) -> None:
        """Measure forward transfer before a task is learned."""
        wanted = self.config.measure.fwt and self.method.growing_head and len(task.test)
        if task.index and wanted:
            found = transfer(self.method, task, lenient=self.config.measure.map_foreign_types_to_O)
            self.results.before.append(found["before"])
            self.results.chance.append(found["chance"])
            self.log({"event": "transfer", "task": task.index + 1, **found})

    def converged(self, stage: Stage) -> bool:
        """Early stopping on the network's validation loss. It is off unless `train.early_stop` is set, and in a stage
        that trains no part of the network."""
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
        """A new optimiser with the state of the checkpoint or, with reset_optimiser off, of the previous stage."""
        optimiser, before = make_optimiser(stage, groups, self.config.train), self.restored
        if before is None and self.optimiser is not None and not self.config.train.reset_optimiser:
            before = OptimiserState.of(self.optimiser)
        if before is not None:
            before.hand_over(optimiser)
        return optimiser

    def new_scaler(self) -> torch.amp.GradScaler:
        """Scales losses so that the gradients of float16 do not underflow; does nothing for other precisions."""
        half = self.config.train.precision == "float16"
        # torch's own first scale, 65,536, costs every stage its first steps, which overflow until it has shrunk
        return torch.amp.GradScaler(self.stream.device.type, init_scale=1024.0, enabled=half)

    def set_learning_rate(self, stage: Stage) -> None:
        train, now = self.config.train, self.now
        factor = learning_rate_factor(stage, train, now.epoch + now.step / now.steps, now.steps)
        now.lr = (train.lr if stage.lr is None else stage.lr) * factor
        if self.optimiser:
            set_learning_rate(self.optimiser, factor)

    # -- the position

    def enter(self, task: Task) -> None:
        """Go to the start of a task or, on resume, to the point where the run was interrupted."""
        if self.now.task != task.index or self.now.phase in ("begin", "end"):
            self.now.begin(task)
        self.now.show_task(task)
        self.open()
        if self.method.licence == "past" and "joint training" not in self.stream.licences:
            self.stream.licences.append("joint training")
            self.log({"event": "licence", "reason": "joint training: all earlier training data may be read"})

    def open(self) -> None:
        """Allow reading the task's training examples and the current memory, and nothing else."""
        task = self.stream[self.now.task]
        self.stream.begin(task, self.method.remembered(), past=self.method.licence == "past")

    def show_progress(self, stage: Stage, stages: int) -> None:
        now, tasks = self.now, len(self.stream)
        share_of_stage = (now.epoch + now.step / now.steps) / stage.epochs
        done = (now.task + (now.stages_done + share_of_stage) / stages) / tasks
        self.began = self.began or (time.monotonic(), done)
        text = f"task {now.task + 1}/{tasks} {stage.name} epoch {now.epoch + 1}/{stage.epochs}"
        text += "" if self.loss is None else f", loss {self.loss:.3g}"
        text += f", A_t {metrics.average_accuracy(self.results.matrix[-1]):.1f}" if self.results.matrix else ""
        self.show(done, text + self.left_in_words(done))

    def task_in_words(self, task: Task) -> str:
        """'task 2/5: A_t 97.20, A_new 98.50, 40 s left'."""
        matrix, tasks = self.results.matrix, len(self.stream)
        new = metrics.new_task_accuracy(matrix)
        scores = f"A_t {metrics.average_accuracy(matrix[-1]):.2f}" + ("" if new is None else f", A_new {new:.2f}")
        return f"task {task.index + 1}/{tasks}: {scores}{self.left_in_words((task.index + 1) / tasks)}"

    def left_in_words(self, done: float) -> str:
        """', 40 s left', if the rest takes as long per step as in this process so far."""
        if self.began is None or done <= self.began[1] or done >= 1:
            return ""
        return f", {duration((time.monotonic() - self.began[0]) * (1 - done) / (done - self.began[1]))} left"

    def log_epoch(self, stage: Stage) -> None:
        sums = dict(self.now.sums)
        steps = sums.pop("steps", 0)
        terms = {name: value / steps for name, value in sums.items()} if steps else {}
        self.loss = sum(terms.values()) if terms else None
        event = {"event": "epoch", "task": self.now.task + 1, "stage": stage.name, "epoch": self.now.epoch}
        self.log({**event, "loss": self.loss, "terms": terms})

    # -- saving and continuing

    def resume_point(self, kind: str, *, steps: int = 0, due: bool = False) -> None:
        """A point where a run may be interrupted. A checkpoint is written if one is due or the run must stop."""
        self.steps_since_save += steps
        every, minutes = self.config.checkpoint.every, self.config.checkpoint.minutes
        due = due or bool(every and self.steps_since_save >= every)
        due = due or bool(minutes and time.monotonic() - self.saved_at >= 60 * minutes)
        signal, now_due = ranks.agree(self.stopping() or 0, due)  # all ranks save, or stop, at the same step
        if self.save is not None and (now_due or signal):
            self.tick()
            tensors, state = self.state()
            self.check_ranks(tensors)
            self.save(tensors, state)
            self.steps_since_save, self.saved_at = 0, time.monotonic()
        if signal:
            raise Stopped(signal)

    def check_ranks(self, tensors: dict[str, Tensor] | None = None) -> None:
        """Refuse to continue if the processes of the run differ in stream, position, memory or weights (`state`)."""
        if ranks.several():
            labels = fingerprints({"stream.targets": self.stream.targets})  # first, so that the message names them
            whole = {"stream": self.stream.fingerprint(), "position": repr(self.now.state())}
            found = fingerprints(self.state()[0] if tensors is None else tensors)
            ranks.check_same({**labels, **whole, **found})

    def spent(self) -> tuple[float, float]:
        """Seconds on the clock, and passes of examples through the run's encoders, up to now."""
        return time.monotonic(), self.method.model.encoder.passes.total

    def tick(self) -> None:
        """Add the time and passes since the last call."""
        before, self.clock = self.clock, self.spent()
        self.results.seconds += self.clock[0] - before[0]
        self.results.passes += float(ranks.total(torch.tensor(self.clock[1] - before[1], dtype=torch.float64)))

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that the rest of the run depends on."""
        self.losses.read_into(self.now.sums)  # raises if a term is not finite, so that it is never saved
        tensors, plain = take_state(self.method)
        optimiser = self.restored
        if self.optimiser is not None and not self.optimiser_is_over():
            optimiser = OptimiserState.of(self.optimiser)
        noted = optimiser.by_name(dict(self.method.named_parameters())) if optimiser else {}
        tensors |= {f"optimiser.{name}": value for name, value in noted.items()}
        state = {"at": self.now.state(), "results": dataclasses.asdict(self.results), "method": plain}
        state |= {"scaler": self.scaler.state_dict()} if self.scaler.is_enabled() else {}
        return tensors, {**state, "licences": self.stream.licences, "optimiser": optimiser.kind if optimiser else ""}

    def optimiser_is_over(self) -> bool:
        return self.config.train.reset_optimiser and not self.now.prepared

    def restore(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Rebuild the shapes (grow, structure, shrink), then load the saved values."""
        with understood("the checkpoint"):
            self._restore(tensors, state)

    def _restore(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        self.now.restore(state["at"])
        self.results = Results(**as_saved(state["results"], Results()))
        self.results.check()
        self.stream.licences = list(state["licences"])
        self.method.rebuild(self.stream[: self.now.task + 1])
        self.method.load_state_dict(method_state(tensors, state["method"]))
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        noted = {name.removeprefix("optimiser."): t for name, t in tensors.items() if name.startswith("optimiser.")}
        parameters = dict(self.method.named_parameters())
        self.restored = OptimiserState.from_names(state.get("optimiser", ""), noted, parameters) if noted else None
        self.clock = self.spent()
