"""The first stage is compared with numpy and, with identity pairs, equals a separate implementation of ER with
distillation bit for bit. The second stage is compared with 200 steps of numpy and checked by its convexity. The
balanced set is counted."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from steps import (
    Array,
    array,
    assert_equal_bits,
    at_task,
    cross_entropy,
    logits_of,
    make,
    recorded_passes,
    softmax,
    some,
    weights,
)
from torch import Tensor

import bace
from bace.config.parse import config_from
from bace.core.stage import Loss
from bace.core.stream import Task
from bace.core.trainer import Trainer
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.experiments.assemble import assemble
from bace.methods.er import ER
from bace.methods.parts.bias_correction import correct_bias, fit_bias
from bace.methods.parts.held_out import HoldOut

TASKS = {"benchmark.tasks": [2, 1, 2]}
ALL_WORDS = {"train.replay_o": "label"}  # O is among the replayed classes, as in the formulas here


def shown(method: Any, examples: Tensor) -> Batch:
    with method.stream.licence("test", examples):
        found: Batch = method.stream.batch(examples)
    return found


def scaled(logits: Array, pairs: dict[range, tuple[float, float]]) -> Array:
    logits = logits.copy()
    for columns, (a, c) in pairs.items():
        logits[:, list(columns)] = a * logits[:, list(columns)] + c
    return logits


# -- the first stage


@pytest.mark.parametrize("modality", ["image", "text", "token"])
@pytest.mark.parametrize("corrections", ["latest", "cumulative"])
@pytest.mark.parametrize("reduction", ["sum", "joint"])
def test_the_loss_weighs_distillation_of_the_corrected_teacher_by_the_share_of_old_classes(
    tiny: Any, modality: str, corrections: str, reduction: str
) -> None:
    options = {"name": "bic", "corrections": corrections, "reduction": reduction, "bias_epochs": 0}
    method = at_task(tiny, modality, options, task=2, **TASKS, **ALL_WORDS)
    first, second, new = (task.classes for task in method.stream)
    pairs = {first: (1.3, 0.2), second: (0.7, -0.4)}
    for pair, values in zip(method.pairs, pairs.values(), strict=False):
        pair.data.copy_(torch.tensor(values))
    with torch.no_grad():
        for p in method.model.parameters():
            p += 0.02  # the student differs from its teacher
    batch = some(method)
    with recorded_passes() as passes:
        terms = method.loss(batch)
    (both,) = (p.batch for p in passes if p.training)
    n, old, seen = len(batch), second.stop, new.stop
    assert len(both) > n
    active = pairs if corrections == "cumulative" else {second: pairs[second]}
    teacher = scaled(logits_of(method.teacher, both), active)
    student = logits_of(method.model, both)
    if corrections == "cumulative":
        student = scaled(student, active)
    assert teacher.shape[1] == old
    lam = old / seen
    assert lam == (3 / 5 if modality != "token" else 7 / 11)  # tokens: O, and two tags for each of five types
    log_student = np.log(softmax(student[:, :old] / 2))
    kd = -(softmax(teacher / 2) * log_student).sum(1)
    targets = both.targets.numpy()
    values = {name: term.item() for name, term in terms.items()}
    if reduction == "sum":
        assert values == pytest.approx(
            {
                "new": (1 - lam) * cross_entropy(student[:n], targets[:n]),
                "replay": (1 - lam) * cross_entropy(student[n:], targets[n:]),
                "distil": lam * (kd[:n].mean() + kd[n:].mean()),
            }
        )
    else:
        expected = {"new": (1 - lam) * cross_entropy(student, targets), "distil": lam * kd.mean()}
        assert values == pytest.approx(expected)


class ReplayAndDistil(HoldOut, ER):
    """ER with distillation on the same examples, which is BiC without its second stage."""

    title = "ER+KD"
    holds_out = True
    keeps_teacher = True

    def __init__(self) -> None:
        super().__init__(mode="batch", reduction="sum")

    def loss(self, batch: Batch) -> Loss:
        replay, old = self.replay(), self.now.known
        if self.teacher is None or replay is None:
            return super().loss(batch)
        share, n = old / self.now.seen, len(batch)
        both = Batch.cat(batch, replay)
        z, y = self.model(both).logits, both.targets
        with torch.no_grad():
            wanted = self.teacher(both).logits

        def kd(z: Tensor, wanted: Tensor) -> Tensor:
            return -((wanted / 2).softmax(1) * (z[:, :old] / 2).log_softmax(1)).sum(1).mean()

        return {
            "new": (1 - share) * F.cross_entropy(z[:n], y[:n]),
            "old": (1 - share) * F.cross_entropy(z[n:], y[n:]),
            "kd": share * (kd(z[:n], wanted[:n]) + kd(z[n:], wanted[n:])),
        }


@pytest.mark.parametrize("modality", ["image", "text", "token"])
def test_with_identity_pairs_it_is_er_with_distillation_bit_for_bit(tiny: Any, modality: str) -> None:
    runs = []
    for method in ({"name": "bic", "bias_epochs": 0}, {"name": f"{__name__}.ReplayAndDistil"}):
        learned, stream, config = make(tiny, modality, method, **TASKS, **ALL_WORDS)
        matrix = Trainer(learned, stream, config).run().matrix
        runs.append((matrix, {**weights(learned.model), **weights(learned.memory)}))
    assert runs[0][0] == runs[1][0]
    assert_equal_bits(runs[0][1], runs[1][1])


def test_one_task_without_anything_held_out_is_er_bit_for_bit(tiny: Any) -> None:
    changes = {"benchmark.tasks": [4], "memory.size": 4}
    er, bic = (bace.run(tiny.settings("text", method=name, **changes)) for name in ("er", "bic"))
    assert er.matrix == bic.matrix
    assert_equal_bits(weights(er.method.model), weights(bic.method.model))


# -- the second stage


class Watched:
    """A run, the state before and after each second stage, and the examples that were passed and trained on."""

    def __init__(
        self, tiny: Any, modality: str = "image", method: dict[str, Any] | None = None, **changes: Any
    ) -> None:
        settings = {**TASKS, **changes}
        options = {"name": "bic", "bias_epochs": 10, **(method or {})}
        learned, self.stream, config = make(tiny, modality, options, **settings)
        self.method: Any = learned
        self.balanced: dict[int, list[int]] = {}
        self.states: dict[int, tuple[dict[str, Tensor], dict[str, Tensor]]] = {}
        self.passes: dict[int, list[list[int]]] = {}
        self.sizes: list[tuple[int, int]] = []
        self.drawn: list[list[int]] = []
        self.trained: dict[int, set[int]] = {}

        watched = self

        class Watching(Trainer):
            def train(self, stage: Any, stages: int) -> None:
                task, method = self.now.task, watched.method
                before = {k: v.clone() for k, v in method.state_dict().items()}
                with recorded_passes() as passes:
                    super().train(stage, stages)
                if stage.name == "main":
                    watched.trained[task] = {e for p in passes if p.training for e in p.batch.examples.tolist()}
                    return
                watched.balanced[task] = stage.examples().tolist()
                watched.states[task] = (before, {k: v.clone() for k, v in method.state_dict().items()})
                watched.passes[task] = [p.batch.examples.tolist() for p in passes]
                watched.drawn.append(method.picked.tolist())

        trainer = Watching(learned, self.stream, config)
        for task in self.stream:
            trainer.learn(task)
            self.sizes.append((len(self.method.memory), len(self.method.held)))
        self.trainer = trainer

    def classes(self, task: int) -> Counter[int]:
        """Return the number of examples of each class in the balanced set of a task."""
        return Counter(self.stream.targets[torch.tensor(self.balanced[task])].tolist())


@pytest.fixture(scope="module")
def watched(tiny: Any) -> Watched:
    return Watched(tiny, **{"memory.size": 60})


def test_the_second_stage_changes_the_newest_pair_and_nothing_else(watched: Watched) -> None:
    assert sorted(watched.states) == [1, 2]
    for task, (before, after) in watched.states.items():
        assert before.keys() == after.keys()
        changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
        assert changed == {f"pairs.{task}"}
    assert watched.method.pairs[0].tolist() == [1.0, 0.0]


def test_the_network_is_passed_once_over_the_balanced_set_in_a_second_stage(watched: Watched) -> None:
    for task, passes in watched.passes.items():
        assert sorted(e for batch in passes for e in batch) == watched.balanced[task]


@pytest.mark.parametrize("corrections", ["latest", "cumulative"])
def test_the_pair_is_what_200_full_steps_of_sgd_give(tiny: Any, corrections: str) -> None:
    """The oracle minimises CE([z_old, a z_new + c], y) + 0.1 c^2 / 2 from (1, 0) with momentum 0.9 in numpy."""
    options = {"corrections": corrections, "bias_lr": 0.02, "bias_epochs": 200}
    run = Watched(tiny, method=options, **{"memory.size": 60})
    method = run.method
    batch = shown(method, torch.tensor(run.balanced[2]))
    logits, targets = logits_of(method.model.eval(), batch), batch.targets.numpy()
    assert sorted(targets) == sorted(range(5))
    if corrections == "cumulative":
        logits = scaled(logits, {range(2, 3): tuple(method.pairs[1].tolist())})
    pair, velocity = np.array([1.0, 0.0]), np.zeros(2)
    for _ in range(200):
        error = (softmax(scaled(logits, {range(3, 5): tuple(pair)})) - np.eye(5)[targets])[:, 3:] / len(targets)
        velocity = 0.9 * velocity + [(error * logits[:, 3:]).sum(), error.sum() + 0.1 * pair[1]]
        pair -= 0.02 * velocity
    assert method.pairs[2].tolist() == pytest.approx(pair.tolist(), rel=1e-4)
    assert abs(pair[0] - 1) > 0.05


def test_the_fit_undoes_any_scale_and_shift_of_the_new_logits() -> None:
    """The fit is convex and affine-equivariant. Without the penalty, the corrected logits are the same for every scale
    and shift."""
    rng = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(400, 6, generator=rng, dtype=torch.float64)
    targets = torch.multinomial(logits.softmax(1), 1, generator=rng)[:, 0]
    new = range(4, 6)
    clean = correct_bias(logits, new, *fit_bias(logits, targets, new, solver="lbfgs", penalty=0.0))
    for scale, shift in ((2.5, -1.0), (0.3, 4.0)):
        distorted = logits.clone()
        distorted[:, 4:] = scale * logits[:, 4:] + shift
        again = correct_bias(distorted, new, *fit_bias(distorted, targets, new, solver="lbfgs", penalty=0.0))
        torch.testing.assert_close(again, clean, rtol=1e-5, atol=1e-5)


def test_the_second_stage_approaches_the_optimum_of_the_convex_problem(tiny: Any) -> None:
    method = at_task(tiny, "image", {"name": "bic"})
    rng = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(300, 4, generator=rng)
    targets = torch.multinomial(logits.softmax(1), 1, generator=rng)[:, 0]
    logits[:, 2:] = 1.5 * logits[:, 2:] + 1
    method.rows = method.picked = torch.arange(300)
    method.logits = logits
    batch = Batch({}, targets, method.rows, method.rows)
    optimiser = torch.optim.SGD([method.pairs[1]], lr=0.02, momentum=0.9)
    for _ in range(600):
        optimiser.zero_grad()
        torch.stack(list(method.bias_loss(batch).values())).sum().backward()
        optimiser.step()
    optimum = fit_bias(logits, targets, range(2, 4), solver="lbfgs", penalty=0.1)
    assert method.pairs[1].tolist() == pytest.approx(optimum, abs=1e-3)
    assert optimum[0] < 0.8  # it was scaled by 1.5


# -- corrected predictions


@pytest.mark.parametrize("corrections", ["latest", "cumulative"])
def test_the_prediction_is_corrected_by_the_active_pairs_and_identity_pairs_leave_every_bit(
    tiny: Any, corrections: str
) -> None:
    result = bace.run(tiny.settings("image", method={"name": "bic", "corrections": corrections, "bias_epochs": 5}))
    method: Any = result.method
    batch = shown(method, torch.cat([task.test for task in method.stream]))
    with torch.no_grad():
        raw = method.model(batch).logits
    assert torch.equal(method.predict(batch, "raw"), raw)
    pairs = {task.classes: tuple(pair.tolist()) for task, pair in zip(method.stream, method.pairs, strict=True)}
    assert pairs[range(2)] == (1, 0)
    assert pairs[range(2, 3)] != (1, 0) != pairs[range(3, 5)]
    active = pairs if corrections == "cumulative" else {range(3, 5): pairs[range(3, 5)]}
    np.testing.assert_allclose(array(method.predict(batch)), scaled(array(raw), active), rtol=1e-6)
    right = method.predict(batch, "raw").argmax(1) == batch.targets
    by_task = [100 * part.double().mean().item() for part in right.split([12, 6, 12])]
    assert result.metrics["scorers"]["raw"]["A_last"] == pytest.approx(np.mean(by_task))
    for pair in method.pairs:
        pair.data.copy_(torch.tensor([1.0, 0.0]))
    assert torch.equal(method.predict(batch), raw)


# -- the balanced set


def test_held_out_examples_are_as_many_of_each_class_and_never_trained_on(watched: Watched) -> None:
    assert watched.classes(1) == dict.fromkeys(range(3), 1)
    assert watched.classes(2) == dict.fromkeys(range(5), 1)
    everything = {e for task in watched.stream for e in task.train.tolist()}
    trained = set.union(*watched.trained.values())
    assert not trained & {e for examples in watched.balanced.values() for e in examples}
    assert len(everything - trained) == 5
    assert all(memory + held <= 60 for memory, held in watched.sizes)
    assert not set(watched.method.held.examples.tolist()) & set(watched.method.memory.examples.tolist())


def test_old_classes_give_no_more_than_the_new_ones_hold_out(tiny: Any) -> None:
    """Each class has twelve slots at first, two of them held out, and four in the end, one of them held out."""
    learned, stream, _ = make(tiny, "image", {"name": "bic"}, **{"memory.size": 24, "benchmark.tasks": [2, 3]})
    method: Any = learned
    assert [method.spare(method.quota(task)) for task in stream] == [2, 1]
    ants, bees = stream[0].train.split(10)
    method.held.fill({0: ants[:2], 1: bees[:2]}, 0, 2, torch.Generator())
    method.memory.fill({0: ants[2:], 1: bees[2:]}, 0, 10, torch.Generator())
    stream.begin(stream[1], method.remembered())
    balanced = method.balanced(stream[1])
    assert Counter(stream.targets[balanced].tolist()) == dict.fromkeys(range(5), 1)
    assert set(balanced.tolist()) >= {int(ants[0]), int(bees[0])}


def test_with_one_slot_a_class_the_memory_and_herded_new_examples_are_the_balanced_set(tiny: Any) -> None:
    """Each class has two slots after the first task and one after the others. Then nothing can be held out any more."""
    run = Watched(tiny, **{"memory.size": 5})
    assert run.sizes == [(2, 2), (3, 0), (5, 0)]
    assert run.classes(1) == dict.fromkeys(range(3), 1)
    assert run.classes(2) == dict.fromkeys(range(5), 1)
    _, second, third = run.stream
    assert not set(run.balanced[1]) & run.trained[0]  # examples that were held out while it was possible
    for task in (second, third):
        assert set(task.train.tolist()) <= run.trained[task.index]
        new = set(run.balanced[task.index]) & set(task.train.tolist())
        assert len(new) == len(task.classes)
    assert set(run.balanced[2]) & set(third.train.tolist()) <= set(run.method.memory.examples.tolist())
    old = {e for e in run.balanced[2] if e not in set(third.train.tolist())}
    assert len(old & run.trained[2]) >= 2  # replayed, because nothing else is left


def test_a_memory_smaller_than_the_classes_still_gives_a_finite_pair(tiny: Any) -> None:
    run = Watched(tiny, **{"memory.size": 3, "memory.allow_missing_classes": True})
    assert all(math.isfinite(value) for pair in run.method.pairs for value in pair.tolist())
    assert all(memory + held <= 3 for memory, held in run.sizes)


def test_classes_with_a_single_example_are_trained_on_it(tiny: Any) -> None:
    run = Watched(tiny, **{"benchmark.train_per_class": 1, "memory.size": 10, "train.batch_size": 2})
    assert run.sizes == [(2, 0), (3, 0), (5, 0)]
    assert set(run.stream[2].train.tolist()) <= run.trained[2]
    assert run.classes(2) == dict.fromkeys(range(5), 1)


# -- words


@pytest.fixture(scope="module")
def words(tiny: Any) -> Watched:
    return Watched(tiny, "token", **{"memory.size": 40})


def test_words_of_each_tag_are_as_many_as_of_the_rarest_and_o_is_among_the_old(words: Watched) -> None:
    names = words.stream.names
    for task, drawn in zip((1, 2), words.drawn, strict=True):
        counts = Counter(words.stream.targets[torch.tensor(drawn)].tolist())
        rows = words.stream.rows_of(torch.tensor(words.balanced[task]))[0]
        there = Counter(words.stream.targets[rows].tolist())
        assert counts.keys() == there.keys()
        assert set(counts.values()) == {min(there.values())}
        assert there[0] > min(there.values())
        assert set(drawn) <= set(rows.tolist())
        assert {names[c] for c in counts} >= {"O", f"B-{names[words.stream[task].classes.start][2:]}"}


def test_o_is_never_scaled(words: Watched) -> None:
    method = words.method
    batch = shown(method, words.stream[2].test)
    raw, corrected = method.predict(batch, "raw"), method.predict(batch)
    assert words.stream[2].classes == range(7, 11)
    assert torch.equal(raw[:, :7], corrected[:, :7])
    assert (raw[:, 7:] != corrected[:, 7:]).all()


def test_held_out_sentences_are_distinct_untrained_and_leave_every_type_some(words: Watched) -> None:
    held, memory = (m.examples.tolist() for m in (words.method.held, words.method.memory))
    assert len(set(held)) == len(held) == 5  # one per type
    assert not set(held) & set(memory)
    assert len(held) + len(memory) <= 40
    assert not set(held) & set.union(*words.trained.values())
    assert sorted(words.method.held.group.tolist()) == list(range(5))


def test_the_last_sentence_that_shows_a_type_is_not_held_out(tiny: Any) -> None:
    """Only one sentence shows type 1, and it also shows type 0. It is not held out, and another sentence is held out
    for type 0."""
    learned, stream, _ = make(tiny, "token", {"name": "bic"})
    method: Any = learned
    task = stream[0]
    stream.begin(task, task.train[:0])
    groups = stream.by_group(task.train)
    only = groups[0][0].item()
    found = {0: groups[0], 1: torch.tensor([only])}
    method.stream.by_group = lambda examples: found
    for seed in range(20):
        method.now.seed = seed
        held = method.choose_held(Task(0, "", task.classes, task.train, task.train[:0], task.train[:0]))
        assert only not in held[0].tolist()
        assert len(held[0]) == 1
        assert len(held[1]) == 0


# -- what is refused


def test_a_memory_of_nothing_is_refused_before_training(tiny: Any) -> None:
    with pytest.raises(ConfigError, match="BiC fits its correction on stored examples, but the memory is 0"):
        assemble(config_from(tiny.settings("image", method="bic", **{"memory.size": 0})))


@pytest.mark.parametrize("value", [{"T": 0.0}, {"bias_lr": 0.0}, {"bias_epochs": -1}], ids=str)
def test_values_out_of_range_are_refused(tiny: Any, value: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(value))):
        assemble(config_from(tiny.settings("image", method={"name": "bic", **value})))


def test_early_stopping_leaves_the_second_stage_alone(tiny: Any) -> None:
    """The network's validation loss cannot change in this stage."""
    changes = {"benchmark.val_fraction": 0.2, "train.early_stop": 1, "train.epochs": 3}
    config = config_from(tiny.settings("image", method={"name": "bic", "bias_epochs": 7}, **changes))
    events: list[dict[str, Any]] = []
    Trainer(*assemble(config), config, log=events.append).run()
    for task in (2, 3):
        assert [e["epoch"] for e in events if e.get("stage") == "bias" and e["task"] == task] == list(range(7))


def test_the_logged_terms_of_the_second_stage_are_its_formula(tiny: Any) -> None:
    """One step is computed by hand for two rows, one old and one new class, and logits (0, log 3) in each row. At (1,
    0) the soft-max is (1/4, 3/4)."""
    method = at_task(tiny, "image", {"name": "bic"}, **{"benchmark.tasks": [1, 1]})
    method.rows = method.picked = torch.tensor([5, 9])
    method.logits = torch.tensor([[0.0, math.log(3)]] * 2)
    batch = Batch({}, torch.tensor([1, 0]), method.rows.flip(0), method.rows.flip(0))
    terms = method.bias_loss(batch)
    assert terms["bias"].item() == pytest.approx(-(math.log(3 / 4) + math.log(1 / 4)) / 2)
    assert terms["shift"].item() == 0
    (terms["bias"] + terms["shift"]).backward()
    assert method.pairs[1].grad.tolist() == pytest.approx([math.log(3) / 4, 1 / 4])
    method.pairs[1].data.copy_(torch.tensor([1.0, 0.6]))
    assert method.bias_loss(batch)["shift"].item() == pytest.approx(0.1 * 0.36 / 2)
