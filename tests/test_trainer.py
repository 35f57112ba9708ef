"""The training loop: optimiser, schedules, hooks, stages, resume and forward transfer, on points in the plane, where
everything can be checked by hand."""

import copy
import dataclasses
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from checks import short
from torch import Tensor, nn

import bace
from bace.config.parse import config_from
from bace.config.schema import Config, HeadSettings, Measures, MemoryBudget, Training
from bace.core import checkpoint
from bace.core.evaluation import predict
from bace.core.memory import Memory
from bace.core.method import Method
from bace.core.optimiser import make_optimiser, stage_groups
from bace.core.position import Position
from bace.core.stage import Loss, Stage
from bace.core.stream import Stream, Task
from bace.core.trainer import Trainer
from bace.data.batch import NO_IDS, Batch
from bace.data.modalities.image import IMAGE
from bace.errors import StreamRefused, TrainingError
from bace.experiments.assemble import assemble
from bace.models.encoder import PassCounter
from bace.models.heads import CosineHead
from bace.models.model import Model
from bace.randomness import generator, seed_dropout

# -- a world small enough to compute by hand


class Points:
    """Points in the plane; views do not move them."""

    modality: Any = IMAGE
    row_start = positions = lengths = None

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def inputs(self, examples: Tensor, view: int | None, device: torch.device) -> dict[str, Tensor]:
        return {"x": self.x[examples]}

    def take(self, examples: Tensor) -> dict[str, Tensor]:
        return {"x": self.x[examples]}

    def prepend(self, kept: dict[str, Tensor]) -> None:
        self.x = torch.cat([kept["x"], self.x])


class Plane(nn.Module):
    """Features are the points themselves, times a matrix that starts as the identity, plus zero."""

    width, pieces, shortens, states = 2, 1, False, ()

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.shift = nn.Parameter(torch.eye(2)), nn.Parameter(torch.zeros(2))
        self.passes = PassCounter()

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return (inputs["x"] @ self.turn.T + self.shift)[:, None]

    def rows(self, hidden: Tensor, inputs: dict[str, Tensor], at: Tensor | None) -> Tensor:
        return hidden[:, 0]


# Training and test points by class. Task 1 is east and north, task 2 is west and south.
TRAIN = {0: [(2, 0), (1, 0), (4, 1), (4, -1)], 1: [(0, 3), (0, 1), (1, 5), (-1, 5)],
         2: [(-1, 0), (-3, 0), (-2, 1), (-2, -1)], 3: [(0, -1), (0, -2), (1, -3), (-1, -3)]}  # fmt: skip
TEST = {0: [(1, 0)], 1: [(0, 1)], 2: [(-1, 0.1), (1, 0.1)], 3: [(0.1, -1), (-0.1, -2)]}
LETTERS = "abcdefgh"


def plane_stream(tasks: tuple[int, ...] = (2, 2), valid: int = 0) -> Stream:
    points, targets, made, known = [], [], [], 0
    for t, count in enumerate(tasks):
        classes = range(known, known + count)
        ids: list[Tensor] = []
        for table in (TRAIN, TEST):
            own = [(point, c) for c in classes for point in table[c]]
            ids.append(torch.arange(len(points), len(points) + len(own)))
            points += [point for point, _ in own]
            targets += [c for _, c in own]
        held = ids[0][:: len(ids[0]) // valid] if valid else NO_IDS
        made.append(Task(t, f"task {t + 1}", classes, ids[0][~torch.isin(ids[0], held)], held, ids[1]))
        known += count
    x = torch.tensor(points, dtype=torch.float32)
    return Stream(Points(x), torch.tensor(targets), made, list(LETTERS[:known]))  # type: ignore[arg-type]


def trainer_of(
    method: Method,
    *,
    tasks: tuple[int, ...] = (2, 2),
    valid: int = 0,
    head: HeadSettings | None = None,
    fwt: bool = False,
    memory: int = 0,
    kind: type[Trainer] = Trainer,
    callbacks: dict[str, Any] | None = None,
    **train: Any,
) -> Trainer:
    """A trainer over the plane, by default with four points per step, one epoch and plain SGD."""
    given = {"epochs": 1, "batch_size": 4, "lr": 0.1, "momentum": 0.0, **train}
    config = Config(
        {"name": "plane"},
        {"name": "?"},
        train=Training(**given),
        head=head or HeadSettings(),
        memory=MemoryBudget(size=memory),
        measure=Measures(fwt=fwt),
    )
    stream = plane_stream(tasks, valid)
    method.stream, method.training_settings, method.now = stream, config.train, Position(config.seed)
    method.memory = Memory(**dataclasses.asdict(config.memory))
    method.model = method.build(Model(Plane(), CosineHead(2)))  # type: ignore[arg-type]
    return kind(method, stream, config, **(callbacks or {}))


# -- runs cut at every resume point, which must end like the uninterrupted run


@dataclasses.dataclass
class Cut:
    kind: str
    tensors: dict[str, Tensor]
    state: dict[str, Any]
    logged: int


class Saving(Trainer):
    """Saves at every resume point."""

    def resume_point(self, kind: str, *, steps: int = 0, due: bool = False) -> None:
        self.kind = kind
        super().resume_point(kind, steps=steps, due=True)


def run_saving(make: Callable[..., Trainer], start: Cut | None = None) -> tuple[Trainer, list[Cut], list[Any]]:
    """Run, from a cut if given; also return the saved states and the log."""
    cuts: list[Cut] = []
    log: list[Any] = []

    def save(tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        plain = json.loads(json.dumps(state))
        cuts.append(Cut(trainer.kind, {k: v.clone() for k, v in tensors.items()}, plain, len(log)))  # type: ignore[attr-defined]

    trainer = make(kind=Saving, callbacks={"save": save, "log": log.append})
    if start is not None:
        trainer.restore(copy.deepcopy(start.tensors), copy.deepcopy(start.state))
    trainer.run()
    return trainer, cuts, log


def ending(trainer: Trainer) -> tuple[dict[str, Tensor], Any]:
    results = dataclasses.asdict(trainer.results)
    del results["seconds"], results["passes"]
    return {k: v.clone() for k, v in trainer.method.state_dict().items()}, results


def assert_same_ending(trainer: Trainer, expected: tuple[dict[str, Tensor], Any], where: str) -> None:
    found = ending(trainer)
    assert found[1] == expected[1], where
    assert found[0].keys() == expected[0].keys(), where
    for name, value in expected[0].items():
        assert torch.equal(found[0][name], value), (where, name)


def assert_resumes_exactly(make: Callable[..., Trainer], *, twice: bool = True) -> list[Cut]:
    """The run resumes from every resume point, and is cut again at the first resume point after that."""
    straight, cuts, log = run_saving(make)
    expected = ending(straight)
    assert {cut.kind for cut in cuts} == {"step", "stage", "finish", "evaluate", "task"}
    for number, cut in enumerate(cuts):
        where = f"{number}: {cut.kind} {cut.state['at']}"
        resumed, later, more = run_saving(make, cut)
        assert_same_ending(resumed, expected, where)
        assert log[: cut.logged] + more == log, where
        if twice and later:
            again, _, rest = run_saving(make, later[0])
            assert_same_ending(again, expected, f"{where}, then {later[0].kind}")
            assert log[: cut.logged + later[0].logged] + rest == log
    return cuts


# -- methods for tests


class Plain(Method):
    title = "Plain"


class Slope(Method):
    """One number p whose loss is p, so its gradient is 1 at every step."""

    title = "Slope"

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.zeros(1, 1))
        self.trace: list[float] = []

    def stages(self, task: Task) -> list[Stage]:
        return [self.stage(task, batch_size=8, groups=lambda: {"own": [self.p]})]

    def loss(self, batch: Batch) -> Loss:
        return self.p.sum()

    def after_step(self, batch: Batch) -> None:
        self.trace.append(self.p.item())


# -- the optimiser


def optimiser_of(trainer: Trainer, stage: Stage) -> torch.optim.Optimizer:
    return make_optimiser(stage, stage_groups(stage), trainer.config.train)


@pytest.mark.parametrize("optimiser", ["sgd", "adamw"])
@pytest.mark.parametrize(("head_lr", "expected"), [(0.5, 0.5), (None, 0.1)])
def test_head_and_encoder_have_their_rates_and_vectors_are_not_decayed(optimiser, head_lr, expected):
    trainer = trainer_of(Plain(), optimiser=optimiser, lr=0.1, head_lr=head_lr, weight_decay=0.02)
    method = trainer.method
    method.grow(trainer.stream[0])
    made = optimiser_of(trainer, method.stage(trainer.stream[0]))
    names = {id(p): name for name, p in method.model.named_parameters()}
    found = {names[id(p)]: (g["lr"], g["weight_decay"]) for g in made.param_groups for p in g["params"]}
    assert found == {
        "encoder.turn": (0.1, 0.02),
        "encoder.shift": (0.1, 0.0),
        "head.sigma": (expected, 0.0),
        "head.blocks.0": (expected, 0.02),
    }
    assert isinstance(made, torch.optim.SGD if optimiser == "sgd" else torch.optim.AdamW)


def test_a_stages_own_rate_goes_for_the_head_too():
    trainer = trainer_of(Plain(), lr=0.1, head_lr=0.5)
    method = trainer.method
    method.grow(trainer.stream[0])
    made = optimiser_of(trainer, method.stage(trainer.stream[0], lr=0.003))
    assert {g["lr"] for g in made.param_groups} == {0.003}


@pytest.mark.parametrize("own", [{"lr": 0.1, "rates": {"head": 2.0}}, {"rates": {"head": 2.0}}])
def test_a_stages_rate_for_the_head_wins(own):
    trainer = trainer_of(Plain(), lr=0.1, head_lr=0.5)
    method = trainer.method
    method.grow(trainer.stream[0])
    made = optimiser_of(trainer, method.stage(trainer.stream[0], **own))
    names = {id(p): name for name, p in method.model.named_parameters()}
    found = {names[id(p)]: g["lr"] for g in made.param_groups for p in g["params"]}
    assert found == {"encoder.turn": 0.1, "encoder.shift": 0.1, "head.sigma": 2.0, "head.blocks.0": 2.0}


@pytest.mark.parametrize(("least", "epochs"), [(0, 2), (4, 2), (5, 3), (7, 4)])
def test_a_stage_gets_as_many_epochs_as_its_least_number_of_steps_takes(least, epochs):
    """An epoch has two steps. The schedule runs over all steps."""
    progress: list[float] = []

    class Short(Plain):
        def stages(self, task: Task) -> list[Stage]:
            return [self.stage(task, epochs=2, min_steps=least)]

        def after_step(self, batch: Batch) -> None:
            progress.append(self.now.lr)
            assert self.now.epochs == epochs

    trainer_of(Short(), tasks=(2,), lr=1.0, schedule="linear").run()
    assert progress == pytest.approx([1 - i / (2 * epochs) for i in range(2 * epochs)])


def test_decay_without_gradient_shrinks_matrices_only():
    """SGD takes two steps p <- p - lr * decay * p."""

    class Nothing(Plain):
        def loss(self, batch: Batch) -> Loss:
            return sum((0 * p).sum() for p in self.model.parameters())  # type: ignore[return-value]

    trainer = trainer_of(Nothing(), tasks=(2,), lr=0.1, weight_decay=0.5)
    trainer.run()
    model, fresh = trainer.method.model, generator(0, "head", 0)
    torch.testing.assert_close(model.encoder.turn.data, 0.95**2 * torch.eye(2))
    assert model.head.sigma.item() == 10.0  # type: ignore[operator]
    start = torch.empty(2, 2).uniform_(-1 / math.sqrt(2), 1 / math.sqrt(2), generator=fresh)
    torch.testing.assert_close(model.head.blocks[0].data, 0.95**2 * start)


def test_nothing_to_train_is_an_error():
    class Frozen(Plain):
        def grow(self, task: Task) -> None:
            super().grow(task)
            self.model.requires_grad_(task.index == 0)

    with pytest.raises(TrainingError, match="stage 'main' has no trainable parameter"):
        trainer_of(Frozen()).run()


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ("constant", [1, 1, 1, 1]),
        ("linear", [1, 0.75, 0.5, 0.25]),
        ("cosine", [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]),
    ],
)
def test_schedules_run_over_the_stage_step_by_step(schedule, factors):
    """Two epochs of two steps have progress 0, 1/4, 1/2, 3/4, for head and encoder alike; the second task restarts."""
    rates: list[dict[float, float]] = []

    class Watching(Plain):
        def after_step(self, batch: Batch) -> None:
            assert trainer.optimiser is not None
            rates.append({g["base_lr"]: g["lr"] for g in trainer.optimiser.param_groups})

    trainer = trainer_of(Watching(), epochs=2, lr=0.1, head_lr=0.4, schedule=schedule)
    trainer.run()
    assert [r[0.1] for r in rates] == pytest.approx([0.1 * f for f in factors * 2])
    assert [r[0.4] for r in rates] == pytest.approx([0.4 * f for f in factors * 2])


def test_a_warm_up_rises_from_its_first_step_on_and_the_schedule_follows():
    """In two epochs of two steps, the rate rises in the first half and falls linearly from the full rate after it."""
    rates: list[float] = []

    class Watching(Plain):
        def after_step(self, batch: Batch) -> None:
            assert trainer.optimiser is not None
            rates.append(trainer.optimiser.param_groups[0]["lr"])

    trainer = trainer_of(Watching(), tasks=(2,), epochs=2, lr=0.1, schedule="linear", warmup=0.5)
    trainer.run()
    assert rates == pytest.approx([0.05, 0.1, 0.1, 0.05])


@pytest.mark.parametrize("optimiser", ["sgd", "adam", "adamw"])
def test_hal_s_copy_learns_with_the_run_s_optimiser(tiny, optimiser):
    settings = {"train.epochs": 1, "train.optimiser": optimiser, "measure.fwt": False}
    method = {"name": "hal", "anchor_steps": 1, "memory_steps": 1}
    assert bace.run(tiny.settings("image", method=method, **settings)).matrix


def test_a_stages_own_schedule_is_given_the_epochs_done_exactly():
    """Rounding would miss some of 49 epochs, because 49 * (x / 49) < x. Whole epochs must stay whole."""
    asked: list[float] = []

    class Scheduled(Plain):
        def stages(self, task: Task) -> list[Stage]:
            return [self.stage(task, epochs=49, schedule=lambda epochs: asked.append(epochs) or 0.5)]  # type: ignore[func-returns-value]

    assert any(49 * (x / 49) != x for x in range(49))
    trainer = trainer_of(Scheduled(), tasks=(2,), lr=0.1)
    trainer.run()
    assert asked == [epoch + step / 2 for epoch in range(49) for step in range(2)]
    assert trainer.method.now.lr == pytest.approx(0.05)


def test_what_leaves_the_memory_is_closed_from_the_next_epoch_on():
    class Forgetful(Plain):
        uses_memory = True

        def before_epoch(self, stage: Stage) -> None:
            if self.now.task == 1:
                kept = self.memory.examples.tolist()
                for example in first:
                    if example in kept:
                        self.stream.batch(torch.tensor([example]))
                    else:
                        with pytest.raises(StreamRefused):
                            self.stream.batch(torch.tensor([example]))
                left.append(len(kept))
                self.memory.keep(torch.arange(len(kept) - 1))

    first: list[int] = []
    left: list[int] = []
    trainer = trainer_of(Forgetful(), memory=4, epochs=3)
    first += trainer.stream[0].train.tolist()
    trainer.run()
    assert left == [4, 3, 2]


def test_the_scheduled_rate_is_the_one_that_is_applied():
    trainer = trainer_of(Slope(), tasks=(2,), epochs=4, lr=0.1, schedule="linear")
    trainer.run()
    assert trainer.method.trace == pytest.approx([-0.1, -0.175, -0.225, -0.25])


def test_clipping_comes_after_before_step():
    """before_step makes the gradient huge; the applied gradient has norm 1."""

    class Shouting(Plain):
        def before_step(self, batch: Batch) -> None:
            for p in self.model.parameters():
                if p.grad is not None:
                    p.grad *= 1e4

        def flat(self) -> Tensor:
            return torch.cat([p.detach().flatten() for p in self.model.parameters()])

        def loss(self, batch: Batch) -> Loss:
            self.before = self.flat()
            return super().loss(batch)

        def after_step(self, batch: Batch) -> None:
            moves.append(float((self.flat() - self.before).norm()))

    moves: list[float] = []
    trainer_of(Shouting(), tasks=(2,), epochs=2, lr=0.01, clip=1.0).run()
    assert moves == pytest.approx([0.01] * 4, rel=1e-3)
    moves.clear()
    trainer_of(Shouting(), tasks=(2,), epochs=1, lr=1e-6).run()
    assert min(moves) > 1e-4  # the gradient is not clipped


def test_a_stages_own_clipping_wins():
    class Clipped(Slope):
        def stages(self, task: Task) -> list[Stage]:
            own = {"batch_size": 8, "groups": lambda: {"own": [self.p]}}
            clips = (0.5, 0.0, None)  # its own value, no clipping, and the value of the run
            return [self.stage(task, name=f"clip {clip}", clip=clip, **own) for clip in clips]

    trainer = trainer_of(Clipped(), tasks=(2,), epochs=1, lr=0.1, clip=0.25)
    trainer.run()
    assert trainer.method.trace == pytest.approx([-0.05, -0.15, -0.175], abs=1e-6)  # torch clips to 0.5 / (1 + 1e-6)


def test_a_small_gradient_is_not_clipped():
    trainer = trainer_of(Slope(), tasks=(2,), epochs=2, lr=0.1, clip=5.0)
    trainer.run()
    assert trainer.method.trace == pytest.approx([-0.1, -0.2])


@pytest.mark.parametrize(
    ("reset", "trace"),
    [
        # momentum 1/2, lr 1, gradient 1, two steps per task: v = 1, 3/2 and again 1, 3/2; or 1, 3/2, 7/4, 15/8
        (True, [-1, -2.5, -3.5, -5]),
        (False, [-1, -2.5, -4.25, -6.125]),
    ],
)
def test_momentum_is_dropped_or_carried_from_task_to_task(reset, trace):
    trainer = trainer_of(Slope(), epochs=2, lr=1.0, momentum=0.5, reset_optimiser=reset)
    trainer.run()
    assert trainer.method.trace == pytest.approx(trace)


def test_momentum_of_a_parameter_that_has_a_gradient_only_now_and_then():
    """q is in the loss in every other step; in between, SGD does not change it or its velocity: v = 1, 3/2."""

    class Blinking(Slope):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Parameter(torch.zeros(1, 1))

        def stages(self, task: Task) -> list[Stage]:
            return [self.stage(task, batch_size=8, groups=lambda: {"own": [self.p, self.q]})]

        def loss(self, batch: Batch) -> Loss:
            return (self.p + self.q if self.now.epoch % 2 else self.p).sum()

        def after_step(self, batch: Batch) -> None:
            self.trace.append(self.q.item())

    trainer = trainer_of(Blinking(), tasks=(2,), epochs=4, lr=1.0, momentum=0.5)
    trainer.run()
    assert trainer.method.trace == pytest.approx([0, -1, -1, -2.5])
    assert trainer.method.p.item() == pytest.approx(-1 - 1.5 - 1.75 - 1.875)


@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("optimiser", ["sgd", "adamw"])
def test_the_optimisers_state_survives_every_cut(reset, optimiser):
    def make(**more: Any) -> Trainer:
        return trainer_of(
            Plain(), epochs=2, lr=0.1, momentum=0.9, optimiser=optimiser, reset_optimiser=reset, fwt=True, **more
        )

    cuts = assert_resumes_exactly(make)
    between = next(cut for cut in cuts if cut.kind == "task")
    assert any(name.startswith("optimiser.") for name in between.tensors) is not reset


# -- hooks


def test_hooks_are_called_in_their_order():
    calls: list[str] = []

    class Recording(Method):
        title = "Recording"

        def __getattribute__(self, name: str) -> Any:
            if name in HOOKS:
                calls.append(name)
            return super().__getattribute__(name)

    HOOKS = {
        "before_task", "grow", "stages", "before_epoch", "expand", "before_step", "after_step", "after_epoch",
        "after_task", "shrink", "predict",
    }  # fmt: skip
    trainer_of(Recording(), tasks=(2,), epochs=2, batch_size=8).run()
    step = ["expand", "before_step", "after_step"]
    epoch = ["before_epoch", *step, "after_epoch"]
    assert calls == ["before_task", "grow", "stages", *epoch, *epoch, "after_task", "shrink", "predict"]


def test_expand_makes_an_optimiser_step_of_each_batch_with_its_own_dropout():
    seeds: list[int] = []

    class Thrice(Slope):
        def expand(self, batch: Batch) -> Iterable[Batch]:
            return (batch, batch, batch)

        def loss(self, batch: Batch) -> Loss:
            seeds.append(torch.default_generator.initial_seed())
            return super().loss(batch)

    trainer = trainer_of(Thrice(), tasks=(2,), epochs=2, lr=1.0, momentum=0.5)
    trainer.run()
    # v: 1, 3/2, 7/4, 15/8, ...
    velocity = [2 - 0.5**k for k in range(6)]
    assert trainer.method.trace == pytest.approx([-sum(velocity[: k + 1]) for k in range(6)])
    assert len(set(seeds)) == 6


def test_expand_may_leave_a_batch_out():
    class Never(Slope):
        def expand(self, batch: Batch) -> Iterable[Batch]:
            return ()

    trainer = trainer_of(Never(), tasks=(2,))
    trainer.run()
    assert trainer.method.p.item() == 0


def test_a_loss_of_none_is_a_step_without_update():
    calls: list[str] = []

    class Watching(Plain):
        def loss(self, batch: Batch) -> Loss:
            return None

        def before_step(self, batch: Batch) -> None:
            calls.append("before_step")

        def after_step(self, batch: Batch) -> None:
            calls.append("after_step")

    log: list[Any] = []
    trainer = trainer_of(Watching(), tasks=(2,), weight_decay=0.5, momentum=0.9, callbacks={"log": log.append})
    trainer.run()
    assert torch.equal(trainer.method.model.encoder.turn.data, torch.eye(2))
    assert calls == ["after_step"] * 2
    assert log[0]["loss"] is None
    assert log[0]["terms"] == {}


def test_a_stage_without_an_optimiser_needs_none():
    class Counting(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def stages(self, task: Task) -> list[Stage]:
            return [self.stage(task, optimise=False)]

        def loss(self, batch: Batch) -> Loss:
            self.count += len(batch)
            return None

    trainer = trainer_of(Counting())
    trainer.run()
    assert float(trainer.method.count) == 16
    assert trainer.optimiser is None
    assert_resumes_exactly(lambda **more: trainer_of(Counting(), **more))


def test_a_stage_without_an_optimiser_between_others_resumes_exactly():
    class Between(Plain):
        def stages(self, task: Task) -> list[Stage]:
            idle = self.stage(task, name="idle", optimise=False, loss=lambda batch: None)
            return [self.stage(task), idle]

    assert_resumes_exactly(lambda **more: trainer_of(Between(), momentum=0.9, reset_optimiser=False, **more))


def test_terms_are_summed_and_each_is_logged_as_the_mean_over_steps():
    class Two(Slope):
        def loss(self, batch: Batch) -> Loss:
            return {"up": 3 * self.p.sum() + 2, "down": -self.p.sum() + 1}  # gradient 2

    log: list[Any] = []

    class Small(Two):
        def stages(self, task: Task) -> list[Stage]:
            return [self.stage(task, groups=lambda: {"own": [self.p]})]  # two steps

    trainer = trainer_of(Small(), tasks=(2,), epochs=2, lr=0.5, callbacks={"log": log.append})
    trainer.run()
    assert trainer.method.trace == [-1.0, -2.0, -3.0, -4.0]
    epoch = log[0]
    assert epoch["terms"] == {"up": (2 + -1) / 2, "down": (1 + 2) / 2}  # at p = 0 and p = -1
    assert epoch["loss"] == 2.0
    assert (epoch["task"], epoch["stage"], epoch["epoch"]) == (1, "main", 0)
    assert log[1]["terms"] == {"up": (-4 + -7) / 2, "down": (3 + 4) / 2}  # the second epoch alone


def test_only_the_stages_module_is_in_training_mode():
    modes: list[tuple[bool, bool, bool]] = []

    class Pair(Plain):
        def build(self, model: Model) -> Model:
            self.other = copy.deepcopy(model)
            return model

        def loss(self, batch: Batch) -> Loss:
            modes.append((self.model.training, self.other.training, self.training))
            self.outputs(batch.examples)  # `outputs` restores the mode
            assert self.model.training
            return super().loss(batch)

        def before_epoch(self, stage: Stage) -> None:
            assert not self.model.training

        def after_task(self, task: Task) -> None:
            assert not self.model.training

    trainer_of(Pair(), epochs=2).run()
    assert set(modes) == {(True, False, False)}


def test_a_stage_on_cached_outputs_is_given_batches_without_inputs():
    given: list[tuple[list[str], int]] = []

    class Cached(Plain):
        def stages(self, task: Task) -> list[Stage]:
            return [self.stage(task), self.stage(task, name="cached", cached=True, loss=self.count, optimise=False)]

        def count(self, batch: Batch) -> Loss:
            given.append((list(batch.inputs), len(batch)))
            return None

    trainer_of(Cached(), tasks=(2,)).run()
    assert given == [([], 4), ([], 4)]


def test_every_example_is_seen_once_an_epoch_in_an_order_of_its_own():
    orders: list[list[int]] = []

    class Watching(Plain):
        def before_epoch(self, stage: Stage) -> None:
            orders.append([])

        def after_step(self, batch: Batch) -> None:
            orders[-1] += batch.examples.tolist()

    trainer = trainer_of(Watching(), epochs=3, batch_size=3)
    trainer.run()
    first, second = (task.train.tolist() for task in trainer.stream)
    assert [sorted(order) for order in orders] == [first] * 3 + [second] * 3
    assert len({tuple(order) for order in orders}) == 6


# -- dropout


def test_named_passes_have_dropout_of_their_own_whatever_ran_before(tiny):
    method, stream = assemble(config_from(tiny.settings("text", method="SEQ")))
    method.grow(stream[0])
    stream.begin(stream[0], NO_IDS)
    batch, model = stream.batch(stream[0].train[:4]), method.model.train()

    def passes(*names: str, seed: int = 11) -> list[Tensor]:
        model.dropout_seed = lambda: seed
        return [model(batch, name=name).logits.detach() for name in names]

    new, replay = passes("new", "replay")
    assert not torch.equal(new, replay)
    assert torch.equal(passes("replay")[0], replay)
    assert torch.equal(passes("replay", "new", "new")[2], new)
    assert not torch.equal(passes("new", seed=12)[0], new)
    before = torch.get_rng_state()
    passes("new")
    assert torch.equal(torch.get_rng_state(), before)  # torch's own generator continues as if nothing had been dropped
    model.eval()
    assert torch.equal(*passes("new", "replay"))


@pytest.mark.parametrize("title", ["APER", "EASE", "MOS", "RanPAC"])
def test_adapters_that_a_method_adds_drop_by_the_name_of_the_pass_and_by_rank(tiny, monkeypatch, title):
    """The backbone has no dropout, but the adapters do. A batch shows one picture twice, once to each of two ranks."""
    method, stream = assemble(config_from(tiny.settings("image", method=short(title))))
    assert not method.model.has_dropout
    method.grow(stream[0])
    stream.begin(stream[0], NO_IDS)
    batch, model = stream.batch(stream[0].train[[0, 0]]), method.model.train()
    for name, weight in model.encoder.named_parameters():
        if name.endswith("up.weight"):  # which starts at 0, so that nothing would be seen of the dropout
            torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(1))
    model.dropout_seed = lambda: 11

    def features(name: str) -> Tensor:
        seed_dropout(11)  # as the trainer does before every step
        return model(batch, name=name).features.detach()

    assert torch.equal(features("main"), features("main"))
    assert not torch.equal(features("main"), features("other"))
    monkeypatch.setattr("bace.ranks.size", lambda: 2)
    monkeypatch.setattr("bace.ranks._add_up", lambda rows: None)  # the rows of the other rank stay 0
    own = []
    for rank in range(2):
        monkeypatch.setattr("bace.ranks.index", lambda rank=rank: rank)
        own.append(features("main")[rank])
    assert own[0].any()
    assert own[1].any()
    assert not torch.equal(*own)


class ExtraPass(Method):
    """Plain fine-tuning with an additional pass that is not used."""

    title = "ExtraPass"

    def loss(self, batch: Batch) -> Loss:
        self.model(batch, name="extra")
        torch.rand(7)
        return super().loss(batch)


def test_an_extra_pass_changes_no_other_draw(tiny):
    ends = [
        bace.run(tiny.settings("text", method=method, **{"benchmark.tasks": [2, 1]})).method.model.state_dict()
        for method in ("SEQ", "test_trainer.ExtraPass")
    ]
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


# -- stages that make modules


class TwoStages(Method):
    """Learns as usual, then adds a square matrix for the task (structure), initialises it with the mean of the features
    and a random draw (prepare), and trains it. `prepared` counts the preparations."""

    title = "TwoStages"

    def __init__(self) -> None:
        super().__init__()
        self.squares = nn.ModuleList()
        self.register_buffer("prepared", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.zeros(0))  # grows with the tasks
        self.structures = 0  # counted in this process

    def stages(self, task: Task) -> list[Stage]:
        def structure() -> None:
            self.structures += 1
            self.squares.append(nn.Linear(2, 2, bias=False))

        def prepare() -> None:
            self.prepared += 1
            mean = self.outputs(task.train).features.mean(0)
            noise = torch.rand(2, 2, generator=self.now.rng("square"))
            self.squares[-1].weight.data.copy_(torch.outer(mean, mean) + noise)
            self.table = torch.cat([self.table, mean])

        second = self.stage(
            task,
            name="square",
            epochs=3,
            loss=self.square_loss,
            structure=structure,
            prepare=prepare,
            examples=lambda: task.train[: 4 + int(self.prepared)],  # decided only when the stage begins
            module=lambda: self.squares[-1],
        )
        return [self.stage(task), second]

    def square_loss(self, batch: Batch) -> Loss:
        out = self.model(batch)
        return F.cross_entropy(self.model.head(self.squares[-1](out.features.detach())), batch.targets)

    def before_epoch(self, stage: Stage) -> None:
        self.noted = (stage.name, self.now.task, self.now.epoch)

    def after_epoch(self, stage: Stage) -> None:
        assert self.noted == (stage.name, self.now.task, self.now.epoch)  # also after a resume in the middle
        self.table = self.table + torch.rand(1, generator=self.now.rng("after"))


def test_stages_that_make_modules_resume_exactly_at_every_point():
    def make(**more: Any) -> Trainer:
        return trainer_of(TwoStages(), epochs=2, batch_size=3, momentum=0.9, fwt=True, **more)

    straight, _, _ = run_saving(make)
    assert int(straight.method.prepared) == 2
    assert len(straight.method.squares) == 2
    cuts = assert_resumes_exactly(make)
    places = {(c.state["at"]["phase"], c.state["at"]["stages_done"], c.state["at"]["prepared"]) for c in cuts}
    assert {("train", 0, True), ("train", 1, False), ("train", 1, True), ("train", 2, False)} <= places


def test_on_resume_structure_is_replayed_for_finished_and_current_stages_only():
    def make(**more: Any) -> Trainer:
        return trainer_of(TwoStages(), **more)

    _, cuts, _ = run_saving(make)
    for cut in cuts:
        at = cut.state["at"]
        trainer = make()
        trainer.restore(cut.tensors, cut.state)
        begun = at["task"] if at["phase"] == "begin" else at["task"] + (at["stages_done"] + at["prepared"] > 1)
        assert trainer.method.structures == begun, at
        assert int(trainer.method.prepared) == begun


def test_before_epoch_runs_again_on_resume_before_any_step():
    calls: list[Any] = []

    class Watching(Plain):
        def before_epoch(self, stage: Stage) -> None:
            calls.append(("before_epoch", self.now.task, self.now.epoch))

        def loss(self, batch: Batch) -> Loss:
            calls.append(("loss", self.now.task, self.now.epoch, self.now.step))
            return super().loss(batch)

    def make(**more: Any) -> Trainer:
        return trainer_of(Watching(), epochs=2, **more)

    _, cuts, _ = run_saving(make)
    straight, calls[:] = list(calls), []
    middle = next(c for c in cuts if c.state["at"]["task"] == 1 and c.state["at"]["epoch"] == 1)
    assert middle.state["at"]["step"] == 1
    run_saving(make, middle)
    assert calls == [("before_epoch", 1, 1), ("loss", 1, 1, 1)] == [straight[-3], straight[-1]]


class Helped(Plain):
    """A second network is built for each task, trained, and dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.helper: nn.Module | None = None

    def stages(self, task: Task) -> list[Stage]:
        def structure() -> None:
            self.helper = copy.deepcopy(self.model)

        helper = self.stage(task, name="help", structure=structure, loss=self.help, module=lambda: self.helper)
        return [helper, self.stage(task)]

    def help(self, batch: Batch) -> Loss:
        assert self.helper is not None
        return F.cross_entropy(self.helper(batch).logits, batch.targets)

    def loss(self, batch: Batch) -> Loss:
        assert self.helper is not None
        with torch.no_grad():
            known = self.helper(batch).logits
        return super().loss(batch) + (self.model(batch).logits - known).square().mean()  # type: ignore[operator]

    def shrink(self, task: Task) -> None:
        self.helper = None


def test_what_shrink_lets_go_of_is_in_no_later_checkpoint_and_the_run_resumes_exactly():
    def make(**more: Any) -> Trainer:
        return trainer_of(Helped(), epochs=2, batch_size=3, momentum=0.9, **more)

    cuts = assert_resumes_exactly(make)
    held = {
        (cut.kind, any(name.startswith("method.helper.") for name in cut.tensors))
        for cut in cuts
        if cut.kind in ("step", "stage", "finish", "evaluate", "task")
    }
    assert held == {("step", True), ("stage", True), ("finish", True), ("evaluate", False), ("task", False)}


def test_what_a_stage_does_not_train_asks_for_no_gradient_until_the_stage_is_over():
    asked: dict[str, tuple[bool, bool]] = {}

    class HeadLast(Plain):
        def stages(self, task: Task) -> list[Stage]:
            last = self.stage(task, name="head", groups=lambda: {"head": self.model.head.parameters()})
            return [self.stage(task), last]

        def build(self, model: Model) -> Model:
            model.head.sigma.requires_grad_(False)  # it must stay frozen
            return model

        def before_step(self, batch: Batch) -> None:
            encoder = next(self.model.encoder.parameters())
            asked[self.now.stage] = (encoder.requires_grad, self.model.head.blocks[0].requires_grad)
            assert (self.now.stage == "main") == bool(encoder.grad is not None and encoder.grad.any())

        def before_epoch(self, stage: Stage) -> None:
            self.model.zero_grad()

    trainer = trainer_of(HeadLast(), tasks=(2,))
    trainer.run()
    assert asked == {"main": (True, True), "head": (False, True)}
    wants = {name: p.requires_grad for name, p in trainer.method.model.named_parameters()}
    assert wants.pop("head.sigma") is False
    assert all(wants.values())


# -- early stopping


class Scripted(Method):
    """Every point is classified correctly, with varying confidence: the head's scale follows a script, so the
    validation loss falls when the scale rises."""

    title = "Scripted"

    def __init__(self, script: tuple[float, ...]) -> None:
        super().__init__()
        self.script = script

    def grow(self, task: Task) -> None:
        super().grow(task)
        directions = torch.tensor([[1.0, 0], [0, 1], [-1, 0], [0, -1]])
        self.model.head.blocks[-1].data.copy_(directions[task.classes.start : task.classes.stop])

    def loss(self, batch: Batch) -> Loss:
        return None

    def after_epoch(self, stage: Stage) -> None:
        self.model.head.sigma.data.fill_(self.script[self.now.epoch])  # type: ignore[union-attr]


SCRIPT = (1.0, 2.0, 1.5, 1.7, 3.0, 4.0)


@pytest.mark.parametrize(
    ("patience", "valid", "epochs"),
    [
        (1, 2, 3),  # best after the 2nd epoch, the 3rd is worse
        (2, 2, 4),  # the 4th is better than the 3rd, but worse than the 2nd
        (3, 2, 6),  # the 5th is better again
        (0, 2, 6),
        (1, 0, 6),  # nothing to validate on
    ],
)
def test_a_stage_ends_after_so_many_epochs_without_a_better_validation_loss(patience, valid, epochs):
    log: list[Any] = []
    trainer = trainer_of(Scripted(SCRIPT), epochs=6, early_stop=patience, valid=valid, callbacks={"log": log.append})
    trainer.run()
    for task in (1, 2):  # the second task starts counting again
        assert [e["epoch"] for e in log if e["event"] == "epoch" and e["task"] == task] == list(range(epochs))
    assert ("validation" in trainer.stream.licences) == bool(patience and valid)


def test_a_stage_without_a_validation_loss_is_never_stopped_early():
    class Unvalidated(Scripted):
        def validation_loss(self, examples: Tensor) -> None:
            return None

    log: list[Any] = []
    trainer = trainer_of(Unvalidated(SCRIPT), epochs=6, early_stop=1, valid=2, callbacks={"log": log.append})
    trainer.run()
    assert [e["epoch"] for e in log if e["event"] == "epoch"] == 2 * list(range(6))


def test_a_stage_that_trains_nothing_of_the_network_is_not_stopped_by_its_validation_loss():
    class Beside(Scripted):
        def __init__(self) -> None:
            super().__init__(SCRIPT)
            self.side = nn.Linear(1, 1)

        def stages(self, task: Task) -> list[Stage]:
            shared = nn.Linear(1, 1).requires_grad_(False)  # part of both modules, trained by neither
            self.model.shared = self.side.shared = shared
            return [self.stage(task, name="part", module=lambda: self.model.head),
                    self.stage(task, name="side", module=lambda: self.side)]  # fmt: skip

    log: list[Any] = []
    trainer_of(Beside(), epochs=6, early_stop=1, valid=2, tasks=(2,), callbacks={"log": log.append}).run()
    assert [e["epoch"] for e in log if e.get("stage") == "part"] == list(range(3))
    assert [e["epoch"] for e in log if e.get("stage") == "side"] == list(range(6))


def test_early_stopping_resumes_exactly():
    cuts = assert_resumes_exactly(lambda **more: trainer_of(Scripted(SCRIPT), epochs=6, early_stop=2, valid=2, **more))
    assert {cut.state["at"]["stale"] for cut in cuts} == {0, 1}


def test_early_stopping_on_real_losses_resumes_exactly():
    assert_resumes_exactly(lambda **more: trainer_of(Plain(), epochs=5, early_stop=1, lr=2.0, valid=2, **more))


# -- a loss that is not finite


class Exploding(Method):
    """Its second term is not finite in task 2, epoch 2, step 3."""

    title = "Exploding"

    def loss(self, batch: Batch) -> Loss:
        loss = F.cross_entropy(self.model(batch).logits, batch.targets)
        now = self.now
        bad = (now.task, now.epoch, now.step) == (1, 1, 2)
        return {"good": loss, "bad": loss * (math.inf if bad else 1.0)}


def test_a_loss_that_is_not_finite_names_its_term_and_place_and_leaves_the_last_good_checkpoint(tiny, tmp_path):
    config = tiny.settings("image", method="test_trainer.Exploding", **{"checkpoint.every": 1, "train.batch_size": 4})
    message = r"term 'bad' is inf in task 2, stage 'main', epoch 2, step 3.*lower train\.lr"
    with pytest.raises(TrainingError, match=message):
        bace.run(config, out=tmp_path / "run")
    found = checkpoint.load(tmp_path / "run" / "checkpoints")
    assert found is not None
    assert (found[1]["at"]["task"], found[1]["at"]["epoch"], found[1]["at"]["step"]) == (1, 1, 2)
    assert all(bool(value.isfinite().all()) for value in found[0].values() if value.is_floating_point())
    with pytest.raises(TrainingError, match=message):
        bace.run(resume=tmp_path / "run")


# -- the log


def test_what_was_logged_after_the_checkpoint_is_cut_on_resume(tiny, tmp_path, monkeypatch):
    config = tiny.settings("image", method="ER", **{"checkpoint.every": 7})
    bace.run(config, out=tmp_path / "straight")
    steps = 0

    class Killed(BaseException):
        pass

    original = Trainer.step

    def step(self: Trainer, *args: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 10:  # three epochs of three steps are done, one of them in task 2
            raise Killed
        original(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", step)
        with pytest.raises(Killed):
            bace.run(config, out=tmp_path / "cut")
    log = tmp_path / "cut" / "log.jsonl"
    found = checkpoint.load(tmp_path / "cut" / "checkpoints")
    assert found is not None
    assert log.stat().st_size > found[1]["log"]
    with log.open("a") as file:
        file.write('{"event": "ep')  # a line that was being written
    bace.run(resume=tmp_path / "cut")
    assert log.read_bytes() == (tmp_path / "straight" / "log.jsonl").read_bytes()
    assert matrix(tmp_path / "cut") == matrix(tmp_path / "straight")


def matrix(folder: Path) -> bytes:
    return (folder / "matrix.csv").read_bytes()


def test_without_a_checkpoint_a_resumed_run_starts_over(tiny, tmp_path, monkeypatch):
    config = tiny.settings("image", method="ER")
    bace.run(config, out=tmp_path / "straight")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "evaluate", lambda self, task: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            bace.run(config, out=tmp_path / "cut")
    assert (tmp_path / "cut" / "log.jsonl").stat().st_size
    bace.run(resume=tmp_path / "cut")
    for name in ("matrix.csv", "log.jsonl"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()


# -- imprinted heads and forward transfer


def unit(point: Any) -> np.ndarray:
    return np.array(point, dtype=np.float64) / np.linalg.norm(point)


def mean_direction(c: int) -> np.ndarray:
    return unit(np.mean([unit(p) for p in TRAIN[c]], axis=0))


def test_imprinted_rows_are_the_mean_directions_of_their_class_at_the_norm_of_the_old_rows():
    """The rows of the first task have norm 1."""
    rows: list[Tensor] = []

    class Watching(Plain):
        def before_epoch(self, stage: Stage) -> None:
            rows.append(self.model.head.weight.detach().clone())

        def after_task(self, task: Task) -> None:
            if task.index == 0:
                self.model.head.blocks[0].data.copy_(torch.tensor([[3.0, 0], [0, 1.0]]))  # norms 3 and 1: mean 2

    trainer_of(Watching(), lr=0.0, head=HeadSettings(head_init="imprint")).run()
    first = np.stack([mean_direction(0), mean_direction(1)])
    np.testing.assert_allclose(rows[0].numpy(), first, atol=1e-6)
    np.testing.assert_allclose(first, [[1, 0], [0, 1]], atol=1e-12)  # the classes lie around east and north
    np.testing.assert_allclose(rows[1].numpy(), [[3, 0], [0, 1], [-2, 0], [0, -2]], atol=1e-6)


def test_an_imprinted_run_resumes_exactly():
    assert_resumes_exactly(lambda **more: trainer_of(Plain(), head=HeadSettings(head_init="imprint"), **more))


def test_forward_transfer_by_hand():
    """Nothing is trained (lr 0), so features are the points and the old rows point east and north. Before task 2, its
    imprinted rows point west and south. Of its test points (-1, .1), (1, .1), (.1, -1), (-.1, -2), all but the second,
    which lies in the east, are correct: 75. The chance level is the same with five draws of random rows."""
    trainer = trainer_of(Plain(), lr=0.0, head=HeadSettings(head_init="imprint"), fwt=True)
    results = trainer.run()
    assert results.before == [75.0]
    points, truth = np.array(TEST[2] + TEST[3]), np.array([2, 2, 3, 3])
    shares = []
    for draw in range(5):
        rng = generator(0, "transfer", 1, draw)
        new = torch.empty(2, 2).uniform_(-1 / math.sqrt(2), 1 / math.sqrt(2), generator=rng).numpy()
        directions = np.stack([unit((1, 0)), unit((0, 1)), unit(new[0]), unit(new[1])])
        shares.append(100 * np.mean((points @ directions.T).argmax(1) == truth))
    assert results.chance == pytest.approx([np.mean(shares)])
    assert results.matrix == [[100.0], [100.0, 75.0]]
    summary = bace.core.metrics.summary(results.matrix, results.before, results.chance)
    assert summary["FWT"] == pytest.approx(75 - np.mean(shares))


def test_forward_transfer_is_measured_on_the_encoder_of_the_task_before():
    """The effect of task 1 on the encoder counts: at its end, it turns everything by 180 degrees, so that task 2's
    points lie where the old classes' rows are (both then point in the same direction as the imprinted rows)."""

    class Turning(Plain):
        def after_task(self, task: Task) -> None:
            if task.index == 0:
                self.model.encoder.turn.data.copy_(torch.tensor([[0.0, 0.0], [0.0, 1.0]]))  # type: ignore[union-attr]
                self.model.head.blocks[0].data.copy_(torch.tensor([[0.0, 1.0], [0.0, 1.0]]))

    results = trainer_of(Turning(), lr=0.0, fwt=True).run()
    # Only the second coordinate is left. The means of class 2 cancel to zero (a row of zeros, score 0), and class 3's
    # row points south. (-1, .1) and (1, .1) point north, to an old row; (.1, -1) and (-.1, -2) point south. So half are
    # right.
    assert results.before == [50.0]


def test_measuring_transfer_changes_nothing_else():
    runs = [trainer_of(Plain(), epochs=2, fwt=fwt) for fwt in (True, False)]
    results = [trainer.run() for trainer in runs]
    assert results[0].matrix == results[1].matrix
    assert (len(results[0].before), len(results[1].before)) == (1, 0)
    states = [trainer.method.state_dict() for trainer in runs]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_transfer_is_not_measured_without_one_growing_head():
    class Own(Plain):
        growing_head = False

    results = trainer_of(Own(), fwt=True).run()
    assert results.before == []
    assert bace.core.metrics.summary(results.matrix, results.before, results.chance)["FWT"] is None


def test_test_examples_are_open_for_transfer_and_evaluation_only():
    class Peeking(Plain):
        def loss(self, batch: Batch) -> Loss:
            with pytest.raises(bace.errors.StreamRefused):
                self.stream.batch(self.stream[self.now.task].test)
            return super().loss(batch)

    trainer = trainer_of(Peeking(), fwt=True)
    trainer.run()
    assert [licence.split(" (")[0] for licence in trainer.stream.licences] == ["evaluation", "forward transfer"]


# -- training batches of texts of similar lengths


def steps_of_texts(tiny: Any, bucketing: bool) -> tuple[Trainer, list[Cut], list[Batch]]:
    """ER on texts: the trainer at its end, the state after each step, and the batch of each step."""
    settings = {"method": "er", "train.bucketing": bucketing, "checkpoint.every": 1, "memory": 5}
    config = config_from(tiny.settings("text", **settings))
    batches: list[Batch] = []

    def make(kind: type[Trainer], callbacks: dict[str, Any]) -> Trainer:
        method, stream = assemble(config)
        method.after_step = batches.append  # type: ignore[method-assign, assignment]
        return kind(method, stream, config, **callbacks)

    straight, cuts, _ = run_saving(make)
    made = list(batches)
    for cut in [cut for cut in cuts if cut.kind == "step"][2::6]:
        assert_same_ending(run_saving(make, cut)[0], ending(straight), str(cut.state["at"]))
    return straight, cuts, made


def test_bucketed_training_sees_every_text_pads_less_and_resumes_exactly(tiny):
    (plain, _, batches), (bucketed, _, similar) = (steps_of_texts(tiny, bucketing) for bucketing in (False, True))
    assert len(batches) == len(similar)
    steps = -(-len(plain.stream[0].train) // 8)
    assert sorted(torch.cat([batch.examples for batch in similar[:steps]]).tolist()) == plain.stream[0].train.tolist()
    padded, less = (sum(b.inputs["input_ids"].numel() for b in made[:steps]) for made in (batches, similar))
    assert less < padded
    assert plain.results.matrix != bucketed.results.matrix or not torch.equal(
        plain.method.model.head.weight, bucketed.method.model.head.weight
    )


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("modality", ["text", "token"])
def test_features_and_scores_do_not_depend_on_how_texts_are_put_into_batches(tiny, modality):
    found = []
    for size in (128, 4):  # all texts in one part, and parts of similar lengths
        config = config_from(tiny.settings(modality, method="seq", **{"train.eval_batch_size": size}))
        method, stream = assemble(config)
        trainer = Trainer(method, stream, config)
        trainer.learn(stream[0])
        trainer.evaluate(stream[0])
        with stream.licence("test", stream[0].test):
            out, (rows, predicted) = method.outputs(stream[0].test), predict(method, stream[0].test)
        assert torch.equal(rows, stream.rows_of(stream[0].test)[0])
        found.append((out, predicted[None], trainer.results.matrix))
    (whole, guess, matrix), (parts, guess_in_parts, matrix_in_parts) = found
    torch.testing.assert_close(parts.features, whole.features, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(parts.logits, whole.logits, rtol=1e-9, atol=1e-9)
    assert torch.equal(guess, guess_in_parts)
    assert matrix == matrix_in_parts
