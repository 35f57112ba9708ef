"""Loss terms stay on the device until they are read."""

import pytest
import torch

from bace.core.loss_log import READ_EVERY, LossLog
from bace.errors import TrainingError


def test_sums_are_those_of_the_single_steps_whatever_terms_each_had() -> None:
    log, sums = LossLog(), {"new": 1.0, "steps": 3.0}
    log.note("step 1", {"new": torch.tensor(0.5), "old": torch.tensor(0.25)})
    log.note("step 2", {"new": torch.tensor(0.125)})
    log.read_into(sums)
    assert sums == {"new": 1.625, "old": 0.25, "steps": 5.0}
    log.read_into(sums)  # nothing is counted twice
    assert sums["steps"] == 5.0


def test_the_first_step_that_was_not_finite_is_named_with_its_term() -> None:
    log = LossLog()
    log.note("step 1", {"new": torch.tensor(0.5), "old": torch.tensor(0.25)})
    log.note("step 2", {"new": torch.tensor(0.5), "old": torch.tensor(torch.inf)})
    log.note("step 3", {"new": torch.tensor(torch.nan), "old": torch.tensor(torch.nan)})
    with pytest.raises(TrainingError, match="term 'old' is inf in step 2"):
        log.read_into({})


def test_reading_is_due_after_many_steps_and_not_before() -> None:
    log = LossLog()
    for step in range(READ_EVERY):
        assert not log.due
        log.note(f"step {step}", {"loss": torch.tensor(1.0)})
    assert log.due
    log.read_into({})
    assert not log.due
