"""Every method on the embedded digits stays where it was: a change that breaks one is noticed (tests/golden/)."""

import json

import pytest
from conftest import ROOT
from golden.record import measured

from bace.methods import METHODS

GOLDEN = json.loads((ROOT / "tests" / "golden" / "digits.json").read_text())


@pytest.mark.parametrize("method", [method.title for method in METHODS if "image" in method.modalities])
def test_a_method_scores_on_digits_as_recorded(method: str) -> None:
    band = GOLDEN["methods"][method]
    for name, value in measured(method, GOLDEN["settings"]).items():
        assert value == pytest.approx(band[name], abs=band["tolerance"]), name
