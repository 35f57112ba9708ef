"""The conformance suite over every registered method and each modality it supports."""

from pathlib import Path
from typing import Any

import pytest
from checks import CHECKS, counted_run

from bace.methods import METHODS

CASES = [
    pytest.param(method.title, modality, marks=pytest.mark.xdist_group(f"{method.title} {modality}"))  # in one process
    for method in METHODS
    for modality in sorted(method.modalities)
]


@pytest.fixture(scope="module")
def straight(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One straight run of each case, shared by all checks."""
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
