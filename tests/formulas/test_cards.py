"""The cards of docs/methods.md against the methods."""

from typing import Any

import pytest
from checks import short
from steps import at_task

from bace.methods import METHODS


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.title)
def test_a_card_names_the_stages_of_a_later_task(tiny: Any, method: Any) -> None:
    """A card's "..." stands for stages of which there are as many as there are old tasks."""
    learned = at_task(tiny, sorted(method.modalities)[0], short(method.title))
    stages = [stage.name for stage in learned.stages(learned.stream[1])]
    said = list(method.card.stages)
    if said[-1] == "...":
        said, stages = said[:-1], stages[: len(said) - 1]
    assert stages == said
