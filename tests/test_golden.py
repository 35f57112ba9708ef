"""The scores of every method on the embedded digits do not change, so that a broken method is noticed
(tests/golden/)."""

import json

import pytest
import torch
from golden.record import FILE, TITLES, measured, tells_apart

GOLDEN = json.loads(FILE.read_text())
BANDS = GOLDEN["methods"]
FAR = [title for title in TITLES if BANDS[title]["A_last"][0] > BANDS["SEQ"]["A_last"][0] + 20]


@pytest.mark.parametrize("method", TITLES)
def test_a_method_scores_on_digits_as_recorded(method: str) -> None:
    found = measured(method, {**GOLDEN["settings"], "train.threads": torch.get_num_threads()})
    outside = {
        name: f"{found[name]}, not {middle} ± {half}"
        for name, (middle, half) in BANDS[method].items()
        if abs(found[name] - middle) > half
    }
    assert not outside


@pytest.mark.parametrize("method", ["ACIL", "APER", "FeCAM", "MOS", "RanPAC", "SLDA"])
def test_the_band_of_a_method_on_features_has_no_room_for_class_means_alone(method: str) -> None:
    assert tells_apart(BANDS["SimpleCIL"], BANDS[method])


@pytest.mark.parametrize("method", FAR)
def test_the_band_of_a_method_that_remembers_has_no_room_for_one_that_does_not(method: str) -> None:
    assert tells_apart(BANDS["SEQ"], BANDS[method])
