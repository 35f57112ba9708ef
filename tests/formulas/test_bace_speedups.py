"""BaCE's exact speed-ups (docs/bace.md 9) reduce the work and do not change the result, in double precision and with
LayerNorm models without dropout."""

from typing import Any

import pytest
import torch
from plain_bace import PlainBaCE
from steps import at_task, make, recorded_passes, weights
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bace.core.trainer import Trainer
from bace.data.batch import Batch
from bace.methods.parts.neighbours import nearest

CASES = ("image", "token")
PLAIN = f"{PlainBaCE.__module__}.PlainBaCE"

Steps = list[dict[str, Tensor]]


def learned(
    tiny: Any, modality: str, name: str, settings: dict[str, Any] | None = None, **method: Any
) -> tuple[Steps, dict[str, Tensor], dict[str, Tensor]]:
    """Return the terms of the loss at every step of task 2, the weights after it, and the teacher's weights."""
    options = {"name": name, "W0": 0.6, "K": 3, **({} if name == PLAIN else {"neighbour_scores": "exact"}), **method}
    changes = {"benchmark.train_per_class": 5, "benchmark.test_per_class": 1, "train.batch_size": 6, "memory.size": 4}
    changes |= settings or {}
    chosen, stream, config = make(tiny, modality, options, **changes)
    steps: Steps = []
    loss = chosen.loss

    def noted(batch: Batch) -> Any:
        terms: Any = loss(batch)
        if chosen.now.task == 1:
            steps.append({name: term.detach().clone() for name, term in terms.items()})
        return terms

    chosen.loss = noted  # type: ignore[method-assign]
    Trainer(chosen, stream, config).run()
    return steps, weights(chosen.model), weights(chosen.teacher)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "terms",
    [{"neighbor_grad": False}, {"neighbor_grad": True}, {"W0": 1.0, "alpha": 0.0}, {"teacher_init": "ema"}],
    ids=str,
)
@pytest.mark.parametrize("modality", CASES)
def test_the_speedups_change_neither_losses_nor_updates(tiny: Any, modality: str, terms: dict[str, Any]) -> None:
    steps, after, teacher = learned(tiny, modality, "bace", **terms)
    plain_steps, plain_after, plain_teacher = learned(tiny, modality, PLAIN, **terms)
    assert len(steps) == len(plain_steps) >= 6
    assert plain_steps[-1]["match"] > 1e-4  # the model has moved away from the teacher
    close = {"rtol": 1e-8, "atol": 1e-10}
    for one, other in zip(steps, plain_steps, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            torch.testing.assert_close(one[name], other[name], **close)
    for name, value in after.items():
        torch.testing.assert_close(value, plain_after[name], **close)
    for name, value in teacher.items():
        if terms.get("teacher_init") == "ema":
            torch.testing.assert_close(value, plain_teacher[name], **close)
    if "teacher_init" not in terms:  # S19: the last average of a task, which nothing reads, is skipped
        assert not torch.equal(teacher["head.blocks.0"], plain_teacher["head.blocks.0"])


@pytest.mark.parametrize("view", [{"benchmark.augment": False}, {"train.buffer_view": "epoch"}], ids=str)
def test_logits_that_the_teacher_gives_the_memory_once_an_epoch_are_those_of_every_step(
    tiny: Any, view: dict[str, Any]
) -> None:
    steps, after, _ = learned(tiny, "image", "bace", view)
    plain_steps, plain_after, _ = learned(tiny, "image", PLAIN, view)
    for one, other in zip(steps, plain_steps, strict=True):
        torch.testing.assert_close(one["match"], other["match"], rtol=1e-8, atol=1e-10)
    for name, value in after.items():
        torch.testing.assert_close(value, plain_after[name], rtol=1e-8, atol=1e-10)


# -- each speed-up has its intended effect


def counted(tiny: Any, modality: str, ready: Any = None, **method: Any) -> dict[str, list[int]]:
    """Count the rows of each pass in one step of task 2: the student's passes with gradient, its other passes, and the
    teacher's."""
    ready = ready or at_task(tiny, modality, {"name": "bace", "neighbour_scores": "exact", "K": 5, **method})
    ids = ready.stream[1].train
    batch = ready.stream.batch(ids[:4], view=ready.now.view())
    with recorded_passes() as passes:
        ready.loss(batch)
    rows: dict[str, list[int]] = {"trained": [], "looked at": [], "teacher": []}
    for one in passes:
        who = "teacher" if one.model is ready.teacher else "trained" if one.training else "looked at"
        rows[who].append(len(one.batch))
    return rows


def test_s1_spares_the_teachers_pass_over_the_new_batch(tiny: Any) -> None:
    assert counted(tiny, "image")["teacher"] == [4]  # the replayed half


@pytest.mark.parametrize("modality", CASES)
def test_s2_passes_each_neighbour_once_and_s3_none_that_is_an_anchor(tiny: Any, modality: str) -> None:
    ready = at_task(tiny, modality, {"name": "bace", "neighbour_scores": "exact", "K": 5})
    batch = ready.stream.batch(ready.stream[1].train[:4], view=ready.now.view())
    own = batch.rows if modality == "image" else batch.rows[batch.targets != 0]
    members = [ready.table.neighbours[ready.table.anchors == row][0].tolist() for row in own.tolist()]
    unique = {j for row in members for j in row}
    assert len(unique) < 5 * len(own)
    fresh = unique - set(batch.rows.tolist())  # S3: rows that the step has scored as anchors are not passed again
    assert len(fresh) < len(unique)
    assert counted(tiny, modality)["looked at"] == [len(fresh)]  # S6: in one large batch


def test_s3_is_left_out_where_dropout_makes_the_two_scores_differ(tiny: Any) -> None:
    ready = at_task(tiny, "text", {"name": "bace", "neighbour_scores": "exact", "K": 5}, backbone=tiny.bert)
    assert ready.model.has_dropout
    rows = ready.stream[1].train[:4]
    scored = torch.full((4, 4), torch.nan)
    assert ready.beside(rows, rows, scored).isfinite().all()
    ready.model.has_dropout = False
    assert ready.beside(rows, rows, scored).isnan().all()


@pytest.mark.parametrize("neighbor_grad", [False, True])
def test_s5_passes_the_student_once_a_step(tiny: Any, neighbor_grad: bool) -> None:
    (rows,) = counted(tiny, "image", neighbor_grad=neighbor_grad)["trained"]
    assert rows > 8 if neighbor_grad else rows == 8


class Shapes(TorchDispatchMode):
    """Record the shapes of all tensors that are created."""

    def __init__(self) -> None:
        super().__init__()
        self.made: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                self.made.add(tuple(tensor.shape))
        return result


def test_s4_never_makes_scores_of_all_classes_for_all_neighbours(tiny: Any) -> None:
    ready = at_task(tiny, "image", {"name": "bace", "neighbour_scores": "exact", "K": 5})
    batch = ready.stream.batch(ready.stream[1].train[:3], view=ready.now.view())
    with Shapes() as shapes:
        ready.loss(batch)
    assert (3, 5) in shapes.made  # rows, K
    assert (3, 5, 4) not in shapes.made  # rows, K, classes


def test_s8_bounds_the_memory_of_the_search_and_finds_the_same() -> None:
    features = torch.randn(2500, 3, generator=torch.Generator().manual_seed(0))
    results, largest = [], []
    for options in ({}, {"block": 2500}):
        with Shapes() as shapes:
            results.append(nearest(features, 5, **options))
        largest.append(max(int(torch.tensor(shape).prod()) for shape in shapes.made if shape))
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1])
    assert largest[0] <= 1024**2 < largest[1]


def test_s19_passes_no_teacher_over_new_data_that_nobody_asks_for(tiny: Any) -> None:
    """With alpha = 0 and W0 = 1, the teacher is only needed to match replayed logits, with one pass per step."""
    for terms, epoch_passes in (({"alpha": 0.0, "W0": 1.0}, 0), ({"alpha": 1.0, "W0": 1.0}, 1)):
        ready = at_task(tiny, "image", {"name": "bace", "neighbour_scores": "exact", **terms})
        with recorded_passes() as passes:
            ready.before_epoch(ready.stages(ready.stream[1])[0])
        assert len(passes) == epoch_passes


@pytest.mark.parametrize(("settings", "each_step"), [({}, [4]), ({"benchmark.augment": False}, [])], ids=str)
def test_s20_passes_the_memory_through_the_teacher_once_an_epoch_if_its_views_repeat(
    tiny: Any, settings: dict[str, Any], each_step: list[int]
) -> None:
    ready = at_task(tiny, "image", {"name": "bace", "neighbour_scores": "exact"}, **{"memory.size": 4, **settings})
    with recorded_passes() as passes:
        ready.before_epoch(ready.stages(ready.stream[1])[0])
    task, *memory = [len(one.batch) for one in passes if one.model is ready.teacher][::-1]
    assert (task, memory) == (len(ready.stream[1].train), [] if each_step else [len(ready.memory.examples.unique())])
    assert counted(tiny, "image", ready)["teacher"] == each_step


@pytest.mark.parametrize(("rule", "once"), [("distil", True), ("label", False)])
def test_s20_without_matching_passes_the_memory_only_if_replayed_o_words_are_distilled(
    tiny: Any, rule: str, once: bool
) -> None:
    settings = {"memory.size": 4, "train.replay_o": rule}
    ready = at_task(tiny, "token", {"name": "bace", "neighbour_scores": "exact", "lambda_mse": 0.0}, **settings)
    assert bool(len(ready.remembered_rows)) == once
    assert counted(tiny, "token", ready)["teacher"] == []


@pytest.mark.parametrize("method", [{}, {"teacher_head": "all"}, {"lambda_mse": 0.0}], ids=str)
def test_s20_gives_every_row_of_a_replayed_sentence_the_live_teachers_logits(tiny: Any, method: dict[str, Any]) -> None:
    ready = at_task(tiny, "token", {"name": "bace", "neighbour_scores": "exact", **method}, **{"memory.size": 4})
    replay = ready.replay()
    once = ready.teacher_logits(replay)
    assert len(ready.remembered_rows)
    ready.remembered_rows = ready.remembered_rows[:0]
    live = ready.teacher_logits(replay)
    assert live.shape[1] == (ready.now.seen if "teacher_head" in method else ready.now.known)
    torch.testing.assert_close(once, live, rtol=1e-8, atol=1e-10)
