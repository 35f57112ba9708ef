"""The cards in docs/methods.md agree with the methods."""

from typing import Any

import pytest
from checks import short
from steps import at_task

from bace.methods import ER, METHODS


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.title)
def test_a_card_names_the_stages_of_a_later_task(tiny: Any, method: Any) -> None:
    """The "..." on a card stands for one stage for each old task."""
    learned = at_task(tiny, sorted(method.modalities)[0], short(method.title))
    stages = [stage.name for stage in learned.stages(learned.stream[1])]
    said = list(method.card.stages)
    if said[-1] == "...":
        said, stages = said[:-1], stages[: len(said) - 1]
    assert stages == said


def test_a_card_says_how_the_authors_replay_where_there_is_a_choice() -> None:
    """ExtendNER and CFNER replay nothing in their papers."""
    settings = {m.title: m.hyper_parameters() for m in METHODS if issubclass(m, ER)}
    chosen = {title: found["mode"].default for title, found in settings.items() if "mode" in found}
    said = {m.title: m.card.replay for m in METHODS if m.card and m.card.replay}
    assert said.keys() == chosen.keys() - {"ExtendNER", "CFNER"}
    assert {title for title, mode in said.items() if mode == chosen[title]} == {"ER", "IL2M"}
