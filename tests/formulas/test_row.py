"""ROW's two heads, their pool and their training are compared with numpy, and its scores with scipy's distances. Tests
check bit for bit which weights each stage changes."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial.distance import mahalanobis
from steps import array, assert_equal_bits, at_task, changed_in_stages, cross_entropy, make, recorded_passes, softmax

import bace
from bace.core.trainer import Trainer
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.row import ROW

SMALL = {"name": "row", "latent": 6, "wp_epochs": 2, "tp_epochs": 2, "head_batch": 4, "gate_steps": 0}
TASKS = {"benchmark.tasks": [2, 1, 2]}
OUTPUTS = (slice(0, 3), slice(3, 5), slice(5, 8))  # heads of 2, 1 and 2 classes, each with an output for all others
CLASSES = (range(2), range(2, 3), range(3, 5))


def learned(tiny: Any, tasks: int = 3, modality: str = "image", **options: Any) -> Any:
    method, stream, config = make(tiny, modality, {**SMALL, **options}, **TASKS)
    trainer = Trainer(method, stream, config)
    for task in stream[:tasks]:
        trainer.learn(task)
    return method


def begun(tiny: Any, stage: str, modality: str = "image") -> tuple[Any, Any]:
    """Return the method at the first step of a stage of its third task, without the stages before it, and the stage."""
    method = at_task(tiny, modality, SMALL, 2, **TASKS)
    found = next(s for s in method.stages(method.stream[2]) if s.name == stage)
    method.now.stage = stage
    method.eval()
    method.before_epoch(found)
    return method, found


def shown(method: Any) -> Batch:
    """Return test examples of all tasks."""
    examples = torch.cat([task.test for task in method.stream])
    with method.stream.licence("test", examples):
        found: Batch = method.stream.batch(examples)
    return found


def under(method: Any, task: int, batch: Batch) -> tuple[Any, Any, Any]:
    """Return features, logits of the task's head and logits of its other head, under its gates."""
    with torch.no_grad(), method.gates.of(task):
        out = method.model(batch)
        other = method.tp(out.features)
    return array(out.features), array(out.logits)[:, OUTPUTS[task]], array(other)[:, OUTPUTS[task]]


# -- stages


def test_after_the_first_stage_only_one_head_changes_at_a_time(tiny: Any) -> None:
    changed = changed_in_stages(Trainer(*make(tiny, "image", SMALL, **TASKS)))
    later = [(1, "wp"), (1, "tp 2"), (1, "tp 1")], [(2, "wp"), (2, "tp 3"), (2, "tp 1"), (2, "tp 2")]
    assert list(changed) == [(0, "main"), (1, "main"), *later[0], (2, "main"), *later[1]]
    for (task, stage), names in changed.items():
        if stage == "wp":
            assert names == {f"model.head.blocks.{task}", f"model.head.biases.{task}"}
        elif stage == "tp 2" and task == 1:  # the first such stage also initialises the head of the first task
            assert names == {f"tp.{kind}.{p}" for p in (0, 1) for kind in ("blocks", "biases")}
        elif stage.startswith("tp"):
            p = int(stage.removeprefix("tp ")) - 1
            assert names == {f"tp.blocks.{p}", f"tp.biases.{p}"}
        else:
            assert not any(name.startswith("tp.") for name in names)
            assert any(".adapter." in name for name in names)


def test_the_within_task_head_is_tuned_on_all_outputs_and_all_the_tasks_examples(tiny: Any) -> None:
    method, stage = begun(tiny, "wp")
    assert (stage.epochs, stage.batch_size) == (2, 4)
    assert stage.examples().tolist() == method.stream[2].train.tolist()
    batch = method.stream.batch(stage.examples()[torch.tensor([1, 15, 4])])
    with recorded_passes() as passes:
        loss = stage.loss(batch)
    assert not passes  # cached
    _, logits, _ = under(method, 2, batch)
    assert loss.item() == pytest.approx(cross_entropy(logits, batch.targets.numpy() - 3), rel=1e-4)


@pytest.mark.parametrize("modality", ["image", "text"])
@pytest.mark.parametrize("p", [0, 1, 2])
def test_the_task_head_sees_as_many_others_as_own_examples_under_its_gates(tiny: Any, p: int, modality: str) -> None:
    method, stage = begun(tiny, f"tp {p + 1}", modality)
    batch = method.stream.batch(stage.examples()[:4])
    assert set(batch.targets.tolist()) <= set(CLASSES[p])
    drawn = []
    for step in range(20):
        method.now.step = step
        loss = stage.loss(batch)
        ids = torch.randint(len(stage.others()), (len(batch),), generator=method.now.rng("others"))
        others = method.stream.batch(stage.others()[ids])
        assert not set(others.targets.tolist()) & set(CLASSES[p])
        drawn.extend(others.examples.tolist())
        own, rest = under(method, p, batch)[2], under(method, p, others)[2]
        labels = [y - CLASSES[p].start for y in batch.targets.tolist()] + [len(CLASSES[p])] * len(others)
        assert loss.item() == pytest.approx(cross_entropy(np.concatenate([own, rest]), np.array(labels)), rel=1e-4)
    assert set(drawn) == set(stage.others().tolist())


@pytest.mark.parametrize("p", [0, 1, 2])
def test_the_pool_has_as_many_examples_of_each_class(tiny: Any, p: int) -> None:
    """Ten slots for the three old classes are three each. The two new classes have the same number."""
    method, stage = begun(tiny, f"tp {p + 1}")
    own, others = stage.examples(), stage.others()
    counts = torch.bincount(method.stream.targets[torch.cat([own, others])]).tolist()
    assert counts == [3] * 5
    assert set(method.stream.targets[own].tolist()) == set(CLASSES[p])
    allowed = torch.cat([method.memory.examples, method.stream[2].train])
    assert torch.isin(torch.cat([own, others]), allowed).all()


def test_task_heads_start_as_copies_and_then_go_on(tiny: Any) -> None:
    """Without epochs, task heads keep their initial values. With epochs, the third task continues with the heads it
    finds."""
    still = learned(tiny, tp_epochs=0)
    assert_equal_bits(dict(still.tp.state_dict()), dict(still.head.state_dict()))
    method, stream, config = make(tiny, "image", SMALL, **TASKS)
    trainer = Trainer(method, stream, config)
    for task in stream[:2]:
        trainer.learn(task)
    found = [p.detach().clone() for t in (0, 1) for p in method.tp.of(t)]
    assert not torch.equal(found[0], method.head.blocks[0])
    method.grow(stream[2])
    stages = {stage.name: stage for stage in method.stages(stream[2])}
    assert [name for name, stage in stages.items() if stage.prepare] == ["tp 3"]
    stages["tp 3"].prepare()
    assert all(torch.equal(a, b) for a, b in zip(found, [p for t in (0, 1) for p in method.tp.of(t)], strict=True))
    assert torch.equal(method.tp.blocks[2], method.head.blocks[2])


def test_without_memory_there_is_no_head_between_tasks(tiny: Any) -> None:
    result = bace.run(tiny.settings("image", method=SMALL, **{"memory.size": 0}))
    method: Any = result.method
    assert [stage.name for stage in method.stages(method.stream[2])] == ["main", "wp"]
    assert method.head.sizes == [2, 1, 2]
    assert torch.isfinite(method.predict(shown(method))).all()


def test_a_memory_without_a_tasks_classes_leaves_its_head_as_it_is(tiny: Any) -> None:
    """There is one slot for five classes. The stage of a task that is not remembered is left out."""
    settings = {**TASKS, "memory.size": 1, "memory.allow_missing_classes": True}
    changed = changed_in_stages(Trainer(*make(tiny, "image", SMALL, **settings)))
    assert sum(stage.startswith("tp") for task, stage in changed if task == 2) == 2
    assert (2, "tp 3") in changed


# -- prediction


@pytest.mark.parametrize("modality", ["image", "text"])
def test_scores_are_within_task_times_task_times_relative_nearness(tiny: Any, modality: str) -> None:
    method = learned(tiny, modality=modality)
    batch = shown(method)
    found = array(method.predict(batch))
    within, between, near = [], [], []
    for t, classes in enumerate(CLASSES):
        features, logits, others = under(method, t, batch)
        within.append(softmax(logits[:, : len(classes)] / 5))
        between.append(softmax(others / 5)[:, : len(classes)].max(1))
        whitening, means = array(method.whitening[t]), array(method.means)
        inverse = whitening.T @ whitening
        near.append([max(1 / mahalanobis(h, means[c], inverse) for c in classes) for h in features])
    share = np.array(near) / np.sum(near, 0)
    expected = [w * b[:, None] * n[:, None] for w, b, n in zip(within, between, share, strict=True)]
    np.testing.assert_allclose(found, np.concatenate(expected, 1), rtol=1e-3)
    # the prediction within each task is that of its own head, and the shares of nearness sum to one over the tasks
    for t, classes in enumerate(CLASSES):
        columns = found[:, classes.start : classes.stop]
        assert (columns.argmax(1) == under(method, t, batch)[1][:, : len(classes)].argmax(1)).all()
    sums = [found[:, c.start : c.stop].sum(1) / b for c, b in zip(CLASSES, between, strict=True)]
    np.testing.assert_allclose(np.sum(sums, 0), 1, rtol=1e-4)


def test_after_one_task_scores_are_those_within_it(tiny: Any) -> None:
    method = learned(tiny, tasks=1)
    batch = shown(method)
    _, logits, _ = under(method, 0, batch)
    np.testing.assert_allclose(array(method.predict(batch)), softmax(logits[:, :2] / 5), rtol=1e-5)


def test_a_high_temperature_makes_the_classes_of_a_task_equal(tiny: Any) -> None:
    method = learned(tiny)
    batch = shown(method)
    assert np.ptp(array(method.predict(batch))[:, :2], axis=1).min() > 1e-4
    method.temperature = 1e9
    scores = array(method.predict(batch))
    np.testing.assert_allclose(scores[:, 0], scores[:, 1], rtol=1e-6)
    np.testing.assert_allclose(scores[:, 3], scores[:, 4], rtol=1e-6)


def test_wrong_values_are_refused() -> None:
    for wrong in ({"temperature": 0.0}, {"wp_epochs": -1}, {"tp_epochs": -1}, {"head_batch": 0}):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))} "):
            ROW(**wrong)  # type: ignore[arg-type]
