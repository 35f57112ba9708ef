"""The number of steps of published tunings is compared with hand-computed numbers. Tests show why this number and the
initial values of the head matter."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from steps import at_stage, learned_before

from bace.core.stage import SMALLEST_BATCH, enough_steps

TUNED = ["coda-prompt", "dualprompt", "sd-lora", "o-lora"]


@pytest.mark.parametrize(
    ("examples", "epochs", "batch", "expected"),
    [
        (5000, 20, 128, (20, 128)),  # CIFAR-100 in ten tasks: 800 steps, as published
        (289, 20, 128, (20, 14)),  # two digits: 20 epochs of 21 steps instead of 3
        (289, 5, 24, (11, 8)),  # 37 steps per epoch
        (20, 1, 64, (134, 8)),
    ],
)
def test_few_examples_are_learned_in_smaller_batches_and_then_in_more_epochs(
    examples: int, epochs: int, batch: int, expected: tuple[int, int]
) -> None:
    assert enough_steps(examples, epochs, batch, 400) == expected
    assert enough_steps(examples, epochs, batch, 0) == (epochs, batch)


@given(st.integers(0, 10**5), st.integers(1, 50), st.integers(1, 256), st.integers(0, 2000))
def test_there_are_enough_steps_and_never_fewer_epochs_or_larger_batches(
    examples: int, epochs: int, batch: int, least: int
) -> None:
    found, size = enough_steps(examples, epochs, batch, least)
    assert found >= epochs
    assert min(SMALLEST_BATCH, batch) <= size <= batch
    assert found * max(-(-examples // size), 1) >= least


@pytest.mark.parametrize("method", TUNED)
def test_by_default_a_small_task_has_hundreds_of_steps(tiny: Any, method: str) -> None:
    _, _, stage = at_stage(tiny, "image", {"name": method}, "tune", task=0)
    assert stage.epochs * -(-len(stage.examples()) // stage.batch_size) >= 400


@pytest.mark.parametrize("method", TUNED)
def test_of_two_classes_learned_among_themselves_the_sum_of_rows_stays_zero(tiny: Any, method: str) -> None:
    """Their gradients are opposites, so a random start would stay in the scores for good."""
    options = {"name": method, "tune_epochs": 2, "tune_batch": 6, "tune_steps": 0, "tune_lr": 0.01}
    head = learned_before(tiny, "image", options, 2, **{"benchmark.tasks": [2, 2]}).method.model.head
    for rows in head.blocks:
        assert rows.any()
        torch.testing.assert_close(rows.sum(0), torch.zeros_like(rows[0]), atol=1e-10, rtol=0)
