"""Sparse-ER's steps are compared with a separate count over whole runs (when memory is replayed, how much of it, how
uniformly), and its loss with numpy. With rate 0 it equals SEQ bit for bit. It resumes exactly between two rare
steps."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checks import check_resume_equals_the_straight_run, counted_run
from steps import array, assert_equal_bits, at_task, cross_entropy, make, recorded_passes, weights

import bace
from bace.core.trainer import Trainer
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.sparseer import SparseER


def steps_of(tiny: Any, every: int, modality: str = "image", **changes: Any) -> tuple[list[tuple[int, Batch]], Any]:
    """Return the task and the batch of every optimiser step of a run, and the method."""
    settings = {"benchmark.tasks": [2, 1, 2], **changes}
    method, stream, config = make(tiny, modality, {"name": "sparse-er", "every": every}, **settings)
    found: list[tuple[int, Batch]] = []
    loss = method.loss

    def noted(batch: Batch) -> Any:
        with recorded_passes() as passes:
            value = loss(batch)
        assert len(passes) == 1
        found.append((method.now.task, passes[0].batch))
        return value

    method.loss = noted  # type: ignore[method-assign]
    Trainer(method, stream, config).run()
    return found, method


@pytest.mark.parametrize(("every", "replays"), [(3, 3), (5, 2), (10, 1), (11, 0)])
def test_one_step_on_memory_follows_every_so_many_steps_counted_through_the_tasks(
    tiny: Any, every: int, replays: int
) -> None:
    # ten examples per class, eight per step and two epochs: 6 steps without a memory, then 4 and 6
    steps, method = steps_of(tiny, every)
    new = {int(e): task.index for task in method.stream for e in task.train}
    own = [all(new[e] == task for e in batch.examples.tolist()) for task, batch in steps]
    assert sum(own) == 6 + 4 + 6
    assert own.count(False) == replays == (4 + 6) // every
    later = [i for i, (task, _) in enumerate(steps) if task > 0]
    seen = 0
    for i in later:
        seen += own[i]
        if not own[i]:
            assert own[i - 1]
            assert seen % every == 0  # right after the step on new data
    assert int(method.taken) == 10


def test_a_step_on_memory_is_a_whole_batch_of_stored_examples(tiny: Any) -> None:
    steps, method = steps_of(tiny, 2, **{"benchmark.tasks": [2, 3]})
    first = set(method.stream[0].train.tolist())
    sizes = [len(batch.examples) for task, batch in steps if task and set(batch.examples.tolist()) <= first]
    assert sizes == [8] * 4
    stored = {e for task, batch in steps if task for e in batch.examples.tolist() if e in first}
    assert len(stored) <= 10  # the ten of the memory, out of twenty
    assert len(method.memory) <= 10


@pytest.mark.parametrize("modality", ["image", "token"])
def test_new_and_replayed_rows_have_the_same_cross_entropy_over_all_seen_classes(tiny: Any, modality: str) -> None:
    method = at_task(tiny, modality, {"name": "sparse-er", "every": 1})
    batch = method.stream.batch(method.stream[1].train[:3])
    new, replay = method.expand(batch)
    assert new is batch
    assert len(replay.examples) == 8
    for part in (new, replay):
        logits = method.model(part).logits
        assert logits.shape[1] == method.now.seen
        assert method.loss(part).item() == pytest.approx(cross_entropy(array(logits), part.targets.numpy()), rel=1e-5)
    old = set(range(method.now.known))
    assert set(replay.targets.tolist()) <= old  # a sentence keeps the labels of its own task
    if modality == "token":
        assert len(set(replay.targets.tolist())) > 1


def test_what_is_replayed_is_drawn_uniformly(tiny: Any) -> None:
    method = at_task(tiny, "image", {"name": "sparse-er", "every": 1})
    batch = method.stream.batch(method.stream[1].train[:1])
    counts = dict.fromkeys(method.memory.examples.tolist(), 0)
    for step in range(250):
        method.now.step = step
        for e in list(method.expand(batch))[1].examples.tolist():
            counts[e] += 1
    expected = 250 * 8 / len(counts)
    statistic = sum((count - expected) ** 2 / expected for count in counts.values())
    assert len(counts) == 10
    assert statistic < 27.9  # chi-square with 9 degrees of freedom, exceeded once in a thousand times
    assert np.var(list(counts.values())) > 0


@pytest.mark.parametrize("modality", ["image", "text", "token"])
def test_without_replay_it_is_seq_bit_for_bit(tiny: Any, modality: str) -> None:
    off = {"name": "sparse-er", "every": 0}
    seq, sparse = (bace.run(tiny.settings(modality, method=m)) for m in ("seq", off))
    assert seq.matrix == sparse.matrix
    assert_equal_bits(weights(seq.method.model), weights(sparse.method.model))
    assert len(sparse.method.memory)


def test_replay_changes_nothing_before_its_first_step(tiny: Any) -> None:
    seq, sparse = (bace.run(tiny.settings("text", method=m)) for m in ("seq", {"name": "sparse-er", "every": 10}))
    assert int(sparse.method.taken) == 10
    assert seq.matrix[:2] == sparse.matrix[:2]
    one, other = weights(seq.method.model), weights(sparse.method.model)
    assert any(not torch.equal(one[name], other[name]) for name in one)  # only the very last step replays


def test_resume_keeps_the_count_of_steps(tiny: Any, tmp_path: Path) -> None:
    method: Any = {"name": "sparse-er", "every": 3}
    counted_run(tiny, method, "image", tmp_path)
    check_resume_equals_the_straight_run(tiny, method, "image", tmp_path)


def test_a_negative_rate_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"every \(-1\)"):
        SparseER(every=-1)
