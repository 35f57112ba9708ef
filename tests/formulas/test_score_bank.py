"""BaCE's bank of neighbours' scores (docs/bace.md, S10) starts exact, then holds the scores of each sample from the
last step that showed it, and is saved with the run. The gradient through one drawn neighbour equals that through all
neighbours on average."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import check_resume_equals_the_straight_run, counted_run
from steps import at_task, recorded_passes, some, take_step
from torch import Tensor

from bace.methods.parts.losses import mixture_nll
from bace.methods.parts.neighbours import Drawn, NeighbourTable

BANK = {"name": "bace", "W0": 0.6, "K": 3, "neighbour_scores": "bank"}
CASES = ("image", "token")


def scores_now(method: Any) -> Tensor:  # (task rows, new classes)
    """Return the scores of every row of the task that the student would give now."""
    examples = method.stream[method.now.task].train.sort().values
    logits = method.outputs(examples, view=method.now.view()).logits
    return F.log_softmax(logits, 1)[:, method.now.known :]


@pytest.mark.parametrize("teacher_init", ["student", "ema"])
@pytest.mark.parametrize("modality", CASES)
def test_before_the_first_step_the_bank_holds_what_the_student_scores(
    tiny: Any, modality: str, teacher_init: str
) -> None:
    method = at_task(tiny, modality, {**BANK, "teacher_init": teacher_init})
    torch.testing.assert_close(method.bank, scores_now(method))


@pytest.mark.parametrize("neighbor_grad", [False, True])
@pytest.mark.parametrize("modality", CASES)
def test_the_first_step_has_the_loss_of_the_exact_scores(tiny: Any, modality: str, neighbor_grad: bool) -> None:
    losses = []
    for scores in ("bank", "exact"):
        method = at_task(tiny, modality, {**BANK, "neighbour_scores": scores, "neighbor_grad": neighbor_grad})
        losses.append(method.loss(some(method)))
    assert losses[0]["new"] > 0.1
    for name, value in losses[0].items():
        torch.testing.assert_close(value, losses[1][name])


@pytest.mark.parametrize("neighbor_grad", [False, True])
@pytest.mark.parametrize("modality", CASES)
def test_a_step_refreshes_the_rows_that_it_passes_and_no_others(tiny: Any, modality: str, neighbor_grad: bool) -> None:
    method = at_task(tiny, modality, {**BANK, "neighbor_grad": neighbor_grad})
    take_step(method, some(method))
    before, expected, batch = method.bank.clone(), scores_now(method), some(method)
    method.loss(batch)
    drawn = method.neighbourhood(batch).drawn
    mine = torch.isin(method.rows, torch.cat([batch.rows, drawn.rows]) if neighbor_grad else batch.rows)
    assert (before[mine] - expected[mine]).abs().max() > 1e-3  # the student has changed since then
    torch.testing.assert_close(method.bank[mine], expected[mine])
    assert torch.equal(method.bank[~mine], before[~mine])


def test_neighbours_are_not_passed_and_with_gradient_one_for_each_anchor(tiny: Any) -> None:
    for neighbor_grad in (False, True):
        method = at_task(tiny, "image", {**BANK, "neighbor_grad": neighbor_grad})
        batch = some(method)
        drawn = method.neighbourhood(batch).drawn
        with recorded_passes() as passes:
            method.loss(batch)
        (student,) = [one for one in passes if one.model is method.model]
        assert len(student.batch) == len(batch) + method.replay_size + (len(drawn.rows) if neighbor_grad else 0)
        if neighbor_grad:
            assert 1 <= len(drawn.rows) <= len(batch)


def test_the_mean_gradient_over_draws_is_that_of_all_neighbours() -> None:
    rng = torch.Generator().manual_seed(0)
    scores = torch.randn(4, 3, generator=rng).log_softmax(1)  # (anchors, K)
    log_anchor, log_weights = torch.rand(4, generator=rng).log(), torch.randn(4, 3, generator=rng).log_softmax(1)

    def gradient(log_scores: Tensor, by: Tensor) -> Tensor:
        loss = mixture_nll(log_anchor, log_scores, torch.full((4,), 0.6).log(), log_weights + 0.4)
        return torch.autograd.grad(loss, by)[0]

    passed = scores.clone().requires_grad_()
    expected = gradient(passed, passed)
    chances, mean = log_weights.softmax(1), torch.zeros(4, 3)
    for column in range(3):
        columns = torch.full((4,), column)
        drawn = Drawn(torch.arange(4), torch.arange(4), columns, chances[:, column])
        fresh = scores.clone().requires_grad_()
        carried = drawn.carry(scores, fresh[:, column])
        torch.testing.assert_close(carried.detach(), scores)  # the loss is the same number
        mean += chances[:, column, None] * gradient(carried, fresh)
    torch.testing.assert_close(mean, expected)


def test_neighbours_are_drawn_by_their_weights_and_a_lone_row_draws_itself() -> None:
    log_weights = torch.tensor([[0.9, 0.1], [0.0, 0.0]]).log()
    table = NeighbourTable(
        torch.tensor([3, 8]), torch.tensor([[8, 5], [-1, -1]]), torch.zeros(2), log_weights, torch.zeros(2, 2)
    )
    first, cpu = 0, torch.device("cpu")
    for seed in range(400):
        drawn = table.of(torch.tensor([3, 8]), cpu, torch.Generator().manual_seed(seed)).drawn
        assert drawn is not None
        one, other = drawn.rows[drawn.position].tolist()
        assert one == (8, 5)[int(drawn.column[0])]
        assert other == 8
        torch.testing.assert_close(drawn.probability, torch.tensor([(0.9, 0.1)[int(drawn.column[0])], 0.5]))
        first += one == 8
    assert 330 <= first <= 390  # 360 expected, standard deviation 6


@pytest.mark.parametrize("neighbor_grad", [False, True])
def test_a_run_with_a_bank_resumes_exactly(tiny: Any, tmp_path: Path, neighbor_grad: bool) -> None:
    torch.set_default_dtype(torch.float32)
    method = {**BANK, "neighbor_grad": neighbor_grad}
    counted_run(tiny, method, "image", tmp_path)
    check_resume_equals_the_straight_run(tiny, method, "image", tmp_path)
    torch.set_default_dtype(torch.float64)
