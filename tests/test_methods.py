"""The conformance suite for every registered method and each modality it supports."""

from pathlib import Path
from typing import Any

import pytest
from checks import CHECKS, check_resume_equals_the_straight_run, counted_run

from bace.methods import METHODS


def marks(method: str, modality: str, first: bool) -> list[pytest.MarkDecorator]:
    in_one_process = pytest.mark.xdist_group(f"{method} {modality}")
    return [in_one_process, pytest.mark.first_modality] if first else [in_one_process]


CASES = [
    pytest.param(method.title, modality, marks=marks(method.title, modality, modality == min(method.modalities)))
    for method in METHODS
    for modality in sorted(method.modalities)
]


@pytest.fixture(scope="module")
def straight(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One uninterrupted run of each case, shared by all checks."""
    made: dict[tuple[str, str], Path] = {}

    def folder(method: str, modality: str) -> Path:
        if (method, modality) not in made:
            made[method, modality] = tmp_path_factory.mktemp(f"{method}-{modality}")
            counted_run(tiny, method, modality, made[method, modality])
        return made[method, modality]

    return folder


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize(("method", "modality"), CASES)
def test_conformance(tiny: Any, straight: Any, method: str, modality: str, check: Any) -> None:
    check(tiny, method, modality, straight(method, modality))


class CarryingOver:
    """The tiny data and backbones, in runs whose optimiser keeps its state from stage to stage and task to task."""

    def __init__(self, tiny: Any, optimiser: str) -> None:
        self.tiny, self.optimiser = tiny, optimiser

    def settings(self, modality: str, **changes: Any) -> dict[str, Any]:
        own = {"train.reset_optimiser": False, "train.optimiser": self.optimiser}
        settings: dict[str, Any] = self.tiny.settings(modality, **{**own, **changes})
        return settings


@pytest.mark.parametrize("optimiser", ["sgd", "adamw"])
@pytest.mark.parametrize("method", ["ER", "MTL", "GDumb", "PODNet", "BEEF", "GD"])
def test_a_resumed_run_carries_over_what_the_straight_one_does(
    tiny: Any, tmp_path: Path, method: str, optimiser: str
) -> None:
    """MTL and GDumb start from new parameters with the same names, BEEF's parameters change their shape, and the last
    stages of PODNet and BEEF have their own optimiser."""
    carrying = CarryingOver(tiny, optimiser)
    counted_run(carrying, method, "image", tmp_path)
    check_resume_equals_the_straight_run(carrying, method, "image", tmp_path)
